"""The layouts of the trainers: first-fit decreasing and Karmarkar-Karp, and their parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from routepack.cost import AttentionStage, CostModel
from routepack.errors import InfeasibleError
from routepack.kernels.seeding import lightest_fit
from routepack.layouts import (
    ffd_layout,
    fill_empty,
    heaviest_first,
    karmarkar_karp,
    karmarkar_karp_layout,
    lightest_layout,
)
from routepack.problem import Problem
from routepack.topology import Topology
from routepack.window import Window
from strategies import Instance, instances

TOKENS = CostModel((AttentionStage("linear", 1.0, 0.0),))  # work = tokens / cap


def problem_of(
    lengths_S: list[int], cap: int, rows: int, topology: Topology, model: CostModel = TOKENS
) -> Problem:
    """A window of these lengths, with a single expert, on a number of rows."""
    window = Window(np.array(lengths_S), np.array(lengths_S)[:, None, None], 1)
    return Problem(window, topology, model.resolve(window, topology, cap), cap, rows)


def one_shard(dp: int) -> Topology:
    return Topology.of(dp=dp, ep=1, edp=1)


def work_of(problem: Problem, cell_S: NDArray[np.int32]) -> list[float]:
    return np.bincount(cell_S, weights=problem.work_S, minlength=problem.cells).tolist()


# First-fit decreasing


def test_ffd_and_split_by_hand() -> None:
    """
    Cap 10, D = 2: longest first 5 4 3 3 3 2 are samples 3 0 1 2 5 4. Bins in opening order:
    {3, 0} with 9, {1, 2, 5} with 9, then {4}, although {3, 5, 4} and {0, 1, 2} fill two bins
    exactly. Three bins need two rows, so four cells: the bin with most samples keeps its even
    positions {1, 5}, and its odd ones {2} become the last bin. Row 0 takes the first two.
    """
    problem, cell_S = ffd_layout(problem_of([4, 3, 3, 5, 2, 3], 10, 1, one_shard(2)))
    assert problem.rows == 2
    assert problem.to_rows(cell_S) == (((0, 3), (1, 5)), ((4,), (2,)))


def test_ffd_at_the_fewest_rows_keeps_them() -> None:
    """Where FFD needs no more rows than there are, the bins go row by row to the DP ranks."""
    problem, cell_S = ffd_layout(problem_of([6, 5, 4, 3], 9, 1, one_shard(2)))
    assert problem.rows == 1
    assert problem.to_rows(cell_S) == (((0, 3), (1, 2)),)


def test_ffd_is_split_up_to_more_rows() -> None:
    """With two rows of two cells, both bins are split, the first of equal ones first."""
    problem, cell_S = ffd_layout(problem_of([6, 5, 4, 3], 9, 2, one_shard(2)))
    assert problem.rows == 2
    assert problem.to_rows(cell_S) == (((0,), (1,)), ((3,), (2,)))


def test_bins_go_to_dp_ranks_not_to_cells_of_shards() -> None:
    """Bin d of a row is DP rank d's, also where shards interleave DP ranks 0, 2 and 1, 3: DP rank 1
    is cell 2, the first of the second shard."""
    topology = Topology(dp=4, ep=2, edp=2, order="tp-cp-dp-ep-pp")
    lengths_S = np.array([4, 3, 2, 1])
    window = Window(lengths_S, lengths_S[:, None, None] * np.array([[[1, 0]]]), 1)
    problem = Problem(window, topology, TOKENS.resolve(window, topology, 4), 4, 1)
    _, cell_S = ffd_layout(problem)
    assert cell_S.tolist() == [0, 2, 1, 3]
    assert problem.to_rows(cell_S) == (((0,), (1,), (2,), (3,)),)


def test_ffd_without_enough_samples_is_infeasible() -> None:
    """Three samples of 10 and the instance above fit 5 cells, but FFD opens 6 bins: with D = 5 it
    needs 10 cells for 9 samples."""
    lengths_S = [10, 10, 10, 5, 4, 3, 3, 3, 2]
    with pytest.raises(InfeasibleError) as error:
        ffd_layout(problem_of(lengths_S, 10, 1, one_shard(5)))
    assert str(error.value) == (
        "samples = 9: expected at least 10, first-fit decreasing needs 2 rows of 5 cells, "
        "none empty"
    )


@given(instances())
def test_ffd_fits_where_it_needs_no_more_rows(instance: Instance) -> None:
    """Every sample is placed, every cell within the cap and none empty, at its own rows."""
    try:
        problem, cell_S = ffd_layout(instance.problem)
    except InfeasibleError:
        return
    assert problem.rows >= instance.rows
    assert problem.fits(cell_S)


# Karmarkar-Karp


def sums(work_S: list[float], parts: int) -> list[float]:
    part_S = karmarkar_karp(np.array(work_S, float), parts)
    return sorted(np.bincount(part_S, weights=work_S, minlength=parts).tolist())


def test_the_textbook_instance() -> None:
    """8 7 6 5 4: 8 - 7 = 1, 6 - 5 = 1, 4 - 1 = 3, 3 - 1 = 2. The differencing method ends with 14
    and 16, though 15 and 15 is possible (Karmarkar & Karp 1982)."""
    assert sums([8, 7, 6, 5, 4], 2) == [14.0, 16.0]


def test_three_parts_by_hand() -> None:
    """4 3 2 1 in three parts: (4, 3, 0), (4, 3, 2), (4, 3, 2 + 1)."""
    part_S = karmarkar_karp(np.array([1.0, 2.0, 3.0, 4.0]), 3)
    assert part_S[0] == part_S[1]
    assert len(set(part_S.tolist())) == 3
    assert sums([1, 2, 3, 4], 3) == [3.0, 3.0, 4.0]


def test_equal_work_is_dealt_out_evenly() -> None:
    """Twelve equal samples make four parts of three."""
    assert sums([5.0] * 12, 4) == [15.0] * 4


WORK = st.lists(st.one_of(st.integers(1, 6), st.integers(1, 1000)), min_size=1, max_size=24)


@given(WORK, st.integers(1, 8))
def test_parts_are_balanced_and_not_empty(work: list[int], parts: int) -> None:
    """With at least as many samples as parts none is empty, with fewer each sample is alone; and
    parts differ by no more than the largest sample."""
    part_S = karmarkar_karp(np.array(work, float), parts)
    assert part_S.min() >= 0
    assert part_S.max() < parts
    assert len(set(part_S.tolist())) == min(parts, len(work))
    work_p = np.bincount(part_S, weights=work, minlength=parts)
    assert work_p.max() - work_p.min() <= max(work)


def test_the_layout_puts_heavy_cells_in_lockstep() -> None:
    """Cells of 8, 7, 6 and 5 tokens in rows of two: 8 with 7, then 6 with 5."""
    problem, cell_S = karmarkar_karp_layout(problem_of([6, 8, 5, 7], 9, 2, one_shard(2)))
    assert problem.to_rows(cell_S) == (((1,), (3,)), ((0,), (2,)))


def test_the_layout_balances_attention_work_not_tokens() -> None:
    """6 3 3 3: by tokens 6 + 3 and 3 + 3, by squares 36 against 9 + 9 + 9."""
    squares = CostModel((AttentionStage("full", 0.0, 1.0),))
    lengths_S = [6, 3, 3, 3]
    by_square = karmarkar_karp_layout(problem_of(lengths_S, 9, 1, one_shard(2), squares))
    assert by_square[0].to_rows(by_square[1]) == (((0,), (1, 2, 3)),)
    tokens, cell_S = karmarkar_karp_layout(problem_of(lengths_S, 9, 1, one_shard(2)))
    assert sorted(work_of(tokens, cell_S)) == pytest.approx([6 / 9, 9 / 9])


def test_a_row_is_added_only_when_needed() -> None:
    """3 3 2 2 2 in two cells: differencing gives 7 and 5. With a cap of 7 that stands. With 6, the
    exact {3, 3} and {2, 2, 2} is found neither so nor by lightest first: a third row is added."""
    lengths_S = [3, 3, 2, 2, 2]
    loose, _ = karmarkar_karp_layout(problem_of(lengths_S, 7, 2, one_shard(1)))
    assert loose.rows == 2
    tight, cell_S = karmarkar_karp_layout(problem_of(lengths_S, 6, 2, one_shard(1)))
    assert tight.rows == 3
    assert tight.fits(cell_S)


def test_where_differencing_breaks_the_cap_lightest_first_may_keep_it() -> None:
    """9 6 6 2 by squares: 81 against 36 + 36 + 4, of 14 tokens. With a cap of 12 the 2 finds room
    only beside the 9, and no row is added."""
    squares = CostModel((AttentionStage("full", 0.0, 1.0),))
    problem, cell_S = karmarkar_karp_layout(problem_of([9, 6, 6, 2], 12, 1, one_shard(2), squares))
    assert problem.rows == 1
    assert problem.to_rows(cell_S) == (((0, 3), (1, 2)),)


def test_karmarkar_karp_without_enough_samples_is_infeasible() -> None:
    """6 | 6 | 3 3 | 2 2 2 fills four cells exactly, which neither way finds; eight cells are more
    than seven samples."""
    with pytest.raises(InfeasibleError) as error:
        karmarkar_karp_layout(problem_of([6, 6, 3, 3, 2, 2, 2], 6, 1, one_shard(4)))
    assert str(error.value) == (
        "samples = 7: expected at least 8, Karmarkar-Karp needs 2 rows of 4 cells, none empty"
    )


@given(instances())
def test_karmarkar_karp_fits_in_as_few_rows_as_it_can(instance: Instance) -> None:
    """The layout fits, its cells are ordered by falling work, and one row fewer would not have fit
    either way."""
    try:
        problem, cell_S = karmarkar_karp_layout(instance.problem)
    except InfeasibleError:
        return
    assert problem.fits(cell_S)
    work_c = np.array(work_of(problem, cell_S))
    assert (np.diff(work_c) <= 1e-12 * work_c.max()).all()
    for rows in range(instance.rows, problem.rows):
        fewer = problem.with_rows(rows)
        longest_first = np.argsort(-fewer.work_S, kind="stable")
        assert not fewer.fits(karmarkar_karp(fewer.work_S, fewer.cells))
        assert not fewer.fits(lightest_layout(fewer, longest_first))


# Parts


def test_heaviest_first_by_hand() -> None:
    """Cells of 2, 9 and 5 tokens become cells 2, 0 and 1."""
    problem = problem_of([2, 4, 5, 5], 9, 3, one_shard(1))
    assert heaviest_first(problem, np.array([0, 1, 1, 2], np.int32)).tolist() == [2, 0, 0, 1]


@given(instances())
def test_heaviest_first_only_renumbers(instance: Instance) -> None:
    """The same samples are together, and work falls with the number of the cell."""
    problem, before_S = instance.problem, instance.cell_S
    after_S = heaviest_first(problem, before_S)
    assert len({*zip(before_S.tolist(), after_S.tolist(), strict=True)}) == problem.cells
    assert len(set(after_S.tolist())) == problem.cells
    assert (np.diff(work_of(problem, after_S)) <= 0).all()


def test_fill_empty_by_hand() -> None:
    """Cells 1 and 3 are empty. The first gets the shortest of cell 0, which has most samples; then
    cells 0 and 2 have two each, and the second gets the shortest of cell 0 again."""
    problem = problem_of([5, 2, 3, 6, 6], 12, 4, one_shard(1))
    assert fill_empty(problem, np.array([0, 0, 0, 2, 2], np.int32)).tolist() == [0, 1, 3, 2, 2]


@given(instances(), st.data())
def test_fill_empty_leaves_no_cell_empty(instance: Instance, data: st.DataObject) -> None:
    """Any layout with at least as many samples as cells is filled, moving one sample for each empty
    cell; a layout within the cap stays within it, and one without empty cells as it is."""
    problem = instance.problem
    cells = st.integers(0, problem.cells - 1)
    size = problem.window.samples
    before_S = np.array(data.draw(st.lists(cells, min_size=size, max_size=size)), np.int32)
    after_S = fill_empty(problem, before_S)
    empty = problem.cells - len(set(before_S.tolist()))
    assert len(set(after_S.tolist())) == problem.cells
    assert (after_S != before_S).sum() == empty
    tokens_c = np.bincount(before_S, weights=problem.window.lengths_S, minlength=problem.cells)
    if tokens_c.max() <= problem.token_cap:
        assert problem.fits(after_S)


def lightest(
    order: list[int], lengths: list[int], work: list[float], cells: int, cap: int
) -> list[int]:
    """lightest_fit in plain Python."""
    tokens_c, work_c, cell_S = [0] * cells, [0.0] * cells, [-1] * len(lengths)
    for s in order:
        open_cells = [c for c in range(cells) if tokens_c[c] + lengths[s] <= cap]
        if open_cells:
            c = min(open_cells, key=lambda c: work_c[c])
            cell_S[s] = c
            tokens_c[c] += lengths[s]
            work_c[c] += work[s]
    return cell_S


def test_lightest_fit_by_hand() -> None:
    """Cap 6, longest first: 4 to cell 0, 3 to cell 1, 3 to the lighter cell 1, 2 to cell 0; the
    last 2 has no room, and its place is -1."""
    arguments: tuple[Any, ...] = (
        np.arange(5), np.array([4, 3, 3, 2, 2]), np.array([4.0, 3, 3, 2, 2]), 2, 6
    )  # fmt: skip
    assert lightest_fit(*arguments).tolist() == [0, 1, 1, 0, -1]


@given(WORK, st.integers(1, 5), st.integers(0, 2000), st.randoms(use_true_random=False))
def test_lightest_fit_equals_plain_python(
    lengths: list[int], cells: int, slack: int, random: Any
) -> None:
    """In any order and with any work, each sample goes into the lightest cell with room, within the
    cap."""
    order = list(range(len(lengths)))
    random.shuffle(order)
    work = [random.random() for _ in lengths]
    cap = max(lengths) + slack
    cell_S = lightest_fit(np.array(order), np.array(lengths), np.array(work), cells, cap)
    assert cell_S.tolist() == lightest(order, lengths, work, cells, cap)
    placed = cell_S >= 0
    tokens_c = np.bincount(cell_S[placed], weights=np.array(lengths)[placed], minlength=cells)
    assert tokens_c.max() <= cap
