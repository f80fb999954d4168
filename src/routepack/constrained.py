"""Rows and layouts under a trainer's requirements (rules.py): proven bounds, greedy, repair."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InfeasibleError
from routepack.kernels.inserting import insert, repair
from routepack.kernels.rng import stream_key
from routepack.requirements import Requirements
from routepack.row_bounds import dual_feasible_bound, l2_bound
from routepack.rows import Rows, ffd_bins, minimal_rows, split_to
from routepack.rules import Rules, tag_index_S, unit_index_S
from routepack.topology import Topology
from routepack.window import Window

ATTEMPTS = 6  # at a layout, with orders that differ more and more
NOISE = 0.05  # of the logarithm of a sample's weight in the order, per attempt
REPAIR_STEPS = 400_000
GROUP_STEPS = 40_000  # of repacking a group: there may be many, and bounds are found without
SETTLE_STEPS = 4_000  # moves of groups between ranks that are tried
MORE_ROWS = 8  # multiples of rows beyond the fewest that are tried
LAYOUT = 5  # stream of random numbers


def row_lower_bound(
    window: Window, token_cap: int, topology: Topology, requirements: Requirements, seed: int
) -> tuple[int, str]:
    """Rows that any layout under the requirements needs, and what proves it.

    Needs `requirements.check` to pass.
    """
    parts = _parts(window, token_cap, topology, requirements, seed)
    return _rounded(parts, requirements)


def fewest_rows(
    window: Window,
    token_cap: int,
    topology: Topology,
    requirements: Requirements,
    work_S: NDArray[np.float64],
    seed: int,
) -> tuple[Rows, Rules, NDArray[np.int32] | None]:
    """The fewest rows with a layout under the requirements, its rules, and the layout (cell_S).

    Where they leave the layout free, any at these rows will do, and None is returned for it.
    Raises InfeasibleError, which says what stands in the way.
    """
    parts = _parts(window, token_cap, topology, requirements, seed)
    lower, method = _rounded(parts, requirements)
    multiple = requirements.rows_multiple_of
    known = sum(part.rows for part in parts)
    first = -(-known // multiple) * multiple
    last = first
    for rows in range(first, first + MORE_ROWS * multiple, multiple):
        if window.samples < rows * topology.dp:
            break
        count = _tag_rows(parts, rows, topology.dp)
        if count is None:
            break
        tag_m = np.repeat(np.arange(len(parts)), count) if len(parts) > 1 else None
        rules = Rules(window, topology, rows, requirements, tag_m)
        last = rows
        certified = rows == lower
        name = method if certified else "best known"
        if not rules.shaped:
            return Rows(rows, lower, certified, name, parts[0].bins), rules, None
        for cell_S in layouts(rules, token_cap, work_S, ATTEMPTS, seed, _packed_S(parts, rules)):
            return Rows(rows, lower, certified, name, []), rules, cell_S
    required = ", ".join(f"{name} = {value}" for name, value in requirements.named())
    filled = [len(part.samples_s) // topology.dp for part in parts]  # rows without empty cells
    if window.samples < first * topology.dp:
        expected = (
            f"at least {first * topology.dp}, none of {first} rows of cells empty: {required}"
        )
        raise InfeasibleError.at("samples", window.samples, expected)
    if sum(filled) < first:
        assert window.tag_S is not None
        tags = [int(window.tag_S[part.samples_s[0]]) for part in parts]
        expected = f"at least {first} with no cell empty, tags {tags} fill {filled}: {required}"
        raise InfeasibleError.at("rows", sum(filled), expected)
    found = f"{first} to {last}" if last > first else f"{first}"
    expected = f"room for a layout, none was found in {found} rows: {required}"
    raise InfeasibleError.at("token_cap", token_cap, expected)


@dataclass(eq=False)
class _Part:
    """The samples of a tag (or all): rows that are needed, and that are known to do."""

    lower: int
    rows: int
    method: str
    samples_s: NDArray[np.int64]
    tokens: int
    bins: list[list[int]]
    """Of positions in `samples_s`."""


def _parts(
    window: Window, token_cap: int, topology: Topology, requirements: Requirements, seed: int
) -> list[_Part]:
    tag_S = np.zeros(window.samples, np.int64)
    if requirements.uniform_rows:
        tag_S = tag_index_S(window)
    parts = []
    for tag in range(int(tag_S.max()) + 1):
        samples_s = np.flatnonzero(tag_S == tag)
        lengths_s = np.array(window.lengths_S[samples_s])
        found = minimal_rows(lengths_s, token_cap, topology.dp, seed=seed)
        lower, rows, method = found.lower_bound, found.rows, found.method
        if requirements.max_samples_per_cell is not None:
            held = -(-len(lengths_s) // (requirements.max_samples_per_cell * topology.dp))
            if held > lower:
                lower, method = held, "samples per cell"
        if requirements.together == "rank":
            unit_s = unit_index_S(window)[samples_s]
            most = requirements.max_samples_per_cell or len(lengths_s)
            held = _rows_of_groups(lengths_s, unit_s, token_cap, topology.dp, most, lower, seed)
            if held > lower:
                lower, method = held, "groups on a rank"
        rows = max(rows, lower)
        parts.append(_Part(lower, rows, method, samples_s, int(lengths_s.sum()), found.bins))
    return parts


def _rows_of_groups(
    lengths_s: NDArray[np.int64],
    unit_s: NDArray[np.int64],
    token_cap: int,
    ranks: int,
    most: int,
    lower: int,
    seed: int,
) -> int:
    """Rows that groups need which stay on a DP rank each, where that is more than `lower`.

    In M rows a rank has M cells. So the samples of every group fit into M bins of the cap, and the
    groups, taken as one item each, into a bin of M caps on every rank.
    """
    _, unit_s, size_U = np.unique(unit_s, return_inverse=True, return_counts=True)
    tokens_U = np.bincount(unit_s, weights=lengths_s).astype(np.int64)
    lower = max(lower, -(-int(size_U.max()) // most), -(-int(tokens_U.max()) // token_cap))
    for u in np.argsort(-tokens_U, kind="stable").tolist():
        own_s = lengths_s[unit_s == u]
        if len(ffd_bins(own_s, token_cap)) > lower:  # else it fits, and nothing is to be proven
            found = minimal_rows(own_s, token_cap, 1, seed=seed, iterations=GROUP_STEPS)
            lower = max(lower, found.lower_bound)
    while (
        max(
            l2_bound(tokens_U, lower * token_cap)[0],
            dual_feasible_bound(tokens_U, lower * token_cap),
        )
        > ranks
    ):
        lower += 1
    return lower


def _rounded(parts: list[_Part], requirements: Requirements) -> tuple[int, str]:
    lower, multiple = sum(part.lower for part in parts), requirements.rows_multiple_of
    method = " and ".join(sorted({part.method for part in parts}))
    if len(parts) > 1:
        method = f"tag by tag: {method}"
    if lower % multiple:
        method = f"{method}, to a multiple of {multiple}"
    return -(-lower // multiple) * multiple, method


def _tag_rows(parts: list[_Part], rows: int, ranks: int) -> list[int] | None:
    """How many rows each tag has: spare ones go where rows are fullest; None: too few samples."""
    count = [part.rows for part in parts]
    for _ in range(rows - sum(count)):
        able = [k for k, part in enumerate(parts) if len(part.samples_s) >= (count[k] + 1) * ranks]
        if not able:
            return None
        count[max(able, key=lambda k: parts[k].tokens / count[k])] += 1
    return count


def _packed_S(parts: list[_Part], rules: Rules) -> NDArray[np.int32] | None:
    """The packing that the rows were found by, tag by tag, where samples are free to move."""
    if rules.on_ranks:
        return None
    ranks = rules.topology.dp
    tag_m = np.zeros(rules.rows, np.int64) if rules.tag_m is None else rules.tag_m
    cell_S = np.empty(rules.window.samples, np.int32)
    for tag, part in enumerate(parts):
        rows = int((tag_m == tag).sum())
        first = int((tag_m < tag).sum()) * ranks
        for b, members in enumerate(split_to(part.bins, rows * ranks)):
            cell_S[part.samples_s[members]] = first + b
    return cell_S


def layouts(
    rules: Rules,
    token_cap: int,
    work_S: NDArray[np.float64],
    attempts: int,
    seed: int,
    packed_S: NDArray[np.int32] | None = None,
) -> Iterator[NDArray[np.int32]]:
    """Layouts (cell_S) that the rules allow, lightest-cell ones and fullest-cell ones in turn.

    At last `packed_S` is repaired: it keeps a tight cap that greedy layouts miss.
    """
    lengths_S = np.array(rules.window.lengths_S)
    ranks = rules.topology.dp
    lane_c = rules.lane_c.astype(np.int64)
    rng = np.random.default_rng([seed, LAYOUT])
    for attempt in range(attempts):
        noise_S = np.exp(NOISE * attempt * rng.standard_normal(len(lengths_S)))
        rank_S = unit_ranks_S(rules, token_cap, work_S, rng, NOISE * attempt)
        for fullest, weight_S in ((False, work_S), (True, lengths_S)):
            order_S = np.argsort(-weight_S * noise_S, kind="stable")
            cell_S = insert(
                order_S, lengths_S, work_S, rules.lane_S(rank_S), lane_c, ranks, token_cap,
                rules.most, rules.quota, fullest,
            )  # fmt: skip
            if cell_S.min() < 0:
                continue
            key = stream_key(seed, LAYOUT, attempt, int(fullest))
            wrong = repair(
                cell_S, lengths_S, rules.lane_S(rank_S), lane_c, ranks, token_cap, rules.most,
                rules.quota, REPAIR_STEPS, key,
            )  # fmt: skip
            if wrong == 0 and rules.hold(cell_S):
                yield cell_S
    if packed_S is not None:
        cell_S = packed_S.copy()
        wrong = repair(
            cell_S, lengths_S, rules.lane_S(None), lane_c, ranks, token_cap, rules.most,
            rules.quota, REPAIR_STEPS, stream_key(seed, LAYOUT, attempts),
        )  # fmt: skip
        if wrong == 0 and rules.hold(cell_S):
            yield cell_S


def unit_ranks_S(
    rules: Rules,
    token_cap: int,
    work_S: NDArray[np.float64],
    rng: np.random.Generator,
    noise: float,
) -> NDArray[np.int64] | None:
    """A DP rank for each group that stays on one, heaviest first to the lightest with room."""
    if not rules.on_ranks:
        return None
    units, unit_S, _, _ = rules.units
    ranks = rules.topology.dp
    work_U = np.bincount(unit_S, weights=work_S, minlength=units)
    tokens_U = np.bincount(unit_S, weights=rules.window.lengths_S, minlength=units)
    size_U = np.bincount(unit_S, minlength=units)
    work_d, tokens_d, size_d = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks, np.int64)
    quota = rules.quota if rules.quota >= 0 else rules.window.samples
    rank_U = np.zeros(units, np.int64)
    for u in np.argsort(-work_U * np.exp(noise * rng.standard_normal(units)), kind="stable"):
        full_d = tokens_d + tokens_U[u] > rules.rows * token_cap
        full_d |= size_d + size_U[u] > quota
        d = int(np.lexsort((work_d, full_d))[0])
        rank_U[u] = d
        work_d[d] += work_U[u]
        tokens_d[d] += tokens_U[u]
        size_d[d] += size_U[u]
    _settle(rules, token_cap, rank_U, rng)
    return np.asarray(rank_U[unit_S])


def _settle(
    rules: Rules, token_cap: int, rank_U: NDArray[np.int64], rng: np.random.Generator
) -> None:
    """Move and exchange groups until the cells of each rank and tag can be filled, none empty."""
    units, unit_S, _, _ = rules.units
    ranks, tag_S = rules.topology.dp, rules.tag_S
    tag_m = np.zeros(rules.rows, np.int64) if rules.tag_m is None else rules.tag_m
    rows_t = np.bincount(tag_m)
    tokens_Ut = np.zeros((units, len(rows_t)), np.int64)
    np.add.at(tokens_Ut, (unit_S, tag_S), rules.window.lengths_S)
    size_Ut = np.zeros_like(tokens_Ut)
    np.add.at(size_Ut, (unit_S, tag_S), 1)
    tokens_dt, size_dt = np.zeros((2, ranks, len(rows_t)), np.int64)
    np.add.at(tokens_dt, rank_U, tokens_Ut)
    np.add.at(size_dt, rank_U, size_Ut)
    unit = max(1, token_cap // 8)

    def wrong(tokens_t: NDArray[np.int64], size_t: NDArray[np.int64]) -> int:
        over = np.maximum(tokens_t - rows_t * token_cap, 0).sum()
        off = np.maximum(rows_t - size_t, 0) + np.maximum(size_t - rows_t * rules.most, 0)
        uneven = abs(int(size_t.sum()) - rules.quota) if rules.quota >= 0 else 0
        return int(over + unit * (off.sum() + uneven))

    wrong_d = [wrong(tokens_dt[d], size_dt[d]) for d in range(ranks)]
    for _ in range(SETTLE_STEPS if ranks > 1 else 0):
        if not any(wrong_d):
            break
        u, v = rng.integers(units, size=2)
        x, y = rank_U[u], rank_U[v]
        swap = rng.integers(2) > 0
        if not swap:
            y = rng.integers(ranks)
        if x == y:
            continue
        tokens_t = tokens_Ut[u] - swap * tokens_Ut[v]
        size_t = size_Ut[u] - swap * size_Ut[v]
        after = (
            wrong(tokens_dt[x] - tokens_t, size_dt[x] - size_t),
            wrong(tokens_dt[y] + tokens_t, size_dt[y] + size_t),
        )
        if sum(after) > wrong_d[x] + wrong_d[y]:
            continue
        wrong_d[x], wrong_d[y] = after
        tokens_dt[x] -= tokens_t
        tokens_dt[y] += tokens_t
        size_dt[x] -= size_t
        size_dt[y] += size_t
        rank_U[u] = y
        if swap:
            rank_U[v] = x
