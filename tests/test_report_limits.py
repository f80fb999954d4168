"""What limits a layout: figures by hand, and none above what a layout costs."""

from __future__ import annotations

import io

import numpy as np
from hypothesis import given
from rich.console import Console

from routepack import AttentionStage, CostModel, Topology, Window
from routepack.objective import score
from routepack.report.limits import Extremes, Limits, limits_table
from strategies import Instance, instances

LINEAR = CostModel((AttentionStage("full", 1.0, 0.0),))
TWO = Topology.of(dp=2, ep=2)


def show(window: Window, token_cap: int | None, model: CostModel = LINEAR) -> list[str]:
    """The lines of the table in a wide terminal, blanks squeezed."""
    console = Console(file=io.StringIO(), width=200)
    console.print(limits_table(window, TWO, token_cap, model, cost_source="c.toml"))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return [" ".join(line.split()) for line in lines if line.strip(" ─")]


def even() -> Window:
    """Four samples of 4 tokens; experts get 6, 2, 4 and 4 of the 16."""
    left, right = [3, 1, 0, 0], [0, 0, 2, 2]
    return Window(np.full(4, 4), np.array([[left], [right], [left], [right]], np.uint16), 1)


def uneven() -> Window:
    """A sample of 8 tokens and three of 1; all take expert 0 of 2 at layer 3, of 4 half at 5."""
    lengths_S = np.array([8, 1, 1, 1])
    demand_SLE = np.zeros((4, 2, 2), np.uint16)
    demand_SLE[:, 0, 0] = lengths_S
    demand_SLE[:, 1, 0] = [4, 1, 0, 0]
    demand_SLE[:, 1, 1] = [4, 0, 1, 1]
    return Window(lengths_S, demand_SLE, 1, moe_layers=(3, 5))


def test_a_window_that_can_be_balanced() -> None:
    """Two rows of two cells with a sample each. Attention of a shard is 16 tokens over two cells
    and the cap, expert work half of the 16 over the cap: each 2, of 4 together."""
    assert show(even(), 4) == [
        "layout 2 DP ranks, 2 EP ranks, EDP 1; at most 4 tokens a micro-batch",
        "cost model c.toml: full (linear 1, quadratic 0), expert 1",
        "rows 2, certified: no layout has fewer (volume)",
        "cells 4 of 1.0 samples and 4 tokens on average, 100.0% full",
        "groups 2 of 2.0 samples, one for each row: one placement is to level the EP ranks in all",
        "longest sample 4 tokens, 1.00 of the average cell; its attention is 1.00 of a balanced "
        "one's",
        "hottest expert 0.75 of a balanced EP rank, at layer 0; alone it is above one at no layer",
        "slowest shard balanced at least above of the bound",
        "attention 2.0000 2.0000 +0.00% 50.0%",
        "expert 2.0000 2.0000 +0.00% 50.0%",
        "both 4.0000 4.0000 +0.00%",
        "no floor is proven above balance",
    ]


def test_a_sample_and_an_expert_that_set_the_floor() -> None:
    """One row: a cell of 8 tokens beside one of 3, which costs 8/8 where balance is 5.5/8. Expert 0
    has all 11 tokens of layer 3 where 6 are balanced, and 6 are at layer 5: 17/8 of 12/8."""
    lines = show(uneven(), 8)
    assert lines[2:7] == [
        "rows 1, certified: no layout has fewer (volume)",
        "cells 2 of 2.0 samples and 6 tokens on average, 68.8% full",
        "groups 1 of 4.0 samples, one for each row: one placement is to level the EP ranks in all",
        "longest sample 8 tokens, 1.45 of the average cell; its attention is 1.45 of a balanced "
        "one's, so that it alone puts its row above balance",
        "hottest expert 2.00 of a balanced EP rank, at layer 3; alone it is above one at 1 of 2 "
        "layers",
    ]
    assert lines[8:] == [
        "attention 0.68750 1.00000 +45.45% 32.0%",
        "expert 1.5000 2.1250 +41.67% 68.0%",
        "both 2.1875 3.1250 +42.86%",
        "expert dominates the bound",
        "attention: samples are too long, or too few, for cells of equal work",
        "expert: at 1 of 2 layers no placement gives EP ranks equal loads",
    ]


def test_without_a_cap_only_shares_are_told() -> None:
    """Rows and costs depend on it."""
    assert show(uneven(), None) == [
        "layout 2 DP ranks, 2 EP ranks, EDP 1",
        "DP ranks 2 of 2.0 samples on average",
        "longest sample 8 tokens, 1.45 of the average DP rank",
        "hottest expert 2.00 of a balanced EP rank, at layer 3; alone it is above one at 1 of 2 "
        "layers",
        "rows and costs depend on --token-cap",
    ]


def test_terms_that_cost_nothing() -> None:
    """Experts alone, in a window without a route: nothing is divided by zero."""
    unknown = Window(np.full(4, 4), np.zeros((4, 1, 4), np.uint16), 1, missing_S=np.full(4, 4))
    lines = show(unknown, 4, CostModel((AttentionStage("full", 0.0, 0.0),), 1.0))
    assert lines[5] == "longest sample 4 tokens, 1.00 of the average cell"
    assert lines[8:] == [
        "attention 0.0000 0.0000 +0.00%", "expert 0.0000 0.0000 +0.00%",
        "both 0.0000 0.0000 +0.00%", "no floor is proven above balance",
    ]  # fmt: skip


@given(instances())
def test_floors_are_never_above_a_layout(instance: Instance) -> None:
    """The mean shard of a layout of the fewest rows is not below the floor of either term, nor
    these below balance, nor the bound below both; an expert above balance is a floor."""
    window, topology = instance.window, instance.topology
    cost_model, cap = instance.cost_model, instance.token_cap
    limits = Limits.of(window, topology, cap, cost_model)
    cells = Extremes.of(window, topology, limits.rows.rows * topology.dp)
    both = limits.attention_floor + limits.expert_floor
    assert limits.bound >= both * (1 - 1e-9)
    assert limits.attention_floor >= limits.attention_balanced
    assert limits.expert_floor >= limits.expert_balanced
    assert cells.hot_layers <= cells.floored_layers <= window.layers
    if limits.rows.rows == instance.rows:
        cost = cost_model.resolve(window, topology, cap)
        rows = instance.problem.to_rows(instance.cell_S)
        exact = score(window, topology, cost, instance.placement_LE, rows)
        assert exact.attention / topology.edp >= limits.attention_floor * (1 - 1e-9)
        assert exact.expert / topology.edp >= limits.expert_floor * (1 - 1e-9)
