"""The fewest rows that hold a window, with a certificate (design section 3, stage 2).

M rows of D cells exist when the samples fit into M * D bins of the token cap and no cell need stay
empty (S >= M * D). So this is bin packing in which only the number of bins, rounded up to a
multiple of D, matters. Cheap stages come first, each budgeted in steps; the first that closes the
gap ends it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InfeasibleError
from routepack.kernels.exact_packing import exact_pack
from routepack.kernels.packing import best_fit, fill_bins, first_fit, repack
from routepack.kernels.rng import stream_key
from routepack.row_bounds import (
    column_generation_bound,
    dual_feasible_bound,
    l2_bound,
    volume_bound,
)

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

STEPS = 2_000_000  # of repacking, about 0.2 s
# Candidates for a bin in the trials of subset-sum filling: around 12 does best, the rest is for
# windows unlike those it was measured on.
FILL_WIDTHS = (12, 16, 10, 24, 12, 16, 8, 32)
COLUMN_ROUNDS = 40
SMALL_SAMPLES, SMALL_NODES = 40, 20_000


@dataclass(frozen=True)
class Rows:
    """The fewest rows known, the proof that it takes as many, and bins that show they suffice."""

    rows: int
    """M: `bins` are at most M * D."""
    lower_bound: int
    """Rows that any layout needs, proven."""
    certified: bool
    """rows == lower_bound"""
    method: str
    """The stage that closed the gap: a bound or a packing; "best known" where none did."""
    bins: list[list[int]]
    """Sample indices, longest first within a bin; none empty, each within the token cap."""


def minimal_rows(
    lengths_S: Int64, token_cap: int, data_parallel: int, *, seed: int, iterations: int = STEPS
) -> Rows:
    """The smallest M for which M rows of `data_parallel` non-empty cells hold all samples.

    lengths_S: tokens, at least one sample, each in 1..token_cap. `iterations` budgets the
    repacking search and, in proportion, the exact search; the result depends on nothing else but
    the arguments. Raises InfeasibleError where there are fewer samples than cells.
    """
    lengths_S = np.array(lengths_S, np.int64)
    assert lengths_S.size > 0, "a window without samples"
    assert 0 < lengths_S.min() <= lengths_S.max() <= token_cap, "lengths outside 1..token_cap"
    longest_first_S = _longest_first(lengths_S)
    gap = _Gap(lengths_S[longest_first_S], token_cap, data_parallel, seed, iterations)
    for stage in STAGES:
        stage(gap)
        gap.require_samples()
        if gap.closed:
            break
    samples, needed = lengths_S.size, gap.rows * data_parallel
    if samples < needed:
        reason = (
            f"no layout was found with fewer than {gap.rows} rows of {data_parallel} cells, "
            f"none empty (proven: at least {gap.lower_rows})"
        )
        raise InfeasibleError.at("samples", samples, f"at least {needed}, because {reason}")
    return Rows(
        rows=gap.rows,
        lower_bound=gap.lower_rows,
        certified=gap.closed,
        method=gap.method if gap.closed else "best known",
        bins=_bins(gap.bin_of_S, longest_first_S),
    )


def ffd_bins(lengths_S: Int64, cap: int) -> list[list[int]]:
    """First-fit decreasing: by length descending (ties: lowest index), first bin that fits.

    Bins in opening order; sample indices in the order in which they were placed.
    """
    order_S = _longest_first(lengths_S)
    bin_of_S = first_fit(order_S, np.array(lengths_S, np.int64), cap, order_S.size)
    return _bins(bin_of_S[order_S], order_S)


def split_to(bins: list[list[int]], count: int) -> list[list[int]]:
    """Split bins until there are `count`, the one with most samples (ties: lowest index) first.

    Its even positions stay, its odd positions become a new last bin. Needs `count` samples.
    """
    assert len(bins) <= count <= sum(map(len, bins)), "bins cannot be split to this count"
    bins = [list(members) for members in bins]
    most_first = [(-len(members), b) for b, members in enumerate(bins)]
    heapq.heapify(most_first)
    while len(bins) < count:
        _, b = heapq.heappop(most_first)
        bins.append(bins[b][1::2])
        bins[b] = bins[b][::2]
        heapq.heappush(most_first, (-len(bins[b]), b))
        heapq.heappush(most_first, (-len(bins[-1]), len(bins) - 1))
    return bins


@dataclass
class _Gap:
    """What is proven (`lower` bins) and what is reached (`bin_of_S`); samples longest first."""

    lengths_S: Int64
    cap: int
    data_parallel: int
    seed: int
    steps: int
    lower: int = 1
    alpha: int = 1
    method: str = ""
    bin_of_S: Int32 = field(init=False)

    def __post_init__(self) -> None:
        self.order_S = np.arange(self.lengths_S.size)
        self.bin_of_S = first_fit(self.order_S, self.lengths_S, self.cap, self.order_S.size)

    @property
    def lower_rows(self) -> int:
        return -(-self.lower // self.data_parallel)

    @property
    def rows(self) -> int:
        return -(-(int(self.bin_of_S.max()) + 1) // self.data_parallel)

    @property
    def closed(self) -> bool:
        return self.lower_rows == self.rows

    @property
    def fewer_bins(self) -> int:
        """Bins of a packing that would save a row."""
        return (self.rows - 1) * self.data_parallel

    def prove(self, bins: int, method: str) -> None:
        if bins > self.lower:
            self.lower, self.method = bins, method

    def reach(self, bin_of_S: Int32, method: str) -> bool:
        """Take a complete packing that saves a row."""
        saves = bool(bin_of_S.min() >= 0) and int(bin_of_S.max()) < self.fewer_bins
        if saves:
            self.bin_of_S, self.method = bin_of_S, method
        return saves

    def require_samples(self) -> None:
        samples, rows, width = self.lengths_S.size, self.lower_rows, self.data_parallel
        if samples < rows * width:
            rows_of = f"{rows} {'row' if rows == 1 else 'rows'} of {width}"
            reason = f"token_cap = {self.cap} needs at least {rows_of} cells, none empty"
            raise InfeasibleError.at(
                "samples", samples, f"at least {rows * width}, because {reason}"
            )


def _volume(gap: _Gap) -> None:
    gap.lower, gap.method = volume_bound(gap.lengths_S, gap.cap), "volume"


def _l2(gap: _Gap) -> None:
    bins, gap.alpha = l2_bound(gap.lengths_S, gap.cap)
    gap.prove(bins, "l2")


def _best_fit(gap: _Gap) -> None:
    gap.reach(best_fit(gap.order_S, gap.lengths_S, gap.cap, gap.fewer_bins), "best fit")


def _dual_feasible(gap: _Gap) -> None:
    gap.prove(dual_feasible_bound(gap.lengths_S, gap.cap), "dual-feasible")


def _subset_sum(gap: _Gap) -> None:
    for trial, width in enumerate(FILL_WIDTHS):
        if not gap.closed:
            key = stream_key(gap.seed, 1, trial)
            packed_S = fill_bins(gap.lengths_S, gap.cap, gap.fewer_bins, width, key)
            gap.reach(packed_S, "subset-sum filling")


def _repack(gap: _Gap) -> None:
    while not gap.closed and gap.reach(_repacked(gap, gap.fewer_bins), "repacking"):
        pass


def _repacked(gap: _Gap, bins: int) -> Int32:
    """Into `bins` bins by annealing, first only the samples that make L2 tight; -1 on failure.

    At L2's alpha, the samples above cap - alpha are alone in the tight part of the problem, and
    those below alpha only fill what it leaves.
    """
    lengths_S, cap = gap.lengths_S, gap.cap
    hottest = 1 + cap / 2048  # tokens, about the gaps between the lengths of a few samples
    alone = int(np.count_nonzero(lengths_S > cap - gap.alpha))
    long = int(np.count_nonzero(lengths_S >= gap.alpha))
    packed_S = np.full(lengths_S.size, -1, np.int32)
    packed_S[:alone] = np.arange(alone)
    if long > alone:
        tight_S = lengths_S[alone:long]
        start_S = first_fit(np.arange(tight_S.size), tight_S, cap, bins - alone)
        start_S = _completed(start_S, tight_S, cap, bins - alone)
        key = stream_key(gap.seed, 2, bins)
        over, tight_bin_S = repack(start_S, tight_S, cap, bins - alone, gap.steps, hottest, key)
        if over > 0:
            return packed_S
        packed_S[alone:long] = alone + tight_bin_S
    start_S = _completed(packed_S, lengths_S, cap, bins)
    key = stream_key(gap.seed, 3, bins)
    over, all_S = repack(start_S, lengths_S, cap, bins, gap.steps, hottest, key)
    return all_S if over == 0 else packed_S


def _completed(bin_of_S: Int32, lengths_S: Int64, cap: int, bins: int) -> Int32:
    """Samples in no bin go into the fullest with room, or else into the emptiest."""
    bin_of_S = bin_of_S.copy()
    placed_S = bin_of_S >= 0
    weights = lengths_S[placed_S].astype(np.float64)
    room_B = cap - np.bincount(bin_of_S[placed_S], weights, minlength=bins).astype(np.int64)
    for i in np.flatnonzero(~placed_S):
        fits_B = room_B >= lengths_S[i]
        b = np.where(fits_B, room_B, cap + 1).argmin() if fits_B.any() else room_B.argmax()
        bin_of_S[i] = b
        room_B[b] -= lengths_S[i]
    return bin_of_S


def _columns(gap: _Gap) -> None:
    rows = gap.rows - 1  # first what would close the gap, then, if out of reach, less
    while rows >= gap.lower_rows:
        enough = rows * gap.data_parallel
        bins = column_generation_bound(gap.lengths_S, gap.cap, enough, COLUMN_ROUNDS)
        gap.prove(bins, "column-generation")
        rows -= 1


def _exact(gap: _Gap, nodes: int) -> None:
    while not gap.closed:
        bins = gap.lower_rows * gap.data_parallel
        verdict, packed_S = exact_pack(gap.lengths_S, gap.cap, bins, nodes)
        if verdict < 0:
            return
        if verdict == 1:
            gap.reach(packed_S, "exact search")
        else:
            gap.prove(bins + 1, "exact search")


def _exact_small(gap: _Gap) -> None:
    if gap.lengths_S.size <= SMALL_SAMPLES:
        _exact(gap, SMALL_NODES)


def _exact_large(gap: _Gap) -> None:
    _exact(gap, max(5 * SMALL_NODES, gap.steps // 20))


STAGES: tuple[Callable[[_Gap], None], ...] = (
    _volume,
    _l2,
    _best_fit,
    _dual_feasible,
    _exact_small,
    _subset_sum,
    _repack,
    _columns,
    _exact_large,
)


def _longest_first(lengths_S: Int64) -> Int64:
    return np.argsort(-np.asarray(lengths_S, np.int64), kind="stable")


def _bins(bin_of_S: Int32, sample_S: Int64) -> list[list[int]]:
    """Lists of samples by bin, in the order of `sample_S`, whose bins are `bin_of_S`."""
    bins: list[list[int]] = [[] for _ in range(int(bin_of_S.max()) + 1)]
    for b, sample in zip(bin_of_S.tolist(), sample_S.tolist(), strict=True):
        bins[b].append(sample)
    return bins
