"""Bounds on the slowest shard: below every score, and reached where everything is balanced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.bounds import SAFE, analytic_bound, best_bound, placement_floor_L
from routepack.cost import AttentionStage, CostModel
from routepack.objective import score
from routepack.topology import Topology
from routepack.window import Window
from strategies import Instance, instances, layouts, lowest_peak, placements


@given(instances(), st.data())
def test_no_layout_and_no_placement_is_below_the_bound(
    instance: Instance, data: st.DataObject
) -> None:
    """The slowest shard of any layout, within the cap or not, under any placement, costs at least
    the best bound, rounding included, and that is no less than the analytic one."""
    window, problem = instance.window, instance.problem
    cell_S = data.draw(layouts(window.samples, problem.cells))
    placement_LE = data.draw(placements(window.layers, window.experts))
    rows = problem.to_rows(cell_S)
    result = score(window, problem.topology, problem.cost, placement_LE, rows)
    analytic = analytic_bound(window, problem.topology, problem.cost)
    best, method = best_bound(window, problem.topology, problem.cost)
    assert 0 <= analytic <= best <= result.slowest_shard
    assert method == ("analytic" if best == analytic else "placement floor")


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


def test_the_best_bound_is_named() -> None:
    """Only experts cost. 5 5 5 0 on two ranks: 10 by the floor, above the 8 of balance; 4 4 on two
    ranks: both give 4, and the simpler one is named."""
    topology = Topology.of(dp=1, ep=2, edp=1)
    model = CostModel((AttentionStage("none", 0.0, 0.0),), 1.0)
    for demand_E, expected in (
        ([5, 5, 5, 0], (10 * SAFE, "placement floor")), ([4, 4], (4 * SAFE, "analytic"))
    ):  # fmt: skip
        window = Window(np.array([sum(demand_E)]), np.array([[demand_E]]), 1)
        assert best_bound(window, topology, model.resolve(window, topology, 1)) == expected


def test_the_safety_factor_is_small() -> None:
    """It costs less than a millionth of a millionth, so gaps are meaningful to ten digits."""
    assert 1 - 1e-12 < SAFE < 1
