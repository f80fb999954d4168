"""A trainer's requirements at a number of rows, as the arrays that layouts are held to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from routepack.kernels.layout import UNLIMITED
from routepack.requirements import NONE, Requirements
from routepack.topology import Topology
from routepack.window import Window


@dataclass(frozen=True, eq=False)
class Rules:
    """Requirements of a layout of M rows. Cells are numbered as in kernels/layout.py.

    tag_m    index of the tag of each row, or zeros
    tag_S    index of each sample's tag, or zeros
    """

    window: Window
    topology: Topology
    rows: int
    requirements: Requirements = NONE
    tag_m: NDArray[np.int64] | None = None

    @property
    def most(self) -> int:
        """Samples that a cell may hold."""
        return self.requirements.max_samples_per_cell or self.window.samples

    @property
    def limit(self) -> int:
        """Routed tokens that an EP rank may hold at a layer in a row."""
        return self.requirements.memory_limit_tokens or UNLIMITED

    @property
    def quota(self) -> int:
        """Samples due on every DP rank; -1: any number."""
        even = self.requirements.equal_samples_per_rank
        return self.window.samples // self.topology.dp if even else -1

    @property
    def on_ranks(self) -> bool:
        """Whether the samples of a group stay on one DP rank."""
        return self.requirements.together == "rank"

    @property
    def shaped(self) -> bool:
        """Whether a layout is constrained by more than the cap."""
        return (
            self.quota >= 0
            or self.on_ranks
            or self.tag_m is not None
            or (self.requirements.max_samples_per_cell is not None)
        )

    @cached_property
    def tag_S(self) -> NDArray[np.int64]:
        """Index of each sample's tag."""
        if self.tag_m is None:
            return np.zeros(self.window.samples, np.int64)
        return tag_index_S(self.window)

    @cached_property
    def lane_c(self) -> NDArray[np.int64]:
        """Samples stay in the lane of their cell: rows of a tag, cells of a DP rank, or both."""
        ranks = self.topology.dp
        cells = np.arange(self.rows * ranks)
        tag_m = np.zeros(self.rows, np.int64) if self.tag_m is None else self.tag_m
        lane_c = tag_m[cells // ranks]
        return lane_c * ranks + cells % ranks if self.on_ranks else lane_c

    def lane_S(self, rank_S: NDArray[np.int64] | None) -> NDArray[np.int64]:
        """The lane that each sample belongs in; `rank_S`: its DP rank, where that is settled."""
        if not self.on_ranks:
            return self.tag_S
        assert rank_S is not None
        return self.tag_S * self.topology.dp + rank_S

    @cached_property
    def lanes(self) -> tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Their number, lane_c renumbered from 0, where each starts, and cells lane by lane."""
        _, lane_c = np.unique(self.lane_c, return_inverse=True)
        lane_c = np.asarray(lane_c, np.int64)
        count = int(lane_c.max()) + 1
        start_n = np.searchsorted(np.sort(lane_c), np.arange(count + 1))
        return count, lane_c, start_n.astype(np.int64), np.argsort(lane_c, kind="stable")

    @cached_property
    def units(self) -> tuple[int, NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Groups of samples that share a DP rank: number, of each sample, starts, members."""
        empty = np.zeros(0, np.int64)
        if not self.on_ranks:
            return 0, empty, empty, empty
        unit_S = unit_index_S(self.window)
        count = int(unit_S.max()) + 1
        start_n = np.searchsorted(np.sort(unit_S), np.arange(count + 1)).astype(np.int64)
        return count, unit_S, start_n, np.argsort(unit_S, kind="stable")

    @cached_property
    def block_c(self) -> NDArray[np.int64]:
        """Cells whose samples keep their number: those of a DP rank."""
        return np.arange(self.rows * self.topology.dp) % self.topology.dp

    def hold(self, cell_S: NDArray[np.int32]) -> bool:
        """Whether a complete layout within the cap meets them (the memory limit aside)."""
        if not self.shaped:
            return True
        ranks = self.topology.dp
        if np.bincount(cell_S).max() > self.most:
            return False
        if self.quota >= 0 and np.ptp(np.bincount(cell_S % ranks, minlength=ranks)):
            return False
        if self.tag_m is not None and (self.tag_m[cell_S // ranks] != self.tag_S).any():
            return False
        if not self.on_ranks:
            return True
        _, unit_S, start_n, members_S = self.units
        rank_S = cell_S % ranks
        return bool((rank_S == rank_S[members_S[start_n[:-1]]][unit_S]).all())


def tag_index_S(window: Window) -> NDArray[np.int64]:
    """Index of each sample's tag among the tags in ascending order."""
    assert window.tag_S is not None
    return np.asarray(np.unique(window.tag_S, return_inverse=True)[1], np.int64)


def unit_index_S(window: Window) -> NDArray[np.int64]:
    """Index of each sample's group among the groups in ascending order."""
    assert window.group_S is not None
    return np.asarray(np.unique(window.group_S, return_inverse=True)[1], np.int64)
