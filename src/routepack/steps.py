"""Plan several optimizer steps of a rollout batch jointly, and other passes over it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from routepack.budget import Budget, Meter
from routepack.cost import DEFAULT, CostModel
from routepack.errors import InputError
from routepack.estimate import Estimate
from routepack.membership import balanced_steps, given_steps
from routepack.padding import Padding, padded
from routepack.placement import balanced_ranks, identity, ranks_of, relabel, require_whole
from routepack.plan import Plan, Search, WindowKey, validate_placement
from routepack.planner import DEFAULT_BUDGET, finish_seconds, make_plan, validate
from routepack.planset import Pass, PlanSet
from routepack.requirements import NONE, Requirements
from routepack.search import FIXED_PLACEMENT, ROUNDS, Task, search
from routepack.step import Step, require_lengths
from routepack.topology import Topology
from routepack.trained import Trained
from routepack.window import Window

PASS_SHARE = 0.25  # of the budget, for all other passes


def make_plans(
    window: Window,
    topology: Topology,
    token_cap: int,
    steps: int | ArrayLike | None,
    passes: Sequence[Pass],
    cost_model: CostModel | None,
    budget: Budget | None,
    current_placement: NDArray[np.int32] | None,
    seed: int,
    threads: int | None,
    stop: Callable[[], bool] | None,
    fixed_placement: bool,
    requirements: Requirements | None,
    padding: Padding | None,
    estimate: str | Estimate | None,
) -> PlanSet:
    """`routepack.plan_steps`, which has the documentation."""
    started = time.perf_counter()
    cost_model, required = cost_model or DEFAULT, requirements or NONE
    budget = budget or DEFAULT_BUDGET
    validate(window, topology, token_cap, "routepack", seed, threads)
    _validate_passes(window, topology, passes, seed, threads)
    threads = int(threads or len(os.sched_getaffinity(0)))
    current_LE = identity(window.layers, window.experts)
    if current_placement is not None:
        current_LE = validate_placement(
            "current_placement", current_placement, window.layers, window.experts
        )
    _require_padded(window, padding, int(token_cap))
    required.check(window, topology)
    step_S = _membership(window, steps, topology, required, int(seed))
    samples = [np.flatnonzero(step_S == k) for k in range(int(step_S.max()) + 1)]

    def ready(part: Window, cap: int, cost_model: CostModel, required: Requirements) -> Step:
        trained = Trained.of(part, padding, estimate)
        return Step.of(part, topology, cap, cost_model, required, trained, int(seed))

    parts = []
    for k, index in enumerate(samples):
        with _told_of(f"step {k}"):
            parts.append(ready(window.select(index), int(token_cap), cost_model, required))
    whole = []  # what a pass cannot have is told before the search of the steps
    for one in passes:
        with _told_of(f"pass {one.name}"):
            _require_padded(window, padding, int(one.token_cap))
            whole.append(ready(window, int(one.token_cap), one.cost_model, NONE))
    nodes, alike = parts[0].problem.nodes, parts[0].problem.cost.ep_ranks_alike
    rank_LE = ranks_of(current_LE, topology.ep)
    if not fixed_placement:
        demand_LE = np.sum([part.window.demand_LE for part in parts], axis=0)
        rank_LE = balanced_ranks(demand_LE, topology.ep, threads, nodes)
        if not alike:  # then ranks keep their names from here on
            rank_LE = ranks_of(relabel(rank_LE, topology.ep, current_LE, nodes), topology.ep)
    elif nodes is not None:
        require_whole(current_LE, topology.ep, nodes)
    own, others = _split(budget, bool(passes))
    reserve = len(parts) * finish_seconds(window, rank_LE, topology.ep, current_LE)
    meter = Meter(own, started, reserve)
    tasks = search(
        [part.problem for part in parts],
        rank_LE,
        [part.packed_S for part in parts],
        bounds=[part.bound for part in parts],
        rounds=FIXED_PLACEMENT if fixed_placement else ROUNDS,
        meter=meter,
        threads=threads,
        seed=int(seed),
        stop=stop,
    )
    placement_LE = current_LE
    if not fixed_placement:
        placement_LE = relabel(
            tasks[0].archive.rank_LE, topology.ep, current_LE, nodes, alike=alike
        )
    shared = meter.evaluations - sum(task.archive.proposed for task in tasks)
    plans = []
    for k, (part, task, index) in enumerate(zip(parts, tasks, samples, strict=True)):
        own_share = shared * (k + 1) // len(parts) - shared * k // len(parts)
        with _told_of(f"step {k}"):
            spent = Search(int(seed), task.archive.proposed + own_share, len(task.first))
            plans.append(_plan(part, task, placement_LE, index, spent))
    other = {
        one.name: make_plan(
            window, topology, one.token_cap, one.cost_model, "routepack", _part(others, passes),
            placement_LE, seed, threads, stop, True, None, padding, estimate, step,
        )
        for one, step in zip(passes, whole, strict=True)
    }  # fmt: skip
    stats = {"planning_seconds": time.perf_counter() - started, "evaluations": meter.evaluations}
    first = msgspec.structs.replace(plans[0], stats=stats)
    return PlanSet(WindowKey.of(window), (first, *plans[1:]), other)


@contextmanager
def _told_of(part: str) -> Iterator[None]:
    """Errors name the step or pass that they come from."""
    try:
        yield
    except InputError as error:
        raise type(error)(f"{part}: {error}") from None


def _require_padded(window: Window, padding: Padding | None, token_cap: int) -> None:
    """What is wrong with the padding in every step, or with a padded sample. Raises InputError."""
    if padding is None:
        return
    padded(window.select(np.arange(1)), padding)
    longer = padded(window, replace(padding, experts=None, fills_missing=False))
    require_lengths(longer, token_cap)


def _membership(
    window: Window,
    steps: int | ArrayLike | None,
    topology: Topology,
    required: Requirements,
    seed: int,
) -> NDArray[np.int64]:
    """The step of each sample, numbered 0..N-1 without gaps. Raises InputError."""
    if steps is None:
        step_S = given_steps(window)
    elif isinstance(steps, (int, np.integer)) and not isinstance(steps, bool):
        if not 1 <= steps <= window.samples:
            raise InputError.at("steps", steps, f"a whole number in 1..{window.samples}")
        together = required.together is not None and window.group_S is not None
        step_S = balanced_steps(window, int(steps), seed, together=together)
    else:
        step_S = np.asarray(steps)
        if step_S.shape != (window.samples,) or step_S.dtype.kind not in "iu":
            expected = f"a number, or an integer for each of the {window.samples} samples"
            raise InputError.at("steps", f"{step_S.dtype}{list(step_S.shape)}", expected)
        step_S = step_S.astype(np.int64)
        if (bad := np.flatnonzero(step_S < 0)).size:
            raise InputError.at("steps", int(step_S[bad[0]]), "at least 0", int(bad[0]))
    if (bad := np.flatnonzero(step_S >= window.samples)).size:
        expected = f"below the {window.samples} samples"
        raise InputError.at("steps", int(step_S[bad[0]]), expected, int(bad[0]))
    size_N = np.bincount(step_S)
    if size_N.min() < topology.dp:
        k = int(size_N.argmin())
        expected = f"at least the {topology.dp} DP ranks"
        raise InputError.at("samples of step", int(size_N[k]), expected, k)
    return step_S


def _validate_passes(
    window: Window, topology: Topology, passes: Sequence[Pass], seed: int, threads: int | None
) -> None:
    names = [one.name for one in passes]
    for k, one in enumerate(passes):
        if one.name in names[:k]:
            raise InputError.at("pass.name", repr(one.name), "each name once", k)
        with _told_of(f"pass {one.name}"):
            validate(window, topology, one.token_cap, "routepack", seed, threads)


def _split(budget: Budget, passes: bool) -> tuple[Budget, Budget]:
    """The budget of the steps, and that of all other passes."""
    share = PASS_SHARE if passes else 0.0
    if budget.evaluations is not None:
        other = int(budget.evaluations * share)
        return Budget(evaluations=budget.evaluations - other), Budget(evaluations=other)
    assert budget.seconds is not None
    own = Budget(seconds=budget.seconds * (1 - share))
    return own, Budget(seconds=budget.seconds * max(share, 1e-9))


def _part(others: Budget, passes: Sequence[Pass]) -> Budget:
    if others.evaluations is not None:
        return Budget(evaluations=others.evaluations // len(passes))
    assert others.seconds is not None
    return Budget(seconds=others.seconds / len(passes))


def _plan(
    part: Step,
    task: Task,
    placement_LE: NDArray[np.int32],
    index: NDArray[np.int64],
    spent: Search,
) -> Plan:
    """The plan of a step, its rows in sample indices of the whole window."""
    archive = task.archive
    if archive.measured.over:
        raise part.too_little_memory(task.static, archive.cell_S)
    plan = part.plan(placement_LE, archive.cell_S, archive.measured, "routepack", spent)
    rows = tuple(tuple(tuple(int(index[i]) for i in cell) for cell in row) for row in plan.rows)
    return msgspec.structs.replace(plan, rows=rows)
