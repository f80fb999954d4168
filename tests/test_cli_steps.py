"""`routepack plan --steps --pass` and `routepack verify` of what they write."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import routepack
from cli_helpers import COST, METADATA, SIZES, counted, fill, run
from routepack import files
from routepack.cli import terminal
from routepack.cli.steps import read_plans
from routepack.cost import AttentionStage, CostModel
from routepack.errors import InputError
from routepack.objective import score
from routepack.planset import PlanSet

STEPS = (0, 1, 0, 1, 1, 0, 1, 0)  # of lengths 5 3 6 2 4 4 1 7: samples 0, 2, 5, 7 need two rows
GROUPS = (0, 0, 1, 1, 2, 2, 3, 3)
OUT = ("--out", "p.json")


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Compiled before any test, as that takes long and says so on stderr."""
    terminal.loading_kernels()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window w, the same with the steps of its samples and their prompts in s."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    labels = {"step": np.array(STEPS, np.int32), "group": np.array(GROUPS, np.int32)}
    save_file(counted() | labels, "s", METADATA)


def planned(path: str = "p.json") -> PlanSet:
    """The planset of a file."""
    plans = read_plans(Path(path))
    assert isinstance(plans, PlanSet)
    return plans


def lines(out: str) -> list[str]:
    """The lines of an output, with single spaces."""
    return [" ".join(line.split()) for line in out.splitlines()]


def test_the_steps_of_the_window_are_kept() -> None:
    """A plan for each step that the window states, of the samples that it states for it."""
    code, out, err = run("plan", "s", *SIZES, "--steps", "given", *OUT)
    assert (code, err) == (0, "")
    found = planned()
    assert [found.samples_of(k).tolist() for k in range(2)] == [[0, 2, 5, 7], [1, 3, 4, 6]]
    assert json.loads(Path("p.json").read_text())["format"] == "routepack.planset/1"
    assert lines(out)[-1] == "wrote p.json"
    assert run("verify", "s", "p.json") == (0, "OK: p.json holds for s\n", "")


def test_a_number_of_steps_deals_the_samples_out() -> None:
    """Four steps of two samples each; the same command writes the same bytes."""
    for out in ("p.json", "q.json"):
        assert run("plan", "w", *SIZES, "--steps", "4", "--out", out)[0] == 0
    assert Path("p.json").read_bytes() == Path("q.json").read_bytes()
    found = planned()
    assert [len(found.samples_of(k)) for k in range(4)] == [2] * 4
    assert sorted(i for k in range(4) for i in found.samples_of(k)) == list(range(8))
    assert run("verify", "w", "p.json") == (0, "OK: p.json holds for w\n", "")


def test_passes_have_a_cap_and_a_cost_of_their_own() -> None:
    """A cost model from a file, or that of the steps; and the placement of the steps.

    The default costs 60 and 20 are per cap of 8 tokens and per square of it, so for a cap of 12
    they are 60 * 1.5 and 20 * 1.5^2, and an expert cost of 1.5.
    """
    passes = ("--pass", "log prob:16:c.toml", "--pass", "ref:12")
    assert run("plan", "s", *SIZES, "--steps", "given", *passes, *OUT)[0] == 0
    found = planned()
    assert list(found.passes) == ["log prob", "ref"]
    log_prob, ref = found.passes.values()
    assert (log_prob.token_cap, ref.token_cap) == (16, 12)
    assert log_prob.cost_model == CostModel.from_toml("c.toml")
    assert ref.cost_model == CostModel((AttentionStage("attention", 90.0, 45.0),), expert=1.5)
    assert log_prob.placement == ref.placement == found.plans[1].placement
    assert run("verify", "s", "p.json") == (0, "OK: p.json holds for s\n", "")


@pytest.mark.parametrize("normalise", ["cap", "window"])
def test_a_pass_costs_as_the_steps_whatever_its_cap(normalise: str) -> None:
    """A pass without a cost model has the times of the steps: for its samples in the same rows, a
    cap of 16 instead of 8 changes no cost."""
    Path("d.toml").write_text(f'normalise = "{normalise}"\n{COST}')
    flags = ("--cost-model", "d.toml", "--pass", "ref:16")
    assert run("plan", "w", *SIZES, *flags, *OUT)[0] == 0
    window, found = files.read_window("w"), planned()
    step, ref = found.plans[0], found.passes["ref"]
    costs = [
        plan.cost_model.resolve(window, plan.to_topology(), plan.token_cap) for plan in (step, ref)
    ]
    scores = [
        score(window, step.to_topology(), cost, step.placement_LE, step.rows) for cost in costs
    ]
    assert scores[1].slowest_shard == pytest.approx(scores[0].slowest_shard, rel=1e-12)


def test_passes_alone_go_with_one_step() -> None:
    """Without --steps the batch is one step, as it is without --pass, whatever the window says."""
    flags = ("--together", "cell", "--token-cap", "16", "--pass", "ref:16")
    assert run("plan", "s", *SIZES, *flags, *OUT)[0] == 0
    found = planned()
    assert [found.samples_of(k).tolist() for k in range(len(found.plans))] == [list(range(8))]


