"""Moves of the search: what may be exchanged between two cells, and carrying it out.

Every move keeps the cap and leaves no cell empty. Each is proposed here, evaluated in evaluation.py
and applied here.
"""

from __future__ import annotations

import numpy as np

from routepack.kernels.jit import inlined
from routepack.kernels.layout import (
    put,
    refresh_attention,
    refresh_cell,
    refresh_cost,
    refresh_experts,
    refresh_shards,
    shift,
    take,
)
from routepack.kernels.rng import draw, high, low, unit

# Shares of proposals.
RELOCATE = 0.1  # move one sample
EXCHANGE = 0.02  # exchange two cells whole
PAIR = 0.15  # exchange two samples of a cell for one about as long as both
MANY = 0.05  # exchange one sample for as many of another cell as are about as long together
UNIFORM = 0.35  # swap with any sample; the rest with one of similar length, within a tight cap
LOOK = 4  # samples looked at for one of similar length, where only a lane's may come
HEAVIEST = 0.3  # share of proposals that start in the heaviest cell of a group


@inlined
def pick(static, state, bits):  # type: ignore[no-untyped-def]
    """A sample to move: any, or guided, one of the heaviest cell of some group.

    Of a group's cells the energy sees the heaviest only, which uniform proposals mostly miss.
    """
    samples = len(static.length_S) - 1
    guide = draw(bits, np.uint64(0))
    best = high(bits, samples)
    if unit(guide) < HEAVIEST:
        b = high(draw(bits, np.uint64(1)), len(state.cost_B))
        c = state.top_cell_BTk[b, low(guide, len(static.linear_T)), 0]
        best = np.int64(state.members_ck[c, high(bits, state.count_c[c])])
    return best


