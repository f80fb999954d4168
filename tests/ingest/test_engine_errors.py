"""Every refusal of an engine's reader, as a whole line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ingest.helpers import ALL, MOE, SPEC, Tensor, b64, refusal, trace, with_id
from routepack.ingest import (
    RouteSpec,
    from_areal,
    from_megatron_trace,
    from_nemo_rl,
    from_prime_rl,
    from_segments,
    from_sglang,
    from_slime,
    from_verl_jagged,
    from_verl_padded,
    from_vllm,
    from_vllm_output,
    without_routes,
)

CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (
        without_routes,
        (4, RouteSpec(4, 2)),
        {},
        "moe_layers: expected the MoE layers, a sample without routes shows none",
    ),
    (
        from_vllm,
        (MOE[2:], 4, SPEC),
        {"prompt_routed_experts": MOE[:2], "prompt_tokens": 3},
        "prompt_routed_experts.shape = (2, 2, 2): expected 3 token rows, those of the prompt",
    ),
    (
        from_vllm,
        (MOE[2:], 6, SPEC),
        {"prompt_routed_experts": MOE[:2]},
        "prompt_routed_experts + routed_experts.shape = (4, 2, 2):"
        " expected 5 or 6 token rows for length 6, start 0",
    ),
    (
        from_vllm,
        (ALL[2:], 4, SPEC),
        {"prompt_routed_experts": MOE[:2]},
        "routed_experts.shape = (2, 3, 2): expected 2 layers, as in the rows before",
    ),
    (
        from_vllm,
        (MOE[2:], 4, SPEC),
        {"prompt_routed_experts": with_id(9, 1, 0, 0)[:2]},
        "prompt_routed_experts[1, 0, 0] = 9: expected an expert id in 0..3",
    ),
    (
        from_sglang,
        (b64(MOE.astype("int32")), 4, SPEC),
        {"start": 7},
        "start = 7: expected a whole number in 0..4, the length",
    ),
    (
        from_vllm_output,
        ({"choices": []}, SPEC),
        {},
        "prompt_token_ids = None: expected a list (return_token_ids in a server's request)",
    ),
    (
        from_vllm_output,
        ({"prompt_token_ids": [1], "choices": [{}]}, SPEC),
        {},
        "outputs[0].token_ids = None: expected a list (return_token_ids in a server's request)",
    ),
    (
        from_sglang,
        (b64(MOE[:2].astype("int32")), 4, SPEC),
        {},
        "routed_experts size = 8: expected 3 or 4 token rows x 3 or 2 layers x top_k 2",
    ),
    (
        from_sglang,
        (b64(MOE[:2].astype("int32")), 3, RouteSpec(4, 2)),
        {},
        "moe_layers: expected the MoE layers, flat routes do not show them",
    ),
    (
        from_sglang,
        ("AAA=", 4, SPEC),
        {},
        "routed_experts bytes = 2: expected a multiple of the 4 bytes of int32",
    ),
    (
        from_sglang,
        ("AAAA", 4, SPEC),
        {"dtype": "int8"},
        "routed_experts_dtype = int8: expected one of int32, uint16, uint8",
    ),
    (
        from_sglang,
        (b64(MOE.astype("uint8")), 4, RouteSpec(300, 2, (1, 2))),
        {"dtype": "uint8"},
        "routed_experts.dtype = uint8: expected a type that holds the ids of 300 experts",
    ),
    (
        from_segments,
        ([(0, MOE[:1]), (2, MOE[2:])], 4, SPEC),
        {},
        "segments[1].start = 2: expected at most 1, the rows of the segments before",
    ),
    (
        from_segments,
        ([(0, MOE[:2]), (2, MOE[2:])], 6, SPEC),
        {},
        "segments end = 4: expected 5 or 6 token rows for length 6",
    ),
    (
        from_segments,
        ([(0, MOE[:2]), (2, ALL[2:])], 4, SPEC),
        {},
        "segments[1].shape = (2, 3, 2): expected 2 layers, as in the rows before",
    ),
    (
        from_segments,
        ([(0, MOE[:2]), (2, with_id(9, 3, 1, 0)[2:])], 4, SPEC),
        {},
        "segments[1][1, 1, 0] = 9: expected an expert id in 0..3",
    ),
    (
        from_slime,
        (Tensor(MOE[:2]), 4, SPEC),
        {},
        "rollout_routed_experts.shape = (2, 2, 2):"
        " expected 3 token rows, one less than the 4 tokens",
    ),
    (
        from_nemo_rl,
        (MOE[:2], 4, SPEC),
        {},
        "routed_experts.shape = (2, 2, 2): expected at least 3 token rows for length 4",
    ),
    (
        from_nemo_rl,
        ("nrlre2:int8:1x2x2:AAAA", 2, SPEC),
        {},
        "routed_experts = 'nrlre2:int8:1x2x2:AA': expected nrlre1:<dtype>:<rows>x<layers>x<K>:...",
    ),
    (
        from_nemo_rl,
        ("nrlre1:uint8:1x2x2:AAAA", 2, SPEC),
        {},
        "routed_experts dtype = 'uint8': expected one of int8, int16, int32",
    ),
    (
        from_nemo_rl,
        ("nrlre1:int8:1x-2x2:AAAA", 2, SPEC),
        {},
        "routed_experts shape = '1x-2x2': expected <rows>x<layers>x<K>",
    ),
    (
        from_nemo_rl,
        ("nrlre1:int8:1x2x2:AAAA", 2, SPEC),
        {},
        "routed_experts size = 3: expected 1x2x2 ids",
    ),
    (
        from_prime_rl,
        ([b"", [0, 2, 2]], 1, SPEC),
        {},
        "routed_experts fields = 2: expected 3: data, shape, dtype",
    ),
    (
        from_prime_rl,
        ([b"", [0, 2, 2], "float32"], 1, SPEC),
        {},
        "routed_experts.dtype = 'float32': expected one of uint8, uint16, int16, int32, int64",
    ),
    (
        from_prime_rl,
        ([b"", [0, 2], "uint8"], 1, SPEC),
        {},
        "routed_experts.shape = [0, 2]: expected [token rows, layers, top_k]",
    ),
    (
        from_prime_rl,
        ([b"", [-1, 2, 2], "uint8"], 1, SPEC),
        {},
        "routed_experts.shape[0] = -1: expected a whole number in 0..2147483647",
    ),
    (
        from_prime_rl,
        ([b"\0\1\0\1\0", [1, 2, 2], "uint8"], 1, SPEC),
        {},
        "routed_experts.data size = 5: expected the ids of shape [1, 2, 2]",
    ),
    (
        from_prime_rl,
        ([7, [1, 2, 2], "uint8"], 1, SPEC),
        {},
        "routed_experts.data = int: expected bytes or their base64 string",
    ),
    (
        from_areal,
        (MOE[:, 0, :1], 4, SPEC),
        {},
        "routed_experts.shape = (4, 1): expected (token rows, layers * top_k = layers * 2)",
    ),
    (
        from_areal,
        (MOE.reshape(4, 4), 4, SPEC),
        {"segment_ends": [3, 2, 4]},
        "segment_ends[1] = 2: expected at least 3",
    ),
    (
        from_areal,
        (MOE.reshape(4, 4), 4, SPEC),
        {"segment_ends": [2, 3]},
        "segment_ends = [2, 3]: expected 4, the length of the sample, at the end",
    ),
    (
        from_verl_padded,
        (MOE, np.ones((4, 2)), SPEC),
        {},
        "routed_experts.shape = (4, 2, 2): expected (samples, token rows, layers, top_k = 2)",
    ),
    (
        from_verl_padded,
        (MOE[None], np.ones((1, 3)), SPEC),
        {},
        "attention_mask.shape = (1, 3): expected (1, 4)",
    ),
    (
        from_verl_padded,
        (MOE[None], np.array([[1, 0, 0, 1]]), SPEC),
        {},
        "attention_mask[0][1] = 0: expected the tokens of a sample in one run",
    ),
    (
        from_verl_padded,
        (MOE[None], np.zeros((1, 4)), SPEC),
        {},
        "attention_mask[0] = all 0: expected at least one token",
    ),
    (
        from_verl_padded,
        (with_id(7, 2, 1, 0)[None], np.array([[0, 1, 1, 1]]), SPEC),
        {},
        "routed_experts[0][2, 1, 0] = 7: expected an expert id in 0..3",
    ),
    (
        from_verl_jagged,
        (MOE, None, SPEC),
        {},
        "routed_experts = ndarray: expected a jagged nested tensor, or offsets beside the values",
    ),
    (
        from_verl_jagged,
        (MOE, [0, 3], SPEC),
        {},
        "offsets[1] = 3: expected 4, of 4 rows",
    ),
    (
        from_verl_jagged,
        (MOE, [0, 3, 2, 4], SPEC),
        {},
        "offsets[2] = 2: expected at least 3",
    ),
    (
        from_verl_jagged,
        (MOE, [4], SPEC),
        {},
        "offsets = int64 (1,): expected integers (samples + 1,), at least 2",
    ),
    (
        from_verl_jagged,
        (MOE, [0, 4], SPEC),
        {"lengths": [4, 4]},
        "lengths.shape = (2,): expected (1,)",
    ),
    (
        from_verl_jagged,
        (MOE, [0, 1, 4], SPEC),
        {"lengths": [1, 5]},
        "routed_experts[1].shape = (3, 2, 2): expected 4 or 5 token rows for length 5, start 0",
    ),
]


@pytest.mark.parametrize(("read", "arguments", "options", "message"), CALLS)
def test_engines(
    read: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    """What each engine's own form can get wrong."""
    assert refusal(read, *arguments, **options) == message


