"""What a migration takes beside a plain exchange of the same bytes."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from rank_helpers import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="gloo ranks need torch"
)
SCRIPT = Path(__file__).with_name("timing_ranks.py")


@pytest.mark.slow
@pytest.mark.skipif(
    "ROUTEPACK_TIMED" not in os.environ,
    reason="times mean little on a shared machine: set ROUTEPACK_TIMED=1 on an idle one",
)
@pytest.mark.parametrize("world", [2, 4])
def test_a_migration_is_not_much_slower_than_its_transfer(world: int) -> None:
    """Two checksums and a copy are memory traffic beside the exchange: at most as much again."""
    found = run_ranks(SCRIPT, "migration", world)[0]
    assert found["migration"] <= 2 * found["all_to_all"]
