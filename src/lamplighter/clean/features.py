"""A text in numbers: its words as arrays, counted in bulk; what the gate, the language check and the duplicate search all need.

In:  a text.
Out: the words (lower case, their first eight bytes and their length as one number each), and counts of kinds of characters.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

_ALNUM = bytes(byte if byte >= 128 else ord(chr(byte).lower()) if chr(byte).isalnum() else 0 for byte in range(256))
_KINDS = bytes(
    1 if byte >= 128 or chr(byte).isalpha() else 2 if chr(byte).isdigit() else 3 if chr(byte).isspace()
    else 4 if chr(byte) in ".,;:!?'\"()-&/" else 5
    for byte in range(256)
)  # fmt: skip
LETTER, DIGIT, BLANK, STOP, ODD = 1, 2, 3, 4, 5
_MASKS = np.array([(1 << (8 * size)) - 1 for size in range(8)] + [(1 << 64) - 1], dtype=np.uint64)
_SIZES = np.arange(256, dtype=np.uint64) << np.uint64(56)
MIX = np.uint64(0x9E3779B97F4A7C15)
STRETCHES, STRETCH = 16, 16_384
WORDS_LOOKED_AT = 2_000
CHUNK = 16_384
_SHIFT = np.uint64(29)
Array = np.ndarray


def word_key(word: str) -> int:
    """The number that stands for a word."""
    data = word.encode()
    with np.errstate(over="ignore"):
        first = np.uint64(int.from_bytes(data[:8], "little"))
        return int((first ^ (np.uint64(len(data)) << np.uint64(56))) * MIX)


ENGLISH = ["the", "of", "and", "to", "a", "in", "that", "is", "was", "he", "his", "for", "it", "with", "as", "i", "be", "not", "by", "which", "had", "this", "or", "on", "but", "from", "at", "have", "my", "her", "an", "they", "we", "you", "are", "were", "all", "him", "no", "so", "said", "their", "who", "been", "them", "if", "me", "when", "there", "more", "would", "will", "our", "one", "out", "she", "your", "up", "what", "has", "do", "than", "could", "can"]  # fmt: skip
_COMMON, _LONE = 1, 2
_TABLE = sorted(
    [*((word_key(word), _COMMON) for word in ENGLISH), *((word_key(one), _LONE) for one in "bcdefghjklmnpqrstuvwxyz")]
)
_KEYS = np.array([key for key, _ in _TABLE], dtype=np.uint64)
_WHAT = np.array([what for _, what in _TABLE], dtype=np.uint8)
_PLACE_BITS = np.uint64(48)
_PLACES = np.zeros(1 << 16, dtype=np.uint8)  # by the first bits of a key, which are different for each of these words
_PLACES[_KEYS >> _PLACE_BITS] = np.arange(len(_KEYS))


@dataclass(frozen=True)
class Words:
    """The words of a text: letters and digits between anything else."""

    data: bytes
    plain: bytes  # lower case, 0 where there is no word

    @cached_property
    def spans(self) -> tuple[Array, Array]:
        """(where each word begins, how long it is), in bytes."""
        inside = np.frombuffer(b"\0" + self.plain + b"\0", dtype=np.uint8) != 0
        edges = np.flatnonzero(inside[1:] != inside[:-1])
        return edges[::2], edges[1::2] - edges[::2]

    @cached_property
    def keys(self) -> Array:
        """One number for each word."""
        starts, sizes = self.spans
        padded = self.plain + b"\0" * 8
        eight = np.ndarray(shape=(len(self.plain) + 1,), dtype="<u8", buffer=padded, strides=(1,))
        keys: Array = eight[starts]
        keys &= _MASKS.take(sizes, mode="clip")
        keys ^= _SIZES.take(sizes, mode="wrap")
        keys *= MIX
        return keys

    @cached_property
    def kinds(self) -> list[int]:
        """How many bytes of each kind; of a long text, in stretches spread over it."""
        step = max(1, len(self.data) // STRETCHES)
        some = self.data if len(self.data) <= STRETCHES * STRETCH else b"".join(self.data[at : at + STRETCH] for at in range(0, len(self.data), step))  # fmt: skip
        kinds = np.frombuffer(some.translate(_KINDS), dtype=np.uint8)
        if len(kinds) < CHUNK:
            return [int(count) for count in np.bincount(kinds, minlength=6)]
        return [int(np.count_nonzero(kinds == kind)) for kind in range(6)]

    @cached_property
    def fives(self) -> Array:
        """One number for each run of five words; of a shorter text, one for all of it."""
        keys = self.keys
        size = min(5, len(keys))
        if not size:
            return keys
        count = len(keys) - size + 1
        out, shifted = keys[:count].copy(), np.empty(min(count, CHUNK), dtype=np.uint64)
        for start in range(0, count, CHUNK):  # small enough to stay in the fast memory of a core
            some = out[start : start + CHUNK]
            more = shifted[: len(some)]
            for place in range(1, size):
                np.right_shift(some, _SHIFT, out=more)
                some ^= more
                some *= MIX
                some += keys[start + place : start + place + len(some)]
        return out

    @cached_property
    def small(self) -> tuple[float, float]:
        """(the share of small English words, the share of lone letters), on some thousand words spread over the text."""
        keys = self.keys
        if not len(keys):
            return 0.0, 0.0
        keys = keys[:: 1 + len(keys) // WORDS_LOOKED_AT]
        places = _PLACES.take(keys >> _PLACE_BITS)
        what = _WHAT.take(places)
        what *= _KEYS.take(places) == keys
        return _share(what == _COMMON), _share(what == _LONE)


def _share(which: Array) -> float:
    return int(np.count_nonzero(which)) / len(which)


def distinct(keys: Array) -> int:
    """How many different ones."""
    ordered = np.sort(keys)
    return 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1])) if len(keys) else 0


def words_of(text: str, data: bytes | None = None) -> Words:
    """`data`: the text in UTF-8, where it is at hand."""
    data = text.encode() if data is None else data
    return Words(data, data.translate(_ALNUM))


def sample(text: str, size: int, pieces: int = 4) -> str:
    """A short text as it is; of a long one a few stretches, always the same ones."""
    if len(text) <= size:
        return text
    step, part = (len(text) - size // pieces) // (pieces - 1), size // pieces
    return "\n".join(text[number * step : number * step + part] for number in range(pieces))
