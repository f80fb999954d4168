"""Samples that share a cell, such as rollouts of a prompt, planned as one: together = "cell"."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from routepack.cost import Coefficients
from routepack.errors import InfeasibleError
from routepack.kernels.rowaware import group_demand
from routepack.requirements import Requirements
from routepack.rules import unit_index_S
from routepack.window import Window

Rows = tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True, eq=False)
class Contraction:
    """A window whose samples are the groups of another, with the cost and the requirements."""

    window: Window
    cost: Coefficients
    requirements: Requirements
    members: tuple[tuple[int, ...], ...]
    """Samples of each group in the original window."""

    @classmethod
    def of(
        cls, window: Window, cost: Coefficients, requirements: Requirements, token_cap: int
    ) -> Contraction:
        """One sample per group. Raises InfeasibleError where a group fits no cell."""
        unit_S = unit_index_S(window)
        units = int(unit_S.max()) + 1
        size_U = np.bincount(unit_S, minlength=units)
        tokens_U = np.bincount(unit_S, weights=window.lengths_S, minlength=units).astype(np.int64)
        assert window.group_S is not None
        name_U = np.unique(window.group_S)
        _check(window, requirements, token_cap, unit_S, size_U, tokens_U, name_U)
        demand_ULE = group_demand(window.demand_SLE, unit_S.astype(np.int32), units, np.int64)
        missing_U = np.bincount(unit_S, weights=window.missing_S, minlength=units)
        first_U = np.unique(unit_S, return_index=True)[1]
        tag_U = None if window.tag_S is None else window.tag_S[first_U]
        small = Window(
            lengths_S=tokens_U,
            demand_SLE=demand_ULE.astype(np.uint32),
            top_k=window.top_k,
            missing_S=missing_U.astype(np.int64),
            tag_S=tag_U,
            moe_layers=window.moe_layers,
        )
        tokens2_TU = np.zeros((len(cost.quadratic_tokens_TS), units), np.int64)
        for total_U, tokens2_S in zip(tokens2_TU, cost.quadratic_tokens_TS, strict=True):
            np.add.at(total_U, unit_S, tokens2_S)
        most = requirements.max_samples_per_cell
        fewer = msgspec.structs.replace(
            requirements,
            together=None,
            max_samples_per_cell=None if most is None else most // int(size_U.max()),
        )
        members = tuple(tuple(np.flatnonzero(unit_S == u).tolist()) for u in range(units))
        return cls(small, replace(cost, quadratic_tokens_TS=tokens2_TU), fewer, members)

    def expand(self, rows: Rows) -> Rows:
        """Rows of the original window's samples."""
        return tuple(
            tuple(tuple(sorted(s for u in cell for s in self.members[u])) for cell in row)
            for row in rows
        )


def _check(
    window: Window,
    requirements: Requirements,
    token_cap: int,
    unit_S: NDArray[np.int64],
    size_U: NDArray[np.int64],
    tokens_U: NDArray[np.int64],
    name_U: NDArray[np.int32],
) -> None:
    if (bad := np.flatnonzero(tokens_U > token_cap)).size:
        u = int(bad[0])
        expected = f"at most the token cap {token_cap}, for together = 'cell'"
        raise InfeasibleError.at("tokens of group", int(tokens_U[u]), expected, int(name_U[u]))
    most = requirements.max_samples_per_cell
    if most is not None and most < size_U.max():
        u = int(size_U.argmax())
        expected = f"at most max_samples_per_cell = {most}, for together = 'cell'"
        raise InfeasibleError.at("samples of group", int(size_U[u]), expected, int(name_U[u]))
    counted = most is not None or requirements.equal_samples_per_rank
    if counted and size_U.min() < size_U.max():
        u = int((size_U != size_U[0]).argmax())
        expected = f"{size_U[0]} as in the others, to count samples with together = 'cell'"
        raise InfeasibleError.at("samples of group", int(size_U[u]), expected, int(name_U[u]))
    if requirements.uniform_rows:
        assert window.tag_S is not None
        for u in range(len(size_U)):
            tags = np.unique(window.tag_S[unit_S == u])
            if len(tags) > 1:
                expected = "one, for uniform_rows with together = 'cell'"
                raise InfeasibleError.at("tags of group", tags.tolist(), expected, int(name_U[u]))
