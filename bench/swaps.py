"""Evaluating swaps one by one in the kernel, next to numpy evaluating them in batches, on one core.

python -m bench.swaps [SETTING ...] [--swaps N] [--repeats K] [--check]

The layout has been annealed at a temperature in the middle of a search, at which thresholds are
drawn too. Swaps are between cells of different groups: at random, or those that the search
proposes there, of which more need a closer look. In full, kernel and numpy give the energy after
each swap and must agree to the last bit; with early exit, as in the search, the kernel stops once a
threshold is passed, and must decide alike. The process is bound to one CPU for that, and numpy
uses one thread. Before it, two chains are swept on one thread and on two.

Suffixes as in kernels/layout.py, and N swaps.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench.batched import Batched, Moves
from bench.methods import setting
from bench.report import emit, table
from bench.workloads import WORKLOADS, Workload
from numba import njit, types

import routepack
from routepack.bounds import analytic_bound
from routepack.kernels.evaluation import evaluate
from routepack.kernels.layout import TOTAL_WEIGHT, State, Static, state_type, static_type
from routepack.kernels.moves import propose
from routepack.kernels.rng import draw, stream_key
from routepack.kernels.sweep import ACCEPTED, RESULTS
from routepack.placement import ranks_of
from routepack.population import Chain
from routepack.problem import Problem

LEAST_FULL = 6.0  # kernel in full / fastest numpy
LEAST_EARLY = 20.0  # kernel with early exit, random swaps / numpy with all ranks at once
LEAST_THREADS = 1.4
BATCHES = (64, 128, 256, 512, 1024, 2048, 4096)
TEMPERATURE = 0.006  # of the bound per sample: half of a search's proposals are made above it

KINDS = ("random", "the search's")
COLUMNS = ("M swaps/s", "x numpy at once", "x rank by rank")
SETTINGS = {
    "qwen3-30b-math": WORKLOADS["qwen3-30b-math"],  # 48 layers, 8 ranks
    "qwen3-30b-dapo20k-ep32": replace(
        WORKLOADS["qwen3-30b-dapo20k"], name="qwen3-30b-dapo20k-ep32", ep=32, edp=1
    ),
}


def _evaluate_all(static, state, moves_N4, limit_N, early, energy_N):  # type: ignore[no-untyped-def]
    """Returns how many swaps were evaluated in full."""
    evaluated = 0
    for n in range(len(moves_N4)):
        x, y, i, j = moves_N4[n, 0], moves_N4[n, 1], moves_N4[n, 2], moves_N4[n, 3]
        energy_N[n], full = evaluate(static, state, x, y, i, j, TOTAL_WEIGHT, limit_N[n], early)
        evaluated += full
    return evaluated


def _propose_all(static, state, key, moves_N4):  # type: ignore[no-untyped-def]
    """What a sweep would propose, were every proposal rejected; x < 0 where nothing is legal."""
    for n in range(len(moves_N4)):
        at = np.uint64(2 * n)
        x, y, i, j = propose(static, state, draw(key, at), draw(key, at + np.uint64(1)))
        moves_N4[n, 0], moves_N4[n, 1], moves_N4[n, 2], moves_N4[n, 3] = x, y, i, j


def compiled(function: Callable[..., Any], result: Any, *arguments: Any) -> Callable[..., Any]:
    """As kernels/jit.py compiles, but never from the disk cache: that would keep what is inlined as
    it was when this file last changed."""
    signature = result(static_type(types.int32), state_type(types.int32), *arguments)
    made: Callable[..., Any] = njit([signature], nogil=True, error_model="numpy", _nrt=False)(
        function
    )
    return made


class Annealed(NamedTuple):
    """A layout of a workload, annealed at a temperature from the planned one."""

    problem: Problem
    static: Static
    state: State
    temperature: float

    @property
    def energy(self) -> float:
        """Of the layout, as the search has it."""
        return self.problem.measure(self.static, self.state.cell_S[:-1]).energy

    def chain(self, key: int) -> Chain:
        """A chain of the search that is at a copy of this layout."""
        cell_S = self.state.cell_S[:-1].copy()
        results = np.array([self.energy, self.energy, 0.0, 0.0])
        assert len(results) == RESULTS
        state = self.problem.state(self.static, cell_S)
        return Chain(self.problem, self.static, state, stream_key(key), cell_S, results)


def annealed(workload: Workload, seconds: float, proposals: int) -> Annealed:
    """Plan a workload, then sweep the plan's layout at TEMPERATURE."""
    window = workload.window()
    assert window is not None
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
    temperature = TEMPERATURE * analytic_bound(window, topology, cost) / window.samples
    made = Annealed(problem, static, problem.state(static, cell_S), temperature)
    chain = made.chain(0)
    chain.sweep(temperature, TOTAL_WEIGHT, 0.0, proposals)
    return made._replace(state=chain.state)


