"""The meaning of every reader of routes, one id at a time, with nothing from the package.

A payload that must be refused raises Refused. Everything else gives a Meaning.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CAPTURED, MISSING, PADDING = 0, 1, 2
LIMITS = {
    "int8": 2**7 - 1,
    "uint8": 2**8 - 1,
    "int16": 2**15 - 1,
    "uint16": 2**16 - 1,
    "int32": 2**31 - 1,
    "int64": 2**63 - 1,
}
LIMITS_BY_STR = {np.dtype(name).str: limit for name, limit in LIMITS.items()}  # a fast look-up
CODES = {"int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "int64": "q"}

Row = list[list[int]]  # [A][K]


class Refused(Exception):  # noqa: N818  # an outcome, not a mistake
    """The payload has no certain meaning."""


@dataclass(frozen=True)
class Model:
    """The arguments of a RouteSpec."""

    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...] | None = None
    model_layers: int | None = None
    zero_rows: str | None = None
    partial_rows: str = "refuse"

    @property
    def axes(self) -> list[int]:
        """Sizes of the layer axis: all layers, then MoE layers; none where any will do."""
        if self.moe_layers is None:
            return [] if self.model_layers is None else [self.model_layers]
        every = max(self.moe_layers) + 1 if self.model_layers is None else self.model_layers
        return [every, len(self.moe_layers)]


@dataclass
class Meaning:
    """What a payload says."""

    routes: list[Row]  # of the captured rows
    provenance: list[int]
    demand: list[list[int]]
    duplicate_rows: int = 0
    partial_rows: int = 0


def require(condition: object) -> None:
    """Refuse unless the condition holds."""
    if not condition:
        raise Refused


def whole(value: Any, low: int) -> int:
    """A whole number of at least `low`."""
    require(isinstance(value, (int, np.integer)) and not isinstance(value, bool) and value >= low)
    return int(value)


def rows_of(array: Any, model: Model) -> list[Row]:
    """[N][A][K] of an array, checked for shape and type."""
    array = np.asarray(array)
    require(array.ndim == 3 and array.shape[2] == model.top_k)
    require(LIMITS_BY_STR.get(array.dtype.str, 0) >= model.num_experts - 1)
    require(array.shape[1] in model.axes if model.axes else array.shape[1] >= 1)
    return array.tolist() if len(array) else Empty(array.shape[1])


class Empty(list[Row]):
    """No rows, but of a known number of layers."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis


def moe_positions(axis: int, model: Model) -> list[int]:
    """Where the MoE layers lie on a layer axis."""
    if model.moe_layers is None or axis == len(model.moe_layers):
        return list(range(axis))
    return list(model.moe_layers)


def read_row(row: Row, model: Model) -> Row | str:
    """The routes of a token at the MoE layers, or "missing", or "partial"."""
    positions = moe_positions(len(row), model)
    layers = [row[a] for a in positions]
    if model.top_k == 1 and all(ids == [0] for ids in layers):
        require(model.zero_rows is not None)
        if model.zero_rows == "missing":
            return "missing"
    unrecorded = [-1] * model.top_k
    empty = [ids == unrecorded or (model.top_k > 1 and not any(ids)) for ids in layers]
    if all(empty):
        return "missing"
    if any(empty):
        require(model.partial_rows == "missing")
        return "partial"
    for ids in layers:
        require(all(0 <= e < model.num_experts for e in ids))
        require(len(set(ids)) == model.top_k)
    for a, ids in enumerate(row):
        require(a in positions or all(e in (0, -1) for e in ids))
    return layers


def meaning(
    pieces: Sequence[tuple[int, list[Row]]],
    tokens: int,
    model: Model,
    *,
    left: int = 0,
    right: int = 0,
    duplicate_rows: int = 0,
) -> Meaning:
    """Of pieces (first token, rows) that do not overlap."""
    axes = {rows.axis if isinstance(rows, Empty) else len(rows[0]) for _, rows in pieces}
    require(len(axes) <= 1)
    if axes:
        layers = len(moe_positions(axes.pop(), model))
    else:
        require(model.moe_layers is not None or model.model_layers is not None)
        layers = len(model.moe_layers) if model.moe_layers is not None else model.model_layers or 0
    result = Meaning([], [MISSING] * tokens, [[0] * model.num_experts for _ in range(layers)])
    result.duplicate_rows = duplicate_rows
    for first, rows in pieces:
        for n, row in enumerate(rows):
            found = read_row(row, model)
            if isinstance(found, str):
                result.partial_rows += found == "partial"
                continue
            result.provenance[first + n] = CAPTURED
            result.routes.append(found)
            for layer, ids in enumerate(found):
                for e in ids:
                    result.demand[layer][e] += 1
    result.provenance = [PADDING] * left + result.provenance + [PADDING] * right
    return result


def of_rows(rows: Any, length: Any, model: Model, start: Any = 0) -> Meaning:
    """Rows of all tokens from `start` on, or of all but the last."""
    length, start = whole(length, 1), whole(start, 0)
    read = rows_of(rows, model)
    require(len(read) in (length - start, length - start - 1))
    return meaning([(start, read)], length, model)


def of_segments(segments: Iterable[tuple[Any, Any]], length: Any, model: Model) -> Meaning:
    """Every row of every segment in turn; the last word on a token counts."""
    length = whole(length, 1)
    rows_by_token: list[Row] = []
    duplicates = 0
    axes = set()
    for start, rows in segments:
        start, read = whole(start, 0), rows_of(rows, model)
        require(start <= len(rows_by_token))
        duplicates += len(rows_by_token) - start
        rows_by_token = rows_by_token[:start] + list(read)
        axes.add(np.asarray(rows).shape[1])
    require(len(rows_by_token) in (length, length - 1) and len(axes) <= 1)
    pieces = [(0, rows_by_token or Empty(*axes))] if axes else []
    return meaning(pieces, length, model, duplicate_rows=duplicates)


