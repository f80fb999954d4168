"""Padding: what a trainer appends to its samples, where it is routed, and where it should be.

A trainer pads every sample so that it can be cut into equal chunks: into 2 * cp of them under
context parallelism, each cut again into tp under sequence parallelism. Padding takes room in a
micro-batch and passes every layer. The loss masks it, but the dispatcher does not: in replayed
routes padding rows carry the experts that the trainer writes there, in several trainers the same K
for every row, and make those the busiest. `padded` is the window as such a trainer sees it;
`spread` finds experts that raise no busiest rank above what is unavoidable.

Sources, multiples: verl 1dda039 `preprocess_packed_seqs` (verl/models/mcore/util.py), NeMo-RL
7ea279a `_get_pack_sequence_parameters_for_megatron` (nemo_rl/models/megatron/data.py), slime
624b824 `slice_with_cp` (slime/backends/megatron_utils/cp_utils.py). Experts of padding rows: the
last (`_pad_routed_experts`), miles 31f1ca9 (miles/utils/replay_base.py); why they matter:
https://github.com/radixark/miles/pull/2697.

Shapes: S samples, L MoE layers, E experts, K experts per token, R EP ranks; B groups of a layout
(row * G + shard), P padding rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from routepack.errors import InputError
from routepack.topology import Topology
from routepack.window import MAX_TOKENS, Window

Int64 = NDArray[np.int64]
FILL = "fill"


@dataclass(frozen=True, eq=False)
class Padding:
    """How a trainer pads each sample, and which experts its padding rows choose.

    multiple          a length is rounded up to a multiple of this (FP8: 16) ...
    context_parallel  ... and of 2 * cp where cp > 1, for the two chunks of every rank ...
    tensor_parallel   ... times tp, where sequence parallelism cuts the chunks again; else leave 1
    experts           None: not routed. [L, K] ids: every padding row chooses these. [P, L, K]: the
                      j-th padding row of a sample chooses experts[j % P]. "fill": not routed while
                      the plan is made, and `spread` afterwards
    fills_missing     the trainer gives tokens without a recorded route the same experts; they are
                      counted on their own, from experts[0]

    Raises InputError for sizes that are no whole number of at least 1 or whose least common
    multiple exceeds 2^31 - 1, ids that are negative, no integers, or repeat within their K, and
    `fills_missing` without experts.
    """

    multiple: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1
    experts: ArrayLike | str | None = None
    fills_missing: bool = False

    def __post_init__(self) -> None:
        for name in ("multiple", "context_parallel", "tensor_parallel"):
            value = getattr(self, name)
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not whole or not 1 <= value <= MAX_TOKENS:
                expected = f"a whole number in 1..{MAX_TOKENS}"
                raise InputError.at(f"padding.{name}", repr(value), expected)
            object.__setattr__(self, name, int(value))
        if self.tokens_multiple > MAX_TOKENS:
            expected = f"at most {MAX_TOKENS}, the least common multiple of what is asked for"
            raise InputError.at("padding.tokens_multiple", self.tokens_multiple, expected)
        if isinstance(self.experts, str):
            if self.experts != FILL:
                raise InputError.at(
                    "padding.experts", repr(self.experts), f"{FILL!r} or expert ids"
                )
        elif self.experts is not None:
            object.__setattr__(self, "experts", _expert_ids(self.experts))
        elif self.fills_missing:
            expected = "False where padding rows have no experts"
            raise InputError.at("padding.fills_missing", self.fills_missing, expected)

    @property
    def tokens_multiple(self) -> int:
        """What every padded length is a multiple of."""
        chunks = 2 * self.context_parallel if self.context_parallel > 1 else 1
        return math.lcm(self.multiple, self.tensor_parallel * chunks)

    def tokens_S(self, window: Window) -> Int64:
        """Tokens appended to each sample."""
        return np.asarray(-window.lengths_S % self.tokens_multiple)

    def rows_S(self, window: Window) -> Int64:
        """Token rows of each sample that get the experts of padding, before it is padded."""
        rows_S = self.tokens_S(window)
        return rows_S + window.missing_S if self.fills_missing else rows_S


@dataclass(frozen=True, eq=False)
class Fill:
    """Experts for padding rows: sample s writes ids[offsets[s]:offsets[s+1]] in its own."""

    ids_PLK: NDArray[np.uint16]
    offsets_S1: Int64


def padded(window: Window, padding: Padding) -> Window:
    """The window with its samples padded; lengths, and what the plan packs and caps, include it.

    Padding rows with stated experts count as demand. Others are `missing`: they have length but
    load no rank, so estimate missing tokens first (`routepack.estimate`) or these would be too.
    The demand is shared with `window` unless it changes; the result is `window` if nothing does.

    Raises InputError for stated experts that the window does not have, or of other layers or K.
    """
    tokens_S = padding.tokens_S(window)
    lengths_S, missing_S = window.lengths_S + tokens_S, window.missing_S + tokens_S
    if padding.experts is None or isinstance(padding.experts, str):
        if not tokens_S.any():
            return window
        return replace(window, lengths_S=lengths_S, missing_S=missing_S)
    experts_PLK = np.asarray(padding.experts)
    _require_experts(experts_PLK, window)
    filled_S = padding.rows_S(window)
    if not filled_S.any():
        return window
    demand_SLE = _wide_enough(window.demand_SLE, lengths_S)
    _add_cycles(demand_SLE, experts_PLK, tokens_S)
    if padding.fills_missing:
        _add_cycles(demand_SLE, experts_PLK, window.missing_S)
    return replace(
        window, lengths_S=lengths_S, missing_S=missing_S - filled_S, demand_SLE=demand_SLE
    )


def groups_of(
    rows: Sequence[Sequence[Sequence[int]]], topology: Topology, samples: int
) -> NDArray[np.int32]:
    """Group of each sample in a plan's rows [M][D][...]: row * G + shard; -1 if in none."""
    group_S = np.full(samples, -1, np.int32)
    for m, row in enumerate(rows):
        for cell, shard in zip(row, topology.shard_of_dp, strict=True):
            group_S[list(cell)] = m * topology.edp + shard
    return group_S


