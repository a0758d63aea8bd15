"""A Project Gutenberg file without what is not the book: header, licence, credits, transcribers' notes, adverts, its markup.

In:  a text with line ends of one kind and its blank lines as they were (they tell a section from a paragraph).
Out: the book, its title and author as the header has them, and every piece that was taken away.

A text without one of Project Gutenberg's own lines is handed back as it is. Where a mark is missing or in doubt the text stays.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field, replace

from lamplighter.clean import boilerplate as words
from lamplighter.clean.boilerplate import Paragraph, paragraphs
from lamplighter.clean.rules import Edit

_HEAD_CHARS = 30_000  # a header with all its legal pages is shorter
_FRONT_CHARS = 9_000  # the pages in which credits are looked for
_NOTE_CHARS = 120_000
_BRACKET_CHARS = 4_000
_MENTIONS = 10  # a book that speaks of Project Gutenberg more often than this is about it
_SECTION_GAP = 3  # blank lines


@dataclass
class Book:
    """The text as it shrinks, and what was taken away."""

    text: str
    title: str = ""
    author: str = ""
    removed: list[Edit] = field(default_factory=list)

    def cut(self, rule: str, start: int, end: int, instead: str = "") -> None:
        if piece := self.text[start:end].strip():
            self.removed.append(Edit(rule, piece, instead.strip()))
        self.text = self.text[:start] + instead + self.text[end:]


_LEGAL_WORDS = words.cases("gutenberg", "small print", "updated editions", "this file should", "creating the works", "corrected editions", "please read this", "most people start", "full license")  # fmt: skip
_NOTE_WORDS = words.cases("transcri", "redactor", "proofreader", "etext", "e-text", "ebook", "e-book", "electronic", "scanner", "digiti", "typist", "preparer", "producer", "anmerkung", "bemerkung", "hinweis", "opmerking", "transkri", "trascri", "transskri", "errata", "corrected", "corrections", "executive")  # fmt: skip
TRANSCRIBER = words.cases("transcriber")


def _is_ours(text: str) -> bool:
    """Whether one of Project Gutenberg's own lines is there, in its place; to talk about it, or to quote it, is not enough."""
    head, tail = text[:_HEAD_CHARS], text[-2 * _HEAD_CHARS :] if len(text) > _HEAD_CHARS else ""
    if _FENCE.search(head) or _FENCE.search(tail):
        return False
    for part in (head, tail):
        lines = words.lines_with(part, words.NAME_OR_PRINT)
        marks = words.marks(part, (words.START, words.END, words.SMALL_PRINT_ENDS), lines) if lines else []
        if any(_in_place(part, mark) for mark in marks):
            return True
        if any(words.is_legal(part[m.start() :]) for m in words.marks(part, (words.LAST_LINE,), lines)):
            return True
        if "utenberg-tm" in part and words.marks(part, (words.LEGAL,), words.lines_with(part, _LEGAL_WORDS)):
            return True
    first = words.marks(head, (words.HEADER,), words.lines_with(head[:3000], words.NAME))
    return bool(first and words.TERMS.search(head[first[0].end() :]))


_FENCE = re.compile(r"^ {0,3}```[\w+-]*[ \t]*$", re.MULTILINE)  # of a page that quotes the lines


def _in_place(part: str, mark: re.Match[str]) -> bool:
    """START stands first or after a header, END last or before the licence; the small print's end needs neither."""
    if mark.re is words.START:
        before = part[: mark.start()].strip()
        first = words.marks(before, (words.HEADER,), words.lines_with(before[:3000], words.NAME))
        trimmed = len(before) < 1000 and mark.group().startswith("*")  # somebody left but a title before it
        return trimmed or bool(first or words.TERMS.search(before))
    if mark.re is words.END:
        after = part[mark.end() :].strip()
        return not after or bool(words.BOILER.search(after)) or words.LEGAL.search(after) is not None
    return True


def _near_the_ends(text: str, needles: tuple[str, ...], tail: int) -> list[int]:
    begin = max(_HEAD_CHARS, len(text) - tail)
    return [*words.lines_with(text, needles, 0, _HEAD_CHARS), *words.lines_with(text, needles, begin)]


