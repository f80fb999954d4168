"""What a trainer requires of a layout beyond the cap (each is off by default)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from routepack.errors import InfeasibleError, InputError
from routepack.topology import Topology
from routepack.window import Window

TOGETHER = ("rank", "cell")
LARGEST = 2**31 - 1


class Requirements(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """Constraints on a layout and a placement that some trainers need.

    equal_samples_per_rank  every DP rank trains S / D samples (verl's mini-batches, ROLL)
    rows_multiple_of        the number of rows is a multiple of this (virtual pipeline stages)
    max_samples_per_cell    samples of a micro-batch on a DP rank (a fixed micro-batch size)
    together                samples of one `window.group_S` stay on one DP rank ("rank"), or in one
                            cell ("cell")
    uniform_rows            the samples of a row share their `window.tag_S` (modality)
    memory_limit_tokens     routed tokens that an EP rank may hold at a layer in one row
    routing_groups          experts are routed in this many groups of consecutive ids; each group
                            stays on one node (DeepSeek's and Ling's group-limited routing)
    ranks_per_node          EP ranks of a node, consecutive; used with routing_groups
    node_of_rank            instead of ranks_per_node, the node of each EP rank [R], where those of
                            a node are not consecutive: nodes of equal size, by any whole numbers

    Raises InputError for a value out of range.
    """

    equal_samples_per_rank: bool = False
    rows_multiple_of: int = 1
    max_samples_per_cell: int | None = None
    together: str | None = None
    uniform_rows: bool = False
    memory_limit_tokens: int | None = None
    routing_groups: int | None = None
    ranks_per_node: int | None = None
    node_of_rank: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("equal_samples_per_rank", "uniform_rows"):
            if not isinstance(getattr(self, name), (bool, np.bool_)):
                raise InputError.at(name, repr(getattr(self, name)), "true or false")
            msgspec.structs.force_setattr(self, name, bool(getattr(self, name)))
        whole = (
            "rows_multiple_of", "max_samples_per_cell", "memory_limit_tokens", "routing_groups",
            "ranks_per_node",
        )  # fmt: skip
        for name in whole:
            value = getattr(self, name)
            if value is None and name != "rows_multiple_of":
                continue
            integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not integer or not 1 <= value <= LARGEST:
                raise InputError.at(name, repr(value), f"a whole number in 1..{LARGEST}")
            msgspec.structs.force_setattr(self, name, int(value))
        if self.together is not None and self.together not in TOGETHER:
            raise InputError.at("together", repr(self.together), "'rank' or 'cell'")
        if self.node_of_rank is not None:
            msgspec.structs.force_setattr(self, "node_of_rank", _node_map(self.node_of_rank))
        if self.ranks_per_node is not None and self.node_of_rank is not None:
            raise InputError(
                "ranks_per_node, node_of_rank: expected one of the two, both are given"
            )
        free = self.ranks_per_node is None and self.node_of_rank is None
        if (self.routing_groups is None) != free:
            raise InputError(
                "routing_groups: expected together with ranks_per_node or node_of_rank"
            )

    @property
    def vacuous(self) -> bool:
        """Whether nothing is required."""
        return self == Requirements()

    def named(self) -> Iterator[tuple[str, object]]:
        """The requirements that are on, with their values."""
        off = Requirements()
        for name in self.__struct_fields__:
            if getattr(self, name) != getattr(off, name):
                yield name, getattr(self, name)

    def nodes_of(self, ranks: int) -> tuple[int, ...]:
        """The node of each of `ranks` EP ranks, with routing_groups."""
        if self.node_of_rank is not None:
            return self.node_of_rank
        assert self.ranks_per_node is not None
        return tuple(rank // self.ranks_per_node for rank in range(ranks))

    def check(self, window: Window, topology: Topology) -> None:
        """What can be told from sizes alone. Raises InputError or InfeasibleError."""
        if self.together is not None and window.group_S is None:
            raise InputError(
                f"group: expected in the window, together = {self.together!r} needs it"
            )
        if self.uniform_rows and window.tag_S is None:
            raise InputError("tag: expected in the window, uniform_rows needs it")
        if self.uniform_rows and window.tag_S is not None:
            tags, counts = np.unique(window.tag_S, return_counts=True)
            if counts.min() < topology.dp:
                k = int(counts.argmin())
                expected = f"at least the {topology.dp} DP ranks, for uniform_rows"
                raise InfeasibleError.at("samples with tag", int(counts[k]), expected, int(tags[k]))
        if self.together is not None and window.group_S is not None:
            groups = len(np.unique(window.group_S))
            if groups < topology.dp:
                expected = f"at least the {topology.dp} DP ranks, for together = {self.together!r}"
                raise InfeasibleError.at("groups", groups, expected)
        if self.equal_samples_per_rank and window.samples % topology.dp:
            expected = f"a multiple of the {topology.dp} DP ranks, for equal_samples_per_rank"
            raise InfeasibleError.at("samples", window.samples, expected)
        if self.routing_groups is not None:
            self._check_nodes(window, topology)

    def binding(self, window: Window, topology: Topology, token_cap: int) -> Requirements:
        """The same without those that every layout of the window meets."""
        free: dict[str, object] = {}
        fitting = np.cumsum(np.sort(window.lengths_S))
        if self.max_samples_per_cell is not None and self.max_samples_per_cell >= int(
            np.searchsorted(fitting, token_cap, side="right")
        ):
            free["max_samples_per_cell"] = None
        limit = self.memory_limit_tokens
        if limit is not None and limit >= window.top_k * int(window.lengths_S.sum()):
            free["memory_limit_tokens"] = None
        if topology.dp == 1:
            free["equal_samples_per_rank"] = False
        if self.together is not None and window.group_S is not None:
            alone = len(np.unique(window.group_S)) == window.samples
            if alone or (self.together == "rank" and topology.dp == 1):
                free["together"] = None
        if self.uniform_rows and window.tag_S is not None and len(np.unique(window.tag_S)) == 1:
            free["uniform_rows"] = False
        if self.routing_groups is not None and len(set(self.nodes_of(topology.ep))) == 1:
            free["routing_groups"] = free["ranks_per_node"] = free["node_of_rank"] = None
        return msgspec.structs.replace(self, **free)

    def _check_nodes(self, window: Window, topology: Topology) -> None:
        assert self.routing_groups is not None
        if self.node_of_rank is not None and len(self.node_of_rank) != topology.ep:
            expected = f"one for each of the {topology.ep} EP ranks"
            raise InputError.at("nodes in node_of_rank", len(self.node_of_rank), expected)
        if self.ranks_per_node is not None and topology.ep % self.ranks_per_node:
            expected = f"a divisor of the {topology.ep} EP ranks"
            raise InputError.at("ranks_per_node", self.ranks_per_node, expected)
        if window.experts % self.routing_groups:
            expected = f"a divisor of the {window.experts} experts"
            raise InputError.at("routing_groups", self.routing_groups, expected)
        nodes = len(set(self.nodes_of(topology.ep)))
        if self.routing_groups % nodes:
            expected = f"a multiple of the {nodes} nodes, so that each holds whole groups"
            raise InfeasibleError.at("routing_groups", self.routing_groups, expected)


def _node_map(node_of_rank: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers, each as often as the others. Raises InputError."""
    listed = isinstance(node_of_rank, (Sequence, np.ndarray)) and not isinstance(node_of_rank, str)
    if not listed or len(node_of_rank) == 0:
        raise InputError.at("node_of_rank", repr(node_of_rank), "the node of each EP rank")
    for rank, node in enumerate(node_of_rank):
        integer = isinstance(node, (int, np.integer)) and not isinstance(node, bool)
        if not integer or not 0 <= node <= LARGEST:
            expected = f"a whole number in 0..{LARGEST}"
            raise InputError.at("node_of_rank", repr(node), expected, rank)
    nodes = tuple(int(node) for node in node_of_rank)
    counts = Counter(nodes)
    for node in counts:
        if counts[node] != counts[nodes[0]]:
            equal = f"{counts[nodes[0]]} as in node {nodes[0]}, node_of_rank has nodes of one size"
            raise InputError.at("ranks of node", counts[node], equal, node)
    return nodes


NONE = Requirements()
