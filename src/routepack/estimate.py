"""Demand that is not exact: tokens without a recorded route, and windows not routed yet.

What is not known is estimated, said so in the plan (`Estimate`), and bounded: whatever the true
routes, the cost of a layout lies in `cost_interval`.

All counts are integers, and an estimate is always a demand that some routes have: K * n in each
sample and layer, and no expert more often than there are tokens.

Shapes: S samples, L MoE layers, E experts, K experts per token, R EP ranks, M rows, G shards; B
groups of a layout (row * G + shard).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from routepack.cost import Coefficients
from routepack.errors import InputError
from routepack.padding import groups_of, level_BL, rank_load_BLR, sums_by_group
from routepack.topology import Topology
from routepack.window import Window

Int64 = NDArray[np.int64]
HOW = ("sample", "window", "none")
UNIT = 2**30  # one assignment, in the fixed point of what rounding leaves over
SAFE = 2**62  # products below it fit int64; beyond, Python's integers take over


class Estimate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the demand of a plan was estimated.

    how              "sample" or "window": missing tokens, from the other rows of the sample or of
                     the window; "none": missing tokens load no rank; "predicted": every token,
                     from an earlier window
    unknown_tokens   tokens whose routes are not known
    share            of all tokens of the window
    fallback_tokens  of the unknown ones, those without rows of their sample (or, predicted by
                     prompt, of their prompt) to go by: estimated from the window's mean
    source           sha256 of the window with the recorded rows
    """

    how: str
    unknown_tokens: int
    share: float
    fallback_tokens: int
    source: str

    @classmethod
    def of_missing(cls, window: Window, how: str) -> Estimate:
        """What `fill_missing(window, how)` does. Raises InputError for another `how`."""
        _require_how(how)
        unknown, tokens = int(window.missing_S.sum()), int(window.lengths_S.sum())
        bare_S = window.missing_S == window.lengths_S
        fallback = int(window.missing_S[bare_S].sum()) if how == "sample" else 0
        return cls(how, unknown, unknown / tokens, fallback, window.sha256)

    @classmethod
    def of_prediction(
        cls, window: Window, previous: Window, *, match_groups: bool = False
    ) -> Estimate:
        """What `predicted` did to make `window` out of `previous`."""
        tokens, fallback = int(window.lengths_S.sum()), 0
        if match_groups:
            known = _routed_groups(previous, window.group_S)
            fallback = sum(
                n
                for n, group in zip(window.lengths_S.tolist(), _group_ids(window), strict=True)
                if group not in known
            )
        return cls("predicted", tokens, 1.0, fallback, previous.sha256)


def fill_missing(window: Window, how: str = "sample") -> Window:
    """The window with the demand of its missing tokens estimated; then none is missing.

    how  "sample": in proportion to the recorded rows of the sample; without any, to those of the
         window. "window": to those of the window for every sample. "none": the window as it is

    Where the window has no recorded row at all, experts are taken to be equally likely. Shares are
    rounded to whole counts by largest remainder; what rounding has given an expert too much or too
    little in earlier samples is added to its remainder, so that one missing token a sample (T - 1
    recorded rows) does not always go to the hottest experts. Ties go to the lowest expert.

    Raises InputError for another `how`.
    """
    _require_how(how)
    if how == "none" or not window.missing_S.any():
        return window
    recorded_S = window.lengths_S - window.missing_S
    mean = _mean_rates(window)
    rates = (
        (window.demand_SLE[s], recorded) if recorded and how == "sample" else mean
        for s, recorded in enumerate(recorded_S.tolist())
    )
    fits = window.demand_SLE.dtype == np.uint16 and window.lengths_S.max() < 2**16
    demand_SLE = window.demand_SLE.astype(np.uint16 if fits else np.uint32)
    _add_estimates(demand_SLE, rates, window.missing_S, window.top_k)
    return replace(window, missing_S=np.zeros_like(window.missing_S), demand_SLE=demand_SLE)


