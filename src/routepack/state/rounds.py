"""The difference of two placements as transfer rounds (numpy only; nothing moves here).

An expert that stays on its rank never travels; the others travel once, straight to the rank that
owns them in the new placement. Three steps:

1. Cycles. Every rank owns E/R experts before and after, so at each layer it sends as many as it
   receives, and the moves fall apart into simple cycles of ranks. Carrying out whole cycles leaves
   a placement: every expert is somewhere, every slot is filled.
2. Batches. A received expert waits in a staging buffer, as its slot is still in use and as nothing
   may be overwritten before all ranks agree. Cycles are taken, layer by layer, until one more would
   not fit in `staging_bytes` on some rank: that is a batch, and it is committed before the next one
   is staged. With room for everything there is one batch, so a failure leaves the old placement.
3. Rounds. In a round a rank sends at most one expert and receives at most one: its link is used in
   both directions, and nobody waits for a receiver that several others send to. Such rounds are an
   edge colouring of a bipartite graph, senders on one side, and a graph of degree d has one with d
   colours (Konig 1916): the busiest rank is never idle.

Slots that are renamed inside a rank are local copies at the very end, and are no transfers.

Shapes: L MoE layers, E experts per layer, R EP ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from routepack.errors import InputError
from routepack.migration import require_whole
from routepack.plan import validate_placement
from routepack.state.moves import Batch, Migration, Rename, Transfer


def plan_migration(
    current: ArrayLike,
    new: ArrayLike,
    ranks: int,
    *,
    bytes_per_expert: int | Sequence[int] = 1,
    staging_bytes: int | None = None,
) -> Migration:
    """Batches and rounds that turn the placement `current` into `new`, both [L, E] slots.

    ranks             EP ranks; rank r owns the slots r * E/R to (r + 1) * E/R - 1
    bytes_per_expert  state of one expert on one rank, one number or one for each layer
    staging_bytes     what a rank may hold of a batch; no limit by default, and so a single batch

    Raises InputError, also where the buffer has no room for a single expert that moves.
    """
    current_LE, new_LE = checked_pair(current, new, ranks)
    layers, experts = current_LE.shape
    bytes_L = _bytes_L(bytes_per_expert, layers)
    limit = int(bytes_L.sum()) * experts
    if staging_bytes is not None:
        require_whole("staging_bytes", staging_bytes, 1)
        limit = staging_bytes
    per_rank = experts // ranks
    moves_L = (new_LE // per_rank != current_LE // per_rank).any(axis=1)
    for layer in np.flatnonzero(moves_L).tolist():
        if bytes_L[layer] > limit:
            expected = f"at least {bytes_L[layer]} bytes, one expert of layer {layer}"
            raise InputError.at("staging_bytes", limit, expected)

    cycles = [c for k in range(layers) for c in _cycles(k, current_LE[k], new_LE[k], ranks)]
    batches: list[Batch] = []
    held_LE = current_LE
    for batch in _batched(cycles, bytes_L, ranks, limit):
        landed, held_LE = _landed(batch, held_LE, new_LE)
        batches.append(Batch(_rounds(landed, ranks), held_LE))
    renames = tuple(
        Rename(layer, expert, slot // per_rank, slot, int(new_LE[layer, expert]))
        for layer, expert in np.argwhere(held_LE != new_LE).tolist()
        for slot in [int(held_LE[layer, expert])]
    )
    return Migration(current_LE, new_LE, ranks, bytes_L, tuple(batches), renames)


def checked_pair(
    current: ArrayLike, new: ArrayLike, ranks: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Two placements of the same experts on `ranks` EP ranks. Raises InputError."""
    shape = np.shape(current)
    if len(shape) != 2:
        raise InputError.at("current.shape", shape, "two axes, layers and experts")
    layers, experts = shape
    current_LE = validate_placement("current", current, layers, experts)
    new_LE = validate_placement("new", new, layers, experts)
    require_whole("ranks", ranks, 1)
    if experts % ranks:
        raise InputError.at("ranks", ranks, f"a divisor of the {experts} experts")
    return current_LE, new_LE


def _bytes_L(bytes_per_expert: int | Sequence[int], layers: int) -> NDArray[np.int64]:
    if isinstance(bytes_per_expert, (int, np.integer)):
        require_whole("bytes_per_expert", bytes_per_expert, 1)
        return np.full(layers, bytes_per_expert, np.int64)
    if len(bytes_per_expert) != layers:
        raise InputError.at(
            "len(bytes_per_expert)", len(bytes_per_expert), f"{layers}, one a layer"
        )
    for layer, value in enumerate(bytes_per_expert):
        require_whole(f"bytes_per_expert[{layer}]", value, 1)
    return np.array(bytes_per_expert, np.int64)


