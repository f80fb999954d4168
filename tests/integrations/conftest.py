"""Fixtures of the rollout trainers' tests."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest

from integrations.trainer_helpers import (
    Logged,
)
from routepack.integrations import miles


@pytest.fixture(params=["slime", "miles"])
def trainer(request: pytest.FixtureRequest) -> Iterator[str]:
    """Either trainer."""
    before = sys.modules.pop(miles.MODULE, None)
    yield request.param
    sys.modules.pop(miles.MODULE, None)
    if before is not None:
        sys.modules[miles.MODULE] = before


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Logged:
    """What the trainers' loggers are given."""
    logged = Logged()
    module = types.ModuleType("a_logger")
    vars(module)["log"] = logged
    monkeypatch.setitem(sys.modules, "a_logger", module)
    return logged
