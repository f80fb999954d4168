"""Which data-parallel (DP) ranks meet in which expert-parallel (EP) group.

A *shard* is one EP group with the DP ranks whose tokens are routed in it: micro-batch m of every
DP rank of a shard loads the same EP ranks. Megatron-Core lays two grids over the same global
ranks, a dense one (tp, cp, dp, pp) and an expert one (etp, ep, edp, pp), both in the axis order of
one string; the shards are where the two meet. Source: `RankGenerator` and
`initialize_model_parallel` in megatron.core.parallel_state, 0.16 to 0.20 (0.20's additional axis
`gtp_remat` is not modelled).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from math import prod
from os import PathLike
from typing import Any, Self

import numpy as np

from routepack.errors import InfeasibleError, InputError

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
"""Megatron-Core's default; the first axis varies fastest."""

MOST_RANKS = 2**22
"""Of an axis, and of all: every rank is looked at, so a typing slip must not make billions."""

FILE_KEYS = ("tp", "cp", "pp", "dp", "ep", "etp", "order")
"""Exactly the keys of a topology file."""


@dataclass(frozen=True)
class Topology:
    """The parallel layout of a trainer: the size of every axis and the order of ranks along them.

    Normally `edp` = dp*tp*cp / (ep*etp), and `order` decides which DP ranks form a shard. A
    layout given as dp, ep and edp alone (the flags) may have any `edp` that divides `dp`, because
    its tensor and context sizes are unknown; its shards are blocks of consecutive DP ranks.

    Raises InputError for a size that is not an integer of at least 1, an `order` that is no
    permutation of the axes or that Megatron refuses, and an `edp` that fits neither rule.
    """

    dp: int
    """D, DP ranks."""
    ep: int
    """R, EP ranks in a group."""
    edp: int
    """G, EP groups in a pipeline stage (Megatron's expert data parallelism)."""
    tp: int = 1
    cp: int = 1
    pp: int = 1
    etp: int = 1
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        for name in ("dp", "ep", "edp", "tp", "cp", "pp", "etp"):
            _require_size(name, getattr(self, name))
            object.__setattr__(self, name, int(getattr(self, name)))  # numpy's integers too
        if self.dp * self.tp * self.cp * self.pp > MOST_RANKS:
            ranks = self.dp * self.tp * self.cp * self.pp
            raise InputError.at("dp * tp * cp * pp", ranks, f"at most {MOST_RANKS} ranks")
        _require_order(self.order)
        if self._follows_from_sizes:
            self._require_one_pipeline()
        elif (self.tp, self.cp, self.pp, self.etp, self.order) != (1, 1, 1, 1, DEFAULT_ORDER):
            ratio = f"{self.dp * self.tp * self.cp} / {self.ep * self.etp}"
            raise InputError.at("edp", self.edp, f"dp * tp * cp / (ep * etp) = {ratio}")
        elif self.dp % self.edp:
            raise InputError.at("edp", self.edp, f"a divisor of dp = {self.dp}")

    @classmethod
    def of(cls, *, dp: int, ep: int, edp: int | None = None) -> Self:
        """The layout of the flags `--dp D --ep R [--edp G]`; G defaults to D/R.

        Raises InputError as the class does, and where D/R is no integer and `edp` is not given.
        """
        if edp is None:
            _require_size("dp", dp)
            _require_size("ep", ep)
            if dp % ep:
                expected = f"a multiple of ep = {ep}, unless --edp or a topology file is given"
                raise InputError.at("dp", dp, expected)
            edp = dp // ep
        return cls(dp=dp, ep=ep, edp=edp)

    @classmethod
    def from_toml(cls, path: str | PathLike[str]) -> Self:
        """Read a topology file: TOML with exactly the keys tp, cp, pp, dp, ep, etp and order.

        Raises InputError, prefixed with `path`, for a file that cannot be read or parsed, unknown
        or missing keys, values the class refuses, and ep*etp that does not divide dp*tp*cp.
        """
        try:
            with open(path, "rb") as file:
                table = tomllib.load(file)
            _require_keys(table, FILE_KEYS)
            for name in FILE_KEYS[:-1]:
                _require_size(name, table[name])
            dense, expert = table["dp"] * table["tp"] * table["cp"], table["ep"] * table["etp"]
            if dense % expert:
                raise InputError.at("dp * tp * cp", dense, f"a multiple of ep * etp = {expert}")
            return cls(edp=dense // expert, **table)
        except OSError as error:
            raise InputError(f"{path}: expected a topology file, {error.strerror}") from None
        except ValueError as error:  # InputError, TOML syntax, or bytes that are not UTF-8
            raise InputError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; raises InputError for unknown or missing keys and bad values."""
        _require_keys(data, tuple(f.name for f in fields(cls)))
        return cls(**data)

    def to_dict(self) -> dict[str, int | str]:
        """{dp, ep, edp, tp, cp, pp, etp, order}, as in the plan file."""
        return asdict(self)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Per EP group [G], its DP ranks in ascending order.

        They partition the DP ranks unless the topology `spans`; then a DP rank appears in every
        group that some of its ranks belong to.
        """
        if not self._follows_from_sizes:
            block = self.dp // self.edp
            return tuple(tuple(range(g * block, (g + 1) * block)) for g in range(self.edp))
        rank = np.arange(self.dp * self.tp * self.cp * self.pp)
        dense_dp = rank // self._stride("dp", self._dense_sizes) % self.dp
        expert_dp = rank // self._stride("dp", self._expert_sizes) % self.edp
        met = np.zeros((self.edp, self.dp), dtype=bool)
        met[expert_dp, dense_dp] = True
        return tuple(tuple(np.flatnonzero(row).tolist()) for row in met)

    @cached_property
    def spans(self) -> bool:
        """Whether some DP rank has ranks in several EP groups (always where ep*etp < tp*cp)."""
        return sum(map(len, self.groups)) > self.dp

    @cached_property
    def shard_of_dp(self) -> tuple[int, ...]:
        """The shard of every DP rank [D]. Raises InfeasibleError where the topology `spans`."""
        self.require_plannable()
        shard = {dp: g for g, group in enumerate(self.groups) for dp in group}
        return tuple(shard[dp] for dp in range(self.dp))

    @property
    def ranks_per_shard(self) -> int:
        """D/G, DP ranks of a shard. Raises InfeasibleError where the topology `spans`."""
        self.require_plannable()
        return self.dp // self.edp

    def require_plannable(self) -> None:
        """Raise InfeasibleError where the topology `spans`.

        Sequence or context slicing, not the plan, then decides which tokens of a sample load
        which EP group. Elsewhere every shard has D/G DP ranks: the ranks of a group are those of
        whole DP ranks.
        """
        if not self.spans:
            return
        per_dp, per_group = self.tp * self.cp, self.ep * self.etp
        if per_group % per_dp:
            expected = f"a multiple of tp * cp = {per_dp}, or a DP rank spans several EP groups"
            raise InfeasibleError.at("ep * etp", per_group, expected)
        expected = "an order in which no DP rank spans several EP groups"
        raise InfeasibleError.at("order", repr(self.order), expected)

    @property
    def _follows_from_sizes(self) -> bool:
        return self.edp * self.ep * self.etp == self.dp * self.tp * self.cp

    @property
    def _dense_sizes(self) -> dict[str, int]:
        return {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}

    @property
    def _expert_sizes(self) -> dict[str, int]:
        return {"tp": self.etp, "cp": 1, "ep": self.ep, "dp": self.edp, "pp": self.pp}

    def _stride(self, axis: str, sizes: Mapping[str, int]) -> int:
        """Distance in global ranks between neighbours along `axis`."""
        axes = self.order.split("-")
        return prod(sizes[a] for a in axes[: axes.index(axis)])

    def _require_one_pipeline(self) -> None:
        """Both grids must have the same pipeline groups; Megatron asserts the same two things."""
        strides = {self._stride("pp", s) for s in (self._dense_sizes, self._expert_sizes)}
        same_dp = self.order.endswith("pp") or self.dp == self.edp
        if self.pp > 1 and not (same_dp and len(strides) == 1):
            expected = "an order that ends in pp, as dense and expert pipeline groups differ"
            raise InputError.at("order", repr(self.order), expected)


def _require_size(name: str, value: object) -> None:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not 1 <= value <= MOST_RANKS:  # type: ignore[operator]
        raise InputError.at(name, repr(value), f"an integer in 1..{MOST_RANKS}")


def _require_order(value: object) -> None:
    axes = sorted(DEFAULT_ORDER.split("-"))
    if not isinstance(value, str) or sorted(value.split("-")) != axes:
        raise InputError.at("order", repr(value), f"a permutation of {DEFAULT_ORDER}")


def _require_keys(table: Mapping[str, object], keys: tuple[str, ...]) -> None:
    expected = f"exactly the keys {', '.join(keys)}"
    for key in table:
        if key not in keys:
            raise InputError(f"unknown key {key!r}: expected {expected}")
    for key in keys:
        if key not in table:
            raise InputError(f"missing key {key!r}: expected {expected}")
