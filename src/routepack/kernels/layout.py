"""A layout under search: its integers, and the cost that follows from them.

A *group* is a (row, shard): the cells whose tokens meet in one EP group, W = D/G of them. Cells are
numbered so that cell // W is the group and group % G the shard. Sample S is the null sample: no
tokens, no demand; moving it does nothing, so a relocation is a swap with it. Samples S+1 and S+2
are bundles: several samples of a cell that move as one; they belong to the state.

Loads are rank-major with layers innermost, so that the busiest rank of every layer is a vertical
SIMD maximum; layers that fill up a vector hold nothing. Suffixes: B groups, c cells, T attention
stages, R EP ranks, L layers, S samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np
from numba import types
from numpy.typing import NDArray

from routepack.kernels.jit import PerLoad, inlined

TOTAL_WEIGHT = 1e-6  # of sum U in the energy (design section 2)
WORST_ROW_WEIGHT = 1e-9  # of max J
OVER_WEIGHT = 8.0  # of a token above a limit, in whole costs of a token: far more than it saves
UNLIMITED = 2**62
LANES = 8  # layers are padded to a multiple of this: whole SIMD vectors
TOP = 3  # largest cells kept per stage: two may be excluded by a move, the third is the maximum


class Static(NamedTuple):
    """What a search never changes (everything with a sample axis has the null sample last)."""

    length_S: NDArray[np.int64]
    tokens2_TS: NDArray[np.int64]  # token pairs, per attention stage
    placed_SRL: NDArray[Any]  # int32 routed tokens on each EP rank
    placed_LRS: NDArray[Any]  # the same, samples innermost
    by_length_S: NDArray[np.int32]  # samples, longest first
    length_rank_S: NDArray[np.int32]  # position in by_length_S
    linear_T: NDArray[np.float64]
    quadratic_T: NDArray[np.float64]
    expert: float
    slow_c: NDArray[np.float64]  # attention work of a cell takes so many times as long
    uneven: bool  # whether EP ranks are not equally fast
    slow_GR: NDArray[Any]  # a routed token of a rank counts so often; else 1
    cap: int
    shards: int  # G
    width: int  # W, cells of a group
    group_c: NDArray[np.int64]  # c // W and b % G: looked up, since dividing takes longer
    shard_B: NDArray[np.int64]
    # What a trainer requires (requirements.py); a layout is free of each by default.
    most: int  # samples of a cell
    limit: int  # routed tokens of an EP rank at a layer in a group
    over: float  # charge for a token above the limit
    lanes: int  # samples never leave the lane that their cell is in
    lane_c: NDArray[np.int64]
    lane_start_n: NDArray[np.int64]  # where a lane's cells start in lane_cells_c
    lane_cells_c: NDArray[np.int64]
    blocks: int  # each keeps its number of samples; 0: none does
    block_c: NDArray[np.int64]
    units: int  # samples that move between DP ranks together; 0: each for itself
    unit_S: NDArray[np.int64]
    unit_start_n: NDArray[np.int64]  # where a unit's samples start in unit_members_S
    unit_members_S: NDArray[np.int64]


class State(NamedTuple):
    """A layout. Integers are the truth; floats are functions of them, never accumulated."""

    length_S: NDArray[np.int64]  # as in Static, and of the bundles
    tokens2_TS: NDArray[np.int64]
    bundle_kRL: NDArray[Any]  # routed tokens of the two bundles
    bundle_kn: NDArray[np.int32]  # their samples
    bundled_k: NDArray[np.int64]  # how many
    cell_S: NDArray[np.int32]
    position_S: NDArray[np.int32]  # of a sample among the members of its cell
    members_ck: NDArray[np.int32]
    count_c: NDArray[np.int32]
    tokens_c: NDArray[np.int64]
    tokens2_Tc: NDArray[np.int64]
    load_BRL: NDArray[Any]
    busiest_B: NDArray[np.int64]  # sum over layers of the busiest rank
    anchor_BL: NDArray[np.int32]  # a rank of each layer that is busiest, or was until lately
    anchored_B: NDArray[np.int64]  # load of the anchors, summed over layers: at most busiest_B
    peak_BS: NDArray[Any]  # demand of each sample on the anchors, summed over layers
    slack: NDArray[np.int64]  # [1] an anchor may carry so much less than the busiest rank
    work_Tc: NDArray[np.float64]
    top_BTk: NDArray[np.float64]  # the largest cells of a group, per stage
    top_cell_BTk: NDArray[np.int32]
    work_BT: NDArray[np.float64]  # of all cells of a group
    over_B: NDArray[np.int64]  # routed tokens of busiest ranks above the limit, over layers
    cost_B: NDArray[np.float64]  # J
    shard_G: NDArray[np.float64]  # U
    peak_L: NDArray[Any]  # scratch, as is the next
    other_peak_L: NDArray[Any]


def static_type(load: Any) -> Any:
    """numba's type of Static with loads in `load` (int32, or int64 beyond 2**31)."""
    i32, i64, f64 = types.int32, types.int64, types.float64
    fields = (
        i64[::1], i64[:, ::1], load[:, :, ::1], load[:, :, ::1], i32[::1], i32[::1],
        f64[::1], f64[::1], f64, f64[::1], types.boolean, load[:, ::1], i64, i64, i64,
        i64[::1], i64[::1], i64, i64, f64, i64, i64[::1], i64[::1], i64[::1], i64, i64[::1],
        i64, i64[::1], i64[::1], i64[::1],
    )  # fmt: skip
    return cast(Any, types.NamedTuple)(fields, Static)


