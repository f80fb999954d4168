"""Real ranks for tests: one process imports torch, forks them, and waits for their results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LIMIT_SECONDS = 240


def run_ranks(script: Path, case: str, world: int) -> list[dict[str, Any]]:
    """What each rank of `script` found (tests/distributed/forked.py). Hangs and failures raise."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, str(script), case, str(world), name],
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            try:
                code = process.wait(LIMIT_SECONDS)
            finally:
                process.kill()
                process.wait()
        assert code == 0, log.read_text()
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
