"""slime and miles: every schedule keeps the documented invariants, whatever happens to the plan."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import routepack
from integrations.trainer_helpers import (
    EXPERTS,
    LAYERS,
    TOP_K,
    Logged,
    Sample,
    Schedule,
    arguments,
    broken_schedule,
    next_fit,
    parallel,
    real,
    samples_of,
)
from routepack import InputError
from routepack.integrations import miles, slime
from routepack.integrations.packer import Packer
from routepack.integrations.rollout import rows_of, schedule_of, topology_of

LENGTHS = [int(n) for n in np.random.default_rng(5).integers(4, 33, size=32)]
PLANNED = {"evaluations": 2000, "threads": 1}


@dataclass
class Process:
    """The rollout process of a trainer: its hook, and the function that makes schedules."""

    hook: Callable[..., bool]
    globals: dict[str, Any]

    def rollout(
        self,
        args: Any,
        samples: list[Sample],
        lengths: list[int] | None = None,
        config: dict[str, int] | None = None,
        rollout_id: int = 7,
    ) -> Schedule:
        """One rollout, as the trainer goes through it: log, then split."""
        lengths = [len(sample.tokens) for sample in samples] if lengths is None else lengths
        indices = [sample.rollout_id for sample in samples][: len(lengths)]
        generate = self.globals["generate"]
        return generate(
            self.hook, args, samples, lengths, config or parallel(), indices, rollout_id
        )


GENERATE = """
def generate(hook, args, samples, lengths, config, indices, rollout_id):
    assert hook(rollout_id, args, samples, None, 1.0) is False
    return split(args, config, lengths, indices)

def split(args, config, lengths, indices):
    return build_dp_schedule(
        args, config, lengths, global_batch_size=args.global_batch_size, rollout_indices=indices
    )
"""


def process(trainer: str, own: Callable[..., Schedule]) -> Process:
    """Code with globals of its own, as Ray gives an actor's methods; miles has a module of them."""
    namespace: dict[str, Any] = {"build_dp_schedule": own}
    exec(GENERATE, namespace)
    if trainer == "slime":
        return Process(slime.log_rollout_data, namespace)
    module = types.ModuleType(miles.MODULE)
    vars(module).update(namespace)
    exec(GENERATE, vars(module))
    sys.modules[miles.MODULE] = module
    return Process(miles.log_rollout_data, vars(module))


@pytest.fixture(params=["slime", "miles"])
def trainer(request: pytest.FixtureRequest) -> Iterator[str]:
    """Either trainer."""
    before = sys.modules.pop(miles.MODULE, None)
    yield request.param
    sys.modules.pop(miles.MODULE, None)
    if before is not None:
        sys.modules[miles.MODULE] = before


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Logged:
    """What the trainers' loggers are given."""
    logged = Logged()
    module = types.ModuleType("a_logger")
    vars(module)["log"] = logged
    monkeypatch.setitem(sys.modules, "a_logger", module)
    return logged


def settings_of(mode: str, **changes: Any) -> dict[str, Any]:
    return {"mode": mode, "logger": "a_logger.log", **PLANNED, **changes}


def owned(args: Any, lengths: list[int] = LENGTHS, **config: int) -> Schedule:
    """The trainer's own schedule."""
    return next_fit(
        args,
        parallel(**config),
        lengths,
        global_batch_size=args.global_batch_size,
        rollout_indices=list(range(len(lengths))),
    )


# What is on, and what is off


def test_off_gives_the_identical_object(trainer: str) -> None:
    """Without settings the hook replaces nothing: the function and what it returns are the
    trainer's."""
    schedule = owned(arguments())

    def own(*args: Any, **rest: Any) -> Schedule:
        return schedule

    for nothing in ({}, {"routepack": None}, {"routepack": {"mode": "off"}}):
        running = process(trainer, own)
        assert running.rollout(arguments(**nothing), samples_of(LENGTHS)) is schedule
        assert running.globals["build_dp_schedule"] is own