def state_type(load: Any) -> Any:
    """numba's type of State with loads in `load`."""
    i32, i64, f64 = types.int32, types.int64, types.float64
    fields = (
        i64[::1], i64[:, ::1], load[:, :, ::1], i32[:, ::1], i64[::1],
        i32[::1], i32[::1], i32[:, ::1], i32[::1], i64[::1], i64[:, ::1], load[:, :, ::1],
        i64[::1], i32[:, ::1], i64[::1], load[:, ::1], i64[::1], f64[:, ::1], f64[:, :, ::1],
        i32[:, :, ::1], f64[:, ::1], i64[::1], f64[::1], f64[::1], load[::1], load[::1],
    )  # fmt: skip
    return cast(Any, types.NamedTuple)(fields, State)


@inlined
def refresh_cell(static, state, c):  # type: ignore[no-untyped-def]
    for t in range(len(static.linear_T)):
        work = (
            static.linear_T[t] * state.tokens_c[c] + static.quadratic_T[t] * state.tokens2_Tc[t, c]
        )
        state.work_Tc[t, c] = static.slow_c[c] * work


@inlined
def refresh_attention(static, state, b):  # type: ignore[no-untyped-def]
    """The largest cells of group b, per stage; ties to the lowest cell."""
    for t in range(len(static.linear_T)):
        state.work_BT[b, t] = 0.0
        for k in range(TOP):
            state.top_BTk[b, t, k] = 0.0
            state.top_cell_BTk[b, t, k] = -1
        for c in range(b * static.width, (b + 1) * static.width):
            value, cell = state.work_Tc[t, c], np.int32(c)
            state.work_BT[b, t] += value
            for k in range(TOP):
                held = state.top_cell_BTk[b, t, k]
                if held < 0 or value > state.top_BTk[b, t, k]:
                    moved = state.top_BTk[b, t, k]
                    state.top_BTk[b, t, k], state.top_cell_BTk[b, t, k] = value, cell
                    value, cell = moved, held
                    if held < 0:
                        break


@inlined
def find_peaks(load_RL, slow_R, uneven, peak_L):  # type: ignore[no-untyped-def]
    """The load of the busiest rank of every layer, ranks eight at a time as in evaluation.py."""
    number = peak_L.dtype.type
    ranks, layers = load_RL.shape
    blocks = 0 if uneven else ranks - ranks % 8
    for r in range(0, blocks, 8):
        for layer in range(layers):
            peak = number(0)
            for k in range(r, r + 8):
                peak = max(peak, load_RL[k, layer])
            peak_L[layer] = max(peak, peak_L[layer]) if r > 0 else peak
    for r in range(blocks, ranks):
        for layer in range(layers):
            load = number(slow_R[r] * load_RL[r, layer])
            peak_L[layer] = max(load, peak_L[layer]) if r > 0 else load


