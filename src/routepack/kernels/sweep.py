"""One sweep of annealing at a fixed temperature (design section 3.4; moves of section 6.1).

Each move is proposed, evaluated and applied. The acceptance threshold is drawn first, and
evaluation stops as soon as a lower bound passes it; the result is that of a full evaluation: the
busiest rank of every layer after a move is at least what its old busiest rank then carries.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numpy.typing import NDArray

from routepack.kernels.jit import inlined
from routepack.kernels.layout import (
    TOTAL_WEIGHT,
    WORST_ROW_WEIGHT,
    State,
    Static,
    of_static,
    put,
    refresh_attention,
    refresh_cell,
    refresh_cost,
    refresh_experts,
    refresh_shards,
    routed,
    shift,
    state_type,
    static_type,
    take,
)
from routepack.kernels.rng import draw, high, low, unit

# Shares of proposals.
RELOCATE = 0.1  # move one sample
EXCHANGE = 0.02  # exchange two cells whole
PAIR = 0.15  # exchange two samples of a cell for one about as long as both
UNIFORM = 0.35  # swap with any sample; the rest with one of similar length, within a tight cap
HEAVIEST = 0.3  # share of proposals that start in the heaviest cell of a group

# Where a sweep leaves its results.
ENERGY, BEST, ACCEPTED, EVALUATED, RESULTS = 0, 1, 2, 3, 4
DRAWS = 3  # random words of a proposal


@inlined
def energy(state, total_weight):  # type: ignore[no-untyped-def]
    """max U + total_weight * sum U + 1e-9 * max J."""
    slowest, total, worst = 0.0, 0.0, 0.0
    for g in range(len(state.shard_G)):
        total += state.shard_G[g]
        slowest = max(slowest, state.shard_G[g])
    for b in range(len(state.cost_B)):
        worst = max(worst, state.cost_B[b])
    return slowest + total_weight * total + WORST_ROW_WEIGHT * worst


@inlined
def energy_after(static, state, total_weight, x, cost_x, y, cost_y, exact):  # type: ignore[no-untyped-def]
    """The energy with other costs for groups x and y; not exact: leaves out the other groups' J."""
    shards = len(state.shard_G)
    slowest, total = 0.0, 0.0
    for g in range(shards):
        u = state.shard_G[g]
        if g == static.shard_B[x]:
            u += cost_x - state.cost_B[x]
        if g == static.shard_B[y] and y != x:
            u += cost_y - state.cost_B[y]
        total += u
        slowest = u if u > slowest else slowest
    worst = cost_x if cost_x > cost_y else cost_y
    if exact:
        for b in range(len(state.cost_B)):
            cost = state.cost_B[b]
            worst = cost if b != x and b != y and cost > worst else worst
    return slowest + total_weight * total + WORST_ROW_WEIGHT * worst


@inlined
def cell_work(static, state, t, c, out, into):  # type: ignore[no-untyped-def]
    """Attention work of cell c at stage t without sample `out` and with sample `into`."""
    tokens = state.tokens_c[c] - state.length_S[out] + state.length_S[into]
    tokens2 = state.tokens2_Tc[t, c] - state.tokens2_TS[t, out] + state.tokens2_TS[t, into]
    return static.linear_T[t] * tokens + static.quadratic_T[t] * tokens2


@inlined
def attention_after(static, state, b, x, out, into, y):  # type: ignore[no-untyped-def]
    """A of group b after cell x exchanges out for into, and cell y (if in b) into for out."""
    total = 0.0
    for t in range(len(static.linear_T)):
        largest = 0.0
        for k in range(state.top_BTk.shape[2]):
            cell = state.top_cell_BTk[b, t, k]
            if cell != x and cell != y:
                largest = state.top_BTk[b, t, k]
                break
        largest = max(largest, cell_work(static, state, t, x, out, into))
        if y >= 0 and static.group_c[y] == b:
            largest = max(largest, cell_work(static, state, t, y, into, out))
        total += largest
    return total