def test_without_the_options_the_file_is_a_plan() -> None:
    """The same window, steps and all, is then one optimizer step."""
    assert run("plan", "s", *SIZES, *OUT)[0] == 0
    assert files.read_plan("p.json").window.samples == 8


def test_the_summary_has_a_line_for_each_step_and_pass() -> None:
    """Step 0 has 22 tokens, two rows of two cells of 8; step 1 has 10, one row. A pass whose cap
    holds all 32 tokens still has a cell on each of the two ranks."""
    flags = ("--steps", "given", "--pass", "ref:32")
    _, out, _ = run("plan", "s", *SIZES, "--together", "rank", *flags, *OUT)
    found = planned()
    (zero, one), ref = found.plans, found.passes["ref"]
    facts = lines(out)
    assert "required together = rank" in facts
    table = facts[facts.index("samples cap rows certified slowest shard gap") + 2 : -1]
    assert [line.rsplit(" ", 2)[0] for line in table] == [
        "step 0 4 8 2 yes",
        "step 1 4 8 1 yes",
        "all steps 8 3",
        "pass ref 8 32 1 yes",
    ]
    bounds = [plan.certificate.cost_lower_bound for plan in (zero, one)]
    slowest = [plan.score.slowest_shard for plan in (zero, one)]
    shown = [line.split()[-1] for line in table]
    assert shown == [
        f"{gap:.2%}"
        for gap in (
            zero.certificate.gap,
            one.certificate.gap,
            sum(slowest) / sum(bounds) - 1,
            ref.certificate.gap,
        )
    ]
    assert float(table[2].split()[-2]) == pytest.approx(sum(slowest), rel=1e-4)


def test_rows_that_are_not_certified_say_what_is_proven() -> None:
    """A plan of two rows that claims a bound of one: the summary shows both numbers."""
    from routepack.cli.steps import planset_summary

    run("plan", "s", *SIZES, "--steps", "given", *OUT)
    content = json.loads(Path("p.json").read_text())
    content["plans"][0]["certificate"] |= {"rows_lower_bound": 1, "rows_certified": False}
    found = PlanSet.from_bytes(json.dumps(content).encode())
    found.plans[0].stats.update(planning_seconds=1.0, evaluations=10)
    console = terminal.stdout()
    with console.capture() as capture:
        console.print(planset_summary(found, cost_source="", apart_seconds={}))
    assert any(line.startswith("step 0 4 8 2 at least 1 ") for line in lines(capture.get()))


