"""slime's own schedules against plans, packing alone and with placement; what observing costs.

python -m bench.packing_alone [WORKLOAD ...] [--seconds S] [--seed K] [--observe] [--check]

slime's function is its own, from the source on PYTHONPATH (docs/compatibility.md has the commit);
where it is absent, `kk` stands for its balanced schedules: Karmarkar-Karp with contiguous experts.
Columns, slowest shard over the analytic bound, rows where they differ from the plan's:

    first fit     slime's default: first fit in the order of the rollout, then round robin
    balance-data  the same micro-batches, given to ranks by their FLOPs
    by-flops      micro-batches of equal FLOPs; * where one is above the cap
    kk            Karmarkar-Karp over cells, as verl does it
    packing       a plan with contiguous experts
    reorder-kk    kk with balanced experts
    placement     a plan that also places experts
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from bench.methods import setting
from bench.report import emit, table
from bench.workloads import WORKLOADS, Workload

import routepack
from routepack.bounds import analytic_bound
from routepack.integrations.generic import Packer
from routepack.integrations.observe import measure
from routepack.integrations.rollout import rows_of
from routepack.topology import Topology
from routepack.window import Window

Rows = Sequence[Sequence[Sequence[int]]]
SCHEDULES = {
    "first fit": {},
    "balance-data": {"balance_data": True},
    "by-flops": {"balance_data": True, "balance_by_flops": True},
}
# Only for slime's FLOPs: the shape of Qwen3-30B-A3B.
MODEL = dict(
    hidden_size=2048, num_attention_heads=32, num_query_groups=4, kv_channels=128,
    vocab_size=151936, ffn_hidden_size=6144, moe_ffn_hidden_size=768, num_layers=48,
    num_experts=128, moe_router_topk=8, moe_layer_freq=1,
)  # fmt: skip


@dataclass(frozen=True)
class Compared:
    """One window; by column the ratio to the bound, rows, and whether a cell is above the cap."""

    workload: Workload
    ratios: dict[str, float]
    rows: dict[str, int]
    over_cap: set[str]

    @property
    def failed(self) -> list[str]:
        """Layouts that a plan is not below, packing against packing, or that have other rows."""
        ratios = self.ratios
        theirs = {name: ratios[name] for name in (*SCHEDULES, "kk") if name in ratios}
        lines = [
            f"packing {ratios['packing']:.4f}, {name} {ratio:.4f}"
            for name, ratio in theirs.items()
            if not ratios["packing"] < ratio
        ]
        lines += [
            f"{name} has {count} rows, packing {self.rows['packing']}"
            for name, count in self.rows.items()
            if count != self.rows["packing"]
        ]
        best = min([*theirs.values(), ratios["reorder-kk"]])
        if not ratios["placement"] < best:
            lines.append(f"placement {ratios['placement']:.4f}, best other {best:.4f}")
        return [f"{self.workload.name}: {line}" for line in lines]


def slime_function() -> Any:
    """slime's `build_dp_schedule`, or None."""
    try:
        from slime.utils.dp_schedule import build_dp_schedule
    except ImportError:
        return None
    return build_dp_schedule


def slime_rows(own: Any, window: Window, workload: Workload, **changes: Any) -> Rows:
    """The rows of slime's schedule for one optimizer step of the whole window."""
    defaults = dict(balance_data=False, balance_by_flops=False, micro_batch_size=1)
    args = SimpleNamespace(
        use_dynamic_batch_size=True, max_tokens_per_gpu=workload.token_cap,
        **{**defaults, **changes}, **MODEL,
    )  # fmt: skip
    config = dict(dp_size=workload.dp, cp_size=1, vpp_size=1, microbatch_group_size_per_vp_stage=1)
    schedule = own(
        args, config, window.lengths_S.tolist(),
        global_batch_size=window.samples, rollout_indices=list(range(window.samples)),
    )  # fmt: skip
    [rows] = rows_of(schedule)
    return rows


def run(workload: Workload, window: Window, own: Any, seconds: float) -> Compared:
    """All layouts of one window."""
    topology, model = setting(workload)
    cap = workload.token_cap
    bound = analytic_bound(window, topology, model.resolve(window, topology, cap))
    ratios: dict[str, float] = {}
    rows: dict[str, int] = {}
    over_cap = set()

    def enter(name: str, slowest: float, layout: Rows) -> None:
        ratios[name], rows[name] = slowest / bound, len(layout)
        tokens = [int(window.lengths_S[list(cell)].sum()) for row in layout for cell in row]
        if max(tokens) > cap:
            over_cap.add(name)

    if own is not None:
        for name, changes in SCHEDULES.items():
            layout = slime_rows(own, window, workload, **changes)
            enter(name, measure(window, topology, model, cap, layout).slowest_shard, layout)
    for name, method, fixed in (
        ("kk", "kk", False),
        ("packing", "routepack", True),
        ("reorder-kk", "reorder-kk", False),
        ("placement", "routepack", False),
    ):
        plan = routepack.plan(
            window, topology, token_cap=cap, cost_model=model, method=method,
            budget=routepack.Budget(seconds=seconds), fixed_placement=fixed,
        )  # fmt: skip
        enter(name, plan.score.slowest_shard, plan.rows)
    return Compared(workload, ratios, rows, over_cap)


