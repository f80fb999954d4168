"""A plan under pipeline parallelism: the slowest stage, the fill of 1F1B, and an order of the rows.

The planner minimises the sum over all layers, as if one stage held them all. Here a layout is
evaluated for a map of layers to stages, with the oracle's integers: nothing is searched but the
order in which the rows run, which no score of a plan depends on.

A row takes C[m,g,p] on shard g at stage p, forward and backward together:

    C[m,g,p] = share[p] * A[m,g] + expert * sum over the layers of p of max over ranks of W[m,g,l,r]

Stages run rows in the non-interleaved 1F1B order of Megatron-Core,
`forward_backward_pipelining_without_interleaving` in megatron/core/pipeline_parallel/schedules.py
at d98e8a64ddf34856e74b24714e3bedb2f5a39553: min(P - 1 - p, M) forwards to warm up, then one forward
and one backward in turn, then the backwards that are left. Messages take no time and are buffered.

Shapes: M rows, G EDP shards, P pipeline stages, L MoE layers, R EP ranks, B orders tried at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from routepack.cost import Coefficients
from routepack.errors import InputError
from routepack.objective import Layout, row_costs
from routepack.topology import Topology
from routepack.window import Window

FORWARD_SHARE = 1 / 3
"""A backward pass takes two matrix products for each of the forward's; recomputing all: 1/4."""

MOST_EXHAUSTIVE = 7  # rows of which every order is tried, 5,040
LEAST_GAIN = 1e-12  # of a makespan: less is rounding, and no reason to leave the given order
SHARES_TOLERANCE = 1e-9


