"""Payloads as arrays: numpy, torch without importing it, nested lists, base64 of a .npy file."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.ingest.spec import RouteSpec
from routepack.window import MAX_TOKENS

ROUTE_TYPES = tuple(
    np.dtype(t) for t in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.int64)
)
HIGHEST_IDS: dict[np.dtype[Any], int] = {t: int(np.iinfo(t.type).max) for t in ROUTE_TYPES}


def checked_length(length: Any, field: str = "length", low: int = 1) -> int:
    """A number of tokens. Raises InputError."""
    whole = isinstance(length, (int, np.integer)) and not isinstance(length, bool)
    if not whole or not low <= length <= MAX_TOKENS:
        raise InputError.at(field, length, f"a whole number in {low}..{MAX_TOKENS}")
    return int(length)


def checked_start(start: Any, length: int) -> int:
    """Tokens before the recorded ones. Raises InputError."""
    whole = isinstance(start, (int, np.integer)) and not isinstance(start, bool)
    if not whole or not 0 <= start <= length:
        raise InputError.at("start", start, f"a whole number in 0..{length}, the length")
    return int(start)


def as_array(value: Any, field: str) -> NDArray[Any]:
    """What an engine hands out as an array. Raises InputError.

    value  a numpy array, anything with `.numpy()` (a torch tensor on the CPU), nested lists, or a
           string with a base64 .npy file, as vLLM's servers send
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str):
        return _from_npy(decoded(value, field), field)
    try:
        array = value.numpy() if hasattr(value, "numpy") else np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        detail = str(error).splitlines()[0]
        expected = f"an array of integers on the CPU ({detail})"
        raise InputError.at(field, type(value).__name__, expected) from None
    if not isinstance(array, np.ndarray):
        raise InputError.at(field, type(value).__name__, "an array of integers")
    return array


def as_rows(value: Any, spec: RouteSpec, field: str) -> NDArray[Any]:
    """Routes [N, A, K] of N token rows and A layers, ids as they came. Raises InputError."""
    rows_NAK = as_array(value, field)
    if rows_NAK.size == 0 and rows_NAK.ndim < 3 and spec.axes:  # an empty list tells no sizes
        return np.zeros((0, spec.axes[0], spec.top_k), spec.id_type)
    if rows_NAK.ndim != 3 or rows_NAK.shape[2] != spec.top_k:
        expected = f"(token rows, layers, top_k = {spec.top_k})"
        raise InputError.at(f"{field}.shape", rows_NAK.shape, expected)
    check_type(rows_NAK.dtype, spec, field)
    return rows_NAK


def check_type(dtype: np.dtype[Any], spec: RouteSpec, field: str) -> None:
    """Refuse types that are no ids or cannot hold those of all experts. Raises InputError."""
    if dtype not in ROUTE_TYPES:
        names = ", ".join(map(str, ROUTE_TYPES))
        raise InputError.at(f"{field}.dtype", dtype, f"one of {names}")
    if HIGHEST_IDS[dtype] < spec.num_experts - 1:
        expected = f"a type that holds the ids of {spec.num_experts} experts"
        raise InputError.at(f"{field}.dtype", dtype, expected)


def from_bytes(data: Any, dtype: np.dtype[Any], field: str) -> NDArray[Any]:
    """Raw native-order bytes as a flat array, not copied. Raises InputError."""
    try:
        view = memoryview(data)
    except TypeError:
        raise InputError.at(field, type(data).__name__, "bytes or their base64 string") from None
    if view.nbytes % dtype.itemsize:
        expected = f"a multiple of the {dtype.itemsize} bytes of {dtype}"
        raise InputError.at(f"{field} bytes", view.nbytes, expected)
    return np.frombuffer(view, dtype)


def decoded(text: str, field: str) -> bytes:
    """The bytes of a base64 string. Raises InputError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        detail = str(error).splitlines()[0]
        raise InputError.at(field, _start(text), f"base64 ({detail})") from None


def _from_npy(data: bytes, field: str) -> NDArray[Any]:
    if not data.startswith(b"\x93NUMPY"):
        raise InputError.at(
            field, repr(data[:6]), "base64 of a .npy file, which starts b'\\x93NUMPY'"
        )
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        detail = str(error).splitlines()[0]
        raise InputError.at(field, f"{len(data)} bytes", f"a whole .npy file ({detail})") from None
    return np.asarray(array)


def _start(text: str) -> str:
    return repr(text if len(text) <= 20 else text[:17] + "...")


def get(value: Any, name: str, default: Any = None) -> Any:
    """An attribute, or an item where the value is a mapping."""
    if isinstance(value, Mapping):
        return value.get(name, default)
    return getattr(value, name, default)
