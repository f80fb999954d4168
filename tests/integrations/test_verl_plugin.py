"""The switch, the version check, and changes to modules that are not imported yet."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from routepack.integrations.verl import plugin
from routepack.integrations.verl.hooks import when_imported
from routepack.integrations.verl.plugin import install, mode_of, worker_state


@pytest.mark.parametrize(
    ("value", "mode"),
    [(None, "off"), ("", "off"), ("off", "off"), (" Observe ", "observe"), ("pack", "pack")],
)
def test_the_switch(value: str | None, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Off unless asked for; nothing is said about a supported version."""
    environ = {} if value is None else {"ROUTEPACK_VERL": value}
    assert mode_of(environ, "0.9.1") == mode
    assert caplog.messages == []


def test_a_wrong_switch_is_off_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """One warning that names the variable, its value and what was expected."""
    assert mode_of({"ROUTEPACK_VERL": "on"}, "0.9.1") == "off"
    assert caplog.messages == [
        "routepack is off: ROUTEPACK_VERL = 'on': expected one of off, observe, pack"
    ]


def test_other_versions_stay_off(caplog: pytest.LogCaptureFixture) -> None:
    """One warning that names the version; nothing where the switch is off, or where forced."""
    for version in ("0.8.0", "0.10.0.dev0"):
        assert mode_of({"ROUTEPACK_VERL": "off"}, version) == "off"
        assert mode_of({"ROUTEPACK_VERL": "pack", "ROUTEPACK_VERL_FORCE": "1"}, version) == "pack"
    assert caplog.messages == []
    assert mode_of({"ROUTEPACK_VERL": "pack"}, "0.8.0") == "off"
    assert caplog.messages == [
        "routepack is off: verl 0.8.0: expected 0.9.0 or 0.9.1; ROUTEPACK_VERL_FORCE=1 tries it "
        "anyway"
    ]


def test_importing_the_package_changes_nothing() -> None:
    """In this process verl has loaded nothing: the plugin is off and no import is watched."""
    finders = list(sys.meta_path)
    install("off")
    assert sys.meta_path == finders
    assert plugin.MODE == "off"
    assert worker_state() == ("off", plugin.VERL_VERSION, False)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that is not imported yet; importing it counts in a file."""
    name = "routepack_test_module"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_a_module_is_changed_when_it_is_imported(module: str) -> None:
    """Not before, after its own code has run, once, and its loader is its own again."""
    finders = list(sys.meta_path)
    seen: list[ModuleType] = []

    def patch(found: ModuleType) -> None:
        seen.append(found)
        found.value += 1

    when_imported(module, patch)
    assert seen == []
    found = importlib.import_module(module)
    assert seen == [found]
    assert found.value == 2
    assert sys.meta_path == finders
    assert type(found.__loader__).__name__ == "SourceFileLoader"
    assert importlib.reload(found).value == 1


def test_an_imported_module_is_changed_at_once(module: str) -> None:
    """Also where the plugin is loaded late."""
    found = importlib.import_module(module)
    when_imported(module, lambda module: setattr(module, "value", 3))
    assert found.value == 3


def test_what_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observing leaves the workers' function alone; packing changes it too."""
    watched: list[str] = []
    monkeypatch.setattr(plugin, "when_imported", lambda name, patch: watched.append(name))
    install("observe")
    assert watched == [plugin.TRAINER, plugin.LEGACY_TRAINER]
    install("pack")
    assert watched[2:] == [plugin.TRAINER, plugin.LEGACY_TRAINER, plugin.ENGINE]


def test_warnings_go_to_a_logger_that_is_not_set_up() -> None:
    """A library adds no handlers and no levels."""
    logger = logging.getLogger("routepack.integrations.verl.plugin")
    assert logger.handlers == []
    assert logger.level == logging.NOTSET
