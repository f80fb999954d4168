"""Every refusal of specs and rows, as a whole line: field, index, value and what was expected."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ingest.helpers import ALL, MOE, SPEC, npy, refusal, with_id
from routepack.ingest import (
    RouteSpec,
    from_rows,
    from_vllm,
)

SPECS: list[tuple[dict[str, Any], str]] = [
    ({"num_experts": 0}, "num_experts = 0: expected a whole number in 1..65535"),
    ({"num_experts": 2.0}, "num_experts = 2.0: expected a whole number in 1..65535"),
    ({"top_k": 5}, "top_k = 5: expected a whole number in 1..4"),
    ({"top_k": True}, "top_k = True: expected a whole number in 1..4"),
    ({"moe_layers": ()}, "moe_layers = (): expected at least 1 MoE layer"),
    (
        {"moe_layers": (0, 2, 1)},
        "moe_layers[2] = 1: expected a layer in 3..65535, ascending",
    ),
    (
        {"moe_layers": (0, 2), "model_layers": 2},
        "moe_layers[1] = 2: expected a layer in 1..1, ascending",
    ),
    ({"model_layers": 0}, "model_layers = 0: expected a whole number in 1..65536"),
    ({"zero_rows": "no"}, "zero_rows = 'no': expected 'missing' or 'routed'"),
    (
        {"zero_rows": "routed"},
        "zero_rows = 'routed': expected 'missing': the 2 ids of a routed row differ",
    ),
    ({"partial_rows": "keep"}, "partial_rows = 'keep': expected 'refuse' or 'missing'"),
]


@pytest.mark.parametrize(("fields", "message"), SPECS)
def test_specs(fields: dict[str, Any], message: str) -> None:
    """Models that there cannot be."""
    assert refusal(RouteSpec, **({"num_experts": 4, "top_k": 2} | fields)) == message


ROWS: list[tuple[Any, int, dict[str, Any], str]] = [
    (MOE, 0, {}, "length = 0: expected a whole number in 1..2147483647"),
    (MOE, True, {}, "length = True: expected a whole number in 1..2147483647"),
    (MOE, 4, {"start": -1}, "start = -1: expected a whole number in 0..4, the length"),
    (MOE, 4, {"start": 5}, "start = 5: expected a whole number in 0..4, the length"),
    (
        MOE[:2],
        4,
        {},
        "routes.shape = (2, 2, 2): expected 3 or 4 token rows for length 4, start 0",
    ),
    (
        MOE,
        4,
        {"start": 2},
        "routes.shape = (4, 2, 2): expected 1 or 2 token rows for length 4, start 2"
        " (recordings joined end to end: see from_segments)",
    ),
    (
        MOE[:1],
        4,
        {"start": 4},
        "routes.shape = (1, 2, 2): expected no token rows for length 4, start 4"
        " (recordings joined end to end: see from_segments)",
    ),
    (MOE[0], 4, {}, "routes.shape = (2, 2): expected (token rows, layers, top_k = 2)"),
    (
        MOE[:, :, :1],
        4,
        {},
        "routes.shape = (4, 2, 1): expected (token rows, layers, top_k = 2)",
    ),
    (
        MOE[:, :1],
        4,
        {},
        "routes layer axis = 1: expected 3 (all layers of the model) or 2 (MoE layers only)",
    ),
    (
        MOE.astype(float),
        4,
        {},
        "routes.dtype = float64: expected one of int8, uint8, int16, uint16, int32, int64",
    ),
    (
        MOE.astype(">i4"),
        4,
        {},
        "routes.dtype = >i4: expected one of int8, uint8, int16, uint16, int32, int64",
    ),
    (with_id(4, 1, 0, 1), 4, {}, "routes[1, 0, 1] = 4: expected an expert id in 0..3"),
    (with_id(-2, 1, 0, 0), 4, {}, "routes[1, 0, 0] = -2: expected an expert id in 0..3"),
    (with_id(-1, 2, 1, 1), 4, {}, "routes[2, 1, 1] = -1: expected an expert id in 0..3"),
    (
        with_id(255, 3, 1, 0, dtype="uint8"),
        4,
        {},
        "routes[3, 1, 0] = 255: expected an expert id in 0..3",
    ),
    (
        with_id(2**40, 0, 0, 0),
        4,
        {},
        "routes[0, 0, 0] = 1099511627776: expected an expert id in 0..3",
    ),
    (
        with_id(3, 1, 1, 1),
        4,
        {},
        "routes[1, 1, 1] = 3: expected 2 distinct experts in a token row, it repeats",
    ),
    (
        np.where(np.arange(3)[:, None] == 0, 1, ALL),
        4,
        {},
        "routes[0, 0, 0] = 1: expected 0 or -1, moe_layers leaves out this layer",
    ),
    ("####", 4, {}, "routes = '####': expected base64 (Only base64 data is allowed)"),
    (
        base64.b64encode(b"routes").decode(),
        4,
        {},
        "routes = b'routes': expected base64 of a .npy file, which starts b'\\x93NUMPY'",
    ),
    (object(), 4, {}, "routes.shape = (): expected (token rows, layers, top_k = 2)"),
]


@pytest.mark.parametrize(("rows", "length", "options", "message"), ROWS)
def test_rows(rows: Any, length: int, options: dict[str, Any], message: str) -> None:
    """Rows that are not those of the sample or the model; indices are those of the payload."""
    assert refusal(from_rows, rows, length, SPEC, **options) == message


def test_narrow_types() -> None:
    """A type that cannot hold every expert's id has wrapped some."""
    for dtype, experts in (("uint8", 257), ("int8", 129), ("int16", 32769)):
        spec = RouteSpec(experts, 2)
        assert refusal(from_rows, MOE.astype(dtype), 4, spec) == (
            f"routes.dtype = {dtype}: expected a type that holds the ids of {experts} experts"
        )
    assert from_rows(MOE.astype("uint8"), 4, RouteSpec(256, 2)).captured == 4


def test_index_is_that_of_the_payload() -> None:
    """Dense layers, a missing row before it and a start do not shift the index."""
    rows = ALL.copy()
    rows[1] = 0
    rows[3, 2, 1] = 9
    assert refusal(from_rows, rows, 14, SPEC, start=10) == (
        "routes[3, 2, 1] = 9: expected an expert id in 0..3"
    )


def test_ragged_lists() -> None:
    """Lists that are no array; numpy says why."""
    message = refusal(from_rows, [[[0, 1]], [[1]]], 2, RouteSpec(4, 2))
    assert message.startswith("routes = list: expected an array of integers on the CPU (setting an")


def test_tensors_elsewhere() -> None:
    """What torch raises for a tensor on a GPU."""

    class Cuda:
        def numpy(self) -> None:
            raise TypeError("can't convert cuda:0 device type tensor to numpy.\nUse .cpu()")

    assert refusal(from_rows, Cuda(), 2, SPEC) == (
        "routes = Cuda: expected an array of integers on the CPU"
        " (can't convert cuda:0 device type tensor to numpy.)"
    )
    bad = SimpleNamespace(numpy=lambda: "no array")
    assert refusal(from_rows, bad, 2, SPEC) == (
        "routes = SimpleNamespace: expected an array of integers"
    )


def test_truncated_npy() -> None:
    """A .npy file that ends early."""
    text = base64.b64encode(base64.b64decode(npy(MOE))[:-8]).decode()
    assert refusal(from_vllm, text, 4, SPEC).startswith(
        "routed_experts = 248 bytes: expected a whole .npy file ("
    )
