"""Every engine's payloads by hand: T, T-1 and suffix rows, layer axes, types and holes.

The sample, and the counts of its tokens, are in helpers.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ingest.helpers import ALL, DEMAND, MOE, SPEC, Tensor, b64, check, npy, refusal, trace
from routepack.ingest import (
    CAPTURED,
    MISSING,
    RouteSpec,
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
    from_vllm_output,
    without_routes,
)

AXES = pytest.mark.parametrize("every", [ALL, MOE], ids=["all layers", "MoE layers"])
TYPES = pytest.mark.parametrize("dtype", ["uint8", "uint16", "int8", "int16", "int32", "int64"])


@AXES
@TYPES
def test_rows(every: NDArray[Any], dtype: str) -> None:
    """T rows, T-1 rows and both kinds of suffix, in every type and layout of layers."""
    rows = every.astype(dtype)
    check(from_rows(rows, 4, SPEC), 0, 4)
    check(from_rows(rows[:3], 4, SPEC), 0, 3)
    check(from_rows(rows[2:], 4, SPEC, start=2), 2, 4)
    check(from_rows(rows[2:3], 4, SPEC, start=2), 2, 3)
    check(from_rows(Tensor(rows), 4, SPEC), 0, 4)
    check(from_rows(rows.tolist(), 4, SPEC), 0, 4)
    check(from_rows(np.asfortranarray(rows), 4, SPEC), 0, 4)


@AXES
@pytest.mark.parametrize("fill", [0, -1])
def test_rows_with_holes(every: NDArray[Any], fill: int) -> None:
    """A row of zeros or of -1 is missing at the front, within and at the end."""
    for first, last in ((0, 3), (1, 3), (2, 4)):
        rows = every.astype(np.int16)
        rows[:first] = rows[last:] = fill
        check(from_rows(rows, 4, SPEC), first, last)
    rows = every.copy()
    rows[1] = fill
    sample = from_rows(rows, 4, SPEC)
    assert sample.provenance_T.tolist() == [CAPTURED, MISSING, CAPTURED, CAPTURED]
    assert sample.demand_LE.tolist() == [[2, 1, 1, 2], [1, 2, 2, 1]]
    assert sample.routes_TLK.tolist() == [MOE[0].tolist(), [[0, 0]] * 2, *MOE[2:].tolist()]


def test_first_layer_of_zeros_is_no_hole() -> None:
    """A hole is empty at every MoE layer: a row with one layer of zeros is refused or dropped."""
    rows = MOE.copy()
    rows[2, 0] = 0
    assert refusal(from_rows, rows, 4, SPEC) == (
        "routes[2, 0] = [0, 0]: expected 2 experts, as other MoE layers of the token row have"
        " (moe_layers leaves out dense layers, partial_rows 'missing' such rows)"
    )
    dropping = RouteSpec(4, 2, (1, 2), partial_rows="missing")
    sample = from_rows(rows, 4, dropping)
    assert sample.provenance_T.tolist() == [CAPTURED, CAPTURED, MISSING, CAPTURED]
    assert sample.partial_rows == 1
    assert sample.demand_LE.tolist() == [[1, 2, 2, 1], [2, 1, 1, 2]]


def test_one_expert_per_token() -> None:
    """Zeros are expert 0 or nothing, as stated; only a row with zeros alone needs the statement."""
    rows = [[[1], [0]], [[0], [0]], [[2], [1]]]
    spec = RouteSpec(3, 1, (0, 1))
    assert refusal(from_rows, rows, 3, spec) == (
        "routes[1] = 0 at every MoE layer: expected zero_rows to say if that is 'routed' to"
        " expert 0 or 'missing', top_k is 1"
    )
    assert from_rows(rows[::2], 2, spec).demand_LE.tolist() == [[0, 1, 1], [1, 1, 0]]
    routed = from_rows(rows, 3, RouteSpec(3, 1, (0, 1), zero_rows="routed"))
    assert routed.demand_LE.tolist() == [[1, 1, 1], [2, 1, 0]]
    missing = from_rows(rows, 3, RouteSpec(3, 1, (0, 1), zero_rows="missing"))
    assert missing.provenance_T.tolist() == [CAPTURED, MISSING, CAPTURED]
    assert missing.demand_LE.tolist() == [[0, 1, 1], [1, 1, 0]]
    unrecorded = from_rows([[[-1], [-1]], [[2], [1]]], 2, spec)
    assert unrecorded.provenance_T.tolist() == [MISSING, CAPTURED]


@AXES
@pytest.mark.parametrize("dtype", ["int16", "int32", "uint8"])
def test_vllm(every: NDArray[Any], dtype: str) -> None:
    """One array of T-1 rows; prompt and completion apart; a skipped prefix; base64 .npy."""
    rows = every.astype(dtype)
    check(from_vllm(rows[:3], 4, SPEC), 0, 3)
    check(from_vllm(npy(rows[:3]), 4, SPEC), 0, 3)
    check(from_vllm(rows[2:3], 4, SPEC, start=2), 2, 3)
    for completion, last in ((rows[2:], 4), (rows[2:3], 3)):  # with and without the last token
        sample = from_vllm(
            completion, 4, SPEC, prompt_routed_experts=rows[:2].tolist(), prompt_tokens=2
        )
        check(sample, 0, last)
    check(from_vllm(None, 4, SPEC, prompt_routed_experts=rows[:3]), 0, 3)
    zero_prompt = np.zeros_like(rows[:2])  # what hybrid models return
    check(from_vllm(rows[2:], 4, SPEC, prompt_routed_experts=zero_prompt), 2, 4)


def test_vllm_outputs() -> None:
    """Objects and responses, old and new fields, one sample a completion."""
    old = SimpleNamespace(token_ids=[7, 8], routed_experts=ALL[:3].astype(np.int32))
    short = SimpleNamespace(token_ids=[], routed_experts=None)
    output = SimpleNamespace(prompt_token_ids=[5, 6], outputs=[old, short])
    first, second = from_vllm_output(output, SPEC)
    check(first, 0, 3)
    assert second.provenance_T.tolist() == [MISSING, MISSING]
    split = {
        "prompt_token_ids": [5, 6],
        "prompt_routed_experts": MOE[:2].tolist(),
        "choices": [{"token_ids": [7, 8], "routed_experts": MOE[2:3].tolist()}],
    }
    (sample,) = from_vllm_output(split, SPEC)
    check(sample, 0, 3)


@AXES
@pytest.mark.parametrize("dtype", [None, "int32", "uint16", "uint8"])
def test_sglang(every: NDArray[Any], dtype: str | None) -> None:
    """Base64 of T-1 rows, of all of them, and of a suffix, in every type of the wire."""
    rows = every.astype(dtype or "int32")
    extra = {} if dtype is None else {"routed_experts_dtype": dtype}

    def meta(part: NDArray[Any], **fields: Any) -> dict[str, Any]:
        return {"routed_experts": b64(part), **extra, **fields}

    check(from_sglang(meta(rows[:3]), 4, SPEC), 0, 3)
    check(from_sglang(meta(rows), 4, SPEC), 0, 4)
    check(from_sglang(meta(rows[2:3], routed_experts_start_len=2), 4, SPEC), 2, 3)
    check(from_sglang(b64(rows[2:]), 4, SPEC, start=2, dtype=dtype), 2, 4)
    check(from_sglang(rows[:3].tobytes(), 4, SPEC, dtype=dtype), 0, 3)
    check(from_sglang(Tensor(rows[:3]), 4, SPEC), 0, 3)  # skip_tokenizer_init


def test_sglang_prefers_all_layers() -> None:
    """Where both layouts fit the size, as 3 x 2 = 2 x 3 rows by layers, it is all layers, T-1."""
    spec = RouteSpec(4, 2, (1, 2))
    two_rows_of_three = ALL[:2].astype(np.int32)
    sample = from_sglang(b64(two_rows_of_three), 3, spec)
    assert sample.captured_NLK.tolist() == MOE[:2].tolist()


def test_segments() -> None:
    """A second turn replaces rows from its start on; the replaced ones are duplicates."""
    check(from_segments([(0, ALL[:2]), (2, ALL[2:3])], 4, SPEC), 0, 3)
    stale = ALL[:2].copy()
    stale[1] = ALL[3]
    sample = from_segments([(0, stale), (1, ALL[1:])], 4, SPEC)
    check(sample, 0, 4)
    assert sample.duplicate_rows == 1


@AXES
@pytest.mark.parametrize("dtype", ["int16", "uint8"])
def test_verl(every: NDArray[Any], dtype: str) -> None:
    """One row a token with zeros at the end, or T-1 rows; jagged; padded left and right."""
    rows = every.astype(dtype)
    aligned = rows.copy()
    aligned[3] = 0
    check(from_verl(aligned, 4, SPEC), 0, 3)
    check(from_verl(rows[:3], 4, SPEC), 0, 3)
    values = np.concatenate([aligned, rows[:3]])
    for sample in from_verl_jagged(values, [0, 4, 7], SPEC, lengths=[4, 4]):
        check(sample, 0, 3)
    own = SimpleNamespace(values=lambda: Tensor(aligned), offsets=lambda: Tensor(np.array([0, 4])))
    (sample,) = from_verl_jagged(own, None, SPEC)
    check(sample, 0, 3)
    padded = np.zeros((2, 7, *rows.shape[1:]), dtype)
    mask = np.zeros((2, 7), np.int64)
    padded[0, 1:4], mask[0, 1:5] = rows[:3], 1
    padded[1, 3:7], mask[1, 3:7] = rows, 1
    first, second = from_verl_padded(padded, Tensor(mask), SPEC)
    check(first, 0, 3, padding=(1, 2))
    check(second, 0, 4, padding=(3, 0))


@AXES
def test_slime_and_miles(every: NDArray[Any]) -> None:
    """Exactly T-1 rows; a row of -1 is missing, not experts 0 and 1."""
    check(from_slime(Tensor(every[:3]), 4, SPEC), 0, 3)
    rows = every[:3].astype(np.int32)
    check(from_miles(rows, 4, SPEC), 0, 3)
    rows[0] = -1
    check(from_miles(rows, 4, SPEC), 1, 3)
    assert refusal(from_slime, every, 4, SPEC) == (
        f"rollout_routed_experts.shape = {every.shape}:"
        " expected 3 token rows, one less than the 4 tokens"
    )


@AXES
@pytest.mark.parametrize("dtype", ["int8", "int16", "int32"])
def test_nemo_rl(every: NDArray[Any], dtype: str) -> None:
    """-1 is missing; 0..K-1 in the last token's row and in padding rows is a filler, not routes."""
    filler = np.broadcast_to(np.arange(2), (3, *every.shape[1:]))
    rows = np.concatenate([every[:3], filler]).astype(dtype)
    check(from_nemo_rl(rows, 4, SPEC), 0, 3, padding=(0, 2))
    check(from_nemo_rl(rows[:4], 4, SPEC), 0, 3)
    check(from_nemo_rl(rows[:3], 4, SPEC), 0, 3)
    sizes = "x".join(map(str, rows.shape))
    check(from_nemo_rl(f"nrlre1:{dtype}:{sizes}:{b64(rows)}", 4, SPEC), 0, 3, padding=(0, 2))
    rows[0] = -1
    check(from_nemo_rl(Tensor(rows), 4, SPEC), 1, 3, padding=(0, 2))


