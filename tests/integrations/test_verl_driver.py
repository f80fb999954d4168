"""verl's own trainer, transfer queue and workers around a plan. Skipped where they are missing.

python -m pytest tests/integrations/test_verl_driver.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from integrations.verl_helpers import require

require("verl", "torch", "ray", "transfer_queue", "hydra")

SECONDS = 600
CAP, RANKS, SAMPLES, STEPS = 256, 2, 32, 2


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the driver saw, batch by batch."""
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("verl_driver.py"))],
        env=os.environ | {"ROUTEPACK_VERL": "pack", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    results: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    results["stderr"] = process.stderr
    return results


def members(step: dict[str, Any]) -> list[list[int]]:
    """Samples of each optimizer step, over all ranks, as the workers cut them."""
    return [
        sorted(i for rank in step["ranks"] for batch in rank["update"][k] for i in batch)
        for k in range(STEPS)
    ]


def test_a_planned_batch_is_complete_and_in_step(found: dict[str, Any]) -> None:
    """Every sample once in each pass, within the cap, as many micro-batches on each rank."""
    packed, lengths = found["packed"], found["lengths"]
    for name, cap in (("update", CAP), ("log_probs", 2 * CAP)):
        ranks = [rank[name] for rank in packed["ranks"]]
        if name == "update":
            assert [len(step) for step in ranks[0]] == [len(step) for step in ranks[1]]
            ranks = [[batch for step in rank for batch in step] for rank in ranks]
        assert len(ranks[0]) == len(ranks[1])
        batches = [batch for rank in ranks for batch in rank]
        assert Counter(i for batch in batches for i in batch) == Counter(range(SAMPLES))
        assert max(sum(lengths[i] for i in batch) for batch in batches) <= cap
    assert packed["metrics"]["routepack/packed"] == 1


def test_a_plan_keeps_every_samples_optimizer_step(found: dict[str, Any]) -> None:
    """The same samples as in verl's own mini-batches, on other ranks and in other micro-batches."""
    assert members(found["packed"]) == members(found["verl"])
    assert found["packed"]["ranks"] != found["verl"]["ranks"]


def test_the_plan_is_what_the_metrics_say(found: dict[str, Any]) -> None:
    """Rows are counted alike by the driver and by the workers, for the plan and for verl's own."""
    metrics = found["packed"]["metrics"]
    for name, step in (("plan", found["packed"]), ("own", found["verl"])):
        rows = sum(len(mini_batch) for mini_batch in step["ranks"][0]["update"])
        assert metrics[f"routepack/{name}/rows"] == rows
    assert metrics["routepack/predicted_ratio"] < 1


def test_a_failed_plan_leaves_verls_own_layout(found: dict[str, Any]) -> None:
    """Order and micro-batches are verl's, once said and counted; the next batch is planned."""
    assert found["failed"]["ranks"] == found["verl"]["ranks"]
    assert found["failed"]["order"] == found["verl"]["order"]
    assert found["failed"]["metrics"]["routepack/fallback_steps"] == 1
    assert found["again"]["metrics"]["routepack/fallback_steps"] == 1
    assert found["again"]["metrics"]["routepack/packed"] == 1
    said = [line for line in found["stderr"].splitlines() if "routepack" in line]
    assert len(said) == 1
    assert said[0].endswith(
        "routepack: verl's own layout is used where planning fails: ZeroDivisionError: integer "
        "division or modulo by zero"
    )


def test_observing_changes_nothing(found: dict[str, Any]) -> None:
    """verl's order and micro-batches; the numbers of a batch are reported with the next one."""
    for name in ("observed", "observed_next"):
        assert found[name]["order"] == found["verl"]["order"]
        assert found[name]["ranks"] == found["verl"]["ranks"]
    assert "routepack/predicted_ratio" not in found["observed"]["metrics"]
    metrics = found["observed_next"]["metrics"]
    assert metrics["routepack/predicted_ratio"] < 1
    assert metrics["routepack/own/expert_imbalance"] > 1
    assert metrics["routepack/planning_seconds"] > 0


def test_off_adds_no_metrics(found: dict[str, Any]) -> None:
    """Without a session verl's metrics are its own."""
    assert not [name for name in found["verl"]["metrics"] if name.startswith("routepack")]


def test_workers_report_what_they_did(found: dict[str, Any]) -> None:
    """Three passes of each planned batch were followed, all others left to verl, none failed."""
    assert found["counts"] == [{"followed": 6, "declined": 12}] * RANKS
    assert found["failed"]["metrics"]["routepack/passes/followed"] == 3
    assert found["again"]["metrics"]["routepack/passes/declined"] == 3


def test_a_worker_without_the_switch_is_found_at_launch(found: dict[str, Any]) -> None:
    """One line that says which worker, and what it has."""
    version = found["version"]
    assert found["lonely"] == (
        f"worker[0] = ('off', '{version}', False): expected (mode, verl, patched) ('pack', "
        f"'{version}', True), as the driver; is ROUTEPACK_VERL set there"
    )
