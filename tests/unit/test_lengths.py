"""The arithmetic of lengths: what a window holds, what padding costs, and advice that follows from both."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from lamplighter.data.stats import lengths as room
from lamplighter.data.stats.lengths import draw, svg

RNG = np.random.default_rng(5)
SHORT = np.array([10] * 30 + [30] * 40 + [44] * 26 + [60] * 2 + [90, 200])
MIXED = np.exp(RNG.normal(5.5, 1.2, 4000)).astype(np.int64) + 1


def test_percentiles_are_lengths_that_occur() -> None:
    found = room.spread(SHORT)
    assert (found.count, found.total, found.shortest, found.longest) == (100, 300 + 1200 + 1144 + 120 + 290, 10, 200)
    assert (found.p50, found.p95, found.p99) == (30, 44, 90)
    assert found.mean == pytest.approx(30.54)
    assert room.spread(np.zeros(0, np.int64)).count == 0


@pytest.mark.parametrize("lengths", [SHORT, MIXED, np.array([7]), np.arange(100, 140), np.array([1, 1, 3_000_000])])
def test_bars_hold_every_length_once(lengths: np.ndarray) -> None:
    bars = room.bars(lengths)
    assert sum(bar.count for bar in bars) == len(lengths)
    assert sum(bar.tokens for bar in bars) == lengths.sum()
    assert len(bars) <= 26
    for bar in bars:
        assert bar.count == ((lengths >= bar.low) & (lengths <= bar.high)).sum()
    assert all(one.high + 1 == other.low for one, other in itertools.pairwise(bars))


def test_a_window_counts_what_it_cuts() -> None:
    found = room.window(SHORT, 64)
    assert (found.whole, found.over, found.beyond) == (98, 2, 26 + 136)
    kept = np.minimum(SHORT, 64).sum()
    assert found.padding_alone == pytest.approx(1 - kept / (100 * 64))
    assert found.beyond_share == pytest.approx(162 / SHORT.sum())
    assert 64 in [one.seq_len for one in room.windows(SHORT, 64)]
    assert 77 in [one.seq_len for one in room.windows(SHORT, 77)], "the one that is set is among them"


def test_padding_of_every_strategy() -> None:
    shares = {one.strategy: one for one in room.padding(SHORT, 1024, 8)}
    assert set(shares) == {"to seq_len", "to 128-multiple", "dynamic", "grouped", "packed", "windows"}
    assert shares["to seq_len"].share == pytest.approx(1 - SHORT.sum() / (100 * 1024))
    assert shares["to seq_len"].work == pytest.approx(100 * 1024 / SHORT.sum())
    assert shares["windows"].share == pytest.approx(1 - (SHORT.sum() - 1) / 3072)
    assert shares["packed"].share < shares["grouped"].share < shares["dynamic"].share < shares["to seq_len"].share


def test_advice_for_examples_spells_the_arithmetic_out() -> None:
    window, packing, batch = room.advise(SHORT, 1024, 4, examples=True)
    assert room.fitting(SHORT) == 64
    best = room.packing_window(SHORT)
    assert best in (64, 128, 256) and window.set == f"data.seq_len: {best}"
    assert "p95 = 44" in window.because and "97.0 % would be padding, 34 x the work" in window.because
    assert packing.set == "data.packing: packed" and "grouped" in packing.because
    assert f"4 x {best} = " in batch.because and "steps an epoch" in batch.because
    assert room.advise(np.zeros(0, np.int64), 64, 4, examples=True) == []


def test_advice_for_text_never_calls_a_later_window_lost() -> None:
    window, packing, _ = room.advise(MIXED, 64, 4, examples=False)
    assert "longer window" in window.advice and "none is lost" in window.because
    value = int(window.set.split(": ")[1])
    assert 64 < value <= 4096
    assert packing.set == "data.packing: windows"
    assert room.advise(MIXED, value, 4, examples=False)[0].advice.startswith("keep")


def test_a_batch_that_swallows_the_data_is_made_smaller() -> None:
    batch = room.advise(SHORT, 64, 512, examples=False)[-1]
    assert "smaller batch" in batch.advice and "few to learn by" in batch.because
    size = int(batch.set.split(": ")[1])
    assert 1 <= size < 512
    large = room.advise(np.full(200_000, 400), 128, 4, examples=False)[-1]
    assert "larger batch" in large.advice and "steadier" in large.because


def test_the_drawing_shows_every_bar_and_mark() -> None:
    bars = room.bars(MIXED)
    lines = draw(bars, {"p50": 250, "seq_len": 1024})
    assert len(lines) == len(bars) + 1
    assert sum("<- " in line for line in lines) == 2
    for bar, line in zip(bars, lines[1:], strict=True):
        assert f"{bar.count:,}" in line
        assert ("█" in line or any(sliver in line for sliver in "▏▎▍▌▋▊▉")) == (bar.count > 0)
    assert draw([], {}) == []


def test_the_picture_is_a_picture() -> None:
    bars = room.bars(MIXED)
    picture = ElementTree.fromstring(svg(bars, {"p95": 2000}, "Lengths of <these> & those", "about"))
    assert picture.tag.endswith("svg")
    shown = [element for element in picture.iter() if element.tag.endswith("rect")]
    assert len(shown) == len(bars) + 1
    text = " ".join(element.text or "" for element in picture.iter())
    assert "p95 = 2,000" in text and "Lengths of <these> & those" in text


def test_of_few_examples_the_window_that_they_fill_best_is_advised() -> None:
    """40 of 138 tokens: a window of 4,096 would be two, the second of them hardly begun."""
    few = np.full(40, 138, np.int64)
    shares = {size: room.padding_share(few, "packed", size, 1) for size in (256, 512, 1024, 2048, 4096)}
    assert min(shares.values()) > 0.05, "no window is filled"
    assert room.packing_window(few) == min(shares, key=lambda size: shares[size]) < 4096