def spread(
    window: Window,
    rows_S: ArrayLike,
    placement_LE: NDArray[np.int32],
    ranks: int,
    group_S: NDArray[np.int32],
) -> Fill:
    """Experts for `rows_S` rows of each sample that raise the busiest ranks least (`spread_rows`).

    window        whose demand is on the ranks already: the padded one, the rows not counted
    placement_LE  slot of each expert, of which a rank has E / `ranks` neighbouring
    group_S       of each sample (`groups_of`); a sample in no group gets no rows
    """
    group_S = np.asarray(group_S)
    rows_S = np.where(group_S < 0, 0, np.asarray(rows_S, np.int64))
    load_BLR = rank_load_BLR(window, placement_LE, ranks, group_S)
    rows_B = sums_by_group(rows_S, group_S)
    ids_PLK = spread_rows(load_BLR, rows_B, placement_LE, window.top_k)
    by_group_P = np.argsort(np.repeat(group_S, rows_S), kind="stable")
    in_order_PLK = np.empty_like(ids_PLK)
    in_order_PLK[by_group_P] = ids_PLK
    return Fill(in_order_PLK, np.concatenate([[0], np.cumsum(rows_S)]))


def spread_rows(
    load_BLR: Int64, rows_B: Int64, placement_LE: NDArray[np.int32], top_k: int
) -> NDArray[np.uint16]:
    """Experts [P, L, K] of rows_B padding rows in each group, group after group.

    load_BLR  routed tokens on the ranks of each group without them

    In every group and layer the busiest rank ends at max(its load, `level_BL`): no choice of K
    distinct experts a row does better. Ties go to the lowest rank. It serves as well where padding
    belongs to a packed micro-batch rather than to a sample: rows count by group only.
    """
    layers, experts = placement_LE.shape
    per_rank = experts // load_BLR.shape[2]
    taken_BLR = _taken_BLR(load_BLR, rows_B, top_k, per_rank)
    expert_at_LE = np.argsort(placement_LE, axis=1)
    parts = [
        _row_ids(taken_LR, rows, expert_at_LE, per_rank)
        for taken_LR, rows in zip(taken_BLR, rows_B.tolist(), strict=True)
        if rows
    ]
    return np.concatenate([np.empty((0, layers, top_k), np.uint16), *parts])


def with_fill(window: Window, fill: Fill) -> Window:
    """The padded window with the demand of the rows that were filled; they are missing no more.

    Raises InputError for a fill of another window: its samples, layers and K, ids that are no
    expert or repeat in a row, or more rows than are missing.
    """
    from routepack.counting import count_routes  # loads a kernel, which padding itself never needs

    shape = (len(fill.offsets_S1) - 1, *fill.ids_PLK.shape[1:])
    expected = (window.samples, window.layers, window.top_k)
    if shape != expected:
        raise InputError.at("fill (samples, layers, top_k)", shape, f"{expected}, as in the window")
    rows_S = np.diff(fill.offsets_S1)
    if (bad := np.flatnonzero(rows_S > window.missing_S)).size:
        s = int(bad[0])
        allowed = f"at most the {window.missing_S[s]} missing rows"
        raise InputError.at("fill.rows", int(rows_S[s]), allowed, s)
    demand_SLE = _wide_enough(window.demand_SLE, window.lengths_S)
    demand_SLE += count_routes(fill.ids_PLK, fill.offsets_S1, window.experts)
    return replace(window, missing_S=window.missing_S - rows_S, demand_SLE=demand_SLE)


