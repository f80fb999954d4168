"""verl's own layout of a batch, and what it and a plan cost.

Shapes: S samples of the batch, D DP ranks, M rows of an optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.cost import DEFAULT
from routepack.integrations.observe import PREFIX, Load, Metrics, measure
from routepack.integrations.verl.column import Row
from routepack.integrations.verl.settings import Run
from routepack.window import Window

Steps = Sequence[Sequence[Row]]
Split = Callable[[NDArray[np.int64], int], list[list[int]]]
"""(lengths, least number) to positions of each micro-batch."""


def own_layout(
    split: Split, lengths_S: NDArray[np.int64], *, ranks: int, steps: int
) -> list[list[Row]]:
    """The rows that verl makes of a balanced batch.

    split      verl's micro-batches of one DP rank's part of an optimizer step
    lengths_S  in the order of the balanced batch: DP rank by DP rank, in each step by step

    verl takes the largest number of micro-batches that any DP rank needs; in 0.9.1 the least from
    there on with which all ranks are within the cap. Asking each rank for at least the largest
    number that another one came to, until all come to the same, is that.
    """
    parts = np.arange(len(lengths_S)).reshape(ranks, steps, -1)
    layout: list[list[Row]] = []
    for k in range(steps):
        count, cells = 0, [[[0]]] * ranks
        while any(len(own) != count for own in cells):
            count = max(len(own) for own in cells) if count else 1
            cells = [split(lengths_S[parts[d, k]], count) for d in range(ranks)]
        members = [[parts[d, k][own].tolist() for own in cells[d]] for d in range(ranks)]
        layout.append([[own[m] for own in members] for m in range(count)])
    return layout


def splitter(rearrange: Callable[..., Any], token_cap: int, rows_multiple_of: int = 1) -> Split:
    """`split` by verl's own `rearrange_micro_batches`, without communication."""
    import torch
    from tensordict import TensorDict

    def split(lengths_S: NDArray[np.int64], at_least: int) -> list[list[int]]:
        # verl sums the mask over a sample's tokens: one entry of the length does as well as ones
        mask = torch.from_numpy(lengths_S)[:, None]
        batch = TensorDict(dict(input_ids=mask, attention_mask=mask), batch_size=len(lengths_S))
        _, positions = rearrange(
            batch,
            max_token_len=token_cap,
            num_batches_divided_by=rows_multiple_of,
            min_num_micro_batch=at_least,
        )
        return list(positions)

    return split


def load_of(window: Window, run: Run, steps: Steps) -> Load:
    """Of a layout under the placement that the trainer holds, summed over optimizer steps."""
    loads = []
    for step in steps:
        members = sorted(i for row in step for cell in row for i in cell)
        position = {i: k for k, i in enumerate(members)}
        part = window.select(members)
        rows = [[[position[i] for i in cell] for cell in row] for row in step]
        loads.append(
            measure(
                part, run.topology, run.cost_model or DEFAULT, run.token_cap, rows, run.placement_LE
            )
        )
    return sum(loads[1:], start=loads[0])


def metrics_of(own: Load, planned: Load) -> Metrics:
    """verl's own layout beside the plan's; `predicted_ratio` below 1 is faster."""
    ratio = {f"{PREFIX}predicted_ratio": planned.over(own)}
    return own.metrics("own") | planned.metrics("plan") | ratio
