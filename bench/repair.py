"""Fixing a layout after the fact: what planning with a requirement is measured against.

Samples that are where they may not be are taken out, longest first, and each goes where it may and
costs least: attention and busiest ranks of the groups that change, exactly. Where no cell has room,
the shortest sample that makes enough room is taken out in turn. Rows are those of the plan that
knew of the requirement, so that the fix is not to find them.

Suffixes as in kernels/layout.py: S samples, c cells, B groups, L layers, R EP ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from routepack.placement import ranks_of
from routepack.plan import Plan
from routepack.problem import Problem
from routepack.requirements import Requirements

OUT = -1
CHAIN = 20  # samples taken out in turn, per sample of the window, before a fix is given up


@dataclass
class Repair:
    """A layout being fixed; cell_S is OUT for a sample that is taken out."""

    problem: Problem
    requirements: Requirements
    placement_LE: NDArray[np.int32]
    cell_S: NDArray[np.int32]
    tag_m: NDArray[np.int64] | None = None
    home_S: NDArray[np.int64] | None = None
    """DP rank, or cell, that a sample's prompt was given."""
    left: int = field(init=False)

    def __post_init__(self) -> None:
        problem = self.problem
        rank_LE = ranks_of(self.placement_LE, problem.topology.ep)
        static = problem.static(rank_LE)
        self.placed_SRL = static.placed_SRL[:-1].astype(np.int64)
        self.width = static.width
        self.lengths_S = np.array(problem.window.lengths_S)
        work_TS = problem.cost.linear_T[:, None] * self.lengths_S
        self.work_TS = (
            work_TS + problem.cost.quadratic_T[:, None] * problem.cost.quadratic_tokens_TS
        )
        cells, stages = problem.cells, len(work_TS)
        self.tokens_c, self.count_c = np.zeros(cells, np.int64), np.zeros(cells, np.int64)
        self.work_Tc = np.zeros((stages, cells))
        _, ranks, layers = self.placed_SRL.shape
        self.load_BRL = np.zeros((cells // self.width, ranks, layers), np.int64)
        self.left = CHAIN * len(self.cell_S)
        for s, c in enumerate(self.cell_S):
            self._add(s, c, 1)

    def _add(self, s: int, c: int, sign: int) -> None:
        self.tokens_c[c] += sign * self.lengths_S[s]
        self.count_c[c] += sign
        self.work_Tc[:, c] += sign * self.work_TS[:, s]
        self.load_BRL[c // self.width] += sign * self.placed_SRL[s]

    def take(self, s: int) -> None:
        """Take a sample out."""
        self._add(s, self.cell_S[s], -1)
        self.cell_S[s] = OUT

    def put(self, s: int, c: int) -> None:
        """Put a sample into a cell."""
        self.cell_S[s] = c
        self._add(s, c, 1)

    def may_c(self, s: int, *, swap: bool = False) -> NDArray[np.bool_]:
        """Cells that a sample may go to, room aside; `swap`: in exchange for one of the cell."""
        required, dp = self.requirements, self.problem.topology.dp
        cells = np.arange(self.problem.cells)
        may_c = np.ones(len(cells), bool)
        if required.max_samples_per_cell is not None and not swap:
            may_c &= self.count_c < required.max_samples_per_cell
        if required.equal_samples_per_rank and not swap:
            quota = len(self.cell_S) // dp
            may_c &= np.bincount(cells % dp, self.count_c, dp)[cells % dp] < quota
        if self.tag_m is not None:
            window = self.problem.window
            assert window.tag_S is not None
            may_c &= self.tag_m[cells // dp] == window.tag_S[s]
        if self.home_S is not None:
            may_c &= (cells % dp if required.together == "rank" else cells) == self.home_S[s]
        if required.memory_limit_tokens is not None and not swap:
            peak_B = (self.load_BRL + self.placed_SRL[s]).max(axis=(1, 2))
            may_c &= (peak_B <= required.memory_limit_tokens)[cells // self.width]
        return may_c

    def increase_c(self, s: int) -> NDArray[np.float64]:
        """What each cell's group costs more with the sample."""
        shape = (len(self.work_Tc), -1, self.width)
        before_TB = self.work_Tc.reshape(shape).max(axis=2)
        after_Tc = np.maximum(
            self.work_Tc + self.work_TS[:, s : s + 1], np.repeat(before_TB, self.width, axis=1)
        )
        busiest_B = self.load_BRL.max(axis=1).sum(axis=1)
        more_B = (self.load_BRL + self.placed_SRL[s]).max(axis=1).sum(axis=1) - busiest_B
        attention_c = after_Tc.sum(axis=0) - np.repeat(before_TB.sum(axis=0), self.width)
        return attention_c + self.problem.cost.expert * np.repeat(more_B, self.width)

    def insert(self, s: int) -> list[int] | None:
        """Put a sample where it costs least; what had to be taken out for it, None: no way."""
        cap, may_c = self.problem.token_cap, self.may_c(s)
        able_c = may_c & (self.tokens_c + self.lengths_S[s] <= cap)
        if able_c.any():
            self.put(s, int(np.where(able_c, self.increase_c(s), np.inf).argmin()))
            return []
        best: tuple[int, int] | None = None
        for c in np.flatnonzero(self.may_c(s, swap=True)):
            need = self.tokens_c[c] + self.lengths_S[s] - cap
            members = np.flatnonzero((self.cell_S == c) & (self.lengths_S >= need))
            members = members[self.lengths_S[members] < self.lengths_S[s]]
            members = members[self._keeps_limit(s, int(c), members)]
            if len(members):
                t = int(members[self.lengths_S[members].argmin()])
                if best is None or self.lengths_S[t] < self.lengths_S[best[0]]:
                    best = t, int(c)
        if best is None:
            return None
        self.take(best[0])
        self.put(s, best[1])
        return [best[0]]

    def _keeps_limit(self, s: int, c: int, members: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the ranks of a cell's group stay below a limit with s instead of each member."""
        limit = self.requirements.memory_limit_tokens
        if limit is None:
            return np.ones(len(members), bool)
        after_nRL = self.load_BRL[c // self.width] + self.placed_SRL[s] - self.placed_SRL[members]
        return np.asarray(after_nRL.max(axis=(1, 2)) <= limit)

    def settle(self, out: list[int]) -> bool:
        """Put all samples back, longest first; False where some find no place."""
        out = sorted(out, key=lambda s: -self.lengths_S[s])
        while out:
            self.left -= 1
            more = self.insert(out.pop(0)) if self.left > 0 else None
            if more is None:
                return False
            out = sorted(out + more, key=lambda s: -self.lengths_S[s])
        return self.fill()

    def fill(self) -> bool:
        """Give each empty cell the shortest sample that may come from a cell with several."""
        for c in np.flatnonzero(self.count_c == 0):
            for s in np.argsort(self.lengths_S, kind="stable"):
                if self.count_c[self.cell_S[s]] < 2:
                    continue
                old = int(self.cell_S[s])
                self.take(int(s))
                if self.may_c(int(s))[c]:
                    self.put(int(s), int(c))
                    break
                self.put(int(s), old)
            else:
                return False
        return True


def repaired(problem: Problem, free: Plan, requirements: Requirements) -> Repair | None:
    """The layout of a plan that knew of no requirements, fixed; None where that fails.

    `problem` has the rows of the plan that knew; a free plan of more rows cannot be fixed.
    """
    dp = problem.topology.dp
    if len(free.rows) > problem.rows:
        return None
    bins = [cell for row in free.rows for cell in row]
    cell_S = problem.from_bins(bins)
    fix = Repair(problem, requirements, free.placement_LE, cell_S)
    window, lengths_S, cells = problem.window, fix.lengths_S, np.arange(problem.cells)
    out: list[int] = []

    def take(samples: NDArray[np.int64]) -> None:
        for s in samples.tolist():
            fix.take(s)
            out.append(s)

    if requirements.uniform_rows:
        assert window.tag_S is not None
        fix.tag_m = _row_tags(problem, cell_S)
        take(np.flatnonzero(fix.tag_m[cell_S // dp] != window.tag_S))
    if requirements.together == "rank":
        assert window.group_S is not None
        unit_S = np.unique(window.group_S, return_inverse=True)[1]
        tokens_UD = np.zeros((unit_S.max() + 1, dp))
        np.add.at(tokens_UD, (unit_S, cell_S % dp), lengths_S)
        fix.home_S = tokens_UD.argmax(axis=1)[unit_S]
        take(np.flatnonzero(cell_S % dp != fix.home_S))
    if requirements.together == "cell":
        return _whole(fix)
    if requirements.max_samples_per_cell is not None:
        for c in cells:
            members = np.flatnonzero(fix.cell_S == c)
            shortest = members[np.argsort(lengths_S[members], kind="stable")]
            take(shortest[: max(0, len(members) - requirements.max_samples_per_cell)])
    if requirements.equal_samples_per_rank:
        quota = len(cell_S) // dp
        for d in range(dp):
            members = np.flatnonzero((fix.cell_S >= 0) & (fix.cell_S % dp == d))
            shortest = members[np.argsort(lengths_S[members], kind="stable")]
            take(shortest[: max(0, len(members) - quota)])
    if requirements.memory_limit_tokens is not None:
        for b in range(len(fix.load_BRL)):
            while fix.load_BRL[b].max() > requirements.memory_limit_tokens:
                r, layer = np.unravel_index(fix.load_BRL[b].argmax(), fix.load_BRL[b].shape)
                members = np.flatnonzero(fix.cell_S // fix.width == b)
                share_s = fix.placed_SRL[members, r, layer] / lengths_S[members]
                take(members[[share_s.argmax()]])
    if requirements.routing_groups is not None:
        fix.placement_LE = whole_groups(free.placement_LE, window.demand_LE, problem, requirements)
    return fix if fix.settle(out) else None


def _row_tags(problem: Problem, cell_S: NDArray[np.int32]) -> NDArray[np.int64]:
    """The tag that has most tokens in a row; a tag whose rows are too few takes the next best."""
    window, dp = problem.window, problem.topology.dp
    assert window.tag_S is not None
    tags = np.unique(window.tag_S)
    tokens_MT = np.zeros((problem.rows, len(tags)))
    at = np.searchsorted(tags, window.tag_S)
    np.add.at(tokens_MT, (cell_S // dp, at), window.lengths_S)
    needed = [-(-int(t) // (problem.token_cap * dp)) for t in np.bincount(at, window.lengths_S)]
    spare = problem.rows - sum(needed)
    while spare > 0:  # where rows are fullest
        needed[int(np.argmax(np.bincount(at, window.lengths_S) / needed))] += 1
        spare -= 1
    slots = np.repeat(np.arange(len(tags)), needed)[: problem.rows]
    row, slot = linear_sum_assignment(-tokens_MT[:, slots])
    tag_m = np.zeros(problem.rows, np.int64)
    tag_m[row] = tags[slots[slot]]
    return tag_m


def _whole(fix: Repair) -> Repair | None:
    """Split prompts are taken out and put into a cell each, longest prompt first."""
    window, cap = fix.problem.window, fix.problem.token_cap
    assert window.group_S is not None
    unit_S = np.unique(window.group_S, return_inverse=True)[1]
    members = [np.flatnonzero(unit_S == u) for u in range(unit_S.max() + 1)]
    split = [m for m in members if len(np.unique(fix.cell_S[m])) > 1]
    for samples in split:
        for s in samples.tolist():
            fix.take(s)
    split.sort(key=lambda m: -int(fix.lengths_S[m].sum()))
    while split:
        samples = split.pop(0)
        tokens = int(fix.lengths_S[samples].sum())
        able_c = fix.tokens_c + tokens <= cap
        fix.left -= 1
        if fix.left < 0:
            return None
        if able_c.any():
            increase_c = np.sum([fix.increase_c(s) for s in samples], axis=0)
            c = int(np.where(able_c, increase_c, np.inf).argmin())
        else:  # the shortest whole prompt that makes room goes out in turn
            away = [
                (int(fix.lengths_S[m].sum()), n)
                for n, m in enumerate(members)
                if fix.cell_S[m[0]] != OUT
                and fix.tokens_c[fix.cell_S[m[0]]] - fix.lengths_S[m].sum() + tokens <= cap
                and fix.lengths_S[m].sum() < tokens
            ]
            if not away:
                return None
            other = members[min(away)[1]]
            c = int(fix.cell_S[other[0]])
            for s in other.tolist():
                fix.take(s)
            split.append(other)
            split.sort(key=lambda m: -int(fix.lengths_S[m].sum()))
        for s in samples.tolist():
            fix.put(s, c)
    for c in np.flatnonzero(fix.count_c == 0):  # a whole prompt from a cell of several
        crowded = [m for m in members if fix.count_c[fix.cell_S[m[0]]] > len(m)]
        if not crowded:
            return None
        for s in min(crowded, key=lambda m: int(fix.lengths_S[m].sum())).tolist():
            fix.take(s)
            fix.put(s, int(c))
    return fix


def whole_groups(
    placement_LE: NDArray[np.int32],
    demand_LE: NDArray[np.int64],
    problem: Problem,
    requirements: Requirements,
) -> NDArray[np.int32]:
    """Each routing group on the node that has most of its experts; experts stay on their rank
    where it is of the node and has a slot, the others go to its lightest rank, busiest first."""
    groups, per_node = requirements.routing_groups, requirements.ranks_per_node
    assert groups is not None
    assert per_node is not None
    ranks = problem.topology.ep
    layers, experts = placement_LE.shape
    nodes, size, per_rank = ranks // per_node, experts // groups, experts // ranks
    fixed_LE = np.empty_like(placement_LE)
    for layer in range(layers):
        rank_E = placement_LE[layer] // per_rank
        held_PN = np.zeros((groups, nodes))
        np.add.at(held_PN, (np.arange(experts) // size, rank_E // per_node), 1)
        slots = np.repeat(np.arange(nodes), groups // nodes)
        node_P = slots[linear_sum_assignment(-held_PN[:, slots])[1]]
        load_R, free_R = np.zeros(ranks), np.full(ranks, per_rank)
        new_E = np.full(experts, -1)
        order = np.argsort(-demand_LE[layer], kind="stable")
        for stay in (True, False):
            for e in order:
                node = node_P[e // size]
                of_node = np.arange(node * per_node, (node + 1) * per_node)
                r = int(rank_E[e])
                if stay and (r // per_node != node or free_R[r] == 0):
                    continue
                if not stay:
                    if new_E[e] >= 0:
                        continue
                    able = of_node[free_R[of_node] > 0]
                    r = int(able[load_R[able].argmin()])
                new_E[e] = r
                free_R[r] -= 1
                load_R[r] += demand_LE[layer, e]
        fixed_LE[layer, np.argsort(new_E, kind="stable")] = np.arange(experts)
    return fixed_LE