def strip(text: str) -> Book:
    """The book in a file, or in several files that were put one after the other."""
    if not _is_ours(text):
        return Book(text)
    books = [_one(part) for part in _parts(text)]
    first = books[0]
    if len(books) == 1:
        return first
    text = "\n\n\n\n\n".join(one.text.strip("\n") for one in books if one.text.strip())
    return Book(text, first.title, first.author, [change for one in books for change in one.removed])


def _parts(text: str) -> list[str]:
    """Where a file goes on with another START after an END, each book by itself."""
    parts, begin = [], 0
    found = words.marks(text, (words.START, words.END), words.lines_with(text, words.NAME))
    for end in (one for one in found if one.re is words.END):
        start = next((one for one in found if one.re is words.START and one.start() > end.end()), None)
        if start is None or end.start() < begin:
            continue
        between = text[end.end() : start.start()]
        header = words.marks(between, (words.HEADER,), words.lines_with(between, words.NAME))
        cut = end.end() + (header[-1].start() if header and words.is_legal(between) else 0)
        parts.append(text[begin:cut])
        begin = cut
    return [*parts, text[begin:]]


def _one(text: str) -> Book:
    book = Book(text)
    _head(book)
    _tail(book)
    _notes(book)
    _front(book)
    _adverts(book)
    _back(book)
    _inside(book)
    return book


# ---------------------------------------------------------------- from the first line to the book


def _head(book: Book) -> None:
    """Everything up to the last of the header's markers."""
    text = book.text
    lines = _near_the_ends(text, words.NAME_OR_PRINT, 4 * _HEAD_CHARS)
    last = min((m.start() for m in words.marks(text, (words.END, words.LAST_LINE), lines)), default=len(text))
    end = 0
    for mark in words.marks(text, (words.START, words.SMALL_PRINT_ENDS), lines):
        if mark.start() > last or mark.start() - end > _HEAD_CHARS:
            break
        if end and not words.is_legal(text[end : mark.start()]):
            break
        end = _marker_end(text, mark.end())
    if not end:
        end = _header_paragraphs(text)
    header = text[:end]
    book.title, book.author = _field(header, "Title"), _field(header, "Author")
    book.cut("gutenberg header", 0, end)


def _marker_end(text: str, end: int) -> int:
    """A marker with a long title goes on over the next lines, to its asterisks."""
    if text[:end].rstrip().endswith("*"):
        return end
    stop = end
    for _ in range(4):
        stop = text.find("\n", stop + 1)
        line = text[end : stop if stop >= 0 else len(text)].rpartition("\n")[2].strip()
        if stop < 0 or not line:
            return end
        if line.endswith("*"):
            return stop
    return end


def _header_paragraphs(text: str) -> int:
    """A header without any marker: its paragraphs one by one, as long as they are the header's."""
    pieces = paragraphs(text, 0, min(len(text), _HEAD_CHARS))
    if not any(words.HEADER.match(one.text) for one in pieces[:4]):
        return 0
    end, doubtful = 0, 0
    for one in pieces:
        if words.is_boiler(one.text):
            end, doubtful = one.end, 0
        else:
            doubtful += 1
            if doubtful > 2 or len(one.text) > 400:
                break
    return end


def _field(header: str, name: str) -> str:
    """The value of a header line, with the lines by which it goes on."""
    found = re.search(rf"^{name}:[ \t]*(\S[^\n]*(?:\n[ \t]+\S[^\n]*)*)", header, re.MULTILINE)
    return " ".join(found.group(1).split()) if found else ""


# ---------------------------------------------------------------- from the book to the last line


