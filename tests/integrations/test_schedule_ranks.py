"""slime's and miles' schedules on real ranks: a plan that fails in their one planner stops none."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from integrations.rollout_helpers import KEPT, LENGTHS, owned
from integrations.trainer_helpers import arguments

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="gloo ranks need torch"
)
SCRIPT = Path(__file__).with_name("schedule_ranks.py")
WORLD, LIMIT_SECONDS = 2, 240


@cache
def ranks(trainer: str) -> list[dict[str, Any]]:
    """What each rank found. A deadlock ends in the timeout of a collective, and so fails."""
    import routepack.planner  # noqa: F401  # compiles the kernels once, and not in every rank

    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        outs = [folder / f"{rank}.json" for rank in range(WORLD)]
        logs = [folder / f"{rank}.log" for rank in range(WORLD)]
        started = []
        for rank in range(WORLD):
            arguments = [trainer, str(rank), str(WORLD), str(folder / "store"), str(outs[rank])]
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments],
                env=os.environ | {"PYTHONPATH": path},
                stdout=stack.enter_context(logs[rank].open("w")),
                stderr=subprocess.STDOUT,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(process)
        codes = [process.wait(LIMIT_SECONDS) for process in started]
        assert codes == [0] * WORLD, "\n".join(log.read_text() for log in logs)
        return [json.loads(out.read_text()) for out in outs]


@pytest.fixture(params=["slime", "miles"])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Both ranks of either trainer."""
    return ranks(request.param)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("exception", "a bug"),
        ("missing route", "routes[3] = none: expected recorded routes, the engine must return"),
        ("another window", "total_lengths = of 32 samples: expected the samples that the log hook"),
    ],
)
def test_a_failure_leaves_every_rank_the_trainers_schedule(
    found: list[dict[str, Any]], case: str, reason: str
) -> None:
    """The trainer's own micro-batches on both ranks, as many on each, all run through."""
    lengths = LENGTHS[::-1] if case == "another window" else LENGTHS
    own = owned(arguments(), lengths, dp=WORLD)
    for rank in found:
        assert rank[case]["schedule"] == json.loads(json.dumps(own))
        assert rank[case]["ran"] == [sum(rank[case]["planned_counts"])] * WORLD
    [warning] = found[0][case]["warnings"]
    assert warning.startswith(KEPT)
    assert reason in warning


def test_the_steps_around_are_packed(found: list[dict[str, Any]]) -> None:
    """Both ranks run the plan, which is another schedule, before and after the failures."""
    own = json.loads(json.dumps(owned(arguments(), dp=WORLD)))
    for rank in found:
        assert rank["fine"]["schedule"] == rank["fine again"]["schedule"] != own
        assert rank["fine"]["ran"] == [sum(rank["fine"]["planned_counts"])] * WORLD
        assert rank["fine"]["warnings"] == rank["fine again"]["warnings"] == []
