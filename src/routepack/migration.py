"""What it costs to move experts: bytes of each layer, and seconds of one migration.

A migration happens between two optimizer steps (design section 5). Layers go one after another
through a bounded staging buffer, so the seconds of layers add up; inside a layer all ranks send and
receive at once, and the busiest one is waited for. Every rank owns E/R experts of a layer before
and after, so it receives as many as it sends: one count says both.

Shapes: L MoE layers, E experts per layer, R EP ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError


def expert_state_bytes(
    hidden: int,
    ffn: int,
    *,
    matrices: int = 3,
    weight_bytes: int = 2,
    optimizer_bytes: int = 12,
    optimizer_shards: int = 1,
    etp: int = 1,
) -> int:
    """Bytes that one GPU sends when one expert of one layer leaves it.

        matrices * hidden * ffn * (weight_bytes + optimizer_bytes / optimizer_shards) / etp

    hidden, ffn       sizes of the expert's matrices (ffn: the expert's own intermediate size)
    matrices          3 for a gated MLP (gate, up, down), 2 without a gate
    weight_bytes      of a parameter as it is trained: 2 for bf16
    optimizer_bytes   of its optimizer state: 4 for the fp32 parameter and 8 for Adam's two moments
    optimizer_shards  ranks that this state is split over: EDP with a distributed optimizer
    etp               expert tensor parallel ranks that the expert is split over

    Biases and scales of a quantisation are left out; gradients are spent when a step ends. Rounded
    up to a whole byte. Raises InputError.
    """
    sizes = dict(hidden=hidden, ffn=ffn, matrices=matrices, weight_bytes=weight_bytes)
    sizes |= dict(optimizer_shards=optimizer_shards, etp=etp)
    for name, value in sizes.items():
        require_whole(name, value, 1)
    require_whole("optimizer_bytes", optimizer_bytes, 0)
    parameters = matrices * hidden * ffn
    split_bytes = parameters * (weight_bytes * optimizer_shards + optimizer_bytes)
    return -(-split_bytes // (optimizer_shards * etp))


LARGEST = 1e15  # and its inverse: times and rates stay finite, whatever is multiplied
MOST_BYTES = 2**40  # a terabyte for one expert; sums over a model stay in 64 bits


@dataclass(frozen=True)
class MigrationCost:
    """What a migration costs, and how the cost of a plan compares to it.

    bytes_per_expert       state of one expert at one layer on one GPU (`expert_state_bytes`)
    bytes_per_second       what a GPU sends, while it receives as much
    seconds_per_cost_unit  seconds of a measured step over its predicted cost (the slowest shard)
    fixed_seconds          of every step that moves any expert: checks, agreement, a barrier
    exposed_seconds        planning that a step waits for before it moves any expert: what the
                           search for a placement takes and no other work hides

    Raises InputError.
    """

    bytes_per_expert: int
    bytes_per_second: float
    seconds_per_cost_unit: float
    fixed_seconds: float = 0.0
    exposed_seconds: float = 0.0

    def __post_init__(self) -> None:
        require_whole("bytes_per_expert", self.bytes_per_expert, 1)
        if self.bytes_per_expert > MOST_BYTES:
            raise InputError.at("bytes_per_expert", self.bytes_per_expert, f"at most {MOST_BYTES}")
        for name in ("bytes_per_second", "seconds_per_cost_unit"):
            value = getattr(self, name)
            if not 0 < value <= LARGEST or value < 1 / LARGEST:
                raise InputError.at(name, value, f"a number in {1 / LARGEST:g}..{LARGEST:g}")
        for name in ("fixed_seconds", "exposed_seconds"):
            value = getattr(self, name)
            if not 0 <= value <= LARGEST:
                raise InputError.at(name, value, f"a number in 0..{LARGEST:g}")

    def bytes_L(self, moves: Moves) -> NDArray[np.int64]:
        """Bytes that the ranks of one EP group receive for each layer, all of them together."""
        return self.bytes_per_expert * moves.experts_L

    def seconds_L(self, moves: Moves) -> NDArray[np.float64]:
        """Seconds of each layer, the busiest rank's."""
        busiest_L = moves.received_LR.max(axis=1)
        return np.asarray(busiest_L * self.bytes_per_expert / self.bytes_per_second)

    def seconds(self, moves: Moves) -> float:
        """Seconds of the whole migration; 0 where nothing moves. Exposed planning is apart."""
        if not moves.received_LR.any():
            return 0.0
        return self.fixed_seconds + math.fsum(self.seconds_L(moves).tolist())


@dataclass(frozen=True, eq=False)
class Moves:
    """Experts that each EP rank receives at each layer, and as many that it sends: [L, R]."""

    received_LR: NDArray[np.int64]

    @classmethod
    def between(cls, current_LE: NDArray[np.int32], new_LE: NDArray[np.int32], ranks: int) -> Moves:
        """From one placement [L, E] (slots) to another. A new slot on the same rank is no move."""
        layers, experts = current_LE.shape
        rank_LE = new_LE // (experts // ranks)
        comes_LE = rank_LE != current_LE // (experts // ranks)
        received_LR = np.zeros((layers, ranks), np.int64)
        np.add.at(received_LR, (np.nonzero(comes_LE)[0], rank_LE[comes_LE]), 1)
        return cls(received_LR)

    @property
    def experts_L(self) -> NDArray[np.int64]:
        """Experts that change rank, by layer."""
        return np.asarray(self.received_LR.sum(axis=1))

    def only(self, moved_L: NDArray[np.bool_]) -> Moves:
        """These moves at the layers `moved_L`, none elsewhere."""
        return Moves(self.received_LR * moved_L[:, None])


def require_whole(name: str, value: int, low: int) -> None:
    """Raise InputError unless `value` is a whole number of at least `low`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < low:
        raise InputError.at(name, value, f"a whole number of at least {low}")