@inlined
def refresh_experts(static, state, b):  # type: ignore[no-untyped-def]
    """Busiest ranks of group b, and where its anchors are to follow them.

    An anchor is a rank that was busiest, or nearly; it moves once it is state.slack[0] below.
    """
    load_RL, peak_L, anchor_L = state.load_BRL[b], state.peak_L, state.anchor_BL[b]
    slow_R, peak_S = static.slow_GR[static.shard_B[b]], state.peak_BS[b]
    ranks, layers = load_RL.shape
    held_L, slack = state.other_peak_L, state.slack[0]
    find_peaks(load_RL, slow_R, static.uneven, peak_L)
    for layer in range(layers):
        held_L[layer] = load_RL[anchor_L[layer], layer]
    if static.uneven:
        for layer in range(layers):
            held_L[layer] *= slow_R[anchor_L[layer]]
    busiest, anchored, moving = np.int64(0), np.int64(0), np.int64(0)
    for layer in range(layers):
        busiest += peak_L[layer]
        anchored += held_L[layer]
        moving += peak_L[layer] - held_L[layer] > slack
    for layer in range(layers if moving > 0 else 0):
        peak, held, old = peak_L[layer], held_L[layer], anchor_L[layer]
        if peak - held <= slack:
            continue
        new = 0
        while slow_R[new] * load_RL[new, layer] != peak:
            new += 1
        anchored += peak - held
        anchor_L[layer] = new
        add_S = static.placed_LRS[layer, new]
        take_S = static.placed_LRS[layer, old]
        if static.uneven:
            for s in range(len(add_S)):
                peak_S[s] += slow_R[new] * add_S[s] - slow_R[old] * take_S[s]
        else:
            for s in range(len(add_S)):
                peak_S[s] += add_S[s] - take_S[s]
    state.busiest_B[b] = busiest
    state.anchored_B[b] = anchored
    if static.limit < UNLIMITED:
        over = np.int64(0)
        for layer in range(layers):
            peak = load_RL[0, layer]
            for r in range(1, ranks):
                peak = max(peak, load_RL[r, layer])
            over += max(np.int64(0), peak - static.limit)
        state.over_B[b] = over


@inlined
def attention(state, b):  # type: ignore[no-untyped-def]
    """A of group b: stages in order, as in objective.py."""
    total = 0.0
    for t in range(state.top_BTk.shape[1]):
        total += state.top_BTk[b, t, 0]
    return total


@inlined
def refresh_cost(static, state, b):  # type: ignore[no-untyped-def]
    state.cost_B[b] = attention(state, b) + static.expert * state.busiest_B[b]


@inlined
def refresh_shards(static, state):  # type: ignore[no-untyped-def]
    """U summed over rows in order: a function of the layout, not of the moves that led to it."""
    for g in range(static.shards):
        total = 0.0
        for b in range(g, len(state.cost_B), static.shards):
            total += state.cost_B[b]
        state.shard_G[g] = total


@inlined
def put(static, state, s, c):  # type: ignore[no-untyped-def]
    """Put sample s into cell c, integers only."""
    state.tokens_c[c] += static.length_S[s]
    for t in range(len(static.linear_T)):
        state.tokens2_Tc[t, c] += static.tokens2_TS[t, s]
    state.cell_S[s] = c
    state.position_S[s] = state.count_c[c]
    state.members_ck[c, state.count_c[c]] = s
    state.count_c[c] += 1


@inlined
def take(static, state, s):  # type: ignore[no-untyped-def]
    """Take sample s out of its cell, integers only."""
    c = state.cell_S[s]
    state.tokens_c[c] -= static.length_S[s]
    for t in range(len(static.linear_T)):
        state.tokens2_Tc[t, c] -= static.tokens2_TS[t, s]
    state.count_c[c] -= 1
    last = state.members_ck[c, state.count_c[c]]
    state.members_ck[c, state.position_S[s]] = last
    state.position_S[last] = state.position_S[s]


@inlined
def routed(static, state, s):  # type: ignore[no-untyped-def]
    """Routed tokens [R, L] of a sample or bundle."""
    null = len(static.length_S) - 1
    return state.bundle_kRL[s - null - 1] if s > null else static.placed_SRL[s]


