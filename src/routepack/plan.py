"""A plan: where each expert lives, which micro-batch trains each sample, and its certificate."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from routepack.cost import CostModel
from routepack.errors import InputError
from routepack.estimate import Estimate
from routepack.requirements import NONE, Requirements
from routepack.topology import Topology
from routepack.trained import PaddingKey, Trained
from routepack.window import Window

FORMAT = "routepack.plan/1"
METHODS = (
    "baseline",
    "reorder",
    "kk",
    "reorder-kk",
    "expert-only",
    "attention-only",
    "routepack",
)


class WindowKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which window a plan is for."""

    samples: int
    layers: int
    experts: int
    top_k: int
    sha256: str

    @classmethod
    def of(cls, window: Window) -> WindowKey:
        return cls(window.samples, window.layers, window.experts, window.top_k, window.sha256)


class TopologyKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a Topology, as they stand in a plan file."""

    dp: int
    ep: int
    edp: int
    tp: int
    cp: int
    pp: int
    etp: int
    order: str


class Certificate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is proven about a plan: gap = slowest shard / cost_lower_bound - 1.

    Where demand was estimated, the slowest shard lies in cost_low..cost_high whatever the routes
    are that nobody recorded; bound and gap are those of the estimated window.
    """

    rows_lower_bound: int
    rows_certified: bool
    rows_method: str
    cost_lower_bound: float
    cost_bound_method: str
    gap: float
    cost_low: float | None = None
    cost_high: float | None = None

    @staticmethod
    def gap_of(slowest_shard: float, bound: float) -> float:
        """How far above the bound; 0 where nothing costs anything."""
        return slowest_shard / bound - 1 if bound > 0 else 0.0


class Score(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Design section 2. `attention` and `expert` are summed over rows and shards."""

    slowest_shard: float
    total: float
    worst_row: float
    attention: float
    expert: float

    @property
    def key(self) -> tuple[float, float, float]:
        """Plans are compared by this, lexicographically; smaller is better."""
        return (self.slowest_shard, self.total, self.worst_row)


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the search spent; with a budget in evaluations it reproduces the plan."""

    seed: int
    evaluations: int
    chains: int


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One optimizer step, `routepack.plan/1` (design section 4).

    placement     [L][E] slot of each logical expert, slot = rank * (E/R) + i
    rows          [M][D][...] sample indices of each cell, ascending
    padding       how samples are padded, estimate: how their demand was estimated; rows, cap, score
                  and certificate are those of the window after both
    requirements  what the trainer requires of the layout; part of the file where anything is
    stats         seconds by stage and other measurements of this run; never part of the file
    """

    window: WindowKey
    topology: TopologyKey
    token_cap: int
    cost_model: CostModel
    method: str
    placement: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    certificate: Certificate
    score: Score
    search: Search
    requirements: Requirements = NONE
    padding: PaddingKey | None = None
    estimate: Estimate | None = None
    format: str = FORMAT
    stats: dict[str, Any] = msgspec.field(default_factory=dict)

    @property
    def placement_LE(self) -> NDArray[np.int32]:
        """Slot of each logical expert, per layer."""
        return np.array(self.placement, dtype=np.int32)

    def checked_placement_LE(self) -> NDArray[np.int32]:
        """The placement of a plan from elsewhere. Raises InputError if it is no bijection."""
        layers, experts = self.window.layers, self.window.experts
        return validate_placement("placement", self.placement, layers, experts)

    def to_topology(self) -> Topology:
        """The topology that the plan was made for."""
        return Topology.from_dict(msgspec.structs.asdict(self.topology))

    def trained(self) -> Trained:
        """How the window is run. Raises InputError for a padding that no trainer has."""
        padding = self.padding.to_padding() if self.padding is not None else None
        return Trained(padding, self.estimate)

    def to_bytes(self) -> bytes:
        """Canonical bytes of the plan file: the same plan is the same bytes."""
        fields = msgspec.to_builtins(self)
        del fields["stats"]
        if self.requirements.vacuous:
            del fields["requirements"]
        for where, name in (
            (fields, "padding"),
            (fields, "estimate"),
            (fields["cost_model"], "dp_speed"),
            (fields["cost_model"], "ep_speed"),
        ):
            if where[name] is None:
                del where[name]
        return (
            json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "plan") -> Plan:
        """Parse a plan file. Raises InputError, one line that names what is wrong."""
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}: expected a plan file in JSON, {error}") from None
        if not isinstance(fields, dict) or fields.get("format") != FORMAT:
            found = fields.get("format") if isinstance(fields, dict) else type(fields).__name__
            raise InputError(f"{name}: format = {found!r}: expected {FORMAT!r}")
        try:
            if "stats" in fields:
                raise msgspec.ValidationError("Object contains unknown field `stats`")
            plan = msgspec.convert(fields, cls, strict=True)
        except msgspec.ValidationError as error:
            raise InputError(f"{name}: expected a plan file, {error}") from None
        if plan.method not in METHODS:
            raise InputError.at(f"{name}: method", plan.method, "one of " + ", ".join(METHODS))
        return plan


def validate_placement(
    name: str, placement: ArrayLike, layers: int, experts: int
) -> NDArray[np.int32]:
    """[L, E], each layer a bijection of experts to slots. Raises InputError."""
    try:
        slots_LE = np.asarray(placement)
    except (ValueError, OverflowError):  # layers of different sizes, or absurd numbers
        expected = f"({layers}, {experts})"
        raise InputError.at(f"{name}.shape", "ragged", expected) from None
    if slots_LE.shape != (layers, experts):
        raise InputError.at(f"{name}.shape", slots_LE.shape, f"({layers}, {experts})")
    if slots_LE.dtype.kind not in "iu":
        raise InputError.at(f"{name}.dtype", slots_LE.dtype, "an integer type")
    for layer in range(layers):
        seen = np.full(experts, -1, np.int64)
        for e, slot in enumerate(slots_LE[layer].tolist()):
            if not 0 <= slot < experts:
                raise InputError.at(name, slot, f"a slot in 0..{experts - 1}", (layer, e))
            if seen[slot] >= 0:
                expected = f"a free slot, expert {seen[slot]} has it"
                raise InputError.at(name, slot, expected, (layer, e))
            seen[slot] = e
    return slots_LE.astype(np.int32)
