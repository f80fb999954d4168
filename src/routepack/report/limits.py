"""What limits a layout before any is made: rows, long samples, hot experts, and their floors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from routepack.bounds import (
    analytic_bound,
    attention_lift_of_stages,
    best_bound,
    placement_floor_L,
)
from routepack.cost import CostModel
from routepack.report.text import cost_model_text, cost_text, printable, rows_text
from routepack.rows import Rows, minimal_rows
from routepack.topology import Topology
from routepack.window import Window

DOMINANT = 0.55  # share of the bound from which a term is said to dominate
BY_SPEED = 1 + 1e-6  # a bound above its two terms is another one, and no rounding


@dataclass(frozen=True)
class Extremes:
    """The longest sample and the hottest experts of a window, against an even share."""

    samples: int
    cells: int
    """That the samples are dealt out to: without a token cap, the DP ranks."""
    tokens: int
    longest_tokens: int
    hottest_share: float
    """Routed tokens of an expert over those of a balanced EP rank, at the layer of the most."""
    hottest_layer: int
    """Its index in the model."""
    layers: int
    floored_layers: int
    """Layers at which no placement is balanced ..."""
    hot_layers: int
    """... and those of them where an expert alone is above a balanced rank."""

    @classmethod
    def of(cls, window: Window, topology: Topology, cells: int) -> Extremes:
        demand_LE = window.demand_LE
        total_L, hot_L = demand_LE.sum(axis=1), demand_LE.max(axis=1)
        share_L = hot_L * topology.ep / np.maximum(total_L, 1)
        floor_L = placement_floor_L(demand_LE, topology.ep)
        balanced_L = -(-total_L // topology.ep)
        return cls(
            samples=window.samples,
            cells=cells,
            tokens=int(window.lengths_S.sum()),
            longest_tokens=int(window.lengths_S.max()),
            hottest_share=float(share_L.max()),
            hottest_layer=window.moe_layers[int(share_L.argmax())],
            layers=window.layers,
            floored_layers=int((floor_L > balanced_L).sum()),
            hot_layers=int((hot_L > balanced_L).sum()),
        )


@dataclass(frozen=True, eq=False)
class Limits:
    """What is known of every plan of a window at the fewest rows.

    Costs are those of the mean shard, which the slowest is not below: `balanced` where all cells
    and EP ranks carry the same, `floor` what any layout and placement cost at least.
    """

    rows: Rows
    longest_share: float
    """Attention of the costliest sample over that of a balanced cell; 0 where none costs any."""
    attention_balanced: float
    attention_floor: float
    expert_balanced: float
    expert_floor: float
    bound: float

    @classmethod
    def of(
        cls, window: Window, topology: Topology, token_cap: int, cost_model: CostModel
    ) -> Limits:
        """Raises InfeasibleError where there are fewer samples than cells."""
        rows = minimal_rows(window.lengths_S, token_cap, topology.dp, seed=0)
        own = cost_model.resolve(window, topology, token_cap)
        cost = own.at_least  # where ranks are not equally fast, all as fast as the fastest
        linear_S = cost.linear_T.sum() * window.lengths_S
        work_S = linear_S + cost.quadratic_T @ cost.quadratic_tokens_TS
        cell = float(work_S.sum()) / (rows.rows * topology.dp)
        attention = analytic_bound(window, topology, replace(cost, expert=0.0))
        lift = attention_lift_of_stages(window, topology, cost, token_cap, rows.rows)
        balanced_L = -(-window.demand_LE.sum(axis=1) // topology.ep)
        floor_L = placement_floor_L(window.demand_LE, topology.ep)
        bound, _ = best_bound(window, topology, own, token_cap, rows.rows)
        return cls(
            rows=rows,
            longest_share=float(work_S.max()) / cell if cell else 0.0,
            attention_balanced=attention,
            attention_floor=attention + lift / topology.edp,
            expert_balanced=cost.expert * int(balanced_L.sum()) / topology.edp,
            expert_floor=cost.expert * int(floor_L.sum()) / topology.edp,
            bound=bound,
        )


def limits_table(
    window: Window,
    topology: Topology,
    token_cap: int | None,
    cost_model: CostModel,
    *,
    cost_source: str,
) -> RenderableType:
    """A line a fact; with a token cap rows and the two terms of the bound too, and what they say.

    `cost_source` says where the cost model is from. Raises InfeasibleError where there are fewer
    samples than cells.
    """
    layout = f"{topology.dp} DP ranks, {topology.ep} EP ranks, EDP {topology.edp}"
    if token_cap is None:
        ranks = Extremes.of(window, topology, topology.dp)
        each = f"{topology.dp} of {ranks.samples / ranks.cells:.1f} samples on average"
        longest = f"{_longest(ranks)} of the average DP rank"
        lines = [("layout", layout), ("DP ranks", each), ("longest sample", longest)]
        note = "rows and costs depend on --token-cap"
        return Group(_facts([*lines, ("hottest expert", _hottest(ranks))]), "", note)
    limits = Limits.of(window, topology, token_cap, cost_model)
    cells = Extremes.of(window, topology, limits.rows.rows * topology.dp)
    longest = f"{_longest(cells)} of the average cell"
    if limits.longest_share:
        longest += f"; its attention is {limits.longest_share:.2f} of a balanced one's"
    if limits.longest_share > 1:
        longest += ", so that it alone puts its row above balance"
    facts = _facts([
        ("layout", f"{layout}; at most {token_cap:,} tokens a micro-batch"),
        ("cost model", f"{cost_source}: {cost_model_text(cost_model)}"),
        ("rows", _rows(limits.rows)),
        ("cells", _cells(cells, token_cap)),
        ("groups", _groups(cells, topology)),
        ("longest sample", longest),
        ("hottest expert", _hottest(cells)),
    ])  # fmt: skip
    return Group(facts, "", _costs(limits), "", *map(Text, _verdict(limits, cells)))


def _facts(lines: list[tuple[str, str]]) -> Table:
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, value in lines:
        facts.add_row(Text(name, "bold"), Text(printable(value)))
    return facts


def _rows(rows: Rows) -> str:
    return rows_text(
        rows.rows, certified=rows.certified, lower_bound=rows.lower_bound, method=rows.method
    )


def _cells(cells: Extremes, token_cap: int) -> str:
    each, tokens = cells.samples / cells.cells, cells.tokens / cells.cells
    full = f"{tokens / token_cap:.1%} full"
    return f"{cells.cells} of {each:.1f} samples and {tokens:,.0f} tokens on average, {full}"


def _groups(cells: Extremes, topology: Topology) -> str:
    groups = cells.cells // topology.ranks_per_shard
    what = "row" if topology.edp == 1 else "row and shard"
    each = f"{groups} of {cells.samples / groups:.1f} samples, one for each {what}"
    return f"{each}: one placement is to level the EP ranks in all"


def _longest(cells: Extremes) -> str:
    share = cells.longest_tokens / (cells.tokens / cells.cells)
    return f"{cells.longest_tokens:,} tokens, {share:.2f}"


def _hottest(cells: Extremes) -> str:
    share = f"{cells.hottest_share:.2f} of a balanced EP rank, at layer {cells.hottest_layer}"
    layers = f"{cells.hot_layers} of {cells.layers} layers" if cells.hot_layers else "no layer"
    return f"{share}; alone it is above one at {layers}"


def _costs(limits: Limits) -> Table:
    """Both terms of the bound: balanced, and at least."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("slowest shard")
    for name in ("balanced", "at least", "above", "of the bound"):
        table.add_column(name, justify="right", no_wrap=True)
    total = limits.attention_floor + limits.expert_floor
    for name, even, floor, part in (
        ("attention", limits.attention_balanced, limits.attention_floor, limits.attention_floor),
        ("expert", limits.expert_balanced, limits.expert_floor, limits.expert_floor),
        ("both", limits.attention_balanced + limits.expert_balanced, limits.bound, None),
    ):
        above = max(0.0, floor / even - 1) if even else 0.0  # proofs are rounded down
        share = f"{part / total:.1%}" if part is not None and total else ""
        table.add_row(name, cost_text(even), cost_text(floor), f"{above:+.2%}", share)
    return table


def _verdict(limits: Limits, cells: Extremes) -> list[str]:
    """What the bound says, a line each."""
    shares = {"attention": limits.attention_floor, "expert": limits.expert_floor}
    lines = []
    by_speed = limits.bound > BY_SPEED * (limits.attention_floor + limits.expert_floor)
    if by_speed:
        lines.append("ranks are not equally fast: the bound is work split by speed, both terms")
        lines.append("above are of ranks all as fast as the fastest")
    larger = max(shares, key=lambda name: shares[name])
    if shares[larger] > DOMINANT * sum(shares.values()):
        lines.append(f"{larger} dominates the bound")
    uneven = limits.attention_floor > limits.attention_balanced
    if uneven:
        lines.append("attention: samples are too long, or too few, for cells of equal work")
    if cells.floored_layers:
        layers = f"{cells.floored_layers} of {cells.layers} layers"
        lines.append(f"expert: at {layers} no placement gives EP ranks equal loads")
    if not uneven and not cells.floored_layers and not by_speed:
        lines.append("no floor is proven above balance")
    return lines
