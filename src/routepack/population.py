"""Population annealing over layouts (Hukushima & Iba 2003; RoutePack's third stage, design 3.4).

Chains anneal independently between temperature steps; at each step the population is resampled by
Boltzmann weights, and the best layout by exact score goes into a monotone archive. Chains run on
threads; every random number comes from a counter of its chain, so that threads change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from routepack.budget import Meter, Phase
from routepack.kernels.layout import TOTAL_WEIGHT, UNLIMITED, State, Static
from routepack.kernels.rng import stream_key
from routepack.kernels.sweep import ACCEPTED, BEST, DRAWS, ENERGY, EVALUATED, RESULTS, sweep
from routepack.plan import Score
from routepack.problem import Measured, Problem
from routepack.seeds import Seed

SHARE_WEIGHT = 0.5  # of the mean shard in the energy at the start; fades to the design's energy
SPREAD_WEIGHT = 6.0  # of the squared spread of cell work at the start; fades to none
EFFECTIVE = 0.5  # resampling keeps at least this share of the population effective
STEPS = 24  # temperature steps of a phase
CHEAP = 1 / 160  # of the charge above a limit: what is asked at the start, so that layouts can pass
DEBUG = False  # tests set it: recompute everything after every accepted move and compare by ==


@dataclass
class Archive:
    """The best placed layout so far by exact lexicographic score. It never gets worse.

    A tie stays with the earlier one, and chains are offered in their order.
    """

    problem: Problem
    meter: Meter
    rank_LE: NDArray[np.int32]
    cell_S: NDArray[np.int32]
    measured: Measured
    history: list[tuple[float, float]] = field(default_factory=list)  # (budget spent, energy)
    proposed: int = 0  # moves, over all chains
    accepted: int = 0
    evaluated: int = 0  # moves whose loads were evaluated in full

    @property
    def score(self) -> Score:
        """The exact score of the best."""
        return self.measured.score

    def watch(self, energy: float) -> None:
        """Note the progress of a running search; its layouts are offered at the end."""
        if not self.history or energy < self.history[-1][1]:
            self.history.append((self.meter.spent, energy))

    def offer(self, static: Static, cell_S: NDArray[np.int32], energy: float) -> bool:
        """Consider a layout. Returns whether it is better.

        A layout whose energy exceeds what any equal score could have is skipped unmeasured.
        """
        shards = self.problem.topology.edp
        slowest = self.score.slowest_shard
        if self.measured.over == 0 and energy > slowest * (1 + 2 * TOTAL_WEIGHT * shards):
            return False
        measured = self.problem.measure(static, cell_S)
        if measured.key >= self.measured.key:
            return False
        self.move(self.rank_LE, cell_S, measured)
        return True

    def move(
        self, rank_LE: NDArray[np.int32], cell_S: NDArray[np.int32], measured: Measured
    ) -> None:
        """Take a layout under a placement, and what it measures, for the best."""
        self.rank_LE, self.cell_S, self.measured = rank_LE, cell_S.copy(), measured
        self.watch(measured.energy)

    def under(self, goal: Static) -> Archive:
        """An archive of its own for a search under other costs, from the same layout."""
        measured = self.problem.measure(goal, self.cell_S)
        return Archive(self.problem, self.meter, self.rank_LE, self.cell_S, measured)

    def take_over(self, other: Archive, static: Static) -> None:
        """Consider what a search under other costs found, by the exact score."""
        self.offer(static, other.cell_S, 0.0)
        self.proposed += other.proposed
        self.accepted += other.accepted
        self.evaluated += other.evaluated


@dataclass(eq=False)
class Chain:
    """One member of the population."""

    problem: Problem
    static: Static
    state: State
    key: np.uint64
    best_S: NDArray[np.int32]
    results: NDArray[np.float64]
    counter: int = 0

    def sweep(
        self, temperature: float, total_weight: float, spread_weight: float, proposals: int
    ) -> None:
        """Anneal at one temperature. Releases the GIL."""
        at_a_time = 1 if DEBUG else proposals
        for _ in range(0, proposals, at_a_time):
            accepted = self.results[ACCEPTED]
            sweep(
                self.static, self.state, self.best_S, self.results,
                temperature, total_weight, spread_weight, at_a_time,
                self.key, np.uint64(self.counter),
            )  # fmt: skip
            self.counter += DRAWS * at_a_time
            if DEBUG and self.results[ACCEPTED] > accepted:
                self.problem.assert_exact(self.static, self.state)

    def charge(self, over: float) -> None:
        """Change the charge above a limit, and judge the best anew."""
        self.static = self.static._replace(over=over)
        self.results[BEST] = self.problem.measure(self.static, self.best_S).energy

    @property
    def energy(self) -> float:
        """Energy of the layout that the chain is at."""
        return float(self.results[ENERGY])

    @property
    def best(self) -> float:
        """Energy of best_S."""
        return float(self.results[BEST])

    def copy_from(self, other: Chain) -> None:
        """Take over another chain's layout, keeping the own random stream and the better best."""
        for name in State._fields:
            np.copyto(getattr(self.state, name), getattr(other.state, name))
        self.results[ENERGY] = other.results[ENERGY]
        if other.best < self.best:
            self.best_S[:] = other.best_S
            self.results[BEST] = other.results[BEST]