def test_observing_gives_the_identical_object_and_logs_later(trainer: str, logged: Logged) -> None:
    """The trainer's schedule is returned itself; its numbers come with a later rollout, with the
    step that they are of."""
    schedule = owned(arguments())
    running = process(trainer, lambda args, train_parallel_config, total_lengths, *,
                      global_batch_size, rollout_indices: schedule)  # fmt: skip
    args = arguments(routepack=settings_of("observe"))
    for step in range(1000):
        assert running.rollout(args, samples_of(LENGTHS), rollout_id=step) is schedule
        if logged.entries:
            break
        time.sleep(0.02)
    else:
        pytest.fail("nothing was logged in 1000 rollouts")
    step, metrics = logged.entries[0]
    assert step == 0
    assert metrics["routepack/samples"] == 32
    assert metrics["routepack/missing_rows"] == 32  # SGLang records no route of the last token
    assert metrics["routepack/own/expert_imbalance"] > 1
    assert 0 < metrics["routepack/predicted_ratio"] <= 1
    assert 0 < metrics["routepack/predicted_ratio_with_placement"] < 1


def test_packing_is_predicted_to_be_faster(trainer: str, logged: Logged) -> None:
    """The schedule is another one, keeps every invariant, and has a slowest shard that the slow
    oracle finds lower than the trainer's."""
    args = arguments(routepack=settings_of("pack"))
    running = process(trainer, next_fit)
    samples = samples_of(LENGTHS)
    schedule = running.rollout(args, samples)
    own = owned(args)
    assert schedule != own
    assert schedule[3] is not None
    assert broken_schedule(
        schedule, LENGTHS, range(32), global_batch_size=32, dp=4, cap=64
    ) == []  # fmt: skip
    [(step, metrics)] = logged.entries
    assert step == 7
    assert metrics["routepack/packed_steps"] == 1
    assert metrics["routepack/total/planned"] == 1

    demand_SLE = np.zeros((32, LAYERS, EXPERTS), np.int64)
    for i, sample in enumerate(samples):
        for layer in range(LAYERS):
            ids = sample.rollout_routed_experts[:, layer].ravel()
            demand_SLE[i, layer] = np.bincount(ids, minlength=EXPERTS)
    window = routepack.Window(np.array(LENGTHS), demand_SLE, TOP_K, missing_S=np.ones(32, np.int32))
    topology = routepack.Topology.of(dp=4, ep=2)
    from routepack.cost import DEFAULT
    from routepack.objective import score
    from routepack.placement import identity

    cost = DEFAULT.resolve(window, topology, 64)
    ours, theirs = (
        score(window, topology, cost, identity(LAYERS, EXPERTS), rows_of(found)[0]).slowest_shard
        for found in (schedule, own)
    )
    assert ours < theirs
    assert metrics["routepack/plan/slowest_shard"] == pytest.approx(ours, rel=1e-12)
    assert metrics["routepack/own/slowest_shard"] == pytest.approx(theirs, rel=1e-12)
    assert metrics["routepack/predicted_ratio"] == pytest.approx(ours / theirs, rel=1e-12)


def test_a_layout_that_is_as_good_is_kept(trainer: str, logged: Logged) -> None:
    """With one sample for each rank all layouts cost the same or more: the trainer's own object."""
    schedule = ([[0], [1], [2], [3]], [[[0]]] * 4, [1], [4])
    samples = samples_of([9, 9, 9, 9])
    for sample in samples[1:]:
        sample.rollout_routed_experts = samples[0].rollout_routed_experts
    running = process(trainer, lambda args, train_parallel_config, total_lengths, *,
                      global_batch_size, rollout_indices: schedule)  # fmt: skip
    args = arguments(global_batch_size=4, routepack=settings_of("pack"))
    assert running.rollout(args, samples) is schedule
    assert logged.entries[0][1]["routepack/packed_steps"] == 0
    assert logged.entries[0][1]["routepack/predicted_ratio"] == 1


# The invariants, against a stand-in and, where it is installed, the trainers' own function