def _tail(book: Book) -> None:
    """From the first end mark after which nothing but licence is left; a mark in the middle goes alone."""
    legal = _near_the_ends(book.text, _LEGAL_WORDS, 4 * _HEAD_CHARS)
    lines = sorted({*words.lines_with(book.text, words.NAME), *legal})
    found = {m.start(): m for m in words.marks(book.text, (words.LEGAL, words.LAST_LINE, words.END), lines)}
    inner: list[tuple[int, int]] = []
    for start in sorted(found):
        if words.is_legal(book.text[start:]):
            book.cut("gutenberg licence", start, len(book.text))
            break
        if found[start].re is not words.LEGAL:
            end = book.text.find("\n\n", start)
            inner.append((start, end if 0 <= end < start + 400 else found[start].end()))
    for start, end in reversed(inner):
        book.cut("gutenberg line", start, end)


# ---------------------------------------------------------------- transcribers' notes


def _notes(book: Book) -> None:
    """Notes under a heading of their own, in a box or in brackets, wherever they stand; from the last one to the first."""
    transcribers = words.lines_with(book.text, TRANSCRIBER)
    lines = {*_near_the_ends(book.text, _NOTE_WORDS, 2 * _HEAD_CHARS), *transcribers}
    for at in sorted(lines, reverse=True):
        if at < len(book.text) and (found := words.NOTE.match(book.text, at)):
            _note_at(book, found)
    places = {at for needle in ("[TN", *(TRANSCRIBER if transcribers else ())) for at in _all(book.text, needle)}
    for at in sorted(places, reverse=True):
        opening = words.BRACKETED.search(book.text, max(0, at - 24), at + 60)
        closing = _closing(book.text, opening.start()) if opening and opening.start() <= at else -1
        if opening and closing > 0:
            start = opening.start()
            spaced = book.text[start - 1 : start] == " " and book.text[closing : closing + 1] in tuple(" \n.,;") + ("",)
            book.cut("transcriber's note", start - spaced, closing)


_PART = re.compile(r"\W*(?:index|appendix|glossary|bibliography|epilogue)\W*\Z", re.IGNORECASE)
_PREFACE = re.compile(r"\b(?:preface|foreword)\W*\Z", re.IGNORECASE)  # of somebody who copied a manuscript


def _note_at(book: Book, found: re.Match[str]) -> None:
    start = _paragraph_start(book.text, found.start())
    pieces = paragraphs(book.text, start, min(len(book.text), start + _NOTE_CHARS))
    head = pieces[0]
    before = book.text[head.start : found.start()]
    if before.strip(" \t\n[({<*_=-+|~#") and not words.is_box(head.text):
        return  # in the middle of a paragraph of the book
    front = max(_letter_end(pieces), _key_end(pieces)) if head.start < _FRONT_CHARS else 0
    end = max(front, _note_end(book.text, pieces))
    if end > head.end or not _PREFACE.search(head.text):
        book.cut("transcriber's note", head.start, end)


def _paragraph_start(text: str, at: int) -> int:
    before = text.rfind("\n\n", 0, at + 1)
    return before + 2 if before >= 0 else 0


def _note_end(text: str, pieces: list[Paragraph]) -> int:
    head = pieces[0]
    if (closing := _bracket_end(text, head)) > 0:
        return closing
    if words.is_box(head.text):
        return _box_end(pieces)
    at_end = head.start > 0.8 * len(text) or len(text) - head.start < 3000
    body, end = "\n" in head.text.strip() or len(head.text) > 90, head.end
    section = _section(pieces, 1, wide=not body)
    if section and _WHOLE_LIST.search(head.text):
        return section[-1].end
    if section and words.RULE.match(section[0].text) and not body:
        return _then_body(pieces, section[0])
    if not body and _is_inset(section) and not head.text.startswith(" "):
        return section[-1].end
    for number, one in enumerate(section):
        if words.RULE.match(one.text):
            after = section[number + 1 :]
            said = sum(bool(words.ABOUT_FILES.search(piece.text)) for piece in after)
            return after[-1].end if at_end and said >= 2 else one.end
        rest = section[number:]
        if not at_end and not words.is_notey(one.text) and not _are_notes(rest):
            return end
        if at_end and not body and not _are_notes(rest) and not words.is_notey(one.text):
            return end
        if at_end and body and _PART.match(one.text) and not any(words.is_notey(piece.text) for piece in rest[1:2]):
            return end
        body, end = True, one.end
    later = 1 + len(section)
    while at_end and (more := _section(pieces, later)) and _are_notes(more):
        later, end = later + len(more), more[-1].end
    return end


