"""How far each proven bound rises above the analytic one, and what of a gap is bound, what search.

python -m bench.bounds [WORKLOAD ...] [--tiny N] [--seconds s]

The first table has a line for each workload: bounds / analytic bound, and their time. The second is
of N windows a line, drawn by the workloads' generator, so small that the best of all layouts under
the best of all placements is known. A set of samples is a mask there, with bit s for sample s.

Suffixes: X masks, A all ways to cut the samples into groups, K groups, P placements of a layer.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench.methods import setting
from bench.report import emit, table
from bench.workloads import WORKLOADS, Lengths, Recipe, Workload, generate
from numpy.typing import NDArray
from scipy.optimize import linprog

import routepack
from routepack.bounds import (
    analytic_bound,
    attention_lift_of_stages,
    best_bound,
    placement_floor_L,
)
from routepack.budget import Budget
from routepack.cost import Coefficients
from routepack.rows import minimal_rows
from routepack.topology import Topology
from routepack.window import Window

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Choice = tuple[float, float, Any]  # costs of two shards, and what brings them


# --- the workloads -----------------------------------------------------------------------------


def timed(what: Callable[[], Any], repeats: int = 5) -> tuple[Any, float]:
    """A result and the median of its milliseconds."""
    spent = []
    for _ in range(repeats):
        begin = time.perf_counter()
        result = what()
        spent.append(1000 * (time.perf_counter() - begin))
    return result, statistics.median(spent)


def line(workload: Workload, window: Window) -> list[str]:
    """A line of the first table."""
    topology, model = setting(workload)
    cap = workload.token_cap
    rows = minimal_rows(window.lengths_S, cap, topology.dp, seed=0).rows
    cost = model.resolve(window, topology, cap)
    analytic, analytic_ms = timed(lambda: analytic_bound(window, topology, cost))
    lift, lift_ms = timed(lambda: attention_lift_of_stages(window, topology, cost, cap, rows))
    floor_L, floor_ms = timed(lambda: placement_floor_L(window.demand_LE, topology.ep))
    (best, name), _ = timed(lambda: best_bound(window, topology, cost, cap, rows), 1)
    demand_LE = window.demand_LE
    balanced_L = np.maximum(-(-demand_LE.sum(axis=1) // topology.ep), demand_LE.max(axis=1))
    extra = cost.expert * int((floor_L - balanced_L).sum())
    return [
        workload.name,
        f"{rows}",
        f"{100 * lift / topology.edp / analytic:.3f}",
        f"{100 * extra / topology.edp / analytic:.3f}",
        f"{best / analytic:.5f}",
        name,
        *(f"{ms:.1f}" for ms in (analytic_ms, lift_ms, floor_ms)),
    ]


# --- windows whose optimum is known ------------------------------------------------------------


class Tiny(NamedTuple):
    """A family of windows: 8 experts, 4 layers, top-2, `edp` * `rows` groups of dp / edp cells."""

    samples: int
    dp: int
    ep: int
    edp: int
    rows: int
    routing: str


FAMILIES = [
    Tiny(samples, dp, ep, edp, rows, routing)
    for routing in ("v2lite", "gptoss", "skewed")
    for samples, dp, ep, edp, rows in (
        (8, 2, 2, 1, 2), (12, 2, 2, 1, 2), (12, 2, 2, 1, 3), (12, 2, 4, 1, 2), (12, 4, 4, 1, 2),
        (12, 4, 2, 2, 2),
    )
]  # fmt: skip


def draw(family: Tiny, seed: int) -> tuple[Window, Workload]:
    """A window of the family, and the least cap (to 1/16) at which it takes the family's rows.

    The costs of a token, linear attention and experts, are in the proportion of the workloads.
    """
    recipe = Recipe(
        "tiny", 4, 8, 2, family.samples, 4, family.routing, 1, Lengths(400, 0.6, 2000, (40, 200))
    )
    trace = generate(recipe, seed)
    window = Window(trace.lengths_S, trace.demand_SLE, 2, group_S=trace.prompt_S)
    cap = max(int(trace.lengths_S.max()), int(trace.lengths_S.sum()) // (family.dp * family.rows))
    while minimal_rows(trace.lengths_S, cap, family.dp, seed=0).rows != family.rows:
        cap += cap // 16
    token = 0.3 * (family.dp / family.edp) * recipe.layers * recipe.top_k / family.ep
    name = f"{family.routing} {family.samples} samples, {family.rows} rows"
    attention = ((token, token),)
    return window, Workload(name, family.dp, family.ep, family.edp, cap, attention, recipe)


def partitions_AK(samples: int, groups: int) -> Int64:
    """Every way to cut the samples into non-empty groups [A, K], as masks; group 0 has sample 0."""
    cuts_AK = np.zeros((1, groups), np.int64)
    cuts_AK[0, 0] = 1
    for s in range(1, samples):
        grown = []
        for k in range(groups):
            can = np.ones(len(cuts_AK), bool) if k == 0 else cuts_AK[:, k - 1] > 0
            new_AK = cuts_AK[can].copy()
            new_AK[:, k] |= 1 << s
            grown.append(new_AK)
        cuts_AK = np.concatenate(grown)
    return cuts_AK[cuts_AK[:, -1] > 0]


def split(cost_X: Float64) -> Float64:
    """The least maximum when each mask is cut into two, each part costing cost_X."""
    masks = np.arange(len(cost_X))
    best_X = np.full(len(cost_X), np.inf)
    for x in masks:
        parts = masks[(masks & x) == masks]
        best_X[x] = np.maximum(cost_X[parts], cost_X[x ^ parts]).min()
    return best_X


def attention_of_masks(window: Window, cost: Coefficients, cap: int, width: int) -> Float64:
    """Attention of every set of samples as a group of 1, 2 or 4 cells; infinite if it is none."""
    bits = np.arange(1 << window.samples)[:, None] >> np.arange(window.samples) & 1
    tokens_X = bits @ window.lengths_S
    work_X = cost.linear_T[0] * tokens_X + cost.quadratic_T[0] * (
        bits @ cost.quadratic_tokens_TS[0]
    )
    cost_X = np.where((tokens_X > 0) & (tokens_X <= cap), work_X, np.inf)
    while width > 1:
        cost_X, width = split(cost_X), width // 2
    return cost_X


def busiest_of_masks(window: Window, ranks: int) -> Int64:
    """Load of the busiest rank, for every set of samples, layer and placement [X, L, P]."""
    experts = window.experts
    per_rank = experts // ranks
    placements = set()
    for order in itertools.permutations(range(experts)):
        parts = [order[r * per_rank : (r + 1) * per_rank] for r in range(ranks)]
        if all(list(p) == sorted(p) for p in parts) and parts == sorted(parts):
            placements.add(tuple(parts))
    bits = np.arange(1 << window.samples)[:, None] >> np.arange(window.samples) & 1
    demand_XLE = np.tensordot(bits, window.demand_SLE.astype(np.int64), 1)
    return np.stack(
        [
            np.stack([demand_XLE[:, :, part].sum(axis=2) for part in parts], axis=2).max(axis=2)
            for parts in sorted(placements)
        ],
        axis=2,
    )


class Optimum(NamedTuple):
    """Slowest shards: the lowest possible, and what relaxations prove to be below it."""

    optimum: float
    own_placements: float
    """The lowest if every group could have placements of its own."""
    own_program: float
    """The same as a linear program over all sets of samples, each taken in part or whole."""
    program: float
    """That program under the placement of the optimum, a bound for this placement alone."""


def solve(window: Window, topology: Topology, cost: Coefficients, cap: int, rows: int) -> Optimum:
    """Try all layouts and placements, those first whose groups would cost least on their own."""
    shards, groups = topology.edp, rows * topology.edp
    attention_X = attention_of_masks(window, cost, cap, topology.ranks_per_shard)
    busiest_XLP = busiest_of_masks(window, topology.ep)
    own_X = attention_X + cost.expert * busiest_XLP.min(axis=2).sum(axis=1)
    cuts_AK = partitions_AK(window.samples, groups)
    own_A = own_X[cuts_AK].sum(axis=1) / shards
    best, best_P = np.inf, np.zeros(window.layers, int)
    # Which groups form shard 0, with group 0 among them.
    mates = [(0, *m) for m in itertools.combinations(range(1, groups), rows - 1)]
    for a in np.argsort(own_A, kind="stable").tolist():
        if own_A[a] >= best:
            break
        busiest_KLP = busiest_XLP[cuts_AK[a]]
        mean = attention_X[cuts_AK[a]].sum() + cost.expert * busiest_KLP.sum(axis=0).min(1).sum()
        if mean / shards >= best:
            continue
        for first in mates if shards == 2 else [tuple(range(groups))]:
            second = [k for k in range(groups) if k not in first]
            fixed = [attention_X[cuts_AK[a][list(ks)]].sum() for ks in (first, second)]
            loads_2LP = np.stack([busiest_KLP[list(ks)].sum(axis=0) for ks in (first, second)])
            value, choice_P = _least_maximum(fixed, cost.expert * loads_2LP)
            if value < best:
                best, best_P = value, choice_P
    fixed_X = attention_X + cost.expert * busiest_XLP[:, np.arange(window.layers), best_P].sum(1)
    return Optimum(
        best,
        float(own_A.min()),
        _program(own_X, window.samples, groups) / shards,
        _program(fixed_X, window.samples, groups) / shards,
    )


def _least_maximum(fixed: list[float], loads_2LP: Float64) -> tuple[float, Int64]:
    """The least slower shard over the placements of all layers, and these: only choices that no
    other betters for both shards are carried from layer to layer."""
    layers = loads_2LP.shape[1]
    front = [(fixed[0], fixed[1], ())]
    for layer in range(layers):
        pairs = [(x, y, p) for p, (x, y) in enumerate(loads_2LP[:, layer].T.tolist())]
        grown = sorted((a + x, b + y, (*c, p)) for a, b, c in front for x, y, p in _front(pairs))
        front = _front(grown)
    best = min(front, key=lambda choice: max(choice[:2]))
    return max(best[:2]), np.array(best[2])


def _front(choices: list[Choice]) -> list[Choice]:
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda c: c[:2]):
        if not kept or choice[1] < kept[-1][1]:
            kept.append(choice)
    return kept


def _program(cost_X: Float64, samples: int, groups: int) -> float:
    """The least cost of `groups` sets that hold each sample once, sets taken in parts."""
    sets = np.flatnonzero(np.isfinite(cost_X))
    covers = np.concatenate(
        [sets[None] >> np.arange(samples)[:, None] & 1, np.ones((1, len(sets)))]
    )
    found = linprog(
        cost_X[sets], A_eq=covers, b_eq=np.append(np.ones(samples), groups), method="highs"
    )
    assert found.status == 0, found.message
    return float(found.fun)


def tiny_line(family: Tiny, seeds: range, seconds: float) -> tuple[list[str], list[list[float]]]:
    """A line of the second table, and for each window the values / optimum."""
    ratios = []
    for seed in seeds:
        window, workload = draw(family, seed)
        topology, model = setting(workload)
        cost = model.resolve(window, topology, workload.token_cap)
        found = solve(window, topology, cost, workload.token_cap, family.rows)
        best, _ = best_bound(window, topology, cost, workload.token_cap, family.rows)
        plan = routepack.plan(
            window, topology, token_cap=workload.token_cap, cost_model=model,
            budget=Budget(seconds=seconds), threads=1,
        )  # fmt: skip
        assert len(plan.rows) == family.rows
        assert best <= found.optimum <= plan.score.slowest_shard * (1 + 1e-12)
        analytic = analytic_bound(window, topology, cost)
        values = (analytic, best, *found[1:], plan.score.slowest_shard)
        ratios.append([value / found.optimum for value in values])
    shape = f"{family.samples} in {family.rows} x {family.dp}, R {family.ep}, G {family.edp}"
    return [family.routing, shape, *summary(ratios)], ratios


def summary(ratios: list[list[float]]) -> list[str]:
    """Percent from the optimum, in the mean, and how often the search found the optimum."""
    means = [100 * statistics.fmean(r[k] - 1 for r in ratios) for k in range(6)]
    found = sum(r[5] < 1 + 1e-9 for r in ratios)
    return [*(f"{mean:+.3f}" for mean in means), f"{found} / {len(ratios)}"]


def main() -> None:
    """Bound every workload, solve tiny windows, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--tiny", type=int, default=2, help="windows of each tiny family")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a search on a tiny window")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    if unknown := [name for name in args.workloads if name not in WORKLOADS]:
        parser.error(f"no workload {', '.join(unknown)}: choose from {', '.join(WORKLOADS)}")
    lines, notes = [], []
    for name in args.workloads or WORKLOADS:
        window = WORKLOADS[name].window(0)
        if window is None:
            notes.append(f"Skipped: {WORKLOADS[name].skip_reason}.")
            continue
        lines.append(line(WORKLOADS[name], window))
        print(f"{name}: {lines[-1][4]}", file=sys.stderr)
    header = [
        "workload", "rows", "attention floors (%)", "placement floor (%)", "best / analytic",
        "named", "analytic (ms)", "attention (ms)", "placement (ms)",
    ]  # fmt: skip
    about = "What proven bounds add to the analytic bound. Window seed 0."
    parts = [about, table(header, lines), *notes]
    if args.tiny > 0:
        every: list[list[float]] = []
        lines = []
        for family in FAMILIES:
            made, ratios = tiny_line(family, range(args.tiny), args.seconds)
            lines.append(made)
            every += ratios
            print(f"{made[0]} {made[1]}: bound {made[3]} search {made[7]}", file=sys.stderr)
        header = [
            "routing", "samples in rows x D", "analytic", "best bound", "own placements",
            "own, LP", "optimal placement, LP", "routepack", "optimal",
        ]  # fmt: skip
        about = (
            f"Percent from the true optimum over all layouts and placements, mean of {args.tiny} "
            f"windows of 8 experts and 4 layers; routepack has {args.seconds:g} s and one thread. "
            f"Own placements: a relaxation in which every group chooses its own."
        )
        parts += [about, table(header, [*lines, ["all", "", *summary(every)]])]
    sys.exit(emit("\n\n".join(parts), args.markdown, [], False))


if __name__ == "__main__":
    main()
