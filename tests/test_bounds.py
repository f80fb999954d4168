"""Bounds on the slowest shard: below every score, and reached where everything is balanced."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from routepack.attention_bounds import attention_lift
from routepack.bounds import (
    SAFE,
    analytic_bound,
    attention_lift_of_stages,
    best_bound,
    placement_floor_L,
)
from routepack.cost import AttentionStage, Coefficients, CostModel
from routepack.objective import score
from routepack.topology import Topology
from routepack.window import Window
from strategies import Instance, instances, layouts, lowest_peak, placements, random_window


@given(instances(), st.data())
def test_no_layout_and_no_placement_is_below_the_bound(
    instance: Instance, data: st.DataObject
) -> None:
    """The slowest shard of any layout, within the cap or not, under any placement, costs at least
    the analytic bound, rounding included; of any layout within the cap, at least the best bound."""
    window, topology, cost = instance.window, instance.topology, instance.problem.cost
    placement_LE = data.draw(placements(window.layers, window.experts))
    analytic = analytic_bound(window, topology, cost)
    best, method = best_bound(window, topology, cost, instance.token_cap, instance.rows)
    assert 0 <= analytic <= best
    assert (method == "analytic") == (best == analytic)
    drawn_S = data.draw(layouts(window.samples, instance.problem.cells))
    for cell_S in (drawn_S, instance.cell_S):
        rows = instance.problem.to_rows(cell_S)
        slowest = score(window, topology, cost, placement_LE, rows).slowest_shard
        assert analytic <= slowest
        if instance.problem.fits(cell_S):
            assert best <= slowest


class Small(NamedTuple):
    """A problem whose every solution can be tried."""

    window: Window
    topology: Topology
    token_cap: int
    rows: int
    cost: Coefficients


def small(seed: int) -> Small:
    """4 experts on 2 ranks, up to 7 samples in 2 to 4 cells, of which one layout sets the cap.

    Every other instance has as many samples above half of the cap as cells of a group, and more.
    """
    rng = np.random.default_rng(seed)
    rows, shards, width = [(1, 1, 2), (2, 1, 2), (1, 2, 2), (1, 1, 3), (2, 2, 1), (1, 1, 4)][
        seed % 6
    ]
    cells = rows * shards * width
    samples = cells + int(rng.integers(0, 8 - cells))
    lengths_S = rng.integers(1, 30, samples)
    if seed // 6 % 2:
        lengths_S[: 1 + width] += 30
    cell_S = np.concatenate([rng.permutation(cells), rng.integers(0, cells, samples - cells)])
    tokens_c = np.bincount(cell_S, weights=lengths_S, minlength=cells)
    token_cap = int(max(tokens_c.max() * rng.uniform(0.8, 1.1), lengths_S.max()))
    if not feasible(lengths_S, token_cap, cells).size:
        token_cap = int(tokens_c.max())
    window = random_window(rng, lengths_S, 2, 4, 2, skew=float(rng.choice([0, 1, 4])))
    stages = [AttentionStage("full", rng.uniform(0, 30), rng.uniform(0, 30))]
    if rng.random() < 0.5:
        stages.append(AttentionStage("swa", rng.uniform(0, 9), 9.0, int(rng.integers(1, 40))))
    topology = Topology.of(dp=shards * width, ep=2, edp=shards)
    cost = CostModel(tuple(stages), rng.choice([0.0, 1.0, 4.0])).resolve(
        window, topology, token_cap
    )
    return Small(window, topology, token_cap, rows, cost)


def feasible(lengths_S: NDArray[np.int64], token_cap: int, cells: int) -> NDArray[np.int64]:
    """Every layout [n, S] (cell of each sample) within the cap and without an empty cell."""
    layout_nS = np.array(list(itertools.product(range(cells), repeat=len(lengths_S))))
    tokens_nc = np.stack([(layout_nS == c) @ lengths_S for c in range(cells)], axis=1)
    return layout_nS[(tokens_nc.max(axis=1) <= token_cap) & (tokens_nc.min(axis=1) > 0)]


def attention_nB(problem: Small, layout_nS: NDArray[np.int64]) -> NDArray[np.float64]:
    """Attention of every group of every layout."""
    window, cost = problem.window, problem.cost
    cells = problem.rows * problem.topology.dp
    width = problem.topology.ranks_per_shard
    total_nB = np.zeros((len(layout_nS), cells // width))
    for a, b, q_S in zip(cost.linear_T, cost.quadratic_T, cost.quadratic_tokens_TS, strict=True):
        work_S = a * window.lengths_S + b * q_S
        work_nc = np.stack([(layout_nS == c) @ work_S for c in range(cells)], axis=1)
        total_nB += work_nc.reshape(len(work_nc), -1, width).max(axis=2)
    return total_nB


# The ways to put experts 0 to 3 on two ranks, up to the names of the ranks.
PLACEMENTS = np.array([[0, 1, 2, 3], [0, 2, 1, 3], [0, 2, 3, 1]], np.int32)


def lowest_cost(problem: Small) -> float:
    """The slowest shard of the best of all layouts under the best of all placements."""
    window, shards = problem.window, problem.topology.edp
    layout_nS = feasible(window.lengths_S, problem.token_cap, problem.rows * problem.topology.dp)
    group_nS = layout_nS // problem.topology.ranks_per_shard
    attention = attention_nB(problem, layout_nS)
    in_group_BnS = np.stack([group_nS == b for b in range(attention.shape[1])])
    costs, choices = [], list(itertools.product(PLACEMENTS, repeat=window.layers))
    for placement_LE in choices:
        busiest_nB = np.zeros_like(attention)
        for layer, slot_E in enumerate(placement_LE):
            first_S = window.demand_SLE[:, layer, slot_E < 2].sum(axis=1, dtype=np.int64)
            routed_S = window.demand_SLE[:, layer].sum(axis=1, dtype=np.int64)
            first_Bn, routed_Bn = in_group_BnS @ first_S, in_group_BnS @ routed_S
            busiest_nB += np.maximum(first_Bn, routed_Bn - first_Bn).T
        cost_nB = attention + problem.cost.expert * busiest_nB
        costs.append(cost_nB.reshape(len(cost_nB), -1, shards).sum(axis=1).max(axis=1))
    best, at = np.unravel_index(np.argmin(costs), (len(choices), len(layout_nS)))
    lowest = float(costs[int(best)][at])
    dp = problem.topology.dp
    rows = [
        [np.flatnonzero(layout_nS[at] == m * dp + d).tolist() for d in range(dp)]
        for m in range(problem.rows)
    ]
    oracle = score(
        window, problem.topology, problem.cost, np.array(choices[int(best)], np.int32), rows
    )
    assert lowest == pytest.approx(oracle.slowest_shard, rel=1e-12)
    return lowest


def test_no_layout_and_no_placement_at_all_is_below_the_bound() -> None:
    """On 200 small instances every layout and every placement is tried: the lowest cost is at least
    the bound, the lowest attention at least what is claimed of it, and both floors lift some."""
    names = set()
    for seed in range(200):
        problem = small(seed)
        window, topology, token_cap, rows, cost = problem
        lowest = lowest_cost(problem)
        bound, name = best_bound(*problem[:2], cost, token_cap, rows)
        assert analytic_bound(window, topology, cost) <= bound <= lowest
        names.add(name)
        layout_nS = feasible(window.lengths_S, token_cap, rows * topology.dp)
        attention = float(attention_nB(problem, layout_nS).sum(axis=1).min())
        lift = attention_lift_of_stages(window, topology, cost, token_cap, rows)
        balanced = cost.linear_T.sum() * window.lengths_S.sum()
        balanced += (cost.quadratic_T @ cost.quadratic_tokens_TS).sum()
        assert (balanced / topology.ranks_per_shard + lift) * SAFE <= attention
    assert names == {
        "analytic", "attention floor", "placement floor", "attention and placement floors"
    }  # fmt: skip


# Eight equal samples on D = 4, G = 2, R = 2 in two rows, C = 8: a cell costs 4/8 * 3 + 16/64 * 8.
EQUAL = Window(np.full(8, 4), np.tile([[2, 2, 2, 2], [4, 0, 4, 0]], (8, 1, 1)), 2)
TOPOLOGY = Topology.of(dp=4, ep=2, edp=2)
ROWS = [[[0], [1], [2], [3]], [[4], [5], [6], [7]]]
MODEL = CostModel((AttentionStage("full", 3.0, 8.0),), 2.0)


def test_tight_where_all_is_balanced() -> None:
    """
    Two rows: attention 2 * (1.5 + 2) = 7 a shard. Experts: a shard routes 4 * 8 = 32 assignments a
    layer, 16 on either rank, so 2 layers * 16 * 2/8 = 8. Bound and slowest shard are 15.
    """
    cost = MODEL.resolve(EQUAL, TOPOLOGY, 8)
    placement_LE = np.array([[0, 1, 2, 3], [0, 1, 2, 3]], np.int32)
    assert score(EQUAL, TOPOLOGY, cost, placement_LE, ROWS).slowest_shard == 15.0
    assert analytic_bound(EQUAL, TOPOLOGY, cost) == 15.0 * SAFE


def test_a_bad_placement_leaves_the_bound() -> None:
    """Both hot experts of layer 1 on one rank make it cost twice: 19, over a bound of 15."""
    cost = MODEL.resolve(EQUAL, TOPOLOGY, 8)
    placement_LE = np.array([[0, 1, 2, 3], [0, 2, 1, 3]], np.int32)
    assert score(EQUAL, TOPOLOGY, cost, placement_LE, ROWS).slowest_shard == 19.0


def test_an_expert_hotter_than_a_balanced_rank_bounds_its_layer() -> None:
    """
    One sample of 6 tokens on each of two DP ranks, top-1. Layer 0: expert 0 takes 10 of 12, more
    than the 12 / 2 of a balanced rank. Layer 1: 3 a expert. Only experts cost: 10 + 6 = 16.
    """
    demand_SLE = [[[6, 0, 0, 0], [3, 3, 0, 0]], [[4, 1, 1, 0], [0, 0, 3, 3]]]
    window = Window(np.array([6, 6]), np.array(demand_SLE), 1)
    topology = Topology.of(dp=2, ep=2, edp=1)
    cost = CostModel((AttentionStage("none", 0.0, 0.0),), 1.0).resolve(window, topology, 1)
    assert analytic_bound(window, topology, cost) == 16.0 * SAFE


def test_a_load_that_does_not_divide_is_rounded_up() -> None:
    """7 assignments on 2 ranks: the busier one has at least 4, though 3.5 is the mean."""
    window = Window(np.array([7]), np.array([[[3, 2, 1, 1]]]), 1)
    topology = Topology.of(dp=1, ep=2, edp=1)
    cost = CostModel((AttentionStage("none", 0.0, 0.0),), 1.0).resolve(window, topology, 1)
    assert analytic_bound(window, topology, cost) == 4.0 * SAFE


def test_stages_and_shards_enter_as_means() -> None:
    """
    D = 4, G = 2, samples of 8, 4, 2, 2 tokens, C = 8, no experts: T_all = 2 and
    Q_all = (64 + 16 + 4 + 4)/64 = 1.375, with a window of 2 tokens
    Q' = (28 + 12 + 4 + 4)/64 = 0.75. (3 * 2 + 8 * 1.375 + 16 * 0.75) / 4 = 7.25.
    """
    lengths_S = np.array([8, 4, 2, 2])
    window = Window(lengths_S, lengths_S[:, None, None], 1)
    stages = (AttentionStage("full", 3.0, 8.0), AttentionStage("swa", 0.0, 16.0, window_tokens=2))
    topology = Topology.of(dp=4, ep=1, edp=2)
    cost = CostModel(stages, 0.0).resolve(window, topology, 8)
    assert analytic_bound(window, topology, cost) == pytest.approx(7.25, rel=1e-11)


@pytest.mark.parametrize(
    ("demand_E", "ranks", "floor"),
    [
        ([5, 5, 5, 0], 2, 10),  # two of the three hot ones share a rank
        ([10, 3, 3, 3], 2, 13),  # the hottest does not go without company
        ([4, 4, 1, 1, 1, 1], 2, 6),  # balance
        ([9, 1, 1], 3, 9),  # the hottest alone
        ([7, 6, 5, 4, 3, 2, 1, 0], 1, 28),  # one rank holds all
        ([10, 10, 4, 4, 4, 4, 3, 2, 1], 3, 15),  # 20 and the coolest four, by 2
        ([9, 9, 9, 4, 1, 1, 1, 1], 4, 10),  # (27 + 3) / 3
        ([10, 10, 10, 2, 2, 2], 2, 22),  # three hot ones, two ranks
        ([3, 2, 2], 1, 7),
    ],
)
def test_placement_floor_by_hand(demand_E: list[int], ranks: int, floor: int) -> None:
    """The busiest rank's load that no placement is below: the same in any order of experts."""
    assert placement_floor_L(np.array([demand_E, demand_E[::-1]]), ranks).tolist() == [floor] * 2


