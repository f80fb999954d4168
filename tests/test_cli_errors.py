"""Every refusal of the command line is one whole line on stderr, with nothing half done."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import routepack
from cli_helpers import (
    COST,
    LENGTHS,
    METADATA,
    SIZES,
    TOPOLOGY,
    Tensors,
    counted,
    fill,
    process,
    routed,
    run,
)
from routepack import files
from routepack.cli import terminal


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Compiled before any test, as that takes long and says so on stderr."""
    terminal.loading_kernels()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory holds a window, a cost model and a topology."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)


def replaced(name: str, index: Any, value: Any, tensors: Callable[[], Tensors]) -> Tensors:
    """A window with one value changed."""
    result = tensors()
    result[name][index] = value
    return result


def without_samples() -> Tensors:
    return {name: tensor[:0] for name, tensor in counted().items()}


BAD_WINDOWS: list[tuple[Tensors, dict[str, str], str]] = [
    (
        replaced("routes", (5, 1, 0), 9, routed),
        {},
        "routes[5, 1, 0] = 9: expected an expert id in 0..3",
    ),
    (
        replaced("routes", (5, 1, 1), 2, routed),
        {},
        "routes[5, 1, 1] = 2: expected 2 distinct experts in a token row, it repeats",
    ),
    (
        replaced("demand", (2, 1, 0), 3, counted),
        {},
        "demand[2, 1] = 13: expected 12 = top_k 2 * (length 6 - missing 0) summed over experts",
    ),
    (
        replaced("lengths", 3, 0, counted),
        {},
        "lengths[3] = 0: expected a whole number in 1..2147483647",
    ),
    (without_samples(), {}, "lengths: expected at least 1 sample, the window has none"),
    (
        counted(),
        {"format": "routepack.window/2"},
        "format = 'routepack.window/2': expected 'routepack.window/1'",
    ),
    (
        counted(),
        {"num_experts": "0"},
        "num_experts = 0: expected a whole number of at least 1 in the metadata",
    ),
]


@pytest.mark.parametrize(("tensors", "metadata", "message"), BAD_WINDOWS)
@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_bad_windows(
    command: str, tensors: Tensors, metadata: dict[str, str], message: str
) -> None:
    """A window that cannot be used is refused by every command alike, and nothing is written."""
    save_file(tensors, "bad", METADATA | metadata)
    args = (*SIZES, "--out", "p.json") if command == "plan" else ()
    assert run(command, "bad", *args) == (2, "", f"error: bad: {message}\n")
    assert not Path("p.json").exists()


@pytest.mark.parametrize("content", [b"", b"not tensors", "truncated"])
def test_files_that_are_no_windows(content: bytes | str) -> None:
    """A foreign or truncated file is named; the rest of the line is what safetensors says."""
    data = Path("w").read_bytes()[:-1] if isinstance(content, str) else content
    Path("bad").write_bytes(data)
    code, out, err = run("inspect", "bad")
    assert (code, out) == (2, "")
    assert err.startswith("error: bad: expected a whole safetensors file, ")
    assert err.count("\n") == 1


