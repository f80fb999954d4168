"""The map between router and dispatcher: the router chooses experts, the dispatcher sees slots.

Everything of the router stays logical: its weight and bias, selection (also within groups), the
auxiliary loss, replayed ids, statistics. What the dispatcher takes is translated just before it:
ids [T, K] by `slots`, or columns of probabilities and of a routing map [T, E] by `by_slot`.

Shapes: T tokens, L MoE layers, E experts, as many slots S, K experts per token.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike

from routepack.errors import InputError
from routepack.plan import validate_placement


class DispatchMap:
    """Where each expert is, at every layer, on the device of the dispatcher.

    placement  [L, E] slots
    device     of the ids and probabilities that are mapped

    `slot_LE` and `expert_LS` (int64) are written in place by `update`, so that a captured CUDA
    graph follows the placement. Raises InputError.
    """

    def __init__(self, placement: ArrayLike, device: torch.device | str = "cpu") -> None:
        shape = np.shape(placement)
        if len(shape) != 2:
            raise InputError.at("placement.shape", shape, "two axes, layers and experts")
        self.slot_LE = torch.empty(shape, dtype=torch.int64, device=device)
        self.expert_LS = torch.empty_like(self.slot_LE)
        self.update(placement)

    def update(self, placement: ArrayLike) -> None:
        """From now on experts are there. Raises InputError, and then nothing has changed."""
        placement_LE = validate_placement("placement", placement, *self.slot_LE.shape)
        expert_LS = np.argsort(placement_LE, axis=1)
        self.slot_LE.copy_(torch.from_numpy(placement_LE.astype(np.int64)))
        self.expert_LS.copy_(torch.from_numpy(expert_LS))

    def slots(self, layer: int, experts_TK: torch.Tensor) -> torch.Tensor:
        """Slots, in the shape and type of the ids; negative ids (no expert) stay as they are."""
        slots_TK = self.slot_LE[layer][experts_TK.long().clamp(min=0)].to(experts_TK.dtype)
        return torch.where(experts_TK < 0, experts_TK, slots_TK)

    def by_slot(self, layer: int, values_TE: torch.Tensor) -> torch.Tensor:
        """[..., S] columns of experts in the order of slots; gradients come back by expert."""
        return values_TE.index_select(-1, self.expert_LS[layer])

    def by_expert(self, layer: int, values_TS: torch.Tensor) -> torch.Tensor:
        """[..., E] what the dispatcher counted for each slot, in logical order."""
        return values_TS.index_select(-1, self.slot_LE[layer])
