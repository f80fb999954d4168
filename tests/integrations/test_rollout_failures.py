"""slime and miles: whatever fails, the step runs on the trainer's own layout."""

from __future__ import annotations

import logging
import sys
import time
import types
from typing import Any

import pytest

import routepack
from integrations.rollout_helpers import (
    KEPT,
    LENGTHS,
    failing,
    owned,
    process,
    settings_of,
)
from integrations.trainer_helpers import (
    Logged,
    arguments,
    next_fit,
    parallel,
    samples_of,
)


def test_a_missing_route(trainer: str, logged: Logged, caplog: pytest.LogCaptureFixture) -> None:
    """One sample without routes: nothing is planned, the warning names the sample."""
    samples = samples_of(LENGTHS)
    samples[3].rollout_routed_experts = None
    warnings, metrics = failing(trainer, logged, caplog, samples)
    assert warnings == [
        f"{KEPT}routes[3] = none: expected recorded routes, the engine must return them"
    ]
    assert metrics["routepack/total/declined"] == 1
    assert metrics["routepack/total/planned"] == 0


def test_a_sample_above_the_cap(
    trainer: str, logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainers train a sample above the cap alone; plans have no such cell."""
    samples = samples_of([*LENGTHS[:-1], 70])
    warnings, metrics = failing(trainer, logged, caplog, samples)
    assert warnings == [f"{KEPT}lengths[31] = 70: expected at most the token cap 64"]
    assert metrics["routepack/total/declined"] == 1


def test_other_samples_than_the_hook_saw(
    trainer: str, logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    """A conversion of one's own may drop samples: routes cannot be told apart any more."""
    lengths = LENGTHS[:28]
    warnings, metrics = failing(
        trainer, logged, caplog, samples_of(LENGTHS), lengths, global_batch_size=28
    )
    assert warnings == [
        f"{KEPT}total_lengths = of 28 samples: expected the samples that the log hook saw, in "
        f"their order"
    ]
    assert metrics["routepack/total/declined"] == 1


def test_a_planner_that_raises(
    trainer: str,
    logged: Logged,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a bug in the planner raises, the step runs."""

    def broken(*args: Any, **rest: Any) -> None:
        raise ZeroDivisionError("a bug\nof two lines")

    monkeypatch.setattr(routepack, "plan", broken)
    warnings, metrics = failing(trainer, logged, caplog, samples_of(LENGTHS))
    assert warnings == [f"{KEPT}ZeroDivisionError: a bug of two lines"]
    assert metrics["routepack/total/errors"] == 1


def test_a_plan_that_breaks_an_invariant(
    trainer: str,
    logged: Logged,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layout is checked before the trainer gets it: here two samples changed cells, so that one
    is above the cap."""
    import msgspec

    plan = routepack.plan

    def crowded(*args: Any, **rest: Any) -> Any:
        made = plan(*args, **rest)
        first, second, *cells = made.rows[0]
        rows = ((tuple(sorted((*first, *second[1:]))), second[:1], *cells), *made.rows[1:])
        return msgspec.structs.replace(made, rows=rows)

    monkeypatch.setattr(routepack, "plan", crowded)
    monkeypatch.setattr("routepack.integrations.observe.Load.over", lambda self, other: 0.5)
    warnings, metrics = failing(trainer, logged, caplog, samples_of(LENGTHS))
    [warning] = warnings
    assert warning.startswith(f"{KEPT}RuntimeError: the plan's layout is not valid: rows[0, 0] = ")
    assert warning.endswith("tokens: expected at most 64")
    assert metrics["routepack/total/errors"] == 1


def test_a_plan_that_is_late(
    trainer: str,
    logged: Logged,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planner that hangs is left behind at the deadline, and asked to stop."""
    stopped = []

    def slow(*args: Any, **rest: Any) -> None:
        while not rest["stop"]():
            time.sleep(0.01)
        stopped.append(True)
        raise AssertionError("nobody waits any more")

    monkeypatch.setattr(routepack, "plan", slow)
    warnings, metrics = failing(
        trainer, logged, caplog, samples_of(LENGTHS), settings={"deadline_seconds": 0.2}
    )
    assert warnings == [f"{KEPT}no plan after 0.2 s"]
    assert metrics["routepack/total/late"] == 1
    for _ in range(200):
        if stopped:
            break
        time.sleep(0.01)
    assert stopped == [True]


def test_samples_of_another_kind(
    trainer: str, logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook that understands nothing of what it is given leaves the rollout alone."""
    running = process(trainer, next_fit)
    args = arguments(routepack=settings_of("pack"))
    with caplog.at_level(logging.WARNING, "routepack"):
        assert running.hook is not None
        schedules = running.globals["generate"](
            running.hook, args, [object()], LENGTHS, parallel(), list(range(32)), 0
        )
    assert schedules == owned(args)
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning == f"{KEPT}'object' object has no attribute 'tokens'"


def test_a_logger_that_raises(trainer: str, caplog: pytest.LogCaptureFixture,
                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The plan is used all the same."""
    module = types.ModuleType("a_logger")

    def log(metrics: dict[str, float], step: int) -> None:
        raise OSError("no space left")

    vars(module)["log"] = log
    monkeypatch.setitem(sys.modules, "a_logger", module)
    args = arguments(routepack=settings_of("pack"))
    with caplog.at_level(logging.WARNING, "routepack"):
        schedule = process(trainer, next_fit).rollout(args, samples_of(LENGTHS))
    assert schedule != owned(args)
    assert [record.getMessage() for record in caplog.records] == [
        "the metrics of a step were not logged: no space left"
    ]
