"""Recorded routes to demand: how many (token, k) assignments each expert gets from each sample.

Shapes: N token rows of all samples, L MoE layers, K experts per token, S samples, E experts.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from routepack.errors import InputError
from routepack.kernels.bitcounting import EXPERTS, as_words, count_words, make_bit_scratch
from routepack.kernels.counting import OK, OUT_OF_RANGE, count_block, make_scratch

ID_TYPES = tuple(np.dtype(t) for t in (np.uint8, np.uint16, np.int16, np.int32, np.int64))
MAX_EXPERTS = 2**16 - 1  # leaves one 16-bit id that is never valid, for ids that do not fit
MAX_THREADS = 1024  # far above any use; a typing slip must not start a million threads
CHUNK_IDS = 2**17  # ids copied at a time where the kernel cannot read the input in place


def count_routes(
    routes_NLK: NDArray[Any],
    offsets_S1: NDArray[np.int64],
    num_experts: int,
    *,
    threads: int = 1,
) -> NDArray[np.uint16 | np.uint32]:
    """Demand [S, L, E] of every sample, in (token, k) assignments.

    routes_NLK   logical expert ids 0..E-1: uint8, uint16, int16, int32 or int64, native byte order.
                 uint8, uint16 and int16 in C order are read in place (memory-mapped, read-only);
                 anything else is copied in chunks of CHUNK_IDS per thread, never as a whole.
    offsets_S1   int64; sample s owns token rows offsets[s]:offsets[s+1]. A sample may have none.
    num_experts  E, from the model's config: experts that no token chose must count too.
    threads      samples are divided among them; the result and a reported error do not depend on it

    The counts are uint16 if every sample has fewer than 65536 token rows, else uint32.

    Raises InputError for a wrong type or shape, for offsets that do not rise from 0 to N, and for
    the first id, in (token row, layer, k) order, that is no expert or repeats within its K ids.
    """
    routes_NLK, offsets_S1 = np.asarray(routes_NLK), np.asarray(offsets_S1)
    _check_arguments(routes_NLK, offsets_S1, num_experts, threads)
    rows, layers, top_k = routes_NLK.shape
    samples = len(offsets_S1) - 1
    longest = int(np.diff(offsets_S1).max(initial=0))
    count_type = np.uint16 if longest < 2**16 else np.uint32
    demand_SLE = np.zeros((samples, layers, num_experts), count_type)

    # Equal token rows a thread; every cut lies between two samples, so no counter is shared.
    cuts = np.searchsorted(offsets_S1, np.linspace(0, rows, threads + 1).astype(np.int64))
    cuts[0], cuts[-1] = 0, samples
    parts = [(int(a), int(b)) for a, b in pairwise(cuts) if a < b]

    def count(part: tuple[int, int]) -> tuple[int, int]:
        first, last = part
        own_S1, own_SLE = offsets_S1[first : last + 1], demand_SLE[first:last]
        if _count_words(routes_NLK, own_S1, own_SLE):
            return OK, 0
        return _count_samples(routes_NLK, own_S1, num_experts, own_SLE)

    if len(parts) > 1:
        with ThreadPoolExecutor(len(parts)) as pool:
            results = list(pool.map(count, parts))
    else:
        results = [count(part) for part in parts]
    # Parts are in token order and each stops at its own first violation.
    for code, position in results:
        if code != OK:
            index = tuple(int(i) for i in np.unravel_index(position, routes_NLK.shape))
            expected = f"{top_k} distinct experts in a token row, it repeats"
            if code == OUT_OF_RANGE:
                expected = f"an expert id in 0..{num_experts - 1}"
            raise InputError.at("routes", int(routes_NLK[index]), expected, index)
    return demand_SLE


def _count_words(
    routes_NLK: NDArray[Any], offsets_S1: NDArray[np.int64], demand_SLE: NDArray[Any]
) -> bool:
    """Count by the faster kernel; False, and nothing counted, if it cannot or an id is wrong."""
    if not (routes_NLK.flags.c_contiguous and demand_SLE.dtype == np.uint16):
        return False
    if demand_SLE.shape[2] > EXPERTS:
        return False
    scratch = make_bit_scratch()
    for s, (start, stop) in enumerate(pairwise(offsets_S1.tolist())):
        words_X = as_words(routes_NLK[start:stop])
        if words_X is None or not count_words(words_X, demand_SLE[s], *scratch):
            demand_SLE[: s + 1] = 0
            return False
    return True


def _count_samples(
    routes_NLK: NDArray[Any],
    offsets_S1: NDArray[np.int64],
    num_experts: int,
    demand_SLE: NDArray[Any],
) -> tuple[int, int]:
    """Count samples with token rows `offsets_S1`; (code, flat position in the routes)."""
    _, layers, top_k = routes_NLK.shape
    # A negative id, seen as unsigned, lies above the positive range of its own type.
    top = min(num_experts - 1, int(np.iinfo(routes_NLK.dtype).max))
    ids_NLK = routes_NLK.view(f"u{routes_NLK.itemsize}")
    row_ids = layers * top_k
    start, stop = int(offsets_S1[0]), int(offsets_S1[-1])
    in_place = ids_NLK.itemsize <= 2 and ids_NLK.flags.c_contiguous and ids_NLK.flags.aligned
    step = max(1, stop - start if in_place else CHUNK_IDS // row_ids)
    id_type = np.dtype(np.uint8 if ids_NLK.itemsize == 1 else np.uint16)
    scratch = make_scratch(top_k, id_type)
    chunk = None
    if not in_place:
        chunk = np.empty((min(step, stop - start), layers, top_k), id_type)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        block = ids_NLK[begin:end]
        if chunk is not None:
            source, block, limit = block, chunk[: end - begin], np.iinfo(chunk.dtype).max
            # An id beyond 16 bits becomes the one that is never valid: 65536 must not read as 0.
            if source.itemsize > chunk.itemsize and source.max() > limit:
                source = np.minimum(source, limit)
            np.copyto(block, source, casting="unsafe")
        # The samples with rows in this chunk, and where they lie within it.
        first = int(np.searchsorted(offsets_S1, begin, side="right")) - 1
        last = int(np.searchsorted(offsets_S1, end, side="left"))
        own_S1 = np.clip(offsets_S1[first : last + 1], begin, end) - begin
        code, position = count_block(
            block.reshape(-1), own_S1, top_k, id_type.type(top), demand_SLE[first:last], *scratch
        )
        if code != OK:
            return code, begin * row_ids + position
    return OK, 0


def _check_arguments(
    routes_NLK: NDArray[Any], offsets_S1: NDArray[Any], num_experts: Any, threads: Any
) -> None:
    if routes_NLK.dtype not in ID_TYPES:
        names = ", ".join(map(str, ID_TYPES))
        raise InputError.at("routes.dtype", routes_NLK.dtype, f"one of {names}")
    shape = routes_NLK.shape
    if len(shape) != 3 or 0 in shape[1:]:
        raise InputError.at("routes.shape", shape, "(N, L, K) with at least 1 layer and 1 expert")
    _check_whole("num_experts", num_experts, MAX_EXPERTS)
    if shape[2] > num_experts:
        raise InputError.at("routes.shape", shape, f"(N, L, K) with K of at most E = {num_experts}")
    _check_whole("threads", threads, MAX_THREADS)
    if offsets_S1.dtype != np.int64:
        raise InputError.at("offsets.dtype", offsets_S1.dtype, "int64")
    if offsets_S1.ndim != 1 or not offsets_S1.size:
        raise InputError.at("offsets.shape", offsets_S1.shape, "(S + 1,)")
    if offsets_S1[0] != 0:
        raise InputError.at("offsets", int(offsets_S1[0]), "0, the first token row", 0)
    if (falls := np.flatnonzero(offsets_S1[1:] < offsets_S1[:-1])).size:
        i = int(falls[0]) + 1
        expected = f"at least offsets[{i - 1}] = {offsets_S1[i - 1]}"
        raise InputError.at("offsets", int(offsets_S1[i]), expected, i)
    if offsets_S1[-1] != shape[0]:
        last = len(offsets_S1) - 1
        expected = f"{shape[0]}, the number of token rows in routes"
        raise InputError.at("offsets", int(offsets_S1[-1]), expected, last)


def _check_whole(name: str, value: Any, high: int) -> None:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or not 1 <= value <= high:
        raise InputError.at(name, value, f"a whole number in 1..{high}")
