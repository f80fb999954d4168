"""The commands: they read, call the library and show. What is refused, the library refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import routepack
from routepack.cli.inputs import choose_budget, choose_topology, load_window, placements
from routepack.cli.options import CostFile, Dp, Edp, Ep, TokenCap, TopologyFile, number, whole
from routepack.cli.replay import replay
from routepack.cli.terminal import require_outputs, stdout, waiting
from routepack.cost import DEFAULT, CostModel
from routepack.errors import InputError
from routepack.files import read_plan, write_atomically, write_plan
from routepack.plan import METHODS, Plan, WindowKey
from routepack.report import inspect_window, plan_summary

app = typer.Typer(
    name="routepack",
    help="Plans expert placement and micro-batches together for mixture-of-experts RL training.",
    rich_markup_mode=None,  # help without boxes, the same in a terminal and in a file
    context_settings={"help_option_names": ["-h", "--help"]},
)

WindowFile = Annotated[
    Path, typer.Argument(metavar="WINDOW", help="A routepack.window/1 file (safetensors).")
]
Threads = Annotated[int | None, whole("Default: the CPUs this process may use.")]


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"routepack {routepack.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def plan(
    window_path: WindowFile,
    token_cap: TokenCap,
    out: Annotated[Path, typer.Option(help="The plan file to write (JSON).", metavar="FILE")],
    dp: Dp = None,
    ep: Ep = None,
    edp: Edp = None,
    topology_path: TopologyFile = None,
    cost_path: CostFile = None,
    method: Annotated[
        str, typer.Option(metavar="NAME", help=f"One of {', '.join(METHODS)}.")
    ] = "routepack",
    seconds: Annotated[float | None, number("Time to plan. Default: 1.")] = None,
    evaluations: Annotated[
        int | None, whole("Moves to propose instead: the same plan, byte for byte, every time.")
    ] = None,
    seed: Annotated[int, whole("Of the search.")] = 0,
    threads: Threads = None,
    stats: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write times and the course of the search (JSON)."),
    ] = None,
) -> None:
    """Plan one optimizer step: where each expert lives, which micro-batch trains each sample."""
    require_outputs([out, stats], inputs=[window_path, topology_path, cost_path])
    topology = choose_topology(topology_path, dp, ep, edp)
    cost_model = DEFAULT if cost_path is None else CostModel.from_toml(cost_path)
    budget = choose_budget(seconds, evaluations)
    window, apart = load_window(window_path, threads, "routepack.planner", "routepack.counting")
    with waiting(f"planning with {method} ..."):
        result = routepack.plan(
            window,
            topology,
            token_cap=token_cap,
            cost_model=cost_model,
            method=method,
            budget=budget,
            seed=seed,
            threads=threads,
        )
    write_plan(out, result)
    if stats is not None:
        write_atomically(stats, _stats_bytes(result, apart))
    source = "default, no --cost-model was given" if cost_path is None else str(cost_path)
    stdout().print(plan_summary(result, cost_source=source, apart_seconds=apart))
    typer.echo(f"wrote {out}")


@app.command()
def verify(
    window_path: WindowFile,
    plan_path: Annotated[Path, typer.Argument(metavar="PLAN", help="A routepack.plan/1 file.")],
    threads: Threads = None,
) -> None:
    """Recompute everything that a plan claims. Exit code 1, a line each, if something is wrong."""
    plan = read_plan(plan_path)
    window, _ = load_window(window_path, threads, "routepack.counting", "routepack.verify")
    from routepack.verify import verify as broken_invariants

    broken = broken_invariants(window, plan)
    if plan.window != WindowKey.of(window):  # says nothing about the plan: the wrong file was given
        raise InputError(f"{plan_path}: {broken[0]}")
    for line in broken:
        typer.echo(line)
    if broken:
        raise typer.Exit(1)
    typer.echo(f"OK: {plan_path} holds for {window_path}")


@app.command()
def inspect(
    window_path: WindowFile,
    ep: Annotated[int | None, whole("Also show the load of this many EP ranks.")] = None,
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Not only the worst.")] = False,
    threads: Threads = None,
) -> None:
    """Show lengths, and how unevenly the tokens of a window use the experts of each layer."""
    kernels = ["routepack.counting"] + ["routepack.placement"] * (ep is not None)
    window, _ = load_window(window_path, threads, *kernels)
    stdout().print(
        inspect_window(
            window,
            ranks=ep,
            placements=None if ep is None else placements(window, ep),
            all_layers=all_layers,
        )
    )


app.command()(replay)


def _stats_bytes(plan: Plan, apart_seconds: dict[str, float]) -> bytes:
    """`Plan.stats` as JSON, with the seconds outside planning; times never enter the plan file."""
    stats = {f"{name}_seconds": value for name, value in apart_seconds.items()} | plan.stats
    return (json.dumps(stats, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()
