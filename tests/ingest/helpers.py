"""What the tests of readers share: samples, and comparison with the reference."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ingest.reference import Meaning, Model
from routepack.errors import InputError
from routepack.ingest import CAPTURED, MISSING, PADDING, RouteSpec, SampleRoutes

# One sample by hand: 4 tokens, a model of 3 layers whose layers 1 and 2 are MoE, 2 of 4 experts.
#
#     token   layer 1   layer 2
#     0       0 1       2 3
#     1       1 2       3 0
#     2       0 3       1 2
#     3       3 2       0 1
MOE = np.array([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[0, 3], [1, 2]], [[3, 2], [0, 1]]])
ALL = np.concatenate([np.zeros((4, 1, 2), int), MOE], axis=1)  # the dense layer 0 is zeros
SPEC = RouteSpec(num_experts=4, top_k=2, moe_layers=(1, 2))

# Demand [2][4] of tokens first..last-1, counted by hand from the table above.
DEMAND = {
    (0, 4): [[2, 2, 2, 2], [2, 2, 2, 2]],
    (0, 3): [[2, 2, 1, 1], [1, 1, 2, 2]],
    (2, 4): [[1, 0, 1, 2], [1, 2, 1, 0]],
    (2, 3): [[1, 0, 0, 1], [0, 1, 1, 0]],
    (1, 3): [[1, 1, 1, 1], [1, 1, 1, 1]],
}


def spec_of(model: Model) -> RouteSpec:
    """The same model for the package."""
    return RouteSpec(**dataclasses.asdict(model))


def said(sample: SampleRoutes) -> Meaning:
    """A sample as the reference writes it."""
    return Meaning(
        sample.captured_NLK.tolist(),
        sample.provenance_T.tolist(),
        sample.demand_LE.tolist(),
        sample.duplicate_rows,
        sample.partial_rows,
    )


def is_named(message: str) -> bool:
    """Whether a message is one line that says what was expected."""
    return ": expected " in message and "\n" not in message


def refusal(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The whole message with which a reader, or a generator of samples, refuses."""

    def read() -> None:
        result = function(*args, **options)
        if isinstance(result, Iterator):
            list(result)

    with pytest.raises(InputError) as caught:
        read()
    assert is_named(str(caught.value))
    return str(caught.value)


def distinct(
    rng: np.random.Generator, rows: int, layers: int, experts: int, top_k: int
) -> NDArray[np.int64]:
    """[N, L, K] distinct ids. With one expert per token 0 is left out, which would be ambiguous."""
    low = int(top_k == 1)
    keys = rng.random((rows, layers, experts - low))
    return np.argsort(keys, axis=2)[:, :, :top_k] + low


def check(sample: SampleRoutes, first: int, last: int, padding: tuple[int, int] = (0, 0)) -> None:
    """Tokens first..last-1 are captured, the others of the four are missing."""
    left, right = padding
    tokens = [CAPTURED if first <= t < last else MISSING for t in range(4)]
    assert sample.provenance_T.tolist() == [PADDING] * left + tokens + [PADDING] * right
    assert sample.captured_NLK.dtype == np.uint8
    assert sample.captured_NLK.tolist() == MOE[first:last].tolist()
    assert sample.demand_LE.tolist() == DEMAND[first, last]
    counts = (sample.length, sample.captured, sample.missing, sample.padding)
    assert counts == (4, last - first, 4 - (last - first), left + right)


def npy(array: NDArray[Any]) -> str:
    """Base64 of a .npy file."""
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def b64(array: NDArray[Any]) -> str:
    """Base64 of bare ids."""
    return base64.b64encode(array.tobytes()).decode()


class Tensor:
    """A torch tensor as far as readers look at one."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def numpy(self) -> NDArray[Any]:
        """The values."""
        return self.array


def trace(rows: NDArray[Any], *, rank: int = 0, step: int = 7) -> list[dict[str, Any]]:
    """The records of one micro-batch."""
    return [
        {
            "step": step,
            "stage": "pre_dispatch",
            "block": "decoder",
            "layer": layer,
            "rank": rank,
            "num_tokens": len(rows),
            "topk": 2,
            "top_indices": rows[:, i].tolist(),
        }
        for i, layer in enumerate((1, 2))
    ]


def with_id(value: int, *index: int, dtype: str = "int64") -> Any:
    """MOE with one id replaced."""
    rows = MOE.astype(dtype)
    rows[index] = value
    return rows
