"""The paper's directions on its models and step (arXiv 2608.12146), from EP4 to EP64.

python -m bench.directions [--sizes tiny flash] [--eps 4 8 ...] [--caps 8192 ...] [--seconds S] ...

First placement: how far the aggregate load of the EP ranks varies before and after LPT, beside a
bound that no placement can beat. Then packing: what the search changes relative to `reorder` (LPT
and first-fit decreasing), under that same placement as in the paper, and with routepack's own.
Suffixes as in routepack; k: the k busiest ranks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

import routepack
from bench.methods import setting
from bench.report import emit, table
from bench.workloads import Workload, ling3
from routepack.bounds import analytic_bound
from routepack.budget import Budget, Meter
from routepack.placement import balanced_ranks, identity, ranks_of
from routepack.plan import Plan
from routepack.problem import Problem
from routepack.rows import minimal_rows, split_to
from routepack.search import FIXED_PLACEMENT, search
from routepack.window import Window

LEVEL = 0.003  # of the paper: the aggregate's coefficient of variation after placement
REPORTED = "Reported by the paper: tail -11 %, peak sum -3 %, joint cost -1.5 %, attention up."


# --- placement -----------------------------------------------------------------------------------


def variation_L(demand_LE: NDArray[np.int64], rank_LE: NDArray[np.int32], ranks: int) -> Any:
    """Standard deviation / mean of the ranks' loads, per layer."""
    load_LR = np.zeros((len(demand_LE), ranks))
    for load_R, demand_E, rank_E in zip(load_LR, demand_LE, rank_LE, strict=True):
        load_R += np.bincount(rank_E, weights=demand_E, minlength=ranks)
    return load_LR.std(axis=1) / load_LR.mean(axis=1)


