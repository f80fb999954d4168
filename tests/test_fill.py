"""Experts for the padding rows of plans, of one step or several."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requirement_helpers import Case, cases
from routepack import Budget, InfeasibleError, InputError, Topology, plan, plan_steps
from routepack.fill import fill_of, steps_of
from routepack.objective import row_costs
from routepack.padding import Padding, groups_of, level_BL, rank_load_BLR, sums_by_group, with_fill
from strategies import random_window

BUDGET = Budget(evaluations=100)


@given(
    cases(), st.integers(1, 3), st.integers(2, 9), st.booleans(), st.sampled_from([None, "sample"])
)
@settings(max_examples=40)
def test_every_step_is_filled_as_well_as_can_be(
    case: Case, steps: int, multiple: int, fills_missing: bool, estimate: str | None
) -> None:
    """By the oracle every busiest rank ends at the higher of its load and the level that no choice
    of experts is below, in each step, whatever was estimated; each sample has its rows."""
    window, topology = case.window, case.topology
    one_S = np.ones(window.samples, np.int32)
    window = replace(window, lengths_S=window.lengths_S + 1, missing_S=one_S)
    steps = max(1, min(steps, window.samples // topology.dp))
    padding = Padding(multiple=multiple, experts="fill", fills_missing=fills_missing)
    step_S = np.arange(window.samples) % steps
    try:
        made = plan_steps(
            window, topology, steps=step_S, token_cap=case.token_cap + 20, budget=BUDGET,
            threads=1, padding=padding, estimate=estimate,
        )  # fmt: skip
    except InfeasibleError:
        return
    fill = fill_of(window, made)
    rows_S = padding.tokens_S(window) + (fills_missing and estimate is None)
    assert np.diff(fill.offsets_S1).tolist() == rows_S.tolist()
    for k, (index, part, step) in enumerate(steps_of(window, made)):
        assert index.tolist() == np.flatnonzero(step_S == k).tolist()
        alone = fill_of(part, step)
        own_PLK = np.concatenate([
            fill.ids_PLK[fill.offsets_S1[i] : fill.offsets_S1[i + 1]] for i in index
        ])  # fmt: skip
        assert own_PLK.tolist() == alone.ids_PLK.tolist()
        bare = step.trained().window(part)
        full = with_fill(bare, alone)
        group_S = groups_of(step.rows, topology, part.samples)
        load_BLR = rank_load_BLR(bare, step.placement_LE, topology.ep, group_S)
        to_BL = level_BL(
            load_BLR, sums_by_group(rows_S[index], group_S), part.top_k, part.experts // topology.ep
        )
        cost = step.cost_model.resolve(bare, topology, step.token_cap)
        load_MGLR = row_costs(full, topology, cost, step.placement_LE, step.rows)[2]
        busiest_BL = load_MGLR.max(axis=-1).reshape(to_BL.shape)
        assert (busiest_BL == np.maximum(load_BLR.max(axis=2), to_BL)).all()


@given(cases())
@settings(max_examples=10)
def test_a_plan_is_filled_as_its_only_step(case: Case) -> None:
    """A set of one step has the fill of its plan."""
    options = {
        "token_cap": case.token_cap + 8,
        "budget": BUDGET,
        "threads": 1,
        "padding": Padding(multiple=4, experts="fill"),
    }
    try:
        alone = plan(case.window, case.topology, **options)
    except InfeasibleError:
        return
    one = plan_steps(
        case.window, case.topology, steps=np.zeros(case.window.samples, int), **options
    )
    found, same = fill_of(case.window, alone), fill_of(case.window, one)
    assert found.ids_PLK.tolist() == same.ids_PLK.tolist()
    assert found.offsets_S1.tolist() == same.offsets_S1.tolist()


@pytest.mark.parametrize(
    ("padding", "found"),
    [
        (None, "none"),
        (Padding(multiple=4), "none"),
        (Padding(multiple=4, experts=[[0, 1], [0, 1]]), "expert ids"),
    ],
)
def test_experts_that_are_settled_are_not_chosen(padding: Padding | None, found: str) -> None:
    """Only a plan that left them open is filled."""
    window = random_window(np.random.default_rng(0), [3, 5, 6, 2], 2, 4, 2)
    made = plan(
        window, Topology.of(dp=1, ep=2, edp=1), token_cap=20, budget=BUDGET, padding=padding
    )
    with pytest.raises(InputError) as error:
        fill_of(window, made)
    assert str(error.value) == (
        f"padding.experts = {found}: expected 'fill', so that they can be chosen"
    )
