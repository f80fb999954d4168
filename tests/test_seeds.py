"""Starting layouts: one form for equivalent layouts, all of them feasible, and different."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from routepack.cost import DEFAULT
from routepack.kernels.layout import Static
from routepack.placement import identity
from routepack.problem import Problem
from routepack.seeds import GATE, Seed, canonical, diverse, make_seeds, sketch
from routepack.topology import Topology
from routepack.window import Window
from strategies import SEEDS, Instance, instances, random_window


def equivalent(instance: Instance, random: Any) -> NDArray[np.int32]:
    """The layout with rows, and the cells of every shard in its row, in another order."""
    problem = instance.problem
    shape = (problem.rows, problem.topology.edp, problem.topology.ranks_per_shard)
    number_MGW = np.arange(problem.cells).reshape(shape)
    number_MGW = number_MGW[random.sample(range(shape[0]), shape[0])]
    for m in range(shape[0]):
        for g in range(shape[1]):
            number_MGW[m, g] = random.sample(number_MGW[m, g].tolist(), shape[2])
    return number_MGW.ravel().astype(np.int32)[instance.cell_S]


def seeds_of(instance: Instance, count: int, seed: int, attempts: int = 2) -> list[Seed]:
    """Seeds, with the layout of the instance for that of the row stage."""
    problem = instance.problem
    rng = np.random.default_rng(seed)
    return make_seeds(problem, instance.static, instance.cell_S, count, rng, attempts)


def longest_to_lightest(lengths: list[int], cells: int) -> NDArray[np.int32]:
    """Longest first, each into the cell with fewest tokens."""
    tokens_c, cell_S = [0] * cells, np.empty(len(lengths), np.int32)
    for s in sorted(range(len(lengths)), key=lambda s: -lengths[s]):
        cell_S[s] = tokens_c.index(min(tokens_c))
        tokens_c[cell_S[s]] += lengths[s]
    return cell_S


# Canonical form


def test_canonical_by_hand() -> None:
    """D = 4, G = 2, rows {4 5} {3} | {6} {7} and {2} {9} | {1 8} {0}. Cells of a group by their
    lowest sample: {3} {4 5}, {6} {7}, {2} {9}, {0} {1 8}; the row with sample 0 is first."""
    topology = Topology.of(dp=4, ep=1, edp=2)
    window = Window(np.full(10, 1), np.ones((10, 1, 1), int), 1)
    problem = Problem(window, topology, DEFAULT.resolve(window, topology, 9), 9, 2)
    cell_S = np.array([7, 6, 4, 1, 0, 0, 2, 3, 6, 5], np.int32)
    assert canonical(problem, cell_S).tolist() == [2, 3, 0, 4, 5, 5, 6, 7, 3, 1]


@given(instances(alike=True), st.randoms(use_true_random=False))
def test_equivalent_layouts_have_one_form(instance: Instance, random: Any) -> None:
    """However rows and the cells of a shard are ordered, the canonical form is the same, and it is
    its own."""
    problem = instance.problem
    form_S = canonical(problem, instance.cell_S)
    assert canonical(problem, equivalent(instance, random)).tolist() == form_S.tolist()
    assert canonical(problem, form_S).tolist() == form_S.tolist()


@given(instances())
def test_the_form_is_an_equivalent_layout(instance: Instance) -> None:
    """Samples that share a cell, a group or a row share it after, each stays in its shard, and the
    score is the same to the last bit."""
    problem, static = instance.problem, instance.static
    before_S, after_S = instance.cell_S, canonical(problem, instance.cell_S)
    for size in (1, static.width, problem.topology.dp):
        pairs = {*zip((before_S // size).tolist(), (after_S // size).tolist(), strict=True)}
        assert len(pairs) == problem.cells // size
    shards = problem.topology.edp
    before_G, after_G = before_S // static.width % shards, after_S // static.width % shards
    assert before_G.tolist() == after_G.tolist()
    score = problem.measure(static, before_S).score
    assert problem.measure(static, after_S).score == score


# Sketches


@given(instances(alike=True), st.randoms(use_true_random=False))
def test_equivalent_layouts_have_no_distance(instance: Instance, random: Any) -> None:
    """The sketch sees groups as a set."""
    problem, static = instance.problem, instance.static
    one = sketch(problem, static, instance.cell_S)
    other = sketch(problem, static, equivalent(instance, random))
    assert np.abs(one - other).sum() == pytest.approx(0.0, abs=1e-12)


def test_different_groups_have_distance() -> None:
    """Long with long and short with short in two rows is not what long with short is."""
    window = random_window(np.random.default_rng(0), [8, 8, 1, 1], 1, 2, 1)
    topology = Topology.of(dp=2, ep=2, edp=1)
    problem = Problem(window, topology, DEFAULT.resolve(window, topology, 9), 9, 2)
    static = problem.static(np.array([[0, 1]], np.int32))
    apart, mixed = (np.array(cells, np.int32) for cells in ([0, 1, 2, 3], [0, 2, 1, 3]))
    distance = np.abs(sketch(problem, static, apart) - sketch(problem, static, mixed)).sum()
    assert distance > 0.05


# Seeds


@given(instances(), st.integers(1, 6), SEEDS)
def test_seeds_are_feasible_canonical_and_good(instance: Instance, count: int, seed: int) -> None:
    """As many as asked for, each within the cap without empty cells, in canonical form, with its
    energy on record, none beyond the gate of the first, whose exact score is the best."""
    problem, static = instance.problem, instance.static
    seeds = seeds_of(instance, count, seed)
    assert len(seeds) == count
    first = problem.measure(static, seeds[0].cell_S).score.key
    for s in seeds:
        assert problem.fits(s.cell_S)
        assert canonical(problem, s.cell_S).tolist() == s.cell_S.tolist()
        assert problem.measure(static, s.cell_S).energy == s.measured.energy
        assert s.measured.energy <= GATE * seeds[0].measured.energy
        assert first <= problem.measure(static, s.cell_S).score.key
    assert first <= problem.measure(static, instance.cell_S).score.key


@given(instances(), SEEDS)
def test_seeds_are_reproducible(instance: Instance, seed: int) -> None:
    """The same seed gives the same layouts from the same generators in the same order."""
    one, other = seeds_of(instance, 4, seed), seeds_of(instance, 4, seed)
    assert [(s.generator, s.cell_S.tolist()) for s in one] == [
        (s.generator, s.cell_S.tolist()) for s in other
    ]


@given(instances(), SEEDS)
def test_seeds_repeat_only_where_there_are_too_few(instance: Instance, seed: int) -> None:
    """Asked for 4, a layout comes up twice only if no more than that were within the gate."""
    distinct = {s.cell_S.tobytes() for s in seeds_of(instance, 4, seed)}
    available = {s.cell_S.tobytes() for s in seeds_of(instance, 1000, seed)}
    assert len(distinct) == min(4, len(available))


def test_every_generator_contributes() -> None:
    """Where cells are almost full all layouts cost about the same, and each of the five ways to
    make one has some within the gate."""
    rng = np.random.default_rng(0)
    window = random_window(rng, rng.integers(5, 60, 64), 2, 8, 2)
    cap = int(window.lengths_S.sum() / 8 * 1.04)
    instance = Instance(
        window, Topology.of(dp=4, ep=4, edp=2), DEFAULT, cap, 2,
        longest_to_lightest(window.lengths_S.tolist(), 8), identity(2, 8),
    )  # fmt: skip
    generators = {s.generator for s in seeds_of(instance, 1000, 0, attempts=8)}
    assert generators == {
        "rows", "first-fit", "balanced", "WindowShuffle", "RandomizedBestFit", "EDPAwarePair"
    }  # fmt: skip


def numbered(problem: Problem, static: Static, layouts: list[list[int]]) -> list[Seed]:
    """Seeds whose generator is their place."""
    cells = [np.array(layout, np.int32) for layout in layouts]
    return [Seed(c_S, str(k), problem.measure(static, c_S)) for k, c_S in enumerate(cells)]


@given(instances(), st.integers(1, 5), st.data())
def test_diverse_picks_are_distinct(instance: Instance, count: int, data: st.DataObject) -> None:
    """From a list of different layouts, best first, it takes the first and `count` in all, none
    twice, in their order."""
    problem, static = instance.problem, instance.static
    orders = data.draw(
        st.lists(st.permutations(instance.cell_S.tolist()), min_size=1, max_size=8, unique_by=tuple)
    )
    seeds = numbered(problem, static, orders)
    chosen = [int(s.generator) for s in diverse(problem, static, seeds, count)]
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    assert len(chosen) == min(count, len(seeds))


def test_diverse_takes_the_farthest() -> None:
    """Of three layouts of which the second equals the first but for the order of rows, and the
    third does not, two picks are the first and the third."""
    window = random_window(np.random.default_rng(0), [8, 8, 1, 1], 1, 2, 1)
    topology = Topology.of(dp=2, ep=2, edp=1)
    problem = Problem(window, topology, DEFAULT.resolve(window, topology, 9), 9, 2)
    static = problem.static(np.array([[0, 1]], np.int32))
    layouts = [[0, 1, 2, 3], [2, 3, 0, 1], [0, 2, 1, 3]]
    seeds = numbered(problem, static, layouts)
    assert [s.generator for s in diverse(problem, static, seeds, 2)] == ["0", "2"]
