"""Short deadlines on generated windows: the promise that a plan is worth having at any time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

import routepack
from routepack import AttentionStage, Budget, CostModel, Topology
from routepack.verify import verify

BENCH = Path(__file__).parents[1] / "bench" / "workloads.py"
# 300 windows in all; the larger ones take a second each to generate.
WINDOWS = {
    "moonlight-gsm8k": 120,
    "moonlight-mixed": 60,
    "gptoss120b-agent": 50,
    "qwen3-30b-math": 40,
    "ling-flash-code": 15,
    "dsv3-math": 15,
}


def workloads() -> Any:
    """bench/workloads.py, which is no part of the package."""
    if "bench_workloads" not in sys.modules:
        spec = importlib.util.spec_from_file_location("bench_workloads", BENCH)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["bench_workloads"] = module
        spec.loader.exec_module(module)
    return sys.modules["bench_workloads"].WORKLOADS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"), [(name, seed) for name, count in WINDOWS.items() for seed in range(count)]
)
def test_fifty_milliseconds_are_never_wasted(name: str, seed: int) -> None:
    """With 50 ms a plan verifies and is at most the better of reorder and reorder-kk."""
    workload = workloads()[name]
    window = workload.window(seed)
    topology = Topology.of(dp=workload.dp, ep=workload.ep, edp=workload.edp)
    stages = (
        AttentionStage(str(k), float(a), float(b)) for k, (a, b) in enumerate(workload.attention)
    )
    options: dict[str, Any] = {
        "token_cap": workload.token_cap,
        "cost_model": CostModel(tuple(stages)),
        "threads": 1,
    }
    plan = routepack.plan(window, topology, budget=Budget(seconds=0.05), **options)
    assert verify(window, plan) == []
    for method in ("reorder", "reorder-kk"):
        own = routepack.plan(window, topology, method=method, **options)
        if len(own.rows) == len(plan.rows):
            assert plan.score.key <= own.score.key
        else:
            assert len(own.rows) > len(plan.rows)
