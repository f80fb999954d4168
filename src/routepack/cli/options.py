"""Options of several commands. The syntax of numbers is checked here, their range where used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from routepack.cost import CostModel
from routepack.errors import InputError

LARGEST = 2**63 - 1  # of any count in the library


def whole(help: str) -> Any:
    """An option with a whole number."""
    return typer.Option(help=help, parser=_whole, metavar="N")


def number(help: str) -> Any:
    """An option with a number."""
    return typer.Option(help=help, parser=_number, metavar="X")


def _whole(text: Any) -> int:  # defaults come as numbers
    try:
        value = int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected a whole number") from None
    if abs(value) > LARGEST:
        raise typer.BadParameter(f"{value}: expected a whole number of at most {LARGEST}")
    return value


def _number(text: Any) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}: expected a number") from None


TokenCap = Annotated[int, whole("Tokens of a micro-batch on one DP rank: max tokens per GPU x cp.")]
Dp = Annotated[int | None, whole("Data-parallel ranks.")]
Ep = Annotated[int | None, whole("Expert-parallel ranks of a group.")]
Edp = Annotated[int | None, whole("EDP shards. Default: dp / ep.")]
TopologyFile = Annotated[
    Path | None,
    typer.Option(
        "--topology", metavar="FILE", help="TOML with tp, cp, pp, dp, ep, etp, order, for --dp etc."
    ),
]
CostFile = Annotated[
    Path | None,
    typer.Option("--cost-model", metavar="FILE", help="TOML with expert and [[attention]]."),
]
EqualSamples = Annotated[
    bool, typer.Option("--equal-samples-per-rank", help="Every DP rank trains as many samples.")
]
RowsMultiple = Annotated[
    int, whole("The number of micro-batches is a multiple of N (virtual pipeline stages).")
]
MaxSamples = Annotated[int | None, whole("Samples that a micro-batch of a DP rank may hold.")]
Together = Annotated[
    str | None,
    typer.Option(
        metavar="WHERE",
        help="rank or cell: samples of a group stay on one DP rank, or in one micro-batch of it.",
    ),
]
UniformRows = Annotated[
    bool,
    typer.Option("--uniform-rows", help="Micro-batches that run in lockstep share their tag."),
]
MemoryLimit = Annotated[
    int | None, whole("Routed tokens that an EP rank may hold at a layer in one row.")
]
RoutingGroups = Annotated[
    int | None, whole("Groups of experts that the router is limited to: each stays on one node.")
]
RanksPerNode = Annotated[int | None, whole("EP ranks of a node, with --routing-groups.")]
NodeOfRank = Annotated[
    str | None,
    typer.Option(
        metavar="NODES",
        help="Instead, where those are not consecutive: the node of each EP rank, as 0,1,0,1.",
    ),
]
DpSpeed = Annotated[
    str | None,
    typer.Option(
        "--dp-speed", metavar="SPEEDS", help="Of each DP rank, as in 1,1,0.8,1. Default: all 1."
    ),
]
EpSpeed = Annotated[
    str | None,
    typer.Option(
        "--ep-speed",
        metavar="SPEEDS",
        help="Of each EP rank, alike in every shard or shard by shard. Default: all 1.",
    ),
]


def with_speeds(model: CostModel, dp_speed: str | None, ep_speed: str | None) -> CostModel:
    """The cost model with the speeds of the flags in place of its own. Raises InputError."""
    for field, text in (("dp_speed", dp_speed), ("ep_speed", ep_speed)):
        if text is None:
            continue
        try:
            speeds = tuple(float(speed) for speed in text.split(","))
        except ValueError:
            flag = f"--{field.replace('_', '-')}"
            raise InputError.at(flag, repr(text), "numbers as in 1,1,0.8,1") from None
        model = msgspec.structs.replace(model, **{field: speeds})
    return model


def node_map(text: str | None) -> tuple[int, ...] | None:
    """`0,1,0,1` as numbers. Raises InputError."""
    if text is None:
        return None
    try:
        return tuple(int(node) for node in text.split(","))
    except ValueError:
        expected = "whole numbers as in 0,1,0,1"
        raise InputError.at("--node-of-rank", repr(text), expected) from None
