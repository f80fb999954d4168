"""Population annealing: weights, resampling, the archive, and streams that stay their own."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from routepack.budget import Budget, Meter, Phase
from routepack.cost import DEFAULT
from routepack.kernels.layout import TOTAL_WEIGHT
from routepack.kernels.rng import stream_key
from routepack.kernels.sweep import BEST, ENERGY, RESULTS
from routepack.placement import identity, ranks_of
from routepack.population import (
    Archive,
    Chain,
    anneal,
    resample,
    systematic,
    tempered_weights,
)
from routepack.seeds import Seed
from routepack.topology import Topology
from strategies import SEEDS, Instance, instances, layouts, random_window

ENERGIES = st.lists(st.floats(0.0, 1e6), min_size=2, max_size=12)


def a_meter(evaluations: int = 1000) -> Meter:
    return Meter(Budget(evaluations=evaluations), time.perf_counter())


def archive_of(instance: Instance, cell_S: NDArray[np.int32]) -> Archive:
    measured = instance.problem.measure(instance.static, cell_S)
    rank_LE = ranks_of(instance.placement_LE, instance.topology.ep)
    return Archive(instance.problem, a_meter(), rank_LE, cell_S, measured)


def chain_of(instance: Instance, cell_S: NDArray[np.int32], number: int) -> Chain:
    problem, static = instance.problem, instance.static
    results = np.zeros(RESULTS)
    results[[ENERGY, BEST]] = problem.measure(static, cell_S).energy
    state = problem.state(static, cell_S)
    return Chain(problem, static, state, stream_key(0, number), cell_S.copy(), results)


# Weights


def effective_size(weights: NDArray[np.float64]) -> float:
    return float(weights.sum() ** 2 / np.square(weights).sum())


@given(ENERGIES, st.floats(0.0, 1e6), st.floats(0.1, 1.0))
def test_tempered_weights_hold_the_effective_size(
    energies: list[float], beta_step: float, share: float
) -> None:
    """Weights sum to 1, fall as the energy rises, and keep the effective size that is asked for."""
    energy = np.array(energies) - min(energies)
    weights = tempered_weights(energy, beta_step, share * len(energies))
    assert weights.sum() == pytest.approx(1.0, rel=1e-12)
    assert effective_size(weights) >= share * len(energies) * (1 - 1e-9)
    order = np.argsort(energy)
    assert all(a >= b for a, b in pairwise(weights[order]))


def test_a_small_step_is_taken_whole() -> None:
    """Two chains 1 apart and a step of ln 2 weigh 2 : 1; (3 * 3) / (4 + 1) = 1.8 is enough of 2."""
    weights = tempered_weights(np.array([0.0, 1.0]), math.log(2), 1.0)
    assert weights.tolist() == pytest.approx([2 / 3, 1 / 3])


def test_a_large_step_is_cut_to_the_effective_size() -> None:
    """The same at 1.9 of 2: the step is cut so that the effective size is 1.9, and no further."""
    weights = tempered_weights(np.array([0.0, 1.0]), math.log(2), 1.9)
    assert effective_size(weights) == pytest.approx(1.9, abs=1e-6)


# Resampling


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12).filter(lambda w: sum(w) > 1e-3),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_systematic_counts_are_next_to_the_expected(parts: list[float], offset: float) -> None:
    """Each of n chains is drawn floor(n w) or ceil(n w) times, for any offset; parents ascend."""
    weights = np.array(parts) / sum(parts)
    n = len(weights)
    parents = systematic(weights, offset)
    assert len(parents) == n
    assert parents == sorted(parents)
    for k, w in enumerate(weights.tolist()):
        assert math.floor(n * w - 1e-9) <= parents.count(k) <= math.ceil(n * w + 1e-9)


def test_systematic_by_hand() -> None:
    """Weights 0.3, 0.3, 0.4 of four chains: pointers 0, 0.25, 0.5, 0.75 at offset 0, and 0.15, 0.4,
    0.65, 0.9 at offset 0.6."""
    weights = np.array([0.3, 0.3, 0.4, 0.0])
    assert systematic(weights, 0.0) == [0, 0, 1, 2]
    assert systematic(weights, 0.6) == [0, 1, 2, 2]


class FixedOffset:
    """Stands in for a generator whose next number is known."""

    def random(self) -> float:
        return 0.5


def tiny_instance() -> Instance:
    """Four samples of 4, 3, 2 and 1 tokens in two cells."""
    window = random_window(np.random.default_rng(0), [4, 3, 2, 1], 2, 4, 1)
    cells = np.array([0, 1, 1, 0], np.int32)
    return Instance(window, Topology.of(dp=2, ep=2, edp=1), DEFAULT, 9, 1, cells, identity(2, 4))


def test_resampling_replaces_the_worst_and_keeps_streams() -> None:
    """At a large step the chain of highest energy takes over the layout, the integers and the best
    of a better one; every chain keeps its own key and counter."""
    instance = tiny_instance()
    cells = [[0, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 0]]
    chains = [chain_of(instance, np.array(c, np.int32), k) for k, c in enumerate(cells)]
    for k, chain in enumerate(chains):
        chain.counter = 100 + k
    keys = [chain.key for chain in chains]
    worst = int(np.argmax([chain.energy for chain in chains]))
    assert worst == 2
    resample(chains, 1e9, FixedOffset())  # type: ignore[arg-type]
    assert chains[2].state.cell_S.tolist()[:4] == [0, 1, 1, 0]
    assert chains[2].best_S.tolist() == [0, 1, 1, 0]
    assert (chains[2].energy, chains[2].best) == (chains[0].energy, chains[0].best)
    assert [chain.key for chain in chains] == keys
    assert [chain.counter for chain in chains] == [100, 101, 102, 103]
    for chain in chains:
        instance.problem.assert_exact(instance.static, chain.state)
    chains[2].sweep(1e6, TOTAL_WEIGHT, 0.0, 50)  # the copy shares nothing with its parent
    assert chains[0].state.cell_S.tolist()[:4] == [0, 1, 1, 0]


@given(instances(), st.data(), st.floats(0.0, 1e3), SEEDS)
def test_resampling_only_copies(
    instance: Instance, data: st.DataObject, beta_step: float, seed: int
) -> None:
    """Afterwards every chain is at a layout that some chain was at, the best one is still there,
    and one random number was drawn, whatever the outcome."""
    orders = data.draw(
        st.lists(st.permutations(range(instance.problem.cells)), min_size=1, max_size=5)
    )
    starts = [np.array(order, np.int32)[instance.cell_S] for order in orders]
    chains = [chain_of(instance, cell_S, k) for k, cell_S in enumerate(starts)]
    before = {(chain.energy, chain.best_S.tobytes()) for chain in chains}
    lowest = min(chain.energy for chain in chains)
    rng, other = np.random.default_rng(seed), np.random.default_rng(seed)
    resample(chains, beta_step, rng)
    assert {(chain.energy, chain.best_S.tobytes()) for chain in chains} <= before
    assert min(chain.energy for chain in chains) == lowest
    other.random()
    assert rng.random() == other.random()


# Archive


@given(instances(), st.data())
def test_the_archive_keeps_the_best_by_exact_score(instance: Instance, data: st.DataObject) -> None:
    """Offered any layouts with their energies, it never gets worse, ends with the best of them all
    (none is lost by skipping those of high energy), and a tie stays with the earlier one."""
    problem, static = instance.problem, instance.static
    layout = layouts(problem.window.samples, problem.cells)
    offered = [instance.cell_S, *data.draw(st.lists(layout, max_size=6))]
    archive = archive_of(instance, instance.cell_S)
    keys = [archive.score.key]
    for cell_S in offered[1:]:
        measured = problem.measure(static, cell_S)
        better = archive.offer(static, cell_S, measured.energy)
        assert better == (measured.score.key < keys[-1])
        keys.append(archive.score.key)
    assert all(after <= before for before, after in pairwise(keys))
    best = min(offered, key=lambda cell_S: problem.measure(static, cell_S).score.key)
    assert archive.cell_S.tolist() == best.tolist()
    assert archive.score == problem.measure(static, best).score
    slowest = [energy for _, energy in archive.history]
    assert all(after < before for before, after in pairwise(slowest))
    assert not slowest or slowest[-1] >= archive.score.slowest_shard


def test_the_archive_copies_what_it_keeps() -> None:
    """A chain goes on changing its layout; the archive's stays."""
    instance = tiny_instance()
    archive = archive_of(instance, np.array([0, 0, 1, 1], np.int32))
    cell_S = instance.cell_S.copy()
    assert archive.offer(instance.static, cell_S, 0.0)
    cell_S[:] = 0
    assert archive.cell_S.tolist() == instance.cell_S.tolist()


