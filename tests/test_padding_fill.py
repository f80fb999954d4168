"""Experts for padding rows: levels, exact against brute force, spread over groups."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from routepack.objective import row_costs
from routepack.padding import (
    Padding,
    groups_of,
    level_BL,
    padded,
    rank_load_BLR,
    spread,
    spread_rows,
    sums_by_group,
    with_fill,
)
from routepack.topology import Topology
from routepack.window import Window
from strategies import SEEDS, Instance, instances, random_routes


def lowest_busiest(load_R: list[int], rows: int, top_k: int, per_rank: int) -> int:
    """Of all choices of K distinct experts for every row, the best, by trying them."""
    experts = range(len(load_R) * per_rank)
    adds = {
        tuple(sum(e // per_rank == r for e in chosen) for r in range(len(load_R)))
        for chosen in itertools.combinations(experts, top_k)
    }
    return min(
        max(map(sum, zip(load_R, *chosen, strict=True)))
        for chosen in itertools.combinations_with_replacement(sorted(adds), rows)
    )


@st.composite
def tiny_groups(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Loads of 1 to 4 ranks, 1 to 4 rows, K, and experts a rank: few enough to try everything."""
    load_R = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    per_rank = draw(st.integers(1, 3))
    top_k = draw(st.integers(1, min(4, len(load_R) * per_rank)))
    return load_R, draw(st.integers(1, 4)), top_k, per_rank


