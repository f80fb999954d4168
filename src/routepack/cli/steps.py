"""Several optimizer steps of one rollout batch, and other passes over it, on the command line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
from numpy.typing import NDArray
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from routepack.cli.options import LARGEST
from routepack.cost import CostModel
from routepack.errors import InputError
from routepack.files import read_plan
from routepack.plan import Certificate, Plan
from routepack.planset import FORMAT, Pass, PlanSet
from routepack.report.text import cost_model_text, cost_text, printable
from routepack.window import Window

GIVEN = "given"

Steps = Annotated[
    str | None,
    typer.Option(
        metavar="given|N",
        help="The window is a batch of several optimizer steps: its own, or so many to deal out.",
    ),
]
Passes = Annotated[
    list[str] | None,
    typer.Option(
        "--pass",
        metavar="NAME:CAP[:COST]",
        help="Also plan a pass over the whole batch on the same placement, such as log-probs: its "
        "token cap and cost model (TOML; default: as the steps). May be repeated.",
    ),
]


@dataclass(frozen=True)
class Batch:
    """What --steps and --pass ask for. `passes` hold name, token cap and cost model file."""

    steps: str | None
    passes: tuple[tuple[str, int, Path | None], ...]

    @classmethod
    def of(cls, steps: str | None, passes: Sequence[str] | None, method: str) -> Batch:
        """From the options of `routepack plan`. Raises InputError."""
        batch = cls(steps, tuple(_pass(text) for text in passes or ()))
        if batch.asked and method != "routepack":
            flag = "--pass" if steps is None else "--steps"
            raise InputError(f"{flag}, --method: expected routepack with {flag}, not {method}")
        if steps is not None and steps != GIVEN:
            _whole("--steps", steps, steps, "given, or a number of steps")
        return batch

    @property
    def asked(self) -> bool:
        """Whether the result is a routepack.planset/1; without either option it is a plan."""
        return self.steps is not None or bool(self.passes)

    @property
    def cost_paths(self) -> list[Path]:
        """Files that are read."""
        return [path for _, _, path in self.passes if path is not None]

    def steps_of(self, window: Window) -> int | NDArray[np.int64] | None:
        """The steps, as `routepack.plan_steps` takes them."""
        if self.steps is None:  # passes alone: one step, as the plan without them
            return np.zeros(window.samples, np.int64)
        return None if self.steps == GIVEN else int(self.steps)

    def read_passes(self, cost_model: CostModel, token_cap: int) -> list[Pass]:
        """With the cost model and cap of the steps where a pass names none. Raises InputError."""
        passes = []
        for name, cap, path in self.passes:
            if path is not None:
                own = CostModel.from_toml(path)
                own = msgspec.structs.replace(  # speeds are the machines', not the pass's
                    own,
                    dp_speed=own.dp_speed or cost_model.dp_speed,
                    ep_speed=own.ep_speed or cost_model.ep_speed,
                )
            elif token_cap < 1:
                own = cost_model  # not used: the library refuses such a cap
            else:
                own = _at_cap(cost_model, cap / token_cap, name)
            passes.append(Pass(name, cap, own))
        return passes


def _at_cap(model: CostModel, ratio: float, name: str) -> CostModel:
    """The same times for a cap `ratio` times as large: costs are per cap. Raises InputError."""
    replace = msgspec.structs.replace
    try:
        stages = (
            replace(stage, linear=stage.linear * ratio, quadratic=stage.quadratic * ratio**2)
            for stage in model.attention
        )
        # Normalised by the window, the expert term does not depend on the cap.
        expert = model.expert if model.normalise == "window" else model.expert * ratio
        return replace(model, attention=tuple(stages), expert=expert)
    except InputError as error:
        raise InputError(f"--pass {name}: {error}") from None


def _pass(text: str) -> tuple[str, int, Path | None]:
    """`logprob:16384:cost.toml` in its parts. Raises InputError."""
    expected = "NAME:CAP or NAME:CAP:COST.toml"
    name, *rest = text.split(":", 2)
    if not name or not rest or (len(rest) > 1 and not rest[1]):
        raise InputError.at("--pass", repr(text), expected)
    cap = _whole("--pass", text, rest[0], expected)
    if not 1 <= cap <= LARGEST:
        raise InputError.at("--pass", repr(text), f"a cap in 1..{LARGEST}")
    return name, cap, Path(rest[1]) if len(rest) > 1 else None


def _whole(flag: str, text: str, number: str, expected: str) -> int:
    try:
        return int(number)
    except ValueError:
        raise InputError.at(flag, repr(text), expected) from None


def read_plans(path: Path) -> Plan | PlanSet:
    """A plan file or a set of plans, by its format. Raises InputError."""
    try:
        data = path.read_bytes()
    except OSError:
        return read_plan(path)  # which refuses it
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None  # which a plan is not either
    is_set = isinstance(found, dict) and found.get("format") == FORMAT
    return (PlanSet if is_set else Plan).from_bytes(data, str(path))


def planset_stats(planset: PlanSet) -> dict[str, Any]:
    """Measurements of the whole, and of the search of each pass by its name."""
    passes = {name: plan.stats for name, plan in planset.passes.items()}
    return planset.plans[0].stats | ({"passes": passes} if passes else {})


def planset_summary(
    planset: PlanSet,
    *,
    cost_source: str,
    apart_seconds: dict[str, float],
    current: tuple[str, NDArray[np.int32]] | None = None,
) -> RenderableType:
    """What all plans share, then a line a step and a line a pass; the rest as in `plan_summary`."""
    first, key = planset.plans[0], planset.window
    topology, stats = first.topology, first.stats
    required = (n if on is True else f"{n} = {on}" for n, on in first.requirements.named())
    name, current_LE = current or ("contiguous", np.arange(key.experts)[None])
    per_rank = key.experts // topology.ep
    moved = int((planset.placement_LE // per_rank != current_LE // per_rank).sum())
    facts = Table.grid(padding=(0, 2, 0, 0))
    for label, value in (
        (
            "window",
            f"{key.samples:,} samples, {key.layers} MoE layers x {key.experts} experts, "
            f"top-{key.top_k}, {key.sha256[:8]}",
        ),
        ("topology", f"{topology.dp} DP ranks, {topology.ep} EP ranks, EDP {topology.edp}"),
        ("cost model", f"{cost_source}: {cost_model_text(first.cost_model)}"),
        ("required", ", ".join(required)),
        (
            "experts moved",
            f"{moved:,} of {key.layers * key.experts:,} are on another EP rank than {name}",
        ),
        (
            "planning",
            f"{stats['planning_seconds']:.3f} s, {stats['evaluations']:,} moves proposed for steps",
        ),
        ("apart from it", ", ".join(f"{k} {v:.2f} s" for k, v in apart_seconds.items())),
    ):
        if value:
            facts.add_row(Text(label, "bold"), Text(printable(value)))
    return Group(facts, "", _table(planset))


def _table(planset: PlanSet) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for name in ("samples", "cap", "rows", "certified", "slowest shard", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    for k, plan in enumerate(planset.plans):
        table.add_row(f"step {k}", *_cells(plan))
    if len(planset.plans) > 1:  # steps follow one another, so that their times add up
        slowest = sum(plan.score.slowest_shard for plan in planset.plans)
        bound = sum(plan.certificate.cost_lower_bound for plan in planset.plans)
        rows = sum(len(plan.rows) for plan in planset.plans)
        gap = f"{Certificate.gap_of(slowest, bound):.2%}"
        samples = f"{planset.window.samples:,}"
        table.add_row("all steps", samples, "", str(rows), "", cost_text(slowest), gap)
    for name, plan in planset.passes.items():
        table.add_row(Text(printable(f"pass {name}")), *_cells(plan))
    return table


def _cells(plan: Plan) -> list[str]:
    certificate = plan.certificate
    return [
        f"{plan.window.samples:,}",
        f"{plan.token_cap:,}",
        str(len(plan.rows)),
        "yes" if certificate.rows_certified else f"at least {certificate.rows_lower_bound}",
        cost_text(plan.score.slowest_shard),
        f"{certificate.gap:.2%}",
    ]
