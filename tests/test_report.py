"""Tables and pictures: numbers checked by hand, shapes that say the same without any colour."""

from __future__ import annotations

import io
import math

import msgspec
import numpy as np
import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from routepack import AttentionStage, CostModel, Plan, Topology, Window
from routepack.objective import score
from routepack.plan import Certificate, Search, TopologyKey, WindowKey
from routepack.report import Outcome, inspect_window, methods_table, plan_summary, rank_picture
from routepack.report.balance import finite_max, finite_mean, gini, ratios
from routepack.report.glyphs import Drawn, bar, deviation, heat, histogram
from routepack.report.text import cost_model_text, cost_text, printable

IDENTITY = np.arange(4, dtype=np.int32)[None]
SWAPPED = np.array([[0, 2, 1, 3]], np.int32)  # experts 0 and 2 on rank 0, 1 and 3 on rank 1


def show(renderable: RenderableType, *, encoding: str = "utf-8", colour: bool = False) -> str:
    """What a terminal of 80 columns shows."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(
        file=stream, width=80, force_terminal=colour, color_system="truecolor" if colour else None
    )
    console.print(renderable)
    stream.flush()
    stream.seek(0)
    return stream.read()


def tiny() -> Window:
    """Four samples of 4 tokens, top-1 of 4 experts: samples 0 and 2 use experts 0 and 1 alone."""
    left, right = [3, 1, 0, 0], [0, 0, 2, 2]
    return Window(np.full(4, 4), np.array([[left], [right], [left], [right]], np.uint16), 1)


def planned(
    method: str,
    placement_LE: np.ndarray,
    *,
    certified: bool = True,
    scale: float = 1.0,
    window: Window | None = None,
) -> tuple[Window, Plan]:
    """Two rows of two cells: samples 0 and 1, then 2 and 3."""
    window = window or tiny()
    topology = Topology.of(dp=2, ep=2)
    model = CostModel((AttentionStage("full", 1.0 * scale, 0.0),), expert=1.0 * scale)
    rows = ([[0], [1]], [[2], [3]])
    exact = score(window, topology, model.resolve(window, topology, 4), placement_LE, rows)
    plan = Plan(
        window=WindowKey.of(window),
        topology=msgspec.convert(topology.to_dict(), TopologyKey),
        token_cap=4,
        cost_model=model,
        method=method,
        placement=tuple(map(tuple, placement_LE.tolist())),
        rows=tuple(tuple(map(tuple, row)) for row in rows),
        certificate=Certificate(2 if certified else 1, certified, "volume", scale, "analytic", 0.5),
        score=exact,
        search=Search(seed=0, evaluations=1234, chains=8),
        stats={"rows_seconds": 0.25, "planning_seconds": 1.5, "threads": 2},
    )
    return window, plan


def outcome(method: str, placement_LE: np.ndarray, **options: float) -> Outcome:
    return Outcome.of(*planned(method, placement_LE, **options))


def test_ratios_and_gini() -> None:
    """Loads 3, 1: the busiest is at 1.5, Gini (3 - 1) / (2 * 4) = 0.25; no load has neither."""
    assert ratios(np.array([3, 1])).tolist() == [1.5, 0.5]
    assert gini(np.array([[3, 1], [2, 2]])).tolist() == [0.25, 0.0]
    assert gini(np.array([0, 0, 0, 8])) == 0.75
    nothing = ratios(np.zeros((1, 2), np.int64))
    assert np.isnan(nothing).all()
    assert np.isnan(gini(np.zeros((1, 2), np.int64))).all()
    assert finite_max(nothing) == 1.0
    assert math.isnan(finite_mean(nothing))
    assert finite_mean(np.array([1.0, 3.0, np.nan])) == 2.0


def test_an_outcome_by_hand() -> None:
    """A row has demand 3, 1, 2, 2. Identity: ranks get 4 and 4. Swapped: 5 and 3, so the mean rank,
    at 4, waits a fifth of the 5."""
    even, uneven = outcome("baseline", IDENTITY), outcome("reorder", SWAPPED)
    assert even.load_MGLR.tolist() == [[[[4, 4]]], [[[4, 4]]]]
    assert (even.waiting, even.busiest_MGL.max()) == (0.0, 1.0)
    assert uneven.load_MGLR.tolist() == [[[[5, 3]]], [[[5, 3]]]]
    assert uneven.step_LR.tolist() == [[1.25, 0.75]]
    assert uneven.step_R.tolist() == [1.25, 0.75]
    assert uneven.busiest_MGL.tolist() == [[[1.25]], [[1.25]]]
    assert uneven.waiting == pytest.approx(0.2, rel=1e-15)


def test_glyphs() -> None:
    """Bars to an eighth of a cell, deviations to half a cell, both clipped at full width."""

    def plain(drawn: Drawn) -> str:
        return drawn.text.plain

    assert plain(bar(0.5, 1.0, 4)) == "██  "
    assert plain(bar(1 / 32, 1.0, 4)) == "▏   "
    assert plain(bar(9.0, 1.0, 4)) == "████"
    assert plain(bar(-1.0, 1.0, 4)) == plain(bar(1.0, 0.0, 4)) == "    "
    assert plain(deviation(0.0, 1.0, 2)) == "  │  "
    assert plain(deviation(0.75, 1.0, 2)) == "  │█▌"
    assert plain(deviation(-0.25, 1.0, 2)) == " ▐│  "
    assert plain(deviation(-3.0, 1.0, 2)) == "██│  "
    assert plain(heat([0.5, 1.0, 1.2, 1.5, 2.0, math.nan])) == "·░▒▓█ "
    assert plain(histogram([0, 1, 100])) == " ▁█"
    assert plain(histogram([0, 0])) == "  "


@pytest.mark.parametrize("drawn", [bar(0.4, 1.0, 9), deviation(0.7, 1.0, 5), heat([0.1, 1, 1.2])])
def test_glyphs_in_ascii(drawn: Drawn) -> None:
    """Every glyph has an ASCII form of the same width."""
    line = show(drawn, encoding="ascii").rstrip("\n")
    assert line.isascii()
    assert len(line) == len(drawn.text)


def test_text() -> None:
    """Five significant digits of a cost, and no control character from a file."""
    assert [cost_text(v) for v in (12345678, 12345.678, 345.678, 1.0123456, 0.00123456, 0.0)] == [
        "1.235e+07",
        "12,346",
        "345.68",
        "1.0123",
        "0.0012346",
        "0.0000",
    ]
    assert printable("ä [bold]\n\x1b[0m") == "ä [bold]\\n\\x1b[0m"
    stages = (AttentionStage("full", 1.5, 2.0), AttentionStage("swa", 1.0, 1.0, 128))
    assert cost_model_text(CostModel(stages, 2.0, "window")) == (
        "full (linear 1.5, quadratic 2) + swa (linear 1, quadratic 1, window 128 tokens), "
        "expert 2, normalised by window"
    )


def test_methods_table() -> None:
    """Costs by hand: a row has attention 1 and expert 4/4 or 5/4, there are two rows."""
    out = show(methods_table([outcome("reorder", SWAPPED), outcome("routepack", IDENTITY)]))
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == "method rows slowest change attention expert peak gap sec"
    assert lines[2] == "reorder 2 = 2 4.5000 2.0000 2.5000 5 50.00% 1.50"
    assert lines[3] == "routepack 2 = 2 4.0000 -11.1% 2.0000 2.0000 4 50.00% 1.50"


def test_methods_table_stays_within_80_columns() -> None:
    """Also for the longest name, large costs, and rows that are not proven fewest."""
    out = show(
        methods_table(
            [outcome("attention-only", SWAPPED, certified=False, scale=s) for s in (1e4, 1e5)]
        )
    )
    assert "…" not in out
    assert "attention-only   2 > 1" in out
    assert max(map(len, out.splitlines())) <= 80


def test_rank_picture() -> None:
    """Rank 0 stands out before and no rank does after, in shapes as well as in numbers."""
    before, after = outcome("baseline", SWAPPED), outcome("routepack", IDENTITY)
    out = show(rank_picture(before, after))
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "rank by layer -25% | +25% all by layer -25% | +25% all" in lines
    assert "0 ▒ │██████ 1.25 ░ │ 1.00" in lines
    assert "1 · ██████│ 0.75 ░ │ 1.00" in lines
    assert "whole step, worst layer 1.25 ██▌ 1.00" in lines
    assert "every row and layer, on average 1.25 ██▌ 1.00" in lines
    assert "every row and layer, worst 1.25 ██▌ 1.00" in lines
    assert "expert time the mean rank waits 20.0% ██ 0.0%" in lines
    assert max(map(len, out.splitlines())) <= 80
    assert show(rank_picture(before, after), encoding="ascii").isascii()
    coloured = show(rank_picture(before, after), colour=True)
    assert Text.from_ansi(coloured).plain.rstrip() == out.rstrip()


def test_rank_picture_of_many_ranks_and_layers() -> None:
    """58 layers share the marks of a line, each of which shows the hottest of its layers."""
    load_MGLR = np.full((1, 1, 58, 64), 10)
    load_MGLR[0, 0, 57, 63] = 100
    side = Outcome(planned("baseline", IDENTITY)[1], load_MGLR)
    lines = show(rank_picture(side, side)).splitlines()
    assert max(map(len, lines)) <= 80
    assert next(line for line in lines if line.startswith("  63")).split()[1] == "░" * 11 + "█"


def test_plan_summary() -> None:
    """One line a fact, with the stages of planning and what was spent outside it."""
    _, plan = planned("routepack", SWAPPED)
    out = show(plan_summary(plan, cost_source="c.toml", apart_seconds={"kernels": 1.0}))
    facts = [" ".join(line.split()) for line in out.splitlines()]
    assert "rows 2, certified: no layout has fewer (volume)" in facts
    assert "cost model c.toml: full (linear 1, quadratic 0), expert 1" in facts
    assert "slowest shard 4.5000" in facts
    assert "attention 2.0000, 44.4% of all shards" in facts
    assert "bound 1.0000 or more for any plan (analytic), gap 50.00%" in facts
    assert "experts moved 2 of 4 are on another EP rank than contiguous" in facts
    assert "planning 1.500 s on 2 threads (rows 0.250), 1,234 moves proposed" in facts
    assert "apart from it kernels 1.00 s" in facts
    _, plan = planned("routepack", SWAPPED, certified=False)
    out = show(plan_summary(plan, cost_source="c.toml", apart_seconds={}))
    assert "2, best known: at least 1 (volume)" in out


def layered(layers: int) -> Window:
    """One sample of 4 tokens; every other layer, from the second on, sends all to expert 0."""
    demand_SLE = np.ones((1, layers, 4), np.uint16)
    demand_SLE[:, 1::2] = [4, 0, 0, 0]
    return Window(np.array([4]), demand_SLE, 1, moe_layers=tuple(range(1, layers + 1)))


def layer_lines(text: str) -> list[list[str]]:
    """Lines of the layer table without their bars."""
    table = text[text.index("layer ") :].splitlines()
    return [[w for w in line.split() if w[0] not in "█▏▎▍▌▋▊▉"] for line in table]


def test_inspect_window() -> None:
    """Few layers come in order: an even one, and one whose expert is at 4 times the mean."""
    identity_LE = np.tile(IDENTITY, (2, 1))
    lines = layer_lines(
        show(inspect_window(layered(2), ranks=2, placements={"contiguous": identity_LE}))
    )
    assert lines[0] == ["layer", "expert", "max/mean", "expert", "Gini", "EP2", "contiguous"]
    assert ["1", "1.00", "0.000", "1.00"] in lines
    assert ["2", "4.00", "0.750", "2.00"] in lines
    assert ["mean", "2.50", "0.375", "1.50"] in lines


def test_inspect_window_of_many_layers() -> None:
    """Of 58 layers the ten worst are shown, lowest of equals first, unless all are asked for."""
    out = show(inspect_window(layered(58)))
    lines = layer_lines(out)
    shown = [line[0] for line in lines if line and line[0].isdigit()]
    assert shown == [str(2 * i) for i in range(1, 11)]
    assert "The 10 worst of 58 layers by expert max/mean; --all-layers shows every one." in out
    lines = layer_lines(show(inspect_window(layered(58), all_layers=True)))
    shown = [line[0] for line in lines if line and line[0].isdigit()]
    assert shown == [str(i) for i in range(1, 59)]
    assert lines[-1] == ["mean", "2.50", "0.375"]


def test_inspect_window_without_any_route() -> None:
    """Nothing recorded: no balance is claimed, nothing is divided by zero."""
    demand_SLE = np.zeros((2, 1, 4), np.uint16)
    window = Window(np.array([3, 5]), demand_SLE, 1, missing_S=np.array([3, 5], np.int32))
    out = show(inspect_window(window))
    assert "8 tokens without a recorded route (100.0%)" in out
    assert ["mean", "-", "-"] in layer_lines(out)
    _, plan = planned("baseline", IDENTITY, window=None)
    side = Outcome(plan, np.zeros((1, 1, 1, 2), np.int64))
    assert "expert time the mean rank waits" in show(rank_picture(side, side))
