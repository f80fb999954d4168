"""Windows: validated once, hashed canonically, never changed afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.window import MAX_TOKENS, Window
from strategies import SEEDS, random_routes, windows

# S=2 samples of 3 and 1 tokens, L=2 layers, E=3 experts, K=2.
LENGTHS_S = [3, 1]
DEMAND_SLE = [[[3, 2, 1], [1, 3, 2]], [[1, 0, 1], [0, 1, 1]]]
# The token rows [N=4, L, K] that lead to it, the third and fourth of different samples.
ROUTES_NLK = [[[0, 1], [1, 2]], [[1, 0], [1, 0]], [[2, 0], [2, 1]], [[0, 2], [2, 1]]]
OFFSETS_S1 = [0, 3, 4]


def window(**changes: Any) -> Window:
    """The window above, with changes."""
    fields: dict[str, Any] = dict(
        lengths_S=np.array(LENGTHS_S), demand_SLE=np.array(DEMAND_SLE, np.uint16), top_k=2
    )
    return Window(**(fields | changes))


def demand(
    *index: int, value: int, dtype: Any = np.int64, of: Any = DEMAND_SLE
) -> NDArray[np.int64]:
    """The demand above with one count replaced."""
    demand_SLE = np.array(of, dtype)
    demand_SLE[index] = value
    return demand_SLE


def test_fields_default_as_documented() -> None:
    """Nothing is missing, there are no prompts, and layers are numbered from 0."""
    w = window()
    assert (w.samples, w.layers, w.experts, w.top_k) == (2, 2, 3, 2)
    assert w.missing_S.tolist() == [0, 0]
    assert (w.group_S, w.tag_S, w.step_S) == (None, None, None)
    assert w.moe_layers == (0, 1)
    assert w.demand_LE.tolist() == [[4, 2, 2], [1, 4, 3]]
    assert (w.lengths_S.dtype, w.missing_S.dtype, w.demand_LE.dtype) == ("i8", "i4", "i8")


@pytest.mark.parametrize(
    ("given", "kept"),
    [("uint16", "u2"), ("uint32", "u4"), ("int64", "u2"), ("uint8", "u2"), ("int32", "u2")],
)
def test_demand_is_kept_in_16_or_32_bits(given: str, kept: str) -> None:
    """Counts of other integer types are narrowed, to 32 bits only where 16 do not hold them."""
    assert window(demand_SLE=np.array(DEMAND_SLE, given)).demand_SLE.dtype == kept


def test_counts_above_16_bits_are_kept() -> None:
    """A sample of 70,000 tokens that all choose the same expert has a demand of 70,000."""
    w = Window(np.array([70_000]), np.array([[[70_000, 0]]]), 1)
    assert w.demand_SLE.dtype == np.uint32
    assert w.demand_LE.tolist() == [[70_000, 0]]


def test_from_routes_equals_a_count_by_hand() -> None:
    """The four token rows give the demand above, sample by sample."""
    routes_NLK = np.array(ROUTES_NLK, np.uint8)
    w = Window.from_routes(LENGTHS_S, routes_NLK, OFFSETS_S1, 3, model="m")
    assert w.demand_SLE.tolist() == DEMAND_SLE
    assert (w.top_k, w.model) == (2, "m")


def test_missing_tokens_have_length_but_no_demand() -> None:
    """An engine that records T-1 rows: 4 tokens, 3 of them routed, so 2 * 3 assignments a layer."""
    routes_NLK = np.array(ROUTES_NLK, np.uint8)
    w = Window.from_routes([4, 2], routes_NLK, OFFSETS_S1, 3, missing_S=np.array([1, 1]))
    assert w.lengths_S.tolist() == [4, 2]
    assert w.demand_SLE.sum(axis=2).tolist() == [[6, 6], [2, 2]]


def test_a_sample_may_miss_every_route() -> None:
    """missing = length is valid, with no demand at all."""
    w = Window(np.array([5]), np.zeros((1, 1, 2), np.uint16), 1, missing_S=np.array([5]))
    assert w.demand_LE.tolist() == [[0, 0]]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(1, 3), SEEDS, st.data())
def test_hash_is_the_same_for_routes_and_demand(
    lengths_S: list[int], layers: int, seed: int, data: st.DataObject
) -> None:
    """The hash is of what was counted: not of the form, nor of the integer types it came in."""
    experts = data.draw(st.integers(2, 6))
    rng = np.random.default_rng(seed)
    routes_NLK = random_routes(rng, sum(lengths_S), layers, experts, 2, 1.0)
    offsets_S1 = np.cumsum([0, *lengths_S])
    counted = Window.from_routes(lengths_S, routes_NLK, offsets_S1, experts)
    again = Window(np.array(lengths_S, np.uint8), np.array(counted.demand_SLE, np.int64), 2)
    wide = Window(np.array(lengths_S), np.array(counted.demand_SLE, np.uint32), 2)
    assert counted.sha256 == again.sha256 == wide.sha256


def test_hash_covers_more_samples_than_are_hashed_at_a_time() -> None:
    """With 40 samples a change in any one of them changes the hash."""
    lengths_S, demand_SLE = np.full(40, 2), np.tile(np.uint16([1, 1]), (40, 1, 1))
    hashes = {Window(lengths_S, demand_SLE, 1).sha256}
    for s in range(40):
        changed_SLE = demand_SLE.copy()
        changed_SLE[s, 0] = [2, 0]
        hashes.add(Window(lengths_S, changed_SLE, 1).sha256)
    assert len(hashes) == 41


def test_hash_differs_when_anything_changes() -> None:
    """Lengths, demand, its shape, top_k, missing tokens, prompts, tags and steps enter the hash."""
    one_SLE = np.zeros((2, 2, 3), np.uint16)
    one_SLE[:, :, 0] = [[3], [1]]
    swapped = np.array(DEMAND_SLE)[:, :, [1, 0, 2]]
    changed = [
        window(),
        window(lengths_S=np.array([4, 1]), missing_S=np.array([1, 0])),
        window(lengths_S=np.array([3, 2]), missing_S=np.array([0, 1])),
        window(demand_SLE=swapped),
        window(demand_SLE=one_SLE, top_k=1),
        window(demand_SLE=np.array(DEMAND_SLE)[:, :1]),
        window(demand_SLE=np.pad(DEMAND_SLE, ((0, 0), (0, 0), (0, 1)))),
        window(group_S=np.array([0, 0])),
        window(group_S=np.array([0, 1])),
        window(tag_S=np.array([0, 1])),
        window(step_S=np.array([0, 1])),
        window(tag_S=np.array([0, 1]), step_S=np.array([0, 1])),
    ]
    assert len({w.sha256 for w in changed}) == len(changed)
    assert window(model="m", source="s", moe_layers=(3, 5)).sha256 == window().sha256


def test_hash_without_tags_and_steps_is_that_of_earlier_versions() -> None:
    """Plan files of earlier versions name these two hashes, so they never change."""
    plain, grouped = window(), window(group_S=np.array([7, -3]))
    assert plain.sha256 == "8e8dc655ee8052e2956da9fd13b64f2140fdfad6e102c25fe6d421ed201f00f3"
    assert grouped.sha256 == "a0de7a1b4b19e0487a13ddcacb58f41988c890f9eee155f5b8dc54c80b4706da"


def test_arrays_are_read_only() -> None:
    """No array of a window can be written to."""
    w = window(
        group_S=np.array([0, 1]),
        missing_S=np.array([0, 0]),
        tag_S=np.array([2, -1]),
        step_S=np.array([0, 1]),
    )
    arrays = (w.lengths_S, w.demand_SLE, w.missing_S, w.group_S, w.tag_S, w.step_S)
    for array in arrays:
        assert array is not None
        with pytest.raises(ValueError, match="assignment destination is read-only"):
            array[0] = 1


def test_the_callers_arrays_stay_writable() -> None:
    """A window takes read-only views and leaves the flags of what it was given alone."""
    lengths_S, demand_SLE = np.array(LENGTHS_S), np.array(DEMAND_SLE, np.uint16)
    window(lengths_S=lengths_S, demand_SLE=demand_SLE)
    assert lengths_S.flags.writeable
    assert demand_SLE.flags.writeable


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no samples": (
        {"lengths_S": np.array([], int)},
        "lengths: expected at least 1 sample, the window has none",
    ),
    "length 0": (
        {"lengths_S": np.array([3, 0])},
        f"lengths[1] = 0: expected a whole number in 1..{MAX_TOKENS}",
    ),
    "length too large": (
        {"lengths_S": np.array([3, 2**31])},
        f"lengths[1] = {2**31}: expected a whole number in 1..{MAX_TOKENS}",
    ),
    "float lengths": (
        {"lengths_S": np.array([3.0, 1.0])},
        "lengths.dtype = float64: expected an integer type",
    ),
    "lengths in two dimensions": (
        {"lengths_S": np.array([[3, 1]])},
        "lengths.shape = (1, 2): expected one dimension",
    ),
    "negative missing": (
        {"missing_S": np.array([0, -1])},
        f"missing[1] = -1: expected a whole number in 0..{MAX_TOKENS}",
    ),
    "missing more than the length": (
        {"missing_S": np.array([0, 2])},
        "missing[1] = 2: expected at most length 1",
    ),
    "missing of another size": (
        {"missing_S": np.array([0])},
        "missing.shape = (1,): expected (2,)",
    ),
    "group of another size": (
        {"group_S": np.array([0, 1, 2])},
        "group.shape = (3,): expected (2,)",
    ),
    "float group": (
        {"group_S": np.array([0.0, 1.0])},
        "group.dtype = float64: expected an integer type",
    ),
    "tag of another size": (
        {"tag_S": np.array([0])},
        "tag.shape = (1,): expected (2,)",
    ),
    "float tag": (
        {"tag_S": np.array([0.0, 1.0])},
        "tag.dtype = float64: expected an integer type",
    ),
    "tag too large": (
        {"tag_S": np.array([0, 2**31])},
        f"tag[1] = {2**31}: expected a whole number in -{MAX_TOKENS}..{MAX_TOKENS}",
    ),
    "step of another size": (
        {"step_S": np.array([0, 1, 2])},
        "step.shape = (3,): expected (2,)",
    ),
    "negative step": (
        {"step_S": np.array([0, -1])},
        f"step[1] = -1: expected a whole number in 0..{MAX_TOKENS}",
    ),
    "demand in two dimensions": (
        {"demand_SLE": np.array(DEMAND_SLE)[0]},
        "demand.shape = (2, 3): expected (S=2, L, E), none of them 0",
    ),
    "demand of other samples": (
        {"demand_SLE": np.array(DEMAND_SLE)[:1]},
        "demand.shape = (1, 2, 3): expected (S=2, L, E), none of them 0",
    ),
    "no layers": (
        {"demand_SLE": np.zeros((2, 0, 3), int)},
        "demand.shape = (2, 0, 3): expected (S=2, L, E), none of them 0",
    ),
    "float demand": (
        {"demand_SLE": np.array(DEMAND_SLE, float)},
        "demand.dtype = float64: expected an integer type",
    ),
    "negative count": (
        {"demand_SLE": demand(1, 0, 2, value=-1)},
        f"demand[1, 0, 2] = -1: expected a count in 0..{MAX_TOKENS}",
    ),
    "count too large": (
        {"demand_SLE": demand(1, 1, 0, value=2**31)},
        f"demand[1, 1, 0] = {2**31}: expected a count in 0..{MAX_TOKENS}",
    ),
    "count of 32 bits too large": (
        {"demand_SLE": demand(1, 1, 0, value=2**31, dtype=np.uint32)},
        f"demand[1, 1] = {2**31 + 2}: expected 2 = top_k 2 * (length 1 - missing 0) "
        "summed over experts",
    ),
    "a layer's sum": (
        {"demand_SLE": demand(0, 1, 2, value=1)},
        "demand[0, 1] = 5: expected 6 = top_k 2 * (length 3 - missing 0) summed over experts",
    ),
    "a sum with missing tokens": (
        {"missing_S": np.array([1, 0])},
        "demand[0, 0] = 6: expected 4 = top_k 2 * (length 3 - missing 1) summed over experts",
    ),
    "an expert twice in a token": (
        {"demand_SLE": np.array([DEMAND_SLE[0], [[1, 0, 1], [0, 0, 2]]])},
        "demand[1, 1, 2] = 2: expected at most the 1 recorded tokens of the sample",
    ),
    "top_k 0": ({"top_k": 0}, "top_k = 0: expected a whole number of at least 1"),
    "top_k True": ({"top_k": True}, "top_k = True: expected a whole number of at least 1"),
    "top_k 2.0": ({"top_k": 2.0}, "top_k = 2.0: expected a whole number of at least 1"),
    "top_k above E": ({"top_k": 4}, "top_k = 4: expected at most the number of experts 3"),
    "moe_layers of another size": (
        {"moe_layers": (1, 2, 3)},
        "moe_layers = [1, 2, 3]: expected 2 layers, as in demand",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_field_is_named(case: str) -> None:
    """One line says which field, where in it, what was found and what was expected."""
    changes, message = REFUSED[case]
    with pytest.raises(InputError) as error:
        window(**changes)
    assert str(error.value) == message


REFUSED_ROUTES: dict[str, tuple[dict[str, Any], str]] = {
    "offsets of another size": (
        {"offsets": [0, 4]},
        "offsets.shape = (2,): expected (3,)",
    ),
    "negative offset": (
        {"offsets": [-1, 3, 4]},
        f"offsets[0] = -1: expected a whole number in 0..{2**63 - 1}",
    ),
    "rows that are not the length": (
        {"offsets": [0, 2, 4]},
        "demand[0, 0] = 4: expected 6 = top_k 2 * (length 3 - missing 0) summed over experts",
    ),
    "an id out of range": (
        {"num_experts": 2},
        "routes[0, 1, 1] = 2: expected an expert id in 0..1",
    ),
}


@pytest.mark.parametrize("case", REFUSED_ROUTES)
def test_bad_routes_are_named(case: str) -> None:
    """Routes are refused as demand is: offsets, ids, and rows that do not add up to the length."""
    changes, message = REFUSED_ROUTES[case]
    arguments: dict[str, Any] = dict(
        lengths_S=LENGTHS_S, routes_NLK=np.array(ROUTES_NLK, np.uint8), offsets=OFFSETS_S1,
        num_experts=3,
    )  # fmt: skip
    with pytest.raises(InputError) as error:
        Window.from_routes(**(arguments | changes))
    assert str(error.value) == message


LABELS: dict[str, Any] = dict(
    missing_S=np.array([0, 0]), group_S=np.array([7, 8]), tag_S=np.array([-1, 1]),
    step_S=np.array([0, 1]), moe_layers=(3, 5), model="m", source="s",
)  # fmt: skip


def test_select_gathers_every_tensor_of_a_sample() -> None:
    """Sample 1 alone: its length, demand, prompt, tag and step; what is of all samples stays."""
    w = window(**LABELS).select([1])
    assert (w.lengths_S.tolist(), w.demand_SLE.tolist()) == ([1], DEMAND_SLE[1:])
    assert w.group_S is not None
    assert w.tag_S is not None
    assert w.step_S is not None
    labels = (w.missing_S.tolist(), w.group_S.tolist(), w.tag_S.tolist(), w.step_S.tolist())
    assert labels == ([0], [8], [1], [1])
    assert (w.top_k, w.moe_layers, w.model, w.source) == (2, (3, 5), "m", "s")
    assert w.demand_LE.tolist() == DEMAND_SLE[1]


@given(windows(), st.data())
def test_select_composes_and_its_order_counts(w: Window, data: st.DataObject) -> None:
    """All samples give the same window, and a selection of a selection is their composition."""
    assert w.select(range(w.samples)).sha256 == w.sha256
    outer = data.draw(st.lists(st.sampled_from(range(w.samples)), min_size=1, unique=True))
    inner = data.draw(st.lists(st.sampled_from(range(len(outer))), min_size=1, unique=True))
    twice = w.select(outer).select(np.array(inner))
    once = w.select([outer[i] for i in inner])
    assert twice.sha256 == once.sha256
    assert once.lengths_S.tolist() == [int(w.lengths_S[outer[i]]) for i in inner]
    assert once.missing_S.tolist() == [int(w.missing_S[outer[i]]) for i in inner]


REFUSED_SAMPLES: dict[str, tuple[Any, str]] = {
    "none": ([], "lengths: expected at least 1 sample, the window has none"),
    "out of range": ([0, 2], "samples[1] = 2: expected a sample of the window, in 0..1"),
    "from the end": ([-1], f"samples[0] = -1: expected a whole number in 0..{MAX_TOKENS}"),
    "twice": ([1, 0, 1], "samples[2] = 1: expected every sample at most once"),
    "a mask": (np.array([True, False]), "samples.dtype = bool: expected an integer type"),
}


@pytest.mark.parametrize("case", REFUSED_SAMPLES)
def test_a_selection_that_is_none_is_named(case: str) -> None:
    """Samples of another window, twice, or none at all are refused."""
    samples, message = REFUSED_SAMPLES[case]
    with pytest.raises(InputError) as error:
        window().select(samples)
    assert str(error.value) == message
