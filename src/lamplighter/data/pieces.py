"""A text as its tokens come: what can be shown of it already, and whether it has met a text that ends it.

In:  a tokenizer, texts that end the text, ids one by one.
Out: pieces that add up to the text; half a character, and what may become a stop, wait for what follows.
"""

from __future__ import annotations

from collections.abc import Sequence

from lamplighter.data.tokenizer import Tokenizer


class TextPieces:
    """One growing text. `shown` after a context: some tokenizers decode a token by the one before it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self.tokenizer, self.stops = tokenizer, [stop for stop in stops if stop]
        self.ids = list(context)
        self._prefix, self._read = max(0, len(self.ids) - 8), len(self.ids)
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """What can be shown after one more token; nothing more once it has stopped."""
        if self.stopped:
            return ""
        self.ids.append(token)
        return self._without_stops(self._new(final=False), final=False)

    def end(self) -> str:
        """What was held back."""
        return "" if self.stopped else self._without_stops(self._new(final=True), final=True)

    def _new(self, final: bool) -> str:
        before = self.tokenizer.decode(self.ids[self._prefix : self._read])
        now = self.tokenizer.decode(self.ids[self._prefix :])
        if now.endswith("\ufffd") and not final:
            return ""
        if self._read < len(self.ids):
            self._prefix, self._read = self._read, len(self.ids)
        return now[len(before) :]

    def _without_stops(self, piece: str, final: bool) -> str:
        whole = self._held + piece
        found = [at for at in (whole.find(stop) for stop in self.stops) if at >= 0]
        if found:
            self.stopped = True
            return whole[: min(found)]
        most = 0 if final else max((_overlap(whole, stop) for stop in self.stops), default=0)
        self._held = whole[len(whole) - most :]
        return whole[: len(whole) - most]


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text may be the beginning of a stop."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
