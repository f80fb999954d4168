"""What `+routepack.*` and the rest of verl's configuration say about a run.

Works on plain dictionaries, verl's configuration resolved: nothing here needs verl or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from routepack.budget import Budget
from routepack.cost import CostModel
from routepack.errors import InputError
from routepack.files import read_plan
from routepack.topology import Topology

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"

# Keys, under the strategy's own table, of the ranks that share one sample: its tokens are spread
# over them, and verl multiplies max_token_len_per_gpu by their number (`sp_size`).
SEQUENCE_RANKS = {
    "megatron": "megatron.context_parallel_size",
    "fsdp": "fsdp_config.ulysses_sequence_parallel_size",
    "fsdp2": "fsdp_config.ulysses_sequence_parallel_size",
    "veomni": "veomni.ulysses_parallel_size",
}


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of `+routepack.*`.

    topology                TOML; default: from actor_rollout_ref.actor.megatron
    cost_model              TOML; default: that of routepack.plan
    placement               a plan whose placement the trainer holds; default contiguous experts
    seconds, evaluations    budget of a step's plans, as in routepack.Budget; default 1 second
    threads, seed           as in routepack.plan
    keep_step_membership    each sample stays in the optimizer step that verl's balancing put it in;
                            false lets the plan choose
    count_on                "workers" count the routes in parallel, or the "driver" all of them
    num_experts             default: from the model's config
    allow_changed_loss      settings of verl, named in full, whose loss depends on packing
    """

    topology: str | None = None
    cost_model: str | None = None
    placement: str | None = None
    seconds: float | None = None
    evaluations: int | None = None
    threads: int | None = None
    seed: int = 0
    keep_step_membership: bool = True
    count_on: str = "workers"
    num_experts: int | None = None
    allow_changed_loss: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        """From verl's configuration. Raises InputError."""
        try:
            settings = msgspec.convert(config.get("routepack") or {}, cls, strict=True)
        except msgspec.ValidationError as error:
            raise InputError(f"routepack: {error}") from None
        if settings.count_on not in ("workers", "driver"):
            raise InputError.at("routepack.count_on", settings.count_on, "'workers' or 'driver'")
        return settings

    @property
    def budget(self) -> Budget:
        """Of a step's plans. Raises InputError for both seconds and evaluations, or bad ones."""
        if self.seconds is None and self.evaluations is None:
            return Budget(seconds=1.0)
        return Budget(seconds=self.seconds, evaluations=self.evaluations)


@dataclass(frozen=True, eq=False)
class Run:
    """What the plans of a run need to know.

    token_cap         C of the update: tokens of a micro-batch on one DP rank
    pass_caps         those of the log-probability passes that plans serve too, none smaller
    short_caps        those of passes whose cap is smaller: they keep verl's own layout
    mini_batch        samples of an optimizer step, over all DP ranks
    rows_multiple_of  of interleaved pipelines
    """

    settings: Settings
    budget: Budget
    topology: Topology
    cost_model: CostModel | None
    placement_LE: NDArray[np.int32] | None
    token_cap: int
    pass_caps: tuple[int, ...]
    short_caps: tuple[int, ...]
    mini_batch: int
    rows_multiple_of: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Run:
        """From verl's configuration. Raises InputError, one line that names the setting."""
        settings = Settings.of(config)
        ranks = sequence_ranks(config)
        token_cap = _whole(config, f"{ACTOR}.ppo_max_token_len_per_gpu") * ranks
        others = {_whole(config, f"{ROLLOUT}.log_prob_max_token_len_per_gpu") * ranks}
        if get(config, f"{ACTOR}.use_kl_loss") or get(config, "algorithm.use_kl_in_reward"):
            ref_ranks = sequence_ranks(config, REF) if get(config, REF) else ranks
            others.add(_whole(config, f"{REF}.log_prob_max_token_len_per_gpu") * ref_ranks)
        placement_LE = None
        if settings.placement is not None:
            placement_LE = read_plan(settings.placement).checked_placement_LE()
        mini_batch = _whole(config, f"{ACTOR}.ppo_mini_batch_size")
        return cls(
            settings=settings,
            budget=settings.budget,
            topology=topology_of(config, settings),
            cost_model=CostModel.from_toml(settings.cost_model) if settings.cost_model else None,
            placement_LE=placement_LE,
            token_cap=token_cap,
            pass_caps=tuple(sorted(cap for cap in others if cap > token_cap)),
            short_caps=tuple(sorted(cap for cap in others if cap < token_cap)),
            mini_batch=mini_batch * _whole(config, f"{ROLLOUT}.n"),
            rows_multiple_of=_rows_multiple_of(config),
        )


