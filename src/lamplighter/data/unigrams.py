"""What counting alone achieves: the entropy of single tokens, which a model that reads its context must beat.

In:  the tokens of a run: text, instruction rows, or what a stream held back.
Out: nats per token of a guess by frequency, from a sample spread over the whole; a few milliseconds.
"""

from __future__ import annotations

import numpy as np

from lamplighter.data.batches import Int64s, TokenStream

SAMPLE_TOKENS = 1 << 20
_STRETCHES = 64
_LEAST_TOKENS = 2_000  # of fewer the estimate says nothing


def unigram_loss(text: TokenStream) -> float | None:
    """Of a stream of text; None where there are too few tokens to count."""
    return loss_of(_spread(text))


def loss_of(ids: Int64s) -> float | None:
    """Of a sample of tokens."""
    return entropy(ids) if len(ids) >= _LEAST_TOKENS else None


def entropy(ids: Int64s) -> float:
    """Nats per token by frequency; what is too small in a small sample is added (Miller and Madow, 1955)."""
    counts = np.bincount(ids)
    seen = counts[counts > 0]
    share = seen / len(ids)
    return float(-(share * np.log(share)).sum() + (len(seen) - 1) / (2 * len(ids)))


def _spread(stream: TokenStream) -> Int64s:
    """Stretches at even distances, or all of it."""
    size = SAMPLE_TOKENS // _STRETCHES
    if len(stream) <= SAMPLE_TOKENS:
        return np.asarray(stream.read(0, len(stream)), np.int64)
    starts = (np.arange(_STRETCHES) * (len(stream) - size) // (_STRETCHES - 1)).tolist()
    return np.concatenate([np.asarray(stream.read(start, start + size), np.int64) for start in starts])
