"""`routepack plan` with padding, estimates of missing routes, and pipeline stages."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from cli_helpers import METADATA, SIZES, counted, fill, run
from routepack.cli import terminal
from routepack.files import read_plan, read_window
from routepack.fill import fill_of
from routepack.objective import score
from routepack.padding import with_fill
from routepack.plan import Plan
from routepack.planset import PlanSet
from routepack.report.text import cost_text
from routepack.verify import verify


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    """Compiled before any test, as that takes long and says so on stderr."""
    terminal.loading_kernels()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window w, and the same without the route of each sample's last token in m."""
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    tensors = counted()
    lengths_S = tensors["lengths"] + 1
    missing_S = np.ones(len(lengths_S), np.int32)
    save_file({**tensors, "lengths": lengths_S, "missing": missing_S}, tmp_path / "m", METADATA)


def planned(window: str, *flags: str) -> Plan:
    """The plan that a command writes, which verifies."""
    code, _, err = run("plan", window, *SIZES, *flags, "--out", "p.json")
    assert (code, err) == (0, "")
    plan = read_plan("p.json")
    assert verify(read_window(window), plan) == []
    return plan


def test_padding_counts_under_the_cap() -> None:
    """Padded to 4, the lengths 5 3 6 2 4 4 1 7 take 8 4 8 4 4 4 4 8: 44 tokens need six cells."""
    plan = planned("w", "--pad-multiple", "4")
    assert len(plan.rows) == 3
    assert plan.padding is not None
    assert plan.padding.multiple == 4


def test_context_parallelism_pads_to_twice_its_ranks() -> None:
    """cp = 2 and tp = 2: every length becomes 8, so that each sample fills a cell."""
    assert len(planned("w", "--pad-cp", "2", "--pad-tp", "2").rows) == 4


def test_padding_goes_to_stated_experts(tmp_path: Path) -> None:
    """All padding on experts 0 and 1 costs more than padding that is not routed."""
    (tmp_path / "ids.json").write_text("[[0, 1], [0, 1]]")
    free = planned("w", "--pad-multiple", "4").score.expert
    assert planned("w", "--pad-multiple", "4", "--pad-experts", "ids.json").score.expert > free


@pytest.mark.parametrize("how", ["sample", "window", "none"])
def test_an_estimate_is_stated_with_its_margin(how: str) -> None:
    """Eight tokens have no route; the margin says what they may cost."""
    plan = planned("m", "--missing", how)
    assert plan.estimate is not None
    assert (plan.estimate.how, plan.estimate.unknown_tokens) == (how, 8)
    low, high = plan.certificate.cost_low, plan.certificate.cost_high
    assert low is not None
    assert high is not None
    # Not estimated, missing tokens load no rank, which no route can do.
    assert (low <= plan.score.slowest_shard) == (how != "none")
    assert plan.score.slowest_shard < high
    assert low < high


def test_pipeline_stages_only_order_rows() -> None:
    """With a layer per stage the rows are the same up to their order, as is the score."""
    plain, ordered = planned("w"), planned("w", "--layers-per-stage", "2,1")
    assert sorted(ordered.rows) == sorted(plain.rows)
    assert ordered.score == plain.score


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--layers-per-stage", "2,x"),
            "--layers-per-stage = '2,x': expected whole numbers, such as 12,12,12,12",
        ),
        (
            ("--layers-per-stage", "1,2", "--steps", "2"),
            "--layers-per-stage: expected without --steps and --pass",
        ),
        (("--pad-multiple", "0"), "padding.multiple = 0: expected a whole number in 1..2147483647"),
        (("--pad-multiple", "16"), "lengths[0] = 16: expected at most the token cap 8"),
        (
            ("--pad-experts", "absent.json"),
            "absent.json: expected a file of expert ids, No such file or directory",
        ),
        (
            ("--pad-missing",),
            "padding.fills_missing = True: expected False where padding rows have no experts",
        ),
    ],
)
def test_what_is_refused_is_one_line(flags: tuple[str, ...], message: str) -> None:
    """Exit code 2, one line, no file."""
    code, out, err = run("plan", "w", *SIZES, *flags, "--out", "p.json")
    assert (code, out, err) == (2, "", f"error: {message}\n")
    assert not Path("p.json").exists()


