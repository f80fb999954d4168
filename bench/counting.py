"""Counting routes with all checks, next to one unchecked `numpy.bincount` per layer, in one run.

python bench/counting.py [--tokens N] [--layers L] [--top-k K] [--experts E] [--samples S] ...
python bench/counting.py --builder: what a step of 512 samples of 1,000 tokens costs to observe.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.counting import ID_TYPES, count_routes
from routepack.ingest import RouteSpec, WindowBuilder, from_rows

POOL_ROWS = 2048  # distinct rows of K experts a layer, from which every token draws
MIB = 2**20


def make(args: argparse.Namespace) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Routes [N, L, K] with skewed expert popularity, and offsets of log-normal sample lengths."""
    rng = np.random.default_rng(args.seed)
    pool = np.empty((POOL_ROWS, args.layers, args.top_k), args.dtype)
    for layer in range(args.layers):
        noisy = rng.normal(0, 1, args.experts) + rng.gumbel(size=(POOL_ROWS, args.experts))
        pool[:, layer] = np.argpartition(-noisy, args.top_k - 1)[:, : args.top_k]
    routes_NLK = np.empty((args.tokens, args.layers, args.top_k), args.dtype)
    for start in range(0, args.tokens, 4096):  # in pieces: temporaries would raise the peak memory
        part = routes_NLK[start : start + 4096]
        for layer in range(args.layers):  # independent layers, as far as the counters' order goes
            part[:, layer] = pool[rng.integers(0, POOL_ROWS, len(part)), layer]
    share_S = rng.lognormal(0, 1, args.samples)
    offsets_S1 = np.zeros(args.samples + 1, np.int64)
    offsets_S1[1:] = np.rint(np.cumsum(share_S) / share_S.sum() * args.tokens)
    return routes_NLK, offsets_S1


def bincount(
    routes_NLK: NDArray[Any], sample_N: NDArray[np.int64], samples: int, experts: int
) -> list[NDArray[np.int64]]:
    """One [S * E] histogram per layer, without any check."""
    layers = range(routes_NLK.shape[1])
    keys = ((sample_N[:, None] * experts + routes_NLK[:, layer, :]).ravel() for layer in layers)
    return [np.bincount(key, minlength=samples * experts) for key in keys]


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def compare(args: argparse.Namespace) -> None:
    """Print medians of alternating runs and their ratio; the results must be equal."""
    routes_NLK, offsets_S1 = make(args)
    sample_N = np.repeat(np.arange(args.samples), np.diff(offsets_S1))
    expected = np.stack(bincount(routes_NLK, sample_N, args.samples, args.experts))
    demand_SLE = count_routes(routes_NLK, offsets_S1, args.experts, threads=args.threads)
    assert np.array_equal(
        demand_SLE.transpose(1, 0, 2).reshape(args.layers, args.samples * args.experts), expected
    )
    ours: list[float] = []
    numpys: list[float] = []
    for _ in range(args.repeats):
        ours.append(
            seconds(
                lambda: count_routes(routes_NLK, offsets_S1, args.experts, threads=args.threads)
            )
        )
        numpys.append(seconds(lambda: bincount(routes_NLK, sample_N, args.samples, args.experts)))
    ratios = [slow / fast for slow, fast in zip(numpys, ours, strict=True)]
    each_ns = statistics.median(ours) / routes_NLK.size * 1e9
    print(f"count_routes   median {statistics.median(ours):.4f} s  ({each_ns:.2f} ns an id)")
    print(f"numpy.bincount median {statistics.median(numpys):.4f} s")
    print(
        f"ratio          median {statistics.median(ratios):.1f}"
        f"  (pairs {min(ratios):.1f} to {max(ratios):.1f}, {args.repeats} alternations)"
    )


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process; ru_maxrss would start at the parent's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def memory(args: argparse.Namespace) -> None:
    """Print the extra and the output bytes of one call in this fresh process, as JSON."""
    routes_NLK, offsets_S1 = make(args)
    count_routes(routes_NLK[:1], np.array([0, 1]), args.experts)  # load the kernel
    if args.trace:  # in a process of its own, since tracing takes memory too
        tracemalloc.start()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at the present size
    before_bytes = resident_bytes("VmRSS")
    demand_SLE = count_routes(routes_NLK, offsets_S1, args.experts, threads=args.threads)
    extra_bytes = resident_bytes("VmHWM") - before_bytes
    if args.trace:
        extra_bytes = tracemalloc.get_traced_memory()[1]
    print(json.dumps([extra_bytes, demand_SLE.nbytes]))


def builder(args: argparse.Namespace) -> None:
    """Print what reducing the payloads of a step to a window takes, for each type of ids.

    96 different payloads, more than a cache holds, stand for the 512; the least of the repeats.
    """
    rows, payloads, samples = 1000, 96, 512
    make_args = argparse.Namespace(**{**vars(args), "tokens": rows, "samples": 1})
    routes_NLK, _ = make(make_args)
    spec = RouteSpec(args.experts, args.top_k, moe_layers=tuple(range(args.layers)))
    for name in ("uint8", "int16", "int32"):
        arrays = [routes_NLK.astype(name) for _ in range(payloads)]
        for threads in (1, 2):
            walls, cpus = [], []
            for _ in range(args.repeats):
                window = WindowBuilder(spec)
                began, cpu = time.perf_counter(), time.process_time()
                window.add_all(lambda rows_NLK: from_rows(rows_NLK, rows, spec), arrays,
                               threads=threads)  # fmt: skip
                walls.append(time.perf_counter() - began)
                cpus.append(time.process_time() - cpu)
            wall_ms, cpu_ms = (min(x) / payloads * samples * 1e3 for x in (walls, cpus))
            print(f"{name:6} {threads} thread(s)  wall {wall_ms:6.1f} ms  CPU {cpu_ms:6.1f} ms")


def main() -> None:
    """Parse the flags and print both comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("tokens", 400_000),
        ("layers", 48),
        ("top-k", 8),
        ("experts", 128),
        ("samples", 1024),
        ("threads", 1),
        ("repeats", 5),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", choices=[str(t) for t in ID_TYPES], default="uint8")
    parser.add_argument("--memory", action="store_true", help="only measure memory, print JSON")
    parser.add_argument("--trace", action="store_true", help="with --memory: by tracemalloc")
    parser.add_argument("--builder", action="store_true", help="measure WindowBuilder instead")
    args = parser.parse_args()
    if args.builder:
        builder(args)
        return
    if args.memory:
        memory(args)
        return
    shape = [args.tokens, args.layers, args.top_k]
    print(f"{shape} {args.dtype}, E={args.experts}, S={args.samples}, {args.threads} thread(s)")
    compare(args)
    for label, flags in (("tracemalloc", ["--trace"]), ("RSS", [])):
        command = [sys.executable, *sys.argv, "--memory", *flags]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        extra_bytes, output_bytes = json.loads(done.stdout)
        print(
            f"extra memory   {extra_bytes / MIB:.2f} MiB by {label}, output"
            f" {output_bytes / MIB:.2f} MiB: {extra_bytes / output_bytes:.3f} of it"
        )


if __name__ == "__main__":
    main()
