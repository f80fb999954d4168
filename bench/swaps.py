"""Evaluating swaps one by one in the kernel, next to numpy evaluating them in batches, on one core.

python -m bench.swaps [--workload NAME] [--swaps N] [--repeats K] [--check]

Both give the energy after each swap, with the loads of both its groups evaluated in full, and must
agree to the last bit. The swaps are random, between cells of different groups of a planned layout,
and keep within the cap. The process is bound to one CPU; numpy uses one thread for all of this.
Suffixes as in kernels/layout.py, and N swaps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench.methods import setting
from bench.report import emit, table
from bench.workloads import WORKLOADS
from numba import njit, types
from numpy.typing import NDArray

import routepack
from routepack.bounds import analytic_bound
from routepack.kernels.evaluation import energy, evaluate
from routepack.kernels.layout import (
    TOTAL_WEIGHT,
    WORST_ROW_WEIGHT,
    State,
    Static,
    state_type,
    static_type,
)
from routepack.placement import ranks_of
from routepack.problem import Problem

LEAST_RATIO = 6.0
BATCHES = (256, 512, 1024, 2048, 4096)
TEMPERATURE = 0.01  # of the bound per sample: about the middle of a search

Moves = NDArray[np.int64]  # [N, 4]: cell x, cell y, sample i (in x), sample j (in y)


def _evaluate_all(static, state, moves_N4, limit_N, early, energy_N):  # type: ignore[no-untyped-def]
    """Returns how many swaps were evaluated in full."""
    evaluated = 0
    for n in range(len(moves_N4)):
        x, y, i, j = moves_N4[n, 0], moves_N4[n, 1], moves_N4[n, 2], moves_N4[n, 3]
        energy_N[n], full = evaluate(static, state, x, y, i, j, TOTAL_WEIGHT, limit_N[n], early)
        evaluated += full
    return evaluated


def compile_kernel() -> Callable[..., int]:
    """As kernels/jit.py compiles, but never from the disk cache: that would keep `evaluate` as it
    was when this file last changed."""
    f64 = types.float64[::1]
    frame = (static_type(types.int32), state_type(types.int32))
    signature = types.int64(*frame, types.int64[:, ::1], f64, types.boolean, f64)
    compiled: Callable[..., int] = njit([signature], nogil=True, error_model="numpy", _nrt=False)(
        _evaluate_all
    )
    return compiled


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
        return self.peak_2NL[:, :n].sum(axis=2, dtype=np.int64)

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
        return self.peak_2NL[:, :n].sum(axis=2, dtype=np.int64)

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


def planned(name: str, seconds: float) -> tuple[Static, State, float]:
    """A planned layout of a workload, and the temperature of its limits."""
    workload = WORKLOADS[name]
    window = workload.window()
    if window is None:
        sys.exit(workload.skip_reason)
    topology, cost_model = setting(workload)
    cap = workload.token_cap
    plan = routepack.plan(
        window, topology, token_cap=cap, cost_model=cost_model,
        budget=routepack.Budget(seconds=seconds),
    )  # fmt: skip
    cost = cost_model.resolve(window, topology, cap)
    problem = Problem(window, topology, cost, cap, len(plan.rows))
    static = problem.static(ranks_of(plan.placement_LE, topology.ep))
    cell_S = problem.from_bins([cell for row in plan.rows for cell in row])
    unit = analytic_bound(window, topology, cost) / window.samples
    return static, problem.state(static, cell_S), TEMPERATURE * unit


def draw_swaps(static: Static, state: State, count: int, rng: np.random.Generator) -> Moves:
    """Random swaps of samples of different groups that keep both cells within the cap."""
    samples = len(static.length_S) - 1
    chunks: list[Moves] = []
    while sum(map(len, chunks)) < count:
        i_N, j_N = rng.integers(0, samples, (2, count))
        x_N, y_N = state.cell_S[i_N].astype(np.int64), state.cell_S[j_N].astype(np.int64)
        longer_N = static.length_S[i_N] - static.length_S[j_N]
        legal_N = x_N // static.width != y_N // static.width
        legal_N &= state.tokens_c[x_N] - longer_N <= static.cap
        legal_N &= state.tokens_c[y_N] + longer_N <= static.cap
        chunks.append(np.stack([x_N, y_N, i_N, j_N], axis=1)[legal_N])
    return np.ascontiguousarray(np.concatenate(chunks)[:count])


def cpu_seconds(function: Callable[..., object], *args: object) -> float:
    """CPU time of one call: on a core that others use too, wall time would be theirs as well."""
    begin = time.process_time()
    function(*args)
    return time.process_time() - begin


def main() -> None:
    """Measure in alternation, compare the results, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=WORKLOADS, default="qwen3-30b-math")
    parser.add_argument("--swaps", type=int, default=65_536)
    parser.add_argument("--repeats", type=int, default=9, help="alternations")
    parser.add_argument("--plan-seconds", type=float, default=1.0, help="for the layout")
    parser.add_argument("--seed", type=int, default=0, help="of the swaps")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a check fails")
    args = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})

    static, state, temperature = planned(args.workload, args.plan_seconds)
    rng = np.random.default_rng(args.seed)
    moves_N4 = draw_swaps(static, state, args.swaps, rng)
    now = energy.py_func(state, TOTAL_WEIGHT)
    limit_N = now - temperature * np.log(1 - rng.random(args.swaps))  # Metropolis acceptance
    kernel = compile_kernel()
    full_N, early_N, numpy_N = np.empty((3, args.swaps))

    failed = []
    kernel(static, state, moves_N4, limit_N, False, full_N)
    best: dict[bool, Batched] = {}
    for by_rank in (False, True):
        seconds = []
        for batch in BATCHES:
            batched = Batched(static, state, batch, by_rank)
            seconds.append(min(cpu_seconds(batched, moves_N4, numpy_N) for _ in range(2)))
            if not np.array_equal(numpy_N, full_N):
                failed.append(f"numpy in batches of {batch}: other energies than the kernel's")
        best[by_rank] = Batched(static, state, BATCHES[int(np.argmin(seconds))], by_rank)
    evaluated = kernel(static, state, moves_N4, limit_N, True, early_N)
    if not np.array_equal(early_N <= limit_N, full_N <= limit_N):
        failed.append("early exit accepts other swaps than full evaluation")

    full, early = [], []
    numpys: dict[bool, list[float]] = {by_rank: [] for by_rank in best}
    for _ in range(args.repeats):
        full.append(cpu_seconds(kernel, static, state, moves_N4, limit_N, False, full_N))
        for by_rank, batched in best.items():
            numpys[by_rank].append(cpu_seconds(batched, moves_N4, numpy_N))
        early.append(cpu_seconds(kernel, static, state, moves_N4, limit_N, True, early_N))
    ratios = {
        by_rank: [slow / fast for slow, fast in zip(seconds, full, strict=True)]
        for by_rank, seconds in numpys.items()
    }
    least = min(statistics.median(pairs) for pairs in ratios.values())
    if least < LEAST_RATIO:
        failed.append(f"kernel / fastest numpy = {least:.2f}, expected at least {LEAST_RATIO:g}")

    def line(name: str, seconds: list[float], pairs: list[float] | None = None) -> list[str]:
        rate = f"{args.swaps / statistics.median(seconds) / 1e6:.2f}"
        if pairs is None:
            return [name, rate, "", ""]
        pairs_range = f"{min(pairs):.1f} to {max(pairs):.1f}"
        return [name, rate, f"{statistics.median(pairs):.2f}", pairs_range]

    groups, ranks, layers = state.load_BRL.shape
    about = (
        f"{args.workload}: L={layers}, R={ranks}, {groups} groups; {args.swaps} swaps of samples "
        f"of different groups on one core, CPU time, medians of {args.repeats} alternations; numpy "
        f"in the best of {len(BATCHES)} batch sizes n. All energies are compared by `==`."
    )
    lines = [
        line("kernel, full evaluation", full),
        line(f"numpy, [n, R, L] at once, n = {best[False].batch}", numpys[False], ratios[False]),
        line(f"numpy, [n, L] rank by rank, n = {best[True].batch}", numpys[True], ratios[True]),
        line(f"kernel, early exit ({evaluated / args.swaps:.0%} in full)", early),
    ]
    text = about + "\n\n" + table(["", "M swaps/s", "kernel / numpy", "pairs"], lines)
    sys.exit(emit(text, args.markdown, failed, args.check))


if __name__ == "__main__":
    main()
