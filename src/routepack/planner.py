"""RoutePack, stage by stage (arXiv 2608.12146; design section 3), in one place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from routepack.bounds import best_bound
from routepack.budget import Budget, Meter
from routepack.cost import DEFAULT, Coefficients, CostModel
from routepack.errors import InputError
from routepack.layouts import ffd_layout, karmarkar_karp_layout
from routepack.placement import balanced_ranks, identity, ranks_of, relabel
from routepack.plan import (
    METHODS,
    Certificate,
    Plan,
    Search,
    TopologyKey,
    WindowKey,
    validate_placement,
)
from routepack.problem import Problem
from routepack.rows import Rows, minimal_rows, split_to
from routepack.search import FIXED_PLACEMENT, ROUNDS, search
from routepack.topology import Topology
from routepack.window import Window

DEFAULT_BUDGET = Budget(seconds=1.0)


@dataclass
class _Clock:
    """Seconds by stage, for Plan.stats."""

    started: float = field(default_factory=time.perf_counter)
    stages: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.stages[f"{stage}_seconds"] = now - self.last
        self.last = now


def make_plan(
    window: Window,
    topology: Topology,
    token_cap: int,
    cost_model: CostModel | None,
    method: str,
    budget: Budget | None,
    current_placement: NDArray[np.int32] | None,
    seed: int,
    threads: int | None,
    stop: Callable[[], bool] | None,
    fixed_placement: bool = False,
) -> Plan:
    """`routepack.plan`, which has the documentation."""
    clock = _Clock()
    cost_model = cost_model or DEFAULT
    budget = budget or DEFAULT_BUDGET
    _validate(window, topology, token_cap, method, seed, threads)
    token_cap, seed = (
        int(token_cap),
        int(seed),
    )  # numpy's integers are welcome, but not in a plan file
    threads = int(threads or len(os.sched_getaffinity(0)))
    current_LE = identity(window.layers, window.experts)
    if current_placement is not None:
        current_LE = validate_placement(
            "current_placement", current_placement, window.layers, window.experts
        )
    cost = cost_model.resolve(window, topology, token_cap)
    clock.lap("setup")

    # 2. Rows first: a window that cannot be packed needs no placement.
    rows = minimal_rows(window.lengths_S, token_cap, topology.dp, seed=seed)
    problem = Problem(window, topology, cost, token_cap, rows.rows)
    clock.lap("rows")
    bound, bound_method = best_bound(window, topology, cost, token_cap, problem.rows)
    clock.lap("bound")

    # 1. Placement, layer by layer, from aggregate demand.
    given = fixed_placement or method in ("baseline", "kk")
    if given:
        placement_LE = current_LE if fixed_placement else identity(window.layers, window.experts)
        rank_LE = ranks_of(placement_LE, topology.ep)
    else:
        rank_LE = balanced_ranks(window.demand_LE, topology.ep, threads)
    clock.lap("placement")

    # 3. and 4. Seeds, population annealing and row-aware placement, or a trainer's own layout.
    spent = Search(seed=seed, evaluations=0, chains=0)
    stats: dict[str, Any] = {}
    if method in ("baseline", "reorder"):
        problem, cell_S = ffd_layout(problem)
    elif method in ("kk", "reorder-kk"):
        problem, cell_S = karmarkar_karp_layout(problem)
    else:
        meter = Meter(
            budget, clock.started, _finish_seconds(window, rank_LE, topology.ep, current_LE)
        )
        archive, seeds = search(
            replace(problem, cost=objective_of(method, cost)),
            rank_LE,
            split_to(rows.bins, problem.cells),
            bound=bound,
            rounds=FIXED_PLACEMENT if fixed_placement else ROUNDS,
            meter=meter,
            threads=threads,
            seed=seed,
            stop=stop,
        )
        rank_LE, cell_S = archive.rank_LE, archive.cell_S
        spent = Search(seed=seed, evaluations=meter.evaluations, chains=len(seeds))
        stats = {
            "seed_generators": [s.generator for s in seeds],
            "accepted": archive.accepted,
            "evaluated": archive.evaluated,
            "history": archive.history,
        }
    clock.lap("layout")

    if method == "routepack":
        score = archive.score
    else:
        score = problem.measure(problem.static(rank_LE, threads), cell_S).score
    if not given:
        placement_LE = relabel(rank_LE, topology.ep, current_LE)
    if problem.rows != rows.rows:  # a length-only layout that needed more
        bound, bound_method = best_bound(window, topology, cost, token_cap, problem.rows)
    result = Plan(
        window=WindowKey.of(window),
        topology=msgspec.convert(topology.to_dict(), TopologyKey),
        token_cap=token_cap,
        cost_model=cost_model,
        method=method,
        placement=tuple(tuple(slots) for slots in placement_LE.tolist()),
        rows=problem.to_rows(cell_S),
        certificate=_certificate(rows, problem.rows, score.slowest_shard, bound, bound_method),
        score=score,
        search=spent,
    )
    clock.lap("finish")
    stats["planning_seconds"] = time.perf_counter() - clock.started
    return msgspec.structs.replace(result, stats={**clock.stages, **stats, "threads": threads})


def _finish_seconds(
    window: Window, rank_LE: NDArray[np.int32], ranks: int, current_LE: NDArray[np.int32]
) -> float:
    """What naming ranks and writing the plan out will take, judged by naming one layer's."""
    started = time.perf_counter()
    relabel(rank_LE[:1], ranks, current_LE[:1])
    naming = time.perf_counter() - started
    numbers = window.layers * window.experts + window.samples
    return 0.002 + window.layers * naming + numbers * 4e-7


