"""A window, topology, cap and cost turned into the arrays that the search works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.cost import Coefficients
from routepack.errors import InfeasibleError
from routepack.kernels.layout import (
    LANES,
    OVER_WEIGHT,
    TOP,
    TOTAL_WEIGHT,
    WORST_ROW_WEIGHT,
    State,
    Static,
    build,
    measure,
)
from routepack.kernels.placing import place_demand
from routepack.objective import score_rows
from routepack.parallel import over_slices
from routepack.placement import Nodes
from routepack.plan import Score
from routepack.requirements import NONE, Requirements
from routepack.rules import Rules
from routepack.topology import Topology
from routepack.window import Window


@dataclass(frozen=True, eq=False)
class Measured:
    """Costs of the groups of a layout, as the oracle would give them."""

    attention_B: NDArray[np.float64]
    expert_B: NDArray[np.float64]
    over: int
    """Routed tokens of busiest ranks above a limit, summed over groups and layers."""
    over_cost: float
    shards: int

    @property
    def score(self) -> Score:
        """The exact score."""
        shape = (-1, self.shards)
        return score_rows(self.attention_B.reshape(shape), self.expert_B.reshape(shape))

    @property
    def energy(self) -> float:
        """The search energy (design section 2)."""
        score = self.score
        energy = score.slowest_shard + TOTAL_WEIGHT * score.total
        return energy + WORST_ROW_WEIGHT * score.worst_row + self.over_cost

    @property
    def key(self) -> tuple[float, ...]:
        """Layouts are compared by this: what is above a limit, then the score."""
        return (self.over, *self.score.key)


@dataclass(frozen=True, eq=False)
class Problem:
    """What to pack: a window on a topology at a number of rows (frame: kernels/layout.py).

    A layout is cell_S [S]: the cell of each sample, cells numbered row by row and, inside a row,
    shard by shard.
    """

    window: Window
    topology: Topology
    cost: Coefficients
    token_cap: int
    rows: int
    requirements: Requirements = NONE
    tag_m: NDArray[np.int64] | None = None  # the tag of each row, where rows have one

    @cached_property
    def rules(self) -> Rules:
        """The requirements as arrays."""
        return Rules(self.window, self.topology, self.rows, self.requirements, self.tag_m)

    @property
    def nodes(self) -> Nodes | None:
        """Where routing groups must stay whole."""
        required = self.requirements
        if required.routing_groups is None:
            return None
        return Nodes(required.routing_groups, required.nodes_of(self.topology.ep))

    @property
    def cells(self) -> int:
        """M * D."""
        return self.rows * self.topology.dp

    @property
    def full_rows(self) -> int:
        """Rows that the tokens would fill; of more, some may do with little."""
        return -(-int(self.window.lengths_S.sum()) // (self.token_cap * self.topology.dp))

    @property
    def load(self) -> Any:
        """Dtype that holds the routed tokens of a group at a layer, and of a cell at all layers."""
        longest = max(int(self.window.lengths_S.sum()), self.window.layers * self.token_cap)
        most = self.window.top_k * longest * int(self.cost.slow_GR.max())
        return np.dtype(np.int32 if most < 2**31 else np.int64)

    @property
    def dp_order(self) -> tuple[int, ...]:
        """DP rank of each cell of a row: shards one after another."""
        return tuple(d for group in self.topology.groups for d in group)

    def static(self, rank_LE: NDArray[np.int32], threads: int = 1) -> Static:
        """The arrays of a search under one placement, given as the EP rank of each expert."""
        cost = self.cost
        lengths_S = self.window.lengths_S
        samples = len(lengths_S)
        by_length_S = np.argsort(-lengths_S, kind="stable").astype(np.int32)
        length_rank_S = np.empty(samples, np.int32)
        length_rank_S[by_length_S] = np.arange(samples, dtype=np.int32)
        demand_SLE = self.window.demand_SLE
        expert_LRi = np.argsort(rank_LE, axis=1, kind="stable").astype(np.uint32)
        expert_LRi = expert_LRi.reshape(len(rank_LE), self.topology.ep, -1)
        layers = self.window.layers + -self.window.layers % LANES
        placed_SRL = np.zeros((samples + 1, self.topology.ep, layers), self.load)
        placed_LRS = np.zeros(placed_SRL.shape[::-1], self.load)

        def place(part: slice) -> None:
            place_demand(placed_SRL, placed_LRS, part.start, demand_SLE[part], expert_LRi)

        over_slices(samples, threads, place)
        rules = self.rules
        lanes, lane_c, lane_start_n, lane_cells_c = rules.lanes
        units, unit_S, unit_start_n, unit_members_S = rules.units
        return Static(
            length_S=np.append(lengths_S, 0),
            tokens2_TS=np.pad(cost.quadratic_tokens_TS, ((0, 0), (0, 1))),
            placed_SRL=placed_SRL,
            placed_LRS=placed_LRS,
            by_length_S=by_length_S,
            length_rank_S=length_rank_S,
            linear_T=np.ascontiguousarray(cost.linear_T),
            quadratic_T=np.ascontiguousarray(cost.quadratic_T),
            expert=float(cost.expert),
            slow_c=np.tile(cost.slow_D[list(self.dp_order)], self.rows),
            uneven=bool((cost.slow_GR != 1).any()),
            slow_GR=cost.slow_GR.astype(self.load),
            cap=self.token_cap,
            shards=self.topology.edp,
            width=self.topology.ranks_per_shard,
            group_c=np.arange(self.cells, dtype=np.int64) // self.topology.ranks_per_shard,
            shard_B=np.arange(self.rows * self.topology.edp, dtype=np.int64) % self.topology.edp,
            most=rules.most,
            limit=rules.limit,
            over=OVER_WEIGHT * self.token_cost,
            lanes=lanes,
            lane_c=lane_c,
            lane_start_n=lane_start_n,
            lane_cells_c=lane_cells_c,
            blocks=self.topology.dp if rules.quota >= 0 else 0,
            block_c=rules.block_c,
            units=units,
            unit_S=unit_S,
            unit_start_n=unit_start_n,
            unit_members_S=unit_members_S,
        )

    def state(self, static: Static, cell_S: NDArray[np.int32]) -> State:
        """A layout with all that is derived from it."""
        samples, ranks, layers = static.placed_SRL.shape
        stages, cells = len(static.linear_T), self.cells
        groups = cells // static.width
        load = static.placed_SRL.dtype
        bundles = ((0, 0), (0, 2))
        state = State(
            length_S=np.append(static.length_S, [0, 0]),
            tokens2_TS=np.pad(static.tokens2_TS, bundles),
            bundle_kRL=np.zeros((2, ranks, layers), load),
            bundle_kn=np.zeros((2, self.most_members), np.int32),
            bundled_k=np.zeros(2, np.int64),
            cell_S=np.full(samples, -1, np.int32),
            position_S=np.zeros(samples, np.int32),
            members_ck=np.zeros((cells, self.most_members), np.int32),
            count_c=np.zeros(cells, np.int32),
            tokens_c=np.zeros(cells, np.int64),
            tokens2_Tc=np.zeros((stages, cells), np.int64),
            load_BRL=np.zeros((groups, ranks, layers), load),
            busiest_B=np.zeros(groups, np.int64),
            anchor_BL=np.zeros((groups, layers), np.int32),
            anchored_B=np.zeros(groups, np.int64),
            peak_BS=np.zeros((groups, samples + 2), load),
            slack=np.zeros(1, np.int64),
            work_Tc=np.zeros((stages, cells)),
            top_BTk=np.zeros((groups, stages, TOP)),
            top_cell_BTk=np.zeros((groups, stages, TOP), np.int32),
            work_BT=np.zeros((groups, stages)),
            over_B=np.zeros(groups, np.int64),
            cost_B=np.zeros(groups),
            shard_G=np.zeros(static.shards),
            peak_L=np.zeros(layers, load),
            other_peak_L=np.zeros(layers, load),
        )
        build(static, state, cell_S)
        return state

    @cached_property
    def work_S(self) -> NDArray[np.float64]:
        """Attention work of each sample, stages added up."""
        tokens = np.array(self.window.lengths_S, dtype=np.float64)
        tokens2_TS = self.cost.quadratic_tokens_TS
        if not (self.cost.linear_T.any() or self.cost.quadratic_T.any()):
            return tokens  # an expert-only cost: balance tokens
        return np.asarray(self.cost.linear_T.sum() * tokens + self.cost.quadratic_T @ tokens2_TS)

    @property
    def token_cost(self) -> float:
        """What a token costs on a cell and on an EP rank."""
        cost, tokens = self.cost, self.window.lengths_S.sum()
        pairs_T = cost.quadratic_tokens_TS.sum(axis=1)
        expert = cost.expert * int(cost.slow_GR.min())
        return float(expert + cost.linear_T.sum() + cost.quadratic_T @ pairs_T / tokens)

    def with_rows(self, rows: int) -> Problem:
        """The same problem at another number of rows."""
        return replace(self, rows=rows)

    def require_samples(self, what: str) -> None:
        """No cell may be empty. Raises InfeasibleError."""
        if self.window.samples < self.cells:
            expected = (
                f"at least {self.cells}, {what} needs {self.rows} rows of {self.topology.dp} "
                f"cells, none empty"
            )
            raise InfeasibleError.at("samples", self.window.samples, expected)

    def fits(self, cell_S: NDArray[np.int32]) -> bool:
        """Every sample placed, every cell within the cap and none empty, requirements met."""
        if cell_S.min() < 0:
            return False
        tokens_c = np.bincount(cell_S, weights=self.window.lengths_S, minlength=self.cells)
        within = tokens_c.max() <= self.token_cap and tokens_c.min() > 0
        return bool(within and self.rules.hold(cell_S))

    @cached_property
    def most_members(self) -> int:
        """No cell within the cap holds more samples than this."""
        shortest = np.cumsum(np.sort(self.window.lengths_S))
        return int(np.searchsorted(shortest, self.token_cap, side="right")) + 1

    def assert_exact(self, static: Static, state: State) -> None:
        """The debug check: a state's integers and the costs that follow equal a recompute by ==."""
        samples = self.window.samples
        fresh = self.state(static, state.cell_S[:samples].copy())
        derived = (
            "count_c", "tokens_c", "tokens2_Tc", "load_BRL", "busiest_B", "work_Tc", "work_BT",
            "over_B", "cost_B", "shard_G",
        )  # fmt: skip
        for name in derived:
            assert np.array_equal(getattr(state, name), getattr(fresh, name)), name
        assert np.array_equal(state.top_BTk[:, :, 0], fresh.top_BTk[:, :, 0])
        groups, _, layers = state.load_BRL.shape
        for b in range(groups):  # any ranks within the slack will do as anchors
            anchor_L = state.anchor_BL[b]
            at = (anchor_L, np.arange(layers))
            slow_R = static.slow_GR[static.shard_B[b]]
            load_RL = slow_R[:, None] * state.load_BRL[b]
            assert (load_RL[at] >= load_RL.max(axis=0) - state.slack[0]).all()
            assert load_RL[at].sum() == state.anchored_B[b]
            peak_S = (static.placed_SRL[:, at[0], at[1]] * slow_R[anchor_L]).sum(axis=1)
            assert np.array_equal(state.peak_BS[b, : samples + 1], peak_S)
        for s, c in enumerate(state.cell_S[:samples].tolist()):
            assert state.members_ck[c, state.position_S[s]] == s

    def measure(self, static: Static, cell_S: NDArray[np.int32]) -> Measured:
        """The exact cost of a layout under `static`."""
        _, ranks, layers = static.placed_SRL.shape
        groups = self.cells // static.width
        attention_B, busiest_B = np.empty(groups), np.empty(groups, np.int64)
        over_B = np.empty(groups, np.int64)
        load_RL = np.empty((ranks, layers), static.placed_SRL.dtype)
        measure(static, cell_S, attention_B, busiest_B, over_B, load_RL)
        expert_B = np.asarray(static.expert * busiest_B, np.float64)
        over = int(over_B.sum())
        over_cost = static.over * over
        return Measured(attention_B, expert_B, over, over_cost, self.topology.edp)

    def largest_load(self, static: Static, cell_S: NDArray[np.int32]) -> int:
        """The most routed tokens that an EP rank holds at a layer in a row."""
        group_S = cell_S // static.width
        placed_SRL = static.placed_SRL[:-1]
        groups = range(self.cells // static.width)
        return max(int(placed_SRL[group_S == b].sum(axis=0).max()) for b in groups)

    def to_rows(self, cell_S: NDArray[np.int32]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """[M][D][...] sample indices, ascending in a cell, as a plan holds them."""
        dp = self.topology.dp
        members: list[list[int]] = [[] for _ in range(self.cells)]
        for s, c in enumerate(cell_S.tolist()):
            members[c].append(s)
        rows = []
        for m in range(self.rows):
            row: list[tuple[int, ...]] = [()] * dp
            for position, d in enumerate(self.dp_order):
                row[d] = tuple(members[m * dp + position])
            rows.append(tuple(row))
        return tuple(rows)

    def from_bins(self, bins: Sequence[Sequence[int]]) -> NDArray[np.int32]:
        """cell_S of M*D bins, bin r*D + d being the cell of row r on DP rank d."""
        dp = self.topology.dp
        position_of = {d: position for position, d in enumerate(self.dp_order)}
        cell_S = np.full(self.window.samples, -1, np.int32)
        for index, members in enumerate(bins):
            m, d = divmod(index, dp)
            cell_S[list(members)] = m * dp + position_of[d]
        assert cell_S.min() >= 0
        return cell_S
