"""A lower bound on attention that knows the token cap and the number of cells.

A group waits for its heaviest cell. Two samples above half of the cap never share a cell, so the
group of the longest sample is as high as that sample, while the cells beside it hold shorter ones:
whatever these cannot be filled up with is lost. Every stage is bounded on its own, as the sum of
the stages' maxima is what counts.

**Proof.** A layout has `cells` non-empty cells in groups of `width`; t is the height of a group,
the work of its heaviest cell. Give each sample any value between 0 and its work. Then

    width * sum of heights = sum over cells of t = sum of all values + sum over cells of
                             (t - values in the cell),

and no summand of the last sum is negative, since a cell's values are at most its work. They are
bounded from below by

1. heights: sorted, the k-th group is at least as high as the cell that is number k * width by work
   (from 0), and that one at least as `_least_works` says;
2. contents: a cell's longest sample *leads* it. Cells have different leaders, and one led by a
   given sample is worth at most what `_most_values` says.

The sum over cells of max(0, height - content) is least when both are sorted alike (it is convex in
the difference), and no less for higher heights or smaller contents. That is the bound. What a value
is below the work is the Lagrangian price of a sample, which stops it from filling up many cells.

Suffixes: S samples, longest first; c cells, heaviest first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

FLAT_PRICES, GROUPS = 16, 4  # prices that are tried: values of a token, groups filled up greedily
NOISE = 1e-9  # a lift below this part of the work is not worth a name, and may be rounding


def attention_lift(
    lengths_S: Int64, work_S: Float64, token_cap: int, cells: int, width: int
) -> float:
    """By how much the heights of all groups exceed work_S.sum() / width, at least; 0 if unproven.

    lengths_S: tokens of each sample, at most token_cap. work_S: its work at one attention stage; no
    sample's is above that of a longer one. Holds for every layout of the samples in exactly `cells`
    non-empty cells within the cap, in groups of `width` cells. The module says why.
    """
    order_S = np.argsort(-lengths_S, kind="stable")
    lengths_S, work_S = lengths_S[order_S], work_S[order_S]
    height_c = np.repeat(_least_works(lengths_S, work_S, token_cap, cells)[::width], width)
    best: tuple[float, Float64, Float64] = (0.0, work_S, work_S)
    for value_S in _values(lengths_S, work_S, token_cap, cells, width):
        content_c = -np.sort(-_most_values(lengths_S, value_S, token_cap, cells))[:cells]
        short_c = np.maximum(height_c - content_c, 0.0)
        more_S = value_S - work_S
        about = float(short_c.sum() + more_S.sum())
        if about > best[0]:
            best = (about, short_c, more_S)
    lift = math.fsum([*best[1].tolist(), *best[2].tolist()]) if best[0] > 0 else 0.0
    return lift / width if lift > NOISE * float(work_S.sum()) else 0.0


def _least_works(lengths_S: Int64, work_S: Float64, token_cap: int, cells: int) -> Float64:
    """The work that the c-th heaviest cell has at least, for every c [cells].

    The longest samples of which no two fit into a cell are in different cells, so the c-th heaviest
    cell has at least the c-th of their works. And as no cell is empty, any j samples share at least
    j - (S - cells) cells.
    """
    least_c = work_S[len(work_S) - cells :].copy()
    clash_S = lengths_S[:-1] + lengths_S[1:] > token_cap  # then also with every longer sample
    alone = 1 + int(np.argmin([*clash_S.tolist(), False]))
    alone = min(alone, cells)
    least_c[:alone] = np.maximum(least_c[:alone], work_S[:alone])
    return least_c


def _most_values(lengths_S: Int64, value_S: Float64, token_cap: int, cells: int) -> Float64:
    """The most value in a cell led by each sample [S].

    Beside its leader a cell holds samples that come later and fit into the room r that it leaves:
    at most r tokens of at most the highest value per token, and at most so many samples as leave
    one for every other cell, and as fit if all were the shortest, of at most the highest value.
    """
    room_S = token_cap - lengths_S
    first_S = np.searchsorted(-lengths_S, -room_S)  # of the samples that fit beside the leader
    first_S = np.maximum(first_S, np.arange(1, len(lengths_S) + 1))
    count_S = np.minimum(room_S // lengths_S[-1], len(lengths_S) - cells)
    by_tokens_S = room_S * _most_from(value_S / lengths_S)[first_S]
    by_count_S = count_S * _most_from(value_S)[first_S]
    return np.asarray(value_S + np.minimum(by_tokens_S, by_count_S))


def _most_from(of_S: Float64) -> Float64:
    """The largest from each sample on, and 0 for none left [S + 1]."""
    return np.append(np.maximum.accumulate(of_S[::-1])[::-1], 0.0)


def _values(
    lengths_S: Int64, work_S: Float64, token_cap: int, cells: int, width: int
) -> Iterator[Float64]:
    """Values to try; any are valid. Samples above half of the cap fill up no cell: all their work.

    First the work itself; then no token of the others worth more than a limit; then what is best
    where the first groups, led by the longest samples, take the rest in parts of any size.
    """
    yield work_S
    density_S = work_S / lengths_S
    shared = int(np.searchsorted(-lengths_S, -(token_cap // 2)))
    for k in np.linspace(shared, len(lengths_S), FLAT_PRICES, endpoint=False).astype(int).tolist():
        if k < len(lengths_S):
            value_S = np.minimum(work_S, density_S[k] * lengths_S)
            value_S[:shared] = work_S[:shared]
            yield value_S
    for leaders in range(width, min(cells, GROUPS * width) + 1, width):
        if leaders < len(lengths_S):
            yield _filled_up(lengths_S, work_S, token_cap, leaders)


def _filled_up(lengths_S: Int64, work_S: Float64, token_cap: int, leaders: int) -> Float64:
    """Dual values of filling up the cells of the longest samples with parts of the others.

    A part fits where its whole sample would; the room for all samples of a length or more is nested
    in that for shorter ones, so the longest (of the highest work per token) go first. A sample that
    runs out of room sets the value of a token, its own, for those before it.
    """
    others_S = lengths_S[leaders:]
    rooms = np.sort(token_cap - lengths_S[:leaders])
    room_from = np.append(np.cumsum(rooms[::-1])[::-1], 0)
    room_S = room_from[np.searchsorted(rooms, others_S)]
    wanted_S = np.cumsum(others_S)
    used_S = wanted_S + np.minimum(np.minimum.accumulate(room_S - wanted_S), 0)
    full_S = np.diff(used_S, prepend=0) == others_S
    limit_S = np.where(full_S, len(others_S), np.arange(len(others_S)))
    limit_S = np.minimum.accumulate(limit_S[::-1])[::-1]
    density_S = np.append(work_S[leaders:] / others_S, 0.0)[limit_S]
    value_S = work_S.copy()
    value_S[leaders:] = np.minimum(work_S[leaders:], density_S * others_S)
    return value_S
