"""Real ranks: one rank's failure, and every rank runs the step on the trainer's own layout."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="gloo ranks need torch"
)
SCRIPT = Path(__file__).with_name("agreement_ranks.py")
LIMIT_SECONDS = 240
KEPT = "this step keeps the trainer's own layout: "
OTHERS = f"{KEPT}another rank has no plan, or a different one"


@cache
def ranks(world: int) -> list[dict[str, Any]]:
    """What each rank found. A deadlock ends in the timeout of a collective, and so fails."""
    import routepack.planner  # noqa: F401  # compiles the kernels once, and not in every rank

    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        outs = [folder / f"{rank}.json" for rank in range(world)]
        logs = [folder / f"{rank}.log" for rank in range(world)]
        started = []
        for rank in range(world):
            arguments = [str(rank), str(world), str(folder / "store"), str(outs[rank])]
            log = stack.enter_context(logs[rank].open("w"))
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments], stdout=log, stderr=subprocess.STDOUT
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        codes = [process.wait(LIMIT_SECONDS) for process in started]
        assert codes == [0] * world, "\n".join(log.read_text() for log in logs)
        return [json.loads(out.read_text()) for out in outs]


WORLDS = pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])


@WORLDS
def test_ranks_that_agree_use_the_plan(world: int) -> None:
    """The same layout everywhere, with fewer micro-batches than the trainer's own."""
    found = [rank["fine"] for rank in ranks(world)]
    assert not any(rank["own"] for rank in found)
    assert all(rank["rows"] == found[0]["rows"] for rank in found)
    assert {count for rank in found for count in rank["counts"]} == {8 // world}
    assert found[0]["warnings"] == []


@WORLDS
@pytest.mark.parametrize(
    ("case", "reason", "counter"),
    [
        ("exception", "ZeroDivisionError: a bug", "errors"),
        ("missing route", "routes[2] = None: expected recorded routes", "declined"),
        ("late", "no plan after 0.5 s", "late"),
    ],
)
def test_a_failure_of_one_rank(world: int, case: str, reason: str, counter: str) -> None:
    """All ranks have the trainer's own layout, in the very object, and the step runs through; the
    rank that failed warns why, the others that one of them did."""
    found = [rank[case] for rank in ranks(world)]
    assert all(rank["own"] for rank in found)
    assert all(rank["counts"] == [16 // world] * world for rank in found)
    assert [rank["warnings"] for rank in found] == [
        [KEPT + reason if rank == 1 else OTHERS] for rank in range(world)
    ]
    assert found[1]["totals"][counter] == 1


@WORLDS
def test_a_rank_with_another_window(world: int) -> None:
    """Plans of different windows are fine each for itself; together they are not."""
    found = [rank["another window"] for rank in ranks(world)]
    assert all(rank["own"] for rank in found)
    assert all(rank["counts"] == [16 // world] * world for rank in found)
    assert [rank["warnings"] for rank in found] == [[OTHERS]] * world


@WORLDS
def test_after_failures_plans_are_used_again(world: int) -> None:
    """Each failure was of one step: the last of the five, like the first, was packed."""
    totals = [rank["fine"]["totals"] for rank in ranks(world)]
    assert totals[0] == {"planned": 2, "disagreed": 3}
    assert totals[1] == {"planned": 2, "errors": 1, "declined": 1, "disagreed": 1}


@WORLDS
def test_a_rank_that_is_not_there(world: int) -> None:
    """The agreement itself times out, on all ranks: they say so once, and are not asked again."""
    found = [rank["absent"] for rank in ranks(world)]
    for rank in found:
        assert rank["own"]
        assert rank["second"]["own"]
        assert rank["second"]["totals"] == {"unreachable": 2}
        [warning] = rank["warnings"]
        assert warning.startswith(f"{KEPT}the ranks could not agree, and will not be asked again: ")
        assert rank["seconds"] < 60
