"""A rollout batch of several steps, planned or refused: what the tests of steps share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from routepack import (
    AttentionStage,
    Budget,
    CostModel,
    InputError,
    Pass,
    PlanSet,
    Topology,
    Window,
    plan_steps,
)
from strategies import random_window

BUDGET = Budget(evaluations=400)
FORWARD = CostModel((AttentionStage("full", 20.0, 7.0),), 0.4)
LOG_PROBS, REFERENCE = Pass("log-probs", 90, FORWARD), Pass("reference", 120, FORWARD)


def batch(samples: int = 24, **fields: Any) -> Window:
    """Samples of 5 to 30 tokens in prompts of two, tags by halves of every eight."""
    rng = np.random.default_rng(5)
    lengths_S = rng.integers(5, 31, samples)
    fields = {"group_S": np.arange(samples) // 2, "tag_S": np.arange(samples) // 4 % 2} | fields
    return random_window(rng, lengths_S, 2, 8, 2, **fields)


WINDOW, TOPOLOGY = batch(), Topology.of(dp=2, ep=4, edp=1)


def made(steps: Any = 3, window: Window = WINDOW, **options: Any) -> PlanSet:
    options = dict[str, Any]() | {"token_cap": 60, "budget": BUDGET, "threads": 1} | options
    return plan_steps(window, TOPOLOGY, steps=steps, **options)


def refusal(steps: Any = 3, window: Window = WINDOW, **options: Any) -> str:
    with pytest.raises(InputError) as error:
        made(steps, window, **options)
    return str(error.value)
