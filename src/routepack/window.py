"""A window: the samples of one optimizer step, with their lengths and expert demand."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from routepack.errors import InputError

FORMAT = "routepack.window/1"
MAX_TOKENS = 2**31 - 1  # lengths and counts are held in 32 bits
_UNSET = cast(Any, None)  # a default that the checks replace
HASH_SAMPLES = 16  # samples hashed at a time, so that hashing needs no second copy of the demand


@dataclass(frozen=True, eq=False)
class Window:
    """Samples of one optimizer step, or of several (design section 2). Validated once, here.

    lengths_S    tokens of each sample, at least 1
    demand_SLE   (token, k) assignments of sample s to expert e at MoE layer l; over the experts
                 they sum to top_k * (length - missing) at every layer
    top_k        experts per token (K)
    missing_S    tokens of each sample without a recorded route; default 0
    group_S      prompt of each sample, or None
    tag_S        kind of each sample, such as its modality, or None
    step_S       optimizer step of each sample, from 0, or None
    moe_layers   index in the model of each MoE layer; default 0..L-1

    The window keeps a read-only view of the demand it is given, not a copy: leave that alone.

    Raises InputError, one line that names field, index, value and what was expected.
    """

    lengths_S: NDArray[np.int64]
    demand_SLE: NDArray[Any]
    top_k: int
    missing_S: NDArray[np.int32] = _UNSET
    group_S: NDArray[np.int32] | None = None
    moe_layers: tuple[int, ...] = ()
    model: str = ""
    source: str = ""
    tag_S: NDArray[np.int32] | None = None
    step_S: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        lengths_S = _integers("lengths", self.lengths_S, None, low=1)
        samples = len(lengths_S)
        if samples == 0:
            raise InputError("lengths: expected at least 1 sample, the window has none")
        missing = np.zeros(samples, np.int32) if self.missing_S is None else self.missing_S
        missing_S = _integers("missing", missing, samples, low=0).astype(np.int32)
        if (bad := np.flatnonzero(missing_S > lengths_S)).size:
            i = int(bad[0])
            raise InputError.at("missing", int(missing_S[i]), f"at most length {lengths_S[i]}", i)
        group_S = _labels("group", self.group_S, samples, low=-MAX_TOKENS)
        tag_S = _labels("tag", self.tag_S, samples, low=-MAX_TOKENS)
        step_S = _labels("step", self.step_S, samples, low=0)
        demand_SLE = _demand(self.demand_SLE, samples)
        top_k = _size("top_k", self.top_k)
        layers, experts = demand_SLE.shape[1:]
        if top_k > experts:
            raise InputError.at("top_k", top_k, f"at most the number of experts {experts}")
        moe_layers = tuple(int(layer) for layer in self.moe_layers) or tuple(range(layers))
        if len(moe_layers) != layers:
            raise InputError.at("moe_layers", list(moe_layers), f"{layers} layers, as in demand")
        for name in ("model", "source"):
            if not isinstance(getattr(self, name), str):
                raise InputError.at(name, repr(getattr(self, name)), "a string")
        _check_sums(demand_SLE, lengths_S, missing_S, top_k)
        values = dict(lengths_S=lengths_S, missing_S=missing_S, group_S=group_S, top_k=top_k)
        values.update(demand_SLE=demand_SLE, moe_layers=moe_layers, tag_S=tag_S, step_S=step_S)
        for name, value in values.items():
            if isinstance(value, np.ndarray):
                value = _frozen(value)
            object.__setattr__(self, name, value)

    @classmethod
    def from_routes(
        cls,
        lengths_S: ArrayLike,
        routes_NLK: NDArray[Any],
        offsets: ArrayLike,
        num_experts: int,
        *,
        threads: int = 1,
        **fields: Any,
    ) -> Window:
        """Count recorded routes; `offsets` [S+1] delimits the token rows of each sample.

        Raises InputError for an id out of range, a duplicate id in a token row, or a sample whose
        token rows are not length - missing.
        """
        from routepack.counting import count_routes  # loads a kernel, which data alone never needs

        lengths_S = _integers("lengths", lengths_S, None, low=1)
        offsets_S1 = _integers("offsets", offsets, len(lengths_S) + 1, low=0)
        routes_NLK = np.asarray(routes_NLK)
        demand_SLE = count_routes(routes_NLK, offsets_S1, num_experts, threads=threads)
        return cls(lengths_S, demand_SLE, routes_NLK.shape[2], **fields)

    def select(self, samples: ArrayLike) -> Window:
        """The window of these samples alone, in the order given; demand is gathered (a copy).

        Raises InputError for an index out of range or given twice, or without any.
        """
        chosen = _integers("samples", samples, None, low=0)
        if (bad := np.flatnonzero(chosen >= self.samples)).size:
            i = int(bad[0])
            expected = f"a sample of the window, in 0..{self.samples - 1}"
            raise InputError.at("samples", int(chosen[i]), expected, i)
        first = np.unique(chosen, return_index=True)[1]
        if len(first) < len(chosen):
            i = int(np.setdiff1d(np.arange(len(chosen)), first)[0])
            raise InputError.at("samples", int(chosen[i]), "every sample at most once", i)
        fields: dict[str, Any] = {}
        for name in ("lengths_S", "demand_SLE", "missing_S", "group_S", "tag_S", "step_S"):
            if (values := getattr(self, name)) is not None:
                fields[name] = values[chosen]
        return replace(self, **fields)

    @property
    def samples(self) -> int:
        """S."""
        return len(self.lengths_S)

    @property
    def layers(self) -> int:
        """L, MoE layers."""
        return int(self.demand_SLE.shape[1])

    @property
    def experts(self) -> int:
        """E, logical experts per layer."""
        return int(self.demand_SLE.shape[2])

    @cached_property
    def demand_LE(self) -> NDArray[np.int64]:
        """Demand of the whole window."""
        return np.asarray(self.demand_SLE.sum(axis=0, dtype=np.int64))

    @cached_property
    def sha256(self) -> str:
        """Hash of the canonical tensors: the same for routes and the demand counted from them."""
        shape = f"{FORMAT} {self.samples} {self.layers} {self.experts} {self.top_k}\n"
        digest = hashlib.sha256(shape.encode())
        digest.update(self.lengths_S.astype("<i8").tobytes())
        digest.update(self.missing_S.astype("<i4").tobytes())
        if self.group_S is not None:
            digest.update(self.group_S.astype("<i4").tobytes())
        for name, labels_S in (("tag", self.tag_S), ("step", self.step_S)):
            if labels_S is not None:  # named, so that equal numbers of another field differ
                digest.update(f"{name}\n".encode())
                digest.update(labels_S.astype("<i4").tobytes())
        for start in range(0, self.samples, HASH_SAMPLES):
            digest.update(self.demand_SLE[start : start + HASH_SAMPLES].astype("<u4").tobytes())
        return digest.hexdigest()


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A read-only view, so that nothing changes a window after its checks."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _labels(
    name: str, values: ArrayLike | None, samples: int, *, low: int
) -> NDArray[np.int32] | None:
    """An optional whole number of each sample."""
    return None if values is None else _integers(name, values, samples, low=low).astype(np.int32)


def _size(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise InputError.at(name, value, "a whole number of at least 1")
    return int(value)


def _integers(name: str, values: ArrayLike, size: int | None, *, low: int) -> NDArray[np.int64]:
    """A 1-D int64 array with values in low..MAX_TOKENS."""
    array = np.asarray(values)
    if array.ndim != 1 or (size is not None and len(array) != size):
        expected = "one dimension" if size is None else f"({size},)"
        raise InputError.at(f"{name}.shape", array.shape, expected)
    if array.size and array.dtype.kind not in "iu":
        raise InputError.at(f"{name}.dtype", array.dtype, "an integer type")
    high = np.iinfo(np.int64).max if name == "offsets" else MAX_TOKENS
    if (bad := np.flatnonzero((array < low) | (array > high))).size:
        i = int(bad[0])
        raise InputError.at(name, int(array[i]), f"a whole number in {low}..{high}", i)
    return array.astype(np.int64)


def _demand(demand: NDArray[Any], samples: int) -> NDArray[Any]:
    """[S, L, E] with counts that fit 32 bits, as uint16 or uint32."""
    array = np.asarray(demand)
    if array.ndim != 3 or array.shape[0] != samples or 0 in array.shape:
        raise InputError.at("demand.shape", array.shape, f"(S={samples}, L, E), none of them 0")
    if array.dtype.kind not in "iu":
        raise InputError.at("demand.dtype", array.dtype, "an integer type")
    if array.dtype in (np.uint16, np.uint32):
        return array
    if array.min() < 0 or array.max() > MAX_TOKENS:
        s, layer, e = np.argwhere((array < 0) | (array > MAX_TOKENS))[0].tolist()
        value = int(array[s, layer, e])
        raise InputError.at("demand", value, f"a count in 0..{MAX_TOKENS}", (s, layer, e))
    return array.astype(np.uint16 if array.max() < 2**16 else np.uint32)


def _check_sums(
    demand_SLE: NDArray[Any],
    lengths_S: NDArray[np.int64],
    missing_S: NDArray[np.int32],
    top_k: int,
) -> None:
    recorded_S = lengths_S - missing_S
    sums_SL = demand_SLE.sum(axis=2, dtype=np.int64)
    bad = np.argwhere(sums_SL != top_k * recorded_S[:, None])
    if bad.size:
        s, layer = bad[0].tolist()
        total = top_k * int(recorded_S[s])
        expected = (
            f"{total} = top_k {top_k} * (length {lengths_S[s]} - missing {missing_S[s]}) "
            f"summed over experts"
        )
        raise InputError.at("demand", int(sums_SL[s, layer]), expected, (s, layer))
    for s in range(
        len(lengths_S)
    ):  # a token uses an expert at most once; sample by sample: no copy
        if demand_SLE[s].max() > recorded_S[s]:
            layer, e = np.argwhere(demand_SLE[s] > recorded_S[s])[0].tolist()
            expected = f"at most the {recorded_S[s]} recorded tokens of the sample"
            raise InputError.at("demand", int(demand_SLE[s, layer, e]), expected, (s, layer, e))