def random_swaps(made: Annealed, count: int) -> Iterator[Moves]:
    """Swaps of any two samples that keep both cells within the cap."""
    static, state = made.static, made.state
    rng = np.random.default_rng(1)
    while True:
        i_N, j_N = rng.integers(0, len(static.length_S) - 1, (2, count))
        x_N, y_N = state.cell_S[i_N].astype(np.int64), state.cell_S[j_N].astype(np.int64)
        longer_N = static.length_S[i_N] - static.length_S[j_N]
        legal_N = state.tokens_c[x_N] - longer_N <= static.cap
        legal_N &= state.tokens_c[y_N] + longer_N <= static.cap
        yield np.stack([x_N, y_N, i_N, j_N], axis=1)[legal_N]


def proposed_swaps(made: Annealed, count: int) -> Iterator[Moves]:
    """Swaps of two samples, or relocations of one, that the search proposes."""
    propose_all = compiled(_propose_all, types.void, types.uint64, types.int64[:, ::1])
    null = len(made.static.length_S) - 1
    for chunk in itertools.count():
        moves_N4 = np.empty((count, 4), np.int64)
        propose_all(made.static, made.state, stream_key(1, chunk), moves_N4)
        x_N, _, i_N, j_N = moves_N4.T
        # without those that move two samples at once, or whole cells
        yield moves_N4[(x_N >= 0) & (i_N <= null) & (j_N <= null)]


def between_groups(made: Annealed, chunks: Iterator[Moves], count: int) -> Moves:
    """The first `count` that are between cells of different groups."""
    kept: list[Moves] = []
    while sum(map(len, kept)) < count:
        moves_N4 = next(chunks)
        group_N2 = moves_N4[:, :2] // made.static.width
        kept.append(moves_N4[group_N2[:, 0] != group_N2[:, 1]])
    return np.ascontiguousarray(np.concatenate(kept)[:count])


def cpu_seconds(function: Callable[..., object], *args: object) -> float:
    """CPU time of one call: on a core that others use too, wall time would be theirs as well."""
    begin = time.process_time()
    function(*args)
    return time.process_time() - begin


# --- one core ----------------------------------------------------------------------------------


class Timed(NamedTuple):
    """CPU seconds of each alternation, on the same swaps."""

    full: list[float]
    early: list[float]
    numpys: tuple[list[float], list[float]]
    """All ranks at once; rank by rank."""
    evaluated: float
    """Share of swaps that early exit evaluates in full."""
    batches: tuple[int, int]
    """The best batch sizes of numpy."""
    failed: list[str]


def time_swaps(made: Annealed, moves_N4: Moves, repeats: int, seed: int) -> Timed:
    """Compare the results of kernel and numpy, then time them in alternation."""
    static, state, swaps = made.static, made.state, len(moves_N4)
    rng = np.random.default_rng(seed)
    limit_N = made.energy - made.temperature * np.log(
        1 - rng.random(swaps)
    )  # Metropolis acceptance
    f64 = types.float64[::1]
    kernel = compiled(_evaluate_all, types.int64, types.int64[:, ::1], f64, types.boolean, f64)
    full_N, early_N, numpy_N = np.empty((3, swaps))

    failed = []
    kernel(static, state, moves_N4, limit_N, False, full_N)
    best = []
    for by_rank in (False, True):
        seconds = []
        for batch in BATCHES:
            batched = Batched(static, state, batch, by_rank)
            seconds.append(min(cpu_seconds(batched, moves_N4, numpy_N) for _ in range(2)))
            if not np.array_equal(numpy_N, full_N):
                failed.append(f"numpy in batches of {batch}: other energies than the kernel's")
        best.append(Batched(static, state, BATCHES[int(np.argmin(seconds))], by_rank))
    evaluated = kernel(static, state, moves_N4, limit_N, True, early_N)
    if not np.array_equal(early_N <= limit_N, full_N <= limit_N):
        failed.append("early exit accepts other swaps than full evaluation")

    full, early = [], []
    numpys: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        full.append(cpu_seconds(kernel, static, state, moves_N4, limit_N, False, full_N))
        for batched, seconds in zip(best, numpys, strict=True):
            seconds.append(cpu_seconds(batched, moves_N4, numpy_N))
        early.append(cpu_seconds(kernel, static, state, moves_N4, limit_N, True, early_N))
    batches = (best[0].batch, best[1].batch)
    return Timed(full, early, numpys, evaluated / swaps, batches, failed)


def times(slow: list[float], fast: list[float]) -> float:
    """How often `fast` fits into `slow`: the median over alternations."""
    return statistics.median(s / f for s, f in zip(slow, fast, strict=True))


