"""Lower bounds on the slowest shard, proven for every layout and every placement."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from routepack.attention_bounds import attention_lift
from routepack.cost import Coefficients
from routepack.topology import Topology
from routepack.window import Window

# A score sums at most some thousands of float64 terms, each within a few units in the last place;
# this factor is far below that error's bound, so the rounded bound stays a bound.
SAFE = 1.0 - 2.0**-40


def best_bound(
    window: Window, topology: Topology, cost: Coefficients, token_cap: int, rows: int
) -> tuple[float, str]:
    """The best of the bounds below and its name: what lifts it above the analytic bound.

    Holds for every placement and every layout of exactly `rows` rows of D non-empty cells within
    the cap, and says nothing of layouts of other rows. Where ranks are not equally fast, the bounds
    are those of ranks all as fast as the fastest, or the one that splits work by speed.
    """
    by_speed, cost = _split_by_speed(window, topology, cost), cost.at_least
    lift = attention_lift_of_stages(window, topology, cost, token_cap, rows)
    balanced_L = _balanced_L(window, topology)
    floor_L = placement_floor_L(window.demand_LE, topology.ep)
    placement = cost.expert > 0 and int(floor_L.sum()) > int(balanced_L.sum())
    names = [name for name, lifts in (("attention", lift > 0), ("placement", placement)) if lifts]
    bound = _combine(window, topology, cost, floor_L if placement else balanced_L, lift)
    if by_speed > bound:
        return by_speed, "split by speed"
    return bound, f"{' and '.join(names)} floor{'s' * (len(names) > 1)}" if names else "analytic"


def analytic_bound(window: Window, topology: Topology, cost: Coefficients) -> float:
    """Balanced attention plus, per layer, the balanced load or the hottest expert (design 2).

    The slowest shard is at least the mean shard; a row's attention at least the mean of its shard's
    cells; a rank's load at least the mean rank and at least the expert that it owns. Holds for
    layouts of any rows, within a cap or not.
    """
    cost = cost.at_least
    return _combine(window, topology, cost, _balanced_L(window, topology))


def attention_lift_of_stages(
    window: Window, topology: Topology, cost: Coefficients, token_cap: int, rows: int
) -> float:
    """Attention of all shards and rows above the balanced one, at least (attention_bounds.py)."""
    cells = rows * topology.dp
    return math.fsum(
        attention_lift(
            window.lengths_S,
            a * window.lengths_S + b * q_S,
            token_cap,
            cells,
            topology.ranks_per_shard,
        )
        for a, b, q_S in zip(cost.linear_T, cost.quadratic_T, cost.quadratic_tokens_TS, strict=True)
    )


def placement_floor_L(demand_LE: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """Routed tokens of the busiest rank under any placement, per layer: balance and pigeonholes.

    Every rank holds n = E/R experts, so r ranks with the k hottest hold beside them at least the
    r*n - k coolest; the busiest of them has at least their mean.

    1. Let the k hottest lie on r <= k ranks. r = k gives the floor. A smaller r drops the hottest
       of the k*n - k coolest; if that lowers the mean, one of them is above it, and so are all the
       experts that are neither hottest nor coolest: the floor for r = k is then no more than
       balance. With k = 1 this is the hottest expert in the company of the coolest.
    2. Of the k*R + 1 hottest some rank holds k + 1, at least the coolest k + 1 of them.
    """
    experts = demand_LE.shape[1]
    per_rank = experts // ranks
    sums_LE = np.cumsum(-np.sort(-demand_LE, axis=1), axis=1)
    sums_LE = np.pad(sums_LE, ((0, 0), (1, 0)))  # of the e hottest
    total_L = sums_LE[:, -1]
    floor_L = -(-total_L // ranks)
    for k in range(1, ranks):
        cool_L = total_L - sums_LE[:, experts - k * (per_rank - 1)]
        floor_L = np.maximum(floor_L, -(-(sums_LE[:, k] + cool_L) // k))
    for k in range(1, per_rank):
        hot_L = sums_LE[:, k * ranks + 1] - sums_LE[:, k * ranks - k]
        cool_L = total_L - sums_LE[:, experts - (per_rank - k - 1)]
        floor_L = np.maximum(floor_L, hot_L + cool_L)
    return np.asarray(floor_L)


def _balanced_L(window: Window, topology: Topology) -> NDArray[np.int64]:
    """Routed tokens of a layer's busiest rank: at least the mean, and at least one expert's."""
    balanced_L = -(-window.demand_LE.sum(axis=1) // topology.ep)
    return np.asarray(np.maximum(balanced_L, window.demand_LE.max(axis=1)))


def _combine(
    window: Window,
    topology: Topology,
    cost: Coefficients,
    busiest_L: NDArray[np.int64],
    lift: float = 0.0,
) -> float:
    """The mean shard's cost: balanced attention and `lift`, busiest_L on a rank of each layer."""
    tokens = int(window.lengths_S.sum())
    work = [
        float(a) * tokens + float(b) * int(q_S.sum())
        for a, b, q_S in zip(cost.linear_T, cost.quadratic_T, cost.quadratic_tokens_TS, strict=True)
    ]
    attention = math.fsum(work) / topology.ranks_per_shard + lift
    return (attention + cost.expert * int(busiest_L.sum())) / topology.edp * SAFE


def _split_by_speed(window: Window, topology: Topology, cost: Coefficients) -> float:
    """The bound of work that is split over ranks as they are fast; 0 where all are.

    Ranks that take slow_r times as long and finish together share work w in w / sum(1 / slow_r). A
    shard g does a share of all attention and of all routed tokens, at prices a_g and e_g; whatever
    the shares, the slowest shard costs at least sum_g h_g U_g for any h that sums to 1, so at least
    min_g(h_g a_g) of the one and min_g(h_g e_g) of the other; and at a layer at least what a rank
    takes for its E/R experts, were they the coolest. Tried are the h that level attention, the h
    that level routed tokens, and equal ones.
    """
    if cost.ranks_alike:
        return 0.0
    groups = [list(group) for group in topology.groups]
    attention_G = np.array([1.0 / (1.0 / cost.slow_D[group]).sum() for group in groups])
    expert_G = 1.0 / (1.0 / cost.slow_GR).sum(axis=1)
    tokens = int(window.lengths_S.sum())
    work = math.fsum(
        float(a) * tokens + float(b) * int(q_S.sum())
        for a, b, q_S in zip(cost.linear_T, cost.quadratic_T, cost.quadratic_tokens_TS, strict=True)
    )
    routed_L = window.demand_LE.sum(axis=1)
    coolest_L = np.sort(window.demand_LE, axis=1)[:, : window.experts // topology.ep].sum(axis=1)
    bound = 0.0
    for h_G in (1.0 / attention_G, 1.0 / expert_G, np.ones(topology.edp)):
        h_G = h_G / h_G.sum()
        held = float((h_G[:, None] * cost.slow_GR).min(axis=0).max())
        busiest_L = np.maximum(routed_L * (h_G * expert_G).min(), coolest_L * held)
        least = work * float((h_G * attention_G).min()) + cost.expert * math.fsum(busiest_L)
        bound = max(bound, least)
    return bound * SAFE
