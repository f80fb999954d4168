"""The canonical routes of one sample."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

CAPTURED, MISSING, PADDING = 0, 1, 2  # what a token row is


@dataclass(frozen=True, eq=False)
class SampleRoutes:
    """Routes of one sample, checked and counted when the functions of this package made it.

    captured_NLK    ids of the N captured token rows, in token order, MoE layers only: uint8 up to
                    256 experts, else uint16. Perhaps a view of the payload: leave both alone
    provenance_T    uint8, CAPTURED, MISSING or PADDING for each of T token rows
    demand_LE       (token, k) assignments to each expert, uint16 below 65536 token rows, else
                    uint32; sums to K * N at every layer
    duplicate_rows  recorded rows that a later recording of the same tokens replaced
    partial_rows    token rows that are MISSING because some MoE layers had no route
    """

    captured_NLK: NDArray[Any]
    provenance_T: NDArray[np.uint8]
    demand_LE: NDArray[Any]
    duplicate_rows: int = 0
    partial_rows: int = 0

    @property
    def captured(self) -> int:
        """N, token rows with a route at every MoE layer."""
        return len(self.captured_NLK)

    @cached_property
    def padding(self) -> int:
        """Rows of the payload that belong to no token of the sample."""
        return int(np.count_nonzero(self.provenance_T == PADDING))

    @property
    def length(self) -> int:
        """Tokens of the sample: T without padding."""
        return len(self.provenance_T) - self.padding

    @property
    def missing(self) -> int:
        """Tokens of the sample without a route."""
        return self.length - self.captured

    @property
    def last_missing(self) -> bool:
        """Whether the last token has no route, as is usual."""
        tokens_T = self.provenance_T
        if self.padding:
            tokens_T = tokens_T[tokens_T != PADDING]
        return bool(tokens_T[-1] == MISSING)

    @property
    def routes_TLK(self) -> NDArray[Any]:
        """Ids of every token row, [T, L, K]; zeros, which mean nothing, where none is captured."""
        shape = (len(self.provenance_T), *self.captured_NLK.shape[1:])
        routes_TLK = np.zeros(shape, self.captured_NLK.dtype)
        routes_TLK[self.provenance_T == CAPTURED] = self.captured_NLK
        return routes_TLK
