"""The table of losses that depend on packing, against the installed verl. Skipped without it.

python -m pytest tests/integrations/test_verl_losses.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from integrations.verl_helpers import require
from routepack.integrations.verl.checks import PACKING_FREE, PER_MICRO_BATCH

require("verl", "torch")


@pytest.fixture(scope="module")
def losses() -> dict[str, Any]:
    """Summed losses of the same samples in two packings."""
    process = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("verl_losses.py"))],
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def test_every_policy_loss_of_verl_is_in_the_table(losses: dict[str, Any]) -> None:
    """And on the right side: equal under both packings up to rounding, or clearly not."""
    assert set(losses["modes"]) == {*PACKING_FREE, *PER_MICRO_BATCH}
    for mode, (one, other) in losses["modes"].items():
        same = one == pytest.approx(other, rel=1e-12)
        assert same == (mode in PACKING_FREE), mode


def test_aggregations(losses: dict[str, Any]) -> None:
    """Only one depends on packing, and not where its scale is set."""
    for name, (one, other) in losses["aggregations"].items():
        same = one == pytest.approx(other, rel=1e-12)
        assert same == (name != "seq-mean-token-sum-norm"), name
    one, other = losses["scaled"]
    assert one == pytest.approx(other, rel=1e-12)


def test_weights_normalised_in_a_micro_batch(losses: dict[str, Any]) -> None:
    """Of the rollout correction in bypass mode."""
    one, other = losses["normalised"]
    assert one != pytest.approx(other, rel=1e-3)
