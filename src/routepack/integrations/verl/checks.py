"""What is looked at before the first step: settings that plans cannot serve, and losses.

verl scales the loss of each micro-batch by the tokens or samples of the whole optimizer step
(`agg_loss` with `batch_num_tokens`, `global_batch_size` and `dp_size`, in
verl/trainer/ppo/core_algos.py of 0.9.0 and 0.9.1), so that their sum does not depend on how samples
are packed. The exceptions are named here. Under them verl's own dynamic batching already makes the
loss depend on its packing, and a plan would make it depend on another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from routepack.errors import InputError
from routepack.integrations.semantics import MEGATRON as MEGATRON_RULES
from routepack.integrations.verl.settings import ACTOR, ROLLOUT, Run, get, strategy_of

MODEL = "actor_rollout_ref.model"
MEGATRON = f"{ACTOR}.megatron"
TRANSFORMER = f"{MEGATRON}.override_transformer_config"

# Policy losses of verl that aggregate tokens or sequences by the whole step only.
PACKING_FREE = (
    "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "dro", "cispo", "bypass_mode",
)  # fmt: skip
PER_MICRO_BATCH = {
    "clip_cov": "the tokens of largest covariance of a micro-batch are clipped",
    "kl_cov": "the tokens of largest covariance of a micro-batch are penalised",
    "geo_mean": "it is a mean over the sequences of a micro-batch",
}


def require_usable(config: Mapping[str, Any], run: Run) -> None:
    """Raise InputError for the first setting under which micro-batches cannot follow a plan."""
    expectations: list[tuple[str, Any, str]] = [
        (f"{ACTOR}.shuffle", False, "false, the order of a batch decides its optimizer steps"),
        (f"{ACTOR}.use_dynamic_bsz", True, "true, plans pack by tokens"),
        (f"{MODEL}.use_remove_padding", True, "true, samples are packed without padding"),
        (f"{ACTOR}.use_prefix_grouper", False, "false, it has a layout of its own"),
        (f"{MEGATRON}.dynamic_context_parallel", False, "false, it has a scheduler of its own"),
        (f"{ROLLOUT}.enable_rollout_routing_replay", True, "true, plans need the rollout's routes"),
    ]
    defaults = {
        f"{ACTOR}.use_dynamic_bsz": False,
        f"{ROLLOUT}.enable_rollout_routing_replay": False,
    }
    for path, wanted, expected in expectations:
        found = get(config, path, defaults.get(path, wanted))
        if found != wanted:
            raise InputError.at(path, found, expected)
    if run.mini_batch % run.topology.dp:
        name = f"{ACTOR}.ppo_mini_batch_size * {ROLLOUT}.n"
        expected = f"a multiple of the {run.topology.dp} DP ranks"
        raise InputError.at(name, run.mini_batch, expected)
    if uses_critic(config):
        _require_critic_alike(config, run)


def require_same_loss(config: Mapping[str, Any], allow: tuple[str, ...]) -> None:
    """Raise InputError for the first setting under which repacking changes what is learned.

    `allow` names settings, in full, that are accepted.
    """
    for path, value, why in loss_changes(config):
        if path not in allow:
            expected = (
                f"a loss that does not depend on packing ({why}); "
                f"+routepack.allow_changed_loss='[{path}]' accepts it"
            )
            raise InputError.at(path, value, expected)


def loss_changes(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """(setting, value, why) of every loss that depends on how samples are packed."""
    mode = str(get(config, f"{ACTOR}.policy_loss.loss_mode", "vanilla"))
    if mode in PER_MICRO_BATCH:
        yield f"{ACTOR}.policy_loss.loss_mode", mode, PER_MICRO_BATCH[mode]
    elif mode not in PACKING_FREE:
        yield f"{ACTOR}.policy_loss.loss_mode", mode, "it is not one of verl's"
    for model in (ACTOR, "critic") if uses_critic(config) else (ACTOR,):
        path = f"{model}.loss_agg_mode"
        normed = get(config, path) == "seq-mean-token-sum-norm"
        if normed and get(config, f"{model}.loss_scale_factor") is None:
            why = (
                "it is divided by the longest response of a micro-batch, unless "
                f"{model}.loss_scale_factor is set"
            )
            yield path, get(config, path), why
    correction = "algorithm.rollout_correction"
    if (
        get(config, f"{correction}.bypass_mode")
        and get(config, f"{correction}.loss_type") == "reinforce"
        and get(config, f"{correction}.rollout_is_batch_normalize")
    ):
        why = "weights are divided by their mean over a micro-batch in bypass mode"
        yield f"{correction}.rollout_is_batch_normalize", True, why
    if get(config, f"{MODEL}.mtp.enable") and get(config, f"{MODEL}.mtp.enable_train"):
        why = "the multi-token prediction loss is normalised by the tokens of a micro-batch"
        yield f"{MODEL}.mtp.enable_train", True, why
    if strategy_of(config) == "megatron":
        yield from _router_losses(config)


def _router_losses(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Of Megatron's router. verl turns balancing losses off unless they are overridden."""
    overridden = get(config, TRANSFORMER, {})
    # coefficients that are not overridden come from the model
    settings = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": "the model's"}
    settings |= {name: value for name, value in overridden.items() if value is not None}
    for rule in MEGATRON_RULES:
        if rule.changes(settings):
            yield f"{TRANSFORMER}.{rule.setting}", settings[rule.setting], rule.because
    bridge = f"{MEGATRON}.vanilla_mbridge"
    if get(config, bridge) and "moe_router_load_balancing_type" not in overridden:
        yield bridge, True, "the bridge decides on the router's balancing loss, if it is not set"


def uses_critic(config: Mapping[str, Any]) -> bool:
    """As verl decides it: the critic's own switch, or else an advantage that needs values."""
    enabled = get(config, "critic.enable")
    if enabled is not None:
        return bool(enabled)
    return bool(get(config, "algorithm.adv_estimator", "gae") == "gae")


def _require_critic_alike(config: Mapping[str, Any], run: Run) -> None:
    """It trains on the same order of samples, and with the same cap follows the same rows."""
    for name, expected in (("shuffle", False), ("ppo_mini_batch_size", None)):
        wanted = get(config, f"{ACTOR}.{name}", expected)
        found = get(config, f"critic.{name}", expected)
        if found != wanted:
            raise InputError.at(f"critic.{name}", found, f"{wanted}, as the actor has")
