"""The gate: which layers move, by hand, and what holds of every decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate_helpers import MOVABLE, by_hand, plan_of
from routepack import InputError
from routepack.gate import Decision, Gate, decide
from routepack.migration import MigrationCost, Moves
from routepack.verify import verify
from strategies import Instance

# One sample, three layers of eight experts. Contiguous, the busier of the two ranks has 42, 48 and
# 38 tokens; as proposed, 32 everywhere. Layers 0 and 2 exchange one pair of experts, layer 1 two:
# savings of 10, 16 and 6 tokens for 2, 4 and 2 experts that move, on the busiest rank 1, 2 and 1.
DEMAND_LE = [
    [18, 8, 8, 8, 8, 6, 4, 4],
    [16, 16, 8, 8, 8, 8, 0, 0],
    [14, 8, 8, 8, 8, 6, 6, 6],
]
PROPOSED_LE = [
    [4, 1, 2, 3, 0, 5, 6, 7],
    [4, 5, 2, 3, 0, 1, 6, 7],
    [4, 1, 2, 3, 0, 5, 6, 7],
]


def migration(expert_seconds: float, **fields: float) -> MigrationCost:
    """Experts of one byte that each take so long; a unit of cost is a second."""
    return MigrationCost(1, 1 / expert_seconds, 1.0, **fields)


def decided(
    cost: MigrationCost, steps_since_L: Sequence[int] | None = None, **gate: Any
) -> Decision:
    """The decision on the window above."""
    window, keep, proposed = by_hand([DEMAND_LE], PROPOSED_LE)
    decision = decide(window, keep, proposed, cost, Gate(**gate), steps_since_L)
    assert verify(window, decision.plan) == []
    return decision


def test_layers_move_that_save_more_than_their_migration() -> None:
    """At 8 s an expert, migration takes 8, 16 and 8 s for 10, 16 and 6 s: only layer 0 pays (a tie
    is no gain). The plan costs 1 + 32 + 48 + 38 instead of 1 + 42 + 48 + 38."""
    decision = decided(migration(8.0))
    assert decision.verdicts == ("moved", "saving", "saving")
    assert decision.plan.score.slowest_shard == 119.0
    assert decision.plan.placement == (tuple(PROPOSED_LE[0]), *[tuple(range(8))] * 2)
    assert decision.saving_seconds == 10.0
    assert (decision.moved_experts, decision.migration_bytes) == (2, 2)
    assert decision.migration_seconds == 8.0


@pytest.mark.parametrize(
    ("expert_seconds", "gate", "verdicts"),
    [
        (7.0, {}, ("moved", "moved", "saving")),
        (5.0, {}, ("moved", "moved", "moved")),
        (10.0, {}, ("saving", "saving", "saving")),
        # two steps double what each layer saves: 20, 32 and 12 s
        (10.0, {"horizon_steps": 2}, ("moved", "moved", "moved")),
        (13.0, {"horizon_steps": 2}, ("moved", "moved", "saving")),
        # half as much again for a move: 7.5, 15 and 7.5 s
        (5.0, {"margin": 1.5}, ("moved", "moved", "saving")),
    ],
)
def test_horizon_and_margin(
    expert_seconds: float, gate: dict[str, Any], verdicts: tuple[str, ...]
) -> None:
    """A longer horizon counts a saving more often, a margin above 1 asks for more of it."""
    assert decided(migration(expert_seconds), **gate).verdicts == verdicts


@pytest.mark.parametrize(
    ("byte_budget", "verdicts"),
    [
        (8, ("moved", "moved", "moved")),
        (7, ("moved", "moved", "budget")),
        (6, ("moved", "moved", "budget")),
        (5, ("moved", "budget", "moved")),  # layer 1 saves more a byte than layer 2, but is too big
        (4, ("moved", "budget", "moved")),
        (3, ("moved", "budget", "budget")),
        (1, ("budget", "budget", "budget")),
        (0, ("budget", "budget", "budget")),
    ],
)
def test_a_byte_budget_takes_the_most_saving_per_byte(
    byte_budget: int, verdicts: tuple[str, ...]
) -> None:
    """Layers need 2, 4 and 2 bytes, and save 5, 4 and 3 s a byte."""
    assert decided(migration(1.0), byte_budget=byte_budget).verdicts == verdicts


def test_what_does_not_pay_is_not_over_the_budget() -> None:
    """At 7 s an expert layer 2 saves too little, whatever fits; of the others layer 0 does."""
    assert decided(migration(7.0), byte_budget=4).verdicts == ("moved", "budget", "saving")


def test_layers_that_moved_recently_rest() -> None:
    """With two steps of hysteresis, a layer moves again three steps after it moved."""
    decision = decided(migration(1.0), [3, 2, 1], hysteresis_steps=2)
    assert decision.verdicts == ("moved", "resting", "resting")
    assert decided(migration(1.0), [3, 2, 1]).verdicts == ("moved", "moved", "moved")


@pytest.mark.parametrize("name", ["fixed_seconds", "exposed_seconds"])
def test_the_step_as_a_whole_pays_what_it_waits_for_once(name: str) -> None:
    """Three layers save 32 s for 4 s of transfer. With another 28 s that is no gain."""
    decision = decided(migration(1.0, **{name: 28.0}))
    assert decision.verdicts == ("whole", "whole", "whole")
    assert decision.plan.score.slowest_shard == 129.0
    assert (decision.migration_seconds, decision.exposed_seconds) == (0.0, 0.0)
    decision = decided(migration(1.0, **{name: 27.5}))
    assert decision.verdicts == ("moved", "moved", "moved")
    assert decision.migration_seconds + decision.exposed_seconds == 31.5


# Two samples, each on a shard of its own; a skewed layer has 48 tokens on the busier rank, and 32
# where experts 1 and 3 have changed places.
FLAT, SKEWED = [16, 16, 16, 16], [32, 16, 16, 0]
SWAPPED = [0, 3, 2, 1]


def test_only_the_slowest_shard_counts() -> None:
    """Layer 2 has all tokens on one expert in shard 0, so that this shard is the slowest by 16 with
    layer 0 skewed or not. The skew of shard 1, at layer 1, is not worth any migration."""
    demand_SLE = [[SKEWED, FLAT, [64, 0, 0, 0]], [FLAT, SKEWED, FLAT]]
    window, keep, proposed = by_hand(demand_SLE, [SWAPPED, SWAPPED, [0, 1, 2, 3]])
    decision = decide(window, keep, proposed, migration(1.0))
    assert decision.verdicts == ("moved", "saving", "same")
    assert decision.plan.score.slowest_shard == 1 + 32 + 32 + 64


@pytest.mark.parametrize(
    ("expert_seconds", "verdicts"), [(7.0, ("moved", "moved")), (8.0, ("whole", "whole"))]
)
def test_layers_that_only_save_together(expert_seconds: float, verdicts: tuple[str, ...]) -> None:
    """Layer 0 slows shard 0, layer 1 shard 1: the slowest is faster by 16 with both moved, by
    nothing with one. At 7 s each that pays; at 8 s it is no gain."""
    window, keep, proposed = by_hand([[SKEWED, FLAT], [FLAT, SKEWED]], [SWAPPED, SWAPPED])
    assert decide(window, keep, proposed, migration(expert_seconds)).verdicts == verdicts


# What holds of every decision


@given(
    MOVABLE,
    st.builds(
        Gate,
        horizon_steps=st.integers(1, 4),
        margin=st.sampled_from([0.0, 1.0, 2.0]),
        hysteresis_steps=st.integers(0, 3),
        byte_budget=st.one_of(st.none(), st.integers(0, 60)),
    ),
    st.sampled_from([1e-6, 0.01, 1.0]),
    st.data(),
)
def test_every_decision_holds(
    instance: Instance, gate: Gate, expert_seconds: float, data: st.DataObject
) -> None:
    """The kept plan verifies, moves are those of the layers that moved, stay within the budget and
    leave resting layers alone; without a move the plan is no worse than `keep`."""
    window = instance.window
    since = st.lists(st.integers(1, 4), min_size=window.layers, max_size=window.layers)
    steps_since_L = np.array(data.draw(since))
    keep, proposed = plan_of(instance, 100, fixed_placement=True), plan_of(instance, 100)
    cost = MigrationCost(3, 3 / expert_seconds, 1.0, fixed_seconds=expert_seconds)
    decision = decide(window, keep, proposed, cost, gate, steps_since_L)
    assert verify(window, decision.plan) == []
    moved_L = np.array([verdict == "moved" for verdict in decision.verdicts])
    expected_LE = np.where(moved_L[:, None], proposed.placement_LE, keep.placement_LE)
    assert np.array_equal(decision.plan.placement_LE, expected_LE)
    moves = Moves.between(keep.placement_LE, decision.plan.placement_LE, instance.topology.ep)
    assert decision.migration_bytes == 3 * moves.experts_L.sum()
    assert decision.migration_seconds == cost.seconds(moves)
    assert gate.byte_budget is None or decision.migration_bytes <= gate.byte_budget
    assert not moved_L[steps_since_L <= gate.hysteresis_steps].any()
    assert decision.plan.score.slowest_shard <= keep.score.slowest_shard


@given(MOVABLE, st.sampled_from([1e-6, 0.001, 0.01, 0.1]), st.sampled_from([0.0, 0.01]))
def test_a_step_is_never_beaten_by_keeping_or_moving_all(
    instance: Instance, expert_seconds: float, once_seconds: float
) -> None:
    """With the default gate, the step and its migration take no longer than the better of the two
    pure options (which are up to rounding among those it compares)."""
    keep, proposed = plan_of(instance, 100, fixed_placement=True), plan_of(instance, 100)
    cost = MigrationCost(1, 1 / expert_seconds, 1.0, once_seconds, once_seconds)
    decision = decide(instance.window, keep, proposed, cost)
    moves = Moves.between(keep.placement_LE, proposed.placement_LE, instance.topology.ep)
    once = cost.exposed_seconds if moves.received_LR.any() else 0.0
    everything = proposed.score.slowest_shard + cost.seconds(moves) + once
    total = (
        decision.plan.score.slowest_shard + decision.migration_seconds + decision.exposed_seconds
    )
    assert total <= min(keep.score.slowest_shard, everything) * (1 + 1e-12)


# What is refused


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"horizon_steps": 0}, "horizon_steps = 0: expected a whole number of at least 1"),
        ({"margin": -0.5}, "margin = -0.5: expected a finite number of at least 0"),
        ({"hysteresis_steps": -1}, "hysteresis_steps = -1: expected a whole number of at least 0"),
        ({"byte_budget": 1.5}, "byte_budget = 1.5: expected a whole number of at least 0"),
    ],
)
def test_gates_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        Gate(**fields)
    assert str(error.value) == message


def test_plans_that_cannot_be_compared() -> None:
    """Both must be plans of this window, under the same conditions."""
    window, keep, proposed = by_hand([DEMAND_LE], PROPOSED_LE)
    other, other_keep, _ = by_hand([DEMAND_LE[::-1]], PROPOSED_LE)
    larger = msgspec.structs.replace(proposed, token_cap=65)
    for plans, steps, message in (
        (
            (window, other_keep, proposed),
            None,
            f"keep.window = {other.sha256[:8]}: expected a plan of window {window.sha256[:8]}",
        ),
        ((window, keep, larger), None, "proposed.token_cap = 65: expected that of keep, 64"),
        ((window, keep, proposed), [1, 2], "steps_since.shape = (2,): expected (3,)"),
    ):
        with pytest.raises(InputError) as error:
            decide(*plans, migration(1.0), steps_since_L=steps)
        assert str(error.value) == message
