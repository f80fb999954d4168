"""Plans to choose between: of random instances, and of windows written by hand.

A window written by hand has samples of 64 tokens with top-1 routing, each on a DP rank and an EDP
shard of its own, and two EP ranks. There is one row, and a shard costs 1 for attention and, layer
by layer, the tokens of its busier EP rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack import AttentionStage, Budget, CostModel, Plan, Topology, Window
from routepack import plan as make
from routepack.mixture import Mixture
from routepack.placement import identity
from strategies import Instance, instances

TOKENS = 64
BY_HAND = CostModel((AttentionStage("full", 1.0, 0.0),), expert=float(TOKENS))


def costly(instance: Instance) -> bool:
    """Whether the window has any cost under the model: a bound of 0 leaves no gap to speak of."""
    model = instance.cost_model
    attention = any(stage.linear or stage.quadratic for stage in model.attention)
    return attention or bool(model.expert and instance.window.demand_LE.any())


def movable(instance: Instance) -> bool:
    """Whether another placement can matter: an expert costs, and ranks are not all alike."""
    ranks = instance.topology.ep
    return bool(instance.cost_model.expert) and 1 < ranks < instance.window.experts


COSTLY = instances().filter(costly)
MOVABLE = COSTLY.filter(movable)


def plan_of(instance: Instance, evaluations: int = 0, **options: Any) -> Plan:
    """Plan the instance, its placement being the current one."""
    return make(
        instance.window, instance.topology, token_cap=instance.token_cap,
        cost_model=instance.cost_model, current_placement=instance.placement_LE,
        budget=Budget(evaluations=evaluations), threads=1, **options,
    )  # fmt: skip


def by_hand(
    demand_SLE: Sequence[Sequence[Sequence[int]]], proposed_LE: Sequence[Sequence[int]]
) -> tuple[Window, Plan, Plan]:
    """The window, a plan that keeps the contiguous placement and one with another placement."""
    samples = len(demand_SLE)
    window = Window(np.full(samples, TOKENS), np.array(demand_SLE), 1)
    keep = make(
        window, Topology.of(dp=samples, ep=2, edp=samples), token_cap=TOKENS,
        cost_model=BY_HAND, fixed_placement=True, budget=Budget(evaluations=0), threads=1,
    )  # fmt: skip
    return window, keep, replaced(window, keep, np.array(proposed_LE, np.int32))


def replaced(window: Window, plan: Plan, placement_LE: NDArray[np.int32]) -> Plan:
    """The same layout with another placement."""
    current_LE = identity(window.layers, window.experts)
    everywhere_L = np.ones(window.layers, np.bool_)
    return Mixture.of(window, plan, current_LE, placement_LE).plan(everywhere_L)
