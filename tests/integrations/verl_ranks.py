"""One rank of a gloo group that runs verl's real functions; test_verl_real.py starts several.

    python verl_ranks.py RANK WORLD STORE

Each case runs on all ranks in turn and adds to a dictionary, which is printed as JSON. Nothing here
loads the plugin but verl itself, in the mode of ROUTEPACK_VERL.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import verl  # loads the plugin
from tensordict import TensorDict
from torch import distributed as dist
from verl.utils import seqlen_balancing
from verl.utils import tensordict_utils as tu
from verl.workers.engine import utils as engine

from routepack.integrations.verl.column import NAME, Layout

TIMEOUT_SECONDS = 60  # of every collective: a deadlock is an error, not a test that never ends
CAP, LARGE_CAP = 64, 128
SAMPLES, STEPS = 48, 2  # of a whole batch, and its optimizer steps


def batch_of(lengths: np.ndarray) -> TensorDict:
    """Jagged tokens, and each sample's number as a column of its own."""
    tokens = [torch.full((int(n),), i) for i, n in enumerate(lengths)]
    data = TensorDict(
        {
            "input_ids": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
            "sample": torch.arange(len(lengths)),
        },
        batch_size=len(lengths),
    )
    tu.assign_non_tensor(data, use_dynamic_bsz=True, sp_size=1, max_token_len_per_gpu=CAP)
    return data


def hand_made(lengths: np.ndarray, ranks: int) -> list[Any]:
    """Equal samples a rank and step, two to a micro-batch: nothing that verl would make."""
    steps = []
    for members in np.arange(len(lengths)).reshape(STEPS, -1):
        cells = members.reshape(-1, ranks, 2)
        steps.append([[cell.tolist() for cell in row] for row in cells])
    return steps


