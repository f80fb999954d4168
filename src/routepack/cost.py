"""The cost model: attention stages and the expert term, in units of one cap of tokens."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.topology import Topology
from routepack.window import MAX_TOKENS, Window

LARGEST = 1e12  # of a coefficient: sums over any window stay finite
SPEED_UNIT = 64  # 1 / speed is rounded to whole parts of this, so that costs stay exact
SPEEDS = (0.01, 100.0)


class AttentionStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A family of attention layers, its layer count folded into the coefficients.

    A cell costs linear * T + quadratic * Q, with T = sum(n)/C and Q = sum((n/C)^2) over its samples
    (documents attend separately). Linear attention (KDA, Gated DeltaNet): quadratic = 0. A sliding
    window of w tokens: Q = sum(m * (2n - m))/C^2 with m = min(n, w).
    """

    name: str
    linear: float
    quadratic: float
    window_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic"):
            msgspec.structs.force_setattr(
                self, name, _number(f"attention.{name}", getattr(self, name))
            )


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attention stages, weight of the expert term, and normalisation (design section 4).

    Where ranks are not equally fast, `dp_speed` [D] is the speed of each DP rank, and `ep_speed`
    that of each EP rank: [R], alike in every shard, or [G*R], shard by shard. A rank of speed 0.8
    takes 1 / 0.8 times as long (rounded to 64ths). Default: all 1.
    """

    attention: tuple[AttentionStage, ...]
    expert: float = 1.0
    normalise: str = "cap"
    dp_speed: tuple[float, ...] | None = None
    ep_speed: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not self.attention:
            raise InputError("attention: expected at least one [[attention]] stage")
        msgspec.structs.force_setattr(self, "expert", _number("expert", self.expert))
        _cost("expert", self.expert)
        if self.normalise not in ("cap", "window"):
            raise InputError.at("normalise", self.normalise, "'cap' or 'window'")
        for i, stage in enumerate(self.attention):
            _cost("attention.linear", stage.linear, i)
            _cost("attention.quadratic", stage.quadratic, i)
            w = stage.window_tokens
            if w is not None and w < 1:
                raise InputError.at("attention.window_tokens", w, "a whole number >= 1", i)
        for name in ("dp_speed", "ep_speed"):
            speeds = getattr(self, name)
            if speeds is not None:
                msgspec.structs.force_setattr(self, name, _speeds(name, speeds))
        if self.expert == 0 and not any(s.linear or s.quadratic for s in self.attention):
            raise InputError("cost model: expected a cost above 0, every coefficient is 0")

    @classmethod
    def from_toml(cls, path: str | Path) -> CostModel:
        """Read a cost model; unknown keys are errors. Raises InputError."""
        return from_toml(path, cls)

    def resolve(self, window: Window, topology: Topology, token_cap: int) -> Coefficients:
        """The coefficients of the integers that a layout is scored by.

        Raises InputError for speeds of another number of ranks.
        """
        quadratic_TS = [stage_tokens2(window.lengths_S, s.window_tokens) for s in self.attention]
        linear = [s.linear / token_cap for s in self.attention]
        quadratic = [s.quadratic / (token_cap * token_cap) for s in self.attention]
        expert = self.expert / token_cap
        if self.normalise == "window":
            tokens = int(window.lengths_S.sum())
            work = [
                a * tokens + b * int(q_S.sum())
                for a, b, q_S in zip(linear, quadratic, quadratic_TS, strict=True)
            ]
            attention_balanced = math.fsum(work) / topology.dp
            routed = int(window.demand_LE.sum())
            expert_balanced = routed / (topology.ep * topology.edp)
            if attention_balanced > 0:
                linear = [a / attention_balanced for a in linear]
                quadratic = [b / attention_balanced for b in quadratic]
            if expert_balanced > 0:
                expert = self.expert / expert_balanced
        shape_GR = (topology.edp, topology.ep)
        slow_D, slow_GR = np.ones(topology.dp), np.ones(shape_GR, np.int64)
        if self.dp_speed is not None:
            slow_D = _slow("dp_speed", self.dp_speed, (topology.dp,)) / SPEED_UNIT
        if self.ep_speed is not None:
            slow = _slow("ep_speed", self.ep_speed, (topology.ep, topology.edp * topology.ep))
            slow_GR = np.broadcast_to(slow.reshape(-1, topology.ep), shape_GR)
            expert /= SPEED_UNIT
        return Coefficients(
            linear_T=np.array(linear),
            quadratic_T=np.array(quadratic),
            expert=expert,
            quadratic_tokens_TS=np.stack(quadratic_TS),
            slow_D=slow_D,
            slow_GR=np.ascontiguousarray(slow_GR),
        )


@dataclass(frozen=True, eq=False)
class Coefficients:
    """Cost per integer unit. Suffix T: attention stages.

    A cell's stage costs slow_D * (linear_T * sum(n) + quadratic_T * sum(quadratic_tokens_TS)); a
    group's expert term is expert * (sum over layers of the largest slow_GR * routed tokens of a
    rank).
    """

    linear_T: NDArray[np.float64]
    quadratic_T: NDArray[np.float64]
    expert: float
    quadratic_tokens_TS: NDArray[np.int64]
    slow_D: NDArray[np.float64]
    """1 where every DP rank is as fast."""
    slow_GR: NDArray[np.int64]
    """1 where every EP rank is as fast; with speeds, in units of which `expert` is the cost."""

    @property
    def ranks_alike(self) -> bool:
        """Whether ranks may change places, cells among themselves and EP ranks likewise."""
        return bool(np.ptp(self.slow_D) == 0 and np.ptp(self.slow_GR) == 0)

    @property
    def ep_ranks_alike(self) -> bool:
        """Whether the EP ranks of every shard may change places."""
        return bool((self.slow_GR == self.slow_GR[:, :1]).all())

    @property
    def at_least(self) -> Coefficients:
        """What every layout costs at least: all ranks as fast as the fastest."""
        slow = float(self.slow_D.min())
        return replace(
            self,
            linear_T=self.linear_T * slow,
            quadratic_T=self.quadratic_T * slow,
            expert=self.expert * int(self.slow_GR.min()),
            slow_D=np.ones_like(self.slow_D),
            slow_GR=np.ones_like(self.slow_GR),
        )


def stage_tokens2(lengths_S: NDArray[np.int64], window_tokens: int | None) -> NDArray[np.int64]:
    """Token pairs (times two) that a causal stage attends: n^2, or m(2n - m) with m = min(n, w)."""
    if window_tokens is None:
        return lengths_S * lengths_S
    m_S = np.minimum(lengths_S, min(window_tokens, MAX_TOKENS))
    return np.asarray(m_S * (2 * lengths_S - m_S))


def read_toml(path: str | Path, what: str) -> dict[str, Any]:
    """Parse a TOML file, or one line that says why it cannot be."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: expected a {what} file, {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: expected TOML, {error}") from None


