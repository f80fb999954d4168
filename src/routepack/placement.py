"""Where each expert lives: LPT on the aggregate demand, swap descent, fewest moves (design 3.1)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from routepack.budget import Phase
from routepack.kernels.placing import longest_first, swap_descent
from routepack.kernels.rng import stream_key
from routepack.kernels.rowaware import anneal_layers, group_demand

PLACEMENT_START = 0.2  # starting temperature, in mean excesses of a busiest rank over the mean
PLACEMENT_COOLING = 60.0


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


def row_aware_placement(
    demand_SLE: NDArray[Any],
    group_S: NDArray[np.int32],
    placement_LE: NDArray[np.int32],
    ranks: int,
    phase: Phase,
    stream: tuple[int, ...],
    pool: ThreadPoolExecutor,
) -> NDArray[np.int32]:
    """Ranks [L, E] that lower the busiest ranks of the (row, shard) groups of a layout (design 6.1).

    Given the layout, layers are independent: each anneals swaps of experts under the sum over groups
    of the busiest rank. Starts from `placement_LE`; a layer is never worse after than before.
    """
    layers, experts = placement_LE.shape
    groups = int(group_S.max()) + 1
    demand_BLE = np.zeros((groups, layers, experts), np.int32)
    group_demand(demand_SLE, group_S, demand_BLE)
    demand_LEB = np.ascontiguousarray(demand_BLE.transpose(1, 2, 0))
    rank_LE = (placement_LE // (experts // ranks)).astype(np.int32)
    if ranks == 1 or groups == 0:
        return rank_LE
    busiest_L = np.zeros(layers, np.int64)
    wave = 0
    # With a deadline, a short first wave measures the speed; a wave restarts from the best.
    while (proposals := phase.next_step(layers, 1)) > 0 and wave < 2:
        key = stream_key(*stream, wave)

        def refine(layer: int, key: np.uint64 = key, proposals: int = proposals) -> None:
            anneal_layers(
                demand_LEB, ranks, rank_LE, layer, layer + 1, proposals,
                PLACEMENT_START, PLACEMENT_COOLING, key, busiest_L,
            )  # fmt: skip

        list(pool.map(refine, range(layers)))
        phase.spend(proposals * layers)
        wave += 1
    return rank_LE


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