class Stages(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """Where layers run, and how a row's time divides.

    stage_of_layer    [L] stage 0..P-1 of each MoE layer
    layers_per_stage  [P] transformer layers of each stage, dense ones included; default: the MoE
                      layers. Attention work is split in proportion to them
    attention_share   [P] instead: the share of attention work, adding up to 1
    forward_share     of the time of a row at a stage; default 1/3

    P is the length of layers_per_stage or attention_share, else the highest stage + 1. A stage
    without MoE layers needs one of the two to say what it holds. Raises InputError.
    """

    stage_of_layer: tuple[int, ...]
    layers_per_stage: tuple[int, ...] | None = None
    attention_share: tuple[float, ...] | None = None
    forward_share: float = FORWARD_SHARE

    def __post_init__(self) -> None:
        stages = _whole("stage_of_layer", self.stage_of_layer, 0)
        if not stages:
            raise InputError("stage_of_layer: expected the stage of each MoE layer, found none")
        msgspec.structs.force_setattr(self, "stage_of_layer", stages)
        _require_share("forward_share", self.forward_share)
        if self.layers_per_stage is not None:
            if self.attention_share is not None:
                raise InputError("attention_share: expected without layers_per_stage, both given")
            if not self.layers_per_stage:
                raise InputError("layers_per_stage: expected the layers of each stage, found none")
            layers = _whole("layers_per_stage", self.layers_per_stage, 1)
            msgspec.structs.force_setattr(self, "layers_per_stage", layers)
        if self.attention_share is not None:
            self._check_attention_share(self.attention_share)
            shares = tuple(map(float, self.attention_share))
            msgspec.structs.force_setattr(self, "attention_share", shares)
        for layer, stage in enumerate(stages):
            if stage >= self.count:
                expected = f"a stage in 0..{self.count - 1}"
                raise InputError.at("stage_of_layer", stage, expected, layer)
        explicit = self.layers_per_stage is not None or self.attention_share is not None
        for stage, moe_layers in enumerate(self._moe_layers):
            if moe_layers == 0 and not explicit:
                raise InputError(f"stage_of_layer: expected a layer at stage {stage}, found none")
            if self.layers_per_stage is not None and self.layers_per_stage[stage] < moe_layers:
                found, expected = self.layers_per_stage[stage], f"its {moe_layers} MoE layers"
                raise InputError.at("layers_per_stage", found, f"at least {expected}", stage)

    def _check_attention_share(self, share_P: Sequence[float]) -> None:
        for stage, share in enumerate(share_P):
            if not (math.isfinite(share) and 0 <= share <= 1):
                raise InputError.at("attention_share", share, "a number in 0..1", stage)
        if abs(math.fsum(share_P) - 1) > SHARES_TOLERANCE:
            total = math.fsum(share_P)
            raise InputError(f"attention_share: expected shares that add up to 1, found {total}")

    @classmethod
    def of(
        cls,
        moe_layers: Sequence[int],
        layers_per_stage: Sequence[int],
        forward_share: float = FORWARD_SHARE,
    ) -> Self:
        """Consecutive layers: stage p holds the next layers_per_stage[p] layers of the model.

        moe_layers  [L] indices of the MoE layers among them (`window.moe_layers`)

        Raises InputError.
        """
        ends = np.cumsum(_whole("layers_per_stage", layers_per_stage, 1))
        layers = sum(layers_per_stage)
        for i, layer in enumerate(moe_layers):
            if not 0 <= layer < layers:
                expected = f"one of the {layers} layers of layers_per_stage"
                raise InputError.at("moe_layers", layer, expected, i)
        stages = np.searchsorted(ends, np.asarray(moe_layers, np.int64), side="right").tolist()
        return cls(
            stage_of_layer=tuple(stages),
            layers_per_stage=tuple(layers_per_stage),
            forward_share=forward_share,
        )

    @property
    def count(self) -> int:
        """P."""
        given = self.layers_per_stage or self.attention_share
        return len(given) if given else max(self.stage_of_layer) + 1

    @property
    def share_P(self) -> NDArray[np.float64]:
        """Share of attention work at each stage."""
        if self.attention_share is not None:
            return np.array(self.attention_share, np.float64)
        layers_P = np.array(self.layers_per_stage or self._moe_layers, np.float64)
        return np.asarray(layers_P / layers_P.sum())

    @property
    def _moe_layers(self) -> list[int]:
        found: list[int] = np.bincount(self.stage_of_layer, minlength=self.count).tolist()
        return found


def stage_costs(
    window: Window,
    topology: Topology,
    cost: Coefficients,
    placement_LE: NDArray[np.int32],
    rows: Layout,
    stages: Stages,
) -> NDArray[np.float64]:
    """C[m,g,p], the cost of each row and shard at each stage [M, G, P], in cost units.

    With one stage it is the oracle's A + X by `==`. Raises InputError where `stages` has another
    number of layers than the window.
    """
    if len(stages.stage_of_layer) != window.layers:
        expected = f"{window.layers} layers, as in the window"
        raise InputError.at("len(stage_of_layer)", len(stages.stage_of_layer), expected)
    attention_MG, _, load_MGLR = row_costs(window, topology, cost, placement_LE, rows)
    busiest_MGL = (load_MGLR * cost.slow_GR[:, None]).max(axis=3)
    busiest_MGP = np.zeros((*attention_MG.shape, stages.count), np.int64)
    for layer, stage in enumerate(stages.stage_of_layer):
        busiest_MGP[:, :, stage] += busiest_MGL[:, :, layer]
    return attention_MG[:, :, None] * stages.share_P + cost.expert * busiest_MGP


@dataclass(frozen=True)
class Slowest:
    """The stage and shard with the most work: U[g,p], the sum of its rows, in cost units."""

    stage: int
    shard: int
    cost: float


def slowest(cost_MGP: ArrayLike) -> Slowest:
    """The largest U[g,p] = fsum over rows of C[m,g,p]; ties go to the lowest shard, then stage."""
    cost_GP = _work(_costs("cost", cost_MGP, 3))
    shard, stage = np.unravel_index(int(cost_GP.argmax()), cost_GP.shape)
    return Slowest(int(stage), int(shard), float(cost_GP[shard, stage]))


@dataclass(frozen=True)
class Schedule:
    """One shard's rows through the pipeline, in cost units.

    makespan  from the first forward to the last backward
    busy      work of the slowest stage
    """

    makespan: float
    busy: float

    @property
    def fill(self) -> float:
        """What the slowest stage waits: filling, draining, and unequal rows."""
        return self.makespan - self.busy


def one_f_one_b(cost_MP: ArrayLike, forward_share: float = FORWARD_SHARE) -> Schedule:
    """Rows of one shard, in their order, under 1F1B without interleaving.

    cost_MP  [M, P] forward and backward of a row at a stage; `forward_share` of it is the forward

    Equal rows of t at every stage take (M + P - 1) * t. Raises InputError.
    """
    cost_MP = _costs("cost", cost_MP, 2)
    _require_share("forward_share", forward_share)
    makespan_1 = _makespan_B(cost_MP[None], forward_share)
    return Schedule(float(makespan_1[0]), float(_work(cost_MP[:, None]).max()))


def ordered_rows(cost_MGP: ArrayLike, forward_share: float = FORWARD_SHARE) -> NDArray[np.int64]:
    """An order of the rows [M] with a small largest makespan over shards, then a small sum.

    Every order is tried up to 7 rows. Above, rows are inserted from the most work to the least,
    each where it adds least (after Nawaz, Enscore and Ham's heuristic for flow shops, 1983); then
    rows are swapped and moved while that helps, from that order and from the given one.
    Deterministic; never worse than the given order, which stays where nothing is better. Time
    grows with M^3 or faster: 2 s for 32 rows, 2 shards and 8 stages. Raises InputError.
    """
    cost_MGP = _costs("cost", cost_MGP, 3)
    _require_share("forward_share", forward_share)
    rows = len(cost_MGP)
    given = np.arange(rows)
    orders = _Orders(cost_MGP, forward_share)
    if cost_MGP.shape[2] == 1:  # no stage waits for another
        return given
    if rows <= MOST_EXHAUSTIVE:
        found = orders.best(np.array(list(itertools.permutations(range(rows)))))
        return found if orders.better(found, given) else given
    ends = [orders.improved(start) for start in (given, orders.inserted())]
    return ends[1] if orders.better(ends[1], ends[0]) else ends[0]


@dataclass(frozen=True, eq=False)
class _Orders:
    """Orders of rows, compared by the largest makespan over shards, then by the sum."""

    cost_MGP: NDArray[np.float64]
    forward_share: float

    def keys(self, order_BM: NDArray[np.int64]) -> NDArray[np.float64]:
        """[B, 2]; an order may leave rows out."""
        batch, rows = order_BM.shape
        cost_BGMP = self.cost_MGP[order_BM].swapaxes(1, 2)
        shards, stages = cost_BGMP.shape[1], cost_BGMP.shape[3]
        makespan_B = _makespan_B(cost_BGMP.reshape(-1, rows, stages), self.forward_share)
        makespan_BG = makespan_B.reshape(batch, shards)
        return np.stack([makespan_BG.max(axis=1), makespan_BG.sum(axis=1)], axis=1)

    def best(self, order_BM: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first of the best."""
        key_B2 = self.keys(order_BM)
        return np.asarray(order_BM[np.lexsort((key_B2[:, 1], key_B2[:, 0]))[0]])

    def better(self, order_M: NDArray[np.int64], than_M: NDArray[np.int64]) -> bool:
        """Whether the largest makespan is lower, or the sum at no higher largest makespan."""
        (largest, total), (than_largest, than_total) = self.keys(np.stack([order_M, than_M]))
        if largest < than_largest * (1 - LEAST_GAIN):
            return True
        return bool(largest <= than_largest and total < than_total * (1 - LEAST_GAIN))

    def inserted(self) -> NDArray[np.int64]:
        """Rows one by one, the most work on any shard first, each at its best position."""
        work_M = self.cost_MGP.sum(axis=2).max(axis=1)
        order = np.zeros(0, np.int64)
        for row in np.argsort(-work_M, kind="stable"):
            order = self.best(np.stack([np.insert(order, i, row) for i in range(len(order) + 1)]))
        return order

    def improved(self, order_M: NDArray[np.int64]) -> NDArray[np.int64]:
        """Swap or move the row of each position in turn, the best way, until none helps."""
        rows, since, i = len(order_M), 0, 0
        at = np.arange(rows)
        while since < rows:
            swapped_BM = np.tile(order_M, (rows, 1))
            swapped_BM[:, i] = order_M
            swapped_BM[at, at] = order_M[i]
            others = np.delete(order_M, i)
            moved = [np.insert(others, j, order_M[i]) for j in range(rows)]
            found_M = self.best(np.concatenate([swapped_BM, moved]))
            since += 1
            if self.better(found_M, order_M):
                order_M, since = found_M, 0
            i = (i + 1) % rows
        return order_M


def _makespan_B(cost_BMP: NDArray[np.float64], forward_share: float) -> NDArray[np.float64]:
    """Makespan of each batch of rows [B, M, P]: operations in turn, as soon as they may begin."""
    batch, rows, stages = cost_BMP.shape
    forward_PMB = np.ascontiguousarray((cost_BMP * forward_share).transpose(2, 1, 0))
    backward_PMB = np.ascontiguousarray(cost_BMP.transpose(2, 1, 0)) - forward_PMB
    end_PMB = np.zeros((2, stages, rows, batch))  # of forwards, of backwards
    free_PB = np.zeros((stages, batch))
    for stage, backward, row in _operations(rows, stages):
        start_B = free_PB[stage]
        before = stage + 1 if backward else stage - 1
        if 0 <= before < stages:
            start_B = np.maximum(start_B, end_PMB[backward, before, row])
        duration_B = (backward_PMB if backward else forward_PMB)[stage, row]
        free_PB[stage] = end_PMB[backward, stage, row] = start_B + duration_B
    return np.asarray(free_PB.max(axis=0))


@lru_cache(maxsize=256)
def _operations(rows: int, stages: int) -> tuple[tuple[int, int, int], ...]:
    """(stage, 0 forward or 1 backward, row): each stage's in its 1F1B order, after their inputs."""
    queues = [_stage_operations(rows, stages - 1 - stage) for stage in range(stages)]
    next_P, done = [0] * stages, set[tuple[int, int, int]]()
    order: list[tuple[int, int, int]] = []
    while len(order) < 2 * rows * stages:
        for stage, queue in enumerate(queues):
            while next_P[stage] < len(queue):
                backward, row = queue[next_P[stage]]
                before = stage + 1 if backward else stage - 1
                if 0 <= before < stages and (before, backward, row) not in done:
                    break
                done.add((stage, backward, row))
                order.append((stage, backward, row))
                next_P[stage] += 1
    return tuple(order)


def _stage_operations(rows: int, warm_up: int) -> list[tuple[int, int]]:
    """(0 forward or 1 backward, row) of a stage that runs `warm_up` forwards ahead."""
    warm_up = min(warm_up, rows)
    order = [(0, row) for row in range(warm_up)]
    for row in range(rows - warm_up):
        order += [(0, warm_up + row), (1, row)]
    return order + [(1, row) for row in range(rows - warm_up, rows)]


def _work(cost_MGP: NDArray[np.float64]) -> NDArray[np.float64]:
    """U[g,p]; math.fsum makes it independent of the order of rows."""
    return np.array(
        [[math.fsum(c_M) for c_M in shard.T.tolist()] for shard in cost_MGP.swapaxes(0, 1)]
    )


def _costs(name: str, values: ArrayLike, dimensions: int) -> NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if array.ndim != dimensions or 0 in array.shape:
        expected = {2: "[M, P]", 3: "[M, G, P]"}[dimensions]
        raise InputError.at(f"{name}.shape", array.shape, f"{expected}, none of them 0")
    if (bad := np.argwhere(~(np.isfinite(array) & (array >= 0)))).size:
        index = tuple(int(i) for i in bad[0])
        raise InputError.at(name, float(array[index]), "a finite number of at least 0", index)
    return array


def _require_share(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 < value < 1):
        raise InputError.at(name, value, "a number between 0 and 1")


def _whole(name: str, values: Sequence[int], least: int) -> tuple[int, ...]:
    for i, value in enumerate(values):
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        if not whole or value < least:
            raise InputError.at(name, repr(value), f"a whole number of at least {least}", i)
    return tuple(int(value) for value in values)
