"""Windows and plans on disk. Everything is written beside its target and then renamed."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from routepack.errors import InputError
from routepack.padding import Fill
from routepack.plan import Plan
from routepack.window import FORMAT, Window

FILL_FORMAT = "routepack.fill/1"
_LABELS = ("group", "tag", "step")
_TENSORS = {"lengths", "demand", "routes", "offsets", "missing", *_LABELS}


def read_window(path: str | Path, threads: int = 1) -> Window:
    """Read a `routepack.window/1` file (design section 4); routes are counted on `threads` threads.

    Raises InputError, one line that names the file, field, index, value and expectation.
    """
    _require_file(path)
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise InputError(f"format = {metadata.get('format')!r}: expected {FORMAT!r}")
            names = set(file.keys())
            if unknown := sorted(names - _TENSORS):
                raise InputError.at("tensor", unknown[0], "one of " + ", ".join(sorted(_TENSORS)))
            tensors = {name: file.get_tensor(name) for name in names}
        return _window(tensors, metadata, threads)
    except InputError as error:
        raise type(error)(f"{path}: {error}") from None
    except (SafetensorError, OSError, TypeError, AttributeError) as error:
        # TypeError, AttributeError: a dtype that numpy does not have, such as bfloat16
        detail = str(error).splitlines()[0]
        raise InputError(f"{path}: expected a whole safetensors file, {detail}") from None


def _window(tensors: dict[str, NDArray[Any]], metadata: dict[str, str], threads: int) -> Window:
    num_experts = _metadata_size(metadata, "num_experts")
    top_k = _metadata_size(metadata, "top_k")
    try:
        moe_layers = json.loads(metadata.get("moe_layers", ""))
    except (ValueError, RecursionError):  # the latter for lists nested absurdly deep
        moe_layers = None
    if (
        not isinstance(moe_layers, list)
        or not moe_layers
        or not all(type(i) is int for i in moe_layers)
    ):
        raise InputError.at(
            "moe_layers", metadata.get("moe_layers"), "a JSON list of layer indices"
        )
    if "lengths" not in tensors:
        raise InputError("lengths: expected this tensor, the file has none")
    fields: dict[str, Any] = dict(
        missing_S=tensors.get("missing"),
        **{f"{name}_S": tensors.get(name) for name in _LABELS},
        moe_layers=tuple(moe_layers),
        model=metadata.get("model", ""),
        source=metadata.get("source", ""),
    )
    if ("demand" in tensors) == ("routes" in tensors):
        raise InputError("demand, routes: expected exactly one of the two tensors")
    if "demand" in tensors:
        demand_SLE = tensors["demand"]
        if demand_SLE.dtype not in (np.uint16, np.uint32):
            raise InputError.at("demand.dtype", demand_SLE.dtype, "uint16 or uint32")
        if demand_SLE.ndim == 3 and demand_SLE.shape[2] != num_experts:
            expected = f"num_experts {num_experts} as last size"
            raise InputError.at("demand.shape", demand_SLE.shape, expected)
        return Window(tensors["lengths"], demand_SLE, top_k, **fields)
    if "offsets" not in tensors:
        raise InputError("offsets: expected this tensor beside routes, the file has none")
    routes_NLK = tensors["routes"]
    if routes_NLK.ndim != 3 or routes_NLK.shape[2] != top_k:
        raise InputError.at("routes.shape", routes_NLK.shape, f"(N, L, top_k = {top_k})")
    return Window.from_routes(
        tensors["lengths"], routes_NLK, tensors["offsets"], num_experts, threads=threads, **fields
    )


def write_window(path: str | Path, window: Window) -> None:
    """Write a `routepack.window/1` file with demand. Raises InputError."""
    tensors = {
        "lengths": np.ascontiguousarray(window.lengths_S),
        "demand": np.ascontiguousarray(window.demand_SLE),
    }
    if window.missing_S.any():
        tensors["missing"] = np.ascontiguousarray(window.missing_S)
    for name in _LABELS:
        if (labels_S := getattr(window, f"{name}_S")) is not None:
            tensors[name] = np.ascontiguousarray(labels_S)
    metadata = {
        "format": FORMAT,
        "num_experts": str(window.experts),
        "top_k": str(window.top_k),
        "moe_layers": json.dumps(list(window.moe_layers)),
        "model": window.model,
        "source": window.source,
    }
    write_atomically(path, save(tensors, metadata))


def write_fill(path: str | Path, window: Window, fill: Fill) -> None:
    """Write the experts of a window's padding rows: `ids` [P, L, K] and `offsets` [S + 1].

    Rows offsets[s]:offsets[s+1] are those of sample s. Raises InputError.
    """
    tensors = {"ids": fill.ids_PLK, "offsets": np.asarray(fill.offsets_S1, np.int64)}
    metadata = {
        "format": FILL_FORMAT,
        "num_experts": str(window.experts),
        "top_k": str(window.top_k),
        "moe_layers": json.dumps(list(window.moe_layers)),
        "window_sha256": window.sha256,
    }
    data = save({name: np.ascontiguousarray(values) for name, values in tensors.items()}, metadata)
    write_atomically(path, data)


def read_plan(path: str | Path) -> Plan:
    """Read a `routepack.plan/1` file. Raises InputError."""
    _require_file(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: expected a readable file, {error.strerror}") from None
    return Plan.from_bytes(data, str(path))


def write_plan(path: str | Path, plan: Plan) -> None:
    """Write the canonical bytes of a plan. Raises InputError."""
    write_atomically(path, plan.to_bytes())


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write beside `path`, then rename: the file is whole or as it was. Raises InputError.

    A symbolic link stays one: the file that it names is written.
    """
    target = output_target(path)
    beside = None
    try:
        descriptor, beside = tempfile.mkstemp(prefix=".routepack-", dir=target.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(beside, 0o666 & ~mask)  # mkstemp makes files that only their owner can read
        os.replace(beside, target)
        beside = None
    except OSError as error:
        raise InputError(f"{path}: expected a file that can be written, {error.strerror}") from None
    finally:
        if beside is not None:
            Path(beside).unlink(missing_ok=True)


def output_target(path: str | Path) -> Path:
    """The regular file, perhaps not there yet, that an output path names. Raises InputError."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise InputError(f"{path}: expected a path for a file, it is a folder")
    devices = ("/dev/", "/proc/", "/sys/")
    if (target.exists() and not target.is_file()) or os.path.abspath(path).startswith(devices):
        raise InputError(f"{path}: expected a path for a file, it is a device")
    return target


def _require_file(path: str | Path) -> None:
    if not Path(path).is_file():
        what = "it is a folder" if Path(path).is_dir() else "there is none"
        raise InputError(f"{path}: expected a file, {what}")


def _metadata_size(metadata: dict[str, str], name: str) -> int:
    text = metadata.get(name)
    # int() refuses thousands of digits with an error of its own
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 20 and int(text)):
        raise InputError.at(name, text, "a whole number of at least 1 in the metadata")
    return int(text)
