"""The commands: they read, call the library and show. What is refused, the library refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group

import routepack
from routepack.cli.ingest import ingest
from routepack.cli.inputs import choose_topology, cost_source, load_window, placements
from routepack.cli.options import CostFile, Edp, TopologyFile, whole
from routepack.cli.padding import padding
from routepack.cli.plan import plan
from routepack.cli.replay import replay
from routepack.cli.steps import read_plans
from routepack.cli.terminal import stdout
from routepack.cost import DEFAULT, CostModel
from routepack.errors import InputError
from routepack.plan import WindowKey
from routepack.planset import PlanSet
from routepack.report import inspect_window

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


app.command()(plan)
app.command()(ingest)


@app.command()
def verify(
    window_path: WindowFile,
    plan_path: Annotated[
        Path,
        typer.Argument(metavar="PLAN", help="A routepack.plan/1 or routepack.planset/1 file."),
    ],
    threads: Threads = None,
) -> None:
    """Recompute everything that a plan, or a set of plans, claims.

    Exit code 1, and a line each, if something is wrong.
    """
    plans = read_plans(plan_path)
    window, _ = load_window(window_path, threads, "routepack.counting", "routepack.verify")
    from routepack.verify import verify as broken_invariants
    from routepack.verify import verify_set

    if isinstance(plans, PlanSet):
        broken = verify_set(window, plans)
    else:
        broken = broken_invariants(window, plans)
    if plans.window != WindowKey.of(window):  # says nothing of the plan: it is the wrong file
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
    dp: Annotated[int | None, whole("Data-parallel ranks: also show what limits a layout.")] = None,
    edp: Edp = None,
    topology_path: TopologyFile = None,
    token_cap: Annotated[
        int | None, whole("With a layout: tokens of a micro-batch on one DP rank, as in plan.")
    ] = None,
    cost_path: CostFile = None,
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Not only the worst.")] = False,
    threads: Threads = None,
) -> None:
    """Show lengths, and how unevenly the tokens of a window use the experts of each layer.

    With a layout (--dp and --ep, or --topology), and best a --token-cap: what limits its plans.
    """
    topology = None
    if topology_path is not None or dp is not None:
        topology = choose_topology(topology_path, dp, ep, edp)
        ep = topology.ep
    elif edp is not None or token_cap is not None or cost_path is not None:
        raise InputError("--dp: expected with --edp, --token-cap or --cost-model, or --topology")
    cost_model = DEFAULT if cost_path is None else CostModel.from_toml(cost_path)
    kernels = ["routepack.counting"] + ["routepack.placement"] * (ep is not None)
    kernels += ["routepack.planner"] * (topology is not None)
    window, _ = load_window(window_path, threads, *kernels)
    shown = inspect_window(
        window,
        ranks=ep,
        placements=None if ep is None else placements(window, ep),
        all_layers=all_layers,
    )
    if topology is not None:
        from routepack.planner import validate
        from routepack.report.limits import limits_table

        cap = int(window.lengths_S.max()) if token_cap is None else token_cap
        validate(window, topology, cap, "routepack", 0, threads)
        limits = limits_table(
            window, topology, token_cap, cost_model, cost_source=cost_source(cost_path)
        )
        shown = Group(shown, "", limits)
    stdout().print(shown)


app.command()(replay)
app.command()(padding)
