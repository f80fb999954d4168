"""Alternate packing (population annealing) and row-aware placement in one budget (design 6.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from routepack.budget import Meter, Phase
from routepack.kernels.layout import Static
from routepack.placement import row_aware_placement
from routepack.population import Archive, anneal
from routepack.problem import Problem
from routepack.seeds import Seed, make_seeds

SEED_ATTEMPTS = 3  # of each seed generator
SEED_SHARE = 0.08  # of a budget in seconds, after which no more seeds are made
PACK, PLACE, SEEDS = 1, 2, 3  # streams of random numbers


class Round(NamedTuple):
    """Pack until a share of the budget, between two temperatures, then place until another.

    Temperatures are shares of the bound per sample; `chains` is the size of the population.
    """

    pack_until: float
    hot: float
    cold: float
    place_until: float
    chains: int


ROUNDS = (
    Round(0.25, 0.08, 0.004, 0.40, 4),
    Round(0.55, 0.02, 0.002, 0.68, 2),
    Round(0.80, 0.01, 0.001, 0.90, 2),
    Round(1.00, 0.004, 0.0005, 1.00, 2),
)
FIXED_PLACEMENT = (Round(1.0, 0.08, 0.001, 1.0, 4),)


def search(
    problem: Problem,
    rank_LE: NDArray[np.int32],
    packed_bins: Sequence[Sequence[int]],
    *,
    bound: float,
    rounds: Sequence[Round],
    meter: Meter,
    threads: int,
    seed: int,
    stop: Callable[[], bool] | None = None,
) -> tuple[Archive, list[Seed]]:
    """The best placed layout found in the budget, and the seeds it came from."""
    static = problem.static(rank_LE, threads)
    rng = np.random.default_rng([seed, SEEDS])
    first = make_seeds(
        problem,
        static,
        packed_bins,
        rounds[0].chains,
        rng,
        SEED_ATTEMPTS,
        lambda: meter.spent > SEED_SHARE,
    )
    scores = [problem.measure(static, s.cell_S).score for s in first]
    lead = min(range(len(first)), key=lambda k: scores[k].key)
    archive = Archive(problem, meter, rank_LE, first[lead].cell_S, scores[lead])
    seeds = first
    unit = (bound or 1.0) / problem.window.samples  # a bound of 0: nothing costs anything
    with ThreadPoolExecutor(threads) as pool:
        for k, (pack_until, hot, cold, place_until, chains) in enumerate(rounds):
            if stop is not None and stop():
                break
            seeds = [seeds[n % len(seeds)] for n in range(chains)]
            phase = Phase(meter, pack_until)
            if phase.start < pack_until:  # else a deadline has passed, and setting up costs time
                anneal(
                    problem, static, seeds, archive, phase, hot=hot * unit, cold=cold * unit,
                    stream=(seed, PACK, k), pool=pool, stop=stop,
                )  # fmt: skip
            phase = Phase(meter, place_until)
            if phase.start < place_until > pack_until and (stop is None or not stop()):
                static = _place(problem, static, archive, phase, (seed, PLACE, k), pool)
            energy = problem.measure(static, archive.cell_S).energy
            seeds = [Seed(archive.cell_S, "archive", energy)]
    return archive, first


def _place(
    problem: Problem,
    static: Static,
    archive: Archive,
    phase: Phase,
    stream: tuple[int, ...],
    pool: ThreadPoolExecutor,
) -> Static:
    """A placement for the best layout; kept if the exact score agrees that it is better."""
    ranks = problem.topology.ep
    group_S = (archive.cell_S // static.width).astype(np.int32)
    rank_LE = row_aware_placement(
        problem.window.demand_SLE,
        group_S,
        archive.rank_LE,
        ranks,
        problem.load,
        phase,
        stream,
        pool,
    )
    candidate = problem.static(rank_LE, pool._max_workers)
    if archive.offer(candidate, archive.cell_S, 0.0, rank_LE):
        return candidate
    return static
