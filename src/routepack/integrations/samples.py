"""The samples of slime and miles, whose routes follow Megatron's arguments, as a window."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from routepack.errors import InputError
from routepack.window import Window

if TYPE_CHECKING:
    from routepack.ingest import RouteSpec, SampleRoutes

    Read = Callable[[Any, int, RouteSpec], SampleRoutes]

MOST_THREADS = 8


def require_experts(args: Any) -> int:
    """The routed experts of a layer. Raises InputError for a model without."""
    experts = getattr(args, "num_experts", None)
    if not experts:
        raise InputError.at("num_experts", experts, "a mixture-of-experts model")
    return int(experts)


def moe_layers_of(args: Any) -> tuple[int, ...]:
    """The layers with experts, from num_layers and moe_layer_freq: every so many, or a list."""
    layers, frequency = int(args.num_layers), getattr(args, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        return tuple(range(0, layers, frequency))
    return tuple(i for i, moe in enumerate(list(frequency)[:layers]) if int(moe))


def spec_of(args: Any) -> RouteSpec:
    """What routes must look like, from Megatron's arguments. Raises InputError."""
    from routepack.ingest import RouteSpec  # loads a kernel

    top_k = int(args.moe_router_topk)
    return RouteSpec(
        require_experts(args),
        top_k,
        moe_layers=moe_layers_of(args),
        model_layers=int(args.num_layers),
        zero_rows="routed" if top_k == 1 else None,
    )


def window_of(read: Read, spec: RouteSpec, lengths: Sequence[int], routes: Sequence[Any]) -> Window:
    """Count the routes of every sample, as `read` understands them.

    lengths  tokens of each sample
    routes   what was recorded of each

    Raises InputError for a sample without any route, and as `read` does, naming the sample.
    """
    from routepack.ingest import WindowBuilder

    def one(i: int) -> SampleRoutes:
        try:
            return read(routes[i], int(lengths[i]), spec)
        except InputError as error:
            raise InputError(f"sample {i}: {error}") from None

    builder = WindowBuilder(spec)
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    builder.add_all(one, range(len(lengths)), threads=threads)
    window = builder.finish()
    if (unrecorded := np.flatnonzero(window.missing_S == window.lengths_S)).size:
        i = int(unrecorded[0])
        raise InputError.at("routes", "none", "recorded routes, the engine must return them", i)
    return window
