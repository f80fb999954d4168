"""Experts move over torch.distributed: stage, check, agree, commit.

    state = ExpertState(layers, placement, ranks, rank)
    handle = start(state, plan.placement, ep_group, staging_bytes=2**30)
    ...                                    # anything that leaves the experts alone
    handle.wait()                          # from here on every expert is in its new slot

Each batch of `rounds` is received into staging buffers while all experts stay where they are, and
compared with the expert ids and checksums that travel with it. Only when all ranks agree that they
have it all, each copies it into its own tensors, which needs no other rank. So what fails before
the agreement leaves the placement as it was before that batch, on all ranks; with room for
everything in one batch, that is the old placement.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import ArrayLike

from routepack.errors import InputError
from routepack.state.agreement import Agreement, MigrationError, one_line
from routepack.state.moves import Batch, Migration, Transfer
from routepack.state.rounds import plan_migration
from routepack.state.staging import Arrival, buffers, commit, difference, header, rename
from routepack.state.tensors import ExpertState


@dataclass(frozen=True)
class Report:
    """What a rank did in a migration."""

    sent_bytes: int
    """Expert state; ids and checksums are in `header_bytes`."""
    received_bytes: int
    header_bytes: int
    """Sent and received."""
    staged_bytes: int
    """The most that was staged at a time."""
    batches: int


def start(
    state: ExpertState,
    new: ArrayLike,
    group: Any = None,
    *,
    all_ranks: Any = None,
    staging_bytes: int | None = None,
    timeout_seconds: float = 300.0,
) -> Handle:
    """Begin to move experts to the placement `new` [L, E]; a collective on all ranks.

    group            the EP group, whose rank r is EP rank r; its backend must take every device
                     that experts are on ("cpu:gloo,cuda:nccl" for optimizer state on the CPU)
    all_ranks        who has to agree: with EDP shards, a group of the ranks of all of them (as one
                     placement serves all); default `group`
    staging_bytes    what a rank may hold of experts that are on their way; no limit by default
    timeout_seconds  after which a rank that does not answer is given up

    Until `Handle.wait` returns, nothing may change a tensor of an expert; the group may be used.
    Raises InputError for a group that is not the state's, and MigrationError on all ranks where one
    of them cannot go ahead (a placement that cannot be used, no room) or cannot be reached.
    """
    if dist.get_world_size(group) != state.ranks or dist.get_rank(group) != state.rank:
        found = f"rank {dist.get_rank(group)} of {dist.get_world_size(group)}"
        raise InputError.at("group", found, f"rank {state.rank} of {state.ranks}, as the state")
    timeout = timedelta(seconds=timeout_seconds)
    device = state.layers[0][0].device
    agreement = Agreement(all_ranks if all_ranks is not None else group, device, timeout)
    handle = Handle(state, group, agreement, timeout)
    handle.begin(new, staging_bytes)
    return handle


def migrate(state: ExpertState, new: ArrayLike, group: Any = None, **options: Any) -> Report:
    """`start` and `wait` in one."""
    return start(state, new, group, **options).wait()


class Handle:
    """A migration that has begun: the transfers of its first batch are under way."""

    def __init__(
        self, state: ExpertState, group: Any, agreement: Agreement, timeout: timedelta
    ) -> None:
        self._state, self._group = state, group
        self._agreement, self._timeout = agreement, timeout
        self._arrivals: list[Arrival] = []
        self._rounds: list[tuple[list[tuple[str, Any]], list[Arrival]]] = []
        self._sent_bytes = self._received_bytes = self._header_bytes = self._staged_bytes = 0
        self._done = 0
        self._key = bytes(32)
        self._migration: Migration | None = None
        self._report: Report | None = None
        self._error: Exception | None = None

    def begin(self, new: ArrayLike, staging_bytes: int | None) -> None:
        """Plan, and begin the first batch. Raises as `start`."""
        state, failure = self._state, None
        try:
            self._migration = plan_migration(
                state.placement_LE, new, state.ranks,
                bytes_per_expert=state.bytes_L, staging_bytes=staging_bytes,
            )  # fmt: skip
            said = (state.layout, staging_bytes, self._migration.new_LE.tolist())
            held = (state.ranks, state.placement_LE.tolist())
            self._key = hashlib.sha256(repr((said, held)).encode()).digest()
        except Exception as error:  # the others are told, and give up as well
            failure = error
        if failure is not None or not self._migration or not self._migration.batches:
            self._agree(one_line(failure) if failure else None, "before the first transfer")
        else:
            self._stage(self._migration.batches[0])

    def wait(self) -> Report:
        """Finish, on all ranks: every expert is in the slot that the new placement gives it.

        Raises MigrationError on all ranks that can be reached; `ExpertState.placement_LE` then
        says where every expert is, as it does after a success.
        """
        if self._error is not None:
            raise MigrationError(f"this migration has failed before: {one_line(self._error)}")
        if self._report is None:
            try:
                self._finish()
            except Exception as error:
                self._error = error  # buffers are kept: a lost rank's may still be written to
                raise
            self._report = Report(
                self._sent_bytes, self._received_bytes, self._header_bytes,
                self._staged_bytes, self._done,
            )  # fmt: skip
        return self._report

    def _finish(self) -> None:
        assert self._migration is not None
        batches = self._migration.batches
        while self._done < len(batches):
            failure = self._receive()
            self._agree(failure, f"on batch {self._done + 1} of {len(batches)}", final=True)
            commit(self._state, batches[self._done], self._arrivals)
            self._arrivals = []
            self._done += 1
            if self._done < len(batches):
                self._stage(batches[self._done])
        rename(self._state, self._migration)

    def _stage(self, batch: Batch) -> None:
        """Buffers for what comes, checksums of what goes; then, if all ranks are ready, both are
        under way."""
        outgoing: dict[Transfer, torch.Tensor] = {}
        failure = None
        try:
            self._arrivals = buffers(self._state, batch)
            staged = sum(row.numel() for arrival in self._arrivals for row in arrival.rows)
            self._staged_bytes = max(self._staged_bytes, staged)
            for transfer in batch.transfers:
                if transfer.source == self._state.rank:
                    outgoing[transfer] = header(self._state, transfer)
        except Exception as error:  # the others are told, and nobody sends anything
            failure = one_line(error)
        self._agree(failure, f"before batch {self._done + 1} of {self._batches}")
        arrivals = {arrival.transfer: arrival for arrival in self._arrivals}
        for transfers in batch.rounds:
            mine = [t for t in transfers if self._state.rank in (t.source, t.target)]
            self._post(
                [(t, outgoing[t]) for t in mine if t in outgoing],
                [arrivals[t] for t in mine if t in arrivals],
            )

    @property
    def _batches(self) -> int:
        assert self._migration is not None
        return len(self._migration.batches)

    def _post(self, going: list[tuple[Transfer, torch.Tensor]], coming: list[Arrival]) -> None:
        """The receives and sends of one round, for each device together."""
        ops: dict[torch.device, list[tuple[str, Any]]] = {}

        def add(call: Any, piece: torch.Tensor, rank: int, what: str) -> None:
            peer = dist.get_global_rank(self._group, rank) if self._group is not None else rank
            op = dist.P2POp(call, piece, peer, self._group)
            ops.setdefault(piece.device, []).append((what, op))

        def exchange(t: Transfer, call: Any, rank: int, what: str, pieces: Any) -> int:
            names = ["ids", *(tensor.name for tensor in self._state.layers[t.layer])]
            for name, piece in zip(names, pieces, strict=True):
                add(call, piece, rank, f"layer {t.layer}, expert {t.expert}, tensor {name}: {what}")
            self._header_bytes += pieces[0].nbytes
            return self._state.bytes_L[t.layer]

        for arrival in coming:
            t = arrival.transfer
            what = f"not received from EP rank {t.source}"
            pieces = (arrival.header, *arrival.rows)
            self._received_bytes += exchange(t, dist.irecv, t.source, what, pieces)
        for t, ahead in going:
            what = f"not sent to EP rank {t.target}"
            slot = self._state.local(t.source_slot)
            rows = (tensor.rows[slot] for tensor in self._state.layers[t.layer])
            self._sent_bytes += exchange(t, dist.isend, t.target, what, (ahead, *rows))
        named: list[tuple[str, Any]] = []
        for posted in ops.values():
            try:
                works = dist.batch_isend_irecv([op for _, op in posted])
            except Exception as error:  # a rank was lost since all were ready
                lost = f"{posted[0][0]} ({one_line(error)}); nothing was changed"
                raise MigrationError(lost) from error
            # Some backends return one work for all of them.
            named += zip([what for what, _ in posted][-len(works) :], works, strict=True)
        self._rounds.append((named, coming))

    def _receive(self) -> str | None:
        """Wait for the transfers, and compare what comes in a round while the next is under way:
        what is wrong, if anything.

        Raises MigrationError on this rank alone where another is lost.
        """
        failure = None
        for works, arrivals in self._rounds:
            for what, work in works:
                try:
                    work.wait(self._timeout)
                except Exception as error:
                    lost = f"{what} ({one_line(error)}); nothing was changed"
                    raise MigrationError(lost) from error
            for arrival in arrivals:
                try:
                    failure = failure or difference(self._state, arrival)
                except Exception as error:  # told to the others, who wait for an answer
                    failure = one_line(error)
        self._rounds = []
        return failure

    def _agree(self, failure: str | None, when: str, *, final: bool = False) -> None:
        try:
            self._agreement.reach(self._key, failure, final=final)
        except MigrationError as error:
            raise MigrationError(f"{error}; nothing was changed") from None
        except Exception as error:
            steps = [a.transfer for a in self._arrivals]
            text = "".join(
                f"; layer {t.layer}, expert {t.expert}, tensors "
                + ", ".join(tensor.name for tensor in self._state.layers[t.layer])
                + f" from EP rank {t.source} are not committed"
                for t in steps[:1]
            )
            text += f", nor {len(steps) - 1} more" if len(steps) > 1 else ""
            lost = f"a rank is lost: no agreement {when} ({one_line(error)}){text}"
            raise MigrationError(f"{failure + '; ' if failure else ''}{lost}") from error
