"""What a move costs, exactly, or a bound that is enough to reject it.

Evaluation stops as soon as a lower bound passes the threshold; the result is that of a full
evaluation: the busiest rank of every layer after a move is at least what any rank then carries, so
at least what the layer's anchor does.
"""

from __future__ import annotations

import numpy as np

from routepack.kernels.jit import called, inlined
from routepack.kernels.layout import UNLIMITED, WORST_ROW_WEIGHT, routed
from routepack.kernels.moves import fill_bundle, sum_peaks


@inlined
def over_cost(static, state):  # type: ignore[no-untyped-def]
    """Charge for what is above a limit."""
    over = np.int64(0)
    if static.limit < UNLIMITED:
        for b in range(len(state.over_B)):
            over += state.over_B[b]
    return static.over * over


@inlined
def energy(static, state, total_weight):  # type: ignore[no-untyped-def]
    """max U + total_weight * sum U + 1e-9 * max J, and the charge for what is above a limit."""
    slowest, total, worst = 0.0, 0.0, 0.0
    for g in range(len(state.shard_G)):
        total += state.shard_G[g]
        slowest = max(slowest, state.shard_G[g])
    for b in range(len(state.cost_B)):
        worst = max(worst, state.cost_B[b])
    return slowest + total_weight * total + WORST_ROW_WEIGHT * worst + over_cost(static, state)


@inlined
def energy_after(static, state, total_weight, x, cost_x, y, cost_y, over, exact):  # type: ignore[no-untyped-def]
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
    return slowest + total_weight * total + WORST_ROW_WEIGHT * worst + over


