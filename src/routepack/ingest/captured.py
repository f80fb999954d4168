"""Which rows of an array hold routes, and those routes in the canonical type, counted.

Engines fill rows that they did not record with zeros or with -1. K distinct experts are never K
zeros, so with K > 1 such a row is a hole. Most payloads have holes at an end, if any: routes are
counted at once and looked into only where the count finds something wrong.

Shapes: N token rows, A layers of the layer axis, L MoE layers and D others, K experts per token,
E experts; n some of the rows.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.ingest.narrow import narrow
from routepack.ingest.spec import RouteSpec, Selection
from routepack.kernels.bitcounting import as_words, count_words, make_bit_scratch
from routepack.kernels.counting import OK, Scratch, count_block, make_scratch

Kept = slice | NDArray[np.int64]  # the rows that are captured


class Captured(NamedTuple):
    """The captured rows of an array."""

    kept: Kept
    block_NLK: NDArray[Any]
    demand_LE: NDArray[Any]
    partial_rows: int


class _Source(NamedTuple):
    """An array of routes, and what is needed to read it and to name a place in it."""

    rows_NAK: NDArray[Any]
    selection: Selection
    spec: RouteSpec
    field: str
    offset: int

    def error(
        self, kept: Kept, n: int, layer: int, value: object, expected: str, *k: int
    ) -> InputError:
        """For the n-th of the kept rows."""
        row = self.offset + int(np.arange(len(self.rows_NAK))[kept][n])
        return InputError.at(self.field, value, expected, (row, layer, *k))


def read_captured(
    rows_NAK: NDArray[Any], selection: Selection, spec: RouteSpec, field: str, offset: int
) -> Captured:
    """The captured rows; `field` and `offset` name them in messages. Raises InputError."""
    source = _Source(rows_NAK, selection, spec, field, offset)
    kept: Kept = slice(0, len(rows_NAK))
    partial_rows = 0
    counted = _counted(source, kept) if _ends_look_captured(source) else None
    if counted is None:
        kept = _without_holes(source)
        counted = _counted(source, kept)
    if counted is None:
        whole = _without_partial_rows(source, kept)
        partial_rows = len(rows_NAK[kept]) - len(whole)
        kept, counted = whole, _counted(source, whole) if partial_rows else None
        if counted is None:
            raise _violation(source, kept)
    if selection.dense_D.size:
        _require_empty_dense_layers(source, kept)
    return Captured(kept, *counted, partial_rows)


def _ends_look_captured(source: _Source) -> bool:
    """Whether it is worth counting all rows: a hole is found by that too, unless K is 1."""
    rows_NAK, moe_L = source.rows_NAK, source.selection.moe_L
    if source.spec.top_k == 1 or not len(rows_NAK):
        return False
    return all(rows_NAK[n, moe_L[0], 0] != rows_NAK[n, moe_L[0], 1] for n in (0, -1))


def _without_holes(source: _Source) -> Kept:
    """The rows but those without a route at any MoE layer."""
    rows_NAK, selection, spec = source.rows_NAK, source.selection, source.spec
    first_NK = rows_NAK[:, selection.moe_L[0]]
    # A hole has equal ids, or the one id 0 or -1, at the first MoE layer too.
    suspect_N = first_NK[:, 0] <= 0 if spec.top_k == 1 else first_NK[:, 0] == first_NK[:, 1]
    suspects = np.flatnonzero(suspect_N)
    if not suspects.size:
        return slice(0, len(rows_NAK))
    ids_nLK = rows_NAK[suspects][:, selection.moe_L]
    hole_n = _empty(ids_nLK).all(axis=1)
    if spec.top_k == 1:
        zero_n = (ids_nLK == 0).all(axis=(1, 2))
        if zero_n.any() and spec.zero_rows is None:
            expected = "zero_rows to say if that is 'routed' to expert 0 or 'missing', top_k is 1"
            row = source.offset + int(suspects[np.argmax(zero_n)])
            raise InputError.at(source.field, "0 at every MoE layer", expected, row)
        if spec.zero_rows == "missing":
            hole_n |= zero_n
    kept_N = np.ones(len(rows_NAK), bool)
    kept_N[suspects[hole_n]] = False
    kept = np.flatnonzero(kept_N)
    if not kept.size:
        return slice(0, 0)
    first, last = int(kept[0]), int(kept[-1])
    return slice(first, last + 1) if last - first + 1 == kept.size else kept


def _empty(ids_nLK: NDArray[Any]) -> NDArray[np.bool_]:
    """[n, L] where an engine recorded nothing: all -1 or, with several experts, all 0."""
    empty_nL: NDArray[np.bool_] = np.all(ids_nLK == -1, axis=2)
    if ids_nLK.shape[2] > 1:
        empty_nL |= np.all(ids_nLK == 0, axis=2)
    return empty_nL


def _without_partial_rows(source: _Source, kept: Kept) -> NDArray[np.int64]:
    """The kept rows with a route at every MoE layer; refuses others where the spec says so."""
    ids_nLK = source.rows_NAK[kept][:, source.selection.moe_L]
    empty_nL = _empty(ids_nLK)
    if source.spec.partial_rows == "refuse" and empty_nL.any():
        n, i = np.argwhere(empty_nL)[0].tolist()
        expected = (
            f"{source.spec.top_k} experts, as other MoE layers of the token row have"
            " (moe_layers leaves out dense layers, partial_rows 'missing' such rows)"
        )
        layer = int(source.selection.moe_L[i])
        raise source.error(kept, n, layer, ids_nLK[n, i].tolist(), expected)
    return np.arange(len(source.rows_NAK))[kept][~empty_nL.any(axis=1)]


def _counted(source: _Source, kept: Kept) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Canonical ids [n, L, K] and demand [L, E]; None if an id is no expert or repeats."""
    block_nLK = _block(source.rows_NAK[kept], source.selection, source.spec)
    demand_LE = None if block_nLK is None else _count(block_nLK, source.spec)
    return None if block_nLK is None or demand_LE is None else (block_nLK, demand_LE)


