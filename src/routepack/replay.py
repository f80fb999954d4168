"""Placement over time: a gate on a sequence of windows, beside never and always migrating.

Each window is planned twice, with the same budget: packing under the placement that is held, and a
placement with its own packing. The gate takes what pays (`routepack.gate`), and the next window
finds the placement that was kept. Two other policies see the same windows:

    never    holds the first placement; packs under it
    always   takes every proposed placement whole, its ranks named against the one that it held

The predicted seconds of a step are seconds_per_cost_unit * slowest shard, the migration, and the
planning that a step which migrates waits for. What planning really took is measured beside them: it
is not part of them, since it differs from run to run.

Shapes: L MoE layers, E experts per layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from routepack.budget import Budget
from routepack.cost import DEFAULT, CostModel
from routepack.errors import InfeasibleError, InputError
from routepack.gate import Decision, Gate, Verdict, decide
from routepack.migration import MigrationCost, Moves
from routepack.placement import identity, ranks_of, relabel
from routepack.plan import Plan, validate_placement
from routepack.planner import make_plan
from routepack.topology import Topology
from routepack.window import Window

LONG_AGO = np.iinfo(np.int64).max // 2  # steps since a layer moved that never did


@dataclass(frozen=True)
class Spent:
    """What a policy's step, or all its steps, are predicted to take; bytes of one EP group."""

    step_seconds: float = 0.0
    migration_seconds: float = 0.0
    exposed_seconds: float = 0.0
    migration_bytes: int = 0
    moved_experts: int = 0
    migrations: int = 0  # steps that move any expert

    @property
    def seconds(self) -> float:
        """Training, migration and planning that was waited for."""
        return self.step_seconds + self.migration_seconds + self.exposed_seconds

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(getattr(self, f) + getattr(other, f) for f in self.__dataclass_fields__))

    @classmethod
    def of(cls, cost: float, moves: Moves, migration: MigrationCost) -> Spent:
        """A step whose slowest shard costs `cost`, after these moves."""
        moved = int(moves.experts_L.sum())
        return cls(
            migration.seconds_per_cost_unit * cost,
            migration.seconds(moves),
            migration.exposed_seconds if moved else 0.0,
            int(migration.bytes_L(moves).sum()),
            moved,
            int(moved > 0),
        )


