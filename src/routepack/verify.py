"""Is a plan what it says? Everything is recomputed with the slow oracle."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from routepack.bounds import best_bound
from routepack.constrained import row_lower_bound
from routepack.contraction import Contraction
from routepack.cost import Coefficients
from routepack.errors import InputError
from routepack.estimate import Estimate
from routepack.objective import row_costs, score
from routepack.plan import Plan, WindowKey, validate_placement
from routepack.planset import PlanSet
from routepack.requirement_checks import broken_requirements
from routepack.rows import minimal_rows
from routepack.topology import Topology
from routepack.trained import PREDICTED, Trained
from routepack.window import Window


def verify(window: Window, plan: Plan) -> list[str]:
    """One line per broken invariant; empty for a plan that holds. Never raises for a bad plan."""
    key = WindowKey.of(window)
    if plan.window != key:
        fields = [f for f in key.__struct_fields__ if getattr(key, f) != getattr(plan.window, f)]
        name = fields[0]
        found, expected = getattr(plan.window, name), getattr(key, name)
        return [f"window.{name} = {found!r}: expected {expected!r}, the plan is for another window"]
    recorded = window
    try:
        trained = plan.trained()
        window = trained.window(window)
    except InputError as error:
        return [str(error)]
    broken = [*_numbers(plan), *_layout(window, plan)]
    try:
        topology = plan.to_topology()
        if topology.dp > window.samples:
            raise InputError.at("topology.dp", topology.dp, f"at most {window.samples} samples")
        topology.require_plannable()
        if window.experts % topology.ep:
            raise InputError.at(
                "topology.ep", topology.ep, f"a divisor of {window.experts} experts"
            )
        placement_LE = validate_placement(
            "placement", plan.placement, window.layers, window.experts
        )
    except InputError as error:
        return [*broken, str(error)]
    if broken:
        return broken  # a score of rows that are not a layout means nothing
    broken = broken_requirements(plan.requirements, window, topology, placement_LE, plan.rows)
    broken += _claims(window, plan, topology, placement_LE)
    return [*broken, *_estimated(recorded, window, trained, plan, topology, placement_LE)]


def verify_set(window: Window, planset: PlanSet) -> list[str]:
    """One line per broken invariant of the plans of several steps; empty where all hold."""
    if planset.window != WindowKey.of(window):
        return ["window: expected the one that the planset was made for, found another"]
    placements = {plan.placement for plan in (*planset.plans, *planset.passes.values())}
    broken = ["placement: expected one for all plans"] if len(placements) > 1 else []
    first = planset.plans[0]
    broken += [
        f"plans: {field}: expected one for all steps"
        for field in ("topology", "token_cap", "cost_model", "requirements")
        if any(getattr(plan, field) != getattr(first, field) for plan in planset.plans)
    ]
    step_of: dict[int, int] = {}
    for k, plan in enumerate(planset.plans):
        flat = [i for row in plan.rows for cell in row for i in cell]
        if not flat:
            broken.append(f"plans[{k}]: rows = []: expected at least one row")
            continue
        wrong = [i for i in flat if not 0 <= i < window.samples or step_of.get(i, k) != k]
        if wrong:
            expected = f"a sample in 0..{window.samples - 1}, in one step only"
            return [*broken, f"plans[{k}]: rows = {wrong[0]}: expected {expected}"]
        step_of.update(dict.fromkeys(flat, k))
        index = np.unique(flat)
        position = {int(i): n for n, i in enumerate(index)}
        rows = tuple(tuple(tuple(position[i] for i in c) for c in row) for row in plan.rows)
        local = msgspec.structs.replace(plan, rows=rows)
        broken += [f"plans[{k}]: {line}" for line in verify(window.select(index), local)]
    if len(step_of) < window.samples:
        absent = next(i for i in range(window.samples) if i not in step_of)
        broken.append(f"plans = no sample {absent}: expected each sample in a step")
    for name, plan in planset.passes.items():
        broken += [f"passes[{name}]: {line}" for line in verify(window, plan)]
    return broken


def _numbers(plan: Plan) -> list[str]:
    """What no recompute can tell, at least in range."""
    search = plan.search
    ranges = (
        ("token_cap", plan.token_cap, 1),
        ("search.seed", search.seed, 0),
        ("search.evaluations", search.evaluations, 0),
        ("search.chains", search.chains, 0),
    )
    return [
        f"{name} = {value}: expected a whole number in {low}..2^63-1"
        for name, value, low in ranges
        if not low <= value < 2**63
    ]


def _layout(window: Window, plan: Plan) -> list[str]:
    """Each sample once, every cell non-empty and within the cap, D cells a row."""
    broken = []
    if not plan.rows:
        broken.append("rows = []: expected at least one row")
    seen: dict[int, tuple[int, int]] = {}
    for m, row in enumerate(plan.rows):
        if len(row) != plan.topology.dp:
            broken.append(
                f"rows[{m}] = {len(row)} cells: expected one for each of dp = {plan.topology.dp}"
            )
        for d, cell in enumerate(row):
            where = f"rows[{m}, {d}]"
            if not cell:
                broken.append(f"{where} = []: expected at least one sample")
            if list(cell) != sorted(cell):
                broken.append(f"{where} = {list(cell)}: expected ascending sample indices")
            tokens = 0
            for i in cell:
                if not 0 <= i < window.samples:
                    broken.append(f"{where} = {i}: expected a sample in 0..{window.samples - 1}")
                    continue
                if i in seen:
                    broken.append(
                        f"{where} = {i}: expected each sample once, also in rows{list(seen[i])}"
                    )
                seen[i] = (m, d)
                tokens += int(window.lengths_S[i])
            if tokens > plan.token_cap:
                broken.append(
                    f"{where} = {tokens} tokens: expected at most the cap {plan.token_cap}"
                )
    absent = [i for i in range(window.samples) if i not in seen]
    if absent:
        broken.append(f"rows = no sample {absent[0]}, {len(absent)} absent: expected each once")
    return broken


def _claims(
    window: Window, plan: Plan, topology: Topology, placement_LE: NDArray[np.int32]
) -> list[str]:
    """Score and certificate, recomputed; floats must agree to the last bit."""
    cost = plan.cost_model.resolve(window, topology, plan.token_cap)
    truth = score(window, topology, cost, placement_LE, plan.rows)
    bound, bound_method = best_bound(window, topology, cost, plan.token_cap, len(plan.rows))
    try:
        rows_lower_bound, rows_method = _proven_rows(window, plan, topology, cost)
    except InputError as error:  # requirements that no layout of this window can meet
        return [str(error)]
    certificate = plan.certificate
    claims = [
        (f"score.{name}", getattr(plan.score, name), getattr(truth, name))
        for name in truth.__struct_fields__
    ]
    claims += [
        ("certificate.cost_lower_bound", certificate.cost_lower_bound, bound),
        ("certificate.cost_bound_method", certificate.cost_bound_method, bound_method),
        ("certificate.rows_method", certificate.rows_method, rows_method),
        ("certificate.gap", certificate.gap, certificate.gap_of(truth.slowest_shard, bound)),
        (
            "certificate.rows_certified",
            certificate.rows_certified,
            len(plan.rows) == certificate.rows_lower_bound,
        ),
    ]
    broken = [
        f"{name} = {claimed!r}: expected {recomputed!r}"
        for name, claimed, recomputed in claims
        if claimed != recomputed
    ]
    if not 1 <= certificate.rows_lower_bound <= rows_lower_bound:
        broken.append(
            f"certificate.rows_lower_bound = {certificate.rows_lower_bound}: "
            f"expected at most {rows_lower_bound}, which is what can be proven"
        )
    return broken


def _estimated(
    recorded: Window,
    window: Window,
    trained: Trained,
    plan: Plan,
    topology: Topology,
    placement_LE: NDArray[np.int32],
) -> list[str]:
    """The record of an estimate and its margin, recomputed."""
    estimate, certificate = plan.estimate, plan.certificate
    claimed = (certificate.cost_low, certificate.cost_high)
    if estimate is None:
        expected: tuple[float | None, float | None] = (None, None)
    else:
        cost = plan.cost_model.resolve(window, topology, plan.token_cap)
        attention_MG, _, _ = row_costs(window, topology, cost, placement_LE, plan.rows)
        found = trained.interval(recorded, topology, cost, placement_LE, plan.rows, attention_MG)
        expected = found or (None, None)
    broken = []
    if claimed != expected:
        broken.append(f"certificate.cost_low, cost_high = {claimed}: expected {expected}")
    if estimate is not None and estimate.how != PREDICTED:
        truth = Estimate.of_missing(recorded, estimate.how)
        if estimate != truth:
            broken.append(f"estimate = {estimate}: expected {truth}")
    return broken


def _proven_rows(
    window: Window, plan: Plan, topology: Topology, cost: Coefficients
) -> tuple[int, str]:
    """Rows that are needed, and the name of the proof, or "best known" where rows are more."""
    seed, token_cap = plan.search.seed, plan.token_cap
    required = plan.requirements.binding(window, topology, token_cap)
    if required.vacuous:
        found = minimal_rows(window.lengths_S, token_cap, topology.dp, seed=seed)
        return found.lower_bound, found.method
    if required.together == "cell":
        contraction = Contraction.of(window, cost, required, token_cap)
        window, required = contraction.window, contraction.requirements
    lower, method = row_lower_bound(window, token_cap, topology, required, seed)
    return lower, method if len(plan.rows) == lower else "best known"
