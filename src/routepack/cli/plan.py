"""`routepack plan`: one optimizer step, planned, written and summarised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

import routepack
from routepack.cli.inputs import choose_budget, choose_topology, cost_source, load_window
from routepack.cli.options import (
    CostFile,
    Dp,
    DpSpeed,
    Edp,
    Ep,
    EpSpeed,
    EqualSamples,
    MaxSamples,
    MemoryLimit,
    NodeOfRank,
    RanksPerNode,
    RoutingGroups,
    RowsMultiple,
    Together,
    TokenCap,
    TopologyFile,
    UniformRows,
    node_map,
    number,
    whole,
    with_speeds,
)
from routepack.cli.pipeline import LayersPerStage, in_pipeline, read_layers
from routepack.cli.steps import (
    Batch,
    Passes,
    Steps,
    planset_stats,
    planset_summary,
    read_plans,
)
from routepack.cli.terminal import require_outputs, stdout, waiting
from routepack.cli.trained import (
    Missing,
    PadCp,
    PadExperts,
    PadMissing,
    PadMultiple,
    PadTp,
    read_padding,
)
from routepack.cost import DEFAULT, CostModel
from routepack.errors import InputError
from routepack.files import write_atomically
from routepack.plan import METHODS, Plan
from routepack.planset import PlanSet
from routepack.report import plan_summary
from routepack.report.memory import Busiest
from routepack.requirements import Requirements


def plan(
    window_path: Annotated[
        Path, typer.Argument(metavar="WINDOW", help="A routepack.window/1 file (safetensors).")
    ],
    token_cap: TokenCap,
    out: Annotated[Path, typer.Option(help="The plan file to write (JSON).", metavar="FILE")],
    dp: Dp = None,
    ep: Ep = None,
    edp: Edp = None,
    topology_path: TopologyFile = None,
    cost_path: CostFile = None,
    dp_speed: DpSpeed = None,
    ep_speed: EpSpeed = None,
    method: Annotated[
        str, typer.Option(metavar="NAME", help=f"One of {', '.join(METHODS)}.")
    ] = "routepack",
    seconds: Annotated[float | None, number("Time to plan. Default: 1.")] = None,
    evaluations: Annotated[
        int | None, whole("Moves to propose instead: the same plan, byte for byte, every time.")
    ] = None,
    seed: Annotated[int, whole("Of the search.")] = 0,
    threads: Annotated[int | None, whole("Default: the CPUs this process may use.")] = None,
    current_path: Annotated[
        Path | None,
        typer.Option(
            "--current-placement",
            metavar="PLAN",
            help="A plan with the placement held now; few experts move. Default: contiguous.",
        ),
    ] = None,
    fixed_placement: Annotated[
        bool,
        typer.Option("--fixed-placement", help="Plan micro-batches only: no expert moves."),
    ] = False,
    equal_samples_per_rank: EqualSamples = False,
    rows_multiple_of: RowsMultiple = 1,
    max_samples_per_cell: MaxSamples = None,
    together: Together = None,
    uniform_rows: UniformRows = False,
    memory_limit_tokens: MemoryLimit = None,
    routing_groups: RoutingGroups = None,
    ranks_per_node: RanksPerNode = None,
    node_of_rank: NodeOfRank = None,
    pad_multiple: PadMultiple = None,
    pad_cp: PadCp = None,
    pad_tp: PadTp = None,
    pad_experts: PadExperts = None,
    pad_missing: PadMissing = False,
    missing: Missing = None,
    layers_per_stage: LayersPerStage = None,
    steps: Steps = None,
    passes: Passes = None,
    stats: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write times and the course of the search (JSON)."),
    ] = None,
) -> None:
    """Plan an optimizer step: where each expert lives, which micro-batch trains each sample.

    With --steps or --pass: several steps of a batch, and other passes over it, written as a
    routepack.planset/1.
    """
    batch = Batch.of(steps, passes, method)
    read = [window_path, topology_path, cost_path, current_path, *batch.cost_paths]
    require_outputs([out, stats], inputs=read)
    topology = choose_topology(topology_path, dp, ep, edp)
    cost_model = DEFAULT if cost_path is None else CostModel.from_toml(cost_path)
    cost_model = with_speeds(cost_model, dp_speed, ep_speed)
    other_passes = batch.read_passes(cost_model, token_cap)
    budget = choose_budget(seconds, evaluations)
    requirements = Requirements(
        equal_samples_per_rank=equal_samples_per_rank,
        rows_multiple_of=rows_multiple_of,
        max_samples_per_cell=max_samples_per_cell,
        together=together,
        uniform_rows=uniform_rows,
        memory_limit_tokens=memory_limit_tokens,
        routing_groups=routing_groups,
        ranks_per_node=ranks_per_node,
        node_of_rank=node_map(node_of_rank),
    )
    layers = read_layers(layers_per_stage)
    if layers is not None and batch.asked:
        raise InputError("--layers-per-stage: expected without --steps and --pass")
    padding = read_padding(pad_multiple, pad_cp, pad_tp, pad_experts, pad_missing)
    current = None if current_path is None else (str(current_path), _placement_LE(current_path))
    window, apart = load_window(window_path, threads, "routepack.planner", "routepack.counting")
    options: dict[str, Any] = dict(
        token_cap=token_cap,
        cost_model=cost_model,
        budget=budget,
        current_placement=None if current is None else current[1],
        seed=seed,
        threads=threads,
        fixed_placement=fixed_placement,
        requirements=requirements,
        padding=padding,
        estimate=missing,
    )
    result: Plan | PlanSet
    with waiting(f"planning with {method} ..."):
        if batch.asked:
            options |= dict(steps=batch.steps_of(window), passes=other_passes)
            result = routepack.plan_steps(window, topology, **options)
        else:
            result = routepack.plan(window, topology, method=method, **options)
    pipeline = None
    if layers is not None and isinstance(result, Plan):
        result, pipeline = in_pipeline(window, result, layers)
    write_atomically(out, result.to_bytes())
    if stats is not None:
        measured = result.stats if isinstance(result, Plan) else planset_stats(result)
        write_atomically(stats, _stats_bytes(measured, apart))
    source = cost_source(cost_path)
    if isinstance(result, Plan):
        busiest = Busiest.of(result.trained().window(window), result)
        summary = plan_summary(
            result, cost_source=source, apart_seconds=apart, busiest=busiest, current=current
        )
    else:
        summary = planset_summary(result, cost_source=source, apart_seconds=apart, current=current)
    stdout().print(summary)
    if pipeline is not None:
        typer.echo(f"pipeline: {pipeline}")
    typer.echo(f"wrote {out}")


def _placement_LE(path: Path) -> NDArray[np.int32]:
    """Slots [L, E] of a plan or planset file. Raises InputError, prefixed with `path`."""
    held = read_plans(path)
    first = held if isinstance(held, Plan) else held.plans[0]  # all have the same placement
    try:
        return first.checked_placement_LE()
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _stats_bytes(measured: dict[str, Any], apart_seconds: dict[str, float]) -> bytes:
    """`Plan.stats` as JSON, with the seconds outside planning; times never enter the plan file."""
    stats = {f"{name}_seconds": value for name, value in apart_seconds.items()} | measured
    return (json.dumps(stats, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