def rank_load_BLR(
    window: Window, placement_LE: NDArray[np.int32], ranks: int, group_S: NDArray[np.int32]
) -> Int64:
    """Routed tokens on each EP rank of each group; as `objective.row_costs` has it, but fast."""
    groups, (layers, experts) = int(group_S.max()) + 1, placement_LE.shape
    demand_BLE = np.empty((groups, layers, experts), np.int64)
    for b in range(groups):
        window.demand_SLE[group_S == b].sum(axis=0, dtype=np.int64, out=demand_BLE[b])
    by_slot_BLE = np.take_along_axis(demand_BLE, np.argsort(placement_LE, axis=1)[None], axis=2)
    shape = (groups, layers, ranks, experts // ranks)
    return np.asarray(by_slot_BLE.reshape(shape).sum(axis=3))


def sums_by_group(values_S: NDArray[Any], group_S: NDArray[np.int32]) -> Int64:
    """Sums [B] of whole numbers over the samples of each group."""
    sums_B = np.zeros(int(group_S.max()) + 1, np.int64)
    inside_S = group_S >= 0
    np.add.at(sums_B, group_S[inside_S], values_S[inside_S])
    return sums_B


def level_BL(load_BLR: Int64, rows_B: Int64, top_k: int, per_rank: int) -> Int64:
    """The lowest level that rows_B more tokens can be poured to, K distinct experts each.

    One token adds at most min(K, E/R) to a rank. Any counts x_r in 0..rows * min(K, E/R) that add
    up to rows * K can be met: dealt out to the rows in turn, rank after rank, they give a row K,
    and of a rank at most min(K, E/R). So the level is the least T for which the sum over ranks of
    min(rows * min(K, E/R), max(0, T - load)) reaches rows * K, and the busiest rank ends at no
    less than max(its load, T). Where there are no rows it is the least load.
    """
    need_BL = (rows_B * top_k)[:, None]
    low_BL = load_BLR.min(axis=2)
    high_BL = load_BLR.max(axis=2) + -(-need_BL // load_BLR.shape[2])
    while (low_BL < high_BL).any():
        middle_BL = (low_BL + high_BL) // 2
        reached_BL = (
            _poured_BLR(load_BLR, rows_B, top_k, per_rank, middle_BL).sum(axis=2) >= need_BL
        )
        high_BL = np.where(reached_BL, middle_BL, high_BL)
        low_BL = np.where(reached_BL, low_BL, middle_BL + 1)
    return np.asarray(high_BL)


def _poured_BLR(load_BLR: Int64, rows_B: Int64, top_k: int, per_rank: int, to_BL: Int64) -> Int64:
    """What the ranks take when they are filled up to a level."""
    most_B = rows_B * min(top_k, per_rank)
    return np.asarray(np.clip(to_BL[:, :, None] - load_BLR, 0, most_B[:, None, None]))


def _taken_BLR(load_BLR: Int64, rows_B: Int64, top_k: int, per_rank: int) -> Int64:
    """Assignments of the padding rows to each rank; rows * K in each group and layer."""
    to_BL = level_BL(load_BLR, rows_B, top_k, per_rank)
    taken_BLR = _poured_BLR(load_BLR, rows_B, top_k, per_rank, to_BL)
    surplus_BL = taken_BLR.sum(axis=2) - (rows_B * top_k)[:, None]
    # A level lower is not enough, so more ranks than the surplus end exactly there. The last of
    # them take one less.
    there_BLR = (taken_BLR > 0) & (load_BLR + taken_BLR == to_BL[:, :, None])
    from_last_BLR = np.cumsum(there_BLR[:, :, ::-1], axis=2)[:, :, ::-1]
    return np.asarray(taken_BLR - (there_BLR & (from_last_BLR <= surplus_BL[:, :, None])))


def _row_ids(
    taken_LR: Int64, rows: int, expert_at_LE: NDArray[np.int64], per_rank: int
) -> NDArray[np.uint16]:
    """Experts [rows, L, K] for one group.

    The assignments stand in a line, rank after rank, and are dealt out to the rows in turn. So the
    ones of a rank in a row are `rows` apart, at most ceil(taken / rows) of them, and choose
    neighbouring slots of the rank: distinct experts.
    """
    layers, ranks = taken_LR.shape
    line_LJ = np.repeat(np.tile(np.arange(ranks), layers), taken_LR.ravel()).reshape(layers, -1)
    first_LR = np.cumsum(taken_LR, axis=1) - taken_LR
    nth_LJ = np.arange(line_LJ.shape[1]) - np.take_along_axis(first_LR, line_LJ, axis=1)
    laps_LJ = np.take_along_axis(-(-taken_LR // rows), line_LJ, axis=1)
    slot_LJ = (nth_LJ % rows * laps_LJ + nth_LJ // rows) % per_rank
    expert_LJ = np.take_along_axis(expert_at_LE, line_LJ * per_rank + slot_LJ, axis=1)
    return expert_LJ.reshape(layers, -1, rows).transpose(2, 0, 1).astype(np.uint16)


def _add_cycles(
    demand_SLE: NDArray[Any], experts_PLK: NDArray[np.uint16], rows_S: NDArray[Any]
) -> None:
    """Add rows_S rows of each sample, which choose experts[0], experts[1], ... over and over."""
    from routepack.counting import count_routes

    cycle, experts = len(experts_PLK), demand_SLE.shape[2]
    whole_LE = count_routes(experts_PLK, np.array([0, cycle]), experts)[0].astype(np.int64)
    rest_S = rows_S % cycle
    # The counts of the first n rows of a cycle, only for the n that occur.
    rests = np.unique(rest_S)
    cuts = np.concatenate([[0], rests]).astype(np.int64)
    parts_NLE = count_routes(experts_PLK[: cuts[-1]], cuts, experts)
    begun_NLE = np.cumsum(parts_NLE, axis=0, dtype=np.int64)
    for s, n in enumerate(np.searchsorted(rests, rest_S).tolist()):
        if rows_S[s]:
            added_LE = int(rows_S[s] // cycle) * whole_LE + begun_NLE[n]
            demand_SLE[s] += added_LE.astype(demand_SLE.dtype)


def _wide_enough(demand_SLE: NDArray[Any], lengths_S: Int64) -> NDArray[Any]:
    """A copy that holds counts up to the lengths: no expert gets more than one a token."""
    fits = demand_SLE.dtype == np.uint16 and lengths_S.max() < 2**16
    return demand_SLE.astype(np.uint16 if fits else np.uint32)


def _expert_ids(experts: ArrayLike) -> NDArray[np.uint16]:
    """[P, L, K] from [L, K] or [P, L, K]; K distinct ids a row, read-only."""
    field = "padding.experts"
    try:
        ids_PLK = np.array(experts)
    except (ValueError, OverflowError):  # layers of different sizes, or absurd numbers
        raise InputError.at(f"{field}.shape", "ragged", "(L, K) or (P, L, K)") from None
    shape = ids_PLK.shape
    if ids_PLK.ndim not in (2, 3) or 0 in shape:
        raise InputError.at(f"{field}.shape", shape, "(L, K) or (P, L, K), none of them 0")
    if ids_PLK.dtype.kind not in "iu":
        raise InputError.at(f"{field}.dtype", ids_PLK.dtype, "an integer type")
    bad = np.argwhere((ids_PLK < 0) | (ids_PLK >= 2**16 - 1))
    if bad.size:
        index = tuple(bad[0].tolist())
        raise InputError.at(field, int(ids_PLK[index]), f"an expert id in 0..{2**16 - 2}", index)
    sorted_PLK = np.sort(ids_PLK, axis=-1)
    bad = np.argwhere(sorted_PLK[..., 1:] == sorted_PLK[..., :-1])
    if bad.size:
        *row, k = bad[0].tolist()
        repeated = int(sorted_PLK[(*row, k)])
        expected = f"{shape[-1]} distinct experts in a token row, it repeats"
        raise InputError.at(field, repeated, expected, tuple(row))
    ids_PLK = ids_PLK.reshape(-1, *shape[-2:]).astype(np.uint16)
    ids_PLK.flags.writeable = False
    return ids_PLK


def _require_experts(experts_PLK: NDArray[np.uint16], window: Window) -> None:
    shape, expected = experts_PLK.shape[1:], (window.layers, window.top_k)
    if shape != expected:
        raise InputError.at("padding.experts (layers, top_k)", shape, f"{expected}, as the window")
    if (bad := np.argwhere(experts_PLK >= window.experts)).size:
        index = tuple(bad[0].tolist())
        known = f"an expert id in 0..{window.experts - 1}"
        raise InputError.at("padding.experts", int(experts_PLK[index]), known, index)
