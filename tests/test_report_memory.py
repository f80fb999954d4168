"""The busiest EP rank of a plan, against the slow oracle."""

from __future__ import annotations

import msgspec
import numpy as np
from hypothesis import given

from routepack.cost import DEFAULT
from routepack.objective import row_costs, score
from routepack.plan import Certificate, Plan, Search, TopologyKey, WindowKey
from routepack.report.memory import Busiest
from routepack.topology import Topology
from routepack.window import Window
from strategies import Instance, instances


def planned(instance: Instance) -> Plan:
    """The layout and placement of an instance as a plan."""
    window, topology, model = instance.window, instance.topology, instance.cost_model
    cost = model.resolve(window, topology, instance.token_cap)
    rows = instance.problem.to_rows(instance.cell_S)
    return Plan(
        window=WindowKey.of(window),
        topology=msgspec.convert(topology.to_dict(), TopologyKey),
        token_cap=instance.token_cap,
        cost_model=model,
        method="routepack",
        placement=tuple(map(tuple, instance.placement_LE.tolist())),
        rows=rows,
        certificate=Certificate(1, False, "volume", 1.0, "analytic", 0.0),
        score=score(window, topology, cost, instance.placement_LE, rows),
        search=Search(seed=0, evaluations=0, chains=0),
    )


@given(instances())
def test_the_busiest_rank_is_the_oracles(instance: Instance) -> None:
    """No rank of any row, shard and layer holds more, and the one named holds that."""
    window, plan = instance.window, planned(instance)
    cost = plan.cost_model.resolve(window, instance.topology, plan.token_cap)
    _, _, load_MGLR = row_costs(window, instance.topology, cost, instance.placement_LE, plan.rows)
    busiest = Busiest.of(window, plan)
    assert busiest.tokens == load_MGLR.max()
    layer = window.moe_layers.index(busiest.layer)
    assert load_MGLR[busiest.row, busiest.shard, layer, busiest.rank] == busiest.tokens


def test_layers_are_named_as_in_the_model() -> None:
    """One sample whose tokens all want expert 1, on rank 1, at the second of two MoE layers."""
    demand_SLE = np.array([[[2, 2], [0, 4]]])
    window = Window(np.array([4]), demand_SLE, 1, moe_layers=(3, 7))
    topology = Topology.of(dp=1, ep=2, edp=1)
    instance = Instance(
        window, topology, DEFAULT, 4, 1, np.zeros(1, np.int32), np.array([[0, 1]] * 2)
    )
    assert Busiest.of(window, planned(instance)) == Busiest(4, row=0, shard=0, layer=7, rank=1)
