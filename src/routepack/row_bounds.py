"""Lower bounds on the number of bins of `cap` tokens that hold all samples. Each one is proven.

All that the proofs rest on is integer arithmetic. A *dual feasible function* f maps lengths to
weights so that whatever fits into one bin weighs at most f(cap); then ceil(sum f(n) / f(cap)) bins
are needed. Legend: S samples, T distinct lengths, V parameter values, X columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from routepack.kernels.exact_packing import fill_one_bin
from routepack.kernels.packing import first_fit

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

# Parameters tried for each family of dual feasible functions (at most; spread over the lengths).
PARAMETERS = 256
# Limits of column generation's knapsack table: capacities, distinct lengths, and their product.
MOST_CAPACITIES, MOST_LENGTHS, MOST_CELLS = 1 << 17, 128, 1 << 21
COLUMNS_PER_ROUND = 64
# Weights of column generation are integers, multiples of 1 / DUAL_UNITS of a bin.
DUAL_UNITS = 1 << 30


def volume_bound(lengths_S: Int64, cap: int) -> int:
    """ceil(sum of lengths / cap)."""
    return _ceil_ratio(int(lengths_S.sum()), cap)


def l2_bound(lengths_S: Int64, cap: int) -> tuple[int, int]:
    """Martello and Toth's L2 (1990): (bins, the alpha that gives the most, in tokens).

    For an alpha up to cap / 2: samples above cap - alpha are alone as far as samples of alpha or
    more are concerned; those above cap / 2 share no bin with each other; of the rest, samples
    below alpha are ignored.
    """
    sizes_T, counts_T = np.unique(lengths_S, return_counts=True)
    alpha_V = sizes_T[2 * sizes_T <= cap]
    if alpha_V.size == 0:
        return len(lengths_S), 1
    number_T = np.concatenate(([0], np.cumsum(counts_T)))
    tokens_T = np.concatenate(([0], np.cumsum(counts_T * sizes_T)))
    low_V = np.searchsorted(sizes_T, alpha_V, side="left")
    half = np.searchsorted(sizes_T, cap // 2, side="right")
    high_V = np.searchsorted(sizes_T, cap - alpha_V, side="right")
    alone_V = number_T[-1] - number_T[high_V]
    halves_V = number_T[high_V] - number_T[half]
    room_V = alone_V * cap + np.maximum(halves_V * cap, tokens_T[high_V] - tokens_T[low_V])
    best = int(room_V.argmax())
    return _ceil_ratio(int(room_V[best]), cap), int(alpha_V[best])


def dual_feasible_bound(lengths_S: Int64, cap: int) -> int:
    """The best of three families of dual feasible functions.

    u^(k), and u^(k) after the threshold U^(eps) of L2 (Fekete and Schepers 2001), and f_CCM
    (Carlier, Clautiaux and Moukrim 2007).
    """
    sizes_T, counts_T = np.unique(lengths_S, return_counts=True)
    short_V = _spread(sizes_T[2 * sizes_T <= cap], PARAMETERS)
    gaps_V = cap - sizes_T[2 * sizes_T > cap]
    best = 0
    thresholds = np.concatenate(([0], _spread(short_V, 32)))
    cut_VT = np.stack([threshold(sizes_T, cap, int(eps)) for eps in thresholds])
    for k in range(1, 32):
        total = int((fekete_schepers(cut_VT, cap, k) @ counts_T).max())
        best = max(best, _ceil_ratio(total, k * cap))
    for width in np.unique(np.concatenate((short_V, _spread(gaps_V[gaps_V > 0], PARAMETERS)))):
        total = int(carlier_clautiaux_moukrim(sizes_T, cap, int(width)) @ counts_T)
        best = max(best, _ceil_ratio(total, 2 * (cap // int(width))))
    return best


def threshold(sizes_T: Int64, cap: int, eps: int) -> Int64:
    """U^(eps), eps <= cap / 2: below eps nothing, above cap - eps a whole bin. f(cap) = cap."""
    return np.where(sizes_T > cap - eps, cap, np.where(sizes_T < eps, 0, sizes_T))


def fekete_schepers(sizes_T: Int64, cap: int, k: int) -> Int64:
    """u^(k), k >= 1: multiples of cap / (k + 1) keep their size, others round. f(cap) = k cap."""
    parts, rest = np.divmod((k + 1) * sizes_T, cap)
    return np.where(rest == 0, k * sizes_T, parts * cap)


def carlier_clautiaux_moukrim(sizes_T: Int64, cap: int, width: int) -> Int64:
    """f_CCM, 1 <= width <= cap / 2: sizes in whole widths. f(cap) = 2 floor(cap / width)."""
    whole = cap // width
    large_T = 2 * (whole - (cap - sizes_T) // width)
    small_T = 2 * (sizes_T // width)
    return np.where(2 * sizes_T > cap, large_T, np.where(2 * sizes_T == cap, whole, small_T))


def column_generation_bound(lengths_S: Int64, cap: int, enough: int, rounds: int) -> int:
    """Gilmore and Gomory's linear program (1961), made safe: stops at a bound above `enough`.

    Each round solves the program over the bin contents (columns) known so far, at first those of
    first-fit decreasing, and asks an exact knapsack for contents of most weight under its duals.
    The duals, rounded to integers, prove ceil(total weight / most weight in a bin), whatever the
    floating-point solver did; they are smoothed towards the best so far (Wentges 1997).
    Where lengths are too many for the knapsack's table, they are rounded down to fewer.
    """
    unit = 1 + cap // MOST_CAPACITIES
    lengths_S, cap = lengths_S // unit, cap // unit  # what fitted still fits
    lengths_S = lengths_S[lengths_S > 0]
    if lengths_S.size == 0:
        return 1
    class_S, sizes_T, counts_T = _classes(lengths_S, cap)
    order_S = np.argsort(-lengths_S, kind="stable")
    bin_of_S = first_fit(order_S, sizes_T[class_S], cap, order_S.size)
    columns_XT = np.zeros((int(bin_of_S.max()) + 1, len(sizes_T)), np.int32)
    np.add.at(columns_XT, (bin_of_S, class_S), 1)
    known = {column.tobytes() for column in columns_XT}
    best, best_ratio, center_T = 0, 0.0, None
    for _ in range(rounds):
        lp = linprog(
            np.ones(len(columns_XT)),
            A_ub=-columns_XT.T.astype(np.float64),
            b_ub=-counts_T.astype(np.float64),
            method="highs",
        )
        # The value only falls as columns come: then a bound above `enough` is out of reach.
        if lp.status != 0 or lp.fun is None or lp.fun <= enough + 1e-6:
            break
        dual_T = np.clip(-lp.ineqlin.marginals, 0.0, 1.0)
        center_T = dual_T if center_T is None else center_T
        for guess_T in ((center_T + dual_T) / 2, dual_T):
            weights_T = np.floor(guess_T * DUAL_UNITS).astype(np.int64)
            worth_X, found_XT = fill_one_bin(sizes_T, counts_T, weights_T, cap)
            total, most = int(weights_T @ counts_T), max(1, int(worth_X[0]))
            best = max(best, _ceil_ratio(total, most))
            if best > enough:
                return best
            if total / most > best_ratio:
                best_ratio, center_T = total / most, weights_T / most
            new_XT = _worthwhile(found_XT, dual_T, known)
            if len(new_XT) > 0:
                break
        else:
            break  # the program is solved
        columns_XT = np.concatenate((columns_XT, new_XT))
    return best


def _worthwhile(found_XT: Int32, dual_T: Float64, known: set[bytes]) -> Int32:
    """The columns that the duals of the program price above a bin, most first; now known."""
    worth_X = found_XT @ dual_T
    new = []
    for x in np.argsort(-worth_X, kind="stable")[:COLUMNS_PER_ROUND]:
        if worth_X[x] > 1 + 1e-9 and found_XT[x].tobytes() not in known:
            known.add(found_XT[x].tobytes())
            new.append(x)
    return found_XT[new]


def _classes(lengths_S: Int64, cap: int) -> tuple[Int64, Int64, Int64]:
    """Class of each sample, and size and number of samples of each class (rounded down to it)."""
    sizes_T, class_S = np.unique(lengths_S, return_inverse=True)
    most = max(8, min(MOST_LENGTHS, MOST_CELLS // cap))
    if len(sizes_T) > most:
        edges = np.arange(most) * len(lengths_S) // most  # as many samples in each class
        sizes_T = np.unique(np.sort(lengths_S)[edges])
        class_S = np.searchsorted(sizes_T, lengths_S, side="right") - 1
    counts_T = np.bincount(class_S, minlength=len(sizes_T)).astype(np.int64)
    return class_S.astype(np.int64), sizes_T, counts_T


def _spread(values_V: Int64, most: int) -> Int64:
    """At most `most` of the values, evenly spread over their ranks."""
    if len(values_V) <= most:
        return values_V
    return values_V[np.arange(most) * len(values_V) // most]


def _ceil_ratio(total: int, unit: int) -> int:
    return -(-total // unit)