_WHOLE_LIST = re.compile(r"bookmarks|questo e-?book", re.IGNORECASE)  # quotations an editor chose; a colophon


def _section(pieces: list[Paragraph], begin: int, wide: bool = False) -> list[Paragraph]:
    """The paragraphs from `begin` to the next wide gap; `wide`: a gap before the first one does not count."""
    found: list[Paragraph] = []
    for one in pieces[begin:]:
        if one.gap >= _SECTION_GAP and (found or not wide) and not (begin > 1 and not found):
            break
        found.append(one)
    return found


def _letter_end(pieces: list[Paragraph]) -> int:
    """A note before the book that reads like a letter: to the last paragraph about the etext, and its signature; 0 for none."""
    last = 0
    for number, one in enumerate(pieces[1:], 1):
        if one.gap > 2 or one.start > pieces[0].start + 8000:
            break
        if words.ABOUT_ETEXT.search(one.text):
            last = number
    if not last:
        return 0
    rest = pieces[last + 1 : last + 3]
    signed = len(rest) == 2 and rest[0].gap == 1 < rest[1].gap and len(rest[0].text.split()) <= 4
    return pieces[last + signed].end


def _key_end(pieces: list[Paragraph]) -> int:
    """A note before the book that is a table of signs: to the wide gap before the title, if no title is in it; 0 for none."""
    if "\n" in pieces[0].text.strip() or len(pieces[0].text) > 90:
        return 0
    section = _section(pieces, 1, wide=True)
    if len(section) + 1 >= len(pieces) or not section or section[-1].end - pieces[0].start > 6000:
        return 0
    titled = any(_TITLE.match(one.text) for one in section)
    signs = sum(words.is_notey(one.text) for one in section)
    return section[-1].end if not titled and signs >= 2 and words.is_notey(section[0].text) else 0


_TITLE = re.compile(r"[ \t]*(?:[A-Z][A-Z'\u2019 .,;:-]{3,60}(?:\n|\Z)|(?:By|Chapter|Preface|Contents|Introduction)\b)")


def _is_inset(section: list[Paragraph]) -> bool:
    """A note set in under its heading is one piece, to the next wide gap."""
    return all(line.startswith("    ") for one in section for line in one.text.split("\n")) and bool(section)


def _are_notes(pieces: list[Paragraph]) -> bool:
    """Whether most of these talk about the transcription, up to the last one that does."""
    notey = [words.is_notey(piece.text) for piece in pieces]
    if True not in notey:
        return False
    last = len(notey) - notey[::-1].index(True)
    return sum(notey) * 2 >= last and (notey[0] or last > 1)


def _box_end(pieces: list[Paragraph]) -> int:
    """A box may hold blank lines: to its last line."""
    end = pieces[0].end
    for one in pieces[1:]:
        if one.gap > 1 or not (words.is_box(one.text) or one.text.lstrip()[:1] in ("|", "+")):
            break
        end = one.end
    return end


def _then_body(pieces: list[Paragraph], rule: Paragraph) -> int:
    """Heading, rule, body, rule."""
    later = pieces[pieces.index(rule) + 1 :]
    end = rule.end
    for one in later:
        if words.RULE.match(one.text):
            return one.end
        if not words.is_notey(one.text):
            break
        end = one.end
    return end


def _closing(text: str, start: int) -> int:
    """Just after the bracket that closes the one at `start`; -1 where none does within reason."""
    opening = text[start]
    closing = {"[": "]", "{": "}", "(": ")", "<": ">"}[opening]
    depth = 0
    for found in re.compile(f"[{re.escape(opening + closing)}]").finditer(text, start, start + _BRACKET_CHARS):
        depth += 1 if found.group() == opening else -1
        if depth == 0:
            return found.end()
    return -1


# ---------------------------------------------------------------- credits before and after the book


