"""miles (https://github.com/radixark/miles): observe its schedules, or pack them by a plan.

    --custom-rollout-log-function-path routepack.integrations.miles.log_rollout_data
    --custom-megatron-init-path routepack.integrations.miles.check
    --custom-config-path routepack.yaml

with `routepack: {mode: observe}` in the YAML file (`settings.Settings` has all keys). Without it
both hooks do nothing. docs/guides/miles.md is the guide.

miles makes the schedule of all ranks in one function, which looks `build_dp_schedule` up in its
module; that one name is replaced.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from routepack.integrations.observe import Metrics
from routepack.integrations.rollout import EXPECTED, Trainer, require_usable, schedules_in

__all__ = ["check", "log_rollout_data"]

MODULE = "miles.ray.rollout.train_data_conversion"


def _log(args: Any, rollout_id: int, metrics: Metrics) -> None:
    tracking: Any = importlib.import_module("miles.utils.tracking_utils.tracking")
    metric_utils: Any = importlib.import_module("miles.utils.metric_utils")
    step = metric_utils.compute_rollout_step(args, rollout_id)
    tracking.log(args, {**metrics, "rollout/step": step}, step_key="rollout/step")


ON_TRAIN_SIDE = "its ranks would make the schedule, each for itself"
MILES = Trainer(
    "miles",
    "from_miles",
    {
        **EXPECTED,
        "train_backend": ("megatron", "the other backends make no schedule in the rollout"),
        "delay_split_train_data_by_dp": (False, ON_TRAIN_SIDE),
        "qkv_format": ("thd", "the tokens of a micro-batch are otherwise padded"),
    },
    _log,
)


def check(args: Any) -> None:
    """For --custom-megatron-init-path: refuse incompatible settings when training starts.

    Raises InputError, one line that names the setting.
    """
    require_usable(MILES, args)


def log_rollout_data(
    rollout_id: int,
    args: Any,
    samples: list[Any],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,
) -> bool:
    """For --custom-rollout-log-function-path; miles' own logging goes on.

    Raises InputError at the first rollout where `check` would have.
    """
    if schedules := schedules_in(_globals, MILES, args):
        schedules.remember(rollout_id, samples)
    return False


def _globals() -> dict[str, Any]:
    """Of miles' module, where this version has it."""
    module = sys.modules.get(MODULE)
    return {} if module is None else vars(module)
