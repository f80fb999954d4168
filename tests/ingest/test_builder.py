"""The window builder: counts on arrival, order, groups, threads and the summary."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ingest.helpers import MOE, SPEC, distinct, refusal
from routepack import Window
from routepack.ingest import (
    RouteSpec,
    WindowBuilder,
    from_nemo_rl,
    from_rows,
    from_segments,
    without_routes,
)


def test_by_hand() -> None:
    """Three samples with a missing last token, a hole, and padding; a fourth without routes."""
    holes = MOE.copy()
    holes[1] = -1
    builder = WindowBuilder(SPEC, model="tiny", source="by hand")
    assert builder.add(from_rows(MOE[:3], 4, SPEC), group=5) == 0
    assert builder.add(from_rows(holes, 4, SPEC), group=5) == 1
    assert builder.add(from_nemo_rl(MOE, 2, SPEC), group=6) == 2
    assert builder.add(without_routes(3, SPEC), group=6) == 3
    window = builder.finish()
    assert window.lengths_S.tolist() == [4, 4, 2, 3]
    assert window.missing_S.tolist() == [1, 1, 1, 3]
    assert window.group_S is not None
    assert window.group_S.tolist() == [5, 5, 6, 6]
    assert (window.moe_layers, window.model, window.source) == ((1, 2), "tiny", "by hand")
    assert window.demand_SLE.dtype == np.uint16
    assert window.demand_SLE.tolist() == [
        [[2, 2, 1, 1], [1, 1, 2, 2]],
        [[2, 1, 1, 2], [1, 2, 2, 1]],
        [[1, 1, 0, 0], [0, 0, 1, 1]],
        [[0, 0, 0, 0], [0, 0, 0, 0]],
    ]
    assert builder.summary() == {
        "samples": 4,
        "samples_without_routes": 1,
        "tokens": 13,
        "captured_rows": 7,
        "missing_rows": 6,
        "missing_last_rows": 3,
        "partial_rows": 0,
        "padding_rows": 2,
        "duplicate_rows": 0,
    }


def test_summary_counts_what_was_dropped() -> None:
    """Rows recorded twice, and rows with routes at some layers only."""
    spec = RouteSpec(4, 2, (1, 2), partial_rows="missing")
    partial = MOE.copy()
    partial[0, 1] = 0
    builder = WindowBuilder(spec)
    builder.add(from_segments([(0, MOE[:3]), (1, MOE[1:3])], 4, spec))
    builder.add(from_rows(partial, 4, spec))
    summary = builder.summary()
    assert (summary["duplicate_rows"], summary["partial_rows"]) == (2, 1)
    assert (summary["captured_rows"], summary["missing_rows"]) == (6, 2)
    assert builder.finish().missing_S.tolist() == [1, 1]


def test_routes_are_dropped() -> None:
    """After `add` nothing holds the payload any more."""
    builder = WindowBuilder(RouteSpec(4, 2))
    payload = MOE.astype(np.uint8)
    alive = weakref.ref(payload)
    builder.add(from_rows(payload, 4, builder.spec))
    del payload
    gc.collect()
    assert alive() is None


def test_many_tokens() -> None:
    """A sample of 70,000 tokens next to a short one: 32-bit counts."""
    spec = RouteSpec(3, 1, zero_rows="routed")
    builder = WindowBuilder(spec)
    builder.add(from_rows(np.zeros((70_000, 1, 1), np.uint8), 70_000, spec))
    builder.add(from_rows(np.full((2, 1, 1), 2, np.uint8), 2, spec))
    window = builder.finish()
    assert window.demand_SLE.dtype == np.uint32
    assert window.demand_SLE.tolist() == [[[70_000, 0, 0]], [[0, 0, 2]]]


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=40),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_threads_do_not_change_the_window(lengths: list[int], threads: int, seed: int) -> None:
    """`add_all` gives the window of Window.from_routes, on any number of threads."""
    rng = np.random.default_rng(seed)
    samples = [distinct(rng, n, 2, 5, 3).astype(np.uint8) for n in lengths]
    spec = RouteSpec(5, 3)

    def read(rows: NDArray[Any]) -> Any:
        return from_rows(rows, len(rows), spec)

    builder = WindowBuilder(spec)
    labels = [{"group": i, "tag": i % 2, "step": i % 3} for i in range(len(samples))]
    builder.add_all(read, samples, labels=labels, threads=threads)
    window = builder.finish()
    index = np.arange(len(lengths))
    expected = Window.from_routes(
        lengths,
        np.concatenate(samples),
        np.cumsum([0, *lengths]),
        5,
        group_S=index,
        tag_S=index % 2,
        step_S=index % 3,
    )
    assert window.sha256 == expected.sha256


def test_refusals() -> None:
    """Samples of another model, groups for some samples only, nothing at all, bad payloads."""
    builder = WindowBuilder(SPEC)
    assert refusal(builder.finish) == ("lengths: expected at least 1 sample, the window has none")
    builder.add(from_rows(MOE, 4, SPEC))
    other = from_rows(MOE[:, :1], 4, RouteSpec(4, 2))
    assert refusal(builder.add, other) == (
        "demand.shape[1] = (1, 4): expected (2, 4), as of the samples before"
    )
    builder.add(from_rows(MOE, 4, SPEC), group=1)
    assert refusal(builder.finish) == (
        "group[0] = None: expected a group, as other samples have one"
    )
    assert refusal(builder.add_all, None, [], threads=0) == (
        "threads = 0: expected a whole number in 1..1024"
    )
    payloads = [MOE, MOE[:1], MOE]
    message = refusal(
        builder.add_all, lambda rows: from_rows(rows, 4, SPEC), payloads, labels=[{"group": 1}] * 3
    )
    assert message == "routes.shape = (1, 2, 2): expected 3 or 4 token rows for length 4, start 0"
    assert builder.summary()["samples"] == 3


@pytest.mark.parametrize("missing", [0, 1])
def test_same_as_counting_at_once(missing: int) -> None:
    """512 short samples: the builder's window equals that of all routes counted in one call."""
    rng = np.random.default_rng(missing)
    lengths = rng.integers(2, 30, 512)
    rows = [distinct(rng, int(n) - missing, 3, 16, 4) for n in lengths]
    builder = WindowBuilder(RouteSpec(16, 4))
    for own, length in zip(rows, lengths, strict=True):
        builder.add(from_rows(own.astype(np.int32), length, builder.spec))
    expected = Window.from_routes(
        lengths,
        np.concatenate(rows),
        np.cumsum([0, *(lengths - missing)]),
        16,
        missing_S=np.full(512, missing),
    )
    assert builder.finish().sha256 == expected.sha256
