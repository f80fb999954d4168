"""What a plan may cost: seconds of wall-clock time, or a number of proposals for equal bytes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from routepack.errors import InputError

FIRST_SWEEP = 2_000  # proposals of the sweep from which the speed is measured
LEAST_SECONDS = 0.002  # less than this is left unused
LONGEST_SWEEP = 2_000_000  # keeps a step short beside any deadline's slack


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
        if self.seconds is not None and not (math.isfinite(self.seconds) and self.seconds > 0):
            raise InputError.at("seconds", self.seconds, "a finite number above 0")
        evaluations = self.evaluations
        if evaluations is not None and (isinstance(evaluations, bool) or evaluations < 0):
            raise InputError.at("evaluations", evaluations, "a whole number of at least 0")


@dataclass
class Meter:
    """Spends a budget in sweeps of one length for all chains of a temperature step."""

    budget: Budget
    started: float  # time.perf_counter() at the entry of plan()
    evaluations: int = 0
    search_started: float = field(default_factory=time.perf_counter)

    @property
    def progress(self) -> float:
        """Share of the search budget that is spent, 0 to 1."""
        if self.budget.evaluations is not None:
            return min(1.0, self.evaluations / max(1, self.budget.evaluations))
        assert self.budget.seconds is not None
        available = self.started + self.budget.seconds - self.search_started
        if available <= 0:
            return 1.0
        return min(1.0, (time.perf_counter() - self.search_started) / available)

    def next_sweep(self, chains: int, steps: int, threads: int) -> int:
        """Proposals per chain in the next step of about `steps` in all; 0 when the budget is spent."""
        if self.budget.evaluations is not None:
            left = (self.budget.evaluations - self.evaluations) // chains
            return min(left, max(1, self.budget.evaluations // (chains * steps)))
        assert self.budget.seconds is not None
        now = time.perf_counter()
        left = self.started + self.budget.seconds - now
        if left <= LEAST_SECONDS:
            return 0
        if self.evaluations == 0:
            return FIRST_SWEEP
        speed = self.evaluations / (now - self.search_started) / chains
        available = self.started + self.budget.seconds - self.search_started
        # the last step is shortened to end inside the deadline
        return max(1, min(LONGEST_SWEEP, int(speed * min(available / steps, 0.9 * left))))

    def spend(self, evaluations: int) -> None:
        self.evaluations += evaluations
