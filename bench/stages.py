"""What a search that does not know of pipeline stages leaves on the table.

python -m bench.stages [WORKLOAD ...] [--stages P ...] [--evaluations N] [--markdown FILE]

Layers are split into P stages of consecutive layers, as equal as they come, and attention work as
the layers are. `above its share`: how far the slowest stage of a shard is above what it would be,
were the shard's work spread like the layers. Part of that lies in the layers, whose hottest experts
differ, so each stage has a bound of its own, made of the plan's floors: `its gap` is to that one.
`makespan`: 1F1B with the rows in the order that routepack.pipeline finds, over (M + P - 1) / M
times the slowest stage, which is what M equal rows take; below 1 where short rows fill and drain.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from bench.methods import setting
from bench.report import emit, table
from bench.workloads import WORKLOADS, Workload

import routepack
from routepack.bounds import placement_floor_L
from routepack.pipeline import Stages, one_f_one_b, ordered_rows, slowest, stage_costs

STAGES = (2, 4)


def lines(workload: Workload, counts: list[int], evaluations: int) -> list[list[str]]:
    """A line of the table for each number of stages."""
    window = workload.window()
    assert window is not None
    topology, cost_model = setting(workload)
    plan = routepack.plan(
        window, topology, token_cap=workload.token_cap, cost_model=cost_model,
        budget=routepack.Budget(evaluations=evaluations),
    )  # fmt: skip
    cost = cost_model.resolve(window, topology, workload.token_cap)
    rows, found = len(plan.rows), []
    bound = plan.certificate.cost_lower_bound
    expert_L = cost.expert * placement_floor_L(window.demand_LE, topology.ep)
    for count in counts:
        stage_of_layer = [layer * count // window.layers for layer in range(window.layers)]
        share_P = np.bincount(stage_of_layer) / window.layers
        stages = Stages(
            stage_of_layer=tuple(stage_of_layer), attention_share=tuple(share_P.tolist())
        )
        cost_MGP = stage_costs(window, topology, cost, plan.placement_LE, plan.rows, stages)
        work_GP = cost_MGP.sum(axis=0)
        above = (work_GP / share_P).max(axis=1) / work_GP.sum(axis=1) - 1
        floor_P = np.bincount(stage_of_layer, weights=expert_L)
        bound_P = (share_P * (bound * topology.edp - expert_L.sum()) + floor_P) / topology.edp
        stage = slowest(cost_MGP)
        order = ordered_rows(cost_MGP, stages.forward_share)
        makespan = max(
            one_f_one_b(cost_MGP[order, g], stages.forward_share).makespan
            for g in range(topology.edp)
        )
        equal = stage.cost * (rows + count - 1) / rows
        found.append(
            [workload.name, f"{window.layers}", f"{rows}", f"{count}", f"{above.max():.2%}",
             f"{stage.cost / bound_P[stage.stage] - 1:.2%}", f"{plan.certificate.gap:.2%}",
             f"{makespan / equal:.4f}"]
        )  # fmt: skip
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES), metavar="P")
    parser.add_argument("--evaluations", type=int, default=1_500_000, metavar="N")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    if unknown := [name for name in args.workloads if name not in WORKLOADS]:
        parser.error(f"no workload {', '.join(unknown)}: choose from {', '.join(WORKLOADS)}")
    found = []
    for name in args.workloads or WORKLOADS:
        if WORKLOADS[name].window() is not None:
            found += lines(WORKLOADS[name], args.stages, args.evaluations)
            print(f"{name}: {' '.join(found[-1][3:])}", file=sys.stderr)
    header = [
        "workload", "layers", "rows", "stages", "slowest above its share", "its gap",
        "the plan's gap", "makespan",
    ]  # fmt: skip
    about = f"Plans of {args.evaluations:,} proposals, window seed 0."
    sys.exit(emit("\n\n".join([about, table(header, found)]), args.markdown, [], check=False))


if __name__ == "__main__":
    main()
