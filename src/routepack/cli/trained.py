"""Flags for how a window is trained: padding of its samples, estimates of missing routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from routepack.cli.options import whole
from routepack.errors import InputError
from routepack.padding import FILL, Padding

PadMultiple = Annotated[int | None, whole("Samples are padded to a multiple of N tokens.")]
PadCp = Annotated[
    int | None, whole("... and to 2 * N, for context parallelism over N ranks (docs/padding.md).")
]
PadTp = Annotated[int | None, whole("... times N, for sequence parallelism over N ranks.")]
PadExperts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|fill",
        help="JSON [L][K] ids that padding rows are routed to. Default: they are not routed.",
    ),
]
PadMissing = Annotated[
    bool, typer.Option("--pad-missing", help="Missing tokens get the experts of padding too.")
]
Missing = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="Estimate tokens without a route from the rows of their sample or window, or none.",
    ),
]


def read_padding(
    multiple: int | None, cp: int | None, tp: int | None, experts: str | None, missing: bool
) -> Padding | None:
    """The padding that the flags state, if any. Raises InputError."""
    if multiple is None and cp is None and tp is None and experts is None and not missing:
        return None
    return Padding(
        multiple=1 if multiple is None else multiple,
        context_parallel=1 if cp is None else cp,
        tensor_parallel=1 if tp is None else tp,
        experts=experts if experts in (None, FILL) else _ids(experts),
        fills_missing=missing,
    )


def _ids(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: expected a file of expert ids, {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: expected JSON, {error}") from None