@inlined
def similar(static, length, bits):  # type: ignore[no-untyped-def]
    """A sample whose rank by length is near that of `length`."""
    samples = len(static.length_S) - 1
    first, last = 0, samples - 1
    while first < last:  # the first of by_length_S (falling) that is no longer than `length`
        middle = (first + last) // 2
        if static.length_S[static.by_length_S[middle]] > length:
            first = middle + 1
        else:
            last = middle
    reach = max(4, samples // 16)
    k = first + low(bits, 2 * reach + 1) - reach
    return np.int64(static.by_length_S[min(max(k, 0), samples - 1)])


@inlined
def bundle(static, state, k, c, s, size, tokens, bits):  # type: ignore[no-untyped-def]
    """Make bundle k of sample s and others of its cell c: `size` in all, or fewer that come as near
    to `tokens` as one more would. Returns its index.
    """
    null = len(static.length_S) - 1
    index = null + 1 + k
    state.length_S[index] = 0
    for t in range(len(static.linear_T)):
        state.tokens2_TS[t, index] = 0
    count = state.count_c[c]
    first = state.position_S[s]
    stride = 1 + low(bits, count - 1) if size < count else 1  # neighbours in no fixed order
    state.bundled_k[k] = 0
    for n in range(size):
        member = state.members_ck[c, (first + n * stride) % count]
        length = static.length_S[member]
        if n > 0 and 2 * state.length_S[index] + length > 2 * tokens:
            break
        state.bundle_kn[k, n] = member
        state.bundled_k[k] += 1
        state.length_S[index] += length
        for t in range(len(static.linear_T)):
            state.tokens2_TS[t, index] += static.tokens2_TS[t, member]
    return index


@inlined
def sum_peaks(static, state, k, b):  # type: ignore[no-untyped-def]
    """Demand of bundle k on the anchors of group b."""
    index = len(static.length_S) + k
    state.peak_BS[b, index] = 0
    for n in range(state.bundled_k[k]):
        state.peak_BS[b, index] += state.peak_BS[b, state.bundle_kn[k, n]]


@inlined
def fill_bundle(static, state, k):  # type: ignore[no-untyped-def]
    """Routed tokens of bundle k; left out until a bound has not rejected the move."""
    total_RL = state.bundle_kRL[k]
    ranks, layers = total_RL.shape
    total_RL[:] = 0
    for n in range(state.bundled_k[k]):
        routed_RL = static.placed_SRL[state.bundle_kn[k, n]]
        for r in range(ranks):
            for layer in range(layers):
                total_RL[r, layer] += routed_RL[r, layer]


@inlined
def samples_of(static, state, s):  # type: ignore[no-untyped-def]
    """How many samples an index stands for: one, the null sample none, a bundle its own."""
    null = len(static.length_S) - 1
    return np.int64(s < null) if s <= null else state.bundled_k[s - null - 1]


@inlined
def other_cell(static, x, bits):  # type: ignore[no-untyped-def]
    """Any cell that a sample of cell x may go to."""
    if static.lanes == 1:
        return low(bits, len(static.lane_c))
    lane = static.lane_c[x]
    first, last = static.lane_start_n[lane], static.lane_start_n[lane + 1]
    return static.lane_cells_c[first + low(bits, last - first)]


@inlined
def other_sample(static, state, x, length, near, bits):  # type: ignore[no-untyped-def]
    """A sample that may come to cell x: any, or one about as long as `length`."""
    if static.lanes == 1:
        if near:
            return similar(static, length, bits)
        return np.int64(low(bits, len(static.length_S) - 1))
    best = np.int64(-1)
    for n in range(LOOK if near else 1):  # few are in reach, so look at some
        c = other_cell(static, x, draw(bits, np.uint64(2 * n)))
        at = low(draw(bits, np.uint64(2 * n + 1)), state.count_c[c])
        s = np.int64(state.members_ck[c, at])
        apart = abs(static.length_S[s] - length)
        if best < 0 or apart < abs(static.length_S[best] - length):
            best = s
    return best


@inlined
def allowed(static, state, x, y, i, j):  # type: ignore[no-untyped-def]
    """Whether cells x and y may exchange i and j."""
    longer = state.length_S[i] - state.length_S[j]
    more = samples_of(static, state, i) - samples_of(static, state, j)
    return (
        x != y
        and state.tokens_c[x] - longer <= static.cap
        and state.tokens_c[y] + longer <= static.cap
        and state.count_c[x] - more <= static.most
        and state.count_c[y] + more <= static.most
        and static.lane_c[x] == static.lane_c[y]
        and (static.blocks == 0 or more == 0 or static.block_c[x] == static.block_c[y])
    )


@inlined
def propose(static, state, first, second):  # type: ignore[no-untyped-def]
    """Cells x, y and what they exchange: i of x and j of y; x < 0: no legal move.

    i and j are samples, the null sample (a relocation) or bundles (two or more for one, or whole
    cells).
    """
    kind = unit(second)
    i = pick(static, state, first)
    x = np.int64(state.cell_S[i])
    length, one, all_of_it = static.length_S[i], np.int64(1), np.int64(len(static.length_S))
    size_i, size_j, tokens = one, one, np.int64(static.cap)
    state.bundled_k[0] = state.bundled_k[1] = 0
    legal = True
    if kind < RELOCATE + EXCHANGE:
        y = np.int64(other_cell(static, x, first))
        if kind < RELOCATE:
            j = np.int64(len(static.length_S) - 1)
            legal = state.count_c[x] > 1
        else:
            j = np.int64(state.members_ck[y, 0])
            size_i = size_j = all_of_it
            legal = static.group_c[x] != static.group_c[y]
    else:
        many = kind < RELOCATE + EXCHANGE + MANY
        pair = not many and kind < RELOCATE + EXCHANGE + MANY + PAIR and state.count_c[x] > 1
        if pair:
            size_i = np.int64(2)
            i = np.int64(bundle(static, state, 0, x, i, size_i, tokens, second))
            length = state.length_S[i]
            size_i = one
        near = not many and (pair or kind < 1.0 - UNIFORM)
        j = np.int64(other_sample(static, state, x, length, near, first))
        y = np.int64(state.cell_S[j])
        if many:
            size_j, tokens = all_of_it, length
            legal = x != y and static.length_S[j] < length
    if legal:
        for side in range(2):  # a loop, so that the parts are compiled once
            c, s, size = (y, j, size_j) if side else (x, i, size_i)
            if size > 1:
                count = np.int64(state.count_c[c])
                s = np.int64(bundle(static, state, side, c, s, count, tokens, second))
                i, j = (i, s) if side else (s, j)
    return (x if legal and allowed(static, state, x, y, i, j) else np.int64(-1)), y, i, j


@inlined
def apply(static, state, x, y, i, j):  # type: ignore[no-untyped-def]
    """Carry out a move and refresh what depends on it."""
    null = len(static.length_S) - 1
    bx, by = static.group_c[x], static.group_c[y]
    for moving in (i, j):  # out of both cells first: a cell never holds more than it can
        if moving < null:
            take(static, state, moving)
        elif moving > null:
            k = moving - null - 1
            for n in range(state.bundled_k[k]):
                take(static, state, state.bundle_kn[k, n])
    for side in range(2):
        moving, c = (j, x) if side else (i, y)
        if moving < null:
            put(static, state, moving, c)
        elif moving > null:
            k = moving - null - 1
            for n in range(state.bundled_k[k]):
                put(static, state, state.bundle_kn[k, n], c)
    for side in range(2):  # a loop, so that the parts are compiled once
        b, c, out, into = (by, y, j, i) if side else (bx, x, i, j)
        refresh_cell(static, state, c)
        if side == 0 and bx == by:
            continue  # one group, refreshed once both cells are
        refresh_attention(static, state, b)
        if bx != by:
            shift(static, state, b, out, into)
            refresh_experts(static, state, b)
        refresh_cost(static, state, b)
    refresh_shards(static, state)
