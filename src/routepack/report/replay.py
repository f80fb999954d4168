"""A replay of windows: what the gate did in each step, and what three policies add up to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from routepack.gate import Verdict
from routepack.replay import Step, Totals
from routepack.report.text import cost_text

STAYS: dict[Verdict, str] = {
    "same": "in place",
    "saving": "save too little",
    "budget": "over the byte budget",
    "resting": "moved recently",
    "whole": "no gain as a whole",
}
"""Why layers stay where they are."""

SHORT: dict[Verdict, str] = {
    "same": "in place",
    "saving": "little",
    "budget": "budget",
    "resting": "recent",
    "whole": "whole",
}
"""The same in the width of a column."""


def replay_tables(steps: Sequence[Step], totals: Totals) -> RenderableType:
    """A line a step, then a line a policy. Costs are of the slowest shard, times predicted."""
    legend = Text(
        "kk: the trainer's own layout, keep: packing searched, both with the experts\n"
        "where they are before the step. kept: what trains. saves: keep less kept, move:\n"
        "the migration, in seconds. layers: how many moved. stay: the others, and why.",
        "dim",
    )
    return Group(_steps(steps), legend, "", _policies(totals), "", _layers(totals))


def _steps(steps: Sequence[Step]) -> Table:
    table = _table()
    for name in ("step", "kk", "keep", "kept", "saves", "move", "bytes", "layers"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("stay")
    for step in steps:
        decision = step.decision
        moved = decision.counts.get("moved", 0)
        table.add_row(
            str(step.index),
            "none" if step.kk_cost is None else cost_text(step.kk_cost),
            cost_text(step.keep_cost),
            cost_text(decision.plan.score.slowest_shard),
            seconds_text(decision.saving_seconds),
            seconds_text(decision.migration_seconds),
            bytes_text(decision.migration_bytes),
            f"{moved} of {len(decision.verdicts)}",
            ", ".join(_stay(decision.counts, SHORT)),
            style="bold" if moved else "",
        )
    return table


def _policies(totals: Totals) -> Table:
    """Predicted seconds of all steps; changes are against never migrating."""
    table = _table()
    table.add_column("migrating")
    for name in ("training", "move", "planning", "total", "change", "steps", "experts", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = {"by the gate": totals.gate, "always": totals.always, "never": totals.never}
    least = min(spent.seconds for spent in rows.values())
    for name, spent in rows.items():
        change = spent.seconds / totals.never.seconds - 1 if totals.never.seconds else 0.0
        table.add_row(
            name,
            seconds_text(spent.step_seconds, 4),
            seconds_text(spent.migration_seconds, 4),
            seconds_text(spent.exposed_seconds, 4),
            seconds_text(spent.seconds, 4),
            f"{change:+.2%}",
            f"{spent.migrations} of {totals.steps}",
            f"{spent.moved_experts:,}",
            bytes_text(spent.migration_bytes),
            style="bold" if spent.seconds == least else "",
        )
    return table


def _layers(totals: Totals) -> Text:
    """Layers by verdict, and what planning took."""
    moved = totals.verdicts.get("moved", 0)
    stay = ", ".join(_stay(totals.verdicts, STAYS))
    planning = totals.planning_seconds / totals.steps
    return Text(
        f"layers: {moved} moved; stayed: {stay or 'none'}\n"
        f"planning was measured: {planning:.2f} s a step for both searches; the totals hold what\n"
        f"of it was given as exposed, in steps that migrate"
    )


def _stay(counts: Mapping[Verdict, int], names: Mapping[Verdict, str]) -> Iterator[str]:
    """Layers that stayed, by reason."""
    for verdict, name in names.items():
        if count := counts.get(verdict):
            yield f"{count} {name}"


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def seconds_text(value: float, digits: int = 3) -> str:
    """Seconds with so many significant digits, down to a tenth of a millisecond."""
    if abs(value) < 5e-5:
        return "0"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{min(max(0, decimals), 4)}f}"


def bytes_text(value: int) -> str:
    """Bytes in decimal units: 1.23 GB."""
    for factor, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if value >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value} B"
