"""Real ranks exchange experts of every form, and every bit of them is where the placement says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rank_helpers import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="gloo ranks need torch"
)
SCRIPT = Path(__file__).with_name("transfer_ranks.py")


@pytest.mark.parametrize("world", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_experts_move_exactly(world: int) -> None:
    """Twenty random placements and back to the first: each time the old placement holds to the last
    bit until `wait` begins, and the new one when it returns, at unchanged addresses. What is sent
    and staged is what the rounds say: the experts that change rank, and no byte more."""
    for found in run_ranks(SCRIPT, "moves", world):
        assert found["wrong"] == []
        for report in found["reports"]:
            assert report["received"] == report["sent"] == report["planned"]
            assert report["staged"] == report["planned_staged"]
            assert report["limit"] is None or report["staged"] <= report["limit"]
            assert report["batches"] == report["planned_batches"]
        assert max(report["batches"] for report in found["reports"]) > 1


def test_ranks_that_were_given_different_things() -> None:
    """All ranks raise the same line, whichever rank is the odd one; nothing moves. An expert of
    layer 0 has 96 + 96 + 6 bytes of weights, 192 + 96 + 48 + 12 + 4 of the optimizer, and 8 + 5."""
    differs = (
        "rank 1: another placement, layout of experts or staging_bytes than rank 0; "
        "nothing was changed"
    )
    for found in run_ranks(SCRIPT, "refusals", 2):
        assert found == {
            "placement": differs,
            "nothing to do": differs,
            "no bijection": "rank 1: InputError: new[0, 1] = 0: expected a free slot, expert 0 has "
            "it; nothing was changed",
            "staging": differs,
            "layout": differs,
            "too small": "rank 0: InputError: staging_bytes = 9: expected at least 563 bytes, one "
            "expert of layer 0; nothing was changed",
        }


def test_edp_shards_agree() -> None:
    """A canary that does not fit in one EP group stops the other one too, and once it is put right
    the same migration goes through, with a handle of its own."""
    line = (
        "rank 2: layer 0, expert 6, tensor ids: layer 0, expert 7 came from EP rank 1; "
        "nothing was changed"
    )
    for found in run_ranks(SCRIPT, "shards", 4):
        assert found["messages"] == [line, f"this migration has failed before: {line}"]
