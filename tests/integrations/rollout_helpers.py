"""The rollout process of slime and of miles in small."""

from __future__ import annotations

import logging
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from integrations.trainer_helpers import (
    Logged,
    Sample,
    Schedule,
    arguments,
    next_fit,
    parallel,
)
from routepack.integrations import miles, slime

LENGTHS = [int(n) for n in np.random.default_rng(5).integers(4, 33, size=32)]
PLANNED = {"evaluations": 2000, "threads": 1}


@dataclass
class Process:
    """The rollout process of a trainer: its hook, and the function that makes schedules."""

    hook: Callable[..., bool]
    globals: dict[str, Any]

    def rollout(
        self,
        args: Any,
        samples: list[Sample],
        lengths: list[int] | None = None,
        config: dict[str, int] | None = None,
        rollout_id: int = 7,
    ) -> Schedule:
        """One rollout, as the trainer goes through it: log, then split."""
        lengths = [len(sample.tokens) for sample in samples] if lengths is None else lengths
        indices = [sample.rollout_id for sample in samples][: len(lengths)]
        generate = self.globals["generate"]
        return generate(
            self.hook, args, samples, lengths, config or parallel(), indices, rollout_id
        )


GENERATE = """
def generate(hook, args, samples, lengths, config, indices, rollout_id):
    assert hook(rollout_id, args, samples, None, 1.0) is False
    return split(args, config, lengths, indices)

def split(args, config, lengths, indices):
    return build_dp_schedule(
        args, config, lengths, global_batch_size=args.global_batch_size, rollout_indices=indices
    )
"""


def process(trainer: str, own: Callable[..., Schedule]) -> Process:
    """Code with globals of its own, as Ray gives an actor's methods; miles has a module of them."""
    namespace: dict[str, Any] = {"build_dp_schedule": own}
    exec(GENERATE, namespace)
    if trainer == "slime":
        return Process(slime.log_rollout_data, namespace)
    module = types.ModuleType(miles.MODULE)
    vars(module).update(namespace)
    exec(GENERATE, vars(module))
    sys.modules[miles.MODULE] = module
    return Process(miles.log_rollout_data, vars(module))


def settings_of(mode: str, **changes: Any) -> dict[str, Any]:
    return {"mode": mode, "logger": "a_logger.log", **PLANNED, **changes}


def owned(args: Any, lengths: list[int] = LENGTHS, **config: int) -> Schedule:
    """The trainer's own schedule."""
    return next_fit(
        args,
        parallel(**config),
        lengths,
        global_batch_size=args.global_batch_size,
        rollout_indices=list(range(len(lengths))),
    )


KEPT = "this step keeps the trainer's own layout: "


def failing(
    trainer: str,
    logged: Logged,
    caplog: pytest.LogCaptureFixture,
    samples: list[Sample],
    lengths: list[int] | None = None,
    **changes: Any,
) -> tuple[list[str], dict[str, float]]:
    """Warnings and numbers of a step that has to run on the trainer's own schedule, itself."""
    schedules: list[Schedule] = []

    def own(
        args: Any,
        train_parallel_config: Any,
        total_lengths: Any,
        *,
        global_batch_size: int,
        rollout_indices: Any,
    ) -> Schedule:
        schedules.append(
            next_fit(
                args, train_parallel_config, total_lengths,
                global_batch_size=global_batch_size, rollout_indices=rollout_indices,
            )
        )  # fmt: skip
        return schedules[-1]

    args = arguments(routepack=settings_of("pack", **changes.pop("settings", {})), **changes)
    with caplog.at_level(logging.WARNING, "routepack"):
        schedule = process(trainer, own).rollout(args, samples, lengths)
    assert schedule is schedules[0]
    return [record.getMessage() for record in caplog.records], dict(
        logged.entries[0][1] if logged.entries else {}
    )
