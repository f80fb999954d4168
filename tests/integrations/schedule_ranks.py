"""One DP rank of slime or miles: `python schedule_ranks.py TRAINER RANK WORLD STORE OUT`.

As in the trainers, one process holds the rollout and makes the schedule of all ranks; here that is
rank 0, which hands it to the others. Every step then runs one all-reduce for each micro-batch of
the own rank: were the ranks given different numbers of them, they would wait for each other until
the collective's timeout. The result goes to OUT.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import routepack
from integrations.rollout_helpers import LENGTHS, process, settings_of
from integrations.trainer_helpers import arguments, next_fit, parallel, samples_of

TIMEOUT = timedelta(seconds=60)
CASES = ("fine", "exception", "missing route", "another window", "fine again")


class Warnings(logging.Handler):
    """Keeps what was warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def rollout(running: Any, args: Any, case: str, world: int) -> Any:
    """The schedule of a rollout in which planning fails as the case says."""
    samples = samples_of(LENGTHS)
    if case == "missing route":
        samples[3].rollout_routed_experts = None
    lengths = LENGTHS[::-1] if case == "another window" else LENGTHS
    planning = mock.patch.object(routepack, "plan", side_effect=ZeroDivisionError("a bug"))
    if case != "exception":
        planning = mock.patch.object(routepack, "plan", routepack.plan)
    with planning:
        return running.rollout(args, samples, lengths, parallel(dp=world))


def main() -> None:
    trainer, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    store = dist.FileStore(sys.argv[4], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    warnings = Warnings()
    logging.getLogger("routepack").addHandler(warnings)
    args = arguments(routepack=settings_of("pack", logger="builtins.print"))
    running = process(trainer, next_fit) if rank == 0 else None
    found: dict[str, Any] = {}
    for case in CASES:
        warnings.lines.clear()
        handed = [rollout(running, args, case, world) if running is not None else None]
        dist.broadcast_object_list(handed)
        partitions, indices, counts, _ = handed[0]
        done = torch.zeros(1)
        for micro_batch in indices[rank]:
            assert [partitions[rank][i] for i in micro_batch]
            dist.all_reduce(done)
        ran = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(ran, torch.tensor([len(indices[rank])]))
        found[case] = {
            "schedule": handed[0],
            "planned_counts": counts,
            "ran": [int(count) for count in ran],
            "warnings": list(warnings.lines),
        }
    Path(sys.argv[5]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
