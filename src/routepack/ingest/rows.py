"""The one normaliser: token rows of any engine to canonical routes, checked and counted.

Shapes: N token rows of a payload, A layers of its layer axis, L MoE layers, K experts per token,
T token rows of the sample, E experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.ingest.arrays import as_rows, checked_length, checked_start
from routepack.ingest.captured import read_captured
from routepack.ingest.sample import CAPTURED, MISSING, PADDING, SampleRoutes
from routepack.ingest.spec import RouteSpec


class Part(NamedTuple):
    """Consecutive token rows of one array."""

    first: int  # token of the sample that the first of them is
    rows_NAK: NDArray[Any]
    field: str = "routes"  # the payload, for messages
    offset: int = 0  # where in it they start, likewise


def from_rows(
    rows: Any, length: int, spec: RouteSpec, *, start: int = 0, field: str = "routes"
) -> SampleRoutes:
    """Routes of a sample of `length` tokens from one array of token rows.

    rows    [N, A, K] of tokens start, start + 1, ...: all of them, or all but the last, which
            engines sample but do not run. A is all layers of the model or the MoE layers only
    start   tokens before the recorded ones; they are missing

    Raises InputError.
    """
    length = checked_length(length)
    start = checked_start(start, length)
    rows_NAK = as_rows(rows, spec, field)
    if len(rows_NAK) not in (length - start, length - start - 1):
        raise wrong_rows(field, rows_NAK.shape, length, start)
    return assemble([Part(start, rows_NAK, field)], length, spec)


def from_segments(
    segments: Iterable[tuple[int, Any]], length: int, spec: RouteSpec, *, field: str = "segments"
) -> SampleRoutes:
    """Routes of a sample from several recordings, such as the requests of a multi-turn rollout.

    segments   (start, rows [N, A, K]) in the order of recording. Each begins within or right behind
               the rows so far and replaces those from its start on; the last ends at the last
               token, or the one before. Replaced rows are counted as duplicates

    Raises InputError, also for rows that leave a gap or do not add up to the length.
    """
    length = checked_length(length)
    parts: list[Part] = []
    covered = duplicate_rows = 0
    for i, (start, rows) in enumerate(segments):
        name = f"{field}[{i}]"
        start = checked_length(start, f"{name}.start", low=0)
        if start > covered:
            expected = f"at most {covered}, the rows of the segments before"
            raise InputError.at(f"{name}.start", start, expected)
        rows_NAK = as_rows(rows, spec, name)
        duplicate_rows += covered - start
        parts = [
            part._replace(rows_NAK=part.rows_NAK[: start - part.first])
            for part in parts
            if part.first < start
        ]
        parts.append(Part(start, rows_NAK, name))
        covered = start + len(rows_NAK)
    if covered not in (length, length - 1):
        expected = f"{length - 1} or {length} token rows for length {length}"
        raise InputError.at(f"{field} end", covered, expected)
    return assemble(parts, length, spec, duplicate_rows=duplicate_rows)


def without_routes(length: int, spec: RouteSpec) -> SampleRoutes:
    """A sample that came without any route. Raises InputError where the spec lacks the layers."""
    return assemble([], checked_length(length), spec)


def wrong_rows(field: str, shape: tuple[int, ...], length: int, start: int = 0) -> InputError:
    """The error for rows that are neither of all tokens nor of all but the last."""
    recorded = length - start
    allowed = f"{recorded - 1} or {recorded}" if recorded else "no"
    expected = f"{allowed} token rows for length {length}, start {start}"
    if shape[0] > recorded:
        expected += " (recordings joined end to end: see from_segments)"
    return InputError.at(f"{field}.shape", shape, expected)


def assemble(
    parts: Sequence[Part],
    tokens: int,
    spec: RouteSpec,
    *,
    left: int = 0,
    right: int = 0,
    duplicate_rows: int = 0,
) -> SampleRoutes:
    """Canonical routes of `tokens` tokens between `left` and `right` rows of padding.

    The parts do not overlap and lie within the tokens. Raises InputError.
    """
    provenance_T = np.full(left + tokens + right, MISSING, np.uint8)
    if left or right:
        provenance_T[:left] = PADDING
        provenance_T[left + tokens :] = PADDING
    if not parts:
        return _without(provenance_T, spec)
    axis = parts[0].rows_NAK.shape[1]
    selection = spec.selection(axis, parts[0].field)
    blocks, demands, partial_rows = [], [], 0
    for part in parts:
        if part.rows_NAK.shape[1] != axis:
            expected = f"{axis} layers, as in the rows before"
            raise InputError.at(f"{part.field}.shape", part.rows_NAK.shape, expected)
        captured = read_captured(part.rows_NAK, selection, spec, part.field, part.offset)
        blocks.append(captured.block_NLK)
        demands.append(captured.demand_LE)
        partial_rows += captured.partial_rows
        own_T = provenance_T[left + part.first :][: len(part.rows_NAK)]
        own_T[captured.kept] = CAPTURED
    block_NLK, demand_LE = blocks[0], demands[0]
    if len(parts) > 1:
        block_NLK = np.concatenate(blocks)
        demand_LE = np.stack(demands).sum(axis=0, dtype=np.uint32)
        if len(block_NLK) < 2**16:
            demand_LE = demand_LE.astype(np.uint16)
    return SampleRoutes(block_NLK, provenance_T, demand_LE, duplicate_rows, partial_rows)


def _without(provenance_T: NDArray[np.uint8], spec: RouteSpec) -> SampleRoutes:
    if spec.layers is None:
        raise InputError("moe_layers: expected the MoE layers, a sample without routes shows none")
    none_NLK = np.zeros((0, spec.layers, spec.top_k), spec.id_type)
    demand_LE = np.zeros((spec.layers, spec.num_experts), np.uint16)
    return SampleRoutes(none_NLK, provenance_T, demand_LE)
