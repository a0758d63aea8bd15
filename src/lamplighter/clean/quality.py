"""The gate: measures of a text with stated bounds; the worst of them is its quality.

In:  a text.
Out: scores from 0 (out of bounds) to 1 (as good text is), and the name of the worst.

The measures are those of the published filters (letters, word length, symbols, repetition, small common words). Their bounds
are set so that 17th-century spelling and the OCR of 1824 newspapers pass, and noise, menus and dumps do not.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from lamplighter.clean import features
from lamplighter.clean.features import WORDS_LOOKED_AT, Words

BYTES_LOOKED_AT = LINES_LOOKED_AT = 200_000
# measure: (bad, good); the score is 0 at the first and 1 at the second, and goes straight between them.
BOUNDS: dict[str, tuple[float, float]] = {
    "letters": (0.55, 0.80),  # share of letters among all that is not blank
    "word_length": (2.0, 3.2),  # mean, in letters
    "long_words": (14.0, 9.0),  # mean word length again, from above
    "odd_symbols": (0.25, 0.08),  # share of what is neither letter, digit nor usual punctuation
    "broken_words": (0.40, 0.15),  # share of words that are a single letter or a mix of letters and digits
    "common_words": (0.04, 0.20),  # share of small English words; only where English is asked for, or found
    "repeated_lines": (0.50, 0.20),  # share of the text in lines that occur before
    "repeated_words": (0.70, 0.35),  # share of runs of ten words that occur before
    "distinct_words": (0.02, 0.08),  # share of different words among the first five hundred
}
REASONS = {name: name for name in BOUNDS} | {"long_words": "word_length"}


@dataclass(frozen=True)
class Quality:
    """The measures as they are, the score of the worst, and which that is."""

    measures: dict[str, float]
    score: float
    worst: str
    words: int


def judge(text: str, words: Words, english: bool) -> Quality:
    """The measures of a text; those that need sorting are taken on its beginning."""
    found = _measures(text, words)
    if not english:
        del found["common_words"]
    scores = {name: _score(value, *BOUNDS[name]) for name, value in found.items()}
    worst = min(scores, key=scores.__getitem__)
    count = len(words.spans[0])
    return Quality({name: round(value, 4) for name, value in found.items()}, round(scores[worst], 4), worst, count)


def _score(value: float, bad: float, good: float) -> float:
    found = (value - bad) / (good - bad)
    return 1.0 if found >= 1.0 else max(found, 0.0)


def _measures(text: str, words: Words) -> dict[str, float]:
    kinds, (_, sizes) = words.kinds, words.spans
    seen = max(1, sum(kinds) - kinds[features.BLANK])
    mean = float(sizes.sum()) / max(1, len(sizes)) / _bytes_per_letter(text, words)
    common, lone = words.small
    return {
        "letters": kinds[features.LETTER] / seen,
        "word_length": mean,
        "long_words": mean,
        "odd_symbols": (kinds[features.ODD] + _replaced(text)) / seen,
        "broken_words": lone + _mixed(words) if len(sizes) else 1.0,
        "common_words": common,
        "repeated_lines": _repeated_lines(text[:LINES_LOOKED_AT]),
        "repeated_words": _repeated_words(words),
        "distinct_words": _distinct(words.keys[:500]),
    }


def _distinct(keys: features.Array) -> float:
    return 1.0 if len(keys) < 200 else features.distinct(keys) / len(keys)


def _bytes_per_letter(text: str, words: Words) -> float:
    """Letters outside ASCII take more than one byte; their words are not longer for that."""
    return max(1.0, len(words.data) / max(1, len(text)))


def _replaced(text: str) -> int:
    return 0 if text.isascii() else 3 * text.count("\ufffd")


def _mixed(words: Words) -> float:
    """Words in which letters and digits alternate more than once: x3k9, not 3rd or A4."""
    if words.kinds[features.DIGIT] * 50 < words.kinds[features.LETTER]:  # too few digits for many such words
        return 0.0
    plain = np.frombuffer(words.plain[:BYTES_LOOKED_AT], dtype=np.uint8)
    digit = (plain >= 48) & (plain <= 57)
    turns = np.flatnonzero((digit[1:] != digit[:-1]) & (plain[1:] != 0) & (plain[:-1] != 0)) + 1
    if not len(turns):
        return 0.0
    starts = words.spans[0]
    owners = np.searchsorted(starts, turns, side="right")
    seen = int(np.searchsorted(starts, len(plain)))
    return float(np.sum(np.bincount(owners) > 1)) / max(1, seen)


def _repeated_lines(text: str) -> float:
    """The share of characters in lines that were there before; short lines (names of speakers, rules) are not counted."""
    lines = [line for line in text.split("\n") if len(line) > 24]
    if len(lines) < 4:
        return 0.0
    if len(set(lines)) == len(lines):
        return 0.0
    counts = Counter(lines)
    repeated = sum((count - 1) * len(line) for line, count in counts.items() if count > 1)
    return repeated / sum(map(len, lines))


def _repeated_words(words: Words) -> float:
    """Runs of ten words: two runs of five, one after the other."""
    fives = words.fives[:WORDS_LOOKED_AT]
    if len(fives) < 25:
        return 0.0
    tens = fives[:-5] * features.MIX + fives[5:]
    return 1.0 - features.distinct(tens) / len(tens)