def changed(i: int, **fields: Any) -> list[dict[str, Any]]:
    """The records of a micro-batch with fields of one replaced."""
    records = trace(MOE)
    records[i] |= fields
    return records


TRACES: list[tuple[list[Any], dict[str, Any], str]] = [
    ([], {}, "router trace: expected records of decoder layers, there are none"),
    (trace(MOE), {"step": 1}, "router trace: expected records of step 1 of decoder layers,"),
    (["{"], {}, "record[0] = no JSON: expected one record a line (Input data was truncated)"),
    (["[]"], {}, "record[0] = list: expected a JSON object"),
    (changed(1, layer=-1), {}, "layer[1] = -1: expected a whole number of at least 0"),
    (changed(1, layer=0), {}, "layer[1] = 0: expected one of moe_layers"),
    (changed(0, topk=3), {}, "topk[0] = 3: expected top_k 2"),
    (
        changed(0, num_tokens=5),
        {},
        "top_indices[0].shape = (4, 2): expected (5, 2), num_tokens and top_k, at least 1 token",
    ),
    (
        changed(0, top_indices=[[0, 1]] * 3 + [[0, 4]]),
        {},
        "top_indices[0, 3, 1] = 4: expected an expert id in 0..3",
    ),
    (
        changed(1, top_indices=[[0, 1]] * 3 + [[1, 1]]),
        {},
        "rank 0 routes[3, 1, 1] = 1: expected 2 distinct experts in a token row, it repeats",
    ),
    (
        [*trace(MOE), trace(MOE)[0]],
        {},
        "rank 0 records[2] = 1: expected 2, as of layer 1",
    ),
    (
        [trace(MOE)[0], trace(MOE[:2])[1]],
        {},
        "rank 0 num_tokens[2, 0] = 2: expected 4, as of layer 1",
    ),
]


@pytest.mark.parametrize(("records", "options", "message"), TRACES)
def test_traces(records: list[Any], options: dict[str, Any], message: str) -> None:
    """Records that are none, or that do not fit each other."""
    whole = message + " there are none" if message.endswith(",") else message
    assert refusal(from_megatron_trace, records, SPEC, **options) == whole