def from_toml(path: str | Path, kind: type[CostModel]) -> CostModel:
    table = read_toml(path, "cost model")
    try:
        return msgspec.convert(table, kind, strict=True)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        detail = cause if isinstance(cause, InputError) else error
        raise InputError(f"{path}: {detail}") from None


def _number(name: str, value: object) -> float:
    """A Python float, also for an integer or numpy's: equal models are equal bytes in a plan."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InputError.at(name, repr(value), "a number")
    return float(value)


def _speeds(name: str, values: Sequence[float]) -> tuple[float, ...]:
    """Speeds of ranks as Python floats."""
    low, high = SPEEDS
    found = tuple(_number(name, value) for value in values)
    for i, speed in enumerate(found):
        if not low <= speed <= high:
            raise InputError.at(name, speed, f"a speed in {low:g}..{high:g}", i)
    return found


def _slow(name: str, speeds: Sequence[float], sizes: tuple[int, ...]) -> NDArray[np.int64]:
    """1 / speed of each rank, in units of 1 / SPEED_UNIT, at least one."""
    if len(speeds) not in sizes:
        expected = " or ".join(str(size) for size in dict.fromkeys(sizes))
        raise InputError.at(name, f"{len(speeds)} speeds", expected)
    return np.array([max(1, round(SPEED_UNIT / speed)) for speed in speeds], np.int64)


def _cost(name: str, value: float, index: int | None = None) -> None:
    if not math.isfinite(value) or not 0 <= value <= LARGEST:
        raise InputError.at(name, value, f"a finite number in 0..{LARGEST:g}", index)


DEFAULT = CostModel(attention=(AttentionStage("attention", 60.0, 20.0),))
