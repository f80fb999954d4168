"""What the commands share: consoles, checks of output paths, and the wait for the kernels."""

from __future__ import annotations

import importlib
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console

from routepack.errors import InputError
from routepack.files import output_target

COMPILING = "compiling kernels (first run only: two to three minutes) ..."
COMPILING_SECONDS = 3.0  # from numba's cache the kernels load in about one


def stdout() -> Console:
    """Where results go. No markup: names and paths of users may hold square brackets."""
    return Console(markup=False, highlight=False, emoji=False)


def waiting(text: str) -> AbstractContextManager[object]:
    """A line on stderr while something runs; none where nobody watches."""
    console = Console(stderr=True, markup=False, highlight=False, emoji=False)
    return console.status(text) if console.is_terminal else nullcontext()


def loading_kernels(*modules: str) -> float:
    """Import modules that need kernels, and return the seconds that took.

    The first import after an installation compiles for minutes; one line on stderr says so.
    """
    started = time.perf_counter()
    say = threading.Timer(COMPILING_SECONDS, _say_compiling)
    say.daemon = True
    say.start()
    try:
        for module in modules or ("routepack.planner", "routepack.counting"):
            importlib.import_module(module)
    finally:
        say.cancel()
    return time.perf_counter() - started


def _say_compiling() -> None:
    sys.stderr.write(f"{COMPILING}\n")
    sys.stderr.flush()


def require_outputs(outputs: Sequence[Path | None], inputs: Sequence[Path | None]) -> None:
    """Refuse, before any work, outputs that could not be written or would overwrite an input.

    Raises InputError.
    """
    taken = [path for path in inputs if path is not None and path.exists()]
    for out in outputs:
        if out is None:
            continue
        _require_writable(out)
        for other in taken:
            if out.resolve() == other.resolve():
                raise InputError(f"{out}: expected a path for output, it is also {other}")
        taken.append(out)


def _require_writable(path: Path) -> None:
    target = output_target(path)
    if not target.parent.is_dir():
        raise InputError(f"{path}: expected an existing folder, {path.parent} is none")
    try:
        if path.exists():
            with path.open("ab"):  # a file that is write-protected stays as it is
                pass
        with tempfile.NamedTemporaryFile(prefix=".routepack-", dir=target.parent):
            pass
    except OSError as error:
        raise InputError(f"{path}: expected a file that can be written, {error.strerror}") from None
