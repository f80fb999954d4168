"""Recorded routes to demand counts, checked in the same pass.

Ids are read in tiles of whole rows of K (one token at one layer), small enough for the L1 cache. A
tile is checked with vector compares, then counted into the sample's [L, E] slab, which is in L1
too. Consecutive increments never hit the same counter (distinct experts, then the next layer), so
they run at about one a cycle; checking with a bitmap of seen experts would double their work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routepack.kernels.jit import kernel

OK, OUT_OF_RANGE, REPEATED = 0, 1, 2
TILE_IDS = 512  # ids in a tile, about: with the masks of K = 8 that is 5 KB of the L1 cache
FUSED = 4  # distances compared in one sweep over a tile, to load and store `clash` less often


class Scratch(NamedTuple):
    """Working memory of one thread, for ids of one type and one K."""

    tile: NDArray[Any]  # [width + padding] ids at hand
    clash: NDArray[Any]  # [width + padding] nonzero bits where an id is out of range or repeats
    masks: NDArray[Any]  # [K + FUSED, width] masks[d, j]: ids j and j + d of a tile share a row


def make_scratch(top_k: int, id_type: np.dtype[Any]) -> Scratch:
    """Scratch for `count_block`; lengths are whole 64-bit words, so that words can be read too."""
    width = top_k * max(1, TILE_IDS // top_k)
    tile = np.zeros((width + top_k + FUSED + 7) // 8 * 8, id_type)
    clash = np.zeros((width + 7) // 8 * 8, id_type)
    masks = np.zeros((top_k + FUSED, width), id_type)  # from top_k on no row is shared
    for d in range(1, top_k):
        masks[d].reshape(-1, top_k)[:, : top_k - d] = 1
    return Scratch(tile, clash, masks)


@kernel(allocates=False)
def _mark_repeats(
    tile: NDArray[Any], clash: NDArray[Any], masks: NDArray[Any], top_k: int, width: int
) -> None:
    """Set `clash` where an id equals one of the following ids of its row."""
    for d in range(1, top_k, FUSED):
        # Slices, because LLVM vectorises only if it can prove that indices do not wrap around.
        ahead_1, ahead_2, ahead_3, ahead_4 = tile[d:], tile[d + 1 :], tile[d + 2 :], tile[d + 3 :]
        mask_1, mask_2, mask_3, mask_4 = masks[d], masks[d + 1], masks[d + 2], masks[d + 3]
        for j in range(width):
            own = tile[j]
            clash[j] |= (
                ((own == ahead_1[j]) & mask_1[j])
                | ((own == ahead_2[j]) & mask_2[j])
                | ((own == ahead_3[j]) & mask_3[j])
                | ((own == ahead_4[j]) & mask_4[j])
            )


@kernel(allocates=False)
def _mark_repeats_in_words(
    words: NDArray[np.uint64], clash_words: NDArray[np.uint64], rows: int
) -> None:
    """The same for rows of 8 bytes, each in one word: any two of them meet in 4 rotations."""
    lowest, highest = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
    for row in range(rows):
        word = words[row]
        zeros = np.uint64(0)
        for bits in (8, 16, 24, 32):
            differ = word ^ ((word << np.uint64(bits)) | (word >> np.uint64(64 - bits)))
            zeros |= (differ - lowest) & ~differ  # has a high bit set iff a byte is zero: a repeat
        clash_words[row] |= zeros & highest


@kernel(allocates=False)
def _add_rows(
    tile: NDArray[Any], slab: NDArray[Any], base: int, experts: int, top_k: int, rows: int
) -> int:
    """Count rows of K into a flat [L * E] slab from layer offset `base`; the offset after them."""
    for row in range(rows):
        for k in range(top_k):
            # Unsigned, or numba tests every index for being negative.
            slab[np.uintp(base) + np.uintp(tile[row * top_k + k])] += 1
        base += experts
        if base == slab.size:
            base = 0
    return base


@kernel(allocates=False)
def _first_violation(tile: NDArray[Any], top: int, top_k: int, width: int) -> tuple[int, int]:
    """(code, position in the tile) of the first id above `top` or equal to an earlier one."""
    for j in range(width):
        if tile[j] > top:
            return OUT_OF_RANGE, j
        for earlier in range(j - j % top_k, j):
            if tile[earlier] == tile[j]:
                return REPEATED, j
    return OK, 0


@kernel(
    *(
        f"Tuple((i8, i8))(Array({ids}, 1, 'C', readonly=True), Array(i8, 1, 'C', readonly=True),"
        f" i8, {ids}, {count}[:, :, ::1], {ids}[::1], {ids}[::1], {ids}[:, ::1])"
        for ids in ("uint8", "uint16")
        for count in ("uint16", "uint32")
    ),
    allocates=False,
)
def count_block(
    ids_X: NDArray[Any],
    offsets_S1: NDArray[np.int64],
    top_k: int,
    top: int,
    demand_SLE: NDArray[Any],
    tile: NDArray[Any],
    clash: NDArray[Any],
    masks: NDArray[Any],
) -> tuple[int, int]:
    """Add the routes of consecutive samples to `demand_SLE`.

    ids_X       uint8 or uint16 routes [N, L, K], flattened
    offsets_S1  token rows of each sample within `ids_X`
    top         highest valid id, at most E - 1, in the type of the ids
    tile, ...   a Scratch for this K and this type; not to be used again after a violation

    Returns (OK, 0), or (OUT_OF_RANGE or REPEATED, position in `ids_X`) of the first violation in
    (token row, layer, k) order; `demand_SLE` is then partly counted.
    """
    samples, layers, experts = demand_SLE.shape
    whole = masks.shape[1]
    # Views as words: or-ing `clash` byte by byte would cost as much as the comparisons.
    tile_words, clash_words = tile.view(np.uint64), clash.view(np.uint64)
    row_is_word = top_k == 8 and ids_X.itemsize == 1
    for s in range(samples):
        slab = demand_SLE[s].reshape(layers * experts)
        start, stop = offsets_S1[s] * layers * top_k, offsets_S1[s + 1] * layers * top_k
        base = 0
        while start < stop:
            width = min(whole, stop - start)
            ids = ids_X[start : start + width]
            for j in range(width):
                tile[j] = ids[j]
                clash[j] = ids[j] > top
            if row_is_word:
                _mark_repeats_in_words(tile_words, clash_words, width // 8)
            else:
                _mark_repeats(tile, clash, masks, top_k, width)
            found = np.uint64(0)
            for word in clash_words:  # beyond `width` all zero: earlier tiles had no violation
                found |= word
            if found != 0:
                code, position = _first_violation(tile, top, top_k, width)
                return code, start + position
            base = _add_rows(tile, slab, base, experts, top_k, width // top_k)
            start += width
    return OK, 0
