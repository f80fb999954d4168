"""Plan a recorded RL step with four methods, check the plans, and show what they change.

The window holds 440 samples of maths, code and text with the experts that an 8M-parameter Qwen3-MoE
chose for them. Writes plan.json in the current directory.
"""

from pathlib import Path

from rich.console import Console

import routepack
from routepack.cli.terminal import loading_kernels
from routepack.files import read_window, write_plan
from routepack.report import Outcome, methods_table, rank_picture
from routepack.report.text import cost_model_text
from routepack.verify import verify

WINDOW = Path(__file__).parent / "tiny_moe_replay.safetensors"
METHODS = ("baseline", "reorder", "reorder-kk", "routepack")

# 8 data-parallel ranks whose tokens meet in one group of 8 expert-parallel ranks.
topology = routepack.Topology.of(dp=8, ep=8)
token_cap = 4096
# Attention against expert work as in Qwen3-30B-A3B, brought to 6 layers and to this cap.
cost_model = routepack.CostModel(attention=(routepack.AttentionStage("attention", 12.5, 3.75),))

console = Console(highlight=False)
loading_kernels()
window = read_window(WINDOW)
outcomes = []
for method in METHODS:
    plan = routepack.plan(
        window,
        topology,
        token_cap=token_cap,
        cost_model=cost_model,
        method=method,
        budget=routepack.Budget(seconds=1.0),
    )
    if broken := verify(window, plan):
        raise SystemExit("\n".join(broken))
    outcomes.append(Outcome.of(window, plan))

console.print(
    f"{window.samples} samples, {window.lengths_S.sum():,} tokens, {window.layers} MoE layers x "
    f"{window.experts} experts, top-{window.top_k}\n"
    f"dp {topology.dp}, ep {topology.ep}, edp {topology.edp}, token cap {token_cap:,}\n"
    f"cost model: {cost_model_text(cost_model)}\n"
)
console.print(methods_table(outcomes))
console.print()
console.print(rank_picture(outcomes[0], outcomes[-1]))
write_plan("plan.json", outcomes[-1].plan)
console.print(f"\nEvery plan was verified; wrote {Path('plan.json').resolve()}", soft_wrap=True)
