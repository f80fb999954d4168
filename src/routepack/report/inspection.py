"""What a window holds: lengths, and how unevenly its tokens use the experts of each layer.

Shapes: S samples, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from routepack.objective import rank_load_LR
from routepack.report.balance import finite_max, finite_mean, gini, ratios
from routepack.report.glyphs import bar, histogram
from routepack.report.text import printable
from routepack.window import Window

WORST_LAYERS = 10  # shown unless all are asked for
PERCENTILES = (0, 10, 50, 90, 99, 100)
BINS = 40  # of the histogram of lengths
BAR = 8  # cells


@dataclass(frozen=True, eq=False)
class _Column:
    """A measure of every layer; its bars start at `zero` and are of full width at `full`."""

    name: str
    values_L: NDArray[np.float64]
    zero: float
    full: float
    digits: int

    def cell(self, value: float) -> RenderableType:
        """The value as a number and a bar."""
        if not np.isfinite(value):
            return "-"  # no token of this layer has a recorded route
        pair = Table.grid(padding=(0, 1, 0, 0))
        pair.add_row(f"{value:.{self.digits}f}", bar(value - self.zero, self.full - self.zero, BAR))
        return pair


def inspect_window(
    window: Window,
    *,
    ranks: int | None = None,
    placements: Mapping[str, NDArray[np.int32]] | None = None,
    all_layers: bool = False,
) -> RenderableType:
    """Samples, lengths and the balance of experts; of `ranks` EP ranks too, by placement [L, E].

    All layers in the model's order, or the worst ones first: by EP ranks under the first placement,
    without placements by experts.
    """
    expert_L = ratios(window.demand_LE).max(axis=-1)
    gini_L = gini(window.demand_LE)
    columns = [
        _Column("expert max/mean", expert_L, 1.0, finite_max(expert_L), 2),
        _Column("expert Gini", gini_L, 0.0, 1.0, 3),
    ]
    rank_Ls = {}
    for name, placement_LE in (placements or {}).items():
        assert ranks is not None
        load_LR = rank_load_LR(window.demand_LE, placement_LE, ranks)
        rank_Ls[f"EP{ranks} {name}"] = ratios(load_LR).max(axis=-1)
    full = max((finite_max(rank_L) for rank_L in rank_Ls.values()), default=1.0)  # one scale
    columns += [_Column(name, rank_L, 1.0, full, 2) for name, rank_L in rank_Ls.items()]
    by = columns[2 if rank_Ls else 0]
    layers = list(range(window.layers))
    caption = ""
    if not all_layers and window.layers > WORST_LAYERS:
        layers = np.argsort(-np.nan_to_num(by.values_L), kind="stable")[:WORST_LAYERS].tolist()
        caption = (
            f"The {WORST_LAYERS} worst of {window.layers} layers by {by.name}; "
            "--all-layers shows every one."
        )
    table = _layer_table(window, columns, layers)
    return Group(_facts(window), "", table, *([Text(caption, "dim")] if caption else []))


def _facts(window: Window) -> Table:
    """What is in the window, one fact a line."""
    lengths_S, tokens = window.lengths_S, int(window.lengths_S.sum())
    missing = int(window.missing_S.sum())
    samples = f"{window.samples:,}"
    if window.group_S is not None:
        samples += f" in {len(np.unique(window.group_S)):,} groups"
    names = ("min", *(f"p{p}" for p in PERCENTILES[1:-1]), "max")
    values = np.percentile(lengths_S, PERCENTILES)
    lengths = "  ".join(f"{n} {v:,.0f}" for n, v in zip(names, values, strict=True))
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, value in (
        ("model", window.model),
        ("source", window.source),
        ("samples", samples),
        ("tokens", f"{tokens:,}"),
        ("missing", f"{missing:,} tokens without a recorded route ({missing / tokens:.1%})"),
        ("experts", f"{window.layers} MoE layers x {window.experts} experts, top-{window.top_k}"),
        ("lengths", f"{lengths}  mean {tokens / window.samples:,.0f}"),
    ):
        if value:
            table.add_row(Text(name, "bold"), Text(printable(value)))
    table.add_row("", histogram(np.histogram(lengths_S, bins=BINS)[0].tolist()))
    return table


def _layer_table(window: Window, columns: list[_Column], layers: list[int]) -> Table:
    """A line for each of `layers`, and the mean over all layers of the window."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layer", justify="right", no_wrap=True)
    for column in columns:
        table.add_column(column.name)
    for layer in layers:
        cells = [column.cell(float(column.values_L[layer])) for column in columns]
        table.add_row(str(window.moe_layers[layer]), *cells)
    table.add_section()
    means = [column.cell(finite_mean(column.values_L)) for column in columns]
    table.add_row("mean", *means, style="bold")
    return table
