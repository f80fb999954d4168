"""`routepack padding`: the experts that padding rows are routed to, chosen for a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from routepack.cli.inputs import load_window
from routepack.cli.options import whole
from routepack.cli.steps import read_plans
from routepack.cli.terminal import require_outputs
from routepack.errors import InputError
from routepack.files import write_fill
from routepack.objective import score
from routepack.padding import Fill, with_fill
from routepack.plan import Plan
from routepack.planset import PlanSet
from routepack.report.text import cost_text
from routepack.window import Window


def padding(
    window_path: Annotated[
        Path, typer.Argument(metavar="WINDOW", help="The window that was planned.")
    ],
    plan_path: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="A plan or planset made with --pad-experts fill."),
    ],
    out: Annotated[Path, typer.Option(help="The experts to write (safetensors).", metavar="FILE")],
    threads: Annotated[int | None, whole("Default: the CPUs this process may use.")] = None,
) -> None:
    """Choose the experts of padding rows so that no busiest rank is busier than it must be.

    The plan is verified first. ids [P, L, K] of FILE are the experts of all padding rows; rows
    offsets[s]:offsets[s+1] are those of sample s.
    """
    require_outputs([out], inputs=[window_path, plan_path])
    plans = read_plans(plan_path)
    window, _ = load_window(window_path, threads, "routepack.counting", "routepack.verify")
    from routepack.fill import fill_of
    from routepack.verify import verify, verify_set

    broken = verify_set(window, plans) if isinstance(plans, PlanSet) else verify(window, plans)
    if broken:
        raise InputError(f"{plan_path}: {broken[0]}")
    try:
        fill = fill_of(window, plans)
    except InputError as error:
        raise InputError(f"{plan_path}: {error}") from None
    write_fill(out, window, fill)
    typer.echo(_summary(window, plans, fill))
    typer.echo(f"wrote {out}")


def _summary(window: Window, plans: Plan | PlanSet, fill: Fill) -> str:
    """How many rows there are, and what they cost."""
    from routepack.fill import steps_of

    rows_S, tokens = np.diff(fill.offsets_S1), 0
    without: list[float] = []
    full: list[float] = []
    for index, part, step in steps_of(window, plans):
        bare = step.trained().window(part)
        own_S1 = np.concatenate([[0], np.cumsum(rows_S[index])])
        own_PLK = fill.ids_PLK[np.repeat(np.isin(np.arange(window.samples), index), rows_S)]
        topology = step.to_topology()
        cost = step.cost_model.resolve(bare, topology, step.token_cap)
        for costs, trained in ((without, bare), (full, with_fill(bare, Fill(own_PLK, own_S1)))):
            costs.append(score(trained, topology, cost, step.placement_LE, step.rows).slowest_shard)
        tokens += int(bare.lengths_S.sum())
    rows, samples = int(rows_S.sum()), int((rows_S > 0).sum())
    what = "slowest shard" if isinstance(plans, Plan) else "all steps    "
    return (
        f"padding rows   {rows:,} in {samples:,} samples, {rows / tokens:.1%} of all tokens\n"
        f"{what}  {cost_text(sum(without))} without them, {cost_text(sum(full))} with them"
    )
