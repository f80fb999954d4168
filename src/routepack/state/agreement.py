"""All ranks go on, or none does: what each of them knows, gathered in a fixed number of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

KEY_BYTES = 32
MESSAGE_BYTES = 480


class MigrationError(RuntimeError):
    """A migration did not happen: one line with layer, expert and tensor, the same on all ranks
    that could be reached. `ExpertState.placement_LE` says where every expert is."""


@dataclass(frozen=True)
class Agreement:
    """A collective among the ranks of `group`.

    device   of the few bytes that are gathered: one that the group's backend takes
    timeout  after which a rank that does not answer is given up
    """

    group: Any
    device: torch.device
    timeout: timedelta

    def reach(self, key: bytes, failure: str | None, *, final: bool) -> None:
        """Return on all ranks where none has a failure and all have the same key (32 bytes).

        Raises MigrationError otherwise, on all ranks; what the collective raises where a rank
        cannot be reached. Before what cannot be taken back (`final`) there is a second gather: a
        rank that gave up in the first one does not come to it, so that the others fail there too
        instead of going ahead.
        """
        text = (failure or "").encode()[:MESSAGE_BYTES]
        message = text.ljust(MESSAGE_BYTES, b"\0")
        everyone = self._gather(bytes([failure is not None]) + key + message)
        failed = [rank for rank, answer in enumerate(everyone) if answer[0]]
        keys = [answer[1 : 1 + KEY_BYTES] for answer in everyone]
        other = [rank for rank, theirs in enumerate(keys) if theirs != keys[0]]
        if failed:
            said = everyone[failed[0]][1 + KEY_BYTES :].rstrip(b"\0")
            raise MigrationError(f"rank {failed[0]}: {said.decode(errors='replace')}")
        if other:
            differs = "another placement, layout of experts or staging_bytes than rank 0"
            raise MigrationError(f"rank {other[0]}: {differs}")
        if final:
            self._gather(b"\1")

    def _gather(self, mine: bytes) -> list[bytes]:
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        answers = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        work = dist.all_gather(answers, own, group=self.group, async_op=True)
        work.wait(self.timeout)
        return [bytes(answer.cpu().numpy().tobytes()) for answer in answers]


def one_line(error: BaseException) -> str:
    """An error as a part of a message."""
    if isinstance(error, MigrationError):
        return str(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
