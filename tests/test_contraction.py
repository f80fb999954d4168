"""Prompts that share a cell are planned as one sample: nothing is lost, cost included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from requirement_helpers import Case, cases, planned
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
from routepack.contraction import Contraction
from routepack.cost import DEFAULT
from routepack.objective import score
from routepack.placement import identity, ranks_of
from routepack.problem import Problem
from strategies import cost_models, random_window

CELL = Requirements(together="cell")


def contracted(case: Case, cost_model: CostModel, required: Requirements = CELL) -> Contraction:
    cap = int(case.window.lengths_S.sum())
    cost = cost_model.resolve(case.window, case.topology, cap)
    return Contraction.of(case.window, cost, required, cap)


@given(cases(), cost_models())
def test_sums_are_those_of_the_samples(case: Case, cost_model: CostModel) -> None:
    """Tokens, demand, missing and token pairs of a prompt are its samples' added up; each sample is
    in one prompt; the demand is still K for every recorded token (a Window checks that)."""
    window = case.window
    assert window.group_S is not None
    small = contracted(case, cost_model)
    cost = cost_model.resolve(window, case.topology, int(window.lengths_S.sum()))
    assert sorted(s for members in small.members for s in members) == list(range(window.samples))
    for u, members in enumerate(small.members):
        index = list(members)
        assert len(set(window.group_S[index].tolist())) == 1
        assert small.window.lengths_S[u] == window.lengths_S[index].sum()
        assert small.window.missing_S[u] == window.missing_S[index].sum()
        assert (small.window.demand_SLE[u] == window.demand_SLE[index].sum(axis=0)).all()
        pairs_T = cost.quadratic_tokens_TS[:, index].sum(axis=1)
        assert small.cost.quadratic_tokens_TS[:, u].tolist() == pairs_T.tolist()
    assert small.requirements.vacuous


@given(cases(), cost_models(), st.data())
def test_a_layout_of_prompts_costs_what_its_samples_do(
    case: Case, cost_model: CostModel, data: st.DataObject
) -> None:
    """The score of a layout of the small window is the oracle's of the rows it stands for, by ==:
    samples of a prompt are attended separately, also inside a sliding window."""
    small = contracted(case, cost_model)
    units, dp = small.window.samples, case.topology.dp
    cap = int(case.window.lengths_S.sum())
    if units < dp:
        return
    problem = Problem(small.window, case.topology, small.cost, cap, 1)
    order = data.draw(st.permutations(range(units)))
    cell_S = np.empty(units, np.int32)
    cell_S[list(order)] = np.arange(units) % dp
    placement_LE = identity(2, 8)
    found = problem.measure(problem.static(ranks_of(placement_LE, case.topology.ep)), cell_S).score
    rows = small.expand(problem.to_rows(cell_S))
    cost = cost_model.resolve(case.window, case.topology, cap)
    assert found == score(case.window, case.topology, cost, placement_LE, rows)


def test_by_hand() -> None:
    """Prompts 9, 4 and 9 again: unit 0 is prompt 4."""
    demand_SLE = np.array([[[1, 1]], [[3, 0]], [[0, 2]]], np.uint16)
    window = Window([2, 3, 2], demand_SLE, 1, group_S=[9, 4, 9], tag_S=[1, 0, 1])
    cost = CostModel((AttentionStage("full", 1.0, 1.0),)).resolve(
        window, Topology.of(dp=1, ep=1), 8
    )
    required = Requirements(together="cell", rows_multiple_of=3, uniform_rows=True)
    small = Contraction.of(window, cost, required, 8)
    assert small.members == ((1,), (0, 2))
    assert small.window.lengths_S.tolist() == [3, 4]
    assert small.window.demand_SLE.tolist() == [[[3, 0]], [[1, 3]]]
    assert small.cost.quadratic_tokens_TS.tolist() == [[9, 8]]
    assert small.window.tag_S is not None
    assert small.window.tag_S.tolist() == [0, 1]
    assert small.requirements == Requirements(rows_multiple_of=3, uniform_rows=True)
    assert small.expand((((1,), (0,)),)) == (((0, 2), (1,)),)


@pytest.mark.parametrize(("most", "expected"), [(None, None), (2, 1), (5, 2), (6, 3)])
def test_samples_of_a_cell_are_counted_in_prompts(most: int | None, expected: int | None) -> None:
    """At most 5 samples are two prompts of two."""
    window = random_window(np.random.default_rng(0), [4] * 8, 1, 2, 1, group_S=np.arange(8) // 2)
    case = Case(window, Topology.of(dp=1, ep=1), 32)
    required = Requirements(together="cell", max_samples_per_cell=most)
    assert contracted(case, DEFAULT, required).requirements == Requirements(
        max_samples_per_cell=expected
    )


def test_fewer_prompts_than_ranks_are_told() -> None:
    """Three prompts of two samples on four DP ranks: some rank would have none."""
    window = random_window(np.random.default_rng(0), [4] * 6, 1, 2, 1, group_S=np.arange(6) // 2)
    with pytest.raises(InfeasibleError) as error:
        plan(
            window, Topology.of(dp=4, ep=1), token_cap=8, threads=1,
            budget=Budget(evaluations=10), requirements=CELL,
        )  # fmt: skip
    assert str(error.value) == (
        "groups = 3: expected at least the 4 DP ranks, for together = 'cell'"
    )


@given(cases(), st.sampled_from([{}, {"equal_samples_per_rank": True}, {"uniform_rows": True}]))
def test_plans_keep_prompts_whole(case: Case, fields: dict[str, Any]) -> None:
    """Planned, expanded, verified: a prompt in one cell, in a plan of the window's own samples."""
    found = planned(case, Requirements(together="cell", **fields))
    if isinstance(found, Plan):
        assert found.window.samples == case.window.samples
