"""The command line: what it shows and what it writes."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

import routepack
from cli_helpers import METADATA, SIZES, counted, fill, process, routed, run
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


def test_plan_then_verify() -> None:
    """A plan is written, summarised and holds; times are in the statistics, never in the plan."""
    code, out, err = run("plan", "w", *SIZES, "--out", "p.json", "--stats", "s.json")
    assert (code, err) == (0, "")
    for fact in (
        "routepack",
        "8 samples, 2 MoE layers x 4 experts, top-2",
        "2 DP ranks, 2 EP ranks, EDP 1; at most 8 tokens a micro-batch",
        "default, no --cost-model was given: attention (linear 60,",
        "slowest shard",
        "wrote p.json",
    ):
        assert fact in out
    plan = files.read_plan("p.json")
    assert plan.search.seed == 0
    stats = json.loads(Path("s.json").read_text())
    assert {"kernels_seconds", "reading_seconds", "planning_seconds", "history"} <= set(stats)
    assert "seconds" not in Path("p.json").read_text()
    assert run("verify", "w", "p.json") == (0, "OK: p.json holds for w\n", "")


def test_the_options_of_plan_reach_the_library() -> None:
    """Files give the same plan as flags; method and seed arrive; equal runs give equal bytes."""
    same = ("--token-cap", "8", "--evaluations", "200", "--cost-model", "c.toml", "--seed", "3")
    code, out, _ = run("plan", "w", "--dp", "2", "--ep", "2", *same, "--out", "a.json")
    assert (code, "c.toml: full (linear 2, quadratic 1), expert 1" in out) == (0, True)
    run("plan", "w", "--topology", "t.toml", *same, "--threads", "1", "--out", "b.json")
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
    run("plan", "w", "--topology", "t.toml", *same, "--method", "kk", "--out", "b.json")
    plan = files.read_plan("b.json")
    assert (plan.method, plan.cost_model.attention[0].linear) == ("kk", 2.0)
    assert files.read_plan("a.json").search.seed == 3


def test_routes_and_demand_are_the_same_window() -> None:
    """A plan for the counted window holds for the recorded one."""
    save_file(routed(), "routes", METADATA)
    run("plan", "w", *SIZES, "--out", "p.json")
    assert run("verify", "routes", "p.json") == (0, "OK: p.json holds for routes\n", "")


def test_verify_lists_broken_invariants() -> None:
    """A plan that is not what it says: one line for each lie, exit code 1."""
    run("plan", "w", *SIZES, "--method", "baseline", "--out", "p.json")
    plan = json.loads(Path("p.json").read_text())
    total, gap = plan["score"]["total"], plan["certificate"]["gap"]
    plan["score"]["total"], plan["certificate"]["gap"] = 1.0, 2.0
    Path("p.json").write_text(json.dumps(plan))
    assert run("verify", "w", "p.json") == (
        1,
        f"score.total = 1.0: expected {total!r}\ncertificate.gap = 2.0: expected {gap!r}\n",
        "",
    )


def test_inspect_shows_samples_lengths_and_layers() -> None:
    """Two layers that use all experts alike, as the token rows cycle through them."""
    code, out, err = run("inspect", "w", "--ep", "2")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["samples", "8"] in lines
    assert ["tokens", "32"] in lines
    assert ["experts", "2", "MoE", "layers", "x", "4", "experts,", "top-2"] in lines
    for label in ("1", "2", "mean"):  # the model's indices of the MoE layers
        assert [label, "1.00", "0.000", "1.00", "1.00"] in lines


def test_inspect_shows_what_limits_a_layout() -> None:
    """With --dp and --ep, or a topology file of the same, and a cap: 32 tokens in two rows of two
    cells of 8; without a cap what does not depend on it."""
    cost = ("--cost-model", "c.toml")
    code, out, err = run("inspect", "w", "--dp", "2", "--ep", "2", "--token-cap", "8", *cost)
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    for line in (
        "cost model c.toml: full (linear 2, quadratic 1), expert 1",
        "rows 2, certified: no layout has fewer (volume)",
        "cells 4 of 2.0 samples and 8 tokens on average, 100.0% full",
        "slowest shard balanced at least above of the bound",
    ):
        assert line in lines
    assert run("inspect", "w", "--topology", "t.toml", "--token-cap", "8", *cost)[1] == out
    assert out.startswith(run("inspect", "w", "--ep", "2")[1])
    code, out, err = run("inspect", "w", "--dp", "2", "--ep", "2")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].rstrip() == "rows and costs depend on --token-cap"


REFUSED_LAYOUTS = [
    (("--token-cap", "8"), "--dp: expected with --edp, --token-cap or --cost-model, or --topology"),
    (("--dp", "2"), "--ep: expected a size, or --topology with a file, none is given"),
    (
        ("--topology", "t.toml", "--ep", "2"),
        "--topology, --ep: expected either a file or sizes, not both",
    ),
    (
        ("--dp", "2", "--ep", "2", "--token-cap", "6"),
        "lengths[7] = 7: expected at most the token cap 6",
    ),
    (
        ("--dp", "2", "--ep", "2", "--token-cap", "0"),
        "token_cap = 0: expected a whole number of at least 1",
    ),
    (("--dp", "9", "--ep", "1"), "samples = 8: expected at least the 9 DP ranks"),
    (("--dp", "3", "--ep", "3"), "num_experts = 4: expected a multiple of the 3 EP ranks"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED_LAYOUTS)
def test_layouts_that_cannot_be_inspected(flags: tuple[str, ...], message: str) -> None:
    """One line, exit code 2, and no half of a report."""
    assert run("inspect", "w", *flags) == (2, "", f"error: {message}\n")


def test_version_and_help() -> None:
    """Both go to stdout; the bare command shows its help."""
    version = (0, f"routepack {routepack.__version__}\n", "")
    assert run("--version") == run("--version", "inspect", "none") == version
    code, out, err = run()
    assert (code, err) == (0, "")
    assert out == run("--help")[1]
    for command in ("plan", "verify", "inspect"):
        assert f"\n  {command} " in out
        assert run(command, "--help")[0] == 0


def test_slow_loading_says_that_it_compiles(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Loading that takes long is explained once, quick loading is silent; both are timed."""
    monkeypatch.setattr(terminal, "COMPILING_SECONDS", 0.05)
    assert terminal.loading_kernels("json") < 0.05
    monkeypatch.setattr(importlib, "import_module", lambda _: time.sleep(0.3))
    assert terminal.loading_kernels("anything") >= 0.3
    assert capsys.readouterr().err == f"{terminal.COMPILING}\n"


