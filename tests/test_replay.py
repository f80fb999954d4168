"""Placement over time, on a sequence of windows written by hand.

Two layers of four experts on two EP ranks, top-1; four samples of eight tokens on two DP ranks of
one shard, so that a step is one row of 32 tokens. Attention costs 16 in any layout; a layer costs
the tokens of its busier rank, 16 at best. Three partitions of the experts into pairs exist, and one
exchange of experts, which takes 5 s, leads from any to any other. A cost of 1 is a second.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate_helpers import COSTLY, plan_of
from routepack import (
    AttentionStage,
    Budget,
    CostModel,
    InfeasibleError,
    InputError,
    Topology,
    Window,
)
from routepack import plan as make
from routepack.gate import Gate
from routepack.migration import MigrationCost
from routepack.placement import identity
from routepack.plan import METHODS
from routepack.replay import Spent, Step, Totals, replay
from routepack.verify import verify
from strategies import Instance

# Tokens of each expert in every sample. FLAT is balanced under any partition. Under 03|12 alone,
# HOT_1 and MILD_1 are balanced too: elsewhere the busier rank has 24 and 20 of the 32 tokens. For
# HOT_2 and MILD_2 that partition is 02|13. LPT places FLAT as 02|13. The start is 01|23.
FLAT = (2, 2, 2, 2)
HOT_1, HOT_2 = (4, 2, 2, 0), (4, 2, 0, 2)
MILD_1, MILD_2 = (3, 2, 2, 1), (3, 2, 1, 2)

WINDOWS = [
    Window(np.full(4, 8), np.array([layers] * 4), 1)
    for layers in (
        (FLAT, FLAT),
        (MILD_1, FLAT),
        (HOT_1, MILD_1),
        (HOT_1, MILD_1),
        (HOT_1, HOT_2),
        (MILD_2, HOT_2),
        (HOT_1, HOT_2),
        (FLAT, FLAT),
    )
]
MIGRATION = MigrationCost(bytes_per_expert=10, bytes_per_second=2.0, seconds_per_cost_unit=1.0)


def replayed(gate: Gate | None = None, **options: Any) -> list[Step]:
    """The replay of the windows above, or of others."""
    fixed: dict[str, Any] = dict(
        token_cap=16,
        migration=MIGRATION,
        gate=gate,
        cost_model=CostModel((AttentionStage("full", 16.0, 0.0),), expert=16.0),
        budget=Budget(evaluations=100),
        threads=1,
    )
    windows = options.pop("windows", WINDOWS)
    return list(replay(windows, Topology.of(dp=2, ep=2, edp=1), **(fixed | options)))


def test_the_gate_declines_what_costs_more_than_it_saves_and_takes_the_rest() -> None:
    """Mild skew costs 4 a step, hot skew 8, a migration 5: the gate moves layer 0 at step 2 and
    layer 1 at step 4, and nothing else. That beats never migrating, which pays for every skew, and
    always migrating, which also moves for the mild and the flat windows."""
    steps = replayed()
    assert [step.decision.verdicts for step in steps] == [
        ("saving", "saving"),
        ("saving", "saving"),
        ("moved", "saving"),
        ("same", "saving"),
        ("same", "moved"),
        ("saving", "same"),
        ("same", "same"),
        ("saving", "same"),
    ]
    assert [step.gate.seconds for step in steps] == [48, 52, 57, 52, 53, 52, 48, 48]
    assert [step.always.seconds for step in steps] == [58, 53, 53, 48, 53, 53, 53, 53]
    assert [step.never.seconds for step in steps] == [48, 52, 60, 60, 64, 60, 64, 48]
    totals = Totals.of(steps)
    assert totals.gate == Spent(400, 10, 0, 40, 4, 2)
    assert totals.always == Spent(384, 40, 0, 160, 16, 7)
    assert totals.never == Spent(456)
    assert totals.gate.seconds <= min(totals.always.seconds, totals.never.seconds)
    assert totals.verdicts == {"moved": 2, "same": 6, "saving": 8}


def test_every_decision_compares_what_each_step_saves_with_what_it_costs() -> None:
    """Where layers moved, they saved more than the migration took; where none did, moving to the
    proposed placement would not have."""
    for step in replayed():
        if step.gate.migrations:
            assert step.decision.saving_seconds > step.gate.migration_seconds
        else:
            changed = sum(verdict != "same" for verdict in step.decision.verdicts)
            assert step.keep_cost - step.proposed_cost <= 5 * changed
        assert step.baseline_cost == step.kk_cost == step.keep_cost  # one row: nothing to pack


def test_every_kept_plan_verifies_and_starts_where_the_last_one_ended() -> None:
    """The plan of a step is whole, and its placement is what the next step's moves are from."""
    placement_LE = identity(2, 4)
    for window, step in zip(WINDOWS, replayed(), strict=True):
        assert verify(window, step.decision.plan) == []
        moved_L = (step.decision.plan.placement_LE != placement_LE).any(axis=1)
        assert [verdict == "moved" for verdict in step.decision.verdicts] == moved_L.tolist()
        placement_LE = step.decision.plan.placement_LE


def test_a_longer_horizon_moves_for_a_mild_skew() -> None:
    """Over two steps mild skew costs 8, more than a migration: layers move five times. The skew
    lasts long enough for that to pay here: 409 s."""
    totals = Totals.of(replayed(Gate(horizon_steps=2)))
    assert totals.verdicts == {"moved": 5, "same": 7, "saving": 4}
    assert totals.gate.seconds == 409