@inlined
def busiest_after(static, state, x, y, i, j):  # type: ignore[no-untyped-def]
    """Sums over layers of the busiest ranks of groups x and y after they exchange i and j.

    Both at once, since both need the loads of the same two samples; ranks are taken eight at a
    time, which keeps the maxima in registers, then the rest.
    """
    x_RL, y_RL = state.load_BRL[x], state.load_BRL[y]
    i_RL, j_RL = routed(static, state, i), routed(static, state, j)
    peak_x_L, peak_y_L = state.peak_L, state.other_peak_L
    ranks, layers = x_RL.shape
    number = peak_x_L.dtype.type  # int32 stays int32: numba widens the arithmetic otherwise
    for layer in range(layers):
        peak_x_L[layer] = peak_y_L[layer] = 0
    for r in range(0, ranks - 7, 8):
        for layer in range(layers):
            peak_x, peak_y = peak_x_L[layer], peak_y_L[layer]
            for k in range(r, r + 8):  # unrolled by the compiler
                moved = number(j_RL[k, layer] - i_RL[k, layer])
                load_x, load_y = number(x_RL[k, layer] + moved), number(y_RL[k, layer] - moved)
                peak_x = load_x if load_x > peak_x else peak_x
                peak_y = load_y if load_y > peak_y else peak_y
            peak_x_L[layer], peak_y_L[layer] = peak_x, peak_y
    for r in range(ranks - ranks % 8, ranks):
        for layer in range(layers):
            moved = number(j_RL[r, layer] - i_RL[r, layer])
            load_x, load_y = number(x_RL[r, layer] + moved), number(y_RL[r, layer] - moved)
            peak_x_L[layer] = load_x if load_x > peak_x_L[layer] else peak_x_L[layer]
            peak_y_L[layer] = load_y if load_y > peak_y_L[layer] else peak_y_L[layer]
    total_x, total_y = np.int64(0), np.int64(0)
    for layer in range(layers):
        total_x += peak_x_L[layer]
        total_y += peak_y_L[layer]
    return total_x, total_y


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
def bundle(static, state, k, c, s, size, bits):  # type: ignore[no-untyped-def]
    """Make bundle k of sample s and others of its cell c, `size` in all; returns its index."""
    null = len(static.length_S) - 1
    index = null + 1 + k
    state.length_S[index] = 0
    for t in range(len(static.linear_T)):
        state.tokens2_TS[t, index] = 0
    count = state.count_c[c]
    first = state.position_S[s]
    stride = 1 + low(bits, count - 1) if size < count else 1  # neighbours in no fixed order
    for n in range(size):
        member = state.members_ck[c, (first + n * stride) % count]
        state.bundle_kn[k, n] = member
        state.length_S[index] += static.length_S[member]
        for t in range(len(static.linear_T)):
            state.tokens2_TS[t, index] += static.tokens2_TS[t, member]
    state.bundled_k[k] = size
    return index


@inlined
def sum_peaks(static, state, k, b):  # type: ignore[no-untyped-def]
    """Demand of bundle k on the busiest ranks of group b."""
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
def propose(static, state, first, second):  # type: ignore[no-untyped-def]
    """Cells x, y and what they exchange: i of x and j of y; x < 0: no legal move.

    i and j are samples, the null sample (a relocation) or bundles (two for one, or whole cells).
    """
    samples = len(static.length_S) - 1
    cells = len(state.count_c)
    kind = unit(second)
    i = pick(static, state, first)
    x = np.int64(state.cell_S[i])
    if kind < RELOCATE:
        j = np.int64(samples)
        y = low(first, cells)
        legal = state.count_c[x] > 1
    elif kind < RELOCATE + EXCHANGE:
        y = low(first, cells)
        legal = static.group_c[x] != static.group_c[y]
        if legal:
            i = np.int64(bundle(static, state, 0, x, i, np.int64(state.count_c[x]), second))
            j = np.int64(state.members_ck[y, 0])
            j = np.int64(bundle(static, state, 1, y, j, np.int64(state.count_c[y]), second))
    else:
        pair = kind < RELOCATE + EXCHANGE + PAIR and state.count_c[x] > 1
        if pair:
            i = np.int64(bundle(static, state, 0, x, i, np.int64(2), second))
            state.bundled_k[1] = 0
        if pair or kind < 1.0 - UNIFORM:
            j = similar(static, state.length_S[i], first)
        else:
            j = low(first, samples)
        y = np.int64(state.cell_S[j])
        legal = True
    longer = state.length_S[i] - state.length_S[j]
    legal = (
        legal
        and x != y
        and state.tokens_c[x] - longer <= static.cap
        and state.tokens_c[y] + longer <= static.cap
    )
    return (x if legal else np.int64(-1)), y, i, j


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


