"""Samples of slime and miles as a window: Megatron's arguments say what routes must look like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from integrations.trainer_helpers import arguments
from routepack import InputError
from routepack.ingest import from_miles, from_slime
from routepack.integrations.samples import moe_layers_of, spec_of, window_of


@pytest.mark.parametrize(
    ("frequency", "layers"),
    [(1, (0, 1, 2, 3)), (2, (0, 2)), ([0, 1, 0, 1], (1, 3)), ((0, 1, 1, 1), (1, 2, 3))],
)
def test_which_layers_have_experts(frequency: Any, layers: tuple[int, ...]) -> None:
    """Every so many, or one flag a layer."""
    assert moe_layers_of(arguments(num_layers=4, moe_layer_freq=frequency)) == layers


def test_counts_by_hand() -> None:
    """Two layers, the first dense; samples of 3 and 2 tokens without a route for the last. The ids
    of the dense layer, zeros in what SGLang returns, count nowhere."""
    args = arguments(num_layers=2, moe_layer_freq=[0, 1], num_experts=4)
    routes = [
        np.array([[[0, 0], [0, 1]], [[0, 0], [1, 3]]], np.int32),
        np.array([[[0, 0], [2, 1]]], np.int32),
    ]
    window = window_of(from_slime, spec_of(args), [3, 2], routes)
    assert window.demand_SLE.tolist() == [[[1, 2, 0, 1]], [[0, 1, 1, 0]]]
    assert window.missing_S.tolist() == [1, 1]
    assert (window.moe_layers, window.top_k) == ((1,), 2)


def test_rows_that_miles_pads() -> None:
    """A row of -1 is a token without a route."""
    args = arguments(num_layers=1, num_experts=4)
    routes = [np.array([[[-1, -1]], [[3, 0]]], np.int32)]
    window = window_of(from_miles, spec_of(args), [3], routes)
    assert window.demand_SLE.tolist() == [[[1, 0, 0, 1]]]
    assert window.missing_S.tolist() == [2]


def test_one_expert_a_token_may_be_expert_0() -> None:
    """With top-1 a zero is a route: the trainers refuse captures that were not merged."""
    args = arguments(num_layers=1, num_experts=4, moe_router_topk=1)
    window = window_of(from_slime, spec_of(args), [3], [np.zeros((2, 1, 1), np.int32)])
    assert window.demand_SLE.tolist() == [[[2, 0, 0, 0]]]


def test_a_sample_that_is_refused_is_named() -> None:
    """By its place in the rollout."""
    args = arguments(num_layers=1, num_experts=4)
    routes = [np.array([[[3, 0]]], np.int32), np.array([[[3, 4]]], np.int32)]
    with pytest.raises(InputError, match=r"^sample 1: rollout_routed_experts\[0, 0, 1\] = 4: "):
        window_of(from_slime, spec_of(args), [2, 2], routes)
    with pytest.raises(InputError) as refused:
        window_of(from_slime, spec_of(args), [2, 2], [routes[0], None])
    assert str(refused.value) == (
        "routes[1] = none: expected recorded routes, the engine must return them"
    )
