"""Kernels that only tests need: parts that the package inlines, called one by one.

A move is named by the two random words that it is proposed from, since what a proposal bundles
lives in the state until the next. Compiled without numba's disk cache, which notices no change in
the files of the parts.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from routepack.kernels import evaluation, moves, rng
from routepack.kernels.layout import State, Static, state_type, static_type

Words = NDArray[np.uint64]  # [N, 2]


class Moves(NamedTuple):
    """What is told of each move; NaN where it is not legal (x < 0)."""

    x_N: NDArray[np.int64]
    y_N: NDArray[np.int64]
    energy_N: NDArray[np.float64]
    """By `evaluate`: the energy after the move, or a lower bound of it beyond the limit."""
    full_N: NDArray[np.bool_]
    """Whether its loads were evaluated in full."""
    spread_N: NDArray[np.float64]
    """By `spread_change`."""
    applied_N: NDArray[np.float64]
    """The energy of the state after the move, where it was carried out."""


def _try_moves(  # type: ignore[no-untyped-def]
    static, state, words_N2, total_weight, limit_N, early, carry_out,
    cells_N2, energy_N, full_N, spread_N, applied_N,
):  # fmt: skip
    for n in range(len(words_N2)):
        x, y, i, j = moves.propose(static, state, words_N2[n, 0], words_N2[n, 1])
        cells_N2[n, 0], cells_N2[n, 1] = x, y
        if x < 0:
            continue
        spread_N[n] = evaluation.spread_change(static, state, x, y, i, j)
        energy_N[n], full_N[n] = evaluation.evaluate(
            static, state, x, y, i, j, total_weight, limit_N[n], early
        )
        if carry_out:
            moves.apply(static, state, x, y, i, j)
            applied_N[n] = evaluation.energy(static, state, total_weight)


def _draw_many(key, first, bits_N):  # type: ignore[no-untyped-def]
    for n in range(len(bits_N)):
        bits_N[n] = rng.draw(key, first + np.uint64(n))


def _below_many(bits_N, n, high_N, low_N, unit_N):  # type: ignore[no-untyped-def]
    for k in range(len(bits_N)):
        high_N[k], low_N[k] = rng.high(bits_N[k], n), rng.low(bits_N[k], n)
        unit_N[k] = rng.unit(bits_N[k])


@cache
def _kernel(name: str) -> Any:
    """Compiled at its first use, which takes some seconds."""
    i64, f64, u64 = types.int64, types.float64, types.uint64
    frame = (static_type(types.int32), state_type(types.int32))
    flag = types.boolean
    out = (i64[:, ::1], f64[::1], flag[::1], f64[::1], f64[::1])
    function, arguments = {
        "try": (_try_moves, (*frame, u64[:, ::1], f64, f64[::1], flag, flag, *out)),
        "draw": (_draw_many, (u64, u64, u64[::1])),
        "below": (_below_many, (u64[::1], i64, i64[::1], i64[::1], f64[::1])),
    }[name]
    return njit([types.void(*arguments)], error_model="numpy", _nrt=False)(function)


def random_words(seed: int, count: int) -> Words:
    """The words of `count` moves."""
    return np.random.default_rng(seed).integers(0, 2**64, (count, 2), np.uint64)


def _tried(
    static: Static, state: State, words_N2: Words, total_weight: float, limit_N: Any, *flags: bool
) -> Moves:
    count = len(words_N2)
    cells_N2, full_N = np.empty((count, 2), np.int64), np.zeros(count, np.bool_)
    energy_N, spread_N, applied_N = np.full((3, count), np.nan)
    limit_N = np.broadcast_to(limit_N, (count,)).astype(float)
    _kernel("try")(
        static, state, words_N2, total_weight, limit_N, *flags,
        cells_N2, energy_N, full_N, spread_N, applied_N,
    )  # fmt: skip
    return Moves(cells_N2[:, 0], cells_N2[:, 1], energy_N, full_N, spread_N, applied_N)


def evaluate_moves(
    static: Static, state: State, words_N2: Words, total_weight: float, limit_N: Any, *, early: bool
) -> Moves:
    """Propose and evaluate every move on its own, from the same state."""
    return _tried(static, state, words_N2, total_weight, limit_N, early, False)


def apply_move(static: Static, state: State, words_2: Words, total_weight: float) -> Moves:
    """Propose one move, evaluate it, and carry it out if it is legal."""
    return _tried(static, state, words_2[None], total_weight, np.inf, True, True)


def draw_many(key: int, first: int, count: int) -> NDArray[np.uint64]:
    """`count` draws of a stream, from counter `first` on."""
    bits_N = np.empty(count, np.uint64)
    _kernel("draw")(np.uint64(key), np.uint64(first), bits_N)
    return bits_N


def below_many(
    bits_N: NDArray[np.uint64], n: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
    """`high`, `low` (whole numbers below n) and `unit` of every word."""
    high_N, low_N = np.empty(len(bits_N), np.int64), np.empty(len(bits_N), np.int64)
    unit_N = np.empty(len(bits_N))
    _kernel("below")(bits_N, n, high_N, low_N, unit_N)
    return high_N, low_N, unit_N
