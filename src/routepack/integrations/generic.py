"""Any trainer: a dozen lines around `routepack.plan`, or a `Packer` for the steps of a run.

    for micro_batch in micro_batches(plan, ids)[rank]:  # lists of the ids given
        ...

docs/guides/generic.md is the guide; nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from routepack.errors import InputError
from routepack.integrations.guarded import AllAgree, Guard, torch_agreement
from routepack.integrations.layout import by_rank, by_row
from routepack.integrations.packer import Packer
from routepack.plan import Plan

__all__ = [
    "AllAgree",
    "BatchSampler",
    "Guard",
    "Packer",
    "by_rank",
    "by_row",
    "micro_batches",
    "torch_agreement",
]

Id = TypeVar("Id")


def micro_batches(plan: Plan, ids: Sequence[Id]) -> list[list[list[Id]]]:
    """[D][M][...] the ids of each micro-batch, by DP rank; `ids` [S] names the window's samples.

    All ranks have the same number of micro-batches. Raises InputError for another number of ids.
    """
    if len(ids) != plan.window.samples:
        raise InputError.at("ids", len(ids), f"one for each of {plan.window.samples} samples")
    return [[[ids[i] for i in cell] for cell in cells] for cells in by_rank(plan.rows)]


class BatchSampler:
    """The micro-batches of one rank, for `torch.utils.data.DataLoader(batch_sampler=...)`.

    Yields lists of positions in the data set, in the plan's order: row m is the m-th batch on every
    rank, as the ranks of an expert-parallel group must meet in it.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        layout = by_rank(plan.rows)
        if not 0 <= rank < len(layout):
            raise InputError.at("rank", rank, f"a DP rank in 0..{len(layout) - 1}")
        self._batches = layout[rank]

    def __iter__(self) -> Iterator[list[int]]:
        return (list(batch) for batch in self._batches)

    def __len__(self) -> int:
        return len(self._batches)
