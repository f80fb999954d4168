"""`routepack replay`: what a gate on migration would have done over recorded windows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from routepack.cli.inputs import choose_budget, choose_topology, load_window
from routepack.cli.options import CostFile, Dp, Edp, Ep, TokenCap, TopologyFile, number, whole
from routepack.cli.terminal import loading_kernels, require_outputs, stdout, waiting
from routepack.cost import DEFAULT, CostModel
from routepack.files import read_plan, read_window, write_atomically
from routepack.window import Window


def replay(
    window_paths: Annotated[
        list[Path],
        typer.Argument(metavar="WINDOW...", help="Windows of successive optimizer steps."),
    ],
    token_cap: TokenCap,
    expert_bytes: Annotated[
        int, whole("State of one expert at one layer on one GPU: weights and optimizer.")
    ],
    bandwidth: Annotated[float, number("Bytes a second that a GPU sends to others, as 50e9.")],
    seconds_per_unit: Annotated[
        float, number("Seconds of a measured step over its predicted cost (slowest shard).")
    ],
    dp: Dp = None,
    ep: Ep = None,
    edp: Edp = None,
    topology_path: TopologyFile = None,
    cost_path: CostFile = None,
    horizon: Annotated[int, whole("Steps that a placement is expected to serve.")] = 1,
    margin: Annotated[float, number("A move must save this times what it costs.")] = 1.0,
    hysteresis: Annotated[int, whole("Steps for which a layer that moved stays.")] = 0,
    byte_budget: Annotated[
        int | None, whole("What an EP group may receive in one step. Default: no limit.")
    ] = None,
    fixed_seconds: Annotated[
        float, number("Of every step that migrates, besides the transfer.")
    ] = 0.0,
    exposed_seconds: Annotated[
        float, number("Planning that a step waits for before it migrates.")
    ] = 0.0,
    current: Annotated[
        Path | None,
        typer.Option(metavar="PLAN", help="A plan with the first placement. Default: contiguous."),
    ] = None,
    seconds: Annotated[float | None, number("Time of each search. Default: 1.")] = None,
    evaluations: Annotated[
        int | None, whole("Moves that each search proposes instead: the same result every time.")
    ] = None,
    seed: Annotated[int, whole("Of the searches.")] = 0,
    threads: Annotated[int | None, whole("Default: the CPUs this process may use.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write every step and totals (JSONL).")
    ] = None,
) -> None:
    """Migrate over successive windows by a gate, always and never: gains, moves and declines."""
    require_outputs([out], inputs=[*window_paths, topology_path, cost_path, current])
    topology = choose_topology(topology_path, dp, ep, edp)
    cost_model = DEFAULT if cost_path is None else CostModel.from_toml(cost_path)
    budget = choose_budget(seconds, evaluations)
    start = None if current is None else read_plan(current).checked_placement_LE()
    for path in window_paths:
        if not path.is_file():
            read_window(path)  # which refuses it, before the windows ahead of it are planned
    loading_kernels("routepack.replay", "routepack.counting")
    from routepack.gate import Gate
    from routepack.migration import MigrationCost
    from routepack.replay import Totals
    from routepack.replay import replay as replayed
    from routepack.report.replay import replay_tables

    def windows() -> Iterator[Window]:
        for path in window_paths:
            yield load_window(path, threads, "routepack.counting")[0]

    migration = MigrationCost(
        expert_bytes, bandwidth, seconds_per_unit, fixed_seconds, exposed_seconds
    )
    with waiting(f"planning {len(window_paths)} windows ..."):
        steps = list(
            replayed(
                windows(),
                topology,
                token_cap=token_cap,
                migration=migration,
                gate=Gate(horizon, margin, hysteresis, byte_budget),
                cost_model=cost_model,
                budget=budget,
                current_placement=start,
                seed=seed,
                threads=threads,
            )
        )
    totals = Totals.of(steps)
    if out is not None:
        lines = [step.to_dict() for step in steps] + [{"totals": totals.to_dict()}]
        text = "".join(json.dumps(line, sort_keys=True, allow_nan=False) + "\n" for line in lines)
        write_atomically(out, text.encode())
    stdout().print(replay_tables(steps, totals))
    if out is not None:
        typer.echo(f"wrote {out}")
