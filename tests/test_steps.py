"""Several optimizer steps planned together: membership, one placement, a layout each, one file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from requirement_helpers import Case, broken, cases, one_line, requirements_for
from routepack import (
    Budget,
    InfeasibleError,
    InputError,
    Pass,
    Requirements,
    plan,
    plan_steps,
)
from routepack.membership import balanced_steps
from routepack.padding import Padding
from routepack.plan import WindowKey
from routepack.step import Step
from routepack.verify import verify, verify_set
from step_helpers import (
    BUDGET,
    FORWARD,
    LOG_PROBS,
    REFERENCE,
    TOPOLOGY,
    WINDOW,
    batch,
    made,
    refusal,
)
from strategies import SEEDS, random_window

# Given membership


@given(cases(max_groups=12), st.integers(1, 3), st.data())
@settings(max_examples=25)
def test_given_steps_are_kept(case: Case, steps: int, data: st.DataObject) -> None:
    """Every step has its own samples, all steps one placement, every requirement holds in every
    step, and the set verifies; or one line says what cannot be had."""
    window = case.window
    step_S = np.arange(window.samples) % min(steps, window.samples // case.topology.dp)
    step_S = step_S[data.draw(st.permutations(range(window.samples)))]
    names: dict[str, dict[str, Any]] = {
        "none": {}, "cells": {"max_samples_per_cell": 4}, "rows": {"rows_multiple_of": 2},
        "rank": {"together": "rank"}, "cell": {"together": "cell"}, "tags": {"uniform_rows": True},
        "counts": {"equal_samples_per_rank": True},
        "limit": {"memory_limit_tokens": 0.6},
        "nodes": {"routing_groups": 4, "ranks_per_node": 2},
    }  # fmt: skip
    required = requirements_for(case, names[data.draw(st.sampled_from(sorted(names)))])
    try:
        found = plan_steps(
            window, case.topology, token_cap=case.token_cap, steps=step_S, budget=BUDGET,
            threads=1, requirements=required,
        )  # fmt: skip
    except InfeasibleError as error:
        one_line(error)
        return
    assert verify_set(window, found) == []
    assert len(found.plans) == step_S.max() + 1
    for k, one in enumerate(found.plans):
        index = np.flatnonzero(step_S == k)
        assert found.samples_of(k).tolist() == index.tolist()
        position = {int(i): n for n, i in enumerate(index)}
        rows = [[[position[i] for i in cell] for cell in row] for row in one.rows]
        part = replace(case, window=window.select(index))
        assert broken(required, part, one.placement, rows) == set()
        assert one.window == WindowKey.of(part.window)


def test_the_windows_own_steps_are_the_default() -> None:
    """`step_S` of the window is used where no steps are given, and gives the same bytes."""
    step_S = np.arange(24) % 3
    window = batch(step_S=step_S)
    found, given_ = made(None, window), made(step_S, window)
    assert found.to_bytes() == given_.to_bytes()
    assert found.samples_of(1).tolist() == list(range(1, 24, 3))


def test_one_step_is_a_plan() -> None:
    """A single step has the placement, rows, score and certificate of `plan`."""
    found = made(np.zeros(24, int)).plans[0]
    alone = plan(WINDOW, TOPOLOGY, token_cap=60, budget=BUDGET, threads=1)
    for field in ("window", "placement", "rows", "score", "certificate", "search"):
        assert getattr(found, field) == getattr(alone, field), field


def test_evaluations_add_up_to_the_budget() -> None:
    """Over the steps, those for the placement included, to all that were spent; with passes these
    have a quarter of the budget."""
    for steps in (1, 2, 3):
        found = made(steps, budget=Budget(evaluations=1001))
        spent = [one.search.evaluations for one in found.plans]
        assert sum(spent) == found.plans[0].stats["evaluations"]
        assert 1001 - 64 <= sum(spent) <= 1001
        assert min(spent) > 0.5 * 1001 / steps
    found = made(2, budget=Budget(evaluations=1000), passes=[LOG_PROBS, REFERENCE])
    assert sum(one.search.evaluations for one in found.plans) <= 750
    assert all(64 < one.search.evaluations <= 125 for one in found.passes.values())


def test_steps_are_planned_jointly() -> None:
    """The sum over steps of the slowest shard is below that of plans of each step under the
    placement made for the first: one placement is made for all."""
    step_S = np.arange(24) * 3 // 24
    budget = Budget(evaluations=6000)
    joint = made(step_S, budget=budget)
    parts = [WINDOW.select(np.flatnonzero(step_S == k)) for k in range(3)]
    first = plan(parts[0], TOPOLOGY, token_cap=60, budget=budget, threads=1)
    others = [
        plan(
            part, TOPOLOGY, token_cap=60, budget=budget, threads=1, fixed_placement=True,
            current_placement=first.placement_LE,
        )
        for part in parts[1:]
    ]  # fmt: skip
    assert sum(p.score.slowest_shard for p in joint.plans) < sum(
        p.score.slowest_shard for p in (first, *others)
    )


@pytest.mark.parametrize("fixed", [False, True])
def test_threads_change_no_byte(fixed: bool) -> None:
    """As for a plan; a fixed placement stays."""
    current_LE = np.tile(np.arange(8)[::-1], (2, 1))
    options: dict[str, Any] = {"fixed_placement": fixed, "current_placement": current_LE}
    one, three = made(threads=1, **options), made(threads=3, **options)
    assert one.to_bytes() == three.to_bytes()
    if fixed:
        assert one.placement_LE.tolist() == current_LE.tolist()


# Free membership


@given(SEEDS, st.integers(1, 4), st.integers(1, 5), st.sampled_from([1, 2, 3]), st.booleans())
def test_dealt_steps_are_equal_and_whole(
    seed: int, steps: int, each: int, size: int, together: bool
) -> None:
    """Every step has as many samples, and with `together` every prompt is in one step."""
    rng = np.random.default_rng(seed)
    samples = steps * each * size
    group_S = rng.permutation(np.repeat(np.arange(steps * each) * 3 - 4, size))
    window = random_window(rng, rng.integers(1, 30, samples), 2, 4, 2, group_S=group_S)
    step_S = balanced_steps(window, steps, seed, together=together)
    assert np.bincount(step_S, minlength=steps).tolist() == [each * size] * steps
    if together:
        for group in np.unique(group_S):
            assert len(np.unique(step_S[group_S == group])) == 1
    again_S = balanced_steps(window, steps, seed, together=together)
    assert again_S.tolist() == step_S.tolist()


def test_dealt_steps_are_alike() -> None:
    """On 20 windows of 64 samples in 4 steps: tokens, token pairs and the demand of experts differ
    less between steps than by chance, by a factor of 5, 2.5 and 1.2 in the mean."""
    ratios = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths_S = np.minimum(200, rng.lognormal(3, 0.8, 64).astype(int) + 1)
        window = random_window(rng, lengths_S, 2, 8, 2, skew=2.0)
        measures = [
            lengths_S[:, None].astype(float),
            lengths_S[:, None].astype(float) ** 2,
            window.demand_SLE.reshape(64, -1).astype(float),
        ]

        def spread(step_S: Any, values_SF: Any) -> float:
            sums = np.array([values_SF[step_S == k].sum(axis=0) for k in range(4)])
            return float(sums.std(axis=0).mean())

        dealt_S = balanced_steps(window, 4, seed, together=False)
        chance_S = rng.permutation(np.arange(64) % 4)
        ratios.append([spread(chance_S, v) / max(spread(dealt_S, v), 1e-9) for v in measures])
    tokens, pairs, demand = np.exp(np.log(ratios).mean(axis=0))
    assert tokens > 5
    assert pairs > 2.5
    assert demand > 1.2


def test_a_number_of_steps_is_planned() -> None:
    """Dealt out, planned and verified, prompts whole where they stay together in a step."""
    found = made(3, requirements=Requirements(together="rank", equal_samples_per_rank=True))
    assert verify_set(WINDOW, found) == []
    assert [len(found.samples_of(k)) for k in range(3)] == [8, 8, 8]
    for k in range(3):
        assert len(np.unique(found.samples_of(k) // 2)) == 4
    assert made(np.int64(3)).to_bytes() == made(3).to_bytes()


# Other passes


def test_passes_run_on_the_same_placement() -> None:
    """Each over the whole batch, with its own cap and cost, verified with the set."""
    found = made(3, passes=[LOG_PROBS, REFERENCE])
    assert verify_set(WINDOW, found) == []
    assert list(found.passes) == ["log-probs", "reference"]
    for one in (LOG_PROBS, REFERENCE):
        other = found.passes[one.name]
        assert (other.token_cap, other.cost_model) == (one.token_cap, one.cost_model)
        assert other.placement == found.plans[0].placement
        assert other.window.samples == 24
        assert verify(WINDOW, other) == []


# What cannot be had


def test_steps_that_cannot_be_had_are_told() -> None:
    """Whole messages, by hand; 24 samples, 12 prompts of two, two DP ranks."""
    assert refusal(None) == "step: expected in the window, or a number of steps"
    assert refusal(0) == "steps = 0: expected a whole number in 1..24"
    assert refusal(25) == "steps = 25: expected a whole number in 1..24"
    assert refusal(5) == "samples = 24: expected a multiple of the 5 steps"
    assert refusal(24) == "samples of step[0] = 1: expected at least the 2 DP ranks"
    whole = "a number, or an integer for each of the 24 samples"
    assert refusal([0, 1]) == f"steps = int64[2]: expected {whole}"
    assert refusal(np.zeros(24)) == f"steps = float64[24]: expected {whole}"
    assert refusal(True) == f"steps = bool[]: expected {whole}"
    assert refusal([0] * 23 + [-1]) == "steps[23] = -1: expected at least 0"
    assert refusal([0] * 22 + [2] * 2) == "samples of step[1] = 0: expected at least the 2 DP ranks"
    together = Requirements(together="cell")
    assert refusal(8, requirements=together) == "groups = 12: expected a multiple of the 8 steps"
    uneven = batch(group_S=[70, 70, 70, *range(71, 92)])
    assert refusal(2, uneven, requirements=together) == (
        "samples of group[71] = 1: expected 3 as in the others, to deal groups out evenly"
    )


def test_absurd_step_numbers_are_told() -> None:
    """A step number from the number of samples on leaves steps empty; it is told, not counted up
    to."""
    assert refusal([0] * 22 + [2**40] * 2) == (
        "steps[22] = 1099511627776: expected below the 24 samples"
    )


def test_requirements_hold_in_every_step() -> None:
    """12 samples in step 0 are even, 9 and 3 in the others are not."""
    steps = [0] * 12 + [1] * 9 + [2] * 3
    required = Requirements(equal_samples_per_rank=True)
    with pytest.raises(InfeasibleError) as error:
        made(steps, requirements=required)
    assert str(error.value) == (
        "step 1: samples = 9: expected a multiple of the 2 DP ranks, for equal_samples_per_rank"
    )


def test_what_no_step_can_have_names_none() -> None:
    """A window without prompts, nodes that do not divide, a sample that is padded above the cap and
    padding of other experts are told of the whole."""
    bare = batch(group_S=None)
    told = refusal([0, 1] * 12, bare, requirements=Requirements(together="rank"))
    assert told == "group: expected in the window, together = 'rank' needs it"
    nodes = Requirements(routing_groups=2, ranks_per_node=3)
    assert (
        refusal(2, requirements=nodes) == "ranks_per_node = 3: expected a divisor of the 4 EP ranks"
    )
    longest = int(WINDOW.lengths_S.argmax())
    assert refusal(2, padding=Padding(multiple=64)) == (
        "lengths[0] = 64: expected at most the token cap 60"
    )
    exact = int(WINDOW.lengths_S[longest])
    assert refusal(2, padding=Padding(multiple=exact - 1), token_cap=exact) == (
        f"lengths[{longest}] = {2 * exact - 2}: expected at most the token cap {exact}"
    )
    told = refusal(2, padding=Padding(multiple=8, experts=[[0, 9], [0, 1]]))
    assert told == "padding.experts[0, 0, 1] = 9: expected an expert id in 0..7"


def test_what_a_search_cannot_meet_names_its_step() -> None:
    """Step 1 holds the longer samples, for which a limit is below balance that step 0 keeps."""
    order_S = np.argsort(WINDOW.lengths_S, kind="stable")
    step_S = np.zeros(24, int)
    step_S[order_S[12:]] = 1
    longer = WINDOW.select(np.flatnonzero(step_S == 1))
    least = int(-(-longer.demand_LE.sum(axis=1) // 4).max())  # one row, four EP ranks
    limit = least - 1
    with pytest.raises(InfeasibleError) as error:
        made(step_S, requirements=Requirements(memory_limit_tokens=limit), token_cap=200)
    message = str(error.value)
    assert message.startswith(f"step 1: memory_limit_tokens = {limit}: expected at least ")
    assert f"(proven: at least {least})" in message


def test_what_a_pass_cannot_have_is_told_before_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """25 samples of 30 tokens need 13 rows of two cells of 31, with one sample more than there are:
    that is found without any search."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr("routepack.steps.search", never)
    lengths_S = np.full(25, 30)
    window = random_window(np.random.default_rng(0), lengths_S, 2, 8, 2)
    message = refusal([0] * 12 + [1] * 13, window, passes=[Pass("ref", 31, FORWARD)])
    assert message.startswith(
        "pass ref: samples = 25: expected at least 26, because token_cap = 31"
    )


def test_the_rows_of_a_pass_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each step and each pass, and not again for its search."""
    calls = []

    def counted(*arguments: Any) -> Step:
        calls.append(arguments)
        return ready(*arguments)

    ready = Step.of
    monkeypatch.setattr(Step, "of", counted)
    made(3, passes=[LOG_PROBS, REFERENCE])
    assert len(calls) == 5


def test_passes_that_cannot_be_had_are_told() -> None:
    """A name twice, no name, a cap that is no number, and one that a sample exceeds."""
    assert refusal(2, passes=[LOG_PROBS, LOG_PROBS]) == (
        "pass.name[1] = 'log-probs': expected each name once"
    )
    with pytest.raises(InputError) as error:
        Pass("", 8, FORWARD)
    assert str(error.value) == "pass.name = '': expected a name"
    assert refusal(2, passes=[Pass("x", 0, FORWARD)]) == (
        "pass x: token_cap = 0: expected a whole number of at least 1"
    )
    longest = int(WINDOW.lengths_S.argmax())
    assert f"lengths[{longest}]" in refusal(
        2, passes=[Pass("x", int(WINDOW.lengths_S[longest]) - 1, FORWARD)]
    )
