"""Routes as verl keeps them, to a window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.integrations.verl import routes
from routepack.integrations.verl.routes import count, window_of

EXPERTS = 4
# Two samples of 3 and 2 tokens, 3 layers of which the first is dense, K = 2. The last row of each
# is zero: the last token is never fed back. The first row of the second sample is missing.
FIRST = np.array(
    [
        [[0, 0], [0, 1], [3, 2]],
        [[0, 0], [1, 2], [3, 0]],
        [[0, 0], [0, 0], [0, 0]],
    ],
    np.int16,
)
SECOND = np.array(
    [
        [[0, 0], [0, 0], [0, 0]],
        [[0, 0], [2, 0], [1, 3]],
        [[0, 0], [0, 0], [0, 0]],
    ],
    np.int16,
)
PADDING = np.zeros((2, 3, 2), np.int16)  # verl's own padding samples have zeros only


def fetch_from(*samples: NDArray[Any]) -> Any:
    """Fetches by key, and remembers how many samples were asked for at a time."""
    asked: list[int] = []

    def fetch(keys: list[str]) -> Iterable[NDArray[Any]]:
        asked.append(len(keys))
        return [samples[int(key)] for key in keys]

    fetch.asked = asked  # type: ignore[attr-defined]
    return fetch


def counted(*samples: NDArray[Any], lengths: list[int] | None = None) -> routes.Counted:
    keys = [str(i) for i in range(len(samples))]
    return count(keys, lengths or [len(s) for s in samples], EXPERTS, fetch_from(*samples))


def test_counts_by_hand() -> None:
    """Zero rows are missing wherever they stand, and the dense layer is left out."""
    part = counted(FIRST, SECOND, PADDING)
    assert part.layers == (1, 2)
    assert part.top_k == 2
    assert part.missing_S.tolist() == [1, 2, 2]
    assert part.demand_SLE.tolist() == [
        [[1, 2, 1, 0], [1, 0, 1, 2]],
        [[1, 0, 1, 0], [0, 1, 0, 1]],
        [[0, 0, 0, 0], [0, 0, 0, 0]],
    ]


def test_a_window_of_several_parts() -> None:
    """Workers count shares of a batch; one that holds padding samples only knows no layers."""
    window = window_of([3, 3, 2], [counted(FIRST, SECOND), counted(PADDING)])
    assert window.moe_layers == (1, 2)
    assert window.missing_S.tolist() == [1, 2, 2]
    assert window.demand_LE.tolist() == [[2, 2, 2, 0], [1, 1, 1, 3]]


def test_fewer_rows_than_tokens_are_missing_too() -> None:
    """An engine that records T - 1 rows, before verl has aligned them."""
    assert counted(FIRST[:2], lengths=[3]).missing_S.tolist() == [1]


def test_routes_are_fetched_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not more than about a piece of tokens is held at a time, but at least a sample."""
    monkeypatch.setattr(routes, "PIECE_TOKENS", 5)
    fetch = fetch_from(PADDING, PADDING, FIRST, SECOND)
    count(list("0123"), [2, 2, 3, 3], EXPERTS, fetch)
    assert fetch.asked == [2, 1, 1]


HINT = (
    "expected 2 experts, as other MoE layers of the token row have (moe_layers leaves out dense "
    "layers, partial_rows 'missing' such rows)"
)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (
            FIRST[:, :, :1],
            "routed_experts.shape = (3, 3, 1): expected (tokens, layers, K of at least 2)",
        ),
        (
            np.concatenate([FIRST, FIRST]),
            "routed_experts[0].shape = (6, 3, 2): expected 2 or 3 token rows for length 3, start 0 "
            "(recordings joined end to end: see from_segments)",
        ),
        (
            FIRST + np.int16(2),
            "routed_experts[0][0, 0, 1] = 2: expected 2 distinct experts in a token row, it "
            "repeats",
        ),
        (
            np.where(FIRST == 3, 4, FIRST).astype(np.int16),
            "routed_experts[0][0, 2, 0] = 4: expected an expert id in 0..3",
        ),
        (
            np.stack([FIRST[0], [[0, 0], [0, 0], [3, 2]], FIRST[2]]).astype(np.int16),
            f"routed_experts[0][1, 1] = [0, 0]: {HINT}",
        ),
    ],
)
def test_what_is_no_route_is_refused(sample: NDArray[Any], message: str) -> None:
    """Each in one line that names the sample, so that the step is left to verl."""
    with pytest.raises(InputError) as error:
        counted(sample, lengths=[3])
    assert str(error.value) == message


def test_layers_must_agree() -> None:
    """Inside a share and between shares: a layer is dense in all samples or in none."""
    dense_last = FIRST[:, [1, 2, 0]]
    with pytest.raises(InputError) as error:
        counted(FIRST, dense_last)
    assert str(error.value) == (f"routed_experts[1][0, 2] = [0, 0]: {HINT}")
    with pytest.raises(InputError) as error:
        window_of([3, 3], [counted(FIRST), counted(dense_last)])
    assert str(error.value) == (
        "routed_experts: MoE layers = [1, 2]: expected [0, 1] in every sample"
    )
    with pytest.raises(InputError) as error:
        window_of([2], [counted(PADDING)])
    assert str(error.value) == (
        "routed_experts: expected recorded routes, every row of every sample is zero"
    )
