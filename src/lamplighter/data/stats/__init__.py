"""A corpus in figures: documents, true tokens, lengths, padding, duplicates, advice; from one reading.

In:  a source, a tokenizer, the settings of a run; perhaps a test set.
Out: Stats, a frozen record of every figure (its JSON is `lamp data stats --json`); summary.py has the words for it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lamplighter import report
from lamplighter.data.sources import Source
from lamplighter.data.stats.collect import SHOWN, Tally, find_split, read
from lamplighter.data.stats.lengths import (
    Bar,
    LengthAdvice,
    Lengths,
    Padding,
    Spread,
    Window,
    advise,
    bars,
    padding,
    spread,
    window,
    windows,
)
from lamplighter.data.stats.overlap import (
    Duplicates,
    Sides,
    TestGrams,
    TestSet,
    compare_sides,
    compare_test,
    find_duplicates,
    no_near,
)
from lamplighter.data.token_cache.reader import open_tokens
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.readers.bad_records import BadRecords

_FORMAT = 1
_NEAR_DOCUMENTS = 50_000
_MANY_REPEATS = 0.005
_MANY_TWINS = 0.01
_CACHE_NOTE = "from a token cache: characters, near duplicates and faults of rows need the text itself"


@dataclass(frozen=True)
class Request:
    """What is to be counted, besides the text."""

    seq_len: int
    batch_size: int
    val_fraction: float
    sample_bytes: int | None = None
    near_documents: int = _NEAR_DOCUMENTS


# ---------------------------------------------------------------- the record


@dataclass(frozen=True)
class Found:
    """A document, by its place."""

    number: int
    place: str
    tokens: int
    head: str


@dataclass(frozen=True)
class Counts:
    """How much there is."""

    documents: int
    characters: int
    bytes: int
    tokens: int
    """By the tokenizer, without end-of-text."""
    tokens_with_ends: int
    """With one end-of-text after each document: what a token cache of whole documents holds."""
    learned_tokens: int | None
    """Of instruction data: those of the answers, which the loss is taken on; None for text."""
    bytes_per_token: float
    empty_documents: int
    set_aside_lines: int
    set_aside_reasons: dict[str, int]
    used_tokens: int
    """Of the vocabulary."""


@dataclass(frozen=True)
class Example:
    place: str
    text: str


@dataclass(frozen=True)
class Reason:
    """One kind of fault of instruction rows."""

    reason: str
    kind: str
    """faulty or doubtful."""
    about: str
    count: int
    examples: list[Example]


@dataclass(frozen=True)
class Quality:
    """What is wrong with the rows."""

    rows: int
    faulty: int
    doubtful: int
    score: float
    formula: str
    reasons: list[Reason]
    answer_words_mean: float
    """Of the answers that there are."""


@dataclass(frozen=True)
class Stats:
    """Everything."""

    format: int
    source: str
    kind: str
    """text, or chat."""
    template: str
    tokenizer: str
    tokenizer_path: str
    sampled: str
    """'' where all was read; else how much of what."""
    seconds: float
    bytes_per_second: float
    tokens_per_second: float
    """Of encoding alone."""
    counts: Counts
    lengths: Spread
    histogram: list[Bar]
    longest: list[Found]
    shortest: list[Found]
    seq_len: int
    batch_size: int
    window: Window
    windows: list[Window]
    padding: list[Padding]
    duplicates: Duplicates
    sides: Sides
    test_set: TestSet | None
    quality: Quality | None
    advice: list[LengthAdvice]
    notes: list[str] = field(default_factory=list)


# ---------------------------------------------------------------- counting


def count_text(source: Source, tokenizer: Tokenizer, path: str, request: Request, test: TestGrams | None) -> Stats:
    """All figures of plain text."""
    started = time.monotonic()
    found, why_not = find_split(source, request.val_fraction)
    reason = no_near(request.near_documents)
    tally = Tally(tokenizer, found, 0 if reason else request.near_documents, test.meet if test else None)
    sampled = read(source, tally, request.sample_bytes)
    seconds = time.monotonic() - started
    return conclude(
        About(str(source), "text", "", str(tokenizer), path, sampled=sampled, seconds=seconds),
        request,
        tally,
        dirt=_set_aside(source),
        duplicates=find_duplicates(tally, reason),
        apart=compare_sides(tally, found, why_not, reason),
        test_set=compare_test(tally, test, reason) if test is not None else None,
    )


def _set_aside(source: Source) -> dict[str, int]:
    """Lines that the source has set aside, by reason."""
    bad = getattr(source, "bad", None) or getattr(getattr(source, "source", None), "bad", None)
    return dict(bad.reasons) if isinstance(bad, BadRecords) else {}


@dataclass(frozen=True)
class About:
    """What was counted, and how long it took."""

    source: str
    kind: str
    template: str
    tokenizer: str
    tokenizer_path: str
    sampled: str
    seconds: float


def conclude(
    about: About,
    request: Request,
    tally: Tally,
    dirt: dict[str, int],
    duplicates: Duplicates,
    apart: Sides,
    test_set: TestSet | None = None,
    quality: Quality | None = None,
    notes: list[str] | None = None,
) -> Stats:
    """From what was counted to the record."""
    is_text = about.kind == "text"
    lengths = np.frombuffer(tally.lengths, np.int64) + int(is_text)
    tokens = int(lengths.sum()) - (len(lengths) if is_text else 0)
    seq_len, batch_size = request.seq_len, request.batch_size
    with report.phase("padding of each strategy", unit="documents") as p:
        wasted = padding(lengths, seq_len, batch_size)
        p.tick(len(lengths))
    longest, shortest = _extremes(tally, lengths)
    return Stats(
        format=_FORMAT,
        **{**vars(about), "seconds": round(about.seconds, 3)},
        bytes_per_second=round(tally.bytes / max(1e-6, about.seconds)),
        tokens_per_second=round(tokens / tally.encode_s) if tally.encode_s else 0,
        counts=Counts(
            documents=len(lengths),
            characters=tally.characters,
            bytes=tally.bytes,
            tokens=tokens,
            tokens_with_ends=int(lengths.sum()),
            learned_tokens=tally.learned,
            bytes_per_token=tally.bytes / max(1, tokens),
            empty_documents=tally.empty,
            set_aside_lines=sum(dirt.values()),
            set_aside_reasons=dirt,
            used_tokens=int(tally.used.sum()),
        ),
        lengths=spread(lengths),
        histogram=bars(lengths),
        longest=longest,
        shortest=shortest,
        seq_len=seq_len,
        batch_size=batch_size,
        window=window(lengths, seq_len),
        windows=windows(lengths, seq_len),
        padding=wasted,
        duplicates=duplicates,
        sides=apart,
        test_set=test_set,
        quality=quality,
        advice=[
            *advise(lengths, seq_len, batch_size, not is_text),
            *_advise_cleaning(duplicates, len(lengths), is_text),
            *_advise_apart(apart, test_set),
        ],
        notes=notes or [],
    )


def _advise_cleaning(found: Duplicates, documents: int, is_text: bool) -> list[LengthAdvice]:
    """Equal examples are learned once in any case; equal documents are not."""
    exact, near = found.exact if is_text else 0, found.near or 0
    if exact + near <= _MANY_REPEATS * documents:
        return []
    because = (
        f"{exact:,} of {documents:,} repeat an earlier one ({exact / documents:.1%}), {near:,} of {found.near_documents:,}"
        " looked at nearly do: they are learned by heart, and cost steps"
    )
    return [LengthAdvice("take repeated texts out", because, "lamp data clean PATH... --out DIR")]


def _advise_apart(sides: Sides, test: TestSet | None) -> list[LengthAdvice]:
    """A score on text that was trained on says nothing."""
    found = []
    if sides.near and sides.near > _MANY_TWINS * sides.near_val:
        because = (
            f"{sides.near:,} of {sides.near_val:,} held-back {sides.by} ({sides.near / sides.near_val:.1%}) nearly stand among"
            f" {sides.near_train:,} that are trained on: the validation loss will look better than it is"
        )
        found.append(
            LengthAdvice("take near duplicates out before training", because, "lamp data clean PATH... --out DIR")
        )
    if test is not None and (known := test.exact + test.grams):
        because = (
            f"{known:,} of its {test.documents:,} documents stand in the training text ({test.exact:,} as they are,"
            f" {test.grams:,} for the most part): a score on them measures memory"
        )
        found.append(LengthAdvice(f"do not judge by {test.name} as it is", because, "take those out of one of the two"))
    return found


# ---------------------------------------------------------------- a token cache


def count_cache(folder: Path, request: Request) -> Stats:
    """What a finished token cache tells: lengths and exact repeats; it holds no text."""
    started = time.monotonic()
    found = open_tokens(folder)
    tally = Tally(None, None, 0)
    with report.phase("count", total=found.train.tokens + found.val.tokens, unit="tokens") as p:
        for split in (found.train, found.val):
            ends = np.append(split.document_starts()[1:], split.tokens).tolist()
            for begin, end in zip(split.document_starts().tolist(), ends, strict=True):
                p.tick(0, f"{split.name} of {folder}")
                data = split.read(int(begin), int(end)).astype("<u4").tobytes()
                tally.add_hashed(f"{split.name} of {folder}", data, int(end - begin) - 1)
                p.tick(end - begin)
            tally.bytes += split.text_bytes
    parts = found.manifest.get("parts", {})
    named = {name: str(parts.get(name, {}).get("content", "unknown")) for name in ("sources", "tokenizer")}
    seconds, reason = time.monotonic() - started, "a token cache holds no text"
    name = f"token cache {folder} of {named['sources']}"
    return conclude(
        About(name, "text", "", named["tokenizer"], "", sampled="", seconds=seconds),
        request,
        tally,
        dirt={},
        duplicates=find_duplicates(tally, reason),
        apart=Sides("documents", reason, found.train.documents, found.val.documents),
        notes=[_CACHE_NOTE],
    )


def _extremes(tally: Tally, lengths: Lengths) -> tuple[list[Found], list[Found]]:
    """The longest and the shortest documents, in tokens."""
    order = np.argsort(lengths, kind="stable")
    made = []
    for numbers in (order[::-1][:SHOWN], order[:SHOWN]):
        made.append([Found(int(n), tally.places.of(int(n)), int(lengths[n]), tally.head_of(int(n))) for n in numbers])
    return made[0], made[1]