@AXES
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_prime_rl(every: NDArray[Any], dtype: str) -> None:
    """Bytes with shape and type, as object, mapping or list; a tail of zeros is missing."""
    rows = every.astype(dtype)
    rows[3] = 0
    shape = list(rows.shape)
    as_list = [rows.tobytes(), shape, dtype]
    check(from_prime_rl(as_list, 4, SPEC), 0, 3)
    fields = dict(zip(("data", "shape", "dtype"), as_list, strict=True))
    check(from_prime_rl(SimpleNamespace(**fields), 4, SPEC), 0, 3)
    suffix = {"data": b64(rows[2:3]), "shape": [1, *shape[1:]], "dtype": dtype, "start": 2}
    check(from_prime_rl(suffix, 4, SPEC), 2, 3)


@AXES
def test_areal(every: NDArray[Any]) -> None:
    """Layers and experts in one axis; joined attempts only with the tokens at each one's end."""
    flat = every.reshape(4, -1).astype(np.int32)
    check(from_areal(flat[:3], 4, SPEC), 0, 3)
    check(from_areal(flat, 4, SPEC), 0, 4)
    joined = np.concatenate([flat[:1], flat[:3]])  # aborted with 2 tokens known, then resumed
    sample = from_areal(joined, 4, SPEC, segment_ends=[2, 4])
    check(sample, 0, 3)
    assert sample.duplicate_rows == 1


