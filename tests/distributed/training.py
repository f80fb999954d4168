"""A small model of reference layers, its data, and training with and without migrations."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch._dynamo  # an optimizer's first step imports it, for seconds: once, not on every rank
import torch.distributed as dist
from numpy.typing import NDArray

from routepack.state.checkpoint import logical, restore
from routepack.state.dispatch import DispatchMap
from routepack.state.norm import logical_square_norm
from routepack.state.reference import ReferenceMoE
from routepack.state.tensors import ExpertState
from routepack.state.transfer import migrate

EXPERTS, HIDDEN, FFN, TOKENS = 16, 16, 32, 48
EXPERT_NAMES = ("w1_SHF", "w2_SFH")
RATE = 3e-3


@dataclass
class Setting:
    """Of one run; every rank is a DP rank."""

    top_k: int = 2
    ep: int = 4
    layers: int = 2
    dtype: torch.dtype = torch.float32
    order: str = "slot"
    clip: float | None = None
    groups: dict[str, Any] = field(default_factory=dict)
    """EP and EDP group of this rank."""


class Model(torch.nn.Module):
    """Residual MoE layers with a norm each."""

    def __init__(self, setting: Setting, dispatch: DispatchMap) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(HIDDEN) for _ in range(setting.layers))
        self.moes = torch.nn.ModuleList(
            ReferenceMoE(k, dispatch, HIDDEN, FFN, setting.top_k, setting.groups["ep"],
                         setting.order)
            for k in range(setting.layers)
        )  # fmt: skip

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        for norm, moe in zip(self.norms, self.moes, strict=True):
            x_TH = x_TH + moe(norm(x_TH))
        return x_TH


def groups_of(world: int, ep: int) -> dict[str, Any]:
    """Consecutive EP ranks form a group; EDP groups hold the same EP rank of each."""
    groups: dict[str, Any] = {}
    for kind, members in (
        ("ep", [list(range(first, first + ep)) for first in range(0, world, ep)]),
        ("edp", [list(range(first, world, ep)) for first in range(ep)]),
    ):
        for ranks in members:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                groups[kind] = group
    return groups


class Run:
    """A model in training."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        identity_LE = np.tile(np.arange(EXPERTS, dtype=np.int32), (setting.layers, 1))
        self.dispatch = DispatchMap(identity_LE)
        torch.manual_seed(5)
        self.model = Model(setting, self.dispatch).to(setting.dtype)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, foreach=False, fused=False
        )
        for parameter in self.model.parameters():  # so that moments exist from the start
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.param_groups[0]["lr"] = 0.0
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] = RATE
        layers = []
        for moe in self.model.moes:
            tensors = {}
            for name in EXPERT_NAMES:
                parameter = getattr(moe, name)
                tensors[name] = parameter
                for moment in ("exp_avg", "exp_avg_sq"):
                    tensors[f"{name}.{moment}"] = self.optimizer.state[parameter][moment]
            layers.append(tensors)
        group = setting.groups["ep"]
        self.state = ExpertState(layers, identity_LE, setting.ep, dist.get_rank(group))
        values = {}
        for layer, tensors in enumerate(self.state.layers):
            for tensor in tensors:
                scale = 0.0 if "exp_avg" in tensor.name else 0.2
                shape = (EXPERTS, *tensor.shape)
                values[layer, tensor.name] = (torch.randn(shape) * scale).to(tensor.dtype)
        restore(self.state, values)

    def load(self, values: dict[str, torch.Tensor], steps: int) -> None:
        """What `logical` returned, after `steps` optimizer steps."""
        experts = {}
        for name, found in values.items():
            layer, _, tensor = name.partition(".")
            if layer.isdigit():
                experts[int(layer), tensor] = found
        restore(self.state, experts)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                held = self.optimizer.state[parameter]
                held["step"].fill_(steps + 1)  # and the one that made the moments
                if not name.endswith(EXPERT_NAMES):
                    parameter.copy_(values[name])
                    for moment in ("exp_avg", "exp_avg_sq"):
                        held[moment].copy_(values[f"{name}.{moment}"])

    def step(self, t: int, shuffle: bool) -> None:
        """One optimizer step on this rank's tokens; `shuffle` reorders them."""
        world, setting = dist.get_world_size(), self.setting
        generator = torch.Generator().manual_seed(1000 * t + dist.get_rank())
        x_TH, y_TH = (
            torch.randn(TOKENS, HIDDEN, generator=generator).to(setting.dtype) for _ in range(2)
        )
        if shuffle:
            order_T = torch.randperm(TOKENS, generator=generator)
            x_TH, y_TH = x_TH[order_T], y_TH[order_T]
        self.optimizer.zero_grad()
        loss = (self.model(x_TH) - torch.tanh(x_TH.roll(1, dims=1) + y_TH * 0.1)).square().mean()
        loss.backward()
        experts, others = [], []
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            expert = name.endswith(EXPERT_NAMES)
            (experts if expert else others).append((name, parameter.grad))
        for gradients, group in ((experts, setting.groups["edp"]), (others, None)):
            flat = torch.cat([gradient.flatten() for _, gradient in gradients])
            dist.all_reduce(flat, group=group)
            flat /= world
            for (_, gradient), part in zip(
                gradients, flat.split([g.numel() for _, g in gradients]), strict=True
            ):
                gradient.copy_(part.view_as(gradient))
        if setting.clip is not None:
            square = logical_square_norm(
                [(int(name.split(".")[1]), gradient) for name, gradient in experts],
                self.state.placement_LE,
                setting.groups["ep"],
            )
            square += math.fsum(float(gradient.double().square().sum()) for _, gradient in others)
            factor = min(1.0, setting.clip / math.sqrt(square))
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad *= factor
        self.optimizer.step()

    def move(self, placement_LE: NDArray[np.int32]) -> None:
        """To another placement."""
        migrate(
            self.state,
            placement_LE,
            self.setting.groups["ep"],
            all_ranks=dist.group.WORLD,
            timeout_seconds=60,
        )
        self.dispatch.update(self.state.placement_LE)

    def logical(self) -> dict[str, torch.Tensor]:
        """All that is learned, and the optimizer's moments, without a trace of the placement."""
        found = {
            f"{layer}.{name}": values
            for layer, name, values in logical(self.state, self.setting.groups["ep"])
        }
        for name, parameter in self.model.named_parameters():
            if not name.endswith(EXPERT_NAMES):
                found[name] = parameter.detach().clone()
                for moment in ("exp_avg", "exp_avg_sq"):
                    found[f"{name}.{moment}"] = self.optimizer.state[parameter][moment].clone()
        return found


def trained(
    setting: Setting,
    steps: int,
    *,
    seed: int | None = None,
    check: bool = False,
    shuffle: bool = False,
) -> tuple[Run, list[str]]:
    """A run of `steps`, with a random placement after each with `seed`; with `check`, what in the
    un-permuted state is not the same after a move as before."""
    run, changed = Run(setting), []
    rng = np.random.default_rng(seed)
    for t in range(steps):
        run.step(t, shuffle)
        if seed is not None:
            before = run.logical() if check else {}
            run.move(np.array([rng.permutation(EXPERTS) for _ in range(setting.layers)], np.int32))
            changed += differing(before, run.logical()) if check else []
    return run, changed


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not the same to the last bit."""
    return [
        name
        for name in one.keys() | other.keys()
        if not np.array_equal(
            *(t[name].contiguous().view(torch.uint8).numpy() for t in (one, other))
        )
    ]


def distance(
    one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> float:
    """||one - other|| / ||other - start|| over the parameters."""
    names = [name for name in start if "exp_avg" not in name]

    def norm(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
        return math.sqrt(sum(float((a[n].double() - b[n].double()).square().sum()) for n in names))

    return norm(one, other) / norm(other, start)
