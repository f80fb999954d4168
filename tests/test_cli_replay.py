"""`routepack replay`: what it shows, what it writes, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from cli_helpers import METADATA, SIZES, counted, fill, run
from routepack.cli import terminal

PRICES = ("--expert-bytes", "1000", "--bandwidth", "1e6", "--seconds-per-unit", "0.5")


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Compiled before any test, as that takes long and says so on stderr."""
    terminal.loading_kernels()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A balanced window w, and a window v whose tokens all want the experts of the first rank."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    skewed = counted()
    demand_E = np.array([1, 1, 0, 0], np.uint16)
    skewed["demand"][:] = skewed["lengths"][:, None, None].astype(np.uint16) * demand_E
    save_file(skewed, "v", METADATA)


def test_steps_policies_and_layers() -> None:
    """Two ranks share 32 tokens with 2 experts each. In v rank 0 has all 64 demands of a layer, in
    w 32. An exchange of experts takes 1 ms, so that both layers move in v and stay in w."""
    code, out, err = run("replay", "w", "v", "w", *SIZES, *PRICES, "--out", "r.jsonl")
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in Path("r.jsonl").read_text().splitlines()]
    assert [line["verdicts"] for line in lines[:-1]][1] == ["moved", "moved"]
    assert lines[1]["gate"]["migration_bytes"] == 4000
    assert lines[1]["gate"]["migration_seconds"] == 0.002
    totals = lines[-1]["totals"]
    assert totals["steps"] == 3
    assert totals["gate"]["step_seconds"] < totals["never"]["step_seconds"]
    assert totals["gate"]["migrations"] <= totals["always"]["migrations"]
    assert max(len(line) for line in out.splitlines()) <= 80
    for fact in ("2 of 2", "4 kB", "by the gate", "always", "never", "1 of 3", "wrote r.jsonl"):
        assert fact in out


def test_equal_runs_write_equal_bytes() -> None:
    """With a budget in evaluations, on any number of threads; no time enters the file."""
    for threads, name in (("1", "a"), ("2", "b")):
        more = ("--threads", threads, "--out", name)
        assert run("replay", "w", "v", *SIZES, *PRICES, *more)[0] == 0
    assert Path("a").read_bytes() == Path("b").read_bytes()
    assert "planning" not in Path("a").read_text()


def test_the_gate_has_options() -> None:
    """Each keeps the experts of v where they are; the reasons are named."""
    for option, reason in (
        (("--byte-budget", "0"), "over the byte budget"),
        (("--fixed-seconds", "1e6"), "no gain as a whole"),
        (("--exposed-seconds", "1e6"), "no gain as a whole"),
        (("--margin", "1e9"), "save too little"),
    ):
        code, out, _ = run("replay", "v", *SIZES, *PRICES, *option)
        assert code == 0
        assert f"layers: 0 moved; stayed: 2 {reason}\n" in out
    # A migration of 40,000 s pays for v over many steps only.
    slow = ("--expert-bytes", "1000", "--bandwidth", "0.05", "--seconds-per-unit", "0.5")
    for horizon, moved in (("1", 0), ("1000000", 2)):
        _, out, _ = run("replay", "v", *SIZES, *slow, "--horizon", horizon)
        assert f"layers: {moved} moved" in out


def test_a_replay_continues_from_a_plan() -> None:
    """The placement of a plan file is the one that the first step finds."""
    assert run("plan", "v", *SIZES, "--out", "p.json")[0] == 0
    code, out, _ = run("replay", "v", *SIZES, *PRICES, "--current", "p.json")
    assert code == 0
    assert "layers: 0 moved; stayed: 2 in place\n" in out


BAD: list[tuple[Sequence[str], str]] = [
    (("w", "absent", *SIZES, *PRICES), "absent: expected a file, there is none"),
    (("w", *SIZES, *PRICES[2:]), "Missing option '--expert-bytes'"),
    (("w", *SIZES, *PRICES[:4]), "Missing option '--seconds-per-unit'"),
    (
        ("w", *SIZES, *PRICES, "--bandwidth", "fast"),
        "--bandwidth = 'fast': expected a number",
    ),
    (
        ("w", *SIZES, *PRICES, "--bandwidth", "0"),
        "bytes_per_second = 0.0: expected a number in 1e-15..1e+15",
    ),
    (
        ("w", *SIZES, *PRICES, "--horizon", "0"),
        "horizon_steps = 0: expected a whole number of at least 1",
    ),
    (
        ("w", *SIZES, *PRICES, "--hysteresis", "-1"),
        "hysteresis_steps = -1: expected a whole number of at least 0",
    ),
    (
        ("w", *SIZES, *PRICES, "--out", "w"),
        "w: expected a path for output, it is also w",
    ),
    (
        ("w", *SIZES, *PRICES, "--dp", "9", "--ep", "1"),
        "windows[0]: samples = 8: expected at least the 9 DP ranks",
    ),
]


@pytest.mark.parametrize(("args", "message"), BAD)
def test_what_is_refused(args: Sequence[str], message: str) -> None:
    """One line, exit code 2, and no output; a window that is absent before any is planned."""
    out = () if "--out" in args else ("--out", "r.jsonl")
    assert run("replay", *args, *out) == (2, "", f"error: {message}\n")
    assert not Path("r.jsonl").exists()


def test_windows_of_another_model_are_named() -> None:
    tensors = counted()
    tensors["demand"] = tensors["demand"][:, :1].copy()
    save_file(tensors, "one", METADATA | {"moe_layers": "[1]"})
    message = "windows[1]: (layers, experts) = (1, 4): expected (2, 4), as in the first window"
    assert run("replay", "w", "one", *SIZES, *PRICES) == (2, "", f"error: {message}\n")
