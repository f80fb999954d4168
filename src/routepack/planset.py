"""Several optimizer steps of one rollout batch, and other passes over it, under one placement."""

from __future__ import annotations

import json

import msgspec
import numpy as np
from numpy.typing import NDArray

from routepack.cost import CostModel
from routepack.errors import InputError
from routepack.plan import Plan, WindowKey

FORMAT = "routepack.planset/1"


class Pass(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pass over the whole batch that is no update, such as log-probs or a reference model.

    It runs on the same placement, with a cap and a cost (forward only) of its own. Raises
    InputError.
    """

    name: str
    token_cap: int
    cost_model: CostModel

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError.at("pass.name", repr(self.name), "a name")


class PlanSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One placement, a plan for each optimizer step, and one for each other pass.

    plans   of the steps; `rows` hold sample indices of the whole window, `window` is the key of the
            step's own samples (`Window.select` in ascending order)
    passes  by name; over the whole window

    `search.evaluations` of a step's plan are the moves proposed for its layout and an equal share
    of those proposed for the placement: over the steps they add up to what was spent on them.
    """

    window: WindowKey
    plans: tuple[Plan, ...]
    passes: dict[str, Plan] = {}
    format: str = FORMAT

    @property
    def placement_LE(self) -> NDArray[np.int32]:
        """Slot of each logical expert, per layer."""
        return self.plans[0].placement_LE

    def samples_of(self, step: int) -> NDArray[np.int64]:
        """The samples of an optimizer step, ascending."""
        return np.array(sorted(i for row in self.plans[step].rows for c in row for i in c))

    def to_bytes(self) -> bytes:
        """Canonical bytes of the file: the placement once, plans without it."""

        def fields(plan: Plan) -> dict[str, object]:
            found = json.loads(plan.to_bytes())
            del found["placement"]
            return dict(found)

        out = {
            "format": FORMAT,
            "window": msgspec.to_builtins(self.window),
            "placement": msgspec.to_builtins(self.plans[0].placement),
            "plans": [fields(plan) for plan in self.plans],
            "passes": {name: fields(plan) for name, plan in self.passes.items()},
        }
        text = json.dumps(out, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return (text + "\n").encode()

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "planset") -> PlanSet:
        """Parse a file. Raises InputError, one line that names what is wrong."""
        try:
            found = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}: expected a planset file in JSON, {error}") from None
        keys = {"format", "window", "placement", "plans", "passes"}
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            value = found.get("format") if isinstance(found, dict) else type(found).__name__
            raise InputError(f"{name}: format = {value!r}: expected {FORMAT!r}")
        if set(found) != keys:
            wrong = sorted(set(found) ^ keys)[0]
            raise InputError(
                f"{name}: {wrong}: expected exactly the keys {', '.join(sorted(keys))}"
            )
        if not isinstance(found["plans"], list) or not found["plans"]:
            raise InputError(f"{name}: plans: expected at least one")
        if not isinstance(found["passes"], dict):
            raise InputError(f"{name}: passes: expected an object")

        def plan(where: str, fields: object) -> Plan:
            if not isinstance(fields, dict) or "placement" in fields:
                raise InputError(f"{name}: {where}: expected a plan without a placement")
            whole = {**fields, "placement": found["placement"]}
            return Plan.from_bytes(json.dumps(whole).encode(), f"{name}: {where}")

        try:
            key = msgspec.convert(found["window"], WindowKey, strict=True)
        except msgspec.ValidationError as error:
            raise InputError(f"{name}: window: expected a window's key, {error}") from None
        return cls(
            window=key,
            plans=tuple(plan(f"plans[{k}]", one) for k, one in enumerate(found["plans"])),
            passes={key: plan(f"passes[{key}]", one) for key, one in found["passes"].items()},
        )
