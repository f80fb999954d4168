"""verl's trainer, transfer queue and two workers on a CPU; test_verl_driver.py reads what it finds.

    ROUTEPACK_VERL=pack python verl_driver.py

The driver is verl's own `PPOTrainer` on verl's own configuration, with a worker group of two Ray
actors in its place. What verl would do with models is left out; how a batch is balanced, stored,
dispatched, cut into mini-batches and into micro-batches is verl's.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import ray
import torch
import transfer_queue as tq
import verl  # loads the plugin
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.protocol import BatchData
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from routepack.errors import InputError
from routepack.integrations.verl import plugin
from routepack.integrations.verl.session import Session
from routepack.integrations.verl.trainer import require_alike

RANKS, STEPS, CAP = 2, 2, 256
LAYERS, EXPERTS, TOP_K = 3, 8, 2  # and a dense layer before them
OVERRIDES = [
    "model_engine=megatron",
    "trainer.n_gpus_per_node=2",
    "trainer.nnodes=1",
    "trainer.critic_warmup=0",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={CAP}",
    f"actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu={2 * CAP}",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.megatron.expert_model_parallel_size=2",
    "actor_rollout_ref.actor.megatron.router_replay.mode=R3",
    "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
    "actor_rollout_ref.rollout.n=4",
    f"+routepack.num_experts={EXPERTS}",
    "+routepack.evaluations=20000",
    "+routepack.threads=1",
]


class Trainer(PPOTrainer):
    """What a mode of verl's trainer adds, and nothing else."""

    def on_step_end(self) -> None:
        """Nothing to synchronise."""

    def on_sample_end(self) -> None:
        """Nothing to put to sleep."""


class Worker:
    """One DP rank: fetches its part, cuts it as verl's workers do, and reports the samples."""

    def __init__(self, rank: int, store: str) -> None:
        import verl.workers.engine.utils  # noqa: F401, as verl's workers do
        from torch import distributed as dist
        from verl.utils import seqlen_balancing

        seqlen_balancing.get_device_name = lambda: "cpu"
        dist.init_process_group("gloo", rank=rank, world_size=RANKS, init_method=f"file://{store}")

    def run(self, part: Any) -> dict[str, Any]:
        """The update's micro-batches of each mini-batch, and those of a log-probability pass."""
        from verl.utils.transferqueue_utils import tqbridge

        return tqbridge()(_cut)(part)


class Idle:
    """A worker that has imported verl, and nothing else."""

    def __init__(self) -> None:
        import verl.workers.engine.utils  # noqa: F401


def _cut(data: TensorDict) -> dict[str, Any]:
    from torch import distributed as dist
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.utils import prepare_micro_batches

    def cut(part: TensorDict, cap: int) -> list[list[int]]:
        tu.assign_non_tensor(part, use_dynamic_bsz=True, sp_size=1, max_token_len_per_gpu=cap)
        batches, _ = prepare_micro_batches(part, dp_group=dist.group.WORLD)
        return [[int(ids[0]) for ids in batch["input_ids"].unbind()] for batch in batches]

    log_probs = cut(data, 2 * CAP)
    mini_batches = tu.make_iterator(
        data, mini_batch_size=len(data) // STEPS, epochs=1, seed=1,
        dataloader_kwargs={"shuffle": False},
    )  # fmt: skip
    return {"log_probs": log_probs, "update": [cut(part, CAP) for part in mini_batches]}


def rollout(batch_number: int, lengths: list[int]) -> KVBatchMeta:
    """A batch as verl's agent loop stores it; the first token of a sample is its number."""
    rng = np.random.default_rng(batch_number)
    tokens, routes = [], []
    for i, n in enumerate(lengths):
        tokens.append(torch.full((n,), i))
        score = rng.normal(size=(n, LAYERS + 1, EXPERTS))
        score[:, :, 2 * (i % 4)] += 2  # hot experts of its own
        chosen = np.argsort(-score, axis=2)[:, :, :TOP_K].astype(np.int16)
        chosen[:, 0] = chosen[-1] = 0  # the dense layer, and the token that was not fed back
        routes.append(torch.from_numpy(chosen))
    fields = {
        "input_ids": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
        "prompts": torch.nested.as_nested_tensor([t[:1] for t in tokens], layout=torch.jagged),
        "routed_experts": torch.nested.as_nested_tensor(routes, layout=torch.jagged),
    }
    keys = [f"batch{batch_number}_{i}" for i in range(len(lengths))]
    tags = [{"seq_len": n} for n in lengths]
    data = TensorDict(fields, batch_size=len(lengths))
    return tq.kv_batch_put(keys=keys, partition_id="train", fields=data, tags=tags)


def number(key: str) -> int:
    return int(key.rsplit("_", 1)[1])


def step(trainer: Trainer, group: Any, batch: KVBatchMeta) -> dict[str, Any]:
    """Balance a batch and have the workers cut it."""
    metrics: dict[str, Any] = {}
    balanced = trainer._balance_batch(batch, metrics)
    parts = BatchData(balanced).chunk(RANKS)
    found = ray.get([w.run.remote(part) for w, part in zip(group.workers, parts, strict=True)])
    order = [number(key) for key in balanced.keys]
    return {"metrics": metrics, "order": order, "ranks": found}


def main() -> None:
    env = {"ROUTEPACK_VERL": "pack", "PYTHONWARNINGS": "ignore"}
    ray.init(
        num_cpus=8, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env}
    )
    tq.init()
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", OVERRIDES)
    trainer = Trainer(config)
    store = tempfile.mktemp()
    workers = [ray.remote(Worker).remote(rank, store) for rank in range(RANKS)]
    group = SimpleNamespace(
        workers=workers,
        _dispatch_info={},
        _query_dispatch_info=lambda role: list(range(RANKS)),
    )
    trainer.actor_rollout_wg = group
    trainer.tokenizer = SimpleNamespace(eos_token_id=0)
    trainer.global_steps = 1
    require_alike(group, trainer.routepack_session.run)
    off = ray.remote(Idle).options(runtime_env={"env_vars": {"ROUTEPACK_VERL": "off"}})
    lonely = SimpleNamespace(workers=[off.remote()])
    found: dict[str, Any] = {"version": verl.__version__, "mode": plugin.MODE}
    try:
        require_alike(lonely, trainer.routepack_session.run)
    except InputError as error:
        found["lonely"] = str(error)
    found["lengths"] = lengths = np.random.default_rng(3).integers(20, 120, 32).tolist()
    found["packed"] = step(trainer, group, rollout(0, lengths))

    trainer.routepack_session._plan = lambda window: 1 // 0
    found["failed"] = step(trainer, group, rollout(1, lengths))
    del trainer.routepack_session._plan
    found["again"] = step(trainer, group, rollout(2, lengths))

    trainer.routepack_session = Session(OmegaConf.to_container(config, resolve=True), "observe")
    found["observed"] = step(trainer, group, rollout(3, lengths))
    trainer.routepack_session.observed.result()
    found["observed_next"] = step(trainer, group, rollout(4, lengths))
    trainer.routepack_session = None
    found["verl"] = step(trainer, group, rollout(3, lengths))

    from routepack.integrations.verl import microbatch

    found["counts"] = ray.get([w.__ray_call__.remote(microbatch.counts) for w in workers])
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
