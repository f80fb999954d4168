"""Kernels that build a layout sample by sample."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from routepack.kernels.jit import inlined, kernel
from routepack.kernels.layout import Static, of_static, static_type


@kernel("int32[::1](int64[::1], int64[::1], float64[::1], int64, int64)")
def lightest_fit(order_S, length_S, work_S, cells, cap):  # type: ignore[no-untyped-def]
    """Each sample, in order, into the cell with the least work that has room; -1 where none has."""
    tokens_c = np.zeros(cells, np.int64)
    work_c = np.zeros(cells)
    cell_S = np.full(len(order_S), -1, np.int32)
    for s in order_S:
        best = -1
        for c in range(cells):
            if tokens_c[c] + length_S[s] <= cap and (best < 0 or work_c[c] < work_c[best]):
                best = c
        if best >= 0:
            cell_S[s] = best
            tokens_c[best] += length_S[s]
            work_c[best] += work_S[s]
    return cell_S


@inlined
def before(spread_n, x, y):  # type: ignore[no-untyped-def]
    """Whether node x comes before y: the larger spread, then the older."""
    return spread_n[x] > spread_n[y] or (spread_n[x] == spread_n[y] and x < y)


@inlined
def push(heap, size, node, spread_n):  # type: ignore[no-untyped-def]
    k = size
    while k > 0 and before(spread_n, node, heap[(k - 1) // 2]):
        heap[k] = heap[(k - 1) // 2]
        k = (k - 1) // 2
    heap[k] = node


@inlined
def pop(heap, size, spread_n):  # type: ignore[no-untyped-def]
    """The first node; `size` counts it."""
    first, last, k = heap[0], heap[size - 1], 0
    while 2 * k + 1 < size - 1:
        child = 2 * k + 1
        if child + 1 < size - 1 and before(spread_n, heap[child + 1], heap[child]):
            child += 1
        if not before(spread_n, heap[child], last):
            break
        heap[k] = heap[child]
        k = child
    heap[k] = last
    return first


@kernel("int32[::1](float64[::1], int64)")
def largest_differencing(work_S, parts):  # type: ignore[no-untyped-def]
    """Karmarkar and Karp's method: the part of each sample; parts by falling work.

    Partial partitions are merged two at a time, those of largest spread first, heaviest set with
    lightest set; ties as in a stable sort of the merge. A partition keeps the sets that hold a
    sample, each a chain of samples, in a stretch of an arena that is closed up when it is full: of
    all partitions there are never more sets than samples.
    """
    samples = len(work_S)
    nodes = 2 * samples - 1
    sum_a = np.empty(3 * samples)
    head_a, tail_a = np.empty(3 * samples, np.int32), np.empty(3 * samples, np.int32)
    next_S = np.full(samples, -1, np.int32)
    start_n, size_n = np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)
    spread_n, heap = np.zeros(nodes), np.empty(samples, np.int64)
    for s in range(samples):
        sum_a[s], head_a[s], tail_a[s] = work_S[s], s, s
        start_n[s], size_n[s] = s, 1
        spread_n[s] = work_S[s] if parts > 1 else 0.0
        push(heap, s, s, spread_n)
    used = samples
    for node in range(samples, nodes):
        held = nodes - node + 1  # partitions left
        left = pop(heap, held, spread_n)
        right = pop(heap, held - 1, spread_n)
        most, added = size_n[left], size_n[right]
        size = min(parts, most + added)
        if used + size > len(sum_a):
            used = 0
            for n in range(node):  # older nodes lie before younger ones
                for k in range(size_n[n]):
                    a = start_n[n] + k
                    sum_a[used], head_a[used], tail_a[used] = sum_a[a], head_a[a], tail_a[a]
                    used += 1
                start_n[n] = used - size_n[n]
        a, b, first = start_n[left], start_n[right], False
        if most == 1 and added > 1:  # the other way round, if no two sets weigh the same
            first = True
            for k in range(added - 1):
                first = first and sum_a[b + k] > sum_a[b + k + 1]
            if first:
                a, b, most, added = b, a, added, most
        for k in range(size):
            occupied = k < most
            sum_a[used + k] = sum_a[a + k] if occupied else 0.0
            head_a[used + k] = head_a[a + k] if occupied else -1
            tail_a[used + k] = tail_a[a + k] if occupied else -1
        for n in range(added):
            k = used + size - 1 - n
            sum_a[k] += sum_a[b + n]
            if head_a[k] >= 0:
                next_S[tail_a[k]] = head_a[b + n]
            else:
                head_a[k] = head_a[b + n]
            tail_a[k] = tail_a[b + n]
        if added == 1:
            k = used + size - 1
            total, head, tail = sum_a[k], head_a[k], tail_a[k]
            while k > used and (sum_a[k - 1] < total or (first and sum_a[k - 1] == total)):
                sum_a[k], head_a[k], tail_a[k] = sum_a[k - 1], head_a[k - 1], tail_a[k - 1]
                k -= 1
            sum_a[k], head_a[k], tail_a[k] = total, head, tail
        else:
            order = np.argsort(-sum_a[used : used + size], kind="mergesort") + used
            sum_a[used : used + size] = sum_a[order]
            head_a[used : used + size] = head_a[order]
            tail_a[used : used + size] = tail_a[order]
        start_n[node], size_n[node] = used, size
        size_n[left] = size_n[right] = 0
        least = sum_a[used + size - 1] if size == parts else 0.0
        spread_n[node] = sum_a[used] - least
        used += size
        push(heap, held - 2, node, spread_n)
    part_S = np.zeros(samples, np.int32)
    for k in range(size_n[nodes - 1]):
        s = head_a[start_n[nodes - 1] + k]
        while s >= 0:
            part_S[s] = k
            s = next_S[s]
    return part_S


def _least_increase(
    static: Static,
    order_S: NDArray[np.int64],
    cells: int,
    cell_S: NDArray[np.int32],
    load_BRL: NDArray[Any],
) -> None:
    """EDPAwarePair: each sample, in order, where its group's cost rises least; -1 where no room is.

    The rise is that of the stage maxima and of the busiest rank at every layer of the group.
    """
    stages, width = len(static.linear_T), static.width
    groups, ranks, layers = load_BRL.shape
    tokens_c = np.zeros(cells, np.int64)
    work_Tc = np.zeros((stages, cells))
    largest_BT = np.zeros((groups, stages))
    busiest_B = np.zeros(groups, np.int64)
    peak_L = np.empty(layers, load_BRL.dtype)
    cell_S[:] = -1
    for s in order_S:
        best, best_rise, best_busiest = -1, np.inf, np.int64(0)
        for b in range(groups):
            has_room = False
            for c in range(b * width, (b + 1) * width):
                has_room = has_room or tokens_c[c] + static.length_S[s] <= static.cap
            if not has_room:
                continue
            peak_L[:] = 0
            slow_R = static.slow_GR[static.shard_B[b]]
            for r in range(ranks):
                for layer in range(layers):
                    load = load_BRL[b, r, layer] + static.placed_SRL[s, r, layer]
                    peak_L[layer] = max(peak_L[layer], slow_R[r] * load)
            busiest = np.int64(0)
            for layer in range(layers):
                busiest += peak_L[layer]
            expert = static.expert * (busiest - busiest_B[b])
            for c in range(b * width, (b + 1) * width):
                if tokens_c[c] + static.length_S[s] > static.cap:
                    continue
                rise, slack = expert, 0.0
                for t in range(stages):
                    work = work_Tc[t, c] + static.slow_c[c] * (
                        static.linear_T[t] * static.length_S[s]
                        + static.quadratic_T[t] * static.tokens2_TS[t, s]
                    )
                    rise += max(0.0, work - largest_BT[b, t])
                    slack += work
                rise += 1e-6 * slack  # among equals the lightest cell
                if rise < best_rise:
                    best, best_rise, best_busiest = c, rise, busiest
        if best < 0:
            continue
        b = best // width
        cell_S[s] = best
        tokens_c[best] += static.length_S[s]
        busiest_B[b] = best_busiest
        for t in range(stages):
            work_Tc[t, best] += static.slow_c[best] * (
                static.linear_T[t] * static.length_S[s]
                + static.quadratic_T[t] * static.tokens2_TS[t, s]
            )
            largest_BT[b, t] = max(largest_BT[b, t], work_Tc[t, best])
        for r in range(ranks):
            for layer in range(layers):
                load_BRL[b, r, layer] += static.placed_SRL[s, r, layer]


least_increase = of_static(
    _least_increase,
    lambda load: types.void(
        static_type(load), types.int64[::1], types.int64, types.int32[::1], load[:, :, ::1]
    ),
    allocates=True,
)
