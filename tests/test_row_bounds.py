"""Bounds on the number of bins: never above the truth, and as strong as their definitions say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.kernels.exact_packing import fill_one_bin
from routepack.row_bounds import (
    carlier_clautiaux_moukrim,
    column_generation_bound,
    dual_feasible_bound,
    fekete_schepers,
    l2_bound,
    threshold,
    volume_bound,
)


def fewest_bins(lengths, cap):
    """For every subset, the fewest bins and the least tokens in the last one, sample by sample."""
    best = [(0, cap)] + [(len(lengths) + 1, 0)] * (2 ** len(lengths) - 1)
    for subset in range(1, len(best)):
        for i, length in enumerate(lengths):
            if subset >> i & 1:
                bins, last = best[subset ^ 1 << i]
                grown = (bins, last + length) if last + length <= cap else (bins + 1, length)
                best[subset] = min(best[subset], grown)
    return best[-1][0]


def heaviest_bin(weight_of_size, cap):
    """The most weight that fits into a bin, any number of each size 1..cap: plain recursion."""
    best = [0] * (cap + 1)
    for room in range(1, cap + 1):
        best[room] = max(weight_of_size[n] + best[room - n] for n in range(1, room + 1))
    return best[cap]


def l2_by_definition(lengths, cap):
    """Martello and Toth 1990, one alpha at a time."""
    best = 0
    for alpha in range(cap // 2 + 1):
        alone = [n for n in lengths if n > cap - alpha]
        halves = [n for n in lengths if cap - alpha >= n and 2 * n > cap]
        rest = [n for n in lengths if 2 * n <= cap and n >= alpha]
        spill = sum(rest) - (len(halves) * cap - sum(halves))
        best = max(best, len(alone) + len(halves) + max(0, -(-spill // cap)))
    return best


@st.composite
def windows(draw, most=9):
    cap = draw(st.integers(1, 60))
    longest = draw(st.sampled_from([cap, max(1, cap // 2), max(1, cap * 2 // 5)]))
    return draw(st.lists(st.integers(1, longest), min_size=1, max_size=most)), cap


@given(windows())
def test_no_bound_exceeds_the_optimum(window):
    """Every bound is at most the fewest bins, and L2 is never below the volume."""
    lengths_S, cap = np.array(window[0]), window[1]
    fewest = fewest_bins(window[0], cap)
    assert volume_bound(lengths_S, cap) <= l2_bound(lengths_S, cap)[0] <= fewest
    assert dual_feasible_bound(lengths_S, cap) <= fewest
    assert column_generation_bound(lengths_S, cap, 0, 30) <= fewest


@given(windows(most=30))
def test_l2_is_martello_and_toths(window):
    """Only lengths up to half the cap need be tried as alpha."""
    assert l2_bound(np.array(window[0]), window[1])[0] == l2_by_definition(*window)


@pytest.mark.parametrize("cap", range(1, 25))
def test_dual_feasible_functions(cap):
    """Whatever fits into one bin weighs at most what a sample of the cap's length weighs."""
    sizes = np.arange(cap + 1)
    families = [threshold(sizes, cap, eps) for eps in range(cap // 2 + 1)]
    families += [fekete_schepers(f, cap, k) for f in list(families) for k in range(1, 12)]
    families += [carlier_clautiaux_moukrim(sizes, cap, w) for w in range(1, cap // 2 + 1)]
    for weights in families:
        assert weights[0] == 0
        assert heaviest_bin(weights.tolist(), cap) == weights[cap]


def test_hand_checked():
    """Four in ten: two fit, so five samples take three bins; volume says two, and so does L2."""
    lengths_S = np.array([4, 4, 4, 4, 4])
    assert volume_bound(lengths_S, 10) == 2
    assert l2_bound(lengths_S, 10) == (2, 4)
    assert dual_feasible_bound(lengths_S, 10) == 3
    assert column_generation_bound(lengths_S, 10, 2, 30) == 3


def test_column_generation_sees_what_the_others_do_not():
    """No three of these fit into 53, so five take three bins; the other bounds allow for two."""
    lengths_S = np.array([16, 18, 20, 21, 27])
    assert volume_bound(lengths_S, 53) == 2
    assert l2_bound(lengths_S, 53)[0] == 2
    assert dual_feasible_bound(lengths_S, 53) == 2
    assert column_generation_bound(lengths_S, 53, 2, 30) == 3


def test_column_generation_stops_where_nothing_is_to_gain():
    """A packing into as many bins as are asked for rules out a higher bound: none is sought."""
    assert column_generation_bound(np.array([5, 5, 5, 5]), 10, 2, 30) == 0


@given(st.integers(0, 1000))
def test_coarse_lengths_keep_the_bound_valid(seed):
    """More lengths and capacities than the table holds are rounded down, never up."""
    rng = np.random.default_rng(seed)
    cap = 1 << 20
    lengths_S = rng.integers(1, cap // 2, 60)
    assert column_generation_bound(lengths_S, cap, 0, 2) <= -(-60 // 2)


@given(windows(most=6), st.data())
def test_fill_one_bin_is_the_best_content(window, data):
    """The knapsack's worth is that of brute force, and each column is a content of that worth."""
    sizes_T, counts_T = np.unique(np.array(window[0]), return_counts=True)
    cap = window[1]
    weights = data.draw(st.lists(st.integers(0, 50), min_size=6, max_size=6))
    weights_T = np.array(weights[: len(sizes_T)])
    worth_X, column_XT = fill_one_bin(sizes_T, counts_T, weights_T, cap)
    grid = np.stack(np.meshgrid(*(np.arange(c + 1) for c in counts_T), indexing="ij"))
    contents = grid.reshape(len(sizes_T), -1).T
    contents = contents[contents @ sizes_T <= cap]
    assert worth_X[0] == (contents @ weights_T).max()
    assert (column_XT @ weights_T == worth_X).all()
    assert (column_XT @ sizes_T <= cap).all()
    assert (column_XT <= counts_T).all()
