"""Faults before the agreement: `python fault_ranks.py "KIND COUNT" WORLD FOLDER`.

A fault is drawn from a seed that all ranks share, so that each knows which of them is to fail, how,
and at which transfer, tensor and point.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experts import LAYERS, names_of, state_of, wrong_rows
from forked import main, run
from numpy.typing import NDArray

from routepack.state import staging, transfer
from routepack.state.agreement import MigrationError
from routepack.state.moves import Migration, Transfer
from routepack.state.rounds import plan_migration
from routepack.state.tensors import ExpertState, checksum

EXPERTS = 8
KINDS = ("exception", "corrupted", "checksum", "canary", "no room")
KIND, COUNT = sys.argv[1].split()
KILLED_AT = ("before staging", "while staging", "before receiving", "before agreeing")


@dataclass(frozen=True)
class Fault:
    """What goes wrong, at one tensor of one transfer."""

    kind: str
    transfer: Transfer
    name: str
    new_LE: NDArray[np.int32]
    migration: Migration

    @property
    def victim(self) -> int:
        """The rank that it goes wrong on."""
        at_target = ("checksum", "no room")
        return self.transfer.target if self.kind in at_target else self.transfer.source


def fault_of(rng: np.random.Generator, kind: str, placement_LE: Any, world: int) -> Fault:
    """Some fault of the first batch of a random migration."""
    new_LE = np.array([rng.permutation(EXPERTS) for _ in range(LAYERS)], np.int32)
    migration = plan_migration(placement_LE, new_LE, world)
    transfers = list(migration.batches[0].transfers)
    chosen = transfers[rng.integers(len(transfers))]
    name = sorted(names_of(chosen.layer))[rng.integers(len(names_of(chosen.layer)))]
    return Fault(kind, chosen, name, new_LE, migration)


class InjectedError(RuntimeError):
    """What a fault raises."""


def inject(fault: Fault, state: ExpertState, patches: dict[str, Any]) -> None:
    """Prepare the fault on its victim; `patches` is what is to be undone."""
    chosen, name = fault.transfer, fault.name
    tensor = next(t for t in state.layers[chosen.layer] if t.name == name)
    slot = state.local(chosen.source_slot)
    real_buffers, real_difference = staging.buffers, staging.difference
    if fault.kind == "exception":

        def failing(row: torch.Tensor) -> torch.Tensor:
            if row is tensor.rows[slot]:
                raise InjectedError("a bug")
            return checksum(row)

        patches[staging, "checksum"] = failing
    elif fault.kind == "corrupted":  # on its way, after its checksum

        def corrupting(state: ExpertState, step: Transfer) -> torch.Tensor:
            header = staging_header(state, step)
            if step == chosen:
                row = tensor.rows[slot]
                kept = row.clone()
                patches["restore"] = lambda: row.copy_(kept)
                row[0] ^= 1
            return header

        staging_header = staging.header
        patches[transfer, "header"] = corrupting
    elif fault.kind == "checksum":  # in the buffer of the receiver

        def spoiling(state: ExpertState, arrival: Any) -> str | None:
            if arrival.transfer == chosen:
                k = [t.name for t in state.layers[chosen.layer]].index(name)
                arrival.rows[k][-1] ^= 128
            return real_difference(state, arrival)

        patches[transfer, "difference"] = spoiling
    elif fault.kind == "canary":
        kept_id = int(state.ids_LS[chosen.layer, slot])
        state.ids_LS[chosen.layer, slot] = EXPERTS + 1

        def put_back() -> None:
            state.ids_LS[chosen.layer, slot] = kept_id

        patches["restore"] = put_back
    else:
        assert fault.kind == "no room"

        def full(*_: Any, **__: Any) -> torch.Tensor:
            raise RuntimeError("out of memory")

        class Torch:
            """torch, without memory to give."""

            empty = staticmethod(full)

            def __getattr__(self, name: str) -> Any:
                return getattr(torch, name)

        def without_room(state: ExpertState, batch: Any) -> Any:
            staging.torch = Torch()
            try:
                return real_buffers(state, batch)
            finally:
                staging.torch = torch

        patches[transfer, "buffers"] = without_room


def exceptions(rank: int, world: int) -> dict[str, Any]:
    """Faults that all ranks survive, one after another, and a migration that works after each
    tenth."""
    rng = np.random.default_rng(17)
    identity_LE = np.tile(np.arange(EXPERTS, dtype=np.int32), (LAYERS, 1))
    state, layers = state_of(identity_LE, world, rank)
    found: list[dict[str, Any]] = []
    for k in range(int(COUNT)):
        held_LE = state.placement_LE
        fault = fault_of(rng, KINDS[k % len(KINDS)], held_LE, world)
        patches: dict[Any, Any] = {}
        kept: list[tuple[Any, str, Any]] = []
        if rank == fault.victim:
            inject(fault, state, patches)
            for where, value in list(patches.items()):
                if where != "restore":
                    kept.append((*where, getattr(*where)))
                    setattr(*where, value)
        try:
            transfer.migrate(state, fault.new_LE, timeout_seconds=30)
            message = "nothing was raised"
        except MigrationError as error:
            message = str(error)
        for module, name, value in kept:
            setattr(module, name, value)
        if "restore" in patches:
            patches["restore"]()
        chosen = fault.transfer
        found.append(
            {
                "kind": fault.kind,
                "message": message,
                "layer": chosen.layer,
                "expert": chosen.expert,
                "name": fault.name,
                "whole": bool(np.array_equal(state.placement_LE, held_LE))
                and not wrong_rows(layers, held_LE, world, rank),
            }
        )
        if k % 10 == 9:
            transfer.migrate(state, fault.new_LE, timeout_seconds=30)
            assert not wrong_rows(layers, fault.new_LE, world, rank)
    return {"faults": found}


def die() -> None:
    """As when the machine goes."""
    os.kill(os.getpid(), signal.SIGKILL)


def survivor(rank: int, world: int, *, seed: int) -> dict[str, Any]:
    """A migration in which a rank is killed."""
    rng = np.random.default_rng(seed)
    identity_LE = np.tile(np.arange(EXPERTS, dtype=np.int32), (LAYERS, 1))
    fault = fault_of(rng, "killed", identity_LE, world)
    point = KILLED_AT[seed % len(KILLED_AT)]
    state, layers = state_of(identity_LE, world, rank)
    if rank == fault.victim:
        real_header, real_receive = transfer.header, transfer.Handle._receive

        def dying(state: ExpertState, step: Transfer) -> torch.Tensor:
            if step == fault.transfer:
                die()
            return real_header(state, step)

        def dying_after(handle: transfer.Handle) -> None:
            real_receive(handle)
            die()

        if point == "while staging":
            transfer.header = dying
        elif point == "before agreeing":
            transfer.Handle._receive = dying_after
    began = time.monotonic()
    try:
        if rank == fault.victim and point == "before staging":
            die()
        handle = transfer.start(state, fault.new_LE, timeout_seconds=10)
        if rank == fault.victim and point == "before receiving":
            die()
        handle.wait()
        message = "nothing was raised"
    except MigrationError as error:
        message = str(error)
    whole = np.array_equal(state.placement_LE, identity_LE)
    return {
        "message": message,
        "point": point,
        "whole": bool(whole) and not wrong_rows(layers, identity_LE, world, rank),
        "seconds": time.monotonic() - began,
    }


if __name__ == "__main__":
    if KIND == "killed":
        size, folder = int(sys.argv[2]), Path(sys.argv[3])
        jobs = [
            run(partial(survivor, seed=seed), size, folder / f"job{seed}", killed=1)
            for seed in range(int(COUNT))
        ]
        for rank in range(size):
            (folder / f"{rank}.json").write_text(json.dumps({"jobs": jobs}))
    else:
        main({sys.argv[1]: exceptions})
