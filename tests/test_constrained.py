"""Rows and layouts under requirements, against all layouts of tiny windows."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from requirement_helpers import Case, broken, every_layout, planned
from routepack import Budget, InfeasibleError, Plan, Requirements, Topology
from routepack.constrained import fewest_rows, layouts, row_lower_bound, unit_ranks_S
from routepack.cost import DEFAULT
from routepack.kernels.inserting import insert, repair
from routepack.placement import identity
from routepack.problem import Problem
from routepack.rules import Rules
from routepack.verify import verify
from strategies import SEEDS, random_window

ASKED: tuple[dict[str, Any], ...] = (
    {"equal_samples_per_rank": True},
    {"max_samples_per_cell": 2},
    {"rows_multiple_of": 2},
    {"together": "rank"},
    {"together": "cell"},
    {"uniform_rows": True},
    {"equal_samples_per_rank": True, "together": "rank"},
    {"uniform_rows": True, "max_samples_per_cell": 2},
    {"together": "rank", "uniform_rows": True},
    {"equal_samples_per_rank": True, "uniform_rows": True, "rows_multiple_of": 2},
)


def tiny_case(rng: np.random.Generator) -> Case:
    """4 to 6 samples on two DP ranks, at most three rows."""
    samples = int(rng.integers(4, 7))
    lengths_S = rng.integers(1, 12, samples)
    group_S = np.sort(rng.integers(0, 4, samples))
    tag_S = np.arange(samples) * 2 // samples
    window = random_window(rng, lengths_S, 2, 4, 2, group_S=group_S, tag_S=tag_S)
    cap = max(int(lengths_S.max()), int(rng.uniform(0.35, 1.4) * lengths_S.sum() / 2))
    topology = Topology.of(dp=2, ep=2, edp=int(rng.integers(1, 3)))
    return Case(window, topology, cap)


def fewest_by_trying(case: Case, required: Requirements) -> int | None:
    """The fewest rows of any layout, or None without one."""
    for rows in range(1, case.window.samples // case.topology.dp + 1):
        if len(every_layout(case, rows, required, identity(2, 4))):
            return rows
    return None


COUNTED = "to count samples with together = 'cell'"  # a layout is not looked for there


@pytest.mark.parametrize("fields", ASKED, ids=str)
def test_rows_are_the_fewest_that_can_be_had(fields: dict[str, Any]) -> None:
    """On 25 tiny windows: what is proven is never above the true fewest rows, a certified number is
    that, no plan is refused on proof where there is a layout, and greedy layouts, repaired, find
    the fewest rows on all of them."""
    rng = np.random.default_rng(1)
    required = Requirements(**fields)
    missed = []
    for n in range(25):
        case = tiny_case(rng)
        true = fewest_by_trying(case, required)
        found = planned(case, required, Budget(evaluations=0))
        if isinstance(found, InfeasibleError):
            if true is not None and COUNTED not in str(found):
                assert "none was found" in str(found)
                missed.append(n)
            continue
        assert true is not None
        assert found.certificate.rows_lower_bound <= true <= len(found.rows)
        if found.certificate.rows_certified:
            assert len(found.rows) == true
        if len(found.rows) > true:
            missed.append(n)
    assert missed == []


@pytest.mark.parametrize("fields", ASKED, ids=str)
def test_the_search_reaches_the_best_layout(fields: dict[str, Any]) -> None:
    """With the placement fixed, of all layouts that meet what is required at the plan's rows none
    is better by score on at least 7 of 8 tiny windows, and never is a plan better than all."""
    rng = np.random.default_rng(2)
    required = Requirements(**fields)
    reached, plans = 0, 0
    for _ in range(200):
        case = tiny_case(rng)
        found = planned(case, required, Budget(evaluations=6000), fixed_placement=True)
        if isinstance(found, InfeasibleError):
            continue
        plans += 1
        best = best_by_trying(case, required, len(found.rows))
        assert found.score.slowest_shard >= best * (1 - 1e-12)
        reached += found.score.slowest_shard <= best * (1 + 1e-9)
        if plans == 8:
            break
    assert plans == 8
    assert reached >= 7


def best_by_trying(case: Case, required: Requirements, rows: int) -> float:
    """The lowest slowest shard of any layout of that many rows."""
    window, topology = case.window, case.topology
    cost = DEFAULT.resolve(window, topology, case.token_cap)
    problem = Problem(window, topology, cost, case.token_cap, rows)
    static = problem.static(identity(2, 4) // 2)
    cell_NS = every_layout(case, rows, required, identity(2, 4))
    return min(problem.measure(static, cell_S).score.slowest_shard for cell_S in cell_NS)


def test_a_memory_limit_is_kept_by_the_best_layout_that_does() -> None:
    """With the placement fixed and the smallest limit that any layout keeps: the best of these."""
    rng = np.random.default_rng(3)
    reached = 0
    for _ in range(12):
        case = tiny_case(rng)
        free = planned(case, Requirements(), Budget(evaluations=0), fixed_placement=True)
        assert isinstance(free, Plan)
        rows, tokens = len(free.rows), int(case.window.lengths_S.sum()) * 2
        low, high = 0, tokens  # none keeps `low`, all keep `high`
        while high - low > 1:
            middle = (low + high) // 2
            kept = Requirements(memory_limit_tokens=middle)
            some = len(every_layout(case, rows, kept, identity(2, 4))) > 0
            low, high = (low, middle) if some else (middle, high)
        required = Requirements(memory_limit_tokens=high)
        found = planned(case, required, Budget(evaluations=6000), fixed_placement=True)
        assert isinstance(found, Plan), str(found)
        best = best_by_trying(case, required, rows)
        assert found.score.slowest_shard >= best * (1 - 1e-12)
        reached += found.score.slowest_shard <= best * (1 + 1e-9)
    assert reached >= 11


def test_a_memory_limit_is_refused_only_below_the_least_that_is_told_as_proven() -> None:
    """The limit that a refusal calls proven is not above what some layout keeps."""
    rng = np.random.default_rng(4)
    told = 0
    for _ in range(10):
        case = tiny_case(rng)
        found = planned(
            case, Requirements(memory_limit_tokens=1), Budget(evaluations=500), fixed_placement=True
        )
        assert isinstance(found, InfeasibleError)
        if "proven" not in str(found):
            continue
        told += 1
        reached, proven = (int(part.split(")")[0].split(",")[0]) for part in
                           str(found).split("at least ")[1:])  # fmt: skip
        free = planned(case, Requirements(), Budget(evaluations=0))
        assert isinstance(free, Plan)
        rows = len(free.rows)
        below = every_layout(
            case, rows, Requirements(memory_limit_tokens=proven - 1), identity(2, 4)
        )
        at = every_layout(case, rows, Requirements(memory_limit_tokens=reached), identity(2, 4))
        assert len(below) == 0
        assert len(at)
    assert told >= 5


# Lower bounds


def bound_of(lengths_S: list[int], cap: int, dp: int, **fields: Any) -> tuple[int, str]:
    rest = {name: fields.pop(name) for name in ("group_S", "tag_S") if name in fields}
    window = random_window(np.random.default_rng(0), lengths_S, 1, 2, 1, **rest)
    required = Requirements(**fields)
    return row_lower_bound(window, cap, Topology.of(dp=dp, ep=1), required, 0)


def test_bounds_by_hand() -> None:
    """8 samples of 4 tokens, cap 8, two ranks: 2 rows by volume; 3 rounded to 4; with one sample a
    cell 4; tags of 2 and 6 samples take 1 and 2 rows."""
    eights = [4] * 8
    assert bound_of(eights, 8, 2) == (2, "volume")
    assert bound_of(eights, 8, 2, rows_multiple_of=4) == (4, "volume, to a multiple of 4")
    assert bound_of(eights, 8, 2, max_samples_per_cell=1) == (4, "samples per cell")
    tags = [0, 0, 1, 1, 1, 1, 1, 1]
    assert bound_of(eights, 8, 2, uniform_rows=True, tag_S=tags) == (3, "tag by tag: volume")
    both = bound_of(
        eights, 8, 2, uniform_rows=True, max_samples_per_cell=1, rows_multiple_of=3, tag_S=tags
    )
    assert both == (6, "tag by tag: samples per cell and volume, to a multiple of 3")


def test_bounds_of_groups_on_a_rank_by_hand() -> None:
    """Two ranks. Of eight samples of 4 tokens, cap 8, six in one group take three rows of its rank;
    five of a cap of 10 take three, though their volume is two. Three groups of 20 tokens, of which
    each would fit two rows of 16: two of them on a rank need 40 tokens, three rows. With one sample
    a cell, a group of five takes five rows. Tags count for themselves: 3 + 1 rows."""
    apart = "groups on a rank"
    groups = [0] * 6 + [1] * 2
    assert bound_of([4] * 8, 8, 2, together="rank", group_S=groups) == (3, apart)
    assert bound_of([4] * 6, 10, 2, together="rank", group_S=[0] * 5 + [1]) == (3, apart)
    assert bound_of([4] * 15, 16, 2, together="rank", group_S=[0, 1, 2] * 5) == (3, apart)
    one = {"max_samples_per_cell": 1, "group_S": [0] * 5 + [1]}
    assert bound_of([1] * 6, 10, 2, together="rank", **one) == (5, apart)
    tags: dict[str, Any] = {"uniform_rows": True, "tag_S": [0] * 8 + [1] * 2}
    groups = [0] * 6 + [1, 1, 0, 1]
    assert bound_of([4] * 10, 8, 2, together="rank", group_S=groups, **tags) == (
        4, f"tag by tag: {apart} and volume"
    )  # fmt: skip
    assert bound_of([4] * 8, 8, 2, together="rank", group_S=[0, 1] * 4) == (2, "volume")


@functools.cache
def fewest_cells(lengths: tuple[int, ...], cap: int, most: int) -> int:
    """The fewest cells of the cap, and of at most so many samples, that hold all: by trying."""
    if not lengths:
        return 0
    first, rest = lengths[0], lengths[1:]
    return 1 + min(
        fewest_cells(tuple(n for k, n in enumerate(rest) if k not in beside), cap, most)
        for count in range(min(most, len(lengths)))
        for beside in itertools.combinations(range(len(rest)), count)
        if first + sum(rest[k] for k in beside) <= cap
    )


def fewest_rows_of_groups(case: Any) -> int | None:
    """The fewest rows of groups on ranks, none of whose cells is empty; None: there are none."""
    lengths_S, group_S, cap, dp, most = case
    fewest = None
    for rank_U in itertools.product(range(dp), repeat=max(group_S) + 1):
        own = [
            tuple(n for n, u in zip(lengths_S, group_S, strict=True) if rank_U[u] == d)
            for d in range(dp)
        ]
        rows = max(fewest_cells(some, cap, most) for some in own)
        if rows <= min(map(len, own)) and (fewest is None or rows < fewest):
            fewest = rows
    return fewest


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=6),
    st.integers(12, 20), st.integers(1, 3), st.sampled_from([2, 9]),
)  # fmt: skip
@settings(max_examples=60)
def test_the_bound_of_groups_on_a_rank_is_never_above_the_fewest_rows(
    samples: list[tuple[int, int]], cap: int, dp: int, most: int
) -> None:
    """Of all ways to deal groups out to ranks and to fill the cells of each; and it is at least the
    tokens and the samples of the largest group."""
    lengths_S, names_S = [n for n, _ in samples], [u for _, u in samples]
    group_S = np.unique(names_S, return_inverse=True)[1].tolist()
    true = fewest_rows_of_groups((lengths_S, group_S, cap, dp, most))
    try:
        lower, _ = bound_of(
            lengths_S, cap, dp, together="rank", max_samples_per_cell=most, group_S=group_S
        )
    except InfeasibleError:
        assert true is None
        return
    if true is not None:
        assert lower <= true
    assert lower >= -(-int(np.bincount(group_S, weights=lengths_S).max()) // cap)
    assert lower >= -(-int(np.bincount(group_S).max()) // most)


def test_the_bound_of_groups_on_a_rank_is_verified() -> None:
    """A plan whose rows only that bound certifies holds, and says so; a bound above it does not."""
    lengths_S, group_S = [4] * 15, [0, 1, 2] * 5
    window = random_window(np.random.default_rng(0), lengths_S, 1, 2, 1, group_S=group_S)
    case = Case(window, Topology.of(dp=2, ep=1, edp=1), 16)
    found = planned(case, Requirements(together="rank"), Budget(evaluations=0))
    assert isinstance(found, Plan)
    certificate = found.certificate
    assert (len(found.rows), certificate.rows_lower_bound, certificate.rows_certified) == (
        3,
        3,
        True,
    )
    assert certificate.rows_method == "groups on a rank"
    more = msgspec.structs.replace(certificate, rows_lower_bound=4, rows_certified=False)
    assert verify(window, msgspec.structs.replace(found, certificate=more))[-1] == (
        "certificate.rows_lower_bound = 4: expected at most 3, which is what can be proven"
    )


def test_spare_rows_go_where_rows_are_fullest() -> None:
    """Tags of 4 and 24 tokens, one and two rows of two cells: the fourth row is the second's."""
    window = random_window(
        np.random.default_rng(0), [1, 1, 1, 1, 4, 4, 4, 4, 4, 4], 1, 2, 1, tag_S=[0] * 4 + [1] * 6
    )
    required = Requirements(uniform_rows=True, rows_multiple_of=2)
    topology = Topology.of(dp=2, ep=1)
    rows, rules, cell_S = fewest_rows(window, 8, topology, required, window.lengths_S * 1.0, 0)
    assert (rows.rows, rows.lower_bound, rows.certified) == (4, 4, True)
    assert rules.tag_m is not None
    assert rules.tag_m.tolist() == [0, 1, 1, 1]
    assert cell_S is not None
    assert rules.hold(cell_S)


