"""Settings under which repacking changes what is learned: named, and refused unless allowed."""

from __future__ import annotations

from typing import Any

import pytest

from routepack import InputError
from routepack.integrations.semantics import RULES, changed_loss, require_same_loss

SAME: dict[str, list[dict[str, Any]]] = {
    "slime": [
        {},
        {"calculate_per_token_loss": False},
        {"calculate_per_token_loss": True},
        {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.01},
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.0},
        {"moe_router_load_balancing_type": ["aux_loss", "none"], "moe_aux_loss_coeff": [0.0, 0.1]},
        {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 1e-3},
        {"loss_type": "sft_loss", "use_kl_loss": True, "entropy_coef": 0.1},
    ],
    "megatron": [{"calculate_per_token_loss": True}],
}
SAME["miles"] = SAME["slime"]

CHANGED: list[tuple[dict[str, Any], str]] = [
    (
        {"moe_aux_loss_coeff": 0.001},
        "moe_aux_loss_coeff = 0.001: expected 0, or moe_router_load_balancing_type = 'none', "
        "because the router's balancing loss multiplies two means over the tokens of a micro-batch",
    ),
    (
        {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-4},
        "moe_aux_loss_coeff = 0.0001: expected 0, or moe_router_load_balancing_type = 'none', "
        "because the router's balancing loss multiplies two means over the tokens of a micro-batch",
    ),
    (
        {
            "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
            "moe_aux_loss_coeff": [0.0, 0.01],
        },
        "moe_aux_loss_coeff = [0.0, 0.01]: expected 0, or moe_router_load_balancing_type = 'none', "
        "because the router's balancing loss multiplies two means over the tokens of a micro-batch",
    ),
    (
        {"moe_z_loss_coeff": 0.001},
        "moe_z_loss_coeff = 0.001: expected None, because the router's z loss is a mean over the "
        "tokens of a micro-batch",
    ),
    (
        {"moe_router_load_balancing_type": "sinkhorn"},
        "moe_router_load_balancing_type = 'sinkhorn': expected 'none', 'aux_loss', 'seq_aux_loss' "
        "or 'global_aux_loss', because it routes by all the tokens of a micro-batch",
    ),
    (
        {"moe_router_load_balancing_type": "quantile_balancing"},
        "moe_router_load_balancing_type = 'quantile_balancing': expected 'none', 'aux_loss', "
        "'seq_aux_loss' or 'global_aux_loss', because it routes by all the tokens of a micro-batch",
    ),
    (
        {"moe_expert_capacity_factor": 1.25},
        "moe_expert_capacity_factor = 1.25: expected None, because which tokens are dropped "
        "depends on the others of the micro-batch",
    ),
    (
        {"moe_expert_rank_capacity_factor": 2.0},
        "moe_expert_rank_capacity_factor = 2.0: expected None, because which tokens are dropped "
        "depends on the others of the micro-batch",
    ),
]
ROLLOUT: list[tuple[dict[str, Any], str]] = [
    (
        {"enable_mtp_training": True},
        "enable_mtp_training = True: expected False, because the multi-token prediction loss is "
        "normalised by the tokens of a micro-batch",
    ),
    (
        {"tis_batch_normalize": True},
        "tis_batch_normalize = True: expected False, because importance weights are divided by "
        "their mean over a micro-batch",
    ),
    (
        {"loss_type": "custom_loss"},
        "loss_type = 'custom_loss': expected 'policy_loss' or 'sft_loss', because the loss is a "
        "function of yours: nobody but its author knows whether it sums over samples",
    ),
    (
        {"custom_pg_loss_reducer_function_path": "mine.reduce"},
        "custom_pg_loss_reducer_function_path = 'mine.reduce': expected None, because it is a "
        "function of yours: nobody but its author knows whether it sums over samples",
    ),
    (
        {"custom_tis_function_path": "mine.weights"},
        "custom_tis_function_path = 'mine.weights': expected None, because it is a function of "
        "yours: nobody but its author knows whether it sums over samples",
    ),
]
MEGATRON: list[tuple[dict[str, Any], str]] = [
    (
        {"calculate_per_token_loss": False},
        "calculate_per_token_loss = False: expected True, because the loss is otherwise a mean "
        "over the tokens of a micro-batch",
    ),
    (
        {"mtp_num_layers": 1},
        "mtp_num_layers = 1: expected None, because the multi-token prediction loss is normalised "
        "by the tokens of a micro-batch",
    ),
]
CASES = [
    *[(trainer, *case) for trainer in ("slime", "miles") for case in [*CHANGED, *ROLLOUT]],
    *[("megatron", *case) for case in [*CHANGED, *MEGATRON]],
]


@pytest.mark.parametrize("trainer", SAME)
def test_settings_of_the_trainers_recipes_change_nothing(trainer: str) -> None:
    """Losses that are sums over samples, whatever they are divided by once a step, and an expert
    bias that is updated once a step."""
    for settings in SAME[trainer]:
        assert changed_loss(settings, trainer) == []
        assert require_same_loss(settings, trainer) == []


@pytest.mark.parametrize(("trainer", "settings", "line"), CASES)
def test_each_rule_names_its_setting(trainer: str, settings: dict[str, Any], line: str) -> None:
    """One line: the setting as the trainer spells it, its value, what is expected and why."""
    given = {"calculate_per_token_loss": True} | settings
    assert changed_loss(given, trainer) == [line]
    with pytest.raises(InputError) as refused:
        require_same_loss(given, trainer)
    assert str(refused.value) == f"{line}; allow_changed_loss = True packs all the same"
    assert require_same_loss(given, trainer, allow_changed_loss=True) == [line]


def test_every_rule_is_tried() -> None:
    """The cases above break every rule of every trainer."""
    for trainer, rules in RULES.items():
        tried = {line.split(" = ")[0] for name, _, line in CASES if name == trainer}
        assert tried == {rule.setting for rule in rules}


def test_all_changed_settings_are_told() -> None:
    """Two settings, two lines; the first is the one that is refused."""
    settings = {"moe_z_loss_coeff": 0.1, "enable_mtp_training": True}
    lines = changed_loss(settings, "slime")
    assert [line.split(" = ")[0] for line in lines] == ["moe_z_loss_coeff", "enable_mtp_training"]


def test_megatron_alone_averages_over_micro_batches_unless_told() -> None:
    """Megatron's default divides by the tokens of a micro-batch."""
    assert changed_loss({}, "megatron")[0].startswith("calculate_per_token_loss = None: expected")


def test_another_trainer_is_refused() -> None:
    """There are rules for three."""
    with pytest.raises(InputError) as refused:
        changed_loss({}, "trl")
    assert str(refused.value) == "trainer = 'trl': expected one of slime, miles, megatron"
