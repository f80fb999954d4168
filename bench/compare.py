"""Searches against each other on the same windows, in equal proposals and in equal seconds.

python -m bench.compare [WORKLOAD ...] [--seeds N] [--evaluations n] [--seconds s] [--check] ...

Differences are paired: each window's result with the paper's pipeline on that window. A generated
workload gives N windows, one with a file gives one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from bench.methods import setting
from bench.report import emit, table
from bench.searches import KK, METHODS, PAPER, SHIPPED, plan
from bench.workloads import WORKLOADS, Recipe, Workload
from numpy.typing import NDArray

from routepack.bounds import analytic_bound
from routepack.budget import Budget
from routepack.window import Window

RESAMPLES = 10_000  # of the windows, for an interval
SAME = 1e-9  # relative difference below which neither wins

Float64 = NDArray[np.float64]


class Runs(NamedTuple):
    """Results of one method, in the order of the windows [N]."""

    ratio_N: Float64
    """Slowest shard / analytic bound."""
    seconds_N: Float64
    """Planning, from the entry of routepack.plan."""
    proposals_N: Float64


def windows(names: Sequence[str], seeds: int) -> Iterator[tuple[Workload, int, Window | None]]:
    """Every window with its seed, one at a time; None for a workload whose file is absent."""
    for name in names:
        workload = WORKLOADS[name]
        for seed in range(seeds if isinstance(workload.origin, Recipe) else 1):
            yield workload, seed, workload.window(seed)


def run(workload: Workload, window: Window, budget: Budget, threads: int | None) -> Float64:
    """Ratio, seconds and proposals of each method on a window [methods, 3]."""
    topology, cost_model = setting(workload)
    cost = cost_model.resolve(window, topology, workload.token_cap)
    bound = analytic_bound(window, topology, cost)
    results = []
    for method in METHODS:
        made = plan(method, window, workload, budget, threads=threads)
        seconds = made.stats["planning_seconds"]
        results.append((made.score.slowest_shard / bound, seconds, made.search.evaluations))
    return np.array(results)


def interval(difference_N: Float64) -> tuple[float, float]:
    """Bootstrap 95 % interval of the median: windows are drawn anew, each with its own pair."""
    n = len(difference_N)
    draws = np.random.default_rng(0).integers(0, n, (RESAMPLES, n))
    low, high = np.percentile(np.median(difference_N[draws], axis=1), [2.5, 97.5])
    return float(low), float(high)


def difference(runs: Runs, base: Runs) -> Float64:
    """How far a method is above another, in %, on each window."""
    return np.asarray(100 * (runs.ratio_N / base.ratio_N - 1))


def against(runs: Runs, base: Runs) -> list[str]:
    """Cells on the difference to another method: median and interval, wins and losses."""
    if runs is base:
        return ["", ""]
    difference_N = difference(runs, base)
    low, high = interval(difference_N)
    wins, losses = (difference_N < -100 * SAME).sum(), (difference_N > 100 * SAME).sum()
    return [f"{np.median(difference_N):+.3f} ({low:+.3f} to {high:+.3f})", f"{wins} / {losses}"]


def line(name: str, by_name: dict[str, Runs], step_seconds: float) -> list[str]:
    """A line of a table."""
    runs, kk = by_name[name], by_name[KK.name]
    saved = step_seconds * float(np.mean(kk.ratio_N - runs.ratio_N))
    spent = float(np.mean(runs.seconds_N))
    return [
        name,
        *(f"{np.percentile(runs.ratio_N, q):.4f}" for q in (50, 10, 90)),
        *against(runs, by_name[PAPER.name]),
        *against(runs, by_name[SHIPPED.name]),
        f"{np.median(runs.proposals_N) / 1e6:.2f}",
        f"{spent:.3f}",
        *([""] * 2 if runs is kk else [f"{saved:.3f}", f"{saved / spent:.2f}"]),
    ]


HEADER = [
    "method", "median", "p10", "p90", "vs the paper (%)", "wins / losses", "vs routepack (%)",
    "wins / losses", "proposals (M)", "spent (s)", "saved (s)", "saved / spent",
]  # fmt: skip


def compare(
    budgets: Sequence[Budget], names: Sequence[str], seeds: int, threads: int | None
) -> tuple[list[dict[str, Runs]], list[str]]:
    """For each budget the runs of every method, and notes on workloads that were left out."""
    results: list[list[Float64]] = [[] for _ in budgets]
    notes = []
    warm = False
    for workload, seed, window in windows(names, seeds):
        if window is None:
            notes.append(f"Skipped: {workload.skip_reason}.")
            continue
        if not warm:  # loads the kernels, and compiles them after an installation
            run(workload, window, Budget(evaluations=1000), threads)
            warm = True
        for kept, budget in zip(results, budgets, strict=True):
            kept.append(run(workload, window, budget, threads))
        last = " ".join(f"{ratio:.4f}" for ratio in results[-1][-1][:, 0])
        print(f"{workload.name} seed {seed}: {last}", file=sys.stderr)
    made = []
    for kept in results:
        of_methods = np.stack(kept, axis=2)  # [methods, 3, N]
        by_name = zip(METHODS, of_methods, strict=True)
        made.append({method.name: Runs(*values) for method, values in by_name})
    return made, notes


def main() -> None:
    """Run every method on every window in both budgets, and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--seeds", type=int, default=3, help="windows of a generated workload")
    parser.add_argument("--evaluations", type=int, default=2_000_000, help="0: not this table")
    parser.add_argument("--seconds", type=float, default=0.5, help="0: not this table")
    parser.add_argument("--step-seconds", type=float, default=10.0, help="a step at the bound")
    parser.add_argument("--threads", type=int, help="default: every core")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a check fails")
    args = parser.parse_args()
    if unknown := [name for name in args.workloads if name not in WORKLOADS]:
        parser.error(f"no workload {', '.join(unknown)}: choose from {', '.join(WORKLOADS)}")
    budgets = [Budget(evaluations=args.evaluations)] if args.evaluations else []
    budgets += [Budget(seconds=args.seconds)] if args.seconds else []
    made, notes = compare(budgets, args.workloads or list(WORKLOADS), args.seeds, args.threads)

    parts, failed = [], []
    for budget, by_name in zip(budgets, made, strict=True):
        equal = f"{budget.seconds:g} s" if budget.seconds else f"{budget.evaluations} proposals"
        paper, shipped = by_name[PAPER.name], by_name[SHIPPED.name]
        parts.append(
            f"Slowest shard / analytic bound over {len(paper.ratio_N)} windows, {equal} each. The "
            f"paper: `{PAPER.name}`, placement fixed. Differences on the same window: median "
            f"(bootstrap 95 % interval), wins and losses. Means: spent, planning; saved, against "
            f"`{KK.name}`, where a step at the bound takes {args.step_seconds:g} s."
        )
        parts.append(table(HEADER, [line(name, by_name, args.step_seconds) for name in by_name]))
        _, high = interval(difference(shipped, paper))
        if high >= 0:
            failed.append(f"{equal}: routepack is not below the paper's pipeline ({high:+.3f} %)")
    sys.exit(emit("\n\n".join([*parts, *notes]), args.markdown, failed, args.check))


if __name__ == "__main__":
    main()
