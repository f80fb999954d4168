"""Mutated payloads: what is accepted means what the reference says, what is not is named.

A payload is drawn for an engine, then broken in zero to three places: ids, rows, layers, types,
lengths, and, where an engine sends text or bytes, those.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from ingest import reference
from ingest.helpers import distinct, is_named, said
from ingest.reference import Meaning, Model, Refused
from routepack.errors import InputError
from routepack.ingest import (
    RouteSpec,
    SampleRoutes,
    from_areal,
    from_nemo_rl,
    from_prime_rl,
    from_rows,
    from_segments,
    from_sglang,
    from_slime,
    from_verl_padded,
    from_vllm,
)

T = TypeVar("T")
Rows = NDArray[Any]
Outcome = list[Meaning] | str | None  # None: refused by name
MANY = 1_000_000
SOME = 20_000
MODELS = tuple(
    Model(experts, top_k, moe, every, zero, partial)
    for experts, top_k, zero in (
        (4, 2, None),
        (3, 1, None),
        (3, 1, "missing"),
        (3, 1, "routed"),
        (5, 3, None),
        (256, 2, None),
        (257, 2, None),
    )
    for moe, every in ((None, None), (None, 2), ((1, 2), None), ((0, 2), 4), ((0, 1), None))
    for partial in ("refuse", "missing")
)
TYPES = ("int64", "int32", "int16", "uint16", "uint8", "int8")


@cache
def spec_of(model: Model) -> RouteSpec:
    """The same model for the package."""
    return RouteSpec(
        model.num_experts,
        model.top_k,
        model.moe_layers,
        model.model_layers,
        model.zero_rows,  # type: ignore[arg-type]
        model.partial_rows,  # type: ignore[arg-type]
    )


@cache
def valid(model: Model, rows: int, every: bool) -> Rows:
    """[N, A, K] routes without holes."""
    axis = (model.axes or [2])[0 if every else -1]
    moe = reference.moe_positions(axis, model)
    rng = np.random.default_rng(rows)
    array = np.zeros((rows, axis, model.top_k), np.int64)
    array[:, moe] = distinct(rng, rows, len(moe), model.num_experts, model.top_k)
    return array


def below(rng: random.Random, size: int) -> int:
    """0..size-1, in a third of the time of randrange."""
    return int(rng.random() * size)


def pick(rng: random.Random, values: Sequence[T]) -> T:
    """One of the values."""
    return values[int(rng.random() * len(values))]


def broken(rng: random.Random, rows: Rows, model: Model) -> Rows:
    """The rows with one thing changed."""
    kind = below(rng, 9)
    n, a, k = (below(rng, size) if size else 0 for size in rows.shape)
    if kind == 6:
        return rows[: max(0, len(rows) - 1)]
    if kind == 7:
        return np.concatenate([rows, rows[:1]])
    if kind == 8:
        which = below(rng, 4)
        if which == 0:
            return rows[:, :-1]
        if which == 1:
            return np.concatenate([rows, rows[:, :1]], axis=1)
        return rows[:, :, :-1] if which == 2 else np.concatenate([rows, rows[:, :, :1]], axis=2)
    if not rows.size:
        return rows
    rows = rows.copy()
    if kind == 0:
        rows[n] = pick(rng, (0, -1))
    elif kind == 1:
        rows[n:] = pick(rng, (0, -1))
    elif kind == 2:
        rows[n, a] = pick(rng, (0, -1))
    elif kind == 3:
        rows[:, a] = pick(rng, (0, -1))
    else:
        e = model.num_experts
        rows[n, a, k] = pick(rng, (-1, 0, 1, e - 1, e, -2, 255, 256, 65535, 65536, 2**31 - 1))
    return rows


def typed(rng: random.Random, rows: Rows) -> Rows:
    """In one of the types, ids beyond it wrapped as a careless cast does; rarely no id type."""
    draw = rng.random()
    if draw < 0.01:
        return rows.astype(pick(rng, ("float32", "bool", "uint32", "uint64", ">i4")))
    return rows.astype(pick(rng, TYPES)) if draw < 0.5 else rows


def as_type(rows: Rows, name: str) -> Rows:
    """In that type, wrapped as a careless cast does, floats too."""
    return np.ascontiguousarray(rows).astype(np.int64).astype(name)


def drawn(rng: random.Random) -> tuple[Model, Rows, Any, Any]:
    """A model, rows, length and start."""
    model = pick(rng, MODELS)
    rows = valid(model, below(rng, 5), rng.random() < 0.5)
    length, start = len(rows) + below(rng, 2), 0
    for _ in range(pick(rng, (0, 1, 1, 2, 3))):
        rows = broken(rng, rows, model)
    if rng.random() < 0.3:
        length += pick(rng, (-1, 1, 2))
    if rng.random() < 0.2:
        start = pick(rng, (0, 1, 2, -1))
        length += start
    return model, typed(rng, rows), length, start


def damaged(rng: random.Random, text: str) -> str:
    """Now and then with a character lost, doubled or replaced."""
    if rng.random() < 0.8 or not text:
        return text
    at = below(rng, len(text))
    return text[:at] + pick(rng, ("", text[at] * 2, "!", "A", "\xe9", "-1")) + text[at + 1 :]


def as_rows(rng: random.Random) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """One array of rows, of slime or of any engine."""
    model, rows, length, start = drawn(rng)
    if rng.random() < 0.3:
        return (
            lambda: from_slime(rows, length, spec_of(model)),
            lambda: reference.of_slime(rows, length, model),
        )
    return (
        lambda: from_rows(rows, length, spec_of(model), start=start),
        lambda: reference.of_rows(rows, length, model, start),
    )


def as_vllm(rng: random.Random) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Prompt and completion apart."""
    model, rows, length, start = drawn(rng)
    cut = below(rng, len(rows) + 1)
    prompt, routed = rows[:cut], rows[cut:]
    if rng.random() < 0.1:
        routed = typed(rng, broken(rng, valid(model, len(routed), rng.random() < 0.5), model))
    return (
        lambda: from_vllm(
            routed, length, spec_of(model), prompt_routed_experts=prompt, start=start
        ),
        lambda: reference.of_vllm(prompt, routed, length, model, start),
    )


