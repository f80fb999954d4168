"""One JSON object of an engine or trainer, as a line of a file, to samples.

The number of tokens is `length`, or the lengths of the token lists that the engine itself writes.
Arrays are nested lists or base64 of a .npy file; SGLang's strings are base64 of bare ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from routepack.errors import InputError
from routepack.ingest.nemo_rl import from_nemo_rl
from routepack.ingest.prime_rl import from_prime_rl
from routepack.ingest.sample import SampleRoutes
from routepack.ingest.sglang import from_areal, from_miles, from_sglang, from_slime
from routepack.ingest.spec import RouteSpec
from routepack.ingest.verl import from_verl
from routepack.ingest.vllm import from_vllm, from_vllm_output

Record = Mapping[str, Any]
FIELD = "routed_experts"


def _length(record: Record, *lists: str) -> Any:
    """`length`, or the tokens in `lists` together. Raises InputError."""
    if "length" in record:
        return record["length"]
    for name in lists:
        if not isinstance(record.get(name), list):
            others = " and ".join(lists)
            raise InputError.at(name, record.get(name), f"a list of tokens, or length for {others}")
    if not lists:
        raise InputError("length: expected the tokens of the sample, the record has none")
    return sum(len(record[name]) for name in lists)


def _vllm(record: Record, spec: RouteSpec) -> Iterable[SampleRoutes]:
    start = record.get("routed_experts_prompt_start", 0)
    if "outputs" in record or "choices" in record:
        return from_vllm_output(record, spec, start=start)
    prompt_ids = record.get("prompt_token_ids")
    prompt_tokens = len(prompt_ids) if isinstance(prompt_ids, list) else None
    sample = from_vllm(
        record.get(FIELD),
        _length(record, "prompt_token_ids", "token_ids"),
        spec,
        prompt_routed_experts=record.get(f"prompt_{FIELD}"),
        prompt_tokens=prompt_tokens,
        start=start,
    )
    return [sample]


def _sglang(record: Record, spec: RouteSpec) -> Iterable[SampleRoutes]:
    meta_info = record.get("meta_info", record)
    if not isinstance(meta_info, Mapping):
        raise InputError.at("meta_info", type(meta_info).__name__, "a JSON object")
    length = record.get("length")
    if length is None:
        prompt, completion = meta_info.get("prompt_tokens"), meta_info.get("completion_tokens")
        if type(prompt) is not int or type(completion) is not int:
            expected = "length, or prompt_tokens and completion_tokens in meta_info"
            raise InputError.at("length", None, expected)
        length = prompt + completion
    start = record.get("routed_experts_start_len")  # a field of the request; slime's meta_info too
    return [from_sglang(meta_info, length, spec, start=start)]


def _verl(record: Record, spec: RouteSpec) -> Iterable[SampleRoutes]:
    return [from_verl(record.get(FIELD), _length(record, "prompts", "responses"), spec)]


def _slime(record: Record, spec: RouteSpec) -> Iterable[SampleRoutes]:
    return [from_slime(record.get(f"rollout_{FIELD}"), _length(record, "tokens"), spec)]


def _miles(record: Record, spec: RouteSpec) -> Iterable[SampleRoutes]:
    return [from_miles(record.get(f"rollout_{FIELD}"), _length(record, "tokens"), spec)]


def _nemo_rl(record: Record, spec: RouteSpec) -> Iterable[SampleRoutes]:
    return [from_nemo_rl(record.get(FIELD), _length(record), spec)]


def _prime_rl(record: Record, spec: RouteSpec) -> Iterable[SampleRoutes]:
    return [from_prime_rl(record.get(FIELD), _length(record, "token_ids"), spec)]


def _areal(record: Record, spec: RouteSpec) -> Iterable[SampleRoutes]:
    ends = record.get("segment_ends")
    if ends is not None and not isinstance(ends, list):
        raise InputError.at("segment_ends", ends, "a list of whole numbers")
    length = _length(record, "input_tokens", "output_tokens")
    return [from_areal(record.get(FIELD), length, spec, segment_ends=ends)]


READERS: dict[str, Callable[[Record, RouteSpec], Iterable[SampleRoutes]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "verl": _verl,
    "slime": _slime,
    "miles": _miles,
    "nemo-rl": _nemo_rl,
    "prime-rl": _prime_rl,
    "areal": _areal,
}
