"""The one way a kernel is compiled: for its signatures, without the GIL, cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numba import from_dtype, njit

F = TypeVar("F", bound=Callable[..., Any])
_njit = cast(Any, njit)  # numba's stubs leave out `_nrt`, which its extension guide documents


def kernel(*signatures: Any, allocates: bool = True) -> Callable[[F], F]:
    """Compile for exactly these signatures, so that a wrong dtype is an error and not a recompile.

    Without a signature the function is only called from other kernels.
    allocates=False promises that no array is made inside; then numba counts no references, and a
    kernel that reads many arrays out of named tuples runs several times faster.
    Fast-math stays off: a kernel's float64 result equals the oracle's to the last bit.
    """

    def decorate(function: F) -> F:
        argument = list(signatures) or None
        compiled = _njit(argument, nogil=True, cache=True, error_model="numpy", _nrt=allocates)
        return cast(F, compiled(function))

    return decorate


def inlined(function: F) -> F:
    """A part of kernels, inlined where it is called and compiled only there."""
    return cast(F, _njit(inline="always", error_model="numpy", _nrt=False)(function))


def called(function: F) -> F:
    """A rarely run part of kernels: called, since inlining it would take long to compile."""
    return cast(F, _njit(error_model="numpy", _nrt=False)(function))


class PerLoad:
    """A kernel compiled for loads (routed tokens of a rank) in int32, or in int64.

    int32 holds the loads of any window below 2**31 routed tokens a layer (times what a slow rank
    makes of one, problem.py), and is compiled at import; int64 when the first larger window comes,
    once after an installation, which takes minutes. `dtype_of` reads the loads' dtype off the first
    argument.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        signature: Callable[[Any], Any],
        dtype_of: Callable[[Any], Any] = lambda array: array.dtype,
        *,
        allocates: bool = False,
    ) -> None:
        self._function, self._signature, self._dtype_of = function, signature, dtype_of
        self._allocates = allocates
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._for(np.dtype(np.int32))

    def _for(self, load: Any) -> Callable[..., Any]:
        if load not in self._compiled:
            signature = self._signature(from_dtype(load))
            self._compiled[load] = kernel(signature, allocates=self._allocates)(self._function)
        return self._compiled[load]

    def __call__(self, first: Any, *rest: Any) -> Any:
        return self._for(self._dtype_of(first))(first, *rest)
