"""slime and miles make the schedule of all ranks in one process; here is what replaces it.

Both call `build_dp_schedule(args, train_parallel_config, total_lengths, *, global_batch_size,
rollout_indices) -> (partitions, micro_batch_indices, num_microbatches, rollouts)` in the actor that
holds the rollout. `partitions[d]` are the samples of DP rank d, `micro_batch_indices[d][m]` tile
the positions of that list in order, and `num_microbatches[k]` is the number of micro-batches of
optimizer step k on every rank. The trainer's function is always called first: its result says which
samples each optimizer step has, and it is what the trainer gets wherever there is no better plan.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from routepack.errors import InputError
from routepack.integrations.layout import Cells, by_rank, by_row
from routepack.integrations.observe import PREFIX, Metrics
from routepack.integrations.packer import Packer
from routepack.integrations.samples import require_experts, spec_of, window_of
from routepack.integrations.semantics import require_same_loss
from routepack.integrations.settings import Settings
from routepack.topology import Topology
from routepack.window import Window

logger = logging.getLogger("routepack")
Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]
NAME = "build_dp_schedule"
UNPLANNED = f"{PREFIX}total/unplanned"
"""Steps whose samples, ranks or schedule were not understood; they run as the trainer has them."""
PARAMETERS = (
    "args",
    "train_parallel_config",
    "total_lengths",
    "global_batch_size",
    "rollout_indices",
)

EXPECTED: Mapping[str, tuple[Any, str]] = {
    "use_dynamic_batch_size": (True, "plans pack by tokens"),
    "use_rollout_routing_replay": (True, "plans need the routes of the rollout"),
}
"""Settings that packing needs in either trainer, by name: value and why."""


@dataclass(frozen=True)
class Trainer:
    """What differs between the two.

    name      as in `semantics`
    reader    the function of `routepack.ingest` that reads the routes of a sample
    expected  settings that packing needs, by name: value and why
    log       called with (args, rollout_id, metrics)
    """

    name: str
    reader: str
    expected: Mapping[str, tuple[Any, str]]
    log: Callable[[Any, int, Metrics], object]


def require_usable(trainer: Trainer, args: Any) -> Settings:
    """The settings in `args.routepack`. Raises InputError for what is incompatible with them."""
    settings = Settings.of(getattr(args, "routepack", None))
    if settings.mode == "off":
        return settings
    for name, (value, why) in trainer.expected.items():
        found = getattr(args, name, value)
        if found != value:
            raise InputError.at(name, repr(found), f"{value!r}, {why}")
    experts = require_experts(args)
    ranks = int(getattr(args, "expert_model_parallel_size", 1))
    if experts % ranks:
        expected = f"a multiple of expert_model_parallel_size = {ranks}"
        raise InputError.at("num_experts", experts, expected)
    if settings.mode == "pack":
        lines = require_same_loss(
            vars(args), trainer.name, allow_changed_loss=settings.allow_changed_loss
        )
        for line in lines:
            logger.warning("packing changes what is learned: %s", line)
    settings.costs()
    settings.log_function()
    return settings


def topology_of(args: Any, train_parallel_config: Mapping[str, Any]) -> Topology:
    """The trainer's ranks, from Megatron's arguments. Raises InputError."""
    tp = int(getattr(args, "tensor_model_parallel_size", 1))
    ep = int(getattr(args, "expert_model_parallel_size", 1))
    etp = int(getattr(args, "expert_tensor_parallel_size", None) or tp)
    dp, cp = int(train_parallel_config["dp_size"]), int(train_parallel_config["cp_size"])
    dense, expert = dp * tp * cp, ep * etp
    if dense % expert:
        raise InputError.at("dp * tp * cp", dense, f"a multiple of ep * etp = {expert}")
    order = "tp-cp-ep-pp-dp" if getattr(args, "use_tp_pp_dp_mapping", False) else "tp-cp-ep-dp-pp"
    pp = int(getattr(args, "pipeline_model_parallel_size", 1))
    return Topology(dp=dp, ep=ep, edp=dense // expert, tp=tp, cp=cp, pp=pp, etp=etp, order=order)


@dataclass(frozen=True, eq=False)
class _Rollout:
    """Samples between the log hook, which sees their routes, and the schedule."""

    rollout_id: int
    lengths: list[int]
    routes: list[Any]


class Schedules:
    """The schedules of one rollout process."""

    def __init__(self, trainer: Trainer, settings: Settings) -> None:
        self._trainer, self._settings = trainer, settings
        self._log = settings.log_function()
        self._rollout: _Rollout | None = None
        self._unplanned_total = 0
        self._packers: dict[tuple[Any, ...], Packer] = {}

    def remember(self, rollout_id: int, samples: Sequence[Any]) -> None:
        """Hold the routes of a rollout until its schedule is made; nothing is copied."""
        self._rollout = None
        try:
            lengths = [len(sample.tokens) for sample in samples]
            routes = [sample.rollout_routed_experts for sample in samples]
        except Exception as error:  # not what this trainer's samples were: the step runs on
            self._unplanned(error)
        else:
            self._rollout = _Rollout(rollout_id, lengths, routes)

    def replacing(self, own: Callable[..., Schedule]) -> Callable[..., Schedule]:
        """The function that takes the place of the trainer's."""

        @functools.wraps(own)
        def build_dp_schedule(
            args: Any, train_parallel_config: Any, total_lengths: Any, **rest: Any
        ) -> Schedule:
            schedule = own(args, train_parallel_config, total_lengths, **rest)
            return self._replaced(args, train_parallel_config, total_lengths, schedule)

        build_dp_schedule.schedules = self  # type: ignore[attr-defined]
        return build_dp_schedule

    def _replaced(
        self, args: Any, config: Mapping[str, Any], total_lengths: Sequence[int], own: Schedule
    ) -> Schedule:
        rollout, self._rollout = self._rollout, None
        if rollout is None:
            return own
        try:
            packer = self._packer(args, config)
            steps = rows_of(own)
            spec = spec_of(args)
        except Exception as error:
            self._unplanned(error)
            return own

        def window() -> Window:
            if list(total_lengths) != rollout.lengths:
                expected = "the samples that the log hook saw, in their order"
                raise InputError.at("total_lengths", f"of {len(total_lengths)} samples", expected)
            read = getattr(importlib.import_module("routepack.ingest"), self._trainer.reader)
            return window_of(read, spec, rollout.lengths, rollout.routes)

        def log(metrics: Metrics) -> None:
            totals = {UNPLANNED: self._unplanned_total, **metrics}
            if self._log is not None:
                self._log(totals, rollout.rollout_id)
            else:
                self._trainer.log(args, rollout.rollout_id, totals)

        packed = packer.step(window, steps, log)
        return own if packed is steps else schedule_of(packed, own[3])

    def _unplanned(self, error: Exception) -> None:
        self._unplanned_total += 1
        logger.warning("this step keeps the trainer's own layout: %s", error)

    def _packer(self, args: Any, config: Mapping[str, Any]) -> Packer:
        topology = topology_of(args, config)
        token_cap = int(args.max_tokens_per_gpu) * topology.cp
        virtual = (config["vpp_size"] or 1) > 1
        multiple = int(config["microbatch_group_size_per_vp_stage"]) if virtual else 1
        key = (topology, token_cap, multiple)
        if key not in self._packers:
            settings = self._settings
            self._packers[key] = Packer(
                topology,
                token_cap,
                mode=settings.mode,
                cost_model=settings.costs(),
                budget=settings.budget(),
                rows_multiple_of=multiple,
                deadline_seconds=settings.deadline_seconds,
                with_placement=settings.with_placement,
                seed=settings.seed,
                threads=settings.threads,
            )
        return self._packers[key]


