"""The search's state under a trainer's requirements: exact after every move, and never outside
what they allow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit, types
from numpy.typing import NDArray

from kernel_helpers import Words, evaluate_moves, random_words
from requirement_helpers import Case, cases
from routepack import AttentionStage, CostModel, InfeasibleError, Requirements, Topology, population
from routepack.constrained import fewest_rows
from routepack.kernels import evaluation, units
from routepack.kernels.layout import TOTAL_WEIGHT, UNLIMITED, State, Static, state_type, static_type
from routepack.kernels.rng import stream_key
from routepack.kernels.sweep import ACCEPTED, BEST, ENERGY, RESULTS
from routepack.placement import identity, ranks_of
from routepack.population import Chain
from routepack.problem import Problem
from strategies import SEEDS, random_window

MODEL = CostModel((AttentionStage("a", 3.0, 1.0), AttentionStage("b", 1.0, 2.0, window_tokens=9)))
ASKED: dict[str, dict[str, Any]] = {
    "counts": {"equal_samples_per_rank": True},
    "cells": {"max_samples_per_cell": 3},
    "units": {"together": "rank"},
    "tags": {"uniform_rows": True},
    "units and counts": {"together": "rank", "equal_samples_per_rank": True},
    "units and tags": {"together": "rank", "uniform_rows": True},
    "tags and counts": {"uniform_rows": True, "equal_samples_per_rank": True},
    "limit": {"memory_limit_tokens": 0.5},
    "all": {
        "together": "rank", "uniform_rows": True, "equal_samples_per_rank": True,
        "max_samples_per_cell": 4, "memory_limit_tokens": 0.4,
    },
}  # fmt: skip


def started(case: Case, fields: dict[str, Any]) -> tuple[Problem, NDArray[np.int32]] | None:
    """The problem at the fewest rows and a layout; a memory limit is a share of all tokens."""
    fields = dict(fields)
    if "memory_limit_tokens" in fields:
        routed = int(case.window.lengths_S.sum()) * case.window.top_k
        share = fields["memory_limit_tokens"] * routed / case.topology.ep
        fields["memory_limit_tokens"] = max(1, int(share))
    required = Requirements(**fields)
    cost = MODEL.resolve(case.window, case.topology, case.token_cap)
    problem = Problem(case.window, case.topology, cost, case.token_cap, 1)
    try:
        required.check(case.window, case.topology)
        rows, rules, cell_S = fewest_rows(
            case.window, case.token_cap, case.topology, required, problem.work_S, 0
        )
    except InfeasibleError:
        return None
    problem = replace(problem, rows=rows.rows, requirements=required, tag_m=rules.tag_m)
    if cell_S is None:
        from routepack.rows import split_to

        cell_S = problem.from_bins(split_to(rows.bins, problem.cells))
    return problem, cell_S


def static_of(problem: Problem) -> Static:
    window = problem.window
    return problem.static(ranks_of(identity(window.layers, window.experts), problem.topology.ep))


def chain_of(problem: Problem, cell_S: NDArray[np.int32], seed: int) -> Chain:
    static = static_of(problem)
    results = np.zeros(RESULTS)
    results[[ENERGY, BEST]] = problem.measure(static, cell_S).energy
    state = problem.state(static, cell_S)
    return Chain(problem, static, state, stream_key(seed), cell_S.copy(), results)


@pytest.mark.parametrize("name", ASKED)
@given(cases(), SEEDS, st.sampled_from([0.0001, 0.05, 10.0]))
@settings(max_examples=15)
def test_every_accepted_move_keeps_the_state_exact(
    name: str, case: Case, seed: int, heat: float
) -> None:
    """Under every rule, in debug mode: integers and costs equal a recompute by == after each
    accepted move, layouts stay within the rules, and the best has the energy on record."""
    start = started(case, ASKED[name])
    if start is None:
        return
    problem, cell_S = start
    chain = chain_of(problem, cell_S, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(population, "DEBUG", True)
        energy = max(chain.energy, 1e-9)
        chain.sweep(heat * energy, TOTAL_WEIGHT, 0.5 / energy, 80)
    assert problem.fits(chain.state.cell_S[:-1])
    assert problem.fits(chain.best_S)
    measured = problem.measure(chain.static, chain.best_S)
    assert measured.energy == pytest.approx(chain.best, rel=1e-12)
    assert measured.over == np.maximum(loads(problem, chain.best_S) - problem.rules.limit, 0).sum()


def loads(problem: Problem, cell_S: NDArray[np.int32]) -> NDArray[np.int64]:
    """Busiest rank [B, L] of every group and layer, by numpy."""
    window, topology = problem.window, problem.topology
    rank_E = np.arange(window.experts) // (window.experts // topology.ep)
    busiest = []
    for b in range(problem.cells // topology.ranks_per_shard):
        samples = np.flatnonzero(cell_S // topology.ranks_per_shard == b)
        demand_LE = window.demand_SLE[samples].sum(axis=0, dtype=np.int64)
        busiest.append([np.bincount(rank_E, row_E).max() for row_E in demand_LE])
    return np.array(busiest, np.int64)


@pytest.mark.parametrize("name", ["limit", "all"])
@given(cases(), SEEDS)
@settings(max_examples=15)
def test_early_exit_under_a_limit_changes_no_decision(name: str, case: Case, seed: int) -> None:
    """The charge for what is above a limit is in the energy and, as far as it is known, in the
    bound that rejects early: decisions are those of the full energy."""
    start = started(case, ASKED[name])
    if start is None:
        return
    problem, cell_S = start
    static = static_of(problem)
    state = problem.state(static, cell_S)
    words_N2 = random_words(seed, 48)
    full = evaluate_moves(static, state, words_N2, TOTAL_WEIGHT, -np.inf, early=False)
    legal_N = full.x_N >= 0
    if not legal_N.any():
        return
    limit_N = np.random.default_rng(seed).choice(full.energy_N[legal_N], 48)
    early = evaluate_moves(static, state, words_N2, TOTAL_WEIGHT, limit_N, early=True)
    assert (early.energy_N <= full.energy_N)[legal_N].all()
    assert ((early.energy_N > limit_N) == (full.energy_N > limit_N)).all()
    problem.assert_exact(static, state)


# Units that move whole


@cache
def _trier() -> Callable[..., None]:
    """`try_units`, word after word, and the energy that the state then has."""

    def run(static, state, words_N2, total_weight, limit, told_N, found_N):  # type: ignore[no-untyped-def]
        for n in range(len(words_N2)):
            told_N[n] = units.try_units(
                static, state, words_N2[n, 0], words_N2[n, 1], total_weight, limit
            )
            found_N[n] = evaluation.energy(static, state, total_weight)

    arguments = (
        static_type(types.int32), state_type(types.int32), types.uint64[:, ::1], types.float64,
        types.float64, types.float64[::1], types.float64[::1],
    )  # fmt: skip
    return njit([types.void(*arguments)], error_model="numpy")(run)  # type: ignore[no-any-return]


def try_units(
    static: Static, state: State, words_N2: Words, limit: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    told_N, found_N = np.zeros((2, len(words_N2)))
    _trier()(static, state, words_N2, TOTAL_WEIGHT, limit, told_N, found_N)
    return told_N, found_N


@pytest.mark.parametrize("name", ["units", "units and counts", "units and tags", "all"])
@given(cases(), SEEDS)
@settings(max_examples=15)
def test_units_are_exchanged_whole(name: str, case: Case, seed: int) -> None:
    """An exchange that is made leaves the state exact, with the energy that was told, at most two
    units elsewhere, each whole on one rank and every sample in its row."""
    start = started(case, ASKED[name])
    if start is None:
        return
    problem, cell_S = start
    static, dp = static_of(problem), problem.topology.dp
    state = problem.state(static, cell_S)
    for words_2 in random_words(seed, 20):
        before_S = state.cell_S[:-1].copy()
        told_N, found_N = try_units(static, state, words_2[None], np.inf)
        after_S = state.cell_S[:-1]
        problem.assert_exact(static, state)
        assert problem.fits(after_S)
        assert (after_S // dp == before_S // dp).all()
        moved_S = after_S != before_S
        assert moved_S.any() == np.isfinite(told_N[0])
        if moved_S.any():
            assert told_N[0] == found_N[0]
            assert len(np.unique(static.unit_S[moved_S])) <= 2
            assert len({*before_S[moved_S] % dp, *after_S[moved_S] % dp}) == 2


@given(cases(), SEEDS)
@settings(max_examples=25)
def test_an_exchange_that_is_too_dear_is_taken_back(case: Case, seed: int) -> None:
    """At a limit that no energy meets the layout stays, and the state is exact."""
    start = started(case, ASKED["units"])
    if start is None:
        return
    problem, cell_S = start
    static = static_of(problem)
    state = problem.state(static, cell_S)
    _, found_N = try_units(static, state, random_words(seed, 30), -1.0)
    assert state.cell_S[:-1].tolist() == cell_S.tolist()
    problem.assert_exact(static, state)
    assert (found_N == found_N[0]).all()


def test_every_exchange_comes_up() -> None:
    """Four prompts of two on two ranks with room for three: from 0 | 1 | 0 | 1, each is moved alone
    and each pair is exchanged."""
    window = random_window(np.random.default_rng(0), [4] * 8, 2, 4, 2, group_S=np.arange(8) // 2)
    case = Case(window, Topology.of(dp=2, ep=2), 24)
    start = started(case, {"together": "rank", "rows_multiple_of": 1})
    assert start is not None
    problem, _ = start
    cell_S = np.repeat([0, 1, 0, 1], 2).astype(np.int32)
    static, seen = static_of(problem), set()
    for words_2 in random_words(0, 400):
        state = problem.state(static, cell_S)
        try_units(static, state, words_2[None], np.inf)
        seen.add(tuple(np.flatnonzero(state.cell_S[:-1:2] != cell_S[::2]).tolist()))
    assert seen - {()} == {(0,), (1,), (2,), (3,), (0, 1), (1, 2), (0, 3), (2, 3)}


def test_prompts_change_ranks_in_a_sweep() -> None:
    """A sweep moves prompts between ranks, not samples inside a rank alone."""
    window = random_window(
        np.random.default_rng(1), np.arange(5, 21), 2, 4, 2, group_S=np.arange(16) // 2
    )
    start = started(Case(window, Topology.of(dp=4, ep=2, edp=1), 70), ASKED["units"])
    assert start is not None
    problem, cell_S = start
    chain = chain_of(problem, cell_S, 3)
    chain.sweep(1e9, TOTAL_WEIGHT, 0.0, 3000)
    moved = (chain.state.cell_S[:-1] % 4 != cell_S % 4).sum()
    assert moved >= 4
    assert chain.results[ACCEPTED] > 10


def test_no_limit_is_charged_without_one() -> None:
    """Without a memory limit nothing is above it, whatever the loads."""
    window = random_window(np.random.default_rng(2), [30] * 4, 2, 4, 2)
    start = started(Case(window, Topology.of(dp=2, ep=2), 60), {})
    assert start is not None
    problem, cell_S = start
    static = static_of(problem)
    assert static.limit == UNLIMITED
    measured = problem.measure(static, cell_S)
    assert (measured.over, measured.over_cost) == (0, 0.0)
