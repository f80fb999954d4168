"""Estimated demand: exact sums, proportional counts, intervals that hold for all true routes."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.estimate import (
    HOW,
    Estimate,
    busiest_interval_BL,
    cost_interval,
    fill_missing,
    predicted,
)
from routepack.objective import row_costs, score
from routepack.padding import Padding, groups_of, padded
from routepack.placement import identity
from routepack.window import MAX_TOKENS, Window
from strategies import SEEDS, Instance, instances, random_routes, random_window, windows


def one_layer(lengths_S: list[int], demand_SE: Any, top_k: int, missing_S: Any, **f: Any) -> Window:
    """A window of one layer."""
    demand_SLE = np.array(demand_SE, np.uint16)[:, None]
    return Window(np.array(lengths_S), demand_SLE, top_k, missing_S=np.array(missing_S), **f)


def test_missing_tokens_follow_the_rows_of_their_sample() -> None:
    """Sample 0: 2 tokens missing beside 4 recorded, so half of (4, 2, 1, 1): 2, 1, and one more
    for the first of two halves. Sample 1 is complete."""
    w = one_layer([6, 1], [[4, 2, 1, 1], [0, 0, 1, 1]], 2, [2, 0])
    filled = fill_missing(w)
    assert filled.demand_SLE.tolist() == [[[6, 3, 2, 1]], [[0, 0, 1, 1]]]
    assert filled.missing_S.tolist() == [0, 0]


def test_missing_tokens_follow_the_window() -> None:
    """The window recorded (4, 2, 2, 2) of 5 tokens. By "window", 2 missing tokens get two fifths
    of it: (1.6, .8, .8, .8), of which three go up. A sample without rows gets that by "sample"."""
    w = one_layer([6, 1], [[4, 2, 1, 1], [0, 0, 1, 1]], 2, [2, 0])
    assert fill_missing(w, "window").demand_SLE[0].tolist() == [[5, 3, 2, 2]]
    bare = one_layer([2, 5], [[0, 0, 0, 0], [4, 2, 2, 2]], 2, [2, 0])
    assert fill_missing(bare).demand_SLE.tolist() == [[[1, 1, 1, 1]], [[4, 2, 2, 2]]]


def test_what_rounding_takes_is_given_later() -> None:
    """One token missing in each of 4 samples that recorded (2, 1, 1) of 4. Due after 1, 2, 3, 4
    tokens are (.5, .25, .25), (1, .5, .5), (1.5, .75, .75) and (2, 1, 1): expert 0 first, then 1
    and 2, which have waited for longer, then 0 again; by itself every sample would take 0."""
    w = one_layer([5] * 4, [[2, 1, 1]] * 4, 1, [1] * 4)
    added_SLE = fill_missing(w).demand_SLE - w.demand_SLE
    assert added_SLE[:, 0].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]


def test_without_any_row_experts_are_equally_likely() -> None:
    """2 tokens over 4 experts, top-1: half an assignment each, given to the first two, then, in
    the next sample, to the others."""
    w = one_layer([2, 2], np.zeros((2, 4)), 1, [2, 2])
    assert fill_missing(w).demand_SLE[:, 0].tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]


def test_layers_are_estimated_on_their_own() -> None:
    """One token missing beside one recorded: each layer repeats its own experts."""
    w = Window(np.array([2]), np.array([[[1, 1, 0], [0, 1, 1]]]), 2, missing_S=np.array([1]))
    assert fill_missing(w).demand_SLE.tolist() == [[[2, 2, 0], [0, 2, 2]]]


def test_a_window_may_stay_as_it_is() -> None:
    """By "none", and where nothing is missing, the same window comes back."""
    w = one_layer([2], [[1]], 1, [1])
    complete = one_layer([1], [[1]], 1, [0])
    assert fill_missing(w, "none") is w
    assert all(fill_missing(complete, how) is complete for how in HOW)


def test_filled_counts_beyond_16_bits() -> None:
    """65,535 recorded tokens of one expert and one more no longer fit 16 bits."""
    w = Window(np.array([65_536]), np.array([[[65_535, 0]]], np.uint16), 1, missing_S=np.array([1]))
    assert fill_missing(w).demand_SLE.tolist() == [[[65_536, 0]]]


def test_counts_whose_products_exceed_64_bits() -> None:
    """2^31 - 1 tokens each: experts 0 and 1 at 2 : 1 in the first, and so in the second."""
    third = MAX_TOKENS // 3
    counts_E = [MAX_TOKENS - third, third]
    for missing in (MAX_TOKENS, MAX_TOKENS - 5):
        kept = MAX_TOKENS - missing
        w = Window(
            np.array([MAX_TOKENS] * 2),
            np.array([[counts_E], [[0, kept]]]),
            1,
            missing_S=np.array([0, missing]),
        )
        added = int(fill_missing(w, "window").demand_SLE[1, 0, 0])
        exact = Fraction(missing * counts_E[0], MAX_TOKENS + kept)
        assert exact - 1 < added < exact + 1


def rates_of(w: Window, s: int, how: str) -> tuple[NDArray[np.int64], int]:
    """The counts [L, E] that sample s follows, and of how many rows they are."""
    recorded_S = w.lengths_S - w.missing_S
    if how == "sample" and recorded_S[s]:
        return w.demand_SLE[s].astype(np.int64), int(recorded_S[s])
    if recorded_S.any():
        return w.demand_LE, int(recorded_S.sum())
    return np.full(w.demand_LE.shape, w.top_k), w.experts


@given(windows(), st.sampled_from(["sample", "window"]))
def test_estimates_are_proportional_and_exact_in_sum(w: Window, how: str) -> None:
    """Every count added is its share rounded down or up, never more than one a missing token, and
    K * missing in all; what was recorded, lengths and the rest stay."""
    filled = fill_missing(w, how)
    added_SLE = filled.demand_SLE.astype(np.int64) - w.demand_SLE
    for s, tokens in enumerate(w.missing_S.tolist()):
        counts_LE, rows = rates_of(w, s, how)
        down_LE = counts_LE * tokens // rows
        assert (added_SLE[s] >= down_LE).all()
        assert (added_SLE[s] <= -(-counts_LE * tokens // rows)).all()
        assert (added_SLE[s] <= tokens).all()
        assert (added_SLE[s].sum(axis=1) == w.top_k * tokens).all()
    assert (filled.lengths_S == w.lengths_S).all()
    assert not filled.missing_S.any()
    assert fill_missing(w, how).sha256 == filled.sha256


@given(SEEDS, st.integers(1, 8), st.lists(st.integers(1, 3), min_size=1, max_size=40), st.data())
def test_rounding_does_not_add_up(
    seed: int, experts: int, missing_S: list[int], data: st.DataObject
) -> None:
    """However many samples miss a few tokens each, no expert's total is 2 from its share."""
    top_k = data.draw(st.integers(1, experts))
    rng = np.random.default_rng(seed)
    recorded = random_window(rng, [20], 2, experts, top_k)
    samples = len(missing_S)
    w = Window(
        np.array(missing_S) + 20,
        np.repeat(recorded.demand_SLE, samples, axis=0),
        top_k,
        missing_S=np.array(missing_S),
    )
    added_LE = fill_missing(w).demand_LE - w.demand_LE
    assert (abs(20 * added_LE - sum(missing_S) * recorded.demand_LE) < 2 * 20).all()


