"""Flags of `routepack plan` for what a trainer requires, and for the placement that is held."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import routepack
from cli_helpers import METADATA, SIZES, counted, fill, run
from routepack import files
from routepack.cli import terminal
from routepack.errors import InputError
from routepack.plan import Plan
from routepack.requirements import LARGEST, Requirements

# The last one wins: a cap of 16 leaves room for other layouts than the one of four full cells.
LOOSE = (*SIZES, "--token-cap", "16")
GROUPS = (0, 0, 1, 1, 2, 2, 3, 3)
TAGS = (0, 0, 0, 0, 1, 1, 1, 1)


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Compiled before any test, as that takes long and says so on stderr."""
    terminal.loading_kernels()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window w, the same with prompts and tags in g, and a window v of hot experts."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    labels = {"group": np.array(GROUPS, np.int32), "tag": np.array(TAGS, np.int32)}
    save_file(counted() | labels, "g", METADATA)
    skewed = counted()
    hot_E = np.array([1, 1, 0, 0], np.uint16)
    skewed["demand"][:] = skewed["lengths"][:, None, None].astype(np.uint16) * hot_E
    save_file(skewed, "v", METADATA)


FLAGS: list[tuple[Sequence[str], Requirements]] = [
    ((), Requirements()),
    (("--equal-samples-per-rank",), Requirements(equal_samples_per_rank=True)),
    (("--rows-multiple-of", "2"), Requirements(rows_multiple_of=2)),
    (("--max-samples-per-cell", "3"), Requirements(max_samples_per_cell=3)),
    (("--together", "rank"), Requirements(together="rank")),
    (("--together", "cell"), Requirements(together="cell")),
    (("--uniform-rows",), Requirements(uniform_rows=True)),
    (("--memory-limit-tokens", "40"), Requirements(memory_limit_tokens=40)),
    (
        ("--routing-groups", "2", "--ranks-per-node", "1"),
        Requirements(routing_groups=2, ranks_per_node=1),
    ),
    (
        ("--routing-groups", "2", "--node-of-rank", "4,0"),
        Requirements(routing_groups=2, node_of_rank=(4, 0)),
    ),
]


@pytest.mark.parametrize(("flags", "expected"), FLAGS)
def test_flags_reach_the_library(
    monkeypatch: pytest.MonkeyPatch, flags: Sequence[str], expected: Requirements
) -> None:
    """Each flag is the field of that name, and without any nothing is required."""
    asked: dict[str, Any] = {}

    def plan(*_: object, **options: Any) -> Plan:
        asked.update(options)
        raise InputError("seen")

    monkeypatch.setattr(routepack, "plan", plan)
    assert run("plan", "g", *SIZES, *flags, "--out", "p.json") == (2, "", "error: seen\n")
    assert asked["requirements"] == expected
    assert (asked["current_placement"], asked["fixed_placement"]) == (None, False)


@pytest.mark.parametrize(("flags", "expected"), FLAGS)
def test_a_plan_meets_what_is_required(flags: Sequence[str], expected: Requirements) -> None:
    """The plan says what was required, verification holds it to that, the summary names it."""
    code, out, err = run("plan", "g", *LOOSE, *flags, "--out", "p.json")
    assert (code, err) == (0, "")
    assert files.read_plan("p.json").requirements == expected
    assert run("verify", "g", "p.json") == (0, "OK: p.json holds for g\n", "")
    facts = {line.split("  ")[0]: " ".join(line.split()) for line in out.splitlines()}
    named = [name if on is True else f"{name} = {on}" for name, on in expected.named()]
    assert facts.get("required") == (f"required {', '.join(named)}" if named else None)


