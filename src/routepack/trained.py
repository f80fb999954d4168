"""The window as a trainer will run it: missing routes estimated, samples padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from routepack.cost import Coefficients
from routepack.errors import InputError
from routepack.estimate import Estimate, cost_interval, fill_missing
from routepack.padding import Padding, padded
from routepack.topology import Topology
from routepack.window import Window

PREDICTED = "predicted"


class PaddingKey(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """A Padding, as it stands in a plan file."""

    multiple: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1
    experts: Any = None
    fills_missing: bool = False

    @classmethod
    def of(cls, padding: Padding) -> PaddingKey:
        experts = padding.experts
        return cls(
            multiple=padding.multiple,
            context_parallel=padding.context_parallel,
            tensor_parallel=padding.tensor_parallel,
            experts=experts.tolist() if isinstance(experts, np.ndarray) else experts,
            fills_missing=padding.fills_missing,
        )

    def to_padding(self) -> Padding:
        """Raises InputError for values that a Padding refuses."""
        return Padding(**msgspec.structs.asdict(self))


@dataclass(frozen=True, eq=False)
class Trained:
    """How a window is run: the padding and the estimate that its plan states."""

    padding: Padding | None = None
    estimate: Estimate | None = None

    @classmethod
    def of(
        cls, window: Window, padding: Padding | None, estimate: str | Estimate | None
    ) -> Trained:
        """`estimate`: how missing tokens are estimated, or the record of a prediction.

        Raises InputError for another estimate.
        """
        if isinstance(estimate, Estimate) and estimate.how != PREDICTED:
            estimate = estimate.how
        if isinstance(estimate, str):
            estimate = Estimate.of_missing(window, estimate)
        elif estimate is not None and not isinstance(estimate, Estimate):
            raise InputError.at("estimate", repr(estimate), "sample, window, none or an Estimate")
        return cls(padding, estimate)

    def window(self, window: Window) -> Window:
        """The window that is planned."""
        if self.estimate is not None and self.estimate.how != PREDICTED:
            window = fill_missing(window, self.estimate.how)
        return padded(window, self.padding) if self.padding is not None else window

    def interval(
        self,
        window: Window,
        topology: Topology,
        cost: Coefficients,
        placement_LE: NDArray[np.int32],
        rows: Sequence[Sequence[Sequence[int]]],
        attention_MG: NDArray[np.float64],
    ) -> tuple[float, float] | None:
        """The least and the most that the slowest shard can cost; None if nothing is estimated."""
        if self.estimate is None:
            return None
        known, unknown_S = window, np.array(window.missing_S)
        if self.estimate.how == PREDICTED:
            nothing_SLE = np.zeros_like(window.demand_SLE)
            known = replace(
                window, demand_SLE=nothing_SLE, missing_S=window.lengths_S.astype(np.int32)
            )
            unknown_S = np.array(window.lengths_S)
        if self.padding is not None:
            if self.padding.fills_missing:
                unknown_S[:] = 0
            known = padded(known, self.padding)
        return cost_interval(known, unknown_S, topology, cost, placement_LE, rows, attention_MG)
