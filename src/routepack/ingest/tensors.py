"""Samples from the arrays of a .npz or .safetensors file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.ingest.builder import LABELS
from routepack.ingest.nemo_rl import from_nemo_rl
from routepack.ingest.rows import from_rows
from routepack.ingest.sample import SampleRoutes
from routepack.ingest.sglang import from_areal, from_miles, from_slime
from routepack.ingest.spec import RouteSpec
from routepack.ingest.verl import checked_offsets, from_verl, from_verl_padded

FIELD = "routed_experts"
NAMES = (FIELD, "offsets", "lengths", "starts", "attention_mask", *LABELS)
SUFFIXES = ("vllm", "sglang", "prime-rl")  # engines that may leave out the rows of a prefix
READERS: dict[str, Callable[[Any, int, RouteSpec], SampleRoutes]] = {
    "verl": from_verl,
    "slime": from_slime,
    "miles": from_miles,
    "nemo-rl": from_nemo_rl,
    "areal": from_areal,
}


def tensor_samples(
    tensors: Mapping[str, NDArray[Any]], engine: str, spec: RouteSpec
) -> Iterator[SampleRoutes]:
    """The samples of one file, in order. Raises InputError.

    routed_experts  token rows of all samples one after another with `offsets` [S+1] and `lengths`
                    [S], and perhaps `starts` [S] for engines that send suffixes; verl needs no
                    `lengths` for one row a token. Or padded, [S, X, A, K]: verl with
                    `attention_mask` [S, X], nemo-rl with `lengths`
    """
    routes = _required(tensors, FIELD)
    if routes.ndim == 4 and engine == "verl":
        _require_one_a_sample(tensors, len(routes))
        return from_verl_padded(routes, _required(tensors, "attention_mask"), spec)
    lengths = tensors.get("lengths")
    if routes.ndim == 4 and engine == "nemo-rl":
        parts = list(routes)
    else:
        offsets_S1 = checked_offsets(_required(tensors, "offsets"), len(routes))
        parts = [routes[a:b] for a, b in pairwise(offsets_S1.tolist())]
        if lengths is None and engine == "verl":
            lengths = np.diff(offsets_S1)
    if lengths is None:
        raise InputError("lengths: expected this array, the file has none")
    starts = tensors.get("starts", np.zeros(len(parts), np.int64))
    if "starts" in tensors and engine not in SUFFIXES:
        raise InputError("starts: expected no such array, the engine sends no suffixes")
    _require_one_a_sample(tensors, len(parts))
    return _samples(parts, lengths.tolist(), starts.tolist(), engine, spec)


def _require_one_a_sample(tensors: Mapping[str, NDArray[Any]], samples: int) -> None:
    for name in ("lengths", "starts", *LABELS):
        array = tensors.get(name)
        if array is not None and (array.shape != (samples,) or array.dtype.kind not in "iu"):
            value = f"{array.dtype} {array.shape}"
            raise InputError.at(name, value, f"integers ({samples},), one a sample")


def _samples(
    parts: list[NDArray[Any]], lengths: list[int], starts: list[int], engine: str, spec: RouteSpec
) -> Iterator[SampleRoutes]:
    read = READERS.get(engine)
    for i, (rows, length, start) in enumerate(zip(parts, lengths, starts, strict=True)):
        try:
            if read is None:
                yield from_rows(rows, length, spec, start=start, field=FIELD)
            else:
                yield read(rows, length, spec)
        except InputError as error:
            raise InputError(f"sample {i}: {error}") from None


def _required(tensors: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any]:
    if name not in tensors:
        raise InputError(f"{name}: expected this array, the file has none")
    return tensors[name]
