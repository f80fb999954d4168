"""Rounds of transfers, carried out on arrays: what arrives, and what waits where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.placement import identity
from routepack.state.moves import Migration
from routepack.state.nearest import nearest
from routepack.state.rounds import plan_migration
from strategies import lowest_moves, placements


def carried_out(migration: Migration) -> tuple[NDArray[np.int64], int]:
    """[L, E] the expert in each slot after the rounds, and the most bytes that a rank staged.

    As on real ranks: a batch is received into staging while all slots keep what they hold, and only
    then copied into the slots.
    """
    layers, experts = migration.current_LE.shape
    slots_LE = np.argsort(migration.current_LE, axis=1)
    most = 0
    for batch in migration.batches:
        staged: dict[tuple[int, int], int] = {}
        held_R = np.zeros(migration.ranks, np.int64)
        for transfers in batch.rounds:
            for transfer in transfers:
                staged[transfer.layer, transfer.target_slot] = slots_LE[
                    transfer.layer, transfer.source_slot
                ]
                held_R[transfer.target] += migration.bytes_L[transfer.layer]
        assert np.array_equal(held_R, migration.staged_bytes_R(batch))
        most = max(most, int(held_R.max()))
        for (layer, slot), expert in staged.items():
            slots_LE[layer, slot] = expert
        assert np.array_equal(np.sort(slots_LE), np.tile(np.arange(experts), (layers, 1)))
        assert np.array_equal(np.argsort(slots_LE), batch.after_LE)
    before_LE = slots_LE.copy()
    for rename in migration.renames:
        assert before_LE[rename.layer, rename.source_slot] == rename.expert
        slots_LE[rename.layer, rename.target_slot] = rename.expert
    return slots_LE, most


@st.composite
def pairs(draw: st.DrawFn) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:
    """Two placements of the same experts, and the ranks that hold them."""
    layers, ranks, per_rank = (draw(st.integers(1, k)) for k in (3, 5, 4))
    old_LE, new_LE = (draw(placements(layers, ranks * per_rank)) for _ in range(2))
    return old_LE, new_LE, ranks


@given(st.data(), pairs())
def test_the_rounds_give_the_new_placement(data: st.DataObject, pair: Any) -> None:
    """Exactly, whatever the staging buffer holds, and it never holds more than it may; an expert
    travels once if it changes rank, and never otherwise."""
    old_LE, new_LE, ranks = pair
    layers, experts = old_LE.shape
    bytes_L = data.draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    staging_bytes = data.draw(st.none() | st.integers(max(bytes_L), 9 * experts * layers))
    migration = plan_migration(
        old_LE, new_LE, ranks, bytes_per_expert=bytes_L, staging_bytes=staging_bytes
    )
    slots_LE, most = carried_out(migration)
    assert np.array_equal(slots_LE, np.argsort(new_LE, axis=1))
    assert staging_bytes is None or most <= staging_bytes
    travelled = [(t.layer, t.expert) for batch in migration.batches for t in batch.transfers]
    changes_LE = old_LE // (experts // ranks) != new_LE // (experts // ranks)
    assert sorted(travelled) == [tuple(at) for at in np.argwhere(changes_LE).tolist()]
    link_RR = migration.link_bytes_RR
    assert np.array_equal(link_RR.sum(axis=0), migration.received_bytes_R)
    assert np.array_equal(link_RR.sum(axis=1), migration.received_bytes_R)
    assert not np.diag(link_RR).any()


@given(pairs(), st.none() | st.integers(1, 4))
def test_pairs_of_a_round_are_disjoint(pair: Any, staging_bytes: int | None) -> None:
    """A rank sends and receives at most once a round, and a batch has no more rounds than its
    busiest rank has transfers."""
    old_LE, new_LE, ranks = pair
    migration = plan_migration(old_LE, new_LE, ranks, staging_bytes=staging_bytes)
    for batch in migration.batches:
        for transfers in batch.rounds:
            assert len({t.source for t in transfers}) == len(transfers)
            assert len({t.target for t in transfers}) == len(transfers)
        assert len(batch.rounds) == migration.staged_bytes_R(batch).max()


def test_a_migration_by_hand() -> None:
    """Three ranks with two experts each. Experts 1, 2 and 4 go round (slots 1 -> 2 -> 4 -> 1) and
    5 stays, 0 stays; 3 stays. One round, and nothing is renamed."""
    new = [[0, 2, 4, 3, 1, 5]]
    migration = plan_migration(identity(1, 6), new, 3, bytes_per_expert=10)
    [batch] = migration.batches
    [transfers] = batch.rounds
    assert [(t.expert, t.source, t.target, t.target_slot) for t in transfers] == [
        (1, 0, 1, 2),
        (2, 1, 2, 4),
        (4, 2, 0, 1),
    ]
    assert migration.renames == ()
    assert migration.link_bytes_RR.tolist() == [[0, 10, 0], [0, 0, 10], [10, 0, 0]]
    assert migration.across_bytes([0, 0, 1]) == 20
    assert migration.moves.received_LR.tolist() == [[1, 1, 1]]


def test_cycles_are_staged_one_by_one_where_room_is_short() -> None:
    """Two ranks exchange both of their experts. With room for one expert the two exchanges follow
    each other, each committed before the next one is received."""
    whole = plan_migration(identity(1, 4), [[2, 3, 0, 1]], 2, bytes_per_expert=10)
    assert [len(batch.rounds) for batch in whole.batches] == [2]
    tight = plan_migration(identity(1, 4), [[2, 3, 0, 1]], 2, bytes_per_expert=10, staging_bytes=19)
    assert [len(batch.rounds) for batch in tight.batches] == [1, 1]
    assert tight.batches[0].after_LE.tolist() == [[0, 3, 2, 1]]


def test_slots_of_a_rank_are_renamed_without_a_transfer() -> None:
    """Experts 0 and 1 exchange slots of rank 0."""
    migration = plan_migration(identity(1, 4), [[1, 0, 2, 3]], 2)
    assert migration.batches == ()
    assert [(r.expert, r.source_slot, r.target_slot) for r in migration.renames] == [
        (0, 0, 1),
        (1, 1, 0),
    ]


@given(pairs())
def test_interchangeable_ranks_move_least(pair: Any) -> None:
    """The groups of experts are those asked for, no labelling of ranks moves fewer experts, and
    none of those that move as few sends fewer to another node."""
    old_LE, new_LE, ranks = pair
    per_rank = old_LE.shape[1] // ranks
    node_R = [rank // 2 for rank in range(ranks)]
    near_LE = nearest(new_LE, old_LE, ranks, node_R)
    for layer in range(len(old_LE)):
        groups = [
            {frozenset(np.flatnonzero(at[layer] // per_rank == r).tolist()) for r in range(ranks)}
            for at in (new_LE, near_LE)
        ]
        assert groups[0] == groups[1]
        migration = plan_migration(old_LE[layer : layer + 1], near_LE[layer : layer + 1], ranks)
        assert migration.renames == ()
        found = int(migration.received_bytes_R.sum()), migration.across_bytes(node_R)
        assert found == lowest_moves(old_LE[layer], new_LE[layer], node_R)


@pytest.mark.parametrize(
    ("arguments", "fields", "message"),
    [
        (([0, 1], [[0, 1]], 2), {}, "current.shape = (2,): expected two axes, layers and experts"),
        (([[0, 1]], [[0, 1, 2]], 2), {}, "new.shape = (1, 3): expected (1, 2)"),
        (
            ([[0, 1]], [[1, 1]], 2),
            {},
            "new[0, 1] = 1: expected a free slot, expert 0 has it",
        ),
        (([[0, 1]], [[1, 0]], 0), {}, "ranks = 0: expected a whole number of at least 1"),
        (([[0, 1]], [[1, 0]], 3), {}, "ranks = 3: expected a divisor of the 2 experts"),
        (
            ([[0, 1]], [[1, 0]], 2),
            {"bytes_per_expert": 10, "staging_bytes": 9},
            "staging_bytes = 9: expected at least 10 bytes, one expert of layer 0",
        ),
        (
            ([[0, 1]], [[1, 0]], 2),
            {"bytes_per_expert": [1, 2]},
            "len(bytes_per_expert) = 2: expected 1, one a layer",
        ),
        (
            ([[0, 1]], [[1, 0]], 2),
            {"bytes_per_expert": [0]},
            "bytes_per_expert[0] = 0: expected a whole number of at least 1",
        ),
    ],
)
def test_migrations_that_are_refused(arguments: Any, fields: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        plan_migration(*arguments, **fields)
    assert str(error.value) == message


def test_a_node_map_of_another_size_is_refused() -> None:
    with pytest.raises(InputError) as error:
        nearest([[0, 1]], [[1, 0]], 2, [0])
    assert str(error.value) == "node_of_rank.shape = (1,): expected (2,)"
