"""NeMo-RL: rows aligned to the padded sequence, -1 where a route is missing.

Sources: nemo_rl/models/generation/vllm/utils.py (`pad_and_align_routed_expert_indices`: T-1
recorded or all -1 rows, then 0..K-1 in the row of the last token and in all padding rows; of a
surplus row for the last token it keeps nothing), nemo_rl/models/generation/interfaces.py (int8 up
to 128 experts, int16, int32), nemo_rl/utils/routed_experts_codec.py (the envelope).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.ingest.arrays import as_rows, checked_length, decoded, from_bytes
from routepack.ingest.rows import Part, assemble, without_routes
from routepack.ingest.sample import SampleRoutes
from routepack.ingest.spec import RouteSpec

FIELD = "routed_experts"
MAGIC = "nrlre1"
WIRE_TYPES = ("int8", "int16", "int32")


def from_nemo_rl(routed_experts: Any, length: int, spec: RouteSpec) -> SampleRoutes:
    """Routes of one sample of `length` valid tokens.

    routed_experts  [X, A, K] with X >= T-1, or its envelope `nrlre1:<dtype>:<XxAxK>:<base64>`.
                    The row of the last token is a filler, always missing; rows behind it are
                    padding. None: no routes

    For what vLLM returned, prompt and completion apart, use from_vllm. Raises InputError.
    """
    length = checked_length(length)
    if routed_experts is None:
        return without_routes(length, spec)
    if isinstance(routed_experts, str):
        routed_experts = _opened(routed_experts)
    rows_XAK = as_rows(routed_experts, spec, FIELD)
    if len(rows_XAK) < length - 1:
        expected = f"at least {length - 1} token rows for length {length}"
        raise InputError.at(f"{FIELD}.shape", rows_XAK.shape, expected)
    padding = max(0, len(rows_XAK) - length)
    part = Part(0, rows_XAK[: length - 1], FIELD)
    return assemble([part], length, spec, right=padding)


def _opened(envelope: str) -> NDArray[Any]:
    fields = envelope.split(":", 3)
    if len(fields) != 4 or fields[0] != MAGIC:
        raise InputError.at(FIELD, repr(envelope[:20]), f"{MAGIC}:<dtype>:<rows>x<layers>x<K>:...")
    _, name, sizes, text = fields
    if name not in WIRE_TYPES:
        raise InputError.at(f"{FIELD} dtype", repr(name), f"one of {', '.join(WIRE_TYPES)}")
    parts = [size for size in sizes.split("x") if size.isascii() and size.isdigit()]
    shape = tuple(int(size) for size in parts if len(size) < 12)
    if len(shape) != 3 or sizes != "x".join(map(str, shape)):
        raise InputError.at(f"{FIELD} shape", repr(sizes), "<rows>x<layers>x<K>")
    flat_X = from_bytes(decoded(text, FIELD), np.dtype(name), FIELD)
    if flat_X.size != shape[0] * shape[1] * shape[2]:
        raise InputError.at(f"{FIELD} size", flat_X.size, f"{sizes} ids")
    return flat_X.reshape(shape)
