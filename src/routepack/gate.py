"""Is a new placement worth its migration? The net-benefit gate, layer by layer (design 6.3).

Given a layout, the layers of a placement are independent, so a placement may be taken at some
layers and left at others. Each step compares, by the exact score of what would really run:

    keep        the current placement, with the layout that was packed under it
    move        the layers of the proposed placement that pay, with the proposed plan's layout
    move, keep  the layers that pay with the layout of `keep`

Packing costs no migration, so `keep` is always there, and wins ties. An option is priced

    horizon_steps * seconds_per_cost_unit * slowest shard  +  margin * (migration + exposed planning)

where the second term is 0 if nothing moves. The layers that pay are found from all that may move by
dropping the weakest one at a time, until each saves more over the horizon than `margin` times its
own seconds and all fit the byte budget; with one EDP shard savings add up, so that without a budget
this is the best choice there is.

What is promised: with the default gate (horizon 1, margin 1, no rest, no budget), the step and its
migration take at most as long as the better of keeping everything and moving everything, from the
placement that the step begins with. The saving is this window's own, not a forecast. A longer
horizon bets that the skew lasts: it counts the saving of this window for each of the steps. Over
many steps no rule that does not know the next window can promise to beat both never and always
migrating; `routepack replay` shows all three on recorded windows.

Shapes: L MoE layers, M rows, G EDP shards, E experts per layer, R EP ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from routepack.cost import Coefficients
from routepack.errors import InputError
from routepack.migration import MigrationCost, Moves, require_whole
from routepack.objective import cell_attention, score_rows
from routepack.plan import Plan, Score, WindowKey
from routepack.window import Window

Verdict = Literal["moved", "same", "resting", "saving", "budget", "whole"]
"""Of a layer: moved; nothing proposed; moved too recently; saves too little; over the byte budget;
would pay alone, but the step as a whole does better without."""


@dataclass(frozen=True)
class Gate:
    """When to migrate.

    horizon_steps     steps that a placement is expected to serve; 1 counts this step's saving only
    margin            a move must save more than this times its cost; above 1 against noise
    hysteresis_steps  a layer that moved in one of the last so many steps stays where it is
    byte_budget       bytes that all ranks of an EP group together may receive in one step

    Raises InputError.
    """

    horizon_steps: int = 1
    margin: float = 1.0
    hysteresis_steps: int = 0
    byte_budget: int | None = None

    def __post_init__(self) -> None:
        require_whole("horizon_steps", self.horizon_steps, 1)
        if not (math.isfinite(self.margin) and self.margin >= 0):
            raise InputError.at("margin", self.margin, "a finite number of at least 0")
        require_whole("hysteresis_steps", self.hysteresis_steps, 0)
        if self.byte_budget is not None:
            require_whole("byte_budget", self.byte_budget, 0)


@dataclass(frozen=True, eq=False)
class Decision:
    """What a step does. `plan` is whole: its score is that of the placement that is kept.

    verdicts           one a layer
    saving_seconds     of this step, against keeping the placement; migration is not taken off
    migration_bytes    received by all ranks of one EP group together
    exposed_seconds    planning that the step waited for; 0 where nothing moves
    """

    plan: Plan
    verdicts: tuple[Verdict, ...]
    saving_seconds: float
    moved_experts: int
    migration_bytes: int
    migration_seconds: float
    exposed_seconds: float

    @property
    def moved_L(self) -> NDArray[np.bool_]:
        """Layers whose experts move."""
        return np.array([verdict == "moved" for verdict in self.verdicts])

    @property
    def counts(self) -> dict[Verdict, int]:
        """Layers by verdict."""
        return dict(sorted(Counter(self.verdicts).items()))


def decide(
    window: Window,
    keep: Plan,
    proposed: Plan,
    migration: MigrationCost,
    gate: Gate | None = None,
    steps_since_L: NDArray[np.int64] | None = None,
) -> Decision:
    """Keep the placement, or move the layers that pay.

    keep           planned under the current placement: `plan(..., fixed_placement=True)`
    proposed       planned for the same step with a placement of its own, its ranks named against
                   the current one: `plan(..., current_placement=...)`
    steps_since_L  [L] steps since a layer last moved, 1 for the step before; default: long ago

    Raises InputError where the two are not plans of `window` under the same conditions.
    """
    gate = gate or Gate()
    _require_comparable(window, keep, proposed)
    resting_L = np.zeros(window.layers, np.bool_)
    if steps_since_L is not None:
        if np.shape(steps_since_L) != (window.layers,):
            raise InputError.at("steps_since.shape", np.shape(steps_since_L), f"({window.layers},)")
        resting_L = np.asarray(steps_since_L) <= gate.hysteresis_steps
    moves = Moves.between(keep.placement_LE, proposed.placement_LE, keep.topology.ep)
    moving = [_moving(window, keep, proposed, p, moves, resting_L, migration, gate) for p in (proposed, keep)]
    declined = np.where(moving[0].moved_L, "whole", moving[0].verdict_L)
    options = [_Option(keep, declined, keep.score), *moving]
    best = min(options, key=lambda option: option.price(moves, migration, gate))  # ties: the first
    moved = moves.only(best.moved_L)
    return Decision(
        plan=_mixed(best, proposed, keep),
        verdicts=tuple(best.verdict_L.tolist()),
        saving_seconds=migration.seconds_per_cost_unit
        * (keep.score.slowest_shard - best.score.slowest_shard),
        moved_experts=int(moved.experts_L.sum()),
        migration_bytes=int(migration.bytes_L(moved).sum()),
        migration_seconds=migration.seconds(moved),
        exposed_seconds=migration.exposed_seconds if best.moved_L.any() else 0.0,
    )


@dataclass(frozen=True, eq=False)
class _Option:
    """The layout of `base`, with the layers whose verdict is `moved` placed as proposed."""

    base: Plan
    verdict_L: NDArray[np.str_]
    score: Score

    @property
    def moved_L(self) -> NDArray[np.bool_]:
        return np.asarray(self.verdict_L == "moved")

    def price(self, moves: Moves, migration: MigrationCost, gate: Gate) -> float:
        """Seconds over the horizon."""
        step = migration.seconds_per_cost_unit * self.score.slowest_shard
        once = migration.exposed_seconds if self.moved_L.any() else 0.0
        once += migration.seconds(moves.only(self.moved_L))
        return gate.horizon_steps * step + gate.margin * once


@dataclass(frozen=True, eq=False)
class _Layout:
    """The rows of a plan: what they cost under placements that mix two, layer by layer."""

    attention_MG: NDArray[np.float64]
    current_MGL: NDArray[np.int64]  # routed tokens of the busiest rank, under either placement
    proposed_MGL: NDArray[np.int64]
    expert: float

    @classmethod
    def of(cls, window: Window, layout: Plan, keep: Plan, proposed: Plan) -> _Layout:
        topology = layout.to_topology()
        cost = layout.cost_model.resolve(window, topology, layout.token_cap)
        groups = [[[row[d] for d in dp] for dp in topology.groups] for row in layout.rows]
        attention_MG = [[_attention(cells, window, cost) for cells in row] for row in groups]
        demand_MGLE = np.array(
            [
                [window.demand_SLE[sum(cells, ())].sum(axis=0, dtype=np.int64) for cells in row]
                for row in groups
            ]
        )
        current_MGL, proposed_MGL = (
            _busiest(demand_MGLE, plan.placement_LE, topology.ep) for plan in (keep, proposed)
        )
        return cls(np.array(attention_MG), current_MGL, proposed_MGL, cost.expert)

    def score(self, moved_L: NDArray[np.bool_]) -> Score:
        """The exact score with the layers `moved_L` as proposed and the others as they are."""
        busiest_MG = np.where(moved_L, self.proposed_MGL, self.current_MGL).sum(axis=2)
        return score_rows(self.attention_MG, self.expert * busiest_MG)

    def saving_L(self, moved_L: NDArray[np.bool_]) -> NDArray[np.float64]:
        """By how much the slowest shard would rise if one of the layers `moved_L` stayed."""
        current_GL, proposed_GL = self.current_MGL.sum(axis=0), self.proposed_MGL.sum(axis=0)
        busiest_G = np.where(moved_L, proposed_GL, current_GL).sum(axis=1)
        cost_G = self.attention_MG.sum(axis=0) + self.expert * busiest_G
        without_GL = cost_G[:, None] + self.expert * (current_GL - proposed_GL)
        return np.asarray(without_GL.max(axis=0) - cost_G.max())


def _moving(
    window: Window,
    keep: Plan,
    proposed: Plan,
    base: Plan,
    moves: Moves,
    resting_L: NDArray[np.bool_],
    migration: MigrationCost,
    gate: Gate,
) -> _Option:
    """The layers that pay with the layout of `base`."""
    layout = _Layout.of(window, base, keep, proposed)
    verdict_L = _verdicts(layout, moves, resting_L, migration, gate)
    return _Option(base, verdict_L, layout.score(verdict_L == "moved"))