def unpacked(data: bytes, dtype: str) -> list[int]:
    """Ids from raw bytes."""
    code = CODES[dtype]
    require(len(data) % struct.calcsize(code) == 0)
    return [value for (value,) in struct.iter_unpack(f"={code}", data)]


def base64_bytes(text: str) -> bytes:
    """Bytes of a base64 string."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refused from None


def nested(flat: list[int], shape: Sequence[int], dtype: str) -> Any:
    """The array of a flat list."""
    require(math.prod(shape) == len(flat))
    return np.array(flat, dtype).reshape(shape)


def of_sglang(payload: Any, length: Any, model: Model) -> Meaning:
    """A meta_info with base64."""
    length = whole(length, 1)
    start = whole(payload.get("routed_experts_start_len", 0), 0)
    dtype = payload.get("routed_experts_dtype", "int32")
    require(dtype in ("int32", "uint16", "uint8"))
    flat = unpacked(base64_bytes(payload["routed_experts"]), dtype)
    require(LIMITS[dtype] >= model.num_experts - 1)
    for axis in model.axes:
        for rows in (length - start - 1, length - start):
            if rows >= 0 and rows * axis * model.top_k == len(flat):
                return of_rows(nested(flat, (rows, axis, model.top_k), dtype), length, model, start)
    raise Refused


def of_slime(rows: Any, length: Any, model: Model) -> Meaning:
    """Exactly one row less than tokens."""
    length = whole(length, 1)
    read = rows_of(rows, model)
    require(len(read) == length - 1)
    return meaning([(0, read)], length, model)


def of_nemo_rl(rows: Any, length: Any, model: Model) -> Meaning:
    """Rows of all tokens but the last; then a filler, then padding."""
    length = whole(length, 1)
    if isinstance(rows, str):
        fields = rows.split(":", 3)
        require(len(fields) == 4 and fields[0] == "nrlre1")
        require(fields[1] in ("int8", "int16", "int32"))
        require(len(fields[2].split("x")) == 3)
        require(all(size.isascii() and size.isdigit() for size in fields[2].split("x")))
        shape = [int(size) for size in fields[2].split("x")]
        require("x".join(map(str, shape)) == fields[2])
        rows = nested(unpacked(base64_bytes(fields[3]), fields[1]), shape, fields[1])
    read = rows_of(rows, model)
    require(len(read) >= length - 1)
    used = read[: length - 1] or Empty(np.asarray(rows).shape[1])
    return meaning([(0, used)], length, model, right=max(0, len(read) - length))


def of_prime_rl(payload: Any, length: Any, model: Model) -> Meaning:
    """Bytes, shape, dtype, and perhaps a start."""
    length = whole(length, 1)
    dtype, shape, data = payload["dtype"], payload["shape"], payload["data"]
    require(dtype in ("uint8", "uint16", "int16", "int32", "int64") and len(shape) == 3)
    sizes = [whole(size, 0) for size in shape]
    data = base64_bytes(data) if isinstance(data, str) else data
    rows = nested(unpacked(data, dtype), sizes, dtype)
    return of_rows(rows, length, model, payload.get("start", 0))


def of_areal(flat: Any, length: Any, model: Model, ends: Sequence[int] | None) -> Meaning:
    """[N, A * K], perhaps of several attempts one behind the other."""
    length = whole(length, 1)
    flat = np.asarray(flat)
    require(flat.ndim == 2 and flat.shape[1] and flat.shape[1] % model.top_k == 0)
    rows = flat.reshape(len(flat), flat.shape[1] // model.top_k, model.top_k)
    earlier = 0
    if ends is not None:
        require(ends and ends[-1] == length and min(ends) >= 1 and sorted(ends) == list(ends))
        require(len(rows) == sum(end - 1 for end in ends))
        earlier = len(rows) - (length - 1)
    read = rows_of(rows, model)[earlier:] or Empty(rows.shape[1])
    require(len(read) in (length, length - 1))
    rows_of(rows, model)
    return meaning([(0, read)], length, model, duplicate_rows=earlier)


def of_padded(array: Any, mask: Any, model: Model) -> list[Meaning]:
    """[B, X, A, K] where the mask has the tokens of every sample in one run."""
    array, mask = np.asarray(array), np.asarray(mask)
    require(array.ndim == 4 and mask.shape == array.shape[:2])
    samples = []
    for rows, tokens in zip(array, mask.tolist(), strict=True):
        left = next((x for x, token in enumerate(tokens) if token), len(tokens))
        right = next((x for x, token in enumerate(reversed(tokens)) if token), 0)
        own = tokens[left : len(tokens) - right]
        require(own and all(own))
        read = rows_of(rows, model)[left : len(tokens) - right]
        samples.append(meaning([(0, read)], len(own), model, left=left, right=right))
    return samples


def of_vllm(prompt: Any, routed: Any, length: Any, model: Model, start: Any) -> Meaning:
    """The prompt's rows and those of the completion."""
    if prompt is None:
        return of_rows(routed, length, model, start)
    length, start = whole(length, 1), whole(start, 0)
    first, second = rows_of(prompt, model), rows_of(routed, model)
    require(len(first) + len(second) in (length - start, length - start - 1))
    return meaning([(start, first), (start + len(first), second)], length, model)
