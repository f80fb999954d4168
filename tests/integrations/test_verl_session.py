"""The driver's side without verl: what a step leaves behind, and what verl's layout costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from integrations.verl_helpers import config_of
from routepack import AttentionStage, CostModel, Topology, Window
from routepack.errors import InputError
from routepack.integrations.verl.observe import load_of, metrics_of, own_layout
from routepack.integrations.verl.session import Session, membership
from routepack.integrations.verl.settings import Run, Settings

SMALL = {
    "trainer.n_gpus_per_node": 2,
    "trainer.nnodes": 1,
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 1,
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.rollout.n": 2,
    "routepack.num_experts": 4,
    "routepack.count_on": "driver",
}


@dataclass
class Batch:
    """As much of verl's `KVBatchMeta` as a session looks at; refuses to be changed."""

    keys: list[str]
    tags: list[dict[str, int]]
    partition_id: str = "train"
    fields: list[str] | None = None

    @classmethod
    def of(cls, samples: int) -> Batch:
        return cls([f"k{i}" for i in range(samples)], [{"seq_len": 3}] * samples)

    def __len__(self) -> int:
        return len(self.keys)

    def reorder(self, order: list[int]) -> None:
        raise AssertionError(f"reordered to {order}")


@dataclass
class Queue:
    """A transfer queue without routes."""

    asked: list[list[str]] = field(default_factory=list)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> Any:
        self.asked.append(select_fields)
        raise ValueError("field routed_experts is not there")


