"""Observing and packing for any trainer; what is logged, by hand."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import routepack
from routepack import InputError
from routepack.integrations.generic import BatchSampler, Packer, by_rank, by_row, micro_batches
from routepack.integrations.layout import broken_invariants
from routepack.integrations.observe import measure
from routepack.objective import row_costs
from strategies import Instance, instances, random_window

# Two shards of one DP rank, two EP ranks of one expert each, one token a unit of attention: lengths
# 4, 2, 2 and 4; samples 0 and 1 use expert 0, the others expert 1.
TOPOLOGY = routepack.Topology.of(dp=2, ep=2, edp=2)
COST = routepack.CostModel((routepack.AttentionStage("a", 4.0, 0.0),), 4.0)
LENGTHS = np.array([4, 2, 2, 4])
WINDOW = routepack.Window(
    LENGTHS, np.array([[[4, 0]], [[2, 0]], [[0, 2]], [[0, 4]]]), 1, group_S=np.array([0, 0, 1, 1])
)
OWN = [[[0], [3]], [[1], [2]]]  # rows


def packer(mode: str = "pack", **changes: Any) -> Packer:
    """Of the window above; the cap of 4 makes each token cost a unit."""
    fields: dict[str, Any] = dict(
        mode=mode, cost_model=COST, budget=routepack.Budget(evaluations=500), threads=1
    )
    return Packer(TOPOLOGY, changes.pop("token_cap", 8), **{**fields, **changes})


def test_a_load_by_hand() -> None:
    """Both shards of a row have one cell: attention 2 + 2 + 1 + 1 is as level as it can be. Each
    cell's tokens are on one of two EP ranks, where half would do. A shard is 3 + 3 long."""
    load = measure(WINDOW, TOPOLOGY, COST, 8, OWN)
    assert (load.rows, load.slowest_shard) == (2, 6.0)
    assert (load.attention, load.attention_level) == (6.0, 6.0)
    assert (load.expert, load.expert_level) == (6.0, 3.0)
    assert load.worst_row == 2.0
    assert load.metrics("own") == {
        "routepack/own/rows": 2,
        "routepack/own/slowest_shard": 6.0,
        "routepack/own/attention_imbalance": 1.0,
        "routepack/own/expert_imbalance": 2.0,
        "routepack/own/worst_row_expert_imbalance": 2.0,
    }
    level = measure(WINDOW, TOPOLOGY, COST, 8, [[[0, 3], [1, 2]]])
    assert (level.slowest_shard, level.expert, level.expert_level) == (6.0, 3.0, 3.0)
    both = load + level
    assert (both.rows, both.slowest_shard, both.expert, both.worst_row) == (3, 12.0, 9.0, 2.0)
    assert level.over(load) == 1.0


def test_a_load_without_costs() -> None:
    """Where no expert costs anything, experts are level."""
    model = routepack.CostModel((routepack.AttentionStage("a", 4.0, 0.0),), 0.0)
    load = measure(WINDOW, TOPOLOGY, model, 8, OWN)
    assert load.metrics("own")["routepack/own/expert_imbalance"] == 1.0
    assert load.worst_row == 1.0


@given(instances())
def test_loads_are_the_oracles(instance: Instance) -> None:
    """Paced work is the exact score's, and level work is never above it."""
    window, topology = instance.window, instance.topology
    cost = instance.cost_model.resolve(window, topology, instance.token_cap)
    rows = instance.problem.to_rows(instance.cell_S)
    attention_MG, expert_MG, load_MGLR = row_costs(
        window, topology, cost, instance.placement_LE, rows
    )
    load = measure(
        window, topology, instance.cost_model, instance.token_cap, rows, instance.placement_LE
    )
    assert load.attention == pytest.approx(attention_MG.sum(), rel=1e-12)
    assert load.expert == pytest.approx(expert_MG.sum(), rel=1e-12)
    assert load.slowest_shard == (attention_MG + expert_MG).sum(axis=0).max() or (
        load.slowest_shard == pytest.approx((attention_MG + expert_MG).sum(axis=0).max(), rel=1e-12)
    )
    together_G = (1 / cost.slow_GR).sum(axis=1)  # tokens that ranks take in the time of one
    level = cost.expert * (load_MGLR.sum(axis=(2, 3)) / together_G).sum()
    assert load.expert_level == pytest.approx(level, rel=1e-12)
    assert load.attention_level <= load.attention * (1 + 1e-12)


