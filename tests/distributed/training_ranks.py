"""Ranks that train: `python training_ranks.py CASE WORLD FOLDER`."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from forked import main
from training import (
    EXPERT_NAMES,
    EXPERTS,
    HIDDEN,
    TOKENS,
    Run,
    Setting,
    differing,
    distance,
    groups_of,
    trained,
)

from routepack.state.checkpoint import logical
from routepack.state.norm import logical_square_norm
from routepack.state.reference import ORDERS
from routepack.state.tensors import ExpertState

STEPS = 20


def one_layer(rank: int, world: int) -> dict[str, Any]:
    """Output and gradients of a layer at a random placement, by those at the identity and by a
    dense computation; the inputs and the gradient of the output are the same."""
    found: dict[str, Any] = {}
    for top_k in (1, 2, 4, 8):
        for order in ORDERS:
            setting = Setting(top_k, world, 1, order=order, groups={"ep": None})
            run = Run(setting)
            moe = run.model.moes[0]
            generator = torch.Generator().manual_seed(rank)
            x_TH, dy_TH = (torch.randn(TOKENS, HIDDEN, generator=generator) for _ in range(2))
            identity = gradients(run, x_TH, dy_TH)
            whole = {name: values for _, name, values in logical(run.state)}
            dense_TH = dense(x_TH, moe.router_EH, whole["w1_SHF"], whole["w2_SFH"], top_k)
            run.move(np.random.default_rng(top_k).permutation(EXPERTS)[None].astype(np.int32))
            moved = gradients(run, x_TH, dy_TH)
            weights = [(0, moe.w1_SHF.grad), (0, moe.w2_SFH.grad)]
            norm = logical_square_norm(weights, run.state.placement_LE)
            square = sum(float(moved[f"d{n}"].double().square().sum()) for n in EXPERT_NAMES)
            found[f"{top_k}, {order}"] = {
                "norm": norm / square,
                "from dense": float((identity["y"] - dense_TH).abs().max()),
                "differs": sorted(differing(identity, moved)),
                "distance": float((identity["y"] - moved["y"]).abs().max()),
            }
    return found


def table(rank: int, world: int) -> dict[str, Any]:
    """Distances after twenty steps from a run that never moved an expert (docs/exactness.md)."""
    groups = groups_of(world, world)
    found: dict[str, Any] = {}
    for dtype, layers, top_k in product((torch.float32, torch.bfloat16), (1, 3), (1, 2, 4, 8)):
        setting = Setting(top_k, world, layers, dtype, groups=groups)
        start = Run(setting).logical()
        never = trained(setting, STEPS)[0].logical()
        moved = trained(setting, STEPS, seed=3)[0].logical()
        control = trained(setting, STEPS, shuffle=True)[0].logical()
        found[f"top-{top_k}, {dtype}, {layers} layers"] = {
            "distance": distance(moved, never, start),
            "control": distance(control, never, start),
        }
    return found


def gradients(run: Run, x_TH: torch.Tensor, dy_TH: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output of the first layer and all gradients, experts in logical order."""
    moe = run.model.moes[0]
    x_TH = x_TH.clone().requires_grad_()
    y_TH = moe(x_TH)
    run.optimizer.zero_grad()
    y_TH.backward(dy_TH)
    weights = {name: getattr(moe, name).grad for name in EXPERT_NAMES}
    state = ExpertState([weights], run.state.placement_LE, run.state.ranks, run.state.rank)
    found = {f"d{name}": values.clone() for _, name, values in logical(state)}
    return found | {"y": y_TH.detach(), "dx": x_TH.grad, "drouter": moe.router_EH.grad.clone()}


def dense(
    x_TH: torch.Tensor,
    router_EH: torch.Tensor,
    w1_EHF: torch.Tensor,
    w2_EFH: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """The same layer without expert parallelism: every expert for every token."""
    probs_TE = torch.softmax(x_TH @ router_EH.T, dim=-1)
    chosen_TE = torch.zeros_like(probs_TE).scatter(1, probs_TE.topk(top_k).indices, 1.0)
    y_ETH = torch.nn.functional.silu(x_TH @ w1_EHF) @ w2_EFH
    return torch.einsum("te,eth->th", probs_TE * chosen_TE, y_ETH).detach()


def migrated(rank: int, world: int, ep: int) -> dict[str, Any]:
    """Twenty steps and twenty placements, against runs that never moved an expert."""
    groups = groups_of(world, ep)
    found: dict[str, Any] = {}
    settings = {"top-2": Setting(top_k=2), "top-4": Setting(top_k=4)}
    if ep == world == 4:
        settings["top-2, clipped"] = Setting(top_k=2, clip=0.05)
        settings["top-4, in the router's order"] = Setting(top_k=4, order="router")
    for name, setting in settings.items():
        setting.ep, setting.groups = ep, groups
        start = Run(setting).logical()
        never, _ = trained(setting, STEPS)
        moved, changed = trained(setting, STEPS, seed=3, check=name == "top-2")
        result = {
            "changed by moving": changed,
            "differs after training": sorted(differing(never.logical(), moved.logical())),
            "distance": distance(moved.logical(), never.logical(), start),
        }
        if name == "top-4":
            control, _ = trained(setting, STEPS, shuffle=True)
            result["control"] = distance(control.logical(), never.logical(), start)
        before = moved.logical()
        held_LE = moved.state.placement_LE
        moved.move(np.tile(np.arange(EXPERTS, dtype=np.int32), (setting.layers, 1)))
        moved.move(held_LE)
        result["changed by a round trip"] = differing(before, moved.logical())
        found[name] = result
    return found


if __name__ == "__main__":
    main(
        {
            "one layer": one_layer,
            "table": table,
            "EP2 x EDP2": lambda rank, world: migrated(rank, world, 2),
            "EP4": lambda rank, world: migrated(rank, world, 4),
            "EP8": lambda rank, world: migrated(rank, world, 8),
        }
    )
