"""A plan must never stop a step: failures, deadlines, and one mind across ranks.

Where every rank plans for itself, one rank with a different layout would deadlock the next
collective. So each rank calls `all_agree` once a step, whatever happened to its own plan: with the
key of its layout, or with None where it has none. It returns True only where every rank passed the
same key, and otherwise every rank keeps the trainer's own layout. Where one process makes the
schedule for all ranks (slime, miles), there is nothing to agree on.

A rank whose planner is late reports None, and does not make the others wait. If the collective
itself fails, the group is not used again: from then on this rank keeps the trainer's own layout, as
do the others, since the collective fails for them too.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar

from routepack.errors import InputError

logger = logging.getLogger("routepack")
T = TypeVar("T")
AllAgree = Callable[[str | None], bool]
Stop = Callable[[], bool]

PLANNED, DECLINED, ERRORS, LATE = "planned", "declined", "errors", "late"
DISAGREED, UNREACHABLE = "disagreed", "unreachable"
OUTCOMES = (PLANNED, DECLINED, ERRORS, LATE, DISAGREED, UNREACHABLE)
"""Of a step: it was planned; its input cannot be; the planner raised; it passed the deadline;
another rank has no plan, or a different one; the ranks could not be asked."""


@dataclass(frozen=True)
class Made(Generic[T]):
    """A result and the key that says whether another rank has the same one."""

    key: str
    result: T


class Task(Generic[T]):
    """A call on a thread of its own, which no one has to wait for."""

    def __init__(self, call: Callable[[Stop], T]) -> None:
        self._call = call
        self._stop = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None
        # a daemon: a planner that hangs must not keep the process
        self._thread = threading.Thread(target=self._run, name="routepack", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.result = self._call(self._stop.is_set)
        except BaseException as error:  # handed to whoever waits
            self.error = error
        del self._call  # and the routes that it holds

    @property
    def running(self) -> bool:
        """Whether the call has not returned yet."""
        return self._thread.is_alive()

    def wait(self, seconds: float | None) -> bool:
        """Whether the call has returned within `seconds`; if not, it is asked to stop."""
        self._thread.join(seconds)
        finished = not self.running
        if not finished:
            self._stop.set()
        return finished


class Guard:
    """Runs `make` for a step, and counts what came of it.

    all_agree          a collective, called exactly once for each attempt; None for one process
    deadline_seconds   how long a step waits for its plan
    """

    def __init__(self, all_agree: AllAgree | None = None, deadline_seconds: float = 60.0) -> None:
        self._all_agree = all_agree
        self._deadline_seconds = deadline_seconds
        self._last: Task[Any] | None = None
        self._reachable = True
        self.totals: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))

    def attempt(self, make: Callable[[Stop], Made[T]]) -> T | None:
        """The result of `make`, or None on every rank alike; never raises what `make` raises."""
        if not self._reachable:
            self.totals[UNREACHABLE] += 1
            return None
        made, outcome, reason = self._local(make)
        if self._all_agree is not None:
            try:
                agreed = bool(self._all_agree(made.key if made else None))
            except Exception as error:
                self._reachable = False
                agreed, outcome = False, UNREACHABLE
                reason = f"the ranks could not agree, and will not be asked again: {_line(error)}"
            if not agreed and outcome == PLANNED:
                outcome, reason = DISAGREED, "another rank has no plan, or a different one"
        self.totals[outcome] += 1
        if outcome == PLANNED:
            assert made is not None
            return made.result
        logger.warning("this step keeps the trainer's own layout: %s", reason)
        return None

    def _local(self, make: Callable[[Stop], Made[T]]) -> tuple[Made[T] | None, str, str]:
        """What this rank has to offer, the outcome, and why there is nothing."""
        if self._last is not None and self._last.running:
            return None, LATE, "the plan of an earlier step is still being made"
        try:
            task: Task[Made[T]] = Task(make)
        except RuntimeError as error:  # no thread is to be had
            return None, ERRORS, _line(error)
        self._last = task
        if not task.wait(self._deadline_seconds):
            return None, LATE, f"no plan after {self._deadline_seconds:g} s"
        if isinstance(task.error, InputError):
            return None, DECLINED, str(task.error)
        if task.error is not None:
            logger.debug("planning failed", exc_info=task.error)
            return None, ERRORS, _line(task.error)
        return task.result, PLANNED, ""


def torch_agreement(group: Any = None, timeout_seconds: float = 300.0) -> AllAgree:
    """`all_agree` on a torch.distributed process group with a CPU backend such as gloo.

    Two rounds: the keys, then whether each rank saw them all. A rank that timed out in the first
    does not enter the second, so that the others fail there too instead of going ahead. Keep
    `timeout_seconds` above the guard's deadline.
    """
    import torch
    import torch.distributed as dist

    def gather(mine: torch.Tensor) -> list[torch.Tensor]:
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        work = dist.all_gather(everyone, mine, group=group, async_op=True)
        work.wait(timedelta(seconds=timeout_seconds))
        return everyone

    def all_agree(key: str | None) -> bool:
        digest = hashlib.sha256(key.encode()).digest() if key is not None else bytes(32)
        mine = torch.tensor([int(key is not None), *digest], dtype=torch.uint8)
        keys = gather(mine)
        same = all(bool(other[0]) and torch.equal(other, mine) for other in keys)
        verdicts = gather(torch.tensor([int(same)], dtype=torch.uint8))
        return all(bool(verdict[0]) for verdict in verdicts)

    return all_agree


def _line(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
