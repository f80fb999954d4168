"""What a layout costs, as numbers for a trainer's logger.

A row is paced twice: by the heaviest cell of each shard (attention), and at every MoE layer by the
busiest EP rank (experts). An imbalance is what is paced over what would be with everything level:
1.0 is perfect, 1.25 means 25 % of that work is waiting.

Shapes: B groups (row * shard), S samples, T attention stages, G shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routepack.cost import CostModel
from routepack.integrations.layout import Cells
from routepack.topology import Topology
from routepack.window import Window

PREFIX = "routepack/"
Metrics = dict[str, float]


@dataclass(frozen=True)
class Load:
    """Costs of a layout, in units of the cost model; loads of several optimizer steps add up."""

    rows: int
    slowest_shard: float
    attention: float
    """Of the heaviest cells, summed over rows and shards."""
    attention_level: float
    """The same, were the cells of every shard equal."""
    expert: float
    """Of the busiest EP ranks, summed over layers, rows and shards."""
    expert_level: float
    worst_row: float
    """The largest expert imbalance of a row and shard."""

    def __add__(self, other: Load) -> Load:
        return Load(
            self.rows + other.rows,
            self.slowest_shard + other.slowest_shard,
            self.attention + other.attention,
            self.attention_level + other.attention_level,
            self.expert + other.expert,
            self.expert_level + other.expert_level,
            max(self.worst_row, other.worst_row),
        )

    def over(self, other: Load) -> float:
        """Predicted time over another layout's: below 1 is faster."""
        return _ratio(self.slowest_shard, other.slowest_shard)

    def metrics(self, name: str) -> Metrics:
        """Flat, under `routepack/{name}/`."""
        values = {
            "rows": self.rows,
            "slowest_shard": self.slowest_shard,
            "attention_imbalance": _ratio(self.attention, self.attention_level),
            "expert_imbalance": _ratio(self.expert, self.expert_level),
            "worst_row_expert_imbalance": self.worst_row,
        }
        return {f"{PREFIX}{name}/{key}": value for key, value in values.items()}


def measure(
    window: Window,
    topology: Topology,
    cost_model: CostModel,
    token_cap: int,
    rows: Cells,
    placement_LE: NDArray[np.int32] | None = None,
) -> Load:
    """The load of the rows [M][D] of one optimizer step, which hold every sample of `window`.

    A cell may be above the token cap, as some trainers' own are. `placement_LE` defaults to
    contiguous experts.
    """
    from routepack.placement import identity, ranks_of  # loads the kernels
    from routepack.problem import Problem

    if placement_LE is None:
        placement_LE = identity(window.layers, window.experts)
    cost = cost_model.resolve(window, topology, token_cap)
    problem = Problem(window, topology, cost, token_cap, len(rows))
    cell_S = problem.from_bins([cell for row in rows for cell in row])
    static = problem.static(ranks_of(placement_LE, topology.ep))
    measured = problem.measure(static, cell_S)

    groups, width = len(rows) * topology.edp, topology.ranks_per_shard
    group_S = cell_S // width
    linear = float(cost.linear_T.sum())
    work_S = linear * window.lengths_S + cost.quadratic_T @ cost.quadratic_tokens_TS
    # Level is what ranks reach together, each as fast as it is.
    shard_B = np.arange(groups) % topology.edp
    slow_G = np.array([1 / np.mean(1 / cost.slow_D[list(ranks)]) for ranks in topology.groups])
    attention_level_B = np.bincount(group_S, work_S, groups) / width * slow_G[shard_B]
    recorded_S = (window.lengths_S - window.missing_S) * (window.top_k * window.layers)
    slow_G = 1 / np.mean(1 / cost.slow_GR, axis=1)
    routed_B = np.bincount(group_S, recorded_S, groups) / topology.ep
    expert_level_B = cost.expert * routed_B * slow_G[shard_B]
    return Load(
        rows=len(rows),
        slowest_shard=measured.score.slowest_shard,
        attention=float(measured.attention_B.sum()),
        attention_level=float(attention_level_B.sum()),
        expert=float(measured.expert_B.sum()),
        expert_level=float(expert_level_B.sum()),
        worst_row=max(map(_ratio, measured.expert_B.tolist(), expert_level_B.tolist())),
    )


def _ratio(paced: float, level: float) -> float:
    """Nothing to do is level."""
    return paced / level if level > 0 else 1.0