def planned_batch(ranks: int, stamp: int = 5) -> tuple[TensorDict, list[Any]]:
    """A batch in the order of a hand-made plan, with its column, as the driver leaves it."""
    lengths = np.random.default_rng(0).integers(5, CAP // 2, SAMPLES)
    steps = hand_made(lengths, ranks)
    layout = Layout.of(steps, lengths, (CAP, LARGE_CAP), stamp=stamp)
    batch = batch_of(lengths)
    column = [torch.from_numpy(row) for row in layout.column_SC]  # jagged, as from the queue
    batch[NAME] = torch.nested.as_nested_tensor(column, layout=torch.jagged)
    return tu.index_select_tensor_dict(batch, layout.order), steps


def part_of(batch: TensorDict, rank: int, ranks: int) -> TensorDict:
    """What verl's dispatch sends to a DP rank."""
    return tu.chunk_tensordict(batch, ranks)[rank]


def prepare(data: TensorDict, group: Any = None) -> list[list[int]]:
    """Samples of each micro-batch that verl's engines would run."""
    micro_batches, positions = engine.prepare_micro_batches(
        data, dp_group=group or dist.group.WORLD, same_micro_num_in_dp=True
    )
    samples = [micro_batch["sample"].tolist() for micro_batch in micro_batches]
    assert [[int(data["sample"][i]) for i in own] for own in positions] == samples
    return samples


def original(data: TensorDict, group: Any = None) -> list[list[int]]:
    """The same by verl's function alone."""
    own = getattr(
        engine.rearrange_micro_batches, "routepack_original", engine.rearrange_micro_batches
    )
    micro_batches, _ = own(
        data, max_token_len=int(data["max_token_len_per_gpu"]), dp_group=group or dist.group.WORLD
    )
    return [micro_batch["sample"].tolist() for micro_batch in micro_batches]


def follow(rank: int, ranks: int) -> dict[str, Any]:
    """The update's mini-batches, then a pass over everything with a larger cap."""
    batch, steps = planned_batch(ranks)
    own = part_of(batch, rank, ranks)
    size = SAMPLES // STEPS // ranks
    iterator = tu.make_iterator(
        own, mini_batch_size=size, epochs=1, seed=rank, dataloader_kwargs={"shuffle": False}
    )
    update = [prepare(mini_batch) for mini_batch in iterator]
    tu.assign_non_tensor(own, max_token_len_per_gpu=LARGE_CAP)
    log_probs, positions = engine.prepare_micro_batches(own, dp_group=dist.group.WORLD)
    flat = torch.cat([micro_batch["sample"] for micro_batch in log_probs])
    restored = seqlen_balancing.restore_dynamic_batch(flat, positions)
    return {
        "update": update,
        "expected": [[sorted(row[rank]) for row in step] for step in steps],
        "log_probs": [micro_batch["sample"].tolist() for micro_batch in log_probs],
        "log_prob_tokens": [len(m["input_ids"].values()) for m in log_probs],
        "restored": bool(torch.equal(restored, own["sample"])),
    }


def fall_back(rank: int, ranks: int) -> dict[str, Any]:
    """One rank cannot follow, in each of the ways that are known; all ranks do as verl does."""
    from routepack.integrations.verl import microbatch

    found: dict[str, Any] = {}
    for how in ("exception", "missing", "hash", "cap", "other cap"):
        batch, _ = planned_batch(ranks)
        own = part_of(batch, rank, ranks)
        read = microbatch._column
        if rank == ranks - 1:
            if how == "exception":
                microbatch._column = lambda batch: 1 // 0
            elif how == "missing":
                del own[NAME]
            elif how == "hash":
                other, _ = planned_batch(ranks, stamp=6)
                own = part_of(other, rank, ranks)
            elif how == "cap":
                column = torch.stack(own[NAME].unbind())
                column[:, 4] = 0
                own[NAME] = column
        if how == "other cap":  # on all ranks: no fault
            tu.assign_non_tensor(own, max_token_len_per_gpu=CAP + 1)
        found[how] = {"got": prepare(own), "verl": original(own)}
        microbatch._column = read
        own = part_of(planned_batch(ranks)[0], rank, ranks)
        found[how]["next"] = len(prepare(own))  # the following step is unharmed
    found["counts"] = microbatch.counts()
    return found


def without_plan(rank: int, ranks: int) -> dict[str, Any]:
    """A batch without a column."""
    own = part_of(batch_of(np.random.default_rng(1).integers(5, 60, SAMPLES)), rank, ranks)
    return {"got": prepare(own), "verl": original(own)}


def two_by_two(rank: int, ranks: int) -> dict[str, Any]:
    """Two DP ranks of two tensor-parallel ranks each: one rank alone fails."""
    from routepack.integrations.verl import microbatch

    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, data_rank = groups[rank % 2], rank // 2
    found = {}
    for failing in (False, True):
        own = part_of(planned_batch(2)[0], data_rank, 2)
        read = microbatch._column
        if failing and rank == 3:
            microbatch._column = lambda batch: 1 // 0
        found["fails" if failing else "follows"] = {
            "got": prepare(own, group),
            "verl": original(own, group),
        }
        microbatch._column = read
    return found


def main() -> None:
    rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    seqlen_balancing.get_device_name = lambda: "cpu"  # verl takes no platform for CUDA
    dist.init_process_group(
        "gloo", rank=rank, world_size=ranks, init_method=f"file://{store}",
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )  # fmt: skip
    plugin = sys.modules.get("routepack.integrations.verl.plugin")
    mode = plugin.MODE if plugin is not None else "not loaded"
    found: dict[str, Any] = {
        "mode": mode,
        "version": verl.__version__,
        "untouched": engine.rearrange_micro_batches is seqlen_balancing.rearrange_micro_batches,
        "without_plan": without_plan(rank, ranks),
    }
    if mode == "pack":
        found["follow"] = follow(rank, ranks)
        found["fall_back"] = fall_back(rank, ranks)
        if ranks == 4:
            found["two_by_two"] = two_by_two(rank, ranks)
    dist.barrier()
    sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