def _cycles(
    layer: int, current_E: NDArray[np.int32], new_E: NDArray[np.int32], ranks: int
) -> list[list[Transfer]]:
    """The moves of a layer as cycles that visit a rank at most once; slots as in the placements."""
    per_rank = len(current_E) // ranks
    leaving: list[list[Transfer]] = [[] for _ in range(ranks)]
    for expert, (old, new) in enumerate(zip(current_E.tolist(), new_E.tolist(), strict=True)):
        source, target = old // per_rank, new // per_rank
        if source != target:
            leaving[source].append(Transfer(layer, expert, source, target, old, new))
    cycles = []
    for start in range(ranks):
        path: list[Transfer] = []
        at = start
        while leaving[at]:
            path.append(leaving[at].pop())
            at = path[-1].target
            before = [step.source for step in path]
            if at in before:  # what leads here from its last visit is a cycle
                cycles.append(path[before.index(at) :])
                path = path[: before.index(at)]
        assert not path  # every rank sends as many as it receives
    return cycles


def _batched(
    cycles: list[list[Transfer]], bytes_L: NDArray[np.int64], ranks: int, limit: int
) -> Iterable[list[Transfer]]:
    """The cycles in order, as many at a time as every rank can stage."""
    batch: list[Transfer] = []
    staged_R = [0] * ranks
    for cycle in cycles:
        size = int(bytes_L[cycle[0].layer])
        if any(staged_R[step.target] + size > limit for step in cycle):
            yield batch
            batch, staged_R = [], [0] * ranks
        batch += cycle
        for step in cycle:
            staged_R[step.target] += size
    if batch:
        yield batch


def _landed(
    batch: list[Transfer], held_LE: NDArray[np.int32], new_LE: NDArray[np.int32]
) -> tuple[list[Transfer], NDArray[np.int32]]:
    """The transfers with the slots they leave and land in, and the placement after them.

    A slot that the batch vacates on a rank goes to the expert that belongs there, if it comes in
    this batch; what is left is filled in ascending order.
    """
    vacated: dict[tuple[int, int], list[int]] = {}
    for step in batch:
        slot = int(held_LE[step.layer, step.expert])
        vacated.setdefault((step.layer, step.source), []).append(slot)
    lands: dict[tuple[int, int], int] = {}
    for step in batch:
        wanted, free = int(new_LE[step.layer, step.expert]), vacated[step.layer, step.target]
        if wanted in free:
            free.remove(wanted)
            lands[step.layer, step.expert] = wanted
    after_LE = held_LE.copy()
    landed = []
    for step in batch:
        if (step.layer, step.expert) not in lands:
            free = vacated[step.layer, step.target]
            lands[step.layer, step.expert] = free.pop(free.index(min(free)))
        slot = lands[step.layer, step.expert]
        left = int(held_LE[step.layer, step.expert])
        after_LE[step.layer, step.expert] = slot
        landed.append(Transfer(step.layer, step.expert, step.source, step.target, left, slot))
    return landed, after_LE


def _rounds(transfers: list[Transfer], ranks: int) -> tuple[tuple[Transfer, ...], ...]:
    """As few rounds as the busiest rank needs, by alternating paths (Konig's edge colouring)."""
    sent_R = np.bincount([step.source for step in transfers], minlength=ranks)
    received_R = np.bincount([step.target for step in transfers], minlength=ranks)
    rounds = int(max(sent_R.max(), received_R.max()))
    # at[side][rank][round]: the transfer of that round, of senders (0) and of receivers (1)
    at: list[list[list[int | None]]] = [[[None] * rounds for _ in range(ranks)] for _ in range(2)]
    round_of = [0] * len(transfers)
    for k, step in enumerate(transfers):
        mine = at[0][step.source].index(None)
        theirs = at[1][step.target].index(None)
        # Exchange the two rounds along the path that `mine` begins at the receiver: it alternates
        # sides, so it cannot end at the sender, where `mine` is free.
        path: list[int] = []
        side, rank, taken = 1, step.target, mine
        while mine != theirs and (edge := at[side][rank][taken]) is not None:
            path.append(edge)
            side = 1 - side
            rank = transfers[edge].target if side else transfers[edge].source
            taken = theirs if taken == mine else mine
        for edge in path:
            at[0][transfers[edge].source][round_of[edge]] = None
            at[1][transfers[edge].target][round_of[edge]] = None
        for edge in path:
            round_of[edge] = theirs if round_of[edge] == mine else mine
        for edge in [*path, k]:
            if edge == k:
                round_of[k] = mine
            at[0][transfers[edge].source][round_of[edge]] = edge
            at[1][transfers[edge].target][round_of[edge]] = edge
    grouped: list[list[Transfer]] = [[] for _ in range(rounds)]
    for k, step in enumerate(transfers):
        grouped[round_of[k]].append(step)
    return tuple(tuple(sorted(group, key=lambda step: step.source)) for group in grouped)