def _front(book: Book) -> None:
    """Who made the file: paragraphs before the first line of the book, and a few that stand behind its title."""
    leading = True
    cuts: list[Paragraph] = []
    done = 0
    for one in paragraphs(book.text, 0, min(len(book.text), _FRONT_CHARS)):
        if one.end >= _FRONT_CHARS and one.end < len(book.text):
            break
        if one.start < done:
            continue
        short = len(one.text) < 1500
        if (short and (words.OURS.search(one.text) or (words.CREDIT.match(one.text) and (leading or words.ADDRESS.search(one.text))))) or (leading and cuts and short and len(one.text.split("\n")) <= 4 and words.ADDRESS.search(one.text)):  # fmt: skip
            done = max(one.end, _bracket_end(book.text, one))
            cuts.append(replace(one, end=done))
        elif not (leading and words.RULE.match(one.text)):
            leading = False
    for one in reversed(cuts):
        book.cut("gutenberg credits", one.start, one.end)


def _bracket_end(text: str, one: Paragraph) -> int:
    """A paragraph that opens a bracket goes on to where it closes; -1 where it opens none."""
    inset = len(one.text) - len(one.text.lstrip())
    return _closing(text, one.start + inset) if one.text[inset] in "[{(" else -1


_LAST_BRACKET = re.compile(r"\s*\[(?:the )?end of\b[^\]]{0,300}\]\s*\Z", re.IGNORECASE)


def _back(book: Book) -> None:
    """Credits and rules after the last paragraph of the book."""
    if found := _LAST_BRACKET.search(book.text, max(0, len(book.text) - 400)):
        book.cut("gutenberg line", found.start(), found.end())
    _last_bracket(book)
    for one in reversed(paragraphs(book.text, max(0, len(book.text) - 6000))):
        is_credit = words.CREDIT.match(one.text) and one.gap >= 1
        if len(one.text) < 1500 and (words.OURS.search(one.text) or is_credit):
            book.cut("gutenberg credits", one.start, one.end)
        elif not words.RULE.match(one.text):
            return


def _last_bracket(book: Book) -> None:
    """A list of corrections in brackets, after the last paragraph of the book."""
    end = len(book.text.rstrip())
    if book.text[end - 1 : end] != "]":
        return
    for one in reversed(paragraphs(book.text, max(0, end - _BRACKET_CHARS))):
        if one.gap >= 2 and one.text.lstrip()[:1] == "[" and _bracket_end(book.text, one) == end:
            if _CHANGES.search(one.text):
                book.cut("transcriber's note", one.start, end)
            return


_CHANGES = re.compile(
    r"transcri|transkri|trascri|e-?text|e-?book|geänderten? textzeilen|list of (?:corrections|changes)|(?:corrections|changes) (?:made|have been)",
    re.IGNORECASE,
)
_THE_END = re.compile(r"[ \t]*(?:THE END|FINIS|END OF (?:VOLUME|VOL\.?) \w+|END)\W*$", re.MULTILINE)


