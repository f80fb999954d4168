"""Plans of small instances: what the tests of the planner share."""

from __future__ import annotations

from typing import Any

import numpy as np

from routepack import (
    AttentionStage,
    Budget,
    CostModel,
    Plan,
    Topology,
)
from routepack import plan as make
from routepack.placement import identity
from strategies import Instance, random_window


def plan_of(instance: Instance, **options: Any) -> Plan:
    """A plan of the instance; few evaluations unless told otherwise."""
    options = {"budget": Budget(evaluations=400), "threads": 1} | options
    return make(
        instance.window, instance.topology, token_cap=instance.token_cap,
        cost_model=instance.cost_model, **options,
    )  # fmt: skip


def example(samples: int = 40) -> Instance:
    """Forty samples with hot experts, D = 4 in two shards, R = 4, a cap that fills three rows."""
    rng = np.random.default_rng(11)
    window = random_window(rng, rng.integers(10, 100, samples), 2, 8, 2, skew=1.0)
    topology = Topology.of(dp=4, ep=4, edp=2)
    cap = int(window.lengths_S.sum() / 12 * 1.1)
    model = CostModel((AttentionStage("full", 6.0, 4.0),), 3.0)
    cells = (np.arange(samples) % 12).astype(np.int32)
    return Instance(window, topology, model, cap, 3, cells, identity(2, 8))


# Reproducibility
