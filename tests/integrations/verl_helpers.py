"""verl's configuration in small."""

from __future__ import annotations

import os
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest

Config = dict[str, Any]
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"


def config_of(**changes: Any) -> Config:
    """GRPO on 16 GPUs, TP 2, EP 4: 8 DP ranks, 4 of them in an EP group; changes by dotted path."""
    config: Config = {
        "trainer": {"n_gpus_per_node": 8, "nnodes": 2},
        "algorithm": {"adv_estimator": "grpo"},
        "actor_rollout_ref": {
            "actor": {
                "strategy": "megatron",
                "shuffle": False,
                "use_dynamic_bsz": True,
                "ppo_max_token_len_per_gpu": 16384,
                "ppo_mini_batch_size": 32,
                "policy_loss": {"loss_mode": "vanilla"},
                "loss_agg_mode": "token-mean",
                "loss_scale_factor": None,
                "megatron": {
                    "tensor_model_parallel_size": 2,
                    "pipeline_model_parallel_size": 1,
                    "virtual_pipeline_model_parallel_size": None,
                    "context_parallel_size": 1,
                    "expert_model_parallel_size": 4,
                    "expert_tensor_parallel_size": None,
                    "override_transformer_config": {},
                },
            },
            "rollout": {
                "n": 8,
                "log_prob_max_token_len_per_gpu": 16384,
                "enable_rollout_routing_replay": True,
            },
            "ref": {"log_prob_max_token_len_per_gpu": 16384, "megatron": {}},
            "model": {"use_remove_padding": True, "mtp": {"enable": False}},
        },
        "critic": {"enable": None},
    }
    for path, value in changes.items():
        *tables, key = path.split(".")
        table = config
        for name in tables:
            table = table.setdefault(name, {})
        table[key] = value
    return config


def require(*modules: str) -> None:
    """Skip a test module where one of these is missing; `make check` names the version of verl
    that it has installed, and there that is an error."""
    expected = os.environ.get("ROUTEPACK_TEST_VERL")
    missing = [name for name in modules if find_spec(name) is None]
    if expected is None and missing:
        pytest.skip(f"needs {', '.join(missing)}, not installed", allow_module_level=True)
    if missing:
        raise ImportError(f"verl {expected} cannot be tested without {', '.join(missing)}")
    if expected is not None and expected != version("verl"):
        raise ImportError(f"expected verl {expected}, found {version('verl')}")
