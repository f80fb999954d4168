"""One plan in a few lines: what it costs, what is proven about it, and what planning took."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from routepack.plan import Plan
from routepack.report.memory import Busiest
from routepack.report.text import cost_model_text, cost_text, printable, rows_text


def plan_summary(
    plan: Plan,
    *,
    cost_source: str,
    apart_seconds: dict[str, float],
    busiest: Busiest | None = None,
    current: tuple[str, NDArray[np.int32]] | None = None,
) -> RenderableType:
    """A line a fact. `cost_source` says where the cost model is from, `apart_seconds` names what
    was spent outside planning, `current` names the placement [L, E] held so far (contiguous)."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in (
        ("method", plan.method),
        ("window", _window(plan)),
        ("topology", _topology(plan)),
        ("cost model", f"{cost_source}: {cost_model_text(plan.cost_model)}"),
        ("required", _required(plan)),
        ("rows", _rows(plan)),
        ("slowest shard", _slowest(plan)),
        ("attention", _share(plan.score.attention, plan)),
        ("expert", _share(plan.score.expert, plan)),
        ("worst row", cost_text(plan.score.worst_row)),
        ("bound", _bound(plan)),
        ("busiest rank", _busiest(plan, busiest)),
        ("experts moved", _moved(plan, current)),
        ("planning", _planning(plan)),
        ("apart from it", ", ".join(f"{k} {v:.2f} s" for k, v in apart_seconds.items())),
    ):
        if value:
            table.add_row(Text(name, "bold"), Text(printable(value)))
    return table


def _window(plan: Plan) -> str:
    key = plan.window
    return (
        f"{key.samples:,} samples, {key.layers} MoE layers x {key.experts} experts, "
        f"top-{key.top_k}, {key.sha256[:8]}"
    )


def _topology(plan: Plan) -> str:
    key = plan.topology
    return (
        f"{key.dp} DP ranks, {key.ep} EP ranks, EDP {key.edp}; "
        f"at most {plan.token_cap:,} tokens a micro-batch"
    )


def _slowest(plan: Plan) -> str:
    total = f", all {plan.topology.edp} shards {cost_text(plan.score.total)}"
    return cost_text(plan.score.slowest_shard) + total * (plan.topology.edp > 1)


def _rows(plan: Plan) -> str:
    found = plan.certificate
    return rows_text(
        len(plan.rows),
        certified=found.rows_certified,
        lower_bound=found.rows_lower_bound,
        method=found.rows_method,
    )


def _share(cost: float, plan: Plan) -> str:
    return f"{cost_text(cost)}, {cost / (plan.score.total or 1.0):.1%} of all shards"


def _bound(plan: Plan) -> str:
    certificate = plan.certificate
    return (
        f"{cost_text(certificate.cost_lower_bound)} or more for any plan "
        f"({certificate.cost_bound_method}), gap {certificate.gap:.2%}"
    )


def _required(plan: Plan) -> str:
    """The requirements that are on; nothing where none is."""
    return ", ".join(
        name if value is True else f"{name} = {value}" for name, value in plan.requirements.named()
    )


def _busiest(plan: Plan, busiest: Busiest | None) -> str:
    if busiest is None:
        return ""
    shard = f", shard {busiest.shard}" if plan.topology.edp > 1 else ""
    limit = plan.requirements.memory_limit_tokens
    limited = "" if limit is None else f", limit {limit:,}"
    where = f"EP rank {busiest.rank}, layer {busiest.layer}, row {busiest.row}{shard}"
    return f"{busiest.tokens:,} routed tokens ({where}){limited}"


def _moved(plan: Plan, current: tuple[str, NDArray[np.int32]] | None) -> str:
    """Experts whose EP rank differs from the placement held so far."""
    placement_LE = plan.placement_LE
    per_rank = plan.window.experts // plan.topology.ep
    name, current_LE = current or ("contiguous", np.arange(plan.window.experts)[None])
    moved = int((placement_LE // per_rank != current_LE // per_rank).sum())
    return f"{moved:,} of {placement_LE.size:,} are on another EP rank than {name}"


def _planning(plan: Plan) -> str:
    """Seconds inside routepack.plan(), with its stages."""
    seconds = {
        k.removesuffix("_seconds"): v for k, v in plan.stats.items() if k.endswith("_seconds")
    }
    total = seconds.pop("planning", sum(seconds.values()))
    stages = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())
    spent = f", {plan.search.evaluations:,} moves proposed" if plan.search.chains else ""
    return f"{total:.3f} s on {plan.stats.get('threads', '?')} threads ({stages}){spent}"
