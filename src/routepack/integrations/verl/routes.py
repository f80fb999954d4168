"""A window from the routes that verl's rollout recorded.

verl keeps `routed_experts` [tokens, layers, K] int16 for each sample, aligned to its tokens; rows
that the engine did not record are zero, at least the last one, and so are all rows of verl's
padding samples (`routepack.ingest.verl` reads them). The layer axis has all layers of the model or
its MoE layers, by engine: a layer is dense where the first sample with routes has zeros only.

Routes are reduced to counts where they are fetched, in pieces; with `count_on_workers` by all
workers at once, which are idle while the driver balances a batch. Only counts travel.

Shapes: n tokens of a sample, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.ingest import RouteSpec, from_rows
from routepack.window import Window

FIELD = "routed_experts"
PIECE_TOKENS = 2**18  # tokens whose routes are held at a time: about 400 MB at 96 layers and K 8

Fetch = Callable[[list[str]], Iterable[NDArray[Any]]]
"""Routes [n, layers, K] of each of these samples of a batch."""


@dataclass(frozen=True, eq=False)
class Counted:
    """What is left of the routes of some samples; `layers` are the MoE layers among those given."""

    demand_SLE: NDArray[Any]
    missing_S: NDArray[np.int64]
    layers: tuple[int, ...]
    top_k: int


def count(keys: Sequence[str], lengths: Sequence[int], num_experts: int, fetch: Fetch) -> Counted:
    """Count the routes of these samples. Raises InputError where they are no routes of them."""
    missing = np.array(lengths, np.int64)
    demands: dict[int, NDArray[Any]] = {}
    spec: RouteSpec | None = None
    for piece in _pieces(lengths):
        fetched = fetch([keys[i] for i in piece])
        for i, routes_nLK in zip(piece, fetched, strict=True):
            spec = spec or _spec(routes_nLK, num_experts)
            if spec is not None:
                sample = from_rows(routes_nLK, lengths[i], spec, field=f"{FIELD}[{i}]")
                demands[i] = sample.demand_LE
                missing[i] = sample.missing
    layers = (spec.moe_layers or ()) if spec is not None else ()
    dtype = np.result_type(np.uint16, *(demand.dtype for demand in demands.values()))
    demand_SLE = np.zeros((len(keys), len(layers), num_experts), dtype)
    for i, demand_LE in demands.items():
        demand_SLE[i] = demand_LE
    return Counted(demand_SLE, missing, layers, spec.top_k if spec is not None else 0)


def window_of(lengths: Sequence[int], parts: Iterable[Counted]) -> Window:
    """The window of samples counted in consecutive parts. Raises InputError where none has routes,
    or parts differ in their MoE layers."""
    parts = list(parts)
    layers = {part.layers for part in parts if part.layers}
    if not layers:
        raise InputError(f"{FIELD}: expected recorded routes, every row of every sample is zero")
    if len(layers) > 1:
        first, second = sorted(layers)[:2]
        raise InputError.at(f"{FIELD}: MoE layers", list(second), f"{list(first)} in every sample")
    shape = (len(next(iter(layers))), parts[0].demand_SLE.shape[2])
    demands = [
        part.demand_SLE if part.layers else np.zeros((len(part.missing_S), *shape), np.uint16)
        for part in parts
    ]
    return Window(
        np.array(lengths),
        np.concatenate(demands),
        max(part.top_k for part in parts),
        missing_S=np.concatenate([part.missing_S for part in parts]),
        moe_layers=layers.pop(),
        source="verl",
    )


def fetcher(queue: Any, partition_id: str) -> Fetch:
    """From the transfer queue, a module or what stands for it."""

    def fetch(keys: list[str]) -> Iterable[NDArray[Any]]:
        routes = queue.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=[FIELD])
        if FIELD not in routes.keys():  # noqa: SIM118, a TensorDict is no mapping
            raise InputError(f"{FIELD}: expected with every sample, the rollout recorded none")
        return [sample.numpy() for sample in routes[FIELD].unbind()]

    return fetch


def count_on_workers(
    workers: Sequence[Any],
    keys: Sequence[str],
    partition_id: str,
    lengths: Sequence[int],
    num_experts: int,
) -> list[Any]:
    """References to what each Ray actor counts, its share about equal in tokens; in order."""
    ends = np.cumsum(lengths)
    cuts = np.searchsorted(ends, np.arange(1, len(workers)) * ends[-1] / len(workers)).tolist()
    calls = []
    for worker, first, last in zip(workers, [0, *cuts], [*cuts, len(keys)], strict=True):
        if first < last:
            share = slice(first, last)
            part = (list(keys[share]), partition_id, list(lengths[share]), num_experts)
            calls.append(worker.__ray_call__.remote(_count_on_worker, *part))
    return calls


def _count_on_worker(
    worker: Any, keys: list[str], partition_id: str, lengths: list[int], num_experts: int
) -> Counted:
    import transfer_queue

    return count(keys, lengths, num_experts, fetcher(transfer_queue, partition_id))


def _pieces(lengths: Sequence[int]) -> Iterable[list[int]]:
    """Consecutive samples of about PIECE_TOKENS tokens."""
    piece: list[int] = []
    tokens = 0
    for i, length in enumerate(lengths):
        if piece and tokens + length > PIECE_TOKENS:
            yield piece
            piece, tokens = [], 0
        piece.append(i)
        tokens += length
    yield piece


def _spec(routes_nLK: NDArray[Any], num_experts: int) -> RouteSpec | None:
    """The model, by a sample's routes; None where no row was recorded. Raises InputError."""
    if routes_nLK.ndim != 3 or routes_nLK.shape[2] < 2:  # with K = 1 a zero may be expert 0
        expected = "(tokens, layers, K of at least 2)"
        raise InputError.at(f"{FIELD}.shape", routes_nLK.shape, expected)
    layers = np.flatnonzero(routes_nLK.any(axis=(0, 2))).tolist()
    if not layers:
        return None
    _, axis, top_k = routes_nLK.shape
    return RouteSpec(num_experts, top_k, moe_layers=tuple(layers), model_layers=axis)
