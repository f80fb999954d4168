"""Samples from files: JSON lines, .npz and .safetensors, and Megatron's router traces."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from routepack.errors import InputError
from routepack.ingest import records, tensors
from routepack.ingest.builder import LABELS
from routepack.ingest.megatron import from_megatron_trace
from routepack.ingest.sample import SampleRoutes
from routepack.ingest.spec import RouteSpec

MEGATRON = "megatron"
ENGINES = (*records.READERS, MEGATRON)
Sample = tuple[SampleRoutes, dict[str, int | None]]  # with the labels that the file has


def read_samples(
    paths: Sequence[Path], engine: str, spec: RouteSpec, *, step: int | None = None
) -> Iterator[Sample]:
    """The samples of all files, in order, one at a time.

    step   which step of Megatron's router traces; None where they have only one

    Raises InputError, one line that names the file and the place in it.
    """
    if engine not in ENGINES:
        raise InputError.at("engine", repr(engine), f"one of {', '.join(ENGINES)}")
    if step is not None and engine != MEGATRON:
        raise InputError.at("step", step, f"none, only {MEGATRON} traces have steps")
    for path in paths:
        if not path.is_file():
            what = "it is a folder" if path.is_dir() else "there is none"
            raise InputError(f"{path}: expected a file, {what}")
        allowed = (".jsonl",) if engine == MEGATRON else (".jsonl", ".npz", ".safetensors")
        if path.suffix not in allowed:
            raise InputError(f"{path}: expected a name that ends in {' or '.join(allowed)}")
    if engine == MEGATRON:
        return _megatron(paths, spec, step)
    return (sample for path in paths for sample in _file(path, engine, spec))


def _file(path: Path, engine: str, spec: RouteSpec) -> Iterator[Sample]:
    if path.suffix == ".jsonl":
        yield from _lines(path, engine, spec)
        return
    try:
        arrays = _npz(path) if path.suffix == ".npz" else _safetensors(path)
        labels = {name: arrays[name] for name in LABELS if name in arrays}
        for i, sample in enumerate(tensors.tensor_samples(arrays, engine, spec)):
            yield sample, {name: int(labels[name][i]) for name in labels}
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _npz(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with path.open("rb") as file:
            archive = np.load(file, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise InputError("expected a .npz file, it is a single array")
            with archive:
                _require_known(archive.files)
                return {name: archive[name] for name in archive.files}
    except InputError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise InputError(f"expected a whole .npz file, {_first_line(error)}") from None


def _safetensors(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with safe_open(str(path), framework="numpy") as file:
            names = list(file.keys())
            _require_known(names)
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, TypeError, AttributeError) as error:
        # TypeError, AttributeError: a dtype that numpy does not have, such as bfloat16
        raise InputError(f"expected a whole safetensors file, {_first_line(error)}") from None


def _require_known(names: Sequence[str]) -> None:
    if unknown := sorted(set(names) - set(tensors.NAMES)):
        raise InputError.at("array", unknown[0], f"one of {', '.join(tensors.NAMES)}")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _lines(path: Path, engine: str, spec: RouteSpec) -> Iterator[Sample]:
    read = records.READERS[engine]
    for where, line in _numbered([path]):
        try:
            record = msgspec.json.decode(line)
            if not isinstance(record, dict):
                raise InputError.at("line", type(record).__name__, "a JSON object")
            labels = {name: record.get(name) for name in LABELS}
            for name, label in labels.items():
                if label is not None and type(label) is not int:
                    raise InputError.at(name, repr(label), "a whole number")
            for sample in read(record, spec):
                yield sample, labels
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise InputError(f"{where}: expected a JSON object, {_first_line(error)}") from None


def _numbered(paths: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Lines that are not blank, with file and number."""
    for path in paths:
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield f"{path}:{number}", line
        except OSError as error:
            raise InputError(f"{path}: expected a readable file, {error.strerror}") from None


def _megatron(paths: Sequence[Path], spec: RouteSpec, step: int | None) -> Iterator[Sample]:
    place = ""

    def lines() -> Iterator[bytes]:
        nonlocal place
        for where, line in _numbered(paths):
            place = f"{where}: "
            yield line
        place = f"{paths[0]}: " if len(paths) == 1 else ""  # what follows is about all lines

    try:
        for sample in from_megatron_trace(lines(), spec, step=step):
            yield sample, {}
    except InputError as error:
        raise InputError(f"{place}{error}") from None
