"""What a plan may cost: seconds of wall-clock time, or a number of proposals for equal bytes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from routepack.errors import InputError

FIRST_SWEEP = 1_000  # proposals from which the speed of a phase is measured
LONGEST_SWEEP = 2_000_000  # keeps a step short beside any deadline's slack
LEAST_SECONDS = 0.001  # less than this is left unused


@dataclass(frozen=True)
class Budget:
    """Either `seconds`, from the entry of plan(), or `evaluations`, moves proposed by the search.

    With `evaluations` every stage is counted in iterations, and a plan is the same bytes on any
    number of threads. Raises InputError.
    """

    seconds: float | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.evaluations is None):
            raise InputError("budget: expected either seconds or evaluations")
        seconds = self.seconds
        if seconds is not None and not (
            isinstance(seconds, (int, float)) and math.isfinite(seconds) and seconds > 0
        ):
            raise InputError.at("seconds", repr(seconds), "a finite number above 0")
        evaluations = self.evaluations
        if evaluations is None:
            return
        whole = isinstance(evaluations, (int, np.integer)) and not isinstance(evaluations, bool)
        if not whole or evaluations < 0:
            raise InputError.at("evaluations", repr(evaluations), "a whole number of at least 0")
        object.__setattr__(self, "evaluations", int(evaluations))


@dataclass
class Meter:
    """How much of a budget the search has spent."""

    budget: Budget
    started: float  # time.perf_counter() at the entry of plan()
    reserve_seconds: float = 0.0  # kept for what follows the search
    evaluations: int = 0
    search_started: float = field(default_factory=time.perf_counter)

    def spend(self, evaluations: int) -> None:
        """Count proposed moves."""
        self.evaluations += evaluations

    @property
    def spent(self) -> float:
        """Share of the search's budget that is spent, 0 to 1."""
        if self.budget.evaluations is not None:
            return min(1.0, self.evaluations / max(1, self.budget.evaluations))
        if self.search_seconds <= 0:
            return 1.0
        return min(1.0, (time.perf_counter() - self.search_started) / self.search_seconds)

    def leaves(self, until: float, seconds: float) -> bool:
        """Whether a deadline leaves so many seconds once a share of the budget is spent."""
        return self.budget.seconds is None or (1 - until) * self.search_seconds >= seconds

    @property
    def search_seconds(self) -> float:
        """Seconds between the start of the search and its deadline."""
        assert self.budget.seconds is not None
        return self.started + self.budget.seconds - self.reserve_seconds - self.search_started


@dataclass
class Phase:
    """A part of the search, up to a share of its budget, spent in steps of equal tasks."""

    meter: Meter
    until: float  # share of the whole budget
    start: float = field(init=False)
    evaluations: int = 0
    step_started: float = 0.0
    speed: float = 0.0  # proposals a second in the last step

    def __post_init__(self) -> None:
        self.start = self.meter.spent

    @property
    def progress(self) -> float:
        """Share of this phase that is spent, 0 to 1."""
        if self.until <= self.start:
            return 1.0
        return min(1.0, max(0.0, (self.meter.spent - self.start) / (self.until - self.start)))

    def next_step(self, workers: int, steps: int) -> int:
        """Proposals for each worker in the next of about `steps` steps; 0 ends the phase."""
        budget = self.meter.budget.evaluations
        if budget is not None:
            whole = round((self.until - self.start) * budget)
            return min((whole - self.evaluations) // workers, max(1, whole // (workers * steps)))
        # what came before the search may have passed the deadline: then no seconds are left
        left = (self.until - self.meter.spent) * max(0.0, self.meter.search_seconds)
        if left <= LEAST_SECONDS:
            return 0
        self.step_started = time.perf_counter()
        if self.evaluations == 0:
            return FIRST_SWEEP
        step = (self.until - self.start) * self.meter.search_seconds / steps
        # just short of the end, so that the last step does not pass it
        return max(1, min(LONGEST_SWEEP, int(self.speed / workers * min(step, 0.9 * left))))

    def spend(self, evaluations: int) -> None:
        """Count proposed moves."""
        self.evaluations += evaluations
        self.speed = evaluations / max(1e-9, time.perf_counter() - self.step_started)
        self.meter.spend(evaluations)
