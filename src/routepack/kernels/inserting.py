"""Kernels that make a layout under a trainer's requirements: greedy insertion, then repair.

Legend: S samples, c cells, d DP ranks (cells of a row). A sample of lane n goes into cells of lane
n only. `quota` samples are due on every DP rank, -1: any number.
"""

from __future__ import annotations

import numpy as np

from routepack.kernels.jit import inlined, kernel
from routepack.kernels.rng import draw, high, low

COUNT_WEIGHT = 8  # a sample too many weighs as much as 1 / COUNT_WEIGHT of a cap of tokens


@kernel(
    "int32[::1](int64[::1], int64[::1], float64[::1], int64[::1], int64[::1], int64, int64, int64,"
    " int64, boolean)"
)
def insert(order_S, length_S, work_S, lane_S, lane_c, ranks, cap, most, quota, fullest):  # type: ignore[no-untyped-def]
    """Each sample, in order, into the lightest cell that may take it, or the fullest with room.

    Where none may, into the one with the fewest tokens: for `repair`.
    """
    cells = len(lane_c)
    tokens_c = np.zeros(cells, np.int64)
    count_c = np.zeros(cells, np.int64)
    count_d = np.zeros(ranks, np.int64)
    work_c = np.zeros(cells)
    cell_S = np.full(len(order_S), -1, np.int32)
    for s in order_S:
        best, best_fits = -1, False
        for c in range(cells):
            if lane_c[c] != lane_S[s]:
                continue
            fits = tokens_c[c] + length_S[s] <= cap and count_c[c] < most
            fits = fits and (quota < 0 or count_d[c % ranks] < quota)
            if best < 0 or fits > best_fits:
                best, best_fits = c, fits
            elif fits == best_fits:
                if not fits or fullest:
                    less = tokens_c[c] < tokens_c[best]
                    less = tokens_c[c] > tokens_c[best] if fits else less
                else:
                    less = work_c[c] < work_c[best]
                if less:
                    best = c
        if best < 0:
            continue
        cell_S[s] = best
        tokens_c[best] += length_S[s]
        count_c[best] += 1
        count_d[best % ranks] += 1
        work_c[best] += work_S[s]
    return cell_S


@inlined
def cell_wrong(tokens, count, cap, most, unit):  # type: ignore[no-untyped-def]
    return max(0, tokens - cap) + unit * (max(0, count - most) + (count == 0))


@inlined
def rank_wrong(count, quota, unit):  # type: ignore[no-untyped-def]
    return unit * abs(count - quota) if quota >= 0 else 0


@kernel(
    "int64(int32[::1], int64[::1], int64[::1], int64[::1], int64, int64, int64, int64, int64,"
    " uint64)"
)
def repair(cell_S, length_S, lane_S, lane_c, ranks, cap, most, quota, steps, key):  # type: ignore[no-untyped-def]
    """Relocate and swap samples inside their lanes until nothing is wrong; returns what still is.

    Moves that make nothing worse are made, so that plateaus are crossed. Needs complete layouts.
    """
    samples, cells = len(cell_S), len(lane_c)
    unit = max(1, cap // COUNT_WEIGHT)
    tokens_c = np.zeros(cells, np.int64)
    count_c = np.zeros(cells, np.int64)
    count_d = np.zeros(ranks, np.int64)
    for s in range(samples):
        tokens_c[cell_S[s]] += length_S[s]
        count_c[cell_S[s]] += 1
        count_d[cell_S[s] % ranks] += 1
    wrong = np.int64(0)
    for c in range(cells):
        wrong += cell_wrong(tokens_c[c], count_c[c], cap, most, unit)
    for d in range(ranks):
        wrong += rank_wrong(count_d[d], quota, unit)
    for n in range(steps):
        if wrong == 0:
            break
        bits = draw(key, np.uint64(2 * n))
        more = draw(key, np.uint64(2 * n + 1))
        i, j = high(bits, samples), low(bits, samples)
        x = np.int64(cell_S[i])
        swap = more & np.uint64(1) == np.uint64(0)
        y = np.int64(cell_S[j]) if swap else np.int64(low(bits, cells))
        if x == y or lane_c[x] != lane_c[y]:
            continue
        moved = length_S[i] - (length_S[j] if swap else 0)
        one = np.int64(0 if swap else 1)
        p, q = x % ranks, y % ranks
        before = cell_wrong(tokens_c[x], count_c[x], cap, most, unit)
        before += cell_wrong(tokens_c[y], count_c[y], cap, most, unit)
        after = cell_wrong(tokens_c[x] - moved, count_c[x] - one, cap, most, unit)
        after += cell_wrong(tokens_c[y] + moved, count_c[y] + one, cap, most, unit)
        if p != q:
            before += rank_wrong(count_d[p], quota, unit) + rank_wrong(count_d[q], quota, unit)
            after += rank_wrong(count_d[p] - one, quota, unit)
            after += rank_wrong(count_d[q] + one, quota, unit)
        if after > before:
            continue
        wrong += after - before
        tokens_c[x] -= moved
        tokens_c[y] += moved
        count_c[x] -= one
        count_c[y] += one
        count_d[p] -= one
        count_d[q] += one
        cell_S[i] = y
        if swap:
            cell_S[j] = x
    return wrong
