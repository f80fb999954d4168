"""The planner as a whole: what every plan holds, what never happens, and how good it is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner_helpers import example, plan_of
from routepack import (
    Budget,
    InfeasibleError,
    Plan,
    Topology,
    Window,
)
from routepack import plan as make
from routepack.files import write_window
from routepack.objective import row_costs
from routepack.placement import balanced_placement, identity
from routepack.plan import METHODS
from routepack.verify import verify
from strategies import SEEDS, Instance, instances, placements

SEARCHES = ("expert-only", "attention-only", "routepack")


def costly(instance: Instance) -> bool:
    """Whether the window has any cost under the model: a bound of 0 leaves no gap to speak of."""
    model = instance.cost_model
    attention = any(stage.linear or stage.quadratic for stage in model.attention)
    return attention or bool(model.expert and instance.window.demand_LE.any())


COSTLY = instances().filter(costly)
ALIKE = instances(alike=True).filter(costly)


# What every plan holds


@settings(max_examples=100)
@given(COSTLY, st.sampled_from(METHODS), st.sampled_from([0, 7, 400]), st.integers(0, 2**63 - 1))
def test_every_plan_of_every_method_holds(
    instance: Instance, method: str, evaluations: int, seed: int
) -> None:
    """Each layer's placement is a bijection, every sample is planned once, each of the M * D cells
    is non-empty, sorted and within the cap, and the oracle finds score and certificate as claimed.
    Only the trainers' own layouts may need rows that there are not samples for."""
    window, dp = instance.window, instance.topology.dp
    try:
        plan = plan_of(instance, method=method, budget=Budget(evaluations=evaluations), seed=seed)
    except InfeasibleError:
        assert method not in SEARCHES
        return
    for slots in plan.placement:
        assert sorted(slots) == list(range(window.experts))
    cells = [cell for row in plan.rows for cell in row]
    assert sorted(i for cell in cells for i in cell) == list(range(window.samples))
    assert len(cells) == len(plan.rows) * dp
    for cell in cells:
        assert cell
        assert list(cell) == sorted(cell)
        assert sum(int(window.lengths_S[i]) for i in cell) <= instance.token_cap
    assert verify(window, plan) == []
    assert verify(window, Plan.from_bytes(plan.to_bytes())) == []
    assert plan.certificate.gap >= -1e-12
    assert plan.search.evaluations <= evaluations
    if method in SEARCHES:
        assert len(plan.rows) <= instance.rows
    else:
        assert (plan.search.evaluations, plan.search.chains) == (0, 0)


@given(COSTLY, st.sampled_from([0, 400]), SEEDS)
def test_routepack_is_never_worse_than_the_trainers_layouts(
    instance: Instance, evaluations: int, seed: int
) -> None:
    """At equal rows the exact score is no worse than that of `reorder` and of `reorder-kk`, even
    with no evaluations at all."""
    budget = Budget(evaluations=evaluations)
    best = plan_of(instance, budget=budget, seed=seed)
    for method in ("reorder", "reorder-kk"):
        try:
            other = plan_of(instance, method=method)
        except InfeasibleError:
            continue
        if len(other.rows) == len(best.rows):
            assert best.score.key <= other.score.key


@given(COSTLY, SEEDS)
def test_search_never_loses_to_its_start(instance: Instance, seed: int) -> None:
    """More evaluations with the same seed start from the same layouts, so no search ends worse than
    with none."""
    start = plan_of(instance, budget=Budget(evaluations=0), seed=seed)
    found = plan_of(instance, budget=Budget(evaluations=800), seed=seed)
    assert found.score.key <= start.score.key


def test_baseline_and_kk_keep_the_identity() -> None:
    """The methods without `reorder` in their name leave every expert where trainers put it, even
    where another placement is current; the others balance it."""
    instance = example()
    reversed_LE = identity(2, 8)[:, ::-1].copy()
    for method in METHODS:
        plan = plan_of(instance, method=method, current_placement=reversed_LE)
        stays = plan.placement_LE.tolist() == identity(2, 8).tolist()
        assert stays == (method in ("baseline", "kk"))


