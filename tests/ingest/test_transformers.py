"""Recording a Hugging Face model: real forward passes of tiny random MoE models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ingest.helpers import refusal
from routepack.ingest import CAPTURED, PADDING, WindowBuilder
from routepack.ingest.transformers import RouteRecorder

torch: Any = pytest.importorskip("torch", reason="torch is not installed (extra lab)")
transformers: Any = pytest.importorskip(
    "transformers", minversion="5.0", reason="transformers 5 is not installed (extra lab)"
)

SMALL = dict(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=16,
    moe_intermediate_size=16,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts_per_tok=3,
)


def qwen(**fields: Any) -> Any:
    """Qwen3-MoE with 8 experts at layers 1, 2 and 3; layer 0 is dense."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=8, mlp_only_layers=[0], **fields
    )
    return transformers.Qwen3MoeForCausalLM(config).eval()


def deepseek() -> Any:
    """DeepSeek-V3 with group-limited routing: 8 experts in 4 groups, layer 0 dense."""
    torch.manual_seed(1)
    config = transformers.DeepseekV3Config(
        **(SMALL | {"num_key_value_heads": 4}),
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    )
    return transformers.DeepseekV3ForCausalLM(config).eval()


def batch() -> tuple[Any, Any]:
    """Three samples of 6, 4 and 5 tokens; the second is padded left and right, the third right."""
    torch.manual_seed(2)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]])
    return torch.randint(0, 50, mask.shape), mask


def test_equals_the_routers_own_logits() -> None:
    """The recorded ids are the top-k of the logits that the model returns, layer by layer."""
    model, (ids, mask) = qwen(), batch()
    with torch.no_grad(), RouteRecorder(model) as recorder:
        output = model(ids, attention_mask=mask, output_router_logits=True)
        spec = recorder.spec()
        samples = recorder.take(mask)
    assert (spec.num_experts, spec.top_k, spec.moe_layers) == (8, 3, (1, 2, 3))
    assert [sample.length for sample in samples] == [6, 4, 5]
    assert samples[1].provenance_T.tolist() == [PADDING] + [CAPTURED] * 4 + [PADDING]
    chosen = [logits.topk(3).indices.reshape(3, 6, 3).numpy() for logits in output.router_logits]
    for b, (sample, tokens) in enumerate(zip(samples, mask.bool().numpy(), strict=True)):
        expected = np.stack([layer[b][tokens] for layer in chosen], axis=1)
        assert sample.captured_NLK.dtype == np.uint8
        assert np.array_equal(np.sort(sample.captured_NLK, 2), np.sort(expected, 2))


def test_to_a_window() -> None:
    """Two forward passes fill one window; every token counts at every layer."""
    model, (ids, mask) = qwen(), batch()
    with torch.no_grad(), RouteRecorder(model) as recorder:
        model(ids, attention_mask=mask)
        builder = WindowBuilder(recorder.spec())
        for sample in recorder.take(mask):
            builder.add(sample)
        model(ids[:1])
        for sample in recorder.take(lengths=[2, 4]):  # two documents in one row
            builder.add(sample)
    window = builder.finish()
    assert window.lengths_S.tolist() == [6, 4, 5, 2, 4]
    assert window.moe_layers == (1, 2, 3)
    assert not window.missing_S.any()
    assert window.demand_SLE.sum(axis=2).tolist() == [[3 * n] * 3 for n in (6, 4, 5, 2, 4)]


def test_group_limited_routing() -> None:
    """What is recorded is the final choice: at most 2 of the 4 groups of 2 experts each."""
    model, (ids, _) = deepseek(), batch()
    with torch.no_grad(), RouteRecorder(model) as recorder:
        model(ids)
        samples = recorder.take(torch.ones_like(ids))
    assert recorder.moe_layers == (1, 2, 3)
    groups = np.concatenate([sample.captured_NLK for sample in samples]) // 2
    assert max(len(set(row)) for row in groups.reshape(-1, 3).tolist()) == 2


def test_the_model_is_as_before() -> None:
    """Recording changes no output, and no hook stays."""
    model, (ids, mask) = qwen(), batch()
    with torch.no_grad():
        before = model(ids, attention_mask=mask).logits
        with RouteRecorder(model):
            during = model(ids, attention_mask=mask).logits
        after = model(ids, attention_mask=mask).logits
    assert torch.equal(before, during)
    assert torch.equal(before, after)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_refuses_several_passes() -> None:
    """A second pass before `take`, as generation makes them, is not mixed with the first."""
    model, (ids, mask) = qwen(), batch()
    with torch.no_grad(), RouteRecorder(model) as recorder:
        expected = "1 forward pass since the last take"
        assert refusal(recorder.take, mask) == f"layer 1 records = 0: expected {expected}"
        model(ids)
        model(ids)
        assert refusal(recorder.take, mask) == f"layer 1 records = 2: expected {expected}"


def test_refuses_other_shapes() -> None:
    """Masks and lengths that are not of the forward pass."""
    model, (ids, mask) = qwen(), batch()
    with torch.no_grad(), RouteRecorder(model) as recorder:
        model(ids)
        assert refusal(recorder.take) == (
            "attention_mask, lengths: expected exactly one of the two"
        )
        assert refusal(recorder.take, mask[:2]) == (
            "attention_mask.shape = (2, 6): expected (samples, tokens), the 18 of the forward pass"
        )
        assert refusal(recorder.take, lengths=[6, 6]) == (
            "lengths = 12: expected 18 in all, the tokens of the forward pass"
        )
        assert len(recorder.take(mask)) == 3  # refusing took nothing


def test_refuses_a_dense_model() -> None:
    """A model without MoE layers."""
    torch.manual_seed(0)
    fields = {name: SMALL[name] for name in SMALL if "moe" not in name and "per_tok" not in name}
    dense = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields, head_dim=8))
    assert refusal(RouteRecorder, dense) == (
        "model = Qwen3ForCausalLM: expected a transformers 5 model with MoE layers,"
        " `layers.<n>...experts`"
    )


def test_refuses_two_models_in_one() -> None:
    """Layers of two MoE models, whose numbers clash, are not mixed."""
    both = torch.nn.ModuleDict({"first": qwen(), "second": qwen()})
    assert refusal(RouteRecorder, both) == (
        "model = second.model.layers.1.mlp.experts:"
        " expected one MoE model, layer 1 has experts already: pass a part"
    )


def test_refuses_experts_without_routes() -> None:
    """An `experts` module that is not called with top_k_index."""

    class Block(torch.nn.Module):  # type: ignore[misc]  # torch is Any here
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.Identity()

        def forward(self, x: Any) -> Any:
            return self.experts(x)

    class Model(torch.nn.Module):  # type: ignore[misc]  # as above
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([Block()])
            self.config = SimpleNamespace(num_experts=2)

        def forward(self, x: Any) -> Any:
            return self.layers[0](x)

    model = Model()
    with RouteRecorder(model):
        assert refusal(model, torch.zeros(2)) == (
            "layer 0 = NoneType: expected top_k_index [tokens, K] as second argument of experts"
        )
