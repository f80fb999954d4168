"""Expert placement: balanced on the whole window, few experts moved, then aware of rows."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from routepack.budget import Budget, Meter, Phase
from routepack.cost import DEFAULT
from routepack.errors import InfeasibleError
from routepack.kernels.layout import UNLIMITED
from routepack.kernels.placing import longest_first, swap_descent
from routepack.kernels.rowaware import anneal_layers, group_demand
from routepack.placement import (
    Nodes,
    balanced_placement,
    balanced_ranks,
    identity,
    ranks_of,
    relabel,
    require_whole,
    row_aware_placement,
)
from routepack.plan import validate_placement
from routepack.topology import Topology
from routepack.window import Window
from strategies import SEEDS, Instance, instances, lowest_peak, placements


def loads(demand_E: NDArray[np.int64], rank_E: NDArray[np.int32], ranks: int) -> list[int]:
    """Demand on each rank, counted here."""
    return [int(demand_E[rank_E == r].sum()) for r in range(ranks)]


def lpt(demand_E: list[int], ranks: int) -> list[int]:
    """Longest processing time first with E/R experts a rank, in plain Python."""
    load, members = [0] * ranks, [0] * ranks
    rank_E = [-1] * len(demand_E)
    for e in sorted(range(len(demand_E)), key=lambda e: -demand_E[e]):
        open_ranks = [r for r in range(ranks) if members[r] < len(demand_E) // ranks]
        r = min(open_ranks, key=lambda r: load[r])
        rank_E[e], load[r], members[r] = r, load[r] + demand_E[e], members[r] + 1
    return rank_E


@st.composite
def demands(draw: st.DrawFn, sizes: list[tuple[int, int]]) -> tuple[NDArray[np.int64], int]:
    """Demand [L, E] and R, of one of `sizes` (E, R): some experts hot, some equal, some idle."""
    experts, ranks = draw(st.sampled_from(sizes))
    layers = draw(st.integers(1, 3))
    count = st.one_of(st.integers(0, 5), st.integers(0, 100))
    demand = [draw(st.lists(count, min_size=experts, max_size=experts)) for _ in range(layers)]
    return np.array(demand, np.int64), ranks


SIZES = [(1, 1), (4, 1), (2, 2), (4, 2), (6, 3), (8, 4), (12, 3), (8, 8), (16, 4)]


# LPT and swap descent


def test_lpt_by_hand() -> None:
    """10 to rank 0, 6 to rank 1, 5 to the lighter rank 1, and 1 where the last slot is, though rank
    0 is no lighter by then: 11 and 11."""
    rank_LE = np.empty((1, 4), np.int32)
    longest_first(np.array([[5, 10, 1, 6]]), 2, rank_LE)
    assert rank_LE.tolist() == [[1, 0, 0, 1]]


def test_lpt_breaks_ties_by_the_lowest_index() -> None:
    """Equal experts go round the ranks in their order."""
    rank_LE = np.empty((1, 6), np.int32)
    longest_first(np.full((1, 6), 7), 3, rank_LE)
    assert rank_LE.tolist() == [[0, 1, 2, 0, 1, 2]]


def test_descent_by_hand() -> None:
    """3 3 2 2 2 0: LPT gives {3, 2, 2} and {3, 2, 0}; swapping the 3 of the first with the 2 of the
    second makes both 6, and the swap of lowest indices is taken."""
    demand_LE, rank_LE = np.array([[3, 3, 2, 2, 2, 0]]), np.empty((1, 6), np.int32)
    longest_first(demand_LE, 2, rank_LE)
    assert rank_LE.tolist() == [[0, 1, 0, 1, 0, 1]]
    swap_descent(demand_LE, 2, rank_LE)
    assert rank_LE.tolist() == [[1, 1, 0, 0, 0, 1]]
    assert loads(demand_LE[0], rank_LE[0], 2) == [6, 6]


@given(demands(SIZES))
def test_descent_starts_from_lpt_and_never_raises_the_peak(
    case: tuple[NDArray[np.int64], int],
) -> None:
    """The first step is LPT; descent ends with E/R experts a rank and no higher peak, and there no
    swap with the busiest rank lowers the larger of the two loads."""
    demand_LE, ranks = case
    layers, experts = demand_LE.shape
    rank_LE = np.empty((layers, experts), np.int32)
    longest_first(demand_LE, ranks, rank_LE)
    assert rank_LE.tolist() == [lpt(demand_E, ranks) for demand_E in demand_LE.tolist()]
    before = [max(loads(*pair, ranks)) for pair in zip(demand_LE, rank_LE, strict=True)]
    swap_descent(demand_LE, ranks, rank_LE)
    for demand_E, rank_E, peak in zip(demand_LE, rank_LE, before, strict=True):
        assert np.bincount(rank_E, minlength=ranks).tolist() == [experts // ranks] * ranks
        load = loads(demand_E, rank_E, ranks)
        assert max(load) <= peak
        top = load.index(max(load))
        for a, b in itertools.product(np.flatnonzero(rank_E == top), np.flatnonzero(rank_E != top)):
            moved = demand_E[a] - demand_E[b]
            assert max(load[top] - moved, load[rank_E[b]] + moved) >= load[top]


@given(demands([(6, 2), (6, 3), (8, 2), (8, 4), (9, 3)]))
def test_the_peak_is_within_four_thirds_of_the_optimum(
    case: tuple[NDArray[np.int64], int],
) -> None:
    """On instances small enough to try all partitions."""
    demand_LE, ranks = case
    rank_LE = balanced_ranks(demand_LE, ranks)
    for demand_E, rank_E in zip(demand_LE, rank_LE, strict=True):
        optimum = lowest_peak(demand_E.tolist(), ranks)
        assert optimum <= max(loads(demand_E, rank_E, ranks)) <= 4 / 3 * optimum


# Slots


def test_ranks_of_slots() -> None:
    """Slots 0 and 1 are on rank 0, slots 2 and 3 on rank 1."""
    assert identity(2, 4).tolist() == [[0, 1, 2, 3]] * 2
    assert ranks_of(np.array([[3, 0, 2, 1]], np.int32), 2).tolist() == [[1, 0, 1, 0]]


def test_relabel_by_hand() -> None:
    """
    Experts 0..5 in slots 0..5 of three ranks. The parts {2, 3}, {0, 5} and {1, 4}: the first is
    where ranks 1 is now and stays; {0, 5} may keep one expert on rank 0 or 2, {1, 4} likewise.
    Four stay, and of the two that move each takes the slot that is free on its rank.
    """
    rank_LE = np.array([[1, 2, 0, 0, 2, 1]], np.int32)
    slots_E = relabel(rank_LE, 3, identity(1, 6))[0].tolist()
    assert slots_E in ([0, 5, 2, 3, 4, 1], [4, 1, 2, 3, 0, 5])


def test_relabel_keeps_slots_inside_a_rank() -> None:
    """Where no expert changes rank nothing moves, however the ranks are numbered."""
    current_LE = np.array([[3, 0, 2, 1], [1, 3, 0, 2]], np.int32)
    renamed_LE = 1 - ranks_of(current_LE, 2)
    assert relabel(renamed_LE, 2, current_LE).tolist() == current_LE.tolist()


@given(demands([(4, 1), (4, 2), (8, 2), (6, 3), (8, 4), (4, 4)]), st.data())
def test_relabelling_moves_the_fewest_experts(
    case: tuple[NDArray[np.int64], int], data: st.DataObject
) -> None:
    """No other numbering of the ranks leaves more experts where they are; every slot is used once,
    the parts stay together, and an expert that stays on its rank keeps its slot."""
    demand_LE, ranks = case
    layers, experts = demand_LE.shape
    current_LE = data.draw(placements(layers, experts))
    rank_LE = balanced_ranks(demand_LE, ranks)
    slots_LE = relabel(rank_LE, ranks, current_LE)
    validate_placement("placement", slots_LE, layers, experts)
    old_LE, new_LE = ranks_of(current_LE, ranks), ranks_of(slots_LE, ranks)
    for layer in range(layers):
        stayed = new_LE[layer] == old_LE[layer]
        most = max(
            int((np.array(names)[rank_LE[layer]] == old_LE[layer]).sum())
            for names in itertools.permutations(range(ranks))
        )
        assert stayed.sum() == most
        assert (slots_LE[layer, stayed] == current_LE[layer, stayed]).all()
        pairs = {(int(a), int(b)) for a, b in zip(rank_LE[layer], new_LE[layer], strict=True)}
        assert len(pairs) == ranks


@given(demands(SIZES), st.data())
def test_balanced_placement_is_the_balance_relabelled(
    case: tuple[NDArray[np.int64], int], data: st.DataObject
) -> None:
    """Slots that are a bijection with the rank loads of LPT and descent; planning again from there
    moves nothing."""
    demand_LE, ranks = case
    layers, experts = demand_LE.shape
    current_LE = data.draw(placements(layers, experts))
    slots_LE = balanced_placement(demand_LE, ranks, current_LE)
    validate_placement("placement", slots_LE, layers, experts)
    for demand_E, part_E, rank_E in zip(
        demand_LE, balanced_ranks(demand_LE, ranks), ranks_of(slots_LE, ranks), strict=True
    ):
        assert sorted(loads(demand_E, part_E, ranks)) == sorted(loads(demand_E, rank_E, ranks))
    assert balanced_placement(demand_LE, ranks, slots_LE).tolist() == slots_LE.tolist()


# Nodes

MAPS = [(0, 0, 1, 1), (0, 1, 0, 1), (5, 2, 2, 5), (1, 1, 0, 0), (3, 3, 3, 3), (3, 0, 2, 1)]


def test_seats_by_hand() -> None:
    """Nodes 5 (ranks 0 and 3) and 2 (ranks 1 and 2), in the order of their first ranks."""
    nodes = Nodes(2, (5, 2, 2, 5))
    assert nodes.ranks == 2
    assert nodes.rank_R.tolist() == [0, 3, 1, 2]
    assert nodes.seat_R.tolist() == [0, 2, 3, 1]


def test_nodes_by_hand() -> None:
    """Four experts in two groups on ranks 0, 2 of a node and 1, 3 of the other. Identity splits the
    groups; where expert 1 is on rank 2 and 2 on rank 1 they are whole, and none need move."""
    nodes, demand_LE = Nodes(2, (0, 1, 0, 1)), np.array([[4, 3, 2, 1]])
    rank_LE = balanced_ranks(demand_LE, 4, nodes=nodes)
    assert {frozenset(rank_LE[0, :2].tolist()), frozenset(rank_LE[0, 2:].tolist())} == {
        frozenset({0, 2}), frozenset({1, 3})
    }  # fmt: skip
    whole_LE = np.array([[0, 2, 1, 3]], np.int32)
    require_whole(whole_LE, 4, nodes)
    assert relabel(rank_LE, 4, whole_LE, nodes).tolist() == whole_LE.tolist()
    with pytest.raises(InfeasibleError):
        require_whole(identity(1, 4), 4, nodes)


@given(demands([(8, 4)]), st.sampled_from(MAPS), st.integers(0, 1), st.data())
def test_routing_groups_stay_whole_on_any_nodes(
    case: tuple[NDArray[np.int64], int], node_of_rank: tuple[int, ...], fine: int, data: Any
) -> None:
    """Balanced, made aware of rows and named anew, each group is on one node; of all namings that
    keep nodes whole, the one chosen leaves most experts where they are."""
    demand_LE, ranks = case
    nodes = Nodes((4, 8)[fine], node_of_rank)
    layers, experts = demand_LE.shape
    current_LE = data.draw(placements(layers, experts))
    rank_LE = balanced_ranks(demand_LE, ranks, nodes=nodes)
    phase = Phase(Meter(Budget(evaluations=200), time.perf_counter()), 1.0)
    with ThreadPoolExecutor(1) as pool:
        demand_BLE = np.stack([demand_LE, demand_LE[:, ::-1]]).astype(np.int32)
        rank_LE = row_aware_placement(demand_BLE, rank_LE, ranks, phase, (1,), pool, nodes=nodes)
    slots_LE = relabel(rank_LE, ranks, current_LE, nodes)
    validate_placement("placement", slots_LE, layers, experts)
    require_whole(slots_LE, ranks, nodes)
    old_LE, new_LE, node_R = ranks_of(current_LE, ranks), ranks_of(slots_LE, ranks), node_of_rank
    allowed = [
        names
        for names in itertools.permutations(range(ranks))
        if len({(node_R[r], node_R[names[r]]) for r in range(ranks)}) == len(set(node_R))
    ]
    for layer in range(layers):
        groups = new_LE[layer].reshape(nodes.groups, -1).tolist()
        assert all(len({node_R[r] for r in group}) == 1 for group in groups)
        stayed = int((new_LE[layer] == old_LE[layer]).sum())
        assert stayed == max(
            int((np.array(names)[rank_LE[layer]] == old_LE[layer]).sum()) for names in allowed
        )


# Row-aware placement


def busiest_L(instance: Instance, rank_LE: NDArray[np.int32]) -> list[int]:
    """Per layer, the sum over groups of the busiest rank, counted here."""
    window, topology = instance.window, instance.topology
    group_S = instance.cell_S // topology.ranks_per_shard
    total_L = [0] * window.layers
    for b in range(group_S.max() + 1):
        demand_LE = window.demand_SLE[group_S == b].sum(axis=0, dtype=np.int64)
        for layer in range(window.layers):
            total_L[layer] += max(loads(demand_LE[layer], rank_LE[layer], topology.ep))
    return total_L


def row_aware(
    instance: Instance, evaluations: int, *, threads: int = 1, load: Any = "i4", seed: int = 0
) -> NDArray[np.int32]:
    """Ranks that the row-aware placement finds within a budget."""
    phase = Phase(Meter(Budget(evaluations=evaluations), time.perf_counter()), 1.0)
    group_S = (instance.cell_S // instance.topology.ranks_per_shard).astype(np.int32)
    rank_LE = ranks_of(instance.placement_LE, instance.topology.ep)
    with ThreadPoolExecutor(threads) as pool:
        demand_BLE = group_demand(
            instance.window.demand_SLE, group_S, int(group_S.max()) + 1, np.dtype(load)
        )
        return row_aware_placement(
            demand_BLE, rank_LE, instance.topology.ep, phase, (seed, 2, 0), pool
        )


@given(instances(), st.sampled_from([0, 1, 10, 300]), SEEDS)
def test_row_aware_placement_raises_no_layer(
    instance: Instance, evaluations: int, seed: int
) -> None:
    """Recounted, no layer's sum over groups of the busiest rank is higher than before, and every
    rank still has E/R experts."""
    before_LE = ranks_of(instance.placement_LE, instance.topology.ep)
    after_LE = row_aware(instance, evaluations, seed=seed)
    for before, after in zip(
        busiest_L(instance, before_LE), busiest_L(instance, after_LE), strict=True
    ):
        assert after <= before
    for rank_E in after_LE:
        held = np.bincount(rank_E, minlength=instance.topology.ep)
        assert set(held.tolist()) == {instance.window.experts // instance.topology.ep}
    if evaluations == 0:
        assert after_LE.tolist() == before_LE.tolist()


@settings(max_examples=20)
@given(instances(), SEEDS)
def test_row_aware_placement_is_reproducible(instance: Instance, seed: int) -> None:
    """The same seed gives the same ranks on 1 and 3 threads, and with loads of 64 bits."""
    expected = row_aware(instance, 200, seed=seed).tolist()
    assert row_aware(instance, 200, seed=seed, threads=3).tolist() == expected
    assert row_aware(instance, 200, seed=seed, load="i8").tolist() == expected


@given(instances(), SEEDS, st.integers(1, 200))
def test_the_annealed_sum_is_exact(instance: Instance, seed: int, proposals: int) -> None:
    """What the kernel reports as a layer's sum is the sum of the ranks that it leaves."""
    window, topology = instance.window, instance.topology
    if topology.ep == 1:
        return
    group_S = instance.cell_S // topology.ranks_per_shard
    demand_BLE = np.stack(
        [window.demand_SLE[group_S == b].sum(axis=0) for b in range(group_S.max() + 1)]
    )
    demand_LEB = np.ascontiguousarray(demand_BLE.transpose(1, 2, 0), np.int32)
    rank_LE = ranks_of(instance.placement_LE, topology.ep)
    reported_L = np.zeros(window.layers, np.int64)
    slow_RB = np.ones((topology.ep, demand_LEB.shape[2]), np.int32)
    anneal_layers(
        demand_LEB, topology.ep, topology.ep, UNLIMITED, False, slow_RB, rank_LE, 0,
        window.layers, proposals, 0.2, 60.0, np.uint64(seed), reported_L,
    )  # fmt: skip
    assert reported_L.tolist() == busiest_L(instance, rank_LE)


