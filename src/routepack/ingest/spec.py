"""What a reader of recorded routes must know about the model and may assume about holes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from routepack.counting import MAX_EXPERTS
from routepack.errors import InputError

MAX_LAYERS = 2**16  # far above any model; a typing slip must not allocate


class Selection(NamedTuple):
    """Which layers of a payload's layer axis (A of them) are MoE layers."""

    whole: bool  # all of them are
    moe_L: NDArray[np.int64]
    dense_D: NDArray[np.int64]  # the others
    runs_U2: NDArray[np.int64]  # consecutive MoE layers: position and number of ids in a row


@dataclass(frozen=True)
class RouteSpec:
    """The model whose routes are read, and what rows without a route mean.

    num_experts   E, from the model's config, never from the largest id
    top_k         K, experts per token
    moe_layers    index in the model of each MoE layer, ascending. None: every layer of a payload
                  is a MoE layer
    model_layers  layers of the model, dense ones included; default: the last MoE layer is the last
    zero_rows     only for top_k 1, where a row of zeros may be routes to expert 0: whether a token
                  row that is zero at every MoE layer is "routed" or "missing". None refuses such a
                  row. With more experts per token zeros are always a hole: the ids of a row differ
    partial_rows  a token row with routes at some MoE layers only: "refuse" it, or count the whole
                  row as "missing", since a window has the same tokens at every layer

    Raises InputError.
    """

    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...] | None = None
    model_layers: int | None = None
    zero_rows: Literal["missing", "routed"] | None = None
    partial_rows: Literal["refuse", "missing"] = "refuse"

    def __post_init__(self) -> None:
        _whole("num_experts", self.num_experts, MAX_EXPERTS)
        _whole("top_k", self.top_k, self.num_experts)
        if self.model_layers is not None:
            _whole("model_layers", self.model_layers, MAX_LAYERS)
        if self.moe_layers is not None:
            layers = tuple(self.moe_layers)
            if not layers:
                raise InputError.at("moe_layers", "()", "at least 1 MoE layer")
            last = -1
            for i, layer in enumerate(layers):
                top = (self.model_layers or MAX_LAYERS) - 1
                if not _is_whole(layer) or not last < layer <= top:
                    expected = f"a layer in {last + 1}..{top}, ascending"
                    raise InputError.at("moe_layers", layer, expected, i)
                last = int(layer)
            object.__setattr__(self, "moe_layers", tuple(int(layer) for layer in layers))
        if self.zero_rows not in (None, "missing", "routed"):
            raise InputError.at("zero_rows", repr(self.zero_rows), "'missing' or 'routed'")
        if self.zero_rows == "routed" and self.top_k > 1:
            expected = f"'missing': the {self.top_k} ids of a routed row differ"
            raise InputError.at("zero_rows", repr(self.zero_rows), expected)
        if self.partial_rows not in ("refuse", "missing"):
            raise InputError.at("partial_rows", repr(self.partial_rows), "'refuse' or 'missing'")

    @cached_property
    def id_type(self) -> np.dtype[Any]:
        """The type of canonical ids: uint8 up to 256 experts, else uint16."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @cached_property
    def layers(self) -> int | None:
        """L, or None where only a payload can tell."""
        return self.model_layers if self.moe_layers is None else len(self.moe_layers)

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """Sizes that a payload's layer axis may have: all layers of the model, MoE layers only."""
        if self.moe_layers is None:
            return () if self.model_layers is None else (self.model_layers,)
        every = self.moe_layers[-1] + 1 if self.model_layers is None else self.model_layers
        return (every,) if every == len(self.moe_layers) else (every, len(self.moe_layers))

    def selection(self, axis: int, field: str) -> Selection:
        """The MoE layers of a layer axis of this size. Raises InputError for a wrong size."""
        found = self._selections.get(axis)
        if found is None:
            if axis < 1 or (self.axes and axis not in self.axes):
                names = ("all layers of the model", "MoE layers only")
                sizes = [f"{size} ({name})" for size, name in zip(self.axes, names, strict=False)]
                expected = " or ".join(sizes) or "at least 1 layer"
                raise InputError.at(f"{field} layer axis", axis, expected)
            found = self._selections[axis] = self._select(axis)
        return found

    @cached_property
    def _selections(self) -> dict[int, Selection]:
        return {}

    def _select(self, axis: int) -> Selection:
        whole = self.moe_layers is None or axis == len(self.moe_layers)
        moe_L = np.arange(axis) if whole else np.array(self.moe_layers)
        dense_D = np.setdiff1d(np.arange(axis), moe_L)
        starts = np.flatnonzero(np.diff(moe_L, prepend=-2) != 1)
        sizes = np.diff(starts, append=len(moe_L))
        runs_U2 = np.stack([moe_L[starts], sizes], axis=1) * self.top_k
        return Selection(whole, moe_L, dense_D, np.ascontiguousarray(runs_U2, np.int64))


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _whole(name: str, value: Any, high: int) -> None:
    if not _is_whole(value) or not 1 <= value <= high:
        raise InputError.at(name, value, f"a whole number in 1..{high}")
