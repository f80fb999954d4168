"""One rank of a trainer that plans on every rank: `python agreement_ranks.py RANK WORLD STORE OUT`.

Every step runs one all-reduce for each micro-batch of the layout that the rank was given. The
trainer's own layout has more micro-batches than a plan's, so that ranks with different layouts
would wait for each other for ever, or here until the collective's timeout. The result goes to OUT.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import routepack
from routepack import InputError
from routepack.integrations.generic import Packer, torch_agreement

COLLECTIVE = timedelta(seconds=60)
DEADLINE_SECONDS = 20.0
SAMPLES = 16


def window_of(seed: int) -> routepack.Window:
    """Samples of 4 tokens; each chooses one of four experts for all of them."""
    experts = np.random.default_rng(seed).integers(0, 4, (SAMPLES, 2))
    demand_SLE = 4 * np.eye(4, dtype=np.int64)[experts]
    return routepack.Window(np.full(SAMPLES, 4), demand_SLE, 1)


def own_of(world: int) -> list[list[list[list[int]]]]:
    """One sample a micro-batch."""
    rows = [list(range(m, m + world)) for m in range(0, SAMPLES, world)]
    return [[[[i] for i in row] for row in rows]]


class Warnings(logging.Handler):
    """Keeps what was warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def failure(case: str, rank: int) -> Any:
    """The window of a rank, or what makes it; rank 1 is the one that fails."""
    window = window_of(3)
    if rank != 1 or case == "fine":
        return window

    def make() -> routepack.Window:
        if case == "exception":
            raise ZeroDivisionError("a bug")
        if case == "missing route":
            raise InputError("routes[2] = None: expected recorded routes")
        if case == "another window":
            return window_of(4)
        assert case == "late"
        time.sleep(2)
        return window

    return make


def step(packer: Packer, window: Any, rank: int, world: int) -> dict[str, Any]:
    """One training step: plan, agree, and run the micro-batches in lockstep."""
    own = own_of(world)
    [rows] = packed = packer.step(window, own)
    done = torch.zeros(1)
    for row in rows:
        assert row[rank]
        dist.all_reduce(done)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([len(rows)]))
    return {
        "own": packed is own,
        "rows": rows,
        "counts": [int(count) for count in counts],
        "totals": {name: count for name, count in packer.guard.totals.items() if count},
    }


def main() -> None:
    rank, world = int(sys.argv[1]), int(sys.argv[2])
    store = dist.FileStore(sys.argv[3], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=COLLECTIVE)
    warnings = Warnings()
    logging.getLogger("routepack").addHandler(warnings)
    topology = routepack.Topology.of(dp=world, ep=2, edp=1)

    def packer(deadline_seconds: float, all_agree: Any) -> Packer:
        return Packer(
            topology,
            8,
            budget=routepack.Budget(evaluations=500),
            threads=1,
            all_agree=all_agree,
            deadline_seconds=deadline_seconds,
        )

    found: dict[str, Any] = {}
    all_agree = torch_agreement(timeout_seconds=40.0)
    packer(1, None).step(window_of(3), own_of(world))  # the kernels are loaded, or even compiled
    dist.barrier()
    planning = packer(DEADLINE_SECONDS, all_agree)
    for case in ("fine", "exception", "missing route", "another window", "fine"):
        warnings.lines.clear()
        result = step(planning, failure(case, rank), rank, world)
        found[case] = {**result, "warnings": list(warnings.lines)}
    hurried = packer(0.5 if rank == 1 else DEADLINE_SECONDS, all_agree)
    warnings.lines.clear()
    result = step(hurried, failure("late", rank), rank, world)
    found["late"] = {**result, "warnings": list(warnings.lines)}

    # A rank that does not come to the agreement at all, until the others have given up.
    group = dist.new_group(timeout=timedelta(seconds=1))
    agree = torch_agreement(group, timeout_seconds=1.0)

    def absent(key: str | None) -> bool:
        time.sleep(3)
        return agree(key)

    lonely = packer(DEADLINE_SECONDS, absent if rank == 1 else agree)
    warnings.lines.clear()
    began = time.perf_counter()
    first = step(lonely, window_of(3), rank, world)
    second = step(lonely, window_of(3), rank, world)
    found["absent"] = {
        **first,
        "second": second,
        "warnings": list(warnings.lines),
        "seconds": time.perf_counter() - began,
    }
    Path(sys.argv[4]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
