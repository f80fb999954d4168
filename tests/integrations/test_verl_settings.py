"""What verl's configuration says about a run, and what is refused before the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integrations.verl_helpers import ACTOR, MEGATRON, ROLLOUT, TRANSFORMER, Config, config_of
from routepack.errors import InputError
from routepack.integrations.verl.checks import (
    loss_changes,
    require_same_loss,
    require_usable,
    uses_critic,
)
from routepack.integrations.verl.settings import Run, Settings, topology_of
from routepack.topology import Topology


def message_of(call: Any, *arguments: Any) -> str:
    with pytest.raises(InputError) as error:
        call(*arguments)
    return str(error.value)


def test_a_run_of_megatron() -> None:
    """Sizes, the cap and the samples of an optimizer step are verl's own."""
    run = Run.of(config_of())
    assert run.topology == Topology(dp=8, ep=4, edp=2, tp=2, etp=2)
    assert run.topology.groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (run.token_cap, run.pass_caps, run.short_caps) == (16384, (), ())
    assert (run.mini_batch, run.rows_multiple_of) == (256, 1)
    assert run.budget.seconds == 1.0


def test_caps_count_the_ranks_that_share_a_sample() -> None:
    """With context parallelism a micro-batch holds cp times as many tokens, in every pass."""
    changes = {
        f"{MEGATRON}.context_parallel_size": 2,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 32768,
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 8192,
        f"{ACTOR}.use_kl_loss": True,
    }
    run = Run.of(config_of(**changes))
    assert (run.token_cap, run.pass_caps, run.short_caps) == (32768, (65536,), (8192,))
    assert run.topology.cp == 2


def test_an_interleaved_pipeline_needs_a_multiple_of_its_stages() -> None:
    """Megatron's group size is the number of pipeline stages unless it is overridden."""
    changes = {
        f"{MEGATRON}.pipeline_model_parallel_size": 2,
        f"{MEGATRON}.virtual_pipeline_model_parallel_size": 3,
    }
    assert Run.of(config_of(**changes)).rows_multiple_of == 2
    changes[f"{TRANSFORMER}.microbatch_group_size_per_vp_stage"] = 4
    assert Run.of(config_of(**changes)).rows_multiple_of == 4


def test_other_engines_name_their_groups_in_a_file(tmp_path: Path) -> None:
    """Only Megatron's groups follow from verl's configuration; a file serves the other engines."""
    file = tmp_path / "topology.toml"
    file.write_text('tp = 1\ncp = 1\npp = 1\ndp = 16\nep = 8\netp = 1\norder = "tp-cp-ep-dp-pp"\n')
    changes = {f"{ACTOR}.strategy": "fsdp2", f"{ACTOR}.ulysses_sequence_parallel_size": 2}
    config = config_of(**changes)
    assert message_of(Run.of, config) == (
        f"{ACTOR}.strategy = fsdp2: expected megatron, or +routepack.topology=FILE that names the "
        "ranks of an EP group"
    )
    run = Run.of(config | {"routepack": {"topology": str(file), "evaluations": 100}})
    assert (run.topology.dp, run.topology.edp, run.token_cap) == (16, 2, 32768)
    assert run.budget.evaluations == 100


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routepack.second": 1}, "routepack: Object contains unknown field `second`"),
        ({"routepack.seconds": -1}, "seconds = -1.0: expected a finite number above 0"),
        (
            {"routepack.count_on": "gpu"},
            "routepack.count_on = gpu: expected 'workers' or 'driver'",
        ),
        (
            {f"{ACTOR}.strategy": "automodel"},
            f"{ACTOR}.strategy = automodel: expected one of megatron, fsdp, fsdp2, veomni",
        ),
        (
            {f"{ROLLOUT}.n": None},
            f"{ROLLOUT}.n = None: expected a whole number of at least 1",
        ),
        (
            {"trainer.nnodes": 3, f"{MEGATRON}.pipeline_model_parallel_size": 5},
            "trainer.n_gpus_per_node * trainer.nnodes = 24: "
            "expected a multiple of tp * pp * cp = 10",
        ),
        (
            {f"{MEGATRON}.expert_model_parallel_size": 5},
            "dp * tp * cp = 16: expected a multiple of expert_model_parallel_size * tensor size of "
            "experts = 10",
        ),
        (
            {f"{MEGATRON}.context_parallel_size": 8, f"{MEGATRON}.expert_model_parallel_size": 2},
            "ep * etp = 4: expected a multiple of tp * cp = 16, or a DP rank spans several EP "
            "groups",
        ),
    ],
)
def test_runs_that_are_not_understood(changes: Config, message: str) -> None:
    """One line names the setting; nothing is guessed."""
    assert message_of(Run.of, config_of(**changes)) == message


