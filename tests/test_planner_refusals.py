"""What the planner refuses, one line each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner_helpers import example, plan_of
from routepack import (
    AttentionStage,
    Budget,
    CostModel,
    InfeasibleError,
    InputError,
    Topology,
    Window,
)
from routepack import plan as make
from routepack.placement import identity, ranks_of
from routepack.plan import METHODS
from routepack.verify import verify

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "token_cap 0": ({"token_cap": 0}, "token_cap = 0: expected a whole number of at least 1"),
    "token_cap True": (
        {"token_cap": True}, "token_cap = True: expected a whole number of at least 1"
    ),
    "token_cap 100.0": (
        {"token_cap": 100.0}, "token_cap = 100.0: expected a whole number of at least 1"
    ),
    "threads 0": ({"threads": 0}, "threads = 0: expected a whole number of at least 1"),
    "threads -1": ({"threads": -1}, "threads = -1: expected a whole number of at least 1"),
    "seed -1": ({"seed": -1}, "seed = -1: expected a whole number in 0..2^63-1"),
    "seed 2^63": ({"seed": 2**63}, f"seed = {2**63}: expected a whole number in 0..2^63-1"),
    "seed True": ({"seed": True}, "seed = True: expected a whole number in 0..2^63-1"),
    "seed 1.0": ({"seed": 1.0}, "seed = 1.0: expected a whole number in 0..2^63-1"),
    "unknown method": (
        {"method": "magic"},
        "method = magic: expected one of baseline, reorder, kk, reorder-kk, expert-only, "
        "attention-only, routepack",
    ),
    "experts that do not divide": (
        {"topology": Topology.of(dp=4, ep=3, edp=2)},
        "num_experts = 8: expected a multiple of the 3 EP ranks",
    ),
    "more DP ranks than samples": (
        {"topology": Topology.of(dp=41, ep=4, edp=1)},
        "samples = 40: expected at least the 41 DP ranks",
    ),
    "a topology that spans": (
        {"topology": Topology(dp=2, ep=4, edp=4, tp=4, cp=2)},
        "ep * etp = 4: expected a multiple of tp * cp = 8, or a DP rank spans several EP groups",
    ),
    "a sample over the cap": (
        {"token_cap": 40},
        "lengths[{first}] = {length}: expected at most the token cap 40",
    ),
    "placement of another size": (
        {"current_placement": identity(1, 8)},
        "current_placement.shape = (1, 8): expected (2, 8)",
    ),
    "ragged placement": (
        {"current_placement": [[0, 1], [0]]},
        "current_placement.shape = ragged: expected (2, 8)",
    ),
    "placement of floats": (
        {"current_placement": identity(2, 8).astype(float)},
        "current_placement.dtype = float64: expected an integer type",
    ),
    "a slot twice": (
        {"current_placement": np.array([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 6]])},
        "current_placement[1, 7] = 6: expected a free slot, expert 6 has it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_argument_is_named(case: str) -> None:
    """One line says which argument, its value and what was expected."""
    changes, message = REFUSED[case]
    instance = example()
    lengths_S = instance.window.lengths_S
    first = int(np.flatnonzero(lengths_S > 40)[0])
    arguments = {"topology": instance.topology, "token_cap": instance.token_cap} | changes
    with pytest.raises(InputError) as error:
        make(instance.window, **arguments)
    assert str(error.value) == message.format(first=first, length=lengths_S[first])


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({}, "budget: expected either seconds or evaluations"),
        ({"seconds": 1, "evaluations": 1}, "budget: expected either seconds or evaluations"),
        ({"seconds": 0}, "seconds = 0: expected a finite number above 0"),
        ({"seconds": float("nan")}, "seconds = nan: expected a finite number above 0"),
        ({"seconds": float("inf")}, "seconds = inf: expected a finite number above 0"),
        ({"evaluations": -1}, "evaluations = -1: expected a whole number of at least 0"),
        ({"evaluations": 1.5}, "evaluations = 1.5: expected a whole number of at least 0"),
        ({"evaluations": True}, "evaluations = True: expected a whole number of at least 0"),
    ],
)
def test_a_bad_budget_is_named(budget: dict[str, Any], message: str) -> None:
    """A budget is seconds or evaluations, finite and not negative."""
    with pytest.raises(InputError) as error:
        Budget(**budget)
    assert str(error.value) == message


def test_too_few_samples_for_the_rows_are_infeasible() -> None:
    """Four samples of 6 tokens and a cap of 6 need four cells, and on 3 DP ranks two rows of them:
    six cells, of which two would be empty. Every method says so."""
    window = Window(np.full(4, 6), np.full((4, 1, 2), 3), 1)
    topology = Topology.of(dp=3, ep=1, edp=1)
    for method in METHODS:
        with pytest.raises(InfeasibleError) as error:
            make(window, topology, token_cap=6, method=method)
        assert str(error.value) == (
            "samples = 4: expected at least 6, because token_cap = 6 needs at least 2 rows of "
            "3 cells, none empty"
        )


def test_ranks_of_a_plan_are_those_scored() -> None:
    """The slots that a search chooses last lie on the ranks that it searched."""
    instance = example()
    plan = plan_of(instance)
    static = instance.problem.static(ranks_of(plan.placement_LE, 4))
    bins = [cell for row in plan.rows for cell in row]
    measured = instance.problem.measure(static, instance.problem.from_bins(bins))
    assert measured.score == plan.score


@pytest.mark.parametrize("seconds", [1e-9, 1e-4, 2e-3])
def test_a_deadline_that_is_over_before_the_search(seconds: float) -> None:
    """Whatever is left when the search starts, also less than nothing, a plan comes back."""
    window = Window(np.full(16, 3), np.full((16, 2, 4), 3), 4)
    topology = Topology.of(dp=2, ep=2)
    plan = make(window, topology, token_cap=9, budget=Budget(seconds=seconds), threads=1)
    assert verify(window, plan) == []


def test_a_cost_of_nothing_is_planned() -> None:
    """Only experts cost anything, and no token has a route: the bound is 0, and so is the gap."""
    window = Window(np.full(4, 2), np.zeros((4, 1, 2), np.uint16), 1, missing_S=np.full(4, 2))
    cost_model = CostModel((AttentionStage("none", 0.0, 0.0),))
    for method in METHODS:
        plan = make(
            window, Topology.of(dp=2, ep=2), token_cap=4, cost_model=cost_model,
            method=method, budget=Budget(evaluations=50),
        )  # fmt: skip
        assert (plan.certificate.cost_lower_bound, plan.certificate.gap) == (0.0, 0.0)
        assert verify(window, plan) == []