@inlined
def shift(static, state, b, out, into):  # type: ignore[no-untyped-def]
    """Group b loses `out` and gains `into` (samples or bundles): loads only."""
    load_RL = state.load_BRL[b]
    out_RL, into_RL = routed(static, state, out), routed(static, state, into)
    ranks, layers = load_RL.shape
    for r in range(ranks):
        for layer in range(layers):
            load_RL[r, layer] += into_RL[r, layer] - out_RL[r, layer]


def _build(static: Static, state: State, cell_S: NDArray[np.int32]) -> None:
    """Fill `state` from scratch for the layout cell_S (null sample not included)."""
    layers = static.placed_SRL.shape[2]
    samples = len(static.length_S) - 1
    state.tokens_c[:] = 0
    state.tokens2_Tc[:] = 0
    state.count_c[:] = 0
    state.load_BRL[:] = 0
    for s in range(samples):
        put(static, state, s, cell_S[s])
        shift(static, state, static.group_c[cell_S[s]], samples, s)
    state.cell_S[samples] = -1
    state.anchor_BL[:] = 0
    state.slack[0] = 0
    state.peak_BS[:] = 0
    for b in range(len(state.cost_B)):
        slow = static.slow_GR[static.shard_B[b], 0]
        for layer in range(layers):
            for s in range(samples):
                state.peak_BS[b, s] += slow * static.placed_LRS[layer, 0, s]
        for c in range(b * static.width, (b + 1) * static.width):
            refresh_cell(static, state, c)
        refresh_attention(static, state, b)
        refresh_experts(static, state, b)
        refresh_cost(static, state, b)
    refresh_shards(static, state)


def _measure(
    static: Static,
    cell_S: NDArray[np.int32],
    attention_B: NDArray[np.float64],
    busiest_B: NDArray[np.int64],
    over_B: NDArray[np.int64],
    load_RL: NDArray[Any],
) -> None:
    """A of every group, its busiest ranks and their excess summed over layers; without a State."""
    groups, width = len(attention_B), static.width
    ranks, layers = load_RL.shape
    for b in range(groups):
        load_RL[:] = 0
        attention_B[b] = 0.0
        tokens_c = np.zeros(width, np.int64)
        tokens2_Tc = np.zeros((len(static.linear_T), width), np.int64)
        for s in range(len(cell_S)):
            c = cell_S[s] - b * width
            if 0 <= c < width:
                tokens_c[c] += static.length_S[s]
                tokens2_Tc[:, c] += static.tokens2_TS[:, s]
                for r in range(ranks):
                    for layer in range(layers):
                        load_RL[r, layer] += static.placed_SRL[s, r, layer]
        for t in range(len(static.linear_T)):
            largest = 0.0
            for c in range(width):
                work = static.linear_T[t] * tokens_c[c] + static.quadratic_T[t] * tokens2_Tc[t, c]
                largest = max(largest, static.slow_c[b * width + c] * work)
            attention_B[b] += largest
        busiest, over = np.int64(0), np.int64(0)
        for layer in range(layers):
            peak, slowest = np.int64(0), np.int64(0)
            for r in range(ranks):
                load = np.int64(load_RL[r, layer])
                peak = max(peak, load)
                slowest = max(slowest, load * static.slow_GR[static.shard_B[b], r])
            busiest += slowest
            over += max(np.int64(0), peak - static.limit)
        busiest_B[b], over_B[b] = busiest, over


def of_static(
    function: Callable[..., Any], signature: Callable[[Any], Any], *, allocates: bool = False
) -> PerLoad:
    """A kernel whose first argument is a Static."""
    return PerLoad(function, signature, lambda static: static.placed_SRL.dtype, allocates=allocates)


build = of_static(
    _build, lambda load: types.void(static_type(load), state_type(load), types.int32[::1])
)
measure = of_static(
    _measure,
    lambda load: types.void(
        static_type(load),
        types.int32[::1],
        types.float64[::1],
        types.int64[::1],
        types.int64[::1],
        load[:, ::1],
    ),
    allocates=True,
)
