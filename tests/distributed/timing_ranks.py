"""Ranks that time a migration beside a plain all-to-all.

`python timing_ranks.py migration WORLD FOLDER`
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from forked import main

from routepack.state.nearest import nearest
from routepack.state.rounds import plan_migration
from routepack.state.tensors import ExpertState
from routepack.state.transfer import migrate

EXPERTS, ROW, RUNS = 32, 2**20, 9


def timed(call: Callable[[], object]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    call()
    taken = torch.tensor([time.perf_counter() - began])
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def migration(rank: int, world: int) -> dict[str, Any]:
    """Medians of nine, in turns: a random migration and an all-to-all of as many bytes."""
    per_rank = EXPERTS // world
    tensors = {name: torch.zeros(per_rank, ROW) for name in ("weight", "exp_avg", "exp_avg_sq")}
    identity_LE = np.arange(EXPERTS, dtype=np.int32)[None]
    state = ExpertState([tensors], identity_LE, world, rank, keep_staging=True)
    there_LE = nearest(np.random.default_rng(2).permutation(EXPERTS)[None], identity_LE, world)
    link_RR = plan_migration(
        identity_LE, there_LE, world, bytes_per_expert=state.bytes_L
    ).link_bytes_RR
    moved, plain = [], []
    for k in range(RUNS + 1):
        going_RR = link_RR if k % 2 == 0 else link_RR.T
        sent, received = going_RR[rank].tolist(), going_RR[:, rank].tolist()
        source = torch.zeros(sum(sent), dtype=torch.uint8)
        target = torch.empty(sum(received), dtype=torch.uint8)
        for one in source, target:  # pages are there before the clock runs
            one.fill_(1)
        new_LE = there_LE if k % 2 == 0 else identity_LE
        moved.append(timed(lambda: migrate(state, new_LE, timeout_seconds=60)))  # noqa: B023
        plain.append(
            timed(lambda: dist.all_to_all_single(target, source, received, sent))  # noqa: B023
        )
    return {
        "bytes": int(link_RR.sum()),
        "migration": median(moved[1:]),
        "all_to_all": median(plain[1:]),
    }


if __name__ == "__main__":
    main({"migration": migration})
