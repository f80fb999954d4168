"""A step of any trainer: leave it alone, observe it, or replace its micro-batches by a plan's.

A plan is used only where its layout keeps every invariant and is predicted to be faster than the
trainer's own. Whatever fails on the way, the step gets the trainer's own layout back, as the very
object that it gave.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from routepack.budget import Budget
from routepack.cost import DEFAULT, CostModel
from routepack.errors import InputError
from routepack.integrations.guarded import (
    DECLINED,
    ERRORS,
    PLANNED,
    AllAgree,
    Guard,
    Made,
    Stop,
    Task,
)
from routepack.integrations.layout import Cells
from routepack.integrations.observe import PREFIX, Metrics
from routepack.integrations.planning import Planner
from routepack.topology import Topology
from routepack.window import Window

logger = logging.getLogger("routepack")
Log = Callable[[Metrics], object]
MakeWindow = Callable[[], Window]
MODES = ("off", "observe", "pack")


class Packer:
    """Observes or packs the steps of a trainer.

    topology          the trainer's DP and EP ranks
    token_cap         tokens of a micro-batch on one DP rank
    mode              "off", "observe" or "pack"
    cost_model        default: one stage linear 60, quadratic 20, expert 1
    budget            of all optimizer steps of a call together; default one second. With
                      `all_agree` in evaluations, as ranks that plan for seconds never agree
    placement         [L, E] slots that the trainer's experts are in; default: contiguous
    rows_multiple_of  micro-batches a rank come in multiples of this (virtual pipeline)
    all_agree         see `guarded`; None where one process makes the schedule of all ranks
    deadline_seconds  how long a step waits for its plan
    with_placement    when observing, also plan with experts placed anew
    seed, threads     as in `routepack.plan`

    With a mode other than "off" this loads the kernels, and compiles them after an installation.
    Raises InputError.
    """

    def __init__(
        self,
        topology: Topology,
        token_cap: int,
        *,
        mode: str = "pack",
        cost_model: CostModel | None = None,
        budget: Budget | None = None,
        placement: NDArray[np.int32] | None = None,
        rows_multiple_of: int = 1,
        all_agree: AllAgree | None = None,
        deadline_seconds: float = 60.0,
        with_placement: bool = True,
        seed: int = 0,
        threads: int | None = None,
    ) -> None:
        if mode not in MODES:
            raise InputError.at("mode", repr(mode), "one of " + ", ".join(MODES))
        budget = budget or Budget(seconds=1.0)
        if all_agree is not None and budget.seconds is not None:
            expected = "a budget in evaluations, as ranks that plan for seconds never agree"
            raise InputError.at("budget.seconds", budget.seconds, expected)
        self.mode = mode
        self.guard = Guard(all_agree, deadline_seconds)
        self._planner = Planner(
            topology,
            token_cap,
            cost_model or DEFAULT,
            budget,
            placement,
            rows_multiple_of,
            seed,
            threads,
        )
        self._with_placement = with_placement
        self._observing: tuple[Task[Metrics], float, Log | None] | None = None
        self._unobserved = 0
        if mode != "off":
            topology.require_plannable()
            import routepack.planner  # noqa: F401  # outside any deadline, as it may compile

    def step(
        self, window: Window | MakeWindow, own: Sequence[Cells], log: Log | None = None
    ) -> Sequence[Cells]:
        """The rows [M][D] of each optimizer step: a plan's, or else `own` itself.

        window  the samples of all the optimizer steps, or what makes it: called on another thread,
                so that it may count routes; an error that it raises is a plan that failed
        own     the trainer's rows of each optimizer step, in samples of the window
        log     called with a flat dict of numbers: when packing at once, when observing during a
                later call or `flush`, as a step never waits to be observed
        """
        if self.mode == "off":
            return own
        began = time.perf_counter()
        if self.mode == "observe":
            self._observe(window, own, log, began)
            return own
        packed = self.guard.attempt(lambda stop: self._pack(window, own, stop))
        metrics: Metrics = {}
        if packed is not None:
            metrics, own = packed
        self._log(log, metrics, time.perf_counter() - began)
        return own

    def flush(self, seconds: float | None = None) -> None:
        """Log the step that is being observed, waiting for it at most so long."""
        if self._observing is None:
            return
        task, blocked_seconds, log = self._observing
        if not task.wait(seconds):
            return
        self._observing = None
        error, metrics = task.error, task.result or {}
        if error is None:
            self.guard.totals[PLANNED] += 1
        else:
            self.guard.totals[DECLINED if isinstance(error, InputError) else ERRORS] += 1
            logger.warning("a step was not observed: %s", error)
        self._log(log, metrics, blocked_seconds)

    def _pack(
        self, window: Window | MakeWindow, own: Sequence[Cells], stop: Stop
    ) -> Made[tuple[Metrics, Sequence[Cells]]]:
        counted, counting = _made(window)
        compared = self._planner.compare(counted, own, stop)
        rows = compared.rows if compared.packed_steps else own
        return Made(compared.key, (counting | compared.metrics, rows))

    def _observe(
        self, window: Window | MakeWindow, own: Sequence[Cells], log: Log | None, began: float
    ) -> None:
        self.flush(0)
        if self._observing is not None:
            self._unobserved += 1
            return

        def look(stop: Stop) -> Metrics:
            counted, metrics = _made(window)
            compared = self._planner.compare(counted, own, stop)
            metrics |= compared.metrics
            if self._with_placement:
                metrics |= self._planner.with_placement(compared, stop)
            return metrics

        task = Task(look)
        self._observing = task, time.perf_counter() - began, log

    def _log(self, log: Log | None, metrics: Metrics, blocked_seconds: float) -> None:
        """A logger that fails does not stop the step."""
        if log is None:
            return
        totals = {f"{PREFIX}total/{name}": count for name, count in self.guard.totals.items()}
        totals[f"{PREFIX}total/unobserved"] = self._unobserved
        try:
            log({**metrics, f"{PREFIX}blocked_seconds": blocked_seconds, **totals})
        except Exception as error:
            logger.warning("the metrics of a step were not logged: %s", error)


def _made(window: Window | MakeWindow) -> tuple[Window, Metrics]:
    began = time.perf_counter()
    made = window() if callable(window) else window
    return made, {f"{PREFIX}counting_seconds": time.perf_counter() - began}
