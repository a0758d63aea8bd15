"""Which text is trained on and which is held back for validation: by hash, so equal texts are never on both sides.

In:  a source, and what share of it to hold back.
Out: pieces of text, each with its side; whole documents where there are enough of them, else runs of blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lamplighter import report
from lamplighter.data.files import Part, cut_all
from lamplighter.data.sources import Cursor, Source
from lamplighter.errors import BadConfig, BadData
from lamplighter.rundir import human_bytes

LOOK_DOCUMENTS = 100  # with fewer, single blocks of text are divided between training and validation
LOOK_BYTES = 1 << 30
SAMPLE_BYTES = 1 << 22
BLOCK_CHARS = 2000


@dataclass(frozen=True)
class Settings:
    """What, besides texts and tokenizer, decides the bytes of a cache."""

    val_fraction: float = 0.01
    seed: int = 0
    shard_tokens: int = 1 << 24

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise BadConfig(
                f"data.val_fraction is {self.val_fraction}", "it must be 0 or more, and below 1", "try 0.01"
            )
        if self.shard_tokens < 1:
            raise BadConfig(f"shard_tokens is {self.shard_tokens}", "a shard holds at least one token", "")


@dataclass(frozen=True)
class Division:
    """A text's side is decided by its hash alone, so equal texts are never on both sides."""

    by: str
    """"documents", or "blocks" of some 2,000 characters where there are too few documents."""
    below: int
    """Hashes below this are for validation."""
    seed: int
    always_val: int | None = None
    always_train: int | None = None

    def hash(self, text: bytes) -> int:
        salt = (self.seed & (1 << 64) - 1).to_bytes(8, "little")
        return int.from_bytes(hashlib.blake2b(text, digest_size=8, salt=salt).digest(), "little")

    def side(self, hash: int) -> str:
        if hash in (self.always_val, self.always_train):
            return "val" if hash == self.always_val else "train"
        return "val" if hash < self.below else "train"


@dataclass
class _Hashes:
    """The least and the greatest hash of what was looked at."""

    least: int = 1 << 64
    greatest: int = -1

    def add(self, hash: int) -> None:
        self.least, self.greatest = min(self.least, hash), max(self.greatest, hash)


@dataclass
class Look:
    """What the first documents tell."""

    documents: int = 0
    text_bytes: int = 0
    ended: bool = False
    sample: list[str] = field(default_factory=list)
    by_document: _Hashes = field(default_factory=_Hashes)
    by_block: _Hashes = field(default_factory=_Hashes)


Show = Callable[[int, str], None]
"""Is told how many bytes are read, and what is being read now."""


def look(source: Source, settings: Settings, show: Show, sample_bytes: int = SAMPLE_BYTES) -> tuple[Division, Look]:
    """Read the first documents: enough to divide by documents? Neither side may come out empty."""
    plain = Division("documents", int(settings.val_fraction * 2**64), settings.seed)
    found = _look(source, plain, show, sample_bytes)
    by = "documents" if found.documents >= LOOK_DOCUMENTS else "blocks"
    hashes = found.by_document if by == "documents" else found.by_block
    if not settings.val_fraction:
        return Division(by, 0, settings.seed), found
    if hashes.least == hashes.greatest:
        raise BadData(
            "too little text to hold some back for validation",
            f"{source} has one piece of text of its own, of {human_bytes(found.text_bytes)}",
            "add text, or train without validation: --data.val_fraction 0",
        )
    return Division(
        by,
        plain.below,
        settings.seed,
        always_val=hashes.least if hashes.least >= plain.below else None,
        always_train=hashes.greatest if hashes.greatest < plain.below else None,
    ), found


def _look(source: Source, plain: Division, show: Show, sample_bytes: int) -> Look:
    found = Look()
    begins = True
    with report.phase("look at the documents", unit="documents") as p:

        def tell(bytes_done: int, item: str) -> None:
            p.set(found.documents, item)
            show(bytes_done, item)

        for text in watched(source, None, tell):
            data = text.encode()
            if begins and text:
                found.by_document.add(plain.hash(data))
            for block in cut_all(text, BLOCK_CHARS) if text else ():
                found.by_block.add(plain.hash(block.encode()))
            if found.text_bytes < sample_bytes:
                found.sample.append(text)
            found.text_bytes += len(data)
            found.documents += bool(text) and not isinstance(text, Part)
            begins = not isinstance(text, Part)
            if found.text_bytes >= LOOK_BYTES or (
                found.documents >= LOOK_DOCUMENTS and found.text_bytes >= sample_bytes
            ):
                return found
    found.ended = True
    return found


def watched(source: Source, start: Cursor | None, show: Show) -> Iterator[str]:
    """The texts; what is being read is shown before each wait for one."""
    texts = source.documents(start)
    while True:
        here = source.position()
        show(here.bytes_done, here.item)
        text = next(texts, None)
        if text is None:
            return
        yield text


@dataclass(frozen=True)
class Piece:
    """A stretch of text that goes to one side as it is."""

    side: str
    text: str
    bytes: int
    hashes: list[int]
    begins: bool
    ends: bool


class Divider:
    """Texts in, pieces out. Between texts it remembers only the side whose document has not ended."""

    def __init__(self, division: Division, open_side: str | None) -> None:
        self.division, self.open_side = division, open_side

    def pieces(self, text: str) -> Iterator[Piece]:
        if not text and self.open_side is None:
            return iter(())
        return self._runs(text) if self.division.by == "blocks" else self._document(text)

    def _piece(self, side: str, text: str, size: int, hashes: list[int], ends: bool) -> Piece:
        begins = self.open_side is None
        self.open_side = None if ends else side
        return Piece(side, text, size, hashes, begins, ends)

    def _document(self, text: str) -> Iterator[Piece]:
        """A document of several parts goes where its first part says."""
        data = text.encode()
        hashes = [] if self.open_side else [self.division.hash(data)]
        side = self.open_side or self.division.side(hashes[0])
        yield self._piece(side, text, len(data), hashes, ends=not isinstance(text, Part))

    def _runs(self, text: str) -> Iterator[Piece]:
        """Neighbouring blocks of one side stay together; where the side changes, the run ends."""
        run: list[str] = []
        hashes: list[int] = []
        size, now = 0, self.open_side
        for block in cut_all(text, BLOCK_CHARS) if text else ():
            data = block.encode()
            hash = self.division.hash(data)
            side = self.division.side(hash)
            if now is not None and side != now:
                yield self._piece(now, "".join(run), size, hashes, ends=True)
                run, hashes, size = [], [], 0
            now = side
            run.append(block)
            hashes.append(hash)
            size += len(data)
        assert now is not None
        yield self._piece(now, "".join(run), size, hashes, ends=not isinstance(text, Part))
