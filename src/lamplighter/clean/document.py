"""One document through all the rules: from raw text to clean text, or to the reason why it is left out.

In:  a raw document and the rules.
Out: the clean one with its scores, or a rejection; what each rule did is in the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lamplighter.clean import gutenberg, quality, unwrap
from lamplighter.clean import normalise as characters
from lamplighter.clean.features import Words, words_of
from lamplighter.clean.language import language_of
from lamplighter.clean.libraries import has_language
from lamplighter.clean.rules import Ledger, Raw, Rejected, Rules, snippet

INSIDE = {"transcriber's note", "gutenberg line", "page numbers", "illustrations", "italics"}


@dataclass(frozen=True)
class Clean:
    """A document as it goes out."""

    place: str
    text: str
    words: Words
    extra: dict[str, Any] = field(default_factory=dict)
    language: str = ""
    score: float = 1.0


def clean_text(text: str, rules: Rules, ledger: Ledger | None = None, place: str = "") -> tuple[str, dict[str, str]]:
    """(the clean text, what its own header says of it). Doing it again changes nothing."""
    done, extra = _cleaned(text, rules, ledger if ledger is not None else Ledger(), place)
    return done.text, extra


def _cleaned(text: str, rules: Rules, ledger: Ledger, place: str) -> tuple[unwrap.Joined, dict[str, str]]:
    odd = characters.odd_ones(text)
    text, changes = characters.misread(text, odd)
    ledger.add("mojibake", len(changes), sum(len(one.before) for one in changes), changes, place)
    text, unseen = characters.characters(text, None if changes else odd)
    ledger.add("unseen characters", unseen, unseen)
    book = gutenberg.strip(text)
    for change in book.removed:
        ledger.add(change.rule, 1, len(change.before), [change], place)
    cut_inside = any(
        change.rule in INSIDE for change in book.removed
    )  # what went there may leave blanks at a line's end
    text = characters.blank_lines(characters.trailing(book.text) if cut_inside else book.text)
    joined = unwrap.Joined(text)
    if not rules.keep_lines:
        joined = unwrap.join(text, real_hyphens=bool(book.removed))
        ledger.add("joined lines", joined.count, 0, list(joined.changes), place)
        ledger.add("hyphens closed", joined.hyphens, joined.hyphens)
    extra = {name: value for name, value in (("title", book.title), ("author", book.author)) if value}
    return joined, extra


def clean_document(raw: Raw, rules: Rules, ledger: Ledger) -> Clean | Rejected:
    """Clean it, then ask whether it is worth keeping."""
    if not raw.text or raw.text.isspace():
        return Rejected(raw.place, "empty", "there is no text in it")
    if len(raw.text) > rules.max_bytes:
        why = f"{len(raw.text):,} characters; the limit is {rules.max_document_mb:g} MB (--max-document-mb)"
        return Rejected(raw.place, "too_long", why, head=snippet(raw.text))
    done, own = _cleaned(raw.text, rules, ledger, raw.place)
    text = done.text
    if not text:
        return Rejected(raw.place, "empty", "nothing is left when the boilerplate is gone", head=snippet(raw.text))
    words = words_of(text, done.data)
    language = language_of(text, words) if has_language(rules.language != "any") else ""
    found = quality.judge(text, words, english=language == "en" or rules.language == "en")
    if reason := _refusal(found, language, rules):
        scores = {**found.measures, "score": found.score, "words": found.words}
        return Rejected(raw.place, reason[0], reason[1], scores, snippet(text))
    return Clean(raw.place, text, words, {**own, **raw.extra}, language, found.score)


def _refusal(found: quality.Quality, language: str, rules: Rules) -> tuple[str, str] | None:
    if found.words < rules.min_words:
        return "too_short", f"{found.words} words; {rules.min_words} are wanted (--min-words)"
    wanted = {one.strip() for one in rules.language.split(",")}
    if "any" not in wanted and language not in wanted:
        return "language", f"{language or 'unknown'}, wanted is {rules.language} (--language)"
    if found.score <= rules.min_quality:
        bad, good = quality.BOUNDS[found.worst]
        value = found.measures[found.worst]
        return quality.REASONS[
            found.worst
        ], f"{found.worst} is {value:g}; good text has {good:g}, {bad:g} is out of bounds"
    return None