@dataclass(frozen=True, eq=False)
class Step:
    """One window. Costs are of the slowest shard, in units of the cost model.

    baseline_cost     first-fit decreasing under the placement held before the step; None where it
    kk_cost           finds no layout. Karmarkar-Karp there likewise: what the trainer does alone
    keep_cost         packing searched under that placement
    proposed_cost     the proposed plan, taken whole
    decision          what the gate does; its plan is what trains
    gate              what that is predicted to take, and beside it the two other policies
    planning_seconds  measured: the search under the held placement and the one for a new placement
    """

    index: int
    baseline_cost: float | None
    kk_cost: float | None
    keep_cost: float
    proposed_cost: float
    decision: Decision
    gate: Spent
    always: Spent
    never: Spent
    planning_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The step as JSON has it, without anything that was measured."""
        plan = self.decision.plan
        return {
            "step": self.index,
            "window": plan.window.sha256,
            "costs": {
                "baseline": self.baseline_cost,
                "kk": self.kk_cost,
                "keep": self.keep_cost,
                "proposed": self.proposed_cost,
                "kept": plan.score.slowest_shard,
            },
            "saving_seconds": self.decision.saving_seconds,
            "verdicts": list(self.decision.verdicts),
            **{name: asdict(getattr(self, name)) for name in ("gate", "always", "never")},
        }


@dataclass(frozen=True)
class Totals:
    """All steps of a replay, by policy; layers by verdict, summed over the steps."""

    steps: int
    gate: Spent
    always: Spent
    never: Spent
    verdicts: dict[Verdict, int]
    planning_seconds: float

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Totals:
        """Add up."""
        steps = list(steps)
        verdicts = Counter(verdict for step in steps for verdict in step.decision.verdicts)
        return cls(
            len(steps),
            sum((step.gate for step in steps), Spent()),
            sum((step.always for step in steps), Spent()),
            sum((step.never for step in steps), Spent()),
            dict(sorted(verdicts.items())),
            sum(step.planning_seconds for step in steps),
        )

    def to_dict(self) -> dict[str, Any]:
        """The totals as JSON has them, without anything that was measured."""
        fields = asdict(self)
        del fields["planning_seconds"]
        return fields


def replay(
    windows: Iterable[Window],
    topology: Topology,
    *,
    token_cap: int,
    migration: MigrationCost,
    gate: Gate | None = None,
    cost_model: CostModel | None = None,
    budget: Budget | None = None,
    current_placement: ArrayLike | None = None,
    seed: int = 0,
    threads: int | None = None,
) -> Iterator[Step]:
    """Plan and gate one window after another; the last placement is that of the last step's plan.

    windows            one an optimizer step, in order; all with the same layers and experts
    budget             of each search; two or three a step. Default: one second
    current_placement  [L, E] slots that the first step finds; default contiguous

    The other arguments are those of `routepack.plan`. Raises InputError, which names the window.
    """
    state: _State | None = None
    for index, window in enumerate(windows):
        try:
            if state is None:
                state = _State.start(window, current_placement)
            state.require_same_model(window)
            planner = _Planner(window, topology, token_cap, cost_model, budget, seed, threads)
            step, state = _step(index, planner, state, migration, gate or Gate())
        except InputError as error:
            raise type(error)(f"windows[{index}]: {error}") from None
        yield step


@dataclass(frozen=True, eq=False)
class _State:
    """The placements that the policies hold before a step."""

    gate_LE: NDArray[np.int32]
    always_LE: NDArray[np.int32]
    never_LE: NDArray[np.int32]
    steps_since_L: NDArray[np.int64]

    @classmethod
    def start(cls, window: Window, placement: ArrayLike | None) -> _State:
        layers, experts = window.layers, window.experts
        start_LE = identity(layers, experts)
        if placement is not None:
            start_LE = validate_placement("current_placement", placement, layers, experts)
        return cls(start_LE, start_LE, start_LE, np.full(layers, LONG_AGO))

    def require_same_model(self, window: Window) -> None:
        found, expected = (window.layers, window.experts), self.gate_LE.shape
        if found != expected:
            raise InputError.at("(layers, experts)", found, f"{expected}, as in the first window")


@dataclass(frozen=True, eq=False)
class _Planner:
    """`make_plan` for one window."""

    window: Window
    topology: Topology
    token_cap: int
    cost_model: CostModel | None
    budget: Budget | None
    seed: int
    threads: int | None

    def pack(self, placement_LE: NDArray[np.int32], method: str = "routepack") -> Plan:
        """Micro-batches under a placement that stays."""
        return self._plan(placement_LE, method, fixed_placement=True)

    def place(self, placement_LE: NDArray[np.int32]) -> Plan:
        """A placement and micro-batches, with few moves away from `placement_LE`."""
        return self._plan(placement_LE, "routepack", fixed_placement=False)

    @property
    def ep_ranks_alike(self) -> bool:
        """Whether EP ranks may be named anew."""
        model = self.cost_model or DEFAULT
        return model.resolve(self.window, self.topology, self.token_cap).ep_ranks_alike

    def cost(self, placement_LE: NDArray[np.int32], method: str) -> float | None:
        """Of a layout that needs no search; None where the method finds none."""
        try:
            return self.pack(placement_LE, method).score.slowest_shard
        except InfeasibleError:
            return None

    def _plan(self, placement_LE: NDArray[np.int32], method: str, *, fixed_placement: bool) -> Plan:
        return make_plan(
            self.window, self.topology, self.token_cap, self.cost_model, method, self.budget,
            placement_LE, self.seed, self.threads, None, fixed_placement,
        )  # fmt: skip


def _step(
    index: int, planner: _Planner, state: _State, migration: MigrationCost, gate: Gate
) -> tuple[Step, _State]:
    """One window, and the placements after it."""
    held_LE = state.gate_LE
    keep, proposed = planner.pack(held_LE), planner.place(held_LE)
    decision = decide(planner.window, keep, proposed, migration, gate, state.steps_since_L)
    kept_LE, ranks = decision.plan.placement_LE, proposed.topology.ep
    # What is held enters a proposal only by the names of its ranks, so one serves both policies.
    always_LE = relabel(
        ranks_of(proposed.placement_LE, ranks), ranks, state.always_LE,
        alike=planner.ep_ranks_alike,
    )  # fmt: skip
    never = keep if np.array_equal(held_LE, state.never_LE) else planner.pack(state.never_LE)

    def spent(cost: float, from_LE: NDArray[np.int32], to_LE: NDArray[np.int32]) -> Spent:
        return Spent.of(cost, Moves.between(from_LE, to_LE, ranks), migration)

    step = Step(
        index,
        baseline_cost=planner.cost(held_LE, "baseline"),
        kk_cost=planner.cost(held_LE, "kk"),
        keep_cost=keep.score.slowest_shard,
        proposed_cost=proposed.score.slowest_shard,
        decision=decision,
        gate=spent(decision.plan.score.slowest_shard, held_LE, kept_LE),
        always=spent(proposed.score.slowest_shard, state.always_LE, always_LE),
        never=spent(never.score.slowest_shard, state.never_LE, state.never_LE),
        planning_seconds=sum(plan.stats["planning_seconds"] for plan in (keep, proposed)),
    )
    moved_L = np.array([verdict == "moved" for verdict in decision.verdicts])
    return step, replace(
        state,
        gate_LE=kept_LE,
        always_LE=always_LE,
        steps_since_L=np.where(moved_L, 1, state.steps_since_L + 1),
    )
