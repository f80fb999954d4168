"""What commands read, from files and from options that exclude each other."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from routepack.budget import Budget
from routepack.cli.terminal import loading_kernels
from routepack.errors import InputError
from routepack.files import read_window
from routepack.topology import Topology
from routepack.window import Window


def load_window(path: Path, threads: int | None, *kernels: str) -> tuple[Window, dict[str, float]]:
    """The window, and the seconds spent on loading or compiling kernels and on reading it."""
    if not path.is_file():
        read_window(path)  # which refuses it: a wrong path need not wait for the kernels
    if threads is not None and threads < 1:
        raise InputError.at("threads", threads, "a whole number of at least 1")
    kernel_seconds = loading_kernels(*kernels)
    started = perf_counter()
    window = read_window(path, len(os.sched_getaffinity(0)) if threads is None else threads)
    return window, {"kernels": kernel_seconds, "reading": perf_counter() - started}


def choose_topology(path: Path | None, dp: int | None, ep: int | None, edp: int | None) -> Topology:
    """From a file or from the flags. Raises InputError where both or neither are given."""
    flags = {"--dp": dp, "--ep": ep, "--edp": edp}
    if path is not None:
        if given := [name for name, value in flags.items() if value is not None]:
            raise InputError(f"--topology, {given[0]}: expected either a file or sizes, not both")
        return Topology.from_toml(path)
    if dp is None or ep is None:
        absent = "--dp" if dp is None else "--ep"
        raise InputError(f"{absent}: expected a size, or --topology with a file, none is given")
    return Topology.of(dp=dp, ep=ep, edp=edp)


def cost_source(path: Path | None) -> str:
    """Where the cost model is from."""
    return "default, no --cost-model was given" if path is None else str(path)


def choose_budget(seconds: float | None, evaluations: int | None) -> Budget | None:
    """From --seconds or --evaluations; None, the library's default, without either."""
    if seconds is None and evaluations is None:
        return None
    if seconds is not None and evaluations is not None:
        raise InputError("--seconds, --evaluations: expected one of the two, both are given")
    return Budget(seconds=seconds, evaluations=evaluations)


def placements(window: Window, ranks: int) -> dict[str, NDArray[np.int32]]:
    """The placements that `inspect` compares. Raises InputError for a bad number of ranks."""
    from routepack.placement import balanced_placement, identity

    if ranks < 1:
        raise InputError.at("ep", ranks, "a whole number of at least 1")
    if window.experts % ranks:
        raise InputError.at("num_experts", window.experts, f"a multiple of the {ranks} EP ranks")
    contiguous_LE = identity(window.layers, window.experts)
    return {
        "contiguous": contiguous_LE,
        "LPT": balanced_placement(window.demand_LE, ranks, contiguous_LE),
    }
