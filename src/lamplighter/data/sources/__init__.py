"""Where documents come from: files here or elsewhere, datasets, a source of the user's own, or the embedded corpus.

In:  paths, patterns, URLs, dataset:NAME, source:module:name, with or without weights; or "module:name"; or nothing.
Out: a Source: texts in a fixed order, a fingerprint of them, and how far the reading is.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lamplighter import own_code, report
from lamplighter.data.sources.file_source import FileSource, Source
from lamplighter.data.sources.hub import HubSource, open_dataset
from lamplighter.data.sources.mixture import Chain, Mixture, check_weights
from lamplighter.errors import BadConfig, BadData
from lamplighter.readers.files import find_items
from lamplighter.readers.http import safe_url
from lamplighter.readers.records import Cursor, Part, Position, digest, skip
from lamplighter.readers.remote import RemoteFile, is_url
from lamplighter.readers.tables import require_library

if TYPE_CHECKING:
    from lamplighter.config import Data

__all__ = [
    "Cursor",
    "EmbeddedCorpus",
    "FileSource",
    "OwnSource",
    "Part",
    "Position",
    "Source",
    "open_data",
    "own_source",
]


Opened = dict[str, list[RemoteFile] | HubSource]
"""What entries of data.paths were opened already, to see whether they hold rows: not asked for a second time."""


def watched(source: Source, show: Callable[[int, str], None], start: Cursor | None = None) -> Iterator[str]:
    """The texts of a source; bytes done and what is being read now are shown before each wait for one."""
    texts = source.documents(start)
    while True:
        here = source.position()
        show(here.bytes_done, here.item)
        text = next(texts, None)
        if text is None:
            return
        yield text


def open_data(data: Data, hash_store: Path | None = None, opened: Opened | None = None) -> Source:
    """The documents that the section `data` of a run asks for; the embedded corpus where it asks for none."""
    if data.paths and data.source:
        why = "documents come from one of the two"
        raise BadConfig("both data.paths and data.source are set", why, "take one of them out")
    if data.weights and not data.paths:
        raise BadConfig("data.weights without data.paths", "weights mix the entries of data.paths", "give data.paths")
    if data.source:
        return own_source(data.source)
    if not data.paths:
        return EmbeddedCorpus()
    known = opened or {}
    if data.weights:
        check_weights(data.weights, data.paths)
        sources = [_open_entries([entry], data, hash_store, known) for entry in data.paths]
        return Mixture(sources, data.weights, data.mix_until, [_shown_entry(entry) for entry in data.paths])
    groups = [list(group) for _, group in groupby(data.paths, lambda entry: entry if is_named(entry) else "")]
    sources = [_open_entries(group, data, hash_store, known) for group in groups]
    return sources[0] if len(sources) == 1 else Chain(sources)


def _open_entries(entries: list[str], data: Data, hash_store: Path | None, known: Opened) -> Source:
    """Files that follow each other in data.paths, or one dataset, or one source of the user's own."""
    kind, _, name = entries[0].partition(":")
    if isinstance(hub := known.get(entries[0]), HubSource):
        return hub.narrowed(data.text_key)
    if kind == "dataset":
        return open_dataset(name, data, data.text_key, hash_store)
    if kind == "source":
        return own_source(name)
    remote = {entry: files for entry, files in known.items() if isinstance(files, list)}
    items = find_items(entries, data.retry_s, remote)
    require_library(item.name for item in items)
    return FileSource(
        items, data.separator, data.text_key, hash_store, bad_text=data.bad_text, bad_limit=data.bad_limit
    )


def is_named(entry: str) -> bool:
    """Whether an entry of data.paths names a dataset or a source of the user's own, not a file."""
    return entry.startswith(("dataset:", "source:"))


def is_own(entry: str) -> bool:
    return entry.startswith("source:")


def _shown_entry(entry: str) -> str:
    """An entry of data.paths for people: without the credentials of a URL."""
    return safe_url(entry) if is_url(entry) else entry


# ---------------------------------------------------------------- a source of the user's own


def own_source(name: str) -> OwnSource:
    """Import "module:name" (own_code.py). It is, or returns, a Source or texts."""
    with report.phase(f"import {name}"):
        module, target = _find(name)
        is_source = hasattr(target, "documents") and not isinstance(target, type)
        make: Callable[[], Any] | None = target if callable(target) and not is_source else None
        found = make() if make else target
    if hasattr(found, "documents"):
        return OwnSource(name, found, lambda: found, module)
    if isinstance(found, str) or not hasattr(found, "__iter__"):
        what = f"{name} gives a {type(found).__name__}"
        raise BadConfig(what, "wanted: texts, or an object with documents()", "return a list, or write a generator")
    if iter(found) is not found:
        return OwnSource(name, found, lambda: found, module)
    if make is None:
        why = "texts are read more than once: to look, to train a tokenizer, to encode"
        raise BadConfig(f"{name} can be read only once", why, "name the function that makes it, or a list")
    return OwnSource(name, found, make, module)


def _find(name: str) -> tuple[ModuleType, Any]:
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise BadConfig(f'data.source is "{name}"', "it must be module:name", 'for example "mytexts:documents"')
    module = _import(module_name, name)
    if not hasattr(module, attribute):
        near = get_close_matches(attribute, dir(module), n=1)
        advice = f"did you mean {module_name}:{near[0]}?" if near else "check data.source"
        raise BadConfig(f"no {attribute} in module {module_name}", f"looked in {module.__file__}", advice)
    return module, getattr(module, attribute)


