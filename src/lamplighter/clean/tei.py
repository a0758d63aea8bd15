"""TEI: the text of a file as one document, or one for each trial, letter or article in it.

In:  the bytes of a TEI file (TEI.2 or P5).
Out: documents. The layout of the file itself (line ends and indentation beside elements) is not taken for blanks of the text.

Of a pair (sic and corr, orig and reg, abbr and expan) the original is taken. Where lines are marked with <lb/> inside words
and not between them, which the words of the file itself tell, the words are put together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.parsers import expat

from lamplighter.clean.rules import MarkupText

_SKIPPED = {"teiheader", "interp", "interpgrp", "xptr", "join", "fw", "figdesc", "corr", "reg", "expan", "index", "anchor", "facsimile", "standoff"}  # fmt: skip
_BLOCKS = {"p", "head", "lg", "sp", "list", "table", "quote", "opener", "closer", "trailer", "byline", "epigraph", "front", "body", "back", "titlepage", "floatingtext", "argument", "salute", "signed", "dateline", "ab", "figure", "text"}  # fmt: skip
_LINES = {"l", "item", "row", "speaker", "stage", "label", "titlepart", "docauthor", "docdate"}
_WHOLE_BOOKS = {"chapter", "part", "book", "volume", "section", "act", "scene", "canto", "preface", "introduction", "appendix", "contents", "index", "dedication", "titlepage", "notes", "prologue", "epilogue", "frontmatter", "backmatter", ""}  # fmt: skip
INLINE, BLOCK, LINE, BREAK, APART = "\x01", "\x02", "\x03", "\x05", "\x07"

_LAYOUT = re.compile(r"\n\s*")
_BEFORE_CLOSING = re.compile("\n\x01(?=[,.;:!?)\\]\u2019\u201d])")
_BEFORE_STOP = re.compile("\n(?=[,;:.!?])")
_LETTERS_END, _LETTERS_START = re.compile(r"[^\W\d_]+$"), re.compile(r"[^\W\d_]+")


@dataclass
class _Division:
    depth: int
    start: int
    kind: str
    name: str
    end: int = 0
    head: tuple[int, int] = (0, 0)


class _TeiParser:
    """Takes the parser's events; what it keeps are pieces of text and where the divisions begin and end.

    Text goes from the parser straight into the list; at the end of what is skipped, its text is taken out again.
    """

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.divisions: list[_Division] = []
        self.open: list[_Division] = []
        self.skipping = 0
        self.kept = self.title_at = 0  # how many pieces there were before what is skipped, and before the title
        self.title: list[str] = []
        self.in_title = False
        self.names: dict[str, str] = {}  # of the elements met so far, without prefix, in small letters
        self.marks: dict[str, str] = {}  # of the elements met so far that need nothing else

    def start(self, tag: str, attributes: list[str]) -> None:
        mark = self.marks.get(tag)
        if mark and not self.skipping:  # the common case, at once
            self.pieces.append(mark)
            return
        if self.skipping:
            self.skipping += 1
            if self.title:
                return
            self._end_title()
            self.in_title = not self.title and tag.rpartition(":")[2].lower() == "title"
            self.title_at = len(self.pieces)
            return
        name = self.names.get(tag) or self.names.setdefault(tag, tag.rpartition(":")[2].lower())
        if name in _SKIPPED:
            self.skipping = 1
            self.pieces.append(INLINE)
            self.kept = len(self.pieces)
        elif name.startswith("div"):
            found = dict(zip(attributes[::2], attributes[1::2], strict=True))
            one = _Division(len(self.open), len(self.pieces), found.get("type", ""), found.get("id") or found.get("xml:id", ""))  # fmt: skip
            self.open.append(one)
            self.divisions.append(one)
            self.pieces.append(BLOCK)
        elif name == "lb":
            self.pieces.append("" if "no" in attributes[1::2] else BREAK)
        elif name == "head":
            if self.open and not self.open[-1].head[0]:
                self.open[-1].head = (len(self.pieces), 0)
            self.pieces.append(BLOCK)
        else:
            mark = BLOCK if name in _BLOCKS else LINE if name in _LINES else " " if name == "cell" else INLINE
            self.marks[tag] = mark
            self.pieces.append(mark)

    def end(self, tag: str) -> None:
        if self.skipping:
            self.skipping -= 1
            if self.in_title:
                self._end_title()
            if not self.skipping:
                del self.pieces[self.kept :]
            return
        if mark := self.marks.get(tag):
            self.pieces.append(mark)
            return
        name = tag.rpartition(":")[2].lower()
        if name != "lb":
            self.pieces.append(BLOCK)
        if name == "head" and self.open and not self.open[-1].head[1]:
            self.open[-1].head = (self.open[-1].head[0], len(self.pieces))
        elif name.startswith("div"):
            self.open.pop().end = len(self.pieces)

    def _end_title(self) -> None:
        if self.in_title:
            self.title += self.pieces[self.title_at :]
            self.in_title = False


def read(data: bytes, split: str) -> list[MarkupText]:
    """The documents. Divisions of a collection are documents each; chapters of a book are not."""
    reader = _TeiParser()
    parser = expat.ParserCreate()
    parser.ordered_attributes = True
    parser.buffer_text = True
    parser.StartElementHandler = reader.start
    parser.EndElementHandler = reader.end
    parser.CharacterDataHandler = reader.pieces.append
    parser.Parse(data, True)
    pieces, title = reader.pieces, " ".join("".join(reader.title).split())
    if BREAK in pieces:
        pieces = _breaks(pieces)
    named = {"title": title} if title else {}
    top = _top(reader.divisions, pieces)
    kinds = {one.kind.lower() for one in top}
    if not top or split == "file" or (split == "auto" and (len(top) < 2 or kinds <= _WHOLE_BOOKS)):
        return [MarkupText(_shaped(pieces), "", named)]
    ordered: list[str] = []
    at, loose = 0, []
    for one in top:
        loose += pieces[at : one.start]
        ordered += [*pieces[one.start : one.end], APART]
        at = one.end
    texts = _shaped([*ordered, *loose, *pieces[at:]]).split(
        APART
    )  # all at once: the same few searches for hundreds of trials
    found = []
    for number, (one, text) in enumerate(zip(top, texts, strict=False), 1):
        head = " ".join(_shaped(pieces[slice(*one.head)]).split()) if one.head[1] else ""
        extra = {**({"title": head} if head else named), **({"type": one.kind} if one.kind else {})}
        found.append(MarkupText(text.strip(), one.name or str(number), extra))
    rest = texts[-1].strip()
    return [*found, MarkupText(rest, "rest", named)] if rest else found


def _top(divisions: list[_Division], pieces: list[str]) -> list[_Division]:
    """The outermost divisions; below one that is alone and holds nothing but divisions, those."""
    depth = 0
    while True:
        here = [one for one in divisions if one.depth == depth]
        below = [one for one in divisions if one.depth == depth + 1]
        if len(here) != 1 or not below:
            return here
        own = "".join(pieces[here[0].start : below[0].start])
        if own.strip(" \t\n\x01\x02\x03\x05") and len(below) == 1:
            return here
        depth += 1


def _breaks(pieces: list[str]) -> list[str]:
    """A line's end within a word is nothing, between words it is a blank: as the words of the file say, in doubt as most of them do."""
    text = "".join(pieces).replace(BREAK, " ").replace(INLINE, " ").replace(BLOCK, " ")
    words = {word.strip(".,;:!?\"'()[]\u201c\u201d\u2018\u2019-\u2014") for word in set(text.lower().split())}
    out, doubtful, within, between = list(pieces), [], 0, 0
    for number, piece in enumerate(pieces):
        if piece != BREAK:
            continue
        left, right = _beside(pieces, number)
        out[number] = " "
        if not left or not right:
            continue
        if (left + right).lower() in words:
            out[number], within = "", within + 1
        elif left.lower() in words and right.lower() in words:
            between += 1
        else:
            doubtful.append(number)
    for number in doubtful:
        out[number] = "" if within > between else " "
    return out