def test_off_looks_at_nothing() -> None:
    """The identical object, and neither the window nor the layout is touched."""

    def window() -> routepack.Window:
        raise AssertionError("looked at")

    own = [object()]
    logged: list[Any] = []
    assert packer("off").step(window, own, logged.append) is own  # type: ignore[arg-type]
    assert logged == []


def test_packing_finds_the_level_layout() -> None:
    """Pairing 0 with 3 and 1 with 2 halves the expert term: 2 + 1 + 1 + 0.5 a shard at most."""
    logged: list[dict[str, float]] = []
    [rows] = packer().step(WINDOW, [[[[0, 1], [2, 3]]]], logged.append)
    assert sorted(map(sorted, rows[0])) == [[0, 2], [1, 3]] or sorted(map(sorted, rows[0])) == [
        [0, 3],
        [1, 2],
    ]
    [metrics] = logged
    assert metrics["routepack/own/slowest_shard"] == 6.0
    assert metrics["routepack/plan/slowest_shard"] == 5.0
    assert metrics["routepack/predicted_ratio"] == 5 / 6
    del metrics["routepack/counting_seconds"], metrics["routepack/planning_seconds"]
    assert metrics.pop("routepack/blocked_seconds") > 0
    assert metrics == {
        "routepack/steps": 1,
        "routepack/samples": 4,
        "routepack/tokens": 12,
        "routepack/missing_rows": 0,
        "routepack/packed_steps": 1,
        "routepack/predicted_ratio": 5 / 6,
        "routepack/own/rows": 1,
        "routepack/own/slowest_shard": 6.0,
        "routepack/own/attention_imbalance": 1.0,
        "routepack/own/expert_imbalance": 2.0,
        "routepack/own/worst_row_expert_imbalance": 2.0,
        "routepack/plan/rows": 1,
        "routepack/plan/slowest_shard": 5.0,
        "routepack/plan/attention_imbalance": 1.0,
        "routepack/plan/expert_imbalance": 4 / 3,
        "routepack/plan/worst_row_expert_imbalance": 4 / 3,
        "routepack/total/planned": 1,
        "routepack/total/declined": 0,
        "routepack/total/errors": 0,
        "routepack/total/late": 0,
        "routepack/total/disagreed": 0,
        "routepack/total/unreachable": 0,
        "routepack/total/unobserved": 0,
    }


def test_observing_leaves_everything_alone() -> None:
    """The identical object comes back; the numbers follow with flush, on this thread."""
    own = [[[[0, 1], [2, 3]]]]
    logged: list[dict[str, float]] = []
    watching = packer("observe")
    assert watching.step(WINDOW, own, logged.append) is own
    watching.flush()
    [metrics] = logged
    assert metrics["routepack/predicted_ratio"] == 5 / 6
    # each expert on a rank of its own is where they are: placement brings nothing more
    assert metrics["routepack/predicted_ratio_with_placement"] == 5 / 6
    assert metrics["routepack/total/planned"] == 1
    watching.flush()
    assert len(logged) == 1


def test_a_step_is_not_observed_while_another_is() -> None:
    """Steps never wait: what comes meanwhile is counted as unobserved."""
    import threading

    release = threading.Event()

    def slow() -> routepack.Window:
        release.wait(10)
        return WINDOW

    logged: list[dict[str, float]] = []
    watching = packer("observe", with_placement=False)
    own = [OWN]
    watching.step(slow, own, logged.append)
    assert watching.step(WINDOW, own, logged.append) is own
    assert watching.step(WINDOW, own, logged.append) is own
    assert logged == []
    release.set()
    watching.flush()
    assert [metrics["routepack/total/unobserved"] for metrics in logged] == [2]
    assert "routepack/predicted_ratio_with_placement" not in logged[0]


def test_observing_survives_failures(caplog: pytest.LogCaptureFixture) -> None:
    """A window that cannot be made is a warning and a count; the next one is observed."""

    def none() -> routepack.Window:
        raise InputError("routes[0] = None: expected routes")

    def bug() -> routepack.Window:
        raise ValueError("a bug")

    logged: list[dict[str, float]] = []
    watching = packer("observe")
    with caplog.at_level(logging.WARNING, "routepack"):
        for window in (none, bug, WINDOW):
            watching.step(window, [OWN], logged.append)
            watching.flush()
    assert [record.getMessage() for record in caplog.records] == [
        "a step was not observed: routes[0] = None: expected routes",
        "a step was not observed: a bug",
    ]
    totals = [
        [metrics[f"routepack/total/{name}"] for name in ("planned", "declined", "errors")]
        for metrics in logged
    ]
    assert totals == [[0, 1, 0], [0, 1, 1], [1, 1, 1]]


