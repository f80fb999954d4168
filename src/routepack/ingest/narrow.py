"""Ids of any integer type to the canonical one, leaving out dense layers, in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.kernels.jit import kernel

_SOURCES = {
    "uint8": ("uint8", "uint16", "uint32", "uint64"),
    "uint16": ("uint16", "uint32", "uint64"),  # 8 bits do not hold more than 256 experts
}


@kernel(
    *(
        f"{source}(Array({source}, 1, 'C', readonly=True), i8, i8[:, ::1], {target}[::1])"
        for target, sources in _SOURCES.items()
        for source in sources
    ),
    allocates=False,
)
def narrow(ids_X: NDArray[Any], width: int, runs_U2: NDArray[np.int64], out_Y: NDArray[Any]) -> Any:
    """Copy the runs (position, number of ids) of every row of `width` ids, of which there is one.

    Signed ids come as unsigned views, so that negative ones are large. Returns the largest copied
    id; where that does not fit `out_Y`, what was written is of no use.
    """
    largest = ids_X[runs_U2[0, 0]]
    start = 0
    for row in range(ids_X.size // width):
        for u in range(runs_U2.shape[0]):
            size = runs_U2[u, 1]
            # Slices, because LLVM vectorises only if it can prove that indices do not wrap around.
            own = ids_X[row * width + runs_U2[u, 0] :][:size]
            out = out_Y[start:][:size]
            for j in range(size):
                largest = max(largest, own[j])
                out[j] = own[j]
            start += size
    return largest
