"""A layout under two placements: every choice of layers costs what the oracle says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate_helpers import COSTLY, plan_of
from routepack.mixture import Mixture
from routepack.objective import score
from routepack.verify import verify
from strategies import Instance, placements


@given(COSTLY, st.data())
def test_any_mixture_is_what_the_oracle_says(instance: Instance, data: st.DataObject) -> None:
    """Score and plan of any choice of layers hold to the last bit; what one layer saves is the
    difference of two scores."""
    window, base = instance.window, plan_of(instance, fixed_placement=True)
    layers = window.layers
    proposed_LE = data.draw(placements(layers, window.experts))
    moved_L = np.array(data.draw(st.lists(st.booleans(), min_size=layers, max_size=layers)))
    mixture = Mixture.of(window, base, instance.placement_LE, proposed_LE)
    mixed_LE = np.where(moved_L[:, None], proposed_LE, instance.placement_LE)
    cost = instance.cost_model.resolve(window, instance.topology, instance.token_cap)
    truth = score(window, instance.topology, cost, mixed_LE, base.rows)
    assert mixture.score(moved_L) == truth
    assert verify(window, mixture.plan(moved_L)) == []
    assert mixture.plan(moved_L & False) == base
    for layer in np.flatnonzero(moved_L):
        without_L = moved_L & (np.arange(layers) != layer)
        saved = mixture.score(without_L).slowest_shard - truth.slowest_shard
        assert mixture.saving_L(moved_L)[layer] == pytest.approx(
            saved, abs=1e-9 * truth.slowest_shard
        )
