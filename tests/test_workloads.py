"""The benchmark workloads: the same windows as the calibration tool, and counts that conserve."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT.parent / "shared" / "tools" / "synth_trace.py"


def load_module(path: Path) -> ModuleType:
    """Import a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks its module up
    spec.loader.exec_module(module)
    return module


workloads = load_module(ROOT / "bench" / "workloads.py")
SYNTHETIC = [w for w in workloads.WORKLOADS.values() if isinstance(w.origin, workloads.Recipe)]
REAL = [w for w in workloads.WORKLOADS.values() if not isinstance(w.origin, workloads.Recipe)]


def named(items: list) -> list:
    return [pytest.param(workload, id=workload.name) for workload in items]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    """The project's calibration tool, which defines the windows."""
    if not TOOL.exists():
        pytest.skip(f"needs {TOOL}, which is not part of the repository")
    return load_module(TOOL)


@pytest.mark.parametrize(
    ("name", "seed"), [("moonlight-gsm8k", 0), ("moonlight-gsm8k", 7), ("gptoss120b-agent", 1)]
)
def test_windows_equal_the_calibration_tool(tool: ModuleType, name: str, seed: int) -> None:
    """Lengths, demand, tasks and prompts are bit-identical."""
    theirs, _ = tool.make(name, seed)
    ours = workloads.generate(workloads.WORKLOADS[name].origin, seed)
    np.testing.assert_array_equal(ours.lengths_S, theirs["seq_len"], strict=True)
    np.testing.assert_array_equal(ours.demand_SLE, theirs["counts"], strict=True)
    np.testing.assert_array_equal(ours.task_S, theirs["task"], strict=True)
    np.testing.assert_array_equal(ours.prompt_S, theirs["group"], strict=True)


@pytest.mark.parametrize("routing", sorted(workloads.ROUTINGS))
def test_clipped_draws_equal_the_calibration_tool(tool: ModuleType, routing: str) -> None:
    """Where short samples draw an expert more than once per token, the surplus moves alike."""
    recipe = workloads.Recipe(
        "toy", 5, 16, 8, 40, 4, routing, 2, workloads.Lengths(20, 1.0, 60, (1, 5))
    )
    ours = workloads.generate(recipe, seed=11)
    theirs = tool.generate(11, 40, 5, 16, 8, routing, 2, 4, lens=ours.lengths_S)
    np.testing.assert_array_equal(ours.demand_SLE, theirs["counts"], strict=True)
    full_S = (ours.demand_SLE == ours.lengths_S[:, None, None]).any(axis=(1, 2))
    assert full_S.mean() > 0.2  # clipping is what this test is about


@pytest.mark.parametrize("name", sorted(w.name for w in SYNTHETIC if "ling3" not in w.name))
def test_recipes_equal_the_calibration_tool(tool: ModuleType, name: str) -> None:
    """Shape, routing, lengths and layout of every shared name are the tool's."""
    ours, theirs = workloads.WORKLOADS[name], tool.SUITE[name]
    recipe = ours.origin
    assert (ours.dp, ours.ep, ours.edp, ours.token_cap) == tuple(
        theirs[key] for key in ("DP", "EP", "EDP", "cap")
    )
    assert (recipe.layers, recipe.experts, recipe.top_k) == tuple(theirs[key] for key in "LEK")
    assert (recipe.samples, recipe.rollouts, recipe.routing, recipe.tasks) == tuple(
        theirs[key] for key in ("S", "G", "preset", "tasks")
    )
    law = {"prompt": (60, 400), "within": 0.45} | theirs["len"]
    assert recipe.lengths == tuple(
        law[key] for key in ("median", "sigma", "cap", "prompt", "within")
    )
    routing = tool.PRESETS[recipe.routing]
    assert workloads.ROUTINGS[recipe.routing] == tuple(
        routing[key] for key in ("k", "sf", "se", "D", "decay", "vt", "vp", "vr")
    )


@pytest.mark.parametrize("routing", sorted(workloads.ROUTINGS))
def test_demand_is_conserved(routing: str) -> None:
    """Every token is at K different experts: sums are K * n, and no expert exceeds n."""
    lengths = workloads.Lengths(20, 1.0, 60, (1, 5))
    recipe = workloads.Recipe("toy", 3, 16, 8, 21, 4, routing, 2, lengths)
    trace = workloads.generate(recipe, seed=3)
    expected_SL = np.repeat(8 * trace.lengths_S[:, None], 3, axis=1)
    np.testing.assert_array_equal(trace.demand_SLE.sum(2), expected_SL)
    assert (trace.demand_SLE <= trace.lengths_S[:, None, None]).all()
    assert trace.demand_SLE.min() >= 0


def test_seeds_differ_and_repeat() -> None:
    """A seed names one window."""
    recipe = workloads.WORKLOADS["moonlight-gsm8k"].origin._replace(samples=16)
    first, again, other = (workloads.generate(recipe, seed) for seed in (5, 5, 6))
    np.testing.assert_array_equal(first.demand_SLE, again.demand_SLE)
    assert not np.array_equal(first.lengths_S, other.lengths_S)


def test_registry_order() -> None:
    """Twelve workloads with reference numbers come first, real windows last among them."""
    names = list(workloads.WORKLOADS)
    assert names[:12] == [w.name for w in workloads.WORKLOADS.values() if w.reference]
    assert names[7:12] == [w.name for w in REAL]
    assert names[12:] == ["dsv3-mixed", "ling3-tiny", "ling3-flash"]


