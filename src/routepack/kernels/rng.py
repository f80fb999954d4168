"""Counter-based random numbers (SplitMix64, Steele et al. 2014): a function of key and counter.

So a chain's stream is the same on any thread, and after any resampling of the population.
"""

from __future__ import annotations

import numpy as np

from routepack.kernels.jit import inlined

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
S30, S27, S31, S32, S11 = (np.uint64(n) for n in (30, 27, 31, 32, 11))
LOW = np.uint64(0xFFFFFFFF)
ONE = np.uint64(1)


@inlined
def draw(key, counter):  # type: ignore[no-untyped-def]
    """64 random bits."""
    z = key + (counter + ONE) * GAMMA
    z = (z ^ (z >> S30)) * MIX_1
    z = (z ^ (z >> S27)) * MIX_2
    return z ^ (z >> S31)


@inlined
def high(bits, n):  # type: ignore[no-untyped-def]
    """A whole number in 0..n-1 from the upper 32 bits."""
    return np.int64(((bits >> S32) * np.uint64(n)) >> S32)


@inlined
def low(bits, n):  # type: ignore[no-untyped-def]
    """A whole number in 0..n-1 from the lower 32 bits."""
    return np.int64(((bits & LOW) * np.uint64(n)) >> S32)


@inlined
def unit(bits):  # type: ignore[no-untyped-def]
    """A float64 in (0, 1]."""
    return (np.float64(bits >> S11) + 1.0) * 2.0**-53


def stream_key(seed: int, *path: int) -> np.uint64:
    """The key of a stream, e.g. stream_key(seed, STAGE, chain): SplitMix64 folded over the path."""
    mask = (1 << 64) - 1
    key = 0
    for part in (seed, *path):
        key = (key ^ (part & mask)) + 0x9E3779B97F4A7C15 & mask
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & mask
        key = (key ^ key >> 27) * 0x94D049BB133111EB & mask
        key ^= key >> 31
    return np.uint64(key)
