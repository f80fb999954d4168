"""The workers: micro-batches that follow the column, if all ranks alike can.

Replaces `rearrange_micro_batches` in verl.workers.engine.utils, from where the engines'
`prepare_micro_batches` calls it. Each rank looks at its own part, then one small all-reduce over
all ranks of the worker group decides: either every rank follows the plan, or every rank calls
verl's own function. A rank never decides alone: tensor- and pipeline-parallel ranks of one DP rank
must agree as well, and a DP rank with another number of micro-batches would never return.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.integrations.verl.column import NAME, DeclinedError, UnusableError, micro_batches

logger = logging.getLogger(__name__)

FOLLOW, DECLINE, FAIL = 0, 1, 2
COUNTS: Counter[str] = Counter()
"""Calls of this process: `followed`, `declined` (nothing was planned), `fell_back` (it failed)."""


def counts(worker: Any = None) -> dict[str, int]:
    """What COUNTS holds; the driver asks a worker for it."""
    return dict(COUNTS)


def patch(engine_utils: ModuleType) -> None:
    """Put the following function in the place of verl's own."""
    original = engine_utils.rearrange_micro_batches
    if not hasattr(original, "routepack_original"):
        engine_utils.rearrange_micro_batches = following(original)  # type: ignore[attr-defined]


def following(original: Callable[..., Any]) -> Callable[..., Any]:
    """`rearrange_micro_batches` of verl, following the batch's column where all ranks can."""

    @functools.wraps(original)
    def rearrange_micro_batches(
        batch: Any,
        max_token_len: int,
        dp_group: Any = None,
        num_batches_divided_by: int | None = None,
        same_micro_num_in_dp: bool = True,
        min_num_micro_batch: int | None = None,
        use_dynamic_bsz_balance: bool = True,
        force_group_size: int = 1,
    ) -> Any:
        agreed = None
        if same_micro_num_in_dp:  # else ranks are not in step, and must not wait for each other
            agreed = _agree(
                functools.partial(
                    _own, batch, int(max_token_len), dp_group, num_batches_divided_by or 1,
                    min_num_micro_batch or 0, force_group_size,
                )
            )  # fmt: skip
        if agreed is None:
            return original(
                batch, max_token_len, dp_group, num_batches_divided_by, same_micro_num_in_dp,
                min_num_micro_batch, use_dynamic_bsz_balance, force_group_size,
            )  # fmt: skip
        from verl.utils.tensordict_utils import index_select_tensor_dict

        return [index_select_tensor_dict(batch, positions) for positions in agreed], agreed

    rearrange_micro_batches.routepack_original = original  # type: ignore[attr-defined]
    return rearrange_micro_batches


def _own(
    batch: Any,
    max_tokens: int,
    dp_group: Any,
    multiple_of: int,
    at_least: int,
    force_group_size: int,
) -> tuple[int, list[list[int]]]:
    """This rank's stamp and micro-batches, from its part of the batch alone."""
    from torch import distributed as dist

    if NAME not in batch.keys():  # noqa: SIM118, a TensorDict is no mapping
        raise DeclinedError("the batch has no plan")
    if force_group_size != 1:
        raise DeclinedError(f"force_group_size = {force_group_size}")
    in_group = dist.is_initialized() and dp_group is not None
    rank, ranks = (dist.get_rank(dp_group), dist.get_world_size(dp_group)) if in_group else (0, 1)
    stamp, batches = micro_batches(
        _column(batch), _lengths(batch),
        max_tokens=max_tokens, rank=rank, ranks=ranks, multiple_of=multiple_of,
    )  # fmt: skip
    if len(batches) < at_least:
        raise DeclinedError(f"{len(batches)} rows, this pass wants at least {at_least}")
    return stamp, batches


def _column(batch: Any) -> NDArray[np.int64]:
    """[S, C]; the transfer queue returns rows of equal length as a jagged tensor."""
    import torch

    column = batch[NAME]
    if column.is_nested:
        column = torch.stack(column.unbind())
    return np.asarray(column.cpu().numpy(), np.int64)


def _lengths(batch: Any) -> NDArray[np.int64]:
    """[S] tokens, as verl counts them."""
    if batch["input_ids"].is_nested:
        lengths = batch["input_ids"].offsets().diff()
    else:
        mask = batch["attention_mask"]
        lengths = mask.view(len(mask), -1).sum(-1)
    return np.asarray(lengths.cpu().numpy(), np.int64)


def _agree(own: Callable[[], tuple[int, list[list[int]]]]) -> list[list[int]] | None:
    """This rank's micro-batches if every rank can follow the same plan, else None on all."""
    batches: list[list[int]] = []
    stamp, status, reason = 0, FOLLOW, "another rank could not follow the plan"
    try:
        stamp, batches = own()
    except DeclinedError:
        status = DECLINE
    except UnusableError as error:
        status, reason = FAIL, str(error)
    except Exception as error:
        status, reason = FAIL, f"{type(error).__name__}: {error}"
    worst, best, same = _gather(status, stamp, len(batches))
    if worst == FOLLOW and same:
        COUNTS["followed"] += 1
        return batches
    if worst == best == DECLINE:
        COUNTS["declined"] += 1
        return None
    if worst == FOLLOW:
        reason = "ranks hold different plans"
    if not COUNTS["fell_back"]:
        logger.warning(
            "routepack: verl's own micro-batches are used where the plan cannot be: %s", reason
        )
    COUNTS["fell_back"] += 1
    return None


def _gather(status: int, stamp: int, count: int) -> tuple[int, int, bool]:
    """Highest and lowest status of all ranks, and whether stamps and counts are equal."""
    from torch import distributed as dist

    if not dist.is_initialized():
        return status, status, True
    import torch

    # All of the world, and on the CPU where it has a backend for it (verl's default), so that the
    # device is not waited for.
    device = "cpu"
    if "cpu:" not in str(dist.get_backend_config()):
        from verl.utils.device import get_device_name

        device = get_device_name()
    both = torch.tensor([status, stamp, count], dtype=torch.int64, device=device)
    values = torch.cat([both, -both])
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    high, low = values[:3].tolist(), (-values[3:]).tolist()
    return high[0], low[0], high[1:] == low[1:]
