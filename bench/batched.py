"""The evaluation of swaps in numpy, in batches: what the kernel is measured against.

Suffixes as in kernels/layout.py, and N swaps.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.kernels.layout import TOTAL_WEIGHT, WORST_ROW_WEIGHT, State, Static

Moves = NDArray[np.int64]  # [N, 4]: cell x, cell y, sample i (in x), sample j (in y)


class Batched:
    """The same evaluation in numpy. `expert_sums` is either of the two methods of that name below;
    the buffers of a batch are made once."""

    def __init__(self, static: Static, state: State, batch: int, by_rank: bool) -> None:
        self.static, self.state, self.batch = static, state, batch
        _, ranks, layers = state.load_BRL.shape
        shape = (batch, layers) if by_rank else (batch, ranks, layers)
        self.delta, self.taken = np.empty(shape, np.int32), np.empty(shape, np.int32)
        self.peak_2NL = np.empty((2, batch, layers), np.int32)
        self.expert_sums = self.rank_by_rank if by_rank else self.all_ranks
        if by_rank:  # rank-major copies: what a batch reads of one rank is contiguous
            self.load_RBL = np.ascontiguousarray(state.load_BRL.transpose(1, 0, 2))
            self.placed_RSL = np.ascontiguousarray(static.placed_SRL.transpose(1, 0, 2))
        order = np.argsort(-state.cost_B, kind="stable")
        self.worst_k = np.append(order, [-1, -1, -1])[:3]
        self.worst_cost_k = np.where(self.worst_k >= 0, state.cost_B[self.worst_k], 0.0)

    def __call__(self, moves_N4: Moves, energy_N: NDArray[np.float64]) -> None:
        for start in range(0, len(moves_N4), self.batch):
            part = slice(start, start + self.batch)
            self.evaluate(moves_N4[part], energy_N[part])

    def evaluate(self, moves_N4: Moves, energy_N: NDArray[np.float64]) -> None:
        """One batch."""
        x_N, y_N, i_N, j_N = np.ascontiguousarray(moves_N4.T)
        width, expert = self.static.width, self.static.expert
        bx_N, by_N = x_N // width, y_N // width
        busiest_x_N, busiest_y_N = self.expert_sums(bx_N, by_N, i_N, j_N)
        cost_x_N = self.attention(bx_N, x_N, i_N, j_N) + expert * busiest_x_N
        cost_y_N = self.attention(by_N, y_N, j_N, i_N) + expert * busiest_y_N
        self.energy(bx_N, cost_x_N, by_N, cost_y_N, energy_N)

    def all_ranks(self, bx_N: Moves, by_N: Moves, i_N: Moves, j_N: Moves) -> NDArray[np.int64]:
        """Busiest ranks summed over layers, of both groups [2, N]: all loads [N, R, L] at once."""
        n = len(i_N)
        delta, taken, placed_SRL = self.delta[:n], self.taken[:n], self.static.placed_SRL
        np.take(placed_SRL, j_N, axis=0, out=delta, mode="clip")
        np.take(placed_SRL, i_N, axis=0, out=taken, mode="clip")
        np.subtract(delta, taken, out=delta)
        for side, b_N, change in ((0, bx_N, np.add), (1, by_N, np.subtract)):
            np.take(self.state.load_BRL, b_N, axis=0, out=taken, mode="clip")
            change(taken, delta, out=taken)
            np.max(taken, axis=1, out=self.peak_2NL[side, :n])
        return np.asarray(self.peak_2NL[:, :n].sum(axis=2, dtype=np.int64))

    def rank_by_rank(self, bx_N: Moves, by_N: Moves, i_N: Moves, j_N: Moves) -> NDArray[np.int64]:
        """The same with one rank's loads [N, L] at a time, which stay in the cache."""
        n = len(i_N)
        delta, taken = self.delta[:n], self.taken[:n]
        for r, (load_BL, placed_SL) in enumerate(zip(self.load_RBL, self.placed_RSL, strict=True)):
            np.take(placed_SL, j_N, axis=0, out=delta, mode="clip")
            np.take(placed_SL, i_N, axis=0, out=taken, mode="clip")
            np.subtract(delta, taken, out=delta)
            for side, b_N, change in ((0, bx_N, np.add), (1, by_N, np.subtract)):
                peak = self.peak_2NL[side, :n]
                np.take(load_BL, b_N, axis=0, out=taken, mode="clip")
                change(taken, delta, out=peak if r == 0 else taken)
                if r:
                    np.maximum(peak, taken, out=peak)
        return np.asarray(self.peak_2NL[:, :n].sum(axis=2, dtype=np.int64))

    def attention(self, b_N: Moves, c_N: Moves, out_N: Moves, into_N: Moves) -> NDArray[Any]:
        """A of group b after its cell c gives `out` for `into`."""
        static, state = self.static, self.state
        total_N = np.zeros(len(c_N))
        tokens_N = state.tokens_c[c_N] - static.length_S[out_N] + static.length_S[into_N]
        for t in range(len(static.linear_T)):
            tokens2_S = static.tokens2_TS[t]
            tokens2_N = state.tokens2_Tc[t, c_N] - tokens2_S[out_N] + tokens2_S[into_N]
            work_N = static.linear_T[t] * tokens_N + static.quadratic_T[t] * tokens2_N
            first_N, second_N = state.top_BTk[b_N, t, 0], state.top_BTk[b_N, t, 1]
            others_N = np.where(state.top_cell_BTk[b_N, t, 0] == c_N, second_N, first_N)
            total_N += np.maximum(others_N, work_N)
        return total_N

    def energy(
        self,
        bx_N: Moves,
        cost_x_N: NDArray[np.float64],
        by_N: Moves,
        cost_y_N: NDArray[np.float64],
        energy_N: NDArray[np.float64],
    ) -> None:
        """max U + 1e-6 sum U + 1e-9 max J, in the kernel's order of operations."""
        cost_B, shards = self.state.cost_B, self.static.shards
        gain_x_N, gain_y_N = cost_x_N - cost_B[bx_N], cost_y_N - cost_B[by_N]
        slowest_N, total_N = np.zeros(len(bx_N)), np.zeros(len(bx_N))
        for g, u in enumerate(self.state.shard_G):
            u_N = np.where(bx_N % shards == g, u + gain_x_N, u)
            u_N = np.where(by_N % shards == g, u_N + gain_y_N, u_N)
            total_N += u_N
            np.maximum(slowest_N, u_N, out=slowest_N)
        worst_N = np.maximum(cost_x_N, cost_y_N)
        other_N = np.zeros(len(bx_N))  # the largest J outside of the two groups
        for b, cost in zip(self.worst_k[::-1], self.worst_cost_k[::-1], strict=True):
            other_N = np.where((bx_N == b) | (by_N == b), other_N, cost)
        np.maximum(worst_N, other_N, out=worst_N)
        energy_N[:] = slowest_N + TOTAL_WEIGHT * total_N + WORST_ROW_WEIGHT * worst_N
