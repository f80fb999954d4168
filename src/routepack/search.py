"""Alternate packing (population annealing) and row-aware placement in one budget (design 6.1).

Several optimizer steps share one placement: each is packed for itself, in its part of the budget,
and the placement is made for the groups of all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from routepack.budget import Meter, Phase
from routepack.kernels.layout import Static
from routepack.kernels.rowaware import group_demand
from routepack.placement import row_aware_placement
from routepack.population import Archive, anneal
from routepack.problem import Measured, Problem
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
    Round(0.45, 0.08, 0.002, 0.60, 4),
    Round(0.80, 0.01, 0.001, 0.90, 2),
    Round(1.00, 0.004, 0.0005, 1.00, 2),
)
FIXED_PLACEMENT = (Round(1.0, 0.08, 0.001, 1.0, 4),)
# A placement levels one or two groups whatever their samples, so the first round of so few charges
# what will be left of the expert term; else which samples share a row is settled too early.
FEW_GROUPS = 2
FORESEEN = 0.1


@dataclass(eq=False)
class Task:
    """An optimizer step under search: its problem, a layout to start from, and the best so far.

    `draft_S` is the layout that the next placement is made for; it differs from the archive's where
    a round charged other costs.
    """

    problem: Problem
    packed_S: NDArray[np.int32]
    static: Static
    archive: Archive
    first: list[Seed]
    seeds: list[Seed]
    draft_S: NDArray[np.int32]
    static_seconds: float
    """What counting the loads of a placement takes."""

    @classmethod
    def start(
        cls,
        problem: Problem,
        packed_S: NDArray[np.int32],
        rank_LE: NDArray[np.int32],
        chains: int,
        meter: Meter,
        enough_at: float,
        threads: int,
        stream: tuple[int, ...],
    ) -> Task:
        """Make seeds under a placement, until `enough_at` of the budget is spent."""
        started = time.perf_counter()
        static = problem.static(rank_LE, threads)
        seconds = time.perf_counter() - started
        first = make_seeds(
            problem,
            static,
            packed_S,
            chains,
            np.random.default_rng(stream),
            SEED_ATTEMPTS,
            lambda: meter.spent > enough_at,
        )
        lead = min(first, key=lambda seed: seed.measured.key)
        archive = Archive(problem, meter, rank_LE, lead.cell_S, lead.measured)
        return cls(problem, packed_S, static, archive, first, first, archive.cell_S, seconds)

    def pack(
        self,
        k: int,
        spent: Round,
        foresee: bool,
        phase: Phase,
        unit: float,
        stream: tuple[int, ...],
        pool: ThreadPoolExecutor,
        stop: Callable[[], bool] | None,
    ) -> None:
        """Anneal from the seeds under the present placement."""
        draft, goal, problem = self.archive, self.static, self.problem
        seeds = [self.seeds[n % len(self.seeds)] for n in range(spent.chains)]
        if foresee:
            goal = goal._replace(expert=FORESEEN * goal.expert)
            draft = draft.under(goal)
            seeds = [replace(s, measured=problem.measure(goal, s.cell_S)) for s in seeds]
        if phase.start < phase.until:  # else a deadline has passed, and setting up costs time
            anneal(
                problem, goal, seeds, draft, phase, hot=spent.hot * unit, cold=spent.cold * unit,
                stream=stream, pool=pool, stop=stop,
            )  # fmt: skip
        if draft is not self.archive:
            self.archive.take_over(draft, self.static)
        self.draft_S = draft.cell_S

    def reseed(self) -> None:
        """Go on from the best."""
        self.seeds = [Seed(self.archive.cell_S, "archive", self.archive.measured)]
        self.draft_S = self.archive.cell_S


def search(
    problems: Sequence[Problem],
    rank_LE: NDArray[np.int32],
    packed: Sequence[NDArray[np.int32]],
    *,
    bounds: Sequence[float],
    rounds: Sequence[Round],
    meter: Meter,
    threads: int,
    seed: int,
    stop: Callable[[], bool] | None = None,
) -> list[Task]:
    """The best layouts found in the budget, a step each, under one placement.

    packed  a layout of each problem to start from
    bounds  what each costs at least: temperatures are a share of it
    """
    samples = [problem.window.samples for problem in problems]
    share = np.cumsum([0, *samples]) / sum(samples)
    tasks = [
        Task.start(
            problem, packed_S, rank_LE, rounds[0].chains, meter, SEED_SHARE * share[n + 1], threads,
            _stream(seed, SEEDS, n),
        )
        for n, (problem, packed_S) in enumerate(zip(problems, packed, strict=True))
    ]  # fmt: skip
    few = sum(problem.full_rows * problem.topology.edp for problem in problems) <= FEW_GROUPS
    stopped = stop if stop is not None else lambda: False
    with ThreadPoolExecutor(threads) as pool:
        for k, spent in enumerate(rounds):
            if stopped():
                break
            # A placement brings other loads; a deadline must leave the time to count them.
            places = spent.place_until > spent.pack_until and meter.leaves(
                spent.place_until, sum(task.static_seconds for task in tasks)
            )
            start = meter.spent
            for n, task in enumerate(tasks):
                until = start + (spent.pack_until - start) * share[n + 1]
                unit = (bounds[n] or 1.0) / samples[n]  # a bound of 0: nothing costs anything
                phase = Phase(meter, spent.pack_until if n + 1 == len(tasks) else until)
                foresee = few and k == 0 and places
                task.pack(k, spent, foresee, phase, unit, _stream(seed, PACK, n, k), pool, stop)
            phase = Phase(meter, spent.place_until)
            if places and phase.start < spent.place_until and not stopped():
                _place(tasks, phase, (seed, PLACE, k), pool)
            for task in tasks:
                task.reseed()
    return tasks


def _stream(seed: int, kind: int, step: int, *rest: int) -> tuple[int, ...]:
    """Names a stream of random numbers; the first step's are those of a step alone."""
    return (seed, kind, *rest, step) if step else (seed, kind, *rest)


