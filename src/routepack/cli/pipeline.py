"""`--layers-per-stage`: rows in an order that keeps pipeline stages busy, and what they cost."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from routepack.errors import InputError
from routepack.pipeline import Stages, one_f_one_b, ordered_rows, slowest, stage_costs
from routepack.plan import Plan
from routepack.report.text import cost_text
from routepack.window import Window

LayersPerStage = Annotated[
    str | None,
    typer.Option(
        metavar="N,N,...",
        help="Transformer layers of each pipeline stage: order the rows for 1F1B.",
    ),
]


def read_layers(text: str | None) -> tuple[int, ...] | None:
    """The layers of each stage. Raises InputError."""
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise InputError.at("--layers-per-stage", repr(text), "whole numbers, such as 12,12,12,12")
    return tuple(int(part) for part in parts)


def in_pipeline(window: Window, plan: Plan, layers_per_stage: tuple[int, ...]) -> tuple[Plan, str]:
    """The plan with its rows in a good order, and a line on its stages. Raises InputError."""
    window = plan.trained().window(window)
    topology = plan.to_topology()
    stages = Stages.of(window.moe_layers, layers_per_stage)
    cost = plan.cost_model.resolve(window, topology, plan.token_cap)
    cost_MGP = stage_costs(window, topology, cost, plan.placement_LE, plan.rows, stages)
    order_M = ordered_rows(cost_MGP, stages.forward_share)
    rows = tuple(plan.rows[m] for m in order_M)
    shards = range(topology.edp)
    before, after = (
        max((one_f_one_b(c[:, g], stages.forward_share) for g in shards), key=lambda s: s.makespan)
        for c in (cost_MGP, cost_MGP[order_M])
    )
    busiest = slowest(cost_MGP)
    text = (
        f"slowest stage {busiest.stage} of shard {busiest.shard}: {cost_text(busiest.cost)}; 1F1B "
        f"{cost_text(after.makespan)}, fill {cost_text(after.fill)} "
        f"({cost_text(before.makespan)} before rows were ordered)"
    )
    return msgspec.structs.replace(plan, rows=rows), text
