"""Requirements of a plan, checked: each broken one is a whole line, and nothing else is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.bounds import best_bound
from routepack.cost import AttentionStage, CostModel
from routepack.objective import score
from routepack.placement import identity
from routepack.plan import Certificate, Plan, Search, TopologyKey, WindowKey
from routepack.requirement_checks import broken_requirements
from routepack.requirements import Requirements
from routepack.rows import minimal_rows
from routepack.topology import Topology
from routepack.verify import verify
from routepack.window import Window
from strategies import Instance, instances

# Six samples of 2 tokens, two layers of four experts, top-1. At layer 0 each token takes expert 0,
# 1, 2 or 3 as below; at layer 1 all take expert 3.
EXPERT_S = [0, 0, 1, 2, 3, 3]
GROUP_S = [5, 5, 6, 6, 7, 7]
TAG_S = [0, 0, 0, 0, 1, 1]
TOPOLOGY = Topology.of(dp=2, ep=2)
ROWS = (((0, 1), (2, 3)), ((4,), (5,)))  # three samples a rank, prompts in one cell but for 7
PLACEMENT_LE = identity(2, 4)


def window(**changes: Any) -> Window:
    """The window above, with changes."""
    demand_SLE = np.zeros((6, 2, 4), np.uint16)
    demand_SLE[np.arange(6), 0, EXPERT_S] = 2
    demand_SLE[:, 1, 3] = 2
    labels: dict[str, Any] = dict(group_S=np.array(GROUP_S), tag_S=np.array(TAG_S))
    return Window(np.full(6, 2), demand_SLE, 1, **(labels | changes))


def broken(rows: Any = ROWS, *, placement_LE: Any = PLACEMENT_LE, **asked: Any) -> list[str]:
    """Broken lines of a layout of the window above."""
    return broken_requirements(Requirements(**asked), window(), TOPOLOGY, placement_LE, rows)


def test_nothing_required_is_met_by_any_layout() -> None:
    """Not even without prompts and tags in the window."""
    bare = window(group_S=None, tag_S=None)
    rows = (((0, 1, 2, 4), (5,)), ((3,), ()))
    assert broken_requirements(Requirements(), bare, TOPOLOGY, PLACEMENT_LE, rows) == []


def test_ranks_of_unequal_samples_are_named() -> None:
    """Each rank that has more or fewer than its share, with what it has."""
    assert broken(equal_samples_per_rank=True) == []
    rows = (((0, 1), (2, 3)), ((4, 5), ()))
    assert broken(rows, equal_samples_per_rank=True) == [
        "rows[:, 0] = 4 samples: expected 3 on every DP rank, equal_samples_per_rank",
        "rows[:, 1] = 2 samples: expected 3 on every DP rank, equal_samples_per_rank",
    ]


def test_rows_that_are_no_multiple_are_named() -> None:
    """Two rows are a multiple of 2, not of 3."""
    assert broken(rows_multiple_of=2) == []
    assert broken(rows_multiple_of=3) == [
        "rows = 2 rows: expected a multiple of 3, rows_multiple_of"
    ]


def test_cells_of_too_many_samples_are_named() -> None:
    """Each by its row and DP rank."""
    assert broken(max_samples_per_cell=2) == []
    assert broken(max_samples_per_cell=1) == [
        "rows[0, 0] = 2 samples: expected at most 1, max_samples_per_cell",
        "rows[0, 1] = 2 samples: expected at most 1, max_samples_per_cell",
    ]


def test_a_prompt_on_two_ranks_is_named() -> None:
    """Once, by the first two of its ranks; two rows of one rank are no matter."""
    rows = (((0, 4), (2,)), ((1, 5), (3,)))
    assert broken(rows, together="rank") == []
    rows = (((0, 2), (1, 4)), ((5,), (3,)))
    assert broken(rows, together="rank") == [
        "group 5 = DP ranks 0 and 1: expected one DP rank, together = 'rank'",
        "group 7 = DP ranks 1 and 0: expected one DP rank, together = 'rank'",
        "group 6 = DP ranks 0 and 1: expected one DP rank, together = 'rank'",
    ]


def test_a_prompt_in_three_places_is_one_line() -> None:
    """Only the first two of them are named."""
    rows = (((0,), (2,)), ((1,), (3, 4)), ((5,), ()))
    one = window(group_S=np.zeros(6, np.int32))
    asked = Requirements(together="cell")
    assert broken_requirements(asked, one, TOPOLOGY, PLACEMENT_LE, rows) == [
        "requirements: groups = 1: expected at least the 2 DP ranks, for together = 'cell'",
        "group 0 = rows[0, 0] and rows[0, 1]: expected one cell, together = 'cell'",
    ]


def test_a_prompt_in_two_cells_is_named() -> None:
    """Also where both are on one rank."""
    assert broken((((0, 1), (2, 3)), ((4, 5), ())), together="cell") == []
    rows = (((0, 4), (2, 3)), ((1, 5), ()))
    assert broken(rows, together="cell") == [
        "group 5 = rows[0, 0] and rows[1, 0]: expected one cell, together = 'cell'",
        "group 7 = rows[0, 0] and rows[1, 0]: expected one cell, together = 'cell'",
    ]


def test_a_row_of_several_tags_is_named() -> None:
    """A row, not a cell, has one tag: the whole row runs in lockstep."""
    assert broken(uniform_rows=True) == []
    rows = (((0, 1), (4,)), ((2, 3), (5,)))
    assert broken(rows, uniform_rows=True) == [
        "rows[0] = tags [0, 1]: expected one tag, uniform_rows",
        "rows[1] = tags [0, 1]: expected one tag, uniform_rows",
    ]


def test_a_rank_above_the_memory_limit_is_named() -> None:
    """Row 0 sends its 8 tokens of layer 1 to expert 3, on rank 1; row 1 sends 4 at both layers."""
    assert broken(memory_limit_tokens=8) == []
    line = "expected at most 3 routed tokens, memory_limit_tokens"
    assert broken(memory_limit_tokens=3) == [
        f"load[row 0, shard 0, layer 1, rank 1] = 8: {line}",
        f"load[row 1, shard 0, layer 0, rank 1] = 4: {line}",
    ]
    swapped_LE = np.array([[2, 3, 0, 1], [2, 3, 0, 1]], np.int32)
    assert broken(memory_limit_tokens=7, placement_LE=swapped_LE) == [
        "load[row 0, shard 0, layer 1, rank 0] = 8: expected at most 7 routed tokens, "
        "memory_limit_tokens"
    ]


def test_shards_are_limited_on_their_own() -> None:
    """Two shards of one DP rank: each loads its own EP group."""
    two = Topology.of(dp=2, ep=2, edp=2)
    asked = Requirements(memory_limit_tokens=3)
    line = "expected at most 3 routed tokens, memory_limit_tokens"
    rows = (((0, 1), (2, 3)), ((4,), (5,)))
    assert broken_requirements(asked, window(), two, PLACEMENT_LE, rows) == [
        f"load[row 0, shard 0, layer 0, rank 0] = 4: {line}",
        f"load[row 0, shard 1, layer 1, rank 1] = 4: {line}",
    ]


def test_a_routing_group_on_two_nodes_is_named() -> None:
    """Experts 0 and 1 are a group, 2 and 3 the other; each rank is a node."""
    nodes: dict[str, Any] = dict(routing_groups=2, ranks_per_node=1)
    assert broken(**nodes) == []
    mixed_LE = np.array([[0, 1, 2, 3], [0, 2, 1, 3]], np.int32)
    assert broken(**nodes, placement_LE=mixed_LE) == [
        "placement[1] = experts of routing group 0 on nodes [0, 1]: expected one node, "
        "routing_groups",
        "placement[1] = experts of routing group 1 on nodes [0, 1]: expected one node, "
        "routing_groups",
    ]
    assert broken(routing_groups=2, ranks_per_node=2, placement_LE=mixed_LE) == []
    mapped: dict[str, Any] = dict(routing_groups=2, node_of_rank=(8, 3))
    assert broken(**mapped) == []
    assert broken(**mapped, placement_LE=mixed_LE)[0] == (
        "placement[1] = experts of routing group 0 on nodes [3, 8]: expected one node, "
        "routing_groups"
    )
    assert broken(routing_groups=2, node_of_rank=(3, 3), placement_LE=mixed_LE) == []


IMPOSSIBLE: dict[str, tuple[Requirements, dict[str, Any], str]] = {
    "prompts that are not known": (
        Requirements(together="rank"),
        {"group_S": None},
        "requirements: group: expected in the window, together = 'rank' needs it",
    ),
    "tags that are not known": (
        Requirements(uniform_rows=True),
        {"tag_S": None},
        "requirements: tag: expected in the window, uniform_rows needs it",
    ),
    "nodes of another size": (
        Requirements(routing_groups=2, ranks_per_node=3),
        {},
        "requirements: ranks_per_node = 3: expected a divisor of the 2 EP ranks",
    ),
    "nodes of other ranks": (
        Requirements(routing_groups=2, node_of_rank=(0,)),
        {},
        "requirements: nodes in node_of_rank = 1: expected one for each of the 2 EP ranks",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_be_required_is_a_line(case: str) -> None:
    """A requirement that does not fit the window or topology is told, and never raises."""
    asked, changes, line = IMPOSSIBLE[case]
    assert broken_requirements(asked, window(**changes), TOPOLOGY, PLACEMENT_LE, ROWS) == [line]


def test_all_that_is_broken_is_listed() -> None:
    """In the order in which requirements are documented."""
    rows = (((0, 1, 4), (2, 3)), ((5,), ()))
    lines = broken(
        rows,
        equal_samples_per_rank=True,
        rows_multiple_of=4,
        max_samples_per_cell=2,
        together="cell",
        uniform_rows=True,
        memory_limit_tokens=9,
    )
    assert lines == [
        "rows[:, 0] = 4 samples: expected 3 on every DP rank, equal_samples_per_rank",
        "rows[:, 1] = 2 samples: expected 3 on every DP rank, equal_samples_per_rank",
        "rows = 2 rows: expected a multiple of 4, rows_multiple_of",
        "rows[0, 0] = 3 samples: expected at most 2, max_samples_per_cell",
        "group 7 = rows[0, 0] and rows[1, 0]: expected one cell, together = 'cell'",
        "rows[0] = tags [0, 1]: expected one tag, uniform_rows",
        "load[row 0, shard 0, layer 1, rank 1] = 10: expected at most 9 routed tokens, "
        "memory_limit_tokens",
    ]


def counted(instance: Instance, rows: Any) -> dict[str, Any]:
    """The largest counts and loads of a layout, by numpy and Counter instead of loops."""
    window, topology, ranks = instance.window, instance.topology, instance.topology.ep
    rank_LE = instance.placement_LE // (window.experts // ranks)
    loads = [
        np.bincount(rank_LE[layer], window.demand_SLE[samples, layer].sum(axis=0), ranks).max()
        for row in rows
        for dp_ranks in topology.groups
        for samples in [[i for d in dp_ranks for i in row[d]]]
        for layer in range(window.layers)
    ]
    cells = Counter(instance.cell_S.tolist())
    return {"max_samples_per_cell": max(cells.values()), "memory_limit_tokens": int(max(loads))}


@given(instances(), st.sampled_from(["max_samples_per_cell", "memory_limit_tokens"]))
def test_limits_hold_from_what_a_layout_reaches_on(instance: Instance, name: str) -> None:
    """A limit at the largest cell or load is met by any layout; one below it is not."""
    rows = instance.problem.to_rows(instance.cell_S)
    reached = counted(instance, rows)[name]
    arguments = (instance.window, instance.topology, instance.placement_LE, rows)
    if reached:
        assert broken_requirements(Requirements(**{name: reached}), *arguments) == []
    if reached > 1:
        lines = broken_requirements(Requirements(**{name: reached - 1}), *arguments)
        assert any(f" = {reached}" in line for line in lines)


def planned(requirements: Requirements) -> Plan:
    """A plan of the layout above with true claims."""
    w, model = window(), CostModel((AttentionStage("full", 1.0, 0.0),))
    cost = model.resolve(w, TOPOLOGY, 4)
    exact = score(w, TOPOLOGY, cost, PLACEMENT_LE, ROWS)
    rows = minimal_rows(w.lengths_S, 4, TOPOLOGY.dp, seed=0)
    bound, method = best_bound(w, TOPOLOGY, cost, 4, len(ROWS))
    gap = Certificate.gap_of(exact.slowest_shard, bound)
    return Plan(
        window=WindowKey.of(w),
        topology=msgspec.convert(TOPOLOGY.to_dict(), TopologyKey),
        token_cap=4,
        cost_model=model,
        method="reorder",
        placement=tuple(map(tuple, PLACEMENT_LE.tolist())),
        rows=ROWS,
        certificate=Certificate(rows.lower_bound, True, rows.method, bound, method, gap),
        score=exact,
        search=Search(seed=0, evaluations=0, chains=0),
        requirements=requirements,
    )


def test_verification_tells_broken_requirements() -> None:
    """A plan that is true in all else is told its broken requirement alone; without, it holds."""
    assert verify(window(), planned(Requirements())) == []
    assert verify(window(), planned(Requirements(max_samples_per_cell=2))) == []
    assert verify(window(), planned(Requirements(memory_limit_tokens=7))) == [
        "load[row 0, shard 0, layer 1, rank 1] = 8: expected at most 7 routed tokens, "
        "memory_limit_tokens"
    ]


def test_a_plan_that_is_no_layout_is_told_first() -> None:
    """With a sample absent nothing is said about requirements: their counts would mean nothing."""
    plan = planned(Requirements(equal_samples_per_rank=True))
    absent = msgspec.structs.replace(plan, rows=(((0, 1), (2, 3)), ((4,), ())))
    assert verify(window(), absent) == [
        "rows[1, 1] = []: expected at least one sample",
        "rows = no sample 5, 1 absent: expected each once",
    ]