def test_row_aware_placement_sees_rows() -> None:
    """
    Two rows, the first only of experts 0 and 1 (4 assignments each), the second only of 2 and 3.
    Ranks {0, 1} and {2, 3} are balanced over the window, yet each row loads one rank with 8: 16.
    Any placement that parts 0 from 1 and 2 from 3 costs 4 + 4 = 8, and is found.
    """
    demand_SLE = np.array([[[4, 4, 0, 0]], [[0, 0, 4, 4]]], np.uint16)
    instance = Instance(
        Window(np.array([8, 8]), demand_SLE, 1), Topology.of(dp=1, ep=2, edp=1), DEFAULT, 8, 2,
        np.array([0, 1], np.int32), identity(1, 4),
    )  # fmt: skip
    assert busiest_L(instance, ranks_of(identity(1, 4), 2)) == [16]
    rank_E = row_aware(instance, 100)[0].tolist()
    assert rank_E[0] != rank_E[1]
    assert rank_E[2] != rank_E[3]
    assert busiest_L(instance, np.array([rank_E])) == [8]


def test_row_aware_placement_reads_both_widths_of_demand() -> None:
    """Demand of 16 and of 32 bits leads to the same ranks, better than those it started from, which
    are left as they were."""
    demand_SLE = np.random.default_rng(0).integers(0, 50, (6, 2, 8))
    group_S = np.array([0, 0, 1, 1, 2, 2], np.int32)
    rank_LE = ranks_of(identity(2, 8), 4)
    found = []
    for dtype in (np.uint16, np.uint32):
        phase = Phase(Meter(Budget(evaluations=2000), time.perf_counter()), 1.0)
        with ThreadPoolExecutor(1) as pool:
            demand_BLE = group_demand(demand_SLE.astype(dtype), group_S, 3, np.dtype("i4"))
            after_LE = row_aware_placement(demand_BLE, rank_LE, 4, phase, (0,), pool)
        found.append(after_LE.tolist())
    assert found[0] == found[1] != rank_LE.tolist()
    assert rank_LE.tolist() == ranks_of(identity(2, 8), 4).tolist()
