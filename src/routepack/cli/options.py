"""Numbers on the command line: their syntax is checked here, their range where they are used."""

from __future__ import annotations

from typing import Any

import typer

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