def predicted(
    lengths_S: ArrayLike, previous: Window, *, match_groups: bool = False, **fields: Any
) -> Window:
    """A window whose routes are not known yet, with the demand of an earlier one's tokens.

    lengths_S     tokens of each sample
    match_groups  a sample whose `group_S` also stands in `previous` follows the rows recorded
                  there for that prompt; the others, or all, the mean of `previous`. Only where
                  equal numbers mean equal prompts: many trainers number them anew every step
    fields        of the new window: group_S, source, ...

    Rounded as in `fill_missing`. Raises InputError for lengths or fields that a window refuses.
    """
    lengths_S = np.asarray(lengths_S)
    shape = (*lengths_S.shape, previous.layers, previous.experts)
    wide = lengths_S.size and lengths_S.dtype.kind in "iu" and lengths_S.max() >= 2**16
    fields = {"moe_layers": previous.moe_layers, "model": previous.model} | fields
    # Checked with all tokens missing, before anything is computed from the lengths.
    window = Window(
        lengths_S,
        np.zeros(shape, np.uint32 if wide else np.uint16),
        previous.top_k,
        missing_S=lengths_S,
        **fields,
    )
    mean = _mean_rates(previous)
    rates_of = _routed_groups(previous, window.group_S) if match_groups else {}
    rates = (rates_of.get(group, mean) for group in _group_ids(window))
    demand_SLE = np.array(window.demand_SLE)
    _add_estimates(demand_SLE, rates, window.lengths_S, window.top_k)
    return replace(window, missing_S=np.zeros_like(window.missing_S), demand_SLE=demand_SLE)


def cost_interval(
    recorded: Window,
    unknown_S: ArrayLike,
    topology: Topology,
    cost: Coefficients,
    placement_LE: NDArray[np.int32],
    rows: Sequence[Sequence[Sequence[int]]],
    attention_MG: NDArray[np.float64],
) -> tuple[float, float]:
    """Lowest and highest slowest shard that a layout can have, whatever the unknown routes are.

    recorded      the window as planned, but with the demand that is known only
    unknown_S     tokens of each sample that are routed nobody knows where: `missing_S` of what was
                  recorded, before padding that is not routed
    cost          of the planned window
    rows          [M][D][...] of the plan
    attention_MG  attention of each row and shard (`objective.row_costs`); lengths are known

    Where ranks are equally fast, both ends are costs of some routes, to the last bit as the
    objective computes them: layers and groups are independent, and in each the extremes of
    `busiest_BL` are reached. Else the lower end is a bound.

    Raises InputError where more tokens are unknown than have no recorded route.
    """
    group_S = groups_of(rows, topology, recorded.samples)
    ends = []
    for busiest_BL in busiest_interval_BL(
        recorded, unknown_S, placement_LE, topology.ep, group_S, cost.slow_GR
    ):
        busiest_MG = busiest_BL.sum(axis=1).reshape(attention_MG.shape)
        cost_MG = attention_MG + cost.expert * busiest_MG
        ends.append(max(math.fsum(cost_M) for cost_M in cost_MG.T.tolist()))
    return ends[0], ends[1]


