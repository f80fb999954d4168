"""A run's session on the driver: plan each batch after verl's own balancing.

One process drives all workers, so one plan is made, and nothing has to agree but the workers that
carry it out (`microbatch`). Whatever fails in a step leaves the batch as verl balanced it, without
a column: verl's own layout, one warning, and a count in `routepack/fallback_steps`.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.estimate import fill_missing
from routepack.integrations.observe import PREFIX, Metrics
from routepack.integrations.verl import microbatch, routes
from routepack.integrations.verl.checks import require_same_loss, require_usable
from routepack.integrations.verl.column import NAME, STAMP_BITS, Layout, Row
from routepack.integrations.verl.observe import load_of, metrics_of, own_layout, splitter
from routepack.integrations.verl.settings import Run
from routepack.window import Window

logger = logging.getLogger(__name__)


class Session:
    """One trainer's run."""

    def __init__(self, config: Mapping[str, Any], mode: str) -> None:
        """Raises InputError, one line that names the setting."""
        self.mode = mode
        self.run = Run.of(config)
        require_usable(config, self.run)
        if mode == "pack":
            require_same_loss(config, self.run.settings.allow_changed_loss)
        self.model_config = config["actor_rollout_ref"]["model"]
        self.fallbacks = 0
        self.packed = False  # whether the last batch was
        self.unfollowed = False  # whether the workers ever left a packed batch to verl
        self.worker_counts: Counter[str] = Counter()
        self.observer: ThreadPoolExecutor | None = None
        self.observed: Future[Metrics] | None = None
        for cap in self.run.short_caps:
            logger.warning(
                "routepack: passes with a cap of %d tokens keep verl's own layout: expected at"
                " least %d, the update's", cap, self.run.token_cap,
            )  # fmt: skip

    def step(self, batch: Any, metrics: dict[str, Any], queue: Any, workers: Sequence[Any]) -> None:
        """Plan a balanced batch; never raises, and changes nothing when it fails or observes."""
        try:
            if self.mode == "pack" and workers:
                metrics.update(self._followed(workers))
            self.packed = False
            if len(batch) % self.run.mini_batch == 0:  # else no optimizer step follows: warming up
                if self.mode == "pack":
                    metrics.update(self._pack(batch, queue, workers))
                else:
                    metrics.update(self._observe(batch, queue, workers))
        except Exception as error:
            if not self.fallbacks:
                logger.warning(
                    "routepack: verl's own layout is used where planning fails: %s: %s",
                    type(error).__name__, error,
                )  # fmt: skip
            self.fallbacks += 1
        metrics[f"{PREFIX}fallback_steps"] = float(self.fallbacks)

    def _followed(self, workers: Sequence[Any]) -> Metrics:
        """What the workers did since the last batch: as all do alike, one is asked."""
        import ray

        counts = Counter(ray.get(workers[0].__ray_call__.remote(microbatch.counts)))
        new, self.worker_counts = counts - self.worker_counts, counts
        if self.packed and not new["followed"] and not self.unfollowed:
            self.unfollowed = True
            logger.warning("routepack: the workers followed none of the last batch's plans")
        outcomes = ("followed", "declined", "fell_back")
        return {f"{PREFIX}passes/{outcome}": float(new[outcome]) for outcome in outcomes}

    def _pack(self, batch: Any, queue: Any, workers: Sequence[Any]) -> Metrics:
        started = time.perf_counter()
        window = self._window(batch, self._count(batch, queue, workers))
        counted = time.perf_counter()
        steps, stamp = self._plan(window)
        caps = (self.run.token_cap, *self.run.pass_caps)
        layout = Layout.of(
            steps, window.lengths_S, caps,
            stamp=stamp, rows_multiple_of=self.run.rows_multiple_of,
        )  # fmt: skip
        planned = time.perf_counter()
        metrics = self._compare(window, steps)
        # where verl's own layout is as good it stays, unless it breaks the cap, as 0.9.0's can
        worth = metrics[f"{PREFIX}predicted_ratio"] < 1 or metrics[f"{PREFIX}own/above_cap"] > 0
        if worth:
            import torch
            from tensordict import TensorDict

            column = TensorDict({NAME: torch.from_numpy(layout.column_SC)}, batch_size=len(batch))
            queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=column)
            if batch.fields is not None:  # what the workers fetch; all fields if there is no list
                batch.fields = [*batch.fields, NAME]
            batch.reorder(layout.order)  # last: until here the batch is as verl balanced it
        self.packed = worth
        return metrics | {
            f"{PREFIX}packed": float(worth),
            f"{PREFIX}counting_seconds": counted - started,
            f"{PREFIX}planning_seconds": planned - counted,
            f"{PREFIX}exposed_seconds": time.perf_counter() - started,
        }

    def _observe(self, batch: Any, queue: Any, workers: Sequence[Any]) -> Metrics:
        """Plans beside the step, in a thread; reports the latest that is ready."""
        started = time.perf_counter()
        ready: Metrics = {}
        if self.observed is not None:
            if not self.observed.done():
                return {}  # a plan that takes longer than a step: this batch is left out
            job, self.observed = self.observed, None
            ready = job.result()
        counting = self._count(batch, queue, workers)
        lengths = _lengths(batch)
        if self.observer is None:
            self.observer = ThreadPoolExecutor(1, thread_name_prefix="routepack")
        self.observed = self.observer.submit(self._look, lengths, counting)
        return ready | {f"{PREFIX}exposed_seconds": time.perf_counter() - started}

    def _look(self, lengths: list[int], counting: list[Any]) -> Metrics:
        started = time.perf_counter()
        window = fill_missing(routes.window_of(lengths, _received(counting)))
        counted = time.perf_counter()
        steps, _ = self._plan(window)
        planned = time.perf_counter()
        return self._compare(window, steps) | {
            f"{PREFIX}counting_seconds": counted - started,
            f"{PREFIX}planning_seconds": planned - counted,
        }

    def _count(self, batch: Any, queue: Any, workers: Sequence[Any]) -> list[Any]:
        """Counts of the batch's routes, or references to them."""
        lengths, keys = _lengths(batch), list(batch.keys)
        if self.run.settings.count_on == "workers":
            parts = (keys, batch.partition_id, lengths, self.num_experts)
            return routes.count_on_workers(workers, *parts)
        fetch = routes.fetcher(queue, batch.partition_id)
        return [routes.count(keys, lengths, self.num_experts, fetch)]

    def _window(self, batch: Any, counting: list[Any]) -> Window:
        return fill_missing(routes.window_of(_lengths(batch), _received(counting)))

    def _plan(self, window: Window) -> tuple[list[list[Row]], int]:
        """Rows of each optimizer step, and the stamp of their plans."""
        import routepack

        run, settings = self.run, self.run.settings
        count = window.samples // run.mini_batch
        steps: int | NDArray[np.int32] = count
        if settings.keep_step_membership:
            steps = membership(window.samples, run.topology.dp, count)
        plans = routepack.plan_steps(
            window,
            run.topology,
            token_cap=run.token_cap,
            steps=steps,
            cost_model=run.cost_model,
            budget=run.budget,
            current_placement=run.placement_LE,
            fixed_placement=True,
            requirements=routepack.Requirements(
                equal_samples_per_rank=True, rows_multiple_of=run.rows_multiple_of
            ),
            seed=settings.seed,
            threads=settings.threads,
        )
        digest = hashlib.sha256(window.sha256.encode() + plans.to_bytes()).digest()
        stamp = int.from_bytes(digest[:8], "big") % 2**STAMP_BITS
        return [list(plan.rows) for plan in plans.plans], stamp

    def _compare(self, window: Window, steps: list[list[Row]]) -> Metrics:
        """Metrics of the plans beside verl's own layout of the same batch."""
        from verl.utils.seqlen_balancing import rearrange_micro_batches

        run = self.run
        split = splitter(rearrange_micro_batches, run.token_cap, run.rows_multiple_of)
        own = own_layout(split, window.lengths_S, ranks=run.topology.dp, steps=len(steps))
        tokens = [window.lengths_S[cell].sum() for step in own for row in step for cell in row]
        above_cap = sum(int(cell) > run.token_cap for cell in tokens)
        metrics = metrics_of(load_of(window, run, own), load_of(window, run, steps))
        return metrics | {f"{PREFIX}own/above_cap": float(above_cap)}

    @functools.cached_property
    def num_experts(self) -> int:
        """E, from the settings or from the model's config, which verl reads."""
        if self.run.settings.num_experts is not None:
            return self.run.settings.num_experts
        from verl.trainer.ppo.metric_utils import infer_rollout_moe_num_experts

        found = infer_rollout_moe_num_experts(self.model_config)
        if found is None:
            raise InputError.at("routepack.num_experts", found, "set, the model's config has none")
        return int(found)


def membership(samples: int, ranks: int, steps: int) -> NDArray[np.int32]:
    """[S] optimizer step of each sample of a balanced batch: verl cuts a rank's part in order."""
    return np.tile(np.repeat(np.arange(steps, dtype=np.int32), samples // ranks // steps), ranks)


def _lengths(batch: Any) -> list[int]:
    return [int(tag["seq_len"]) for tag in batch.tags]


def _received(counting: list[Any]) -> list[routes.Counted]:
    """The counts themselves, where they are still references."""
    if all(isinstance(part, routes.Counted) for part in counting):
        return counting
    import ray

    return list(ray.get(counting))
