"""Where each expert lives: LPT on the aggregate demand, swap descent, fewest moves (design 3.1)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from routepack.budget import Phase
from routepack.errors import InfeasibleError
from routepack.kernels.layout import UNLIMITED
from routepack.kernels.placing import longest_first, swap_descent
from routepack.kernels.rng import stream_key
from routepack.kernels.rowaware import anneal_layers
from routepack.parallel import over_slices


@dataclass(frozen=True)
class Nodes:
    """Routing groups of consecutive experts that stay whole on a node of EP ranks.

    What is searched sees *seats*: the ranks node by node, so that nodes are consecutive.
    """

    groups: int
    node_of_rank: tuple[int, ...]
    """Of each EP rank [R]; nodes of equal size, by any names."""

    @cached_property
    def ranks(self) -> int:
        """Of a node."""
        return len(self.node_of_rank) // len(set(self.node_of_rank))

    @cached_property
    def rank_R(self) -> NDArray[np.int32]:
        """The rank in each seat: nodes by their first rank, ascending ranks of a node."""
        first = {node: rank for rank, node in reversed(list(enumerate(self.node_of_rank)))}
        first_R = [first[node] for node in self.node_of_rank]
        return np.argsort(first_R, kind="stable").astype(np.int32)

    @cached_property
    def seat_R(self) -> NDArray[np.int32]:
        """The seat of each rank."""
        return np.argsort(self.rank_R).astype(np.int32)


PLACEMENT_START = 0.2  # starting temperature, in mean excesses of a busiest rank over the mean
PLACEMENT_COOLING = 60.0


def identity(layers: int, experts: int) -> NDArray[np.int32]:
    """The contiguous placement [L, E] that trainers start with: expert e in slot e."""
    return np.tile(np.arange(experts, dtype=np.int32), (layers, 1))


def ranks_of(placement_LE: NDArray[np.int32], ranks: int) -> NDArray[np.int32]:
    """EP rank [L, E] of each expert's slot."""
    return np.asarray(placement_LE // (placement_LE.shape[1] // ranks), np.int32)


def balanced_placement(
    demand_LE: NDArray[np.int64], ranks: int, current_LE: NDArray[np.int32]
) -> NDArray[np.int32]:
    """Slots [L, E] that balance the aggregate demand over `ranks` EP ranks, near `current_LE`."""
    return relabel(balanced_ranks(demand_LE, ranks), ranks, current_LE)


def balanced_ranks(
    demand_LE: NDArray[np.int64], ranks: int, threads: int = 1, nodes: Nodes | None = None
) -> NDArray[np.int32]:
    """EP rank [L, E] of each expert that balances the aggregate demand (LPT, swap descent)."""
    if nodes is not None:
        return _balanced_on_nodes(demand_LE, ranks, threads, nodes)
    rank_LE = np.empty(demand_LE.shape, np.int32)
    demand_LE = np.ascontiguousarray(demand_LE)

    def balance(layers: slice) -> None:
        longest_first(demand_LE[layers], ranks, rank_LE[layers])
        swap_descent(demand_LE[layers], ranks, rank_LE[layers])

    over_slices(len(demand_LE), threads, balance)
    return rank_LE


def _balanced_on_nodes(
    demand_LE: NDArray[np.int64], ranks: int, threads: int, nodes: Nodes
) -> NDArray[np.int32]:
    """Whole routing groups balanced over nodes, then the experts of a node over its ranks."""
    layers, experts = demand_LE.shape
    count = ranks // nodes.ranks
    routed_LP = demand_LE.reshape(layers, nodes.groups, -1).sum(axis=2)
    node_LE = np.repeat(balanced_ranks(routed_LP, count, threads), experts // nodes.groups, axis=1)
    rank_LE = np.empty((layers, experts), np.int32)
    for node in range(count):
        held_LE = np.nonzero(node_LE == node)[1].reshape(layers, -1)
        inside_LE = balanced_ranks(
            np.take_along_axis(demand_LE, held_LE, axis=1), nodes.ranks, threads
        )
        np.put_along_axis(rank_LE, held_LE, inside_LE + np.int32(node * nodes.ranks), axis=1)
    return nodes.rank_R[rank_LE]


def row_aware_placement(
    demand_BLE: NDArray[Any],
    rank_LE: NDArray[np.int32],
    ranks: int,
    phase: Phase,
    stream: tuple[int, ...],
    pool: ThreadPoolExecutor,
    limit: int = UNLIMITED,
    nodes: Nodes | None = None,
    slow_RB: NDArray[np.int64] | None = None,
) -> NDArray[np.int32]:
    """Ranks [L, E] that lower the busiest ranks of groups, given their demand (design 6.1).

    Given the layout, layers are independent: each anneals swaps of experts under the sum over
    groups of the busiest rank. Starts from `rank_LE`; a layer is never worse after than before.
    Above `limit` routed tokens a busiest rank is charged more; experts stay on their node. With
    `slow_RB` a routed token counts so often on a rank in a group, and one of the limit as on the
    fastest: slower ranks are then charged from fewer tokens on.
    """
    layers = len(rank_LE)
    demand_LEB = np.ascontiguousarray(demand_BLE.transpose(1, 2, 0))
    seat_LE = rank_LE.copy() if nodes is None else nodes.seat_R[rank_LE]
    per_node = nodes.ranks if nodes is not None else ranks
    if per_node == 1:
        return rank_LE.copy()
    uneven = slow_RB is not None
    if slow_RB is None:
        slow_RB = np.ones((ranks, len(demand_BLE)), np.int64)
    elif limit < UNLIMITED:
        limit *= int(slow_RB.min())
    if nodes is not None:
        slow_RB = slow_RB[nodes.rank_R]
    slow_RB = np.ascontiguousarray(slow_RB, demand_LEB.dtype)
    busiest_L = np.zeros(layers, np.int64)
    wave = 0
    # With a deadline, a short first wave measures the speed; a wave restarts from the best.
    while (proposals := phase.next_step(layers, 1)) > 0 and wave < 2:
        key = stream_key(*stream, wave)

        def refine(layer: int, key: np.uint64 = key, proposals: int = proposals) -> None:
            anneal_layers(
                demand_LEB, ranks, per_node, limit, uneven, slow_RB, seat_LE, layer, layer + 1,
                proposals, PLACEMENT_START, PLACEMENT_COOLING, key, busiest_L,
            )  # fmt: skip

        list(pool.map(refine, range(layers)))
        phase.spend(proposals * layers)
        wave += 1
    return seat_LE if nodes is None else nodes.rank_R[seat_LE]


def relabel(
    rank_LE: NDArray[np.int32],
    ranks: int,
    current_LE: NDArray[np.int32],
    nodes: Nodes | None = None,
    *,
    alike: bool = True,
) -> NDArray[np.int32]:
    """Slots for a partition of experts into ranks that moves as few experts as possible.

    Ranks that are `alike` are interchangeable (those of a node among themselves, and nodes whole),
    so each layer assigns the parts to ranks to keep most experts where they are. An expert that
    stays on its rank keeps its slot; the others take the free slots in ascending order.
    """
    experts = rank_LE.shape[1]
    per_rank = experts // ranks
    current_rank_LE = ranks_of(current_LE, ranks)
    new_rank_LE = np.empty_like(rank_LE)
    for layer, (part_E, current_E) in enumerate(zip(rank_LE, current_rank_LE, strict=True)):
        stay_RR = np.bincount(part_E * ranks + current_E, minlength=ranks * ranks)
        stay_RR = stay_RR.reshape(ranks, ranks)
        if not alike:
            name_R = np.arange(ranks)
        elif nodes is None:
            name_R = linear_sum_assignment(stay_RR, maximize=True)[1]
        else:
            seated_RR = stay_RR[np.ix_(nodes.rank_R, nodes.rank_R)]
            named_R = _names_R(seated_RR, nodes.ranks)[nodes.seat_R]
            name_R = nodes.rank_R[named_R].astype(np.int64)
        new_rank_LE[layer] = name_R[part_E]
    # Stable sorts pair, rank by rank, the experts that move in with the slots that are left free.
    stays_LE = new_rank_LE == current_rank_LE
    slots_LE = np.where(stays_LE, current_LE, -1).astype(np.int32)
    for layer, stays_E in enumerate(stays_LE):
        movers = np.flatnonzero(~stays_E)
        movers = movers[np.argsort(new_rank_LE[layer, movers], kind="stable")]
        slots_LE[layer, movers] = np.sort(current_LE[layer, ~stays_E])
    assert (slots_LE // per_rank == new_rank_LE).all()
    return slots_LE


def require_whole(placement_LE: NDArray[np.int32], ranks: int, nodes: Nodes) -> None:
    """A given placement keeps routing groups on their node. Raises InfeasibleError."""
    layers = len(placement_LE)
    node_LE = np.array(nodes.node_of_rank)[ranks_of(placement_LE, ranks)]
    node_LPi = node_LE.reshape(layers, nodes.groups, -1)
    split_LP = np.ptp(node_LPi, axis=2) > 0
    if split_LP.any():
        layer, group = (int(k) for k in np.argwhere(split_LP)[0])
        found = np.unique(node_LPi[layer, group]).tolist()
        expected = "one, for routing_groups, and the placement is fixed"
        raise InfeasibleError.at("nodes of routing group", found, expected, (layer, group))


def _names_R(stay_RR: NDArray[np.int64], per_node: int) -> NDArray[np.int64]:
    """The rank that each part becomes, so that most experts stay; the parts of a node share one."""
    count = len(stay_RR) // per_node
    stay_NiNi = stay_RR.reshape(count, per_node, count, per_node)
    inside = [
        [linear_sum_assignment(stay_NiNi[a, :, b], maximize=True)[1] for b in range(count)]
        for a in range(count)
    ]
    index = np.arange(per_node)
    stay_NN = [
        [stay_NiNi[a, index, b, inside[a][b]].sum() for b in range(count)] for a in range(count)
    ]
    _, node_N = linear_sum_assignment(stay_NN, maximize=True)
    return np.concatenate([b * per_node + inside[a][b] for a, b in enumerate(node_N)])