@given(
    st.sampled_from([(4, 2), (6, 2), (6, 3), (8, 4), (3, 3), (4, 1)]),
    st.lists(st.integers(0, 20), min_size=8, max_size=8),
)
def test_no_placement_is_below_its_floor(sizes: tuple[int, int], counts: list[int]) -> None:
    """Tried with every placement; the floor is never below balance and the hottest expert."""
    experts, ranks = sizes
    demand_E = np.array(counts[:experts])
    floor = int(placement_floor_L(demand_E[None], ranks)[0])
    assert floor >= max(-(-demand_E.sum() // ranks), demand_E.max())
    assert floor <= lowest_peak(demand_E.tolist(), ranks)


@pytest.mark.parametrize(
    ("lengths_S", "cells", "width", "heights"),
    [
        # {10} beside {6, 4}: 48 of 100 stay unused. {5, 5} beside {5, 5}.
        ([10, 6, 5, 5, 5, 5, 4], 4, 2, 100 + 50),
        # {10}, {7, 3}, {7}: the sample of 3 fills up one cell, not two.
        ([10, 7, 7, 3], 3, 3, 100),
        # As many samples as cells: each alone, and the longest beside the longest.
        ([4, 3, 2, 1], 4, 2, 16 + 4),
        # One sample more than cells: 3 and 1 together would be 10.
        ([3, 2, 2, 2, 1], 4, 2, 9 + 4),
        # {9}, then nothing fits beside 8: the shortest has 3. {4, 3, 3} beside {4, 3, 3}.
        ([9, 8, 4, 4, 3, 3, 3, 3], 4, 2, 81 + 34),
        # {3}, {2, 2}, then {1}, {1}: two of 2 may share a cell, so no second group is above 1.
        ([3, 2, 2, 1, 1], 4, 2, 9 + 1),
        # {8}, {5, 5}, then {1}, {1}: 5 and 5 fill a cell, so they do not exclude each other.
        ([8, 5, 5, 1, 1], 4, 2, 64 + 1),
        # Nothing to lift: {5, 5}, {5, 5}.
        ([5, 5, 5, 5], 2, 2, 50),
    ],
)
def test_attention_lift_by_hand(
    lengths_S: list[int], cells: int, width: int, heights: float
) -> None:
    """Work n^2, cap 10: the lowest sum of the groups' heaviest cells, which the bound reaches."""
    work_S = np.square(lengths_S).astype(float)
    lift = attention_lift(np.array(lengths_S), work_S, 10, cells, width)
    assert work_S.sum() / width + lift == pytest.approx(heights, rel=1e-12)


def test_work_by_the_token_is_lifted_only_by_what_does_not_fit() -> None:
    """
    Linear attention, cap 10, two cells side by side. 10 | 7, 3 is level. With 6 and 2 instead of
    7 and 3 the cell beside the 10 is at 8; with 6 alone at 6: heights 10, means 9 and 8.
    """
    for lengths, height in (([10, 7, 3], 10), ([10, 6, 2], 10), ([10, 6], 10)):
        lift = attention_lift(np.array(lengths), np.array(lengths, float), 10, 2, 2)
        assert sum(lengths) / 2 + lift == pytest.approx(height, rel=1e-12)


@pytest.mark.parametrize(
    ("demand_SE", "quadratic", "bound", "name"),
    [
        ([[5, 5, 5, 0]], 0.0, 10 / 15, "placement floor"),  # balance is 8
        ([[4, 4, 0, 0]], 0.0, 4 / 8, "analytic"),  # both give 4: the simpler one is named
        ([[3, 0, 0, 0], [0, 1, 0, 0]], 9.0, 9 + 3 / 3, "attention floor"),
        ([[3, 3, 3, 0], [0, 0, 0, 1]], 9.0, 9 + 6 / 9, "attention and placement floors"),
    ],
)
def test_the_best_bound_is_named(
    demand_SE: list[list[int]], quadratic: float, bound: float, name: str
) -> None:
    """Top-1 on two ranks, each sample alone, the cap the longest: its attention is `quadratic`,
    and the expert term the busiest rank's load by the cap."""
    lengths_S = np.array(demand_SE).sum(axis=1)
    window = Window(lengths_S, np.array(demand_SE)[:, None], 1)
    topology = Topology.of(dp=len(lengths_S), ep=2, edp=1)
    cap = int(lengths_S.max())
    cost = CostModel((AttentionStage("full", 0.0, quadratic),), 1.0).resolve(window, topology, cap)
    value, found = best_bound(window, topology, cost, cap, 1)
    assert (value, found) == (pytest.approx(bound, rel=1e-11), name)


def test_the_safety_factor_is_small() -> None:
    """It costs less than a millionth of a millionth, so gaps are meaningful to ten digits."""
    assert 1 - 1e-12 < SAFE < 1
