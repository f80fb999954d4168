"""Padding: lengths, stated experts as load, and a fill that no other choice of experts beats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack import Budget, plan
from routepack.errors import InputError
from routepack.padding import (
    Fill,
    Padding,
    padded,
    spread,
    with_fill,
)
from routepack.topology import Topology
from routepack.verify import verify
from routepack.window import MAX_TOKENS, Window
from strategies import SEEDS, random_routes, windows

# S=2 samples of 3 and 4 tokens, of which the second has one without a route; L=1, E=4, K=2.
DEMAND_SLE = [[[3, 2, 1, 0]], [[0, 1, 2, 3]]]


def window(**changes: Any) -> Window:
    """The window above, with changes."""
    fields: dict[str, Any] = dict(
        lengths_S=np.array([3, 4]),
        demand_SLE=np.array(DEMAND_SLE, np.uint16),
        top_k=2,
        missing_S=np.array([0, 1]),
        group_S=np.array([7, 8]),
        moe_layers=(5,),
        model="m",
        source="s",
    )
    return Window(**(fields | changes))


@pytest.mark.parametrize(
    ("sizes", "multiple"),
    [
        ({}, 1),
        ({"multiple": 16}, 16),
        ({"context_parallel": 4}, 8),
        ({"tensor_parallel": 4}, 4),
        ({"tensor_parallel": 2, "context_parallel": 2}, 8),
        ({"tensor_parallel": 2, "context_parallel": 2, "multiple": 8}, 8),
        ({"tensor_parallel": 3, "context_parallel": 2, "multiple": 16}, 48),
        ({"multiple": np.int64(6), "context_parallel": np.int32(2)}, 12),
    ],
)
def test_the_multiple_of_a_trainer(sizes: dict[str, Any], multiple: int) -> None:
    """2 * cp chunks under context parallelism, each cut into tp, and what else is asked for."""
    assert Padding(**sizes).tokens_multiple == multiple


def test_lengths_by_hand() -> None:
    """To multiples of 4, 3 becomes 4 and 4 stays; the new token has no route, the rest is kept."""
    padding = Padding(context_parallel=2)
    w, p = window(), padded(window(), padding)
    assert p.lengths_S.tolist() == [4, 4]
    assert p.missing_S.tolist() == [1, 1]
    assert p.demand_SLE.tolist() == DEMAND_SLE
    assert padding.tokens_S(w).tolist() == padding.rows_S(w).tolist() == [1, 0]
    assert p.group_S is not None
    assert p.group_S.tolist() == [7, 8]
    assert (p.moe_layers, p.model, p.source) == ((5,), "m", "s")


def test_padding_without_routes_shares_the_demand() -> None:
    """No copy of [S, L, E] is made where the demand stays; nor a window where nothing changes."""
    w = window()
    for experts in (None, "fill"):
        p = padded(w, Padding(multiple=8, experts=experts))
        assert np.shares_memory(p.demand_SLE, w.demand_SLE)
    assert padded(w, Padding()) is w
    assert padded(w, Padding(experts=[[0, 1]])) is w


def test_stated_experts_are_load() -> None:
    """To multiples of 8 the samples get 5 and 4 rows, all of which choose experts 0 and 1."""
    p = padded(window(), Padding(multiple=8, experts=[[0, 1]]))
    assert p.demand_SLE.tolist() == [[[8, 7, 1, 0]], [[4, 5, 2, 3]]]
    assert p.missing_S.tolist() == [0, 1]


def test_stated_experts_may_differ_from_row_to_row() -> None:
    """A cycle of rows (0, 1), (2, 3), (0, 3), begun anew in every sample: 5 rows are one cycle and
    two more, 4 rows one cycle and one more. The missing token of the second sample is counted on
    its own, so it chooses (0, 1) again."""
    cycle_PLK = [[[0, 1]], [[2, 3]], [[0, 3]]]
    p = padded(window(), Padding(multiple=8, experts=cycle_PLK))
    assert p.demand_SLE.tolist() == [[[3 + 3, 2 + 2, 1 + 2, 3]], [[3, 1 + 2, 2 + 1, 3 + 2]]]
    padding = Padding(multiple=8, experts=cycle_PLK, fills_missing=True)
    p = padded(window(), padding)
    assert p.demand_SLE.tolist() == [[[6, 4, 3, 3]], [[4, 4, 3, 5]]]
    assert p.missing_S.tolist() == [0, 0]
    assert padding.rows_S(window()).tolist() == [5, 5]


def test_missing_tokens_are_filled_where_there_is_nothing_to_pad() -> None:
    """A trainer that writes (0, 1) for a token without a route makes it load, at any multiple."""
    p = padded(window(), Padding(experts=[[0, 1]], fills_missing=True))
    assert p.demand_SLE.tolist() == [[[3, 2, 1, 0]], [[1, 2, 2, 3]]]
    assert p.missing_S.tolist() == [0, 0]


@given(windows(), SEEDS, st.integers(1, 9), st.integers(1, 5), st.booleans())
def test_stated_experts_are_counted_like_routes(
    w: Window, seed: int, multiple: int, cycle: int, fills_missing: bool
) -> None:
    """The demand grows by a count, row by row, of what the trainer writes."""
    rng = np.random.default_rng(seed)
    experts_PLK = random_routes(rng, cycle, w.layers, w.experts, w.top_k, 1.0)
    padding = Padding(multiple=multiple, experts=experts_PLK, fills_missing=fills_missing)
    p = padded(w, padding)
    expected_SLE = w.demand_SLE.astype(np.int64)
    for s, (pads, missing) in enumerate(
        zip(padding.tokens_S(w).tolist(), w.missing_S.tolist(), strict=True)
    ):
        for rows in (pads, missing if fills_missing else 0):
            for j in range(rows):
                for layer in range(w.layers):
                    expected_SLE[s, layer, experts_PLK[j % cycle, layer]] += 1
    assert (p.demand_SLE == expected_SLE).all()
    assert (p.lengths_S % multiple == 0).all()
    assert (p.lengths_S - w.lengths_S < multiple).all()


def test_counts_beyond_16_bits() -> None:
    """65,535 tokens on one expert and one more of padding no longer fit 16 bits."""
    full = Window(np.array([65_535]), np.array([[[65_535, 0]]], np.uint16), 1)
    p = padded(full, Padding(multiple=2, experts=[[0]]))
    assert p.demand_SLE.tolist() == [[[65_536, 0]]]
    assert p.demand_SLE.dtype == np.uint32
    bare = padded(full, Padding(multiple=2))
    assert with_fill(bare, Fill(np.array([[[0]]], np.uint16), np.array([0, 1]))).sha256 == p.sha256


def test_a_plan_packs_padded_lengths() -> None:
    """Six samples of 5 tokens fit a cap of 15 in two cells, but not padded to 8: those take six
    cells, and the plan of the padded window holds for it."""
    lengths_S, topology = np.full(6, 5), Topology.of(dp=1, ep=1)
    w = Window(lengths_S, np.full((6, 1, 1), 5, np.uint16), 1)
    p = padded(w, Padding(context_parallel=4))
    arguments: dict[str, Any] = dict(token_cap=15, budget=Budget(evaluations=1000))
    assert len(plan(w, topology, **arguments).rows) == 2
    result = plan(p, topology, **arguments)
    assert len(result.rows) == 6
    assert verify(p, result) == []


def test_nothing_to_fill() -> None:
    """Without padding rows the fill is empty and the window is the same."""
    w = window()
    placement_LE = np.arange(4, dtype=np.int32)[None]
    fill = spread(w, [0, 0], placement_LE, 2, np.zeros(2, np.int32))
    assert fill.ids_PLK.shape == (0, 1, 2)
    assert with_fill(w, fill).sha256 == w.sha256


# --- what is refused

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "multiple 0": (
        {"multiple": 0},
        f"padding.multiple = 0: expected a whole number in 1..{MAX_TOKENS}",
    ),
    "a float": (
        {"context_parallel": 2.0},
        f"padding.context_parallel = 2.0: expected a whole number in 1..{MAX_TOKENS}",
    ),
    "a boolean": (
        {"tensor_parallel": True},
        f"padding.tensor_parallel = True: expected a whole number in 1..{MAX_TOKENS}",
    ),
    "sizes that multiply beyond any length": (
        {"multiple": 2**20 + 1, "context_parallel": 2**11},
        f"padding.tokens_multiple = {(2**20 + 1) * 2**12}: expected at most {MAX_TOKENS}, the "
        "least common multiple of what is asked for",
    ),
    "another word": (
        {"experts": "spread"},
        "padding.experts = 'spread': expected 'fill' or expert ids",
    ),
    "ragged ids": (
        {"experts": [[0, 1], [2]]},
        "padding.experts.shape = ragged: expected (L, K) or (P, L, K)",
    ),
    "one dimension": (
        {"experts": [0, 1]},
        "padding.experts.shape = (2,): expected (L, K) or (P, L, K), none of them 0",
    ),
    "no rows": (
        {"experts": np.zeros((0, 1, 2), int)},
        "padding.experts.shape = (0, 1, 2): expected (L, K) or (P, L, K), none of them 0",
    ),
    "float ids": (
        {"experts": [[0.0, 1.0]]},
        "padding.experts.dtype = float64: expected an integer type",
    ),
    "a negative id": (
        {"experts": [[0, 1], [2, -1]]},
        "padding.experts[1, 1] = -1: expected an expert id in 0..65534",
    ),
    "a row of zeros": (
        {"experts": [[[1, 0]], [[0, 0]]]},
        "padding.experts[1, 0] = 0: expected 2 distinct experts in a token row, it repeats",
    ),
    "missing tokens filled with nothing": (
        {"fills_missing": True},
        "padding.fills_missing = True: expected False where padding rows have no experts",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_padding_is_named(case: str) -> None:
    """One line says which field, what was found and what was expected."""
    changes, message = REFUSED[case]
    with pytest.raises(InputError) as error:
        Padding(**changes)
    assert str(error.value) == message


UNFIT: dict[str, tuple[Any, str]] = {
    "other layers": (
        [[0, 1], [0, 1]],
        "padding.experts (layers, top_k) = (2, 2): expected (1, 2), as the window",
    ),
    "other top_k": (
        [[[0]]],
        "padding.experts (layers, top_k) = (1, 1): expected (1, 2), as the window",
    ),
    "an expert that is not there": (
        [[[0, 1]], [[3, 4]]],
        "padding.experts[1, 0, 1] = 4: expected an expert id in 0..3",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_experts_must_be_those_of_the_window(case: str) -> None:
    """Layers, K and ids are compared, also where there is nothing to pad."""
    experts, message = UNFIT[case]
    for multiple in (1, 8):
        with pytest.raises(InputError) as error:
            padded(window(), Padding(multiple=multiple, experts=experts))
        assert str(error.value) == message


def test_a_length_that_does_not_fit_32_bits_is_refused() -> None:
    """Padding beyond the longest length is named like any length."""
    w = Window(
        np.array([MAX_TOKENS]), np.zeros((1, 1, 1), int), 1, missing_S=np.array([MAX_TOKENS])
    )
    with pytest.raises(InputError) as error:
        padded(w, Padding(multiple=2))
    assert str(error.value) == f"lengths[0] = {2**31}: expected a whole number in 1..{MAX_TOKENS}"


BAD_FILLS: dict[str, tuple[Any, list[int], str]] = {
    "another number of samples": (
        [[[0, 1]]],
        [0, 1],
        "fill (samples, layers, top_k) = (1, 1, 2): expected (2, 1, 2), as in the window",
    ),
    "more rows than are missing": (
        [[[0, 1]], [[0, 1]]],
        [0, 1, 2],
        "fill.rows[0] = 1: expected at most the 0 missing rows",
    ),
    "an expert twice in a row": (
        [[[1, 1]]],
        [0, 0, 1],
        "routes[0, 0, 1] = 1: expected 2 distinct experts in a token row, it repeats",
    ),
}


@pytest.mark.parametrize("case", BAD_FILLS)
def test_a_fill_of_another_window_is_refused(case: str) -> None:
    """Shapes, rows and ids are checked before they count as demand."""
    ids_PLK, offsets_S1, message = BAD_FILLS[case]
    with pytest.raises(InputError) as error:
        with_fill(window(), Fill(np.array(ids_PLK, np.uint16), np.array(offsets_S1)))
    assert str(error.value) == message