def test_options_of_plan_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requirements, placement, budget, seed and threads are what `routepack.plan` would get."""
    asked: list[dict[str, Any]] = []

    def seen(*_: object, **options: Any) -> None:
        asked.append(options)
        raise InputError("seen")

    monkeypatch.setattr(routepack, "plan", seen)
    monkeypatch.setattr(routepack, "plan_steps", seen)
    flags = ("--rows-multiple-of", "2", "--fixed-placement", "--seed", "3", "--threads", "1")
    for more in ((), ("--steps", "2"), ("--steps", "given")):
        assert run("plan", "s", *SIZES, *flags, *more, *OUT) == (2, "", "error: seen\n")
    single, two, given = asked
    assert single.pop("method") == "routepack"
    assert two == single | {"steps": 2, "passes": []}
    assert given == single | {"steps": None, "passes": []}
    assert (single["requirements"].rows_multiple_of, single["seed"]) == (2, 3)


def test_a_batch_continues_from_the_placement_of_another() -> None:
    """--current-placement takes a planset, and the report names it."""
    run("plan", "s", *SIZES, "--steps", "given", *OUT)
    held = ("--current-placement", "p.json", "--fixed-placement")
    for more in ((), ("--steps", "2")):
        _, out, _ = run("plan", "s", *SIZES, *held, *more, "--out", "q.json")
        assert "experts moved 0 of 8 are on another EP rank than p.json" in lines(out)
        held_now = read_plans(Path("q.json"))
        first = held_now.plans[0] if isinstance(held_now, PlanSet) else held_now
        assert first.placement == planned().plans[0].placement


def test_statistics() -> None:
    """Times are in the statistics, those of a pass under its name, and never in the planset."""
    run("plan", "s", *SIZES, "--steps", "2", "--pass", "ref:16", *OUT, "--stats", "t.json")
    stats = json.loads(Path("t.json").read_text())
    keys = {"kernels_seconds", "reading_seconds", "planning_seconds", "evaluations", "passes"}
    assert set(stats) == keys
    assert stats["passes"]["ref"]["planning_seconds"] > 0
    assert "seconds" not in Path("p.json").read_text()


def test_verify_lists_broken_invariants() -> None:
    """A line for each lie, with the step or pass that tells it; exit code 1."""
    run("plan", "s", *SIZES, "--steps", "given", "--pass", "ref:16", *OUT)
    content = json.loads(Path("p.json").read_text())
    step, ref = content["plans"][1], content["passes"]["ref"]
    total, worst = step["score"]["total"], ref["score"]["worst_row"]
    step["score"]["total"] = ref["score"]["worst_row"] = 1.0
    Path("p.json").write_text(json.dumps(content))
    assert run("verify", "s", "p.json") == (
        1,
        f"plans[1]: score.total = 1.0: expected {total!r}\n"
        f"passes[ref]: score.worst_row = 1.0: expected {worst!r}\n",
        "",
    )


def test_verify_misses_a_step() -> None:
    """Without its second plan the set leaves samples out."""
    run("plan", "s", *SIZES, "--steps", "given", *OUT)
    content = json.loads(Path("p.json").read_text())
    del content["plans"][1]
    Path("p.json").write_text(json.dumps(content))
    line = "plans = no sample 1: expected each sample in a step\n"
    assert run("verify", "s", "p.json") == (1, line, "")


def test_verify_with_the_wrong_window() -> None:
    """That says nothing about the plans, so it is an error of the command."""
    run("plan", "s", *SIZES, "--steps", "given", *OUT)
    found = "expected the one that the planset was made for, found another"
    assert run("verify", "w", "p.json") == (2, "", f"error: p.json: window: {found}\n")


BAD_SETS: list[tuple[dict[str, Any], str]] = [
    ({"plans": []}, "plans: expected at least one"),
    (
        {"more": 1},
        "more: expected exactly the keys format, passes, placement, plans, window",
    ),
    ({"format": "routepack.planset/2"}, "format = 'routepack.planset/2': expected "
     "'routepack.plan/1'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_SETS)
def test_files_that_are_no_plansets(change: dict[str, Any], message: str) -> None:
    """One line, exit code 2."""
    run("plan", "s", *SIZES, "--steps", "given", *OUT)
    content = json.loads(Path("p.json").read_text())
    Path("p.json").write_text(json.dumps(content | change))
    assert run("verify", "s", "p.json") == (2, "", f"error: p.json: {message}\n")


NAME_CAP = "expected NAME:CAP or NAME:CAP:COST.toml"
BAD: list[tuple[Sequence[str], str]] = [
    # what does not go together
    (
        ("--steps", "2", "--method", "kk"),
        "--steps, --method: expected routepack with --steps, not kk",
    ),
    (
        ("--pass", "ref:8", "--method", "baseline"),
        "--pass, --method: expected routepack with --pass, not baseline",
    ),
    # the steps
    (("--steps", "two"), "--steps = 'two': expected given, or a number of steps"),
    (("--steps", ""), "--steps = '': expected given, or a number of steps"),
    (("--steps", "0"), "steps = 0: expected a whole number in 1..8"),
    (("--steps", "9"), "steps = 9: expected a whole number in 1..8"),
    (("--steps", "3"), "samples = 8: expected a multiple of the 3 steps"),
    (("--steps", "8"), "samples of step[0] = 1: expected at least the 2 DP ranks"),
    (("--steps", "given"), "step: expected in the window, or a number of steps"),
    # the passes
    (("--pass", "ref"), f"--pass = 'ref': {NAME_CAP}"),
    (("--pass", "ref:many"), f"--pass = 'ref:many': {NAME_CAP}"),
    (("--pass", ":8"), f"--pass = ':8': {NAME_CAP}"),
    (("--pass", "ref:8:"), f"--pass = 'ref:8:': {NAME_CAP}"),
    (("--pass", "ref:0"), f"--pass = 'ref:0': expected a cap in 1..{2**63 - 1}"),
    (("--pass", "ref:8", "--token-cap", "0"), "token_cap = 0: expected a whole number of at least "
     "1"),
    (("--pass", f"ref:{8 * 10**10}"), "--pass ref: attention.quadratic[0] = 2e+21: expected a "
     "finite number in 0..1e+12"),
    (
        ("--pass", "ref:8:none"),
        "none: expected a cost model file, No such file or directory",
    ),
    (("--pass", "ref:8:e.toml"), "e.toml: Object missing required field `attention`"),
    (("--pass", "a:8", "--pass", "a:9"), "pass.name[1] = 'a': expected each name once"),
    (("--steps", "2", "--out", "c.toml", "--pass", "a:8:c.toml"), "c.toml: expected a path for "
     "output, it is also c.toml"),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "message"), BAD)
def test_what_is_refused(flags: Sequence[str], message: str) -> None:
    """One line, exit code 2, and files stay as they were."""
    Path("e.toml").write_text("expert = 1.0\n")
    Path("p.json").write_text("before")
    before = {name: Path(name).read_bytes() for name in sorted(os.listdir())}
    assert run("plan", "w", *SIZES, *OUT, *flags) == (2, "", f"error: {message}\n")
    assert {name: Path(name).read_bytes() for name in sorted(os.listdir())} == before


def test_a_disk_that_fills_leaves_the_old_planset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails half way is one line; the old file stays and no other remains."""
    Path("p.json").write_text("before")
    names = sorted(os.listdir())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    message = "p.json: expected a file that can be written, No space left on device"
    assert run("plan", "w", *SIZES, "--steps", "2", *OUT) == (2, "", f"error: {message}\n")
    assert (Path("p.json").read_text(), sorted(os.listdir())) == ("before", names)
