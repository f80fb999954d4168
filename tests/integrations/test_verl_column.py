"""The column that carries a plan from verl's driver to its workers."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.integrations.verl.column import (
    DeclinedError,
    Layout,
    UnusableError,
    merge_rows,
    micro_batches,
    small_at_both_ends,
)

LENGTHS = np.array([5, 1, 4, 2, 3, 3, 6, 2])
ONE_STEP = [[[0], [2, 1]], [[4, 3], [5]], [[7], [6]]]  # two DP ranks, three rows, cap 6
CAPS = (6, 12)


def read(layout: Layout, rank: int, cap: int, part: slice = slice(None), **wanted: int) -> list:
    """Samples of each micro-batch of a rank's part of the batch, as a worker makes them."""
    ranks = wanted.pop("ranks", 2)
    order = np.array(layout.order).reshape(ranks, -1)[rank][part]
    _, batches = micro_batches(
        layout.column_SC[order],
        LENGTHS[order],
        max_tokens=cap,
        rank=rank,
        ranks=ranks,
        **wanted,
    )
    return [sorted(order[batch].tolist()) for batch in batches]


def layout_of(steps: list = [ONE_STEP], caps: tuple = CAPS, **wanted: int) -> Layout:  # noqa: B006
    return Layout.of(steps, LENGTHS, caps, stamp=wanted.pop("stamp", 7), **wanted)


def test_a_rank_finds_its_cells_of_the_plan() -> None:
    """Row by row, in the order of the column: the plan's cells, light rows at both ends."""
    layout = layout_of()
    assert read(layout, 0, 6) == [[3, 4], [7], [0]]
    assert read(layout, 1, 6) == [[5], [6], [1, 2]]
    assert layout.order == [4, 3, 7, 0, 5, 6, 2, 1]
    assert layout.rows == (3, 2)


def test_a_pass_with_a_larger_cap_gets_merged_rows() -> None:
    """The first two rows of the column fit 12 tokens on both ranks; the third fits beside none."""
    layout = layout_of()
    assert read(layout, 0, 12) == [[3, 4, 7], [0]]
    assert read(layout, 1, 12) == [[5, 6], [1, 2]]


def test_a_mini_batch_finds_its_own_rows() -> None:
    """Two optimizer steps: each rank's first and second half are the steps, with one row each."""
    layout = layout_of([[[[0], [6]], [[1], [2]]], [[[3, 4], [5, 7]]]], (8, 11))
    assert layout.order == [0, 1, 3, 4, 6, 2, 5, 7]
    assert read(layout, 0, 8, slice(0, 2)) == [[0], [1]]
    assert read(layout, 0, 8, slice(2, 4)) == [[3, 4]]
    assert read(layout, 1, 8, slice(2, 4)) == [[5, 7]]
    assert read(layout, 1, 8) == [[6], [2], [5, 7]]
    assert read(layout, 0, 11) == [[0, 1], [3, 4]]  # merged inside a step only


def test_rows_are_merged_to_a_multiple() -> None:
    """Two rows would fit into one, but an interleaved pipeline needs an even number."""
    tokens_MD = np.array([[3, 3], [2, 2]])
    assert merge_rows(tokens_MD, 6).tolist() == [0, 0]
    assert merge_rows(tokens_MD, 6, multiple_of=2).tolist() == [0, 1]


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=3), min_size=1, max_size=12),
    st.integers(9, 40),
    st.integers(1, 3),
)
def test_merged_rows_fit_and_tile(tokens: list[list[int]], cap: int, multiple_of: int) -> None:
    """On every rank within the cap, numbered without gaps, a multiple, never more than before."""
    tokens = tokens * multiple_of
    tokens_MD = np.array(tokens)
    merged_M = merge_rows(tokens_MD, cap, multiple_of)
    count = merged_M.max() + 1
    assert set(merged_M.tolist()) == set(range(count))
    assert count % multiple_of == 0
    sums = np.zeros((count, 3), np.int64)
    np.add.at(sums, merged_M, tokens_MD)
    assert sums.max() <= cap


