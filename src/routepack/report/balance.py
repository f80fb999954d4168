"""How even a demand is: ratios to the mean and the Gini coefficient."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def ratios(load: NDArray[Any]) -> NDArray[np.float64]:
    """Each value over the mean of the last axis; not a number where that mean is 0."""
    mean = load.mean(axis=-1, keepdims=True)
    return np.divide(load, mean, out=np.full(load.shape, np.nan), where=mean > 0)


def gini(load: NDArray[Any]) -> NDArray[np.float64]:
    """Gini coefficient over the last axis: 0 all equal, (n-1)/n all in one; not a number for no load.

    Half the mean absolute difference of two values, over their mean; from sorted values x_i it is
    sum((2i - n - 1) x_i) / (n sum(x)), i = 1..n.
    """
    n = load.shape[-1]
    weights = 2 * np.arange(1, n + 1) - n - 1
    total = n * load.sum(axis=-1)
    spread = (np.sort(load, axis=-1) * weights).sum(axis=-1)
    return np.divide(spread, total, out=np.full(total.shape, np.nan), where=total > 0)
