"""Which settings of a trainer make its loss depend on how samples are packed into micro-batches.

slime and miles sum the loss over samples and divide by numbers of the whole optimizer step, with
`calculate_per_token_loss` on or off, so that any packing learns the same. What is left are terms
that Megatron computes from the tokens of one micro-batch, and functions of the user's that see one
micro-batch. docs/compatibility.md cites the source of each rule; verl's are in verl/checks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from routepack.errors import InputError

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """A setting that can make the loss depend on packing.

    changes   whether it does, given all settings
    expected  the value under which it does not
    because   what depends on the micro-batch
    """

    setting: str
    changes: Callable[[Settings], bool]
    expected: str
    because: str

    def line(self, settings: Settings) -> str:
        """`setting = value: expected ...`"""
        value = settings.get(self.setting)
        return f"{self.setting} = {value!r}: expected {self.expected}, because {self.because}"


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _balancing_loss(settings: Settings) -> bool:
    kinds = _list(settings.get("moe_router_load_balancing_type", "aux_loss"))
    coefficients = _list(settings.get("moe_aux_loss_coeff", 0.0))
    if len(coefficients) < len(kinds):
        coefficients *= len(kinds)
    losses = ("aux_loss", "seq_aux_loss", "global_aux_loss")
    return any(k in losses and c for k, c in zip(kinds, coefficients, strict=False))


def _batch_routing(settings: Settings) -> bool:
    kinds = _list(settings.get("moe_router_load_balancing_type", "aux_loss"))
    return "sinkhorn" in kinds or "quantile_balancing" in kinds


def _given(setting: str) -> Callable[[Settings], bool]:
    return lambda settings: bool(settings.get(setting))


def _not_none(setting: str) -> Callable[[Settings], bool]:
    return lambda settings: settings.get(setting) is not None


USERS_FUNCTION = "nobody but its author knows whether it sums over samples"

MEGATRON = (
    Rule(
        "moe_aux_loss_coeff",
        _balancing_loss,
        "0, or moe_router_load_balancing_type = 'none'",
        "the router's balancing loss multiplies two means over the tokens of a micro-batch",
    ),
    Rule(
        "moe_z_loss_coeff",
        _given("moe_z_loss_coeff"),
        "None",
        "the router's z loss is a mean over the tokens of a micro-batch",
    ),
    Rule(
        "moe_router_load_balancing_type",
        _batch_routing,
        "'none', 'aux_loss', 'seq_aux_loss' or 'global_aux_loss'",
        "it routes by all the tokens of a micro-batch",
    ),
    Rule(
        "moe_expert_capacity_factor",
        _not_none("moe_expert_capacity_factor"),
        "None",
        "which tokens are dropped depends on the others of the micro-batch",
    ),
    Rule(
        "moe_expert_rank_capacity_factor",
        _not_none("moe_expert_rank_capacity_factor"),
        "None",
        "which tokens are dropped depends on the others of the micro-batch",
    ),
)

ROLLOUT_TRAINERS = (
    *MEGATRON,
    Rule(
        "enable_mtp_training",
        _given("enable_mtp_training"),
        "False",
        "the multi-token prediction loss is normalised by the tokens of a micro-batch",
    ),
    Rule(
        "tis_batch_normalize",
        _given("tis_batch_normalize"),
        "False",
        "importance weights are divided by their mean over a micro-batch",
    ),
    Rule(
        "loss_type",
        lambda settings: settings.get("loss_type") == "custom_loss",
        "'policy_loss' or 'sft_loss'",
        f"the loss is a function of yours: {USERS_FUNCTION}",
    ),
    Rule(
        "custom_pg_loss_reducer_function_path",
        _given("custom_pg_loss_reducer_function_path"),
        "None",
        f"it is a function of yours: {USERS_FUNCTION}",
    ),
    Rule(
        "custom_tis_function_path",
        _given("custom_tis_function_path"),
        "None",
        f"it is a function of yours: {USERS_FUNCTION}",
    ),
)

RULES: dict[str, tuple[Rule, ...]] = {
    "slime": ROLLOUT_TRAINERS,
    "miles": ROLLOUT_TRAINERS,
    "megatron": (
        Rule(
            "calculate_per_token_loss",
            lambda settings: not settings.get("calculate_per_token_loss", False),
            "True",
            "the loss is otherwise a mean over the tokens of a micro-batch",
        ),
        Rule(
            "mtp_num_layers",
            _given("mtp_num_layers"),
            "None",
            "the multi-token prediction loss is normalised by the tokens of a micro-batch",
        ),
        *MEGATRON,
    ),
}
"""By trainer. `megatron` is for a loop of one's own around Megatron-Core's schedules, with a loss
function that returns a sum and its number of tokens."""


def changed_loss(settings: Settings, trainer: str) -> list[str]:
    """One line for each setting under which repacking changes what is learned.

    settings  the trainer's, by name, as in `vars(args)`; those not given have the trainer's default
    trainer   a key of RULES

    Raises InputError for another trainer.
    """
    if trainer not in RULES:
        raise InputError.at("trainer", repr(trainer), "one of " + ", ".join(RULES))
    return [rule.line(settings) for rule in RULES[trainer] if rule.changes(settings)]


def require_same_loss(
    settings: Settings, trainer: str, *, allow_changed_loss: bool = False
) -> list[str]:
    """Refuse the first setting under which repacking changes what is learned, unless allowed.

    Returns the lines of `changed_loss`. Raises InputError.
    """
    lines = changed_loss(settings, trainer)
    if lines and not allow_changed_loss:
        raise InputError(f"{lines[0]}; allow_changed_loss = True packs all the same")
    return lines
