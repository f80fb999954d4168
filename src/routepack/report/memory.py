"""What an expert-parallel (EP) rank has to hold at once, and so what may run out of memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from routepack.padding import groups_of, rank_load_BLR
from routepack.plan import Plan
from routepack.window import Window


@dataclass(frozen=True)
class Busiest:
    """The most tokens routed to an EP rank at a layer in one row of a shard, and where."""

    tokens: int
    row: int
    shard: int
    layer: int
    """Index of the MoE layer in the model, as in `Window.moe_layers`."""
    rank: int

    @classmethod
    def of(cls, window: Window, plan: Plan) -> Busiest:
        """Of the window's plan; the first of equals, by row, shard, layer and rank."""
        topology = plan.to_topology()
        group_S = groups_of(plan.rows, topology, window.samples)
        load_BLR = rank_load_BLR(window, plan.placement_LE, topology.ep, group_S)
        at = np.unravel_index(int(load_BLR.argmax()), load_BLR.shape)
        b, layer, rank = (int(i) for i in at)
        row, shard = divmod(b, topology.edp)
        return cls(int(load_BLR[at]), row, shard, window.moe_layers[layer], rank)
