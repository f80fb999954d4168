"""verl's own functions, from the installed verl, on gloo ranks. Skipped where verl is missing.

With 0.9.0 or 0.9.1 (docs/guides/verl.md has what else it needs to be imported on a CPU):

    python -m pytest tests/integrations/test_verl_real.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from integrations.verl_helpers import require

require("verl", "torch")

HERE = Path(__file__).parent
ENTRY_POINTS = [point.name for point in entry_points(group="verl.plugins")]
SECONDS = 300  # for a group to start and finish


def run_ranks(ranks: int, folder: Path, **environ: str) -> list[dict[str, Any]]:
    """What each rank of a group of processes found."""
    store = folder / f"store-{ranks}-{len(list(folder.iterdir()))}"
    env = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"} | environ
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "verl_ranks.py"), str(rank), str(ranks), str(store)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=SECONDS) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-4000:]
    found = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    for result, (_, errors) in zip(found, outputs, strict=True):
        result["stderr"] = errors
    return found


@pytest.fixture(scope="module", params=[2, 4])
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Ranks in which the plugin is on."""
    folder = tmp_path_factory.mktemp("packed")
    return run_ranks(request.param, folder, ROUTEPACK_VERL="pack")


def test_verl_finds_the_plugin() -> None:
    """The entry point is installed with routepack, under the group that verl loads."""
    assert "routepack" in ENTRY_POINTS


def test_micro_batches_are_the_plans(packed: list[dict[str, Any]]) -> None:
    """Every mini-batch of every rank, split by verl's `prepare_micro_batches`: the plan's cells."""
    for found in packed:
        assert found["mode"] == "pack"
        update, expected = found["follow"]["update"], found["follow"]["expected"]
        assert [sorted(map(sorted, step)) for step in update] == [sorted(s) for s in expected]
    counts = [[len(step) for step in found["follow"]["update"]] for found in packed]
    assert all(count == counts[0] for count in counts)


def test_a_pass_with_a_larger_cap_follows_merged_rows(packed: list[dict[str, Any]]) -> None:
    """Fewer micro-batches, as many on each rank, within the cap; outputs return to their places."""
    counts = set()
    for found in packed:
        follow = found["follow"]
        counts.add(len(follow["log_probs"]))
        assert max(follow["log_prob_tokens"]) <= 128
        assert len(follow["log_probs"]) < sum(len(step) for step in follow["update"])
        assert follow["restored"]
    assert len(counts) == 1


@pytest.mark.parametrize("how", ["exception", "missing", "hash", "cap", "other cap"])
def test_all_ranks_fall_back_together(packed: list[dict[str, Any]], how: str) -> None:
    """One rank's failure: every rank gets verl's own micro-batches; the next step is planned."""
    for found in packed:
        case = found["fall_back"][how]
        assert case["got"] == case["verl"]
        assert case["next"] == found["fall_back"]["exception"]["next"]


def test_fall_backs_are_counted_and_said_once(packed: list[dict[str, Any]]) -> None:
    """Four failures on each rank, one warning; a pass that was not planned for is no failure."""
    for rank, found in enumerate(packed):
        counts = found["fall_back"]["counts"]
        assert (counts["fell_back"], counts["declined"]) == (4, 2)
        warnings = [line for line in found["stderr"].splitlines() if "routepack" in line]
        reason = "another rank could not follow the plan"
        if rank == len(packed) - 1:
            reason = "ZeroDivisionError: integer division or modulo by zero"
        assert len(warnings) == 1
        assert warnings[0].endswith(
            f"routepack: verl's own micro-batches are used where the plan cannot be: {reason}"
        )


def test_tensor_parallel_ranks_agree_too(packed: list[dict[str, Any]]) -> None:
    """One of four ranks fails: also the DP group that it is not in uses verl's own layout."""
    if len(packed) < 4:
        pytest.skip("needs 4 ranks")
    for found in packed:
        follows, fails = found["two_by_two"]["follows"], found["two_by_two"]["fails"]
        assert fails["got"] == fails["verl"]
        assert len(follows["got"]) == 12  # one micro-batch for two samples, as planned
        assert follows["got"] != follows["verl"]


def test_off_is_identical(packed: list[dict[str, Any]], tmp_path: Path) -> None:
    """With the switch off, and without any plugin, verl's own function makes the same batches; with
    the switch on, a batch without a plan gets them too."""
    if len(packed) > 2:
        pytest.skip("shown on 2 ranks")
    off = run_ranks(2, tmp_path, ROUTEPACK_VERL="off")
    bare = run_ranks(2, tmp_path, ROUTEPACK_VERL="pack", VERL_USE_EXTERNAL_PLUGINS="none")
    for on, found, without in zip(packed, off, bare, strict=True):
        assert (found["mode"], without["mode"]) == ("off", "not loaded")
        assert found["untouched"]
        assert without["untouched"]
        assert not on["untouched"]
        assert on["without_plan"]["got"] == on["without_plan"]["verl"]
        assert found["without_plan"] == on["without_plan"] == without["without_plan"]
