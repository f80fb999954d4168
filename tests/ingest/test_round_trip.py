"""Any routes that an engine can hold come back as they were, and count as the reference counts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ingest.helpers import b64, distinct, npy, said, spec_of
from ingest.reference import Model, of_rows
from routepack.ingest import (
    RouteSpec,
    SampleRoutes,
    from_areal,
    from_megatron_trace,
    from_miles,
    from_nemo_rl,
    from_prime_rl,
    from_rows,
    from_segments,
    from_sglang,
    from_slime,
    from_verl,
    from_verl_jagged,
    from_verl_padded,
    from_vllm,
)

Rows = NDArray[Any]


@st.composite
def models(draw: st.DrawFn) -> Model:
    """1 to 4 MoE layers among up to 7, up to 300 experts."""
    experts = draw(st.sampled_from([2, 3, 8, 256, 257, 300]))
    layers = sorted(draw(st.sets(st.integers(0, 6), min_size=1, max_size=4)))
    every = draw(st.sampled_from([None, 7]))
    return Model(experts, draw(st.integers(1, min(experts - 1, 9))), tuple(layers), every)


@st.composite
def recordings(draw: st.DrawFn) -> tuple[Model, Rows, int]:
    """Rows [N, A, K] of all layers or MoE layers, some of them holes, and T = N + 1."""
    model = draw(models())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tokens = draw(st.integers(2, 30))
    assert model.moe_layers is not None
    moe = distinct(rng, tokens - 1, len(model.moe_layers), model.num_experts, model.top_k)
    fill = -1 if model.top_k == 1 else draw(st.sampled_from([0, -1]))
    moe[rng.random(tokens - 1) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = fill
    rows = moe
    if draw(st.booleans()):
        rows = np.zeros((tokens - 1, model.axes[0], model.top_k), np.int64)
        rows[:, list(model.moe_layers)] = moe
    if fill == 0 and model.num_experts > 256:
        return model, rows.astype(draw(st.sampled_from(["uint16", "int16", "int32"]))), tokens
    if fill == 0:
        return model, rows.astype(draw(st.sampled_from(["uint8", "uint16", "int64"]))), tokens
    return model, rows.astype(draw(st.sampled_from(["int16", "int32", "int64"]))), tokens


def halves(rows: Rows, tokens: int, spec: RouteSpec) -> SampleRoutes:
    """As prompt and completion of vLLM."""
    cut = len(rows) // 2
    return from_vllm(rows[cut:], tokens, spec, prompt_routed_experts=rows[:cut])


def turns(rows: Rows, tokens: int, spec: RouteSpec) -> SampleRoutes:
    """As two segments without overlap."""
    cut = len(rows) // 2
    return from_segments([(0, rows[:cut]), (cut, rows[cut:])], tokens, spec)


def padded(rows: Rows, tokens: int, spec: RouteSpec) -> SampleRoutes:
    """As the only sample of a batch of verl, padding cut off again."""
    batch = np.zeros((1, tokens + 5, *rows.shape[1:]), rows.dtype)
    mask = np.zeros((1, tokens + 5), np.int64)
    batch[0, 2 : 2 + len(rows)], mask[0, 2 : 2 + tokens] = rows, 1
    if spec.top_k == 1:
        batch[0, 1 + tokens] = -1  # the last token: zeros would need zero_rows
    (sample,) = from_verl_padded(batch, mask, spec)
    assert (sample.padding, sample.provenance_T[:2].tolist()) == (5, [2, 2])
    inner = sample.provenance_T[2 : 2 + tokens]
    return SampleRoutes(sample.captured_NLK, inner, sample.demand_LE)


def jagged(rows: Rows, tokens: int, spec: RouteSpec) -> SampleRoutes:
    """As the second of two samples of a jagged batch."""
    both = np.concatenate([rows, rows])
    offsets = np.array([0, len(rows), 2 * len(rows)])
    return list(from_verl_jagged(both, offsets, spec, lengths=[tokens, tokens]))[1]


def wire(rows: Rows) -> Rows:
    """In a type that SGLang and NeMo-RL send."""
    return rows.astype(np.int32)


def envelope(rows: Rows) -> str:
    """As NeMo-RL sends rows."""
    return f"nrlre1:int32:{'x'.join(map(str, rows.shape))}:{b64(wire(rows))}"


FORMS: dict[str, Callable[[Rows, int, RouteSpec], SampleRoutes]] = {
    "rows": from_rows,
    "lists": lambda rows, tokens, spec: from_rows(rows.tolist(), tokens, spec),
    "vllm": from_vllm,
    "vllm npy": lambda rows, tokens, spec: from_vllm(npy(rows), tokens, spec),
    "vllm halves": halves,
    "sglang": lambda rows, tokens, spec: from_sglang(b64(wire(rows)), tokens, spec),
    "segments": turns,
    "verl": from_verl,
    "verl padded": padded,
    "verl jagged": jagged,
    "slime": from_slime,
    "miles": from_miles,
    "nemo-rl": from_nemo_rl,
    "nemo-rl envelope": lambda rows, tokens, spec: from_nemo_rl(envelope(rows), tokens, spec),
    "prime-rl": lambda rows, tokens, spec: from_prime_rl(
        SimpleNamespace(data=rows.tobytes(), shape=list(rows.shape), dtype=str(rows.dtype)),
        tokens,
        spec,
    ),
    "areal": lambda rows, tokens, spec: from_areal(rows.reshape(len(rows), -1), tokens, spec),
}


@pytest.mark.parametrize("form", FORMS)
@given(recordings())
def test_round_trip(form: str, recording: tuple[Model, Rows, int]) -> None:
    """Written as `form` and read again: the same ids, provenance and demand."""
    model, rows, tokens = recording
    sample = FORMS[form](rows, tokens, spec_of(model))
    assert said(sample) == of_rows(rows, tokens, model)
    kept = sample.provenance_T == 0
    assert np.array_equal(sample.routes_TLK[kept], sample.captured_NLK)
    assert not sample.routes_TLK[~kept].any()


@given(recordings(), st.integers(1, 4))
def test_suffix(recording: tuple[Model, Rows, int], start: int) -> None:
    """Rows from `start` on of a longer sample: what is before is missing, the rest the same."""
    model, rows, tokens = recording
    sample = from_rows(rows, tokens + start, spec_of(model), start=start)
    expected = of_rows(rows, tokens, model)
    expected.provenance = [1] * start + expected.provenance
    assert said(sample) == expected


@given(recordings())
def test_trace(recording: tuple[Model, Rows, int]) -> None:
    """Megatron's records of a micro-batch, which has no holes and MoE layers only."""
    model, rows, _ = recording
    assert model.moe_layers is not None
    rng = np.random.default_rng(len(rows))
    rows = distinct(rng, len(rows), len(model.moe_layers), model.num_experts, model.top_k)
    records = [
        {
            "step": 3,
            "rank": 0,
            "layer": layer,
            "num_tokens": len(rows),
            "topk": model.top_k,
            "top_indices": rows[:, i].tolist(),
        }
        for i, layer in enumerate(model.moe_layers)
    ]
    (sample,) = from_megatron_trace(records, spec_of(model))
    assert said(sample) == of_rows(rows, len(rows), model)


@given(recordings())
def test_layouts_in_memory(recording: tuple[Model, Rows, int]) -> None:
    """Read-only, strided, reversed and unaligned arrays read alike."""
    model, rows, tokens = recording
    expected = of_rows(rows, tokens, model)
    wide = np.zeros((2 * len(rows), *rows.shape[1:]), rows.dtype)
    wide[::2] = rows
    buffer = b"\0" + rows.tobytes()
    for other in (
        np.frombuffer(rows.tobytes(), rows.dtype).reshape(rows.shape),
        np.frombuffer(buffer, rows.dtype, offset=1).reshape(rows.shape),
        np.asfortranarray(rows),
        wide[::2],
        rows[::-1].copy()[::-1],
    ):
        assert said(from_rows(other, tokens, spec_of(model))) == expected