FUNCTIONS = ["stand-in", "slime.utils.dp_schedule", "miles.utils.dp_schedule"]


def function(name: str) -> Callable[..., Schedule]:
    return next_fit if name == "stand-in" else real(name)


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[Any, list[Sample], dict[str, int], int]:
    """Arguments, samples (some rollouts have several), ranks, the group of a virtual pipeline."""
    dp = draw(st.sampled_from([1, 2, 4]))
    ep = draw(st.sampled_from([e for e in (1, 2, 4) if e <= dp]))
    group = draw(st.sampled_from([1, 1, 2]))
    steps = draw(st.integers(1, 3))
    size = dp * group * draw(st.sampled_from([2, 3]))
    lengths, ids = [], []
    for rollout in range(steps * size + draw(st.integers(0, 2))):
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
            lengths.append(draw(st.integers(2, 40)))
            ids.append(rollout)
    samples = samples_of(lengths, draw(st.integers(0, 99)))
    for sample, rollout in zip(samples, ids, strict=True):
        sample.rollout_id = rollout
    args = arguments(
        expert_model_parallel_size=ep,
        global_batch_size=size,
        max_tokens_per_gpu=draw(st.integers(40, 90)),
        balance_data=draw(st.booleans()),
        routepack=settings_of("pack", evaluations=200),
    )
    return args, samples, parallel(dp=dp, vpp=group, group=group), group


@pytest.mark.parametrize("name", FUNCTIONS)
@given(drawn=rollouts())
@settings(max_examples=25)
def test_invariants(name: str, drawn: tuple[Any, list[Sample], dict[str, int], int]) -> None:
    """The trainer's own schedules hold them, and so do packed ones, step by step."""
    args, samples, config, multiple = drawn
    own = function(name)
    lengths = [len(sample.tokens) for sample in samples]
    ids = [sample.rollout_id for sample in samples]
    wanted: dict[str, Any] = dict(
        global_batch_size=args.global_batch_size,
        dp=config["dp_size"],
        cap=args.max_tokens_per_gpu,
        multiple=multiple,
    )
    try:
        theirs = own(
            args,
            config,
            lengths,
            global_batch_size=args.global_batch_size,
            rollout_indices=ids,
        )
    except AssertionError:  # the trainer's own way to say that there are too few samples
        reject()
    assert broken_schedule(theirs, lengths, ids, **wanted) == []
    logged = Logged()
    module = types.ModuleType("a_logger")
    vars(module)["log"] = logged
    sys.modules["a_logger"] = module
    ours = process("slime", own).rollout(args, samples, config=config)
    assert broken_schedule(ours, lengths, ids, **wanted) == []
    assert ours[3] == theirs[3]
    assert logged.entries[0][1]["routepack/total/planned"] == 1


@given(rollouts())
@settings(max_examples=25)
def test_schedules_and_rows_are_inverse(
    drawn: tuple[Any, list[Sample], dict[str, int], int],
) -> None:
    """A schedule read as rows and written again is the same schedule."""
    args, samples, config, _ = drawn
    lengths = [len(sample.tokens) for sample in samples]
    schedule = next_fit(
        args, config, lengths,
        global_batch_size=args.global_batch_size,
        rollout_indices=[sample.rollout_id for sample in samples],  # type: ignore[misc]
    )  # fmt: skip
    assert schedule_of(rows_of(schedule), schedule[3]) == schedule


def _lose(schedule: Schedule) -> None:
    schedule[1][0][-1].pop()
    schedule[0][0].pop()


