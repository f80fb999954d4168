"""A Hugging Face model: the experts that its MoE layers choose in a forward pass.

Source: transformers 5, whose MoE blocks all call `self.experts(hidden_states, top_k_index,
top_k_weights)`, as src/transformers/models/qwen3_moe/modeling_qwen3_moe.py. The recorder looks at
what goes into `experts`, so it sees the final choice, whatever the router.

torch is loaded by the model alone, not by importing this module.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.ingest.arrays import as_array, checked_length
from routepack.ingest.rows import Part, assemble
from routepack.ingest.sample import SampleRoutes
from routepack.ingest.spec import RouteSpec
from routepack.ingest.verl import token_run

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:.*\.)?experts$")
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")


class RouteRecorder:
    """Records the routes of every MoE layer while it is open.

    >>> with RouteRecorder(model) as recorder:
    ...     model(input_ids, attention_mask=attention_mask)
    ...     samples = recorder.take(attention_mask)

    One forward pass over whole sequences between two calls of `take`; generation, which runs the
    model token by token, and recomputed activations are refused. Raises InputError where the model
    has no MoE layers of the form above, or no number of experts in its config.
    """

    def __init__(self, model: Any) -> None:
        self._modules: dict[int, Any] = {}
        for name, module in model.named_modules():
            if found := _LAYER.search(name):
                layer = int(found.group(1))
                if layer in self._modules:
                    expected = f"one MoE model, layer {layer} has experts already: pass a part"
                    raise InputError.at("model", name, expected)
                self._modules[layer] = module
        if not self._modules:
            expected = "a transformers 5 model with MoE layers, `layers.<n>...experts`"
            raise InputError.at("model", type(model).__name__, expected)
        self.moe_layers = tuple(sorted(self._modules))
        self._config = getattr(model.config, "text_config", None) or model.config
        self._routes: dict[int, list[NDArray[Any]]] = {layer: [] for layer in self.moe_layers}
        self._handles: list[Any] = []

    def __enter__(self) -> RouteRecorder:
        for layer, module in self._modules.items():
            hook = self._hook(layer)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, layer: int) -> Any:
        routes = self._routes[layer]

        def record(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            index = args[1] if len(args) > 1 else kwargs.get("top_k_index")
            if index is None or index.ndim != 2 or index.is_floating_point():
                kind = type(index).__name__ if index is None else f"{index.dtype} {index.ndim}-d"
                expected = "top_k_index [tokens, K] as second argument of experts"
                raise InputError.at(f"layer {layer}", kind, expected)
            routes.append(index.detach().cpu().numpy())

        return record

    def spec(self) -> RouteSpec:
        """Experts and layers from the config, K from what was recorded. Raises InputError."""
        numbers = (getattr(self._config, name, None) for name in _EXPERT_COUNTS)
        experts = next((number for number in numbers if isinstance(number, int)), None)
        if experts is None:
            expected = " or ".join(_EXPERT_COUNTS) + " in the config"
            raise InputError.at("num_experts", None, expected)
        top_k = self._recorded(self.moe_layers[0]).shape[1]
        layers = getattr(self._config, "num_hidden_layers", None)
        return RouteSpec(experts, top_k, self.moe_layers, layers, zero_rows=_zero_rows(top_k))

    def take(
        self, attention_mask: Any = None, *, lengths: Sequence[int] | None = None
    ) -> list[SampleRoutes]:
        """The samples of the forward pass since the last call; every token is captured.

        attention_mask  [B, X] of a batch: 1 where there is a token
        lengths         tokens of each sample, where they lie one after another without padding

        Raises InputError.
        """
        spec = self.spec()
        rows_NLK = np.stack([self._recorded(layer) for layer in self.moe_layers], axis=1)
        runs = _runs(attention_mask, lengths, len(rows_NLK))
        for recorded in self._routes.values():
            recorded.clear()
        return [
            assemble(
                [Part(0, rows_NLK[first:last], "top_k_index", first)],
                last - first,
                spec,
                left=left,
                right=right,
            )
            for first, last, left, right in runs
        ]

    def _recorded(self, layer: int) -> NDArray[Any]:
        recorded = self._routes[layer]
        if len(recorded) != 1:
            expected = "1 forward pass since the last take"
            raise InputError.at(f"layer {layer} records", len(recorded), expected)
        return recorded[0]


def _zero_rows(top_k: int) -> Any:
    return "routed" if top_k == 1 else None  # every row was recorded


def _runs(
    attention_mask: Any, lengths: Sequence[int] | None, rows: int
) -> list[tuple[int, int, int, int]]:
    """(first row, last + 1, padding before, padding behind) of every sample."""
    if (attention_mask is None) == (lengths is None):
        raise InputError("attention_mask, lengths: expected exactly one of the two")
    runs = []
    if lengths is not None:
        first = 0
        for i, length in enumerate(lengths):
            last = first + checked_length(length, f"lengths[{i}]")
            runs.append((first, last, 0, 0))
            first = last
        if first != rows:
            raise InputError.at("lengths", first, f"{rows} in all, the tokens of the forward pass")
        return runs
    mask_BX = as_array(attention_mask, "attention_mask")
    if mask_BX.ndim != 2 or mask_BX.size != rows:
        expected = f"(samples, tokens), the {rows} of the forward pass"
        raise InputError.at("attention_mask.shape", mask_BX.shape, expected)
    width = mask_BX.shape[1]
    for b, mask_X in enumerate(mask_BX):
        first, last = token_run(mask_X, f"attention_mask[{b}]")
        runs.append((b * width + first, b * width + last, first, width - last))
    return runs
