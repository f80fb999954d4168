"""verl's own layout against a plan, at equal rows: its functions, from the installed verl.

python -m bench.verl_layout [WORKLOAD ...] [--seconds S] [--seed K] [--check]

Both sides keep what verl requires: as many samples on every DP rank, as many micro-batches, none
empty. Each window is cut to a multiple of its DP ranks, as verl would pad it to one. verl's layout
is `get_seqlen_balanced_partitions` over DP ranks, then `rearrange_micro_batches` on each; where it
needs more rows than the plan, its partitioner is also given the plan's number of rows, and then may
break the cap. Columns, slowest shard over the analytic bound:

    verl            verl's own rows, contiguous experts
    verl =          the same at the plan's rows; * where a cell is above the cap
    packing         a plan with contiguous experts: what packing alone brings
    verl LPT        verl's own rows with balanced expert placement
    verl LPT =      the same at the plan's rows
    placement       a plan that also places experts
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from bench.methods import setting
from bench.report import emit, table
from bench.workloads import WORKLOADS, Workload
from numpy.typing import NDArray

import routepack
from routepack.bounds import analytic_bound
from routepack.integrations.observe import measure
from routepack.integrations.verl.observe import own_layout, splitter
from routepack.placement import balanced_ranks, identity, relabel
from routepack.window import Window

Rows = Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True)
class Compared:
    """One window; ratios to the analytic bound by column."""

    workload: Workload
    rows: tuple[int, int]
    """verl's and the plan's."""
    ratios: dict[str, float]
    over_cap: bool
    """Whether verl's partitioner breaks the cap at the plan's rows."""

    @property
    def better(self) -> bool:
        """Lower on both placements, whichever rows verl is given."""
        r = self.ratios
        return r["packing"] < min(r["verl"], r["verl ="]) and r["placement"] < min(
            r["verl LPT"], r["verl LPT ="]
        )


def cut(window: Window, ranks: int) -> Window:
    """The window without the last samples, those beyond a multiple of the DP ranks."""
    keep = slice(0, window.samples // ranks * ranks)
    groups = window.group_S
    return replace(
        window,
        lengths_S=window.lengths_S[keep],
        demand_SLE=window.demand_SLE[keep],
        missing_S=window.missing_S[keep],
        group_S=None if groups is None else groups[keep],
    )


def verl_rows(
    lengths_S: NDArray[np.int64], ranks: int, token_cap: int, rows: int
) -> tuple[Rows, Rows]:
    """verl's layout, and what its partitioner makes of the same DP ranks with `rows` rows."""
    import torch
    from verl.utils import seqlen_balancing as verl

    work_S = verl.calculate_workload(torch.from_numpy(lengths_S))
    parts = verl.get_seqlen_balanced_partitions(work_S, k_partitions=ranks, equal_size=True)
    order = np.concatenate(parts)
    split = splitter(verl.rearrange_micro_batches, token_cap)
    (own,) = own_layout(split, lengths_S[order], ranks=ranks, steps=1)
    cells = [
        verl.get_seqlen_balanced_partitions(work_S[part].tolist(), rows, equal_size=False)
        for part in parts
    ]
    return (
        [[order[cell].tolist() for cell in row] for row in own],
        [[[parts[d][i] for i in cells[d][m]] for d in range(ranks)] for m in range(rows)],
    )


def compare(workload: Workload, seconds: float, seed: int) -> Compared:
    """Both sides on one window."""
    window = workload.window(seed)
    assert window is not None
    window = cut(window, workload.dp)
    topology, cost_model = setting(workload)
    common: dict[str, Any] = dict(
        token_cap=workload.token_cap,
        cost_model=cost_model,
        budget=routepack.Budget(seconds=seconds),
        requirements=routepack.Requirements(equal_samples_per_rank=True),
    )
    packing = routepack.plan(window, topology, fixed_placement=True, **common)
    placement = routepack.plan(window, topology, **common)
    contiguous_LE = identity(window.layers, window.experts)
    lpt_LE = relabel(balanced_ranks(window.demand_LE, topology.ep, 1), topology.ep, contiguous_LE)
    own, equal = verl_rows(window.lengths_S, topology.dp, workload.token_cap, len(packing.rows))
    bound = analytic_bound(
        window, topology, cost_model.resolve(window, topology, workload.token_cap)
    )

    def ratio(rows: Rows, placement_LE: NDArray[np.int32]) -> float:
        load = measure(window, topology, cost_model, workload.token_cap, rows, placement_LE)
        return load.slowest_shard / bound

    tokens = [int(window.lengths_S[cell].sum()) for row in equal for cell in row]
    return Compared(
        workload,
        (len(own), len(packing.rows)),
        {
            "verl": ratio(own, contiguous_LE),
            "verl =": ratio(equal, contiguous_LE),
            "packing": ratio(packing.rows, contiguous_LE),
            "verl LPT": ratio(own, lpt_LE),
            "verl LPT =": ratio(equal, lpt_LE),
            "placement": ratio(placement.rows, placement.placement_LE),
        },
        max(tokens) > workload.token_cap,
    )


def main() -> int:
    """Print the table; with --check 1 where a window is not better."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), metavar="WORKLOAD")
    parser.add_argument("--seconds", type=float, default=1.0, help="budget of a plan")
    parser.add_argument("--seed", type=int, default=0, help="of synthetic windows")
    parser.add_argument("--check", action="store_true", help="fail where a plan is not better")
    parser.add_argument("--out", type=Path, help="write the table here as well")
    args = parser.parse_args()
    results, skipped = [], []
    for name in args.workloads:
        if reason := WORKLOADS[name].skip_reason:
            skipped.append(f"Skipped: {reason}.")
            continue
        print(name, file=sys.stderr)
        results.append(compare(WORKLOADS[name], args.seconds, args.seed))

    columns = ["verl", "verl =", "packing", "verl LPT", "verl LPT =", "placement"]
    lines = []
    for result in results:
        cells = [f"{result.ratios[column]:.4f}" for column in columns]
        for column in (1, 4):
            cells[column] += "*" if result.over_cap else ""
        lines.append([result.workload.name, f"{result.rows[0]}, {result.rows[1]}", *cells])
    about = f"verl {version('verl')}, plans of {args.seconds:g} s, slowest shard over the bound"
    text = "\n\n".join([about, table(["window", "rows", *columns], lines), *skipped])
    worse = [f"{r.workload.name}: a plan is not better" for r in results if not r.better]
    return emit(text, args.out, worse, args.check)


if __name__ == "__main__":
    sys.exit(main())