def as_segments(rng: random.Random) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Two segments that may overlap or leave a gap."""
    model, rows, length, start = drawn(rng)
    cut = below(rng, len(rows) + 1)
    begin = max(0, cut - pick(rng, (0, 0, 1, 2)))
    segments = [(start, rows[:cut]), (begin + pick(rng, (0, 0, 0, 1)), rows[begin:])]
    return (
        lambda: from_segments(segments, length, spec_of(model)),
        lambda: reference.of_segments(segments, length, model),
    )


def as_sglang(rng: random.Random) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Base64 with its type."""
    model, rows, length, start = drawn(rng)
    name = pick(rng, ("int32", "int32", "uint16", "uint8"))
    data = as_type(rows, name).tobytes()
    meta = {"routed_experts": damaged(rng, base64.b64encode(data).decode())}
    if name != "int32" or rng.random() < 0.5:
        meta["routed_experts_dtype"] = name if rng.random() < 0.95 else "float32"
    if start:
        meta["routed_experts_start_len"] = start
    return (
        lambda: from_sglang(meta, length, spec_of(model)),
        lambda: reference.of_sglang(meta, length, model),
    )


def as_nemo_rl(rng: random.Random) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Padded rows, as an array or an envelope."""
    model, rows, length, _ = drawn(rng)
    payload: Any = rows
    if rng.random() < 0.5:
        name = pick(rng, ("int8", "int16", "int32"))
        sizes = "x".join(map(str, rows.shape))
        text = base64.b64encode(as_type(rows, name).tobytes()).decode()
        payload = damaged(rng, f"nrlre1:{name}:{sizes}:{text}")
    return (
        lambda: from_nemo_rl(payload, length, spec_of(model)),
        lambda: reference.of_nemo_rl(payload, length, model),
    )


def as_prime_rl(rng: random.Random) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Bytes or base64 with shape, type and start."""
    model, rows, length, start = drawn(rng)
    data: Any = np.ascontiguousarray(rows).tobytes()
    shape: list[Any] = list(rows.shape)
    name = str(rows.dtype)
    draw = rng.random()
    if draw < 0.1:
        data = data[:-1]
    elif draw < 0.2:
        shape[below(rng, 3)] += pick(rng, (-1, 1))
    elif draw < 0.3:
        name = pick(rng, ("uint8", "uint16", "int32", "float16"))
    elif draw < 0.4:
        data = damaged(rng, base64.b64encode(data).decode())
    payload = {"data": data, "shape": shape, "dtype": name}
    if start:
        payload["start"] = start
    return (
        lambda: from_prime_rl(payload, length, spec_of(model)),
        lambda: reference.of_prime_rl(payload, length, model),
    )


