"""Gloo ranks as forks of one process, so that torch is imported once.

A script defines its cases and calls `main`: `python SCRIPT CASE WORLD FOLDER` runs the case on
WORLD ranks and writes what each returns to FOLDER/RANK.json. The parent ends all ranks as soon as
one has failed, or when they take too long.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

COLLECTIVE = timedelta(seconds=60)
LIMIT_SECONDS = 200.0
Case = Callable[[int, int], dict[str, Any]]


def main(cases: dict[str, Case]) -> None:
    """Run the case that the command line names."""
    case, world, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    results = run(cases[case], world, folder / "store")
    for rank, result in enumerate(results):
        assert result is not None, f"rank {rank} ended without a result"
        (folder / f"{rank}.json").write_text(json.dumps(result))


def run(case: Case, world: int, store: Path, *, killed: int = 0) -> list[dict[str, Any] | None]:
    """What each rank returns; None of a rank that was killed, of which there must be `killed`."""
    torch.set_num_threads(1)  # forks have none of the threads of a pool
    pids = [_fork(case, rank, world, store) for rank in range(world)]
    left, lost = dict(enumerate(pids)), 0
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while left:
            for rank, pid in list(left.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del left[rank]
                    code = os.waitstatus_to_exitcode(status)
                    lost += code == -signal.SIGKILL
                    assert code in (0, -signal.SIGKILL), f"rank {rank} failed: {code}"
            assert lost <= killed, "a rank was killed"
            assert time.monotonic() < deadline, f"ranks {sorted(left)} hang"
            time.sleep(0.005)
    finally:
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert lost == killed
    files = [_file(store, rank) for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def _file(store: Path, rank: int) -> Path:
    return store.with_name(f"{store.name}.{rank}")


def _fork(case: Case, rank: int, world: int, store: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), world),
            rank=rank,
            world_size=world,
            timeout=COLLECTIVE,
        )
        result = case(rank, world)
        _file(store, rank).write_text(json.dumps(result))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
