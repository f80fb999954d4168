"""Windows with prompts and tags, what a layout must meet in plain Python, and all layouts of tiny
windows: what the tests of requirements share.

Shape suffixes as in the package: S samples, L layers, E experts; N layouts, c cells.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from routepack import Budget, InfeasibleError, Plan, Requirements, Topology, Window, plan
from routepack.verify import verify
from strategies import SEEDS, random_window

Rows = Sequence[Sequence[Sequence[int]]]
BUDGET = Budget(evaluations=240)


@dataclass(frozen=True, eq=False)
class Case:
    """What a plan is asked for."""

    window: Window
    topology: Topology
    token_cap: int


def even_window(**fields: Any) -> Window:
    """16 samples of 5 to 20 tokens in 8 prompts of two, tags 0 and 1 by halves."""
    rng = np.random.default_rng(4)
    lengths_S = rng.integers(5, 21, 16)
    fields = {"group_S": np.arange(16) // 2, "tag_S": np.arange(16) // 8} | fields
    return random_window(rng, lengths_S, 2, 8, 2, **fields)


EVEN = Case(even_window(), Topology.of(dp=2, ep=4, edp=1), 50)


@st.composite
def cases(draw: st.DrawFn, *, max_groups: int = 8, experts: int = 8) -> Case:
    """Prompts of one to three samples, mostly of equal size and one tag, on 1 to 4 DP ranks."""
    dp, edp = draw(st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 1), (4, 2)]))
    ep = draw(st.sampled_from([1, 2, 4]))
    size, equal = draw(st.integers(1, 3)), draw(st.sampled_from([True, True, False]))
    groups = dp * draw(st.integers(1, max(1, max_groups // dp)))
    size_U = [size if equal else draw(st.integers(1, 3)) for _ in range(groups)]
    group_S = np.repeat(np.arange(groups), size_U)
    tag_U = np.arange(groups) * draw(st.integers(1, 2)) // groups
    lengths_S = draw(st.lists(st.integers(1, 30), min_size=len(group_S), max_size=len(group_S)))
    tag_S = tag_U[group_S]
    if draw(st.integers(0, 3)) == 0:
        tag_S = np.array(draw(st.permutations(tag_S.tolist())))
    rng = np.random.default_rng(draw(SEEDS))
    window = random_window(
        rng, lengths_S, 2, experts, 2, group_S=rng.permutation(20)[group_S], tag_S=tag_S
    )
    share = draw(st.sampled_from([0.3, 0.6, 1.2]))  # of the mean rank's tokens: some four, two, one
    cap = max(*lengths_S, int(share * sum(lengths_S) / dp))
    return Case(window, Topology.of(dp=dp, ep=ep, edp=edp), cap)


# One way to ask for each requirement; the memory limit is a share of all routed tokens of a rank.
ASKED: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "equal_samples_per_rank": st.just({"equal_samples_per_rank": True}),
    "rows_multiple_of": st.builds(lambda n: {"rows_multiple_of": n}, st.integers(2, 3)),
    "max_samples_per_cell": st.builds(lambda n: {"max_samples_per_cell": n}, st.integers(1, 4)),
    "together rank": st.just({"together": "rank"}),
    "together cell": st.just({"together": "cell"}),
    "uniform_rows": st.just({"uniform_rows": True}),
    "memory_limit_tokens": st.builds(
        lambda share: {"memory_limit_tokens": share}, st.sampled_from([0.4, 0.7, 1.1])
    ),
    "routing_groups": st.sampled_from(
        [{"routing_groups": n, "ranks_per_node": r} for n in (2, 4, 8) for r in (1, 2)]
    ),
    "node_of_rank": st.builds(  # ranks of a node, and how they are dealt out
        lambda n, r, seed: {"routing_groups": n, "node_of_rank": (r, seed)},
        st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]), SEEDS,
    ),
}  # fmt: skip
NEVER_BOTH = ({"together rank", "together cell"}, {"routing_groups", "node_of_rank"})
PAIRS = [(a, b) for a, b in itertools.combinations(ASKED, 2) if {a, b} not in NEVER_BOTH]


def requirements_for(case: Case, *fields: dict[str, Any]) -> Requirements:
    """The fields together; a memory limit in tokens, nodes no larger than there are ranks."""
    values = {name: value for some in fields for name, value in some.items()}
    if "memory_limit_tokens" in values:
        routed = int(case.window.lengths_S.sum()) * case.window.top_k / case.topology.ep
        values["memory_limit_tokens"] = max(1, int(values["memory_limit_tokens"] * routed))
    if "ranks_per_node" in values:
        values["ranks_per_node"] = min(values["ranks_per_node"], case.topology.ep)
    if "node_of_rank" in values:
        values.pop("ranks_per_node", None)
        per_node, seed = values["node_of_rank"]
        per_node = min(per_node, case.topology.ep)
        rng = np.random.default_rng(seed)
        names = rng.choice(100, case.topology.ep // per_node, replace=False)
        values["node_of_rank"] = rng.permutation(np.repeat(names, per_node)).tolist()
    return Requirements(**values)


def broken(
    requirements: Requirements, case: Case, placement: Sequence[Sequence[int]], rows: Rows
) -> set[str]:
    """The names of the requirements that a plan does not meet, by counting."""
    window, topology = case.window, case.topology
    names = set()
    where = {i: (m, d) for m, row in enumerate(rows) for d, cell in enumerate(row) for i in cell}
    assert sorted(where) == sorted(i for row in rows for cell in row for i in cell)
    per_rank = Counter(d for _, d in where.values())
    if requirements.equal_samples_per_rank and len(set(per_rank.values())) > 1:
        names.add("equal_samples_per_rank")
    if len(rows) % requirements.rows_multiple_of:
        names.add("rows_multiple_of")
    most = requirements.max_samples_per_cell
    if most is not None and max(Counter(where.values()).values()) > most:
        names.add("max_samples_per_cell")
    if requirements.together is not None:
        assert window.group_S is not None
        places: dict[int, set[Any]] = {}
        for i, (m, d) in where.items():
            place: Any = d if requirements.together == "rank" else (m, d)
            places.setdefault(int(window.group_S[i]), set()).add(place)
        if max(map(len, places.values())) > 1:
            names.add("together")
    if requirements.uniform_rows:
        assert window.tag_S is not None
        tags = Counter(m for m, _ in {(m, int(window.tag_S[i])) for i, (m, _) in where.items()})
        if max(tags.values()) > 1:
            names.add("uniform_rows")
    per = window.experts // topology.ep
    limit = requirements.memory_limit_tokens
    for row in rows if limit is not None else ():
        for ranks in topology.groups:
            for layer in range(window.layers):
                load = [0] * topology.ep
                for i in (i for d in ranks for i in row[d]):
                    for e in range(window.experts):
                        load[placement[layer][e] // per] += int(window.demand_SLE[i, layer, e])
                if limit is not None and max(load) > limit:
                    names.add("memory_limit_tokens")
    if requirements.routing_groups is not None:
        size = window.experts // requirements.routing_groups
        for slots in placement:
            if requirements.node_of_rank is not None:
                nodes = [requirements.node_of_rank[slot // per] for slot in slots]
            else:
                nodes = [slot // per // (requirements.ranks_per_node or 1) for slot in slots]
            if any(len(set(nodes[k : k + size])) > 1 for k in range(0, len(nodes), size)):
                names.add("routing_groups")
    return names


def planned(
    case: Case, requirements: Requirements, budget: Budget = BUDGET, **options: Any
) -> Plan | InfeasibleError:
    """A plan that holds and meets all that is required, or why there is none."""
    try:
        made = plan(
            case.window, case.topology, token_cap=case.token_cap, budget=budget, threads=1,
            requirements=requirements, **options,
        )  # fmt: skip
    except InfeasibleError as error:
        return one_line(error)
    assert made.requirements == requirements
    assert verify(case.window, made) == []
    assert broken(requirements, case, made.placement, made.rows) == set()
    return made


def one_line(error: InfeasibleError) -> InfeasibleError:
    """The error, which is one line."""
    assert "\n" not in str(error)
    return error


def every_layout(
    case: Case, rows: int, requirements: Requirements, placement_LE: NDArray[np.int32]
) -> NDArray[np.int32]:
    """cell_S [N, S] of all layouts of that many rows within the cap that meet what is required.

    Cell m * D + d is that of row m on DP rank d; shards are blocks of consecutive ranks.
    """
    window, topology = case.window, case.topology
    cells, samples, dp = rows * topology.dp, window.samples, topology.dp
    assert cells**samples <= 300_000
    if rows % requirements.rows_multiple_of:
        return np.empty((0, samples), np.int32)
    cell_NS = np.indices((cells,) * samples).reshape(samples, -1).T.astype(np.int32)

    def within(cell_NS: NDArray[np.int32]) -> NDArray[np.bool_]:
        in_NSc = cell_NS[:, :, None] == np.arange(cells)
        tokens_Nc = np.einsum("nsc,s->nc", in_NSc, window.lengths_S)
        count_Nc = in_NSc.sum(axis=1)
        most = requirements.max_samples_per_cell or samples
        fine_N = (count_Nc > 0).all(axis=1) & (count_Nc <= most).all(axis=1)
        fine_N &= (tokens_Nc <= case.token_cap).all(axis=1)
        if requirements.equal_samples_per_rank:
            count_ND = count_Nc.reshape(-1, rows, dp).sum(axis=1)
            fine_N &= np.ptp(count_ND, axis=1) == 0
        return np.asarray(fine_N)

    cell_NS = cell_NS[within(cell_NS)]
    for s, t in itertools.combinations(range(samples), 2):
        if window.group_S is not None and window.group_S[s] == window.group_S[t]:
            if requirements.together == "rank":
                cell_NS = cell_NS[cell_NS[:, s] % dp == cell_NS[:, t] % dp]
            elif requirements.together == "cell":
                cell_NS = cell_NS[cell_NS[:, s] == cell_NS[:, t]]
        tag_S = window.tag_S if requirements.uniform_rows else None
        if tag_S is not None and tag_S[s] != tag_S[t]:
            cell_NS = cell_NS[cell_NS[:, s] // dp != cell_NS[:, t] // dp]
    if requirements.memory_limit_tokens is not None:
        width = topology.ranks_per_shard
        rank_LE = placement_LE // (window.experts // topology.ep)
        on_LER = rank_LE[:, :, None] == np.arange(topology.ep)
        placed_SLR = np.einsum("sle,ler->slr", window.demand_SLE.astype(np.int64), on_LER)
        in_NSB = (cell_NS // width)[:, :, None] == np.arange(cells // width)
        load_NBLR = np.einsum("nsb,slr->nblr", in_NSB, placed_SLR)
        cell_NS = cell_NS[load_NBLR.max(axis=(1, 2, 3)) <= requirements.memory_limit_tokens]
    return cell_NS
