"""The one way a kernel is compiled: ahead of time for its signatures, without the GIL, cached on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def kernel(*signatures: Any, allocates: bool = True) -> Callable[[F], F]:
    """Compile for exactly these signatures, so that a wrong dtype is an error and not a recompile.

    Without a signature the function is only called from other kernels.
    allocates=False promises that no array is made inside; then numba counts no references, and a
    kernel that reads many arrays out of named tuples runs several times faster.
    Fast-math stays off: a kernel's float64 result equals the oracle's to the last bit.
    """

    def decorate(function: F) -> F:
        argument = list(signatures) or None
        compiled = njit(argument, nogil=True, cache=True, error_model="numpy", _nrt=allocates)
        return cast(F, compiled(function))

    return decorate


def inlined(function: F) -> F:
    """A part of kernels, inlined where it is called and compiled only there."""
    return cast(F, njit(inline="always", error_model="numpy", _nrt=False)(function))
