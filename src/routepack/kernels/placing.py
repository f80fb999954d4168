"""Kernels of the expert placement: demand on ranks, LPT, swap descent."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from routepack.kernels.jit import kernel

_READ_U16 = types.Array(types.uint16, 3, "C", readonly=True)
_READ_U32 = types.Array(types.uint32, 3, "C", readonly=True)


@kernel(
    types.void(_READ_U16, types.int32[:, ::1], types.int32[:, :, ::1]),
    types.void(_READ_U32, types.int32[:, ::1], types.int32[:, :, ::1]),
)
def _place(demand_SLE, rank_LE, placed_SRL):  # type: ignore[no-untyped-def]
    samples, layers, experts = demand_SLE.shape
    for s in range(samples):
        for layer in range(layers):
            for e in range(experts):
                placed_SRL[s, rank_LE[layer, e], layer] += demand_SLE[s, layer, e]


def place_demand(
    demand_SLE: NDArray[Any], rank_LE: NDArray[np.int32], ranks: int, load: Any
) -> NDArray[Any]:
    """Routed tokens of each sample on each EP rank [S+1, R, L]; the last sample is all zero."""
    samples, layers, _ = demand_SLE.shape
    placed_SRL = np.zeros((samples + 1, ranks, layers), np.int32)
    _place(demand_SLE, rank_LE, placed_SRL)
    return placed_SRL.astype(load, copy=False)


@kernel("void(int64[:,::1], int64, int32[:,::1])")
def longest_first(demand_LE, ranks, rank_LE):  # type: ignore[no-untyped-def]
    """LPT with E/R experts a rank: hottest expert first to the lightest rank with a free slot.

    Ties go to the lowest expert and the lowest rank.
    """
    layers, experts = demand_LE.shape
    per_rank = experts // ranks
    for layer in range(layers):
        order = np.argsort(-demand_LE[layer], kind="mergesort")
        load = np.zeros(ranks, np.int64)
        held = np.zeros(ranks, np.int64)
        for e in order:
            best = -1
            for r in range(ranks):
                if held[r] < per_rank and (best < 0 or load[r] < load[best]):
                    best = r
            rank_LE[layer, e] = best
            load[best] += demand_LE[layer, e]
            held[best] += 1


@kernel("void(int64[:,::1], int64, int32[:,::1])")
def swap_descent(demand_LE, ranks, rank_LE):  # type: ignore[no-untyped-def]
    """Swap an expert of the busiest rank with one elsewhere while that lowers the larger load.

    The best swap is taken each time (ties to the lowest experts); the busiest load never rises and,
    while several ranks are equally busy, their number falls, so it ends.
    """
    layers, experts = demand_LE.shape
    for layer in range(layers):
        demand_E, rank_E = demand_LE[layer], rank_LE[layer]
        load = np.zeros(ranks, np.int64)
        for e in range(experts):
            load[rank_E[e]] += demand_E[e]
        while True:
            top = 0
            for r in range(1, ranks):
                if load[r] > load[top]:
                    top = r
            best, best_a, best_b = load[top], -1, -1
            for a in range(experts):
                if rank_E[a] != top:
                    continue
                for b in range(experts):
                    moved = demand_E[a] - demand_E[b]
                    if rank_E[b] == top or moved <= 0:
                        continue
                    larger = max(load[top] - moved, load[rank_E[b]] + moved)
                    if larger < best:
                        best, best_a, best_b = larger, a, b
            if best_a < 0:
                break
            moved = demand_E[best_a] - demand_E[best_b]
            other = rank_E[best_b]
            load[top] -= moved
            load[other] += moved
            rank_E[best_a], rank_E[best_b] = other, top
