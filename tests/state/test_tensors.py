"""Tensors of experts: the views that move, the checksum of a row, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.errors import InputError

torch = pytest.importorskip("torch", reason="the state of experts is in torch tensors")


def state(tensors: dict[str, Any], **fields: Any) -> Any:
    """One layer of four experts on two ranks."""
    from routepack.state.tensors import ExpertState

    return ExpertState([tensors], **({"placement": [[0, 1, 2, 3]], "ranks": 2, "rank": 1} | fields))


def test_rows_are_the_trainer_s_own_memory() -> None:
    """A tensor with an axis of experts and a list of parameters: rows of bytes at their addresses,
    also of parameters that need gradients and of numbers without an axis."""
    w1 = torch.nn.Parameter(torch.zeros(2, 3, 4))
    steps = [torch.zeros(()), torch.zeros(())]
    [[step, weight]] = state({"w1": w1, "step": steps}).layers
    assert [row.data_ptr() for row in weight.rows] == [w1[0].data_ptr(), w1[1].data_ptr()]
    assert [row.data_ptr() for row in step.rows] == [one.data_ptr() for one in steps]
    assert (weight.row_bytes, step.row_bytes) == (48, 4)
    weight.rows[1].copy_(torch.ones(12).view(torch.uint8))
    assert w1.sum() == 12


def test_the_local_part_of_a_dtensor_moves(tmp_path: Any) -> None:
    """Experts as torchtitan keeps them: [E, ...] sharded over a mesh of EP ranks, here of one."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        weight = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)]))
        [[tensor]] = state({"w": weight}, ranks=1, rank=0).layers
        assert tensor.rows[2].data_ptr() == weight.to_local()[2].data_ptr()
    finally:
        dist.destroy_process_group()


@given(st.integers(1, 40_000), st.integers(0, 2**32 - 1), st.data())
def test_one_changed_bit_changes_the_checksum(size: int, seed: int, data: st.DataObject) -> None:
    """Of rows of any length, at any alignment; the same bytes elsewhere have the same one."""
    from routepack.state.tensors import checksum

    values = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    row = torch.from_numpy(values)
    shifted = torch.empty(size + 8, dtype=torch.uint8)[data.draw(st.integers(0, 7)) :][:size]
    shifted.copy_(row)
    before = int(checksum(row))
    assert int(checksum(shifted)) == before
    shifted[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert int(checksum(shifted)) != before


def test_blocks_that_changed_places_change_the_checksum() -> None:
    """Two halves of a row of 16 KiB: the sum of all words is the same, the checksum is not."""
    from routepack.state.tensors import checksum

    row = torch.arange(2048)
    turned = torch.cat([row[1024:], row[:1024]])
    assert row.sum() == turned.sum()
    assert checksum(row.view(torch.uint8)) != checksum(turned.view(torch.uint8))


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (
            lambda: {"w": torch.zeros(3, 2)},
            {},
            "layers[0]['w'].shape = (3, 2): expected 2 rows, one for each slot of a rank",
        ),
        (
            lambda: {"w": [torch.zeros(2)]},
            {},
            "len(layers[0]['w']) = 1: expected 2, one for each slot",
        ),
        (
            lambda: {"w": [torch.zeros(2), torch.zeros(3)]},
            {},
            "layers[0]['w'][1] = torch.float32 (3,) on cpu: "
            "expected torch.float32 (2,) on cpu, as in slot 0",
        ),
        (
            lambda: {"w": torch.zeros(2, 4, 3).transpose(1, 2)},
            {},
            "layers[0]['w'].stride[0] = (1, 3): expected contiguous memory for each expert",
        ),
        (lambda: {"w": torch.zeros(2, 0)}, {}, "layers[0] = no bytes: expected tensors of experts"),
        (
            lambda: {"w": torch.zeros(2, 1)},
            {"ranks": 3},
            "ranks = 3: expected a divisor of the 4 experts",
        ),
        (lambda: {"w": torch.zeros(2, 1)}, {"rank": 2}, "rank = 2: expected an EP rank in 0..1"),
        (
            lambda: {"w": torch.zeros(2, 1)},
            {"placement": [0, 1]},
            "placement.shape = (2,): expected two axes, layers and experts",
        ),
    ],
)
def test_states_that_are_refused(make: Any, fields: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        state(make(), **fields)
    assert str(error.value) == message


def test_the_core_needs_no_torch() -> None:
    """Planning rounds does not load it either."""
    import subprocess
    import sys

    code = "import sys, routepack, routepack.state.rounds, routepack.state.nearest; "
    code += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
