"""Where each expert lives: LPT on the aggregate demand, swap descent, fewest moves (design 3.1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from routepack.kernels.placing import longest_first, swap_descent


def identity(layers: int, experts: int) -> NDArray[np.int32]:
    """The contiguous placement [L, E] that trainers start with: expert e in slot e."""
    return np.tile(np.arange(experts, dtype=np.int32), (layers, 1))


def balanced_placement(
    demand_LE: NDArray[np.int64], ranks: int, current_LE: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Slots [L, E] that balance the aggregate demand over `ranks` EP ranks, near `current_LE`."""
    rank_LE = np.empty(demand_LE.shape, np.int32)
    demand_LE = np.ascontiguousarray(demand_LE)
    longest_first(demand_LE, ranks, rank_LE)
    swap_descent(demand_LE, ranks, rank_LE)
    return relabel(rank_LE, ranks, current_LE)


def relabel(
    rank_LE: NDArray[np.int32], ranks: int, current_LE: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Slots for a partition of experts into ranks that moves as few experts as possible.

    Ranks are interchangeable, so each layer assigns the parts to ranks to keep most experts where
    they are. An expert that stays on its rank keeps its slot; the others take the free slots in
    ascending order.
    """
    layers, experts = rank_LE.shape
    per_rank = experts // ranks
    slots_LE = np.full((layers, experts), -1, np.int32)
    for layer in range(layers):
        current_E = current_LE[layer]
        stay_RR = np.zeros((ranks, ranks), np.int64)
        np.add.at(stay_RR, (rank_LE[layer], current_E // per_rank), 1)
        _, name_R = linear_sum_assignment(stay_RR, maximize=True)
        new_rank_E = name_R[rank_LE[layer]]
        stays_E = new_rank_E == current_E // per_rank
        slots_LE[layer, stays_E] = current_E[stays_E]
        free = np.ones(experts, bool)
        free[current_E[stays_E]] = False
        for r in range(ranks):
            movers = np.flatnonzero(~stays_E & (new_rank_E == r))
            slots = np.flatnonzero(free[r * per_rank : (r + 1) * per_rank]) + r * per_rank
            slots_LE[layer, movers] = slots
    return slots_LE
