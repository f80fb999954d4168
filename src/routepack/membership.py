"""Which optimizer step trains which sample, where the trainer leaves that open."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InfeasibleError, InputError
from routepack.window import Window

FEATURES = 48  # random projections of a sample's demand
TRIES = 40  # exchanges looked at, per sample


def given_steps(window: Window) -> NDArray[np.int64]:
    """The membership that the window states. Raises InputError without one."""
    if window.step_S is None:
        raise InputError("step: expected in the window, or a number of steps")
    return np.asarray(window.step_S, np.int64)


def balanced_steps(window: Window, steps: int, seed: int, *, together: bool) -> NDArray[np.int64]:
    """A step for each sample [S]: equally many samples each, alike in length and expert demand.

    With `together` the samples of a group stay in one step. Raises InfeasibleError where the
    samples (or groups of equal size) cannot be dealt out evenly.
    """
    if steps == 1:
        return np.zeros(window.samples, np.int64)
    name_U = unit_S = np.arange(window.samples)
    if together:
        assert window.group_S is not None
        name_U, unit_S = np.unique(window.group_S, return_inverse=True)
    size_U = np.bincount(unit_S)
    if len(size_U) % steps:
        what = "groups" if together else "samples"
        raise InfeasibleError.at(what, len(size_U), f"a multiple of the {steps} steps")
    if size_U.min() < size_U.max():
        u = int((size_U != size_U[0]).argmax())
        expected = f"{size_U[0]} as in the others, to deal groups out evenly"
        raise InfeasibleError.at("samples of group", int(size_U[u]), expected, int(name_U[u]))
    features_UF = _features(window, unit_S, len(size_U), seed)
    order_U = np.argsort(-features_UF[:, 0], kind="stable")
    step_U = np.empty(len(size_U), np.int64)
    for at, u in enumerate(order_U):  # back and forth, longest first
        turn, k = divmod(at, steps)
        step_U[u] = k if turn % 2 == 0 else steps - 1 - k
    _exchange(step_U, features_UF, steps, np.random.default_rng([seed, 7]))
    return np.asarray(step_U[unit_S])


def _features(
    window: Window, unit_S: NDArray[np.int64], units: int, seed: int
) -> NDArray[np.float64]:
    """Attention pairs, tokens and projected demand of each unit, each of unit variance."""
    tokens_S = np.asarray(window.lengths_S, np.float64)
    columns = window.layers * window.experts
    rng = np.random.default_rng([seed, 6])
    signs_CF = rng.choice(np.array([-1.0, 1.0], np.float32), (columns, FEATURES))
    demand_SF = np.empty((window.samples, FEATURES))
    for first in range(0, window.samples, 64):  # in parts: no copy of the demand
        part = window.demand_SLE[first : first + 64].reshape(-1, columns)
        demand_SF[first : first + 64] = part.astype(np.float32) @ signs_CF
    all_SF = np.column_stack([tokens_S**2, tokens_S, demand_SF])
    features_UF = np.zeros((units, all_SF.shape[1]))
    np.add.at(features_UF, unit_S, all_SF)
    features_UF -= features_UF.mean(axis=0)
    features_UF /= np.maximum(features_UF.std(axis=0), 1e-12)
    features_UF[:, 2:] /= np.sqrt(FEATURES / 2)  # together they weigh like the first two
    return features_UF


def _exchange(
    step_U: NDArray[np.int64],
    features_UF: NDArray[np.float64],
    steps: int,
    rng: np.random.Generator,
) -> None:
    """Exchange units of two steps where that brings the sums of the steps nearer to each other."""
    sums_NF = np.zeros((steps, features_UF.shape[1]))
    np.add.at(sums_NF, step_U, features_UF)
    units = len(step_U)
    for a, b in rng.integers(units, size=(TRIES * units, 2)):
        x, y = step_U[a], step_U[b]
        if x == y:
            continue
        moved = features_UF[b] - features_UF[a]
        if moved @ (sums_NF[x] - sums_NF[y] + moved) < 0:  # half the change of the squared sums
            sums_NF[x] += moved
            sums_NF[y] -= moved
            step_U[a], step_U[b] = y, x
