"""The tensors that make up the experts of one EP rank, row by row, where they are.

Everything that belongs to an expert moves together: weights, biases, fp32 main parameters, Adam's
moments in any precision, scales, counters. Here they are names with one row for each slot of the
rank; a row is a view into the trainer's own memory, so that addresses never change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from routepack.errors import InputError
from routepack.plan import validate_placement

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
BLOCK_WORDS = 1024
Rows: TypeAlias = "torch.Tensor | Sequence[torch.Tensor]"
"""[E/R, ...], or one tensor for each of the E/R slots; a DTensor stands for its local part."""


@dataclass(frozen=True)
class Tensor:
    """One kind of tensor of a layer's experts; all of its rows are alike."""

    name: str
    rows: tuple[torch.Tensor, ...]
    """A flat view of bytes for each slot of the rank."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of a row, as the trainer sees it."""

    @property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        """Type and shape."""
        return str(self.dtype), self.shape

    @property
    def row_bytes(self) -> int:
        """Of one expert."""
        return int(self.rows[0].numel())

    @property
    def word_bytes(self) -> int:
        """The largest word that a row is a multiple of."""
        return word_bytes(self.row_bytes)

    @property
    def device(self) -> torch.device:
        """Where the rows are, and where what replaces them is staged."""
        return self.rows[0].device


class ExpertState:
    """The experts that one EP rank owns, at every MoE layer, and the placement that says which.

    layers        for each MoE layer the tensors by name, in any order, the same on all ranks
    placement     [L, E] slots now; rank r owns slots r * E/R to (r + 1) * E/R - 1, in this order
    ranks         R, EP ranks of the group
    rank          of this process in it
    keep_staging  keep the staging memory from one migration to the next: where tensors are on the
                  CPU, getting its pages anew can take longer than the transfer

    `placement_LE` is kept up to date by every migration. Tensors may be on any device, each row
    contiguous; a tensor that covers several experts in another way (blockwise scales, a fused
    buffer) is given as a view with an axis for experts. Raises InputError.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, Rows]],
        placement: ArrayLike,
        ranks: int,
        rank: int,
        *,
        keep_staging: bool = False,
    ) -> None:
        shape = np.shape(placement)
        if len(shape) != 2:
            raise InputError.at("placement.shape", shape, "two axes, layers and experts")
        self.placement_LE = validate_placement("placement", placement, len(layers), shape[1])
        if ranks < 1 or shape[1] % ranks:
            raise InputError.at("ranks", ranks, f"a divisor of the {shape[1]} experts")
        if not 0 <= rank < ranks:
            raise InputError.at("rank", rank, f"an EP rank in 0..{ranks - 1}")
        self.ranks, self.rank, self.keep_staging = ranks, rank, keep_staging
        self.staging: dict[torch.device, torch.Tensor] = {}
        self.per_rank: int = shape[1] // ranks
        self.layers = [
            tuple(_tensor(layer, name, tensors[name], self.per_rank) for name in sorted(tensors))
            for layer, tensors in enumerate(layers)
        ]
        for layer, tensors in enumerate(self.layers):
            if not sum(tensor.row_bytes for tensor in tensors):
                raise InputError.at("layers", "no bytes", "tensors of experts", layer)
        expert_LS = np.argsort(self.placement_LE, axis=1)
        self.ids_LS = expert_LS[:, rank * self.per_rank : (rank + 1) * self.per_rank].copy()
        """The expert that came to each slot of this rank: canaries, as they travel with its
        tensors and are not computed from the placement."""

    @property
    def bytes_L(self) -> list[int]:
        """State of one expert, by layer."""
        return [sum(tensor.row_bytes for tensor in tensors) for tensors in self.layers]

    @property
    def layout(self) -> list[list[tuple[str, tuple[str, tuple[int, ...]]]]]:
        """Names, types and shapes: what has to be the same on all ranks."""
        return [[(tensor.name, tensor.kind) for tensor in tensors] for tensors in self.layers]

    def local(self, slot: int) -> int:
        """Position of a slot of this rank among its rows."""
        return slot - self.rank * self.per_rank

    def experts_S(self, layer: int) -> NDArray[np.int64]:
        """The expert in each slot of this rank, by the placement."""
        first = self.rank * self.per_rank
        return np.argsort(self.placement_LE[layer])[first : first + self.per_rank]


def checksum(bytes_: torch.Tensor) -> torch.Tensor:
    """A scalar int64 of a flat row of bytes, on its device; needs no more than a block's sums.

    Sums of blocks of words, each times an odd number of its own, modulo 2^64: one changed bit
    always shows, and so do blocks that changed places.
    """
    width = word_bytes(bytes_.numel())
    if bytes_.data_ptr() % width:
        bytes_ = bytes_.clone()
    words = bytes_.view(WORDS[width])
    blocks = words.numel() // BLOCK_WORDS
    sums = words[: blocks * BLOCK_WORDS].view(blocks, BLOCK_WORDS).sum(dim=1, dtype=torch.int64)
    odd = torch.arange(blocks, device=words.device) * 2 + 3
    return (sums * odd).sum() + words[blocks * BLOCK_WORDS :].sum(dtype=torch.int64)


def word_bytes(size: int) -> int:
    """The largest word that so many bytes are a multiple of."""
    return next(width for width in WORDS if size % width == 0)


def _tensor(layer: int, name: str, rows: Rows, per_rank: int) -> Tensor:
    field = f"layers[{layer}][{name!r}]"
    if isinstance(rows, torch.Tensor):
        whole = _local(rows)
        if whole.dim() == 0 or len(whole) != per_rank:
            expected = f"{per_rank} rows, one for each slot of a rank"
            raise InputError.at(f"{field}.shape", tuple(whole.shape), expected)
        parts = list(whole.unbind(0))
    else:
        if len(rows) != per_rank:
            raise InputError.at(f"len({field})", len(rows), f"{per_rank}, one for each slot")
        parts = [_local(row) for row in rows]
    kinds = [(str(part.dtype), tuple(part.shape)) for part in parts]
    for slot, (part, kind) in enumerate(zip(parts, kinds, strict=True)):
        if kind != kinds[0] or part.device != parts[0].device:
            found = f"{kind[0]} {kind[1]} on {part.device}"
            expected = f"{kinds[0][0]} {kinds[0][1]} on {parts[0].device}, as in slot 0"
            raise InputError.at(field, found, expected, slot)
        if not part.is_contiguous():
            expected = "contiguous memory for each expert"
            raise InputError.at(f"{field}.stride", part.stride(), expected, slot)
    flat = tuple(part.reshape(-1).view(torch.uint8) for part in parts)
    return Tensor(name, flat, parts[0].dtype, kinds[0][1])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this process, without autograd."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