def _import(module_name: str, name: str) -> ModuleType:
    try:
        return own_code.load(module_name)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        inside = "" if "importlib" in frame.filename else f" (at {frame.filename}:{frame.lineno})"
        why = f"{type(error).__name__}: {error}{inside}"
        raise BadConfig(
            f"cannot import {name}", why, f"try: python -c 'import {module_name}' in {Path.cwd()}"
        ) from error


class OwnSource:
    """A user's texts, given the methods that they lack."""

    def __init__(self, name: str, found: Any, texts: Callable[[], Any], module: ModuleType) -> None:
        self.name, self._found, self._texts, self._module = name, found, texts, module
        self._number, self._bytes = 0, 0

    def __str__(self) -> str:
        return f"source {self.name}"

    def fingerprint(self) -> str:
        if hasattr(self._found, "fingerprint"):
            return digest([self.name, str(self._found.fingerprint())])
        code = Path(self._module.__file__ or "")
        report.note(f"{self.name} has no fingerprint(): its texts count as changed when {code.name} changes")
        return digest([self.name, code.read_text() if code.is_file() else ""])

    def total_bytes(self) -> int | None:
        total = self._found.total_bytes() if hasattr(self._found, "total_bytes") else None
        return None if total is None else int(total)

    def position(self) -> Position:
        if hasattr(self._found, "position"):
            position: Position = self._found.position()
            own = {"own": position.cursor} if getattr(position, "cursor", None) else {}
            return Position(position.item, position.bytes_done, {"document": self._number, **own})
        return Position(f"document {self._number} of {self.name}", self._bytes, {"document": self._number})

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        self._number, self._bytes = int((start or {}).get("document", 0)), 0
        return self._read(start or {})

    def _read(self, start: Cursor) -> Iterator[str]:
        if hasattr(self._found, "documents"):
            texts = iter(self._found.documents(start.get("own", self._number)))
        else:
            texts = iter(self._texts())
            skip(texts, self._number, self.position)
        some = self._number > 0
        for text in texts:
            self._bytes += len(self._checked(text))
            self._number += 1
            some = some or bool(text)
            yield text
        if not some:
            raise BadData(f"no text in {self}", "it gave no document that holds text", "check what it yields")

    def _checked(self, text: object) -> bytes:
        which = f"document {self._number} of {self.name}"
        if not isinstance(text, str):
            what = f"{which} is a {type(text).__name__}, not a text"
            raise BadData(what, "documents are strings", "yield the text itself, such as row['text']")
        try:
            return text.encode()
        except UnicodeEncodeError as error:
            raise BadData(f"{which} cannot be written as UTF-8", str(error), "mend that document") from error


# ---------------------------------------------------------------- only the first of many


class First:
    """The first `count` documents of a source, for trying things out; all Parts of each."""

    def __init__(self, source: Source, count: int) -> None:
        self.source, self.count = source, count
        self._number = 0

    def __str__(self) -> str:
        return f"the first {self.count:,} documents of {self.source}"

    def fingerprint(self) -> str:
        return digest(["first documents", self.count, self.source.fingerprint()])

    def total_bytes(self) -> int | None:
        """Unknown: it depends on where the last text ends."""
        return None

    def position(self) -> Position:
        here = self.source.position()
        return Position(here.item, here.bytes_done, {"number": self._number, "inner": here.cursor})

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        self._number = int((start or {}).get("number", 0))
        return self._read(self.source.documents((start or {}).get("inner")))

    def _read(self, texts: Iterator[str]) -> Iterator[str]:
        while self._number < self.count and (text := next(texts, None)) is not None:
            self._number += not isinstance(text, Part)
            yield text


# ---------------------------------------------------------------- the embedded corpus


class EmbeddedCorpus:
    """The default: made up by a grammar, so it ships with the product and any size is to be had."""

    def __init__(self, seed: int = 0, documents: int = 20_000) -> None:
        self.seed, self.count = seed, documents
        self._number, self._bytes = 0, 0

    def __str__(self) -> str:
        return f"embedded corpus, {self.count:,} documents, seed {self.seed}"

    def fingerprint(self) -> str:
        from lamplighter.data.corpus import GRAMMAR_VERSION

        return digest(["corpus", GRAMMAR_VERSION, self.seed, self.count])

    def total_bytes(self) -> int:
        """About: the mean of the first documents, times their number."""
        from lamplighter.data.corpus import entries

        first = [len(entry.text) for entry in entries(self.seed, min(self.count, 64))]
        return sum(first) * self.count // max(1, len(first))

    def position(self) -> Position:
        return Position(f"document {self._number} of {self.count}", self._bytes, {"document": self._number})

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        self._number = int((start or {}).get("document", 0))
        self._bytes = self.total_bytes() * self._number // max(1, self.count)
        return self._read()

    def _read(self) -> Iterator[str]:
        from lamplighter.data.corpus import entries

        for entry in entries(self.seed, self.count - self._number, self._number):
            self._number += 1
            self._bytes += len(entry.text)
            yield entry.text
