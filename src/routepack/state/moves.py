"""What a migration is, as data: transfers between ranks, in batches of rounds (numpy only).

Shapes: L MoE layers, E experts per layer, R EP ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routepack.migration import Moves


@dataclass(frozen=True)
class Transfer:
    """One expert of one layer on its way from a rank to another; slots are global (0..E-1)."""

    layer: int
    expert: int
    source: int
    target: int
    source_slot: int
    """Where it is when its batch begins."""
    target_slot: int
    """Where its batch leaves it: a slot that its batch vacates."""


@dataclass(frozen=True)
class Rename:
    """An expert that changes its slot inside a rank, once all batches are committed."""

    layer: int
    expert: int
    rank: int
    source_slot: int
    target_slot: int


@dataclass(frozen=True, eq=False)
class Batch:
    """What is staged, agreed on and committed together."""

    rounds: tuple[tuple[Transfer, ...], ...]
    after_LE: NDArray[np.int32]
    """The placement once it is committed."""

    @property
    def transfers(self) -> Iterable[Transfer]:
        """All of its transfers, in the order of the rounds."""
        return (transfer for transfers in self.rounds for transfer in transfers)


@dataclass(frozen=True, eq=False)
class Migration:
    """From one placement to another, as `plan_migration` planned it."""

    current_LE: NDArray[np.int32]
    new_LE: NDArray[np.int32]
    ranks: int
    bytes_L: NDArray[np.int64]
    """State of one expert, by layer."""
    batches: tuple[Batch, ...]
    renames: tuple[Rename, ...]

    @property
    def moves(self) -> Moves:
        """The experts that each rank receives at each layer, as `MigrationCost` prices them."""
        return Moves.between(self.current_LE, self.new_LE, self.ranks)

    @property
    def received_bytes_R(self) -> NDArray[np.int64]:
        """Bytes of expert state that each rank receives; each sends as many."""
        return np.asarray((self.moves.received_LR * self.bytes_L[:, None]).sum(axis=0))

    @property
    def link_bytes_RR(self) -> NDArray[np.int64]:
        """Bytes from each rank to each other one."""
        link_RR = np.zeros((self.ranks, self.ranks), np.int64)
        for batch in self.batches:
            for transfer in batch.transfers:
                link_RR[transfer.source, transfer.target] += self.bytes_L[transfer.layer]
        return link_RR

    def staged_bytes_R(self, batch: Batch) -> NDArray[np.int64]:
        """What each rank holds in staging when the batch is agreed on."""
        staged_R = np.zeros(self.ranks, np.int64)
        for transfer in batch.transfers:
            staged_R[transfer.target] += self.bytes_L[transfer.layer]
        return staged_R

    def across_bytes(self, node_of_rank: Sequence[int]) -> int:
        """Bytes that leave a node, where rank r is on node `node_of_rank[r]`."""
        node_R = np.asarray(node_of_rank)
        return int(self.link_bytes_RR[node_R[:, None] != node_R[None, :]].sum())
