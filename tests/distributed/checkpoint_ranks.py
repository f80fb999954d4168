"""A job that saves at one placement and EP size, and jobs that load it at others.

`python checkpoint_ranks.py resume 4 FOLDER` runs them one after another.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forked import run
from numpy.typing import NDArray
from training import EXPERTS, HIDDEN, TOKENS, Run, Setting, differing, groups_of

FOLDER = Path(sys.argv[3])
SAVED, STEPS, LAYERS = 3, 5, 2
PLAIN = """
import sys
import torch
saved = torch.load(sys.argv[1])
values, y = saved["values"], saved["x"]
for k in range(2):
    x = torch.nn.functional.layer_norm(
        y, y.shape[1:], values[f"norms.{k}.weight"], values[f"norms.{k}.bias"])
    probs = torch.softmax(x @ values[f"moes.{k}.router_EH"].T, dim=-1)
    for t in range(len(x)):
        for e in probs[t].topk(2).indices.tolist():
            h = torch.nn.functional.silu(x[t] @ values[f"{k}.w1_SHF"][e])
            out = probs[t, e] * (h @ values[f"{k}.w2_SFH"][e])
            y = y.index_add(0, torch.tensor([t]), out[None])
assert not [name for name in sys.modules if name.startswith("routepack")]
print(float((y - saved["y"]).abs().max()))
"""


def shuffled(rng: np.random.Generator) -> NDArray[np.int32]:
    """Any placement."""
    return np.array([rng.permutation(EXPERTS) for _ in range(LAYERS)], np.int32)


def tokens() -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))


def save(rank: int, world: int) -> dict[str, Any]:
    """Train and move, save in the middle, go on."""
    job = Run(Setting(ep=world, groups=groups_of(world, world)))
    rng = np.random.default_rng(11)
    for t in range(STEPS):
        if t == SAVED:
            values = job.logical()
            y_TH = job.model(tokens()).detach()
            if rank == 0:
                saved = {"values": values, "x": tokens(), "y": y_TH}
                torch.save(saved, FOLDER / "checkpoint.pt")
        job.step(t, False)
        job.move(shuffled(rng))
    values = job.logical()
    if rank == 0:
        torch.save(values, FOLDER / "end.pt")
    return {}


def load(rank: int, world: int) -> dict[str, Any]:
    """Load at the identity, and on a placement of its own."""
    saved = torch.load(FOLDER / "checkpoint.pt")
    found: dict[str, Any] = {}
    for name in ("identity", "another placement")[:world]:
        job = Run(Setting(ep=world, groups=groups_of(world, world)))
        if name == "another placement":
            job.move(shuffled(np.random.default_rng(12)))
        job.load(saved["values"], SAVED)
        found[f"{name}: differs"] = differing(saved["values"], job.logical())
        y_TH = job.model(tokens()).detach()
        found[f"{name}: output"] = float((y_TH - saved["y"]).abs().max())
    if world == 4:
        for t in range(SAVED, STEPS):
            job.step(t, False)
        found["end: differs"] = differing(torch.load(FOLDER / "end.pt"), job.logical())
    return found


if __name__ == "__main__":
    run(save, 4, FOLDER / "save")
    found = {str(ep): run(load, ep, FOLDER / f"load{ep}") for ep in (1, 2, 4)}
    plain = [sys.executable, "-c", PLAIN, str(FOLDER / "checkpoint.pt")]
    found["plain"] = float(subprocess.run(plain, check=True, capture_output=True).stdout)
    for rank in range(4):
        (FOLDER / f"{rank}.json").write_text(json.dumps(found))