def test_areal_joined_attempts_are_noticed() -> None:
    """Without the ends, rows that are too many; with wrong ends, rows that do not add up."""
    flat = MOE.reshape(4, -1)
    joined = np.concatenate([flat[:2], flat[:3]])
    assert refusal(from_areal, joined, 4, SPEC) == (
        "routed_experts.shape = (5, 2, 2): expected 3 or 4 token rows for length 4, start 0"
        " (recordings joined end to end: see from_segments)"
    )
    assert refusal(from_areal, joined, 4, SPEC, segment_ends=[2, 4]) == (
        "routed_experts.shape = (5, 2, 2):"
        " expected 4 token rows, one less than each of segment_ends [2, 4]"
    )


def test_megatron() -> None:
    """One sample a micro-batch and rank; MTP records are not layer 1; repeats are recomputing."""
    mtp = {**trace(MOE)[0], "block": "mtp", "mtp_idx": 0}
    records = [*trace(MOE), mtp, *trace(MOE[:3]), *trace(MOE, rank=1)]
    lines = [json.dumps(record) for record in records]
    first, second, other = from_megatron_trace(lines, SPEC)
    check(first, 0, 4)
    check(other, 0, 4)
    assert second.provenance_T.tolist() == [CAPTURED] * 3
    assert second.demand_LE.tolist() == DEMAND[0, 3]
    repeated = [*trace(MOE), *trace(MOE)]
    assert refusal(from_megatron_trace, repeated, SPEC) == (
        "rank 0 records[1] = a repeat: expected routes unlike those of the record before"
        " (recomputing: drop_repeats)"
    )
    (sample,) = from_megatron_trace(repeated, SPEC, drop_repeats=True)
    check(sample, 0, 4)
    assert sample.duplicate_rows == 4


