"""Ranks whose experts move: `python transfer_ranks.py CASE WORLD FOLDER`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from experts import LAYERS, rows_of, state_of, wrong_rows
from forked import main
from numpy.typing import NDArray

from routepack.state.rounds import plan_migration
from routepack.state.tensors import ExpertState
from routepack.state.transfer import MigrationError, migrate, start

EXPERTS = 8


def identity() -> NDArray[np.int32]:
    """Expert e in slot e."""
    return np.tile(np.arange(EXPERTS, dtype=np.int32), (LAYERS, 1))


def shuffled(rng: np.random.Generator) -> NDArray[np.int32]:
    """Any placement; one layer in four stays at identity."""
    layers = [rng.permutation(EXPERTS) for _ in range(LAYERS)]
    if rng.random() < 0.75:
        layers[rng.integers(LAYERS)] = np.arange(EXPERTS)
    return np.array(layers, np.int32)


def moves(rank: int, world: int) -> dict[str, Any]:
    """Twenty placements and back, with and without a tight staging buffer."""
    rng = np.random.default_rng(7)
    state, layers = state_of(identity(), world, rank)
    addresses = [row.data_ptr() for *_, row in rows_of(layers)]
    wrong, reports = [], []
    for k in range(21):
        new_LE = shuffled(rng) if k < 20 else identity()
        limit = [None, max(state.bytes_L), 3 * max(state.bytes_L)][k % 3]
        migration = plan_migration(
            state.placement_LE, new_LE, world, bytes_per_expert=state.bytes_L, staging_bytes=limit
        )
        handle = start(state, new_LE, staging_bytes=limit, timeout_seconds=30)
        if k % 2:  # the group is free for others while experts are on their way
            dist.all_reduce(torch.ones(1))
        wrong += wrong_rows(layers, migration.current_LE, world, rank)  # unchanged until wait
        report = handle.wait()
        assert handle.wait() is report
        assert np.array_equal(state.placement_LE, new_LE)
        wrong += wrong_rows(layers, new_LE, world, rank)
        staged = max((int(migration.staged_bytes_R(b)[rank]) for b in migration.batches), default=0)
        reports.append(
            {
                "sent": report.sent_bytes,
                "received": report.received_bytes,
                "planned": int(migration.received_bytes_R[rank]),
                "staged": report.staged_bytes,
                "planned_staged": staged,
                "limit": limit,
                "batches": report.batches,
                "planned_batches": len(migration.batches),
            }
        )
    assert [row.data_ptr() for *_, row in rows_of(layers)] == addresses
    return {"wrong": wrong, "reports": reports}


def refusals(rank: int, world: int) -> dict[str, Any]:
    """One rank with other arguments: no rank moves anything, and the next migration is fine."""
    state, layers = state_of(identity(), world, rank)
    there = np.roll(identity(), 3, axis=1)
    odd = rank == 1
    without = [{name: rows for name, rows in t.items() if name != "bias"} for t in layers]
    fewer = ExpertState(without, identity(), world, rank)
    attempts: dict[str, Any] = {
        "placement": lambda: start(state, np.roll(there, 1, axis=1) if odd else there),
        "nothing to do": lambda: start(state, identity() if odd else there),
        "no bijection": lambda: start(state, there * 0 if odd else there),
        "staging": lambda: start(state, there, staging_bytes=10**6 + odd),
        "too small": lambda: start(state, there, staging_bytes=9),
        "layout": lambda: start(fewer if odd else state, there),
    }
    found: dict[str, Any] = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except MigrationError as error:
            found[name] = str(error)
        assert np.array_equal(state.placement_LE, identity())
        assert wrong_rows(layers, identity(), world, rank) == []
    migrate(state, there, timeout_seconds=30)
    assert wrong_rows(layers, there, world, rank) == []
    return found


def shards(rank: int, world: int) -> dict[str, Any]:
    """Two EP groups of two: what one of them cannot do, the other does not do either."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group, ep_rank = groups[rank // 2], rank % 2
    state, layers = state_of(identity(), 2, ep_rank)
    there = np.roll(identity(), 3, axis=1)
    if rank == 3:
        state.ids_LS[0, 2] = 7  # a canary that does not fit
    handle = start(state, there, group, all_ranks=dist.group.WORLD, timeout_seconds=30)
    messages = []
    for _ in range(2):
        try:
            handle.wait()
        except MigrationError as error:
            messages.append(str(error))
    assert wrong_rows(layers, identity(), 2, ep_rank) == []
    if rank == 3:
        state.ids_LS[0, 2] = 6
    migrate(state, there, group, all_ranks=dist.group.WORLD, timeout_seconds=30)
    assert wrong_rows(layers, there, 2, ep_rank) == []
    return {"messages": messages}


if __name__ == "__main__":
    main({"moves": moves, "refusals": refusals, "shards": shards})