@pytest.mark.parametrize(
    ("load_R", "rows", "top_k", "per_rank", "taken_R", "level"),
    [
        # 2 rows bring 4: one rank takes them, below the other.
        ([5, 0], 2, 2, 2, [0, 4], 4),
        # With one expert a rank, each of the two takes one of every row, however low it is.
        ([9, 0, 0], 2, 2, 1, [0, 2, 2], 2),
        # 8 in all and at most 4 on a rank: 4 on the empty one, the others meet at 10.
        ([9, 0, 7], 4, 2, 1, [1, 4, 3], 10),
        # 3 over ranks that are level: the first gets the odd one.
        ([2, 2], 3, 1, 1, [2, 1], 4),
        # Every row goes everywhere.
        ([0, 3], 2, 2, 1, [2, 2], 5),
    ],
)
def test_a_fill_by_hand(
    load_R: list[int], rows: int, top_k: int, per_rank: int, taken_R: list[int], level: int
) -> None:
    """What each rank gets, and the level that it is filled up to."""
    load_BLR, rows_B = np.array([[load_R]]), np.array([rows])
    experts = len(load_R) * per_rank
    placement_LE = np.arange(experts, dtype=np.int32)[None]
    ids_PLK = spread_rows(load_BLR, rows_B, placement_LE, top_k)
    got_R = np.bincount(ids_PLK.ravel() // per_rank, minlength=len(load_R))
    assert got_R.tolist() == taken_R
    assert level_BL(load_BLR, rows_B, top_k, per_rank).tolist() == [[level]]


@given(tiny_groups())
def test_no_choice_of_experts_beats_the_fill(group: tuple[list[int], int, int, int]) -> None:
    """On groups small enough to try every choice, the busiest rank ends as low as in the best."""
    load_R, rows, top_k, per_rank = group
    best = lowest_busiest(load_R, rows, top_k, per_rank)
    load_BLR, rows_B = np.array([[load_R]]), np.array([rows])
    level = int(level_BL(load_BLR, rows_B, top_k, per_rank)[0, 0])
    assert max(*load_R, level) == best
    placement_LE = np.arange(len(load_R) * per_rank, dtype=np.int32)[None]
    ids_PLK = spread_rows(load_BLR, rows_B, placement_LE, top_k)
    assert ids_PLK.shape == (rows, 1, top_k)
    assert all(len(set(row)) == top_k for row in ids_PLK[:, 0].tolist())
    after_R = load_R + np.bincount(ids_PLK.ravel() // per_rank, minlength=len(load_R))
    assert after_R.max() == best


def layout_of(instance: Instance) -> tuple[Any, NDArray[np.int32]]:
    """Rows of the instance, and the group of each sample."""
    rows = instance.problem.to_rows(instance.cell_S)
    return rows, groups_of(rows, instance.topology, instance.window.samples)


def busiest_MGL(instance: Instance, w: Window, rows: Any) -> NDArray[np.int64]:
    """Routed tokens of the busiest ranks, by the oracle."""
    cost, topology = instance.problem.cost, instance.topology
    load_MGLR = row_costs(w, topology, cost, instance.placement_LE, rows)[2]
    return np.asarray(load_MGLR.max(axis=3))


@given(instances())
def test_loads_are_those_of_the_oracle(instance: Instance) -> None:
    """Groups number as row * G + shard, and their ranks carry what the oracle counts."""
    rows, group_S = layout_of(instance)
    w, topology, cost = instance.window, instance.topology, instance.problem.cost
    load_BLR = rank_load_BLR(w, instance.placement_LE, topology.ep, group_S)
    load_MGLR = row_costs(w, topology, cost, instance.placement_LE, rows)[2]
    assert (load_BLR == load_MGLR.reshape(load_BLR.shape)).all()


@given(instances(), st.integers(2, 12), st.booleans())
def test_a_fill_raises_no_group_above_what_is_unavoidable(
    instance: Instance, multiple: int, fills_missing: bool
) -> None:
    """In a whole layout: rows are valid routes of their samples, nothing else of the window
    changes, and by the oracle every (group, layer) ends at the higher of its load and the level
    that is proven best above."""
    w, ranks = instance.window, instance.topology.ep
    rows, group_S = layout_of(instance)
    padding = Padding(multiple=multiple, experts="fill", fills_missing=fills_missing)
    bare, rows_S = padded(w, padding), padding.rows_S(w)
    fill = spread(bare, rows_S, instance.placement_LE, ranks, group_S)
    full = with_fill(bare, fill)
    assert np.diff(fill.offsets_S1).tolist() == rows_S.tolist()
    assert (bare.missing_S - full.missing_S == rows_S).all()
    rows_B = sums_by_group(rows_S, group_S)
    load_BLR = rank_load_BLR(w, instance.placement_LE, ranks, group_S)
    to_BL = level_BL(load_BLR, rows_B, w.top_k, w.experts // ranks)
    best_BL = np.maximum(load_BLR.max(axis=2), to_BL)
    assert (busiest_MGL(instance, full, rows).reshape(best_BL.shape) == best_BL).all()


@given(instances(), st.integers(2, 12), SEEDS)
def test_a_fill_is_no_worse_than_stated_experts(
    instance: Instance, multiple: int, seed: int
) -> None:
    """In every group and layer, against experts that a trainer would write without knowing."""
    w, rng = instance.window, np.random.default_rng(seed)
    rows, group_S = layout_of(instance)
    bare = padded(w, Padding(multiple=multiple))
    rows_S = Padding(multiple=multiple).rows_S(w)
    fill = spread(bare, rows_S, instance.placement_LE, instance.topology.ep, group_S)
    ours_MGL = busiest_MGL(instance, with_fill(bare, fill), rows)
    for cycle in (1, 4):
        stated = random_routes(rng, cycle, w.layers, w.experts, w.top_k, 0.0)
        theirs = padded(w, Padding(multiple=multiple, experts=stated))
        assert (ours_MGL <= busiest_MGL(instance, theirs, rows)).all()


def test_a_sample_in_no_group_gets_no_rows() -> None:
    """Of several steps planned together, one step's rows hold some of the samples."""
    topology = Topology.of(dp=2, ep=1, edp=2)
    group_S = groups_of((((3,), (0,)), ((1,), (4,))), topology, 5)
    assert group_S.tolist() == [1, 2, -1, 0, 3]
    w = Window(np.full(5, 1), np.ones((5, 1, 1), np.uint16), 1)
    bare = padded(w, Padding(multiple=3))
    placement_LE = np.zeros((1, 1), np.int32)
    fill = spread(bare, np.full(5, 2), placement_LE, 1, group_S)
    assert fill.offsets_S1.tolist() == [0, 2, 4, 4, 6, 8]
    assert with_fill(bare, fill).missing_S.tolist() == [0, 0, 2, 0, 0]
