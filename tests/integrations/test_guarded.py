"""A plan never stops a step: every outcome has its counter, and every failure one warning."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest

from routepack import InputError
from routepack.integrations.guarded import OUTCOMES, Guard, Made, Stop, Task

KEPT = "this step keeps the trainer's own layout: "


def counted(guard: Guard) -> dict[str, int]:
    """The outcomes that happened."""
    assert list(guard.totals) == list(OUTCOMES)
    return {name: count for name, count in guard.totals.items() if count}


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_a_result_is_given_back(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is said where nothing is wrong."""
    guard = Guard()
    result = object()
    assert guard.attempt(lambda stop: Made("key", result)) is result
    assert counted(guard) == {"planned": 1}
    assert warned(caplog) == []


def _refuse(stop: Stop) -> Made[int]:
    raise InputError.at("lengths", 9, "at most the token cap 8", 3)


def _fail(stop: Stop) -> Made[int]:
    raise KeyError("missing")


def _exit(stop: Stop) -> Made[int]:
    raise SystemExit


@pytest.mark.parametrize(
    ("make", "outcome", "reason"),
    [
        (_refuse, "declined", "lengths[3] = 9: expected at most the token cap 8"),
        (_fail, "errors", "KeyError: 'missing'"),
        (_exit, "errors", "SystemExit"),
    ],
)
def test_a_failure_is_one_warning_and_one_count(
    make: Callable[[Stop], Made[int]],
    outcome: str,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And no result."""
    guard = Guard()
    assert guard.attempt(make) is None
    assert counted(guard) == {outcome: 1}
    assert warned(caplog) == [KEPT + reason]


def test_what_is_late_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    """The step goes on at the deadline. While the late plan is still being made, further steps do
    not wait for it; then all is as before."""
    guard = Guard(deadline_seconds=0.1)
    asked, release = threading.Event(), threading.Event()

    def hang(stop: Stop) -> Made[int]:
        while not stop():
            time.sleep(0.01)
        asked.set()
        release.wait(10)
        return Made("late", 1)

    began = time.perf_counter()
    assert guard.attempt(hang) is None
    assert time.perf_counter() - began < 5
    assert asked.wait(10)
    began = time.perf_counter()
    assert guard.attempt(lambda stop: Made("next", 2)) is None
    assert time.perf_counter() - began < 5
    release.set()
    for _ in range(1000):
        if guard.attempt(lambda stop: Made("then", 3)) == 3:
            break
        time.sleep(0.01)
    else:
        pytest.fail("the late plan was never over")
    assert guard.totals["planned"] == 1
    assert warned(caplog)[:2] == [
        f"{KEPT}no plan after 0.1 s",
        f"{KEPT}the plan of an earlier step is still being made",
    ]


def test_no_thread_is_a_failure_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks are asked all the same."""
    asked: list[str | None] = []

    def all_agree(key: str | None) -> bool:
        asked.append(key)
        return False

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    guard = Guard(all_agree)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert guard.attempt(lambda stop: Made("key", 1)) is None
    assert asked == [None]
    assert counted(guard) == {"errors": 1}
    assert warned(caplog) == [f"{KEPT}RuntimeError: can't start new thread"]


# Agreement: called once for each step, whatever happened


def test_agreement_gets_the_key_or_none() -> None:
    """Each attempt asks once: with the key of what was made, with None where nothing was."""
    asked: list[str | None] = []

    def all_agree(key: str | None) -> bool:
        asked.append(key)
        return key is not None

    guard = Guard(all_agree)
    assert guard.attempt(lambda stop: Made("a key", 5)) == 5
    assert guard.attempt(_fail) is None
    assert guard.attempt(_refuse) is None
    assert asked == ["a key", None, None]
    assert counted(guard) == {"planned": 1, "declined": 1, "errors": 1}


def test_disagreement_keeps_the_own_layout(caplog: pytest.LogCaptureFixture) -> None:
    """A rank whose plan is fine warns that another's is not; one whose own failed says why."""
    guard = Guard(lambda key: False)
    assert guard.attempt(lambda stop: Made("key", 5)) is None
    assert guard.attempt(_fail) is None
    assert counted(guard) == {"disagreed": 1, "errors": 1}
    assert warned(caplog) == [
        f"{KEPT}another rank has no plan, or a different one",
        f"{KEPT}KeyError: 'missing'",
    ]


def test_ranks_that_cannot_be_asked_are_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    """After a collective that failed nothing is planned, and there is no further warning."""
    asked = []

    def all_agree(key: str | None) -> bool:
        asked.append(key)
        raise RuntimeError("Timed out waiting 20000ms")

    guard = Guard(all_agree)
    made = []

    def make(stop: Stop) -> Made[int]:
        made.append(1)
        return Made("key", 5)

    assert guard.attempt(make) is None
    assert guard.attempt(make) is None
    assert guard.attempt(make) is None
    assert (asked, made) == (["key"], [1])
    assert counted(guard) == {"unreachable": 3}
    assert warned(caplog) == [
        f"{KEPT}the ranks could not agree, and will not be asked again: RuntimeError: Timed out "
        f"waiting 20000ms"
    ]


def test_a_task_lets_go_of_what_it_was_given() -> None:
    """Routes are held while they are counted, and no longer."""
    import gc
    import weakref

    class Routes:
        """Something that can be watched."""

    routes = Routes()
    seen = weakref.ref(routes)

    def call(stop: Stop, routes: Routes = routes) -> int:
        return id(routes)

    task = Task(call)
    del call, routes
    assert task.wait(10)
    gc.collect()
    assert seen() is None