@inlined
def spread_change(static, state, x, y, i, j):  # type: ignore[no-untyped-def]
    """Change, by a move, of the squared deviation of cells from the mean cell of their group."""
    bx, by = static.group_c[x], static.group_c[y]
    change = 0.0
    for t in range(len(static.linear_T)):
        before_x, before_y = state.work_Tc[t, x], state.work_Tc[t, y]
        after_x = cell_work(static, state, t, x, i, j)
        after_y = cell_work(static, state, t, y, j, i)
        change += after_x * after_x - before_x * before_x + after_y * after_y - before_y * before_y
        if bx != by:
            total_x, total_y = state.work_BT[bx, t], state.work_BT[by, t]
            moved = after_x - before_x
            change -= moved * (2.0 * (total_x - total_y) + 2.0 * moved) / static.width
    return change


@inlined
def evaluate(static, state, x, y, i, j, total_weight, limit, early):  # type: ignore[no-untyped-def]
    """The energy after a move, or a lower bound of it as soon as that passes `limit`.

    Returns (energy, whether the loads were evaluated in full).
    """
    bx, by = static.group_c[x], static.group_c[y]
    if bx == by:
        cost = attention_after(static, state, bx, x, i, j, y) + static.expert * state.busiest_B[bx]
        return energy_after(static, state, total_weight, bx, cost, bx, cost, True), False
    null = len(static.length_S) - 1
    for moving in (i, j):
        if moving > null:
            sum_peaks(static, state, moving - null - 1, bx)
            sum_peaks(static, state, moving - null - 1, by)
    attention_x = attention_after(static, state, bx, x, i, j, np.int64(-1))
    attention_y = attention_after(static, state, by, y, j, i, np.int64(-1))
    least_x = state.busiest_B[bx] + (state.peak_BS[bx, j] - state.peak_BS[bx, i])
    least_y = state.busiest_B[by] + (state.peak_BS[by, i] - state.peak_BS[by, j])
    cost_x = attention_x + static.expert * least_x
    cost_y = attention_y + static.expert * least_y
    if early:
        least = energy_after(static, state, total_weight, bx, cost_x, by, cost_y, False)
        if least > limit:
            return least, False
    for moving in (i, j):
        if moving > null:
            fill_bundle(static, state, moving - null - 1)
    busiest_x, busiest_y = busiest_after(static, state, bx, by, i, j)
    cost_x = attention_x + static.expert * busiest_x
    cost_y = attention_y + static.expert * busiest_y
    return energy_after(static, state, total_weight, bx, cost_x, by, cost_y, True), True


def _sweep(
    static: Static,
    state: State,
    best_S: NDArray[np.int32],
    results: NDArray[np.float64],
    temperature: float,
    total_weight: float,
    spread_weight: float,
    proposals: int,
    key: np.uint64,
    counter: np.uint64,
) -> None:
    """Make `proposals` proposals; best_S keeps the layout of the least energy seen (results[BEST]).

    While a search is hot, `total_weight` may exceed TOTAL_WEIGHT, so that the other shards stay low
    too, and `spread_weight` charges unequal cells, of which the energy sees only the largest. The
    best is always kept by the energy of the design.
    """
    now = energy(state, total_weight)
    best = results[BEST]
    accepted, evaluated = 0, 0
    for n in range(proposals):
        at = counter + np.uint64(DRAWS * n)
        x, y, i, j = propose(static, state, draw(key, at), draw(key, at + np.uint64(1)))
        if x < 0:
            continue
        limit = now - temperature * math.log(unit(draw(key, at + np.uint64(2))))
        if spread_weight > 0.0:
            limit -= spread_weight * spread_change(static, state, x, y, i, j)
        after, full = evaluate(static, state, x, y, i, j, total_weight, limit, True)
        if full:
            evaluated += 1
        if after > limit:
            continue
        apply(static, state, x, y, i, j)
        now = energy(state, total_weight)
        accepted += 1
        reached = now
        if total_weight != TOTAL_WEIGHT:
            reached = energy(state, TOTAL_WEIGHT)
        if reached < best:
            best = reached
            for s in range(len(best_S)):
                best_S[s] = state.cell_S[s]
    results[ENERGY], results[BEST] = now, best
    results[ACCEPTED] += accepted
    results[EVALUATED] += evaluated


sweep = of_static(
    _sweep,
    lambda load: types.void(
        static_type(load), state_type(load), types.int32[::1], types.float64[::1],
        types.float64, types.float64, types.float64, types.int64, types.uint64, types.uint64,
    ),
)  # fmt: skip