@pytest.mark.parametrize("workload", named(list(workloads.WORKLOADS.values())))
def test_layouts_divide(workload: object) -> None:
    """Experts divide over EP ranks, DP ranks over shards, and every sample fits the cap."""
    assert workload.dp % workload.edp == 0
    if isinstance(workload.origin, workloads.Recipe):
        assert workload.origin.experts % workload.ep == 0
        law = workload.origin.lengths
        longest = law.cap_tokens + law.prompt_tokens[1] - 1
        # GSM8K answers are cut at the cap but never come near it: 16 standard deviations.
        assert longest <= workload.token_cap or law is workloads.GSM8K
    if workload.reference:
        reached = list(workload.reference.values())
        assert reached[3:] == sorted(reached[3:], reverse=True)
        assert min(reached) == reached[-1] > 1


@pytest.mark.parametrize("ep", [4, 8, 16, 32, 64])
@pytest.mark.parametrize(("size", "edp"), [("tiny", 1), ("flash", 2)])
def test_ling3_layouts(size: str, edp: int, ep: int) -> None:
    """The paper's windows exist at EP4 to EP64, one DP rank per EP rank and shard."""
    workload = workloads.ling3(size, ep)
    assert (workload.dp, workload.ep, workload.edp) == (ep * edp, ep, edp)
    assert workload.origin.experts % ep == 0
    assert workload.name == f"ling3-{size}" + ("" if ep == 8 else f"-ep{ep}")


def test_ling3_cost_of_a_token_does_not_depend_on_the_cap() -> None:
    """The quadratic coefficient is in units of (n/C)^2 beside linear n/C: it grows with C."""
    small, large = (workloads.ling3("flash", token_cap=cap) for cap in (1024, 8192))
    assert small.attention == ((60, 2.5),)
    assert large.attention == ((60, 20),)
    assert small.name == "ling3-flash-c1024"


def test_gsm8k_lengths_are_those_measured() -> None:
    """Question and answer lengths have the measured means (59, 103) and spread (0.41)."""
    data = workloads.SHARED_DATA / "lengths.npz"
    if not data.exists():
        pytest.skip(f"needs {data}, which is not part of the repository")
    measured = np.load(data)["gsm8k_4models_grouped"]
    question, answers = measured[:, 0], measured[:, 1:]
    draws = workloads.draw_lengths(np.random.default_rng(0), 200_000, 4, workloads.GSM8K)
    assert abs(draws.mean() - (question.mean() + answers.mean())) < 2
    low, high = workloads.GSM8K.prompt_tokens
    assert abs((low + high - 1) / 2 - question.mean()) < 1
    assert abs(np.log(answers).std() - workloads.GSM8K.sigma) < 0.01
    assert abs(np.median(answers) - workloads.GSM8K.median_tokens) < 1
    logs = np.log(answers)
    within = logs.var(axis=1, ddof=1).mean()
    share = within / (logs.mean(axis=1).var(ddof=1) + within * (1 - 1 / logs.shape[1]))
    assert abs(share - workloads.GSM8K.within) < 0.02


@pytest.mark.parametrize("workload", named(REAL))
def test_real_windows(workload: object) -> None:
    """A window on disk is read with the shape its metadata declares; its rows are its tokens."""
    if workload.skip_reason:
        assert workload.load() is None
        pytest.skip(workload.skip_reason)
    raw = workload.load()
    assert raw["routes"].shape == (raw["lengths"].sum(), len(raw["moe_layers"]), raw["top_k"])
    np.testing.assert_array_equal(np.diff(raw["offsets"]), raw["lengths"])
    assert raw["routes"].max() < raw["experts"]
    assert raw["lengths"].max() <= workload.token_cap
    assert raw["experts"] % workload.ep == 0


def test_absent_files_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without shared data nothing fails: there is no window, and a reason."""
    monkeypatch.setattr(workloads, "SHARED_DATA", tmp_path)
    workload = workloads.WORKLOADS["gptoss20b_dev-c4096"]
    assert workload.load() is None
    assert workload.window() is None
    assert workload.skip_reason == (
        f"gptoss20b_dev-c4096 needs {tmp_path / 'gptoss20b_dev.safetensors'}, "
        "which is not part of the repository"
    )
    assert workloads.WORKLOADS["moonlight-gsm8k"].skip_reason is None


@pytest.mark.parametrize("name", ["moonlight-gsm8k", "deepseek_v2_lite_dev-c1536"])
def test_windows_load_as_routepacks_own_type(name: str) -> None:
    """`window` agrees with `load`, demand counted from routes included."""
    workload = workloads.WORKLOADS[name]
    if workload.skip_reason:
        pytest.skip(workload.skip_reason)
    raw, window = workload.load(), workload.window()
    np.testing.assert_array_equal(window.lengths_S, raw["lengths"])
    assert window.top_k == raw["top_k"]
    assert window.experts == raw["experts"]
    assert window.moe_layers == raw["moe_layers"]
    if "routes" in raw:
        demand_LE = [
            np.bincount(raw["routes"][:, layer].ravel(), minlength=raw["experts"])
            for layer in range(window.layers)
        ]
        np.testing.assert_array_equal(window.demand_LE, demand_LE)
    else:
        np.testing.assert_array_equal(window.demand_SLE, raw["demand"])
