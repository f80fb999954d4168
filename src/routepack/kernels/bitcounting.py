"""Counting routes of 8 one-byte ids a row without a memory access for each id.

A row (one token at one layer) is read as one 64-bit word and becomes two words with a bit for each
of 128 experts. Adding up such bits over tokens is a positional population count: full adders work
on 64 counters at once, the n-th bits of all of them in one word (Klarqvist, Muła and Lemire,
"Efficient computation of positional population counts using SIMD instructions", arXiv 1911.02696).
Layers are the vector lanes. An id that repeats sets no further bit, and one out of range none at
all: a layer's counts then add up to less than its rows, which is the only check that is needed.

One array holds all bits, in rows of LANES, so that the compiler knows what overlaps what.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routepack.kernels.jit import called, inlined, kernel

TOP_K = 8
MAX_ROWS = 2**16 - 1  # of a sample: what its counts hold
EXPERTS = 256  # at most: what one byte tells apart
PART = 128  # experts at a time
LANES = 64  # layers at a time
GROUP = 8  # tokens whose bits are added in one go
PLANES = 8  # bits of a counter
FLUSH = 248  # tokens, whole groups, that the counters hold
HALF = (GROUP + PLANES) * LANES  # bits of 64 experts: those of GROUP tokens, then the counters

U64 = np.uint64


class BitScratch(NamedTuple):
    """Working memory of one thread; holds nothing between calls."""

    bits: NDArray[np.uint64]  # [2 * HALF]
    counts: NDArray[np.uint64]  # [LANES * PART / 8] one byte for each lane and expert
    totals: NDArray[np.int64]  # [LANES]


def make_bit_scratch() -> BitScratch:
    """Scratch for `count_words`."""
    return BitScratch(
        np.zeros(2 * HALF, np.uint64),
        np.zeros(LANES * PART // 8, np.uint64),
        np.zeros(LANES, np.int64),
    )


def as_words(ids_NLK: NDArray[Any]) -> NDArray[np.uint64] | None:
    """Routes of a sample, in C order, for `count_words`; None if they are not for it.

    They are copied only if unaligned.
    """
    rows, _, top_k = ids_NLK.shape
    if top_k != TOP_K or ids_NLK.dtype != np.uint8 or rows > MAX_ROWS:
        return None
    words_X = ids_NLK.reshape(-1).view(np.uint64)
    return words_X if words_X.flags.aligned else words_X.copy()


@inlined
def _bits_of(word: Any) -> Any:
    """The 8 ids of a row as bits: those of ids 0..63, those of 64..127."""
    low, high = U64(0), U64(0)
    for k in range(TOP_K):
        # A shift by 64 or more is undefined; compilers know the select as one vector instruction.
        own = (word >> U64(8 * k)) & U64(255)
        low |= (U64(1) << own) if own < U64(64) else U64(0)
        above = own ^ U64(64)
        high |= (U64(1) << above) if above < U64(64) else U64(0)
    return low, high


@inlined
def _add(a: Any, b: Any, c: Any) -> Any:
    """Full adders: (carries, sums)."""
    differ = a ^ b
    return (a & b) | (differ & c), differ ^ c


@inlined
def _add_group(bits: Any, at: Any) -> None:
    """Add the bits of GROUP tokens to the counters, of one lane and 64 experts from `at` on."""
    ones, twos = bits[at + U64(8 * LANES)], bits[at + U64(9 * LANES)]
    two_1, ones = _add(ones, bits[at], bits[at + U64(LANES)])
    two_2, ones = _add(ones, bits[at + U64(2 * LANES)], bits[at + U64(3 * LANES)])
    four_1, twos = _add(twos, two_1, two_2)
    two_1, ones = _add(ones, bits[at + U64(4 * LANES)], bits[at + U64(5 * LANES)])
    two_2, ones = _add(ones, bits[at + U64(6 * LANES)], bits[at + U64(7 * LANES)])
    four_2, twos = _add(twos, two_1, two_2)
    carry, fours = _add(bits[at + U64(10 * LANES)], four_1, four_2)
    bits[at + U64(8 * LANES)] = ones
    bits[at + U64(9 * LANES)] = twos
    bits[at + U64(10 * LANES)] = fours
    for plane in range(11, 16):
        old = bits[at + U64(plane * LANES)]
        bits[at + U64(plane * LANES)] = old ^ carry
        carry &= old


@called
def _add_tokens(
    words_X: NDArray[np.uint64],
    tokens: int,
    layers: int,
    lanes: int,
    flip: Any,
    bits: NDArray[np.uint64],
) -> None:
    """Add the rows of `lanes` layers and up to FLUSH tokens; `flip` changes a bit of every id."""
    for half in range(2):
        bits[half * HALF + GROUP * LANES : (half + 1) * HALF] = 0
    for first in range(0, tokens, GROUP):
        for j in range(GROUP):
            low, high = bits[j * LANES :][:lanes], bits[HALF + j * LANES :][:lanes]
            if first + j < tokens:
                row = words_X[(first + j) * layers :][:lanes]
                for lane in range(len(row)):
                    low[lane], high[lane] = _bits_of(row[lane] ^ flip)
            else:
                low[:] = 0
                high[:] = 0
        for half in range(2):
            for lane in range(U64(lanes)):
                _add_group(bits, U64(half * HALF) + lane)


@called
def _read_counters(bits: NDArray[np.uint64], lanes: int, counts: NDArray[np.uint64]) -> None:
    """Counters to a byte for each lane and expert: transposed 8 x 8 bits, then 8 x 8 bytes."""
    for half in range(2):
        base = half * HALF + GROUP * LANES
        shift, distance, mask = 4, 4, U64(0x0F0F0F0F0F0F0F0F)
        for step in range(6):
            if step == 1:
                shift, distance, mask = 2, 2, U64(0x3333333333333333)
            elif step == 2:
                shift, distance, mask = 1, 1, U64(0x5555555555555555)
            elif step == 3:
                shift, distance, mask = 32, 4, U64(0x00000000FFFFFFFF)
            elif step == 4:
                shift, distance, mask = 16, 2, U64(0x0000FFFF0000FFFF)
            elif step == 5:
                shift, distance, mask = 8, 1, U64(0x00FF00FF00FF00FF)
            for i in range(PLANES):
                if i & distance == 0:
                    one = bits[base + i * LANES :][:lanes]
                    other = bits[base + (i + distance) * LANES :][:lanes]
                    for lane in range(lanes):
                        moved = ((one[lane] >> U64(shift)) ^ other[lane]) & mask
                        one[lane] ^= moved << U64(shift)
                        other[lane] ^= moved
        for i in range(PLANES):
            for lane in range(lanes):
                counts[lane * (PART // 8) + half * 8 + i] = bits[base + i * LANES + lane]


@kernel(
    "b1(Array(uint64, 1, 'C', readonly=True), uint16[:, ::1], uint64[::1], uint64[::1], i8[::1])",
    allocates=False,
)
def count_words(
    words_X: NDArray[np.uint64],
    demand_LE: NDArray[np.uint16],
    bits: NDArray[np.uint64],
    counts: NDArray[np.uint64],
    totals: NDArray[np.int64],
) -> bool:
    """Add the routes of a sample to `demand_LE`, of at most EXPERTS experts.

    words_X     uint8 routes [N, L, TOP_K] of up to MAX_ROWS token rows, see `as_words`
    bits, ...   a BitScratch

    Returns False where an id is out of range or repeats within its row; `demand_LE` is then of no
    use, and `counting.count_block` says which id it is.
    """
    layers, experts = demand_LE.shape
    count_bytes = counts.view(np.uint8)
    rows = words_X.size // layers
    for start in range(0, rows, FLUSH):
        tokens = min(FLUSH, rows - start)
        for layer in range(0, layers, LANES):
            lanes = min(LANES, layers - layer)
            # Whole vectors, also where they take in words of the next token: those are ignored.
            width = (lanes + 3) // 4 * 4
            words = words_X[start * layers + layer :]
            totals[:lanes] = 0
            for part in range(0, experts, PART):
                own = min(PART, experts - part)
                flip = U64(part) * U64(0x0101010101010101)
                _add_tokens(words, tokens, layers, width, flip, bits)
                _read_counters(bits, width, counts)
                for lane in range(lanes):
                    slab = demand_LE[layer + lane, part:][:own]
                    found = count_bytes[lane * PART :][:own]
                    total = 0
                    for e in range(own):
                        slab[e] += found[e]
                        total += found[e]
                    totals[lane] += total
            for lane in range(lanes):
                if totals[lane] != TOP_K * tokens:
                    return False
    return True
