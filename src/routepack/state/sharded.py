"""Experts that are sharded further over EDP ranks (FSDP2): who owns which slots then (numpy only).

FSDP shards the experts of an EP rank [E/R, ...] over its EDP ranks. On another dimension than the
first, each of them holds a part of every expert: nothing changes, each EP group moves its parts.
On the first dimension each holds whole experts, E/(R*G) of them: then all R*G ranks are one group,
and a move may be between EDP ranks as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from routepack.errors import InputError


def over_ranks(placement: ArrayLike, rank_of_part: Sequence[int]) -> NDArray[np.int32]:
    """The placement [L, E] as slots of a group whose ranks own the parts in another order.

    placement     [L, E] slots; part p of P is the p-th run of E/P consecutive slots
    rank_of_part  [P] the rank of the group that holds each part

    A group of torch.distributed has its ranks in ascending order; with FSDP2 on the first dimension
    part r * G + g, of EP rank r and EDP rank g, is on the mesh's rank g * R + r. Raises InputError.
    """
    placement_LE = np.asarray(placement)
    parts = len(rank_of_part)
    if sorted(rank_of_part) != list(range(parts)) or placement_LE.shape[-1] % parts:
        expected = f"each rank once, and a divisor of the {placement_LE.shape[-1]} experts"
        raise InputError.at("rank_of_part", list(rank_of_part), expected)
    per_part = placement_LE.shape[-1] // parts
    rank_P = np.asarray(rank_of_part)
    slots_LE = rank_P[placement_LE // per_part] * per_part + placement_LE % per_part
    return np.asarray(slots_LE, np.int32)
