"""The driver's side of verl: what is changed in its trainer.

A run is checked when the trainer is made, before any model is; its workers when they are up; and
each batch is planned after verl has balanced it (`session`).
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

from routepack.errors import InputError
from routepack.integrations.verl.session import Session
from routepack.integrations.verl.settings import Run

logger = logging.getLogger(__name__)


def patch(trainer_base: ModuleType, mode: str) -> None:
    """Check a run when verl's trainer is made, its workers when they are, and plan its batches."""
    trainer = trainer_base.PPOTrainer
    make, set_up, balance = trainer.__init__, trainer._setup, trainer._balance_batch

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.routepack_session = session_for(self.config, mode)

    @functools.wraps(set_up)
    def ready(self: Any) -> None:
        set_up(self)
        session = getattr(self, "routepack_session", None)
        if session is not None and mode == "pack":
            require_alike(self.actor_rollout_wg, session.run)

    @functools.wraps(balance)
    def balanced(self: Any, batch: Any, metrics: Any, *args: Any, **kwargs: Any) -> Any:
        batch = balance(self, batch, metrics, *args, **kwargs)
        session = getattr(self, "routepack_session", None)  # a subclass may have its own __init__
        if session is not None:
            session.step(batch, metrics, trainer_base.tq, self.actor_rollout_wg.workers)
        return batch

    trainer.__init__, trainer._setup, trainer._balance_batch = made, ready, balanced


def patch_legacy(ray_trainer: ModuleType, mode: str) -> None:
    """Say at launch that trainers outside verl's V1 are not served."""
    make = ray_trainer.RayPPOTrainer.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        error = InputError.at("trainer.use_v1", False, "true; older trainers are not supported")
        if mode == "pack":
            raise error
        logger.warning("routepack is off: %s", error)
        make(self, *args, **kwargs)

    ray_trainer.RayPPOTrainer.__init__ = made


def session_for(config: Any, mode: str) -> Session | None:
    """Raises InputError for a run that cannot be planned; in observe mode warns and is None."""
    from omegaconf import OmegaConf

    try:
        return Session(OmegaConf.to_container(config, resolve=True), mode)
    except Exception as error:
        if mode == "pack":
            raise
        logger.warning("routepack is off: %s", error)
        return None


def require_alike(worker_group: Any, run: Run) -> None:
    """Raise InputError unless every worker has the plugin on, and DP ranks are as planned for."""
    import ray

    from routepack.integrations.verl import plugin

    states = ray.get([w.__ray_call__.remote(plugin.worker_state) for w in worker_group.workers])
    expected = (plugin.MODE, plugin.VERL_VERSION, True)
    for rank, found in enumerate(states):
        if found != expected:
            wanted = f"(mode, verl, patched) {expected}, as the driver; is ROUTEPACK_VERL set there"
            raise InputError.at("worker", found, wanted, rank)
    ranks = max(worker_group._query_dispatch_info("actor")) + 1
    if ranks != run.topology.dp:
        raise InputError.at("topology.dp", run.topology.dp, f"the {ranks} DP ranks of verl's actor")