def schedules_in(
    find: Callable[[], dict[str, Any]], trainer: Trainer, args: Any
) -> Schedules | None:
    """What makes the schedules, put into the trainer's globals that `find` gives at the first call.

    None where the mode is off: then nothing is looked for. Raises InputError for incompatible
    settings, and for a trainer whose function is another one.
    """
    if Settings.of(getattr(args, "routepack", None)).mode == "off":
        return None
    namespace = find()
    own = namespace.get(NAME)
    if (schedules := getattr(own, "schedules", None)) is not None:
        assert isinstance(schedules, Schedules)
        return schedules
    settings = require_usable(trainer, args)
    found = "absent"
    if callable(own):
        found = f"({', '.join(inspect.signature(own).parameters)})"
    wanted = f"({', '.join(PARAMETERS)})"
    if own is None or found != wanted:
        expected = f"{wanted}; this version of {trainer.name} is not supported"
        raise InputError.at(f"{trainer.name}'s {NAME}", found, expected)
    schedules = Schedules(trainer, settings)
    namespace[NAME] = schedules.replacing(own)
    return schedules


def rows_of(schedule: Schedule) -> list[list[list[list[int]]]]:
    """The rows [M][D] of each optimizer step, in samples of the rollout. Raises InputError."""
    partitions, micro_batch_indices, num_microbatches, _ = schedule
    layout = [
        [[samples[i] for i in micro_batch] for micro_batch in micro_batches]
        for samples, micro_batches in zip(partitions, micro_batch_indices, strict=True)
    ]
    rows = by_row(layout)
    if len(rows) != sum(num_microbatches):
        expected = f"{len(rows)} micro-batches a rank in total"
        raise InputError.at("num_microbatches", num_microbatches, expected)
    steps, start = [], 0
    for count in num_microbatches:
        steps.append(rows[start : start + count])
        start += count
    return steps


def schedule_of(steps: Sequence[Cells], rollouts: list[int]) -> Schedule:
    """The trainer's form of the rows of each optimizer step."""
    layout = by_rank([row for rows in steps for row in rows])
    partitions: list[list[int]] = []
    micro_batch_indices: list[list[list[int]]] = []
    for micro_batches in layout:
        samples: list[int] = []
        indices = []
        for micro_batch in micro_batches:
            indices.append(list(range(len(samples), len(samples) + len(micro_batch))))
            samples.extend(micro_batch)
        partitions.append(samples)
        micro_batch_indices.append(indices)
    return partitions, micro_batch_indices, [len(rows) for rows in steps], rollouts
