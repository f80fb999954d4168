"""The parts of bench/ that a table rests on: what is compared must be what it is called."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import routepack
from routepack import Budget, Window
from routepack.population import Chain
from routepack.verify import verify

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("searches", "compare", "scaling", "workloads", "methods")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Modules of bench/, which is no part of the package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield SimpleNamespace(**{n: importlib.import_module(f"bench.{n}") for n in NAMES})


@pytest.fixture(scope="module")
def window(bench: Any) -> Window:
    """256 samples in two rows."""
    made = bench.workloads.WORKLOADS["moonlight-gsm8k"].window(0)
    assert made is not None
    return made


# --- searches ----------------------------------------------------------------------------------


def test_the_shipped_method_is_the_shipped_planner(bench: Any, window: Window) -> None:
    """What the comparison calls routepack gives the bytes of routepack.plan."""
    workload = bench.workloads.WORKLOADS["moonlight-gsm8k"]
    topology, cost_model = bench.methods.setting(workload)
    budget = Budget(evaluations=20_000)
    made = bench.searches.plan(bench.searches.SHIPPED, window, workload, budget)
    own = routepack.plan(
        window, topology, token_cap=workload.token_cap, cost_model=cost_model, budget=budget
    )
    assert made.to_bytes() == own.to_bytes()


def test_every_method_plans_within_its_budget(bench: Any, window: Window) -> None:
    """Each verifies, spends no more than it may, repeats itself, and is not above reorder-kk."""
    workload = bench.workloads.WORKLOADS["moonlight-gsm8k"]
    budget = Budget(evaluations=20_000)
    kk, *others = (
        bench.searches.plan(method, window, workload, budget) for method in bench.searches.METHODS
    )
    for method, made in zip(bench.searches.METHODS[1:], others, strict=True):
        assert verify(window, made) == []
        assert 0.99 * 20_000 <= made.search.evaluations <= 20_000
        assert made.score.key <= kk.score.key
        again = bench.searches.plan(method, window, workload, budget)
        assert again.to_bytes() == made.to_bytes()


def test_only_a_resampled_population_copies_chains(
    bench: Any, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Population annealing replaces chains by others; independent annealing never does."""
    workload = bench.workloads.WORKLOADS["moonlight-gsm8k"]
    copied = []
    own = Chain.copy_from
    monkeypatch.setattr(
        Chain, "copy_from", lambda chain, other: (copied.append(1), own(chain, other))
    )
    budget = Budget(evaluations=20_000)
    independent = bench.searches.SEARCHES["independent annealing"]
    method = bench.searches.Method("independent annealing", independent, False)
    bench.searches.plan(method, window, workload, budget)
    assert copied == []
    bench.searches.plan(bench.searches.PAPER, window, workload, budget)
    assert copied != []


def test_a_fixed_placement_stays_as_lpt_made_it(bench: Any, window: Window) -> None:
    """Only a row-aware method changes the placement of reorder-kk."""
    workload = bench.workloads.WORKLOADS["moonlight-gsm8k"]
    budget = Budget(evaluations=20_000)
    kk = bench.searches.plan(bench.searches.KK, window, workload, budget)
    for method in bench.searches.METHODS:
        made = bench.searches.plan(method, window, workload, budget)
        assert (made.placement != kk.placement) == method.row_aware


energies = st.floats(1.0, 2.0)
temperatures = st.floats(0.1, 10.0)


@given(energies, temperatures, energies, temperatures)
def test_an_exchange_keeps_detailed_balance(
    bench: Any, a: float, s: float, b: float, t: float
) -> None:
    """Boltzmann weight times exchange probability is the same in both directions."""
    odds = bench.searches.exchange_odds
    stay, change = math.exp(-a / s - b / t), math.exp(-b / s - a / t)
    assert math.isclose(stay * odds(a, s, b, t), change * odds(b, s, a, t), rel_tol=1e-9)


def test_a_better_layout_always_goes_to_the_colder_place(bench: Any) -> None:
    """Energies 1 and 2 at temperatures 4 and 2: exchanged always; in place, e^-(1/4) of times."""
    assert bench.searches.exchange_odds(1.0, 4.0, 2.0, 2.0) == 1.0
    assert math.isclose(bench.searches.exchange_odds(1.0, 2.0, 2.0, 4.0), math.exp(-0.25))


# --- statistics --------------------------------------------------------------------------------


def test_the_interval_of_equal_differences_is_a_point(bench: Any) -> None:
    """Drawn anew, windows that all differ by 3 % still do."""
    assert bench.compare.interval(np.full(30, 3.0)) == (3.0, 3.0)


def test_the_interval_surrounds_the_median(bench: Any) -> None:
    """Of 0 to 30 the median is 15; its interval is about 1.96 * 1.25 * sd / sqrt(31) wide."""
    low, high = bench.compare.interval(np.arange(31.0))
    assert 8 <= low < 15 < high <= 22


def test_differences_are_paired(bench: Any) -> None:
    """Two windows, each 1 % better: wins on both, however far apart the windows are."""
    none = np.zeros(2)
    base = bench.compare.Runs(np.array([1.0, 2.0]), none, none)
    runs = bench.compare.Runs(np.array([0.99, 1.98]), none, none)
    assert bench.compare.against(runs, base) == ["-1.000 (-1.000 to -1.000)", "2 / 0"]
    assert bench.compare.against(base, base) == ["", ""]


# --- windows of the scaling benchmark ----------------------------------------------------------


@given(st.integers(6, 10_000), st.integers(0, 2**32 - 1), st.floats(0.0, 3.0))
def test_rounded_counts_conserve_tokens(bench: Any, tokens: int, seed: int, sd: float) -> None:
    """Every layer has top-8 times the tokens, and no expert more than the tokens."""
    rng = np.random.default_rng(seed)
    count_LE = bench.scaling.rounded(np.exp(sd * rng.standard_normal((3, 64))), tokens, rng)
    assert (count_LE.sum(axis=1) == bench.scaling.TOP_K * tokens).all()
    assert count_LE.min() >= 0
    assert count_LE.max() <= tokens
