"""Experts for the padding rows of planned samples, chosen after planning (padding.py).

Shapes: S samples, L MoE layers, K experts per token; P padding rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.padding import FILL, Fill, groups_of, spread
from routepack.plan import Plan
from routepack.planset import PlanSet
from routepack.trained import Trained
from routepack.window import Window


def fill_of(window: Window, plan: Plan | PlanSet) -> Fill:
    """Experts that raise the busiest ranks of a plan, or of each step of a set, least.

    window  that was planned, as it was recorded: padding and estimates are the plan's
    plan    that holds (`routepack.verify`), made with `Padding(experts="fill")`

    `with_fill(plan.trained().window(window), fill)` is the window that the ranks will carry. Raises
    InputError for a plan of other padding.
    """
    parts, owner_parts = [], []
    for index, part, step in steps_of(window, plan):
        fill = _of_step(part, step)
        parts.append(fill.ids_PLK)
        owner_parts.append(np.repeat(index, np.diff(fill.offsets_S1)))
    sample_P = np.concatenate(owner_parts)
    rows_S = np.bincount(sample_P, minlength=window.samples)
    ids_PLK = np.concatenate(parts)[np.argsort(sample_P, kind="stable")]
    return Fill(ids_PLK, np.concatenate([[0], np.cumsum(rows_S)]))


def steps_of(
    window: Window, plan: Plan | PlanSet
) -> Iterator[tuple[NDArray[np.int64], Window, Plan]]:
    """The samples of each step, its window, and its plan in the sample indices of that window."""
    if isinstance(plan, Plan):
        yield np.arange(window.samples), window, plan
        return
    for k, step in enumerate(plan.plans):
        index = plan.samples_of(k)
        position = {int(i): n for n, i in enumerate(index)}
        rows = tuple(tuple(tuple(position[i] for i in c) for c in row) for row in step.rows)
        yield index, window.select(index), msgspec.structs.replace(step, rows=rows)


def _of_step(window: Window, plan: Plan) -> Fill:
    trained, topology = plan.trained(), plan.to_topology()
    padding = trained.padding
    if padding is None or not isinstance(padding.experts, str):
        found = "none" if padding is None or padding.experts is None else "expert ids"
        raise InputError.at("padding.experts", found, f"{FILL!r}, so that they can be chosen")
    rows_S = padding.rows_S(Trained(None, trained.estimate).window(window))
    group_S = groups_of(plan.rows, topology, window.samples)
    return spread(trained.window(window), rows_S, plan.placement_LE, topology.ep, group_S)