def _adverts(book: Book) -> None:
    """Publishers' lists at the end: whole sections, walked from the last one towards the book."""
    size = len(book.text)
    begin = max(0, size - 150_000, min(size * 3 // 4, size - 20_000))
    ends = [
        at
        for at in words.lines_with(book.text, ("END", "FINIS"), begin)
        if at >= begin and _THE_END.match(book.text, at)
    ]
    starts = [found.end() for found in re.compile(r"\n{4,}").finditer(book.text, ends[-1] if ends else begin)]
    spans = list(itertools.pairwise([*starts, len(book.text)]))
    cut, small = len(book.text), 0
    for start, end in reversed(spans):
        section = book.text[start:end]
        if words.is_advert(section, after_one=cut < len(book.text)):
            cut, small = start, 0
        elif section.strip() and (len(section.split("\n")) > 12 or small >= 2 or words.NOT_ADVERT.match(section)):
            break
        else:
            small += 1
    if cut < len(book.text):
        book.cut("adverts", cut, len(book.text))


# ---------------------------------------------------------------- inside


_PAGE = re.compile(r"\[(?:Pg|Page) ?[0-9ivxlcIVXLC]+\][ \t]?|\[Blank Page\]")
_BOLD = re.compile(r"=(?=[^\s=])([^=\n]*[A-Za-z]{2}[^=\n]*)(?<=\S)=(?![\w=])")
_SWUNG = re.compile(r"~(?=[^\s~])([^~\n]+)(?<=\S)~(?![\w~])")


def _unmark(text: str, mark: str, pattern: re.Pattern[str]) -> str:
    """=word= without its marks, where the pattern takes them for a pair; a mark after a letter opens none."""
    pieces, done, at = [], 0, text.find(mark)
    while at >= 0:
        before = text[at - 1 : at]
        found = None if before.isalnum() or before == mark else pattern.match(text, at)
        if found:
            pieces += [text[done:at], found.group(1)]
            done = found.end()
        at = text.find(mark, found.end() if found else at + 1)
    return "".join([*pieces, text[done:]])


def _inside(book: Book) -> None:
    """Marks in the running text: illustrations, page numbers, italics; and lines about the file itself."""
    if "<<" in book.text:
        for found in reversed(list(words.ELECTRONIC.finditer(book.text))):
            book.cut("gutenberg line", found.start(), found.end())
    _mentions(book)
    _illustrations(book)
    count = 0
    if "[P" in book.text or "[Blank" in book.text:
        book.text, count = _PAGE.subn("", book.text)
    if count:
        book.removed.append(Edit("page numbers", f"{count} marks such as [Pg 12]", ""))
    if "=" in book.text:
        book.text = _unmark(book.text, "=", _BOLD)
    notes = " ".join(change.before for change in book.removed if change.rule == "transcriber's note")
    if "~" in book.text and re.search(r"swung|tilde|~\w[^~\n]*~", notes, re.IGNORECASE):
        book.text = _unmark(book.text, "~", _SWUNG)
    _italics(book)


def _mentions(book: Book) -> None:
    """A paragraph that names Project Gutenberg is not of the book, unless the book is about it."""
    text = book.text
    places = {at for word in words.NAME for at in _all(text, word)}
    found = [at for at in sorted(places) if book.text[max(0, at - 12) : at - 1].rstrip().lower().endswith("project")]
    if len(found) > _MENTIONS:
        return
    for at in reversed(found):
        start = _paragraph_start(book.text, at)
        one = paragraphs(book.text, start, min(len(book.text), start + 2000))[:1]
        if one and len(one[0].text) < 900 and one[0].end > at:
            book.cut("gutenberg line", one[0].start, one[0].end)


def _all(text: str, word: str) -> list[int]:
    found, at = [], text.find(word)
    while at >= 0:
        found.append(at)
        at = text.find(word, at + 1)
    return found


def _italics(book: Book) -> None:
    """_word_ loses its underscores; a run of them and one between two letters stay."""
    pieces = book.text.split("_")
    out, count = pieces[:1], 0
    for number in range(1, len(pieces)):
        before, after = pieces[number - 1], pieces[number]
        is_run = (not before and number > 1) or (not after and number < len(pieces) - 1)
        if is_run or (before[-1:].isalpha() and after[:1].isalnum()):
            out.append("_")
        else:
            count += 1
        out.append(after)
    if count:
        book.removed.append(Edit("italics", f"{count} underscores around words", ""))
        book.text = "".join(out)


_TAG = re.compile(r"\[(?:Illustrations?|ILLUSTRATIONS?|Picture(?=:))\b[ \t]*(?:\d+\w?)?[:.]?[ \t]*")
_TAGS = ("[Illustration", "[ILLUSTRATION", "[Picture:")


def _illustrations(book: Book) -> None:
    """[Illustration] goes, [Illustration: caption] leaves its caption: that is the book's."""
    pieces, at = [], 0
    for found in _TAG.finditer(book.text) if any(tag in book.text for tag in _TAGS) else ():
        if found.start() < at or (closing := _closing(book.text, found.start())) < 0:
            continue
        pieces.append(book.text[at : found.start()] + book.text[found.end() : closing - 1])
        at = closing
    if pieces:
        book.removed.append(Edit("illustrations", f"{len(pieces)} tags such as [Illustration: ...]", ""))
        book.text = "".join(pieces) + book.text[at:]
