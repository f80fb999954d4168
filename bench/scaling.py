"""Planning time and memory as windows grow: samples, layers and EP ranks, one at a time.

python -m bench.scaling [CASE ...] [--long s] [--large] [--check] ...

Time: the shortest of a ladder of deadlines whose plan is within 1 % of a long deadline's. Memory:
what planning adds to a process that holds the window. Each case has a process of its own.

Windows follow the law of workloads.py for gpt-oss, factors shared by all layers included. Counts
are rounded with one random offset per sample and layer in place of being drawn one by one, which
would take minutes. Shapes: S samples, L layers, E experts, F factors, P prompts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from bench.counting import resident_bytes
from bench.report import emit, table
from bench.workloads import ROUTINGS, Lengths, draw_lengths
from numpy.typing import NDArray

import routepack
from routepack import AttentionStage, Budget, CostModel, Plan, Topology, Window

TOP_K, EXPERTS, ROLLOUTS = 8, 256, 8
LENGTHS = Lengths(1800, 0.9, 8192)
TOKEN_CAP = 16_384
COST = CostModel(attention=(AttentionStage("full", 100.0, 60.0),))
LADDER = (0.0625, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # seconds
NEAR = 1.01
EVALUATIONS = 100_000  # of the plan whose memory is measured: every stage runs
TABLES = 5  # arrays [S, R, L] of 32 bits that planning may add: four are two placements' loads
SMALL_BYTES = 8 * 2**20
MIB = 2**20


class Case(NamedTuple):
    """Sizes of a window. There are as many DP ranks as EP ranks, one shard, and a fixed cap."""

    samples: int = 2048
    layers: int = 48
    ranks: int = 16

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"S{self.samples}-L{self.layers}-R{self.ranks}"

    @property
    def loads_bytes(self) -> int:
        """One array [S, R, L] of 32 bits."""
        return 4 * self.samples * self.ranks * self.layers


BASE = Case()
CASES = (
    *(BASE._replace(samples=samples) for samples in (512, 1024)),
    BASE,
    *(BASE._replace(samples=samples) for samples in (4096, 8192, 16_384)),
    *(BASE._replace(layers=layers) for layers in (24, 94)),
    *(BASE._replace(ranks=ranks) for ranks in (8, 32, 64, 128)),
)
LARGE = Case(16_384, 94, 128)


# --- windows -----------------------------------------------------------------------------------


def make_window(case: Case, seed: int = 0) -> Window:
    """A window that holds its demand in 16 bits, without larger temporaries."""
    law = ROUTINGS["gptoss"]
    S, L, E, F = case.samples, case.layers, EXPERTS, law.factors
    lengths_S = draw_lengths(np.random.default_rng(10_000 + seed), S, ROLLOUTS, LENGTHS)
    rng = np.random.default_rng(seed)
    prompt_S = np.arange(S, dtype=np.int32) // ROLLOUTS
    z_SF = np.sqrt(law.task + law.prompt) * rng.normal(size=(prompt_S[-1] + 1, F))[prompt_S]
    z_SF += np.sqrt(law.rollout) * rng.normal(size=(S, F))
    scale_F = law.decay ** np.arange(F)
    z_SF *= law.shared_sd * scale_F / np.sqrt(np.square(scale_F).sum())
    low, high = np.log(law.popularity_shape)
    shape_L = np.exp(rng.uniform(low, high, L))
    popularity_LE = np.log(rng.gamma(shape_L[:, None], 1 / shape_L[:, None], (L, E)) + 0.02)
    direction_FLE = rng.normal(size=(F, L, E)).astype(np.float32)
    demand_SLE = np.empty((S, L, E), np.uint16)
    for s, tokens in enumerate(lengths_S.tolist()):
        logit_LE = popularity_LE + np.tensordot(z_SF[s].astype(np.float32), direction_FLE, 1)
        logit_LE += law.noise_sd * rng.standard_normal((L, E), np.float32)
        demand_SLE[s] = rounded(np.exp(logit_LE), tokens, rng)
    return Window(lengths_S, demand_SLE, TOP_K, group_S=prompt_S)


def rounded(share_LE: NDArray[Any], tokens: int, rng: np.random.Generator) -> NDArray[Any]:
    """Counts in proportion to the shares, none above `tokens`, TOP_K * tokens at each layer."""
    share_LE = share_LE / share_LE.sum(axis=1, keepdims=True)
    share_LE = np.minimum(share_LE, 0.8 / TOP_K)  # a token picks an expert at most once
    share_LE += (1 - share_LE.sum(axis=1, keepdims=True)) / share_LE.shape[1]
    edge_LE = TOP_K * tokens * np.cumsum(share_LE, axis=1) + rng.random((len(share_LE), 1))
    edge_LE[:, -1] = TOP_K * tokens
    return np.diff(np.floor(edge_LE), axis=1, prepend=0)


# --- one case, in its own process --------------------------------------------------------------


def plan(window: Window, ranks: int, budget: Budget) -> Plan:
    """Plan with as many DP ranks as EP ranks."""
    topology = Topology.of(dp=ranks, ep=ranks, edp=1)
    return routepack.plan(window, topology, token_cap=TOKEN_CAP, cost_model=COST, budget=budget)


class Measured(NamedTuple):
    """What the process of a case reports."""

    rows: int
    input_bytes: int
    """Demand, as the window holds it."""
    extra_bytes: int
    """Peak memory of planning above that before it."""
    long_ratio: float
    """Slowest shard / proven bound with the long deadline."""
    deadline: float | None
    """The shortest within 1 % of the long one; None for none."""
    seconds: float
    """Wall time of that plan, or of the long one."""
    proposals: int


def measure(case: Case, long_seconds: float) -> Measured:
    """Make the window, plan it once for the memory, then with every deadline that it takes."""
    window = make_window(case)
    plan(make_window(Case(256, 4, 8)), 8, Budget(evaluations=1000))  # loads the kernels
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at the present size
    before_bytes = resident_bytes("VmRSS")
    plan(window, case.ranks, Budget(evaluations=EVALUATIONS))
    extra_bytes = resident_bytes("VmHWM") - before_bytes

    long = plan(window, case.ranks, Budget(seconds=long_seconds))
    deadline, seconds, proposals = None, long_seconds, long.search.evaluations
    for deadline_seconds in (rung for rung in LADDER if rung < long_seconds):
        begin = time.perf_counter()
        made = plan(window, case.ranks, Budget(seconds=deadline_seconds))
        if made.score.slowest_shard <= NEAR * long.score.slowest_shard:
            deadline, seconds = deadline_seconds, time.perf_counter() - begin
            proposals = made.search.evaluations
            break
    return Measured(
        len(long.rows), window.demand_SLE.nbytes, extra_bytes, 1 + long.certificate.gap,
        deadline, seconds, proposals,
    )  # fmt: skip


def in_process(case: Case, long_seconds: float) -> Measured:
    """`measure` in a fresh process, so that no earlier case has left memory behind."""
    command = [sys.executable, "-m", "bench.scaling", case.name, "--long", f"{long_seconds}"]
    done = subprocess.run([*command, "--json"], check=True, stdout=subprocess.PIPE, text=True)
    return Measured(*json.loads(done.stdout))


# --- all cases ---------------------------------------------------------------------------------


def line(case: Case, found: Measured) -> list[str]:
    """A line of the table."""
    return [
        *(f"{size}" for size in case),
        f"{found.rows}",
        f"{found.input_bytes / MIB:.0f}",
        f"{found.extra_bytes / MIB:.0f}",
        f"{found.extra_bytes / case.loads_bytes:.1f}",
        f"{found.extra_bytes / found.input_bytes:.2f}",
        f"{found.long_ratio:.4f}",
        f"{found.deadline:g}" if found.deadline else "none",
        f"{found.seconds:.2f}",
        f"{found.proposals / 1e6:.2f}",
    ]


def failures(case: Case, found: Measured) -> list[str]:
    """The checks that do not hold, in words."""
    limit_bytes = TABLES * case.loads_bytes + SMALL_BYTES
    if found.extra_bytes <= limit_bytes:
        return []
    extra, limit = found.extra_bytes / MIB, limit_bytes / MIB
    return [f"{case.name}: {extra:.0f} MiB beyond the input, expected at most {limit:.0f}"]


def main() -> None:
    """Measure every case, and print the table and the failed checks."""
    by_name = {case.name: case for case in (*CASES, LARGE)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(by_name))
    parser.add_argument("--long", type=float, default=60.0, metavar="s", help="the long deadline")
    parser.add_argument("--large", action="store_true", help=f"also {LARGE.name}: 5 GB, minutes")
    parser.add_argument("--json", action="store_true", help="one case, in this process")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a check fails")
    args = parser.parse_args()
    if unknown := [name for name in args.cases if name not in by_name]:
        parser.error(f"no case {', '.join(unknown)}: choose from {', '.join(by_name)}")
    cases = [by_name[name] for name in args.cases] or [*CASES, *[LARGE] * args.large]
    if args.json:
        print(json.dumps(measure(cases[0], args.long)))
        return

    lines, failed = [], []
    for case in cases:
        found = in_process(case, args.long)
        lines.append(line(case, found))
        failed += failures(case, found)
        print(f"{case.name}: {' '.join(lines[-1][3:])}", file=sys.stderr)
    about = (
        f"E={EXPERTS}, top-{TOP_K}, demand in 16 bits; D = R, cap {TOKEN_CAP}. Extra: peak memory "
        f"that a plan of {EVALUATIONS} proposals adds to a process that holds the window; a table "
        f"is an array [S, R, L] of 32 bits, and a copy of the input would be {EXPERTS // 2} / R of "
        f"them. Deadline: the shortest from {LADDER[0]:g} s in powers of 2 whose plan is within "
        f"{NEAR - 1:.0%} of that with {args.long:g} s; the wall time it took, and its proposals."
    )
    header = [
        "S", "L", "R", "rows", "input (MiB)", "extra (MiB)", "in tables", "extra / input",
        f"ratio at {args.long:g} s", "deadline (s)", "wall (s)", "proposals (M)",
    ]  # fmt: skip
    text = "\n\n".join([about, table(header, lines)])
    sys.exit(emit(text, args.markdown, failed, args.check))


if __name__ == "__main__":
    main()
