"""Methods side by side, and the load of every expert-parallel (EP) rank before and after.

Shapes: M rows, G EDP shards, L MoE layers, R EP ranks. A rank's *ratio* is its routed tokens over
the mean rank of the same layer (and row and shard): at 1.00 nobody waits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from routepack.objective import row_costs
from routepack.plan import Plan
from routepack.report.balance import finite_max, finite_mean, ratios
from routepack.report.glyphs import HEAT_LEGEND, HIGH, Drawn, bar, deviation, heat
from routepack.report.text import cost_text
from routepack.window import Window

HEAT_WIDTH = 12  # marks for the layers; more layers share marks
ARM = 6  # cells of a bar on either side of its axis
PACE = 10  # cells of a bar that is full at twice the mean


@dataclass(frozen=True, eq=False)
class Outcome:
    """A plan with the routed tokens of each EP rank that it leads to."""

    plan: Plan
    load_MGLR: NDArray[np.int64]

    @classmethod
    def of(cls, window: Window, plan: Plan) -> Outcome:
        """Recompute the loads of a plan with the slow oracle."""
        topology = plan.to_topology()
        cost = plan.cost_model.resolve(window, topology, plan.token_cap)
        _, _, load_MGLR = row_costs(window, topology, cost, plan.placement_LE, plan.rows)
        return cls(plan, load_MGLR)

    @cached_property
    def step_LR(self) -> NDArray[np.float64]:
        """Ratio of each rank over the whole step, all rows and shards together."""
        return ratios(self.load_MGLR.sum(axis=(0, 1)))

    @cached_property
    def step_R(self) -> NDArray[np.float64]:
        """Ratio of each rank over the whole step and all layers."""
        return ratios(self.load_MGLR.sum(axis=(0, 1, 2)))

    @cached_property
    def busiest_MGL(self) -> NDArray[np.float64]:
        """Ratio of the busiest rank of every row, shard and layer: what paces its expert work."""
        return np.asarray(ratios(self.load_MGLR).max(axis=-1))

    @property
    def waiting(self) -> float:
        """Share of expert time that the average rank waits for the busiest one."""
        busiest = self.load_MGLR.max(axis=-1).sum()
        return 1.0 - float(self.load_MGLR.mean(axis=-1).sum() / busiest) if busiest else 0.0


def methods_table(outcomes: Sequence[Outcome]) -> RenderableType:
    """One line a method, costs in the unit of the cost model; changes are against the first."""
    first = outcomes[0].plan
    best = min(outcomes, key=lambda outcome: outcome.plan.score.key)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0)
    table.add_column("method", min_width=10, no_wrap=True)
    for name in ("rows", "slowest", "change", "attention", "expert", "peak", "gap", "sec"):
        width = 5 if name == "sec" else 7  # at most 80 in all, even for large costs
        table.add_column(name, justify="right", min_width=width, no_wrap=True)
    for outcome in outcomes:
        plan, score, certificate = outcome.plan, outcome.plan.score, outcome.plan.certificate
        relation = "=" if certificate.rows_certified else ">"
        change = score.slowest_shard / first.score.slowest_shard - 1
        table.add_row(
            plan.method,
            f"{len(plan.rows)} {relation} {certificate.rows_lower_bound}",
            cost_text(score.slowest_shard),
            "" if plan is first else f"{change:+.1%}",
            cost_text(score.attention),
            cost_text(score.expert),
            f"{outcome.load_MGLR.max():,}",
            f"{certificate.gap:.2%}",
            f"{plan.stats.get('planning_seconds', math.nan):.2f}",
            style="bold" if outcome is best else "",
        )
    legend = Text(
        "rows: = proven fewest, > proven bound. peak: most tokens routed to an EP rank at\n"
        "one layer of a row. gap: how far the slowest shard is above its proven bound.",
        "dim",
    )
    return Group(table, legend)


def rank_picture(before: Outcome, after: Outcome) -> RenderableType:
    """The load of every EP rank under two plans, and what it makes each micro-batch wait for."""
    sides = (before, after)
    most = max(finite_max(np.abs(side.step_R - 1)) for side in sides)
    full = max(0.05, math.ceil(most * 20) / 20)  # one scale for both, in steps of 5 %
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("EP\nrank", justify="right")
    for side in sides:
        table.add_column(f"{side.plan.method}\nby layer", no_wrap=True)
        table.add_column(f"\n-{full:.0%} | +{full:.0%}", justify="center", no_wrap=True)
        table.add_column("\nall", justify="right", no_wrap=True)
        table.add_column(min_width=2)
    marks = min(HEAT_WIDTH, before.load_MGLR.shape[2])
    for r in range(before.load_MGLR.shape[-1]):
        cells: list[RenderableType] = [str(r)]
        for side in sides:
            hottest = [float(part.max()) for part in np.array_split(side.step_LR[:, r], marks)]
            ratio = float(side.step_R[r])
            cells += [heat(hottest), deviation(ratio - 1, full, ARM), f"{ratio:.2f}", ""]
        table.add_row(*cells)
    title = Text("Tokens routed to every EP rank in the step, over the mean rank", "bold")
    legend = Drawn(Text(HEAT_LEGEND, "dim"))
    return Group(title, table, legend, "", _pace(sides))


def _pace(sides: Sequence[Outcome]) -> Table:
    """What is waited for: the busiest rank over the mean rank, in the step and in each row."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("busiest EP rank over the mean rank")
    for side in sides:
        table.add_column(side.plan.method, justify="right")
        table.add_column(min_width=PACE)
    for name, values in (
        ("whole step, worst layer", [finite_max(side.step_LR) for side in sides]),
        ("every row and layer, on average", [finite_mean(side.busiest_MGL) for side in sides]),
        ("every row and layer, worst", [finite_max(side.busiest_MGL) for side in sides]),
    ):
        cells: list[RenderableType] = []
        for value in values:
            cells += [f"{value:.2f}", bar(value - 1, 1.0, PACE, HIGH)]
        table.add_row(name, *cells)
    cells = []
    for side in sides:
        cells += [f"{side.waiting:.1%}", bar(side.waiting, 1.0, PACE, HIGH)]
    table.add_row("expert time the mean rank waits", *cells)
    return table
