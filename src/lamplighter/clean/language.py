"""Which language a text is in, by a few hundred characters from several places of it.

In:  a text and its words.
Out: a two-letter code, or "" where there is too little to tell.

Small English words at a fifth of all words settle it at once; everything else is asked of py3langid.
"""

from __future__ import annotations

from lamplighter.clean.features import Words, sample
from lamplighter.clean.libraries import py3langid

SURELY_ENGLISH = 0.20  # Dutch and German come to a tenth at most
SAMPLE_CHARS = 600
LEAST_CHARS = 40


def language_of(text: str, words: Words) -> str:
    """The language of most of the text."""
    if len(text) < LEAST_CHARS:
        return ""
    if words.small[0] >= SURELY_ENGLISH:
        return "en"
    return str(py3langid().classify(sample(text, SAMPLE_CHARS, 3))[0])
