"""Which language a text is in, by a few hundred characters from several places of it.

In:  a text and its words.
Out: a two-letter code, or "" where there is too little to tell.

Small English words at a fifth of all words settle it at once; everything else is asked of py3langid.
"""

from __future__ import annotations

from lamplighter.data.clean.libraries import py3langid
from lamplighter.data.clean.measure import sample, words_of
from lamplighter.data.clean.quality import common_share

SURELY_ENGLISH = 0.28
SAMPLE_CHARS = 1_200
LEAST_CHARS = 40


def language_of(text: str) -> str:
    """The language of most of the text."""
    part = sample(text, 4 * SAMPLE_CHARS)
    if len(part.strip()) < LEAST_CHARS:
        return ""
    if common_share(words_of(part)) >= SURELY_ENGLISH:
        return "en"
    return str(py3langid().classify(sample(text, SAMPLE_CHARS, 3))[0])