def test_importing_the_command_line_loads_no_kernels() -> None:
    """`routepack --version` must not wait for numba."""
    code = (
        "import sys, routepack.cli.app, routepack.report\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('numba', 'scipy')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_ascii_terminal() -> None:
    """Bars and names come out in whatever encoding the terminal has."""
    save_file(counted(), "w", METADATA | {"model": "Größe \x1b[31m"})
    code, out, err = process("inspect", "w", env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (code, err) == (0, "")
    assert "model    Gr\\xf6\\xdfe \\x1b[31m" in out


def test_a_reader_that_stops() -> None:
    """`routepack inspect w | head -0` ends without a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    code, _, err = process("inspect", "w", stdout=writer)
    os.close(writer)
    assert (code, err) == (1, "")


@pytest.mark.slow
def test_the_demo(tmp_path: Path) -> None:
    """The example plans, verifies and shows all of its methods, within 80 columns."""
    demo = Path(__file__).parents[1] / "examples" / "demo_plan.py"
    command = [sys.executable, demo]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert files.read_plan(tmp_path / "plan.json").method == "routepack"
    for method in ("baseline", "reorder", "reorder-kk", "routepack"):
        assert f"\n{method} " in done.stdout
    assert max(map(len, done.stdout.splitlines()[:-1])) <= 80  # the last one has a path
