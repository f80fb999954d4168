"""One sweep of annealing at a fixed temperature (design section 3.4; moves of section 6.1)."""

from __future__ import annotations

import math

import numpy as np
from numba import types
from numpy.typing import NDArray

from routepack.kernels.evaluation import energy, evaluate, spread_change
from routepack.kernels.layout import TOTAL_WEIGHT, State, Static, of_static, state_type, static_type
from routepack.kernels.moves import apply, propose
from routepack.kernels.rng import draw, unit
from routepack.kernels.units import UNIT, try_units

# Where a sweep leaves its results.
ENERGY, BEST, ACCEPTED, EVALUATED, RESULTS = 0, 1, 2, 3, 4
DRAWS = 3  # random words of a proposal
SLACK = 2.0  # of the temperature: what a bound may lose so that anchors seldom move


def _sweep(
    static: Static,
    state: State,
    best_S: NDArray[np.int32],
    results: NDArray[np.float64],
    temperature: float,
    total_weight: float,
    spread_weight: float,
    proposals: int,
    key: np.uint64,
    counter: np.uint64,
) -> None:
    """Make `proposals` proposals; best_S keeps the layout of the least energy seen (results[BEST]).

    While a search is hot, `total_weight` may exceed TOTAL_WEIGHT, so that the other shards stay low
    too, and `spread_weight` charges unequal cells, of which the energy sees only the largest. The
    best is always kept by the energy of the design.
    """
    now = energy(static, state, total_weight)
    best = results[BEST]
    accepted, evaluated = 0, 0
    one = np.uint64(1)
    layers = state.load_BRL.shape[2]
    loss = SLACK * temperature / (max(static.expert, 1e-300) * layers)
    state.slack[0] = np.int64(min(loss, 1e9))
    for n in range(proposals):
        at = counter + np.uint64(DRAWS * n)
        first, second, third = draw(key, at), draw(key, at + one), draw(key, at + one + one)
        limit = now - temperature * math.log(unit(third))
        if static.units > 0 and unit(draw(third, one)) < UNIT:
            after = try_units(static, state, first, second, total_weight, limit)
            evaluated += 1
            if after > limit:
                continue
        else:
            x, y, i, j = propose(static, state, first, second)
            if x < 0:
                continue
            if spread_weight > 0.0:
                limit -= spread_weight * spread_change(static, state, x, y, i, j)
            after, full = evaluate(static, state, x, y, i, j, total_weight, limit, True)
            if full:
                evaluated += 1
            if after > limit:
                continue
            apply(static, state, x, y, i, j)
        now = energy(static, state, total_weight)
        accepted += 1
        reached = now
        if total_weight != TOTAL_WEIGHT:
            reached = energy(static, state, TOTAL_WEIGHT)
        if reached < best:
            best = reached
            for s in range(len(best_S)):
                best_S[s] = state.cell_S[s]
    results[ENERGY], results[BEST] = now, best
    results[ACCEPTED] += accepted
    results[EVALUATED] += evaluated


sweep = of_static(
    _sweep,
    lambda load: types.void(
        static_type(load), state_type(load), types.int32[::1], types.float64[::1],
        types.float64, types.float64, types.float64, types.int64, types.uint64, types.uint64,
    ),
)  # fmt: skip
