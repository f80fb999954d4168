"""Bin packing kernels: samples into bins of at most `cap` tokens. No validation, no I/O.

Legend: S samples, T distinct lengths, W words of a bit set. `bin_of_S[i]` is the bin of sample i,
in opening order, or -1 where the sample was not placed.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from routepack.kernels.jit import kernel

Int32: TypeAlias = NDArray[np.int32]
Int64: TypeAlias = NDArray[np.int64]

# A bit set of sums has at most this many bits; above, lengths are rounded up to a coarser unit.
SUM_BITS = 1 << 17


@kernel("int32[::1](int64[::1], int64[::1], int64, int64)")
def first_fit(order_S: Int64, lengths_S: Int64, cap: int, max_bins: int) -> Int32:
    """First fit: each sample of `order_S`, in order, into the first bin with room."""
    bin_of_S = np.full(lengths_S.size, -1, np.int32)
    room_B = np.empty(min(max_bins, order_S.size), np.int64)
    opened = 0
    for i in order_S:
        length = lengths_S[i]
        b = 0
        while b < opened and room_B[b] < length:
            b += 1
        if b == opened:
            if opened == room_B.size:
                continue
            room_B[b] = cap
            opened += 1
        room_B[b] -= length
        bin_of_S[i] = b
    return bin_of_S


@kernel("int32[::1](int64[::1], int64[::1], int64, int64)")
def best_fit(order_S: Int64, lengths_S: Int64, cap: int, max_bins: int) -> Int32:
    """Best fit: each sample of `order_S`, in order, into the fullest bin with room (ties: first)."""
    bin_of_S = np.full(lengths_S.size, -1, np.int32)
    room_B = np.empty(min(max_bins, order_S.size), np.int64)
    opened = 0
    for i in order_S:
        length = lengths_S[i]
        best = -1
        for b in range(opened):
            if room_B[b] >= length and (best < 0 or room_B[b] < room_B[best]):
                best = b
        if best < 0:
            if opened == room_B.size:
                continue
            best = opened
            room_B[best] = cap
            opened += 1
        room_B[best] -= length
        bin_of_S[i] = best
    return bin_of_S


@kernel()
def _random_below(state: NDArray[np.uint64], bound: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014): a number in [0, bound); advances `state[0]`."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return np.int64((z >> np.uint64(33)) % np.uint64(bound))


@kernel()
def _fullest_subset(
    candidates_N: Int64, lengths_S: Int64, room: int, reach_NW: NDArray[np.uint64], taken_N: Int64
) -> int:
    """Subset of the candidates with the largest sum <= `room`; writes it to `taken_N`, returns its size.

    reach_NW[t] is the bit set of the sums of the first t candidates. Reading it back from the end
    takes a candidate only where it must, so earlier candidates are preferred.
    """
    unit = 1 + (room - 1) // SUM_BITS
    top = room // unit
    words = top // 64 + 1
    for w in range(words):
        reach_NW[0, w] = 0
    reach_NW[0, 0] = 1
    used = candidates_N.size
    for t in range(candidates_N.size):
        shift = -(-lengths_S[candidates_N[t]] // unit)
        far, near = shift // 64, np.uint64(shift % 64)
        for w in range(min(far, words)):
            reach_NW[t + 1, w] = reach_NW[t, w]
        if near == 0:
            for w in range(far, words):
                reach_NW[t + 1, w] = reach_NW[t, w] | reach_NW[t, w - far]
        elif far < words:
            back = np.uint64(64) - near
            reach_NW[t + 1, far] = reach_NW[t, far] | (reach_NW[t, 0] << near)
            for w in range(far + 1, words):
                moved = (reach_NW[t, w - far] << near) | (reach_NW[t, w - far - 1] >> back)
                reach_NW[t + 1, w] = reach_NW[t, w] | moved
        if reach_NW[t + 1, top // 64] >> np.uint64(top % 64) & np.uint64(1):
            used = t + 1
            break
    total = top
    while not reach_NW[used, total // 64] >> np.uint64(total % 64) & np.uint64(1):
        total -= 1
    count = 0
    for t in range(used, 0, -1):
        if not reach_NW[t - 1, total // 64] >> np.uint64(total % 64) & np.uint64(1):
            taken_N[count] = candidates_N[t - 1]
            count += 1
            total -= -(-lengths_S[candidates_N[t - 1]] // unit)
    return count


@kernel("int32[::1](int64[::1], int64[::1], int64, int64, int64, uint64)")
def fill_bins(
    order_S: Int64, lengths_S: Int64, cap: int, max_bins: int, width: int, seed: int
) -> Int32:
    """Subset-sum filling: each bin takes the longest sample left, then the fullest subset of the rest.

    The subset is drawn from `width` of the fitting samples, picked at random (all where there are
    no more). order_S: all samples by length descending. Gives up (leaving -1) as soon as the tokens
    left exceed the room in the bins left. After Gupta and Ho (1999), minimum bin slack.
    """
    bin_of_S = np.full(lengths_S.size, -1, np.int32)
    left_S = order_S.copy()
    left = order_S.size
    tokens = lengths_S.sum()
    picked_N = np.empty(max(left, 1), np.int64)
    taken_N = np.empty(width, np.int64)
    words = min(cap, SUM_BITS) // 64 + 1
    reach_NW = np.empty((width + 1, words), np.uint64)
    state = np.empty(1, np.uint64)
    state[0] = seed
    opened = 0
    while left > 0 and opened < max_bins and tokens <= cap * (max_bins - opened):
        bin_of_S[left_S[0]] = opened
        room = cap - lengths_S[left_S[0]]
        low, high = 1, left
        while low < high:
            mid = (low + high) // 2
            if lengths_S[left_S[mid]] <= room:
                high = mid
            else:
                low = mid + 1
        # selection sampling (Knuth, algorithm S) keeps the descending order
        count = min(left - low, width)
        kept = 0
        for p in range(low, left):
            if kept == count:
                break
            if _random_below(state, left - p) < count - kept:
                picked_N[kept] = left_S[p]
                kept += 1
        if kept > 0:
            taken = _fullest_subset(picked_N[:kept], lengths_S, room, reach_NW, taken_N)
            for t in range(taken):
                bin_of_S[taken_N[t]] = opened
                room -= lengths_S[taken_N[t]]
        tokens -= cap - room
        kept = 0
        for p in range(left):
            if bin_of_S[left_S[p]] < 0:
                left_S[kept] = left_S[p]
                kept += 1
        left = kept
        opened += 1
    return bin_of_S
