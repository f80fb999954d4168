"""The fewest rows: decided exactly where brute force can tell, certified where it cannot."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from routepack import rows as rows_module
from routepack.errors import InfeasibleError
from routepack.kernels.exact_packing import exact_pack
from routepack.kernels.packing import best_fit, fill_bins, first_fit, repack
from routepack.rows import Rows, ffd_bins, minimal_rows, split_to

SYNTH_TRACE = Path(__file__).parents[2] / "shared" / "tools" / "synth_trace.py"

# First-fit decreasing takes four bins of 60 where three, all full, suffice.
HARD_FOR_FFD = [31, 27, 20, 17, 16, 16, 14, 13, 13, 13]


def fewest_bins(lengths, cap):
    """Independent of the package: every way to put each sample into an open bin or a new one."""

    def place(left, rooms, best):
        if len(rooms) >= best:
            return best
        if not left:
            return len(rooms)
        for b, room in enumerate(rooms):
            if left[0] <= room:
                best = place(left[1:], [*rooms[:b], room - left[0], *rooms[b + 1 :]], best)
        return place(left[1:], [*rooms, cap - left[0]], best)

    return place(sorted(lengths, reverse=True), [], len(lengths) + 1)


def assert_packing(bins, lengths, cap):
    """Every sample once, no bin empty or over the cap."""
    assert sorted(i for members in bins for i in members) == list(range(len(lengths)))
    assert all(members and sum(lengths[i] for i in members) <= cap for members in bins)


@st.composite
def windows(draw, most=9):
    """Few samples under a cap: of any length, or mostly short of a half, where packing is hard."""
    cap = draw(st.integers(1, 60))
    longest = draw(st.sampled_from([cap, max(1, cap // 2), max(1, cap * 2 // 5)]))
    return draw(st.lists(st.integers(1, longest), min_size=1, max_size=most)), cap


def packed(window):
    """Lengths descending, as the kernels want them."""
    return np.sort(np.array(window, np.int64))[::-1].copy()


class TestMinimalRows:
    @given(windows(), st.integers(1, 4))
    def test_small_windows_are_decided_exactly(self, window, data_parallel):
        """Up to 9 samples the rows are those of brute force, certified, with bins that show it."""
        lengths, cap = window
        needed = -(-fewest_bins(lengths, cap) // data_parallel)
        if len(lengths) < needed * data_parallel:
            with pytest.raises(InfeasibleError):
                minimal_rows(np.array(lengths), cap, data_parallel, seed=0)
            return
        rows = minimal_rows(np.array(lengths), cap, data_parallel, seed=0)
        assert (rows.rows, rows.lower_bound, rows.certified) == (needed, needed, True)
        assert len(rows.bins) <= rows.rows * data_parallel
        assert_packing(rows.bins, lengths, cap)

    @pytest.mark.parametrize(
        ("lengths", "cap", "data_parallel", "expected"),
        [
            ([10], 10, 1, Rows(1, 1, True, "volume", [[0]])),
            ([5, 5, 5, 5], 10, 2, Rows(1, 1, True, "volume", [[0, 1], [2, 3]])),
            ([6, 6, 6], 10, 1, Rows(3, 3, True, "l2", [[0], [1], [2]])),
            ([4, 4, 4, 4, 4], 10, 1, Rows(3, 3, True, "dual-feasible", [[0, 1], [2, 3], [4]])),
        ],
    )
    def test_hand_checked(self, lengths, cap, data_parallel, expected):
        """The first bound that reaches the packing is the one that is named."""
        assert minimal_rows(np.array(lengths), cap, data_parallel, seed=0) == expected

    def test_search_beats_first_fit(self):
        """Where first-fit decreasing wastes a bin, a search finds the row without it."""
        rows = minimal_rows(np.array(HARD_FOR_FFD), 60, 1, seed=0)
        assert len(ffd_bins(np.array(HARD_FOR_FFD), 60)) == 4
        assert (rows.rows, rows.certified) == (3, True)

    def test_only_rows_count(self):
        """A bin more than needed is no reason to search where it costs no row."""
        rows = minimal_rows(np.array(HARD_FOR_FFD), 60, 2, seed=0)
        assert (rows.rows, rows.method, len(rows.bins)) == (2, "volume", 4)

    def test_too_few_samples(self):
        """Rows that the tokens need but the samples cannot fill are refused, with the reason."""
        message = (
            "samples = 5: expected at least 8, because token_cap = 10 "
            "needs at least 2 rows of 4 cells, none empty"
        )
        with pytest.raises(InfeasibleError, match=f"^{re.escape(message)}$"):
            minimal_rows(np.array([9, 9, 9, 9, 9]), 10, 4, seed=0)

    def test_fewer_samples_than_ranks(self):
        """One row already takes a sample for every data-parallel rank."""
        message = (
            "samples = 3: expected at least 4, because token_cap = 10 "
            "needs at least 1 row of 4 cells, none empty"
        )
        with pytest.raises(InfeasibleError, match=f"^{re.escape(message)}$"):
            minimal_rows(np.array([1, 2, 3]), 10, 4, seed=0)

    def test_no_layout_found_is_not_called_impossible(self, monkeypatch):
        """Without a proof the refusal says what was tried and what is proven."""
        window = np.array([*HARD_FOR_FFD, 60, 60, 60, 60, 60])
        assert minimal_rows(window, 60, 8, seed=0).rows == 1
        monkeypatch.setattr(rows_module, "STAGES", rows_module.STAGES[:1])
        message = (
            "samples = 15: expected at least 16, because no layout was found with fewer than "
            "2 rows of 8 cells, none empty (proven: at least 1)"
        )
        with pytest.raises(InfeasibleError, match=f"^{re.escape(message)}$"):
            minimal_rows(window, 60, 8, seed=0)

    def test_uncertified_is_best_known(self, monkeypatch):
        """Where bound and packing do not meet, both are reported and nothing is claimed."""
        monkeypatch.setattr(rows_module, "STAGES", rows_module.STAGES[:1])
        rows = minimal_rows(np.array(HARD_FOR_FFD), 60, 1, seed=0)
        assert (rows.rows, rows.lower_bound) == (4, 3)
        assert (rows.certified, rows.method) == (False, "best known")

    def test_same_arguments_same_result(self):
        """The result is a function of the arguments, and the window is not written to."""
        lengths_S = np.random.default_rng(3).integers(20, 700, 120)
        lengths_S.flags.writeable = False
        results = [minimal_rows(lengths_S, 1000, 1, seed=5) for _ in range(2)]
        assert results[0] == results[1]
        assert_packing(results[0].bins, lengths_S, 1000)

    @given(st.integers(0, 10_000))
    def test_middling_windows(self, seed):
        """Beyond brute force too, the bins hold the window and the bound is below them."""
        rng = np.random.default_rng(seed)
        cap = int(rng.integers(100, 5000))
        lengths_S = rng.integers(1, cap // int(rng.integers(1, 5)) + 1, int(rng.integers(10, 80)))
        rows = minimal_rows(lengths_S, cap, 1, seed=seed, iterations=50_000)
        assert rows.lower_bound <= rows.rows == len(rows.bins)
        assert rows.certified == (rows.lower_bound == rows.rows)
        assert_packing(rows.bins, lengths_S, cap)


class TestFirstFitDecreasing:
    def test_hand_checked(self):
        """By length descending, equal lengths by index, each into the first bin with room."""
        assert ffd_bins(np.array([3, 7, 5, 3, 2, 5]), 10) == [[1, 0], [2, 5], [3, 4]]

    def test_split_hand_checked(self):
        """The bin with most samples, the first of several, leaves its odd positions at the end."""
        assert split_to([[9, 8], [7, 6, 5], [4, 3, 2]], 5) == [[9, 8], [7, 5], [4, 2], [6], [3]]

    def test_split_to_single_samples(self):
        """Splitting can go on until each bin has one sample, and no further."""
        assert split_to([[3, 1, 2]], 3) == [[3], [1], [2]]
        with pytest.raises(AssertionError):
            split_to([[3, 1, 2]], 4)

    @given(windows(), st.data())
    def test_split_is_what_it_says(self, window, data):
        """A heap gives the same as taking the fullest bin by a scan; the input stays as it was."""
        bins = ffd_bins(np.array(window[0]), window[1])
        count = data.draw(st.integers(len(bins), len(window[0])))
        before = [list(members) for members in bins]
        expected = [list(members) for members in bins]
        while len(expected) < count:
            b = max(range(len(expected)), key=lambda b: (len(expected[b]), -b))
            expected.append(expected[b][1::2])
            expected[b] = expected[b][::2]
        assert split_to(bins, count) == expected
        assert bins == before


class TestKernels:
    @given(windows())
    def test_exact_search_agrees_with_brute_force(self, window):
        """For every number of bins the search decides as brute force does, and shows a packing."""
        lengths_S, cap = packed(window[0]), window[1]
        fewest = fewest_bins(window[0], cap)
        for bins in range(1, len(lengths_S) + 1):
            verdict, bin_of_S = exact_pack(lengths_S, cap, bins, 1_000_000)
            assert verdict == (bins >= fewest)
            if verdict:
                assert bin_of_S.min() >= 0
                assert bin_of_S.max() < bins
                assert np.bincount(bin_of_S, lengths_S).max() <= cap

    def test_exact_search_stops_at_its_budget(self):
        """Out of nodes is neither yes nor no."""
        assert exact_pack(packed(HARD_FOR_FFD), 60, 3, 4)[0] == -1

    @given(windows(most=40), st.integers(0, 2**64 - 1), st.integers(1, 20))
    def test_filling_and_repacking_keep_every_sample(self, window, key, width):
        """Both place each sample once; filling respects the cap, repacking says by how much not."""
        lengths_S, cap = packed(window[0]), window[1]
        filled_S = fill_bins(lengths_S, cap, len(lengths_S), width, np.uint64(key))
        assert filled_S.min() >= 0
        assert np.bincount(filled_S, lengths_S).max() <= cap
        bins = int(filled_S.max()) + 1
        start_S = np.minimum(filled_S, max(0, bins - 2))
        bins = int(start_S.max()) + 1
        over, repacked_S = repack(start_S, lengths_S, cap, bins, 2000, 5.0, np.uint64(key))
        excess_B = np.bincount(repacked_S, lengths_S, minlength=bins) - cap
        assert len(excess_B) == bins
        assert over == excess_B[excess_B > 0].sum()

    def test_first_and_best_fit(self):
        """First fit takes the first bin with room, best fit the fullest; past max_bins it is -1."""
        lengths_S, order_S = np.array([6, 7, 3, 4, 9]), np.arange(5)
        assert first_fit(order_S, lengths_S, 10, 5).tolist() == [0, 1, 0, 2, 3]
        assert best_fit(order_S, lengths_S, 10, 5).tolist() == [0, 1, 1, 0, 2]
        assert first_fit(order_S, lengths_S, 10, 2).tolist() == [0, 1, 0, -1, -1]
        assert best_fit(order_S, lengths_S, 10, 2).tolist() == [0, 1, 1, 0, -1]
        assert first_fit(np.array([3, 0]), lengths_S, 10, 5).tolist() == [0, -1, -1, 0, -1]


@pytest.mark.slow
@pytest.mark.skipif(not SYNTH_TRACE.exists(), reason=f"no window generator at {SYNTH_TRACE}")
def test_generated_windows_are_certified():
    """At least 99 % of 200 windows shaped like real RL steps are closed (199 at first)."""
    spec = importlib.util.spec_from_file_location("synth_trace", SYNTH_TRACE)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    suite = {name: s for name, s in tool.SUITE.items() if not name.endswith("-mb1")}
    certified = 0
    for setting in suite.values():
        for seed in range(25):
            rng = np.random.default_rng(10_000 + seed)
            lengths_S = tool.lengths(rng, setting["S"], setting["G"], **setting["len"])
            rows = minimal_rows(lengths_S, setting["cap"], setting["DP"], seed=seed)
            assert_packing(rows.bins, lengths_S, setting["cap"])
            assert len(rows.bins) <= rows.rows * setting["DP"]
            certified += rows.certified
    assert len(suite) == 8
    assert certified >= 198
