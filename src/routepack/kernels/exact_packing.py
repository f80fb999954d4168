"""Bin packing kernels that prove: the exact search, and the pricing of column generation.

Legend: S samples, T distinct lengths, P pieces (lots of equal samples), C capacities 0..cap, X
columns, D depth of the search. `bin_of_S[i]` is the bin of sample i, or -1 where it was not placed.
"""

from __future__ import annotations

import numpy as np

from routepack.kernels.jit import kernel
from routepack.kernels.packing import Int32, Int64


@kernel("Tuple((int64, int32[::1]))(int64[::1], int64, int64, int64)")
def exact_pack(lengths_S: Int64, cap: int, bins: int, nodes: int) -> tuple[int, Int32]:
    """Whether `bins` bins suffice: (1, bin_of_S), (0, ...) if proven not, (-1, ...) out of nodes.

    lengths_S descending. Depth-first bin completion (Martello and Toth 1990; Korf 2003): the next
    bin opens with the longest sample left and is completed in falling order of length. Dropped are
    completions that leave room for a sample, or that an exchange for longer samples or for one
    sample of the same sum would still fit; and branches that waste more than there is to waste.
    """
    S = lengths_S.size
    bin_of_S = np.full(S, -1, np.int32)
    next_S = np.arange(1, S + 2)  # circular list of the samples left; S is its head
    prev_S = np.arange(-1, S)
    next_S[S], prev_S[0] = 0, S
    waste = bins * cap - lengths_S.sum()
    if waste < 0:
        return 0, bin_of_S
    item_D = np.empty(S + 1, np.int64)
    room_D = np.empty(S + 1, np.int64)
    waste_D = np.empty(S + 1, np.int64)
    opens_D = np.empty(S + 1, np.bool_)
    depth, opened, room = 0, 0, 0
    descend = True
    while True:
        opens = False
        item = S  # none
        if descend:
            if depth == S:
                return 1, bin_of_S
            if lengths_S[prev_S[S]] > room:  # the bin is complete (or none is open)
                fits = opened < bins and bool(room <= waste)
                d = depth - 1
                while fits and d >= 0 and not opens_D[d]:
                    longer = prev_S[item_D[d]]
                    grow = lengths_S[longer] - lengths_S[item_D[d]] if longer < S else 0
                    fits = not bool(0 < grow <= room)
                    d -= 1
                if fits:
                    opens = True
                    item = next_S[S]
            else:
                item = next_S[item_D[depth - 1]]
                while item < S and lengths_S[item] > room:
                    item = next_S[item]
        else:
            if depth == 0:
                return 0, bin_of_S
            depth -= 1
            last = item_D[depth]
            next_S[prev_S[last]] = last
            prev_S[next_S[last]] = last
            bin_of_S[last] = -1
            room, waste = room_D[depth], waste_D[depth]
            if opens_D[depth]:
                opened -= 1
            elif lengths_S[last] < room:  # a sample that fills the bin needs no alternative
                second = prev_S[prev_S[S]]  # nor is there a choice where no two samples fit
                if second < S and lengths_S[prev_S[S]] + lengths_S[second] <= room:
                    item = next_S[last]
                    while item < S and lengths_S[item] == lengths_S[last]:
                        item = next_S[item]
        descend = item < S
        if descend:
            if nodes == 0:
                return -1, bin_of_S
            nodes -= 1
            item_D[depth], opens_D[depth], room_D[depth], waste_D[depth] = item, opens, room, waste
            depth += 1
            if opens:
                opened += 1
                waste -= room
                room = cap
            room -= lengths_S[item]
            bin_of_S[item] = opened - 1
            next_S[prev_S[item]] = next_S[item]
            prev_S[next_S[item]] = prev_S[item]


@kernel("Tuple((int64[::1], int32[:, ::1]))(int64[::1], int64[::1], int64[::1], int64)")
def fill_one_bin(
    sizes_T: Int64, counts_T: Int64, weights_T: Int64, cap: int
) -> tuple[Int64, Int32]:
    """Bounded knapsack, exact in integers: contents of a bin of greatest weight.

    Returns (worth_X, column_XT): column 0 is the heaviest of all, column 1 + t a heaviest one with
    at least one sample of size t, or empty where the supply of t does not allow the one found.
    """
    T = sizes_T.size
    lots_T = np.zeros(T, np.int64)
    for t in range(T):
        copies = min(counts_T[t], cap // sizes_T[t])
        while copies > 0:
            lots_T[t] += 1
            copies >>= 1
    P = lots_T.sum()
    took_PC = np.zeros((P, cap + 1), np.bool_)
    kind_P = np.empty(P, np.int64)
    copies_P = np.empty(P, np.int64)
    best_C = np.zeros(cap + 1, np.int64)
    p = 0
    for t in range(T):
        left = min(counts_T[t], cap // sizes_T[t])
        for lot in range(lots_T[t]):  # 1, 2, 4, ... and what is left reach every number of copies
            copies = min(1 << lot, left)
            left -= copies
            kind_P[p], copies_P[p] = t, copies
            size, weight = copies * sizes_T[t], copies * weights_T[t]
            for c in range(cap, size - 1, -1):
                if best_C[c - size] + weight > best_C[c]:
                    best_C[c] = best_C[c - size] + weight
                    took_PC[p, c] = True
            p += 1
    worth_X = np.zeros(T + 1, np.int64)
    column_XT = np.zeros((T + 1, T), np.int32)
    for x in range(T + 1):
        c = cap if x == 0 else cap - sizes_T[x - 1]
        worth_X[x] = best_C[c]
        for p in range(P - 1, -1, -1):
            if took_PC[p, c]:
                column_XT[x, kind_P[p]] += copies_P[p]
                c -= copies_P[p] * sizes_T[kind_P[p]]
        if x > 0:
            column_XT[x, x - 1] += 1
            worth_X[x] += weights_T[x - 1]
            if column_XT[x, x - 1] > counts_T[x - 1]:
                worth_X[x] = 0
                column_XT[x] = 0
    return worth_X, column_XT
