"""prime-rl: raw bytes with their shape and type.

Sources: prime_rl/transports/rollouts/types.py (`RoutedExperts{data, shape, dtype}`, T rows),
prime_rl/orchestrator/trajectories.py (a short tail is filled with zeros), and the server's form
with base64 and `start`, prime_rl/inference/vllm/routed_experts.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from routepack.errors import InputError
from routepack.ingest.arrays import checked_length, decoded, from_bytes, get
from routepack.ingest.rows import from_rows, without_routes
from routepack.ingest.sample import SampleRoutes
from routepack.ingest.spec import RouteSpec

FIELD = "routed_experts"
WIRE_TYPES = ("uint8", "uint16", "int16", "int32", "int64")


def from_prime_rl(
    routed_experts: Any, length: int, spec: RouteSpec, *, start: int | None = None
) -> SampleRoutes:
    """Routes of one `TrainingSample` of `length` tokens.

    routed_experts  an object or a mapping with `data` (bytes, or base64), `shape` [N, A, K],
                    `dtype` and perhaps `start`; or the list [data, shape, dtype], as in msgpack.
                    N is T or T-1, less start. Rows of zeros, as its fill, are missing.
                    None: no routes
    start           tokens before the first row, missing; default: as in the payload, else 0

    Raises InputError.
    """
    length = checked_length(length)
    if routed_experts is None:
        return without_routes(length, spec)
    if isinstance(routed_experts, (list, tuple)):
        if len(routed_experts) != 3:
            raise InputError.at(f"{FIELD} fields", len(routed_experts), "3: data, shape, dtype")
        routed_experts = dict(zip(("data", "shape", "dtype"), routed_experts, strict=True))
    name, shape = get(routed_experts, "dtype"), get(routed_experts, "shape")
    if name not in WIRE_TYPES:
        raise InputError.at(f"{FIELD}.dtype", repr(name), f"one of {', '.join(WIRE_TYPES)}")
    if not isinstance(shape, (list, tuple)) or len(shape) != 3:
        raise InputError.at(f"{FIELD}.shape", shape, "[token rows, layers, top_k]")
    sizes = [checked_length(size, f"{FIELD}.shape[{i}]", low=0) for i, size in enumerate(shape)]
    data = get(routed_experts, "data")
    if isinstance(data, str):
        data = decoded(data, f"{FIELD}.data")
    flat_X = from_bytes(data, np.dtype(name), f"{FIELD}.data")
    if flat_X.size != sizes[0] * sizes[1] * sizes[2]:
        raise InputError.at(f"{FIELD}.data size", flat_X.size, f"the ids of shape {sizes}")
    if start is None:
        start = get(routed_experts, "start", 0)
    return from_rows(flat_X.reshape(sizes), length, spec, start=start, field=FIELD)
