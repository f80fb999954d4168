"""The map between router and dispatcher, on placements checked by hand and at random."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.errors import InputError
from strategies import placements

torch = pytest.importorskip("torch", reason="the dispatch map is in torch tensors")


def test_ids_and_columns_by_hand() -> None:
    """Expert 0 in slot 2, 1 in 0, 2 in 1, at the second layer; no expert stays no expert."""
    from routepack.state.dispatch import DispatchMap

    dispatch = DispatchMap([[0, 1, 2], [2, 0, 1]])
    ids_TK = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
    assert dispatch.slots(1, ids_TK).tolist() == [[2, 0], [1, -1]]
    assert dispatch.slots(1, ids_TK).dtype == torch.int32
    assert dispatch.slots(0, ids_TK).tolist() == ids_TK.tolist()
    assert dispatch.by_slot(1, torch.tensor([[0.5, 0.3, 0.2]])).tolist() == [
        pytest.approx([0.3, 0.2, 0.5])
    ]
    assert dispatch.by_expert(1, torch.tensor([7, 8, 9])).tolist() == [9, 7, 8]


@given(st.data(), st.integers(1, 3), st.integers(1, 8), st.integers(0, 2**31))
def test_both_forms_agree_and_gradients_are_logical(
    data: st.DataObject, layers: int, experts: int, seed: int
) -> None:
    """Ids mapped to slots name the columns that `by_slot` moves there; probabilities keep their
    bits and give the router exactly the gradient that each column had; and back is the identity."""
    from routepack.state.dispatch import DispatchMap

    placement_LE = data.draw(placements(layers, experts))
    dispatch = DispatchMap(placement_LE)
    generator = torch.Generator().manual_seed(seed)
    probs_TE = torch.rand(5, experts, generator=generator, requires_grad=True)
    ids_TK = torch.rand(5, experts, generator=generator).argsort(dim=1)[:, : max(1, experts // 2)]
    weights_TE = torch.rand(5, experts, generator=generator)
    for layer in range(layers):
        by_slot_TS = dispatch.by_slot(layer, probs_TE)
        slots_TK = dispatch.slots(layer, ids_TK)
        assert torch.equal(by_slot_TS.gather(1, slots_TK), probs_TE.gather(1, ids_TK))
        chosen_TE = torch.zeros(5, experts, dtype=torch.bool).scatter(1, ids_TK, True)
        chosen_TS = torch.zeros(5, experts, dtype=torch.bool).scatter(1, slots_TK, True)
        assert torch.equal(dispatch.by_slot(layer, chosen_TE), chosen_TS)
        assert torch.equal(dispatch.by_expert(layer, by_slot_TS), probs_TE)
        [gradient_TE] = torch.autograd.grad(by_slot_TS, probs_TE, weights_TE)
        assert torch.equal(gradient_TE, dispatch.by_expert(layer, weights_TE))


def test_an_update_is_in_place_or_not_at_all() -> None:
    """The tensors that a captured graph reads stay where they are; a bad placement changes none."""
    from routepack.state.dispatch import DispatchMap

    dispatch = DispatchMap([[0, 1, 2]])
    addresses = dispatch.slot_LE.data_ptr(), dispatch.expert_LS.data_ptr()
    dispatch.update(np.array([[2, 0, 1]], np.int32))
    assert (dispatch.slot_LE.data_ptr(), dispatch.expert_LS.data_ptr()) == addresses
    assert (dispatch.slot_LE.tolist(), dispatch.expert_LS.tolist()) == ([[2, 0, 1]], [[1, 2, 0]])
    refused: list[tuple[Any, str]] = [
        ([[0, 0, 1]], "placement[0, 1] = 0: expected a free slot, expert 0 has it"),
        ([[0, 1]], "placement.shape = (1, 2): expected (1, 3)"),
    ]
    for placement, message in refused:
        with pytest.raises(InputError) as error:
            dispatch.update(placement)
        assert str(error.value) == message
        assert dispatch.slot_LE.tolist() == [[2, 0, 1]]