def test_settings_have_defaults() -> None:
    """Without +routepack.* every setting has its documented default."""
    assert Settings.of({}) == Settings()
    assert topology_of(config_of(), Settings()).ep == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {f"{ACTOR}.shuffle": True},
            f"{ACTOR}.shuffle = True: expected false, the order of a batch decides its optimizer "
            "steps",
        ),
        (
            {f"{ACTOR}.use_dynamic_bsz": None},
            f"{ACTOR}.use_dynamic_bsz = False: expected true, plans pack by tokens",
        ),
        (
            {"actor_rollout_ref.model.use_remove_padding": False},
            "actor_rollout_ref.model.use_remove_padding = False: expected true, samples are packed "
            "without padding",
        ),
        (
            {f"{ACTOR}.use_prefix_grouper": True},
            f"{ACTOR}.use_prefix_grouper = True: expected false, it has a layout of its own",
        ),
        (
            {f"{MEGATRON}.dynamic_context_parallel": True},
            f"{MEGATRON}.dynamic_context_parallel = True: expected false, it has a scheduler of "
            "its own",
        ),
        (
            {f"{ROLLOUT}.enable_rollout_routing_replay": False},
            f"{ROLLOUT}.enable_rollout_routing_replay = False: expected true, plans need the "
            "rollout's routes",
        ),
        (
            {f"{ACTOR}.ppo_mini_batch_size": 3, f"{ROLLOUT}.n": 1},
            f"{ACTOR}.ppo_mini_batch_size * {ROLLOUT}.n = 3: expected a multiple of the 8 DP ranks",
        ),
        (
            {"critic.enable": True, "critic.ppo_mini_batch_size": 16},
            "critic.ppo_mini_batch_size = 16: expected 32, as the actor has",
        ),
        (
            {"critic.enable": True, "critic.shuffle": True},
            "critic.shuffle = True: expected False, as the actor has",
        ),
    ],
)
def test_settings_that_plans_cannot_serve(changes: Config, message: str) -> None:
    """Each is named at launch, with what is expected instead."""
    config = config_of(**changes)
    assert message_of(require_usable, config, Run.of(config)) == message


def test_a_usable_run_is_let_through() -> None:
    """With a critic that trains as the actor does, too."""
    config = config_of(**{"critic.enable": True, "critic.ppo_mini_batch_size": 32})
    require_usable(config, Run.of(config))
    assert uses_critic(config)
    assert uses_critic(config_of(**{"algorithm.adv_estimator": "gae"}))
    assert not uses_critic(config_of())


