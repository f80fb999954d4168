"""Running the command line in tests, on a tiny window that is checked by hand."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from routepack.cli import main, terminal

LENGTHS = (5, 3, 6, 2, 4, 4, 1, 7)
LAYERS, EXPERTS, TOP_K = 2, 4, 2
METADATA = {
    "format": "routepack.window/1",
    "num_experts": str(EXPERTS),
    "top_k": str(TOP_K),
    "moe_layers": "[1, 2]",
    "model": "tiny",
    "source": "made by a test",
}
COST = '[[attention]]\nname = "full"\nlinear = 2.0\nquadratic = 1.0\n'
TOPOLOGY = 'tp = 1\ncp = 1\npp = 1\ndp = 2\nep = 2\netp = 1\norder = "tp-cp-ep-dp-pp"\n'
SIZES = ("--dp", "2", "--ep", "2", "--token-cap", "8", "--evaluations", "200")

Tensors = dict[str, NDArray[Any]]


def routed() -> Tensors:
    """A window with routes: token t of the file uses experts t and t + 1, modulo E."""
    rows = sum(LENGTHS)
    first_NL = (np.arange(rows)[:, None] + np.arange(LAYERS)) % EXPERTS
    return {
        "lengths": np.array(LENGTHS),
        "routes": np.stack([first_NL, (first_NL + 1) % EXPERTS], axis=2).astype(np.uint8),
        "offsets": np.cumsum((0, *LENGTHS)),
    }


def counted() -> Tensors:
    """The same window with its demand."""
    tensors = routed()
    demand_SLE = np.zeros((len(LENGTHS), LAYERS, EXPERTS), np.uint16)
    for s in range(len(LENGTHS)):
        for layer in range(LAYERS):
            ids = tensors["routes"][tensors["offsets"][s] : tensors["offsets"][s + 1], layer]
            demand_SLE[s, layer] = np.bincount(ids.ravel(), minlength=EXPERTS)
    return {"lengths": tensors["lengths"], "demand": demand_SLE}


def fill(folder: Path) -> None:
    """A window w, a cost model c.toml and a topology t.toml."""
    save_file(counted(), folder / "w", METADATA)
    (folder / "c.toml").write_text(COST)
    (folder / "t.toml").write_text(TOPOLOGY)


def run(*args: str) -> tuple[int, str, str]:
    """Run a command in this process: exit code, stdout, stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(args)
    return code, out.getvalue(), err.getvalue()


def process(*args: str, **options: Any) -> tuple[int, str, str]:
    """Run a command as a user does: exit code, stdout, stderr without the note on slow loading."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    command = [sys.executable, "-m", "routepack", *args]
    done = subprocess.run(command, check=False, text=True, timeout=300, **streams)
    return done.returncode, done.stdout, done.stderr.replace(f"{terminal.COMPILING}\n", "")