def _block(rows_nAK: NDArray[Any], selection: Selection, spec: RouteSpec) -> NDArray[Any] | None:
    if not (rows_nAK.flags.c_contiguous and rows_nAK.flags.aligned):
        rows_nAK = np.require(rows_nAK, requirements=["C", "A"])
    ids_nAK = rows_nAK.view(f"u{rows_nAK.itemsize}")
    if ids_nAK.dtype == spec.id_type and selection.whole:
        return ids_nAK  # the count checks the range
    block_nLK = np.empty((len(ids_nAK), len(selection.moe_L), spec.top_k), spec.id_type)
    if not block_nLK.size:
        return block_nLK
    width = ids_nAK[0].size
    largest = narrow(ids_nAK.reshape(-1), width, selection.runs_U2, block_nLK.reshape(-1))
    return block_nLK if largest < spec.num_experts else None


class _Scratches(threading.local):
    """Working memory of a thread; making it anew would cost as much as a short sample."""

    def __init__(self) -> None:
        self.bits = make_bit_scratch()
        self.known: dict[tuple[int, int], Scratch] = {}

    def of(self, spec: RouteSpec) -> Scratch:
        key = spec.top_k, spec.id_type.itemsize
        if key not in self.known:
            self.known[key] = make_scratch(spec.top_k, spec.id_type)
        return self.known[key]


_scratches = _Scratches()


def _count(block_nLK: NDArray[Any], spec: RouteSpec) -> NDArray[Any] | None:
    rows, layers, top_k = block_nLK.shape
    shape = layers, spec.num_experts
    if (words_X := as_words(block_nLK)) is not None:
        demand_LE: NDArray[Any] = np.zeros(shape, np.uint16)
        return demand_LE if count_words(words_X, demand_LE, *_scratches.bits) else None
    demand_LE = np.zeros(shape, np.uint32)  # faster to count in than 16 bits
    offsets_S1 = np.array([0, rows])
    top = spec.id_type.type(spec.num_experts - 1)
    code, _ = count_block(
        block_nLK.reshape(-1), offsets_S1, top_k, top, demand_LE[np.newaxis], *_scratches.of(spec)
    )
    if code == OK:
        return demand_LE.astype(np.uint16) if rows < 2**16 else demand_LE
    _scratches.known.clear()  # of no use after a violation
    return None


def _violation(source: _Source, kept: Kept) -> InputError:
    """The error of the first id that is no expert or repeats in its row."""
    spec = source.spec
    ids_nLK = source.rows_NAK[kept][:, source.selection.moe_L]
    outside_nLK = (ids_nLK < 0) | (ids_nLK >= spec.num_experts)
    wrong_nLK = outside_nLK.copy()
    for k in range(1, spec.top_k):
        wrong_nLK[:, :, k] |= (ids_nLK[:, :, :k] == ids_nLK[:, :, k, None]).any(axis=2)
    n, i, k = (int(at) for at in np.unravel_index(int(np.argmax(wrong_nLK)), wrong_nLK.shape))
    assert wrong_nLK[n, i, k], "the count found a violation"
    expected = f"{spec.top_k} distinct experts in a token row, it repeats"
    if outside_nLK[n, i, k]:
        expected = f"an expert id in 0..{spec.num_experts - 1}"
    return source.error(kept, n, int(source.selection.moe_L[i]), int(ids_nLK[n, i, k]), expected, k)


def _require_empty_dense_layers(source: _Source, kept: Kept) -> None:
    """Ids at a layer that is said to be dense would be demand that nobody counts."""
    ids_nDK = source.rows_NAK[kept][:, source.selection.dense_D]
    wrong_nDK = (ids_nDK != 0) & (ids_nDK != -1)
    if wrong_nDK.any():
        n, d, k = np.argwhere(wrong_nDK)[0].tolist()
        layer = int(source.selection.dense_D[d])
        expected = "0 or -1, moe_layers leaves out this layer"
        raise source.error(kept, n, layer, int(ids_nDK[n, d, k]), expected, k)
