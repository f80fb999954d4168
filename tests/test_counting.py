"""Counting recorded routes: every claim against a slow count with dictionaries."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from routepack import counting
from routepack.counting import CHUNK_IDS, ID_TYPES, count_routes
from routepack.errors import InputError

# N=4 token rows, L=2 layers, K=2 of E=4 experts; expert 3 is never chosen at layer 0.
ROUTES_NLK = np.array(
    [
        [[0, 1], [2, 3]],
        [[2, 0], [3, 0]],
        [[1, 2], [3, 2]],
        [[0, 2], [1, 3]],
    ],
    np.uint8,
)


def slow_count(
    routes_NLK: NDArray[Any], offsets_S1: list[int], experts: int
) -> list[Counter[tuple[int, int]]]:
    """The meaning: one id at a time. Raises InputError with the message that is due."""
    demand_S = []
    top_k = routes_NLK.shape[2]
    for start, stop in pairwise(offsets_S1):
        demand: Counter[tuple[int, int]] = Counter()
        for t in range(start, stop):
            for layer, ids in enumerate(routes_NLK[t].tolist()):
                for k, e in enumerate(ids):
                    where = f"routes[{t}, {layer}, {k}] = {e}: expected "
                    if not 0 <= e < experts:
                        raise InputError(where + f"an expert id in 0..{experts - 1}")
                    if e in ids[:k]:
                        raise InputError(
                            where + f"{top_k} distinct experts in a token row, it repeats"
                        )
                    demand[layer, e] += 1
        demand_S.append(demand)
    return demand_S


def outcome(routes_NLK: NDArray[Any], offsets_S1: list[int], experts: int, **options: Any) -> Any:
    """The counts that are not zero, sample by sample, or the error message."""
    try:
        demand_SLE = count_routes(routes_NLK, np.array(offsets_S1, np.int64), experts, **options)
    except InputError as error:
        return str(error)
    assert demand_SLE.shape == (len(offsets_S1) - 1, routes_NLK.shape[1], experts)
    assert demand_SLE.dtype == np.uint16
    return [
        {(layer, e): int(demand_LE[layer, e]) for layer, e in np.argwhere(demand_LE).tolist()}
        for demand_LE in demand_SLE
    ]


def slow_outcome(routes_NLK: NDArray[Any], offsets_S1: list[int], experts: int) -> Any:
    """The same from `slow_count`."""
    try:
        return slow_count(routes_NLK, offsets_S1, experts)
    except InputError as error:
        return str(error)


def valid_routes(
    rng: np.random.Generator, shape: tuple[int, int, int], experts: int, dtype: np.dtype[Any]
) -> NDArray[Any]:
    """K distinct experts for every token and layer."""
    order = rng.random((*shape[:2], experts)).argsort(axis=2)
    return order[:, :, : shape[2]].astype(dtype)


@st.composite
def recordings(draw: st.DrawFn, violations: int) -> tuple[NDArray[Any], list[int], int]:
    """Routes of every id type, with up to `violations` ids overwritten, offsets and E.

    Up to 60 * 4 * 10 ids, so that there are several tiles, and samples without token rows.
    """
    dtype = draw(st.sampled_from(ID_TYPES))
    top_k = draw(st.integers(1, 10))
    experts = max(top_k, draw(st.sampled_from([1, 5, 8, 17, 128, 255, 256, 300])))
    if dtype == np.uint8:
        experts = min(experts, 256)
    rows_S = draw(st.lists(st.integers(0, 20), max_size=6))
    offsets_S1 = [0, *np.cumsum(rows_S, dtype=int).tolist()]
    shape = (min(sum(rows_S), 60), draw(st.integers(1, 4)), top_k)
    offsets_S1 = [min(row, shape[0]) for row in offsets_S1]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    routes_NLK = valid_routes(rng, shape, experts, dtype)
    limits = np.iinfo(dtype)
    near = [-1, 0, 1, experts - 1, experts, 255, 256, 32767, 65535, 65536, 65537, 2**32]
    ids = [e for e in (*near, limits.min, limits.max) if limits.min <= e <= limits.max]
    for _ in range(draw(st.integers(0, violations)) if routes_NLK.size else 0):
        routes_NLK.flat[draw(st.integers(0, routes_NLK.size - 1))] = draw(st.sampled_from(ids))
    return routes_NLK, offsets_S1, experts


def layouts(routes_NLK: NDArray[Any], buffer: bytearray) -> dict[str, NDArray[Any]]:
    """The same routes in other memory layouts; `buffer` holds those that are out of alignment."""
    n, layers, top_k = routes_NLK.shape
    wide = np.zeros((2 * n, layers, top_k + 1), routes_NLK.dtype)
    wide[::2, :, 1:] = routes_NLK
    read_only = routes_NLK.copy()
    read_only.flags.writeable = False
    buffer[:] = b"\0" + routes_NLK.tobytes()
    return {
        "read-only": read_only,
        "layers outermost": routes_NLK.transpose(1, 0, 2).copy().transpose(1, 0, 2),
        "Fortran": np.asfortranarray(routes_NLK),
        "slices of a wider array": wide[::2, :, 1:],
        "reversed": routes_NLK[::-1].copy()[::-1],
        "unaligned": np.frombuffer(buffer, routes_NLK.dtype, offset=1).reshape(routes_NLK.shape),
    }


def message(*arguments: Any, **options: Any) -> str:
    """The whole message with which the arguments are refused."""
    with pytest.raises(InputError) as caught:
        count_routes(*arguments, **options)
    return str(caught.value)


def test_small_instance() -> None:
    """Three samples with 2, 0 and 2 token rows, counted by hand."""
    demand_SLE = count_routes(ROUTES_NLK, np.array([0, 2, 2, 4]), 4)
    assert demand_SLE.dtype == np.uint16
    assert demand_SLE.tolist() == [
        [[2, 1, 1, 0], [1, 0, 1, 2]],
        [[0, 0, 0, 0], [0, 0, 0, 0]],
        [[1, 1, 2, 0], [0, 1, 1, 2]],
    ]


def test_expert_count_is_as_given() -> None:
    """E comes from the caller, even if the highest ids never occur."""
    demand_SLE = count_routes(ROUTES_NLK, np.array([0, 4]), 7)
    assert demand_SLE.shape == (1, 2, 7)
    assert demand_SLE[0, 1].tolist() == [1, 1, 2, 4, 0, 0, 0]


@given(recordings(violations=0), st.integers(1, 4))
def test_equals_slow_count(recording: tuple[NDArray[Any], list[int], int], threads: int) -> None:
    """Every id type, K and E gives the counts of the slow version, on any number of threads."""
    expected = slow_count(*recording)
    assert outcome(*recording, threads=threads) == expected


@given(recordings(violations=4), st.integers(1, 4))
@example((np.array([[[65536, 1]]], np.int64), [0, 1], 4), 1)  # 0 in its lowest 16 bits
@example((np.array([[[3, 9, 3, 9]]], np.int16), [0, 1], 9), 1)  # out of range before the repeat
def test_first_violation(recording: tuple[NDArray[Any], list[int], int], threads: int) -> None:
    """The error names the first violation in (token row, layer, k) order, as the slow version."""
    assert outcome(*recording, threads=threads) == slow_outcome(*recording)


@given(recordings(violations=1), st.integers(1, 40), st.integers(1, 3))
def test_memory_layout_does_not_matter(
    recording: tuple[NDArray[Any], list[int], int], chunk_ids: int, threads: int
) -> None:
    """Read-only, strided and unaligned input counts alike, wherever chunks cut samples."""
    routes_NLK, offsets_S1, experts = recording
    expected = slow_outcome(*recording)
    with mock.patch.object(counting, "CHUNK_IDS", chunk_ids):
        for name, other in layouts(routes_NLK, bytearray()).items():
            assert outcome(other, offsets_S1, experts, threads=threads) == expected, name


@pytest.mark.parametrize("top_k", range(2, 17))
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_every_pair_of_a_row_is_compared(top_k: int, dtype: str) -> None:
    """A repeat at any two positions of a row is found, in the first and in the last row."""
    offsets_S1 = [0, 1, 40]
    rows_NLK = np.tile(np.arange(top_k, dtype=dtype), (40, 3, 1))
    for late in range(1, top_k):
        for early in range(late):
            for t, layer in ((0, 0), (39, 2)):
                routes_NLK = rows_NLK.copy()
                routes_NLK[t, layer, late] = early
                expected = (
                    f"routes[{t}, {layer}, {late}] = {early}:"
                    f" expected {top_k} distinct experts in a token row, it repeats"
                )
                assert outcome(routes_NLK, offsets_S1, top_k) == expected


@st.composite
def long_recordings(draw: st.DrawFn) -> tuple[NDArray[Any], int]:
    """uint8 routes of 8 ids a row around the sizes at which the faster kernel cuts, and E."""
    rows = draw(st.sampled_from([1, 7, 8, 9, 247, 248, 249, 256, 497, 600]))
    layers = draw(st.sampled_from([1, 2, 3, 4, 5, 61, 64, 65, 67]))
    experts = draw(st.sampled_from([8, 13, 63, 64, 65, 127, 128, 129, 160, 255, 256]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    pool = valid_routes(rng, (layers + 16, 1, 8), experts, np.dtype(np.uint8))[:, 0]
    return pool[rng.integers(0, len(pool), (rows, layers))], experts


@given(long_recordings(), st.data())
def test_long_samples_equal_bincount(recording: tuple[NDArray[Any], int], data: Any) -> None:
    """Counts are those of `numpy.bincount`, and any one wrong id in any place is found."""
    routes_NLK, experts = recording
    rows, layers, _ = routes_NLK.shape
    offsets_S1 = np.array([0, data.draw(st.integers(0, rows)), rows])
    demand_SLE = count_routes(routes_NLK, offsets_S1, experts)
    for s, (start, stop) in enumerate(pairwise(offsets_S1)):
        for layer in range(layers):
            ids = routes_NLK[start:stop, layer].ravel()
            assert np.array_equal(demand_SLE[s, layer], np.bincount(ids, minlength=experts))
    row, layer, k = (data.draw(st.integers(0, size - 1)) for size in routes_NLK.shape)
    if experts < 256 and data.draw(st.booleans()):
        routes_NLK[row, layer, k] = data.draw(st.integers(experts, 255))
        expected = f"an expert id in 0..{experts - 1}"
    else:
        routes_NLK[row, layer, k] = routes_NLK[row, layer, k - 1]
        k = k or 7  # the later one of the two is the repeat
        expected = "8 distinct experts in a token row, it repeats"
    assert message(routes_NLK, offsets_S1, experts) == (
        f"routes[{row}, {layer}, {k}] = {routes_NLK[row, layer, k]}: expected {expected}"
    )


def test_longest_sample_of_the_faster_kernel() -> None:
    """The highest count of 16 bits, and one row more."""
    for rows in (65535, 65536):
        routes_NLK = np.tile(np.arange(8, dtype=np.uint8), (rows, 1, 1))
        assert count_routes(routes_NLK, np.array([0, rows]), 9).tolist() == [[[rows] * 8 + [0]]]


def test_equal_ids_in_neighbouring_rows_are_no_repeat() -> None:
    """Only ids of the same token and layer must differ."""
    routes_NLK = np.tile(np.array([5, 2, 7], np.uint8), (300, 2, 1))
    demand_SLE = count_routes(routes_NLK, np.array([0, 300]), 8)
    assert demand_SLE[0].tolist() == [[0, 0, 300, 0, 0, 300, 0, 300]] * 2


@pytest.mark.parametrize("threads", range(1, 9))
def test_reported_error_is_the_same_on_any_number_of_threads(threads: int) -> None:
    """Of violations in several samples the one of the lowest token row is reported."""
    routes_NLK = valid_routes(np.random.default_rng(3), (800, 3, 4), 16, np.dtype(np.int32))
    routes_NLK[799, 0, 0] = 16
    routes_NLK[420, 1, 3] = routes_NLK[420, 1, 1]
    routes_NLK[421, 0, 0] = -1
    offsets_S1 = np.arange(0, 801, 10)
    assert message(routes_NLK, offsets_S1, 16, threads=threads) == (
        f"routes[420, 1, 3] = {routes_NLK[420, 1, 1]}:"
        " expected 4 distinct experts in a token row, it repeats"
    )


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_threads_do_not_change_the_result(threads: int) -> None:
    """Samples of very different lengths, some empty, and more threads than samples."""
    routes_NLK = valid_routes(np.random.default_rng(4), (500, 3, 8), 40, np.dtype(np.uint8))
    offsets_S1 = np.array([0, 0, 3, 400, 400, 400, 401, 500, 500])
    demand_SLE = count_routes(routes_NLK, offsets_S1, 40, threads=threads)
    assert np.array_equal(demand_SLE, count_routes(routes_NLK, offsets_S1, 40))
    assert demand_SLE.sum(axis=2).tolist() == [[8 * n] * 3 for n in np.diff(offsets_S1)]


@pytest.mark.parametrize(
    ("rows", "dtype"), [(65535, np.uint16), (65536, np.uint32), (70000, np.uint32)]
)
@pytest.mark.parametrize("id_type", ID_TYPES, ids=str)
def test_counts_do_not_overflow(rows: int, dtype: type, id_type: np.dtype[Any]) -> None:
    """uint16 while the longest sample is below 65536 token rows, else uint32."""
    routes_NLK = np.full((rows + 1, 1, 1), 1, id_type)
    demand_SLE = count_routes(routes_NLK, np.array([0, rows, rows + 1]), 2)
    assert demand_SLE.dtype == dtype
    assert demand_SLE.tolist() == [[[0, rows]], [[0, 1]]]


@pytest.mark.parametrize("dtype", [t for t in ID_TYPES if t != np.uint8], ids=str)
def test_many_experts(dtype: np.dtype[Any]) -> None:
    """Ids up to the highest that the type and 65535 experts allow; the next one is refused."""
    highest = min(65534, int(np.iinfo(dtype).max))
    routes_NLK = np.array([[[highest, 0]], [[1, highest]]], dtype)
    demand_SLE = count_routes(routes_NLK, np.array([0, 2]), 65535)
    assert np.flatnonzero(demand_SLE[0, 0]).tolist() == [0, 1, highest]
    assert demand_SLE[0, 0, highest] == 2
    assert message(routes_NLK, np.array([0, 2]), highest) == (
        f"routes[0, 0, 0] = {highest}: expected an expert id in 0..{highest - 1}"
    )


def test_memory_mapped(tmp_path: Path) -> None:
    """A file mapped read-only is counted in place."""
    routes_NLK = valid_routes(np.random.default_rng(5), (300, 4, 6), 300, np.dtype(np.int16))
    np.save(tmp_path / "routes.npy", routes_NLK)
    mapped = np.load(tmp_path / "routes.npy", mmap_mode="r")
    offsets_S1 = np.array([0, 100, 300])
    offsets_S1.flags.writeable = False
    demand_SLE = count_routes(mapped, offsets_S1, 300)
    assert np.array_equal(demand_SLE, count_routes(routes_NLK, offsets_S1, 300))
    mapped._mmap.close()


@pytest.mark.parametrize("dtype", ID_TYPES, ids=str)
@pytest.mark.parametrize("contiguous", [True, False])
def test_extra_memory_is_bounded(dtype: np.dtype[Any], contiguous: bool) -> None:
    """The input is never copied as a whole: at most the output and a chunk in 16 bits."""
    shape = (8 * CHUNK_IDS // 32, 4, 8) if contiguous else (4, 8 * CHUNK_IDS // 32, 8)
    routes_NLK = np.tile(np.arange(8, dtype=dtype), (*shape[:2], 1))
    if not contiguous:
        routes_NLK = routes_NLK.transpose(1, 0, 2)
    offsets_S1 = np.array([0, routes_NLK.shape[0]])
    tracemalloc.start()
    try:
        demand_SLE = count_routes(routes_NLK, offsets_S1, 128)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    in_place = contiguous and dtype.itemsize <= 2
    scratch_bytes = 2**15 + (0 if in_place else 2 * CHUNK_IDS)
    assert peak_bytes <= demand_SLE.nbytes + scratch_bytes


def test_no_samples_and_no_rows() -> None:
    """A window without samples, and samples that recorded nothing at all."""
    empty_NLK = np.zeros((0, 2, 2), np.uint8)
    assert count_routes(empty_NLK, np.array([0]), 4).shape == (0, 2, 4)
    assert (
        count_routes(empty_NLK, np.array([0, 0, 0]), 4, threads=3).tolist()
        == [[[0, 0, 0, 0]] * 2] * 2
    )


@pytest.mark.parametrize(
    ("routes_NLK", "expected"),
    [
        (
            ROUTES_NLK.astype(np.float32),
            "routes.dtype = float32: expected one of uint8, uint16, int16, int32, int64",
        ),
        (
            ROUTES_NLK.astype(bool),
            "routes.dtype = bool: expected one of uint8, uint16, int16, int32, int64",
        ),
        (
            ROUTES_NLK.astype(np.int32).astype(np.dtype(np.int32).newbyteorder()),
            "routes.dtype = >i4: expected one of uint8, uint16, int16, int32, int64",
        ),
        (
            ROUTES_NLK[0],
            "routes.shape = (2, 2): expected (N, L, K) with at least 1 layer and 1 expert",
        ),
        (
            ROUTES_NLK[:, :0],
            "routes.shape = (4, 0, 2): expected (N, L, K) with at least 1 layer and 1 expert",
        ),
        (
            np.zeros((4, 1, 5), np.uint8),
            "routes.shape = (4, 1, 5): expected (N, L, K) with K of at most E = 4",
        ),
    ],
)
def test_refuses_routes(routes_NLK: NDArray[Any], expected: str) -> None:
    """Types and shapes that are no recorded routes."""
    assert message(routes_NLK, np.array([0, 4]), 4) == expected


@pytest.mark.parametrize(
    ("offsets_S1", "expected"),
    [
        (np.array([0.0, 4.0]), "offsets.dtype = float64: expected int64"),
        (np.array([0, 4], np.int32), "offsets.dtype = int32: expected int64"),
        (np.array([[0, 4]]), "offsets.shape = (1, 2): expected (S + 1,)"),
        (np.array([], np.int64), "offsets.shape = (0,): expected (S + 1,)"),
        (np.array([1, 4]), "offsets[0] = 1: expected 0, the first token row"),
        (np.array([-1, 4]), "offsets[0] = -1: expected 0, the first token row"),
        (np.array([0, 3, 2, 4]), "offsets[2] = 2: expected at least offsets[1] = 3"),
        (np.array([0, 3]), "offsets[1] = 3: expected 4, the number of token rows in routes"),
        (np.array([0, 3, 5]), "offsets[2] = 5: expected 4, the number of token rows in routes"),
        (np.array([0]), "offsets[0] = 0: expected 4, the number of token rows in routes"),
    ],
)
def test_refuses_offsets(offsets_S1: NDArray[Any], expected: str) -> None:
    """Offsets must be int64 and rise from 0 to N."""
    assert message(ROUTES_NLK, offsets_S1, 4) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_experts": 0}, "num_experts = 0: expected a whole number in 1..65535"),
        ({"num_experts": 65536}, "num_experts = 65536: expected a whole number in 1..65535"),
        ({"num_experts": 4.0}, "num_experts = 4.0: expected a whole number in 1..65535"),
        ({"num_experts": True}, "num_experts = True: expected a whole number in 1..65535"),
        ({"threads": 0}, "threads = 0: expected a whole number in 1..1024"),
        ({"threads": None}, "threads = None: expected a whole number in 1..1024"),
    ],
)
def test_refuses_numbers(options: dict[str, Any], expected: str) -> None:
    """The number of experts and of threads."""
    assert message(ROUTES_NLK, np.array([0, 4]), **{"num_experts": 4, **options}) == expected


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_refuses_padding(dtype: type) -> None:
    """-1, as engines pad rows that were not recorded, is never counted."""
    routes_NLK = ROUTES_NLK.astype(dtype)
    routes_NLK[3] = -1
    assert message(routes_NLK, np.array([0, 4]), 4) == (
        "routes[3, 0, 0] = -1: expected an expert id in 0..3"
    )
