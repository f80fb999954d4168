"""Planning with a requirement against planning without and fixing the layout after the fact.

python -m bench.requirements [WORKLOAD ...] [--evaluations N] [--seed K] [--check] ...

Both plans of a line have the same number of proposals; the fix (repair.py) is greedy, knows the
rows of the plan that knew of the requirement, and changes the layout, or for routing groups the
placement. Requirements, each so that it asks for something:

    equal samples   as many samples on every DP rank
    rows x N        N the smallest number that does not divide the rows without it
    samples <= N    N the mean number of samples of a cell, rounded up
    prompt on rank  a prompt's rollouts on one DP rank
    prompt in cell  in one cell
    tags            two tags, by halves of the prompts; a row has one
    tokens <= N     N a fifth of the way from the busiest rank of the plan without to balance
    8 groups        routing groups of consecutive experts stay on one of two nodes

Then layouts of scripts with D < R (tensor and context parallelism), with a deadline.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from bench.methods import setting
from bench.repair import repaired
from bench.report import emit, table
from bench.workloads import WORKLOADS, Workload

import routepack
from routepack import InputError, Plan, Requirements, Topology, Window
from routepack.bounds import analytic_bound
from routepack.objective import score
from routepack.placement import ranks_of
from routepack.problem import Problem
from routepack.requirement_checks import broken_requirements
from routepack.verify import verify

NODES, GROUPS = 2, 8  # nodes of an EP group, routing groups
SCRIPTS = (("qwen3-30b-math", 8, 32), ("ling-flash-code", 16, 64))  # window, R, samples; D = 2


@dataclass(frozen=True)
class Line:
    """A requirement on a window: slowest shard / analytic bound, or why there is none."""

    workload: str
    name: str
    binds: bool
    """Whether the plan without does not meet it."""
    rows: int
    planned: float | None
    repaired: float | None
    free: float
    free_rows: int
    note: str = ""
    broken: tuple[str, ...] = ()

    @property
    def worse(self) -> bool:
        """Whether the fix is better, or finds a layout where the plan does not."""
        if self.planned is None:
            return self.repaired is not None
        return self.repaired is not None and self.planned > self.repaired


def cut(window: Window, ranks: int) -> Window:
    """The window without the last samples, those beyond a multiple of the DP ranks, with tags."""
    window = window.select(np.arange(window.samples // ranks * ranks))
    assert window.group_S is not None
    unit_S = np.unique(window.group_S, return_inverse=True)[1]
    return replace(window, tag_S=unit_S * 2 // (unit_S.max() + 1))


def asked(free: Plan, problem: Problem) -> Iterator[tuple[str, Requirements]]:
    """The requirements, by name."""
    rows, window, ranks = len(free.rows), problem.window, problem.topology.ep
    yield "equal samples", Requirements(equal_samples_per_rank=True)
    multiple = next(n for n in range(2, rows + 2) if rows % n)
    yield f"rows x {multiple}", Requirements(rows_multiple_of=multiple)
    most = -(-window.samples // problem.cells)
    yield f"samples <= {most}", Requirements(max_samples_per_cell=most)
    yield "prompt on rank", Requirements(together="rank")
    yield "prompt in cell", Requirements(together="cell")
    yield "tags", Requirements(uniform_rows=True)
    static = problem.static(ranks_of(free.placement_LE, ranks))
    cell_S = problem.from_bins([cell for row in free.rows for cell in row])
    reached = problem.largest_load(static, cell_S)
    groups = rows * problem.topology.edp
    proven = int((-(-window.demand_LE.sum(axis=1) // (ranks * groups))).max())
    limit = reached - (reached - proven) // 5
    yield f"tokens <= {limit:,}", Requirements(memory_limit_tokens=limit)
    if window.experts % GROUPS == 0 and ranks % NODES == 0:
        required = Requirements(routing_groups=GROUPS, ranks_per_node=ranks // NODES)
        yield f"{GROUPS} groups", required


def compare(workload: Workload, evaluations: int, seed: int) -> Iterator[Line]:
    """Every requirement on a window."""
    whole = workload.window(seed)
    assert whole is not None
    window, cap = cut(whole, workload.dp), workload.token_cap
    topology, cost_model = setting(workload)
    cost = cost_model.resolve(window, topology, cap)
    bound = analytic_bound(window, topology, cost)

    def plan(required: Requirements) -> Plan:
        return routepack.plan(
            window, topology, token_cap=cap, cost_model=cost_model, requirements=required,
            budget=routepack.Budget(evaluations=evaluations),
        )  # fmt: skip

    free = plan(Requirements())
    base = Problem(window, topology, cost, cap, len(free.rows))
    for name, required in asked(free, base):
        met = not broken_requirements(required, window, topology, free.placement_LE, free.rows)
        planned, note = None, ""
        try:
            planned = plan(required)
        except InputError as error:
            note = str(error)
        rows = len(planned.rows) if planned else len(free.rows)
        fix = None if met else repaired(base.with_rows(rows), free, required)
        ratio = None
        if fix is not None:
            layout = fix.problem.to_rows(fix.cell_S)
            assert not broken_requirements(required, window, topology, fix.placement_LE, layout)
            assert fix.tokens_c.max() <= cap
            ratio = score(window, topology, cost, fix.placement_LE, layout).slowest_shard / bound
        yield Line(
            workload.name, name, not met, rows,
            planned.score.slowest_shard / bound if planned else None, ratio,
            free.score.slowest_shard / bound, len(free.rows), note,
            tuple(verify(window, planned)) if planned else (),
        )  # fmt: skip


def script(name: str, ranks: int, samples: int, seconds: float, seed: int) -> list[str]:
    """A layout of two DP ranks over an EP group of `ranks`: rows, gap, planning seconds."""
    workload = WORKLOADS[name]
    whole = workload.window(seed)
    assert whole is not None
    window = whole.select(np.arange(samples))
    topology = Topology(dp=2, ep=ranks, edp=1)
    _, cost_model = setting(workload)
    plans = {
        method: routepack.plan(
            window, topology, token_cap=workload.token_cap, cost_model=cost_model, method=method,
            budget=routepack.Budget(seconds=seconds),
        )
        for method in ("reorder-kk", "routepack")
    }  # fmt: skip
    ours = plans["routepack"]
    below = 1 - ours.score.slowest_shard / plans["reorder-kk"].score.slowest_shard
    attention = ours.score.attention / (ours.score.attention + ours.score.expert)
    return [
        f"D=2 R={ranks} G=1 S={samples} ({name})",
        f"{len(ours.rows)}" + ("" if ours.certificate.rows_certified else " (not certified)"),
        f"{100 * ours.certificate.gap:.2f}",
        ours.certificate.cost_bound_method,
        f"{100 * attention:.0f}",
        f"{100 * below:.2f}",
        f"{ours.stats['planning_seconds']:.2f}",
    ]


def failures(line: Line) -> Iterator[str]:
    """Checks that fail."""
    where = f"{line.workload}, {line.name}"
    if line.binds and line.worse:
        planned = "no plan" if line.planned is None else f"{line.planned:.4f}"
        yield f"{where}: planned {planned}, repaired {line.repaired:.4f}"
    if not line.binds and line.planned is not None and line.planned > line.free * 1.005:
        yield f"{where}: planned {line.planned:.4f}, which {line.free:.4f} meets without"
    yield from (f"{where}: {broken}" for broken in line.broken)


def main() -> None:
    """Parse the flags, plan, and print the tables and the failed checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--evaluations", type=int, default=400_000, help="of each plan")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a script's layout")
    parser.add_argument("--seed", type=int, default=0, help="of the windows")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a check fails")
    args = parser.parse_args()
    if unknown := [name for name in args.workloads if name not in WORKLOADS]:
        parser.error(f"no workload {', '.join(unknown)}: choose from {', '.join(WORKLOADS)}")
    lines: list[list[str]] = []
    failed: list[str] = []
    notes: list[str] = []
    for name in args.workloads or WORKLOADS:
        workload = WORKLOADS[name]
        if workload.skip_reason:
            notes.append(f"Skipped: {workload.skip_reason}.")
            continue
        for line in compare(workload, args.evaluations, args.seed):
            planned = f"**{line.planned:.4f}**" if line.planned is not None else "none"
            fixed = f"{line.repaired:.4f}" if line.repaired is not None else "fails"
            rows = f"{line.rows}" + (f" ({line.free_rows})" if line.rows != line.free_rows else "")
            fixed = fixed if line.binds else "met without"
            lines.append([line.workload, line.name, rows, planned, fixed, f"{line.free:.4f}"])
            failed += failures(line)
            if line.note:
                notes.append(f"{line.workload}, {line.name}: {line.note}.")
            print(" ".join(lines[-1]), file=sys.stderr)
    header = ["workload", "requirement", "rows (without)", "planned", "repaired", "without"]
    about = (
        f"Slowest shard / analytic bound, {args.evaluations:,} proposals a plan, window seed "
        f"{args.seed}."
    )
    parts = [about, table(header, lines), *notes]
    if not args.workloads:
        header = ["layout", "rows", "gap (%)", "bound", "attention (%)", "below reorder-kk (%)",
                  "planning (s)"]  # fmt: skip
        scripts = [script(*one, args.seconds, args.seed) for one in SCRIPTS]
        parts += [f"Layouts of scripts, {args.seconds:g} s:", table(header, scripts)]
    sys.exit(emit("\n\n".join(parts), args.markdown, failed, args.check))


if __name__ == "__main__":
    main()
