"""Slots of ranks that own parts in another order, by hand."""

from __future__ import annotations

import pytest

from routepack.errors import InputError
from routepack.state.sharded import over_ranks


def test_parts_of_two_ep_ranks_over_two_edp_ranks() -> None:
    """Eight experts in order: EP rank 0 holds 0 to 3, halved over ranks 0 and 2 of the mesh."""
    assert over_ranks([[0, 1, 2, 3, 4, 5, 6, 7]], [0, 2, 1, 3]).tolist() == [
        [0, 1, 4, 5, 2, 3, 6, 7]
    ]


@pytest.mark.parametrize("order", [[0, 0], [0, 1, 2]])
def test_orders_that_are_refused(order: list[int]) -> None:
    with pytest.raises(InputError) as error:
        over_ranks([[0, 1, 2, 3]], order)
    assert str(error.value) == (
        f"rank_of_part = {order}: expected each rank once, and a divisor of the 4 experts"
    )
