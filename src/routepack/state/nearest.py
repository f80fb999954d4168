"""The placement that moves least, where ranks are interchangeable (numpy only).

Shapes: L MoE layers, E experts per layer, R EP ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linear_sum_assignment

from routepack.errors import InputError
from routepack.state.rounds import checked_pair


def nearest(
    new: ArrayLike, current: ArrayLike, ranks: int, node_of_rank: Sequence[int] | None = None
) -> NDArray[np.int32]:
    """The placement [L, E] that groups experts as `new` does, and moves least from `current`.

    For ranks that are interchangeable: which rank holds which group of experts is chosen so that
    the fewest experts change rank and, among those choices, the fewest leave their node
    (`node_of_rank` [R]). An expert that stays on its rank keeps its slot; the others take the free
    slots in ascending order. Raises InputError.
    """
    current_LE, new_LE = checked_pair(current, new, ranks)
    layers, experts = current_LE.shape
    node_R = np.arange(ranks) if node_of_rank is None else np.asarray(node_of_rank)
    if node_R.shape != (ranks,):
        raise InputError.at("node_of_rank.shape", node_R.shape, f"({ranks},)")
    alike_RR = (node_R[:, None] == node_R[None, :]).astype(np.int64)
    per_rank = experts // ranks
    result_LE = np.empty_like(current_LE)
    for layer in range(layers):
        part_E, rank_E = new_LE[layer] // per_rank, current_LE[layer] // per_rank
        stay_RR = np.bincount(part_E * ranks + rank_E, minlength=ranks * ranks)
        stay_RR = stay_RR.reshape(ranks, ranks)
        # A whole layer that stays inside nodes weighs less than one expert that stays put.
        worth_RR = stay_RR * (experts + 1) + stay_RR @ alike_RR
        _, name_R = linear_sum_assignment(worth_RR, maximize=True)
        named_E = name_R[part_E]
        stays_E = named_E == rank_E
        movers = np.flatnonzero(~stays_E)
        movers = movers[np.argsort(named_E[movers], kind="stable")]
        result_LE[layer] = np.where(stays_E, current_LE[layer], -1)
        result_LE[layer, movers] = np.sort(current_LE[layer, ~stays_E])
    return result_LE