def floor_L(demand_LE: NDArray[np.int64], ranks: int) -> Any:
    """A variation that no placement of E/R experts per rank can go below, per layer.

    The k busiest ranks carry at least what k ranks with the k hottest experts do: those and, as
    all their slots are filled, the k (E/R - 1) lightest. They also carry at least k means. The
    loads that vary least under these partial sums are the slopes of their least concave majorant,
    since all others majorise them.
    """
    layers, experts = demand_LE.shape
    k = np.arange(ranks + 1)
    floors = np.empty(layers)
    for layer in range(layers):
        lightest_E = np.sort(demand_LE[layer])
        light = np.append(0, np.cumsum(lightest_E))
        hot = np.append(0, np.cumsum(lightest_E[::-1]))
        least_k = np.maximum(hot[k] + light[k * (experts // ranks - 1)], k * light[-1] / ranks)
        load_R = isotonic_regression(np.diff(least_k), increasing=False).x
        floors[layer] = load_R.std() / load_R.mean()
    return floors


class Placed(NamedTuple):
    """Coefficients of variation [L] of one window at one EP size."""

    size: str
    ep: int
    per_rank: int
    before_L: Any
    after_L: Any
    floor_L: Any

    @property
    def allowed_L(self) -> Any:
        """Layers whose hottest experts allow the paper's level, as far as is proven."""
        return self.floor_L < LEVEL

    def line(self) -> list[str]:
        """A line of the table."""
        above_L = self.after_L >= LEVEL
        return [
            self.size, str(self.ep), str(self.per_rank),
            *(f"{np.mean(v):.4f} ({np.max(v):.4f})" for v in (self.before_L, self.after_L)),
            f"{np.mean(self.floor_L):.4f} ({np.max(self.floor_L):.4f})",
            f"{np.count_nonzero(~above_L)} / {len(above_L)}",
            str(np.count_nonzero(~self.allowed_L)),
            str(np.count_nonzero(above_L & self.allowed_L)),
        ]  # fmt: skip

    def failures(self) -> list[str]:
        """Where the level is missed although there are experts enough to reach it."""
        missed = np.flatnonzero((self.after_L >= LEVEL) & self.allowed_L)
        if not missed.size:
            return []
        worst = missed[self.after_L[missed].argmax()]
        return [
            f"{self.size} EP{self.ep}: {missed.size} layers vary by {LEVEL} or more, where "
            f"{self.per_rank} experts a rank are not proven to prevent less; layer {worst} by "
            f"{self.after_L[worst]:.4f}, no less than {self.floor_L[worst]:.4f}"
        ]


def place(size: str, ep: int, window: Window) -> Placed:
    """Variation before and after LPT placement."""
    demand_LE = window.demand_LE
    contiguous_LE = ranks_of(identity(window.layers, window.experts), ep)
    return Placed(
        size, ep, window.experts // ep,
        variation_L(demand_LE, contiguous_LE, ep),
        variation_L(demand_LE, balanced_ranks(demand_LE, ep), ep),
        floor_L(demand_LE, ep),
    )  # fmt: skip


# --- packing -------------------------------------------------------------------------------------


class Measures(NamedTuple):
    """Of a plan: routed tokens of the busiest rank of each row, shard and layer, and costs."""

    tail: float
    """99th percentile."""
    peak: float
    """Maximum."""
    total: float
    joint: float
    """Slowest shard."""
    attention: float
    """Sum over rows and shards."""


def measure(problem: Problem, rank_LE: NDArray[np.int32], cell_S: NDArray[np.int32]) -> Measures:
    """The measures of a layout under a placement."""
    static = problem.static(rank_LE)
    busiest_BL = problem.state(static, cell_S).load_BRL.max(axis=1)
    score = problem.measure(static, cell_S).score
    return Measures(
        float(np.percentile(busiest_BL, 99)), float(busiest_BL.max()),
        float(busiest_BL.sum(dtype=np.int64)), score.slowest_shard, score.attention,
    )  # fmt: skip


class Packed(NamedTuple):
    """One window at one EP size and cap: changes are relative to `reorder`, in percent."""

    workload: Workload
    rows: int
    more_rows: bool
    """Whether first-fit decreasing needs more rows than the search."""
    placement: float
    """Joint cost of `reorder` relative to `baseline`."""
    fixed: Measures
    full: Measures

    @property
    def ordered(self) -> bool:
        """Packing cuts the tail more than the peak sum, and that more than the joint cost."""
        return self.fixed.tail < self.fixed.total < self.fixed.joint < 0

    def line(self) -> list[str]:
        """A line of the table."""
        workload = self.workload
        return [
            workload.name, str(workload.ep), str(workload.token_cap),
            f"{self.rows}" + (" (reorder more)" if self.more_rows else ""),
            f"{self.placement:+.1f}",
            *(f"{change:+.1f}" for change in self.fixed),
            "yes" if self.ordered else "no",
            *(f"{change:+.1f}" for change in self.full),
        ]  # fmt: skip


def pack(workload: Workload, window: Window, seconds: float, seed: int, threads: int) -> Packed:
    """Plan with `baseline`, `reorder`, the search under reorder's placement, and `routepack`."""
    topology, cost_model = setting(workload)
    cap = workload.token_cap
    cost = cost_model.resolve(window, topology, cap)

    def plan(method: str) -> Plan:
        return routepack.plan(
            window, topology, token_cap=cap, cost_model=cost_model, method=method,
            budget=Budget(seconds=seconds), seed=seed, threads=threads,
        )  # fmt: skip

    def measured(made: Plan) -> Measures:
        problem = Problem(window, topology, cost, cap, len(made.rows))
        cell_S = problem.from_bins([cell for row in made.rows for cell in row])
        return measure(problem, ranks_of(made.placement_LE, topology.ep), cell_S)

    reorder, ours = plan("reorder"), plan("routepack")
    base = measured(reorder)
    started = time.perf_counter()
    rows = minimal_rows(window.lengths_S, cap, topology.dp, seed=seed)
    problem = Problem(window, topology, cost, cap, rows.rows)
    rank_LE = balanced_ranks(window.demand_LE, topology.ep)
    archive, _ = search(
        problem, rank_LE, split_to(rows.bins, problem.cells),
        bound=analytic_bound(window, topology, cost), rounds=FIXED_PLACEMENT,
        meter=Meter(Budget(seconds=seconds), started), threads=threads, seed=seed,
    )  # fmt: skip
    assert archive.rank_LE is rank_LE

    def change(after: Measures) -> Measures:
        return Measures(*(100 * (b / a - 1) for a, b in zip(base, after, strict=True)))

    return Packed(
        workload, rows.rows, len(reorder.rows) > rows.rows,
        100 * (base.joint / measured(plan("baseline")).joint - 1),
        change(measure(problem, rank_LE, archive.cell_S)), change(measured(ours)),
    )  # fmt: skip


def medians(packed: list[Packed]) -> str:
    """The changes in the middle, and how often the order of the paper holds."""
    names = ("tail (p99)", "largest", "peak sum", "joint cost", "attention")
    lines = []
    for label, of in (("LPT placement", "fixed"), ("routepack", "full")):
        values = zip(*(getattr(one, of) for one in packed), strict=True)
        shown = (f"{n} {statistics.median(v):+.1f} %" for n, v in zip(names, values, strict=True))
        lines.append(f"- {label}: {', '.join(shown)}")
    ordered = sum(one.ordered for one in packed)
    lines.append(f"- tail < peak sum < joint cost < 0 in {ordered} of {len(packed)}")
    return "\n".join(lines)


def main() -> None:
    """Parse the flags, measure, print both tables and the failed checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=("tiny", "flash"), default=["tiny", "flash"])
    parser.add_argument("--eps", nargs="+", type=int, default=[4, 8, 16, 32, 64], metavar="R")
    parser.add_argument("--caps", nargs="+", type=int, default=[8192, 2048, 1024], metavar="C")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each search")
    parser.add_argument("--seed", type=int, default=0, help="of the windows and searches")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a check fails")
    args = parser.parse_args()

    placed, packed, notes = [], [], []
    for size in args.sizes:
        window = ling3(size).window(args.seed)  # the same at any EP size and cap
        assert window is not None
        for ep in args.eps:
            placed.append(place(size, ep, window))
            for cap in args.caps:
                workload = ling3(size, ep, cap)
                if not packed:
                    pack(workload, window, 0.1, args.seed, args.threads)  # loads the kernels
                packed.append(pack(workload, window, args.seconds, args.seed, args.threads))
                print(f"{workload.name} done", file=sys.stderr)
    failed = [line for one in placed for line in one.failures()]
    for one in packed:
        if one.rows > 1 and not one.ordered:  # in one row there is only attention to lower
            tail, _, total, joint, _ = one.fixed
            failed.append(
                f"{one.workload.name}: tail {tail:+.2f} %, peak sum {total:+.2f} %, joint cost "
                f"{joint:+.2f} %"
            )
    placement = table(
        [
            "model", "EP", "E/R", "CV before", "after LPT", "proven floor",
            f"layers < {LEVEL}", "impossible", "missed",
        ],
        [one.line() for one in placed],
    )  # fmt: skip
    changes = ("tail (p99)", "largest", "peak sum", "joint", "attention")
    packing = table(
        [
            "workload", "EP", "cap", "rows", "joint: placement",
            *changes, "in order", *(f"{name}, routepack" for name in changes),
        ],
        [one.line() for one in packed],
    )  # fmt: skip
    notes = [
        f"Placement: CV of the aggregate EP load, mean over layers (largest). Window seed "
        f"{args.seed}. impossible: layers whose floor is above {LEVEL}; missed: the others above.",
        placement,
        f"Packing, change in % relative to `reorder`: first under its placement, then `routepack`; "
        f"{args.seconds:g} s a search. joint: placement is `reorder` relative to `baseline`. "
        f"{REPORTED}",
        packing,
    ]
    for cap in args.caps:
        of_cap = [one for one in packed if one.workload.token_cap == cap]
        notes.append(f"Medians at cap {cap}:\n\n{medians(of_cap)}")
    sys.exit(emit("\n\n".join(notes), args.markdown, failed, args.check))


if __name__ == "__main__":
    main()
