"""The plugin itself: verl imports this module in each of its processes.

That import is what loading means to verl (entry-point group `verl.plugins`), so this module alone
acts, and reads the environment, when imported:

    ROUTEPACK_VERL        off (default), observe or pack
    ROUTEPACK_VERL_FORCE  1 also accepts versions of verl that were not tested

When off nothing of verl is touched. When on, nothing is imported that verl does not import itself.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from routepack.integrations.verl.hooks import when_imported

SUPPORTED = ("0.9.0", "0.9.1")
MODES = ("off", "observe", "pack")
TRAINER = "verl.trainer.ppo.v1.trainer_base"
LEGACY_TRAINER = "verl.trainer.ppo.ray_trainer"
ENGINE = "verl.workers.engine.utils"

logger = logging.getLogger(__name__)


def mode_of(environ: Mapping[str, str], version: str) -> str:
    """The mode that the environment asks for and this version of verl allows; warns where not."""
    mode = environ.get("ROUTEPACK_VERL", "off").strip().lower() or "off"
    if mode not in MODES:
        logger.warning(
            "routepack is off: ROUTEPACK_VERL = %r: expected one of %s", mode, ", ".join(MODES)
        )
        return "off"
    if mode != "off" and version not in SUPPORTED and environ.get("ROUTEPACK_VERL_FORCE") != "1":
        logger.warning(
            "routepack is off: verl %s: expected %s; ROUTEPACK_VERL_FORCE=1 tries it anyway",
            version,
            " or ".join(SUPPORTED),
        )
        return "off"
    return mode


def install(mode: str) -> None:
    """Have verl's driver and workers changed as they are imported. Does nothing when off."""
    if mode == "off":
        return
    when_imported(TRAINER, lambda module: _patch_trainer(module, mode))
    when_imported(LEGACY_TRAINER, lambda module: _patch_legacy_trainer(module, mode))
    if mode == "pack":
        when_imported(ENGINE, _patch_engine)


def worker_state(worker: Any = None) -> tuple[str, str, bool]:
    """(mode, verl's version, micro-batches patched); the driver asks each worker for them."""
    own = getattr(sys.modules.get(ENGINE), "rearrange_micro_batches", None)
    return MODE, VERL_VERSION, hasattr(own, "routepack_original")


def _patch_trainer(module: ModuleType, mode: str) -> None:
    from routepack.integrations.verl.trainer import patch

    patch(module, mode)


def _patch_legacy_trainer(module: ModuleType, mode: str) -> None:
    from routepack.integrations.verl.trainer import patch_legacy

    patch_legacy(module, mode)


def _patch_engine(module: ModuleType) -> None:
    from routepack.integrations.verl.microbatch import patch

    patch(module)


VERL_VERSION = str(getattr(sys.modules.get("verl"), "__version__", "unknown"))
MODE = mode_of(os.environ, VERL_VERSION)
install(MODE)
