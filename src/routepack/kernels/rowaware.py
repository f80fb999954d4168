"""Kernels of the row-aware placement: expert swaps annealed under the sum of busiest ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from routepack.kernels.jit import PerLoad, inlined
from routepack.kernels.layout import OVER_WEIGHT
from routepack.kernels.rng import draw, high, low, unit

_READ_U16 = types.Array(types.uint16, 3, "C", readonly=True)
_READ_U32 = types.Array(types.uint32, 3, "C", readonly=True)
OVER = np.int64(OVER_WEIGHT)
LARGEST = 3  # ranks kept per group: a swap changes two, the third is the maximum of the rest


def _group_demand(demand_BLE, demand_SLE, group_S):  # type: ignore[no-untyped-def]
    """Add the demand of each sample to its group's."""
    samples, layers, experts = demand_SLE.shape
    for s in range(samples):
        b = group_S[s]
        for layer in range(layers):
            for e in range(experts):
                demand_BLE[b, layer, e] += demand_SLE[s, layer, e]


@inlined
def charged(peak, limit):  # type: ignore[no-untyped-def]
    """The routed tokens of a busiest rank, and the charge for what is above the limit."""
    return np.int64(peak) + OVER * max(np.int64(0), peak - limit)


@inlined
def find_largest(load_RB, top_kB, rank_kB, limit):  # type: ignore[no-untyped-def]
    """The LARGEST ranks of every group, by load; ties to the lowest rank. Returns their cost."""
    ranks, groups = load_RB.shape
    top_kB[:] = -1
    rank_kB[:] = -1
    for r in range(ranks):
        for b in range(groups):
            load = load_RB[r, b]
            if load > top_kB[0, b]:
                top_kB[2, b], rank_kB[2, b] = top_kB[1, b], rank_kB[1, b]
                top_kB[1, b], rank_kB[1, b] = top_kB[0, b], rank_kB[0, b]
                top_kB[0, b], rank_kB[0, b] = load, r
            elif load > top_kB[1, b]:
                top_kB[2, b], rank_kB[2, b] = top_kB[1, b], rank_kB[1, b]
                top_kB[1, b], rank_kB[1, b] = load, r
            elif load > top_kB[2, b]:
                top_kB[2, b], rank_kB[2, b] = load, r
    total = np.int64(0)
    for b in range(groups):
        total += charged(top_kB[0, b], limit)
    return total


def _anneal_layers(  # type: ignore[no-untyped-def]
    demand_LEB,
    ranks,
    per_node,
    limit,
    uneven,
    slow_RB,
    rank_LE,
    first,
    last,
    proposals,
    start,
    cooling,
    key,
    busiest_L,
):
    """Anneal layers first..last-1 of rank_LE in place to the best found; busiest_L gets its cost.

    A proposal swaps an expert of the busiest rank of a random group with one of another rank of its
    node (of `per_node` ranks). Where ranks are uneven, a routed token counts as slow_RB says. The
    temperature falls from `start` to start / cooling, in mean
    excesses of a busiest rank.
    """
    _, experts, groups = demand_LEB.shape
    per_rank = experts // ranks
    load_RB = np.empty((ranks, groups), demand_LEB.dtype)
    top_kB = np.empty((LARGEST, groups), demand_LEB.dtype)
    rank_kB = np.empty((LARGEST, groups), np.int32)
    member_Ri = np.empty((ranks, per_rank), np.int32)
    held_R = np.empty(ranks, np.int64)
    best_E = np.empty(experts, np.int32)
    for layer in range(first, last):
        demand_EB, rank_E = demand_LEB[layer], rank_LE[layer]
        load_RB[:] = 0
        held_R[:] = 0
        total = np.int64(0)
        for e in range(experts):
            r = rank_E[e]
            member_Ri[r, held_R[r]] = e
            held_R[r] += 1
            for b in range(groups):
                load = slow_RB[r, b] * demand_EB[e, b]
                load_RB[r, b] += load
                total += load
        now = find_largest(load_RB, top_kB, rank_kB, limit)
        best = now
        best_E[:] = rank_E
        excess = max(1.0, (now - total / ranks) / groups)
        for n in range(proposals):
            at = np.uint64(3 * (np.int64(layer) * proposals + n))
            first_bits, second_bits = draw(key, at), draw(key, at + np.uint64(1))
            b = high(first_bits, groups)
            x = rank_kB[0, b]
            y = x // per_node * per_node + low(first_bits, per_node - 1)
            y += y >= x
            i, j = high(second_bits, per_rank), low(second_bits, per_rank)
            e, f = member_Ri[x, i], member_Ri[y, j]
            temperature = start * excess * cooling ** (-n / proposals)
            threshold = now - temperature * math.log(unit(draw(key, at + np.uint64(2))))
            after = np.int64(0)
            for b in range(groups):
                moved = demand_EB[e, b] - demand_EB[f, b]
                moved_x = slow_RB[x, b] * moved if uneven else moved
                moved_y = slow_RB[y, b] * moved if uneven else moved
                largest = max(load_RB[x, b] - moved_x, load_RB[y, b] + moved_y)
                rest = top_kB[2, b]
                if rank_kB[1, b] != x and rank_kB[1, b] != y:
                    rest = top_kB[1, b]
                if rank_kB[0, b] != x and rank_kB[0, b] != y:
                    rest = top_kB[0, b]
                after += charged(max(largest, rest), limit)
            if after > threshold:
                continue
            for b in range(groups):
                moved = demand_EB[e, b] - demand_EB[f, b]
                load_RB[x, b] -= slow_RB[x, b] * moved
                load_RB[y, b] += slow_RB[y, b] * moved
            member_Ri[x, i], member_Ri[y, j] = f, e
            rank_E[e], rank_E[f] = y, x
            now = find_largest(load_RB, top_kB, rank_kB, limit)
            if now < best:
                best = now
                best_E[:] = rank_E
        rank_E[:] = best_E
        busiest_L[layer] = best


group_demand_u16 = PerLoad(
    _group_demand, lambda load: types.void(load[:, :, ::1], _READ_U16, types.int32[::1])
)
group_demand_u32 = PerLoad(
    _group_demand, lambda load: types.void(load[:, :, ::1], _READ_U32, types.int32[::1])
)


def group_demand(
    demand_SLE: NDArray[Any], group_S: NDArray[np.int32], groups: int, load: Any
) -> NDArray[Any]:
    """Demand of each group [B, L, E], of dtype `load`."""
    demand_BLE = np.zeros((groups, *demand_SLE.shape[1:]), load)
    add_up = group_demand_u16 if demand_SLE.dtype == np.uint16 else group_demand_u32
    add_up(demand_BLE, demand_SLE, group_S)
    return demand_BLE


anneal_layers = PerLoad(
    _anneal_layers,
    lambda load: types.void(
        load[:, :, ::1], types.int64, types.int64, types.int64, types.boolean, load[:, ::1],
        types.int32[:, ::1], types.int64, types.int64, types.int64, types.float64, types.float64,
        types.uint64, types.int64[::1],
    ),
    allocates=True,
)  # fmt: skip
