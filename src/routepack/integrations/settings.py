"""What a user sets, in the file or mapping that a trainer hands over."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import msgspec

from routepack.budget import Budget
from routepack.cost import DEFAULT, CostModel
from routepack.errors import InputError

Mode = Literal["off", "observe", "pack"]
Log = Callable[[dict[str, float], int], object]


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of an integration; every one has a default, and the default mode is off.

    mode                 off changes nothing and looks at nothing, observe changes nothing and logs,
                         pack replaces the trainer's micro-batches
    seconds              planning budget of a step, all its optimizer steps together (default 1)
    evaluations          a budget in proposed moves instead: the same plan on every rank and machine
    seed                 of the search
    threads              default: the CPUs this process may use
    deadline_seconds     how long a step waits for its plan before it runs without
    cost_model           path of a cost model in TOML; default: one stage linear 60, quadratic 20
    with_placement       when observing, also plan with experts placed anew, as a second ratio
    allow_changed_loss   pack although a setting of the trainer makes its loss depend on packing
    logger               dotted path of a function that is called with a flat dict of numbers and
                         the trainer's number of the step; default: the trainer's own logger
    """

    mode: Mode = "off"
    seconds: float | None = None
    evaluations: int | None = None
    seed: int = 0
    threads: int | None = None
    deadline_seconds: float = 60.0
    cost_model: str | None = None
    with_placement: bool = True
    allow_changed_loss: bool = False
    logger: str | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any] | None) -> Settings:
        """Read a mapping; None is off. Raises InputError, one line, also for unknown keys."""
        try:
            read = msgspec.convert(dict(settings or {}), cls, strict=True)
        except msgspec.ValidationError as error:
            raise InputError(f"routepack: expected its settings, {error}") from None
        read.budget()
        if not read.deadline_seconds > 0:
            expected = "a number of seconds above 0"
            raise InputError.at("routepack.deadline_seconds", read.deadline_seconds, expected)
        return read

    def budget(self) -> Budget:
        """Of one step. Raises InputError."""
        if self.seconds is None and self.evaluations is None:
            return Budget(seconds=1.0)
        return Budget(seconds=self.seconds, evaluations=self.evaluations)

    def costs(self) -> CostModel:
        """The cost model. Raises InputError for a file that cannot be read."""
        return CostModel.from_toml(self.cost_model) if self.cost_model else DEFAULT

    def log_function(self) -> Log | None:
        """The function at `logger`, or None. Raises InputError where there is none."""
        if self.logger is None:
            return None
        module, _, name = self.logger.rpartition(".")
        try:
            return cast("Log", getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError, ValueError) as error:
            expected = f"the dotted path of a function, {error}"
            raise InputError.at("routepack.logger", self.logger, expected) from None
