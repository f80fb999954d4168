"""Requirements in a plan file: there where something is required, and parsed as strictly as all."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.cost import AttentionStage, CostModel
from routepack.errors import InputError
from routepack.plan import Certificate, Plan, Score, Search, TopologyKey, WindowKey
from routepack.requirements import LARGEST, Requirements

PLAN = Plan(
    window=WindowKey(samples=2, layers=1, experts=2, top_k=1, sha256="ab"),
    topology=TopologyKey(dp=1, ep=2, edp=1, tp=1, cp=1, pp=1, etp=1, order="tp-cp-ep-dp-pp"),
    token_cap=8,
    cost_model=CostModel((AttentionStage("full", 1.0, 0.1),)),
    method="reorder",
    placement=((1, 0),),
    rows=(((0,),), ((1,),)),
    certificate=Certificate(2, True, "volume", 1.5, "analytic", 1e-07),
    score=Score(1.0, 1.0, 0.25, 0.5, 0.5),
    search=Search(seed=0, evaluations=0, chains=0),
)
EVERY = Requirements(
    equal_samples_per_rank=True,
    rows_multiple_of=2,
    max_samples_per_cell=3,
    together="cell",
    uniform_rows=True,
    memory_limit_tokens=100,
    routing_groups=8,
    ranks_per_node=4,
)

MAPPED = Requirements(routing_groups=2, node_of_rank=(4, 0))


def with_requirements(requirements: Requirements) -> Plan:
    return msgspec.structs.replace(PLAN, requirements=requirements)


def test_a_plan_without_requirements_has_no_such_field() -> None:
    """Required or not by default: the bytes are those of a plan that knows of no requirements."""
    data = PLAN.to_bytes()
    assert with_requirements(Requirements(rows_multiple_of=1)).to_bytes() == data
    assert "requirements" not in json.loads(data)
    assert Plan.from_bytes(data).requirements.vacuous


def test_only_what_is_required_is_written() -> None:
    """The rest of the file stays as it is, byte for byte."""
    one = Requirements(max_samples_per_cell=1)
    assert with_requirements(one).to_bytes() == PLAN.to_bytes().replace(
        b'"rows":', b'"requirements":{"max_samples_per_cell":1},"rows":'
    )
    assert json.loads(with_requirements(EVERY).to_bytes())["requirements"] == {
        "equal_samples_per_rank": True,
        "max_samples_per_cell": 3,
        "memory_limit_tokens": 100,
        "ranks_per_node": 4,
        "routing_groups": 8,
        "rows_multiple_of": 2,
        "together": "cell",
        "uniform_rows": True,
    }

    fields = json.loads(with_requirements(MAPPED).to_bytes())["requirements"]
    assert fields == {"node_of_rank": [4, 0], "routing_groups": 2}


COUNTS = st.integers(1, LARGEST)


@given(
    st.builds(
        Requirements,
        equal_samples_per_rank=st.booleans(),
        rows_multiple_of=COUNTS,
        max_samples_per_cell=st.none() | COUNTS,
        together=st.sampled_from([None, "rank", "cell"]),
        uniform_rows=st.booleans(),
        memory_limit_tokens=st.none() | COUNTS,
    )
    | st.just(MAPPED)
)
def test_requirements_are_read_as_written(requirements: Requirements) -> None:
    """A round trip keeps them all, and its bytes are the same again."""
    data = with_requirements(requirements).to_bytes()
    again = Plan.from_bytes(data)
    assert again.requirements == requirements
    assert again.to_bytes() == data


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    """What a caller computed with numpy ends up in the file as JSON."""
    counted: dict[str, Any] = {
        "max_samples_per_cell": np.int64(2),
        "uniform_rows": np.bool_(True),
        "routing_groups": 2,
        "node_of_rank": np.array([4, 0]),
    }
    plain = Requirements(
        max_samples_per_cell=2, uniform_rows=True, routing_groups=2, node_of_rank=(4, 0)
    )
    assert Plan.from_bytes(with_requirements(Requirements(**counted)).to_bytes()) == (
        with_requirements(plain)
    )


WHOLE = f"expected a whole number in 1..{LARGEST} - at `$.requirements`"
BAD: dict[str, tuple[Any, str]] = {
    "not an object": ([1], "Expected `object`, got `array` - at `$.requirements`"),
    "null": (None, "Expected `object`, got `null` - at `$.requirements`"),
    "a field too many": (
        {"rows": 2},
        "Object contains unknown field `rows` - at `$.requirements`",
    ),
    "a number for a flag": (
        {"uniform_rows": 1},
        "Expected `bool`, got `int` - at `$.requirements.uniform_rows`",
    ),
    "text for a number": (
        {"max_samples_per_cell": "1"},
        "Expected `int | null`, got `str` - at `$.requirements.max_samples_per_cell`",
    ),
    "no samples": ({"max_samples_per_cell": 0}, f"max_samples_per_cell = 0: {WHOLE}"),
    "no rows": ({"rows_multiple_of": 0}, f"rows_multiple_of = 0: {WHOLE}"),
    "too many tokens": (
        {"memory_limit_tokens": 2**31},
        f"memory_limit_tokens = {2**31}: {WHOLE}",
    ),
    "another place": (
        {"together": "node"},
        "together = 'node': expected 'rank' or 'cell' - at `$.requirements`",
    ),
    "groups without nodes": (
        {"routing_groups": 4},
        "routing_groups: expected together with ranks_per_node or node_of_rank - at "
        "`$.requirements`",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_requirements_of_a_file_are_named(case: str) -> None:
    """One line says which requirement and what was expected."""
    value, message = BAD[case]
    data = json.dumps(json.loads(PLAN.to_bytes()) | {"requirements": value}).encode()
    with pytest.raises(InputError) as error:
        Plan.from_bytes(data, "p.json")
    assert str(error.value) == f"p.json: expected a plan file, {message}"