def test_optimizer_steps_keep_their_samples() -> None:
    """Two optimizer steps of one batch: samples move between ranks and rows, not between steps. The
    step whose layout is as good as can be keeps the trainer's."""
    rng = np.random.default_rng(3)
    window = random_window(rng, rng.integers(2, 20, 24), 2, 8, 2, skew=2.0)
    topology = routepack.Topology.of(dp=2, ep=2)
    packing = Packer(topology, 40, budget=routepack.Budget(evaluations=4000), threads=1)
    first, second = list(range(0, 24, 2)), list(range(1, 24, 2))
    own = [
        [[members[m : m + 2], members[m + 2 : m + 4]] for m in range(0, 12, 4)]
        for members in (first, second)
    ]
    logged: list[dict[str, float]] = []
    packed = packing.step(window, own, logged.append)
    assert packed is not own
    for rows, members in zip(packed, (first, second), strict=True):
        assert broken_invariants(
            rows, window.lengths_S, members, data_parallel=2, token_cap=40
        ) == []  # fmt: skip
    assert logged[0]["routepack/steps"] == 2
    assert logged[0]["routepack/predicted_ratio"] < 1


def test_a_part_of_a_window_is_what_was_asked_for() -> None:
    """Samples that no optimizer step has are left out of all numbers."""
    logged: list[dict[str, float]] = []
    [rows] = packer().step(WINDOW, [[[[0], [2]]]], logged.append)
    assert sorted(i for row in rows for cell in row for i in cell) == [0, 2]
    assert logged[0]["routepack/tokens"] == 6


@pytest.mark.parametrize(
    ("own", "reason"),
    [
        ([[[[0], [0]]]], "layout = 0: expected a sample in 0..3, at most once"),
        ([[[[0], [4]]]], "layout = 4: expected a sample in 0..3, at most once"),
        ([[[[0], [-1]]]], "layout = -1: expected a sample in 0..3, at most once"),
        ([[[[0]]]], "samples = 1: expected at least the 2 DP ranks"),
    ],
)
def test_layouts_that_are_none(own: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """They are the trainer's to run; routepack says what it does not understand of them."""
    with caplog.at_level(logging.WARNING, "routepack"):
        assert packer().step(WINDOW, own) is own
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [f"this step keeps the trainer's own layout: {reason}"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "on"}, "mode = 'on': expected one of off, observe, pack"),
        (
            {"budget": routepack.Budget(seconds=2), "all_agree": bool},
            "budget.seconds = 2: expected a budget in evaluations, as ranks that plan for seconds "
            "never agree",
        ),
        (
            {"budget": None, "all_agree": bool},
            "budget.seconds = 1.0: expected a budget in evaluations, as ranks that plan for "
            "seconds never agree",
        ),
    ],
)
def test_what_a_packer_refuses(fields: dict[str, Any], message: str) -> None:
    """At once, not in the first step."""
    with pytest.raises(InputError) as refused:
        Packer(TOPOLOGY, 8, **fields)
    assert str(refused.value) == message


def test_ranks_with_the_same_window_have_the_same_key() -> None:
    """Two packers, any number of threads: one key for one window and layout, others for others."""

    def key(window: routepack.Window, own: Any, threads: int) -> str | None:
        keys: list[str | None] = []

        def all_agree(key: str | None) -> bool:
            keys.append(key)
            return True

        packer(all_agree=all_agree, threads=threads).step(window, [own])
        assert len(keys) == 1
        return keys[0]

    same = key(WINDOW, OWN, 1)
    assert same is not None
    assert key(WINDOW, OWN, 2) == same
    other = dataclasses.replace(WINDOW, group_S=None)
    assert key(other, OWN, 1) not in (same, None)
    assert key(WINDOW, [[[0], [1]], [[2], [3]]], 1) in (same, key(WINDOW, OWN, 1))


# Layouts


