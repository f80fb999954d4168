"""Experts as DTensors, FSDP2 style: `python dtensor_ranks.py CASE WORLD FOLDER`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch._dynamo  # an optimizer's first step imports it, for seconds: once, not on every rank
import torch.distributed as dist
from forked import main
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from routepack.state.sharded import over_ranks
from routepack.state.tensors import ExpertState
from routepack.state.transfer import migrate

EXPERTS, EP, EDP = 8, 2, 2


class Experts(torch.nn.Module):
    """Two matrices [E, 6, 4], sharded over EP ranks."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.w1, self.w2 = (
            torch.nn.Parameter(distribute_tensor(torch.randn(EXPERTS, 6, 4), mesh, [Shard(0)]))
            for _ in range(2)
        )


def experts(rank: int, dim: int) -> dict[str, Any]:
    """`fully_shard` splits the experts of an EP rank along `dim` over its EDP ranks; they move
    twenty times with AdamW's moments, with a step between. Full tensors say, by expert, what is
    changed by moving."""
    mesh = init_device_mesh("cpu", (EDP, EP), mesh_dim_names=("edp", "ep"))
    module = Experts(mesh["ep"])
    fully_shard(module, mesh=mesh["edp"], shard_placement_fn=lambda _: Shard(dim))
    weights = list(module.parameters())
    optimizer = torch.optim.AdamW(weights, lr=0.1, foreach=False)

    def step() -> None:
        for weight in weights:
            weight.grad = weight.detach() * 0.3 + 0.1
        optimizer.step()

    step()
    layers = []
    for weight in weights:
        moments = optimizer.state[weight]
        layers.append({"w": weight, **{name: moments[name] for name in ("exp_avg", "exp_avg_sq")}})
    shape = tuple(weights[0].to_local().shape)
    held_LE = np.tile(np.arange(EXPERTS, dtype=np.int32), (len(layers), 1))
    order = [0, 2, 1, 3] if dim == 0 else [0, 1]
    if dim == 0:  # whole experts on every rank
        state = ExpertState(layers, over_ranks(held_LE, order), EP * EDP, rank)
        group = None
    else:  # every EDP rank holds a part of each expert
        state = ExpertState(layers, held_LE, EP, mesh["ep"].get_local_rank())
        group = mesh["ep"].get_group()

    def full() -> list[torch.Tensor]:
        found = []
        for layer, tensors in enumerate(layers):
            slots_E = torch.from_numpy(held_LE[layer].astype(np.int64))
            found += [tensor.detach().full_tensor()[slots_E] for tensor in tensors.values()]
        return found

    rng = np.random.default_rng(4)
    addresses = [row.data_ptr() for tensors in state.layers for t in tensors for row in t.rows]
    changed = 0
    for _ in range(20):
        before = full()
        new_LE = np.array([rng.permutation(EXPERTS) for _ in layers], np.int32)
        everyone = dist.group.WORLD
        migrate(state, over_ranks(new_LE, order), group, all_ranks=everyone, timeout_seconds=30)
        held_LE = new_LE
        changed += sum(not torch.equal(a, b) for a, b in zip(before, full(), strict=True))
        step()
    kept = addresses == [
        row.data_ptr() for tensors in state.layers for t in tensors for row in t.rows
    ]
    return {"shape": shape, "changed": changed, "compared": 20 * len(full()), "in place": kept}


if __name__ == "__main__":
    main({"fsdp2": lambda rank, world: {"axes": [experts(rank, 0), experts(rank, 1)]}})
