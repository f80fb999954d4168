"""What the driver tells the workers: `routepack_mb`, a row of integers for every sample.

    [stamp, DP rank, DP ranks, cap of pass 0, row, cap of pass 1, row, ...]

The stamp is a hash of the window and its plans, the same for all samples of a step. Passes over a
batch (log-probabilities, the update) have token caps of their own; a worker follows the row of the
pass whose cap it was called with. Rows are numbered over all optimizer steps of the batch, so a
mini-batch finds its own rows consecutive, and a pass over the whole batch finds all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NAME = "routepack_mb"
HEADER = 3
STAMP_BITS = 62  # a stamp and its negative fit a signed 64-bit integer

Row = Sequence[Sequence[int]]  # sample indices of one micro-batch on each DP rank


class DeclinedError(Exception):
    """The plan has nothing for this pass; verl's own layout is what is wanted."""


class UnusableError(Exception):
    """The column cannot be followed; all ranks together use verl's own layout."""


@dataclass(frozen=True, eq=False)
class Layout:
    """A step's plans, as the driver hands them out.

    order      [S] sample indices: those of DP rank 0, step by step and row by row, then of rank 1
    column_SC  int64, one row for each sample of the batch as it was planned
    rows       micro-batches on each DP rank in each pass, in the order of the caps
    """

    order: list[int]
    column_SC: NDArray[np.int64]
    rows: tuple[int, ...]

    @classmethod
    def of(
        cls,
        steps: Sequence[Sequence[Row]],
        lengths_S: NDArray[np.int64],
        caps: Sequence[int],
        *,
        stamp: int,
        rows_multiple_of: int = 1,
    ) -> Layout:
        """Lay the rows of all optimizer steps out.

        steps             rows of each optimizer step, all within caps[0]
        caps              tokens of a micro-batch in each pass, that of the update first; in the
                          others, none smaller, rows are merged while they fit
        rows_multiple_of  micro-batches on a DP rank in any pass, for interleaved pipelines

        Raises UnusableError unless each rank has as many samples in each step as in the others:
        verl cuts a rank's part of the batch into equal mini-batches.
        """
        steps = [small_at_both_ends(step, lengths_S) for step in steps]
        rows = [row for step in steps for row in step]
        ranks = len(rows[0])
        order = [s for d in range(ranks) for row in rows for s in row[d]]
        rank_S, row_S = (np.full(len(lengths_S), -1, np.int64) for _ in range(2))
        for m, row in enumerate(rows):
            for d, cell in enumerate(row):
                rank_S[list(cell)], row_S[list(cell)] = d, m
        counts_ND = [[sum(len(row[d]) for row in step) for d in range(ranks)] for step in steps]
        if len(set(map(tuple, counts_ND))) > 1 or len(set(counts_ND[0])) > 1:
            raise UnusableError(f"samples of each step and DP rank = {counts_ND}: expected equal")
        tokens = [
            np.array([[lengths_S[list(cell)].sum() for cell in row] for row in step])
            for step in steps
        ]
        columns = [np.full_like(row_S, stamp), rank_S, np.full_like(row_S, ranks)]
        counts = []
        for cap in caps:
            merged: list[int] = []
            for tokens_MD in tokens:  # never across steps, so that each step's stay consecutive
                first = max(merged, default=-1) + 1
                new_M = np.arange(len(tokens_MD))
                if cap != caps[0]:
                    new_M = merge_rows(tokens_MD, cap, rows_multiple_of)
                merged += (first + new_M).tolist()
            columns += [np.full_like(row_S, cap), np.array(merged)[row_S]]
            counts.append(max(merged) + 1)
        return cls(order, np.stack(columns, axis=1), tuple(counts))


def small_at_both_ends(step: Sequence[Row], lengths_S: NDArray[np.int64]) -> list[Row]:
    """Rows as verl orders micro-batches: light ones first and last, for shorter pipeline bubbles.

    By the squared lengths of a row's heaviest cell, where verl goes by each rank's own.
    """
    heavy = [max(int((lengths_S[list(cell)] ** 2).sum()) for cell in row) for row in step]
    order = sorted(range(len(step)), key=lambda m: (-heavy[m], m))
    return [step[m] for m in order[::2][::-1] + order[1::2]]


def merge_rows(tokens_MD: NDArray[np.int64], cap: int, multiple_of: int = 1) -> NDArray[np.int64]:
    """[M] new row of each row: first-fit in order, every DP rank's cell within `cap`.

    Then rows are parted again until their number is a multiple of `multiple_of`, of which the
    number of rows given is one.
    """
    bins: list[list[int]] = []
    for m in range(len(tokens_MD)):
        for members in bins:
            if (tokens_MD[[*members, m]].sum(axis=0) <= cap).all():
                members.append(m)
                break
        else:
            bins.append([m])
    while len(bins) % multiple_of:
        members = max(bins, key=len)
        bins.append([members.pop()])
    merged_M = np.empty(len(tokens_MD), np.int64)
    for new, members in enumerate(sorted(bins)):
        merged_M[members] = new
    return merged_M


def micro_batches(
    column_SC: NDArray[np.int64],
    lengths_S: NDArray[np.int64],
    *,
    max_tokens: int,
    rank: int,
    ranks: int,
    multiple_of: int = 1,
) -> tuple[int, list[list[int]]]:
    """(stamp, positions of each micro-batch) of one DP rank's part of a batch.

    Raises DeclinedError where the plan is for another pass, UnusableError where it is broken.
    """
    if not len(column_SC):
        raise UnusableError("the batch is empty")
    stamps = np.unique(column_SC[:, 0])
    if len(stamps) != 1 or len(column_SC) != len(lengths_S):
        raise UnusableError(f"{len(stamps)} stamps in one batch: expected 1")
    if (column_SC[:, 2] != ranks).any():
        raise DeclinedError(f"planned for {column_SC[0, 2]} DP ranks, this model has {ranks}")
    if (column_SC[:, 1] != rank).any():
        other = column_SC[column_SC[:, 1] != rank][0, 1]
        raise UnusableError(f"DP rank {rank} has a sample of DP rank {other}")
    passes = {int(cap): index for index, cap in enumerate(column_SC[0, HEADER::2])}
    if max_tokens not in passes:
        raise DeclinedError(f"planned for caps {sorted(passes)}, this pass has {max_tokens}")
    row_S = column_SC[:, HEADER + 1 + 2 * passes[max_tokens]]
    first, last = int(row_S.min()), int(row_S.max())
    batches = [np.flatnonzero(row_S == m).tolist() for m in range(first, last + 1)]
    for m, batch in enumerate(batches, first):
        if not batch:
            raise UnusableError(f"row {m} of {first}..{last} has no sample")
        if (tokens := int(lengths_S[batch].sum())) > max_tokens:
            raise UnusableError(f"row {m} has {tokens} tokens: expected at most {max_tokens}")
    if len(batches) % multiple_of:
        raise UnusableError(f"{len(batches)} rows: expected a multiple of {multiple_of}")
    return int(stamps[0]), batches
