"""Experts whose every bit says which they are, in every form in which a trainer may hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from routepack.state.tensors import ExpertState

LAYERS = 3
FORMS: dict[str, tuple[torch.dtype, tuple[int, ...], bool]] = {
    "w1": (torch.bfloat16, (6, 8), False),
    "w2": (torch.bfloat16, (8, 6), True),
    "bias": (torch.bfloat16, (3,), False),
    "w1.main": (torch.float32, (6, 8), False),
    "w1.exp_avg": (torch.bfloat16, (6, 8), True),
    "w1.exp_avg_sq": (torch.uint8, (48,), False),
    "w1.exp_avg_sq.scales": (torch.float32, (3,), False),
    "w2.step": (torch.float32, (), True),
    "tokens": (torch.int64, (), False),
    "frozen": (torch.bool, (5,), False),
}
"""Type and shape of an expert's tensors, and whether there is one tensor for each expert."""


def row_bytes(layer: int, expert: int, name: str) -> NDArray[np.uint8]:
    """The bytes of a tensor of an expert; booleans must be 0 or 1."""
    dtype, shape, _ = FORMS[name]
    size = torch.empty(shape, dtype=dtype).nbytes
    rng = np.random.default_rng([layer, expert, sorted(FORMS).index(name)])
    return rng.integers(0, 2 if dtype == torch.bool else 256, size, np.uint8)


def names_of(layer: int) -> list[str]:
    """The last layer has fewer tensors."""
    return list(FORMS)[:4] if layer == LAYERS - 1 else list(FORMS)


def state_of(
    placement_LE: NDArray[np.int32], ranks: int, rank: int
) -> tuple[ExpertState, list[dict[str, Any]]]:
    """The experts of a rank, and the tensors that hold them."""
    per_rank = placement_LE.shape[1] // ranks
    layers: list[dict[str, Any]] = []
    for layer in range(LAYERS):
        tensors: dict[str, Any] = {}
        for name in names_of(layer):
            dtype, shape, apart = FORMS[name]
            whole = torch.zeros((per_rank, *shape), dtype=dtype)
            tensors[name] = [row.clone() for row in whole] if apart else whole
        layers.append(tensors)
    experts_LS = np.argsort(placement_LE, axis=1)[:, rank * per_rank : (rank + 1) * per_rank]
    for layer, name, slot, row in rows_of(layers):
        row.copy_(torch.from_numpy(row_bytes(layer, int(experts_LS[layer, slot]), name)))
    return ExpertState(layers, placement_LE, ranks, rank), layers


def rows_of(layers: Sequence[Mapping[str, Any]]) -> list[tuple[int, str, int, torch.Tensor]]:
    """Layer, name, slot and bytes of every row."""
    return [
        (layer, name, slot, row.reshape(-1).view(torch.uint8))
        for layer, tensors in enumerate(layers)
        for name, rows in tensors.items()
        for slot, row in enumerate(rows)
    ]


def wrong_rows(
    layers: Sequence[Mapping[str, Any]], placement_LE: NDArray[np.int32], ranks: int, rank: int
) -> list[str]:
    """Rows that do not hold what the placement says, to the last bit."""
    per_rank = placement_LE.shape[1] // ranks
    experts_LS = np.argsort(placement_LE, axis=1)[:, rank * per_rank : (rank + 1) * per_rank]
    return [
        f"layer {layer}, slot {slot}, {name}"
        for layer, name, slot, row in rows_of(layers)
        if not np.array_equal(row.numpy(), row_bytes(layer, int(experts_LS[layer, slot]), name))
    ]