# --- prediction


def test_a_prediction_by_hand() -> None:
    """The previous window recorded (3, 3, 2) of 4 tokens, top-2: 8 tokens get twice that, 2 more
    half of it, (1.5, 1.5, 1), of which the first goes up."""
    previous = one_layer([4, 1], [[3, 3, 2], [0, 0, 0]], 2, [0, 1], moe_layers=(3,), model="m")
    w = predicted([8, 2], previous, group_S=np.array([1, 2]), source="next")
    assert w.demand_SLE[:, 0].tolist() == [[6, 6, 4], [2, 1, 1]]
    assert (w.moe_layers, w.model, w.source) == ((3,), "m", "next")
    assert w.group_S is not None
    assert w.group_S.tolist() == [1, 2]


def test_a_prediction_by_prompt() -> None:
    """Prompt 5 recorded (3, 0, 0), prompt 6 (0, 1, 1) of two samples, prompt 7 nothing: samples of
    5 and 6 follow them, those of 7 and 8 the mean (3, 1, 1) of 5 tokens."""
    previous = one_layer(
        [3, 1, 1, 9], [[3, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]], 1, [0, 0, 0, 9],
        group_S=np.array([5, 6, 6, 7]),
    )  # fmt: skip
    groups = np.array([6, 5, 7, 8])
    w = predicted([4, 2, 5, 10], previous, match_groups=True, group_S=groups)
    assert w.demand_SLE[:, 0].tolist() == [[0, 2, 2], [2, 0, 0], [3, 1, 1], [6, 2, 2]]
    by_mean = predicted([5, 5, 5, 5], previous, group_S=groups)
    assert by_mean.demand_SLE[:, 0].tolist() == [[3, 1, 1]] * 4
    estimate = Estimate.of_prediction(w, previous, match_groups=True)
    assert estimate == Estimate("predicted", 21, 1.0, 15, previous.sha256)


