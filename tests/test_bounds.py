"""The analytic bound: below every score, and reached where everything is balanced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.bounds import SAFE, analytic_bound
from routepack.cost import AttentionStage, CostModel
from routepack.objective import score
from routepack.topology import Topology
from routepack.window import Window
from strategies import Instance, instances, layouts, placements


@given(instances(), st.data())
def test_no_layout_and_no_placement_is_below_the_bound(
    instance: Instance, data: st.DataObject
) -> None:
    """The slowest shard of any layout, within the cap or not, under any placement, costs at least
    the bound, rounding included."""
    window, problem = instance.window, instance.problem
    cell_S = data.draw(layouts(window.samples, problem.cells))
    placement_LE = data.draw(placements(window.layers, window.experts))
    rows = problem.to_rows(cell_S)
    result = score(window, problem.topology, problem.cost, placement_LE, rows)
    bound = analytic_bound(window, problem.topology, problem.cost)
    assert 0 <= bound <= result.slowest_shard


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
    """With both hot experts of layer 1 on one rank that layer costs twice: 15 + 4 over the same 15."""
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


def test_the_safety_factor_is_small() -> None:
    """It costs less than a millionth of a millionth, so gaps are meaningful to ten digits."""
    assert 1 - 1e-12 < SAFE < 1
