"""Is a new placement worth its migration? The net-benefit gate, layer by layer (design 6.3).

Each step compares options by the exact score of what would really run:

    keep         the current placement, with the layout that was packed under it
    move         the layers of the proposed placement that pay, with the proposed plan's layout
    move, keep   the layers that pay with the layout of `keep`

Packing costs no migration, so `keep` is always there, and wins ties. The price of an option is

    horizon_steps * seconds_per_cost_unit * slowest shard + margin * (migration + exposed planning)

whose second term is 0 where nothing moves. The layers that pay are found from all that may move, by
dropping the weakest until each saves more over the horizon than `margin` times its own seconds,
and all fit the byte budget. With one EDP shard savings add up, so that without a budget no other
choice of layers has a lower price. Packing a third time, under the mixture that is kept, gained at
most 0.15 % on windows cut from the example and is left out.

What is promised: with the default gate (horizon 1, margin 1, no hysteresis, no budget) a step with
its migration takes at most as long as the better of keeping everything and of moving everything,
from the placement that the step begins with. That saving is this window's own, not a forecast; a
longer horizon bets that the skew lasts, and counts the saving for each of its steps. Over many
steps no rule that cannot see the next window is better than both never and always migrating on
every sequence; `routepack replay` shows all three on recorded ones.

Shapes: L MoE layers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from routepack.errors import InputError
from routepack.migration import MigrationCost, require_whole
from routepack.mixture import Mixture
from routepack.plan import Plan, WindowKey
from routepack.window import Window

Verdict = Literal["moved", "same", "resting", "saving", "budget", "whole"]
"""Of a layer: it moves; nothing was proposed; it moved too recently; it saves too little; it is
over the byte budget; it would pay, but the step as a whole is better off without any move."""


@dataclass(frozen=True)
class Gate:
    """When to migrate.

    horizon_steps     steps that a placement is expected to serve; 1 counts this step's saving only
    margin            a move must save more than this times what it costs; above 1 against noise
    hysteresis_steps  a layer that moved in one of the last so many steps stays where it is
    byte_budget       what all ranks of an EP group together may receive in one step

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
    """What a step does.

    plan             whole: its score is that of the placement that is kept
    verdicts         one a layer
    saving_seconds   of this step, against keeping the placement; migration is not taken off
    migration_bytes  received by all ranks of one EP group together
    exposed_seconds  planning that the step waited for; 0 where nothing moves
    """

    plan: Plan
    verdicts: tuple[Verdict, ...]
    saving_seconds: float
    moved_experts: int
    migration_bytes: int
    migration_seconds: float
    exposed_seconds: float

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
    steps_since_L: ArrayLike | None = None,
) -> Decision:
    """Keep the placement of a step, or move the layers that pay.

    keep           planned under the current placement: `plan(..., fixed_placement=True)`
    proposed       planned for the same step with a placement of its own, ranks named to move few
                   experts: `plan(..., current_placement=...)`
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

    with_proposed, with_keep = (
        Mixture.of(window, base, keep.placement_LE, proposed.placement_LE)
        for base in (proposed, keep)
    )
    verdicts = _verdicts(with_proposed, resting_L, migration, gate)
    declined: list[Verdict] = ["whole" if v == "moved" else v for v in verdicts]
    options = [
        _decision(with_keep, declined, keep, migration),
        _decision(with_proposed, verdicts, keep, migration),
        _decision(with_keep, _verdicts(with_keep, resting_L, migration, gate), keep, migration),
    ]
    return min(options, key=lambda option: _price(option, migration, gate))  # of equals the first


def _decision(
    mixture: Mixture, verdicts: Sequence[Verdict], keep: Plan, migration: MigrationCost
) -> Decision:
    """The mixture with the layers moved that the verdicts say."""
    moved_L = np.array([verdict == "moved" for verdict in verdicts])
    moves = mixture.moves.only(moved_L)
    plan = mixture.plan(moved_L)
    saving = keep.score.slowest_shard - plan.score.slowest_shard
    return Decision(
        plan=plan,
        verdicts=tuple(verdicts),
        saving_seconds=migration.seconds_per_cost_unit * saving,
        moved_experts=int(moves.experts_L.sum()),
        migration_bytes=int(migration.bytes_L(moves).sum()),
        migration_seconds=migration.seconds(moves),
        exposed_seconds=migration.exposed_seconds if moved_L.any() else 0.0,
    )


def _price(option: Decision, migration: MigrationCost, gate: Gate) -> float:
    """Seconds over the horizon."""
    step_seconds = migration.seconds_per_cost_unit * option.plan.score.slowest_shard
    once_seconds = option.migration_seconds + option.exposed_seconds
    return gate.horizon_steps * step_seconds + gate.margin * once_seconds


def _verdicts(
    mixture: Mixture, resting_L: NDArray[np.bool_], migration: MigrationCost, gate: Gate
) -> list[Verdict]:
    """Which layers pay, each against its own part of the migration."""
    bytes_L = migration.bytes_L(mixture.moves)
    cost_L = gate.margin * migration.seconds_L(mixture.moves)
    budget = bytes_L.sum() if gate.byte_budget is None else gate.byte_budget
    worth = gate.horizon_steps * migration.seconds_per_cost_unit

    verdicts: list[Verdict] = ["same" if moved == 0 else "moved" for moved in bytes_L]
    for layer in np.flatnonzero(resting_L & (bytes_L > 0)).tolist():
        verdicts[layer] = "resting"
    moved_L = (bytes_L > 0) & ~resting_L
    left_out: list[int] = []
    while moved_L.any():
        saving_L = worth * mixture.saving_L(moved_L)
        moving = np.flatnonzero(moved_L)
        weakest = moving[np.argmin(saving_L[moving] - cost_L[moving])]
        if saving_L[weakest] <= cost_L[weakest]:
            verdicts[weakest] = "saving"
        elif bytes_L[moving].sum() > budget:
            weakest = moving[np.argmin(saving_L[moving] / bytes_L[moving])]
            verdicts[weakest] = "budget"
            left_out.append(int(weakest))
        else:
            break
        moved_L[weakest] = False
    for layer in reversed(left_out):  # the most saving per byte first
        moved_L[layer] = bytes_L[moved_L].sum() + bytes_L[layer] <= budget
        if moved_L[layer] and worth * mixture.saving_L(moved_L)[layer] <= cost_L[layer]:
            moved_L[layer] = False
        if moved_L[layer]:
            verdicts[layer] = "moved"
    return verdicts


def _require_comparable(window: Window, keep: Plan, proposed: Plan) -> None:
    key = WindowKey.of(window)
    for name, plan in (("keep", keep), ("proposed", proposed)):
        if plan.window != key:
            found, expected = plan.window.sha256[:8], f"a plan of window {key.sha256[:8]}"
            raise InputError.at(f"{name}.window", found, expected)
    for name in ("topology", "token_cap", "cost_model"):
        found, expected = getattr(proposed, name), getattr(keep, name)
        if found != expected:
            raise InputError.at(f"proposed.{name}", found, f"that of keep, {expected}")
