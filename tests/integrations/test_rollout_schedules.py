"""slime and miles: every schedule keeps the documented invariants."""

from __future__ import annotations

import sys
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import routepack
from integrations.rollout_helpers import (
    LENGTHS,
    owned,
    process,
    settings_of,
)
from integrations.trainer_helpers import (
    EXPERTS,
    LAYERS,
    TOP_K,
    Logged,
    Sample,
    Schedule,
    arguments,
    broken_schedule,
    next_fit,
    parallel,
    real,
    samples_of,
)
from routepack.integrations.rollout import rows_of, schedule_of

# What is on, and what is off


def test_off_gives_the_identical_object(trainer: str) -> None:
    """Without settings the hook replaces nothing: the function and what it returns are the
    trainer's."""
    schedule = owned(arguments())

    def own(*args: Any, **rest: Any) -> Schedule:
        return schedule

    for nothing in ({}, {"routepack": None}, {"routepack": {"mode": "off"}}):
        running = process(trainer, own)
        assert running.rollout(arguments(**nothing), samples_of(LENGTHS)) is schedule
        assert running.globals["build_dp_schedule"] is own


def test_observing_gives_the_identical_object_and_logs_later(trainer: str, logged: Logged) -> None:
    """The trainer's schedule is returned itself; its numbers come with a later rollout, with the
    step that they are of."""
    schedule = owned(arguments())
    running = process(trainer, lambda args, train_parallel_config, total_lengths, *,
                      global_batch_size, rollout_indices: schedule)  # fmt: skip
    args = arguments(routepack=settings_of("observe"))
    for step in range(1000):
        assert running.rollout(args, samples_of(LENGTHS), rollout_id=step) is schedule
        if logged.entries:
            break
        time.sleep(0.02)
    else:
        pytest.fail("nothing was logged in 1000 rollouts")
    step, metrics = logged.entries[0]
    assert step == 0
    assert metrics["routepack/samples"] == 32
    assert metrics["routepack/missing_rows"] == 32  # SGLang records no route of the last token
    assert metrics["routepack/own/expert_imbalance"] > 1
    assert 0 < metrics["routepack/predicted_ratio"] <= 1
    assert 0 < metrics["routepack/predicted_ratio_with_placement"] < 1


def test_packing_is_predicted_to_be_faster(trainer: str, logged: Logged) -> None:
    """The schedule is another one, keeps every invariant, and has a slowest shard that the slow
    oracle finds lower than the trainer's."""
    args = arguments(routepack=settings_of("pack"))
    running = process(trainer, next_fit)
    samples = samples_of(LENGTHS)
    schedule = running.rollout(args, samples)
    own = owned(args)
    assert schedule != own
    assert schedule[3] is not None
    assert broken_schedule(
        schedule, LENGTHS, range(32), global_batch_size=32, dp=4, cap=64
    ) == []  # fmt: skip
    [(step, metrics)] = logged.entries
    assert step == 7
    assert metrics["routepack/packed_steps"] == 1
    assert metrics["routepack/total/planned"] == 1

    demand_SLE = np.zeros((32, LAYERS, EXPERTS), np.int64)
    for i, sample in enumerate(samples):
        for layer in range(LAYERS):
            ids = sample.rollout_routed_experts[:, layer].ravel()
            demand_SLE[i, layer] = np.bincount(ids, minlength=EXPERTS)
    window = routepack.Window(np.array(LENGTHS), demand_SLE, TOP_K, missing_S=np.ones(32, np.int32))
    topology = routepack.Topology.of(dp=4, ep=2)
    from routepack.cost import DEFAULT
    from routepack.objective import score
    from routepack.placement import identity

    cost = DEFAULT.resolve(window, topology, 64)
    ours, theirs = (
        score(window, topology, cost, identity(LAYERS, EXPERTS), rows_of(found)[0]).slowest_shard
        for found in (schedule, own)
    )
    assert ours < theirs
    assert metrics["routepack/plan/slowest_shard"] == pytest.approx(ours, rel=1e-12)
    assert metrics["routepack/own/slowest_shard"] == pytest.approx(theirs, rel=1e-12)
    assert metrics["routepack/predicted_ratio"] == pytest.approx(ours / theirs, rel=1e-12)


def test_a_layout_that_is_as_good_is_kept(trainer: str, logged: Logged) -> None:
    """With one sample for each rank all layouts cost the same or more: the trainer's own object."""
    schedule = ([[0], [1], [2], [3]], [[[0]]] * 4, [1], [4])
    samples = samples_of([9, 9, 9, 9])
    for sample in samples[1:]:
        sample.rollout_routed_experts = samples[0].rollout_routed_experts
    running = process(trainer, lambda args, train_parallel_config, total_lengths, *,
                      global_batch_size, rollout_indices: schedule)  # fmt: skip
    args = arguments(global_batch_size=4, routepack=settings_of("pack"))
    assert running.rollout(args, samples) is schedule
    assert logged.entries[0][1]["routepack/packed_steps"] == 0
    assert logged.entries[0][1]["routepack/predicted_ratio"] == 1


