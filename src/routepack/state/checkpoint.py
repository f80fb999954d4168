"""Experts in logical order, whatever the placement: for checkpoints, export and comparisons.

    for layer, name, values in logical(state, ep_group):      # [E, ...], expert e in row e
        checkpoint[f"layers.{layer}.{name}"] = values

What is saved so knows nothing of slots: it loads at any placement and any EP size (`restore`), and
in a process without routepack.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from routepack.errors import InputError
from routepack.state.tensors import ExpertState


def logical(state: ExpertState, group: Any = None) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Layer, name and [E, ...] values of every tensor, on every rank; a collective of the EP group.

    One tensor of one layer is gathered at a time, in the order of names, so that is all the extra
    memory, if what is yielded is written out before the next.
    """
    for layer, tensors in enumerate(state.layers):
        slot_E = torch.from_numpy(state.placement_LE[layer].astype("int64"))
        for tensor in tensors:
            own = torch.stack(tensor.rows)
            parts = [torch.empty_like(own) for _ in range(state.ranks)]
            dist.all_gather(parts, own, group=group)
            rows_E = torch.cat(parts)[slot_E.to(own.device)]
            yield layer, tensor.name, rows_E.view(tensor.dtype).view(len(slot_E), *tensor.shape)


def restore(state: ExpertState, values: Mapping[tuple[int, str], torch.Tensor]) -> None:
    """Copy [E, ...] values by (layer, name) into the experts of this rank; not a collective.

    Every tensor of the state must be there, with its type and shape. Raises InputError, and then
    nothing has been written.
    """
    experts = state.placement_LE.shape[1]
    for layer, tensors in enumerate(state.layers):
        for tensor in tensors:
            field = f"values[{layer}, {tensor.name!r}]"
            found = values.get((layer, tensor.name))
            if found is None:
                raise InputError.at(field, "missing", "a tensor of all experts")
            kind = str(found.dtype), tuple(found.shape)
            expected = str(tensor.dtype), (experts, *tensor.shape)
            if kind != expected:
                raise InputError.at(field, f"{kind[0]} {kind[1]}", f"{expected[0]} {expected[1]}")
    for layer, tensors in enumerate(state.layers):
        for tensor in tensors:
            rows_E = values[layer, tensor.name].detach()
            for row, expert in zip(tensor.rows, state.experts_S(layer).tolist(), strict=True):
                row.copy_(rows_E[expert].contiguous().reshape(-1).view(torch.uint8))