@given(st.integers(1, 4), st.integers(1, 4), st.randoms(use_true_random=False))
@settings(max_examples=20)
def test_rows_and_ranks(ranks: int, rows: int, random: Any) -> None:
    """The two ways to write a layout hold the same."""
    layout = [[[random.randrange(9) for _ in range(2)] for _ in range(rows)] for _ in range(ranks)]
    assert by_rank(by_row(layout)) == layout
    assert [len(row) for row in by_row(layout)] == [ranks] * rows


def test_ranks_with_other_counts_are_refused() -> None:
    """Ranks that run another number of micro-batches cannot be written by row."""
    with pytest.raises(InputError) as refused:
        by_row([[[0], [1]], [[2]]])
    assert str(refused.value) == "layout[1] = 1: expected 2 micro-batches, as on rank 0"
    with pytest.raises(InputError) as refused:
        by_row([])
    assert str(refused.value) == (
        "layout: expected at least one rank with at least one micro-batch"
    )


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ([[[0, 3], [1, 2]]], []),
        ([], ["rows = 0: expected a positive multiple of 1", "rows = no sample 0, 4 absent: "
              "expected each once"]),
        ([[[0, 1, 2, 3]]], ["rows[0] = 1 micro-batches: expected 2", "rows[0, 0] = 12 tokens: "
                            "expected at most 8"]),
        ([[[0, 3], []], [[1], [2]]], ["rows[0, 1] = []: expected at least one sample"]),
        ([[[0, 3], [1, 1]]], ["rows[0, 1] = 1: expected a sample of the step, once",
                              "rows = no sample 2, 1 absent: expected each once"]),
        ([[[0, 3], [1, 2, 9]]], ["rows[0, 1] = 9: expected a sample of the step, once"]),
    ],
)  # fmt: skip
def test_broken_layouts(rows: Any, lines: list[str]) -> None:
    """One line for each broken invariant."""
    found = broken_invariants(rows, LENGTHS, range(4), data_parallel=2, token_cap=8)
    assert found == lines


def test_rows_of_a_virtual_pipeline() -> None:
    """Three rows are no multiple of two."""
    rows = [[[0], [1]], [[2], [3]]]
    check: dict[str, Any] = dict(data_parallel=2, token_cap=8)
    assert broken_invariants(rows, LENGTHS, range(4), rows_multiple_of=2, **check) == []
    assert broken_invariants(rows, LENGTHS, range(4), rows_multiple_of=3, **check) == [
        "rows = 2: expected a positive multiple of 3"
    ]


# Plans for code of one's own

PLAN = routepack.plan(
    WINDOW, TOPOLOGY, token_cap=8, cost_model=COST, budget=routepack.Budget(evaluations=500)
)


def test_micro_batches_are_named() -> None:
    """By rank, in the order of rows, with the names of the samples."""
    named = micro_batches(PLAN, ["a", "b", "c", "d"])
    assert [[len(batch) for batch in batches] for batches in named] == [[2], [2]]
    assert sorted(name for batches in named for batch in batches for name in batch) == list("abcd")
    assert named == [[["abcd"[i] for i in row[d]] for row in PLAN.rows] for d in range(TOPOLOGY.dp)]
    with pytest.raises(InputError) as refused:
        micro_batches(PLAN, ["a"])
    assert str(refused.value) == "ids = 1: expected one for each of 4 samples"


def test_a_batch_sampler_yields_a_ranks_micro_batches() -> None:
    """Again at each iteration, as lists of its own; another rank has the rest."""
    samplers = [BatchSampler(PLAN, rank) for rank in range(2)]
    batches = [list(sampler) for sampler in samplers]
    assert [list(sampler) for sampler in samplers] == batches
    assert list(map(len, samplers)) == list(map(len, batches))
    batches[0][0].clear()
    assert next(iter(samplers[0])) != []
    positions = sorted(i for sampler in samplers for batch in sampler for i in batch)
    assert positions == [0, 1, 2, 3]
    with pytest.raises(InputError) as refused:
        BatchSampler(PLAN, 2)
    assert str(refused.value) == "rank = 2: expected a DP rank in 0..1"


def test_a_batch_sampler_in_a_data_loader() -> None:
    """torch takes it as it is."""
    data = pytest.importorskip("torch.utils.data", reason="needs torch")
    loader = data.DataLoader([10, 11, 12, 13], batch_sampler=BatchSampler(PLAN, 0))
    assert [batch.tolist() for batch in loader] == [[10 + i for i in row[0]] for row in PLAN.rows]
    assert len(loader) == len(PLAN.rows)
