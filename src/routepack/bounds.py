"""Lower bounds on the slowest shard, proven for every layout and every placement."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from routepack.cost import Coefficients
from routepack.topology import Topology
from routepack.window import Window

# A score sums at most some thousands of float64 terms, each within a few units in the last place;
# this factor is far below that error's bound, so the rounded bound stays a bound.
SAFE = 1.0 - 2.0**-40


def best_bound(window: Window, topology: Topology, cost: Coefficients) -> tuple[float, str]:
    """The best of the bounds below and its name; ties go to the simpler one."""
    analytic = analytic_bound(window, topology, cost)
    floor_L = placement_floor_L(window.demand_LE, topology.ep)
    floor = _combine(window, topology, cost, floor_L)
    return (floor, "placement floor") if floor > analytic else (analytic, "analytic")


def analytic_bound(window: Window, topology: Topology, cost: Coefficients) -> float:
    """Balanced attention plus, per layer, the balanced load or the hottest expert (design 2).

    The slowest shard is at least the mean shard; a row's attention at least the mean of its shard's
    cells; a rank's load at least the mean rank and at least the expert that it owns.
    """
    balanced_L = -(-window.demand_LE.sum(axis=1) // topology.ep)
    hottest_L = window.demand_LE.max(axis=1)
    return _combine(window, topology, cost, np.maximum(balanced_L, hottest_L))


def placement_floor_L(demand_LE: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """Routed tokens of the busiest rank under any placement, per layer: balance and pigeonholes.

    Every rank holds n = E/R experts. Of the k*R + 1 hottest experts some rank holds k + 1, so at
    least the k + 1 coolest of those, and beside them at least the n - k - 1 coolest of all. With
    k = 0 this is the hottest expert in the company of the coolest.
    """
    experts = demand_LE.shape[1]
    per_rank = experts // ranks
    falling_LE = -np.sort(-demand_LE, axis=1)
    sums_LE = np.pad(np.cumsum(falling_LE, axis=1), ((0, 0), (1, 0)))  # of the e hottest
    total_L = sums_LE[:, -1]
    floor_L = -(-total_L // ranks)
    for k in range(per_rank):
        hot_L = sums_LE[:, k * ranks + 1] - sums_LE[:, k * ranks - k]
        cool_L = total_L - sums_LE[:, experts - (per_rank - k - 1)]
        floor_L = np.maximum(floor_L, hot_L + cool_L)
    return np.asarray(floor_L)


def _combine(
    window: Window, topology: Topology, cost: Coefficients, busiest_L: NDArray[np.int64]
) -> float:
    """The mean shard's cost: balanced attention, and at least busiest_L on a rank of each layer."""
    tokens = int(window.lengths_S.sum())
    work = [
        float(a) * tokens + float(b) * int(q_S.sum())
        for a, b, q_S in zip(cost.linear_T, cost.quadratic_T, cost.quadratic_tokens_TS, strict=True)
    ]
    attention = math.fsum(work) / topology.ranks_per_shard
    return (attention + cost.expert * int(busiest_L.sum())) / topology.edp * SAFE
