"""Pipeline stages: costs by stage, 1F1B with unequal rows, and the order of rows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from routepack.cost import AttentionStage, CostModel
from routepack.errors import InputError
from routepack.objective import row_costs
from routepack.pipeline import Slowest, Stages, one_f_one_b, ordered_rows, slowest, stage_costs
from routepack.topology import Topology
from routepack.window import Window
from strategies import SEEDS, Instance, instances


@st.composite
def costs(draw: st.DrawFn, *, max_rows: int = 9, max_shards: int = 3) -> NDArray[np.int64]:
    """[M, G, P] of whole multiples of 4, so that a forward share of 1/4 has no rounding."""
    shape = (
        draw(st.integers(1, max_rows)),
        draw(st.integers(1, max_shards)),
        draw(st.integers(1, 5)),
    )
    return 4 * np.random.default_rng(draw(SEEDS)).integers(0, draw(st.integers(2, 60)), shape)


def longest_path(cost_MP: NDArray[np.int64], forward_share: Fraction) -> Fraction:
    """1F1B by its definition: the longest path in the graph of what waits for what, recursively."""
    rows, stages = cost_MP.shape

    def own_order(p: int) -> list[tuple[str, int]]:
        ahead = min(stages - 1 - p, rows)
        forwards = [("F", m) for m in range(rows)]
        backwards = [("B", m) for m in range(rows)]
        steady = itertools.chain(*zip(forwards[ahead:], backwards, strict=False))
        return [*forwards[:ahead], *steady, *backwards[rows - ahead :]]

    orders = [own_order(p) for p in range(stages)]

    @cache
    def end(p: int, kind: str, m: int) -> Fraction:
        waits = []
        if (i := orders[p].index((kind, m))) > 0:
            waits.append(end(p, *orders[p][i - 1]))
        if kind == "F" and p > 0:
            waits.append(end(p - 1, "F", m))
        if kind == "B" and p < stages - 1:
            waits.append(end(p + 1, "B", m))
        share = forward_share if kind == "F" else 1 - forward_share
        return max(waits, default=Fraction(0)) + share * int(cost_MP[m, p])

    return max(end(p, *orders[p][-1]) for p in range(stages))


def largest(
    cost_MGP: NDArray[np.int64] | NDArray[np.float64], forward_share: float = 1 / 3
) -> float:
    return max(one_f_one_b(c_MP, forward_share).makespan for c_MP in np.swapaxes(cost_MGP, 0, 1))


def test_two_unequal_rows_by_hand() -> None:
    """
    P = 2, M = 2, a third of it forward; rows of 3 and 6 at stage 0, of 6 and 3 at stage 1.

        stage 0  F0 0-1  F1 1-3                  B0 7-9   B1 10-14
        stage 1          F0 1-3  B0 3-7  F1 7-8  B1 8-10

    Stage 0 warms up with F0, then runs F1 (2), B0 (2) and last B1 (4). B0 there begins at 7, when
    stage 1's B0 ends, and ends at 9; B1's gradient comes at 10, and B1 ends at 14.
    """
    found = one_f_one_b([[3, 6], [6, 3]])
    assert (found.makespan, found.busy, found.fill) == pytest.approx((14, 9, 5))


def test_the_other_order_by_hand() -> None:
    """
    The same rows turned round: stage 0 has F0 2, F1 1, B0 4, B1 2; stage 1 1, 2, 2, 4.

        stage 0  F0 0-2  F1 2-3       B0 5-9         B1 11-13
        stage 1          F0 2-3  B0 3-5  F1 5-7  B1 7-11
    """
    assert one_f_one_b([[6, 3], [3, 6]]).makespan == pytest.approx(13)
    assert ordered_rows(np.array([[[3, 6]], [[6, 3]]])).tolist() == [1, 0]


def test_three_stages_warm_up_by_hand() -> None:
    """
    P = 3, M = 3, half forward, so all of a row's operations last the same: rows 2, 4, 6, that is
    1, 2, 3 for each. Stage 0 runs F0 F1 | F2 B0 | B1 B2, stage 1 F0 | F1 B0 F2 B1 | B2.

        stage 0  F0 0-1  F1 1-3  F2 3-6  B0 6-7  B1 11-13  B2 18-21
        stage 1  F0 1-2  F1 3-5  B0 5-6  F2 6-9  B1 9-11   B2 15-18
        stage 2  F0 2-3  B0 3-4  F1 5-7  B1 7-9  F2 9-12   B2 12-15
    """
    assert one_f_one_b([[2] * 3, [4] * 3, [6] * 3], 0.5).makespan == 21


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 50), st.sampled_from([0.25, 0.5]))
def test_equal_rows_take_m_plus_p_minus_1(rows: int, stages: int, t: int, share: float) -> None:
    """Equal rows of t take (M + P - 1) * t, and the fill is (P - 1) * t."""
    found = one_f_one_b(np.full((rows, stages), 4 * t), share)
    assert found.makespan == 4 * t * (rows + stages - 1)
    assert (found.busy, found.fill) == (4 * t * rows, 4 * t * (stages - 1))


@given(costs())
def test_the_simulation_is_the_longest_path(cost_MGP: NDArray[np.int64]) -> None:
    """Equal to an independent recursion in fractions, exactly where floats need no rounding."""
    for cost_MP in np.swapaxes(cost_MGP, 0, 1):
        found = one_f_one_b(cost_MP, 0.25).makespan
        assert found == longest_path(cost_MP, Fraction(1, 4))
        assert one_f_one_b(cost_MP).makespan == pytest.approx(
            float(longest_path(cost_MP, Fraction(1, 3))), rel=1e-12
        )


@given(costs())
def test_makespan_is_at_least_every_stage_and_every_row(cost_MGP: NDArray[np.int64]) -> None:
    """No stage ends before its own work, and no row before all its stages; fill is not negative."""
    for cost_MP in np.swapaxes(cost_MGP, 0, 1):
        found = one_f_one_b(cost_MP, 0.25)
        assert found.busy == cost_MP.sum(axis=0).max()
        assert found.fill >= 0
        assert found.makespan >= cost_MP.sum(axis=1).max()
        assert found.makespan <= cost_MP.sum()


# Layer 0 and 2 at stage 0, layer 1 at stage 1. D = 2, R = 2, G = 1, C = 4, K = 1, one slot a rank.
HAND_TOPOLOGY = Topology.of(dp=2, ep=2)
HAND_ROWS = [[[0], [1]], [[2], [3]]]
HAND_MODEL = CostModel((AttentionStage("full", 4.0, 16.0),), 8.0)


def hand_window() -> Window:
    demand_SLE = [
        [[2, 0], [1, 1], [0, 2]],
        [[1, 1], [0, 2], [1, 1]],
        [[4, 0], [2, 2], [4, 0]],
        [[0, 1], [1, 0], [0, 1]],
    ]
    return Window(np.array([2, 2, 4, 1]), np.array(demand_SLE, np.uint16), 1)


def hand_costs(stages: Stages) -> NDArray[np.float64]:
    window = hand_window()
    cost = HAND_MODEL.resolve(window, HAND_TOPOLOGY, 4)
    placement_LE = np.tile(np.arange(2, dtype=np.int32), (3, 1))
    return stage_costs(window, HAND_TOPOLOGY, cost, placement_LE, HAND_ROWS, stages)


def test_costs_of_stages_by_hand() -> None:
    """
    Attention n + n^2: row 0 has 6 on both cells, row 1 20. An assignment costs 8/4 = 2.
    Busiest ranks, row 0: 3, 3, 3; row 1: 4, 3 (2 + 1), 4.
    Two thirds of attention at stage 0: row 0 4 + 2 * 6 = 16 and 2 + 2 * 3 = 8; row 1 13.33 + 16
    and 6.67 + 6.
    """
    cost_MGP = hand_costs(Stages(stage_of_layer=(0, 1, 0)))
    assert cost_MGP[:, 0] == pytest.approx(np.array([[16, 8], [40 / 3 + 16, 20 / 3 + 6]]))
    found = slowest(cost_MGP)
    assert (found.stage, found.shard) == (0, 0)
    assert found.cost == pytest.approx(16 + 40 / 3 + 16)


def test_dense_layers_carry_attention() -> None:
    """With a dense layer more at stage 1 both have half of attention: 3 + 12 and 3 + 6."""
    found = hand_costs(Stages(stage_of_layer=(0, 1, 0), layers_per_stage=(2, 2)))
    assert found[0, 0].tolist() == [15, 9]
    shares = hand_costs(Stages(stage_of_layer=(0, 1, 0), attention_share=(0.5, 0.5)))
    assert shares.tolist() == found.tolist()


def test_a_stage_may_hold_dense_layers_only() -> None:
    """Then it has its share of attention and no expert term."""
    found = hand_costs(Stages(stage_of_layer=(1, 1, 1), layers_per_stage=(1, 3)))
    assert found[0, 0].tolist() == [1.5, 4.5 + 18]


def test_ties_go_to_the_lowest_shard_then_stage() -> None:
    """U = 3 at three of the four."""
    assert slowest([[[1, 3], [3, 3]]]) == Slowest(stage=1, shard=0, cost=3.0)


@given(instances(), st.data())
def test_stages_add_up_to_the_oracle(instance: Instance, data: st.DataObject) -> None:
    """One stage is the oracle's cost by ==; several add up to it."""
    window, topology = instance.window, instance.topology
    cost = instance.cost_model.resolve(window, topology, instance.token_cap)
    cells: list[list[int]] = [[] for _ in range(instance.rows * topology.dp)]
    for sample, cell in enumerate(instance.cell_S.tolist()):
        cells[cell].append(sample)
    rows = [cells[m * topology.dp : (m + 1) * topology.dp] for m in range(instance.rows)]
    attention_MG, expert_MG, _ = row_costs(window, topology, cost, instance.placement_LE, rows)

    def found(stage_of_layer: list[int], layers: tuple[int, ...]) -> NDArray[np.float64]:
        stages = Stages(stage_of_layer=tuple(stage_of_layer), layers_per_stage=layers)
        return stage_costs(window, topology, cost, instance.placement_LE, rows, stages)

    one = found([0] * window.layers, (window.layers,))
    assert one[:, :, 0].tolist() == (attention_MG + expert_MG).tolist()
    stage = st.lists(st.integers(0, 2), min_size=window.layers, max_size=window.layers)
    three = found(data.draw(stage), (window.layers, window.layers + 1, window.layers + 2))
    np.testing.assert_allclose(three.sum(axis=2), attention_MG + expert_MG, rtol=1e-12)