BROKEN: dict[str, tuple[Callable[[Schedule], object], str]] = {
    "a sample twice": (lambda s: s[0][0].__setitem__(0, s[0][0][1]), "step 0 has other samples"),
    "a sample lost": (_lose, "step 0 has other samples"),
    "another order": (lambda s: s[1][0].reverse(), "rank 0 is not tiled in order"),
    "no tiling": (lambda s: s[0][0].append(0), "rank 0 is not tiled in order"),
    "one micro-batch less": (lambda s: s[1][0].pop(), "rank 0 has another number of micro-batches"),
    "another count": (
        lambda s: s[2].__setitem__(0, s[2][0] - 1),
        "rank 3 has another number of micro-batches",
    ),
    "empty": (lambda s: s[1][0].append([]), "rank 0: a micro-batch of 0 samples, 0 tokens"),
    "another step": (lambda s: s[2].append(1), "steps"),
    "too long": (lambda s: s[1][0].__setitem__(0, [0, 1, 2, 3, 4, 5]), "tokens"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_the_invariants_can_be_broken(case: str) -> None:
    """The suite above finds each kind of damage."""
    schedule = owned(arguments(max_tokens_per_gpu=40))
    check: dict[str, Any] = dict(global_batch_size=32, dp=4, cap=40)
    assert broken_schedule(schedule, LENGTHS, range(32), **check) == []
    damage, expected = BROKEN[case]
    damage(schedule)
    lines = broken_schedule(schedule, LENGTHS, range(32), **check)
    assert any(expected in line for line in lines)


# Failures: the step runs on the trainer's own layout, with one warning and one counter


def failing(
    trainer: str,
    logged: Logged,
    caplog: pytest.LogCaptureFixture,
    samples: list[Sample],
    lengths: list[int] | None = None,
    **changes: Any,
) -> tuple[list[str], dict[str, float]]:
    """Warnings and numbers of a step that has to run on the trainer's own schedule, itself."""
    schedules: list[Schedule] = []

    def own(
        args: Any,
        train_parallel_config: Any,
        total_lengths: Any,
        *,
        global_batch_size: int,
        rollout_indices: Any,
    ) -> Schedule:
        schedules.append(
            next_fit(
                args, train_parallel_config, total_lengths,
                global_batch_size=global_batch_size, rollout_indices=rollout_indices,
            )
        )  # fmt: skip
        return schedules[-1]

    args = arguments(routepack=settings_of("pack", **changes.pop("settings", {})), **changes)
    with caplog.at_level(logging.WARNING, "routepack"):
        schedule = process(trainer, own).rollout(args, samples, lengths)
    assert schedule is schedules[0]
    return [record.getMessage() for record in caplog.records], dict(
        logged.entries[0][1] if logged.entries else {}
    )


KEPT = "this step keeps the trainer's own layout: "


def test_a_missing_route(trainer: str, logged: Logged, caplog: pytest.LogCaptureFixture) -> None:
    """One sample without routes: nothing is planned, the warning names the sample."""
    samples = samples_of(LENGTHS)
    samples[3].rollout_routed_experts = None
    warnings, metrics = failing(trainer, logged, caplog, samples)
    assert warnings == [
        f"{KEPT}routes[3] = none: expected recorded routes, the engine must return them"
    ]
    assert metrics["routepack/total/declined"] == 1
    assert metrics["routepack/total/planned"] == 0


def test_a_sample_above_the_cap(
    trainer: str, logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    """The trainers train a sample above the cap alone; plans have no such cell."""
    samples = samples_of([*LENGTHS[:-1], 70])
    warnings, metrics = failing(trainer, logged, caplog, samples)
    assert warnings == [f"{KEPT}lengths[31] = 70: expected at most the token cap 64"]
    assert metrics["routepack/total/declined"] == 1


def test_other_samples_than_the_hook_saw(
    trainer: str, logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    """A conversion of one's own may drop samples: routes cannot be told apart any more."""
    lengths = LENGTHS[:28]
    warnings, metrics = failing(
        trainer, logged, caplog, samples_of(LENGTHS), lengths, global_batch_size=28
    )
    assert warnings == [
        f"{KEPT}total_lengths = of 28 samples: expected the samples that the log hook saw, in "
        f"their order"
    ]
    assert metrics["routepack/total/declined"] == 1


def test_a_planner_that_raises(
    trainer: str,
    logged: Logged,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever a bug in the planner raises, the step runs."""

    def broken(*args: Any, **rest: Any) -> None:
        raise ZeroDivisionError("a bug\nof two lines")

    monkeypatch.setattr(routepack, "plan", broken)
    warnings, metrics = failing(trainer, logged, caplog, samples_of(LENGTHS))
    assert warnings == [f"{KEPT}ZeroDivisionError: a bug of two lines"]
    assert metrics["routepack/total/errors"] == 1


def test_a_plan_that_breaks_an_invariant(
    trainer: str,
    logged: Logged,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layout is checked before the trainer gets it: here two samples changed cells, so that one
    is above the cap."""
    import msgspec

    plan = routepack.plan

    def crowded(*args: Any, **rest: Any) -> Any:
        made = plan(*args, **rest)
        first, second, *cells = made.rows[0]
        rows = ((tuple(sorted((*first, *second[1:]))), second[:1], *cells), *made.rows[1:])
        return msgspec.structs.replace(made, rows=rows)

    monkeypatch.setattr(routepack, "plan", crowded)
    monkeypatch.setattr("routepack.integrations.observe.Load.over", lambda self, other: 0.5)
    warnings, metrics = failing(trainer, logged, caplog, samples_of(LENGTHS))
    [warning] = warnings
    assert warning.startswith(f"{KEPT}RuntimeError: the plan's layout is not valid: rows[0, 0] = ")
    assert warning.endswith("tokens: expected at most 64")
    assert metrics["routepack/total/errors"] == 1


def test_a_plan_that_is_late(
    trainer: str,
    logged: Logged,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planner that hangs is left behind at the deadline, and asked to stop."""
    stopped = []

    def slow(*args: Any, **rest: Any) -> None:
        while not rest["stop"]():
            time.sleep(0.01)
        stopped.append(True)
        raise AssertionError("nobody waits any more")

    monkeypatch.setattr(routepack, "plan", slow)
    warnings, metrics = failing(
        trainer, logged, caplog, samples_of(LENGTHS), settings={"deadline_seconds": 0.2}
    )
    assert warnings == [f"{KEPT}no plan after 0.2 s"]
    assert metrics["routepack/total/late"] == 1
    for _ in range(200):
        if stopped:
            break
        time.sleep(0.01)
    assert stopped == [True]


def test_samples_of_another_kind(
    trainer: str, logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    """A hook that understands nothing of what it is given leaves the rollout alone."""
    running = process(trainer, next_fit)
    args = arguments(routepack=settings_of("pack"))
    with caplog.at_level(logging.WARNING, "routepack"):
        assert running.hook is not None
        schedules = running.globals["generate"](
            running.hook, args, [object()], LENGTHS, parallel(), list(range(32)), 0
        )
    assert schedules == owned(args)
    [warning] = [record.getMessage() for record in caplog.records]
    assert warning == f"{KEPT}'object' object has no attribute 'tokens'"


def test_a_logger_that_raises(trainer: str, caplog: pytest.LogCaptureFixture,
                              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The plan is used all the same."""
    module = types.ModuleType("a_logger")

    def log(metrics: dict[str, float], step: int) -> None:
        raise OSError("no space left")

    vars(module)["log"] = log
    monkeypatch.setitem(sys.modules, "a_logger", module)
    args = arguments(routepack=settings_of("pack"))
    with caplog.at_level(logging.WARNING, "routepack"):
        schedule = process(trainer, next_fit).rollout(args, samples_of(LENGTHS))
    assert schedule != owned(args)
    assert [record.getMessage() for record in caplog.records] == [
        "the metrics of a step were not logged: no space left"
    ]


# Launch


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key": (
        {"routepack": {"mode": "pack", "second": 1}},
        "routepack: expected its settings, Object contains unknown field `second`",
    ),
    "a mode": (
        {"routepack": {"mode": "on"}},
        "routepack: expected its settings, Invalid enum value 'on' - at `$.mode`",
    ),
    "two budgets": (
        {"routepack": {"mode": "pack", "seconds": 1, "evaluations": 5}},
        "budget: expected either seconds or evaluations",
    ),
    "a deadline": (
        {"routepack": {"mode": "pack", "deadline_seconds": 0}},
        "routepack.deadline_seconds = 0.0: expected a number of seconds above 0",
    ),
    "a logger": (
        {"routepack": {"mode": "pack", "logger": "no.such"}},
        "routepack.logger = no.such: expected the dotted path of a function, No module named 'no'",
    ),
    "fixed micro-batches": (
        {"use_dynamic_batch_size": False},
        "use_dynamic_batch_size = False: expected True, plans pack by tokens",
    ),
    "no routes": (
        {"use_rollout_routing_replay": False},
        "use_rollout_routing_replay = False: expected True, plans need the routes of the rollout",
    ),
    "a dense model": (
        {"num_experts": None},
        "num_experts = None: expected a mixture-of-experts model",
    ),
    "ranks that do not divide the experts": (
        {"expert_model_parallel_size": 3},
        "num_experts = 8: expected a multiple of expert_model_parallel_size = 3",
    ),
    "a balancing loss": (
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.001},
        "moe_aux_loss_coeff = 0.001: expected 0, or moe_router_load_balancing_type = 'none', "
        "because the router's balancing loss multiplies two means over the tokens of a "
        "micro-batch; allow_changed_loss = True packs all the same",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_incompatible_is_named_at_launch(trainer: str, case: str) -> None:
    """By the launch check, and by the hook at the first rollout; the trainer's function stays."""
    changes, message = REFUSED[case]
    args = arguments(**{"routepack": {"mode": "pack"}, **changes})
    module = slime if trainer == "slime" else miles
    with pytest.raises(InputError) as refused:
        module.check(args)
    assert str(refused.value) == message
    running = process(trainer, next_fit)
    with pytest.raises(InputError) as refused:
        running.rollout(args, samples_of(LENGTHS))
    assert str(refused.value) == message
    assert running.globals["build_dp_schedule"] is next_fit


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_backend": "fsdp"},
            "train_backend = 'fsdp': expected 'megatron', the other backends make no schedule in "
            "the rollout",
        ),
        (
            {"delay_split_train_data_by_dp": True},
            "delay_split_train_data_by_dp = True: expected False, its ranks would make the "
            "schedule, each for itself",
        ),
        (
            {"qkv_format": "bshd"},
            "qkv_format = 'bshd': expected 'thd', the tokens of a micro-batch are otherwise padded",
        ),
    ],
)
def test_what_only_miles_has(changes: dict[str, Any], message: str) -> None:
    """miles has ways to make schedules that slime has not."""
    args = arguments(routepack={"mode": "observe"}, **changes)
    with pytest.raises(InputError) as refused:
        miles.check(args)
    assert str(refused.value) == message
    slime.check(args)


def test_observing_changes_no_loss(trainer: str) -> None:
    """What would change the loss by packing is no reason not to look."""
    args = arguments(moe_z_loss_coeff=0.001, routepack={"mode": "observe"})
    (slime if trainer == "slime" else miles).check(args)


def test_a_changed_loss_can_be_allowed(
    trainer: str, logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    """Told so, routepack packs, and says once what changes."""
    args = arguments(moe_z_loss_coeff=0.001, routepack=settings_of("pack", allow_changed_loss=True))
    with caplog.at_level(logging.WARNING, "routepack"):
        running = process(trainer, next_fit)
        for _ in range(2):
            assert running.rollout(args, samples_of(LENGTHS)) != owned(args)
    assert [record.getMessage() for record in caplog.records] == [
        "packing changes what is learned: moe_z_loss_coeff = 0.001: expected None, because the "
        "router's z loss is a mean over the tokens of a micro-batch"
    ]


def test_another_version_is_refused(trainer: str) -> None:
    """A function with other parameters, or none where it is looked for."""

    def older(args: Any, train_parallel_config: Any, total_lengths: Any) -> Schedule:
        raise AssertionError

    args = arguments(routepack={"mode": "pack"})
    with pytest.raises(InputError) as refused:
        process(trainer, older).rollout(args, samples_of(LENGTHS))
    wanted = (
        "(args, train_parallel_config, total_lengths, global_batch_size, rollout_indices); this "
        f"version of {trainer} is not supported"
    )
    found = "(args, train_parallel_config, total_lengths)"
    assert str(refused.value) == f"{trainer}'s build_dp_schedule = {found}: expected {wanted}"
    hook = slime.log_rollout_data if trainer == "slime" else miles.log_rollout_data
    sys.modules.pop(miles.MODULE, None)
    with pytest.raises(InputError) as refused:
        types.FunctionType(_call.__code__, {})(hook, args)
    assert str(refused.value) == f"{trainer}'s build_dp_schedule = absent: expected {wanted}"


def _call(hook: Callable[..., bool], args: Any) -> bool:
    return hook(0, args, [], None, 1.0)


# Ranks


def test_ranks_follow_from_megatrons_arguments() -> None:
    """Two tensor ranks to a DP rank, four EP ranks to a group, contexts of two: by the sizes, one
    group has the ranks of one DP rank or of more."""
    args = arguments(tensor_model_parallel_size=2, expert_model_parallel_size=8)
    topology = topology_of(args, parallel(dp=8, cp=2))
    assert (topology.edp, topology.groups) == (4, ((0, 1), (2, 3), (4, 5), (6, 7)))
    args.expert_tensor_parallel_size = None  # Megatron's default: that of the dense layers
    assert topology_of(args, parallel(dp=8, cp=2)).groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    args.use_tp_pp_dp_mapping = True
    args.pipeline_model_parallel_size = 2
    with pytest.raises(InputError) as refused:
        topology_of(args, parallel(dp=8, cp=2))
    assert str(refused.value) == (
        "order = 'tp-cp-ep-pp-dp': expected an order that ends in pp, as dense and expert pipeline "
        "groups differ"
    )


def test_a_layout_of_ranks_that_cannot_be_planned(
    trainer: str, logged: Logged, caplog: pytest.LogCaptureFixture
) -> None:
    """Where a DP rank spans two EP groups, every step runs as the trainer has it."""
    warnings, _ = failing(
        trainer, logged, caplog, samples_of(LENGTHS),
        tensor_model_parallel_size=4, expert_model_parallel_size=2, expert_tensor_parallel_size=1,
    )  # fmt: skip
    assert warnings == [
        f"{KEPT}ep * etp = 2: expected a multiple of tp * cp = 4, or a DP rank spans several EP "
        f"groups"
    ]


def test_the_cap_is_that_of_all_context_ranks(trainer: str, logged: Logged) -> None:
    """slime and miles pack max_tokens_per_gpu times the context ranks into a micro-batch."""
    args = arguments(
        max_tokens_per_gpu=32, expert_model_parallel_size=4, routepack=settings_of("pack")
    )
    running = process(trainer, next_fit)
    schedule = running.rollout(args, samples_of(LENGTHS), config=parallel(cp=2))
    assert schedule != owned(args, cp=2)
    check: dict[str, Any] = dict(global_batch_size=32, dp=4)
    assert broken_schedule(schedule, LENGTHS, range(32), cap=64, **check) == []
    assert broken_schedule(schedule, LENGTHS, range(32), cap=48, **check) != []


def test_packers_need_ranks_that_can_be_planned() -> None:
    """The same refusal from the class that any trainer uses."""
    spanning = routepack.Topology(dp=2, ep=2, edp=4, tp=4)
    with pytest.raises(InputError) as refused:
        Packer(spanning, 8)
    assert str(refused.value) == (
        "ep * etp = 2: expected a multiple of tp * cp = 4, or a DP rank spans several EP groups"
    )


# Nothing happens by importing


def test_importing_touches_no_trainer() -> None:
    """Neither a trainer nor torch is imported, and no kernel is loaded."""
    code = (
        "import sys\n"
        "import routepack.integrations.slime, routepack.integrations.miles\n"
        "import routepack.integrations.generic, routepack.integrations.semantics\n"
        "print(*{name.split('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"slime", "miles", "torch", "ray", "numba"} & set(done.stdout.split())
