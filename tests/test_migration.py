"""What moving experts costs, checked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.errors import InputError
from routepack.migration import MigrationCost, Moves, expert_state_bytes
from routepack.placement import identity
from strategies import placements

COST: dict[str, Any] = dict(bytes_per_expert=10, bytes_per_second=4.0, seconds_per_cost_unit=1.0)


def test_state_of_an_expert() -> None:
    """Qwen3-30B-A3B: 3 * 2048 * 768 = 4,718,592 parameters of 2 + 12 bytes each. A distributed
    optimizer over 4 ranks leaves 2 + 3 bytes, two expert tensor parallel ranks half of all."""
    assert expert_state_bytes(2048, 768) == 66_060_288
    assert expert_state_bytes(2048, 768, optimizer_shards=4) == 4_718_592 * 5
    assert expert_state_bytes(2048, 768, etp=2) == 33_030_144
    assert expert_state_bytes(2048, 768, matrices=2, weight_bytes=4, optimizer_bytes=8) == (
        2 * 2048 * 768 * 12
    )


def test_state_is_rounded_up_to_a_byte() -> None:
    """3 parameters of 2 + 12 / 5 bytes are 13.2 bytes."""
    assert expert_state_bytes(1, 1, optimizer_shards=5) == 14


def test_moves_are_counted_by_layer_and_rank() -> None:
    """Six experts on three ranks. Layer 0 exchanges experts 1 and 2: one comes to rank 0, one to
    rank 1. Layer 1 sends every expert one rank on. Layer 2 swaps the slots of rank 0: no move."""
    current_LE = identity(3, 6)
    new_LE = np.array([[0, 2, 1, 3, 4, 5], [2, 3, 4, 5, 0, 1], [1, 0, 2, 3, 4, 5]], np.int32)
    moves = Moves.between(current_LE, new_LE, 3)
    assert moves.received_LR.tolist() == [[1, 1, 0], [2, 2, 2], [0, 0, 0]]
    assert moves.experts_L.tolist() == [2, 6, 0]
    assert moves.only(np.array([True, False, True])).experts_L.tolist() == [2, 0, 0]


def test_seconds_wait_for_the_busiest_rank_of_each_layer() -> None:
    """10 bytes an expert at 4 bytes a second are 2.5 s. The layers' busiest ranks receive 1, 2 and
    0 experts: 2.5 + 5 s, and half a second once for the migration as a whole."""
    moves = Moves(np.array([[1, 1, 0], [2, 1, 1], [0, 0, 0]]))
    cost = MigrationCost(**COST, fixed_seconds=0.5, exposed_seconds=100.0)
    assert cost.bytes_L(moves).tolist() == [20, 40, 0]
    assert cost.seconds_L(moves).tolist() == [2.5, 5.0, 0.0]
    assert cost.seconds(moves) == 8.0
    assert cost.seconds(moves.only(np.array([False, False, True]))) == 0.0


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_every_rank_receives_as_many_as_it_sends(
    data: st.DataObject, layers: int, ranks: int, per_rank: int
) -> None:
    """So that received experts alone say what a rank transfers: the way back receives the same."""
    old_LE, new_LE = (data.draw(placements(layers, ranks * per_rank)) for _ in range(2))
    there, back = Moves.between(old_LE, new_LE, ranks), Moves.between(new_LE, old_LE, ranks)
    assert np.array_equal(there.received_LR, back.received_LR)
    assert not Moves.between(old_LE, old_LE, ranks).received_LR.any()
    changed_L = (old_LE // per_rank != new_LE // per_rank).sum(axis=1)
    assert np.array_equal(there.experts_L, changed_L)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bytes_per_expert": 0}, "bytes_per_expert = 0: expected a whole number of at least 1"),
        (
            {"bytes_per_expert": 1.5},
            "bytes_per_expert = 1.5: expected a whole number of at least 1",
        ),
        (
            {"bytes_per_second": 0.0},
            "bytes_per_second = 0.0: expected a number in 1e-15..1e+15",
        ),
        (
            {"seconds_per_cost_unit": float("nan")},
            "seconds_per_cost_unit = nan: expected a number in 1e-15..1e+15",
        ),
        (
            {"fixed_seconds": -1.0},
            "fixed_seconds = -1.0: expected a number in 0..1e+15",
        ),
        (
            {"exposed_seconds": float("inf")},
            "exposed_seconds = inf: expected a number in 0..1e+15",
        ),
    ],
)
def test_costs_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        MigrationCost(**(COST | fields))
    assert str(error.value) == message


def test_sizes_of_an_expert_that_are_refused() -> None:
    with pytest.raises(InputError) as error:
        expert_state_bytes(2048, 0)
    assert str(error.value) == "ffn = 0: expected a whole number of at least 1"
    with pytest.raises(InputError) as error:
        expert_state_bytes(2048, 768, optimizer_bytes=-1)
    assert str(error.value) == "optimizer_bytes = -1: expected a whole number of at least 0"