@pytest.mark.parametrize("hysteresis_steps", [1, 2, 3])
def test_a_layer_that_moved_stays_as_long_as_the_hysteresis_says(hysteresis_steps: int) -> None:
    """Between two moves of a layer lie at least as many steps without; a step of it less, and the
    layers here would move sooner."""
    moved_TL = np.array(
        [
            [verdict == "moved" for verdict in step.decision.verdicts]
            for step in replayed(Gate(horizon_steps=2, hysteresis_steps=hysteresis_steps))
        ]
    )
    resting = 0
    for layer in range(2):
        at = np.flatnonzero(moved_TL[:, layer])
        assert (np.diff(at) > hysteresis_steps).all()
        resting += len(at)
    assert resting < 5


def test_a_byte_budget_spreads_moves_over_steps() -> None:
    """20 bytes are one exchange: two hot layers then move one after the other."""
    twice = [WINDOWS[4]] * 2
    moved = []
    for byte_budget in (None, 20):
        steps = replayed(Gate(byte_budget=byte_budget), windows=twice)
        moved.append([step.decision.counts.get("moved", 0) for step in steps])
    assert moved == [[2, 0], [1, 1]]


def test_planning_is_waited_for_by_steps_that_migrate() -> None:
    """With 3 s of planning to wait for, one hot layer saves 8 for 5 + 3, which is no gain: the gate
    waits for step 4, where two save 16 for 10 + 3. Always migrating waits seven times."""
    exposed = MigrationCost(10, 2.0, 1.0, exposed_seconds=3.0)
    totals = Totals.of(replayed(migration=exposed))
    assert totals.gate == Spent(416, 10, 3, 40, 4, 1)
    assert totals.always == Spent(384, 40, 21, 160, 16, 7)
    assert totals.never == Spent(456)
    assert totals.verdicts["whole"] == 2


def test_the_first_placement_may_be_given() -> None:
    """From 03|12 in both layers, hot and mild skew of the first kind need no move."""
    start_LE = np.array([[0, 2, 3, 1]] * 2)
    steps = replayed(windows=WINDOWS[1:4], current_placement=start_LE)
    assert [step.gate.seconds for step in steps] == [48, 48, 48]
    assert [step.never.seconds for step in steps] == [48, 48, 48]


def test_equal_budgets_in_evaluations_give_equal_steps() -> None:
    """Whatever the threads; times that were measured are no part of a step's JSON."""
    once, again, threaded = replayed(), replayed(), replayed(threads=2)
    text = [json.dumps(step.to_dict()) for step in once]
    assert "planning" not in "".join(text)
    assert text == [json.dumps(step.to_dict()) for step in again]
    assert text == [json.dumps(step.to_dict()) for step in threaded]
    assert all(step.planning_seconds > 0 for step in once)


def test_windows_that_do_not_fit_are_named() -> None:
    """Another model, or samples that are too long: the error says which window it is."""
    other = Window(np.full(4, 8), np.array([[FLAT]] * 4), 1)
    for window, message in (
        (other, "(layers, experts) = (1, 4): expected (2, 4), as in the first window"),
        (
            Window(np.full(4, 32), 4 * np.array([[FLAT] * 2] * 4), 1),
            "lengths[0] = 32: expected at most the token cap 16",
        ),
    ):
        steps = replay(
            [WINDOWS[0], window], Topology.of(dp=2, ep=2, edp=1), token_cap=16,
            migration=MIGRATION, budget=Budget(evaluations=0), threads=1,
        )  # fmt: skip
        assert next(steps).index == 0
        with pytest.raises(InputError) as error:
            next(steps)
        assert str(error.value) == f"windows[1]: {message}"


def test_a_first_placement_that_is_none() -> None:
    with pytest.raises(InputError) as error:
        replayed(current_placement=[[0, 1, 2, 3]])
    assert str(error.value) == "windows[0]: current_placement.shape = (1, 4): expected (2, 4)"


def test_a_layout_that_the_trainer_does_not_find() -> None:
    """Five cells of 10 hold 10, 10, 10, 4 + 3 + 3 and 4 + 3 + 3. First-fit decreasing joins 4 + 4
    and needs a sixth, hence a second row and ten samples, of which there are nine."""
    lengths_S = np.array([10, 10, 10, 4, 4, 3, 3, 3, 3])
    window = Window(lengths_S, np.stack([lengths_S, 0 * lengths_S], axis=1)[:, None], 1)
    (step,) = replay(
        [window], Topology.of(dp=5, ep=1, edp=1), token_cap=10, migration=MIGRATION,
        budget=Budget(evaluations=0), threads=1,
    )  # fmt: skip
    assert step.baseline_cost is None
    assert step.kk_cost == step.keep_cost


# Packing under a placement that stays


@given(COSTLY, st.sampled_from(METHODS))
def test_a_fixed_placement_stays_whatever_the_method(instance: Instance, method: str) -> None:
    """Every expert keeps its slot, and the plan holds. Only the trainers' own layouts may need
    rows that there are not samples for."""
    try:
        plan = plan_of(instance, 100, method=method, fixed_placement=True)
    except InfeasibleError:
        assert method in ("baseline", "reorder", "kk", "reorder-kk")
        return
    assert np.array_equal(plan.placement_LE, instance.placement_LE)
    assert verify(instance.window, plan) == []


def test_a_fixed_placement_is_contiguous_unless_given() -> None:
    """Nothing moves that nobody placed."""
    plan = make(
        WINDOWS[2], Topology.of(dp=2, ep=2, edp=1), token_cap=16, fixed_placement=True,
        budget=Budget(evaluations=100), threads=1,
    )  # fmt: skip
    assert np.array_equal(plan.placement_LE, identity(2, 4))
