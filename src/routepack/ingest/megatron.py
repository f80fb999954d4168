"""Megatron-LM: the JSON lines that its router trace writes, one file a rank.

Source: megatron/core/transformer/moe/router_trace.py (`--moe-routing-trace-path`): one record per
step, block, layer and micro-batch with `num_tokens`, `topk`, `top_indices` [tokens, K]. Records do
not tell samples: what comes out is one `SampleRoutes` per micro-batch of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.ingest.arrays import as_array, check_type
from routepack.ingest.rows import Part, assemble
from routepack.ingest.sample import SampleRoutes
from routepack.ingest.spec import RouteSpec

Routes = dict[int, list[NDArray[Any]]]  # the records of each layer, in order


def from_megatron_trace(
    records: Iterable[Mapping[str, Any] | str | bytes],
    spec: RouteSpec,
    *,
    step: int | None = None,
    drop_repeats: bool = False,
) -> Iterator[SampleRoutes]:
    """Routes of the micro-batches of one step, rank by rank.

    records        lines or parsed records, of one rank's file or several one after another. Of the
                   layers only those in moe_layers are read, of the blocks only the decoder: layers
                   of multi-token prediction count anew from 0
    step           which step; None where there is only one
    drop_repeats   of records that repeat the one before in every layer, as activation recomputing
                   makes them, keep one and count the others as duplicates; else refuse them

    Raises InputError, also for layers with different numbers of records: those of a pipeline stage
    count from 0 on every rank, so a trace must come from a run without pipeline parallelism.
    """
    by_rank: dict[int, Routes] = {}
    seen: int | None = step
    for i, record in enumerate(records):
        record = _parsed(record, i)
        if record.get("block", "decoder") != "decoder":
            continue
        found, rank, layer = (_number(record, name, i) for name in ("step", "rank", "layer"))
        if step is not None and found != step:
            continue
        if seen is not None and found != seen:
            expected = f"{seen}, as before: choose one step, a window holds no more"
            raise InputError.at("step", found, expected, i)
        seen = found
        if spec.moe_layers is not None and layer not in spec.moe_layers:
            raise InputError.at("layer", layer, "one of moe_layers", i)
        by_rank.setdefault(rank, {}).setdefault(layer, []).append(_ids(record, spec, i))
    if not by_rank:
        which = "records" if step is None else f"records of step {step}"
        raise InputError(f"router trace: expected {which} of decoder layers, there are none")
    for rank in sorted(by_rank):
        yield from _micro_batches(by_rank[rank], rank, spec, drop_repeats)


def _parsed(record: Any, i: int) -> Mapping[str, Any]:
    if isinstance(record, (str, bytes)):
        try:
            record = msgspec.json.decode(record)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise InputError.at("record", "no JSON", f"one record a line ({error})", i) from None
    if not isinstance(record, Mapping):
        raise InputError.at("record", type(record).__name__, "a JSON object", i)
    return record


def _number(record: Mapping[str, Any], name: str, i: int) -> int:
    value = record.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError.at(name, repr(value), "a whole number of at least 0", i)
    return value


def _ids(record: Mapping[str, Any], spec: RouteSpec, i: int) -> NDArray[Any]:
    """[tokens, K] of one record."""
    ids_TK = as_array(record.get("top_indices"), f"top_indices[{i}]")
    shape = (_number(record, "num_tokens", i), spec.top_k)
    if _number(record, "topk", i) != spec.top_k:
        raise InputError.at("topk", record["topk"], f"top_k {spec.top_k}", i)
    if ids_TK.shape != shape or not ids_TK.size:
        expected = f"{shape}, num_tokens and top_k, at least 1 token"
        raise InputError.at(f"top_indices[{i}].shape", ids_TK.shape, expected)
    check_type(ids_TK.dtype, spec, f"top_indices[{i}]")
    if ids_TK.min() < 0 or ids_TK.max() >= spec.num_experts:
        t, k = np.argwhere((ids_TK < 0) | (ids_TK >= spec.num_experts))[0].tolist()
        expected = f"an expert id in 0..{spec.num_experts - 1}"
        raise InputError.at("top_indices", int(ids_TK[t, k]), expected, (i, t, k))
    return ids_TK.astype(spec.id_type)  # a step of lists would take eight times the memory


def _micro_batches(
    routes: Routes, rank: int, spec: RouteSpec, drop_repeats: bool
) -> Iterator[SampleRoutes]:
    layers = sorted(routes) if spec.moe_layers is None else list(spec.moe_layers)
    field = f"rank {rank} records"
    counts = [len(routes.get(layer, [])) for layer in layers]
    for layer, count in zip(layers, counts, strict=True):
        if count != counts[0]:
            expected = f"{counts[0]}, as of layer {layers[0]}"
            raise InputError.at(field, count, expected, layer)
    previous: NDArray[Any] | None = None
    repeats = 0
    for m in range(counts[0]):
        tokens = [len(routes[layer][m]) for layer in layers]
        for layer, count in zip(layers, tokens, strict=True):
            if count != tokens[0]:
                expected = f"{tokens[0]}, as of layer {layers[0]}"
                raise InputError.at(f"rank {rank} num_tokens", count, expected, (layer, m))
        rows_TLK = np.stack([routes[layer][m] for layer in layers], axis=1)
        if previous is not None and np.array_equal(previous, rows_TLK):
            if not drop_repeats:
                expected = "routes unlike those of the record before (recomputing: drop_repeats)"
                raise InputError.at(field, "a repeat", expected, m)
            repeats += len(rows_TLK)
            continue
        if previous is not None:
            yield _sample(previous, repeats, spec, f"rank {rank} routes")
        previous, repeats = rows_TLK, 0
    if previous is not None:
        yield _sample(previous, repeats, spec, f"rank {rank} routes")


def _sample(rows_TLK: NDArray[Any], repeats: int, spec: RouteSpec, field: str) -> SampleRoutes:
    return assemble([Part(0, rows_TLK, field)], len(rows_TLK), spec, duplicate_rows=repeats)
