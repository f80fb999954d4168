"""How often the fewest rows are certified, and how long that takes: lengths only.

python -m bench.rows [WORKLOAD ...] [--seeds N]

The lengths are those of the generated windows with seeds 0 to N - 1.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from bench.report import emit, table
from bench.workloads import WORKLOADS, Recipe, draw_lengths

from routepack.rows import Rows, minimal_rows

GENERATED = [  # without ling3-*: the paper's steps fit into one or two rows
    name
    for name, workload in WORKLOADS.items()
    if isinstance(workload.origin, Recipe) and not name.startswith("ling3")
]


def certify(name: str, seed: int) -> tuple[Rows, float]:
    """The rows of one window, and the seconds that they took."""
    workload = WORKLOADS[name]
    recipe = workload.origin
    assert isinstance(recipe, Recipe)
    rng = np.random.default_rng(10_000 + seed)  # as in workloads.generate
    lengths_S = draw_lengths(rng, recipe.samples, recipe.rollouts, recipe.lengths)
    begin = time.perf_counter()
    rows = minimal_rows(lengths_S, workload.token_cap, workload.dp, seed=0)
    return rows, time.perf_counter() - begin


def line(name: str, results: list[tuple[Rows, float]]) -> list[str]:
    """A line of the table."""
    found = [rows for rows, _ in results]
    counts = [rows.rows for rows in found]
    milliseconds = [1000 * seconds for _, seconds in results]
    methods = Counter(rows.method for rows in found).most_common()
    return [
        name,
        f"{sum(rows.certified for rows in found)} / {len(found)}",
        str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}",
        f"{statistics.median(milliseconds):.1f}",
        f"{max(milliseconds):.0f}",
        ", ".join(f"{method} {count}" for method, count in methods),
    ]


def main() -> None:
    """Certify every window and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=", ".join(GENERATED))
    parser.add_argument("--seeds", type=int, default=25, help="windows of each workload")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    names = args.workloads or GENERATED
    if unknown := [name for name in names if name not in GENERATED]:
        parser.error(f"no workload {', '.join(unknown)}: choose from {', '.join(GENERATED)}")
    certify(GENERATED[0], 0)  # loads the kernels
    results = {name: [certify(name, seed) for seed in range(args.seeds)] for name in names}
    every = [result for made in results.values() for result in made]
    lines = [line(name, made) for name, made in results.items()]
    open_windows = [
        f"{name} seed {seed} ({rows.lower_bound} to {rows.rows})"
        for name, made in results.items()
        for seed, (rows, _) in enumerate(made)
        if not rows.certified
    ]
    header = ["workload", "certified", "rows", "median (ms)", "max (ms)", "closed by"]
    text = table(header, [*lines, line("all", every)])
    if open_windows:
        text += f"\n\nNot certified: {', '.join(open_windows)}."
    sys.exit(emit(text, args.markdown, [], check=False))


if __name__ == "__main__":
    main()