def test_consecutive_layers_from_a_window() -> None:
    """Four layers, the first dense, in stages of 2 and 2: MoE layers 1 | 2, 3."""
    stages = Stages.of((1, 2, 3), (2, 2))
    assert stages == Stages(stage_of_layer=(0, 1, 1), layers_per_stage=(2, 2))
    assert stages.count == 2
    assert stages.share_P.tolist() == [0.5, 0.5]


def test_stages_need_not_ascend_and_survive_a_file() -> None:
    """A V-shaped map is accepted; the record goes through JSON and back."""
    stages = Stages(stage_of_layer=(0, 1, 1, 0), forward_share=0.25)
    assert stages.share_P.tolist() == [0.5, 0.5]
    assert msgspec.json.decode(msgspec.json.encode(stages), type=Stages) == stages


@given(costs(max_rows=5))
def test_few_rows_are_ordered_optimally(cost_MGP: NDArray[np.int64]) -> None:
    """Up to 7 rows no order has a lower largest makespan over shards."""
    order = ordered_rows(cost_MGP, 0.25)
    everything = itertools.permutations(range(len(cost_MGP)))
    best = min(largest(cost_MGP[list(p)], 0.25) for p in everything)
    assert largest(cost_MGP[order], 0.25) == best


@given(costs(max_rows=14))
def test_ordering_is_never_worse_and_repeats_itself(cost_MGP: NDArray[np.int64]) -> None:
    """A permutation, no slower than the given order, the same each time."""
    order = ordered_rows(cost_MGP)
    assert sorted(order.tolist()) == list(range(len(cost_MGP)))
    assert largest(cost_MGP[order]) <= largest(cost_MGP)
    assert ordered_rows(cost_MGP).tolist() == order.tolist()
    # work of stages does not depend on the order
    assert slowest(cost_MGP[order]) == slowest(cost_MGP)