# Greedy insertion and repair


@st.composite
def packings(draw: st.DrawFn) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Lengths, the lane of each sample and of each cell: of 2 or 4 ranks, every lane with cells."""
    ranks, rows = draw(st.sampled_from([2, 4])), draw(st.integers(1, 3))
    lanes = draw(st.integers(1, rows))
    lane_c = np.repeat(np.sort(np.arange(rows) % lanes), ranks)
    samples = draw(st.integers(rows * ranks, 20))
    lengths_S = draw(st.lists(st.integers(1, 20), min_size=samples, max_size=samples))
    lane_S = draw(st.lists(st.integers(0, lanes - 1), min_size=samples, max_size=samples))
    return np.array(lengths_S), np.array(lane_S), lane_c.astype(np.int64)


@given(packings(), st.booleans(), st.integers(1, 6), st.integers(10, 60), SEEDS)
def test_greedy_layouts_and_repair_stay_in_lanes(
    packing: Any, fullest: bool, most: int, cap: int, seed: int
) -> None:
    """Samples go into cells of their lane only, before and after; 0 is returned exactly where the
    cap, the number of samples of a cell, and no empty cell hold; else nothing is worse than it was.
    """
    lengths_S, lane_S, lane_c = packing
    cells = len(lane_c)

    def wrong(cell_S: NDArray[np.int32]) -> int:
        unit = max(1, cap // 8)
        tokens_c = np.bincount(cell_S, weights=lengths_S, minlength=cells)
        count_c = np.bincount(cell_S, minlength=cells)
        over = np.maximum(tokens_c - cap, 0).sum()
        return int(over + unit * (np.maximum(count_c - most, 0).sum() + (count_c == 0).sum()))

    order_S = np.argsort(-lengths_S, kind="stable")
    cell_S = insert(order_S, lengths_S, lengths_S * 1.0, lane_S, lane_c, 2, cap, most, -1, fullest)
    assert (lane_c[cell_S] == lane_S).all()
    before = wrong(cell_S)
    left = repair(cell_S, lengths_S, lane_S, lane_c, 2, cap, most, -1, 3000, np.uint64(seed))
    assert (lane_c[cell_S] == lane_S).all()
    assert left == wrong(cell_S) <= before


def test_repair_by_hand() -> None:
    """Cells of 8, 8, 2, 2 tokens with a cap of 5: one of each pair of fours goes to the twos."""
    cell_S = np.array([0, 0, 1, 1, 2, 3], np.int32)
    lengths_S = np.array([4, 4, 4, 4, 1, 1])
    lane_S, lane_c = np.zeros(6, np.int64), np.zeros(4, np.int64)
    left = repair(cell_S, lengths_S, lane_S, lane_c, 2, 5, 2, 3, 10_000, np.uint64(1))
    assert left == 0
    assert np.bincount(cell_S, weights=lengths_S).max() == 5
    assert Counter((cell_S % 2).tolist()) == {0: 3, 1: 3}


def test_what_cannot_be_repaired_is_told() -> None:
    """Two samples of 4 in one cell of 5: 3 tokens are too many, whatever is tried."""
    cell_S = np.zeros(2, np.int32)
    none = np.zeros(2, np.int64)
    left = repair(cell_S, np.array([4, 4]), none, none[:1], 1, 5, 9, -1, 100, np.uint64(0))
    assert left == 3


def test_prompts_go_whole_to_the_lightest_rank() -> None:
    """Prompts of 6, 4, 3 and 1 tokens on two ranks: 6 + 1 and 4 + 3."""
    lengths_S = [3, 3, 2, 2, 3, 1]
    window = random_window(np.random.default_rng(0), lengths_S, 1, 2, 1, group_S=[0, 0, 1, 1, 2, 3])
    rules = Rules(window, Topology.of(dp=2, ep=1), 1, Requirements(together="rank"))
    work_S = np.array(lengths_S, float)
    rank_S = unit_ranks_S(rules, 8, work_S, np.random.default_rng(0), 0.0)
    assert rank_S is not None
    assert rank_S.tolist() == [0, 0, 1, 1, 1, 0]


@given(SEEDS, st.sampled_from([f for f in ASKED if f.get("together") != "cell"]))
@settings(max_examples=40)
def test_layouts_are_complete_and_allowed(seed: int, fields: dict[str, Any]) -> None:
    """Every layout that is yielded is within the cap, has no empty cell, and breaks nothing."""
    case = tiny_case(np.random.default_rng(seed))
    required = Requirements(**fields)
    window, topology = case.window, case.topology
    try:
        found, rules, _ = fewest_rows(
            window, case.token_cap, topology, required, window.lengths_S * 1.0, 0
        )
    except InfeasibleError:
        return
    problem = Problem(
        window, topology, DEFAULT.resolve(window, topology, case.token_cap), case.token_cap,
        found.rows, required, rules.tag_m,
    )  # fmt: skip
    for cell_S in layouts(rules, case.token_cap, window.lengths_S * 1.0, 3, 1):
        assert problem.fits(cell_S)
        rows = problem.to_rows(cell_S)
        assert broken(required, case, identity(2, 4).tolist(), rows) == set()
