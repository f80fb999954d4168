"""Lower bounds on the slowest shard, proven for every layout and placement."""

from __future__ import annotations

import math

import numpy as np

from routepack.cost import Coefficients
from routepack.topology import Topology
from routepack.window import Window

# A score sums at most some thousands of float64 terms, each within a few units in the last place;
# this factor is far below that error's bound, so the rounded bound stays a bound.
SAFE = 1.0 - 2.0**-40


def analytic_bound(window: Window, topology: Topology, cost: Coefficients) -> float:
    """Balanced attention plus, per layer, the balanced load or the hottest expert (design 2).

    The slowest shard is at least the mean shard; a row's attention at least the mean of its shard's
    cells; a rank's load at least the mean rank and at least the expert that it owns.
    """
    tokens = int(window.lengths_S.sum())
    work = [
        float(a) * tokens + float(b) * int(q_S.sum())
        for a, b, q_S in zip(cost.linear_T, cost.quadratic_T, cost.quadratic_tokens_TS, strict=True)
    ]
    attention = math.fsum(work) / topology.ranks_per_shard
    balanced_L = -(-window.demand_LE.sum(axis=1) // topology.ep)
    hottest_L = window.demand_LE.max(axis=1)
    expert = cost.expert * int(np.maximum(balanced_L, hottest_L).sum())
    return (attention + expert) / topology.edp * SAFE
