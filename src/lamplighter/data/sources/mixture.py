"""Several sources as one: one after the other, or mixed by weights in a fixed order.

In:  sources, and for a mixture the share of text (in characters) that each is to give.
Out: a Source. A document stays together; the next one always comes from the source that is furthest behind its share, so the
     order depends on nothing but texts and weights. Repetitions, achieved shares and what was left unread are said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lamplighter import report
from lamplighter.data.sources.file_source import FileSource, Source
from lamplighter.errors import BadConfig, BadData
from lamplighter.readers.records import Cursor, Part, Position, digest


class Chain:
    """Sources one after the other."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = list(sources)
        self._now = self._before = 0
        self._cursor: Cursor = {}

    def __str__(self) -> str:
        return " then ".join(map(str, self.sources))

    def fingerprint(self) -> str:
        return digest(["chain", *(source.fingerprint() for source in self.sources)])

    def total_bytes(self) -> int | None:
        return _sum([source.total_bytes() for source in self.sources])

    def position(self) -> Position:
        here = self.sources[self._now].position()
        return Position(here.item, self._before + here.bytes_done, self._cursor)

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        self._cursor = start or {}
        self._now = int(self._cursor.get("source", 0))
        return self._read(self._cursor)

    def _read(self, start: Cursor) -> Iterator[str]:
        first = self._now
        for number in range(first, len(self.sources)):
            self._before = sum(source.total_bytes() or 0 for source in self.sources[:number])
            self._now = number
            source = self.sources[number]
            for text in source.documents(start.get("inner") if number == first else None):
                self._cursor = {"source": number, "inner": source.position().cursor}
                yield text


class Mixture:
    """Sources mixed by the share of text that each is to give."""

    def __init__(self, sources: Sequence[Source], weights: list[float], until: str, names: list[str]) -> None:
        check_weights(weights, names)
        self.sources, self.weights, self.until, self.names = list(sources), weights, until, names
        self._state = _State.at(None, len(weights))
        self._cursor: Cursor = {}
        self._said: set[str] = set()

    def __str__(self) -> str:
        whole = sum(self.weights)
        shares = (f"{weight / whole:.1%} {source}" for weight, source in zip(self.weights, self.sources, strict=True))
        return "a mixture of " + ", ".join(shares)

    def fingerprint(self) -> str:
        return digest(["mixture", self.weights, self.until, *(source.fingerprint() for source in self.sources)])

    def total_bytes(self) -> int | None:
        """About: when the first source (or the last) ends, by its size and its share."""
        sizes = [source.total_bytes() for source in self.sources]
        if None in sizes:
            return None
        whole = sum(self.weights)
        ends = [(size or 0) * whole / weight for size, weight in zip(sizes, self.weights, strict=True)]
        return int(min(ends) if self.until == "first" else max(ends))

    def position(self) -> Position:
        done = 0
        state = self._state
        for number, source in enumerate(self.sources):
            done += state.rounds[number] * (source.total_bytes() or 0)
            done += source.position().bytes_done if state.inner[number] is not None else 0
        return Position(self._item_now(), done, self._cursor)

    def _item_now(self) -> str:
        now = self._state.now
        return self.sources[now].position().item if self._state.started[now] else self.names[now]

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        """Documents in turn, each from the source that is furthest behind."""
        self._cursor = start or {}
        self._state = _State.at(start, len(self.weights))
        return self._read(self._state)

    def _read(self, state: _State) -> Iterator[str]:
        readings: list[Iterator[str] | None] = [None] * len(self.weights)
        while True:
            now = state.now if state.open else self._furthest_behind(state)
            reading = readings[now] or self.sources[now].documents(state.inner[now])
            state.now, state.started[now], readings[now] = now, True, reading
            text = next(reading, None)
            if text is None:
                state.rounds[now] += 1
                state.inner[now], state.started[now], readings[now] = None, False, None
                if self.until == "first" or all(state.rounds):
                    return self._say_end(state)
                self._say_again(now, state)
                continue
            state.inner[now] = self.sources[now].position().cursor
            state.chars[now] += len(text)
            state.open = isinstance(text, Part)
            self._cursor = state.cursor()
            yield text

    def _furthest_behind(self, state: _State) -> int:
        return min(range(len(self.weights)), key=lambda number: (state.chars[number] / self.weights[number], number))

    def _say_again(self, now: int, state: _State) -> None:
        if not state.chars[now]:
            raise BadData(f"no text in {self.names[now]}", "every document is empty", "take it out of data.paths")
        words = f"mixture: {self.names[now]} has ended and starts again (repetition {state.rounds[now]})"
        if words not in self._said:  # a source is read more than once: to look, to train a tokenizer, to encode
            self._said.add(words)
            report.warn(f"{words}; data.mix_until is all", source=self.names[now], repetition=state.rounds[now])

    def _say_end(self, state: _State) -> None:
        """Achieved shares, and what was left unread."""
        given, whole = max(1, sum(state.chars)), sum(self.weights)
        words = []
        for number, name in enumerate(self.names):
            share = f"{state.chars[number] / given:.1%} of {self.weights[number] / whole:.1%} asked for"
            words.append(f"{name}: {state.chars[number]:,} characters ({share}), {self._unread(number, state)}")
        ended = self.names[state.now]
        text = f"the mixture ends, as {ended} has ended; {'; '.join(words)}"
        if text not in self._said:
            self._said.add(text)
            report.note(text, chars=state.chars)

    def _unread(self, number: int, state: _State) -> str:
        if state.rounds[number]:
            return f"read {state.rounds[number]} times" if state.rounds[number] > 1 else "read to its end"
        total = self.sources[number].total_bytes()
        if not total:
            return "not read to its end"
        source = self.sources[number]
        done = source.bytes_behind() if isinstance(source, FileSource) else source.position().bytes_done
        done = done if state.started[number] else 0
        return f"{max(0.0, 1 - done / total):.0%} left unread"


class _State:
    """How far a mixture is; all of it is in the cursor."""

    def __init__(self, chars: list[int], rounds: list[int], inner: list[Cursor | None], now: int, open: bool) -> None:
        self.chars, self.rounds, self.inner, self.now, self.open = chars, rounds, inner, now, open
        self.started = [False] * len(chars)

    @classmethod
    def at(cls, cursor: Cursor | None, count: int) -> _State:
        if not cursor:
            return cls([0] * count, [0] * count, [None] * count, 0, False)
        inner = [dict(one) if one is not None else None for one in cursor["inner"]]
        return cls([*cursor["chars"]], [*cursor["rounds"]], inner, int(cursor["now"]), bool(cursor["open"]))

    def cursor(self) -> Cursor:
        inner = [*self.inner]
        return {"chars": [*self.chars], "rounds": [*self.rounds], "inner": inner, "now": self.now, "open": self.open}


def check_weights(weights: list[float], names: list[str]) -> None:
    """One positive number for each source, or an error with the arithmetic."""
    if len(weights) != len(names):
        why = f"{len(weights)} weights ({', '.join(f'{w:g}' for w in weights)}) for {len(names)} entries of data.paths"
        raise BadConfig("data.weights does not fit data.paths", why, "give one weight for each entry")
    for weight, name in zip(weights, names, strict=True):
        if not 0 < weight < float("inf"):
            whole = sum(weights)
            why = f"{weight:g} of {whole:g} would be {weight / whole if whole else 0:.0%} of the text"
            raise BadConfig(
                f"the weight of {name} is {weight:g}", why, "weights are above 0; leave the entry out instead"
            )


def _sum(sizes: list[int | None]) -> int | None:
    return None if None in sizes else sum(size or 0 for size in sizes)
