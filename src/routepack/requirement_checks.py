"""Does a plan meet its requirements? Slow and obvious, like the objective's oracle.

Shapes: M rows of D cells, G shards, L MoE layers, E experts, R EP ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InfeasibleError, InputError
from routepack.objective import Layout, rank_load_LR
from routepack.requirements import Requirements
from routepack.topology import Topology
from routepack.window import Window

Cell = tuple[int, int]  # row, DP rank


def broken_requirements(
    requirements: Requirements,
    window: Window,
    topology: Topology,
    placement_LE: NDArray[np.int32],
    rows: Layout,
) -> list[str]:
    """One line per broken requirement: a cell, rank, row or prompt each, in the order of the class.

    requirements  as they were asked for; those that cannot be had are a line, never an error
    placement_LE  [L, E] slots, a bijection in every layer
    rows          [M][D][...] samples of the window, each at most once
    """
    broken = []
    try:
        requirements.check(window, topology)
    except InfeasibleError as error:
        broken.append(f"requirements: {error}")
    except InputError as error:
        return [f"requirements: {error}"]
    broken += _counts(requirements, rows, topology.dp)
    if requirements.together is not None:
        assert window.group_S is not None
        broken += _apart(requirements.together, window.group_S, rows)
    if requirements.uniform_rows:
        assert window.tag_S is not None
        broken += _mixed(window.tag_S, rows)
    if requirements.memory_limit_tokens is not None:
        limit = requirements.memory_limit_tokens
        broken += _overloaded(limit, window, topology, placement_LE, rows)
    if requirements.routing_groups is not None:
        broken += _split_groups(requirements, topology.ep, placement_LE)
    return broken


def _counts(requirements: Requirements, rows: Layout, dp: int) -> Iterator[str]:
    """Samples of DP ranks and of cells, and rows."""
    if requirements.equal_samples_per_rank:
        counts_D = [sum(len(row[d]) for row in rows) for d in range(dp)]
        for d, count in enumerate(counts_D):
            if count * dp != sum(counts_D):
                share = f"{sum(counts_D) / dp:g} on every DP rank"
                yield f"rows[:, {d}] = {count} samples: expected {share}, equal_samples_per_rank"
    if len(rows) % requirements.rows_multiple_of:
        multiple = f"a multiple of {requirements.rows_multiple_of}"
        yield f"rows = {len(rows)} rows: expected {multiple}, rows_multiple_of"
    most = requirements.max_samples_per_cell
    for m, row in enumerate(rows):
        for d, cell in enumerate(row):
            if most is not None and len(cell) > most:
                found = f"rows[{m}, {d}] = {len(cell)} samples"
                yield f"{found}: expected at most {most}, max_samples_per_cell"


def _apart(together: str, group_S: NDArray[np.int32], rows: Layout) -> Iterator[str]:
    """Prompts with samples in two places, the first two of which are named."""
    first: dict[int, Cell] = {}
    told = set()
    for m, row in enumerate(rows):
        for d, cell in enumerate(row):
            for i in cell:
                group = int(group_S[i])
                other = first.setdefault(group, (m, d))
                apart = other[1] != d if together == "rank" else other != (m, d)
                if not apart or group in told:
                    continue
                told.add(group)
                if together == "rank":
                    where, expected = f"DP ranks {other[1]} and {d}", "one DP rank"
                else:
                    where, expected = f"rows[{other[0]}, {other[1]}] and rows[{m}, {d}]", "one cell"
                yield f"group {group} = {where}: expected {expected}, together = {together!r}"


def _mixed(tag_S: NDArray[np.int32], rows: Layout) -> Iterator[str]:
    """Rows of several tags."""
    for m, row in enumerate(rows):
        tags = sorted({int(tag_S[i]) for cell in row for i in cell})
        if len(tags) > 1:
            yield f"rows[{m}] = tags {tags}: expected one tag, uniform_rows"


def _overloaded(
    limit: int,
    window: Window,
    topology: Topology,
    placement_LE: NDArray[np.int32],
    rows: Layout,
) -> Iterator[str]:
    """Of each row and shard the busiest rank above the limit, lowest layer and rank of equals."""
    for m, row in enumerate(rows):
        for g, dp_ranks in enumerate(topology.groups):
            samples = [i for d in dp_ranks for i in row[d]]
            demand_LE = window.demand_SLE[samples].sum(axis=0, dtype=np.int64)
            load_LR = rank_load_LR(demand_LE, placement_LE, topology.ep)
            layer, r = np.unravel_index(int(load_LR.argmax()), load_LR.shape)
            if load_LR[layer, r] > limit:
                found = f"load[row {m}, shard {g}, layer {layer}, rank {r}] = {load_LR[layer, r]}"
                yield f"{found}: expected at most {limit} routed tokens, memory_limit_tokens"


def _split_groups(
    requirements: Requirements, ranks: int, placement_LE: NDArray[np.int32]
) -> Iterator[str]:
    """Groups of consecutive experts whose ranks lie on several nodes."""
    assert requirements.routing_groups is not None
    node_of_rank = requirements.nodes_of(ranks)
    layers, experts = placement_LE.shape
    size = experts // requirements.routing_groups
    for layer in range(layers):
        for group in range(requirements.routing_groups):
            ranks_of = placement_LE[layer, group * size : (group + 1) * size] // (experts // ranks)
            nodes = sorted({node_of_rank[r] for r in ranks_of})
            if len(nodes) > 1:
                found = f"placement[{layer}] = experts of routing group {group} on nodes {nodes}"
                yield f"{found}: expected one node, routing_groups"
