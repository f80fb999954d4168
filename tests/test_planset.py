"""A set of plans of several steps: its file, and its verification."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from routepack import (
    InputError,
    PlanSet,
    Requirements,
)
from routepack.verify import verify_set
from step_helpers import (
    LOG_PROBS,
    WINDOW,
    batch,
    made,
)

# The file


def test_a_set_is_read_as_written() -> None:
    """Canonical bytes: the placement once, sorted keys, a final newline; read back they are the
    set, requirements included."""
    required = Requirements(uniform_rows=True, rows_multiple_of=2)
    found = made(np.arange(24) // 8, passes=[LOG_PROBS], requirements=required, token_cap=70)
    data = found.to_bytes()
    fields = json.loads(data)
    assert sorted(fields) == ["format", "passes", "placement", "plans", "window"]
    assert fields["format"] == "routepack.planset/1"
    assert "placement" not in fields["plans"][0]
    assert data == json.dumps(fields, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    again = PlanSet.from_bytes(data)
    assert again.to_bytes() == data
    assert again.plans[1].requirements == required
    assert verify_set(WINDOW, again) == []
    assert b"seconds" not in data


def edited(edit: Callable[[dict[str, Any]], Any]) -> bytes:
    fields = json.loads(made(2).to_bytes())
    edit(fields)
    return json.dumps(fields).encode()


BROKEN_FILES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "format": (
        lambda f: f.update(format="routepack.plan/1"),
        "x.json: format = 'routepack.plan/1': expected 'routepack.planset/1'",
    ),
    "missing key": (
        lambda f: f.pop("passes"),
        "x.json: passes: expected exactly the keys format, passes, placement, plans, window",
    ),
    "unknown key": (
        lambda f: f.update(stats={}),
        "x.json: stats: expected exactly the keys format, passes, placement, plans, window",
    ),
    "no plans": (lambda f: f.update(plans=[]), "x.json: plans: expected at least one"),
    "passes": (lambda f: f.update(passes=[]), "x.json: passes: expected an object"),
    "a placement each": (
        lambda f: f["plans"][1].update(placement=f["placement"]),
        "x.json: plans[1]: expected a plan without a placement",
    ),
    "a plan": (
        lambda f: f["plans"][1].update(token_cap="60"),
        "x.json: plans[1]: expected a plan file, Expected `int`, got `str` - at `$.token_cap`",
    ),
    "a method": (
        lambda f: f["plans"][0].update(method="best"),
        "x.json: plans[0]: method = best: expected one of baseline, reorder, kk, reorder-kk, "
        "expert-only, attention-only, routepack",
    ),
    "window": (
        lambda f: f.update(window={}),
        "x.json: window: expected a window's key, Object missing required field `samples`",
    ),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_a_file_that_is_no_set_is_told(case: str) -> None:
    """One line that names the file and what is wrong in it."""
    edit, message = BROKEN_FILES[case]
    with pytest.raises(InputError) as error:
        PlanSet.from_bytes(edited(edit), "x.json")
    assert str(error.value) == message


@pytest.mark.parametrize(("data", "found"), [(b"[]", "'list'"), (b"{}", "None"), (b"3", "'int'")])
def test_json_that_is_no_set_is_told(data: bytes, found: str) -> None:
    """Whatever the JSON is."""
    with pytest.raises(InputError) as error:
        PlanSet.from_bytes(data)
    assert str(error.value) == f"planset: format = {found}: expected 'routepack.planset/1'"


def test_text_that_is_no_json_is_told() -> None:
    """With the place where it stops to be JSON."""
    with pytest.raises(InputError) as error:
        PlanSet.from_bytes(b"{")
    assert "planset: expected a planset file in JSON, Expecting property name" in str(error.value)


# Verification of a set


def with_plan(found: PlanSet, k: int, **fields: Any) -> PlanSet:
    plans = list(found.plans)
    plans[k] = msgspec.structs.replace(plans[k], **fields)
    return msgspec.structs.replace(found, plans=tuple(plans))


def test_what_is_broken_is_told_with_its_step() -> None:
    """Another window, a sample in two steps or in none, two placements, a wrong claim."""
    found = made(2)
    assert verify_set(batch(22), found) == [
        "window: expected the one that the planset was made for, found another"
    ]
    first, other = found.samples_of(0)[0], found.plans[1]
    stolen = (((int(first),), *other.rows[0][1:]), *other.rows[1:])
    assert verify_set(WINDOW, with_plan(found, 1, rows=stolen))[0] == (
        f"plans[1]: rows = {first}: expected a sample in 0..23, in one step only"
    )
    fewer = msgspec.structs.replace(found, plans=found.plans[:1])
    absent = int(found.samples_of(1)[0])
    assert verify_set(WINDOW, fewer) == [
        f"plans = no sample {absent}: expected each sample in a step"
    ]
    moved = tuple(tuple(reversed(slots)) for slots in other.placement)
    assert verify_set(WINDOW, with_plan(found, 1, placement=moved))[0] == (
        "placement: expected one for all plans"
    )
    score = msgspec.structs.replace(other.score, total=1.0)
    lines = verify_set(WINDOW, with_plan(found, 1, score=score))
    assert lines == [f"plans[1]: score.total = 1.0: expected {other.score.total!r}"]