def test_verification_tells_what_a_plan_does_not_meet() -> None:
    """Each of the four cells, which are full with two samples, is a line; the exit code is 1."""
    run("plan", "w", *SIZES, "--out", "p.json")
    plan = json.loads(Path("p.json").read_text())
    cells = [(m, d) for m in range(2) for d in range(2)]
    assert [len(plan["rows"][m][d]) for m, d in cells] == [2] * 4
    plan["requirements"] = {"max_samples_per_cell": 1}
    Path("p.json").write_text(json.dumps(plan))
    code, out, err = run("verify", "w", "p.json")
    assert (code, err) == (1, "")
    assert out.splitlines()[:4] == [
        f"rows[{m}, {d}] = 2 samples: expected at most 1, max_samples_per_cell" for m, d in cells
    ]


def test_the_busiest_rank_is_always_reported() -> None:
    """Of v every token wants experts 0 and 1. Contiguously both are on rank 0: first-fit decreasing
    fills 16 tokens a row, so 32 assignments at layer 1, the model's index of the first."""
    _, out, _ = run("plan", "v", *SIZES, "--method", "baseline", "--out", "p.json")
    facts = [" ".join(line.split()) for line in out.splitlines()]
    assert "busiest rank 32 routed tokens (EP rank 0, layer 1, row 0)" in facts
    _, out, _ = run("plan", "v", *SIZES, "--memory-limit-tokens", "16", "--out", "p.json")
    facts = [" ".join(line.split()) for line in out.splitlines()]
    assert "busiest rank 16 routed tokens (EP rank 0, layer 1, row 0), limit 16" in facts


def test_the_shard_of_the_busiest_rank_is_told_where_there_are_several() -> None:
    """Two DP ranks in two shards: each of the four full cells loads an EP group of its own."""
    sizes = (*SIZES, "--edp", "2", "--method", "baseline")
    _, out, _ = run("plan", "v", *sizes, "--out", "p.json")
    facts = [" ".join(line.split()) for line in out.splitlines()]
    assert "busiest rank 16 routed tokens (EP rank 0, layer 1, row 0, shard 0)" in facts


def moved(out: str) -> str:
    """The line on experts that moved."""
    return next(" ".join(ln.split()) for ln in out.splitlines() if ln.startswith("experts moved"))


def test_a_plan_continues_from_a_placement() -> None:
    """The balanced placement of v exchanges experts of both ranks; planned again, none moves."""
    _, out, _ = run("plan", "v", *SIZES, "--out", "p.json")
    assert moved(out) == "experts moved 4 of 8 are on another EP rank than contiguous"
    _, out, _ = run("plan", "v", *SIZES, "--current-placement", "p.json", "--out", "q.json")
    assert moved(out) == "experts moved 0 of 8 are on another EP rank than p.json"
    assert files.read_plan("q.json").placement == files.read_plan("p.json").placement


def test_a_placement_can_be_kept() -> None:
    """With --fixed-placement only micro-batches are planned: under a placement, or contiguous."""
    _, out, _ = run("plan", "v", *SIZES, "--fixed-placement", "--out", "p.json")
    assert moved(out) == "experts moved 0 of 8 are on another EP rank than contiguous"
    held = json.loads(Path("p.json").read_text())
    held["placement"] = [[3, 0, 1, 2], [1, 2, 3, 0]]
    Path("p.json").write_text(json.dumps(held))
    keep = ("--current-placement", "p.json", "--fixed-placement")
    for method in ("baseline", "routepack"):
        code, out, _ = run("plan", "v", *SIZES, *keep, "--method", method, "--out", "q.json")
        assert code == 0
        assert files.read_plan("q.json").placement == ((3, 0, 1, 2), (1, 2, 3, 0))
        assert moved(out) == "experts moved 0 of 8 are on another EP rank than p.json"


