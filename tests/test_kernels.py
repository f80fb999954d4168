"""The search's kernels against the oracle, by ==, and against what the design promises of them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_helpers import apply_move, below_many, draw_many, evaluate_moves, random_words
from routepack import Budget, plan, population
from routepack.cost import AttentionStage, CostModel
from routepack.kernels.layout import TOTAL_WEIGHT, State
from routepack.kernels.rng import stream_key
from routepack.kernels.sweep import ACCEPTED, BEST, ENERGY, RESULTS
from routepack.objective import row_costs
from routepack.placement import identity
from routepack.population import Chain
from routepack.problem import Problem
from routepack.topology import Topology
from routepack.window import Window
from strategies import SEEDS, Instance, instances, layouts, random_window

WEIGHTS = st.sampled_from([TOTAL_WEIGHT, 0.25])
SPREADS = st.sampled_from([0.0, 0.5])  # of a squared cost by the energy: of its order


def fixed_instance(shards: int = 2) -> Instance:
    """24 samples, loose cap, two rows: almost every move is legal and many are accepted."""
    rng = np.random.default_rng(3)
    window = random_window(rng, rng.integers(2, 30, 24), 3, 8, 2)
    stages = (AttentionStage("full", 60.0, 20.0), AttentionStage("swa", 5.0, 9.0, window_tokens=8))
    return Instance(
        window, Topology.of(dp=4, ep=4, edp=shards), CostModel(stages), 200, 2,
        np.arange(24, dtype=np.int32) % 8, identity(3, 8),
    )  # fmt: skip


def chain_of(instance: Instance, seed: int) -> Chain:
    """A chain at the layout of the instance."""
    problem, static, cell_S = instance.problem, instance.static, instance.cell_S
    results = np.zeros(RESULTS)
    results[[ENERGY, BEST]] = problem.measure(static, cell_S).energy
    key = stream_key(seed)
    return Chain(problem, static, problem.state(static, cell_S), key, cell_S.copy(), results)


# Costs of a layout


@given(instances(), st.data())
def test_costs_equal_the_oracle_bit_for_bit(instance: Instance, data: st.DataObject) -> None:
    """J of every group in a state, and A and X of `measure`, are those of objective.py by ==."""
    problem, static = instance.problem, instance.static
    cell_S = instance.cell_S
    attention_MG, expert_MG, load_MGLR = row_costs(
        problem.window, problem.topology, problem.cost, instance.placement_LE,
        problem.to_rows(cell_S),
    )  # fmt: skip
    state = problem.state(static, cell_S)
    assert state.cost_B.tolist() == (attention_MG + expert_MG).ravel().tolist()
    load_BLR = load_MGLR.reshape(-1, *load_MGLR.shape[2:])
    layers = problem.window.layers
    assert np.array_equal(state.load_BRL[:, :, :layers], load_BLR.transpose(0, 2, 1))
    assert not state.load_BRL[:, :, layers:].any()  # layers that fill up a vector
    measured = problem.measure(static, cell_S)
    assert measured.attention_B.tolist() == attention_MG.ravel().tolist()
    assert measured.expert_B.tolist() == expert_MG.ravel().tolist()


@given(instances(), st.data())
def test_any_layout_is_measured_as_the_oracle_does(instance: Instance, data: st.DataObject) -> None:
    """`measure` needs no layout within the cap, and its score is the oracle's by ==."""
    from routepack.objective import score

    problem = instance.problem
    cell_S = data.draw(layouts(problem.window.samples, problem.cells))
    expected = score(
        problem.window, problem.topology, problem.cost, instance.placement_LE,
        problem.to_rows(cell_S),
    )  # fmt: skip
    assert problem.measure(instance.static, cell_S).score == expected


@given(instances())
def test_bins_and_rows_are_inverse(instance: Instance) -> None:
    """Cells of a layout as bins, row by row and DP rank by DP rank, give the layout back."""
    bins = [cell for row in instance.problem.to_rows(instance.cell_S) for cell in row]
    assert instance.problem.from_bins(bins).tolist() == instance.cell_S.tolist()


# Sweeps


