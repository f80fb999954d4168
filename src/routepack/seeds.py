"""Starting layouts for the population: generate, canonicalise, gate, choose for diversity.

Design section 3.3. Generators may fail on a tight cap; a layout that does not fit is dropped, and
first-fit decreasing's bins, which the row certificate rests on, are always among the seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routepack.constrained import layouts
from routepack.kernels.layout import Static
from routepack.kernels.packing import best_fit, first_fit
from routepack.kernels.seeding import least_increase
from routepack.layouts import (
    ffd_cells,
    fill_empty,
    heaviest_first,
    karmarkar_karp_cells,
    lightest_layout,
)
from routepack.problem import Measured, Problem

GATE = 1.10  # seeds within this factor of the best seed's cost are kept
DIRECTIONS = 16  # of the sliced-Wasserstein sketch


@dataclass(frozen=True, eq=False)
class Seed:
    """A layout, the generator it comes from and what it measures."""

    cell_S: NDArray[np.int32]
    generator: str
    measured: Measured


def make_seeds(
    problem: Problem,
    static: Static,
    packed_S: NDArray[np.int32],
    count: int,
    rng: np.random.Generator,
    attempts: int,
    enough: Callable[[], bool] = lambda: False,
) -> list[Seed]:
    """`count` seeds (repeated if there are fewer), best first. `attempts` bounds each generator.

    `enough` is asked between generators whether to make do with the seeds there are.
    """
    candidates = [
        *_given(problem, packed_S),
        *_generate(problem, static, rng, attempts, enough),
    ]
    seeds: dict[bytes, Seed] = {}
    for generator, cell_S in candidates:
        if problem.fits(cell_S):
            cell_S = canonical(problem, cell_S)
            key = cell_S.tobytes()
            if key not in seeds:
                seeds[key] = Seed(cell_S, generator, problem.measure(static, cell_S))
    ranked = sorted(seeds.values(), key=lambda seed: seed.measured.key)
    gate = GATE * ranked[0].measured.energy
    good = [seed for seed in ranked if seed.measured.energy <= gate]
    chosen = diverse(problem, static, good, count)
    return [chosen[k % len(chosen)] for k in range(count)]


def _given(
    problem: Problem, packed_S: NDArray[np.int32]
) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """What certifies the rows, then the layouts of `reorder` and `reorder-kk`: none is worse."""
    yield "rows", packed_S
    if problem.rules.shaped:
        return  # what follows knows of no requirements
    for generator, layout in (("first-fit", ffd_cells), ("balanced", karmarkar_karp_cells)):
        cell_S = layout(problem)
        if cell_S is not None:
            yield generator, cell_S


def _generate(
    problem: Problem,
    static: Static,
    rng: np.random.Generator,
    attempts: int,
    enough: Callable[[], bool],
) -> Iterator[tuple[str, NDArray[np.int32]]]:
    """Layouts by one generator after another, cheap ones and those likeliest to fit first."""
    if problem.rules.shaped:
        seed = int(rng.integers(2**31))
        for cell_S in layouts(problem.rules, problem.token_cap, problem.work_S, attempts, seed):
            yield "required", cell_S
            if enough():
                return
        return
    lengths_S, cap, cells = static.length_S[:-1], problem.token_cap, problem.cells
    yield "balanced", _lightest(problem, np.argsort(-problem.work_S, kind="stable"))
    for attempt in range(attempts):
        spread = 0.05 * attempt  # the first of each generator is unperturbed
        noisy_S = lengths_S * np.exp(spread * rng.standard_normal(len(lengths_S)))
        order_S = np.argsort(-noisy_S, kind="stable")
        if enough():
            return
        yield "WindowShuffle", _opened(problem, first_fit(order_S, lengths_S, cap, cells))
        yield "RandomizedBestFit", _opened(problem, best_fit(order_S, lengths_S, cap, cells))
        if attempt:
            yield "balanced", _lightest(problem, order_S)
        if enough():
            return
        cell_S = np.empty(len(lengths_S), np.int32)
        _, ranks, layers = static.placed_SRL.shape
        load_BRL = np.zeros((cells // static.width, ranks, layers), static.placed_SRL.dtype)
        least_increase(static, order_S, cells, cell_S, load_BRL)
        yield "EDPAwarePair", _opened(problem, cell_S)


def _opened(problem: Problem, cell_S: NDArray[np.int32]) -> NDArray[np.int32]:
    """A complete layout without empty cells, or the incomplete one, which the caller drops."""
    return fill_empty(problem, cell_S) if cell_S.min() >= 0 else cell_S


def _lightest(problem: Problem, order_S: NDArray[np.int64]) -> NDArray[np.int32]:
    cell_S = lightest_layout(problem, order_S)
    return heaviest_first(problem, fill_empty(problem, cell_S)) if cell_S.min() >= 0 else cell_S


def canonical(problem: Problem, cell_S: NDArray[np.int32]) -> NDArray[np.int32]:
    """One layout for all that differ by the order of rows or of the DP ranks of a shard.

    The cells of a group are ordered by their lowest sample, rows by their lowest sample. Under
    requirements, or on ranks of unequal speed, they are not alike, and the layout stays as it is.
    """
    if problem.rules.shaped or not problem.cost.ranks_alike:
        return cell_S
    first_c = np.full(problem.cells, problem.window.samples, np.int64)
    np.minimum.at(first_c, cell_S, np.arange(len(cell_S)))
    width = problem.topology.ranks_per_shard
    first_MGW = first_c.reshape(problem.rows, problem.topology.edp, width)
    cells_MGW = np.arange(problem.cells).reshape(first_MGW.shape)
    cells_MGW = np.take_along_axis(cells_MGW, np.argsort(first_MGW, axis=2, kind="stable"), axis=2)
    cells_MGW = cells_MGW[np.argsort(first_MGW.min(axis=(1, 2)), kind="stable")]
    number_c = np.empty(problem.cells, np.int32)
    number_c[cells_MGW.ravel()] = np.arange(problem.cells, dtype=np.int32)
    return number_c[cell_S]


def sketch(problem: Problem, static: Static, cell_S: NDArray[np.int32]) -> NDArray[np.float64]:
    """Sliced-Wasserstein sketch: groups as points (attention, expert, tokens, samples), projected.

    The L1 distance of two sketches is the sliced 1-Wasserstein distance of the two sets of groups,
    over fixed directions.
    """
    measured = problem.measure(static, cell_S)
    groups = problem.cells // static.width
    group_S = cell_S // static.width
    tokens_B = np.bincount(group_S, weights=problem.window.lengths_S, minlength=groups)
    samples_B = np.bincount(group_S, minlength=groups)
    features = np.stack([measured.attention_B, measured.expert_B, tokens_B, samples_B], axis=1)
    features = features / np.maximum(features.mean(axis=0), 1e-300)
    directions = np.random.default_rng(0).standard_normal((features.shape[1], DIRECTIONS))
    directions /= np.linalg.norm(directions, axis=0)
    return np.sort(features @ directions, axis=0).ravel() / (groups * DIRECTIONS)


def diverse(problem: Problem, static: Static, seeds: list[Seed], count: int) -> list[Seed]:
    """The best seed, then each time the one farthest from those chosen; ties to the better seed."""
    if len(seeds) <= count:
        return seeds
    sketches = np.stack([sketch(problem, static, seed.cell_S) for seed in seeds])
    chosen = [0]
    distance = np.abs(sketches - sketches[0]).sum(axis=1)
    while len(chosen) < count:
        distance[chosen] = -1.0  # none twice, also where all others are equally good
        k = int(distance.argmax())
        chosen.append(k)
        distance = np.minimum(distance, np.abs(sketches - sketches[k]).sum(axis=1))
    return [seeds[k] for k in sorted(chosen)]