# The invariants, against a stand-in and, where it is installed, the trainers' own function

FUNCTIONS = ["stand-in", "slime.utils.dp_schedule", "miles.utils.dp_schedule"]


def function(name: str) -> Callable[..., Schedule]:
    return next_fit if name == "stand-in" else real(name)


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[Any, list[Sample], dict[str, int], int]:
    """Arguments, samples (some rollouts have several), ranks, the group of a virtual pipeline."""
    dp = draw(st.sampled_from([1, 2, 4]))
    ep = draw(st.sampled_from([e for e in (1, 2, 4) if e <= dp]))
    group = draw(st.sampled_from([1, 1, 2]))
    steps = draw(st.integers(1, 3))
    size = dp * group * draw(st.sampled_from([2, 3]))
    lengths, ids = [], []
    for rollout in range(steps * size + draw(st.integers(0, 2))):
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
            lengths.append(draw(st.integers(2, 40)))
            ids.append(rollout)
    samples = samples_of(lengths, draw(st.integers(0, 99)))
    for sample, rollout in zip(samples, ids, strict=True):
        sample.rollout_id = rollout
    args = arguments(
        expert_model_parallel_size=ep,
        global_batch_size=size,
        max_tokens_per_gpu=draw(st.integers(40, 90)),
        balance_data=draw(st.booleans()),
        routepack=settings_of("pack", evaluations=200),
    )
    return args, samples, parallel(dp=dp, vpp=group, group=group), group


@pytest.mark.parametrize("name", FUNCTIONS)
@given(drawn=rollouts())
@settings(max_examples=25)
def test_invariants(name: str, drawn: tuple[Any, list[Sample], dict[str, int], int]) -> None:
    """The trainer's own schedules hold them, and so do packed ones, step by step."""
    args, samples, config, multiple = drawn
    own = function(name)
    lengths = [len(sample.tokens) for sample in samples]
    ids = [sample.rollout_id for sample in samples]
    wanted: dict[str, Any] = dict(
        global_batch_size=args.global_batch_size,
        dp=config["dp_size"],
        cap=args.max_tokens_per_gpu,
        multiple=multiple,
    )
    try:
        theirs = own(
            args,
            config,
            lengths,
            global_batch_size=args.global_batch_size,
            rollout_indices=ids,
        )
    except AssertionError:  # the trainer's own way to say that there are too few samples
        reject()
    assert broken_schedule(theirs, lengths, ids, **wanted) == []
    logged = Logged()
    module = types.ModuleType("a_logger")
    vars(module)["log"] = logged
    sys.modules["a_logger"] = module
    ours = process("slime", own).rollout(args, samples, config=config)
    assert broken_schedule(ours, lengths, ids, **wanted) == []
    assert ours[3] == theirs[3]
    assert logged.entries[0][1]["routepack/total/planned"] == 1


@given(rollouts())
@settings(max_examples=25)
def test_schedules_and_rows_are_inverse(
    drawn: tuple[Any, list[Sample], dict[str, int], int],
) -> None:
    """A schedule read as rows and written again is the same schedule."""
    args, samples, config, _ = drawn
    lengths = [len(sample.tokens) for sample in samples]
    schedule = next_fit(
        args, config, lengths,
        global_batch_size=args.global_batch_size,
        rollout_indices=[sample.rollout_id for sample in samples],  # type: ignore[misc]
    )  # fmt: skip
    assert schedule_of(rows_of(schedule), schedule[3]) == schedule


def _lose(schedule: Schedule) -> None:
    schedule[1][0][-1].pop()
    schedule[0][0].pop()


BROKEN: dict[str, tuple[Callable[[Schedule], object], str]] = {
    "a sample twice": (lambda s: s[0][0].__setitem__(0, s[0][0][1]), "step 0 has other samples"),
    "a sample lost": (_lose, "step 0 has other samples"),
    "another order": (lambda s: s[1][0].reverse(), "rank 0 is not tiled in order"),
    "no tiling": (lambda s: s[0][0].append(0), "rank 0 is not tiled in order"),
    "one micro-batch less": (lambda s: s[1][0].pop(), "rank 0 has another number of micro-batches"),
    "another count": (
        lambda s: s[2].__setitem__(0, s[2][0] - 1),
        "rank 3 has another number of micro-batches",
    ),
    "empty": (lambda s: s[1][0].append([]), "rank 0: a micro-batch of 0 samples, 0 tokens"),
    "another step": (lambda s: s[2].append(1), "steps"),
    "too long": (lambda s: s[1][0].__setitem__(0, [0, 1, 2, 3, 4, 5]), "tokens"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_invariants_can_be_broken(case: str) -> None:
    """The suite above finds each kind of damage."""
    schedule = owned(arguments(max_tokens_per_gpu=40))
    check: dict[str, Any] = dict(global_batch_size=32, dp=4, cap=40)
    assert broken_schedule(schedule, LENGTHS, range(32), **check) == []
    damage, expected = BROKEN[case]
    damage(schedule)
    lines = broken_schedule(schedule, LENGTHS, range(32), **check)
    assert any(expected in line for line in lines)