@given(instances(), SEEDS, WEIGHTS, SPREADS, st.sampled_from([0.0001, 0.05, 10.0]))
def test_every_accepted_move_keeps_the_state_exact(
    instance: Instance, seed: int, total_weight: float, spread: float, heat: float
) -> None:
    """In debug mode every integer and every cost equals a recompute after each accepted move; the
    layout stays within the cap without empty cells, and the best one has the energy on record."""
    chain = chain_of(instance, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(population, "DEBUG", True)
        energy = max(chain.energy, 1e-9)
        chain.sweep(heat * energy, total_weight, spread / energy, 60)
    problem, static = instance.problem, instance.static
    assert problem.fits(chain.state.cell_S[:-1])
    assert problem.fits(chain.best_S)
    assert problem.measure(static, chain.best_S).energy == pytest.approx(chain.best, rel=1e-12)


def test_debug_mode_recomputes_after_accepted_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check runs once for every accepted move; a hundred of 400 proposals are accepted."""
    checked: list[Chain] = []
    monkeypatch.setattr(population, "DEBUG", True)
    monkeypatch.setattr(Problem, "assert_exact", lambda *args: checked.append(args[0]))
    chain = chain_of(fixed_instance(), 1)
    chain.sweep(1e6, TOTAL_WEIGHT, 0.0, 400)
    assert len(checked) == chain.results[ACCEPTED] > 100


@pytest.mark.parametrize(
    "name",
    ["count_c", "tokens_c", "tokens2_Tc", "load_BRL", "busiest_B", "anchor_BL", "anchored_B",
     "peak_BS", "work_Tc", "work_BT", "top_BTk", "cost_B", "shard_G", "position_S"],
)  # fmt: skip
def test_the_debug_check_notices_any_wrong_number(name: str) -> None:
    """A state with a single number changed fails the check, whichever array it is in."""
    instance = fixed_instance()
    state = instance.problem.state(instance.static, instance.cell_S)
    instance.problem.assert_exact(instance.static, state)
    changed = getattr(state, name)
    changed.flat[0] = (changed.flat[0] + 1) % 4 if name == "anchor_BL" else changed.flat[0] + 1
    with pytest.raises(AssertionError):
        instance.problem.assert_exact(instance.static, state)


@given(instances(), SEEDS, SPREADS, st.integers(1, 59))
def test_a_sweep_may_be_cut_anywhere(
    instance: Instance, seed: int, spread: float, first: int
) -> None:
    """60 proposals at once, or some and then the rest, lead to the same layout and record: draws
    depend on key and counter only."""
    whole, cut = chain_of(instance, seed), chain_of(instance, seed)
    temperature = 0.02 * whole.energy
    whole.sweep(temperature, TOTAL_WEIGHT, spread, 60)
    cut.sweep(temperature, TOTAL_WEIGHT, spread, first)
    cut.sweep(temperature, TOTAL_WEIGHT, spread, 60 - first)
    assert whole.results.tolist() == cut.results.tolist()
    assert whole.counter == cut.counter
    assert whole.state.cell_S.tolist() == cut.state.cell_S.tolist()
    assert whole.best_S.tolist() == cut.best_S.tolist()


def test_cold_sweeps_descend() -> None:
    """At a temperature of almost 0 the energy never rises from sweep to sweep, and it does fall."""
    chain = chain_of(fixed_instance(), 2)
    energies = [chain.energy]
    for _ in range(20):
        chain.sweep(1e-300, TOTAL_WEIGHT, 0.0, 50)
        energies.append(chain.energy)
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(energies))
    assert energies[-1] < 0.97 * energies[0]


# Moves


@given(instances(), SEEDS)
def test_moves_are_legal(instance: Instance, seed: int) -> None:
    """Every proposed move, carried out from the same layout, changes something, stays within the
    cap, leaves no cell empty, and leaves all other cells as they were."""
    problem, static = instance.problem, instance.static
    for words_2 in random_words(seed, 24):
        state = problem.state(static, instance.cell_S)
        move = apply_move(static, state, words_2, TOTAL_WEIGHT)
        after_S = state.cell_S[:-1]
        moved_S = after_S != instance.cell_S
        if move.x_N[0] < 0:
            assert not moved_S.any()
            continue
        assert problem.fits(after_S)
        assert moved_S.any()
        cells = {*instance.cell_S[moved_S], *after_S[moved_S]}
        assert cells == {move.x_N[0], move.y_N[0]}


def test_every_kind_of_move_comes_up() -> None:
    """With a loose cap, every ordered pair of cells comes up for one sample moved and for two
    exchanged; two also go for one; whole cells (of three samples) are exchanged between groups."""
    instance = fixed_instance()
    static = instance.static
    kinds: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for words_2 in random_words(0, 6000):
        state = instance.problem.state(static, instance.cell_S)
        move = apply_move(static, state, words_2, TOTAL_WEIGHT)
        x, y = int(move.x_N[0]), int(move.y_N[0])
        moved_S = state.cell_S[:-1] != instance.cell_S
        out, into = (int((moved_S & (instance.cell_S == c)).sum()) for c in (x, y))
        kinds.setdefault((out, into), set()).add((x, y))
    pairs = {(x, y) for x in range(8) for y in range(8) if x != y}
    assert kinds[1, 0] == kinds[1, 1] == pairs
    assert len(kinds[2, 1]) > 20
    assert len(kinds[3, 3]) > 20
    assert all(x // static.width != y // static.width for x, y in kinds[3, 3])


@given(instances(), SEEDS, WEIGHTS)
def test_early_exit_changes_no_decision(instance: Instance, seed: int, total_weight: float) -> None:
    """With early exit a move passes its limit exactly where the full energy does, an accepted move
    has exactly that energy, and the lower bound never exceeds it. Limits are other moves' energies,
    so that ties are among them."""
    static = instance.static
    state = instance.problem.state(static, instance.cell_S)
    words_N2 = random_words(seed, 64)
    full = evaluate_moves(static, state, words_N2, total_weight, -np.inf, early=False)
    legal_N = full.x_N >= 0
    between_N = legal_N & (full.x_N // static.width != full.y_N // static.width)
    assert full.full_N.tolist() == between_N.tolist()
    if not legal_N.any():
        return
    rng = np.random.default_rng(seed)
    others_N = rng.choice(full.energy_N[legal_N], 64)
    for limit_N in (np.where(legal_N, full.energy_N, 0.0), others_N, np.sort(others_N) * 0.99):
        early = evaluate_moves(static, state, words_N2, total_weight, limit_N, early=True)
        assert (early.energy_N <= full.energy_N)[legal_N].all()
        assert ((early.energy_N > limit_N) == (full.energy_N > limit_N)).all()
        accepted_N = full.energy_N <= limit_N
        assert (early.energy_N[accepted_N] == full.energy_N[accepted_N]).all()
    instance.problem.assert_exact(static, state)  # evaluation leaves the state as it was


def test_early_exit_saves_evaluations() -> None:
    """Moves between groups have their loads evaluated in full at a limit that all meet, none at one
    that none meets, and some at the current energy."""
    instance = fixed_instance()
    static, words_N2 = instance.static, random_words(5, 2000)
    state = instance.problem.state(static, instance.cell_S)
    now = instance.problem.measure(static, instance.cell_S).energy
    shares = []
    for limit in (0.0, now, np.inf):
        moves = evaluate_moves(static, state, words_N2, TOTAL_WEIGHT, limit, early=True)
        legal_N = moves.x_N >= 0
        between_N = legal_N & (moves.x_N // static.width != moves.y_N // static.width)
        assert between_N.sum() > 1000
        shares.append(float(moves.full_N[between_N].mean()))
    assert (shares[0], shares[2]) == (0.0, 1.0)
    assert 0.1 < shares[1] < 0.9


def spread(instance: Instance, state: State) -> float:
    """Squared deviation of cells from the mean cell of their group, over stages and groups."""
    work_TBw = state.work_Tc.reshape(len(state.work_Tc), -1, instance.static.width)
    return float(((work_TBw - work_TBw.mean(axis=2, keepdims=True)) ** 2).sum())


@given(instances(), SEEDS, WEIGHTS)
def test_moves_do_what_was_told(instance: Instance, seed: int, total_weight: float) -> None:
    """Move after move, the energy and the change of the spread that are told before are those of
    the state that follows, up to the rounding of a sum; the state stays exact."""
    problem, static = instance.problem, instance.static
    state = problem.state(static, instance.cell_S)
    for words_2 in random_words(seed, 12):
        cost, before = state.cost_B.sum(), spread(instance, state)
        squares = np.square(state.work_Tc).sum()
        move = apply_move(static, state, words_2, total_weight)
        if move.x_N[0] >= 0:
            told, found = move.energy_N[0], move.applied_N[0]
            assert told == pytest.approx(found, rel=1e-12, abs=1e-14 * cost)
            change = spread(instance, state) - before
            assert move.spread_N[0] == pytest.approx(change, abs=1e-12 * (squares + before))
            problem.assert_exact(static, state)


# Loads in 64 bits


@pytest.mark.parametrize("method", ["routepack", "expert-only"])
def test_loads_of_64_bits_give_the_same_plan(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that take over at 2**31 routed tokens lead to the same bytes."""
    instance = fixed_instance()

    def made() -> bytes:
        return plan(
            instance.window, instance.topology, token_cap=instance.token_cap, method=method,
            budget=Budget(evaluations=20_000), threads=1,
        ).to_bytes()  # fmt: skip

    loads: list[Any] = []
    narrow = made()
    monkeypatch.setattr(Problem, "load", property(lambda p: loads.append(p) or np.dtype("i8")))
    assert made() == narrow
    assert loads


def test_loads_beyond_31_bits_are_held_in_64() -> None:
    """top-2 of 2**30 tokens may put 2**31 assignments on one rank, one more than 32 bits hold; so
    may a cell over all layers, as 4 layers with a cap of 2**28."""
    topology = Topology.of(dp=1, ep=1)
    for tokens, cap, load in (
        (2**30 - 1, 8, "i4"), (2**30, 8, "i8"), (8, 2**28 - 1, "i4"), (8, 2**28, "i8")
    ):  # fmt: skip
        window = random_window(np.random.default_rng(0), [1, 1], 4, 2, 2)
        object.__setattr__(window, "lengths_S", np.array([tokens - 1, 1]))
        cost = CostModel((AttentionStage("a", 1.0, 1.0),)).resolve(window, topology, cap)
        assert Problem(window, topology, cost, cap, 1).load == load


def test_large_windows_are_exact() -> None:
    """Samples of 2**26 tokens on 40 layers: what one puts on the busiest ranks of all layers takes
    more than 31 bits, and every integer is that of a recompute."""
    tokens = 2**26
    demand_SLE = np.zeros((4, 40, 2), np.uint32)
    demand_SLE[:2, :, 0] = demand_SLE[2:, :, 1] = tokens
    window = Window(np.full(4, tokens), demand_SLE, 1)
    topology = Topology.of(dp=1, ep=2, edp=1)
    cost = CostModel((AttentionStage("a", 1.0, 1.0),)).resolve(window, topology, tokens)
    problem = Problem(window, topology, cost, tokens, 4)
    static = problem.static(np.tile(np.array([0, 1], np.int32), (40, 1)))
    state = problem.state(static, np.arange(4, dtype=np.int32))
    problem.assert_exact(static, state)
    assert state.peak_BS[0].tolist()[:4] == [40 * tokens, 40 * tokens, 0, 0]


# Random numbers


def splitmix64(state: int) -> int:
    """The output function of SplitMix64 in Python's integers (Steele, Lea, Flood 2014)."""
    mask = 2**64 - 1
    z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31


KNOWN = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # of seed 0, as published


def test_draws_are_splitmix64() -> None:
    """The first draws of key 0 are those that the reference implementation is known for."""
    assert draw_many(0, 0, 3).tolist() == KNOWN


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**63))
def test_draws_depend_on_key_and_counter_only(key: int, counter: int) -> None:
    """Draw n of a key is SplitMix64 seeded with the key at its n-th step, from any start."""
    expected = [
        splitmix64((key + (counter + n + 1) * 0x9E3779B97F4A7C15) % 2**64) for n in range(4)
    ]
    assert draw_many(key, counter, 4).tolist() == expected
    assert draw_many(key, counter + 2, 2).tolist() == expected[2:]


