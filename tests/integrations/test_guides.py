"""The code of the guides runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import routepack
from integrations.trainer_helpers import next_fit, parallel
from routepack.integrations.rollout import rows_of

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "generic.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def names() -> dict[str, Any]:
    """What the guide takes for given."""
    rng = np.random.default_rng(1)
    lengths = [int(n) for n in rng.integers(8, 60, 24)]
    trained: dict[int, list[list[str]]] = {}

    def routes(length: int) -> Any:
        return np.argsort(rng.normal(size=(length, 2, 8)), axis=2)[:, :, :2].astype(np.uint8)

    from types import SimpleNamespace

    args = SimpleNamespace(max_tokens_per_gpu=128)
    schedule = next_fit(
        args, parallel(), lengths, global_batch_size=24, rollout_indices=list(range(24))
    )
    [rows] = rows_of(schedule)
    return {
        "lengths": lengths,
        "routes": routes,
        "ids": [f"sample {i}" for i in range(24)],
        "train": trained.__setitem__,
        "trained": trained,
        "dataset": list(range(24)),
        "layout": [[row[rank] for row in rows] for rank in range(4)],
        "logged": [],
    }


def run(*blocks: int) -> dict[str, Any]:
    given = names()
    for block in blocks:
        exec(compile(BLOCKS[block], str(GUIDE), "exec"), given)
    return given


def test_a_dozen_lines() -> None:
    """Every sample is trained once, on ranks with equally many micro-batches; and it is a dozen
    lines and imports."""
    given = run(0)
    trained = given["trained"]
    assert sorted(trained) == [0, 1, 2, 3]
    assert len({len(batches) for batches in trained.values()}) == 1
    flat = [name for batches in trained.values() for batch in batches for name in batch]
    assert sorted(flat) == sorted(given["ids"])
    lines = [line for line in BLOCKS[0].splitlines() if line and "import" not in line]
    assert len(lines) <= 12


def test_a_data_loader() -> None:
    """One rank's micro-batches come out of torch's loader."""
    pytest.importorskip("torch", reason="needs torch")
    given = run(0, 1)
    assert [batch.tolist() for batch in given["loader"]] == [
        list(row[0]) for row in given["plan"].rows
    ]


def test_observing() -> None:
    """The layout comes back as it was, and its numbers with the flush."""
    before = names()["layout"]
    given = run(0, 2)
    assert given["layout"] == before
    given["packer"].flush()
    [metrics] = given["logged"]
    assert set(metrics) >= {"routepack/predicted_ratio", "routepack/own/expert_imbalance"}
    text = GUIDE.read_text(encoding="utf-8")
    for name in metrics:  # each is in the table, whole or by its last part
        assert name.removeprefix("routepack/").split("/")[-1] in text


def test_agreeing(tmp_path: Path) -> None:
    """A group of one agrees with itself."""
    dist = pytest.importorskip("torch.distributed", reason="needs torch")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        given = run(0, 2, 3)
        own = [given["own"]]
        assert isinstance(given["packer"], routepack.integrations.packer.Packer)
        given["packer"].step(given["window"], own)
        assert given["packer"].guard.totals["planned"] == 1
    finally:
        dist.destroy_process_group()
