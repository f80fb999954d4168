"""Layouts that need no search: the trainers' own (first-fit decreasing, Karmarkar-Karp)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from routepack.kernels.seeding import largest_differencing, lightest_fit
from routepack.problem import Problem
from routepack.rows import ffd_bins, split_to


def ffd_layout(problem: Problem) -> tuple[Problem, NDArray[np.int32]]:
    """First-fit decreasing (design section 4), with more rows where it misses the fewest."""
    bins = ffd_bins(problem.window.lengths_S, problem.token_cap)
    rows = max(problem.rows, -(-len(bins) // problem.topology.dp))
    rows += -rows % problem.requirements.rows_multiple_of
    problem = problem.with_rows(rows)
    problem.require_samples("first-fit decreasing")
    return problem, problem.from_bins(split_to(bins, problem.cells))


def karmarkar_karp_layout(problem: Problem) -> tuple[Problem, NDArray[np.int32]]:
    """Attention work balanced over the cells, heaviest cells in lockstep, as verl 0.9.1 balances.

    Karmarkar-Karp knows no cap. Where it breaks the cap, the longest work goes first into the
    lightest cell with room; where that fails too, a row is added, as verl raises its count.
    """
    while True:
        problem.require_samples("Karmarkar-Karp")
        cell_S = karmarkar_karp_cells(problem)
        if cell_S is not None:
            return problem, cell_S
        problem = problem.with_rows(problem.rows + problem.requirements.rows_multiple_of)


def karmarkar_karp_cells(problem: Problem) -> NDArray[np.int32] | None:
    """The same at the problem's own rows, or None where they do not hold it."""
    cell_S = karmarkar_karp(problem.work_S, problem.cells)
    if not problem.fits(cell_S):
        cell_S = lightest_layout(problem, np.argsort(-problem.work_S, kind="stable"))
    return heaviest_first(problem, cell_S) if problem.fits(cell_S) else None


def ffd_cells(problem: Problem) -> NDArray[np.int32] | None:
    """First-fit decreasing at the problem's own rows, or None where they do not hold it."""
    bins = ffd_bins(problem.window.lengths_S, problem.token_cap)
    if len(bins) > problem.cells or problem.cells > problem.window.samples:
        return None
    return problem.from_bins(split_to(bins, problem.cells))


def lightest_layout(problem: Problem, order_S: NDArray[np.int64]) -> NDArray[np.int32]:
    """Samples in `order_S`, each into the lightest cell with room; -1 for one without."""
    lengths_S = np.array(problem.window.lengths_S)
    return np.asarray(
        lightest_fit(order_S, lengths_S, problem.work_S, problem.cells, problem.token_cap)
    )


def heaviest_first(problem: Problem, cell_S: NDArray[np.int32]) -> NDArray[np.int32]:
    """Renumber cells by falling work, so that the cells of a row weigh alike."""
    work_c = np.bincount(cell_S, weights=problem.work_S, minlength=problem.cells)
    number_c = np.empty(problem.cells, np.int32)
    number_c[np.argsort(-work_c, kind="stable")] = np.arange(problem.cells, dtype=np.int32)
    return number_c[cell_S]


def karmarkar_karp(work_S: NDArray[np.float64], parts: int) -> NDArray[np.int32]:
    """Largest differencing method (Karmarkar & Karp 1982): the part of each sample, 0 the heaviest.

    Where there are fewer samples than parts, the last parts hold none.
    """
    return np.asarray(largest_differencing(np.ascontiguousarray(work_S, np.float64), parts))


def fill_empty(problem: Problem, cell_S: NDArray[np.int32]) -> NDArray[np.int32]:
    """Give every empty cell the shortest sample of a cell with most samples (needs S >= M * D)."""
    cell_S = cell_S.copy()
    count_c = np.bincount(cell_S, minlength=problem.cells)
    for c in np.flatnonzero(count_c == 0).tolist():
        donor = int(count_c.argmax())
        members = np.flatnonzero(cell_S == donor)
        s = members[problem.window.lengths_S[members].argmin()]
        cell_S[s] = c
        count_c[donor] -= 1
        count_c[c] += 1
    return cell_S
