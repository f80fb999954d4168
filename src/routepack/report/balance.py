"""How even a load is: ratios to the mean and the Gini coefficient."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def ratios(load: NDArray[Any]) -> NDArray[np.float64]:
    """Each value over the mean of the last axis; not a number where that mean is 0."""
    mean = load.mean(axis=-1, keepdims=True)
    return np.asarray(np.divide(load, mean, out=np.full(load.shape, np.nan), where=mean > 0))


def gini(load: NDArray[Any]) -> NDArray[np.float64]:
    """Gini coefficient over the last axis: 0 all equal, 1 - 1/n all in one.

    From ascending values x_i it is sum((2i - n - 1) x_i) / (n sum(x)), i = 1..n; not a number where
    the sum is 0.
    """
    n = load.shape[-1]
    spread = np.sort(load, axis=-1) @ (2 * np.arange(1, n + 1) - n - 1)
    total = n * load.sum(axis=-1)
    return np.asarray(np.divide(spread, total, out=np.full(total.shape, np.nan), where=total > 0))


def finite_max(values: NDArray[np.float64]) -> float:
    """The largest number in `values`; 1, the ratio where nobody waits, if there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else 1.0


def finite_mean(values: NDArray[np.float64]) -> float:
    """The mean of the numbers in `values`; not a number where there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")
