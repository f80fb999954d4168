"""What a migration takes beside a plain exchange of the same bytes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from rank_helpers import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="gloo ranks need torch"
)
SCRIPT = Path(__file__).with_name("timing_ranks.py")


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_a_migration_is_not_much_slower_than_its_transfer(world: int) -> None:
    """Two checksums and a copy are memory traffic beside the exchange, so a small multiple of it;
    the bound leaves room for ranks that share their cores with others."""
    found = run_ranks(SCRIPT, "migration", world)[0]
    assert found["migration"] <= 4 * found["all_to_all"]