DP_EP = ("--dp", "2", "--ep", "2")
CAP = ("--token-cap", "8")
BAD_OPTIONS: list[tuple[Sequence[str], str]] = [
    # the window and the sizes
    ((*DP_EP, "--token-cap", "6"), "lengths[7] = 7: expected at most the token cap 6"),
    ((*CAP, "--dp", "9", "--ep", "1"), "samples = 8: expected at least the 9 DP ranks"),
    ((*CAP, "--dp", "3", "--ep", "3"), "num_experts = 4: expected a multiple of the 3 EP ranks"),
    (
        (*CAP, "--dp", "2", "--ep", "4"),
        "dp = 2: expected a multiple of ep = 4, unless --edp or a topology file is given",
    ),
    (
        (*CAP, "--dp", "4", "--ep", "2", "--edp", "3"),
        "edp = 3: expected a divisor of dp = 4",
    ),
    ((*DP_EP, "--token-cap", "0"), "token_cap = 0: expected a whole number of at least 1"),
    ((*CAP, "--dp", "0", "--ep", "2"), "dp = 0: expected an integer in 1..4194304"),
    ((*CAP, "--dp", "2", "--ep", "-1"), "ep = -1: expected an integer in 1..4194304"),
    ((*CAP, *DP_EP, "--edp", "0"), "edp = 0: expected an integer in 1..4194304"),
    ((*CAP, *DP_EP, "--threads", "0"), "threads = 0: expected a whole number of at least 1"),
    ((*CAP, *DP_EP, "--seconds", "0"), "seconds = 0.0: expected a finite number above 0"),
    ((*CAP, *DP_EP, "--seconds", "nan"), "seconds = nan: expected a finite number above 0"),
    (
        (*CAP, *DP_EP, "--evaluations", "-1"),
        "evaluations = -1: expected a whole number of at least 0",
    ),
    ((*CAP, *DP_EP, "--seed", "-1"), "seed = -1: expected a whole number in 0..2^63-1"),
    (
        (*CAP, *DP_EP, "--method", "magic"),
        "method = magic: expected one of baseline, reorder, kk, reorder-kk, expert-only, "
        "attention-only, routepack",
    ),
    # the syntax
    (DP_EP, "Missing option '--token-cap'"),
    ((*DP_EP, "--token-cap", "many"), "--token-cap = 'many': expected a whole number"),
    ((*DP_EP, "--token-cap", "8.5"), "--token-cap = '8.5': expected a whole number"),
    (
        (*DP_EP, "--token-cap", "9" * 20),
        f"--token-cap = {'9' * 20}: expected a whole number of at most 9223372036854775807",
    ),
    ((*CAP, *DP_EP, "--seconds", "soon"), "--seconds = 'soon': expected a number"),
    (
        (*CAP, *DP_EP, "--sed", "1"),
        "No such option: --sed (Possible options: --edp, --seconds, --seed)",
    ),
    # options that exclude each other
    (CAP, "--dp: expected a size, or --topology with a file, none is given"),
    (
        (*CAP, "--dp", "2"),
        "--ep: expected a size, or --topology with a file, none is given",
    ),
    (
        (*CAP, "--topology", "t.toml", "--ep", "2"),
        "--topology, --ep: expected either a file or sizes, not both",
    ),
    (
        (*CAP, *DP_EP, "--seconds", "1", "--evaluations", "1"),
        "--seconds, --evaluations: expected one of the two, both are given",
    ),
    # files
    ((*CAP, *DP_EP, "--cost-model", "none"), "none: expected a cost model file, "
     "No such file or directory"),
    ((*CAP, "--topology", "none"), "none: expected a topology file, No such file or directory"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options_of_plan(options: Sequence[str], message: str) -> None:
    """One line names what is wrong, and a plan that was there before stays."""
    Path("p.json").write_text("before")
    assert run("plan", "w", *options, "--out", "p.json") == (2, "", f"error: {message}\n")
    assert Path("p.json").read_text() == "before"
    assert sorted(os.listdir()) == ["c.toml", "p.json", "t.toml", "w"]


FINITE = "expected a finite number in 0..1e+12"
BAD_COSTS = [
    ("linear = 2.0", "linear = nan", f"attention.linear[0] = nan: {FINITE}"),
    ("linear = 2.0", "linear = inf", f"attention.linear[0] = inf: {FINITE}"),
    ("quadratic = 1.0", "quadratic = -1", f"attention.quadratic[0] = -1.0: {FINITE}"),
]


@pytest.mark.parametrize(("old", "new", "message"), BAD_COSTS)
def test_bad_cost_models(old: str, new: str, message: str) -> None:
    """A cost that is no finite number of at least 0 is refused before anything is planned."""
    Path("c.toml").write_text(COST.replace(old, new))
    args = ("plan", "w", *SIZES, "--cost-model", "c.toml", "--out", "p.json")
    assert run(*args) == (2, "", f"error: c.toml: {message}\n")


def test_unknown_keys() -> None:
    """A slip in a TOML file is an error, not a default."""
    keys = "tp, cp, pp, dp, ep, etp, order"
    Path("t.toml").write_text(TOPOLOGY + "edp = 1\n")
    args = ("plan", "w", *CAP, "--topology", "t.toml", "--out", "p.json")
    message = f"t.toml: unknown key 'edp': expected exactly the keys {keys}"
    assert run(*args) == (2, "", f"error: {message}\n")
    Path("c.toml").write_text(COST + "quadratics = 1.0\n")
    args = ("plan", "w", *SIZES, "--cost-model", "c.toml", "--out", "p.json")
    message = "c.toml: Object contains unknown field `quadratics` - at `$.attention[0]`"
    assert run(*args) == (2, "", f"error: {message}\n")


def test_a_topology_that_cannot_be_planned() -> None:
    """A DP rank in two EP groups is refused with that reason."""
    Path("t.toml").write_text(TOPOLOGY.replace("tp = 1", "tp = 4", 1))
    assert run("plan", "w", *CAP, "--topology", "t.toml", "--out", "p.json") == (
        2,
        "",
        "error: ep * etp = 2: expected a multiple of tp * cp = 4, "
        "or a DP rank spans several EP groups\n",
    )


def test_a_plan_for_another_window() -> None:
    """The plan is not wrong, it was given the wrong window: a user error that names both hashes."""
    run("plan", "w", *SIZES, "--out", "p.json")
    tensors = counted()
    tensors["group"] = np.zeros(len(LENGTHS), np.int32)
    save_file(tensors, "other", METADATA)
    hashes = [files.read_window(name).sha256 for name in ("w", "other")]
    assert run("verify", "other", "p.json") == (
        2,
        "",
        f"error: p.json: window.sha256 = {hashes[0]!r}: expected {hashes[1]!r}, "
        "the plan is for another window\n",
    )


BAD_COMMANDS = [
    (("pack",), "No such command 'pack'"),
    (("inspect",), "Missing argument 'WINDOW'"),
    (("inspect", "w", "--ep"), "Option '--ep' requires an argument"),
    (("inspect", "none"), "none: expected a file, there is none"),
    (("inspect", "."), ".: expected a file, it is a folder"),
    (("inspect", "w", "--ep", "3"), "num_experts = 4: expected a multiple of the 3 EP ranks"),
    (("inspect", "w", "--ep", "0"), "ep = 0: expected a whole number of at least 1"),
    (("verify", "w", "none"), "none: expected a file, there is none"),
    (
        ("verify", "w", "c.toml"),
        "c.toml: expected a plan file in JSON, Expecting value: line 1 column 3 (char 2)",
    ),
    (("verify", "w", "e.json"), "e.json: format = None: expected 'routepack.plan/1'"),
    (("inspect", "two\nlines"), r"two\nlines: expected a file, there is none"),
]


@pytest.mark.parametrize(("args", "message"), BAD_COMMANDS)
def test_bad_commands(args: Sequence[str], message: str) -> None:
    """Whatever the command, one line."""
    Path("e.json").write_text("{}")
    assert run(*args) == (2, "", f"error: {message}\n")


BAD_OUTPUTS = [
    (("--out", "no/p.json"), "no/p.json: expected an existing folder, no is none"),
    (("--out", "."), ".: expected a path for a file, it is a folder"),
    (("--out", "/dev/null"), "/dev/null: expected a path for a file, it is a device"),
    (("--out", "w"), "w: expected a path for output, it is also w"),
    (("--out", "p.json", "--stats", "./p.json"), "p.json: expected a path for output, it is also "
     "p.json"),
    (("--out", "p.json", "--stats", "no/s"), "no/s: expected an existing folder, no is none"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), BAD_OUTPUTS)
def test_bad_outputs(monkeypatch: pytest.MonkeyPatch, options: Sequence[str], message: str) -> None:
    """An output that cannot be written is refused before the search, and inputs are safe."""
    before = Path("w").read_bytes()
    monkeypatch.setattr(routepack, "plan", None)  # not reached
    assert run("plan", "w", *SIZES, *options) == (2, "", f"error: {message}\n")
    assert Path("w").read_bytes() == before
    assert sorted(os.listdir()) == ["c.toml", "t.toml", "w"]


@pytest.mark.parametrize("path", ["/proc/p.json", "/dev/stdout", "/dev/p.json"])
def test_devices_are_no_place_for_a_plan(path: str) -> None:
    """Renaming onto a device, or onto the link that names one, would replace it."""
    message = f"error: {path}: expected a path for a file, it is a device\n"
    assert run("plan", "w", *SIZES, "--out", path) == (2, "", message)


def test_a_link_is_written_through() -> None:
    """The file that a symbolic link names gets the plan, and the link stays one."""
    Path("target.json").write_text("before")
    Path("link.json").symlink_to("target.json")
    code, _, _ = run("plan", "w", *SIZES, "--evaluations", "10", "--out", "link.json")
    assert code == 0
    assert Path("link.json").is_symlink()
    assert Path("target.json").read_text().startswith('{"certificate"')


def test_a_disk_that_fills_leaves_the_old_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails half way is one line; the old file stays and no other remains."""
    Path("p.json").write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    code, _, err = run("plan", "w", *SIZES, "--out", "p.json")
    message = "p.json: expected a file that can be written, No space left on device"
    assert (code, err) == (2, f"error: {message}\n")
    assert Path("p.json").read_text() == "before"
    assert sorted(os.listdir()) == ["c.toml", "p.json", "t.toml", "w"]


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends with one line and the code that shells use for it."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(routepack, "plan", interrupted)
    assert run("plan", "w", *SIZES, "--out", "p.json") == (130, "", "interrupted\n")
    assert not Path("p.json").exists()


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Input beyond the machine's memory is an error of its user, in one line."""

    def exhausted(*_: object, **__: object) -> None:
        raise MemoryError("Unable to allocate 7 TiB")

    monkeypatch.setattr(routepack, "plan", exhausted)
    message = "expected input that fits into memory, Unable to allocate 7 TiB"
    assert run("plan", "w", *SIZES, "--out", "p.json") == (2, "", f"error: {message}\n")


def test_as_a_process() -> None:
    """Exit codes and streams as the shell sees them, with no traceback for a user's error."""
    assert process("--version") == (0, f"routepack {routepack.__version__}\n", "")
    message = "error: none: expected a file, there is none\n"
    assert process("inspect", "none") == (2, "", message)
    code, out, err = process("verify", "w", "w")
    assert (code, out, err.count("\n")) == (2, "", 1)