def _beside(pieces: list[str], number: int) -> tuple[str, str]:
    """The letters that touch a line's end on both sides."""
    before = "".join(pieces[max(0, number - 2) : number]).rstrip(INLINE)
    after = "".join(pieces[number + 1 : number + 3]).lstrip(INLINE)
    left, right = _LETTERS_END.search(before), _LETTERS_START.match(after)
    return (left.group() if left else "", right.group() if right else "")


def _shaped(pieces: list[str]) -> str:
    """Paragraphs and lines. Blanks beside an element are kept as one; but a line end of the file's layout is none before a comma."""
    text = _LAYOUT.sub("\n", "".join(pieces))
    while " \n" in text or "\t\n" in text:
        text = text.replace(" \n", "\n").replace("\t\n", "\n")
    for old, new in ((INLINE + INLINE, INLINE), (INLINE + "\n", "\n" + INLINE), ("\n\n", "\n")):
        while old in text:
            text = text.replace(old, new)
    while INLINE + INLINE in text:
        text = text.replace(INLINE + INLINE, INLINE)
    text = _BEFORE_STOP.sub("", _BEFORE_CLOSING.sub("", text))
    text = text.replace(INLINE, "").replace("\n", " ")
    while "  " in text:
        text = text.replace("  ", " ")
    out = []
    for part in text.split(BLOCK):
        lines = [line.strip() for line in part.split(LINE)] if LINE in part else [part.strip()]
        if block := "\n".join(line for line in lines if line):
            out.append(block)
    return "\n\n".join(out)
