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
    EVEN,
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
    Plan,
    Requirements,
    Topology,
    Window,
    plan,
)
from routepack.objective import rank_load_LR
from routepack.plan import METHODS

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
