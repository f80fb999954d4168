"""How a file is refused: what the tests of files share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from routepack.errors import InputError
from routepack.files import read_window


def refusal(path: Path, read: Any = read_window) -> str:
    """The message with which a file is refused, without its name in front."""
    with pytest.raises(InputError) as error:
        read(path)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message.removeprefix(f"{path}: ")