@settings(max_examples=15)
@given(COSTLY, st.sampled_from(SEARCHES), SEEDS)
def test_threads_do_not_change_a_plan(instance: Instance, method: str, seed: int) -> None:
    """With a budget in evaluations the bytes are the same on 1, 2 and 5 threads."""
    plans = {
        plan_of(instance, method=method, seed=seed, threads=threads).to_bytes()
        for threads in (1, 2, 5)
    }
    assert len(plans) == 1


def test_a_fresh_process_makes_the_same_bytes(tmp_path: Path) -> None:
    """Another interpreter, another hash seed and two threads: the same file."""
    instance = example()
    path = tmp_path / "w.safetensors"
    write_window(path, instance.window)
    script = (
        "import sys, routepack\n"
        "from routepack import *\n"
        "from routepack.files import read_window\n"
        "made = routepack.plan(read_window(sys.argv[1]), Topology.of(dp=4, ep=4, edp=2),\n"
        "    budget=Budget(evaluations=20_000), seed=7, threads=2,\n"
        f"    token_cap={instance.token_cap},\n"
        "    cost_model=CostModel((AttentionStage('full', 6.0, 4.0),), 3.0))\n"
        "sys.stdout.buffer.write(made.to_bytes())\n"
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONHASHSEED": "12345"
    }  # fmt: skip
    fresh = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env=environment, capture_output=True, check=True,
    )  # fmt: skip
    plan = plan_of(instance, budget=Budget(evaluations=20_000), seed=7, threads=1)
    assert fresh.stdout == plan.to_bytes()
    assert fresh.stderr == b""


def test_seeds_lead_to_different_searches() -> None:
    """Ten seeds do not all end with the same rows, and each plan records its own."""
    plans = [plan_of(example(), seed=seed) for seed in range(10)]
    assert [plan.search.seed for plan in plans] == list(range(10))
    assert len({plan.rows for plan in plans}) > 1


def test_the_budget_is_spent_and_recorded() -> None:
    """All but a few of the evaluations are used (what does not divide among chains and layers is
    left), never more, by four chains; other methods search nothing."""
    plan = plan_of(example(), budget=Budget(evaluations=50_000))
    assert 49_900 <= plan.search.evaluations <= 50_000
    assert plan.search.chains == 4
    assert plan.stats["accepted"] > 0
    assert plan.stats["evaluated"] <= 50_000


def test_statistics_stay_out_of_the_file() -> None:
    """Seconds by stage are in Plan.stats only, and add up to no more than the whole."""
    plan = plan_of(example())
    stages = ("setup", "rows", "placement", "layout", "finish")
    parts = [plan.stats[f"{stage}_seconds"] for stage in stages]
    assert min(parts) >= 0
    assert sum(parts) <= plan.stats["planning_seconds"]
    assert b"seconds" not in plan.to_bytes()


# Placement


@given(ALIKE, st.data())
def test_the_current_placement_is_kept_where_it_can_be(
    instance: Instance, data: st.DataObject
) -> None:
    """`reorder` has the placement of fewest moves from the current one, and the score does not
    depend on which one that is."""
    window, topology = instance.window, instance.topology
    current_LE = data.draw(placements(window.layers, window.experts))
    try:
        plan = plan_of(instance, method="reorder", current_placement=current_LE)
    except InfeasibleError:
        return
    expected_LE = balanced_placement(window.demand_LE, topology.ep, current_LE)
    assert plan.placement_LE.tolist() == expected_LE.tolist()
    assert plan.score == plan_of(instance, method="reorder").score
    assert verify(window, plan) == []


def test_planning_again_from_a_plan_moves_nothing() -> None:
    """With its own placement as the current one a search makes the same plan to the byte: ranks are
    searched, and slots are chosen last."""
    first = plan_of(example(), seed=3)
    again = plan_of(example(), seed=3, current_placement=first.placement_LE)
    assert again.to_bytes() == first.to_bytes()


