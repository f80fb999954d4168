"""The `routepack` command. Every user error is one line on stderr and exit code 2."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Any

from routepack.errors import InputError

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
USER_ERROR = 2


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; `args` default to those of the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a model's name in an ASCII terminal
    try:
        code = _run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except InputError as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except MemoryError as error:  # sizes that are typing slips get here, as do huge windows
        return _fail(f"expected input that fits into memory, {error or 'it does not'}")
    if code == INTERRUPTED:
        sys.stderr.write("interrupted\n")
    return code


def _run(args: Sequence[str] | None) -> int:
    import typer

    from routepack.cli.app import app

    # Typer carries a copy of click or imports it, by version: the base of all its usage errors.
    usage_error: Any = typer.BadParameter.__mro__[2]
    command = typer.main.get_command(app)
    try:
        # Not standalone: typer would print boxes of many lines. Its own exits are returned.
        code = command.main(
            None if args is None else list(args), prog_name="routepack", standalone_mode=False
        )
    except usage_error as error:
        raise InputError(_usage(error)) from None
    return code if isinstance(code, int) else 0


def _usage(error: Any) -> str:
    """What is wrong with the options, in the form of InputError.at where a value is refused."""
    if getattr(error, "param", None) is not None and error.message:
        return f"{error.param.opts[0]} = {error.message}"
    return str(error.format_message()).rstrip(".")


def _fail(message: str) -> int:
    from routepack.report.text import printable

    sys.stderr.write(f"error: {printable(message)}\n")
    return USER_ERROR
