"""A plan for each optimizer step of a batch, beside the trainer's own layout.

Packing keeps what the trainer decided about learning: which samples belong to which optimizer step.
It changes on which DP rank and in which micro-batch of that step a sample is trained.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import routepack
from routepack.budget import Budget
from routepack.cost import CostModel
from routepack.errors import InputError
from routepack.integrations.guarded import Stop
from routepack.integrations.layout import Cells, broken_invariants
from routepack.integrations.observe import PREFIX, Load, Metrics, measure
from routepack.plan import Plan
from routepack.topology import Topology
from routepack.window import Window


@dataclasses.dataclass(frozen=True, eq=False)
class Compared:
    """The better layout of every optimizer step, and the numbers that say so."""

    rows: list[list[list[list[int]]]]
    """[step][M][D] samples of the window."""
    packed_steps: int
    """Optimizer steps whose rows are a plan's; the others have the trainer's own."""
    own: Load
    metrics: Metrics
    parts: list[Window]
    """The window of each optimizer step."""

    @property
    def key(self) -> str:
        """Equal where another rank has the same samples and the same rows."""
        shas = [part.sha256 for part in self.parts]
        return hashlib.sha256(json.dumps([shas, self.rows]).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class Planner:
    """How steps are planned; see `Packer`, whose arguments these are."""

    topology: Topology
    token_cap: int
    cost_model: CostModel
    budget: Budget
    placement_LE: NDArray[np.int32] | None
    rows_multiple_of: int
    seed: int
    threads: int | None

    def compare(self, window: Window, own: Sequence[Cells], stop: Stop) -> Compared:
        """Plan each optimizer step under the placement that is held, and keep what is faster.

        own  the trainer's rows [M][D] of each optimizer step, in samples of the window

        Raises InputError for a step that cannot be planned.
        """
        began = time.perf_counter()
        rows, loads, own_loads, parts = [], [], [], []
        packed_steps = 0
        for own_rows in own:
            members = _members(own_rows, window.samples)
            part, position = _part(window, members)
            own_load = self._load(part, _renamed(own_rows, position))
            plan = self.plan(part, len(own), stop)
            load = self._load(part, plan.rows)
            packed_rows = _renamed(plan.rows, members)
            if load.over(own_load) < 1:
                self._require_invariants(packed_rows, window, members)
                packed_steps += 1
            else:
                load, packed_rows = own_load, [[list(cell) for cell in row] for row in own_rows]
            rows.append(packed_rows)
            loads.append(load)
            own_loads.append(own_load)
            parts.append(part)
        own_load = sum(own_loads[1:], start=own_loads[0])
        load = sum(loads[1:], start=loads[0])
        counts = {
            "steps": len(parts),
            "samples": sum(part.samples for part in parts),
            "tokens": sum(int(part.lengths_S.sum()) for part in parts),
            "missing_rows": sum(int(part.missing_S.sum()) for part in parts),
            "packed_steps": packed_steps,
            "planning_seconds": time.perf_counter() - began,
            "predicted_ratio": load.over(own_load),
        }
        metrics = {PREFIX + name: value for name, value in counts.items()}
        metrics |= own_load.metrics("own") | load.metrics("plan")
        return Compared(rows, packed_steps, own_load, metrics, parts)

    def with_placement(self, compared: Compared, stop: Stop) -> Metrics:
        """What plans that also place experts anew would save; migration is not taken off."""
        began = time.perf_counter()
        steps = len(compared.parts)
        slowest = sum(
            self.plan(part, steps, stop, fixed_placement=False).score.slowest_shard
            for part in compared.parts
        )
        own = compared.own.slowest_shard
        return {
            f"{PREFIX}predicted_ratio_with_placement": slowest / own if own > 0 else 1.0,
            f"{PREFIX}placing_seconds": time.perf_counter() - began,
        }

    def plan(self, part: Window, steps: int, stop: Stop, *, fixed_placement: bool = True) -> Plan:
        """Plan one of so many optimizer steps, which share the budget."""
        budget = self.budget
        if budget.seconds is not None:
            budget = Budget(seconds=budget.seconds / steps)
        elif budget.evaluations is not None:
            budget = Budget(evaluations=budget.evaluations // steps)
        return routepack.plan(
            part,
            self.topology,
            token_cap=self.token_cap,
            cost_model=self.cost_model,
            budget=budget,
            current_placement=self.placement_LE,
            fixed_placement=fixed_placement,
            seed=self.seed,
            threads=self.threads,
            stop=stop,
            requirements=routepack.Requirements(rows_multiple_of=self.rows_multiple_of),
        )

    def _load(self, part: Window, rows: Cells) -> Load:
        return measure(
            part, self.topology, self.cost_model, self.token_cap, rows, self.placement_LE
        )

    def _require_invariants(self, rows: Cells, window: Window, members: list[int]) -> None:
        broken = broken_invariants(
            rows,
            window.lengths_S,
            members,
            data_parallel=self.topology.dp,
            token_cap=self.token_cap,
            rows_multiple_of=self.rows_multiple_of,
        )
        if broken:  # not an assert: this is what keeps a bug here out of a training run
            raise RuntimeError(f"the plan's layout is not valid: {broken[0]}")


def _members(rows: Cells, samples: int) -> list[int]:
    """The samples of an optimizer step, ascending."""
    members = sorted(i for row in rows for cell in row for i in cell)
    for before, i in zip([-1, *members], members, strict=False):
        if i == before or not 0 <= i < samples:
            raise InputError.at("layout", i, f"a sample in 0..{samples - 1}, at most once")
    return members


def _part(window: Window, members: list[int]) -> tuple[Window, dict[int, int]]:
    """The window of some samples, and where each of them is in it."""
    position = {i: k for k, i in enumerate(members)}
    if len(members) == window.samples:
        return window, position
    arrays = {
        field.name: value[members]
        for field in dataclasses.fields(window)
        if "_S" in field.name and (value := getattr(window, field.name)) is not None
    }
    return dataclasses.replace(window, **arrays), position


def _renamed(rows: Cells, names: Any) -> list[list[list[int]]]:
    return [[[names[i] for i in cell] for cell in row] for row in rows]