def busiest_interval_BL(
    recorded: Window,
    unknown_S: ArrayLike,
    placement_LE: NDArray[np.int32],
    ranks: int,
    group_S: NDArray[np.int32],
    slow_GR: Int64 | None = None,
) -> tuple[Int64, Int64]:
    """Fewest and most routed tokens that the busiest rank of a group can have at a layer.

    With `slow_GR` (cost.Coefficients) routed tokens count as much as their rank is slow. The most
    is exact; the fewest is then a bound only, the known tokens.

    An unknown token chooses K distinct experts, so it adds at most min(K, E/R) to a rank. The most
    all add that to the rank that is busiest already; the fewest fill the ranks up from the least
    loaded (`padding.level_BL`). Arguments as for `cost_interval`; group_S as from
    `padding.groups_of`.
    """
    unknown_S = np.asarray(unknown_S, np.int64)
    if (bad := np.flatnonzero(unknown_S > recorded.missing_S)).size:
        s = int(bad[0])
        expected = f"at most the {recorded.missing_S[s]} tokens without a recorded route"
        raise InputError.at("unknown", int(unknown_S[s]), expected, s)
    per_rank = recorded.experts // ranks
    load_BLR = rank_load_BLR(recorded, placement_LE, ranks, group_S)
    unknown_B = sums_by_group(unknown_S, group_S)
    known_BL = load_BLR.max(axis=2)
    most_B1 = (unknown_B * min(recorded.top_k, per_rank))[:, None]
    if slow_GR is not None and (slow_GR != 1).any():
        slow_BR = np.tile(slow_GR, (len(unknown_B) // len(slow_GR), 1))[:, None]
        low_BL = (load_BLR * slow_BR).max(axis=2)
        return low_BL, ((load_BLR + most_B1[:, :, None]) * slow_BR).max(axis=2)
    low_BL = np.maximum(known_BL, level_BL(load_BLR, unknown_B, recorded.top_k, per_rank))
    return low_BL, known_BL + most_B1


Rates = tuple[NDArray[Any], int]
"""Counts [L, E] of that many token rows; they sum to K times the rows in each layer."""


def _mean_rates(window: Window) -> Rates:
    """Of all recorded rows; where there is none, every expert as likely as any other."""
    recorded = int((window.lengths_S - window.missing_S).sum())
    if recorded:
        return window.demand_LE, recorded
    return np.full((window.layers, window.experts), window.top_k), window.experts


def _routed_groups(previous: Window, group_S: NDArray[np.int32] | None) -> dict[int | None, Rates]:
    """Rates of each prompt of a window that `previous` has recorded rows of."""
    if group_S is None or previous.group_S is None:
        missing = "previous" if group_S is not None else "the new window"
        raise InputError(f"match_groups = True: expected group_S in both, {missing} has none")
    recorded_S = previous.lengths_S - previous.missing_S
    rates: dict[int | None, Rates] = {}
    for group in np.intersect1d(group_S, previous.group_S).tolist():
        own_S = previous.group_S == group
        if recorded := int(recorded_S[own_S].sum()):
            counts_LE = previous.demand_SLE[own_S].sum(axis=0, dtype=np.int64)
            rates[group] = (counts_LE, recorded)
    return rates


def _group_ids(window: Window) -> list[int | None]:
    return [None] * window.samples if window.group_S is None else window.group_S.tolist()


def _add_estimates(
    demand_SLE: NDArray[Any], rates: Iterable[Rates], tokens_S: NDArray[Any], top_k: int
) -> None:
    """Add to each sample the demand of `tokens_S` tokens at its rates, K * tokens in a layer."""
    carry_LE = np.zeros(demand_SLE.shape[1:], np.int64)
    for s, (tokens, (counts_LE, rows)) in enumerate(zip(tokens_S.tolist(), rates, strict=True)):
        if tokens:
            added_LE = _rounded(counts_LE, rows, tokens, top_k, carry_LE)
            demand_SLE[s] += added_LE.astype(demand_SLE.dtype)


def _rounded(
    counts_LE: NDArray[Any], rows: int, tokens: int, top_k: int, carry_LE: Int64
) -> NDArray[Any]:
    """tokens / rows * counts as whole numbers, K * tokens in each layer; `carry_LE` goes along.

    Each count is rounded down or up. counts <= rows, so none exceeds the tokens, and one that is
    exact is left alone.
    """
    experts = counts_LE.shape[1]
    number = np.int64 if max(tokens, UNIT) * rows < SAFE else object
    due_LE = counts_LE.astype(number) * tokens
    down_LE = due_LE // rows
    part_LE = due_LE - down_LE * rows  # faster than np.divmod
    left_LE = (part_LE * UNIT // rows).astype(np.int64)
    lacking_L = (top_k * tokens - down_LE.sum(axis=1)).astype(np.int64)
    # The lacking_L highest of each layer go up; the expert's number makes them all different.
    rank_LE = (left_LE + carry_LE) * experts - np.arange(experts)
    rank_LE[part_LE == 0] = np.iinfo(np.int64).min
    cut_L1 = np.take_along_axis(
        np.sort(rank_LE, axis=1), experts - lacking_L[:, None].clip(1), axis=1
    )
    up_LE = (rank_LE >= cut_L1) & (lacking_L > 0)[:, None]
    carry_LE += left_LE - up_LE * UNIT
    return np.asarray((down_LE + up_LE).astype(np.int64))


def _require_how(how: str) -> None:
    if how not in HOW:
        raise InputError.at("how", repr(how), "one of " + ", ".join(HOW))
