"""The norm of all gradients, with experts summed in logical order whatever the placement.

Clipping multiplies every gradient by one number. Summed rank by rank, this number depends in its
last bits on which rank owns which expert; summed by expert, it does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray


def logical_square_norm(
    gradients: Iterable[tuple[int, torch.Tensor]], placement_LE: NDArray[Any], group: Any = None
) -> float:
    """The sum of squares of all experts' gradients; a collective of the EP group.

    gradients     layer and [E/R, ...] gradient in the order of slots, the same sequence of layers
                  on all ranks; already reduced over EDP
    placement_LE  [L, E] slots

    Each expert is summed on its own (float64), then all of them exactly (`math.fsum`), so that the
    result has the same bits at any placement.
    """
    layers, sums = [], []
    for layer, gradient in gradients:
        layers.append(layer)
        rows = gradient.detach().reshape(len(gradient), -1).double()
        sums += [row.square().sum() for row in rows]
    if not layers:
        return 0.0
    own = torch.stack(sums).view(len(layers), -1)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    slots_NS = torch.cat(parts, dim=1).cpu().numpy()
    terms = [slots_S[placement_LE[k]] for k, slots_S in zip(layers, slots_NS, strict=True)]
    return math.fsum(value for terms_E in terms for value in terms_E.tolist())
