"""The oracle against numbers worked out by hand, and what it may not depend on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.cost import AttentionStage, CostModel
from routepack.objective import rank_load_LR, row_costs, score
from routepack.topology import Topology
from routepack.window import Window
from strategies import Instance, instances

# D = 4 in G = 2 shards {0, 1} and {2, 3}; R = 2; C = 8; L = 2; E = 4, two slots a rank; K = 1.
TOPOLOGY = Topology.of(dp=4, ep=2, edp=2)
LENGTHS_S = [4, 2, 6, 4, 2, 8, 4, 2, 2]
DEMAND_SLE = [
    [[4, 0, 0, 0], [1, 1, 1, 1]],  # 0
    [[0, 2, 0, 0], [0, 0, 0, 2]],  # 1
    [[3, 0, 3, 0], [6, 0, 0, 0]],  # 2
    [[0, 0, 0, 4], [0, 2, 2, 0]],  # 3
    [[1, 1, 0, 0], [0, 0, 2, 0]],  # 4
    [[2, 2, 2, 2], [4, 4, 0, 0]],  # 5
    [[0, 4, 0, 0], [0, 0, 4, 0]],  # 6
    [[0, 0, 1, 1], [2, 0, 0, 0]],  # 7
    [[1, 1, 0, 0], [0, 0, 0, 2]],  # 8
]
ROWS = [[[0], [1], [2], [3]], [[4, 6], [5], [7], [8]]]
# Layer 0 keeps experts {0, 1} on rank 0; layer 1 pairs {0, 2} and {1, 3}.
PLACEMENT_LE = np.array([[0, 1, 2, 3], [0, 2, 1, 3]], np.int32)
MODEL = CostModel(
    (AttentionStage("full", 8.0, 64.0), AttentionStage("swa", 16.0, 32.0, window_tokens=2)), 4.0
)


def hand_window() -> Window:
    return Window(np.array(LENGTHS_S), np.array(DEMAND_SLE, np.uint16), 1)


def test_an_instance_by_hand() -> None:
    """
    Coefficients, C = 8: stage "full" costs T/1 + Q/1 of tokens and squares (8/8, 64/64), stage
    "swa" 2 T + Q'/2 with Q' = m(2n - m), m = min(n, 2); an assignment on a busiest rank 4/8.

        n           4   2   6   8
        full        4+16=20   2+4=6   6+36=42   8+64=72
        Q'         12   4  20  28
        swa         8+6=14    4+2=6   12+10=22  16+14=30

    Row 0, shard 0: cells {0}, {1}: 20 | 6 and 14 | 6, A = 20 + 14 = 34.
      layer 0: rank 0 (experts 0, 1) 4 + 2 = 6, rank 1 0; layer 1: rank 0 (experts 0, 2) 2 + 0,
      rank 1 (experts 1, 3) 2 + 2 = 4. X = (6 + 4) / 2 = 5.
    Row 0, shard 1: cells {2}, {3}: A = 42 + 22 = 64. Layer 0: rank 0 3 + 0, rank 1 3 + 4 = 7;
      layer 1: rank 0 6 + 2 = 8, rank 1 0 + 2. X = (7 + 8) / 2 = 7.5.
    Row 1, shard 0: cells {4, 6}, {5}: full 6 + 20 | 72, swa 6 + 14 | 30, A = 72 + 30 = 102.
      Layer 0: rank 0 2 + 4 + 4 = 10, rank 1 4; layer 1: rank 0 2 + 4 + 4 = 10, rank 1 0 + 0 + 4.
      X = (10 + 10) / 2 = 10.
    Row 1, shard 1: cells {7}, {8}: A = 6 + 6 = 12. Both ranks get 2 at both layers. X = 2.

    U = (34 + 5) + (102 + 10) = 151 and (64 + 7.5) + (12 + 2) = 85.5; sum 236.5; largest J 112.
    """
    window = hand_window()
    cost = MODEL.resolve(window, TOPOLOGY, 8)
    attention_MG, expert_MG, load_MGLR = row_costs(window, TOPOLOGY, cost, PLACEMENT_LE, ROWS)
    assert attention_MG.tolist() == [[34.0, 64.0], [102.0, 12.0]]
    assert expert_MG.tolist() == [[5.0, 7.5], [10.0, 2.0]]
    assert load_MGLR.tolist() == [
        [[[6, 0], [2, 4]], [[3, 7], [8, 2]]],
        [[[10, 4], [10, 4]], [[2, 2], [2, 2]]],
    ]
    result = score(window, TOPOLOGY, cost, PLACEMENT_LE, ROWS)
    assert result.key == (151.0, 236.5, 112.0)
    assert (result.attention, result.expert) == (212.0, 24.5)


def test_the_stage_maxima_may_lie_in_different_cells() -> None:
    """A sample of 5 tokens has most pairs, two of 3 have most tokens: A = 25 + 6, though no cell
    costs more than 25 + 5."""
    window = Window(np.array([5, 3, 3]), np.array([[[5]], [[3]], [[3]]]), 1)
    model = CostModel((AttentionStage("full", 0.0, 1.0), AttentionStage("linear", 1.0, 0.0)), 0.0)
    topology = Topology.of(dp=2, ep=1, edp=1)
    cost = model.resolve(window, topology, 1)
    placement_LE = np.zeros((1, 1), np.int32)
    result = score(window, topology, cost, placement_LE, [[[0], [1, 2]]])
    assert result.attention == 31.0


def test_rank_loads_follow_the_slots() -> None:
    """Four experts on two ranks: slots 0 and 1 are rank 0, wherever the experts stand."""
    demand_LE = np.array([[1, 2, 4, 8], [1, 2, 4, 8]])
    placement_LE = np.array([[0, 1, 2, 3], [3, 0, 2, 1]], np.int32)
    assert rank_load_LR(demand_LE, placement_LE, 2).tolist() == [[3, 12], [10, 5]]


def test_shards_are_read_off_the_topology() -> None:
    """With interleaved shards {0, 2} and {1, 3} the cells of a shard are not neighbours."""
    topology = Topology(dp=4, ep=2, edp=2, order="tp-cp-dp-ep-pp")
    window = hand_window()
    cost = MODEL.resolve(window, topology, 8)
    interleaved = [[row[0], row[2], row[1], row[3]] for row in ROWS]
    expected = score(window, TOPOLOGY, cost, PLACEMENT_LE, ROWS)
    assert topology.groups == ((0, 2), (1, 3))
    assert score(window, topology, cost, PLACEMENT_LE, interleaved) == expected


@given(instances(alike=True), st.randoms(use_true_random=False))
def test_order_does_not_matter(instance: Instance, random: object) -> None:
    """Rows, the cells of a shard in a row, and the samples of a cell may be listed in any order:
    the score is the same to the last bit."""
    shuffle = random.shuffle  # type: ignore[attr-defined]
    topology, cost = instance.topology, instance.problem.cost
    rows = [list(map(list, row)) for row in instance.problem.to_rows(instance.cell_S)]
    expected = score(instance.window, topology, cost, instance.placement_LE, rows)
    shuffle(rows)
    for row in rows:
        for group in topology.groups:
            cells = [row[d] for d in group]
            shuffle(cells)
            for d, cell in zip(group, cells, strict=True):
                shuffle(cell)
                row[d] = cell
    assert score(instance.window, topology, cost, instance.placement_LE, rows) == expected


@given(instances(alike=True), st.data())
def test_only_ranks_matter_not_slots(instance: Instance, data: st.DataObject) -> None:
    """Exchanging the slots of a rank, or whole ranks, changes nothing."""
    window, topology, cost = instance.window, instance.topology, instance.problem.cost
    rows = instance.problem.to_rows(instance.cell_S)
    expected = score(window, topology, cost, instance.placement_LE, rows)
    per_rank = window.experts // topology.ep
    ranks = data.draw(st.permutations(range(topology.ep)))
    slots = data.draw(st.permutations(range(per_rank)))
    renamed = [ranks[s // per_rank] * per_rank + slots[s % per_rank] for s in range(window.experts)]
    renamed_LE = np.array(renamed, np.int32)[instance.placement_LE]
    assert score(window, topology, cost, renamed_LE, rows) == expected


@given(instances())
def test_parts_add_up(instance: Instance) -> None:
    """The total is attention plus expert, no shard exceeds the slowest, no group the worst."""
    problem, topology = instance.problem, instance.topology
    rows = problem.to_rows(instance.cell_S)
    result = score(instance.window, topology, problem.cost, instance.placement_LE, rows)
    assert result.attention + result.expert == pytest.approx(result.total, rel=1e-12)
    slack = 1 + 1e-12
    assert result.total <= result.slowest_shard * topology.edp * slack
    assert result.slowest_shard <= result.worst_row * problem.rows * slack
