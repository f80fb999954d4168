"""Kernels of the expert placement: demand on ranks, LPT, swap descent."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from routepack.kernels.jit import PerLoad, inlined, kernel

_READ_U16 = types.Array(types.uint16, 3, "C", readonly=True)
_READ_U32 = types.Array(types.uint32, 3, "C", readonly=True)
TILE = 16  # samples, and layers, that are transposed at once: each row is a cache line of loads


def _place(placed_SRL, placed_LRS, first, demand_SLE, expert_LRi):  # type: ignore[no-untyped-def]
    samples, layers, _ = demand_SLE.shape
    _, ranks, per_rank = expert_LRi.shape
    for start in range(0, samples, TILE):
        end = min(start + TILE, samples)
        for s in range(start, end):
            for layer in range(layers):
                demand_E = demand_SLE[s, layer]
                for r in range(ranks):
                    total = placed_SRL.dtype.type(0)
                    for i in range(per_rank):
                        total += demand_E[expert_LRi[layer, r, i]]  # unsigned: not from the end
                    placed_SRL[first + s, r, layer] = total
        for r in range(ranks):
            for lowest in range(0, layers, TILE):
                for s in range(start, end):
                    for layer in range(lowest, min(lowest + TILE, layers)):
                        placed_LRS[layer, r, first + s] = placed_SRL[first + s, r, layer]


_place_u16 = PerLoad(
    _place,
    lambda load: types.void(
        load[:, :, ::1], load[:, :, ::1], types.int64, _READ_U16, types.uint32[:, :, ::1]
    ),
)
_place_u32 = PerLoad(
    _place,
    lambda load: types.void(
        load[:, :, ::1], load[:, :, ::1], types.int64, _READ_U32, types.uint32[:, :, ::1]
    ),
)


def place_demand(
    placed_SRL: NDArray[Any],
    placed_LRS: NDArray[Any],
    first: int,
    demand_SLE: NDArray[Any],
    expert_LRi: NDArray[np.uint32],
) -> None:
    """Write the routed tokens of samples from `first` on, on each EP rank, to both arrays."""
    place = _place_u16 if demand_SLE.dtype == np.uint16 else _place_u32
    place(placed_SRL, placed_LRS, first, demand_SLE, expert_LRi)


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


@inlined
def pair_up(load_i, first_k, second_k):  # type: ignore[no-untyped-def]
    """Twice the load of i, and of j, for every pair [i, j]."""
    per_rank = len(load_i)
    for i in range(per_rank):
        for j in range(per_rank):
            first_k[i * per_rank + j] = 2 * load_i[i]
            second_k[i * per_rank + j] = 2 * load_i[j]


def _swap_descent(demand_LE, ranks, rank_LE):  # type: ignore[no-untyped-def]
    """Swap experts between two ranks while that brings their loads nearer to each other.

    Pair of ranks by pair of ranks, in order, the swap that leaves them nearest is made, until no
    pair has one. A swap that lowers the larger load of two ranks is one of these, so at the end
    none does. It ends, since the sum of squared loads falls each time.
    """
    layers, experts = demand_LE.shape
    per_rank = experts // ranks
    number = demand_LE.dtype.type
    load_R = np.zeros(ranks, demand_LE.dtype)
    member_Ri = np.zeros((ranks, per_rank), np.int64)
    load_Ri = np.zeros((ranks, per_rank), demand_LE.dtype)
    # Twice the loads of all pairs of experts [i, j]: one long loop looks at a pair of ranks.
    first_Rk = np.zeros((ranks, per_rank * per_rank), demand_LE.dtype)
    second_Rk = np.zeros((ranks, per_rank * per_rank), demand_LE.dtype)
    changed_R = np.zeros(ranks, np.int64)  # the visit at which a rank last changed
    seen_RR = np.zeros((ranks, ranks), np.int64)  # the visit that last left a pair as it was
    for layer in range(layers):
        demand_E, rank_E = demand_LE[layer], rank_LE[layer]
        load_R[:] = 0
        held_R = np.zeros(ranks, np.int64)
        for e in range(experts):
            r = rank_E[e]
            member_Ri[r, held_R[r]] = e
            load_Ri[r, held_R[r]] = demand_E[e]
            held_R[r] += 1
            load_R[r] += demand_E[e]
        for r in range(ranks):
            pair_up(load_Ri[r], first_Rk[r], second_Rk[r])
        settled = 0  # pairs in a row without a swap
        pairs = ranks * (ranks - 1) // 2
        visit = 0
        changed_R[:] = 0
        seen_RR[:] = -1
        while settled < pairs:
            for x in range(ranks):
                for y in range(x + 1, ranks):
                    settled += 1
                    visit += 1
                    if seen_RR[x, y] >= max(changed_R[x], changed_R[y]):
                        continue  # as it was when no swap was found
                    seen_RR[x, y] = visit
                    apart = number(load_R[x] - load_R[y])
                    best = number(abs(apart))
                    if best <= 1:
                        continue  # a swap leaves an odd difference odd, an even one even
                    for k in range(per_rank * per_rank):  # the least first, without branches
                        left = number(apart - number(first_Rk[x, k] - second_Rk[y, k]))
                        left = left if left >= 0 else number(-left)
                        best = left if left < best else best
                    if best == abs(apart):
                        continue
                    i = j = 0
                    while abs(apart - 2 * (load_Ri[x, i] - load_Ri[y, j])) != best:
                        j += 1
                        if j == per_rank:
                            i, j = i + 1, 0
                    moved = load_Ri[x, i] - load_Ri[y, j]
                    load_R[x] -= moved
                    load_R[y] += moved
                    load_Ri[x, i], load_Ri[y, j] = load_Ri[y, j], load_Ri[x, i]
                    member_Ri[x, i], member_Ri[y, j] = member_Ri[y, j], member_Ri[x, i]
                    for r in (x, y):
                        pair_up(load_Ri[r], first_Rk[r], second_Rk[r])
                    changed_R[x] = changed_R[y] = visit + 1
                    settled = 0
        for r in range(ranks):
            for i in range(per_rank):
                rank_E[member_Ri[r, i]] = r


_swap_descent_of = PerLoad(
    _swap_descent, lambda load: types.void(load[:, ::1], types.int64, types.int32[:, ::1]),
    allocates=True,
)  # fmt: skip


def swap_descent(demand_LE: NDArray[Any], ranks: int, rank_LE: NDArray[np.int32]) -> None:
    """Lower `rank_LE` in place, in 32 bits where four times a layer's demand fits them."""
    narrow = 4 * int(demand_LE.sum(axis=1).max(initial=0)) < 2**31
    number = np.int32 if narrow else np.int64
    _swap_descent_of(demand_LE.astype(number, copy=False), ranks, rank_LE)
