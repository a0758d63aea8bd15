"""The part of a tokenizer that a worker needs: bytes of text in, ids out; light to start, exact.

In:  a Recipe (from a Tokenizer), and texts as bytes.
Out: the ids of the texts, one after the other; the very ids of each whole text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from lamplighter.procs.procfs import own_memory
from lamplighter.readers.ranges import cut_all

GROWN_BYTES = 128 << 20
_PIECE_BYTES = 1 << 15  # what stays in the processor's cache; longer texts are encoded in such pieces
_MANY = 200  # texts at once, from which on a call for each costs more than it should
_PROBE = (
    "The lamps of 1837 were lit, one by one; it's said 42 of them   went out again.\n\nNobody knew why.\n"
    "\tnaïve œuvre, £5 — “quote” Россия 日本語 and then \n the end  "
)

Ids = np.ndarray[Any, np.dtype[Any]]
Lengths = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Recipe:
    """What an encoder is made of; can be sent to another process."""

    fast: str
    """tokenizer.json for gigatoken, without special tokens; '' where its ids are not exact."""
    reference: str
    """tokenizer.json for tokenizers, used where there is no fast one."""


class Encoder:
    """Encodes in this thread alone, unless `threads`: then by the threads of the library."""

    def __init__(self, fast: Any, reference: Any, threads: bool = False) -> None:
        self.fast, self.reference, self.threads = fast, reference, threads
        self.is_free = self._may_cut()
        self.memory = own_memory()[0]
        self.is_young = True  # not yet asked whether it has grown

    def _may_cut(self) -> bool:
        """Whether a cut after a word changes no id: so with byte-level tokenizers, not with those that mark beginnings."""
        data = _PROBE.encode()
        whole = self._encode([data])[0].tolist()
        for size in (5, 9, 17):
            ends = cut_all(data, size)
            pieces = [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]
            if self._encode(pieces)[0].tolist() != whole:
                return False
        return True

    def encode(self, texts: list[bytes]) -> tuple[Ids, Lengths]:
        """The ids of all texts in one array, and how many each has."""
        if not texts:
            return np.zeros(0, np.uint32), np.zeros(0, np.int64)
        if not self.is_free or max(map(len, texts)) <= 2 * _PIECE_BYTES:
            return self._encode(texts)
        pieces: list[bytes] = []
        firsts = []
        for text in texts:
            firsts.append(len(pieces))
            ends = cut_all(text, _PIECE_BYTES)
            pieces += [text[a:b] for a, b in zip([0, *ends], ends, strict=False)] if len(ends) > 1 else [text]
        ids, lengths = self._encode(pieces)
        return ids, np.add.reduceat(lengths, firsts)

    def _encode(self, texts: list[bytes]) -> tuple[Ids, Lengths]:
        if self.fast is None:
            found = self.reference.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
            rows = [np.array(row.ids, np.uint32) for row in found]
        elif self.threads or len(texts) > _MANY:  # the first time this loads another library: not for a few texts
            layout = self.fast.encode_batch(texts, parallel=self.threads).layout
            return np.asarray(layout.content.data), np.diff(np.asarray(layout.offsets.data))
        else:
            encode = self.fast.encode
            rows = [encode(text) for text in texts]
        return np.concatenate(rows), np.fromiter(map(len, rows), np.int64, len(rows))


def make_encoder(recipe: Recipe, threads: bool = False) -> Encoder:
    """For a worker: nothing is loaded that encoding does not need."""
    if recipe.fast:
        import gigatoken

        return Encoder(gigatoken.Tokenizer.from_json(recipe.fast).backend, None, threads)
    import tokenizers

    reference = tokenizers.Tokenizer.from_str(recipe.reference)
    reference.no_truncation()
    reference.no_padding()
    reference.encode_special_tokens = True
    return Encoder(None, reference, threads)


def renewed(encoder: Encoder, recipe: Recipe) -> Encoder:
    """The same one, or another where it has grown: it remembers every word that it has met, without end."""
    if own_memory()[0] - encoder.memory <= GROWN_BYTES:
        encoder.is_young = False
        return encoder
    fresh = make_encoder(recipe, encoder.threads)
    if not encoder.is_young:  # else it is not the encoder that has grown: measure from here on
        fresh.memory = encoder.memory  # both are there at this moment: what the first one began with stays the measure
    return fresh
