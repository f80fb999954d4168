"""What is saved under a placement is the model, and nothing of the placement."""

from __future__ import annotations

from pathlib import Path

import pytest

from rank_helpers import run_ranks

torch = pytest.importorskip("torch", reason="gloo ranks need torch")
SCRIPT = Path(__file__).with_name("checkpoint_ranks.py")


def test_a_checkpoint_loads_anywhere() -> None:
    """Saved at EP4 under random placements: at EP1, EP2 and EP4, at the identity and, above EP1,
    elsewhere, all weights and moments have the saved bits; training goes on to the bits of the run
    that was not interrupted; and plain torch, without routepack, computes the same output."""
    found = run_ranks(SCRIPT, "resume", 4)[0]
    for ep in ("1", "2", "4"):
        for rank in found[ep]:
            for name in ("identity", "another placement")[: int(ep)]:
                assert rank[f"{name}: differs"] == []
                assert rank[f"{name}: output"] < 1e-6
    assert [rank["end: differs"] for rank in found["4"]] == [[]] * 4
    assert found["plain"] < 1e-5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "values[0, 'w'] = missing: expected a tensor of all experts"),
        (
            {(0, "w"): (2, 3)},
            "values[0, 'w'] = torch.float32 (2, 3): expected torch.float32 (4, 3)",
        ),
    ],
)
def test_values_that_do_not_fit(values: dict[tuple[int, str], tuple[int]], message: str) -> None:
    """The tensors stay as they were."""
    from routepack.errors import InputError
    from routepack.state.checkpoint import restore
    from routepack.state.tensors import ExpertState

    weight = torch.ones(2, 3)
    state = ExpertState([{"w": weight}], [[0, 1, 2, 3]], 2, 0)
    with pytest.raises(InputError) as error:
        restore(state, {key: torch.zeros(shape) for key, shape in values.items()})
    assert str(error.value) == message
    assert weight.sum() == 6


def test_experts_are_put_where_the_placement_says() -> None:
    """Rank 1 of two holds slots 2 and 3, and so experts 0 and 2."""
    from routepack.state.checkpoint import restore
    from routepack.state.tensors import ExpertState

    weight = torch.zeros(2, 1)
    state = ExpertState([{"w": weight}], [[2, 0, 3, 1]], 2, 1)
    restore(state, {(0, "w"): torch.tensor([[10.0], [11.0], [12.0], [13.0]])})
    assert weight.tolist() == [[10.0], [12.0]]
