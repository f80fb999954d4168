"""What is changed in verl's trainers, on small stand-ins for them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from integrations.verl_helpers import config_of
from routepack.errors import InputError
from routepack.integrations.verl import trainer
from routepack.integrations.verl.trainer import patch, patch_legacy, session_for


class PPOTrainer:
    """The methods of verl's trainer that are wrapped."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.actor_rollout_wg = SimpleNamespace(workers=["w0"])

    def _setup(self) -> None:
        self.config["set up"] = True

    def _balance_batch(self, batch: list[str], metrics: dict[str, int], prefix: str = "") -> Any:
        metrics[f"{prefix}seen"] = len(batch)
        return [*batch, "padding"]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer module of its own for each test; sessions and worker checks are only recorded."""

    class Trainer(PPOTrainer):
        pass

    for name in ("__init__", "_setup", "_balance_batch"):
        setattr(Trainer, name, getattr(PPOTrainer, name))
    calls: list[Any] = []

    def session(config: Any, mode: str) -> Any:
        calls.append(("session", config["name"], mode))
        step = lambda *arguments: calls.append(("step", *arguments))  # noqa: E731
        return SimpleNamespace(step=step, run="run") if config["name"] != "unusable" else None

    monkeypatch.setattr(trainer, "session_for", session)
    monkeypatch.setattr(
        trainer, "require_alike", lambda group, run: calls.append(("workers", group.workers, run))
    )
    return SimpleNamespace(PPOTrainer=Trainer, tq="queue", calls=calls)


def test_a_batch_is_planned_after_verl_has_balanced_it(module: Any) -> None:
    """On what verl's own method returns, with its arguments passed on; workers are checked once."""
    patch(module, "pack")
    run = module.PPOTrainer({"name": "usable"})
    run._setup()
    metrics: dict[str, int] = {}
    assert run._balance_batch(["a"], metrics, prefix="p/") == ["a", "padding"]
    assert metrics == {"p/seen": 1}
    assert module.calls == [
        ("session", "usable", "pack"),
        ("workers", ["w0"], "run"),
        ("step", ["a", "padding"], metrics, "queue", ["w0"]),
    ]


def test_observing_asks_no_workers(module: Any) -> None:
    """They are not changed, so there is nothing to check."""
    patch(module, "observe")
    module.PPOTrainer({"name": "usable"})._setup()
    assert module.calls == [("session", "usable", "observe")]


def test_without_a_session_the_trainer_is_verls(module: Any) -> None:
    """Where a run was found unusable, or a subclass does without verl's `__init__`."""

    patch(module, "observe")
    bare = object.__new__(module.PPOTrainer)
    bare.config = {}
    for run in (module.PPOTrainer({"name": "unusable"}), bare):
        run._setup()
        assert run._balance_batch([], {}) == ["padding"]
    assert module.calls == [("session", "unusable", "observe")]


def test_older_trainers_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    """At launch when packing; when observing they run, and it is said."""
    message = "trainer.use_v1 = False: expected true; older trainers are not supported"
    for mode in ("pack", "observe"):
        module = SimpleNamespace(RayPPOTrainer=type("RayPPOTrainer", (PPOTrainer,), {}))
        patch_legacy(module, mode)
        if mode == "pack":
            with pytest.raises(InputError) as error:
                module.RayPPOTrainer({})
            assert str(error.value) == message
        else:
            assert module.RayPPOTrainer({"name": "old"}).config == {"name": "old"}
    assert caplog.messages == [f"routepack is off: {message}"]


def test_an_unusable_run_is_refused_or_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Packing stops before any model is made; observing goes on without."""
    stand_in = SimpleNamespace(
        OmegaConf=SimpleNamespace(to_container=lambda config, resolve: config)
    )
    monkeypatch.setitem(sys.modules, "omegaconf", stand_in)
    config = config_of(**{"actor_rollout_ref.actor.shuffle": True})
    with pytest.raises(InputError, match=r"^actor_rollout_ref\.actor\.shuffle = True: expected"):
        session_for(config, "pack")
    assert session_for(config, "observe") is None
    assert session_for({}, "observe") is None  # a configuration unlike any that is known
    assert len(caplog.messages) == 2
    assert all(message.startswith("routepack is off: ") for message in caplog.messages)
    assert session_for(config_of(), "pack") is not None
