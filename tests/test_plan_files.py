"""Plans on disk: canonical bytes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from file_helpers import refusal
from routepack.cost import AttentionStage, CostModel
from routepack.files import read_plan, write_plan
from routepack.plan import METHODS, Certificate, Plan, Score, Search, TopologyKey, WindowKey

PLAN = Plan(
    window=WindowKey(samples=2, layers=1, experts=2, top_k=1, sha256="ab"),
    topology=TopologyKey(dp=1, ep=2, edp=1, tp=1, cp=1, pp=1, etp=1, order="tp-cp-ep-dp-pp"),
    token_cap=8,
    cost_model=CostModel((AttentionStage("full", 1.0, 0.1),)),
    method="reorder",
    placement=((1, 0),),
    rows=(((0,),), ((1,),)),
    certificate=Certificate(2, True, "volume", 1.5, "analytic", 1e-07),
    score=Score(1.0, 1.0, 0.1 + 0.2, 1e22, 5e-324),
    search=Search(seed=2**63 - 1, evaluations=0, chains=0),
    stats={"planning_seconds": 0.25},
)
# Sorted keys, no spaces, floats by repr, a newline at the end, no stats.
PLAN_BYTES = (
    b'{"certificate":{"cost_bound_method":"analytic","cost_lower_bound":1.5,"gap":1e-07,'
    b'"rows_certified":true,"rows_lower_bound":2,"rows_method":"volume"},'
    b'"cost_model":{"attention":[{"linear":1.0,"name":"full","quadratic":0.1}],"expert":1.0,'
    b'"normalise":"cap"},"format":"routepack.plan/1","method":"reorder","placement":[[1,0]],'
    b'"rows":[[[0]],[[1]]],"score":{"attention":1e+22,"expert":5e-324,"slowest_shard":1.0,'
    b'"total":1.0,"worst_row":0.30000000000000004},"search":{"chains":0,"evaluations":0,'
    b'"seed":9223372036854775807},"token_cap":8,"topology":{"cp":1,"dp":1,"edp":1,"ep":2,'
    b'"etp":1,"order":"tp-cp-ep-dp-pp","pp":1,"tp":1},'
    b'"window":{"experts":2,"layers":1,"samples":2,"sha256":"ab","top_k":1}}\n'
)


def test_plan_bytes_are_canonical() -> None:
    """The bytes of a plan are these; statistics of the run are no part of them."""
    assert PLAN.to_bytes() == PLAN_BYTES


def test_plans_are_read_as_written(tmp_path: Path) -> None:
    """A round trip keeps every field but the statistics, floats to the last bit."""
    path = tmp_path / "plan.json"
    write_plan(path, PLAN)
    assert path.read_bytes() == PLAN_BYTES
    assert read_plan(path) == msgspec.structs.replace(PLAN, stats={})


def test_a_plan_without_a_finite_number_cannot_be_written() -> None:
    """A NaN is no JSON: it is refused instead of written."""
    broken = msgspec.structs.replace(PLAN, score=Score(float("nan"), 1.0, 1.0, 1.0, 1.0))
    with pytest.raises(ValueError, match="Out of range float values are not JSON compliant"):
        broken.to_bytes()


def plan_text(**changes: Any) -> str:
    """The plan above as JSON with fields replaced, or left out where None."""
    fields = json.loads(PLAN_BYTES) | changes
    return json.dumps({k: v for k, v in fields.items() if v is not None})


BAD_PLANS = {
    "no JSON": ("rows", "expected a plan file in JSON, Expecting value: line 1 column 1 (char 0)"),
    "another version": (
        plan_text(format="routepack.plan/2"),
        "format = 'routepack.plan/2': expected 'routepack.plan/1'",
    ),
    "no format": (plan_text(format=None), "format = None: expected 'routepack.plan/1'"),
    "a list": ("[]", "format = 'list': expected 'routepack.plan/1'"),
    "a number": ("1", "format = 'int': expected 'routepack.plan/1'"),
    "a field too few": (
        plan_text(rows=None),
        "expected a plan file, Object missing required field `rows`",
    ),
    "a field too many": (
        plan_text(note="x"),
        "expected a plan file, Object contains unknown field `note`",
    ),
    "statistics": (
        plan_text(stats={}),
        "expected a plan file, Object contains unknown field `stats`",
    ),
    "a field too many inside": (
        plan_text(search={"seed": 0, "evaluations": 0, "chains": 0, "threads": 1}),
        "expected a plan file, Object contains unknown field `threads` - at `$.search`",
    ),
    "half a sample": (
        plan_text(rows=[[[0.5]]]),
        "expected a plan file, Expected `int`, got `float` - at `$.rows[0][0][0]`",
    ),
    "a number as text": (
        plan_text(token_cap="8"),
        "expected a plan file, Expected `int`, got `str` - at `$.token_cap`",
    ),
    "another method": (
        plan_text(method="magic"),
        f"method = magic: expected one of {', '.join(METHODS)}",
    ),
    "a bad cost model": (
        plan_text(cost_model={"attention": []}),
        "expected a plan file, attention: expected at least one [[attention]] stage "
        "- at `$.cost_model`",
    ),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_bad_plans_are_named(case: str, tmp_path: Path) -> None:
    """One line says which field and what was expected."""
    text, message = BAD_PLANS[case]
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert refusal(path, read_plan) == message


def test_truncated_plans_are_refused(tmp_path: Path) -> None:
    """Cut after any byte but the last, the newline, a plan file is refused."""
    path = tmp_path / "plan.json"
    for size in range(0, len(PLAN_BYTES) - 1, 7):
        path.write_bytes(PLAN_BYTES[:size])
        assert refusal(path, read_plan).startswith("expected a plan file in JSON, ")
    path.write_bytes(b"\xff\xfe" + PLAN_BYTES)
    assert refusal(path, read_plan).startswith("expected a plan file in JSON, ")
