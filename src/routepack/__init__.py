"""routepack: expert placement and micro-batch packing for RL training of Mixture-of-Experts models.

Importing this module compiles nothing; `plan` loads the numba kernels at its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from routepack.budget import Budget
from routepack.cost import AttentionStage, CostModel
from routepack.errors import InfeasibleError, InputError
from routepack.estimate import Estimate
from routepack.padding import Padding
from routepack.plan import Plan
from routepack.planset import Pass, PlanSet
from routepack.requirements import Requirements
from routepack.topology import Topology
from routepack.window import Window

__version__ = "0.1.0"
__all__ = [
    "AttentionStage",
    "Budget",
    "CostModel",
    "Estimate",
    "InfeasibleError",
    "InputError",
    "Padding",
    "Pass",
    "Plan",
    "PlanSet",
    "Requirements",
    "Topology",
    "Window",
    "plan",
    "plan_steps",
]


def plan(
    window: Window,
    topology: Topology,
    *,
    token_cap: int,
    cost_model: CostModel | None = None,
    method: str = "routepack",
    budget: Budget | None = None,
    current_placement: NDArray[np.int32] | None = None,
    seed: int = 0,
    threads: int | None = None,
    stop: Callable[[], bool] | None = None,
    fixed_placement: bool = False,
    requirements: Requirements | None = None,
    padding: Padding | None = None,
    estimate: str | Estimate | None = None,
) -> Plan:
    """Plan one optimizer step: where each expert lives, and which micro-batch trains each sample.

    window             lengths [S] and demand [S, L, E] of the step's samples
    topology           DP ranks, EP ranks and EDP shards
    token_cap          C, tokens of a micro-batch on one DP rank (tokens per GPU times cp)
    cost_model         default: one stage linear 60, quadratic 20, expert 1
    method             one of routepack.plan.METHODS; only the last three search
    budget             default one second, from the entry of this function with kernels warm
    current_placement  [L, E] slots held now; the new placement moves as few experts as it can
    threads            default: the CPUs this process may use
    stop               called between temperature steps; True ends the search with its best
    fixed_placement    plan the micro-batches only: every expert stays where current_placement has
                       it (contiguous without one), whatever the method
    requirements       what the trainer requires of a layout beyond the cap (class Requirements)
    padding            how the trainer pads samples: cap, load and cost include it
    estimate           how tokens without a recorded route are estimated ("sample", "window",
                       "none"), or the record of a predicted window; stated in the plan

    Raises InputError for input that cannot be used, InfeasibleError where no plan exists. Seconds
    by stage are in Plan.stats. The first call of a process loads the kernels, the first one after
    an installation compiles them.
    """
    from routepack.planner import make_plan

    return make_plan(
        window,
        topology,
        token_cap,
        cost_model,
        method,
        budget,
        current_placement,
        seed,
        threads,
        stop,
        fixed_placement,
        requirements,
        padding,
        estimate,
    )


def plan_steps(
    window: Window,
    topology: Topology,
    *,
    token_cap: int,
    steps: int | ArrayLike | None = None,
    passes: Sequence[Pass] = (),
    cost_model: CostModel | None = None,
    budget: Budget | None = None,
    current_placement: NDArray[np.int32] | None = None,
    seed: int = 0,
    threads: int | None = None,
    stop: Callable[[], bool] | None = None,
    fixed_placement: bool = False,
    requirements: Requirements | None = None,
    padding: Padding | None = None,
    estimate: str | Estimate | None = None,
) -> PlanSet:
    """Plan several optimizer steps of one rollout batch together: one placement, a layout each.

    steps   the step of each sample [S] (membership is kept), default `window.step_S`; or a number
            of steps, over which the samples are dealt out evenly, alike in length and demand
    passes  other passes over the whole batch on the same placement, each with its own cap and
            cost; they take a quarter of the budget

    The rest is as in `plan`. Requirements hold in every step. Raises InputError, InfeasibleError.
    """
    from routepack.steps import make_plans

    return make_plans(
        window,
        topology,
        token_cap,
        steps,
        passes,
        cost_model,
        budget,
        current_placement,
        seed,
        threads,
        stop,
        fixed_placement,
        requirements,
        padding,
        estimate,
    )