def objective_of(method: str, cost: Coefficients) -> Coefficients:
    """What a method's search minimises; every plan is scored by the whole cost."""
    if method == "expert-only":
        zero_T = np.zeros_like(cost.linear_T)
        return replace(cost, linear_T=zero_T, quadratic_T=zero_T)
    if method == "attention-only":
        return replace(cost, expert=0.0)
    return cost


def _certificate(
    rows: Rows, used: int, slowest: float, bound: float, bound_method: str
) -> Certificate:
    return Certificate(
        rows_lower_bound=rows.lower_bound,
        rows_certified=used == rows.lower_bound,
        rows_method=rows.method,
        cost_lower_bound=bound,
        cost_bound_method=bound_method,
        gap=Certificate.gap_of(slowest, bound),
    )


def _validate(
    window: Window, topology: Topology, token_cap: int, method: str, seed: int, threads: int | None
) -> None:
    for name, value in (("token_cap", token_cap), ("threads", 1 if threads is None else threads)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise InputError.at(name, repr(value), "a whole number of at least 1")
    whole = isinstance(seed, (int, np.integer)) and not isinstance(seed, bool)
    if not whole or not 0 <= seed < 2**63:
        raise InputError.at("seed", repr(seed), "a whole number in 0..2^63-1")
    if token_cap >= 2**63:
        raise InputError.at("token_cap", token_cap, "a whole number below 2^63")
    if method not in METHODS:
        raise InputError.at("method", method, "one of " + ", ".join(METHODS))
    if window.experts % topology.ep:
        expected = f"a multiple of the {topology.ep} EP ranks"
        raise InputError.at("num_experts", window.experts, expected)
    if window.samples < topology.dp:
        expected = f"at least the {topology.dp} DP ranks"
        raise InputError.at("samples", window.samples, expected)
    topology.require_plannable()  # after the sizes: absurd ones would take memory here
    if (bad := np.flatnonzero(window.lengths_S > token_cap)).size:
        i = int(bad[0])
        expected = f"at most the token cap {token_cap}"
        raise InputError.at("lengths", int(window.lengths_S[i]), expected, i)
