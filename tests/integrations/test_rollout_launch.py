"""slime and miles: what is checked at launch, and the ranks that follow from arguments."""

from __future__ import annotations

import logging
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest

import routepack
from integrations.rollout_helpers import (
    KEPT,
    LENGTHS,
    failing,
    owned,
    process,
    settings_of,
)
from integrations.trainer_helpers import (
    Logged,
    Schedule,
    arguments,
    broken_schedule,
    next_fit,
    parallel,
    samples_of,
)
from routepack import InputError
from routepack.integrations import miles, slime
from routepack.integrations.packer import Packer
from routepack.integrations.rollout import topology_of

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key": (
        {"routepack": {"mode": "pack", "second": 1}},
        "routepack: expected its settings, Object contains unknown field `second`",
    ),
    "a mode": (
        {"routepack": {"mode": "on"}},
        "routepack: expected its settings, Invalid enum value 'on' - at `$.mode`",
    ),
    "two budgets": (
        {"routepack": {"mode": "pack", "seconds": 1, "evaluations": 5}},
        "budget: expected either seconds or evaluations",
    ),
    "a deadline": (
        {"routepack": {"mode": "pack", "deadline_seconds": 0}},
        "routepack.deadline_seconds = 0.0: expected a number of seconds above 0",
    ),
    "a logger": (
        {"routepack": {"mode": "pack", "logger": "no.such"}},
        "routepack.logger = no.such: expected the dotted path of a function, No module named 'no'",
    ),
    "fixed micro-batches": (
        {"use_dynamic_batch_size": False},
        "use_dynamic_batch_size = False: expected True, plans pack by tokens",
    ),
    "no routes": (
        {"use_rollout_routing_replay": False},
        "use_rollout_routing_replay = False: expected True, plans need the routes of the rollout",
    ),
    "a dense model": (
        {"num_experts": None},
        "num_experts = None: expected a mixture-of-experts model",
    ),
    "ranks that do not divide the experts": (
        {"expert_model_parallel_size": 3},
        "num_experts = 8: expected a multiple of expert_model_parallel_size = 3",
    ),
    "a balancing loss": (
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.001},
        "moe_aux_loss_coeff = 0.001: expected 0, or moe_router_load_balancing_type = 'none', "
        "because the router's balancing loss multiplies two means over the tokens of a "
        "micro-batch; allow_changed_loss = True packs all the same",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_incompatible_is_named_at_launch(trainer: str, case: str) -> None:
    """By the launch check, and by the hook at the first rollout; the trainer's function stays."""
    changes, message = REFUSED[case]
    args = arguments(**{"routepack": {"mode": "pack"}, **changes})
    module = slime if trainer == "slime" else miles
    with pytest.raises(InputError) as refused:
        module.check(args)
    assert str(refused.value) == message
    running = process(trainer, next_fit)
    with pytest.raises(InputError) as refused:
        running.rollout(args, samples_of(LENGTHS))
    assert str(refused.value) == message
    assert running.globals["build_dp_schedule"] is next_fit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_backend": "fsdp"},
            "train_backend = 'fsdp': expected 'megatron', the other backends make no schedule in "
            "the rollout",
        ),
        (
            {"delay_split_train_data_by_dp": True},
            "delay_split_train_data_by_dp = True: expected False, its ranks would make the "
            "schedule, each for itself",
        ),
        (
            {"qkv_format": "bshd"},
            "qkv_format = 'bshd': expected 'thd', the tokens of a micro-batch are otherwise padded",
        ),
    ],
)
def test_what_only_miles_has(changes: dict[str, Any], message: str) -> None:
    """miles has ways to make schedules that slime has not."""
    args = arguments(routepack={"mode": "observe"}, **changes)
    with pytest.raises(InputError) as refused:
        miles.check(args)
    assert str(refused.value) == message
    slime.check(args)


def test_observing_changes_no_loss(trainer: str) -> None:
    """What would change the loss by packing is no reason not to look."""
    args = arguments(moe_z_loss_coeff=0.001, routepack={"mode": "observe"})
    (slime if trainer == "slime" else miles).check(args)