def _place(
    tasks: Sequence[Task], phase: Phase, stream: tuple[int, ...], pool: ThreadPoolExecutor
) -> None:
    """A placement for the drafts of all steps; kept if the exact scores agree that it is better."""
    first = tasks[0].problem
    demand_BLE = np.concatenate([
        group_demand(
            task.problem.window.demand_SLE,
            (task.draft_S // task.static.width).astype(np.int32),
            task.problem.rows * task.problem.topology.edp,
            max(other.problem.load for other in tasks),
        )
        for task in tasks
    ])  # fmt: skip
    # A limit counts routed tokens, however fast their rank is; first of all they are to fit.
    over = any(task.archive.measured.over for task in tasks)
    slow_RB = None
    if tasks[0].static.uneven and not over:
        slow_RG = first.cost.slow_GR.T
        slow_RB = np.tile(slow_RG, len(demand_BLE) // slow_RG.shape[1])
    rank_LE = row_aware_placement(
        demand_BLE,
        tasks[0].archive.rank_LE,
        first.topology.ep,
        phase,
        stream,
        pool,
        first.rules.limit,
        first.nodes,
        slow_RB,
    )
    statics = [task.problem.static(rank_LE, pool._max_workers) for task in tasks]
    after = [
        task.problem.measure(static, task.draft_S)
        for task, static in zip(tasks, statics, strict=True)
    ]
    before = [task.archive.measured for task in tasks]
    if joint_key(after) < joint_key(before):
        for task, static, measured in zip(tasks, statics, after, strict=True):
            task.static = static
            task.archive.move(rank_LE, task.draft_S, measured)


def joint_key(measured: Sequence[Measured]) -> tuple[float, ...]:
    """Several steps are compared by this: the sums of what a step is compared by."""
    return tuple(math.fsum(values) for values in zip(*(m.key for m in measured), strict=True))