def one_core(
    made: Annealed, swaps: int, repeats: int, seed: int
) -> tuple[list[list[str]], list[str]]:
    """Lines of a table, and what failed. Binds the process to one CPU."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    kinds = [
        time_swaps(made, between_groups(made, chunks(made, swaps), swaps), repeats, seed)
        for chunks in (random_swaps, proposed_swaps)
    ]
    chain = made.chain(2)
    search = [
        cpu_seconds(chain.sweep, made.temperature, TOTAL_WEIGHT, 0.0, swaps) for _ in range(repeats)
    ]
    accepted = chain.results[ACCEPTED] / (repeats * swaps)

    failed = [line for kind in kinds for line in kind.failed]
    random = kinds[0]
    if (least := min(times(slow, random.full) for slow in random.numpys)) < LEAST_FULL:
        failed.append(f"kernel in full / fastest numpy = {least:.2f}, expected {LEAST_FULL:g}")
    if (least := times(random.numpys[0], random.early)) < LEAST_EARLY:
        failed.append(f"kernel, early exit / numpy = {least:.2f}, expected {LEAST_EARLY:g}")

    def cells(kind: Timed, seconds: list[float]) -> list[str]:
        rate = f"{swaps / statistics.median(seconds) / 1e6:.2f}"
        return [rate, *(f"{times(slow, seconds):.1f}" for slow in kind.numpys)]

    full = [cell for kind in kinds for cell in cells(kind, kind.full)]
    early = [cell for kind in kinds for cell in cells(kind, kind.early)]
    at_once = [cell for kind in kinds for cell in cells(kind, kind.numpys[0])]
    by_rank = [cell for kind in kinds for cell in cells(kind, kind.numpys[1])]
    shares = " and ".join(f"{kind.evaluated:.0%}" for kind in kinds)
    n = [" and ".join(f"{kind.batches[k]}" for kind in kinds) for k in range(2)]
    return [
        ["kernel, full evaluation", *full],
        [f"kernel, early exit ({shares} in full)", *early],
        [
            f"a sweep, which also proposes and applies ({accepted:.1%} accepted)",
            *[""] * 3,
            *cells(kinds[1], search),
        ],
        [f"numpy, [n, R, L] at once, n = {n[0]}", *at_once],
        [f"numpy, [n, L] rank by rank, n = {n[1]}", *by_rank],
    ], failed


# --- two threads -------------------------------------------------------------------------------


def two_threads(made: Annealed, proposals: int, repeats: int) -> float:
    """Wall time of two chains on one thread / on two: the fastest of each, as load only adds."""
    chains = [made.chain(3), made.chain(4)]

    def sweep(chain: Chain) -> None:
        chain.sweep(made.temperature, TOTAL_WEIGHT, 0.0, proposals)

    fastest = [np.inf, np.inf]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(2) as two:
        for _ in range(repeats):
            for k, pool in enumerate((one, two)):
                begin = time.perf_counter()
                list(pool.map(sweep, chains))
                fastest[k] = min(fastest[k], time.perf_counter() - begin)
    return fastest[0] / fastest[1]


def main() -> None:
    """Measure every setting, and print the tables and the failed checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=", ".join(SETTINGS))
    parser.add_argument("--swaps", type=int, default=65_536)
    parser.add_argument("--repeats", type=int, default=9, help="alternations")
    parser.add_argument("--plan-seconds", type=float, default=1.0, help="for the layout")
    parser.add_argument("--seed", type=int, default=0, help="of the thresholds")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a check fails")
    args = parser.parse_args()
    if unknown := [name for name in args.settings if name not in SETTINGS]:
        parser.error(f"no setting {', '.join(unknown)}: choose from {', '.join(SETTINGS)}")

    made = {
        name: annealed(SETTINGS[name], args.plan_seconds, 16 * args.swaps)
        for name in args.settings or SETTINGS
    }
    failed, threads = [], []
    if len(os.sched_getaffinity(0)) > 1:  # first: then the process is bound to one CPU
        for name, layout in made.items():
            ratio = two_threads(layout, args.swaps, 30 * args.repeats)
            threads.append([name, f"{ratio:.2f}"])
            if ratio < LEAST_THREADS:
                failed.append(f"{name}: two threads {ratio:.2f}, expected {LEAST_THREADS:g}")
    parts = []
    for name, layout in made.items():
        groups, ranks, layers = layout.state.load_BRL.shape
        lines, wrong = one_core(layout, args.swaps, args.repeats, args.seed)
        failed += [f"{name}: {what}" for what in wrong]
        parts.append(
            f"{name}: L={layers}, R={ranks}, {groups} groups; {args.swaps} swaps on one core, CPU "
            f"time, medians of {args.repeats} alternations; numpy in the best of {len(BATCHES)} "
            f"batch sizes n. All energies are compared by `==`, all decisions too."
        )
        header = ["", *(f"{of}: {what}" for of in KINDS for what in COLUMNS)]
        parts.append(table(header, lines))
    if threads:
        parts.append(
            f"Two chains swept on two threads and on one, {args.swaps} proposals each: wall time, "
            f"the fastest of {30 * args.repeats} alternations."
        )
        parts.append(table(["", "speed of two threads / one"], threads))
    sys.exit(emit("\n\n".join(parts), args.markdown, failed, args.check))


if __name__ == "__main__":
    main()