@inlined
def cell_work(static, state, t, c, out, into):  # type: ignore[no-untyped-def]
    """Attention work of cell c at stage t without sample `out` and with sample `into`."""
    tokens = state.tokens_c[c] - state.length_S[out] + state.length_S[into]
    tokens2 = state.tokens2_Tc[t, c] - state.tokens2_TS[t, out] + state.tokens2_TS[t, into]
    return static.slow_c[c] * (static.linear_T[t] * tokens + static.quadratic_T[t] * tokens2)


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

    Both at once, since both need the loads of the same two samples. Ranks are taken eight at a
    time, which keeps the maxima in registers; the last eight are summed over layers without being
    stored, which spares the compiler's checks that the arrays do not overlap.
    """
    x_RL, y_RL = state.load_BRL[x], state.load_BRL[y]
    i_RL, j_RL = routed(static, state, i), routed(static, state, j)
    peak_x_L, peak_y_L = state.peak_L, state.other_peak_L
    ranks, layers = x_RL.shape
    number = peak_x_L.dtype.type  # int32 stays int32: numba widens the arithmetic otherwise
    summed = 8 if ranks % 8 == 0 and static.limit == UNLIMITED else 0
    stored = ranks - summed
    for r in range(0, stored - 7, 8):
        for layer in range(layers):
            peak_x = peak_y = number(0)
            for k in range(r, r + 8):  # unrolled by the compiler
                moved = number(j_RL[k, layer] - i_RL[k, layer])
                load_x, load_y = number(x_RL[k, layer] + moved), number(y_RL[k, layer] - moved)
                peak_x = load_x if load_x > peak_x else peak_x
                peak_y = load_y if load_y > peak_y else peak_y
            if r > 0:
                peak_x, peak_y = max(peak_x, peak_x_L[layer]), max(peak_y, peak_y_L[layer])
            peak_x_L[layer], peak_y_L[layer] = peak_x, peak_y
    for r in range(stored - stored % 8, stored):
        for layer in range(layers):
            moved = number(j_RL[r, layer] - i_RL[r, layer])
            peak_x, peak_y = number(x_RL[r, layer] + moved), number(y_RL[r, layer] - moved)
            if r > 0:
                peak_x, peak_y = max(peak_x, peak_x_L[layer]), max(peak_y, peak_y_L[layer])
            peak_x_L[layer], peak_y_L[layer] = peak_x, peak_y
    total_x, total_y = np.int64(0), np.int64(0)
    if summed == 0:
        for layer in range(layers):
            total_x += peak_x_L[layer]
            total_y += peak_y_L[layer]
        return total_x, total_y
    for layer in range(layers):
        peak_x = peak_y = number(0)
        for k in range(stored, stored + 8):
            moved = number(j_RL[k, layer] - i_RL[k, layer])
            load_x, load_y = number(x_RL[k, layer] + moved), number(y_RL[k, layer] - moved)
            peak_x = load_x if load_x > peak_x else peak_x
            peak_y = load_y if load_y > peak_y else peak_y
        if stored > 0:
            peak_x, peak_y = max(peak_x, peak_x_L[layer]), max(peak_y, peak_y_L[layer])
        total_x += peak_x
        total_y += peak_y
    return total_x, total_y


@called
def slowest_after(static, state, x, y, i, j):  # type: ignore[no-untyped-def]
    """As busiest_after, where EP ranks are not equally fast; peak_L are the loads as they are."""
    i_RL, j_RL = routed(static, state, i), routed(static, state, j)
    peak_x_L, peak_y_L = state.peak_L, state.other_peak_L
    ranks, layers = i_RL.shape
    total_x, total_y = np.int64(0), np.int64(0)
    for side in range(2):
        b, peak_L = (y, peak_y_L) if side else (x, peak_x_L)
        load_RL, slow_R = state.load_BRL[b], static.slow_GR[static.shard_B[b]]
        total = np.int64(0)
        for layer in range(layers):
            slowest, peak = np.int64(0), np.int64(0)
            for r in range(ranks):
                moved = np.int64(j_RL[r, layer]) - i_RL[r, layer]
                load = load_RL[r, layer] - moved if side else load_RL[r, layer] + moved
                peak, slowest = max(peak, load), max(slowest, slow_R[r] * load)
            peak_L[layer] = peak
            total += slowest
        total_x, total_y = (total_x, total) if side else (total, total_y)
    return total_x, total_y


@inlined
def over_after(static, state, x, y):  # type: ignore[no-untyped-def]
    """The charge for what is above a limit once a move is made, after busiest_after."""
    over = np.int64(0)
    if static.limit < UNLIMITED:
        for b in range(len(state.over_B)):
            if b != x and b != y:
                over += state.over_B[b]
        for layer in range(len(state.peak_L)):
            over += max(np.int64(0), state.peak_L[layer] - static.limit)
            over += max(np.int64(0), state.other_peak_L[layer] - static.limit)
    return static.over * over


@inlined
def over_elsewhere(static, state, x, y):  # type: ignore[no-untyped-def]
    """The charge for what is above a limit in groups other than x and y."""
    over = np.int64(0)
    if static.limit < UNLIMITED:
        for b in range(len(state.over_B)):
            if b != x and b != y:
                over += state.over_B[b]
    return static.over * over


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
        more_x, more_y = after_x - before_x, after_y - before_y
        if bx == by:
            more_x, more_y = more_x + more_y, 0.0
        squares = more_x * (2.0 * state.work_BT[bx, t] + more_x)
        change -= (squares + more_y * (2.0 * state.work_BT[by, t] + more_y)) / static.width
    return change


@inlined
def evaluate(static, state, x, y, i, j, total_weight, limit, early):  # type: ignore[no-untyped-def]
    """The energy after a move, or a lower bound of it as soon as that passes `limit`.

    Returns (energy, whether the loads were evaluated in full).
    """
    bx, by = static.group_c[x], static.group_c[y]
    if bx == by:
        cost = attention_after(static, state, bx, x, i, j, y) + static.expert * state.busiest_B[bx]
        over = over_cost(static, state)
        after = energy_after(static, state, total_weight, bx, cost, bx, cost, over, True)
        return after, False
    null = len(static.length_S) - 1
    for moving in (i, j):
        if moving > null:
            sum_peaks(static, state, moving - null - 1, bx)
            sum_peaks(static, state, moving - null - 1, by)
    attention_x = attention_after(static, state, bx, x, i, j, np.int64(-1))
    attention_y = attention_after(static, state, by, y, j, i, np.int64(-1))
    least_x = state.anchored_B[bx] + (state.peak_BS[bx, j] - state.peak_BS[bx, i])
    least_y = state.anchored_B[by] + (state.peak_BS[by, i] - state.peak_BS[by, j])
    cost_x = attention_x + static.expert * least_x
    cost_y = attention_y + static.expert * least_y
    if early:
        over = over_elsewhere(static, state, bx, by)
        least = energy_after(static, state, total_weight, bx, cost_x, by, cost_y, over, False)
        if least > limit:
            return least, False
    for moving in (i, j):
        if moving > null:
            fill_bundle(static, state, moving - null - 1)
    if static.uneven:
        busiest_x, busiest_y = slowest_after(static, state, bx, by, i, j)
    else:
        busiest_x, busiest_y = busiest_after(static, state, bx, by, i, j)
    cost_x = attention_x + static.expert * busiest_x
    cost_y = attention_y + static.expert * busiest_y
    over = over_after(static, state, bx, by)
    return energy_after(static, state, total_weight, bx, cost_x, by, cost_y, over, True), True
