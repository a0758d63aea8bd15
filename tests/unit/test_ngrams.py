"""One index of runs of words: cleaning, statistics and evaluation ask it, and it says what a set of tuples would."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from lamplighter.clean.quality import words_of
from lamplighter.data.ngrams import NgramIndex, runs_of, word_key

WORDS = ["fog", "lamp", "The", "Goose,", "wig-maker", "£1", "café", "12th", "omnibus.", "(so)", "“Sir,”", "candlestick"]


def text_of(seed: int, count: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


def tuples_of(text: str, words: int) -> list[tuple[str, ...]]:
    """The same by the book: letters, digits and whatever is not ASCII between anything else."""
    split = re.findall(r"[0-9a-z\x80-\U0010ffff]+", text.lower())
    return [tuple(split[n : n + words]) for n in range(len(split) - words + 1)]


@pytest.mark.parametrize("words", [1, 5, 13])
def test_a_run_of_words_has_one_number_and_others_have_another(words: int) -> None:
    texts = [*(text_of(n, n % 40) for n in range(200)), "", "...", "ünï cödé and fünf wörter more", "two\nlines and a\ttab"]  # fmt: skip
    hashes, owners = runs_of(texts, words)
    numbers: dict[tuple[str, ...], int] = {}
    for number, text in enumerate(texts):
        mine = hashes[owners == number].tolist()
        for run, value in zip(tuples_of(text, words), mine, strict=True):
            assert numbers.setdefault(run, value) == value
    assert len(set(numbers.values())) == len(numbers), "different runs, different numbers"


def test_what_is_met_is_what_a_set_of_tuples_would_find() -> None:
    mine, others = [text_of(n, 5 + n) for n in range(60)], [text_of(1000 + n, 400) for n in range(50)]
    others += [f"before it {mine[30]} and behind it", " ".join(mine[40].split()[:20]), mine[50].upper()]
    for words in (3, 13):
        index, seen = NgramIndex(mine, words), {run for text in others for run in tuples_of(text, words)}
        for begin in range(0, len(others), 7):
            index.meet(others[begin : begin + 7])
        for text, share in zip(mine, index.shares(), strict=True):
            runs = tuples_of(text, words)
            assert np.isnan(share) if not runs else share == pytest.approx(sum(run in seen for run in runs) / len(runs))
        assert index.shares()[30] == index.shares()[50] == 1.0


def test_cleaning_finds_duplicates_by_the_same_numbers() -> None:
    text = "The lamplighter, in the FOG, has lost his wig: it's on the goose! 12th of May"
    assert words_of(text).fives.tolist() == runs_of([text], 5)[0].tolist()
    assert words_of("two words").fives.tolist() == runs_of(["two words"], 2)[0].tolist()
    assert words_of("").fives.tolist() == words_of("?!").fives.tolist() == []
    assert words_of("Lamp").keys.tolist() == [word_key("lamp")]


def test_texts_are_not_joined_to_runs_of_nobody() -> None:
    assert len(runs_of(["one two", "three four"], 3)[0]) == 0
    index = NgramIndex(["two three"], 2)
    index.meet(["one two", "three four"])
    assert index.shares().tolist() == [0.0]
    assert NgramIndex([], 5).shares().tolist() == []