# The experts of padding rows


def test_experts_of_padding_are_written() -> None:
    """Padded to 4 the samples get 3 1 2 2 0 0 3 1 rows, each with two experts of its own at both
    layers; the report says what they cost, and the file is that of the library."""
    plan = planned("w", "--pad-multiple", "4", "--pad-experts", "fill")
    code, out, err = run("padding", "w", "p.json", "--out", "f")
    assert (code, err) == (0, "")
    tensors = load_file("f")
    assert tensors["offsets"].tolist() == [0, 3, 4, 6, 8, 8, 8, 11, 12]
    ids_PLK = tensors["ids"]
    assert (ids_PLK.dtype, ids_PLK.shape) == (np.uint16, (12, 2, 2))
    assert (ids_PLK[..., 0] != ids_PLK[..., 1]).all()
    window = read_window("w")
    chosen = fill_of(window, plan)
    assert ids_PLK.tolist() == chosen.ids_PLK.tolist()
    bare = plan.trained().window(window)
    full, topology = with_fill(bare, chosen), plan.to_topology()
    cost = plan.cost_model.resolve(bare, topology, plan.token_cap)
    after = score(full, topology, cost, plan.placement_LE, plan.rows).slowest_shard
    assert after > plan.score.slowest_shard
    assert out.splitlines() == [
        "padding rows   12 in 6 samples, 27.3% of all tokens",
        f"slowest shard  {cost_text(plan.score.slowest_shard)} without them, "
        f"{cost_text(after)} with them",
        "wrote f",
    ]
    with safe_open("f", "numpy") as file:
        assert file.metadata() == {
            "format": "routepack.fill/1",
            "num_experts": "4",
            "top_k": "2",
            "moe_layers": "[1, 2]",
            "window_sha256": window.sha256,
        }


def test_experts_of_padding_of_several_steps() -> None:
    """Each sample has its rows, whatever its step, and the cost is that of all steps."""
    sizes = (*SIZES, "--steps", "2", "--pad-multiple", "4", "--pad-experts", "fill")
    assert run("plan", "w", *sizes, "--pass", "ref:16", "--out", "p.json")[0] == 0
    code, out, err = run("padding", "w", "p.json", "--out", "f")
    assert (code, err) == (0, "")
    assert load_file("f")["offsets"].tolist() == [0, 3, 4, 6, 8, 8, 8, 11, 12]
    steps = PlanSet.from_bytes(Path("p.json").read_bytes()).plans
    before = sum(step.score.slowest_shard for step in steps)
    assert out.splitlines()[1].startswith(f"all steps      {cost_text(before)} without them, ")


def test_padding_that_is_refused() -> None:
    """A plan whose padding has experts or none, that does not hold, that is of another window, or
    that would be overwritten: one line, exit code 2, no file."""

    def refused(window: str = "w", out: str = "f") -> str:
        code, shown, err = run("padding", window, "p.json", "--out", out)
        assert (code, shown) == (2, "")
        assert not Path("f").exists()
        return err

    planned("w")
    settled = "expected 'fill', so that they can be chosen"
    assert refused() == f"error: p.json: padding.experts = none: {settled}\n"
    Path("ids.json").write_text("[[0, 1], [0, 1]]")
    planned("w", "--pad-multiple", "4", "--pad-experts", "ids.json")
    assert refused() == f"error: p.json: padding.experts = expert ids: {settled}\n"
    assert refused(out="p.json") == "error: p.json: expected a path for output, it is also p.json\n"
    plan = planned("w", "--pad-multiple", "4", "--pad-experts", "fill")
    assert refused("m").startswith("error: p.json: window.sha256 = ")
    wrong = msgspec.structs.replace(plan.score, total=1.0)
    Path("p.json").write_bytes(msgspec.structs.replace(plan, score=wrong).to_bytes())
    assert refused() == f"error: p.json: score.total = 1.0: expected {plan.score.total!r}\n"