WHOLE = f"expected a whole number in 1..{LARGEST}"
BAD: list[tuple[str, Sequence[str], str]] = [
    ("w", ("--rows-multiple-of", "0"), f"rows_multiple_of = 0: {WHOLE}"),
    ("w", ("--max-samples-per-cell", "-1"), f"max_samples_per_cell = -1: {WHOLE}"),
    ("w", ("--memory-limit-tokens", "0"), f"memory_limit_tokens = 0: {WHOLE}"),
    (
        "w",
        ("--memory-limit-tokens", "many"),
        "--memory-limit-tokens = 'many': expected a whole number",
    ),
    ("g", ("--together", "node"), "together = 'node': expected 'rank' or 'cell'"),
    (
        "w",
        ("--routing-groups", "2"),
        "routing_groups: expected together with ranks_per_node or node_of_rank",
    ),
    (
        "w",
        ("--ranks-per-node", "1"),
        "routing_groups: expected together with ranks_per_node or node_of_rank",
    ),
    (
        "w",
        ("--node-of-rank", "0;1"),
        "--node-of-rank = '0;1': expected whole numbers as in 0,1,0,1",
    ),
    (
        "w",
        ("--routing-groups", "2", "--node-of-rank", "0,-1"),
        f"node_of_rank[1] = -1: expected a whole number in 0..{LARGEST}",
    ),
    # the window or the sizes
    (
        "w",
        ("--together", "rank"),
        "group: expected in the window, together = 'rank' needs it",
    ),
    ("w", ("--uniform-rows",), "tag: expected in the window, uniform_rows needs it"),
    (
        "w",
        ("--dp", "3", "--edp", "1", "--equal-samples-per-rank"),
        "samples = 8: expected a multiple of the 3 DP ranks, for equal_samples_per_rank",
    ),
    (
        "w",
        ("--routing-groups", "2", "--ranks-per-node", "3"),
        "ranks_per_node = 3: expected a divisor of the 2 EP ranks",
    ),
    (
        "w",
        ("--routing-groups", "3", "--ranks-per-node", "1"),
        "routing_groups = 3: expected a divisor of the 4 experts",
    ),
    (
        "w",
        ("--routing-groups", "1", "--ranks-per-node", "1"),
        "routing_groups = 1: expected a multiple of the 2 nodes, so that each holds whole groups",
    ),
    # the placement
    ("w", ("--current-placement", "none"), "none: expected a file, there is none"),
    ("w", ("--current-placement", "e.json"), "e.json: format = None: expected 'routepack.plan/1'"),
    (
        "w",
        ("--current-placement", "twice.json"),
        "twice.json: placement[0, 1] = 0: expected a free slot, expert 0 has it",
    ),
    (
        "w",
        ("--current-placement", "one.json"),
        "current_placement.shape = (1, 4): expected (2, 4)",
    ),
]


@pytest.mark.parametrize(("window", "flags", "message"), BAD)
def test_what_is_refused(window: str, flags: Sequence[str], message: str) -> None:
    """One line, exit code 2, and the plan that was there stays."""
    Path("e.json").write_text("{}")
    run("plan", "w", *SIZES, "--method", "baseline", "--out", "twice.json")
    plan = json.loads(Path("twice.json").read_text())
    Path("twice.json").write_text(json.dumps(plan | {"placement": [[0, 0, 2, 3], [0, 1, 2, 3]]}))
    other = {"window": plan["window"] | {"layers": 1}, "placement": [[0, 1, 2, 3]]}
    Path("one.json").write_text(json.dumps(plan | other))
    Path("p.json").write_text("before")
    files_before = sorted(os.listdir())
    assert run("plan", window, *SIZES, *flags, "--out", "p.json") == (2, "", f"error: {message}\n")
    assert Path("p.json").read_text() == "before"
    assert sorted(os.listdir()) == files_before


def test_the_placement_held_is_not_overwritten() -> None:
    """A plan is not written onto the one whose placement it continues from."""
    run("plan", "w", *SIZES, "--method", "baseline", "--out", "p.json")
    before = Path("p.json").read_bytes()
    message = "p.json: expected a path for output, it is also p.json"
    same = ("--current-placement", "p.json", "--out", "p.json")
    assert run("plan", "w", *SIZES, *same) == (2, "", f"error: {message}\n")
    assert Path("p.json").read_bytes() == before