def as_areal(rng: random.Random) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Layers and experts in one axis, perhaps of two attempts."""
    model, rows, length, _ = drawn(rng)
    ends = None
    if rng.random() < 0.4:
        first = 1 + below(rng, max(1, length))
        rows = np.concatenate([rows[: first - 1], rows])
        ends = [first, length + pick(rng, (0, 0, 0, 1))]
    flat = rows.reshape(len(rows), rows.shape[1] * rows.shape[2])
    return (
        lambda: from_areal(flat, length, spec_of(model), segment_ends=ends),
        lambda: reference.of_areal(flat, length, model, ends),
    )


def as_padded(rng: random.Random) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A batch of one or two samples with a mask."""
    model, rows, _, _ = drawn(rng)
    batch = np.stack([rows, rows[::-1]][: pick(rng, (1, 2))])
    mask = np.ones(batch.shape[:2], np.int64)
    for _ in range(below(rng, 3)):
        if mask.size:
            mask[below(rng, len(mask)), below(rng, mask.shape[1])] = 0
    if rng.random() < 0.05:
        mask = mask[:, :-1]
    return (
        lambda: list(from_verl_padded(batch, mask, spec_of(model))),
        lambda: reference.of_padded(batch, mask, model),
    )


FORMS = (
    *(as_rows,) * 6,
    *(as_vllm,) * 2,
    *(as_sglang,) * 2,
    *(as_nemo_rl,) * 2,
    *(as_prime_rl,) * 2,
    *(as_areal, as_segments, as_padded),
)


def outcome(read: Callable[[], Any]) -> Outcome:
    """What the package makes of a payload; its refusals must be named."""
    try:
        samples = read()
    except InputError as error:
        return None if is_named(str(error)) else str(error)
    return [
        said(sample) for sample in ([samples] if isinstance(samples, SampleRoutes) else samples)
    ]


def due(read: Callable[[], Any]) -> Outcome:
    """What the reference makes of it."""
    try:
        samples = read()
    except Refused:
        return None
    return [samples] if isinstance(samples, Meaning) else list(samples)


def fuzz(seed: int, payloads: int) -> dict[str, list[int]]:
    """Check that many payloads; how many of each form were accepted and refused."""
    rng = random.Random(seed)
    seen = {form.__name__: [0, 0] for form in FORMS}
    for i in range(payloads):
        form = pick(rng, FORMS)
        read, read_slowly = form(rng)
        expected = due(read_slowly)
        assert outcome(read) == expected, f"seed {seed}, payload {i}, {form.__name__}"
        seen[form.__name__][expected is None] += 1
    return seen


def test_some_mutated_payloads() -> None:
    """Each is refused by name, or equal to the reference; both happen in every form."""
    seen = fuzz(0, SOME)
    assert all(min(counts) > SOME / 100 for counts in seen.values()), seen


@pytest.mark.slow
def test_a_million_mutated_payloads() -> None:
    """The same, and many more."""
    seen = fuzz(random.SystemRandom().randrange(2**32), MANY)
    assert all(min(counts) > MANY / 100 for counts in seen.values()), seen
