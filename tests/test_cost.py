"""The cost model: what a TOML may say, and the coefficients that follow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.cost import DEFAULT, AttentionStage, CostModel, stage_tokens2
from routepack.errors import InputError
from routepack.objective import score
from routepack.topology import Topology
from routepack.window import Window
from strategies import Instance, instances

STAGE = '[[attention]]\nname = "full"\nlinear = 1.0\nquadratic = 2.0\n'
SLIDING = '[[attention]]\nname = "swa"\nlinear = 3\nquadratic = 0.5\nwindow_tokens = 128\n'


def read(folder: Path, text: str) -> CostModel:
    path = folder / "cost.toml"
    path.write_text(text)
    return CostModel.from_toml(path)


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    """Every key arrives; whole numbers stand for floats; the stages keep their order."""
    model = read(tmp_path, f'expert = 2\nnormalise = "window"\n{STAGE}{SLIDING}')
    assert model == CostModel(
        attention=(
            AttentionStage("full", 1.0, 2.0),
            AttentionStage("swa", 3.0, 0.5, window_tokens=128),
        ),
        expert=2.0,
        normalise="window",
    )


def test_defaults(tmp_path: Path) -> None:
    """A file may give stages alone; without a file it is one stage linear 60, quadratic 20."""
    assert read(tmp_path, STAGE) == CostModel((AttentionStage("full", 1.0, 2.0),), 1.0, "cap")
    assert CostModel((AttentionStage("attention", 60.0, 20.0),), 1.0, "cap") == DEFAULT


REFUSED = {
    "unknown key": (f"experts = 1.0\n{STAGE}", "Object contains unknown field `experts`"),
    "unknown key of a stage": (
        f"{STAGE}window = 3",
        "Object contains unknown field `window` - at `$.attention[0]`",
    ),
    "nan": (f"expert = nan\n{STAGE}", "expert = nan: expected a finite number in 0..1e+12"),
    "inf": (f"expert = inf\n{STAGE}", "expert = inf: expected a finite number in 0..1e+12"),
    "negative": (f"expert = -1\n{STAGE}", "expert = -1.0: expected a finite number in 0..1e+12"),
    "a number too large": (
        f"expert = 1.1e12\n{STAGE}",
        "expert = 1100000000000.0: expected a finite number in 0..1e+12",
    ),
    "nan of a stage": (
        STAGE.replace("1.0", "nan"),
        "attention.linear[0] = nan: expected a finite number in 0..1e+12",
    ),
    "inf of the second stage": (
        STAGE + STAGE.replace("2.0", "inf"),
        "attention.quadratic[1] = inf: expected a finite number in 0..1e+12",
    ),
    "negative of a stage": (
        STAGE.replace("2.0", "-2.0"),
        "attention.quadratic[0] = -2.0: expected a finite number in 0..1e+12",
    ),
    "window of 0 tokens": (
        f"{STAGE}window_tokens = 0",
        "attention.window_tokens[0] = 0: expected a whole number >= 1",
    ),
    "window of half tokens": (
        f"{STAGE}window_tokens = 1.5",
        "Expected `int | null`, got `float` - at `$.attention[0].window_tokens`",
    ),
    "empty file": ("", "Object missing required field `attention`"),
    "no stages": ("attention = []", "attention: expected at least one [[attention]] stage"),
    "a table for stages": ("[attention]", "Expected `array`, got `object` - at `$.attention`"),
    "stage without quadratic": (
        STAGE.replace("quadratic = 2.0\n", ""),
        "Object missing required field `quadratic` - at `$.attention[0]`",
    ),
    "text for a number": (
        f'expert = "1"\n{STAGE}',
        "Expected `float`, got `str` - at `$.expert`",
    ),
    "a truth value for a number": (
        f"expert = true\n{STAGE}",
        "Expected `float`, got `bool` - at `$.expert`",
    ),
    "a number for a name": (
        STAGE.replace('"full"', "1"),
        "Expected `str`, got `int` - at `$.attention[0].name`",
    ),
    "unknown normalisation": (
        f'normalise = "row"\n{STAGE}',
        "normalise = row: expected 'cap' or 'window'",
    ),
    "no cost at all": (
        "expert = 0\n" + STAGE.replace("1.0", "0").replace("2.0", "0"),
        "cost model: expected a cost above 0, every coefficient is 0",
    ),
    "no TOML": ("expert =", "expected TOML, Invalid value (at end of document)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_file_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    """The line starts with the file and names key, stage, value and what was expected."""
    text, message = REFUSED[case]
    with pytest.raises(InputError) as error:
        read(tmp_path, text)
    assert str(error.value) == f"{tmp_path / 'cost.toml'}: {message}"


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """A missing file, a folder and bytes that are not UTF-8 give one line each."""
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff")
    messages = {
        tmp_path / "none": "expected a cost model file, No such file or directory",
        tmp_path: "expected a cost model file, Is a directory",
        binary: "expected TOML, 'utf-8' codec can't decode byte 0xff in position 0: "
        "invalid start byte",
    }
    for path, message in messages.items():
        with pytest.raises(InputError) as error:
            CostModel.from_toml(path)
        assert str(error.value) == f"{path}: {message}"


def test_models_made_in_python_are_checked_alike() -> None:
    """The same checks without a file: the message is the one of the file, without its name."""
    stage = AttentionStage("full", 1.0, float("nan"))
    with pytest.raises(InputError) as error:
        CostModel((stage,))
    assert str(error.value) == (
        "attention.quadratic[0] = nan: expected a finite number in 0..1e+12"
    )


def test_token_pairs_by_hand() -> None:
    """n = 5, w = 2: m(2n - m) = 2 * (10 - 2) = 16; without a window 25; w >= n is no window."""
    lengths_S = np.array([5, 1, 2])
    assert stage_tokens2(lengths_S, None).tolist() == [25, 1, 4]
    assert stage_tokens2(lengths_S, 2).tolist() == [16, 1, 4]
    assert stage_tokens2(lengths_S, 1).tolist() == [9, 1, 3]
    assert stage_tokens2(lengths_S, 5).tolist() == [25, 1, 4]
    assert stage_tokens2(lengths_S, 10**30).tolist() == [25, 1, 4]


@given(st.integers(1, 60), st.one_of(st.none(), st.integers(1, 70)))
def test_token_pairs_equal_a_count(n: int, window_tokens: int | None) -> None:
    """Twice the number of attended pairs of a causal mask, where the pair of each new token that
    widens the band counts half: 2 * count - min(n, w)."""
    w = window_tokens or n
    count = sum(1 for query in range(n) for key in range(n) if 0 <= query - key < w)
    assert stage_tokens2(np.array([n]), window_tokens).tolist() == [2 * count - min(n, w)]


def two_samples() -> Window:
    """Two samples of 4 tokens, one layer, two experts with the same demand, top-1."""
    return Window(np.array([4, 4]), np.array([[[2, 2]], [[2, 2]]]), 1)


def test_coefficients_in_units_of_the_cap() -> None:
    """C = 10: linear/10, quadratic/100, expert/10, whatever the window holds."""
    model = CostModel(
        (AttentionStage("full", 6.0, 2.0), AttentionStage("swa", 1.0, 5.0, window_tokens=1)), 3.0
    )
    cost = model.resolve(two_samples(), Topology.of(dp=2, ep=2), 10)
    assert cost.linear_T.tolist() == [0.6, 0.1]
    assert cost.quadratic_T.tolist() == [0.02, 0.05]
    assert cost.expert == 0.3
    assert cost.quadratic_tokens_TS.tolist() == [[16, 16], [7, 7]]


def test_a_balanced_window_costs_one_plus_the_expert_weight() -> None:
    """normalise = "window", D = R = 2, one cell for each sample: attention is 1, since each cell
    does half the work; each rank gets 4 of 8 assignments, the balanced load, times 0.5."""
    window, topology = two_samples(), Topology.of(dp=2, ep=2, edp=1)
    model = CostModel((AttentionStage("full", 7.0, 3.0),), 0.5, "window")
    cost = model.resolve(window, topology, 10)
    result = score(window, topology, cost, np.array([[0, 1]], np.int32), [[[0], [1]]])
    assert result.attention == pytest.approx(1.0, rel=1e-15)
    assert result.expert == 0.5
    assert result.slowest_shard == pytest.approx(1.5, rel=1e-15)


@pytest.mark.parametrize(("shards", "rows", "layers"), [(1, 2, 1), (2, 1, 3), (2, 3, 2)])
def test_balance_costs_the_same_on_any_shards_rows_and_layers(
    shards: int, rows: int, layers: int
) -> None:
    """Equal samples, one in each cell, with equal demand of all experts: every shard costs 1 + 0.5,
    and more stages only share the 1 between them."""
    dp = 2 * shards
    samples = rows * dp
    window = Window(np.full(samples, 6), np.full((samples, layers, 2), 3), 1)
    topology = Topology.of(dp=dp, ep=2, edp=shards)
    stages = (AttentionStage("full", 7.0, 3.0), AttentionStage("swa", 0.0, 2.0, window_tokens=4))
    cost = CostModel(stages, 0.5, "window").resolve(window, topology, 8)
    layout = [[[m * dp + d] for d in range(dp)] for m in range(rows)]
    placement_LE = np.tile(np.array([0, 1], np.int32), (layers, 1))
    result = score(window, topology, cost, placement_LE, layout)
    assert result.slowest_shard == pytest.approx(1.5, rel=1e-14)
    assert result.total == pytest.approx(1.5 * shards, rel=1e-14)


def test_normalising_leaves_out_a_term_that_is_zero() -> None:
    """A window without routes, or a model without attention work, divides by nothing."""
    topology = Topology.of(dp=2, ep=2)
    unrouted = Window(np.array([4, 4]), np.zeros((2, 1, 2), int), 1, missing_S=np.array([4, 4]))
    stage = AttentionStage("full", 1.0, 0.0)
    cost = CostModel((stage,), 3.0, "window").resolve(unrouted, topology, 10)
    assert (cost.linear_T.tolist(), cost.expert) == ([0.25], 0.3)
    expert_only = CostModel((AttentionStage("none", 0.0, 0.0),), 3.0, "window")
    cost = expert_only.resolve(two_samples(), topology, 10)
    assert cost.linear_T.tolist() == cost.quadratic_T.tolist() == [0.0]
    assert cost.expert == 3.0 / (8 / 2)


@given(instances())
def test_normalised_totals(instance: Instance) -> None:
    """normalise = "window": whatever the window, the cap and the stages, the attention work of all
    samples on D ranks is 1, and the assignments of all layers on R * G ranks the expert weight."""
    window, topology = instance.window, instance.topology
    model = CostModel(instance.cost_model.attention, instance.cost_model.expert, "window")
    cost = model.resolve(window, topology, instance.token_cap)
    if any(stage.linear or stage.quadratic for stage in model.attention):
        work_T = cost.linear_T * window.lengths_S.sum()
        work_T += cost.quadratic_T * cost.quadratic_tokens_TS.sum(axis=1)
        assert work_T.sum() / topology.dp == pytest.approx(1.0, rel=1e-12)
    if window.demand_LE.any():
        expert = cost.expert * window.demand_LE.sum() / (topology.ep * topology.edp)
        assert expert == pytest.approx(model.expert, rel=1e-12)


def test_numbers_of_numpy_and_integers_make_the_same_plan_bytes() -> None:
    """Coefficients become Python floats: a plan reads back to the bytes that it was written as."""
    model = CostModel((AttentionStage("a", np.float32(2), 1),), np.int64(1))
    values = (model.attention[0].linear, model.attention[0].quadratic, model.expert)
    assert [type(value) for value in values] == [float] * 3
    assert model == CostModel((AttentionStage("a", 2.0, 1.0),), 1.0)
    for value in (True, "1", None):
        with pytest.raises(InputError) as error:
            AttentionStage("a", value, 1.0)  # type: ignore[arg-type]  # the point of the test
        assert str(error.value) == f"attention.linear = {value!r}: expected a number"
