"""Ranks that are not equally fast: what a layout costs, what is planned, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from cli_helpers import SIZES, fill, run
from routepack import Budget, CostModel, InputError, Requirements, Topology, Window, plan
from routepack.bounds import best_bound
from routepack.cost import AttentionStage
from routepack.files import read_plan
from routepack.integrations.observe import measure
from routepack.objective import score
from routepack.placement import identity
from routepack.plan import Plan
from routepack.planset import PlanSet
from routepack.verify import verify
from strategies import SEEDS, Instance, instances, random_window

STAGE = AttentionStage("attention", 1.0, 0.0)
WINDOW = Window(np.array([4, 8]), np.array([[[4, 0]], [[6, 2]]], np.uint16), 1)
TWO = Topology.of(dp=2, ep=2, edp=1)
ROWS = (((0,), (1,)),)  # sample 0 on DP rank 0, sample 1 on DP rank 1


def scored(model: CostModel, topology: Topology = TWO, window: Window = WINDOW) -> Any:
    """The score of ROWS at cap 8, contiguous experts."""
    cost = model.resolve(window, topology, 8)
    return score(window, topology, cost, identity(window.layers, window.experts), ROWS)


def test_costs_by_hand() -> None:
    """
    Cells of 4 and 8 tokens at cap 8 cost 1/2 and 1; the EP ranks carry 10 and 2 routed tokens,
    10/8. At half speed DP rank 0 takes as long as rank 1; at an eighth it takes 4. EP rank 1 at
    1/8 speed carries what 16 tokens are elsewhere.
    """
    assert scored(CostModel((STAGE,))).slowest_shard == 1 + 10 / 8
    assert scored(CostModel((STAGE,), dp_speed=(0.5, 1.0))).slowest_shard == 1 + 10 / 8
    assert scored(CostModel((STAGE,), dp_speed=(0.125, 1.0))).slowest_shard == 4 + 10 / 8
    assert scored(CostModel((STAGE,), ep_speed=(1.0, 0.125))).slowest_shard == 1 + 16 / 8
    assert scored(CostModel((STAGE,), ep_speed=(2.0, 0.25))).slowest_shard == 1 + 8 / 8


def test_ranks_of_a_shard_have_speeds_of_their_own() -> None:
    """Two shards of one EP rank each carry 4 and 8 tokens; the second at half speed, they take
    4/8 and 16/8 beside attention of 1/2 and 1."""
    window = Window(np.array([4, 8]), np.array([[[4]], [[8]]], np.uint16), 1)
    two_shards = Topology.of(dp=2, ep=1, edp=2)
    assert scored(CostModel((STAGE,)), two_shards, window).slowest_shard == 1 + 8 / 8
    model = CostModel((STAGE,), ep_speed=(1.0, 0.5))
    found = scored(model, two_shards, window)
    assert (found.slowest_shard, found.total) == (1 + 16 / 8, 1 + 16 / 8 + 1 / 2 + 4 / 8)


def test_the_split_by_speed_bounds_by_hand() -> None:
    """
    DP rank 0 at half speed: 12 tokens of work 12/8 are done soonest at 1/3 and 2/3, in 1. EP ranks
    1 and 1/2 share 12 routed tokens in no less than 12/1.5 = 8, that is 8/8. Were all as fast as
    the fastest, the longer sample costs 1, and balance 6/8; that is more where an expert has 10.
    With experts of 4 and 8 the slower rank has at least 4, not less than at 1/8 speed 32 elsewhere.
    """
    split = CostModel((STAGE,), 1.0, dp_speed=(0.5, 1.0), ep_speed=(1.0, 0.5))
    even = Window(np.array([4, 8]), np.array([[[2, 2, 0, 0]], [[4, 4, 0, 0]]], np.uint16), 1)
    bound, method = best_bound(even, TWO, split.resolve(even, TWO, 8), 8, 1)
    assert (bound, method) == (pytest.approx(1 + 8 / 8), "split by speed")
    bound, method = best_bound(WINDOW, TWO, split.resolve(WINDOW, TWO, 8), 8, 1)
    assert (bound, method) == (pytest.approx(1 + 10 / 8), "attention floor")
    slower = CostModel((STAGE,), 1.0, ep_speed=(1.0, 0.125))
    cool = Window(np.array([4, 8]), np.array([[[4, 0]], [[4, 4]]], np.uint16), 1)
    bound, method = best_bound(cool, TWO, slower.resolve(cool, TWO, 8), 8, 1)
    assert (bound, method) == (pytest.approx(12 / 8 / 2 + 32 / 8), "split by speed")


def planned(model: CostModel, seed: int = 0, **options: Any) -> tuple[Window, Plan]:
    """Forty samples on four DP and four EP ranks."""
    rng = np.random.default_rng(7)
    window = random_window(rng, rng.integers(5, 30, 40), 3, 16, 2)
    topology = Topology.of(dp=4, ep=4, edp=1)
    made = plan(
        window, topology, token_cap=120, cost_model=model, budget=Budget(evaluations=20_000),
        seed=seed, threads=1, **options,
    )  # fmt: skip
    assert verify(window, made) == []
    return window, made


def test_slow_ranks_get_less() -> None:
    """A DP rank at half speed gets clearly fewer tokens than the others, and a slow EP rank fewer
    routed ones; the predicted time is below that of the plan made as if all were equal."""
    slow = CostModel((STAGE,), 1.0, dp_speed=(1.0, 0.5, 1.0, 1.0), ep_speed=(1.0, 1.0, 1.0, 0.5))
    window, made = planned(slow)
    tokens_D = np.array([[sum(window.lengths_S[list(c)]) for c in row] for row in made.rows]).sum(0)
    assert tokens_D[1] < 0.75 * np.delete(tokens_D, 1).min()
    routed_R = np.zeros(4)
    np.add.at(routed_R, made.placement_LE // 4, window.demand_LE)
    assert routed_R[3] < 0.8 * routed_R[:3].min()
    assert made.certificate.gap < 0.001  # rank 3 has the coolest experts, which is all it can do
    _, blind = planned(CostModel((STAGE,)))
    cost = slow.resolve(window, made.to_topology(), 120)
    as_it_is = score(window, made.to_topology(), cost, blind.placement_LE, blind.rows)
    assert made.score.slowest_shard < 0.9 * as_it_is.slowest_shard


def test_equal_speeds_change_nothing() -> None:
    """All at speed 1: the plan without speeds, but for the record of them."""
    _, without = planned(CostModel((STAGE,)))
    _, made = planned(CostModel((STAGE,), dp_speed=(1,) * 4, ep_speed=(1,) * 4))
    assert b"speed" not in without.to_bytes()
    assert (made.rows, made.placement, made.score) == (
        without.rows, without.placement, without.score,
    )  # fmt: skip
    assert Plan.from_bytes(made.to_bytes()).cost_model.dp_speed == (1.0,) * 4


@pytest.mark.parametrize(
    "required",
    [
        Requirements(equal_samples_per_rank=True),
        Requirements(rows_multiple_of=4),
        Requirements(max_samples_per_cell=5),
        Requirements(memory_limit_tokens=240),
        Requirements(routing_groups=4, ranks_per_node=2),
    ],
)
def test_with_requirements(required: Requirements) -> None:
    """Slow ranks and a requirement together: `verify` finds both met."""
    slow = CostModel((STAGE,), 1.0, dp_speed=(1.0, 0.8, 1.0, 1.0), ep_speed=(1.0, 1.0, 0.8, 1.0))
    _, made = planned(slow, requirements=required)
    assert made.requirements == required
    assert made.cost_model.ep_speed == (1.0, 1.0, 0.8, 1.0)


@settings(max_examples=25)
@given(instances(), SEEDS)
def test_plans_of_any_speeds_hold(instance: Instance, seed: int) -> None:
    """`verify`, which knows the oracle only, finds nothing wrong in a plan; one with a placement
    held now keeps every expert of a rank that it can."""
    if instance.window.samples < instance.topology.dp:
        return
    made = plan(
        instance.window, instance.topology, token_cap=instance.token_cap,
        cost_model=instance.cost_model, budget=Budget(evaluations=300), seed=seed, threads=1,
        current_placement=instance.placement_LE,
    )  # fmt: skip
    assert verify(instance.window, made) == []


def test_a_limit_is_met_however_fast_ranks_are() -> None:
    """The limit counts routed tokens: one that is met where ranks are alike (1.02 times balance)
    is met where one is at half speed."""
    rng = np.random.default_rng(7)
    window = random_window(rng, rng.integers(5, 30, 40), 3, 16, 2)
    balanced = window.top_k * int(window.lengths_S.sum()) / (4 * 2)  # in two rows
    required = Requirements(memory_limit_tokens=int(1.06 * balanced))
    for speed in (None, (1.0, 1.0, 1.0, 0.5)):
        _, made = planned(CostModel((STAGE,), ep_speed=speed), requirements=required)
        assert len(made.rows) == 2


def test_slow_dp_ranks_move_no_experts() -> None:
    """EP ranks are as interchangeable as ever where only DP ranks differ: under a placement that
    names the same parts otherwise, few experts move."""
    model = CostModel((STAGE,), dp_speed=(1.0, 1.0, 1.0, 0.8))
    _, first = planned(model)
    turned_LE = (first.placement_LE + 4) % 16  # every rank's experts on the next
    _, again = planned(model, current_placement=turned_LE)
    stay = (again.placement_LE // 4 == turned_LE // 4).mean()
    assert stay > 0.5


def test_observed_levels_know_speeds() -> None:
    """Ranks that are all half as fast are as balanced as before."""
    window, made = planned(CostModel((STAGE,)))
    topology = made.to_topology()

    def metrics(**fields: Any) -> dict[str, Any]:
        return measure(window, topology, CostModel((STAGE,), **fields), 120, made.rows).metrics("x")

    half = metrics(dp_speed=(0.5,) * 4, ep_speed=(0.5,) * 4)
    for name, value in metrics().items():
        if "imbalance" in name:
            assert half[name] == pytest.approx(value)


WRONG = [
    ({"dp_speed": (1.0, 0.0)}, "dp_speed[1] = 0.0: expected a speed in 0.01..100"),
    ({"ep_speed": (float("nan"),)}, "ep_speed[0] = nan: expected a speed in 0.01..100"),
    ({"dp_speed": ("fast",)}, "dp_speed = 'fast': expected a number"),
    ({"dp_speed": (1.0,) * 3}, "dp_speed = 3 speeds: expected 4"),
    ({"ep_speed": (1.0,) * 3}, "ep_speed = 3 speeds: expected 2 or 4"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG)
def test_speeds_that_are_refused(fields: dict[str, Any], message: str) -> None:
    """Speeds out of range, or of another number of ranks, are named in one line."""

    def resolve() -> None:
        CostModel((STAGE,), **fields).resolve(WINDOW, Topology.of(dp=4, ep=2, edp=2), 8)

    with pytest.raises(InputError) as error:
        resolve()
    assert str(error.value) == message


def test_the_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--dp-speed` and `--ep-speed` reach the plan and are told; nonsense is refused."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    flags = ("--evaluations", "500", "--out", "p.json")
    code, out, _ = run("plan", "w", *SIZES, "--dp-speed", "1,0.5", "--ep-speed", "1,0.9", *flags)
    assert code == 0
    assert "DP ranks at speed 0.5 to 1, EP ranks at speed 0.9 to 1" in " ".join(out.split())
    model = read_plan("p.json").cost_model
    assert (model.dp_speed, model.ep_speed) == ((1.0, 0.5), (1.0, 0.9))
    expected = "error: --dp-speed = '1,fast': expected numbers as in 1,1,0.8,1\n"
    assert run("plan", "w", *SIZES, "--dp-speed", "1,fast", *flags) == (2, "", expected)
    expected = "error: dp_speed = 3 speeds: expected 2\n"
    assert run("plan", "w", *SIZES, "--dp-speed", "1,1,1", *flags) == (2, "", expected)


def test_passes_run_on_the_same_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass with a cost file of its own has the speeds of the flags, unless it says otherwise."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    Path("c.toml").write_text('[[attention]]\nname = "a"\nlinear = 1.0\nquadratic = 0.0\n')
    flags = ("--dp-speed", "1,0.5", "--pass", "ref:8:c.toml", "--evaluations", "100")
    code, _, err = run("plan", "w", *SIZES, *flags, "--out", "s.json")
    assert (code, err) == (0, "")
    found = PlanSet.from_bytes(Path("s.json").read_bytes())
    assert found.passes["ref"].cost_model.dp_speed == (1.0, 0.5)


def test_inspect_knows_speeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terms are those of ranks as fast as the fastest, and the bound says that it is not."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    stage = '[[attention]]\nname = "a"\nlinear = 1.0\nquadratic = 0.0\n'
    outs = []
    for name, speed in (("plain", ""), ("slow", "ep_speed = [1, 0.25]\n")):
        Path(name).write_text(speed + stage)
        code, out, _ = run("inspect", "w", *SIZES[:6], "--cost-model", name)
        assert code == 0
        outs.append(out.splitlines())
    expert = [next(line for line in out if line.startswith("expert ")) for out in outs]
    assert expert[0].split() == expert[1].split()
    assert any("not equally fast" in line for line in outs[1])
    assert not any("not equally fast" in line for line in outs[0])


def test_speeds_in_a_cost_file(tmp_path: Path) -> None:
    """The TOML keys are the fields."""
    text = '[[attention]]\nname = "a"\nlinear = 1.0\nquadratic = 0.0\n'
    (tmp_path / "c.toml").write_text("dp_speed = [1, 0.5]\nep_speed = [1, 0.25]\n" + text)
    model = CostModel.from_toml(tmp_path / "c.toml")
    assert model == msgspec.structs.replace(
        CostModel((AttentionStage("a", 1.0, 0.0),)), dp_speed=(1.0, 0.5), ep_speed=(1.0, 0.25)
    )


def test_the_strategy_draws_speeds() -> None:
    """Instances with unequal ranks are among those that every property is tried on."""
    from hypothesis import find

    found = find(instances(), lambda instance: not instance.problem.cost.ranks_alike)
    assert found.cost_model.dp_speed or found.cost_model.ep_speed
