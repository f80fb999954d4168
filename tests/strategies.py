"""Every hypothesis strategy of the planner's tests, and what their claims are checked with.

An *instance* is small enough to recompute with the oracle and always feasible: its cap is that of a
layout that was drawn first. Lengths, sizes and layouts are drawn by hypothesis and so shrink; the
experts that tokens choose come from a drawn seed.

Shape suffixes as in the package: S samples, L layers, E experts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from routepack.cost import AttentionStage, CostModel
from routepack.kernels.layout import Static
from routepack.placement import identity, ranks_of
from routepack.problem import Problem
from routepack.topology import Topology
from routepack.window import Window

SEEDS = st.integers(0, 2**32 - 1)
COEFFICIENTS = st.one_of(st.just(0.0), st.floats(0.01, 100.0))


@dataclass(frozen=True, eq=False)
class Instance:
    """A problem with one of its layouts, and the placement that it is searched under."""

    window: Window
    topology: Topology
    cost_model: CostModel
    token_cap: int
    rows: int
    cell_S: NDArray[np.int32]
    placement_LE: NDArray[np.int32]

    @cached_property
    def problem(self) -> Problem:
        """The problem at the rows of the layout."""
        cost = self.cost_model.resolve(self.window, self.topology, self.token_cap)
        return Problem(self.window, self.topology, cost, self.token_cap, self.rows)

    @cached_property
    def static(self) -> Static:
        """The arrays of a search under the placement."""
        return self.problem.static(ranks_of(self.placement_LE, self.topology.ep))


def random_routes(
    rng: np.random.Generator, tokens: int, layers: int, experts: int, top_k: int, skew: float
) -> NDArray[np.uint8]:
    """[N, L, K] distinct experts of every token; `skew` 0 is uniform, above it some are hot."""
    taste_LE = skew * rng.standard_normal((layers, experts))
    keys_NLE = taste_LE + rng.gumbel(size=(tokens, layers, experts))
    return np.argsort(-keys_NLE, axis=2)[:, :, :top_k].astype(np.uint8)


def random_window(
    rng: np.random.Generator,
    lengths_S: Any,
    layers: int,
    experts: int,
    top_k: int,
    *,
    skew: float = 1.0,
    missing_S: Any = None,
    **fields: Any,
) -> Window:
    """A window whose tokens choose at random; every sample has hot experts of its own."""
    lengths_S = np.asarray(lengths_S, np.int64)
    missing_S = np.zeros(len(lengths_S), np.int64) if missing_S is None else np.asarray(missing_S)
    demand_SLE = np.zeros((len(lengths_S), layers, experts), np.uint16)
    for s, recorded in enumerate((lengths_S - missing_S).tolist()):
        routes_NLK = random_routes(rng, recorded, layers, experts, top_k, skew)
        for layer in range(layers):
            demand_SLE[s, layer] = np.bincount(routes_NLK[:, layer].ravel(), minlength=experts)
    return Window(lengths_S, demand_SLE, top_k, missing_S=missing_S, **fields)


def lowest_peak(demand_E: list[int], ranks: int) -> int:
    """The lowest possible load of the busiest rank, by trying all partitions."""

    def best(left: frozenset[int], ranks_left: int) -> int:
        if not ranks_left:
            return 0
        first = min(left)
        peaks = []
        for others in itertools.combinations(sorted(left - {first}), len(left) // ranks_left - 1):
            part = {first, *others}
            rest = best(left - part, ranks_left - 1)
            peaks.append(max(rest, sum(demand_E[e] for e in part)))
        return min(peaks)

    return best(frozenset(range(len(demand_E))), ranks)


def lowest_moves(
    current_E: NDArray[np.int32], new_E: NDArray[np.int32], node_of_rank: list[int]
) -> tuple[int, int]:
    """Fewest experts that change rank, then node, over all ways to name the ranks of `new_E`."""
    ranks = len(node_of_rank)
    per_rank = len(current_E) // ranks
    node_R = np.array(node_of_rank)
    rank_E = current_E // per_rank

    def moved(names: tuple[int, ...]) -> tuple[int, int]:
        named_E = np.array(names)[new_E // per_rank]
        return int((named_E != rank_E).sum()), int((node_R[named_E] != node_R[rank_E]).sum())

    return min(map(moved, itertools.permutations(range(ranks))))


@st.composite
def windows(
    draw: st.DrawFn, *, min_samples: int = 1, max_samples: int = 12, ranks: int = 1
) -> Window:
    """A window with consistent demand; the number of experts is a multiple of `ranks`."""
    lengths_S = draw(st.lists(st.integers(1, 40), min_size=min_samples, max_size=max_samples))
    missing_S = [0] * len(lengths_S)
    if draw(st.booleans()):
        missing_S = [draw(st.sampled_from([0, 1, n])) for n in lengths_S]
    experts = ranks * draw(st.integers(1, max(1, 8 // ranks)))
    return random_window(
        np.random.default_rng(draw(SEEDS)),
        lengths_S,
        draw(st.integers(1, 3)),
        experts,
        draw(st.integers(1, experts)),
        skew=draw(st.sampled_from([0.0, 1.0, 4.0])),
        missing_S=missing_S,
    )


@st.composite
def topologies(draw: st.DrawFn, *, max_dp: int = 16) -> Topology:
    """G = 1, 2 or 4 shards of 1 to 4 DP ranks, neighbouring or interleaved."""
    sizes = [(g, w) for g in (1, 2, 4) for w in (1, 2, 3, 4) if g * w <= max_dp]
    shards, width = draw(st.sampled_from(sizes))
    if draw(st.booleans()):  # Megatron with dp before ep: the DP ranks of a shard are G apart
        return Topology(dp=shards * width, ep=width, edp=shards, order="tp-cp-dp-ep-pp")
    return Topology.of(dp=shards * width, ep=draw(st.sampled_from([1, 2, 3, 4])), edp=shards)


@st.composite
def cost_models(draw: st.DrawFn) -> CostModel:
    """One to three stages, some without a quadratic part or with a sliding window."""
    stages = tuple(
        AttentionStage(
            f"stage {k}",
            linear=draw(COEFFICIENTS),
            quadratic=draw(COEFFICIENTS),
            window_tokens=draw(st.one_of(st.none(), st.integers(1, 50))),
        )
        for k in range(draw(st.integers(1, 3)))
    )
    expert = draw(COEFFICIENTS)
    if expert == 0 and not any(s.linear or s.quadratic for s in stages):
        expert = 1.0
    return CostModel(stages, expert, draw(st.sampled_from(["cap", "window"])))


@st.composite
def speeds(draw: st.DrawFn, cost_model: CostModel, topology: Topology) -> CostModel:
    """The cost model, most often as it is, or with DP or EP ranks that are not equally fast."""
    if not draw(st.sampled_from([False, False, True])):
        return cost_model
    speed = st.sampled_from([0.5, 0.8, 1.0, 1.0, 1.25])
    sizes = draw(st.sampled_from([topology.ep, topology.ep * topology.edp]))
    dp = draw(st.none() | st.tuples(*[speed] * topology.dp))
    ep = draw(st.none() | st.tuples(*[speed] * sizes))
    return msgspec.structs.replace(cost_model, dp_speed=dp, ep_speed=ep)


@st.composite
def placements(draw: st.DrawFn, layers: int, experts: int) -> NDArray[np.int32]:
    """[L, E] slots, any bijection in every layer."""
    if draw(st.booleans()):
        return identity(layers, experts)
    layer = st.permutations(range(experts))
    return np.array([draw(layer) for _ in range(layers)], np.int32)


@st.composite
def layouts(draw: st.DrawFn, samples: int, cells: int) -> NDArray[np.int32]:
    """cell_S [S] without empty cells (samples >= cells)."""
    filled = draw(st.permutations(range(cells)))
    others = [draw(st.integers(0, cells - 1)) for _ in range(samples - cells)]
    return np.array([*filled, *others], np.int32)


@st.composite
def instances(
    draw: st.DrawFn, *, max_cells: int = 8, max_samples: int = 14, alike: bool = False
) -> Instance:
    """A feasible problem: 1 to 3 rows, a cap between tight and loose, and a layout within it.

    `alike`: all ranks are equally fast.
    """
    topology = draw(topologies(max_dp=max_cells))
    rows = draw(st.integers(1, min(3, max_cells // topology.dp)))
    cells = rows * topology.dp
    window = draw(
        windows(min_samples=cells, max_samples=max(cells, max_samples), ranks=topology.ep)
    )
    cell_S = draw(layouts(window.samples, cells))
    tokens_c = np.bincount(cell_S, weights=window.lengths_S, minlength=cells)
    slack = draw(st.sampled_from([0.0, 0.1, 0.5, 3.0]))
    cost_model = draw(cost_models())
    return Instance(
        window,
        topology,
        cost_model if alike else draw(speeds(cost_model, topology)),
        int(tokens_c.max() * (1 + slack)),
        rows,
        cell_S,
        draw(placements(window.layers, window.experts)),
    )
