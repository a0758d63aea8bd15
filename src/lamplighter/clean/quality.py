"""The words of a text as numbers, what they say about its quality, and which language it is in.

In:  a text.
Out: measures from 0 (bad) to 1 (good), the worst of which decides; a two-letter code, or "" where there is too little to tell.

Everything that is asked of a text (quality, language, duplicates) is worked out from one array of word keys, made once. Small
English words at a fifth of all words settle the language at once; everything else is asked of py3langid.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lamplighter.clean.rules import py3langid
from lamplighter.data.ngrams import MIX, plain_words, runs, word_key, word_keys, word_spans

_KINDS = bytes(
    1 if byte >= 128 or chr(byte).isalpha() else 2 if chr(byte).isdigit() else 3 if chr(byte).isspace()
    else 4 if chr(byte) in ".,;:!?'\"()-&/" else 5
    for byte in range(256)
)  # fmt: skip
LETTER, DIGIT, BLANK, STOP, ODD = 1, 2, 3, 4, 5
STRETCHES, STRETCH = 16, 16_384
_WORDS_LOOKED_AT = 2_000
_Array = np.ndarray


ENGLISH = ["the", "of", "and", "to", "a", "in", "that", "is", "was", "he", "his", "for", "it", "with", "as", "i", "be", "not", "by", "which", "had", "this", "or", "on", "but", "from", "at", "have", "my", "her", "an", "they", "we", "you", "are", "were", "all", "him", "no", "so", "said", "their", "who", "been", "them", "if", "me", "when", "there", "more", "would", "will", "our", "one", "out", "she", "your", "up", "what", "has", "do", "than", "could", "can"]  # fmt: skip
_COMMON = np.array(sorted(word_key(word) for word in ENGLISH), dtype=np.uint64)
_LONE = np.array(sorted(word_key(letter) for letter in "bcdefghjklmnpqrstuvwxyz"), dtype=np.uint64)


@dataclass(frozen=True)
class Words:
    """The words of a text: letters and digits between anything else."""

    data: bytes
    plain: bytes  # lower case, 0 where there is no word

    @cached_property
    def spans(self) -> tuple[_Array, _Array]:
        """(where each word begins, how long it is), in bytes."""
        return word_spans(self.plain)

    @cached_property
    def keys(self) -> _Array:
        """One number for each word."""
        return word_keys(self.plain, self.spans)

    @cached_property
    def kinds(self) -> list[int]:
        """How many bytes of each kind; of a long text, in stretches spread over it."""
        some, size = self.data, len(self.data)
        if size > STRETCHES * STRETCH:
            some = b"".join(some[at : at + STRETCH] for at in range(0, size, size // STRETCHES))
        counts = np.bincount(np.frombuffer(some.translate(_KINDS), dtype=np.uint8), minlength=6)
        return [int(count) for count in counts]

    @cached_property
    def fives(self) -> _Array:
        """One number for each run of five words; of a shorter text, one for all of it."""
        return runs(self.keys, min(5, len(self.keys)) or 1)

    @cached_property
    def small(self) -> tuple[float, float]:
        """(the share of small English words, the share of lone letters), on some thousand words spread over the text."""
        keys = self.keys
        if not len(keys):
            return 0.0, 0.0
        keys = keys[:: 1 + len(keys) // _WORDS_LOOKED_AT]
        return _share(keys, _COMMON), _share(keys, _LONE)


def _share(keys: _Array, among: _Array) -> float:
    """The share of keys that are among these, which are sorted."""
    return int(np.count_nonzero(among.take(np.searchsorted(among, keys), mode="clip") == keys)) / len(keys)


def _distinct(keys: _Array) -> float:
    """The share of different ones; np.unique takes three times as long for the few keys of a small page."""
    ordered = np.sort(keys)
    return (1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))) / len(keys)


def words_of(text: str) -> Words:
    data = text.encode()
    return Words(data, plain_words(data))


def sample(text: str, size: int, pieces: int = 4) -> str:
    """A short text as it is; of a long one a few stretches, always the same ones."""
    if len(text) <= size:
        return text
    step, part = (len(text) - size // pieces) // (pieces - 1), size // pieces
    return "\n".join(text[number * step : number * step + part] for number in range(pieces))


# ---------------------------------------------------------------- measures


_BYTES_LOOKED_AT = _LINES_LOOKED_AT = 200_000
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
class TextQuality:
    """The measures as they are, the score of the worst, and which that is."""

    measures: dict[str, float]
    score: float
    worst: str
    words: int


def judge(text: str, words: Words, english: bool) -> TextQuality:
    """The measures of a text; those that need sorting are taken on its beginning."""
    found = _measures(text, words)
    if not english:
        del found["common_words"]
    scores = {name: _score(value, *BOUNDS[name]) for name, value in found.items()}
    worst = min(scores, key=scores.__getitem__)
    count = len(words.spans[0])
    return TextQuality({name: round(value, 4) for name, value in found.items()}, round(scores[worst], 4), worst, count)


def _score(value: float, bad: float, good: float) -> float:
    found = (value - bad) / (good - bad)
    return 1.0 if found >= 1.0 else max(found, 0.0)


def _measures(text: str, words: Words) -> dict[str, float]:
    kinds, (_, sizes) = words.kinds, words.spans
    seen = max(1, sum(kinds) - kinds[BLANK])
    mean = float(sizes.sum()) / max(1, len(sizes)) / _bytes_per_letter(text, words)
    common, lone = words.small
    return {
        "letters": kinds[LETTER] / seen,
        "word_length": mean,
        "long_words": mean,
        "odd_symbols": (kinds[ODD] + _replaced(text)) / seen,
        "broken_words": lone + _mixed(words) if len(sizes) else 1.0,
        "common_words": common,
        "repeated_lines": _repeated_lines(text[:_LINES_LOOKED_AT]),
        "repeated_words": _repeated_words(words),
        "distinct_words": _distinct(words.keys[:500]) if len(words.keys) >= 200 else 1.0,
    }


def _bytes_per_letter(text: str, words: Words) -> float:
    """Letters outside ASCII take more than one byte; their words are not longer for that."""
    return max(1.0, len(words.data) / max(1, len(text)))


def _replaced(text: str) -> int:
    return 0 if text.isascii() else 3 * text.count("\ufffd")


def _mixed(words: Words) -> float:
    """Words in which letters and digits alternate more than once: x3k9, not 3rd or A4."""
    if words.kinds[DIGIT] * 50 < words.kinds[LETTER]:  # too few digits for many such words
        return 0.0
    plain = np.frombuffer(words.plain[:_BYTES_LOOKED_AT], dtype=np.uint8)
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
    if len(lines) < 4 or len(set(lines)) == len(lines):
        return 0.0
    counts = Counter(lines)
    repeated = sum((count - 1) * len(line) for line, count in counts.items() if count > 1)
    return repeated / sum(map(len, lines))


def _repeated_words(words: Words) -> float:
    """Runs of ten words: two runs of five, one after the other."""
    fives = words.fives[:_WORDS_LOOKED_AT]
    if len(fives) < 25:
        return 0.0
    tens = fives[:-5] * MIX + fives[5:]
    return 1.0 - _distinct(tens)


# ---------------------------------------------------------------- language


_SURELY_ENGLISH = 0.20  # Dutch and German come to a tenth at most
_SAMPLE_CHARS = 600
_LEAST_CHARS = 40


def language_of(text: str, words: Words) -> str:
    """The language of most of the text."""
    if len(text) < _LEAST_CHARS:
        return ""
    if words.small[0] >= _SURELY_ENGLISH:
        return "en"
    return str(py3langid().classify(sample(text, _SAMPLE_CHARS, 3))[0])
