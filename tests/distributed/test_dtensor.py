"""Experts as FSDP2 keeps them, sharded over EP and EDP ranks."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rank_helpers import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="gloo ranks need torch"
)
SCRIPT = Path(__file__).with_name("dtensor_ranks.py")


def test_experts_of_fsdp2_move_exactly() -> None:
    """Parameters that `fully_shard` made of EP-sharded DTensors, and AdamW's moments, keep their
    bits by expert over twenty moves, in place; with EDP on the experts' axis, where a rank holds
    whole experts, and on another one, where it holds a part of each."""
    for found in run_ranks(SCRIPT, "fsdp2", 4):
        for shape, axis in zip(([2, 6, 4], [4, 3, 4]), found["axes"], strict=True):
            assert axis == {"shape": shape, "changed": 0, "compared": 120, "in place": True}