def test_a_prediction_beyond_16_bits() -> None:
    """70,000 tokens that all choose one expert."""
    previous = one_layer([1], [[1, 0]], 1, [0])
    assert predicted([70_000], previous).demand_SLE.tolist() == [[[70_000, 0]]]


@given(windows(), st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_a_prediction_has_exact_sums(previous: Window, lengths_S: list[int]) -> None:
    """A prediction is a whole window, complete, with the counts of its lengths."""
    w = predicted(lengths_S, previous)
    assert not w.missing_S.any()
    counts_LE, rows = rates_of(previous, 0, "window")
    for s, tokens in enumerate(lengths_S):
        assert (w.demand_SLE[s].sum(axis=1) == w.top_k * tokens).all()
        assert (abs(rows * w.demand_SLE[s].astype(int) - tokens * counts_LE) < rows).all()


# --- the record in the plan


def test_an_estimate_says_what_was_not_known() -> None:
    """3 of 8 tokens are missing, 2 of them in a sample without rows, which falls back on the
    window; "none" and "window" have nothing to fall back from."""
    w = one_layer([6, 2], [[5, 0], [0, 0]], 1, [1, 2])
    assert Estimate.of_missing(w, "sample") == Estimate("sample", 3, 0.375, 2, w.sha256)
    assert Estimate.of_missing(w, "window") == Estimate("window", 3, 0.375, 0, w.sha256)
    assert Estimate.of_missing(w, "none") == Estimate("none", 3, 0.375, 0, w.sha256)
    by_mean = predicted([4, 4], w)
    assert Estimate.of_prediction(by_mean, w) == Estimate("predicted", 8, 1.0, 0, w.sha256)


def test_an_estimate_survives_json() -> None:
    """It goes into the plan file as it is, and unknown fields are refused."""
    estimate = Estimate("sample", 3, 0.375, 2, "ab")
    data = msgspec.json.encode(estimate)
    assert msgspec.json.decode(data, type=Estimate) == estimate
    with pytest.raises(msgspec.ValidationError, match="unknown field `x`"):
        msgspec.convert(msgspec.to_builtins(estimate) | {"x": 1}, Estimate)


# --- the margin


@pytest.mark.parametrize(
    ("known_E", "unknown", "top_k", "low", "high"),
    [
        # Ranks {0, 1} and {2, 3} carry 5 and 1. Two more tokens of one expert: 3 or 7 at most.
        ([3, 2, 1, 0], 2, 1, 5, 7),
        # Six more: evened out, or all on the busy rank.
        ([3, 2, 1, 0], 6, 1, 6, 11),
        # With top-3 a token has 1 or 2 on each rank: 8 + 1, or 8 + 2.
        ([4, 4, 4, 0], 1, 3, 9, 10),
        # With top-4 it has 2 on each: nothing is uncertain.
        ([1, 1, 1, 1], 3, 4, 8, 8),
    ],
)
def test_an_interval_by_hand(
    known_E: list[int], unknown: int, top_k: int, low: int, high: int
) -> None:
    """One sample, one layer, two ranks of two experts."""
    recorded = sum(known_E) // top_k
    w = one_layer([recorded + unknown], [known_E], top_k, [unknown])
    ends = busiest_interval_BL(w, [unknown], identity(1, 4), 2, np.zeros(1, np.int32))
    assert [end_BL.tolist() for end_BL in ends] == [[[low]], [[high]]]


@st.composite
def few_unknown(draw: st.DrawFn) -> tuple[Window, int]:
    """One sample and layer on 1 to 3 ranks, with 0 to 3 unknown tokens: few routes to try."""
    ranks = draw(st.integers(1, 3))
    experts = ranks * draw(st.integers(1, 6 // ranks))
    top_k = draw(st.integers(1, min(3, experts)))
    recorded, unknown = draw(st.integers(0, 6)), draw(st.integers(0, 3))
    rng = np.random.default_rng(draw(SEEDS))
    length = max(1, recorded + unknown)
    missing = length - recorded
    return random_window(rng, [length], 1, experts, top_k, missing_S=[missing]), ranks


@given(few_unknown())
def test_the_ends_are_reached_and_not_passed(case: tuple[Window, int]) -> None:
    """By trying all routes of the unknown tokens."""
    w, ranks = case
    per_rank = w.experts // ranks
    load_R = w.demand_LE[0].reshape(ranks, per_rank).sum(axis=1).tolist()
    adds = {
        tuple(sum(e // per_rank == r for e in chosen) for r in range(ranks))
        for chosen in itertools.combinations(range(w.experts), w.top_k)
    }
    unknown = int(w.missing_S[0])
    busiest = [
        max(map(sum, zip(load_R, *chosen, strict=True)))
        for chosen in itertools.combinations_with_replacement(sorted(adds), unknown)
    ]
    group_S = np.zeros(1, np.int32)
    low_BL, high_BL = busiest_interval_BL(w, w.missing_S, identity(1, w.experts), ranks, group_S)
    assert (low_BL.tolist(), high_BL.tolist()) == ([[min(busiest)]], [[max(busiest)]])


def true_window(w: Window, unknown_S: NDArray[Any], seed: int, skew: float) -> Window:
    """The window with random true routes for `unknown_S` of its missing tokens."""
    rng = np.random.default_rng(seed)
    demand_SLE = w.demand_SLE.astype(np.int64)
    for s, tokens in enumerate(unknown_S.tolist()):
        routes_NLK = random_routes(rng, tokens, w.layers, w.experts, w.top_k, skew)
        for layer in range(w.layers):
            demand_SLE[s, layer] += np.bincount(routes_NLK[:, layer].ravel(), minlength=w.experts)
    return Window(w.lengths_S, demand_SLE, w.top_k, missing_S=w.missing_S - unknown_S)


@given(instances(), SEEDS, st.sampled_from([0.0, 4.0]), st.sampled_from(HOW), st.integers(1, 4))
def test_the_true_cost_lies_in_the_interval(
    instance: Instance, seed: int, skew: float, how: str, multiple: int
) -> None:
    """Whatever the routes of the missing tokens turn out to be, and for the estimate too. Padding
    that is not routed is missing as well, but not unknown."""
    raw, topology = instance.window, instance.topology
    padding = Padding(multiple=multiple)
    recorded = padded(raw, padding)
    planned = padded(fill_missing(raw, how), padding)
    true = true_window(recorded, raw.missing_S, seed, skew)
    # All have the same lengths; normalised costs must be those of complete routes.
    cost = instance.cost_model.resolve(true, topology, instance.token_cap)
    rows = instance.problem.to_rows(instance.cell_S)
    layout: Any = (topology, cost, instance.placement_LE, rows)
    attention_MG = row_costs(planned, *layout)[0]
    known: Any = (*layout, attention_MG)
    low, high = cost_interval(recorded, raw.missing_S, *known)
    assert low <= score(true, *layout).slowest_shard <= high
    assert low <= high
    if how != "none":
        assert low <= score(planned, *layout).slowest_shard <= high
    if not raw.missing_S.any():
        assert low == high == score(recorded, *layout).slowest_shard


@given(instances(alike=True), SEEDS)
def test_a_predicted_window_has_an_interval_too(instance: Instance, seed: int) -> None:
    """Nothing is known but lengths: from evenly spread tokens to K on one rank, where E/R holds K;
    true routes lie between."""
    w, topology = instance.window, instance.topology
    nothing = Window(
        w.lengths_S, np.zeros_like(w.demand_SLE), w.top_k, missing_S=w.lengths_S.astype(np.int32)
    )
    rows = instance.problem.to_rows(instance.cell_S)
    true = true_window(nothing, w.lengths_S, seed, 1.0)
    cost = instance.cost_model.resolve(true, topology, instance.token_cap)
    layout: Any = (topology, cost, instance.placement_LE, rows)
    attention_MG = row_costs(w, *layout)[0]
    known: Any = (*layout, attention_MG)
    low, high = cost_interval(nothing, w.lengths_S, *known)
    assert low <= score(true, *layout).slowest_shard <= high
    group_S = groups_of(rows, topology, w.samples)
    tokens_MG = np.bincount(group_S, weights=w.lengths_S).reshape(attention_MG.shape)
    ranks, most = topology.ep, min(w.top_k, w.experts // topology.ep)
    for end, busiest_MG in (
        (low, -(-w.top_k * tokens_MG // ranks)),
        (high, most * tokens_MG),
    ):
        shards = (attention_MG + cost.expert * (w.layers * busiest_MG)).T.tolist()
        assert end == max(math.fsum(shard) for shard in shards)


# --- what is refused


def refused(call: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value) == message


def test_another_how_is_refused() -> None:
    """Both where the estimate is made and where it is described."""
    w = one_layer([1], [[1]], 1, [0])
    message = "how = 'mean': expected one of sample, window, none"
    refused(lambda: fill_missing(w, "mean"), message)
    refused(lambda: Estimate.of_missing(w, "mean"), message)


def test_prompts_to_match_must_be_there() -> None:
    """In both windows."""
    plain = one_layer([1], [[1]], 1, [0])
    grouped = one_layer([1], [[1]], 1, [0], group_S=np.array([0]))
    start = "match_groups = True: expected group_S in both, "
    refused(lambda: predicted([1], grouped, match_groups=True), start + "the new window has none")
    refused(
        lambda: predicted([1], plain, match_groups=True, group_S=np.array([0])),
        start + "previous has none",
    )


@pytest.mark.parametrize(
    ("lengths_S", "message"),
    [
        ([3, 0], f"lengths[1] = 0: expected a whole number in 1..{MAX_TOKENS}"),
        ([2**31], f"lengths[0] = {2**31}: expected a whole number in 1..{MAX_TOKENS}"),
        ([1.5], "lengths.dtype = float64: expected an integer type"),
        ([[1]], "lengths.shape = (1, 1): expected one dimension"),
        ([], "lengths: expected at least 1 sample, the window has none"),
    ],
)
def test_lengths_to_predict_are_checked(lengths_S: Any, message: str) -> None:
    """As the lengths of any window."""
    previous = one_layer([1], [[1]], 1, [0])
    refused(lambda: predicted(lengths_S, previous), message)


def test_more_unknown_than_missing_is_refused() -> None:
    """A token is recorded or unknown, not both."""
    w = one_layer([2, 3], [[2], [2]], 1, [0, 1])
    refused(
        lambda: busiest_interval_BL(w, [0, 2], identity(1, 1), 1, np.zeros(2, np.int32)),
        "unknown[1] = 2: expected at most the 1 tokens without a recorded route",
    )


def test_one_rank_leaves_nothing_uncertain() -> None:
    """With one EP rank the routes do not matter: the interval is a point."""
    w = one_layer([4], [[1, 1]], 1, [2])
    ends = busiest_interval_BL(w, [2], identity(1, 2), 1, np.zeros(1, np.int32))
    assert [end_BL.tolist() for end_BL in ends] == [[[4]], [[4]]]