def test_megatron_steps() -> None:
    """A trace with several steps needs one to be chosen."""
    records = [*trace(MOE[:2]), *trace(MOE, step=8)]
    assert refusal(from_megatron_trace, records, SPEC) == (
        "step[2] = 8: expected 7, as before: choose one step, a window holds no more"
    )
    (sample,) = from_megatron_trace(records, SPEC, step=8)
    check(sample, 0, 4)


def test_samples_without_routes() -> None:
    """No payload: every token is missing, in every reader."""
    readers = (from_vllm, from_sglang, from_verl, from_slime, from_miles, from_nemo_rl)
    for sample in (
        without_routes(4, SPEC),
        *(read(None, 4, SPEC) for read in (*readers, from_prime_rl, from_areal)),
    ):
        assert sample.provenance_T.tolist() == [MISSING] * 4
        assert sample.demand_LE.tolist() == [[0] * 4] * 2
        assert sample.captured_NLK.shape == (0, 2, 2)


def test_a_sample_of_one_token() -> None:
    """T-1 = 0 rows: an empty array, an empty list and an empty string."""
    for sample in (
        from_rows(ALL[:0], 1, SPEC),
        from_rows([], 1, SPEC),
        from_sglang({"routed_experts": ""}, 1, SPEC),
        from_slime([], 1, SPEC),
    ):
        assert sample.provenance_T.tolist() == [MISSING]
        assert sample.demand_LE.shape == (2, 4)


def test_many_experts() -> None:
    """Above 256 experts ids are uint16, whatever the payload's type."""
    rows = np.array([[[299, 256]], [[0, 1]]])
    for dtype in ("int16", "uint16", "int32", "int64"):
        sample = from_rows(rows.astype(dtype), 2, RouteSpec(300, 2))
        assert sample.captured_NLK.dtype == np.uint16
        assert np.argwhere(sample.demand_LE).tolist() == [[0, 0], [0, 1], [0, 256], [0, 299]]


def test_layers_between() -> None:
    """MoE layers that are not consecutive: every other layer of four."""
    spec = RouteSpec(4, 2, (1, 3))
    rows = np.zeros((4, 4, 2), np.int32)
    rows[:, 1::2] = MOE
    check(from_rows(rows, 4, spec), 0, 4)
    behind = np.concatenate([rows, np.zeros((4, 1, 2), np.int32)], axis=1)
    check(from_rows(behind, 4, RouteSpec(4, 2, (1, 3), model_layers=5)), 0, 4)
