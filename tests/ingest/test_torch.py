"""Payloads that are real torch tensors, which the package itself never imports."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from ingest.helpers import ALL, SPEC, check, refusal
from routepack.ingest import (
    from_nemo_rl,
    from_rows,
    from_slime,
    from_verl,
    from_verl_jagged,
    from_verl_padded,
)

torch: Any = pytest.importorskip("torch", reason="torch is not installed (extra lab)")


@pytest.mark.parametrize("name", ["uint8", "int8", "int16", "uint16", "int32", "int64"])
def test_tensors(name: str) -> None:
    """Every integer type of torch, also where a slice is not contiguous."""
    rows = torch.from_numpy(ALL).to(getattr(torch, name))
    check(from_rows(rows, 4, SPEC), 0, 4)
    check(from_verl(rows, 4, SPEC), 0, 4)
    check(from_slime(rows[:3], 4, SPEC), 0, 3)
    check(from_nemo_rl(rows[:3], 4, SPEC), 0, 3)
    check(from_rows(rows.permute(2, 1, 0).contiguous().permute(2, 1, 0), 4, SPEC), 0, 4)


def test_nested_tensor() -> None:
    """A jagged nested tensor, as verl carries routes."""
    rows = torch.from_numpy(ALL.astype(np.int16))
    nested = torch.nested.as_nested_tensor([rows[:3], rows], layout=torch.jagged)
    first, second = from_verl_jagged(nested, None, SPEC, lengths=torch.tensor([4, 4]))
    check(first, 0, 3)
    check(second, 0, 4)


def test_padded_batch() -> None:
    """Tensors and mask of a padded batch."""
    batch = torch.zeros(1, 7, 3, 2, dtype=torch.int16)
    batch[0, 2:5] = torch.from_numpy(ALL[:3])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0]])
    (sample,) = from_verl_padded(batch, mask, SPEC)
    check(sample, 0, 3, padding=(2, 1))


def test_refused_types() -> None:
    """A type that numpy does not have, and one that is no id."""
    assert refusal(from_rows, torch.zeros(4, 3, 2, dtype=torch.bfloat16), 4, SPEC).startswith(
        "routes = Tensor: expected an array of integers on the CPU ("
    )
    assert refusal(from_rows, torch.zeros(4, 3, 2), 4, SPEC) == (
        "routes.dtype = float32: expected one of int8, uint8, int16, uint16, int32, int64"
    )


def test_the_package_imports_no_torch() -> None:
    """Neither the readers nor the recorder, until a model brings it."""
    code = "import sys, routepack.ingest.transformers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
