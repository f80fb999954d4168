"""The paper's directions on its models and step (arXiv 2608.12146), from EP4 to EP64.

python -m bench.directions [--sizes tiny flash] [--eps 4 8 ...] [--caps 8192 ...] [--seconds S] ...

First placement: how far the aggregate load of the EP ranks varies before and after LPT, beside a
bound that no placement can beat. Then packing: what the search changes relative to `reorder` (LPT
and first-fit decreasing) and `reorder-kk` (LPT and balanced attention), under their placement as in
the paper, and with routepack's own. Suffixes as in routepack; k: the k busiest ranks.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench.methods import setting
from bench.report import emit, table
from bench.workloads import Workload, ling3
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

import routepack
from routepack.bounds import analytic_bound
from routepack.budget import Budget, Meter
from routepack.placement import balanced_ranks, identity, ranks_of
from routepack.plan import Plan
from routepack.problem import Problem
from routepack.rows import minimal_rows, split_to
from routepack.search import FIXED_PLACEMENT, search
from routepack.window import Window

LEVEL = 0.003  # of the paper: the aggregate's coefficient of variation after placement
BASES = ("reorder", "reorder-kk")
SEVERAL_ROWS = 4  # fewer leave little to pack
TIGHT_ROWS, TIGHT_FILL, TIGHT_SAMPLES = 8, 0.98, 4  # rows, their fill, samples of a cell
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
    """Of a plan; or its change from another plan, in percent."""

    tail: float
    """99th percentile, over rows, shards and layers, of the busiest rank's routed tokens."""
    imbalance: float
    """The same of the busiest rank's share above the mean rank, max/mean."""
    peak_sum: float
    """Routed tokens of the busiest ranks, summed over rows, shards and layers."""
    joint: float
    """Slowest shard."""
    attention: float
    """Summed over rows and shards."""

    @property
    def ordered(self) -> bool:
        """Of a change: cuts the tail more than the peak sum, and that more than the joint cost."""
        return self.tail < self.peak_sum < self.joint < 0


NAMES = ("tail", "max/mean", "peak sum", "joint", "attention")


def measure(problem: Problem, rank_LE: NDArray[np.int32], cell_S: NDArray[np.int32]) -> Measures:
    """The measures of a layout under a placement."""
    static = problem.static(rank_LE)
    load_BRL = problem.state(static, cell_S).load_BRL
    busiest_BL = load_BRL.max(axis=1)
    score = problem.measure(static, cell_S).score
    return Measures(
        float(np.percentile(busiest_BL, 99)),
        float(np.percentile(busiest_BL / load_BRL.mean(axis=1), 99)),
        float(busiest_BL.sum(dtype=np.int64)), score.slowest_shard, score.attention,
    )  # fmt: skip


class Packed(NamedTuple):
    """One window at one EP size and cap."""

    workload: Workload
    size: str
    rows: int
    base_rows: dict[str, int]
    fill: float
    """Tokens / room of all cells."""
    placement: float
    """Change of the joint cost from `baseline` to `reorder`, in percent."""
    changes: dict[str, tuple[Measures, Measures]]
    """From each of BASES: by packing under its placement, and by routepack."""

    def line(self, base: str) -> list[str]:
        """A line of the table."""
        workload, (fixed, full) = self.workload, self.changes[base]
        more = self.base_rows[base] - self.rows
        return [
            self.size,
            str(workload.ep), str(workload.token_cap),
            f"{self.rows}" + (f" ({base} {more:+d})" if more else ""),
            f"{self.fill:.2f}",
            *(f"{change:+.1f}" for change in fixed),
            "yes" if fixed.ordered else "no",
            *(f"{change:+.1f}" for change in full),
        ]  # fmt: skip


