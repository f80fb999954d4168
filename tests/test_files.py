"""Windows and plans on disk: what is written is read back, and nothing else is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from numpy.typing import NDArray
from safetensors.numpy import save

from file_helpers import refusal
from routepack.errors import InputError
from routepack.files import read_plan, read_window, write_atomically, write_window
from routepack.window import Window
from strategies import windows

LENGTHS_S = np.array([3, 1])
DEMAND_SLE = np.array([[[3, 2, 1], [1, 3, 2]], [[1, 0, 1], [0, 1, 1]]], np.uint16)
ROUTES_NLK = np.array(
    [[[0, 1], [1, 2]], [[1, 0], [1, 0]], [[2, 0], [2, 1]], [[0, 2], [2, 1]]], np.uint8
)
METADATA = {
    "format": "routepack.window/1",
    "num_experts": "3",
    "top_k": "2",
    "moe_layers": "[1, 4]",
    "model": "tiny",
    "source": "by hand",
}
TENSORS: dict[str, NDArray[Any]] = {"lengths": LENGTHS_S, "demand": DEMAND_SLE}
ROUTED: dict[str, NDArray[Any]] = {
    "lengths": LENGTHS_S,
    "routes": ROUTES_NLK,
    "offsets": np.array([0, 3, 4]),
}


def file_of(
    folder: Path, tensors: dict[str, NDArray[Any]] = TENSORS, **metadata: str | None
) -> Path:
    """A window file with these tensors; metadata given as None is left out."""
    path = folder / "w.safetensors"
    merged = METADATA | metadata
    path.write_bytes(save(tensors, {k: v for k, v in merged.items() if v is not None}))
    return path


def assert_same_window(one: Window, other: Window) -> None:
    assert one.sha256 == other.sha256
    assert one.demand_SLE.dtype == other.demand_SLE.dtype
    assert (one.moe_layers, one.model, one.source) == (other.moe_layers, other.model, other.source)
    for name in ("group_S", "tag_S", "step_S"):
        assert (getattr(one, name) is None) == (getattr(other, name) is None)


@given(windows())
def test_windows_are_read_as_written(tmp_path_factory: Any, window: Window) -> None:
    """Any window survives a round trip, missing tokens included."""
    path = tmp_path_factory.mktemp("window") / "w.safetensors"
    write_window(path, window)
    assert_same_window(read_window(path), window)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_every_field_is_read_as_written(tmp_path: Path, dtype: str) -> None:
    """Prompts, tags, steps, missing tokens, layer indices, names and count widths survive."""
    window = Window(
        LENGTHS_S + 1,
        DEMAND_SLE.astype(dtype),
        2,
        missing_S=np.array([1, 1], np.int32),
        group_S=np.array([7, -3], np.int32),
        moe_layers=(1, 4),
        model="tiny",
        source="by hand",
        tag_S=np.array([-2, 0], np.int32),
        step_S=np.array([1, 0], np.int32),
    )
    path = tmp_path / "w.safetensors"
    write_window(path, window)
    again = read_window(path)
    assert_same_window(again, window)
    assert again.group_S is not None
    assert again.group_S.tolist() == [7, -3]
    assert again.tag_S is not None
    assert again.tag_S.tolist() == [-2, 0]
    assert again.step_S is not None
    assert again.step_S.tolist() == [1, 0]
    assert again.missing_S.tolist() == [1, 1]


def test_a_file_may_hold_demand_or_routes(tmp_path: Path) -> None:
    """Both forms give the same window, on any number of threads."""
    demand = read_window(file_of(tmp_path))
    for threads in (1, 2):
        assert_same_window(read_window(file_of(tmp_path, ROUTED), threads), demand)
    assert (demand.moe_layers, demand.model, demand.source) == ((1, 4), "tiny", "by hand")


def test_names_are_optional(tmp_path: Path) -> None:
    """A file without model and source has empty ones."""
    window = read_window(file_of(tmp_path, model=None, source=None))
    assert (window.model, window.source) == ("", "")


EXPECTED_SIZE = "expected a whole number of at least 1 in the metadata"
BAD_METADATA: dict[str, tuple[dict[str, str | None], str]] = {
    "another format": (
        {"format": "routepack.plan/1"},
        "format = 'routepack.plan/1': expected 'routepack.window/1'",
    ),
    "a later version": (
        {"format": "routepack.window/2"},
        "format = 'routepack.window/2': expected 'routepack.window/1'",
    ),
    "no format": ({"format": None}, "format = None: expected 'routepack.window/1'"),
    "no experts": ({"num_experts": "0"}, f"num_experts = 0: {EXPECTED_SIZE}"),
    "negative experts": ({"num_experts": "-3"}, f"num_experts = -3: {EXPECTED_SIZE}"),
    "experts left out": ({"num_experts": None}, f"num_experts = None: {EXPECTED_SIZE}"),
    "other experts": (
        {"num_experts": "4"},
        "demand.shape = (2, 2, 3): expected num_experts 4 as last size",
    ),
    "top_k in words": ({"top_k": "two"}, f"top_k = two: {EXPECTED_SIZE}"),
    "another top_k": (
        {"top_k": "1"},
        "demand[0, 0] = 6: expected 3 = top_k 1 * (length 3 - missing 0) summed over experts",
    ),
    "layers left out": (
        {"moe_layers": None},
        "moe_layers = None: expected a JSON list of layer indices",
    ),
    "layers that are no JSON": (
        {"moe_layers": "1,4"},
        "moe_layers = 1,4: expected a JSON list of layer indices",
    ),
    "layers that are no list": (
        {"moe_layers": "2"},
        "moe_layers = 2: expected a JSON list of layer indices",
    ),
    "half layers": (
        {"moe_layers": "[1, 4.5]"},
        "moe_layers = [1, 4.5]: expected a JSON list of layer indices",
    ),
    "layers nested deeply": (
        {"moe_layers": "[" * 10_000},
        f"moe_layers = {'[' * 10_000}: expected a JSON list of layer indices",
    ),
    "thousands of digits": ({"top_k": "9" * 5000}, f"top_k = {'9' * 5000}: {EXPECTED_SIZE}"),
    "too few layers": (
        {"moe_layers": "[1]"},
        "moe_layers = [1]: expected 2 layers, as in demand",
    ),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_bad_metadata_is_named(case: str, tmp_path: Path) -> None:
    """One line says which key, its value and what was expected."""
    metadata, message = BAD_METADATA[case]
    assert refusal(file_of(tmp_path, **metadata)) == message


BAD_TENSORS: dict[str, tuple[dict[str, NDArray[Any]], str]] = {
    "extra tensor": (
        TENSORS | {"weights": LENGTHS_S},
        "tensor = weights: expected one of demand, group, lengths, missing, offsets, routes, step, "
        "tag",
    ),
    "no lengths": (
        {"demand": DEMAND_SLE},
        "lengths: expected this tensor, the file has none",
    ),
    "neither demand nor routes": (
        {"lengths": LENGTHS_S},
        "demand, routes: expected exactly one of the two tensors",
    ),
    "demand and routes": (
        TENSORS | ROUTED,
        "demand, routes: expected exactly one of the two tensors",
    ),
    "routes without offsets": (
        {"lengths": LENGTHS_S, "routes": ROUTES_NLK},
        "offsets: expected this tensor beside routes, the file has none",
    ),
    "demand of 64 bits": (
        TENSORS | {"demand": DEMAND_SLE.astype(np.int64)},
        "demand.dtype = int64: expected uint16 or uint32",
    ),
    "demand in two dimensions": (
        TENSORS | {"demand": DEMAND_SLE[0]},
        "demand.shape = (2, 3): expected (S=2, L, E), none of them 0",
    ),
    "routes in two dimensions": (
        ROUTED | {"routes": ROUTES_NLK[0]},
        "routes.shape = (2, 2): expected (N, L, top_k = 2)",
    ),
    "routes of another top_k": (
        ROUTED | {"routes": ROUTES_NLK[:, :, :1].copy()},
        "routes.shape = (4, 2, 1): expected (N, L, top_k = 2)",
    ),
    "an id out of range": (
        ROUTED | {"routes": np.where(ROUTES_NLK == 2, 9, ROUTES_NLK).astype(np.uint8)},
        "routes[0, 1, 1] = 9: expected an expert id in 0..2",
    ),
    "float lengths": (
        TENSORS | {"lengths": LENGTHS_S.astype(float)},
        "lengths.dtype = float64: expected an integer type",
    ),
    "missing of another size": (
        TENSORS | {"missing": np.zeros(3, np.int32)},
        "missing.shape = (3,): expected (2,)",
    ),
    "group of another size": (
        TENSORS | {"group": np.zeros(3, np.int32)},
        "group.shape = (3,): expected (2,)",
    ),
    "tag of another size": (
        TENSORS | {"tag": np.zeros(3, np.int32)},
        "tag.shape = (3,): expected (2,)",
    ),
    "step of another size": (
        TENSORS | {"step": np.zeros(3, np.int32)},
        "step.shape = (3,): expected (2,)",
    ),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensors_are_named(case: str, tmp_path: Path) -> None:
    """One line says which tensor, what is wrong with it and what was expected."""
    tensors, message = BAD_TENSORS[case]
    assert refusal(file_of(tmp_path, tensors)) == message


def test_truncated_windows_are_refused(tmp_path: Path) -> None:
    """Cut anywhere, or with a byte too many, a window file is refused; the rest is safetensors'."""
    data = file_of(tmp_path).read_bytes()
    path = tmp_path / "cut.safetensors"
    for size in (0, 4, 8, 100, len(data) - 1):
        path.write_bytes(data[:size])
        assert refusal(path).startswith("expected a whole safetensors file, ")
    path.write_bytes(data + b"\0")
    assert refusal(path).startswith("expected a whole safetensors file, ")


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    """Text, and a tensor of a type that numpy has not, are no window."""
    path = tmp_path / "w.safetensors"
    path.write_text('{"lengths": [3, 1]}')
    assert refusal(path).startswith("expected a whole safetensors file, ")
    tensor = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
    header = json.dumps({"__metadata__": METADATA, "lengths": tensor}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    assert "bfloat16" in refusal(path)


@pytest.mark.parametrize("read", [read_window, read_plan])
def test_a_path_without_a_file_is_refused(read: Any, tmp_path: Path) -> None:
    """A folder and a path with nothing there are told apart."""
    assert refusal(tmp_path, read) == "expected a file, it is a folder"
    assert refusal(tmp_path / "none", read) == "expected a file, there is none"


def test_writing_replaces_the_file_whole(tmp_path: Path) -> None:
    """The new bytes are under the name, and nothing else is in the folder."""
    path = tmp_path / "plan.json"
    path.write_text("old and longer than the new")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_written_files_have_the_usual_permissions(tmp_path: Path) -> None:
    """Not only for their owner, as temporary files are: what the umask leaves of 666."""
    path, other = tmp_path / "plan.json", tmp_path / "other"
    write_atomically(path, b"new")
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode


@pytest.mark.parametrize("step", ["replace", "fdopen", "chmod"])
def test_a_failed_write_leaves_the_file_as_it_was(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever step fails, the old bytes stay and no temporary file does."""
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, full)
        with pytest.raises(InputError) as error:
            write_atomically(path, b"new")
    assert str(error.value) == (
        f"{path}: expected a file that can be written, No space left on device"
    )
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_an_interrupted_write_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C during the write is no error of the file: it passes through, and all is as before."""
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_target_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """A folder is not replaced, and a folder that does not exist is not made."""
    assert refusal(tmp_path, lambda path: write_atomically(path, b"new")) == (
        "expected a path for a file, it is a folder"
    )
    assert refusal(tmp_path / "none" / "p", lambda path: write_atomically(path, b"new")) == (
        "expected a file that can be written, No such file or directory"
    )
    assert os.listdir(tmp_path) == []
