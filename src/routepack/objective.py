"""The objective, slow and obvious: the oracle that every kernel and every plan is held to.

Integers first (tokens, token pairs, routed tokens), then one fixed float64 expression of them, in a
fixed order. Kernels evaluate the same expression, so that equal layouts give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from routepack.cost import Coefficients
from routepack.plan import Score
from routepack.topology import Topology
from routepack.window import Window

Layout = Sequence[Sequence[Sequence[int]]]  # rows [M][D][...] of sample indices


def rank_load_LR(
    demand_LE: NDArray[np.int64], placement_LE: NDArray[np.int32], ranks: int
) -> NDArray[np.int64]:
    """Routed tokens of each EP rank at each layer."""
    layers, experts = demand_LE.shape
    load_LR = np.zeros((layers, ranks), np.int64)
    for layer in range(layers):
        for e in range(experts):
            load_LR[layer, placement_LE[layer, e] // (experts // ranks)] += demand_LE[layer, e]
    return load_LR


def cell_attention(
    cell: Sequence[int], dp_rank: int, stage: int, window: Window, cost: Coefficients
) -> float:
    """Attention work of one micro-batch on one DP rank at one stage."""
    tokens = sum(int(window.lengths_S[i]) for i in cell)
    tokens2 = sum(int(cost.quadratic_tokens_TS[stage, i]) for i in cell)
    work = float(cost.linear_T[stage]) * tokens + float(cost.quadratic_T[stage]) * tokens2
    return float(cost.slow_D[dp_rank]) * work


def row_costs(
    window: Window,
    topology: Topology,
    cost: Coefficients,
    placement_LE: NDArray[np.int32],
    rows: Layout,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Attention A and expert X of each (row, shard), and the EP loads they come from.

    Returns attention_MG, expert_MG and load_MGLR. Design section 2.
    """
    stages = len(cost.linear_T)
    shape = (len(rows), topology.edp)
    attention_MG, expert_MG = np.zeros(shape), np.zeros(shape)
    load_MGLR = np.zeros((*shape, window.layers, topology.ep), np.int64)
    for m, row in enumerate(rows):
        for g, dp_ranks in enumerate(topology.groups):
            attention = 0.0
            for stage in range(stages):
                attention += max(cell_attention(row[d], d, stage, window, cost) for d in dp_ranks)
            samples = [i for d in dp_ranks for i in row[d]]
            demand_LE = window.demand_SLE[samples].sum(axis=0, dtype=np.int64)
            load_LR = rank_load_LR(demand_LE, placement_LE, topology.ep)
            slow_R = cost.slow_GR[g]
            busiest = sum(int((slow_R * load_LR[layer]).max()) for layer in range(window.layers))
            attention_MG[m, g] = attention
            expert_MG[m, g] = cost.expert * busiest
            load_MGLR[m, g] = load_LR
    return attention_MG, expert_MG, load_MGLR


def score_rows(attention_MG: NDArray[np.float64], expert_MG: NDArray[np.float64]) -> Score:
    """The exact score of per-(row, shard) costs; math.fsum makes it independent of row order."""
    cost_MG = attention_MG + expert_MG
    shards = [math.fsum(cost_MG[:, g].tolist()) for g in range(cost_MG.shape[1])]
    return Score(
        slowest_shard=max(shards),
        total=math.fsum(shards),
        worst_row=float(cost_MG.max()),
        attention=math.fsum(attention_MG.ravel().tolist()),
        expert=math.fsum(expert_MG.ravel().tolist()),
    )


def score(
    window: Window,
    topology: Topology,
    cost: Coefficients,
    placement_LE: NDArray[np.int32],
    rows: Layout,
) -> Score:
    """The exact score of a placement and a layout."""
    attention_MG, expert_MG, _ = row_costs(window, topology, cost, placement_LE, rows)
    return score_rows(attention_MG, expert_MG)
