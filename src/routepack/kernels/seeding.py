"""Kernels that build a layout sample by sample."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from routepack.kernels.jit import kernel
from routepack.kernels.layout import Static, of_static, static_type


@kernel("int32[::1](int64[::1], int64[::1], float64[::1], int64, int64)")
def lightest_fit(order_S, length_S, work_S, cells, cap):  # type: ignore[no-untyped-def]
    """Each sample, in order, into the cell with the least work that has room; -1 where none has."""
    tokens_c = np.zeros(cells, np.int64)
    work_c = np.zeros(cells)
    cell_S = np.full(len(order_S), -1, np.int32)
    for s in order_S:
        best = -1
        for c in range(cells):
            if tokens_c[c] + length_S[s] <= cap and (best < 0 or work_c[c] < work_c[best]):
                best = c
        if best >= 0:
            cell_S[s] = best
            tokens_c[best] += length_S[s]
            work_c[best] += work_S[s]
    return cell_S


def _least_increase(
    static: Static,
    order_S: NDArray[np.int64],
    cells: int,
    cell_S: NDArray[np.int32],
    load_BRL: NDArray[Any],
) -> None:
    """EDPAwarePair: each sample, in order, where its group's cost rises least; -1 where no room is.

    The rise is that of the stage maxima and of the busiest rank at every layer of the group.
    """
    stages, width = len(static.linear_T), static.width
    groups, ranks, layers = load_BRL.shape
    tokens_c = np.zeros(cells, np.int64)
    work_Tc = np.zeros((stages, cells))
    largest_BT = np.zeros((groups, stages))
    busiest_B = np.zeros(groups, np.int64)
    peak_L = np.empty(layers, load_BRL.dtype)
    cell_S[:] = -1
    for s in order_S:
        best, best_rise, best_busiest = -1, np.inf, np.int64(0)
        for b in range(groups):
            has_room = False
            for c in range(b * width, (b + 1) * width):
                has_room = has_room or tokens_c[c] + static.length_S[s] <= static.cap
            if not has_room:
                continue
            peak_L[:] = 0
            for r in range(ranks):
                for layer in range(layers):
                    load = load_BRL[b, r, layer] + static.placed_SRL[s, r, layer]
                    peak_L[layer] = max(peak_L[layer], load)
            busiest = np.int64(0)
            for layer in range(layers):
                busiest += peak_L[layer]
            expert = static.expert * (busiest - busiest_B[b])
            for c in range(b * width, (b + 1) * width):
                if tokens_c[c] + static.length_S[s] > static.cap:
                    continue
                rise, slack = expert, 0.0
                for t in range(stages):
                    work = work_Tc[t, c] + (
                        static.linear_T[t] * static.length_S[s]
                        + static.quadratic_T[t] * static.tokens2_TS[t, s]
                    )
                    rise += max(0.0, work - largest_BT[b, t])
                    slack += work
                rise += 1e-6 * slack  # among equals the lightest cell
                if rise < best_rise:
                    best, best_rise, best_busiest = c, rise, busiest
        if best < 0:
            continue
        b = best // width
        cell_S[s] = best
        tokens_c[best] += static.length_S[s]
        busiest_B[b] = best_busiest
        for t in range(stages):
            work_Tc[t, best] += (
                static.linear_T[t] * static.length_S[s]
                + static.quadratic_T[t] * static.tokens2_TS[t, s]
            )
            largest_BT[b, t] = max(largest_BT[b, t], work_Tc[t, best])
        for r in range(ranks):
            for layer in range(layers):
                load_BRL[b, r, layer] += static.placed_SRL[s, r, layer]


least_increase = of_static(
    _least_increase,
    lambda load: types.void(
        static_type(load), types.int64[::1], types.int64, types.int32[::1], load[:, :, ::1]
    ),
    allocates=True,
)
