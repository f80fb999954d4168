"""A small MoE layer with expert parallelism in plain PyTorch: what the documentation and tests use.

It does what a trainer's layer does, with nothing hidden: route, map experts to slots, sort tokens
by slot, exchange them with `all_to_all_single`, run each expert, exchange back, and sum. An expert
sees its tokens in the order of (source rank, token), wherever it lives, so that its output and its
weight gradients have the same bits at any placement.

Shapes: T tokens of this rank, H hidden, F ffn, E experts, S slots, K experts per token, R EP ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from routepack.errors import InputError
from routepack.state.dispatch import DispatchMap

ORDERS = ("slot", "router")


class ReferenceMoE(torch.nn.Module):
    """Router, experts of this rank, and their exchange.

    layer     its index in the dispatch map
    dispatch  where experts are; shared by all layers
    top_k     K; the K largest softmax probabilities weigh the experts' outputs
    group     the EP group
    order     in which the K outputs of a token are summed: "slot" as dispatchers do, so that above
              K = 2 the last bits depend on the placement; "router" by descending probability, so
              that they never do

    `router_EH` stays in logical order; `w1_SHF` and `w2_SFH` hold the experts of this rank's slots.
    Raises InputError.
    """

    def __init__(
        self,
        layer: int,
        dispatch: DispatchMap,
        hidden: int,
        ffn: int,
        top_k: int,
        group: Any = None,
        order: str = "slot",
    ) -> None:
        super().__init__()
        experts, ranks = dispatch.slot_LE.shape[1], dist.get_world_size(group)
        if experts % ranks:
            raise InputError.at("ranks", ranks, f"a divisor of the {experts} experts")
        if not 1 <= top_k <= experts:
            raise InputError.at("top_k", top_k, f"a whole number in 1..{experts}")
        if order not in ORDERS:
            raise InputError.at("order", repr(order), "'slot' or 'router'")
        self.layer, self.dispatch, self.top_k = layer, dispatch, top_k
        self.group, self.order = group, order
        self.router_EH = torch.nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)
        per_rank = experts // ranks
        self.w1_SHF = torch.nn.Parameter(torch.randn(per_rank, hidden, ffn) * hidden**-0.5)
        self.w2_SFH = torch.nn.Parameter(torch.randn(per_rank, ffn, hidden) * ffn**-0.5)

    def forward(self, x_TH: torch.Tensor, replay_TK: torch.Tensor | None = None) -> torch.Tensor:
        """[T, H]; `replay_TK` are recorded experts, logical, used in place of the router's own."""
        probs_TE = torch.softmax((x_TH @ self.router_EH.T).float(), dim=-1)
        experts_TK = probs_TE.topk(self.top_k).indices if replay_TK is None else replay_TK
        weights_TK = probs_TE.gather(1, experts_TK).to(x_TH.dtype)
        slots_TK = self.dispatch.slots(self.layer, experts_TK)

        order_A = slots_TK.flatten().argsort(stable=True)  # assignments by slot, then token
        token_A = order_A // self.top_k
        if self.order == "slot":
            x_AH = x_TH.index_select(0, token_A)  # its gradient is summed in this order
        else:
            x_AH = x_TH.repeat_interleave(self.top_k, dim=0).index_select(0, order_A)
        y_AH = self._exchanged(x_AH, slots_TK)
        weights_A = weights_TK.flatten().index_select(0, order_A)
        weighted_AH = y_AH * weights_A[:, None]
        if self.order == "slot":
            return torch.zeros_like(x_TH).index_add(0, token_A, weighted_AH)
        by_token_AH = torch.empty_like(weighted_AH).index_copy(0, order_A, weighted_AH)
        return by_token_AH.view(len(x_TH), self.top_k, -1).sum(dim=1)

    def _exchanged(self, x_AH: torch.Tensor, slots_TK: torch.Tensor) -> torch.Tensor:
        """The experts' outputs for assignments that are sorted by slot."""
        ranks, per_rank = dist.get_world_size(self.group), len(self.w1_SHF)
        sent_RS = slots_TK.flatten().bincount(minlength=ranks * per_rank).view(ranks, per_rank)
        received_RS = torch.empty_like(sent_RS)
        dist.all_to_all_single(received_RS, sent_RS, group=self.group)
        sent, received = sent_RS.sum(dim=1).tolist(), received_RS.sum(dim=1).tolist()
        there_BH = _AllToAll.apply(x_AH, received, sent, self.group)

        # Tokens came by (source, slot); an expert takes its own by (slot, source).
        slot_B = torch.arange(per_rank, device=x_AH.device).repeat(ranks)
        slot_B = slot_B.repeat_interleave(received_RS.flatten())
        by_slot_B = slot_B.argsort(stable=True)
        inputs = there_BH.index_select(0, by_slot_B).split(received_RS.sum(dim=0).tolist())
        outputs = [
            torch.nn.functional.silu(x_NH @ w1_HF) @ w2_FH
            for x_NH, w1_HF, w2_FH in zip(
                inputs, self.w1_SHF.unbind(0), self.w2_SFH.unbind(0), strict=True
            )
        ]
        y_BH = torch.cat(outputs)
        back_BH = torch.empty_like(y_BH).index_copy(0, by_slot_B, y_BH)
        y_AH: torch.Tensor = _AllToAll.apply(back_BH, sent, received, self.group)
        return y_AH


class _AllToAll(torch.autograd.Function):
    """Rows to the ranks of a group, in the order of ranks; the gradient goes the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows_AH: torch.Tensor, received: list[int], sent: list[int], group: Any
    ) -> torch.Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        return _all_to_all(rows_AH, received, sent, group)

    @staticmethod
    def backward(ctx: Any, gradient_BH: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _all_to_all(gradient_BH, ctx.sent, ctx.received, ctx.group), None, None, None


def _all_to_all(
    rows_AH: torch.Tensor, received: list[int], sent: list[int], group: Any
) -> torch.Tensor:
    result_BH = rows_AH.new_empty(sum(received), rows_AH.shape[1])
    dist.all_to_all_single(result_BH, rows_AH.contiguous(), received, sent, group=group)
    return result_BH
