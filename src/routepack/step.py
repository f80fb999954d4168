"""An optimizer step made ready for the search, and the plan that is written of what it finds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from routepack.bounds import best_bound
from routepack.constrained import fewest_rows
from routepack.contraction import Contraction
from routepack.cost import Coefficients, CostModel
from routepack.errors import InfeasibleError, InputError
from routepack.kernels.layout import Static
from routepack.plan import Certificate, Plan, Search, TopologyKey, WindowKey
from routepack.problem import Measured, Problem
from routepack.requirements import Requirements
from routepack.rows import Rows, minimal_rows, split_to
from routepack.topology import Topology
from routepack.trained import PaddingKey, Trained
from routepack.window import Window


@dataclass(frozen=True, eq=False)
class Step:
    """A window, what is asked of its plan, and the problem that the search is given.

    recorded  the window that was given, and `window` as it is trained: estimated and padded
    problem   of the window, or of its groups where these share a cell
    packed_S  a layout at its rows
    """

    recorded: Window
    trained: Trained
    window: Window
    cost_model: CostModel
    requirements: Requirements
    problem: Problem
    rows: Rows
    packed_S: NDArray[np.int32]
    contraction: Contraction | None
    bound: float
    bound_method: str

    @classmethod
    def of(
        cls,
        window: Window,
        topology: Topology,
        token_cap: int,
        cost_model: CostModel,
        requirements: Requirements,
        trained: Trained,
        seed: int,
    ) -> Step:
        """Find the fewest rows. Raises InputError, or InfeasibleError where there is no layout."""
        recorded, window = window, trained.window(window)
        require_lengths(window, token_cap)
        requirements.check(window, topology)
        cost = cost_model.resolve(window, topology, token_cap)
        required = requirements.binding(window, topology, token_cap)
        packed, contraction = window, None
        if required.together == "cell":
            contraction = Contraction.of(window, cost, required, token_cap)
            packed, cost = contraction.window, contraction.cost
            required = contraction.requirements
        try:
            if contraction is not None:
                required.check(packed, topology)
            found = _fewest_rows(packed, topology, cost, token_cap, required, seed)
        except InfeasibleError as error:
            if contraction is None:
                raise
            told = "groups as samples, for together = 'cell'"  # what is counted below is groups
            raise InfeasibleError(f"{told}: {error}") from None
        problem, rows, packed_S = found
        step = cls(
            recorded, trained, window, cost_model, requirements, problem, rows, packed_S,
            contraction, 0.0, "",
        )  # fmt: skip
        return step.at(problem.rows)

    def at(self, rows: int) -> Step:
        """The same at other rows than the fewest known, with the bound that holds there."""
        problem, found = self.problem, self.rows
        if rows == problem.rows and self.bound_method:
            return self
        if rows != problem.rows:
            problem = problem.with_rows(rows)
            if not problem.requirements.vacuous:
                found = replace(found, method="best known")
        topology, token_cap = problem.topology, problem.token_cap
        cost = self.cost_model.resolve(self.window, topology, token_cap)
        bound, method = best_bound(self.window, topology, cost, token_cap, rows)
        return replace(self, problem=problem, rows=found, bound=bound, bound_method=method)

    def plan(
        self,
        placement_LE: NDArray[np.int32],
        cell_S: NDArray[np.int32],
        measured: Measured,
        method: str,
        search: Search,
    ) -> Plan:
        """The plan of a layout under a placement, with its certificate."""
        rows = self.problem.to_rows(cell_S)
        rows = self.contraction.expand(rows) if self.contraction else rows
        score = measured.score
        interval = self._interval(placement_LE, rows, measured)
        topology, padding = self.problem.topology.to_dict(), self.trained.padding
        certificate = Certificate(
            rows_lower_bound=self.rows.lower_bound,
            rows_certified=self.problem.rows == self.rows.lower_bound,
            rows_method=self.rows.method,
            cost_lower_bound=self.bound,
            cost_bound_method=self.bound_method,
            gap=Certificate.gap_of(score.slowest_shard, self.bound),
            cost_low=interval[0] if interval else None,
            cost_high=interval[1] if interval else None,
        )
        return Plan(
            window=WindowKey.of(self.recorded),
            topology=msgspec.convert(topology, TopologyKey),
            token_cap=self.problem.token_cap,
            cost_model=self.cost_model,
            method=method,
            placement=tuple(tuple(slots) for slots in placement_LE.tolist()),
            rows=rows,
            certificate=certificate,
            score=score,
            search=search,
            requirements=self.requirements,
            padding=PaddingKey.of(padding) if padding is not None else None,
            estimate=self.trained.estimate,
        )

    def _interval(
        self,
        placement_LE: NDArray[np.int32],
        rows: tuple[tuple[tuple[int, ...], ...], ...],
        measured: Measured,
    ) -> tuple[float, float] | None:
        problem = self.problem
        cost = self.cost_model.resolve(self.window, problem.topology, problem.token_cap)
        attention_MG = measured.attention_B.reshape(-1, problem.topology.edp)
        return self.trained.interval(
            self.recorded, problem.topology, cost, placement_LE, rows, attention_MG
        )

    def too_little_memory(self, static: Static, cell_S: NDArray[np.int32]) -> InfeasibleError:
        """The memory limit, and the smallest one that the layout found does with."""
        problem = self.problem
        routed_LE = problem.window.demand_LE
        groups = problem.rows * problem.topology.edp
        least = int((-(-routed_LE.sum(axis=1) // (problem.topology.ep * groups))).max())
        expected = (
            f"at least {problem.largest_load(static, cell_S)}, the smallest reached in this "
            f"budget (proven: at least {least}), or more rows by a smaller token cap"
        )
        return InfeasibleError.at("memory_limit_tokens", problem.rules.limit, expected)


def require_lengths(window: Window, token_cap: int) -> None:
    """Every sample fits a cell. Raises InputError."""
    if (bad := np.flatnonzero(window.lengths_S > token_cap)).size:
        i = int(bad[0])
        expected = f"at most the token cap {token_cap}"
        raise InputError.at("lengths", int(window.lengths_S[i]), expected, i)


def _fewest_rows(
    window: Window,
    topology: Topology,
    cost: Coefficients,
    token_cap: int,
    required: Requirements,
    seed: int,
) -> tuple[Problem, Rows, NDArray[np.int32]]:
    """The problem at the fewest rows, the certificate, and a layout that shows that they do."""
    if required.vacuous:
        rows = minimal_rows(window.lengths_S, token_cap, topology.dp, seed=seed)
        problem = Problem(window, topology, cost, token_cap, rows.rows)
        return problem, rows, problem.from_bins(split_to(rows.bins, problem.cells))
    problem = Problem(window, topology, cost, token_cap, 1)
    rows, rules, cell_S = fewest_rows(window, token_cap, topology, required, problem.work_S, seed)
    problem = replace(problem, rows=rows.rows, requirements=required, tag_m=rules.tag_m)
    if cell_S is None:
        cell_S = problem.from_bins(split_to(rows.bins, problem.cells))
    return problem, rows, cell_S
