"""What one rank does with a batch: buffers, ids and checksums, and copies into its own tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from routepack.state.agreement import MigrationError, one_line
from routepack.state.moves import Batch, Migration, Transfer
from routepack.state.tensors import ExpertState, Tensor, checksum


@dataclass(frozen=True)
class Arrival:
    """What one transfer brings to this rank."""

    transfer: Transfer
    header: torch.Tensor
    """int64: layer, expert, then a checksum for each tensor."""
    rows: tuple[torch.Tensor, ...]
    """Staged bytes, in the order of the layer's tensors."""


def buffers(state: ExpertState, batch: Batch) -> list[Arrival]:
    """Staging for all that the batch brings, one piece of memory for each device."""
    coming = [t for t in batch.transfers if t.target == state.rank]
    pieces: list[tuple[Transfer, Tensor]] = []
    pieces += ((t, tensor) for t in coming for tensor in state.layers[t.layer])
    sizes: dict[torch.device, int] = {}
    for _, tensor in pieces:
        sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor.row_bytes
    free = {}
    for device, size in sizes.items():
        try:
            free[device] = _memory(state, device, size)
        except RuntimeError as error:  # out of memory, on any kind of device
            transfer, tensor = next(piece for piece in pieces if piece[1].device == device)
            what = f"{_named(transfer)}, tensor {tensor.name}: no room on {device}"
            what += f" to stage {size} bytes of {len(coming)} experts"
            raise MigrationError(f"{what} ({one_line(error)})") from error
    # Rows of whole words first, so that all are aligned and no byte is lost between them.
    rows: dict[tuple[Transfer, str], torch.Tensor] = {}
    for transfer, tensor in sorted(pieces, key=lambda piece: -piece[1].word_bytes):
        buffer = free[tensor.device]
        rows[transfer, tensor.name] = buffer[: tensor.row_bytes]
        free[tensor.device] = buffer[tensor.row_bytes :]
    arrivals = []
    for transfer in coming:
        tensors = state.layers[transfer.layer]
        header = torch.empty(2 + len(tensors), dtype=torch.int64, device=tensors[0].device)
        mine = tuple(rows[transfer, tensor.name] for tensor in tensors)
        arrivals.append(Arrival(transfer, header, mine))
    return arrivals


def _memory(state: ExpertState, device: torch.device, size: int) -> torch.Tensor:
    kept = state.staging.get(device)
    if kept is None or kept.numel() < size:
        state.staging.pop(device, None)  # before there are two of them
        kept = torch.empty(size, dtype=torch.uint8, device=device)
        if state.keep_staging:
            state.staging[device] = kept
    return kept[:size]


def header(state: ExpertState, transfer: Transfer) -> torch.Tensor:
    """What travels ahead of an expert, made of what is in its slot."""
    tensors = state.layers[transfer.layer]
    device, slot = tensors[0].device, state.local(transfer.source_slot)
    ids = torch.tensor([transfer.layer, int(state.ids_LS[transfer.layer, slot])])
    parts = [ids.to(device)]
    for tensor in tensors:
        try:
            parts.append(checksum(tensor.rows[slot]).to(device).view(1))
        except Exception as error:
            what = f"{_named(transfer)}, tensor {tensor.name}: cannot be read"
            raise MigrationError(f"{what} ({one_line(error)})") from error
    return torch.cat(parts)


def difference(state: ExpertState, arrival: Arrival) -> str | None:
    """What is not as its sender said, if anything: layer, expert and tensor."""
    transfer = arrival.transfer
    at = f"{_named(transfer)}, tensor"
    layer, expert, *sums = arrival.header.tolist()
    if (layer, expert) != (transfer.layer, transfer.expert):
        came = f"layer {layer}, expert {expert} came"
        return f"{at} ids: {came} from EP rank {transfer.source}"
    tensors = state.layers[transfer.layer]
    for tensor, row, expected in zip(tensors, arrival.rows, sums, strict=True):
        if int(checksum(row)) != expected:
            return f"{at} {tensor.name}: the checksum differs, from EP rank {transfer.source}"
    return None


def commit(state: ExpertState, batch: Batch, arrivals: Sequence[Arrival]) -> None:
    """Local copies, into the trainer's own tensors."""
    for arrival in arrivals:
        transfer = arrival.transfer
        slot = state.local(transfer.target_slot)
        for tensor, row in zip(state.layers[transfer.layer], arrival.rows, strict=True):
            tensor.rows[slot].copy_(row)
        state.ids_LS[transfer.layer, slot] = transfer.expert
    state.placement_LE = batch.after_LE


def rename(state: ExpertState, migration: Migration) -> None:
    """Slots that change inside this rank, one row of one tensor aside at a time."""
    mine = [r for r in migration.renames if r.rank == state.rank]
    for layer in sorted({r.layer for r in mine}):
        source_of = {
            state.local(r.target_slot): state.local(r.source_slot) for r in mine if r.layer == layer
        }
        for tensor in state.layers[layer]:
            _rotate(tensor.rows, source_of)
        ids_S = state.ids_LS[layer].copy()
        for slot, source in source_of.items():
            state.ids_LS[layer, slot] = ids_S[source]
    state.placement_LE = migration.new_LE
    for layer, ids_S in enumerate(state.ids_LS):
        assert np.array_equal(ids_S, state.experts_S(layer))


def _named(transfer: Transfer) -> str:
    return f"layer {transfer.layer}, expert {transfer.expert}"


def _rotate(rows: Sequence[torch.Tensor], source_of: dict[int, int]) -> None:
    """Every row of `source_of` takes what its source holds, cycle by cycle."""
    left = set(source_of)
    while left:
        first = slot = min(left)
        aside = rows[first].clone()
        while (source := source_of[slot]) != first:
            rows[slot].copy_(rows[source])
            left.remove(slot)
            slot = source
        rows[slot].copy_(aside)
        left.remove(slot)