def test_light_rows_come_first_and_last() -> None:
    """As in verl: descending by work, then every second one reversed to the front."""
    lengths = np.arange(1, 6)
    assert small_at_both_ends([[[i]] for i in range(5)], lengths) == [
        [[0]], [[2]], [[4]], [[3]], [[1]],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (dict(ranks=4), "planned for 2 DP ranks, this model has 4"),
        (dict(cap=7), "planned for caps [6, 12], this pass has 7"),
    ],
)
def test_other_passes_are_declined(wanted: dict[str, int], message: str) -> None:
    """A model with other DP ranks, or a pass with another cap, is left to verl: no fault."""
    with pytest.raises(DeclinedError) as error:
        read(layout_of(), 0, **{"cap": 6} | wanted)
    assert str(error.value) == message


def test_steps_and_ranks_need_equal_numbers_of_samples() -> None:
    """verl cuts a rank's part into equal mini-batches: a plan without them is never handed out."""
    for steps, counts in (
        ([[[[0], [1, 2]]]], "[[1, 2]]"),
        ([[[[0], [1]]], [[[2, 3], [4, 5]]]], "[[1, 1], [2, 2]]"),
    ):
        with pytest.raises(UnusableError) as error:
            layout_of(steps)
        assert str(error.value) == f"samples of each step and DP rank = {counts}: expected equal"


def broken(column: str) -> tuple[np.ndarray, dict[str, int]]:
    """The column of rank 0's samples 4, 3, 7, 0, broken in one way."""
    layout = layout_of()
    column_SC = layout.column_SC[layout.order[:4]].copy()
    wanted = dict(max_tokens=6, rank=0, ranks=2)
    match column:
        case "stamps":
            column_SC[0, 0] = 8
        case "rank":
            wanted["rank"] = 1
        case "gap":
            column_SC[2, 4] = 2
        case "cap":
            column_SC[3, 4] = 0
            column_SC[1, 4] = 2
        case "multiple":
            wanted["multiple_of"] = 2
        case "empty":
            column_SC = column_SC[:0]
    return column_SC, wanted


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("stamps", "2 stamps in one batch: expected 1"),
        ("rank", "DP rank 1 has a sample of DP rank 0"),
        ("gap", "row 1 of 0..2 has no sample"),
        ("cap", "row 0 has 8 tokens: expected at most 6"),
        ("multiple", "3 rows: expected a multiple of 2"),
        ("empty", "the batch is empty"),
    ],
)
def test_broken_columns_are_named(how: str, message: str) -> None:
    """Whatever makes a rank's part of the plan unusable is said in one line."""
    column_SC, wanted = broken(how)
    lengths = LENGTHS[[4, 3, 7, 0]][: len(column_SC)]
    with pytest.raises(UnusableError) as error:
        micro_batches(column_SC, lengths, **wanted)
    assert str(error.value) == message


@given(st.data())
def test_every_rank_rebuilds_the_plan(data: st.DataObject) -> None:
    """Any tiling of any steps: all ranks together get back exactly the plan's cells, in step."""
    ranks, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    steps, samples = [], 0
    for _ in range(data.draw(st.integers(1, 3))):
        rows = data.draw(st.integers(1, size))
        step: list = [[] for _ in range(rows)]
        for _ in range(ranks):  # the same number of samples on every rank, each rank its own cells
            cuts = sorted(data.draw(st.permutations(range(1, size)))[: rows - 1])
            for m, (start, stop) in enumerate(pairwise([0, *cuts, size])):
                step[m].append(list(range(samples + start, samples + stop)))
            samples += size
        steps.append(step)
    lengths = np.array(data.draw(st.lists(st.integers(1, 9), min_size=samples, max_size=samples)))
    cap = max(int(lengths[cell].sum()) for step in steps for row in step for cell in row)
    layout = Layout.of(steps, lengths, (cap, 2 * cap), stamp=1)
    assert sorted(layout.order) == list(range(samples))
    found = []
    parts = np.array(layout.order).reshape(ranks, len(steps), size)
    for k in range(len(steps)):
        rows = []
        for d in range(ranks):
            part = parts[d, k]
            for passed_cap in (cap, 2 * cap):
                _, batches = micro_batches(
                    layout.column_SC[part], lengths[part],
                    max_tokens=passed_cap, rank=d, ranks=ranks,
                )  # fmt: skip
                assert sorted(i for batch in batches for i in batch) == list(range(size))
                if passed_cap == cap:
                    rows.append([sorted(part[batch].tolist()) for batch in batches])
        found.append([list(row) for row in zip(*rows, strict=True)])
    expected = [small_at_both_ends(step, lengths) for step in steps]
    assert found == expected
