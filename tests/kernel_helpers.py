"""Kernels that only tests need: parts that the package inlines, called one by one.

Compiled without numba's disk cache: that notices no change in the files of the parts.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from routepack.kernels import rng, sweep
from routepack.kernels.layout import State, Static, state_type, static_type


def _evaluate_many(  # type: ignore[no-untyped-def]
    static, state, moves_N4, total_weight, limit_N, early, out_N, full_N
):
    for n in range(len(moves_N4)):
        x, y, i, j = moves_N4[n, 0], moves_N4[n, 1], moves_N4[n, 2], moves_N4[n, 3]
        out_N[n], full_N[n] = sweep.evaluate(
            static, state, x, y, i, j, total_weight, limit_N[n], early
        )


def _apply_one(static, state, x, y, i, j, total_weight, out_N):  # type: ignore[no-untyped-def]
    sweep.apply(static, state, x, y, i, j)
    out_N[0] = sweep.energy(state, total_weight)


def _propose_many(static, state, bits_N2, moves_N4):  # type: ignore[no-untyped-def]
    for n in range(len(bits_N2)):
        x, y, i, j = sweep.propose(static, state, bits_N2[n, 0], bits_N2[n, 1])
        moves_N4[n, 0], moves_N4[n, 1], moves_N4[n, 2], moves_N4[n, 3] = x, y, i, j


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
    flags = types.boolean[::1]
    function, arguments = {
        "evaluate": (
            _evaluate_many, (*frame, i64[:, ::1], f64, f64[::1], types.boolean, f64[::1], flags)
        ),
        "apply": (_apply_one, (*frame, i64, i64, i64, i64, f64, f64[::1])),
        "propose": (_propose_many, (*frame, u64[:, ::1], i64[:, ::1])),
        "draw": (_draw_many, (u64, u64, u64[::1])),
        "below": (_below_many, (u64[::1], i64, i64[::1], i64[::1], f64[::1])),
    }[name]  # fmt: skip
    return njit([types.void(*arguments)], error_model="numpy", _nrt=False)(function)


def evaluate_many(
    static: Static,
    state: State,
    moves_N4: NDArray[np.int64],
    total_weight: float,
    limit_N: NDArray[np.float64],
    *,
    early: bool,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Energy after each move (cells x, y; samples i, j), and whether its loads were evaluated."""
    energy_N, full_N = np.empty(len(moves_N4)), np.empty(len(moves_N4), np.bool_)
    _kernel("evaluate")(static, state, moves_N4, total_weight, limit_N, early, energy_N, full_N)
    return energy_N, full_N


def apply_one(static: Static, state: State, move: tuple[int, ...], total_weight: float) -> float:
    """Carry out one move; the energy of the state that it leads to."""
    energy_N = np.empty(1)
    _kernel("apply")(static, state, *move, total_weight, energy_N)
    return float(energy_N[0])


def propose_many(static: Static, state: State, bits_N2: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The proposals [N, 4] that these random words lead to, x = -1 where it is no legal move."""
    moves_N4 = np.empty((len(bits_N2), 4), np.int64)
    _kernel("propose")(static, state, bits_N2, moves_N4)
    return moves_N4


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
