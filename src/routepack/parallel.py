"""Threads for kernels that release the GIL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise


def over_slices(size: int, threads: int, work: Callable[[slice], None]) -> None:
    """Call `work` on slices that together are range(size), on up to `threads` threads."""
    parts = max(1, min(threads, size))
    if parts == 1:
        work(slice(0, size))
        return
    cuts = [size * k // parts for k in range(parts + 1)]
    with ThreadPoolExecutor(parts) as pool:
        list(pool.map(work, [slice(a, b) for a, b in pairwise(cuts)]))
