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

from routepack.budget import Budget, Meter
from routepack.cost import DEFAULT, Coefficients, CostModel
from routepack.errors import InputError
from routepack.estimate import Estimate
from routepack.layouts import ffd_layout, karmarkar_karp_layout
from routepack.padding import Padding
from routepack.placement import balanced_ranks, identity, ranks_of, relabel, require_whole
from routepack.plan import (
    METHODS,
    Plan,
    Search,
    WindowKey,
    validate_placement,
)
from routepack.requirements import NONE, Requirements
from routepack.search import FIXED_PLACEMENT, ROUNDS, search
from routepack.step import Step, require_lengths
from routepack.topology import Topology
from routepack.trained import Trained
from routepack.window import Window

LENGTH_ONLY = ("baseline", "reorder", "kk", "reorder-kk")
DEFAULT_BUDGET = Budget(seconds=1.0)


@dataclass
class Clock:
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
    requirements: Requirements | None = None,
    padding: Padding | None = None,
    estimate: str | Estimate | None = None,
    step: Step | None = None,
) -> Plan:
    """`routepack.plan`, which has the documentation; `step`: of these arguments, if known."""
    clock = Clock()
    cost_model = cost_model or DEFAULT
    budget = budget or DEFAULT_BUDGET
    validate(window, topology, token_cap, method, seed, threads)
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
    WindowKey.of(window)  # hashes a window once: the search must know what is left of a deadline
    clock.lap("setup")

    # 2. Rows first: a window that cannot be packed needs no placement.
    if step is None:
        trained = Trained.of(window, padding, estimate)
        step = Step.of(window, topology, token_cap, cost_model, requirements or NONE, trained, seed)
    problem, window = step.problem, step.window
    clock.lap("rows")

    # 1. Placement, layer by layer, from aggregate demand.
    given = fixed_placement or method in ("baseline", "kk")
    if given:
        placement_LE = current_LE if fixed_placement else identity(window.layers, window.experts)
        rank_LE = ranks_of(placement_LE, topology.ep)
        if problem.nodes is not None:
            require_whole(placement_LE, topology.ep, problem.nodes)
    else:
        rank_LE = balanced_ranks(window.demand_LE, topology.ep, threads, problem.nodes)
        if not problem.cost.ep_ranks_alike:  # then ranks keep their names from here on
            rank_LE = ranks_of(
                relabel(rank_LE, topology.ep, current_LE, problem.nodes), topology.ep
            )
    clock.lap("placement")

    # 3. and 4. Seeds, population annealing and row-aware placement, or a trainer's own layout.
    spent = Search(seed=seed, evaluations=0, chains=0)
    stats: dict[str, Any] = {}
    if method in LENGTH_ONLY and problem.rules.shaped:
        cell_S = step.packed_S  # lightest cells, or fullest, as far as the requirements allow
    elif method in ("baseline", "reorder"):
        problem, cell_S = ffd_layout(problem)
    elif method in ("kk", "reorder-kk"):
        problem, cell_S = karmarkar_karp_layout(problem)
    else:
        meter = Meter(
            budget, clock.started, finish_seconds(window, rank_LE, topology.ep, current_LE)
        )
        [task] = search(
            [replace(problem, cost=objective_of(method, problem.cost))],
            rank_LE,
            [step.packed_S],
            bounds=[step.bound],
            rounds=FIXED_PLACEMENT if fixed_placement else ROUNDS,
            meter=meter,
            threads=threads,
            seed=seed,
            stop=stop,
        )
        archive = task.archive
        rank_LE, cell_S = archive.rank_LE, archive.cell_S
        spent = Search(seed=seed, evaluations=meter.evaluations, chains=len(task.first))
        stats = {
            "seed_generators": [s.generator for s in task.first],
            "accepted": archive.accepted,
            "evaluated": archive.evaluated,
            "history": archive.history,
        }
    clock.lap("layout")

    if method == "routepack":
        measured = archive.measured
    else:
        measured = problem.measure(problem.static(rank_LE, threads), cell_S)
    step = step.at(problem.rows)  # a length-only layout may need more
    if measured.over:
        raise step.too_little_memory(problem.static(rank_LE, threads), cell_S)
    if not given:
        placement_LE = relabel(
            rank_LE, topology.ep, current_LE, problem.nodes, alike=problem.cost.ep_ranks_alike
        )
    result = step.plan(placement_LE, cell_S, measured, method, spent)
    clock.lap("finish")
    stats["planning_seconds"] = time.perf_counter() - clock.started
    return msgspec.structs.replace(result, stats={**clock.stages, **stats, "threads": threads})


def finish_seconds(
    window: Window, rank_LE: NDArray[np.int32], ranks: int, current_LE: NDArray[np.int32]
) -> float:
    """What naming ranks and writing the plan out will take, judged by naming one layer's."""
    relabel(rank_LE[:1], ranks, current_LE[:1])  # the first of a process takes longer
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


def validate(
    window: Window, topology: Topology, token_cap: int, method: str, seed: int, threads: int | None
) -> None:
    """The arguments that every planning function shares. Raises InputError."""
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
    require_lengths(window, token_cap)
