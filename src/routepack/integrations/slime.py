"""slime (https://github.com/THUDM/slime): observe its schedules, or pack them by a plan.

    --custom-rollout-log-function-path routepack.integrations.slime.log_rollout_data
    --custom-megatron-init-path routepack.integrations.slime.check
    --custom-config-path routepack.yaml

with `routepack: {mode: observe}` in the YAML file (`settings.Settings` has all keys). Without it
both hooks do nothing. docs/guides/slime.md is the guide.

slime makes the schedule of all ranks in the Ray actor that holds the rollout. Ray pickles that
actor's class by value, so its methods have globals of their own, and a name replaced in the module
`slime.ray.rollout` would not reach them: it is replaced in the globals of the frames that called
the hook.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import FrameType
from typing import Any

from routepack.integrations.observe import Metrics
from routepack.integrations.rollout import EXPECTED, NAME, Trainer, require_usable, schedules_in

__all__ = ["check", "log_rollout_data"]


def _log(args: Any, rollout_id: int, metrics: Metrics) -> None:
    package = "slime.observability"
    if importlib.util.find_spec(package) is None:
        package = "slime.utils"  # until 0.3.1
    logging_utils: Any = importlib.import_module(f"{package}.logging_utils")
    metric_utils: Any = importlib.import_module(f"{package}.metric_utils")
    step = metric_utils.compute_rollout_step(args, rollout_id)
    logging_utils.log(args, {**metrics, "rollout/step": step}, step_key="rollout/step")


SLIME = Trainer(
    "slime",
    "from_slime",
    EXPECTED,
    _log,
)


def check(args: Any) -> None:
    """For --custom-megatron-init-path: refuse incompatible settings when training starts.

    Raises InputError, one line that names the setting.
    """
    require_usable(SLIME, args)


def log_rollout_data(
    rollout_id: int,
    args: Any,
    samples: list[Any],
    rollout_extra_metrics: dict[str, Any] | None,
    rollout_time: float,
) -> bool:
    """For --custom-rollout-log-function-path; slime's own logging goes on.

    Raises InputError at the first rollout where `check` would have.
    """
    caller = sys._getframe(1)
    if schedules := schedules_in(lambda: _globals(caller), SLIME, args):
        schedules.remember(rollout_id, samples)
    return False


def _globals(frame: FrameType | None) -> dict[str, Any]:
    """The globals of the nearest caller in which slime's function is called; empty if none is."""
    while frame is not None:
        if callable(frame.f_globals.get(NAME)):
            return frame.f_globals
        frame = frame.f_back
    return {}
