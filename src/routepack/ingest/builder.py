"""A window from samples as they arrive: routes become counts at once and are dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, repeat
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from routepack.counting import MAX_THREADS
from routepack.errors import InputError
from routepack.ingest.sample import SampleRoutes
from routepack.ingest.spec import RouteSpec
from routepack.window import Window

Payload = TypeVar("Payload")
LABELS = ("group", "tag", "step")
PER_THREAD = 8  # samples read ahead by each thread: few, as their routes are held until counted
COUNTS = (
    "samples",
    "samples_without_routes",
    "tokens",
    "captured_rows",
    "missing_rows",
    "missing_last_rows",
    "partial_rows",
    "padding_rows",
    "duplicate_rows",
)


class WindowBuilder:
    """Collects the samples of one optimizer step.

    >>> builder = WindowBuilder(RouteSpec(num_experts=4, top_k=2))
    >>> builder.add(from_rows([[[0, 1]], [[2, 3]]], 3, builder.spec))
    0
    >>> builder.finish().demand_SLE.tolist()
    [[[1, 1, 1, 1]]]
    """

    def __init__(self, spec: RouteSpec, *, model: str = "", source: str = "") -> None:
        self.spec = spec
        self._model, self._source = model, source
        self._lengths: list[int] = []
        self._missing: list[int] = []
        self._labels: dict[str, list[int | None]] = {name: [] for name in LABELS}
        self._demands: list[NDArray[Any]] = []
        self._counts: Counter[str] = Counter()

    def add(
        self,
        sample: SampleRoutes,
        *,
        group: int | None = None,
        tag: int | None = None,
        step: int | None = None,
    ) -> int:
        """Add a sample, with its labels as in a window; returns its index in the window.

        Keeps the counts [L, E], not the routes. Raises InputError for a sample of another model.
        """
        shape = sample.demand_LE.shape
        if self._demands and shape != self._demands[0].shape:
            expected = f"{self._demands[0].shape}, as of the samples before"
            raise InputError.at("demand.shape", shape, expected, len(self._demands))
        length, captured = sample.length, sample.captured
        self._lengths.append(length)
        self._missing.append(length - captured)
        for name, label in zip(LABELS, (group, tag, step), strict=True):
            self._labels[name].append(label)
        self._demands.append(sample.demand_LE)
        counts = self._counts  # `Counter.update` would take as long as counting a short sample
        counts["samples"] += 1
        counts["samples_without_routes"] += captured == 0
        counts["tokens"] += length
        counts["captured_rows"] += captured
        counts["missing_rows"] += length - captured
        counts["missing_last_rows"] += sample.last_missing
        counts["partial_rows"] += sample.partial_rows
        counts["padding_rows"] += sample.padding
        counts["duplicate_rows"] += sample.duplicate_rows
        return len(self._lengths) - 1

    def add_all(
        self,
        read: Callable[[Payload], SampleRoutes],
        payloads: Iterable[Payload],
        *,
        labels: Iterable[Mapping[str, int | None]] | None = None,
        threads: int = 1,
    ) -> None:
        """Add `read(payload)` for every payload, in their order, on several threads.

        labels   for every payload what `add` takes besides the sample

        Reading is numpy and kernels without the GIL. Raises InputError as `read` and `add` do; what
        came before a refused payload has been added.
        """
        if not 1 <= threads <= MAX_THREADS:
            raise InputError.at("threads", threads, f"a whole number in 1..{MAX_THREADS}")
        named: Iterable[Mapping[str, int | None]] = repeat({}) if labels is None else labels
        label = iter(named)
        if threads == 1:
            for payload in payloads:
                self.add(read(payload), **next(label))
            return
        left = iter(payloads)
        with ThreadPoolExecutor(threads) as pool:
            while batch := list(islice(left, PER_THREAD * threads)):
                for sample in pool.map(read, batch):
                    self.add(sample, **next(label))

    def finish(self) -> Window:
        """The window of the samples so far. Raises InputError, as for a window without samples."""
        labels_S = {f"{name}_S": self._label(name) for name in LABELS}
        return Window(
            np.array(self._lengths, np.int64),
            np.stack(self._demands) if self._demands else np.zeros((0, 1, 1), np.uint16),
            self.spec.top_k,
            missing_S=np.array(self._missing, np.int32),
            moe_layers=self.spec.moe_layers or (),
            model=self._model,
            source=self._source,
            **labels_S,
        )

    def _label(self, name: str) -> NDArray[Any] | None:
        labels = self._labels[name]
        if all(label is None for label in labels):
            return None
        if None in labels:
            expected = f"a {name}, as other samples have one"
            raise InputError.at(name, None, expected, labels.index(None))
        return np.array(labels)

    def summary(self) -> dict[str, int]:
        """What the samples so far were made of; every value a count.

        tokens = captured_rows + missing_rows. Of the missing rows, missing_last_rows are last
        tokens, which engines do not run, and partial_rows had routes at some MoE layers only.
        padding_rows are no tokens. duplicate_rows were recorded again later, and do not count.
        """
        return {name: self._counts[name] for name in COUNTS}
