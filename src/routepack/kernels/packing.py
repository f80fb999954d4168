"""Bin packing kernels: samples into bins of at most `cap` tokens. No validation, no I/O.

Legend: S samples, B bins, N candidates for one bin, W 64-bit words of a bit set.
`bin_of_S[i]` is the bin of sample i, or -1 where the sample was not placed. Lengths are tokens.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from routepack.kernels.jit import inlined, kernel
from routepack.kernels.rng import draw, high, low

Int32: TypeAlias = NDArray[np.int32]
Int64: TypeAlias = NDArray[np.int64]
UInt64: TypeAlias = NDArray[np.uint64]
Key: TypeAlias = np.uint64  # of a random stream, or random bits

# A bit set of sums has at most about this many bits; for more room, lengths are rounded up to a
# coarser unit (still within the cap, a little less full).
SUM_BITS = 1 << 17
# Samples of the other bin that a step of `repack` looks at: pairs of them cost time squared.
SPAN = 8
ONE, TWO = np.uint64(1), np.uint64(2)


@kernel()
def _fit(order_S: Int64, lengths_S: Int64, cap: int, max_bins: int, fullest: bool) -> Int32:
    bin_of_S = np.full(lengths_S.size, -1, np.int32)
    room_B = np.empty(min(max_bins, order_S.size), np.int64)
    opened = 0
    for i in order_S:
        best = -1
        for b in range(opened):
            if room_B[b] >= lengths_S[i] and (best < 0 or room_B[b] < room_B[best]):
                best = b
                if not fullest:
                    break
        if best < 0 and opened < room_B.size:
            best = opened
            room_B[best] = cap
            opened += 1
        if best >= 0:
            room_B[best] -= lengths_S[i]
            bin_of_S[i] = best
    return bin_of_S


@kernel("int32[::1](int64[::1], int64[::1], int64, int64)")
def first_fit(order_S: Int64, lengths_S: Int64, cap: int, max_bins: int) -> Int32:
    """Each sample of `order_S`, in order, into the first bin with room; bins in opening order."""
    return _fit(order_S, lengths_S, cap, max_bins, False)


@kernel("int32[::1](int64[::1], int64[::1], int64, int64)")
def best_fit(order_S: Int64, lengths_S: Int64, cap: int, max_bins: int) -> Int32:
    """Each sample of `order_S`, in order, into the fullest bin with room (ties: the first)."""
    return _fit(order_S, lengths_S, cap, max_bins, True)


@inlined
def _has(words_W: UInt64, bit: int) -> bool:
    return bool((words_W[bit >> 6] >> np.uint64(bit & 63)) & ONE == ONE)


@kernel()
def _fullest_subset(
    candidates_N: Int64, lengths_S: Int64, room: int, reach_NW: UInt64, taken_N: Int64
) -> int:
    """Subset of the candidates with the largest sum <= room: fills `taken_N`, returns its size.

    reach_NW[t] is the bit set of the sums of the first t candidates. Reading it back from the end
    takes a candidate only where it must, so earlier candidates are preferred.
    """
    unit = 1 + room // SUM_BITS
    top = room // unit
    words = (top >> 6) + 1
    reach_NW[0, :words] = np.uint64(0)
    reach_NW[0, 0] = ONE
    used = candidates_N.size
    for t in range(candidates_N.size):
        shift = (lengths_S[candidates_N[t]] + unit - 1) // unit
        far, near = shift >> 6, np.uint64(shift & 63)
        old_W, new_W = reach_NW[t], reach_NW[t + 1]
        for w in range(words):
            new_W[w] = old_W[w]
        for w in range(far, words):
            new_W[w] |= old_W[w - far] << near
        if near > np.uint64(0):
            for w in range(far + 1, words):
                new_W[w] |= old_W[w - far - 1] >> (np.uint64(64) - near)
        if _has(new_W, top):
            used = t + 1
            break
    total = top
    while not _has(reach_NW[used], total):
        total -= 1
    count = 0
    for t in range(used, 0, -1):
        if not _has(reach_NW[t - 1], total):
            taken_N[count] = candidates_N[t - 1]
            count += 1
            total -= (lengths_S[candidates_N[t - 1]] + unit - 1) // unit
    return count


@kernel("int32[::1](int64[::1], int64, int64, int64, uint64)")
def fill_bins(lengths_S: Int64, cap: int, max_bins: int, width: int, key: Key) -> Int32:
    """Subset-sum filling: a bin takes the longest sample left, then the fullest subset of others.

    lengths_S descending. The subset is drawn from `width` of the fitting samples, picked at random
    (all where there are no more): fewer leave the flexible short samples for later bins. Gives up,
    leaving -1, once the tokens left exceed the room of the bins left.
    After minimum bin slack (Gupta and Ho, 1999), randomised.
    """
    bin_of_S = np.full(lengths_S.size, -1, np.int32)
    left_S = np.arange(lengths_S.size)
    left = lengths_S.size
    tokens = lengths_S.sum()
    picked_N = np.empty(width, np.int64)
    taken_N = np.empty(width, np.int64)
    reach_NW = np.empty((width + 1, (min(cap, SUM_BITS) >> 6) + 2), np.uint64)
    counter = np.uint64(0)
    opened = 0
    while left > 0 and opened < max_bins and tokens <= cap * (max_bins - opened):
        bin_of_S[left_S[0]] = opened
        room = cap - lengths_S[left_S[0]]
        p, end = 1, left  # p becomes the first that fits
        while p < end:
            mid = (p + end) // 2
            if lengths_S[left_S[mid]] <= room:
                end = mid
            else:
                p = mid + 1
        count = min(left - p, width)
        kept = 0
        while kept < count:  # selection sampling (Knuth, algorithm S): keeps the order
            counter += ONE
            if high(draw(key, counter), left - p) < count - kept:
                picked_N[kept] = left_S[p]
                kept += 1
            p += 1
        if count > 0:
            for t in range(_fullest_subset(picked_N[:count], lengths_S, room, reach_NW, taken_N)):
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


class _Bins(NamedTuple):
    """Contents of bins; `over_B` is the tokens over the cap, negative where there is room."""

    bin_of_S: Int32
    place_S: Int64  # of a sample in the contents of its bin
    content_BN: Int32
    count_B: Int64
    over_B: Int64


@kernel()
def _put(i: int, b: int, length: int, bins: _Bins) -> None:
    bins.bin_of_S[i] = b
    bins.place_S[i] = bins.count_B[b]
    bins.content_BN[b, bins.count_B[b]] = i
    bins.count_B[b] += 1
    bins.over_B[b] += length


@kernel()
def _move(i: int, to: int, length: int, bins: _Bins) -> None:
    b = bins.bin_of_S[i]
    bins.count_B[b] -= 1
    last = bins.content_BN[b, bins.count_B[b]]
    bins.content_BN[b, bins.place_S[i]] = last
    bins.place_S[last] = bins.place_S[i]
    bins.over_B[b] -= length
    _put(i, to, length, bins)


@kernel()
def _contents(start_S: Int32, lengths_S: Int64, cap: int, bins: int) -> _Bins:
    width = max(np.bincount(start_S).max(), 2 * (start_S.size // bins)) + 8
    filled = _Bins(
        np.empty_like(start_S),
        np.empty(start_S.size, np.int64),
        np.empty((bins, width), np.int32),
        np.zeros(bins, np.int64),
        np.full(bins, -cap, np.int64),
    )
    for i in range(start_S.size):
        _put(i, start_S[i], lengths_S[i], filled)
    return filled


@kernel()
def _best_answer(
    give: int, a: int, b: int, bits: Key, lengths_S: Int64, bins: _Bins
) -> tuple[int, int, int]:
    """At most two samples of b to exchange for `give` tokens of a: (tokens from a to b, j, j2).

    j2 is j for a single sample; both are -1 for none.
    """
    over_a, over_b = bins.over_B[a], bins.over_B[b]
    change, j, j2 = give, -1, -1
    least = max(over_a - give, 0) + max(over_b + give, 0)
    span = min(bins.count_B[b], SPAN)
    first = low(bits, bins.count_B[b] - span + 1)
    for p in range(first, first + span):
        one = lengths_S[bins.content_BN[b, p]]
        for p2 in range(p, first + span):
            net = give - one if p2 == p else give - one - lengths_S[bins.content_BN[b, p2]]
            over = max(over_a - net, 0) + max(over_b + net, 0)
            if over < least and net != 0:
                least, change, j, j2 = over, net, bins.content_BN[b, p], bins.content_BN[b, p2]
    return change, j, j2


@kernel("Tuple((int64, int32[::1]))(int32[::1], int64[::1], int64, int64, int64, float64, uint64)")
def repack(
    start_S: Int32, lengths_S: Int64, cap: int, bins: int, steps: int, hottest: float, key: Key
) -> tuple[int, Int32]:
    """Samples in `bins` bins, moved until no bin is over the cap: (tokens over, bin_of_S).

    lengths_S descending; start_S has a bin for each sample. Simulated annealing: a step takes one
    or two samples of a bin, mostly of one over the cap, and exchanges them for the best answer, at
    most two samples, of another; or one sample for one of nearly its length. A rise of r tokens
    over the cap is accepted with probability near 2^-(r / temperature); the temperature falls
    linearly from `hottest` to zero.
    """
    filled = _contents(start_S, lengths_S, cap, bins)
    bin_of_S, count_B, over_B = filled.bin_of_S, filled.count_B, filled.over_B
    width = filled.content_BN.shape[1]
    full_B = np.empty(bins, np.int64)  # the bins over the cap, in any order
    full, tokens_over = 0, 0
    for b in range(bins):
        if over_B[b] > 0:
            full_B[full] = b
            full += 1
            tokens_over += over_B[b]
    for step in range(steps):
        if full == 0:
            break
        counter = np.uint64(4 * step)
        which, first = draw(key, counter), draw(key, counter + ONE)
        second, chance = draw(key, counter + TWO), draw(key, counter + TWO + ONE)
        a = full_B[high(which, full)] if low(which, 8) > 0 else high(which, bins)
        if count_B[a] == 0 or count_B[a] + 2 > width:
            continue
        i = int(filled.content_BN[a, high(first, count_B[a])])
        if low(first, 4) == 0:
            j = i + low(second, 8) - 1  # mostly shorter ones
            if j < 0 or j >= lengths_S.size or bin_of_S[j] == a:
                continue
            i2, j2, b = i, j, int(bin_of_S[j])
            change = lengths_S[i] - lengths_S[j]
        else:
            b = low(second, bins)
            if b == a or count_B[b] + 2 > width:
                continue
            i2 = int(filled.content_BN[a, high(second, count_B[a])])
            give = lengths_S[i] if i2 == i else lengths_S[i] + lengths_S[i2]
            change, j, j2 = _best_answer(give, a, b, chance, lengths_S, filled)
        before = max(over_B[a], 0) + max(over_B[b], 0)
        rise = max(over_B[a] - change, 0) + max(over_B[b] + change, 0) - before
        left = 1.0 * rise
        while left > 0.0 and chance >> np.uint64(63) == ONE:
            left -= hottest * (1.0 - step / steps)
            chance <<= ONE
        if left > 0.0:
            continue
        was_a, was_b = over_B[a] > 0, over_B[b] > 0
        if j >= 0:
            _move(j, a, lengths_S[j], filled)
            if j2 != j:
                _move(j2, a, lengths_S[j2], filled)
        _move(i, b, lengths_S[i], filled)
        if i2 != i:
            _move(i2, b, lengths_S[i2], filled)
        tokens_over += rise
        for c, was in ((a, was_a), (b, was_b)):
            if over_B[c] > 0 and not was:
                full_B[full] = c
                full += 1
            elif over_B[c] <= 0 and was:
                at = 0
                while full_B[at] != c:
                    at += 1
                full -= 1
                full_B[at] = full_B[full]
    return tokens_over, bin_of_S
