"""What a plan is worth at each deadline, and whether the deadline holds.

python -m bench.anytime [WORKLOAD ...] [--seconds s ...] [--seeds N] [--search-seeds N] [--check]

A deadline runs from the entry of `routepack.plan`. `--seconds 60 --seeds 1` takes a quarter of an
hour and is not part of `make bench`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.compare import windows
from bench.methods import setting
from bench.report import emit, table
from bench.workloads import WORKLOADS, Workload

import routepack
from routepack.bounds import analytic_bound
from routepack.plan import Plan
from routepack.verify import verify
from routepack.window import Window

SECONDS = (0.02, 0.05, 0.25, 1.0)
REFERENCES = {0.25: ("s025", 0.001), 1.0: ("s1", 0.0005)}
"""Reference at a deadline, and what a plan may be above it."""
LONG_SECONDS = 60.0
LEAST_BELOW_BEST = 8  # of the workloads with references, at LONG_SECONDS
ALLOWED_SECONDS, ALLOWED_SHARE = 0.010, 0.05  # past a deadline
LENGTH_ONLY = ("reorder", "reorder-kk")


class Run(NamedTuple):
    """One plan."""

    workload: Workload
    window_seed: int
    seconds: float
    ratio: float
    """Slowest shard / analytic bound."""
    over_seconds: float
    """Wall time of routepack.plan beyond the deadline; negative before it."""
    broken: list[str]
    """Lines of verify()."""
    worse_than: list[str]
    """Length-only layouts of as many rows that have a better score."""


def run(
    workload: Workload,
    seed: int,
    window: Window,
    deadlines: Sequence[float],
    search_seeds: int,
    threads: int | None,
) -> list[Run]:
    """Plan a window with every deadline and search seed."""
    topology, cost_model = setting(workload)
    cost = cost_model.resolve(window, topology, workload.token_cap)
    bound = analytic_bound(window, topology, cost)

    def plan(method: str, seconds: float | None, search_seed: int) -> Plan:
        budget = routepack.Budget(seconds=seconds) if seconds else None
        return routepack.plan(
            window, topology, token_cap=workload.token_cap, cost_model=cost_model,
            method=method, budget=budget, seed=search_seed, threads=threads,
        )  # fmt: skip

    others = [plan(method, None, 0) for method in LENGTH_ONLY]
    runs = []
    for seconds in deadlines:
        for search_seed in range(search_seeds):
            begin = time.perf_counter()
            made = plan("routepack", seconds, search_seed)
            over_seconds = time.perf_counter() - begin - seconds
            worse_than = [
                other.method
                for other in others
                if len(other.rows) == len(made.rows) and made.score.key > other.score.key
            ]
            ratio, broken = made.score.slowest_shard / bound, verify(window, made)
            runs.append(Run(workload, seed, seconds, ratio, over_seconds, broken, worse_than))
    return runs


def allowed_seconds(seconds: float) -> float:
    """How late a plan with this deadline may be."""
    return ALLOWED_SECONDS + ALLOWED_SHARE * seconds


def median_ratio(
    runs: Sequence[Run], name: str, seconds: float, window_seed: int = 0
) -> float | None:
    """Over the search seeds, by default on the window that references are for; None without one."""
    ratios = [
        run.ratio
        for run in runs
        if (run.workload.name, run.window_seed, run.seconds) == (name, window_seed, seconds)
    ]
    return statistics.median(ratios) if ratios else None


def failures(runs: Sequence[Run]) -> list[str]:
    """The checks that do not hold, in words."""
    failed = []
    for run in runs:
        at = f"{run.workload.name} seed {run.window_seed}, {run.seconds:g} s"
        failed += [f"{at}: verify: {line}" for line in run.broken]
        failed += [f"{at}: worse than {method}" for method in run.worse_than]
        if run.over_seconds > allowed_seconds(run.seconds):
            failed.append(f"{at}: {1000 * run.over_seconds:.1f} ms late")
    below, known = 0, 0
    for workload in {run.workload.name: run.workload for run in runs}.values():
        if not workload.reference:
            continue
        for seconds, (key, slack) in REFERENCES.items():
            ratio = median_ratio(runs, workload.name, seconds)
            limit = workload.reference[key]
            if ratio is not None and ratio > limit + slack:
                at = f"{workload.name}, {seconds:g} s"
                failed.append(f"{at}: {ratio:.4f} > {limit:.4f} + {slack:g}")
        ratio = median_ratio(runs, workload.name, LONG_SECONDS)
        if ratio is not None:
            known += 1
            below += ratio < workload.reference["best"]
    if known > LEAST_BELOW_BEST and below < LEAST_BELOW_BEST:
        failed.append(f"{LONG_SECONDS:g} s: below the best on {below} of {known} workloads")
    return failed


def quality(runs: Sequence[Run], deadlines: Sequence[float]) -> str:
    """A table with a line for each workload: its first window, then the others."""
    columns: list[tuple[str, float | str]] = []
    for seconds in deadlines:
        columns.append((f"{seconds:g} s", seconds))
        if seconds in REFERENCES:
            columns.append((f"ref. {seconds:g} s", REFERENCES[seconds][0]))
    columns.append(("ref. best", "best"))
    others = sorted({run.window_seed for run in runs} - {0})
    shown = [seconds for seconds in deadlines if seconds in REFERENCES] if others else []
    lines = []
    for name, workload in {run.workload.name: run.workload for run in runs}.items():
        values = [
            median_ratio(runs, name, key)
            if isinstance(key, float)
            else (workload.reference or {}).get(key)
            for _, key in columns
        ]
        cells = ["" if value is None else f"{value:.4f}" for value in values]
        for seconds in shown:
            found = [median_ratio(runs, name, seconds, seed) for seed in others]
            cells.append(" ".join(f"{ratio:.4f}" for ratio in found if ratio is not None))
        lines.append([name, *cells])
    titles = [title for title, _ in columns]
    titles += [f"windows {others[0]}-{others[-1]}, {seconds:g} s" for seconds in shown]
    return table(["workload", *titles], lines)


def punctuality(runs: Sequence[Run], deadlines: Sequence[float]) -> str:
    """A table with a line for each deadline, every window."""
    lines = []
    for seconds in deadlines:
        made = [run for run in runs if run.seconds == seconds]
        over_ms = [1000 * run.over_seconds for run in made]
        lines.append(
            [
                f"{seconds:g} s",
                f"{len(made)}",
                f"{statistics.median(run.ratio for run in made):.4f}",
                f"{statistics.median(over_ms):+.1f}",
                f"{max(over_ms):+.1f}",
                f"{1000 * allowed_seconds(seconds):.0f}",
                f"{sum(run.over_seconds > allowed_seconds(seconds) for run in made)}",
                f"{sum(bool(run.broken) for run in made)}",
                f"{sum(bool(run.worse_than) for run in made)}",
            ]
        )
    header = [
        "deadline", "plans", "median ratio", "past it, median (ms)", "max (ms)", "allowed (ms)",
        "later", "broken", "worse than length-only",
    ]  # fmt: skip
    return table(header, lines)


def main() -> None:
    """Plan every window with every deadline, and print the tables and the failed checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--seconds", type=float, nargs="+", default=list(SECONDS), metavar="s")
    parser.add_argument("--seeds", type=int, default=5, help="windows of a generated workload")
    parser.add_argument("--search-seeds", type=int, default=1, help="plans of each window")
    parser.add_argument("--threads", type=int, help="default: every core")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a check fails")
    args = parser.parse_args()
    if unknown := [name for name in args.workloads if name not in WORKLOADS]:
        parser.error(f"no workload {', '.join(unknown)}: choose from {', '.join(WORKLOADS)}")

    runs: list[Run] = []
    notes = []
    for workload, seed, window in windows(args.workloads or list(WORKLOADS), args.seeds):
        if window is None:
            notes.append(f"Skipped: {workload.skip_reason}.")
            continue
        if not runs:  # loads the kernels, and compiles them after an installation
            run(workload, seed, window, [0.1], 1, args.threads)
        runs += run(workload, seed, window, args.seconds, args.search_seeds, args.threads)
        print(f"{workload.name} seed {seed}: {runs[-1].ratio:.4f}", file=sys.stderr)
    about = (
        f"Slowest shard / analytic bound, median of {args.search_seeds} search seed(s); planning "
        f"is part of a deadline. References are for window seed 0."
    )
    late = (
        f"Every window: {args.seeds} of a generated workload, {args.search_seeds} search seed(s) "
        f"each. A plan may be {1000 * ALLOWED_SECONDS:g} ms + {ALLOWED_SHARE:.0%} late; each is "
        f"verified, and compared with {' and '.join(LENGTH_ONLY)} at equal rows."
    )
    tables = [about, quality(runs, args.seconds), late, punctuality(runs, args.seconds)]
    sys.exit(emit("\n\n".join([*tables, *notes]), args.markdown, failures(runs), args.check))


if __name__ == "__main__":
    main()
