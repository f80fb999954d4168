"""Run every benchmark and write bench/results.md, each table below the command that made it.

python -m bench.report [--only NAME ...] [--quick] [--out FILE]

With --only the other tables of the file stay as they are. Exits with 1 where a check failed. Run it
on a quiet machine: the searches have deadlines.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Script(NamedTuple):
    """A table: its name, the flags of its module, and those of a quick run that shows it works.

    What a script prints is Markdown, or else plain text; its progress goes to stderr.
    """

    name: str
    flags: str
    quick: str
    markdown: bool = True
    module: str = ""
    """In bench/; default: the name."""


SCRIPTS = (
    Script("methods", "--seconds 2 --check", "moonlight-gsm8k --seconds 0.2 --check"),
    Script("swaps", "--check", "qwen3-30b-math --swaps 8192 --repeats 3"),
    Script(
        "compare",
        "--check",
        "moonlight-gsm8k --seeds 2 --evaluations 200000 --seconds 0.1",
    ),
    Script("anytime", "--check", "moonlight-gsm8k --seeds 1 --seconds 0.05 0.25"),
    Script(
        "anytime, 60 s",
        "--seconds 60 --seeds 1 --check",
        "moonlight-gsm8k --seconds 0.3 --seeds 1",
        module="anytime",
    ),
    Script("scaling", "--check", "S512-L48-R16 --long 0.5 --check"),
    Script("requirements", "--evaluations 800000 --check", "moonlight-gsm8k --evaluations 20000"),
    Script("packing_alone", "--observe --check", "moonlight-gsm8k --seconds 0.2 --check"),
    Script("stages", "", "moonlight-gsm8k --evaluations 20000"),
    Script("rows", "", "--seeds 2"),
    Script("bounds", "", "moonlight-gsm8k --tiny 1"),
    Script(
        "directions",
        "--seconds 2 --check",
        "--sizes tiny --eps 8 --caps 1024 --seconds 0.2 --check",
    ),
    Script("counting", "", "--tokens 20000 --layers 8 --samples 64 --repeats 2", markdown=False),
)


def table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table: the first column to the left, the others to the right."""
    rule = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def emit(text: str, path: Path | None, failed: Sequence[str], check: bool) -> int:
    """Print a script's Markdown and its failed checks, write it to `path`; the exit code."""
    if failed:
        text += "\n\nFailed checks:\n\n" + "\n".join(f"- {line}" for line in failed)
    elif check:
        text += "\n\nEvery check holds."
    print(text)
    if path:
        path.write_text(text + "\n")
    return int(check and bool(failed))


def machine() -> str:
    """The machine in one line."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    cores = len(os.sched_getaffinity(0))
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "numba"))
    return f"{model}, {cores} cores, Python {platform.python_version()}, {packages}"


def sections(text: str) -> dict[str, str]:
    """The tables of a results file, by name."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
    return {part.splitlines()[0].removeprefix("## "): part for part in parts}


def main() -> None:
    """Run the scripts one after another and write their output down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [script.name for script in SCRIPTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="small runs that only show it works")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results.md")
    args = parser.parse_args()
    head = f"# Results\n\n{machine()}. What each table shows: [README.md](README.md)."
    parts = {} if args.only == names or not args.out.exists() else sections(args.out.read_text())
    failed = []
    for script in SCRIPTS:
        if script.name not in args.only:
            continue
        flags = shlex.split(script.quick if args.quick else script.flags)
        module = f"bench.{script.module or script.name}"
        command = shlex.join(["python", "-m", module, *flags])
        print(command, file=sys.stderr)
        done = subprocess.run(
            [sys.executable, "-m", module, *flags],
            check=False, cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        if done.returncode:
            failed.append(script.name)
        text = done.stdout.strip()
        text = text if script.markdown else f"```\n{text}\n```"
        parts[script.name] = f"## {script.name}\n\n    {command}\n\n{text}\n"
    order = [*(name for name in names if name in parts), *(n for n in parts if n not in names)]
    found = [head, *(parts[name].strip("\n") for name in order)]
    args.out.write_text("\n\n".join(found) + "\n")
    print(f"wrote {args.out}", file=sys.stderr)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
