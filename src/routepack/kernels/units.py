"""Moves of samples that stay on one DP rank together, such as the rollouts of a prompt.

Inside a rank they move one by one (a lane, layout.py). Between ranks a unit moves whole: every
sample keeps its row, and goes to the cell of that row on the other rank.
"""

from __future__ import annotations

import numpy as np

from routepack.kernels.evaluation import energy
from routepack.kernels.jit import called, inlined
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
from routepack.kernels.moves import pick
from routepack.kernels.rng import draw, high, low, unit

UNIT = 0.03  # share of proposals
ALONE = 0.25  # of these, units that nothing is exchanged for


@inlined
def propose_units(static, state, first, second):  # type: ignore[no-untyped-def]
    """Units a and b and the cells between their ranks; a < 0: no move, b < 0: none in exchange."""
    ranks = static.width * static.shards
    i = pick(static, state, first)
    x = np.int64(state.cell_S[i])
    a, b = np.int64(static.unit_S[i]), np.int64(-1)
    away = low(second, ranks) - x % ranks
    if unit(second) >= ALONE:
        row = high(draw(second, np.uint64(0)), len(state.count_c) // ranks)
        c = row * ranks + x % ranks + away
        at = low(draw(second, np.uint64(1)), state.count_c[c])
        b = np.int64(static.unit_S[state.members_ck[c, at]])
    return (a if away != 0 else np.int64(-1)), b, away, x % ranks


@inlined
def add_up(static, state, u, away, sign):  # type: ignore[no-untyped-def]
    """Add (or subtract) the tokens and counts of unit u where it would be."""
    if u >= 0:
        for n in range(static.unit_start_n[u], static.unit_start_n[u + 1]):
            s = static.unit_members_S[n]
            c = state.cell_S[s] + away
            state.tokens_c[c] += sign * static.length_S[s]
            state.count_c[c] += sign


@inlined
def fit(static, state, rank):  # type: ignore[no-untyped-def]
    """Whether no cell of a DP rank is empty, or holds too much."""
    ranks = static.width * static.shards
    fits = True
    for c in range(rank, len(state.count_c), ranks):
        fits = fits and 0 < state.count_c[c] <= static.most and state.tokens_c[c] <= static.cap
    return fits


@inlined
def lift(static, state, u):  # type: ignore[no-untyped-def]
    """Take all samples of unit u out of their cells."""
    if u >= 0:
        for n in range(static.unit_start_n[u], static.unit_start_n[u + 1]):
            take(static, state, static.unit_members_S[n])


@inlined
def drop(static, state, u, away):  # type: ignore[no-untyped-def]
    """Put all samples of unit u, taken out before, `away` cells from where they were."""
    null = len(static.length_S) - 1
    if u >= 0:
        for n in range(static.unit_start_n[u], static.unit_start_n[u + 1]):
            s = static.unit_members_S[n]
            c = state.cell_S[s]
            old, new = static.group_c[c], static.group_c[c + away]
            put(static, state, s, c + away)
            if old != new:
                shift(static, state, old, s, null)
                shift(static, state, new, null, s)


@inlined
def refresh_ranks(static, state, rank, other):  # type: ignore[no-untyped-def]
    """Refresh what depends on the cells of two DP ranks."""
    ranks = static.width * static.shards
    for first in range(0, len(state.count_c), ranks):
        x, y = first + rank, first + other
        refresh_cell(static, state, x)
        refresh_cell(static, state, y)
        for side in range(2):
            b = static.group_c[y if side else x]
            if side == 1 and b == static.group_c[x]:
                continue
            refresh_attention(static, state, b)
            refresh_experts(static, state, b)
            refresh_cost(static, state, b)
    refresh_shards(static, state)


@inlined
def exchange_units(static, state, a, b, away, rank):  # type: ignore[no-untyped-def]
    """Exchange units a (on `rank`) and b (`away` from it); returns whether that is allowed."""
    size_a = static.unit_start_n[a + 1] - static.unit_start_n[a]
    size_b = static.unit_start_n[b + 1] - static.unit_start_n[b] if b >= 0 else np.int64(0)
    if static.blocks > 0 and size_a != size_b:
        return False
    for u in (a, b):
        lift(static, state, u)
    for sign in (1, -1):
        for u, to in ((a, away), (b, -away)):
            add_up(static, state, u, to, sign)
        if sign == 1:
            fits = fit(static, state, rank) and fit(static, state, rank + away)
    for u, to in ((a, away), (b, -away)):
        drop(static, state, u, to if fits else np.int64(0))
    if fits:
        refresh_ranks(static, state, rank, rank + away)
    return fits


@called
def try_units(static, state, first, second, total_weight, limit):  # type: ignore[no-untyped-def]
    """Propose an exchange of units and make it if it leads to at most `limit`.

    Returns the energy that it leads to, infinite where there is no such exchange.
    """
    a, b, away, rank = propose_units(static, state, first, second)
    after = np.inf
    for turn in range(2 if a >= 0 else 0):  # a loop, so that there and back are compiled once
        if turn == 1 and after <= limit:
            break
        if not exchange_units(static, state, a, b, away, rank):
            break
        if turn == 0:
            after = energy(static, state, total_weight)
        away, rank = -away, rank + away
    return after
