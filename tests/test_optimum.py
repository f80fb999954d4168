"""How good the search is: exact optima by brute force on tiny instances."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack import (
    AttentionStage,
    Budget,
    CostModel,
    Topology,
)
from routepack.budget import Meter
from routepack.kernels.layout import Static
from routepack.placement import balanced_ranks
from routepack.problem import Problem
from routepack.search import FIXED_PLACEMENT, search
from strategies import random_window


def all_layouts(problem: Problem) -> NDArray[np.int64]:
    """cell_S [N, S] of every feasible layout."""
    samples, cells = problem.window.samples, problem.cells
    cell_NS = np.array(list(itertools.product(range(cells), repeat=samples)))
    tokens_Nc = np.stack([(cell_NS == c) @ problem.window.lengths_S for c in range(cells)], axis=1)
    return cell_NS[(tokens_Nc <= problem.token_cap).all(axis=1) & (tokens_Nc > 0).all(axis=1)]


def optimum(problem: Problem, static: Static) -> tuple[float, float, float]:
    """The best exact score of all layouts: ranked by the slowest shard, near ties exactly."""
    cell_NS = all_layouts(problem)
    width, shards = static.width, static.shards
    length_S, tokens2_TS = static.length_S[:-1], static.tokens2_TS[:, :-1]
    cost_NB = np.zeros((len(cell_NS), problem.cells // width))
    for b in range(cost_NB.shape[1]):
        inside_NWS = cell_NS[:, None, :] == np.arange(b * width, (b + 1) * width)[:, None]
        for t in range(len(static.linear_T)):
            work_NW = static.linear_T[t] * (inside_NWS @ length_S)
            work_NW = work_NW + static.quadratic_T[t] * (inside_NWS @ tokens2_TS[t])
            cost_NB[:, b] += work_NW.max(axis=1)
        load_NRL = np.tensordot(inside_NWS.any(axis=1), static.placed_SRL[:-1], axes=1)
        cost_NB[:, b] += static.expert * load_NRL.max(axis=1).sum(axis=1)
    slowest_N = cost_NB.reshape(len(cell_NS), -1, shards).sum(axis=1).max(axis=1)
    near = cell_NS[slowest_N <= slowest_N.min() * (1 + 1e-9)].astype(np.int32)
    return min(problem.measure(static, cell_S).score.key for cell_S in near)


def tiny(seed: int) -> Problem:
    """Six to eight samples in 3 or 4 cells, on one or two shards, under a tight or a loose cap."""
    rng = np.random.default_rng(seed)
    dp, shards, rows = [(2, 1, 2), (2, 2, 2), (1, 1, 3), (4, 2, 1), (1, 1, 4)][seed % 5]
    samples = int(rng.integers(6, 9))
    window = random_window(
        rng, rng.integers(3, 30, samples), int(rng.integers(1, 4)), 4, int(rng.integers(1, 3))
    )
    cells = rng.permutation(np.arange(samples) % (dp * rows))
    tokens_c = np.bincount(cells, weights=window.lengths_S)
    cap = int(tokens_c.max() * rng.choice([1.0, 1.3]))
    topology = Topology.of(dp=dp, ep=2, edp=shards)
    model = CostModel(
        (AttentionStage("full", float(rng.uniform(0, 20)), float(rng.uniform(0, 20))),),
        float(rng.uniform(0, 10)),
    )
    return Problem(window, topology, model.resolve(window, topology, cap), cap, rows)


def found_by_search(
    problem: Problem, rank_LE: NDArray[np.int32], seed: int, evaluations: int = 100_000
) -> Any:
    """The score that the layout search reaches under a fixed placement."""
    start = next(iter(all_layouts(problem))).astype(np.int32)
    bound = problem.measure(problem.static(rank_LE), start).score.total / problem.topology.edp
    [task] = search(
        [problem], rank_LE, [start], bounds=[bound], rounds=FIXED_PLACEMENT,
        meter=Meter(Budget(evaluations=evaluations), time.perf_counter()), threads=1, seed=seed,
    )  # fmt: skip
    assert task.archive.rank_LE is rank_LE
    return task.archive.score.key


def test_search_reaches_the_optimum_of_tiny_instances() -> None:
    """Given the placement, the best layout by exact score of at least 48 of 50 instances is found,
    out of up to 65,536 layouts each; and no score is below the optimum."""
    reached = 0
    for seed in range(50):
        problem = tiny(seed)
        rank_LE = balanced_ranks(problem.window.demand_LE, problem.topology.ep)
        best = optimum(problem, problem.static(rank_LE))
        found = found_by_search(problem, rank_LE, seed)
        slack = 1e-12  # equal up to rounding counts: a layout may have a twin in real numbers
        assert found[0] >= best[0] * (1 - slack)
        reached += found[0] <= best[0] * (1 + slack)
    assert reached >= 48
