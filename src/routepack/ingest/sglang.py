"""SGLang, slime and miles, which carry its payloads, and AReaL, which flattens them.

Sources: sglang/srt/state_capturer/routed_experts_wire.py and base.py: rows [start, T-1) of all
layers, flattened, base64, int32 unless `routed_experts_dtype` says otherwise. slime
slime/utils/types.py and miles miles/utils/types.py: exactly T-1 rows. AReaL
areal/engine/sglang_remote.py: [T-1, layers * K], and areal/infra/remote_inf_engine.py, which joins
the arrays of a request's resumptions, each of them with all rows so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.ingest.arrays import (
    as_array,
    as_rows,
    check_type,
    checked_length,
    checked_start,
    decoded,
    from_bytes,
)
from routepack.ingest.rows import Part, assemble, from_rows, without_routes, wrong_rows
from routepack.ingest.sample import SampleRoutes
from routepack.ingest.spec import RouteSpec

FIELD = "routed_experts"
WIRE_TYPES = ("int32", "uint16", "uint8")


def from_sglang(
    routed_experts: Any,
    length: int,
    spec: RouteSpec,
    *,
    start: int | None = None,
    dtype: str | None = None,
) -> SampleRoutes:
    """Routes of one request; `length` counts prompt and completion.

    routed_experts  a response's `meta_info`, or its `routed_experts`: base64, the decoded bytes, or
                    an array [T-1-start, A, K] (skip_tokenizer_init). None: no routes
    start           routed_experts_start_len of the request, where only the rows of a suffix come
                    back; the rows before it are missing. Default: as in `meta_info`, else 0
    dtype           of base64 and bytes. Default: as in `meta_info`, else int32

    Flat payloads are of all layers of the model if their size allows, else of the MoE layers only;
    the spec must have moe_layers or model_layers. Raises InputError.
    """
    length = checked_length(length)
    if isinstance(routed_experts, Mapping):
        meta_info = routed_experts
        routed_experts = meta_info.get(FIELD)
        start = meta_info.get(f"{FIELD}_start_len") if start is None else start
        dtype = meta_info.get(f"{FIELD}_dtype") if dtype is None else dtype
    if routed_experts is None:
        return without_routes(length, spec)
    start = checked_start(0 if start is None else start, length)
    if isinstance(routed_experts, (str, bytes, bytearray, memoryview)):
        name = "int32" if dtype is None else dtype
        if name not in WIRE_TYPES:
            raise InputError.at(f"{FIELD}_dtype", name, f"one of {', '.join(WIRE_TYPES)}")
        data = routed_experts
        if isinstance(data, str):
            data = decoded(data, FIELD)
        flat_X = from_bytes(data, np.dtype(name), FIELD)
        check_type(flat_X.dtype, spec, FIELD)
        routed_experts = _unflattened(flat_X, length - start, spec)
    return from_rows(routed_experts, length, spec, start=start, field=FIELD)


def _unflattened(flat_X: NDArray[Any], recorded: int, spec: RouteSpec) -> NDArray[Any]:
    """[N, A, K] with all but the last of `recorded` tokens or all, for the first A that fits."""
    if not spec.axes:
        raise InputError("moe_layers: expected the MoE layers, flat routes do not show them")
    for axis in spec.axes:
        for rows in (recorded - 1, recorded):
            if rows >= 0 and rows * axis * spec.top_k == flat_X.size:
                return flat_X.reshape(rows, axis, spec.top_k)
    axes = " or ".join(map(str, spec.axes))
    expected = f"{recorded - 1} or {recorded} token rows x {axes} layers x top_k {spec.top_k}"
    raise InputError.at(f"{FIELD} size", flat_X.size, expected)


def from_slime(rollout_routed_experts: Any, length: int, spec: RouteSpec) -> SampleRoutes:
    """Routes of a slime `Sample` with `length` tokens: [T-1, A, K]. Raises InputError.

    Rows of zeros are holes; a MoE layer of zeros, as where pipeline stages were not merged, is
    refused like any row with routes at some layers only.
    """
    return _all_but_last(rollout_routed_experts, length, spec)


def from_miles(rollout_routed_experts: Any, length: int, spec: RouteSpec) -> SampleRoutes:
    """Routes of a miles `Sample` with `length` tokens: [T-1, A, K]. Raises InputError.

    Rows of -1, which its replay fills with 0..K-1, and rows of zeros are holes.
    """
    return _all_but_last(rollout_routed_experts, length, spec)


def _all_but_last(rollout_routed_experts: Any, length: int, spec: RouteSpec) -> SampleRoutes:
    field = f"rollout_{FIELD}"
    length = checked_length(length)
    if rollout_routed_experts is None:
        return without_routes(length, spec)
    rows_NAK = as_rows(rollout_routed_experts, spec, field)
    if len(rows_NAK) != length - 1:
        expected = f"{length - 1} token rows, one less than the {length} tokens"
        raise InputError.at(f"{field}.shape", rows_NAK.shape, expected)
    return assemble([Part(0, rows_NAK, field)], length, spec)


def from_areal(
    routed_experts: Any, length: int, spec: RouteSpec, *, segment_ends: Sequence[int] | None = None
) -> SampleRoutes:
    """Routes of an AReaL `ModelResponse`; `length` counts input and output tokens.

    routed_experts   [N, A * K]. None: no routes
    segment_ends     where a request was aborted and resumed: tokens known, prompt included, at the
                     end of each attempt. Every attempt then left rows for all of them but the last;
                     those of the last attempt count, the others are duplicates

    Raises InputError, also for joined attempts without `segment_ends`.
    """
    length = checked_length(length)
    if routed_experts is None:
        return without_routes(length, spec)
    flat_NX = as_array(routed_experts, FIELD)
    if flat_NX.ndim != 2 or flat_NX.shape[1] % spec.top_k or not flat_NX.shape[1]:
        expected = f"(token rows, layers * top_k = layers * {spec.top_k})"
        raise InputError.at(f"{FIELD}.shape", flat_NX.shape, expected)
    check_type(flat_NX.dtype, spec, FIELD)
    shape = (len(flat_NX), flat_NX.shape[1] // spec.top_k, spec.top_k)
    rows_NAK = flat_NX.reshape(shape)
    earlier = 0
    if segment_ends is not None:
        earlier = _earlier_rows(segment_ends, length, shape)
    if len(rows_NAK) - earlier not in (length, length - 1):
        raise wrong_rows(FIELD, shape, length)
    part = Part(0, rows_NAK[earlier:], FIELD, earlier)
    return assemble([part], length, spec, duplicate_rows=earlier)


def _earlier_rows(segment_ends: Sequence[int], length: int, shape: tuple[int, ...]) -> int:
    """Rows of all attempts but the last."""
    ends = [checked_length(end, f"segment_ends[{i}]") for i, end in enumerate(segment_ends)]
    for i, end in enumerate(ends):
        if i and end < ends[i - 1]:
            raise InputError.at("segment_ends", end, f"at least {ends[i - 1]}", i)
    if not ends or ends[-1] != length:
        expected = f"{length}, the length of the sample, at the end"
        raise InputError.at("segment_ends", ends, expected)
    rows = sum(end - 1 for end in ends)
    if shape[0] != rows:
        expected = f"{rows} token rows, one less than each of segment_ends {ends}"
        raise InputError.at(f"{FIELD}.shape", shape, expected)
    return rows - (length - 1)