def tight_cap(window: Window, dp: int) -> int:
    """A cap whose rows are nearly full: TIGHT_ROWS of them, or fewer for want of samples."""
    rows = max(1, min(TIGHT_ROWS, window.samples // (dp * TIGHT_SAMPLES)))
    tokens = int(window.lengths_S.sum())
    return max(int(window.lengths_S.max()), math.ceil(tokens / (rows * dp * TIGHT_FILL)))


def pack(workload: Workload, window: Window, seconds: float, seed: int, threads: int) -> Packed:
    """Plan with the trainers' layouts, the search under their LPT placement, and `routepack`."""
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

    bases = {base: plan(base) for base in BASES}
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
    fixed, full = measure(problem, rank_LE, archive.cell_S), measured(plan("routepack"))

    def change(before: Measures, after: Measures) -> Measures:
        return Measures(*(100 * (b / a - 1) for a, b in zip(before, after, strict=True)))

    before = {base: measured(made) for base, made in bases.items()}
    return Packed(
        workload, workload.name.split("-")[1],
        rows.rows, {base: len(made.rows) for base, made in bases.items()},
        int(window.lengths_S.sum()) / (problem.cells * cap),
        100 * (before["reorder"].joint / measured(plan("baseline")).joint - 1),
        {base: (change(m, fixed), change(m, full)) for base, m in before.items()},
    )  # fmt: skip


class Summary(NamedTuple):
    """Medians over the windows of a model, those with rows enough and as many as the base.

    In one or two rows there is little to pack, and what there is lies in attention.
    """

    size: str
    base: str
    packed: list[Packed]

    def medians(self, which: int) -> Measures:
        """Of the changes by packing under LPT placement (0) or by routepack (1)."""
        changes = (one.changes[self.base][which] for one in self.packed)
        return Measures(*(statistics.median(v) for v in zip(*changes, strict=True)))

    def lines(self) -> list[list[str]]:
        """Two lines of the table."""
        return [
            [
                self.size, self.base, name, str(len(self.packed)),
                *(f"{change:+.1f}" for change in self.medians(which)),
                str(sum(one.changes[self.base][which].ordered for one in self.packed)),
            ]
            for which, name in enumerate(("packing", "routepack"))
        ]  # fmt: skip

    def failures(self) -> list[str]:
        """The order of the paper, under LPT placement as there."""
        m = self.medians(0)
        if m.ordered:
            return []
        return [
            f"{self.size}, relative to {self.base}: tail {m.tail:+.2f} %, peak sum "
            f"{m.peak_sum:+.2f} %, joint cost {m.joint:+.2f} %, expected in falling order"
        ]


def summarise(size: str, base: str, packed: list[Packed]) -> list[Summary]:
    """One summary, or none where there is nothing to compare."""
    enough = [
        one for one in packed
        if one.size == size and one.rows >= SEVERAL_ROWS and one.rows == one.base_rows[base]
    ]  # fmt: skip
    return [Summary(size, base, enough)] if enough else []


def main() -> None:
    """Parse the flags, measure, print the tables and the failed checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=("tiny", "flash"), default=["tiny", "flash"])
    parser.add_argument("--eps", nargs="+", type=int, default=[4, 8, 16, 32, 64], metavar="R")
    parser.add_argument(
        "--caps", nargs="+", type=int, default=[8192, 2048, 1024], metavar="C",
        help="beside a cap that fills the rows",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=2.0, help="of each search")
    parser.add_argument("--seed", type=int, default=0, help="of the windows and searches")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a check fails")
    args = parser.parse_args()

    placed: list[Placed] = []
    packed: list[Packed] = []
    for size in args.sizes:
        window = ling3(size).window(args.seed)  # the same at any EP size and cap
        assert window is not None
        for ep in args.eps:
            placed.append(place(size, ep, window))
            tight = tight_cap(window, ling3(size, ep).dp)
            for cap in (*args.caps, tight):
                workload = ling3(size, ep, cap)
                if not packed:  # loads the kernels
                    pack(workload, window, 0.1, args.seed, args.threads)
                packed.append(pack(workload, window, args.seconds, args.seed, args.threads))
                print(f"{workload.name} done", file=sys.stderr)

    summaries = []
    for size in args.sizes:
        for base in BASES:
            summaries += summarise(size, base, packed)
    failed = [line for one in (*placed, *summaries) for line in one.failures()]
    parts = [
        f"CV of the aggregate load of the EP ranks, mean over layers (largest), window seed "
        f"{args.seed}. Impossible: layers whose proven floor is above {LEVEL}. Missed: the others "
        f"that stay above. Joint: joint cost of `reorder` relative to `baseline`, in %, by cap.",
        table(
            [
                "model", "EP", "E/R", "CV before", "after LPT", "floor", f"layers < {LEVEL}",
                "impossible", "missed", "joint",
            ],
            [[*one.line(), joint_by_cap(one, packed)] for one in placed],
        ),
        f"Packing: changes in %, medians over windows with at least {SEVERAL_ROWS} rows and as "
        f"many as the base has. Tail: 99th percentile of the busiest rank's routed tokens over "
        f"rows, shards and layers; max/mean: of its ratio to the mean rank. In order: windows "
        f"where tail < peak sum < joint < 0. {args.seconds:g} s a search. {REPORTED}",
        table(
            ["model", "relative to", "by", "windows", *NAMES, "in order"],
            [line for summary in summaries for line in summary.lines()],
        ),
    ]  # fmt: skip
    for base in BASES:
        parts.append(f"Every window, relative to `{base}`: packing, then routepack.")
        header = ["model", "EP", "cap", "rows", "fill", *NAMES, "in order", *NAMES]
        parts.append(table(header, [one.line(base) for one in packed]))
    sys.exit(emit("\n\n".join(parts), args.markdown, failed, args.check))


def joint_by_cap(placed: Placed, packed: list[Packed]) -> str:
    """What placement alone changes in the joint cost."""
    same = [p for p in packed if p.size == placed.size and p.workload.ep == placed.ep]
    return ", ".join(f"{one.placement:+.1f}" for one in same)


if __name__ == "__main__":
    main()
