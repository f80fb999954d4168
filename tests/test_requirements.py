"""What trainers require: every option, every pair of options, what cannot be had, what is vacuous.

A property's plan is verified by `verify` and, by counting, in requirement_helpers.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requirement_helpers import (
    ASKED,
    BUDGET,
    PAIRS,
    Case,
    cases,
    planned,
    requirements_for,
)
from routepack import (
    AttentionStage,
    Budget,
    CostModel,
    InfeasibleError,
    InputError,
    Plan,
    Requirements,
    Topology,
    Window,
    plan,
)
from routepack.objective import rank_load_LR
from routepack.plan import METHODS
from strategies import random_window

# What is required, one and two at a time


@pytest.mark.parametrize("name", ASKED)
@given(cases(), st.sampled_from([0, 1, 2]), st.data())
@settings(max_examples=20)
def test_a_requirement_is_met_or_refused(
    name: str, case: Case, seed: int, data: st.DataObject
) -> None:
    """Either there is a plan that holds and meets the requirement, or one line says why not."""
    planned(case, requirements_for(case, data.draw(ASKED[name])), seed=seed)


@pytest.mark.parametrize(("first", "second"), PAIRS)
@given(cases(), st.sampled_from(METHODS), st.booleans(), st.data())
@settings(max_examples=8)
def test_two_requirements_are_met_together(
    first: str, second: str, case: Case, method: str, fixed: bool, data: st.DataObject
) -> None:
    """Neither is dropped for the other, by any method, with the placement free or given."""
    fields = data.draw(ASKED[first]), data.draw(ASKED[second])
    required = requirements_for(case, *fields)
    planned(case, required, method=method, fixed_placement=fixed)


@given(cases(), st.sampled_from(METHODS), st.sets(st.sampled_from(sorted(ASKED))), st.data())
def test_any_requirements_are_met_together(
    case: Case, method: str, names: set[str], data: st.DataObject
) -> None:
    """Any number of them, by any method."""
    fields = [data.draw(ASKED[name]) for name in sorted(names)]
    planned(case, requirements_for(case, *fields), method=method)


def even_window(**fields: Any) -> Window:
    """16 samples of 5 to 20 tokens in 8 prompts of two, tags 0 and 1 by halves."""
    rng = np.random.default_rng(4)
    lengths_S = rng.integers(5, 21, 16)
    fields = {"group_S": np.arange(16) // 2, "tag_S": np.arange(16) // 8} | fields
    return random_window(rng, lengths_S, 2, 8, 2, **fields)


EVEN = Case(even_window(), Topology.of(dp=2, ep=4, edp=1), 50)


@pytest.mark.parametrize(("first", "second"), PAIRS)
@pytest.mark.parametrize("method", METHODS)
def test_pairs_can_be_had(first: str, second: str, method: str) -> None:
    """On a window of equal prompts with room to spare every pair leads to a plan, by all methods:
    the properties above are not about refusals."""
    asked: dict[str, dict[str, Any]] = {
        "equal_samples_per_rank": {"equal_samples_per_rank": True},
        "rows_multiple_of": {"rows_multiple_of": 4},
        "max_samples_per_cell": {"max_samples_per_cell": 4},
        "together rank": {"together": "rank"},
        "together cell": {"together": "cell"},
        "uniform_rows": {"uniform_rows": True},
        "memory_limit_tokens": {"memory_limit_tokens": 110},
        "routing_groups": {"routing_groups": 4, "ranks_per_node": 2},
        "node_of_rank": {"routing_groups": 4, "node_of_rank": [7, 0, 7, 0]},
    }
    required = Requirements(**asked[first], **asked[second])
    found = planned(EVEN, required, method=method)
    assert isinstance(found, Plan), found


@given(cases(), st.sampled_from(METHODS), st.booleans(), st.sampled_from([1, 2]), st.data())
@settings(max_examples=20)
def test_consecutive_nodes_may_be_told_either_way(
    case: Case, method: str, fixed: bool, per_node: int, data: st.DataObject
) -> None:
    """A map of consecutive ranks gives, at equal evaluations, the plan that ranks_per_node gives,
    byte for byte but for what is said to be required; whatever the nodes are called."""
    groups, ranks = data.draw(st.sampled_from([2, 4, 8])), case.topology.ep
    per_node = min(per_node, ranks)
    names = data.draw(st.permutations(range(ranks // per_node)))
    options: dict[str, Any] = {"method": method, "fixed_placement": fixed}
    counted = planned(case, Requirements(routing_groups=groups, ranks_per_node=per_node), **options)
    node_of_rank = tuple(names[rank // per_node] for rank in range(ranks))
    mapped = planned(
        case, Requirements(routing_groups=groups, node_of_rank=node_of_rank), **options
    )
    if isinstance(counted, InfeasibleError):
        assert isinstance(mapped, InfeasibleError)
        assert method in ("baseline", "kk") or fixed or str(mapped) == str(counted)
        return
    assert isinstance(mapped, Plan)
    same = msgspec.structs.replace(mapped, requirements=counted.requirements)
    assert same.to_bytes() == counted.to_bytes()


def test_everything_at_once_can_be_had() -> None:
    """All requirements that make sense together, on one window."""
    required = Requirements(
        equal_samples_per_rank=True, rows_multiple_of=4, max_samples_per_cell=4, together="cell",
        uniform_rows=True, memory_limit_tokens=110, routing_groups=4, ranks_per_node=2,
    )  # fmt: skip
    assert isinstance(planned(EVEN, required), Plan)
    other = Requirements(
        equal_samples_per_rank=True, rows_multiple_of=4, max_samples_per_cell=4, together="rank",
        uniform_rows=True, memory_limit_tokens=110, routing_groups=4, ranks_per_node=2,
    )  # fmt: skip
    assert isinstance(planned(EVEN, other), Plan)


@pytest.mark.parametrize("fixed", [False, True])
def test_any_number_of_threads_leads_to_the_same_bytes(fixed: bool) -> None:
    """Also where units move whole, lanes differ and a memory limit is charged."""
    required = Requirements(together="rank", uniform_rows=True, memory_limit_tokens=110)

    def made(threads: int) -> bytes:
        return plan(
            EVEN.window, EVEN.topology, token_cap=EVEN.token_cap, requirements=required,
            budget=Budget(evaluations=4000), threads=threads, fixed_placement=fixed,
        ).to_bytes()  # fmt: skip

    assert made(1) == made(3)
    assert Plan.from_bytes(made(1)).requirements == required


def test_the_search_lowers_the_cost_of_a_required_layout() -> None:
    """A search does better than the layout that it starts from, whatever samples may not do."""
    for fields in (
        {"equal_samples_per_rank": True}, {"max_samples_per_cell": 3}, {"together": "rank"},
        {"together": "cell"}, {"uniform_rows": True},
    ):  # fmt: skip
        required = Requirements(**fields)
        start = planned(EVEN, required, method="reorder")
        found = planned(EVEN, required, Budget(evaluations=4000))
        assert isinstance(start, Plan)
        assert isinstance(found, Plan)
        assert found.score.slowest_shard < start.score.slowest_shard, fields


def test_a_memory_limit_is_searched_for() -> None:
    """A limit at which the cheapest plan does not stay is met by another: by every method that
    searches, also where its own goal does not see the experts."""
    free = planned(EVEN, Requirements(), Budget(evaluations=4000))
    assert isinstance(free, Plan)
    limit = peak(free) - 2
    for method in ("expert-only", "attention-only", "routepack"):
        found = planned(
            EVEN, Requirements(memory_limit_tokens=limit), Budget(evaluations=8000), method=method
        )
        assert isinstance(found, Plan), (method, str(found))
        assert peak(found) <= limit


def peak(made: Plan) -> int:
    """The most routed tokens of an EP rank at a layer in a row."""
    largest = 0
    for row in made.rows:
        for ranks in EVEN.topology.groups:
            samples = [i for d in ranks for i in row[d]]
            demand_LE = EVEN.window.demand_SLE[samples].sum(axis=0, dtype=np.int64)
            load_LR = rank_load_LR(demand_LE, made.placement_LE, EVEN.topology.ep)
            largest = max(largest, int(load_LR.max()))
    return largest


# What cannot be had


def uniform(samples: int, tokens: int = 4, **fields: Any) -> Window:
    """Samples of as many tokens, top-1 of two experts, each sample's half and half."""
    demand_SLE = np.full((samples, 1, 2), tokens // 2, np.uint16)
    return Window(np.full(samples, tokens), demand_SLE, 1, **fields)


TWO_RANKS = Topology.of(dp=2, ep=2)
GROUPS, TAGS = [0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1]
REFUSED: dict[str, tuple[Window, dict[str, Any], int, dict[str, Any], str]] = {
    "odd samples": (
        uniform(5), {"equal_samples_per_rank": True}, 8, {},
        "samples = 5: expected a multiple of the 2 DP ranks, for equal_samples_per_rank",
    ),
    "rows without samples": (  # 3 samples of half a cap fill one row of two cells, two have four
        uniform(3), {"rows_multiple_of": 2}, 8, {},
        "samples = 3: expected at least 4, none of 2 rows of cells empty: rows_multiple_of = 2",
    ),
    "more samples than a cell's": (  # 5 alone need three rows of two cells, which is one too many
        uniform(5), {"max_samples_per_cell": 1}, 8, {},
        "samples = 5: expected at least 6, none of 3 rows of cells empty: max_samples_per_cell = 1",
    ),
    "prompts without a window's": (
        uniform(4), {"together": "rank"}, 8, {},
        "group: expected in the window, together = 'rank' needs it",
    ),
    "a prompt above the cap": (
        uniform(6, group_S=[0, 0, 0, 1, 1, 7]), {"together": "cell"}, 8, {},
        "tokens of group[0] = 12: expected at most the token cap 8, for together = 'cell'",
    ),
    "a prompt of too many": (
        uniform(6, group_S=GROUPS), {"together": "cell", "max_samples_per_cell": 1}, 8, {},
        "samples of group[0] = 2: expected at most max_samples_per_cell = 1, for together = 'cell'",
    ),
    "prompts that cannot be counted": (
        uniform(6, group_S=[3, 3, 3, 4, 4, 5]),
        {"together": "cell", "equal_samples_per_rank": True}, 12, {},
        "samples of group[4] = 2: expected 3 as in the others, to count samples with "
        "together = 'cell'",
    ),
    "prompts that are no multiple": (  # of six samples
        uniform(6, group_S=GROUPS), {"together": "cell", "equal_samples_per_rank": True}, 8, {},
        "groups as samples, for together = 'cell': samples = 3: expected a multiple of the 2 DP "
        "ranks, for equal_samples_per_rank",
    ),
    "rows without prompts": (
        uniform(6, group_S=GROUPS), {"together": "cell", "rows_multiple_of": 2}, 16, {},
        "groups as samples, for together = 'cell': samples = 3: expected at least 4, none of 2 "
        "rows of cells empty: rows_multiple_of = 2",
    ),
    "a prompt of two tags": (
        uniform(6, group_S=GROUPS, tag_S=TAGS), {"together": "cell", "uniform_rows": True}, 8, {},
        "tags of group[1] = [0, 1]: expected one, for uniform_rows with together = 'cell'",
    ),
    "tags without a window's": (
        uniform(4), {"uniform_rows": True}, 8, {},
        "tag: expected in the window, uniform_rows needs it",
    ),
    "a tag without a row": (
        uniform(4, tag_S=[5, 5, 5, 9]), {"uniform_rows": True}, 8, {},
        "samples with tag[9] = 1: expected at least the 2 DP ranks, for uniform_rows",
    ),
    # Prompts of 3, 3 and 2 samples: no choice of them makes 4 of the 8. Two on a rank take three
    # rows; four rows of two cells are the most that 8 samples fill.
    "prompts that fit no rank": (
        uniform(8, group_S=[0, 0, 0, 1, 1, 1, 2, 2]),
        {"together": "rank", "equal_samples_per_rank": True}, 8, {},
        "token_cap = 8: expected room for a layout, none was found in 3 to 4 rows: "
        "equal_samples_per_rank = True, together = rank",
    ),
    "a limit below balance": (  # 8 samples of 2 tokens an expert in two rows: 8 a rank and row
        uniform(8), {"memory_limit_tokens": 7}, 8, {},
        "memory_limit_tokens = 7: expected at least 8, the smallest reached in this budget "
        "(proven: at least 8), or more rows by a smaller token cap",
    ),
    "nodes that do not divide": (
        uniform(4), {"routing_groups": 2, "ranks_per_node": 3}, 8, {},
        "ranks_per_node = 3: expected a divisor of the 2 EP ranks",
    ),
    "nodes of other ranks": (
        uniform(4), {"routing_groups": 2, "node_of_rank": [0, 0, 1, 1]}, 8, {},
        "nodes in node_of_rank = 4: expected one for each of the 2 EP ranks",
    ),
    "fewer groups than mapped nodes": (
        uniform(4), {"routing_groups": 1, "node_of_rank": [4, 2]}, 8, {},
        "routing_groups = 1: expected a multiple of the 2 nodes, so that each holds whole groups",
    ),
    "groups that do not divide": (
        uniform(4), {"routing_groups": 4, "ranks_per_node": 1}, 8, {},
        "routing_groups = 4: expected a divisor of the 2 experts",
    ),
    "fewer groups than nodes": (
        uniform(4), {"routing_groups": 1, "ranks_per_node": 1}, 8, {},
        "routing_groups = 1: expected a multiple of the 2 nodes, so that each holds whole groups",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("method", ["reorder", "routepack"])
def test_what_cannot_be_had_is_told(case: str, method: str) -> None:
    """One line: what was found, what was expected, and which requirement asks for it."""
    window, fields, cap, options, message = REFUSED[case]
    with pytest.raises(InputError) as error:
        plan(
            window, TWO_RANKS, token_cap=cap, requirements=Requirements(**fields), method=method,
            budget=BUDGET, threads=1, **options,
        )  # fmt: skip
    assert str(error.value) == message
    needs_input = message.startswith(
        ("group:", "tag:", "ranks_per_node", "nodes in", "routing_groups = 4")
    )
    assert isinstance(error.value, InfeasibleError) != needs_input


def test_rows_of_tags_cannot_be_more_than_their_samples_fill() -> None:
    """Tag 1 has one row of two cells (3 samples), tag 2 two (5 samples): there is no fourth row."""
    window = uniform(8, tokens=6, tag_S=[1, 1, 1, 2, 2, 2, 2, 2])
    with pytest.raises(InfeasibleError) as error:
        plan(
            window, TWO_RANKS, token_cap=12, budget=BUDGET, threads=1,
            requirements=Requirements(rows_multiple_of=4, uniform_rows=True),
        )  # fmt: skip
    assert str(error.value) == (
        "rows = 3: expected at least 4 with no cell empty, tags [1, 2] fill [1, 2]: "
        "rows_multiple_of = 4, uniform_rows = True"
    )


def test_a_fixed_placement_must_keep_routing_groups_whole() -> None:
    """Experts 0 and 2 exchanged: at layer 0 the first group of two lies on both nodes."""
    window = even_window()
    slots_LE = np.tile(np.arange(8), (2, 1))
    slots_LE[0, [0, 4]] = 4, 0
    with pytest.raises(InfeasibleError) as error:
        plan(
            window, EVEN.topology, token_cap=50, budget=BUDGET, threads=1, fixed_placement=True,
            current_placement=slots_LE,
            requirements=Requirements(routing_groups=4, ranks_per_node=2),
        )  # fmt: skip
    assert str(error.value) == (
        "nodes of routing group[0, 0] = [0, 1]: expected one, for routing_groups, and the "
        "placement is fixed"
    )


def test_a_fixed_placement_is_held_to_a_map_of_nodes() -> None:
    """Experts 0 and 1 on rank 0, 2 and 3 on rank 1: groups of two are whole on any node, groups of
    four only where ranks 0 and 1, and 2 and 3, share one; else the first is on nodes 7 and 9."""
    options: dict[str, Any] = {"method": "baseline"}
    for groups, node_of_rank in ((4, (9, 7, 9, 7)), (2, (9, 9, 7, 7))):
        whole = Requirements(routing_groups=groups, node_of_rank=node_of_rank)
        assert isinstance(planned(EVEN, whole, **options), Plan)
    split = Requirements(routing_groups=2, node_of_rank=(9, 7, 9, 7))
    assert str(planned(EVEN, split, **options)) == (
        "nodes of routing group[0, 0] = [7, 9]: expected one, for routing_groups, and the "
        "placement is fixed"
    )


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "word": (
        {"together": "node"}, "together = 'node': expected 'rank' or 'cell'",
    ),
    "zero": (
        {"rows_multiple_of": 0}, "rows_multiple_of = 0: expected a whole number in 1..2147483647",
    ),
    "none": (
        {"rows_multiple_of": None},
        "rows_multiple_of = None: expected a whole number in 1..2147483647",
    ),
    "fraction": (
        {"max_samples_per_cell": 1.5},
        "max_samples_per_cell = 1.5: expected a whole number in 1..2147483647",
    ),
    "truth": (
        {"memory_limit_tokens": True},
        "memory_limit_tokens = True: expected a whole number in 1..2147483647",
    ),
    "huge": (
        {"memory_limit_tokens": 2**31},
        "memory_limit_tokens = 2147483648: expected a whole number in 1..2147483647",
    ),
    "number": (
        {"uniform_rows": 1}, "uniform_rows = 1: expected true or false",
    ),
    "groups alone": (
        {"routing_groups": 2},
        "routing_groups: expected together with ranks_per_node or node_of_rank",
    ),
    "nodes alone": (
        {"ranks_per_node": 2},
        "routing_groups: expected together with ranks_per_node or node_of_rank",
    ),
    "map alone": (
        {"node_of_rank": [0, 1]},
        "routing_groups: expected together with ranks_per_node or node_of_rank",
    ),
    "nodes twice": (
        {"routing_groups": 2, "ranks_per_node": 2, "node_of_rank": [0, 0]},
        "ranks_per_node, node_of_rank: expected one of the two, both are given",
    ),
    "nodes of two sizes": (
        {"routing_groups": 2, "node_of_rank": [5, 3, 5]},
        "ranks of node[3] = 1: expected 2 as in node 5, node_of_rank has nodes of one size",
    ),
    "no node": (
        {"routing_groups": 2, "node_of_rank": []},
        "node_of_rank = []: expected the node of each EP rank",
    ),
    "a text of nodes": (
        {"routing_groups": 2, "node_of_rank": "01"},
        "node_of_rank = '01': expected the node of each EP rank",
    ),
    "a node below 0": (
        {"routing_groups": 2, "node_of_rank": [0, -1]},
        "node_of_rank[1] = -1: expected a whole number in 0..2147483647",
    ),
    "half a node": (
        {"routing_groups": 2, "node_of_rank": (0.5, 1)},
        "node_of_rank[0] = 0.5: expected a whole number in 0..2147483647",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_values_out_of_range_are_named(case: str) -> None:
    """Whatever is asked for is checked where it is asked for."""
    fields, message = BAD[case]
    with pytest.raises(InputError) as error:
        Requirements(**fields)
    assert str(error.value) == message


def test_only_what_is_on_is_named() -> None:
    """Messages list what was asked for."""
    required = Requirements(max_samples_per_cell=2, together="cell")
    assert list(required.named()) == [("max_samples_per_cell", 2), ("together", "cell")]
    assert not required.vacuous
    assert Requirements(rows_multiple_of=1).vacuous


# What asks for nothing


def longest_cell(case: Case) -> int:
    """Samples of the cell that holds most: the shortest ones."""
    fitting_S = np.cumsum(np.sort(case.window.lengths_S))
    return int(np.searchsorted(fitting_S, case.token_cap, side="right"))


def with_fields(case: Case, **fields: Any) -> Case:
    return replace(case, window=replace(case.window, **fields))


def all_routed(case: Case) -> int:
    return int(case.window.lengths_S.sum()) * case.window.top_k


NOTHING: dict[str, Callable[[Case, Plan], tuple[Case, Requirements]]] = {
    "as many as fit": lambda case, free: (
        case, Requirements(max_samples_per_cell=longest_cell(case))
    ),
    "all samples in a cell": lambda case, free: (
        case, Requirements(max_samples_per_cell=2**31 - 1)
    ),
    "the rows that are": lambda case, free: (case, Requirements(rows_multiple_of=len(free.rows))),
    "one tag": lambda case, free: (
        with_fields(case, tag_S=np.full(case.window.samples, 3)), Requirements(uniform_rows=True)
    ),
    "prompts of one, a rank": lambda case, free: (
        with_fields(case, group_S=np.arange(case.window.samples)), Requirements(together="rank")
    ),
    "prompts of one, a cell": lambda case, free: (
        with_fields(case, group_S=np.arange(case.window.samples)), Requirements(together="cell")
    ),
    "one node": lambda case, free: (
        case, Requirements(routing_groups=1, ranks_per_node=case.topology.ep)
    ),
    "one mapped node": lambda case, free: (
        case, Requirements(routing_groups=1, node_of_rank=(3,) * case.topology.ep)
    ),
    "room for all routed tokens": lambda case, free: (
        case, Requirements(memory_limit_tokens=all_routed(case))
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTHING)
@given(cases(), st.sampled_from(METHODS), st.booleans())
@settings(max_examples=8)
def test_a_requirement_that_asks_for_nothing_changes_nothing(
    name: str, case: Case, method: str, fixed: bool
) -> None:
    """Placement, rows, score and certificate are those of a plan without, at equal evaluations."""
    options: dict[str, Any] = {"method": method, "fixed_placement": fixed}
    try:
        free = plan(
            case.window, case.topology, token_cap=case.token_cap, budget=BUDGET, threads=1,
            **options,
        )  # fmt: skip
    except InfeasibleError:
        return
    case, required = NOTHING[name](case, free)
    found = planned(case, required, **options)
    assert isinstance(found, Plan), found
    for field in ("placement", "rows", "score", "search", "certificate"):
        assert getattr(found, field) == getattr(free, field), field


@pytest.mark.parametrize("fields", [{"equal_samples_per_rank": True}, {"together": "rank"}])
@given(cases())
@settings(max_examples=15)
def test_one_rank_asks_for_nothing(fields: dict[str, Any], case: Case) -> None:
    """With D = 1 all samples are on the same DP rank, and so are those of any prompt."""
    case = replace(case, topology=Topology.of(dp=1, ep=case.topology.ep, edp=1))
    found, free = planned(case, Requirements(**fields)), planned(case, Requirements())
    if isinstance(free, InfeasibleError):
        assert str(found) == str(free)
        return
    assert isinstance(found, Plan)
    assert (found.rows, found.placement, found.score) == (free.rows, free.placement, free.score)


def test_an_expert_free_cost_still_keeps_the_limit() -> None:
    """Where experts cost nothing, a limit on them is all the same searched for: of four samples of
    one expert and four of the other, two of each make a row, by swaps that cost nothing."""
    demand_SLE = np.zeros((8, 1, 2), np.uint16)
    demand_SLE[:4, 0, 0] = demand_SLE[4:, 0, 1] = 4
    window = Window([4] * 8, demand_SLE, 1)
    case = Case(window, Topology.of(dp=2, ep=2), 8)
    model = CostModel((AttentionStage("full", 1.0, 0.5),), 0.0)
    found = planned(
        case, Requirements(memory_limit_tokens=8), Budget(evaluations=4000), cost_model=model
    )
    assert isinstance(found, Plan), str(found)
