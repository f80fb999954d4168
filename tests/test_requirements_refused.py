"""Requirements that no plan can meet, and values that are none: one line each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from requirement_helpers import (
    BUDGET,
    EVEN,
    even_window,
    planned,
)
from routepack import (
    InfeasibleError,
    InputError,
    Plan,
    Requirements,
    Topology,
    Window,
    plan,
)


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