def get(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path; `default` where it is missing or null."""
    value: Any = config
    for key in path.split("."):
        if not isinstance(value, Mapping) or value.get(key) is None:
            return default
        value = value[key]
    return value


def strategy_of(config: Mapping[str, Any]) -> str:
    """The training engine: megatron, fsdp, ..."""
    return str(get(config, f"{ACTOR}.strategy", "fsdp"))


def sequence_ranks(config: Mapping[str, Any], model: str = ACTOR) -> int:
    """`sp_size` of verl: ranks that share the tokens of one sample. Raises InputError."""
    strategy = strategy_of(config)
    if strategy not in SEQUENCE_RANKS:
        expected = "one of " + ", ".join(SEQUENCE_RANKS)
        raise InputError.at(f"{ACTOR}.strategy", strategy, expected)
    ranks = int(get(config, f"{model}.{SEQUENCE_RANKS[strategy]}", 1))
    if strategy.startswith("fsdp"):  # the older of two keys, which verl lets win where it is set
        ranks = max(ranks, int(get(config, f"{model}.ulysses_sequence_parallel_size", 1)))
    return ranks


def topology_of(config: Mapping[str, Any], settings: Settings) -> Topology:
    """The parallel layout: the file of the settings, or what Megatron makes of the sizes."""
    if settings.topology is not None:
        return Topology.from_toml(settings.topology)
    if strategy_of(config) != "megatron":
        expected = "megatron, or +routepack.topology=FILE that names the ranks of an EP group"
        raise InputError.at(f"{ACTOR}.strategy", strategy_of(config), expected)
    table = f"{ACTOR}.megatron"
    tp = int(get(config, f"{table}.tensor_model_parallel_size", 1))
    pp = int(get(config, f"{table}.pipeline_model_parallel_size", 1))
    cp = int(get(config, f"{table}.context_parallel_size", 1))
    ep = int(get(config, f"{table}.expert_model_parallel_size", 1))
    etp = int(get(config, f"{table}.expert_tensor_parallel_size", tp))  # Megatron's default
    world = _whole(config, "trainer.n_gpus_per_node") * _whole(config, "trainer.nnodes")
    if world % (tp * pp * cp):
        expected = f"a multiple of tp * pp * cp = {tp * pp * cp}"
        raise InputError.at("trainer.n_gpus_per_node * trainer.nnodes", world, expected)
    dp = world // (tp * pp * cp)
    if dp * tp * cp % (ep * etp):
        expected = f"a multiple of expert_model_parallel_size * tensor size of experts = {ep * etp}"
        raise InputError.at("dp * tp * cp", dp * tp * cp, expected)
    edp = dp * tp * cp // (ep * etp)
    topology = Topology(dp=dp, ep=ep, edp=edp, tp=tp, cp=cp, pp=pp, etp=etp)
    topology.require_plannable()
    return topology


def _rows_multiple_of(config: Mapping[str, Any]) -> int:
    """`num_batches_divided_by` of verl's Megatron engine."""
    table = f"{ACTOR}.megatron"
    if strategy_of(config) != "megatron":
        return 1
    if int(get(config, f"{table}.virtual_pipeline_model_parallel_size", 1)) <= 1:
        return 1
    stages = int(get(config, f"{table}.pipeline_model_parallel_size", 1))  # Megatron's default
    override = f"{table}.override_transformer_config.microbatch_group_size_per_vp_stage"
    return int(get(config, override, stages))


def _whole(config: Mapping[str, Any], path: str) -> int:
    value = get(config, path)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError.at(path, repr(value), "a whole number of at least 1")
    return value