# Methods


def test_attention_only_lowers_attention_alone() -> None:
    """Its layout has no more attention than any other method's, in the slowest shard; expert-only
    has no more expert time; and routepack beats both on the whole."""
    instance = example()
    budget = Budget(evaluations=60_000)
    plans = {method: plan_of(instance, method=method, budget=budget) for method in METHODS}
    assert len({len(plan.rows) for plan in plans.values()}) == 1

    def slowest(plan: Plan, part: int) -> float:
        cost = instance.problem.cost
        parts = row_costs(instance.window, instance.topology, cost, plan.placement_LE, plan.rows)
        return float(parts[part].sum(axis=0).max())

    attention = {method: slowest(plan, 0) for method, plan in plans.items()}
    expert = {method: slowest(plan, 1) for method, plan in plans.items()}
    assert min(attention, key=attention.__getitem__) == "attention-only"
    assert min(expert, key=expert.__getitem__) == "expert-only"
    assert min(plans, key=lambda method: plans[method].score.key) == "routepack"


def test_a_part_of_the_cost_is_scored_by_the_whole() -> None:
    """Methods that search a part still report the score of the whole model, not of that part."""
    for method in ("expert-only", "attention-only"):
        plan = plan_of(example(), method=method)
        assert plan.score.attention > 0
        assert plan.score.expert > 0
        assert verify(example().window, plan) == []


@pytest.mark.parametrize("method", METHODS)
def test_windows_without_routes_are_planned(method: str) -> None:
    """All tokens missing: no expert term, but attention to balance."""
    window = Window(np.full(8, 3), np.zeros((8, 2, 4), int), 2, missing_S=np.full(8, 3))
    topology = Topology.of(dp=2, ep=2, edp=1)
    plan = make(window, topology, token_cap=6, method=method, budget=Budget(evaluations=100))
    assert plan.score.expert == 0
    assert verify(window, plan) == []


def test_a_cap_of_numpy_is_as_good_as_any() -> None:
    """numpy's integers are whole numbers too, and the plan can be written."""
    instance = example()
    plans = [plan_of(instance, method="reorder"), make(
        instance.window, instance.topology, token_cap=np.int64(instance.token_cap),
        cost_model=instance.cost_model, method="reorder",
    )]  # fmt: skip
    assert plans[0].to_bytes() == plans[1].to_bytes()


# Stopping


def test_a_search_can_be_stopped() -> None:
    """The callback is asked while the search runs; once it says so the best plan so far comes back,
    whole and valid, with the evaluations that were made."""
    asked = []

    def stop() -> bool:
        asked.append(None)
        return len(asked) >= 5

    instance = example()
    plan = plan_of(instance, budget=Budget(evaluations=1_000_000), stop=stop)
    assert 5 <= len(asked) <= 8
    assert 0 < plan.search.evaluations < 100_000
    assert verify(instance.window, plan) == []


def test_a_search_stopped_at_once_returns_its_start() -> None:
    """Told to stop from the first, it gives the plan of no evaluations."""
    instance = example()
    stopped = plan_of(instance, budget=Budget(evaluations=1_000_000), stop=lambda: True)
    start = plan_of(instance, budget=Budget(evaluations=0))
    assert (stopped.rows, stopped.placement) == (start.rows, start.placement)
    assert stopped.search.evaluations == 0


def test_a_deadline_is_kept() -> None:
    """A budget of 0.3 s is over in less than a second, with time spent on searching. No benchmark:
    the margin is for a busy machine."""
    instance = example(400)
    plan_of(instance)  # kernels are loaded
    began = time.perf_counter()
    plan = plan_of(instance, budget=Budget(seconds=0.3), threads=2)
    assert 0.2 < time.perf_counter() - began < 1.0
    assert plan.search.evaluations > 1000
    assert verify(instance.window, plan) == []
