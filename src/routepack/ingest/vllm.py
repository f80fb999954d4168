"""vLLM: one array of all token rows but the last, or the prompt and each completion apart.

Sources: `CompletionOutput.routed_experts` (vllm/outputs.py), [T-1, layers, K]; the split form of
vLLM 0.21, https://docs.vllm.ai/en/v0.21.0/training/routed_experts_replay/; the connector of later
versions, vllm/distributed/aux_output_connector/connector.py (uint8 up to 256 experts, else
uint16). Servers send nested lists or base64 of a .npy file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from routepack.errors import InputError
from routepack.ingest.arrays import as_rows, checked_length, checked_start, get
from routepack.ingest.rows import Part, assemble, from_rows, without_routes, wrong_rows
from routepack.ingest.sample import SampleRoutes
from routepack.ingest.spec import RouteSpec

FIELD = "routed_experts"


def from_vllm(
    routed_experts: Any,
    length: int,
    spec: RouteSpec,
    *,
    prompt_routed_experts: Any = None,
    prompt_tokens: int | None = None,
    start: int = 0,
) -> SampleRoutes:
    """Routes of one completion; `length` counts prompt and completion.

    routed_experts          [T-1, A, K], or those of the completion where the prompt's come apart:
                            numpy, torch, nested lists or base64 of a .npy file. None: no routes
    prompt_routed_experts   [P, A, K] of the prompt; None where one array holds all rows
    prompt_tokens           P less start, to check the prompt's rows
    start                   SamplingParams.routed_experts_prompt_start: tokens that were left out

    Raises InputError. Rows of zeros are holes; stale rows of a KV connector cannot be told.
    """
    if prompt_routed_experts is None:
        if routed_experts is None:
            return without_routes(length, spec)
        return from_rows(routed_experts, length, spec, start=start, field=FIELD)
    length = checked_length(length)
    start = checked_start(start, length)
    prompt_NAK = as_rows(prompt_routed_experts, spec, f"prompt_{FIELD}")
    if prompt_tokens is not None and len(prompt_NAK) != prompt_tokens - start:
        expected = f"{prompt_tokens - start} token rows, those of the prompt"
        raise InputError.at(f"prompt_{FIELD}.shape", prompt_NAK.shape, expected)
    parts = [Part(start, prompt_NAK, f"prompt_{FIELD}")]
    total = len(prompt_NAK)
    if routed_experts is not None:
        rows_NAK = as_rows(routed_experts, spec, FIELD)
        parts.append(Part(start + total, rows_NAK, FIELD))
        total += len(rows_NAK)
    if total not in (length - start, length - start - 1):
        shape = (total, *prompt_NAK.shape[1:])
        raise wrong_rows(f"prompt_{FIELD} + {FIELD}", shape, length, start)
    return assemble(parts, length, spec)


def from_vllm_output(output: Any, spec: RouteSpec, *, start: int = 0) -> Iterator[SampleRoutes]:
    """Routes of every completion of a RequestOutput, or of a server's response as a mapping.

    Read are `prompt_token_ids`, `prompt_routed_experts` where there is one, and of each of
    `outputs` (`choices` in a response) `token_ids` and `routed_experts`. Raises InputError.
    """
    prompt_ids = get(output, "prompt_token_ids")
    completions = get(output, "outputs", get(output, "choices"))
    for name, value in (("prompt_token_ids", prompt_ids), ("outputs", completions)):
        if not hasattr(value, "__len__"):
            raise InputError.at(name, value, "a list (return_token_ids in a server's request)")
    for i, completion in enumerate(completions):
        token_ids = get(completion, "token_ids")
        if not hasattr(token_ids, "__len__"):
            expected = "a list (return_token_ids in a server's request)"
            raise InputError.at(f"outputs[{i}].token_ids", token_ids, expected)
        yield from_vllm(
            get(completion, FIELD),
            len(prompt_ids) + len(token_ids),
            spec,
            prompt_routed_experts=get(output, f"prompt_{FIELD}"),
            prompt_tokens=len(prompt_ids),
            start=start,
        )
