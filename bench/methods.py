"""Every method on every workload: slowest shard / analytic bound, at equal rows.

python -m bench.methods [WORKLOAD ...] [--seconds S] [--seed K] [--search-seeds N] [--check] ...
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from bench.report import emit, table
from bench.workloads import WORKLOADS, Workload

import routepack
from routepack.bounds import analytic_bound
from routepack.cost import AttentionStage, CostModel
from routepack.plan import METHODS, Plan
from routepack.topology import Topology
from routepack.verify import verify
from routepack.window import Window

SEARCHING = ("expert-only", "attention-only", "routepack")
SLACK = 0.03  # above what the experiments reached in one second
LEAST_GAIN = 0.015  # below reorder-kk, on real windows
REAL = ("gptoss20b_dev", "deepseek_v2_lite_dev")


def setting(workload: Workload) -> tuple[Topology, CostModel]:
    """The topology and the cost model that a workload is planned with."""
    stages = (AttentionStage(f"stage {k}", *ab) for k, ab in enumerate(workload.attention))
    topology = Topology.of(dp=workload.dp, ep=workload.ep, edp=workload.edp)
    return topology, CostModel(attention=tuple(stages))


class Result(NamedTuple):
    """What was planned for one workload; `plans` has the first search seed."""

    workload: Workload
    bound: float
    plans: dict[str, Plan]
    routepack: list[Plan]
    """One for each search seed."""
    broken: list[str]
    """Lines of verify()."""

    @property
    def ratios(self) -> list[float]:
        """Slowest shard / analytic bound of routepack, a value for each search seed."""
        return [plan.score.slowest_shard / self.bound for plan in self.routepack]

    @property
    def below_kk(self) -> list[float]:
        """How far routepack is below reorder-kk, as a share of the latter."""
        kk = self.plans["reorder-kk"].score.slowest_shard
        return [1 - plan.score.slowest_shard / kk for plan in self.routepack]


def run(
    workload: Workload, window: Window, seconds: float, search_seeds: int, threads: int | None
) -> Result:
    """Plan a window with every method, routepack with every search seed."""
    topology, cost_model = setting(workload)
    bound = analytic_bound(
        window, topology, cost_model.resolve(window, topology, workload.token_cap)
    )

    def plan(method: str, seed: int) -> Plan:
        budget = routepack.Budget(seconds=seconds)
        return routepack.plan(
            window, topology, token_cap=workload.token_cap, cost_model=cost_model,
            method=method, budget=budget, seed=seed, threads=threads,
        )  # fmt: skip

    plans = {method: plan(method, 0) for method in METHODS}
    every = [plans["routepack"], *(plan("routepack", seed) for seed in range(1, search_seeds))]
    broken = [line for made in every for line in verify(window, made)]
    return Result(workload, bound, plans, every, broken)


def failures(result: Result) -> list[str]:
    """The checks that do not hold, in words; each for the worst search seed."""
    workload, plans = result.workload, result.plans
    failed = [f"verify: {line}" for line in result.broken]
    worst, gain = max(result.ratios), min(result.below_kk)
    if workload.reference and worst > workload.reference["s1"] + SLACK:
        failed.append(f"routepack {worst:.4f} > {workload.reference['s1']:.4f} + {SLACK}")
    if workload.origin in REAL and gain < LEAST_GAIN:
        failed.append(f"routepack {gain:.2%} below reorder-kk, expected {LEAST_GAIN:.1%}")
    rows = len(plans["baseline"].rows)
    different = [f"{m} {len(p.rows)}" for m, p in plans.items() if len(p.rows) != rows]
    if different:
        failed.append(f"rows: baseline {rows}, {', '.join(different)}")
    return [f"{workload.name}: {line}" for line in failed]


def line(result: Result) -> list[str]:
    """A line of the table."""
    workload, plans = result.workload, result.plans
    ours = plans["routepack"]
    reference = workload.reference or {}
    rows = len(ours.rows)
    ratio = statistics.median(result.ratios)

    def cell(method: str) -> str:
        value = plans[method].score.slowest_shard / result.bound
        used = len(plans[method].rows)
        return f"{value:.4f}" + (f" ({used} rows)" if used != rows else "")

    planning = statistics.median(plan.stats["planning_seconds"] for plan in result.routepack)
    evaluations = statistics.median(plan.search.evaluations for plan in result.routepack)
    return [
        workload.name,
        f"{rows}" + ("" if ours.certificate.rows_certified else " (not certified)"),
        *(cell(method) for method in METHODS if method != "routepack"),
        f"**{ratio:.4f}**",
        *(f"{reference[key]:.4f}" if reference else "" for key in ("s1", "best")),
        f"{ratio - reference['s1']:+.4f}" if reference else "",
        f"{100 * statistics.median(result.below_kk):.2f}",
        f"{100 * statistics.median(plan.certificate.gap for plan in result.routepack):.2f}",
        f"{planning:.2f}",
        f"{evaluations / 1e6:.2f}",
    ]


def main() -> None:
    """Parse the flags, plan, and print the table and the failed checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=2.0, help="of a searching method")
    parser.add_argument("--seed", type=int, default=0, help="of the windows; references have 0")
    parser.add_argument("--search-seeds", type=int, default=1, help="runs of routepack")
    parser.add_argument("--threads", type=int, help="default: every core")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a check fails")
    args = parser.parse_args()
    if unknown := [name for name in args.workloads if name not in WORKLOADS]:
        parser.error(f"no workload {', '.join(unknown)}: choose from {', '.join(WORKLOADS)}")
    if args.search_seeds < 1:
        parser.error("--search-seeds: expected at least 1")

    lines, failed, notes, warm = [], [], [], False
    for name in args.workloads or WORKLOADS:
        workload = WORKLOADS[name]
        window = workload.window(args.seed)
        if window is None:
            notes.append(f"Skipped: {workload.skip_reason}.")
            continue
        if not warm:  # loads the kernels, and compiles them after an installation
            run(workload, window, 0.1, 1, args.threads)
            warm = True
        result = run(workload, window, args.seconds, args.search_seeds, args.threads)
        lines.append(line(result))
        failed += failures(result)
        print(f"{name}: routepack {statistics.median(result.ratios):.4f}", file=sys.stderr)
    others = [method for method in METHODS if method != "routepack"]
    header = [
        "workload", "rows", *others, "routepack", "ref. 1 s", "ref. best", "over ref. 1 s",
        "below reorder-kk (%)", "proven gap (%)", "planning (s)", "proposals (M)",
    ]  # fmt: skip
    about = (
        f"Slowest shard / analytic bound. {', '.join(SEARCHING)}: {args.seconds:g} s each; "
        f"routepack: median of {args.search_seeds} search seed(s), its gap to the best proven "
        f"bound, planning seconds and proposed moves. Window seed {args.seed}."
    )
    text = "\n\n".join([about, table(header, lines), *notes])
    sys.exit(emit(text, args.markdown, failed, args.check))


if __name__ == "__main__":
    main()
