"""Trainers in small: arguments, samples with routes, schedules, and what holds of each of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

LAYERS, EXPERTS, TOP_K = 3, 8, 2
Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]


@dataclass
class Sample:
    """What slime's and miles' samples have in common, as far as routepack looks at them."""

    tokens: list[int]
    rollout_routed_experts: Any
    rollout_id: int | None = None
    group_index: int | None = None


@dataclass
class Logged:
    """A logger that keeps what it is given."""

    entries: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def __call__(self, metrics: dict[str, float], step: int) -> None:
        self.entries.append((step, metrics))


def routes_of(rng: np.random.Generator, rows: int, hot: int = 0) -> Any:
    """[rows, LAYERS, TOP_K] distinct experts; every sample has hot ones of its own."""
    score = rng.normal(size=(rows, LAYERS, EXPERTS))
    score[:, :, [hot % EXPERTS, (hot + 1) % EXPERTS]] += 2.0
    return np.argsort(-score, axis=2)[:, :, :TOP_K].astype(np.int32)


def samples_of(lengths: Sequence[int], seed: int = 0) -> list[Sample]:
    """Samples with T - 1 rows of routes, as SGLang records them."""
    rng = np.random.default_rng(seed)
    return [
        Sample(list(range(n)), routes_of(rng, n - 1, 2 * (i % 4)), i) for i, n in enumerate(lengths)
    ]


def arguments(**changes: Any) -> SimpleNamespace:
    """A trainer's arguments: an MoE model on 4 DP ranks in 2 EP groups of 2."""
    values: dict[str, Any] = dict(
        num_layers=LAYERS,
        num_experts=EXPERTS,
        moe_router_topk=TOP_K,
        moe_layer_freq=1,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        use_tp_pp_dp_mapping=False,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=64,
        micro_batch_size=1,
        balance_data=False,
        balance_by_flops=False,
        global_batch_size=32,
        use_rollout_routing_replay=True,
        calculate_per_token_loss=False,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=None,
        hidden_size=16,
        num_attention_heads=2,
        num_query_groups=2,
        vocab_size=32,
        ffn_hidden_size=64,
        moe_ffn_hidden_size=16,
        kv_channels=8,
    )
    return SimpleNamespace(**{**values, **changes})


def parallel(dp: int = 4, cp: int = 1, vpp: int = 1, group: int = 1) -> dict[str, int]:
    """What a trainer tells its rollout process of its ranks."""
    return {
        "dp_size": dp,
        "cp_size": cp,
        "vpp_size": vpp,
        "microbatch_group_size_per_vp_stage": group,
    }


def next_fit(
    args: Any,
    train_parallel_config: dict[str, int],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> Schedule:
    """A schedule with the signature and the invariants of slime's and miles': next fit."""
    dp, cap = train_parallel_config["dp_size"], args.max_tokens_per_gpu
    cap *= train_parallel_config["cp_size"]
    multiple = dp
    if train_parallel_config["vpp_size"] > 1:
        multiple *= train_parallel_config["microbatch_group_size_per_vp_stage"]
    rollouts = list(dict.fromkeys(rollout_indices))
    partitions: list[list[int]] = [[] for _ in range(dp)]
    indices: list[list[list[int]]] = [[] for _ in range(dp)]
    counts = []
    for step in range(len(rollouts) // global_batch_size):
        chosen = set(rollouts[step * global_batch_size : (step + 1) * global_batch_size])
        bins: list[list[int]] = []
        left = 0
        for i, rollout in enumerate(rollout_indices):
            if rollout not in chosen:
                continue
            if not bins or total_lengths[i] > left:
                bins.append([])
                left = cap
            bins[-1].append(i)
            left -= total_lengths[i]
        while len(bins) % multiple:
            longest = max(bins, key=len)
            assert len(longest) > 1, "too few samples"
            bins.append([longest.pop()])
        counts.append(len(bins) // dp)
        for k, members in enumerate(bins):
            d = k % dp
            start = len(partitions[d])
            partitions[d] += members
            indices[d].append(list(range(start, start + len(members))))
    return partitions, indices, counts, [global_batch_size] * len(counts)


def real(module: str) -> Callable[..., Schedule]:
    """A trainer's own function, where its source is on the path."""
    try:
        return importlib.import_module(module).build_dp_schedule
    except ImportError:
        pytest.skip(f"{module} is not installed: it comes with the trainer's source")


def broken_schedule(
    schedule: Schedule,
    lengths: Sequence[int],
    rollout_indices: Sequence[int],
    *,
    global_batch_size: int,
    dp: int,
    cap: int,
    multiple: int = 1,
) -> list[str]:
    """What the documented invariants of slime's and miles' schedules leave to wish for.

    Written from the trainers' documentation and apart from the package: every kept sample in one
    place; each rank's micro-batches tile its samples in order; all ranks the same number of
    micro-batches in each step, a multiple of the virtual pipeline's group; steps in the order of
    the rollouts, `global_batch_size` rollouts each; no micro-batch empty or above the cap, except
    one sample alone.
    """
    partitions, indices, counts, rollouts = schedule
    broken = []
    if len(partitions) != dp or len(indices) != dp:
        broken.append("ranks")
    order = list(dict.fromkeys(rollout_indices))
    steps = len(order) // global_batch_size
    if list(rollouts) != [global_batch_size] * steps or len(counts) != steps:
        broken.append("steps")
    if any(count < 1 or count % multiple for count in counts):
        broken.append("multiple")
    for d in range(dp):
        if [i for batch in indices[d] for i in batch] != list(range(len(partitions[d]))):
            broken.append(f"rank {d} is not tiled in order")
        if len(indices[d]) != sum(counts):
            broken.append(f"rank {d} has another number of micro-batches")
        for batch in indices[d]:
            tokens = sum(lengths[partitions[d][i]] for i in batch)
            if not batch or (tokens > cap and len(batch) > 1):
                broken.append(f"rank {d}: a micro-batch of {len(batch)} samples, {tokens} tokens")
    start = 0
    for step, count in enumerate(counts):
        chosen = set(order[step * global_batch_size : (step + 1) * global_batch_size])
        expected = sorted(i for i, r in enumerate(rollout_indices) if r in chosen)
        found = sorted(
            partitions[d][i]
            for d in range(dp)
            for batch in indices[d][start : start + count]
            for i in batch
        )
        if found != expected:
            broken.append(f"step {step} has other samples")
        start += count
    return broken
