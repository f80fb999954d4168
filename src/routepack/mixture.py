"""One layout under two placements: what any choice between them, layer by layer, really costs.

Given the layout, the layers of a placement are independent (design 6.1), so a placement may be
taken at some layers only. Loads are counted once for each of the two placements; the score of a
mixture is then the oracle's expression of the same integers, equal to it to the last bit.

Shapes: L MoE layers, E experts per layer, R EP ranks, M rows, G EDP shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from routepack.cost import Coefficients
from routepack.migration import Moves
from routepack.objective import cell_attention, score_rows
from routepack.plan import Certificate, Plan, Score
from routepack.window import Window


@dataclass(frozen=True, eq=False)
class Mixture:
    """The layout of `base` under `current_LE`, and under `proposed_LE` at any chosen layers."""

    base: Plan
    current_LE: NDArray[np.int32]
    proposed_LE: NDArray[np.int32]
    attention_MG: NDArray[np.float64]
    current_MGL: NDArray[np.int64]  # routed tokens of the busiest rank under current_LE, slowed
    proposed_MGL: NDArray[np.int64]
    expert: float  # cost of one of them

    @classmethod
    def of(
        cls,
        window: Window,
        base: Plan,
        current_LE: NDArray[np.int32],
        proposed_LE: NDArray[np.int32],
    ) -> Mixture:
        """Count the loads of both placements in the rows of `base`, a plan of `window`."""
        topology = base.to_topology()
        cost = base.cost_model.resolve(window, topology, base.token_cap)
        attention_MG = [
            [_attention(row, dp, window, cost) for dp in topology.groups] for row in base.rows
        ]
        demand_MGLE = np.array(
            [[_demand([row[d] for d in dp], window) for dp in topology.groups] for row in base.rows]
        )
        return cls(
            base,
            current_LE,
            proposed_LE,
            np.array(attention_MG),
            _busiest(demand_MGLE, current_LE, cost.slow_GR),
            _busiest(demand_MGLE, proposed_LE, cost.slow_GR),
            cost.expert,
        )

    @property
    def moves(self) -> Moves:
        """What the whole proposed placement would move."""
        return Moves.between(self.current_LE, self.proposed_LE, self.base.topology.ep)

    def score(self, moved_L: NDArray[np.bool_]) -> Score:
        """The exact score with the layers `moved_L` as proposed and the others as they are."""
        busiest_MG = np.where(moved_L, self.proposed_MGL, self.current_MGL).sum(axis=2)
        return score_rows(self.attention_MG, self.expert * busiest_MG)

    def saving_L(self, moved_L: NDArray[np.bool_]) -> NDArray[np.float64]:
        """By how much the slowest shard would rise if one of the layers `moved_L` stayed."""
        current_GL, proposed_GL = self.current_MGL.sum(axis=0), self.proposed_MGL.sum(axis=0)
        busiest_G = np.where(moved_L, proposed_GL, current_GL).sum(axis=1)
        cost_G = self.attention_MG.sum(axis=0) + self.expert * busiest_G
        without_GL = cost_G[:, None] + self.expert * (current_GL - proposed_GL)
        return np.asarray(without_GL.max(axis=0) - cost_G.max())

    def plan(self, moved_L: NDArray[np.bool_]) -> Plan:
        """The whole plan: `base` with this placement, its score and its gap."""
        score = self.score(moved_L)
        placement_LE = np.where(moved_L[:, None], self.proposed_LE, self.current_LE)
        certificate = self.base.certificate
        gap = Certificate.gap_of(score.slowest_shard, certificate.cost_lower_bound)
        return msgspec.structs.replace(
            self.base,
            placement=tuple(tuple(slots) for slots in placement_LE.tolist()),
            score=score,
            certificate=msgspec.structs.replace(certificate, gap=gap),
        )


def _attention(
    row: Sequence[Sequence[int]], dp_ranks: Sequence[int], window: Window, cost: Coefficients
) -> float:
    """Attention of a row of one shard, as the oracle adds it up."""
    attention = 0.0
    for stage in range(len(cost.linear_T)):
        attention += max(cell_attention(row[d], d, stage, window, cost) for d in dp_ranks)
    return attention


def _demand(cells: Sequence[Sequence[int]], window: Window) -> NDArray[np.int64]:
    """Demand [L, E] of a row of one shard."""
    samples = list(chain.from_iterable(cells))
    return np.asarray(window.demand_SLE[samples].sum(axis=0, dtype=np.int64))


def _busiest(
    demand_MGLE: NDArray[np.int64], placement_LE: NDArray[np.int32], slow_GR: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Routed tokens of the busiest rank [M, G, L], times how slow it is."""
    expert_of_slot_LE = np.argsort(placement_LE, axis=1)
    by_slot = np.take_along_axis(demand_MGLE, expert_of_slot_LE[None, None], axis=3)
    load_MGLR = by_slot.reshape(*by_slot.shape[:3], slow_GR.shape[1], -1).sum(axis=4)
    return np.asarray((load_MGLR * slow_GR[None, :, None]).max(axis=3))
