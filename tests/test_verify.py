"""Verification: a plan that holds has no broken line, and each way to corrupt it is named."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest

import routepack
from routepack.cost import AttentionStage, CostModel
from routepack.plan import Plan
from routepack.topology import Topology
from routepack.verify import verify
from routepack.window import Window
from strategies import random_window

replace = msgspec.structs.replace

CAP = 12


def a_window(seed: int = 0) -> Window:
    """Eight samples of 3 to 8 tokens, two layers, four experts, top-2."""
    return random_window(np.random.default_rng(seed), [8, 3, 6, 4, 5, 7, 6, 3], 2, 4, 2)


@pytest.fixture(scope="module")
def window() -> Window:
    return a_window()


@pytest.fixture(scope="module")
def plan(window: Window) -> Plan:
    """Two rows of two cells, in one shard, on two EP ranks."""
    topology = Topology.of(dp=2, ep=2, edp=1)
    model = CostModel((AttentionStage("full", 60.0, 20.0),), 2.0)
    made = routepack.plan(
        window, topology, token_cap=CAP, cost_model=model, method="reorder", threads=1
    )
    assert len(made.rows) == 2
    return made


Cells = list[list[list[int]]]


def cells_of(plan: Plan) -> Cells:
    return [[list(cell) for cell in row] for row in plan.rows]


def with_rows(plan: Plan, rows: Cells) -> Plan:
    return replace(plan, rows=tuple(tuple(map(tuple, row)) for row in rows))


def test_a_plan_holds(window: Window, plan: Plan) -> None:
    """A plan as it was made has no broken line, nor has it after a round trip through its bytes."""
    assert verify(window, plan) == []
    assert verify(window, Plan.from_bytes(plan.to_bytes())) == []


def test_another_window_is_named(plan: Plan) -> None:
    """The plan of another window of the same shape is told by its hash, and nothing else is."""
    other = a_window(seed=1)
    assert verify(other, plan) == [
        f"window.sha256 = {plan.window.sha256!r}: expected {other.sha256!r}, "
        "the plan is for another window"
    ]


def test_a_changed_hash_is_named(window: Window, plan: Plan) -> None:
    """So is a plan whose hash was edited, or whose shape was."""
    edited = replace(plan, window=replace(plan.window, sha256="0" * 64))
    assert verify(window, edited) == [
        f"window.sha256 = {'0' * 64!r}: expected {window.sha256!r}, the plan is for another window"
    ]
    edited = replace(plan, window=replace(plan.window, samples=9))
    assert verify(window, edited) == [
        "window.samples = 9: expected 8, the plan is for another window"
    ]


def test_a_sample_twice_is_named(window: Window, plan: Plan) -> None:
    """In another cell, or in the same one: the second place is named, and the first."""
    rows = cells_of(plan)
    sample = rows[0][0][0]
    elsewhere = cells_of(plan)
    elsewhere[1][1] = sorted([*elsewhere[1][1], sample])
    lines = verify(window, with_rows(plan, elsewhere))
    assert f"rows[1, 1] = {sample}: expected each sample once, also in rows[0, 0]" in lines
    rows[0][0] = [sample, *rows[0][0]]
    lines = verify(window, with_rows(plan, rows))
    assert f"rows[0, 0] = {sample}: expected each sample once, also in rows[0, 0]" in lines


def test_an_absent_sample_is_named(window: Window, plan: Plan) -> None:
    """The first of those absent, and how many there are."""
    rows = cells_of(plan)
    full = next(cell for row in rows for cell in row if len(cell) > 1)
    sample = full.pop()
    assert verify(window, with_rows(plan, rows)) == [
        f"rows = no sample {sample}, 1 absent: expected each once"
    ]


@pytest.mark.parametrize("index", [8, -1])
def test_an_unknown_sample_is_named(window: Window, plan: Plan, index: int) -> None:
    """An index that the window has not, too large or negative."""
    rows = cells_of(plan)
    rows[0][0] = sorted([*rows[0][0], index])
    assert verify(window, with_rows(plan, rows)) == [
        f"rows[0, 0] = {index}: expected a sample in 0..7"
    ]


def test_a_cell_over_the_cap_is_named(window: Window, plan: Plan) -> None:
    """The same plan under a smaller cap: every cell that no longer fits, with its tokens."""
    tokens = [[sum(int(window.lengths_S[i]) for i in cell) for cell in row] for row in plan.rows]
    cap = max(map(max, tokens)) - 1
    assert verify(window, replace(plan, token_cap=cap)) == [
        f"rows[{m}, {d}] = {n} tokens: expected at most the cap {cap}"
        for m, row in enumerate(tokens)
        for d, n in enumerate(row)
        if n > cap
    ]


def test_an_empty_cell_is_named(window: Window, plan: Plan) -> None:
    """Its samples moved to another cell, which stays within a larger cap."""
    rows = cells_of(plan)
    rows[1][1] = sorted(rows[1][1] + rows[1][0])
    rows[1][0] = []
    edited = replace(with_rows(plan, rows), token_cap=1000)
    assert verify(window, edited) == ["rows[1, 0] = []: expected at least one sample"]


def test_an_unsorted_cell_is_named(window: Window, plan: Plan) -> None:
    """Samples of a cell are listed in ascending order."""
    rows = cells_of(plan)
    m, d = next((m, d) for m in range(2) for d in range(2) if len(rows[m][d]) > 1)
    rows[m][d].reverse()
    assert verify(window, with_rows(plan, rows)) == [
        f"rows[{m}, {d}] = {rows[m][d]}: expected ascending sample indices"
    ]


def test_rows_of_another_size_are_named(window: Window, plan: Plan) -> None:
    """A row with a cell more than there are DP ranks, and a plan without rows."""
    rows = cells_of(plan)
    rows[0].append([rows[1][1].pop()])
    if not rows[1][1]:
        rows[1][1].append(rows[1][0].pop())
    assert "rows[0] = 3 cells: expected one for each of dp = 2" in verify(
        window, with_rows(plan, rows)
    )
    assert verify(window, with_rows(plan, [])) == [
        "rows = []: expected at least one row",
        "rows = no sample 0, 8 absent: expected each once",
    ]


BAD_SLOTS: dict[str, tuple[Any, str]] = {
    "used twice": (((0, 1, 2, 2), (0, 1, 2, 3)), "placement[0, 3] = 2: expected a free slot, "
                   "expert 2 has it"),
    "too large": (((0, 1, 2, 3), (0, 1, 2, 4)), "placement[1, 3] = 4: expected a slot in 0..3"),
    "negative": (((0, 1, 2, 3), (-1, 1, 2, 3)), "placement[1, 0] = -1: expected a slot in 0..3"),
    "too few layers": (((0, 1, 2, 3),), "placement.shape = (1, 4): expected (2, 4)"),
    "too few experts": (((0, 1, 2), (0, 1, 2)), "placement.shape = (2, 3): expected (2, 4)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_SLOTS)
def test_a_bad_slot_is_named(window: Window, plan: Plan, case: str) -> None:
    """A placement that is no bijection in every layer."""
    placement, line = BAD_SLOTS[case]
    assert verify(window, replace(plan, placement=placement)) == [line]


def test_a_ragged_placement_is_a_broken_line(window: Window, plan: Plan) -> None:
    """Layers of different sizes give a line about the placement, as verification never raises."""
    lines = verify(window, replace(plan, placement=((0, 1, 2, 3), (0, 1, 2))))
    assert len(lines) == 1
    assert lines[0].startswith("placement")


def test_another_placement_changes_the_score(window: Window, plan: Plan) -> None:
    """A valid placement that is not the one scored is told by the expert term."""
    swapped = tuple(tuple((slot + 1) % 4 for slot in layer) for layer in plan.placement)
    lines = verify(window, replace(plan, placement=swapped))
    assert any(line.startswith("score.expert = ") for line in lines)


@pytest.mark.parametrize("name", ["slowest_shard", "total", "worst_row", "attention", "expert"])
def test_a_changed_score_is_named(window: Window, plan: Plan, name: str) -> None:
    """A field that is off by its last bit is named, with what it should be."""
    truth = getattr(plan.score, name)
    claimed = math.nextafter(truth, math.inf)
    edited = replace(plan, score=replace(plan.score, **{name: claimed}))
    assert verify(window, edited) == [f"score.{name} = {claimed!r}: expected {truth!r}"]


@pytest.mark.parametrize("name", ["cost_lower_bound", "gap"])
def test_a_changed_bound_is_named(window: Window, plan: Plan, name: str) -> None:
    """A better bound than is proven, or a smaller gap, is named."""
    truth = getattr(plan.certificate, name)
    claimed = math.nextafter(truth, math.inf if name == "cost_lower_bound" else 0.0)
    edited = replace(plan, certificate=replace(plan.certificate, **{name: claimed}))
    assert verify(window, edited) == [f"certificate.{name} = {claimed!r}: expected {truth!r}"]


def test_a_wrong_certified_flag_is_named(window: Window, plan: Plan) -> None:
    """The flag is true exactly where rows and their lower bound agree."""
    truth = plan.certificate.rows_certified
    assert truth
    edited = replace(plan, certificate=replace(plan.certificate, rows_certified=False))
    assert verify(window, edited) == ["certificate.rows_certified = False: expected True"]


def test_a_claim_of_more_rows_than_proven_is_named(window: Window, plan: Plan) -> None:
    """Three rows cannot be proven where two are enough; the flag no longer fits either."""
    edited = replace(plan, certificate=replace(plan.certificate, rows_lower_bound=3))
    assert verify(window, edited) == [
        "certificate.rows_certified = True: expected False",
        "certificate.rows_lower_bound = 3: expected at most 2, which is what can be proven",
    ]


def test_a_bad_topology_is_named(window: Window, plan: Plan) -> None:
    """EP ranks that do not divide the experts, and DP ranks of which there are too many."""
    edited = replace(plan, topology=replace(plan.topology, ep=3))
    assert verify(window, edited) == ["topology.ep = 3: expected a divisor of 4 experts"]
    lines = verify(window, replace(plan, topology=replace(plan.topology, dp=9)))
    assert lines[-1] == "topology.dp = 9: expected at most 8 samples"
    for name in ("dp", "pp"):
        lines = verify(window, replace(plan, topology=replace(plan.topology, **{name: 2**62})))
        assert lines[-1] == f"{name} = {2**62}: expected an integer in 1..4194304"
    lines = verify(window, replace(plan, topology=replace(plan.topology, edp=3)))
    assert lines == ["edp = 3: expected a divisor of dp = 2"]


def test_numbers_out_of_range_are_named(window: Window, plan: Plan) -> None:
    """What cannot be recomputed has to be in range at least."""
    edited = replace(plan, token_cap=10**30, search=replace(plan.search, seed=-1, chains=2**70))
    assert verify(window, edited) == [
        f"token_cap = {10**30}: expected a whole number in 1..2^63-1",
        "search.seed = -1: expected a whole number in 0..2^63-1",
        f"search.chains = {2**70}: expected a whole number in 0..2^63-1",
    ]


def test_all_that_is_broken_is_listed(window: Window, plan: Plan) -> None:
    """One line for every broken invariant, layout first."""
    rows = cells_of(plan)
    m, d = next((m, d) for m in range(2) for d in range(2) if len(rows[m][d]) > 1)
    sample = rows[m][d].pop()
    edited = replace(with_rows(plan, rows), placement=((0, 0, 2, 3), (0, 1, 2, 3)), token_cap=CAP)
    assert verify(window, edited) == [
        f"rows = no sample {sample}, 1 absent: expected each once",
        "placement[0, 1] = 0: expected a free slot, expert 0 has it",
    ]
