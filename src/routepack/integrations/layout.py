"""Layouts as trainers hold them, `layout[d][m]` = samples of micro-batch m on DP rank d.

A plan holds the same thing by row, `rows[m][d]`. Shapes: D DP ranks, M micro-batches a rank.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError

Cells = Sequence[Sequence[Sequence[int]]]


def by_row(layout: Cells) -> list[list[list[int]]]:
    """[M][D] of [D][M]. Raises InputError where ranks have different numbers of micro-batches."""
    _require_equal(layout)
    return [[list(cells[m]) for cells in layout] for m in range(len(layout[0]))]


def by_rank(rows: Cells) -> list[list[list[int]]]:
    """[D][M] of [M][D]."""
    return [[list(row[d]) for row in rows] for d in range(len(rows[0]))]


def broken_invariants(
    rows: Cells,
    lengths_S: NDArray[np.int64],
    members: Collection[int],
    *,
    data_parallel: int,
    token_cap: int,
    rows_multiple_of: int = 1,
) -> list[str]:
    """One line per invariant that the rows of an optimizer step break; empty where all hold.

    Each of `members`, and nothing else, exactly once; one micro-batch a row on each of the
    `data_parallel` ranks, none empty, each within `token_cap`; a multiple of `rows_multiple_of`
    rows, as a virtual pipeline needs.
    """
    broken = []
    if not rows or len(rows) % rows_multiple_of:
        broken.append(f"rows = {len(rows)}: expected a positive multiple of {rows_multiple_of}")
    left = set(members)
    for m, row in enumerate(rows):
        if len(row) != data_parallel:
            broken.append(f"rows[{m}] = {len(row)} micro-batches: expected {data_parallel}")
        for d, cell in enumerate(row):
            where = f"rows[{m}, {d}]"
            if not len(cell):
                broken.append(f"{where} = []: expected at least one sample")
            for i in cell:
                if i not in left:
                    broken.append(f"{where} = {i}: expected a sample of the step, once")
                left.discard(i)
            tokens = sum(int(lengths_S[i]) for i in cell if 0 <= i < len(lengths_S))
            if tokens > token_cap:
                broken.append(f"{where} = {tokens} tokens: expected at most {token_cap}")
    if left:
        broken.append(f"rows = no sample {min(left)}, {len(left)} absent: expected each once")
    return broken


def _require_equal(layout: Cells) -> None:
    if not layout or not layout[0]:
        raise InputError("layout: expected at least one rank with at least one micro-batch")
    for d, cells in enumerate(layout):
        if len(cells) != len(layout[0]):
            expected = f"{len(layout[0])} micro-batches, as on rank 0"
            raise InputError.at("layout", len(cells), expected, d)