COLUMNS = (*SCHEDULES, "kk", "packing", "reorder-kk", "placement")


def line(compared: Compared) -> list[str]:
    """A line of the table."""

    def cell(name: str) -> str:
        if name not in compared.ratios:
            return ""
        mark = "*" if name in compared.over_cap else ""
        rows = compared.rows[name]
        other = f" ({rows})" if rows != compared.rows["packing"] else ""
        return f"{compared.ratios[name]:.4f}{mark}{other}"

    return [compared.workload.name, str(compared.rows["packing"]), *map(cell, COLUMNS)]


def observed(seconds: float) -> tuple[str, list[str]]:
    """What a step waits for while it is observed: 512 samples of 1,000 tokens, 48 layers, top-8."""
    from routepack.ingest import RouteSpec, from_slime
    from routepack.integrations.samples import window_of

    samples, tokens, layers, experts, top_k = 512, 1000, 48, 128, 8
    rng = np.random.default_rng(0)
    score = rng.normal(size=(4096, layers, experts)) + rng.normal(size=(1, layers, experts))
    pool = np.argsort(score, axis=2)[:, :, :top_k]
    topology = Topology.of(dp=16, ep=8)
    own = [[list(range(k, k + 4)) for k in range(m, m + 64, 4)] for m in range(0, samples, 64)]
    lines, slowest = [], 0.0
    for kind in (np.uint8, np.int32):
        draw = rng.integers(0, 4096, (samples, tokens - 1))
        routes = [pool[rows].astype(kind) for rows in draw]
        spec = RouteSpec(experts, top_k, moe_layers=tuple(range(layers)), model_layers=layers)
        packer = Packer(topology, 16384, mode="observe", budget=routepack.Budget(seconds=seconds))
        logged: list[dict[str, float]] = []

        def window(routes: Any = routes, spec: RouteSpec = spec) -> Window:
            return window_of(from_slime, spec, [tokens] * samples, routes)

        waited = []
        for _ in range(6):
            began = time.perf_counter()
            packer.step(window, [own], logged.append)
            waited.append(time.perf_counter() - began)
            time.sleep(5)  # the step
        packer.flush()
        steady = max(waited)
        slowest = max(slowest, steady)
        counting = [metrics["routepack/counting_seconds"] for metrics in logged]
        lines.append(
            [
                np.dtype(kind).name,
                f"{1e3 * steady:.1f}",
                f"{steady / 5:.3%}",
                f"{np.median(counting):.2f}",
                f"{logged[-1]['routepack/total/planned']:g} of 6",
            ]
        )
    header = ["routes", "longest wait (ms)", "of a step of 5 s",
              "counting on the other thread (s)", "steps observed"]  # fmt: skip
    about = (
        "Observing a step of 512 samples of 1,000 tokens at 48 layers, top-8 of 128 experts: how "
        "long the step waits, modules loaded."
    )
    failed = [] if slowest < 0.05 else [f"observing: a step waits {slowest:.3f} s"]
    return f"{about}\n\n{table(header, lines)}", failed


def main() -> None:
    """Parse the flags, plan, and print the table and the failed checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=1.0, help="of a plan")
    parser.add_argument("--seed", type=int, default=0, help="of the windows")
    parser.add_argument("--observe", action="store_true", help="also what observing costs")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a check fails")
    args = parser.parse_args()
    if unknown := [name for name in args.workloads if name not in WORKLOADS]:
        parser.error(f"no workload {', '.join(unknown)}: choose from {', '.join(WORKLOADS)}")

    own = slime_function()
    lines, failed, notes = [], [], []
    if own is None:
        notes.append("slime's source is not on the path: its columns are empty.")
    for name in args.workloads or WORKLOADS:
        workload = WORKLOADS[name]
        window = workload.window(args.seed)
        if window is None:
            notes.append(f"Skipped: {workload.skip_reason}.")
            continue
        compared = run(workload, window, own, args.seconds)
        lines.append(line(compared))
        failed += compared.failed
        print(f"{name}: packing {compared.ratios['packing']:.4f}", file=sys.stderr)
    about = (
        f"Slowest shard / analytic bound, {args.seconds:g} s a plan, window seed {args.seed}. In "
        f"brackets the rows of layouts that have others than the plan."
    )
    parts = [about, table(["workload", "rows", *COLUMNS], lines), *notes]
    if args.observe:
        text, slow = observed(args.seconds)
        parts.append(text)
        failed += slow
    sys.exit(emit("\n\n".join(parts), args.markdown, failed, args.check))


if __name__ == "__main__":
    main()