def test_a_changed_loss_can_be_allowed(
    trainer: str, logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    """Told so, routepack packs, and says once what changes."""
    args = arguments(moe_z_loss_coeff=0.001, routepack=settings_of("pack", allow_changed_loss=True))
    with caplog.at_level(logging.WARNING, "routepack"):
        running = process(trainer, next_fit)
        for _ in range(2):
            assert running.rollout(args, samples_of(LENGTHS)) != owned(args)
    assert [record.getMessage() for record in caplog.records] == [
        "packing changes what is learned: moe_z_loss_coeff = 0.001: expected None, because the "
        "router's z loss is a mean over the tokens of a micro-batch"
    ]


def test_another_version_is_refused(trainer: str) -> None:
    """A function with other parameters, or none where it is looked for."""

    def older(args: Any, train_parallel_config: Any, total_lengths: Any) -> Schedule:
        raise AssertionError

    args = arguments(routepack={"mode": "pack"})
    with pytest.raises(InputError) as refused:
        process(trainer, older).rollout(args, samples_of(LENGTHS))
    wanted = (
        "(args, train_parallel_config, total_lengths, global_batch_size, rollout_indices); this "
        f"version of {trainer} is not supported"
    )
    found = "(args, train_parallel_config, total_lengths)"
    assert str(refused.value) == f"{trainer}'s build_dp_schedule = {found}: expected {wanted}"
    hook = slime.log_rollout_data if trainer == "slime" else miles.log_rollout_data
    sys.modules.pop(miles.MODULE, None)
    with pytest.raises(InputError) as refused:
        types.FunctionType(_call.__code__, {})(hook, args)
    assert str(refused.value) == f"{trainer}'s build_dp_schedule = absent: expected {wanted}"


def _call(hook: Callable[..., bool], args: Any) -> bool:
    return hook(0, args, [], None, 1.0)


# Ranks


def test_ranks_follow_from_megatrons_arguments() -> None:
    """Two tensor ranks to a DP rank, four EP ranks to a group, contexts of two: by the sizes, one
    group has the ranks of one DP rank or of more."""
    args = arguments(tensor_model_parallel_size=2, expert_model_parallel_size=8)
    topology = topology_of(args, parallel(dp=8, cp=2))
    assert (topology.edp, topology.groups) == (4, ((0, 1), (2, 3), (4, 5), (6, 7)))
    args.expert_tensor_parallel_size = None  # Megatron's default: that of the dense layers
    assert topology_of(args, parallel(dp=8, cp=2)).groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    args.use_tp_pp_dp_mapping = True
    args.pipeline_model_parallel_size = 2
    with pytest.raises(InputError) as refused:
        topology_of(args, parallel(dp=8, cp=2))
    assert str(refused.value) == (
        "order = 'tp-cp-ep-pp-dp': expected an order that ends in pp, as dense and expert pipeline "
        "groups differ"
    )


def test_a_layout_of_ranks_that_cannot_be_planned(
    trainer: str, logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a DP rank spans two EP groups, every step runs as the trainer has it."""
    warnings, _ = failing(
        trainer, logged, caplog, samples_of(LENGTHS),
        tensor_model_parallel_size=4, expert_model_parallel_size=2, expert_tensor_parallel_size=1,
    )  # fmt: skip
    assert warnings == [
        f"{KEPT}ep * etp = 2: expected a multiple of tp * cp = 4, or a DP rank spans several EP "
        f"groups"
    ]


def test_the_cap_is_that_of_all_context_ranks(trainer: str, logged: Logged) -> None:
    """slime and miles pack max_tokens_per_gpu times the context ranks into a micro-batch."""
    args = arguments(
        max_tokens_per_gpu=32, expert_model_parallel_size=4, routepack=settings_of("pack")
    )
    running = process(trainer, next_fit)
    schedule = running.rollout(args, samples_of(LENGTHS), config=parallel(cp=2))
    assert schedule != owned(args, cp=2)
    check: dict[str, Any] = dict(global_batch_size=32, dp=4)
    assert broken_schedule(schedule, LENGTHS, range(32), cap=64, **check) == []
    assert broken_schedule(schedule, LENGTHS, range(32), cap=48, **check) != []


def test_packers_need_ranks_that_can_be_planned() -> None:
    """The same refusal from the class that any trainer uses."""
    spanning = routepack.Topology(dp=2, ep=2, edp=4, tp=4)
    with pytest.raises(InputError) as refused:
        Packer(spanning, 8)
    assert str(refused.value) == (
        "ep * etp = 2: expected a multiple of tp * cp = 4, or a DP rank spans several EP groups"
    )


# Nothing happens by importing


def test_importing_touches_no_trainer() -> None:
    """Neither a trainer nor torch is imported, and no kernel is loaded."""
    code = (
        "import sys\n"
        "import routepack.integrations.slime, routepack.integrations.miles\n"
        "import routepack.integrations.generic, routepack.integrations.semantics\n"
        "print(*{name.split('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"slime", "miles", "torch", "ray", "numba"} & set(done.stdout.split())