@pytest.mark.parametrize("mode", ["pack", "observe"])
def test_a_step_never_raises(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """The batch stays as verl balanced it; one warning, and every such step is counted."""
    session = Session(config_of(**SMALL), mode)
    queue, batch = Queue(), Batch.of(8)
    for count in (1, 2):
        metrics: dict[str, Any] = {}
        session.step(batch, metrics, queue, [])
        assert metrics == {"routepack/fallback_steps": count}
    assert queue.asked == [["routed_experts"]] * 2
    assert batch == Batch.of(8)
    assert caplog.messages == [
        "routepack: verl's own layout is used where planning fails: ValueError: field "
        "routed_experts is not there"
    ]


def test_a_batch_that_no_optimizer_step_follows_is_left_alone() -> None:
    """While the critic warms up, verl pads a batch to no multiple of the actor's mini-batch."""
    metrics: dict[str, Any] = {}
    queue = Queue()
    Session(config_of(**SMALL), "pack").step(Batch.of(6), metrics, queue, [])
    assert metrics == {"routepack/fallback_steps": 0}
    assert queue.asked == []


def test_a_run_is_checked_when_its_session_starts(caplog: pytest.LogCaptureFixture) -> None:
    """Packing refuses a loss that it would change; observing changes none, and does not."""
    changed = SMALL | {"actor_rollout_ref.actor.policy_loss.loss_mode": "geo_mean"}
    with pytest.raises(InputError, match=r"^actor_rollout_ref\.actor\.policy_loss\.loss_mode = "):
        Session(config_of(**changed), "pack")
    Session(config_of(**changed), "observe")
    with pytest.raises(InputError, match=r"^actor_rollout_ref\.actor\.shuffle = True: "):
        Session(config_of(**SMALL, **{"actor_rollout_ref.actor.shuffle": True}), "observe")
    assert caplog.messages == []


def test_passes_with_a_smaller_cap_are_said_at_launch(caplog: pytest.LogCaptureFixture) -> None:
    """They keep verl's layout, as the plan's micro-batches do not fit them."""
    small = {"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 8192}
    Session(config_of(**SMALL, **small), "pack")
    assert caplog.messages == [
        "routepack: passes with a cap of 8192 tokens keep verl's own layout: expected at least "
        "16384, the update's"
    ]


def test_optimizer_steps_are_cut_from_every_rank() -> None:
    """Two ranks, two steps of four samples: each rank's part in order, two samples a step."""
    assert membership(8, 2, 2).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert membership(6, 2, 1).tolist() == [0] * 6


def needing(least: dict[int, int], broken: frozenset[int] = frozenset()) -> Any:
    """A `split` that needs so many micro-batches for a part with this longest sample, and that
    never comes to one of the numbers in `broken`, as a partition that breaks the cap would not."""

    def split(lengths_S: NDArray[np.int64], at_least: int) -> list[list[int]]:
        count = max(at_least, least[int(lengths_S.max())])
        while count in broken:
            count += 1
        return [part.tolist() for part in np.array_split(np.arange(len(lengths_S)), count)]

    return split


def test_ranks_take_the_largest_number_of_micro_batches() -> None:
    """The rank with long samples needs three; three break the cap somewhere, so all take four."""
    lengths_S = np.array([1, 1, 1, 1, 9, 9, 9, 9])
    rows = own_layout(needing({1: 1, 9: 3}), lengths_S, ranks=2, steps=1)
    assert rows == [[[[0, 1], [4, 5]], [[2], [6]], [[3], [7]]]]
    rows = own_layout(needing({1: 1, 9: 3}, frozenset({3})), lengths_S, ranks=2, steps=1)
    assert rows == [[[[0], [4]], [[1], [5]], [[2], [6]], [[3], [7]]]]


def test_every_optimizer_step_has_rows_of_its_own() -> None:
    """The first halves of both ranks are the first step, here with one row; the second has two."""
    lengths_S = np.array([1, 1, 9, 9, 1, 1, 9, 9])
    rows = own_layout(needing({1: 1, 9: 2}), lengths_S, ranks=2, steps=2)
    assert rows == [[[[0, 1], [4, 5]]], [[[2], [6]], [[3], [7]]]]


def run_of(cost_model: CostModel) -> Run:
    return Run(
        settings=Settings(),
        budget=Settings().budget,
        topology=Topology.of(dp=2, ep=2),
        cost_model=cost_model,
        placement_LE=None,
        token_cap=4,
        pass_caps=(),
        short_caps=(),
        mini_batch=2,
        rows_multiple_of=1,
    )


def test_optimizer_steps_add_up() -> None:
    """By hand: contiguous experts, one layer, two steps of one row; attention 1 a token in units of
    the cap, the busiest EP rank's tokens likewise."""
    demand_SLE = np.array([[[2, 2, 0, 0]], [[0, 0, 1, 1]], [[1, 0, 1, 0]], [[0, 1, 0, 1]]])
    window = Window(np.array([2, 1, 1, 1]), demand_SLE, 2)
    run = run_of(CostModel((AttentionStage("attention", 1.0, 0.0),)))
    apart = load_of(window, run, [[[[0], [1]]], [[[2], [3]]]])
    # step 0: attention 2/4 of the longer cell, rank 0 has 4 of 6 routed tokens; step 1: 1/4, and 2
    # of 4 on each rank
    assert apart.slowest_shard == 2 / 4 + 4 / 4 + 1 / 4 + 2 / 4
    together = load_of(window, run, [[[[0, 2], [1, 3]]]])
    assert together.slowest_shard == 3 / 4 + 6 / 4
    metrics = metrics_of(apart, together)
    assert metrics["routepack/predicted_ratio"] == 2.25 / 2.25
    assert (metrics["routepack/own/rows"], metrics["routepack/plan/rows"]) == (2, 1)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
def test_own_layouts_tile_the_batch(ranks: int, steps: int, size: int, least: int) -> None:
    """Whatever the split: each sample once, in its own step and on its own rank."""
    lengths_S = np.ones(ranks * steps * size, np.int64)
    count = min(least, size)
    layout = own_layout(needing({1: count}), lengths_S, ranks=ranks, steps=steps)
    of_step = membership(len(lengths_S), ranks, steps)
    seen = []
    for k, step in enumerate(layout):
        assert len(step) == count
        for row in step:
            for d, cell in enumerate(row):
                assert {i // (steps * size) for i in cell} == {d}
                assert {int(of_step[i]) for i in cell} == {k}
                seen += cell
    assert sorted(seen) == list(range(len(lengths_S)))