CHANGED = [
    ({f"{ACTOR}.policy_loss.loss_mode": "geo_mean"}, f"{ACTOR}.policy_loss.loss_mode"),
    ({f"{ACTOR}.policy_loss.loss_mode": "clip_cov"}, f"{ACTOR}.policy_loss.loss_mode"),
    ({f"{ACTOR}.policy_loss.loss_mode": "kl_cov"}, f"{ACTOR}.policy_loss.loss_mode"),
    ({f"{ACTOR}.policy_loss.loss_mode": "mine"}, f"{ACTOR}.policy_loss.loss_mode"),
    ({f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm"}, f"{ACTOR}.loss_agg_mode"),
    (
        {"critic.enable": True, "critic.loss_agg_mode": "seq-mean-token-sum-norm"},
        "critic.loss_agg_mode",
    ),
    (
        {
            "algorithm.rollout_correction": {
                "bypass_mode": True,
                "loss_type": "reinforce",
                "rollout_is_batch_normalize": True,
            }
        },
        "algorithm.rollout_correction.rollout_is_batch_normalize",
    ),
    (
        {"actor_rollout_ref.model.mtp": {"enable": True, "enable_train": True}},
        "actor_rollout_ref.model.mtp.enable_train",
    ),
    (
        {f"{TRANSFORMER}.moe_router_load_balancing_type": "aux_loss"},
        f"{TRANSFORMER}.moe_aux_loss_coeff",
    ),
    (
        {
            f"{TRANSFORMER}.moe_router_load_balancing_type": ["none", "seq_aux_loss"],
            f"{TRANSFORMER}.moe_aux_loss_coeff": [0.0, 0.001],
        },
        f"{TRANSFORMER}.moe_aux_loss_coeff",
    ),
    (
        {f"{TRANSFORMER}.moe_router_load_balancing_type": "sinkhorn"},
        f"{TRANSFORMER}.moe_router_load_balancing_type",
    ),
    ({f"{TRANSFORMER}.moe_z_loss_coeff": 0.001}, f"{TRANSFORMER}.moe_z_loss_coeff"),
    (
        {f"{TRANSFORMER}.moe_expert_capacity_factor": 1.25},
        f"{TRANSFORMER}.moe_expert_capacity_factor",
    ),
    ({f"{MEGATRON}.vanilla_mbridge": True}, f"{MEGATRON}.vanilla_mbridge"),
]


@pytest.mark.parametrize(("changes", "setting"), CHANGED)
def test_losses_that_depend_on_packing(changes: Config, setting: str) -> None:
    """Refused by the name of the setting, unless exactly that name is accepted."""
    config = config_of(**changes)
    assert [path for path, _, _ in loss_changes(config)] == [setting]
    message = message_of(require_same_loss, config, ())
    assert message.startswith(f"{setting} = ")
    assert message.endswith(f"; +routepack.allow_changed_loss='[{setting}]' accepts it")
    require_same_loss(config, (setting,))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {f"{ACTOR}.policy_loss.loss_mode": "gspo"},
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
        {f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 4096},
        {"critic.loss_agg_mode": "seq-mean-token-sum-norm"},  # no critic is trained
        {"actor_rollout_ref.model.mtp": {"enable": True, "enable_train": False}},
        {
            f"{TRANSFORMER}.moe_router_load_balancing_type": "aux_loss",
            f"{TRANSFORMER}.moe_aux_loss_coeff": 0.0,
        },
        {
            f"{MEGATRON}.vanilla_mbridge": True,
            f"{TRANSFORMER}.moe_router_load_balancing_type": "none",
        },
        {f"{TRANSFORMER}.moe_aux_loss_coeff": 0.001},  # verl's balancing type is none
    ],
)
def test_losses_that_do_not(changes: Config) -> None:
    """verl scales them by the whole optimizer step."""
    assert list(loss_changes(config_of(**changes))) == []


def test_the_whole_message_of_a_changed_loss() -> None:
    """Setting, value, what would be accepted, why, and how to accept it."""
    config = config_of(**{f"{TRANSFORMER}.moe_z_loss_coeff": 0.001})
    assert message_of(require_same_loss, config, ()) == (
        f"{TRANSFORMER}.moe_z_loss_coeff = 0.001: expected a loss that does not depend on packing "
        "(the router's z loss is a mean over the tokens of a micro-batch); "
        f"+routepack.allow_changed_loss='[{TRANSFORMER}.moe_z_loss_coeff]' accepts it"
    )
