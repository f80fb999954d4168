"""`routepack ingest`: a window from the routes that an engine or trainer recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from routepack.cli.options import whole
from routepack.cli.terminal import loading_kernels, require_outputs, waiting
from routepack.errors import InputError
from routepack.files import write_window

ENGINES = "vllm, sglang, verl, slime, miles, nemo-rl, prime-rl, areal, megatron"


def ingest(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="Recorded routes: .jsonl, .npz or .safetensors."),
    ],
    engine: Annotated[str, typer.Option(metavar="NAME", help=f"Who wrote them: {ENGINES}.")],
    num_experts: Annotated[int, whole("Experts of a layer, from the model's config.")],
    top_k: Annotated[int, whole("Experts per token.")],
    out: Annotated[Path, typer.Option(help="The window to write (safetensors).", metavar="FILE")],
    moe_layers: Annotated[
        str | None,
        typer.Option(
            metavar="LAYERS",
            help="Layers of the model that have experts, as 1-26 or 0,2,4-9. Default: all.",
        ),
    ] = None,
    model_layers: Annotated[
        int | None, whole("Layers of the model. Default: the last MoE layer is the last.")
    ] = None,
    zero_rows: Annotated[
        str | None,
        typer.Option(metavar="WHAT", help="With --top-k 1: rows of zeros are routed or missing."),
    ] = None,
    partial_rows: Annotated[
        str,
        typer.Option(
            metavar="WHAT", help="Rows with routes at some MoE layers only: refuse or missing."
        ),
    ] = "refuse",
    step: Annotated[int | None, whole("With megatron: the step, if there are several.")] = None,
    model: Annotated[str, typer.Option(metavar="NAME", help="To note in the window.")] = "",
) -> None:
    """Make a window from recorded routes, and say how many token rows had one."""
    require_outputs([out], inputs=paths)
    layers = None if moe_layers is None else _layers(moe_layers)
    loading_kernels("routepack.ingest")
    from routepack.ingest import RouteSpec, WindowBuilder
    from routepack.ingest.files import read_samples

    choices: Any = {"zero_rows": zero_rows, "partial_rows": partial_rows}
    spec = RouteSpec(num_experts, top_k, layers, model_layers, **choices)
    source = f"{engine}: {', '.join(path.name for path in paths)}"
    builder = WindowBuilder(spec, model=model, source=source)
    with waiting(f"reading routes of {engine} ..."):
        for sample, labels in read_samples(paths, engine, spec, step=step):
            builder.add(sample, **labels)
    if not builder.summary()["samples"]:
        raise InputError(f"{paths[0]}: expected at least 1 sample, the files have none")
    window = builder.finish()
    write_window(out, window)
    typer.echo(_table(builder.summary()))
    typer.echo(f"wrote {out}: {window.layers} layers x {window.experts} experts, top-{top_k}")


def _layers(text: str) -> tuple[int, ...]:
    """`1-3,5` as 1, 2, 3, 5. Raises InputError."""
    layers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last) if dash else (first, first)
        if not all(end.isascii() and end.isdigit() and len(end) < 6 for end in ends):
            raise InputError.at("--moe-layers", repr(text), "layers as in 1-26 or 0,2,4-9")
        layers.extend(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(layers)


def _table(summary: dict[str, int]) -> str:
    width = max(len(f"{value:,}") for value in summary.values())
    return "\n".join(
        f"{name.replace('_', ' '):<23}{value:>{width},}" for name, value in summary.items()
    )