@given(costs(max_rows=10, max_shards=1))
def test_an_order_is_kept_where_none_is_better(cost_MGP: NDArray[np.int64]) -> None:
    """Equal rows, or a single stage: every order takes as long, so the given one stays."""
    equal_MGP = np.repeat(cost_MGP[:1], len(cost_MGP), axis=0)
    assert ordered_rows(equal_MGP).tolist() == list(range(len(cost_MGP)))
    assert ordered_rows(cost_MGP[:, :, :1]).tolist() == list(range(len(cost_MGP)))


def test_many_rows_come_close_to_the_best_of_random_orders() -> None:
    """With 16 rows the order found is below the best of 300 random ones."""
    rng = np.random.default_rng(1)
    cost_MGP = rng.uniform(1, 4, (16, 2, 1)) * rng.uniform(0.9, 1.1, (16, 2, 4))
    drawn = min(largest(cost_MGP[rng.permutation(16)]) for _ in range(300))
    assert largest(cost_MGP[ordered_rows(cost_MGP)]) < drawn


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Stages(stage_of_layer=()),
            "stage_of_layer: expected the stage of each MoE layer, found none",
        ),
        (
            lambda: Stages(stage_of_layer=(0, -1)),
            "stage_of_layer[1] = -1: expected a whole number of at least 0",
        ),
        (
            lambda: Stages(stage_of_layer=(0, 2, 2)),
            "stage_of_layer: expected a layer at stage 1, found none",
        ),
        (
            lambda: Stages(stage_of_layer=(0, 2), layers_per_stage=(1, 1)),
            "stage_of_layer[1] = 2: expected a stage in 0..1",
        ),
        (
            lambda: Stages(stage_of_layer=(0, 1, 1), layers_per_stage=(3, 1)),
            "layers_per_stage[1] = 1: expected at least its 2 MoE layers",
        ),
        (
            lambda: Stages(stage_of_layer=(0, 1), layers_per_stage=(1, 0)),
            "layers_per_stage[1] = 0: expected a whole number of at least 1",
        ),
        (
            lambda: Stages(stage_of_layer=(0, 1), layers_per_stage=()),
            "layers_per_stage: expected the layers of each stage, found none",
        ),
        (
            lambda: Stages(
                stage_of_layer=(0, 1), layers_per_stage=(1, 1), attention_share=(0.5, 0.5)
            ),
            "attention_share: expected without layers_per_stage, both given",
        ),
        (
            lambda: Stages(stage_of_layer=(0, 1), attention_share=(0.5, 1.5)),
            "attention_share[1] = 1.5: expected a number in 0..1",
        ),
        (
            lambda: Stages(stage_of_layer=(0, 1), attention_share=(0.5, 0.25)),
            "attention_share: expected shares that add up to 1, found 0.75",
        ),
        (
            lambda: Stages(stage_of_layer=(0,), forward_share=1.0),
            "forward_share = 1.0: expected a number between 0 and 1",
        ),
        (
            lambda: Stages.of((1, 4), (2, 2)),
            "moe_layers[1] = 4: expected one of the 4 layers of layers_per_stage",
        ),
        (
            lambda: hand_costs(Stages(stage_of_layer=(0, 1))),
            "len(stage_of_layer) = 2: expected 3 layers, as in the window",
        ),
        (
            lambda: one_f_one_b([1.0, 2.0]),
            "cost.shape = (2,): expected [M, P], none of them 0",
        ),
        (
            lambda: ordered_rows(np.ones((0, 1, 2))),
            "cost.shape = (0, 1, 2): expected [M, G, P], none of them 0",
        ),
        (
            lambda: one_f_one_b([[1.0, float("nan")]]),
            "cost[0, 1] = nan: expected a finite number of at least 0",
        ),
        (
            lambda: one_f_one_b([[1.0]], 0.0),
            "forward_share = 0.0: expected a number between 0 and 1",
        ),
    ],
)
def test_what_is_refused(make: Callable[[], object], message: str) -> None:
    """One line with field, index, value and what was expected."""
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        make()