def test_the_archive_takes_a_placement_with_its_layout() -> None:
    """A layout alone leaves the ranks as they are; moved to a placement, both are kept."""
    instance = tiny_instance()
    archive = archive_of(instance, np.array([0, 0, 1, 1], np.int32))
    old_LE = archive.rank_LE
    assert archive.offer(instance.static, instance.cell_S, 0.0)
    assert archive.rank_LE is old_LE
    new_LE = 1 - old_LE
    static = instance.problem.static(new_LE)
    archive.move(new_LE, instance.cell_S, instance.problem.measure(static, instance.cell_S))
    assert archive.rank_LE is new_LE
    assert archive.score == instance.problem.measure(static, instance.cell_S).score


# Annealing


def given_seed(instance: Instance) -> Seed:
    """The layout of the instance."""
    measured = instance.problem.measure(instance.static, instance.cell_S)
    return Seed(instance.cell_S, "given", measured)


def annealed(instance: Instance, threads: int, seed: int, evaluations: int = 400) -> Archive:
    """The archive after annealing three chains from the layout of the instance."""
    archive = archive_of(instance, instance.cell_S)
    phase = Phase(a_meter(evaluations), 1.0)
    seeds = [given_seed(instance)] * 3
    energy = seeds[0].measured.energy
    with ThreadPoolExecutor(threads) as pool:
        anneal(
            instance.problem, instance.static, seeds, archive, phase,
            hot=0.1 * energy + 1e-9, cold=0.001 * energy + 1e-12, stream=(seed, 1, 0), pool=pool,
        )  # fmt: skip
    assert phase.evaluations <= evaluations
    return archive