def chains_from(
    problem: Problem, static: Static, seeds: Sequence[Seed], stream: tuple[int, ...]
) -> list[Chain]:
    """A chain at each seed, with random numbers of its own."""
    chains = []
    for k, seed in enumerate(seeds):
        results = np.zeros(RESULTS)
        results[[ENERGY, BEST]] = seed.measured.energy
        state, key = problem.state(static, seed.cell_S), stream_key(*stream, k)
        chains.append(Chain(problem, static, state, key, seed.cell_S.copy(), results))
    return chains


def anneal(
    problem: Problem,
    static: Static,
    seeds: Sequence[Seed],
    archive: Archive,
    phase: Phase,
    *,
    hot: float,
    cold: float,
    stream: tuple[int, ...],
    pool: ThreadPoolExecutor,
    stop: Callable[[], bool] | None = None,
) -> None:
    """Anneal one chain from each seed, from temperature `hot` to `cold`, until the phase is over.

    The best layouts are offered to the archive. `stream` names the random numbers to use.
    """
    chains = chains_from(problem, static, seeds, stream)
    rng = np.random.default_rng(stream)
    shards, width = problem.topology.edp, problem.topology.ranks_per_shard
    mean_work = max(1e-300, float(problem.work_S.sum()) / problem.cells / len(static.linear_T))
    temperature, limited = hot, static.limit < UNLIMITED
    while (proposals := phase.next_step(len(chains), STEPS)) > 0:
        progress = phase.progress
        cooler = hot * (cold / hot) ** progress
        resample(chains, 1 / cooler - 1 / temperature, rng)
        temperature = cooler

        fade = 1 - progress
        if limited:
            for chain in chains:
                chain.charge(static.over * CHEAP**fade)
        total_weight = TOTAL_WEIGHT + (fade * SHARE_WEIGHT / shards if shards > 1 else 0.0)
        spread_weight = fade * SPREAD_WEIGHT / mean_work if width > 1 else 0.0

        def step(
            k: int,
            temperature: float = temperature,
            total_weight: float = total_weight,
            spread_weight: float = spread_weight,
            proposals: int = proposals,
        ) -> None:
            # Every other chain goes without: the charge also keeps long samples where they are.
            chains[k].sweep(temperature, total_weight, spread_weight * (k % 2 == 0), proposals)

        list(pool.map(step, range(len(chains))))
        phase.spend(proposals * len(chains))
        if not limited:
            archive.watch(min(chain.best for chain in chains))
        if stop is not None and stop():
            break
    for chain in chains:
        archive.offer(static, chain.best_S, chain.best)
    archive.proposed += phase.evaluations
    archive.accepted += int(sum(chain.results[ACCEPTED] for chain in chains))
    archive.evaluated += int(sum(chain.results[EVALUATED] for chain in chains))


def resample(chains: list[Chain], beta_step: float, rng: np.random.Generator) -> None:
    """Systematic resampling by exp(-beta_step * energy), tempered to hold the effective size."""
    offset = rng.random()  # drawn at every step, so that the stream does not depend on the outcome
    if beta_step <= 0 or len(chains) < 2:
        return
    energy = np.array([chain.energy for chain in chains])
    weights = tempered_weights(energy - energy.min(), beta_step, EFFECTIVE * len(chains))
    parents = systematic(weights, offset)
    copies = [k for k in range(len(chains)) for _ in range(max(0, parents.count(k) - 1))]
    dead = [k for k in range(len(chains)) if k not in parents]
    for k, parent in zip(dead, copies, strict=True):
        chains[k].copy_from(chains[parent])


def tempered_weights(
    energy: NDArray[np.float64], beta_step: float, effective: float
) -> NDArray[np.float64]:
    """Boltzmann weights of the largest part of `beta_step` that keeps the effective sample size.

    The effective size of weights w is (sum w)^2 / sum w^2; it falls as the step grows.
    """
    low, high = 0.0, 1.0

    def weigh(part: float) -> NDArray[np.float64]:
        w = np.exp(-part * beta_step * energy)
        return np.asarray(w / w.sum())

    if 1 / np.square(weigh(1.0)).sum() >= effective:
        return weigh(1.0)
    for _ in range(30):
        middle = (low + high) / 2
        if 1 / np.square(weigh(middle)).sum() >= effective:
            low = middle
        else:
            high = middle
    return weigh(low)


def systematic(weights: NDArray[np.float64], offset: float) -> list[int]:
    """Parents by systematic resampling: one uniform offset in [0, 1), n evenly spaced pointers."""
    n = len(weights)
    edges = np.cumsum(weights)
    pointers = (np.arange(n) + offset) / n * edges[-1]
    parents = np.searchsorted(edges, pointers, side="right")
    return [int(k) for k in np.minimum(parents, n - 1)]
