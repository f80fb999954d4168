"""Topology: shards as Megatron builds them, and refusals that name field, value and expectation."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack.errors import InfeasibleError, InputError
from routepack.topology import DEFAULT_ORDER, Topology

KEYS = "tp, cp, pp, dp, ep, etp, order"


def from_sizes(
    *, dp: int, ep: int, tp: int = 1, cp: int = 1, pp: int = 1, etp: int = 1, order: str = ""
) -> Topology:
    """A topology as a file would give it, edp following from the other sizes."""
    edp = dp * tp * cp // (ep * etp)
    return Topology(dp, ep, edp, tp, cp, pp, etp, order or DEFAULT_ORDER)


def write(folder: Path, text: str) -> Path:
    path = folder / "t.toml"
    path.write_text(text)
    return path


def toml(**changes: object) -> str:
    values: dict[str, object] = {"tp": 2, "cp": 1, "pp": 1, "dp": 8, "ep": 8, "etp": 1}
    values |= {"order": DEFAULT_ORDER} | changes
    lines = [f"{k} = {repr(v).lower()}" for k, v in values.items() if v is not None]
    return "\n".join(lines)


# The 16-rank table measured on Megatron-Core: (tp, cp, ep, etp, pp) and the groups of DP ranks.
MEGATRON_16 = [
    ((1, 1, 8, 1, 1), (tuple(range(8)), tuple(range(8, 16)))),
    ((2, 1, 8, 1, 1), ((0, 1, 2, 3), (4, 5, 6, 7))),
    ((4, 2, 8, 1, 1), ((0,), (1,))),
    ((4, 2, 4, 1, 1), ((0,), (0,), (1,), (1,))),
    ((2, 1, 4, 2, 1), ((0, 1, 2, 3), (4, 5, 6, 7))),
    ((2, 2, 8, 1, 2), ((0, 1),)),
]


@pytest.mark.parametrize(("sizes", "groups"), MEGATRON_16)
def test_groups_equal_those_measured_on_megatron(
    sizes: tuple[int, ...], groups: tuple[tuple[int, ...], ...]
) -> None:
    """Every row of the 16-rank table comes out; only the fourth has DP ranks in two groups."""
    tp, cp, ep, etp, pp = sizes
    topology = from_sizes(dp=16 // (tp * cp * pp), ep=ep, tp=tp, cp=cp, pp=pp, etp=etp)
    assert topology.groups == groups
    assert topology.edp == len(groups)
    assert topology.spans == (sizes == (4, 2, 4, 1, 1))


def groups_by_enumeration(topology: Topology) -> list[set[int]]:
    """The same from the definition: walk both grids rank by rank, the first axis fastest."""
    t, order = topology, topology.order.split("-")
    dense = {"tp": t.tp, "cp": t.cp, "ep": 1, "dp": t.dp, "pp": t.pp}
    expert = {"tp": t.etp, "cp": 1, "ep": t.ep, "dp": t.edp, "pp": t.pp}

    def dp_index_of_ranks(sizes: dict[str, int]) -> list[int]:
        walk = itertools.product(*(range(sizes[axis]) for axis in reversed(order)))
        return [index[len(order) - 1 - order.index("dp")] for index in walk]

    groups: list[set[int]] = [set() for _ in range(t.edp)]
    pairs = zip(dp_index_of_ranks(expert), dp_index_of_ranks(dense), strict=True)
    for shard, dp in pairs:
        groups[shard].add(dp)
    return groups


SIZE = st.sampled_from([1, 2, 3, 4])


@given(
    tp=SIZE, cp=SIZE, ep=SIZE, etp=SIZE, edp=SIZE, pp=st.sampled_from([1, 2]),
    order=st.permutations(DEFAULT_ORDER.split("-")).map("-".join),
)  # fmt: skip
def test_groups_equal_an_enumeration_for_every_order(
    tp: int, cp: int, ep: int, etp: int, edp: int, pp: int, order: str
) -> None:
    """For any sizes and order Megatron accepts, groups match a rank-by-rank walk of both grids,
    and a topology that does not span has D/G DP ranks in every shard."""
    expert = ep * etp * edp
    dp = expert // (tp * cp)
    if dp * tp * cp != expert or dp == 0:
        return
    try:
        topology = Topology(dp, ep, edp, tp, cp, pp, etp, order)
    except InputError:
        assert pp > 1
        assert not order.endswith("pp")
        return
    assert [set(group) for group in topology.groups] == groups_by_enumeration(topology)
    assert all(group == tuple(sorted(group)) for group in topology.groups)
    if tp * cp > ep * etp:
        assert topology.spans
    if not topology.spans:
        assert {len(group) for group in topology.groups} == {topology.ranks_per_shard}
        assert all(dp in topology.groups[g] for dp, g in enumerate(topology.shard_of_dp))


def test_shards_need_not_be_consecutive() -> None:
    """With dp before ep in the order, neighbouring DP ranks belong to different EP groups."""
    topology = from_sizes(dp=8, ep=4, order="tp-cp-dp-ep-pp")
    assert topology.shard_of_dp == (0, 1, 0, 1, 0, 1, 0, 1)
    assert topology.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert topology.ranks_per_shard == 4


def test_flags_default_to_one_dp_rank_per_ep_rank() -> None:
    """Without --edp, G = D/R and shards are blocks of R consecutive DP ranks."""
    topology = Topology.of(dp=16, ep=8)
    assert topology == Topology(dp=16, ep=8, edp=2)
    assert topology.shard_of_dp == (0,) * 8 + (1,) * 8


def test_explicit_edp_gives_consecutive_blocks() -> None:
    """--edp may be any divisor of dp, also where D < R because of tensor parallelism."""
    assert Topology.of(dp=2, ep=8, edp=1).groups == ((0, 1),)
    assert Topology.of(dp=6, ep=8, edp=3).shard_of_dp == (0, 0, 1, 1, 2, 2)


def test_a_dp_rank_in_two_ep_groups_is_represented_but_not_plannable() -> None:
    """ep*etp < tp*cp: the groups are known; whatever needs one shard per DP rank is refused."""
    topology = from_sizes(dp=2, ep=4, tp=4, cp=2)
    message = (
        "ep * etp = 4: expected a multiple of tp * cp = 8, or a DP rank spans several EP groups"
    )
    for need in (
        topology.require_plannable,
        lambda: topology.shard_of_dp,
        lambda: topology.ranks_per_shard,
    ):
        with pytest.raises(InfeasibleError) as error:
            need()
        assert str(error.value) == message


def test_an_order_that_splits_dp_ranks_is_not_plannable() -> None:
    """Sizes that would do, but dp varies faster than ep: tp neighbours land in different groups."""
    topology = from_sizes(dp=4, ep=4, tp=2, order="tp-cp-dp-ep-pp")
    assert topology.groups == ((0, 1, 2, 3), (0, 1, 2, 3))
    with pytest.raises(InfeasibleError) as error:
        topology.require_plannable()
    assert str(error.value) == (
        "order = 'tp-cp-dp-ep-pp': expected an order in which no DP rank spans several EP groups"
    )


def test_pipeline_may_come_before_dp_only_where_the_grids_agree() -> None:
    """Megatron requires dp == edp and equal pipeline groups unless the order ends in pp."""
    order = "tp-cp-ep-pp-dp"
    assert from_sizes(dp=4, ep=2, tp=2, pp=2, order=order).shard_of_dp == (0, 1, 2, 3)
    refused = (
        (order, {"dp": 4, "ep": 2}),  # dp != edp
        ("tp-ep-pp-cp-dp", {"dp": 2, "ep": 4, "cp": 4}),  # dp == edp, but cp comes after pp
    )
    for order, sizes in refused:
        with pytest.raises(InputError) as error:
            from_sizes(**sizes, pp=2, order=order)
        assert str(error.value) == (
            f"order = '{order}': expected an order that ends in pp, "
            "as dense and expert pipeline groups differ"
        )


@pytest.mark.parametrize("name", ["dp", "ep", "edp", "tp", "cp", "pp", "etp"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8", None])
def test_sizes_are_positive_integers(name: str, value: object) -> None:
    """Zero, negative, fractional, boolean and textual sizes are refused, on every axis."""
    sizes: dict[str, object] = {"dp": 8, "ep": 8, "edp": 1, name: value}
    with pytest.raises(InputError) as error:
        Topology(**sizes)  # type: ignore[arg-type]  # the point of the test
    assert str(error.value) == f"{name} = {value!r}: expected an integer in 1..4194304"


@pytest.mark.parametrize("order", ["tp-cp-ep-dp", "tp-cp-ep-dp-dp", "tp cp ep dp pp", "", 5])
def test_order_is_a_permutation(order: object) -> None:
    """Missing, doubled or unknown axes are refused."""
    with pytest.raises(InputError) as error:
        Topology(8, 8, 1, order=order)  # type: ignore[arg-type]  # the point of the test
    assert str(error.value) == f"order = {order!r}: expected a permutation of tp-cp-ep-dp-pp"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"dp": 2, "ep": 8},
            "dp = 2: expected a multiple of ep = 8, unless --edp or a topology file is given",
        ),
        ({"dp": 0, "ep": 8}, "dp = 0: expected an integer in 1..4194304"),
        ({"dp": 8, "ep": 0}, "ep = 0: expected an integer in 1..4194304"),
        ({"dp": 8, "ep": 8, "edp": 3}, "edp = 3: expected a divisor of dp = 8"),
        ({"dp": 8, "ep": 8, "edp": 0}, "edp = 0: expected an integer in 1..4194304"),
    ],
)
def test_flags_that_do_not_fit(flags: dict[str, int], message: str) -> None:
    """Each refusal of the flags names the flag, its value and the way out."""
    with pytest.raises(InputError) as error:
        Topology.of(**flags)
    assert str(error.value) == message


def test_edp_must_follow_from_known_sizes() -> None:
    """Once tensor or context sizes are given, no other edp is possible."""
    with pytest.raises(InputError) as error:
        Topology(dp=8, ep=8, edp=4, tp=2)
    assert str(error.value) == "edp = 4: expected dp * tp * cp / (ep * etp) = 16 / 8"


def test_file_gives_what_its_sizes_imply(tmp_path: Path) -> None:
    """A topology file is read; edp follows."""
    topology = Topology.from_toml(write(tmp_path, toml()))
    assert topology == Topology(dp=8, ep=8, edp=2, tp=2)
    assert Topology.from_toml(str(write(tmp_path, toml(cp=4, tp=4, dp=2, ep=8)))).spans


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (toml(edp=2), f"unknown key 'edp': expected exactly the keys {KEYS}"),
        (toml(etp=None), f"missing key 'etp': expected exactly the keys {KEYS}"),
        (toml(dp=8.0), "dp = 8.0: expected an integer in 1..4194304"),
        (toml(tp=True), "tp = True: expected an integer in 1..4194304"),
        (toml(order="dp"), "order = 'dp': expected a permutation of tp-cp-ep-dp-pp"),
        (toml(dp=3, tp=1), "dp * tp * cp = 3: expected a multiple of ep * etp = 8"),
        ("dp 8", "Expected '=' after a key in a key/value pair (at line 1, column 4)"),
    ],
)
def test_file_errors(tmp_path: Path, text: str, message: str) -> None:
    """Every defect of a topology file is one line that starts with its path."""
    path = write(tmp_path, text)
    with pytest.raises(InputError) as error:
        Topology.from_toml(path)
    assert str(error.value) == f"{path}: {message}"


def test_unreadable_files(tmp_path: Path) -> None:
    """A missing file, a folder and bytes that are not UTF-8 are refused in one line."""
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe")
    reasons = {
        tmp_path / "absent.toml": "expected a topology file, No such file or directory",
        tmp_path: "expected a topology file, Is a directory",
        binary: "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    }
    for path, reason in reasons.items():
        with pytest.raises(InputError) as error:
            Topology.from_toml(path)
        assert str(error.value) == f"{path}: {reason}"


@pytest.mark.parametrize(
    "topology",
    [
        Topology.of(dp=2, ep=8, edp=1),
        from_sizes(dp=2, ep=4, tp=4, cp=2),
        from_sizes(dp=8, ep=4, order="tp-cp-dp-ep-pp"),
    ],
)
def test_dictionary_round_trip(topology: Topology) -> None:
    """to_dict has the plan file's keys and from_dict restores the topology, shards included."""
    data = topology.to_dict()
    assert list(data) == ["dp", "ep", "edp", "tp", "cp", "pp", "etp", "order"]
    assert Topology.from_dict(data) == topology
    assert Topology.from_dict(data).groups == topology.groups


def test_dictionary_errors() -> None:
    """from_dict refuses unknown and missing keys, and bad values, by name."""
    good = Topology.of(dp=8, ep=8).to_dict()
    keys = "exactly the keys dp, ep, edp, tp, cp, pp, etp, order"
    bad = {
        f"unknown key 'vpp': expected {keys}": good | {"vpp": 1},
        f"missing key 'pp': expected {keys}": {k: v for k, v in good.items() if k != "pp"},
        "cp = 0: expected an integer in 1..4194304": good | {"cp": 0},
    }
    for message, data in bad.items():
        with pytest.raises(InputError) as error:
            Topology.from_dict(data)
        assert str(error.value) == message


def test_large_worlds_are_quick() -> None:
    """Groups of a 16,384-rank world are found without walking ranks in Python."""
    topology = from_sizes(dp=512, ep=64, tp=4, cp=2, pp=4)
    assert topology.edp * topology.ranks_per_shard == 512
    assert topology.groups[0] == tuple(range(8))