@given(instances(), SEEDS)
def test_annealing_is_monotone_and_independent_of_threads(instance: Instance, seed: int) -> None:
    """The archive ends no worse than it began, with a feasible layout and its score; on 1 and 3
    threads it is the same, history included."""
    one, three = annealed(instance, 1, seed), annealed(instance, 3, seed)
    problem = instance.problem
    assert problem.fits(one.cell_S)
    assert one.score == problem.measure(instance.static, one.cell_S).score
    assert one.score.key <= problem.measure(instance.static, instance.cell_S).score.key
    assert one.cell_S.tolist() == three.cell_S.tolist()
    assert (one.accepted, one.evaluated) == (three.accepted, three.evaluated)
    slowest = [cost for _, cost in one.history]
    assert slowest == sorted(slowest, reverse=True)
    assert slowest == [cost for _, cost in three.history]


def test_annealing_stops_when_told() -> None:
    """The callback is asked after every temperature step, and True ends the phase."""
    instance = tiny_instance()
    archive = archive_of(instance, instance.cell_S)
    phase = Phase(a_meter(60_000), 1.0)
    asked = []

    def stop() -> bool:
        asked.append(phase.evaluations)
        return len(asked) == 3

    with ThreadPoolExecutor(1) as pool:
        anneal(
            instance.problem, instance.static, [given_seed(instance)], archive,
            phase, hot=1.0, cold=0.1, stream=(0, 1, 0), pool=pool, stop=stop,
        )  # fmt: skip
    assert asked == [2500, 5000, 7500]  # of 60,000 in 24 steps


def test_annealing_spends_its_budget() -> None:
    """Every proposal of the budget is made, in about 24 temperature steps, when it divides."""
    instance = tiny_instance()
    archive = archive_of(instance, instance.cell_S)
    phase = Phase(a_meter(6_000), 1.0)
    with ThreadPoolExecutor(1) as pool:
        anneal(
            instance.problem, instance.static, [given_seed(instance)] * 2, archive,
            phase, hot=1.0, cold=0.1, stream=(0, 1, 0), pool=pool,
        )  # fmt: skip
    assert phase.evaluations == 6_000
