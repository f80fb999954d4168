"""verl: int16 arrays padded to the batch, or jagged nested tensors.

Sources: verl/experimental/agent_loop/agent_loop.py (`as_dict`: one row per token, zeros where
nothing was recorded; `_postprocess`: [P + R, layers, K] with the prompt padded on the left) and
verl/utils/megatron/router_replay_utils.py (`align_r3_router_replay_data`: T or T-1 rows).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.ingest.arrays import as_array, as_rows, check_type
from routepack.ingest.rows import Part, assemble, from_rows, without_routes
from routepack.ingest.sample import SampleRoutes
from routepack.ingest.spec import RouteSpec

FIELD = "routed_experts"


def from_verl(routed_experts: Any, length: int, spec: RouteSpec) -> SampleRoutes:
    """Routes of one sample: [T or T-1, A, K], rows of zeros missing. Raises InputError."""
    if routed_experts is None:
        return without_routes(length, spec)
    return from_rows(routed_experts, length, spec, field=FIELD)


def from_verl_padded(
    routed_experts: Any, attention_mask: Any, spec: RouteSpec
) -> Iterator[SampleRoutes]:
    """Routes of every sample of a padded batch.

    routed_experts  [B, X, A, K] over prompts padded on the left, responses padded on the right
    attention_mask  [B, X], 1 where there is a token; consecutive in every sample

    Raises InputError.
    """
    padded_BXAK = as_array(routed_experts, FIELD)
    mask_BX = as_array(attention_mask, "attention_mask")
    if padded_BXAK.ndim != 4 or padded_BXAK.shape[3] != spec.top_k:
        expected = f"(samples, token rows, layers, top_k = {spec.top_k})"
        raise InputError.at(f"{FIELD}.shape", padded_BXAK.shape, expected)
    if mask_BX.shape != padded_BXAK.shape[:2]:
        raise InputError.at("attention_mask.shape", mask_BX.shape, str(padded_BXAK.shape[:2]))
    check_type(padded_BXAK.dtype, spec, FIELD)
    for b in range(len(padded_BXAK)):
        first, last = token_run(mask_BX[b], f"attention_mask[{b}]")
        yield assemble(
            [Part(0, padded_BXAK[b, first:last], f"{FIELD}[{b}]", first)],
            last - first,
            spec,
            left=first,
            right=mask_BX.shape[1] - last,
        )


def token_run(mask_X: NDArray[Any], field: str) -> tuple[int, int]:
    """The consecutive tokens first..last-1 of an attention mask. Raises InputError."""
    tokens = np.flatnonzero(mask_X)
    if not tokens.size:
        raise InputError.at(field, "all 0", "at least one token")
    first, last = int(tokens[0]), int(tokens[-1]) + 1
    if last - first != tokens.size:
        hole = first + int(np.flatnonzero(np.asarray(mask_X[first:last]) == 0)[0])
        raise InputError.at(field, 0, "the tokens of a sample in one run", hole)
    return first, last


def from_verl_jagged(
    routed_experts: Any, offsets: Any, spec: RouteSpec, *, lengths: Any = None
) -> Iterator[SampleRoutes]:
    """Routes of every sample of a jagged batch.

    routed_experts  a nested tensor with `.values()` and `.offsets()`, or its values [N, A, K]
    offsets         [B+1], the rows of sample b are offsets[b]:offsets[b+1]; None: the tensor's own
    lengths         [B] tokens of each sample, at most one more than its rows. Default: its rows

    Raises InputError.
    """
    if offsets is None:
        if not (hasattr(routed_experts, "values") and hasattr(routed_experts, "offsets")):
            kind = type(routed_experts).__name__
            raise InputError.at(FIELD, kind, "a jagged nested tensor, or offsets beside the values")
        routed_experts, offsets = routed_experts.values(), routed_experts.offsets()
    rows_NAK = as_rows(routed_experts, spec, FIELD)
    offsets_B1 = checked_offsets(offsets, len(rows_NAK))
    lengths_B = np.diff(offsets_B1) if lengths is None else as_array(lengths, "lengths")
    if lengths_B.shape != (len(offsets_B1) - 1,):
        raise InputError.at("lengths.shape", lengths_B.shape, f"({len(offsets_B1) - 1},)")
    for b, length in enumerate(lengths_B.tolist()):
        rows = rows_NAK[offsets_B1[b] : offsets_B1[b + 1]]
        yield from_rows(rows, length, spec, field=f"{FIELD}[{b}]")


def checked_offsets(offsets: Any, rows: int) -> NDArray[np.int64]:
    """[B+1], from 0 to the number of rows, never falling. Raises InputError."""
    offsets_B1 = as_array(offsets, "offsets")
    if offsets_B1.ndim != 1 or offsets_B1.size < 2 or offsets_B1.dtype.kind not in "iu":
        value = f"{offsets_B1.dtype} {offsets_B1.shape}"
        raise InputError.at("offsets", value, "integers (samples + 1,), at least 2")
    offsets_B1 = offsets_B1.astype(np.int64)
    for at, bound in ((0, 0), (-1, rows)):
        if offsets_B1[at] != bound:
            index = at % len(offsets_B1)
            raise InputError.at("offsets", int(offsets_B1[at]), f"{bound}, of {rows} rows", index)
    if (falls := np.flatnonzero(np.diff(offsets_B1) < 0)).size:
        b = int(falls[0]) + 1
        raise InputError.at("offsets", int(offsets_B1[b]), f"at least {offsets_B1[b - 1]}", b)
    return offsets_B1
