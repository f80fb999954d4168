"""Errors that a user can act on: always one line that names field, index, value and expectation."""

from __future__ import annotations

from typing import Self


class InputError(ValueError):
    """Input that routepack refuses. The command line prints the message and exits with 2."""

    @classmethod
    def at(
        cls, field: str, value: object, expected: str, index: int | tuple[int, ...] | None = None
    ) -> Self:
        """`field[index] = value: expected ...`, the one form in which values are refused."""
        where = ""
        if index is not None:
            where = "[" + ", ".join(map(str, index if isinstance(index, tuple) else (index,))) + "]"
        return cls(f"{field}{where} = {value}: expected {expected}")


class InfeasibleError(InputError):
    """Valid input for which no plan exists; the message says which constraint cannot be met."""
