"""Methods side by side, and the load of every expert-parallel (EP) rank before and after.

Shapes: M rows, G EDP shards, L MoE layers, R EP ranks. A rank's *ratio* is its routed tokens over
the mean rank of the same layer (and row and shard): at 1.00 nobody waits.
"""

from __future__ import annotations

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
from routepack.report.balance import ratios
from routepack.report.glyphs import HEAT_LEGEND, Drawn, deviation, heat
from routepack.window import Window

HEAT_WIDTH = 12  # marks for the layers; more layers share marks
ARM = 6  # cells of a bar on either side of its axis


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


def methods_table(outcomes: Sequence[Outcome]) -> Table:
    """One line a method, costs in the unit of the cost model; changes are against the first."""
    first = outcomes[0].plan
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", no_wrap=True)
    for name in ("rows", "slowest", f"vs {first.method}", "attention", "expert"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("peak tokens", "gap", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    best = min(outcomes, key=lambda o: o.plan.score.key)
    for outcome in outcomes:
        plan = outcome.plan
        score, certificate = plan.score, plan.certificate
        change = score.slowest_shard / first.score.slowest_shard - 1
        seconds = plan.stats.get("planning_seconds")
        table.add_row(
            plan.method,
            f"{len(plan.rows)} {'=' if certificate.rows_certified else '>'}"
            f" {certificate.rows_lower_bound}",
            f"{score.slowest_shard:,.2f}",
            "" if plan is first else f"{change:+.1%}",
            f"{score.attention:,.2f}",
            f"{score.expert:,.2f}",
            f"{outcome.load_MGLR.max():,}",
            f"{certificate.gap:.2%}",
            "" if seconds is None else f"{seconds:.2f}",
            style="bold" if outcome is best else "",
        )
    table.caption = Text(
        "rows: = the proven fewest, > the proven bound. slowest: cost of the slowest shard; gap: "
        "above its proven bound.\npeak tokens: routed to one EP rank at one layer of one row.",
        justify="left",
    )
    table.caption_justify = "left"
    return table


def rank_picture(before: Outcome, after: Outcome) -> RenderableType:
    """The load of every EP rank under two plans, and what that means for each micro-batch."""
    sides = (before, after)
    full = max(float(np.nanmax(np.abs(side.step_R - 1))) for side in sides)
    full = max(0.05, np.ceil(full * 20) / 20)  # one scale for both, in steps of 5 %
    ranks = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    ranks.add_column("EP\nrank", justify="right")
    for side in sides:
        ranks.add_column(Text(f"{side.plan.method}\nby layer"), no_wrap=True)
        ranks.add_column(f"\n{'-' * 2} {full:.0%} {'+' * 2}", justify="center", no_wrap=True)
        ranks.add_column("\nall", justify="right", no_wrap=True)
        ranks.add_column("", min_width=1)
    for r in range(before.load_MGLR.shape[-1]):
        cells: list[str | Drawn] = [str(r)]
        for side in sides:
            parts = np.array_split(side.step_LR[:, r], min(HEAT_WIDTH, len(side.step_LR)))
            cells += [
                heat([float(part.max()) for part in parts]),
                deviation(float(side.step_R[r]) - 1, full, ARM),
                f"{side.step_R[r]:.2f}",
                "",
            ]
        ranks.add_row(*cells)
    title = Text("Load of every EP rank in the step, 1.00 = the mean rank", style="bold")
    return Group(title, ranks, Drawn(Text(HEAT_LEGEND, "dim")), "", _pace(before, after))


def _pace(before: Outcome, after: Outcome) -> Table:
    """What the step waits for: ratios of the busiest rank, over the step and micro-batch by
    micro-batch."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("busiest EP rank over the mean rank")
    for side in (before, after):
        table.add_column(side.plan.method, justify="right")
    sides = (before, after)
    lines = (
        ("whole step, worst layer", [f"{np.nanmax(s.step_LR):.2f}" for s in sides]),
        ("each row and layer, on average", [f"{np.nanmean(s.busiest_MGL):.2f}" for s in sides]),
        ("each row and layer, worst", [f"{np.nanmax(s.busiest_MGL):.2f}" for s in sides]),
        ("expert time the mean rank waits", [f"{s.waiting:.1%}" for s in sides]),
    )
    for name, values in lines:
        table.add_row(name, *values)
    return table