def test_every_path_has_a_key_of_its_own() -> None:
    """Seeds, stages, rounds and chains, and the order among them, give different streams."""
    paths = [(seed, *path) for seed in range(8) for path in
             [(), *((a,) for a in range(8)), *((a, b) for a in range(8) for b in range(8)),
              *((a, b, 0) for a in range(8) for b in range(8))]]  # fmt: skip
    keys = {int(stream_key(*path)) for path in paths}
    assert len(keys) == len(paths) == 8 * (1 + 8 + 64 + 64)


def test_streams_of_neighbouring_chains_do_not_overlap() -> None:
    """No draw of a thousand occurs in another of 16 chains."""
    draws = [draw_many(int(stream_key(0, 1, k)), 0, 1000) for k in range(16)]
    assert len(np.unique(np.concatenate(draws))) == 16_000


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20),
    st.one_of(st.integers(1, 100), st.integers(1, 2**31 - 1)),
)
def test_numbers_below_n(words: list[int], n: int) -> None:
    """`high` and `low` are the upper and lower half of a word scaled to 0..n-1, exactly; `unit` is
    in (0, 1], so that its logarithm is finite."""
    bits_N = np.array([*words, 0, 2**64 - 1, 2**32 - 1, 2**32], np.uint64)
    high_N, low_N, unit_N = below_many(bits_N, n)
    assert high_N.tolist() == [(w >> 32) * n >> 32 for w in bits_N.tolist()]
    assert low_N.tolist() == [(w & 2**32 - 1) * n >> 32 for w in bits_N.tolist()]
    assert all(0 <= k < n for k in [*high_N.tolist(), *low_N.tolist()])
    assert unit_N.tolist() == [((w >> 11) + 1) / 2**53 for w in bits_N.tolist()]
    assert unit_N.min() > 0
    assert unit_N.max() <= 1


def test_numbers_are_uniform() -> None:
    """70,000 draws below 7: every count within 5 standard deviations (93) of 10,000, in both halves
    of a word; the halves are uncorrelated, and the mean of `unit` is a half."""
    high_N, low_N, unit_N = below_many(draw_many(int(stream_key(5)), 0, 70_000), 7)
    for values_N in (high_N, low_N):
        assert abs(np.bincount(values_N, minlength=7) - 10_000).max() < 5 * 93
    together = np.bincount(7 * high_N + low_N, minlength=49)
    assert abs(together - 70_000 / 49).max() < 5 * 38
    assert unit_N.mean() == pytest.approx(0.5, abs=5 * 0.0011)
