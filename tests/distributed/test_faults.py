"""What goes wrong before the agreement leaves the old placement on every rank, and says where."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

from rank_helpers import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="gloo ranks need torch"
)
SCRIPT = Path(__file__).with_name("fault_ranks.py")


@pytest.mark.parametrize("count", [30, pytest.param(160, marks=pytest.mark.slow)])
def test_faults_that_all_ranks_survive(count: int) -> None:
    """Faults on four ranks, one after another: an exception, a byte that changes on its way or in
    the receiver's buffer, another expert than the one expected, no room to stage. All ranks raise
    the same line, with layer, expert and tensor, and hold the old placement to the last bit; the
    next migration works."""
    ranks = [found["faults"] for found in run_ranks(SCRIPT, f"exceptions {count}", 4)]
    assert Counter(fault["kind"] for fault in ranks[0]) == dict.fromkeys(
        ("exception", "corrupted", "checksum", "canary", "no room"), count // 5
    )
    for faults in zip(*ranks, strict=True):
        assert all(fault["whole"] for fault in faults), faults
        assert len({fault["message"] for fault in faults}) == 1, faults
        fault = faults[0]
        at = f"layer {fault['layer']}, expert {fault['expert']}, tensor"
        expected = {
            "exception": rf"{at} {fault['name']}: cannot be read \(InjectedError: a bug\)",
            "corrupted": rf"{at} {fault['name']}: the checksum differs, from EP rank \d",
            "checksum": rf"{at} {fault['name']}: the checksum differs, from EP rank \d",
            "canary": rf"{at} ids: layer \d, expert 9 came from EP rank \d",
            "no room": r"layer \d, expert \d, tensor [\w.]+: no room on cpu to stage \d+ bytes of "
            r"\d experts \(RuntimeError: out of memory\)",
        }[fault["kind"]]
        line = rf"rank \d: {expected}; nothing was changed"
        assert re.fullmatch(line, fault["message"]), fault


@pytest.mark.parametrize("count", [8, pytest.param(40, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed(count: int) -> None:
    """Jobs of four ranks that lose one, at four points: the others end in an error in a few
    seconds, hold the old placement to the last bit, and name the layer, the expert and the tensors
    that they were waiting for."""
    [jobs, *_] = [found["jobs"] for found in run_ranks(SCRIPT, f"killed {count}", 4)]
    assert len(jobs) == count
    transfer = (
        r"layer \d, expert \d, tensor [\w.]+: not (received from|sent to) EP rank \d \(.*\); "
        r"nothing was changed"
    )
    agreement = (
        r"a rank is lost: no agreement (before|on) batch 1 of 1 \(.*\); layer \d, expert \d, "
        r"tensors [\w., ]+ from EP rank \d are not committed(, nor \d more)?"
    )
    for job in jobs:
        survivors = [found for found in job if found is not None]
        assert len(survivors) == 3
        for found in survivors:
            assert found["whole"], found
            assert found["seconds"] < 30
            assert re.fullmatch(f"{transfer}|{agreement}", found["message"]), found
    points = {found["point"] for job in jobs for found in job if found is not None}
    assert len(points) == 4
