"""Searches to compare: each takes the place of population annealing inside the planner itself.

Every method is a run of `routepack.plan`: rows, bounds, placement, seeds, moves, archive and
deadline are the planner's own, and only what is named here differs. A *search* has the signature
of `population.anneal`: it starts from the seeds, spends its phase of the budget in sweeps of the
kernel, and offers its best layouts to the archive. Suffix: K chains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from bench.methods import setting
from bench.workloads import Workload

import routepack
from routepack import planner, population
from routepack import search as planner_search
from routepack.budget import Budget, Phase
from routepack.kernels.layout import TOTAL_WEIGHT, Static
from routepack.kernels.sweep import ACCEPTED, EVALUATED
from routepack.plan import Plan
from routepack.population import Archive, Chain, anneal, chains_from
from routepack.problem import Problem
from routepack.seeds import Seed
from routepack.window import Window

# The best of a few values each at 2 million proposals, on eight windows and two search seeds; none
# of them moves a method by 0.1 %.
CHECKS = 96  # of a phase: how often a descent is asked whether it has stalled
STALLED = 3  # checks without a better layout, after which a descent starts again
KICK_TEMPERATURE = 10.0  # of what shakes a layout before that, in those annealing starts from
KICK_PROPOSALS = 0.5  # for each sample
REPLICAS = 4
EXCHANGES = 200  # of a phase: how often neighbours may change places


# --- searches ----------------------------------------------------------------------------------


def anneal_independently(*args: Any, **kwargs: Any) -> None:
    """Annealing without resampling: as many chains on the same schedule, none ever replaced."""
    with patch.object(population, "resample", lambda *_: None):
        anneal(*args, **kwargs)


def descend(
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
    """Multi-start descent: moves that raise the energy are not accepted.

    A chain that has stalled goes back to its best layout, which is shaken by a short sweep far
    above the temperatures of annealing, and descends again.
    """
    chains = chains_from(problem, static, seeds, stream)
    kick = max(1, round(KICK_PROPOSALS * problem.window.samples))
    best_K, idle_K = [chain.best for chain in chains], [0] * len(chains)
    while (proposals := phase.next_step(len(chains), CHECKS)) > 0:

        def step(k: int, proposals: int = proposals) -> None:
            chain = chains[k]
            restart = idle_K[k] >= STALLED and proposals > kick
            if restart:
                chain.state = problem.state(static, chain.best_S)
                chain.sweep(KICK_TEMPERATURE * hot, TOTAL_WEIGHT, 0.0, kick)
            chain.sweep(0.0, TOTAL_WEIGHT, 0.0, proposals - kick if restart else proposals)
            idle_K[k] = 0 if restart or chain.best < best_K[k] else idle_K[k] + 1
            best_K[k] = chain.best

        list(pool.map(step, range(len(chains))))
        phase.spend(proposals * len(chains))
        archive.watch(min(best_K))
    _offer(chains, static, archive)


def temper(
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
    """Parallel tempering (Hukushima & Nemoto 1996): a replica at each temperature of a ladder.

    Temperatures are in geometric steps from `cold` to `hot`. Neighbours change places by the
    Metropolis rule on the product of their distributions, even and odd pairs in turn.
    """
    ladder_K = cold * (hot / cold) ** np.linspace(0.0, 1.0, REPLICAS)
    replicas = chains_from(
        problem, static, [seeds[k % len(seeds)] for k in range(REPLICAS)], stream
    )
    at_K = list(replicas)  # the replica at each temperature
    rng = np.random.default_rng(stream)
    first = 0
    while (proposals := phase.next_step(REPLICAS, EXCHANGES)) > 0:

        def step(k: int, proposals: int = proposals) -> None:
            at_K[k].sweep(float(ladder_K[k]), TOTAL_WEIGHT, 0.0, proposals)

        list(pool.map(step, range(REPLICAS)))
        phase.spend(proposals * REPLICAS)
        archive.watch(min(replica.best for replica in replicas))
        for k in range(first, REPLICAS - 1, 2):
            odds = exchange_odds(at_K[k].energy, ladder_K[k], at_K[k + 1].energy, ladder_K[k + 1])
            if rng.random() < odds:
                at_K[k], at_K[k + 1] = at_K[k + 1], at_K[k]
        first = 1 - first
    _offer(replicas, static, archive)


def exchange_odds(
    energy: float, temperature: float, energy_2: float, temperature_2: float
) -> float:
    """Probability with which two replicas change places; it keeps detailed balance exactly.

    The ratio of exp(-energy_2 / temperature - energy / temperature_2) to the same with the
    replicas where they are, at most 1.
    """
    return math.exp(min(0.0, (energy - energy_2) * (1 / temperature - 1 / temperature_2)))


def _offer(chains: Sequence[Chain], static: Static, archive: Archive) -> None:
    """What ends a phase, as in population.anneal."""
    for chain in chains:
        archive.offer(static, chain.best_S, chain.best)
    archive.accepted += int(sum(chain.results[ACCEPTED] for chain in chains))
    archive.evaluated += int(sum(chain.results[EVALUATED] for chain in chains))


# --- methods -----------------------------------------------------------------------------------


class Method(NamedTuple):
    """A way to plan: a search, and whether row-aware placement alternates with it."""

    name: str
    search: Callable[..., None]
    row_aware: bool
    """Else the placement stays as LPT made it."""
    plan_method: str = "routepack"


SEARCHES = {
    "population annealing": anneal,
    "independent annealing": anneal_independently,
    "multi-start descent": descend,
    "parallel tempering": temper,
}
KK = Method("reorder-kk", anneal, False, "reorder-kk")
PAPER = Method("population annealing", anneal, False)
"""The paper's pipeline: LPT, seeds, population annealing."""
SHIPPED = Method("routepack", anneal, True)
"""The planner as it is: population annealing, row-aware placement."""
METHODS = (
    KK,
    *(Method(name, search, False) for name, search in SEARCHES.items()),
    SHIPPED,
    *(
        Method(f"{name}, row-aware", search, True)
        for name, search in SEARCHES.items()
        if search is not anneal
    ),
)


def plan(
    method: Method,
    window: Window,
    workload: Workload,
    budget: Budget,
    seed: int = 0,
    threads: int | None = None,
) -> Plan:
    """Plan a window with a method, in the budget and from its entry like any plan."""
    topology, cost_model = setting(workload)
    schedule = planner_search.ROUNDS if method.row_aware else planner_search.FIXED_PLACEMENT
    with (
        patch.object(planner_search, "anneal", method.search),
        patch.object(planner, "ROUNDS", schedule),
    ):
        return routepack.plan(
            window, topology, token_cap=workload.token_cap, cost_model=cost_model,
            method=method.plan_method, budget=budget, seed=seed, threads=threads,
        )  # fmt: skip
