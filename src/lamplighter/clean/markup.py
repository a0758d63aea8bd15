"""Text out of markup: HTML, TEI and ALTO; which of them an XML file is, and its faults with line and column.

In:  the bytes or the text of one file.
Out: documents with paragraphs between blank lines. Nothing outside the file is ever loaded.
"""

from __future__ import annotations

import html
import html.entities
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from xml.parsers import expat


class BadMarkup(ValueError):
    """Markup that cannot be read: where, and why."""

    def __init__(self, reason: str, why: str, line: int = 0, column: int = 0) -> None:
        super().__init__(why)
        self.reason, self.why, self.line, self.column = reason, why, line, column


@dataclass(frozen=True)
class MarkupText:
    """One document of a file; `part` is its place within it."""

    text: str
    part: str = ""
    extra: dict[str, Any] = field(default_factory=dict)


_NAMED = re.compile(rb"&([A-Za-z][A-Za-z0-9]*);")
_XML_OWN = {b"amp", b"lt", b"gt", b"quot", b"apos"}
_ROOT = re.compile(rb"<(?:[A-Za-z_][\w.-]*:)?([A-Za-z_][\w.-]*)[\s/>]")
_NOT_ROOT = re.compile(rb"<\?.*?\?>|<!--.*?-->|<!DOCTYPE[^>\[]*(?:\[.*?\]\s*)?>", re.S)


def read_xml(data: bytes, split: str) -> list[MarkupText]:
    """The documents of an XML file, by its root."""
    name = _root_of(data)
    if name in ("tei.2", "tei", "teicorpus", "teicorpus.2", "text", "body"):
        return _parsed(data, lambda one: _read_tei(one, split))
    if name == "alto":
        return _parsed(data, _read_alto)
    if name == "mets":
        raise BadMarkup("mets", "a METS file lists other files and has no text of its own")
    if name == "html":
        return [read_html(data.decode("utf-8", "replace"))]
    _parsed(data, _only_check)
    raise BadMarkup("unknown_xml", f"the root is <{name}>; TEI, ALTO and XHTML are known")


def _root_of(data: bytes) -> str:
    """The name of the first element, without its prefix, in small letters."""
    found = _ROOT.search(_NOT_ROOT.sub(b"", data[:65536]))
    return found.group(1).decode("ascii", "replace").lower() if found else ""


def _parsed(data: bytes, read: Callable[[bytes], list[MarkupText]]) -> list[MarkupText]:
    """Read; the named characters of HTML are put in where a file uses them without saying what they are."""
    try:
        try:
            return read(data)
        except expat.ExpatError as error:
            if error.code != expat.errors.codes[expat.errors.XML_ERROR_UNDEFINED_ENTITY]:
                raise
            return read(_NAMED.sub(_character, data))
    except expat.ExpatError as error:
        raise BadMarkup("bad_xml", expat.ErrorString(error.code), error.lineno, error.offset + 1) from None


def _only_check(data: bytes) -> list[MarkupText]:
    expat.ParserCreate().Parse(data, True)
    return []


def _character(found: re.Match[bytes]) -> bytes:
    known = html.entities.html5.get(found.group(1).decode() + ";")
    if found.group(1) in _XML_OWN or known is None:
        return found.group()
    return "".join(f"&#{ord(one)};" for one in known).encode()


# ---------------------------------------------------------------- HTML

_TAG = re.compile(r"<!--.*?-->|<!\[CDATA\[.*?\]\]>|<[!?/]?[A-Za-z](?:[^>\"']|\"[^\"]*\"|'[^']*')*>", re.S)
_TAG_NAME = re.compile(r"</?\s*([A-Za-z][A-Za-z0-9]*)")
_HIDDEN = {"script", "style", "head", "nav", "footer", "aside", "form", "template", "svg", "noscript", "iframe", "button", "select", "object", "canvas"}  # fmt: skip
_HTML_BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "dl", "table", "blockquote", "pre", "section", "article", "main", "header", "body", "html", "hr", "figure", "figcaption", "address", "fieldset", "details", "center"}  # fmt: skip
_HTML_LINES = {"br", "li", "tr", "dt", "dd", "caption", "option", "summary"}
_TITLE = re.compile(r"<title[^>]*>(.*?)</title", re.I | re.S)


def read_html(text: str) -> MarkupText:
    """What a reader of the page sees, without menus, scripts and forms."""
    found = _TITLE.search(text)
    title = " ".join(html.unescape(found.group(1)).split()) if found else ""
    pieces: list[str] = []
    hidden, kept, at = "", 0, 0
    for tag in _TAG.finditer(text):
        if not hidden and tag.start() > at:
            inner = text[at : tag.start()]
            pieces.append(inner.replace("\n", "\x04").replace(" ", "\x06") if kept else inner)
        at = tag.end()
        name_found = _TAG_NAME.match(tag.group())
        name = name_found.group(1).lower() if name_found else ""
        closes = tag.group().startswith("</")
        if hidden:
            hidden = "" if closes and name == hidden else hidden
        elif name in _HIDDEN:
            hidden = "" if closes or tag.group().endswith("/>") else name
        elif name in _HTML_BLOCKS:
            pieces.append("\x02")
            kept = max(0, kept + (-1 if closes else 1)) if name == "pre" else kept
        elif name in _HTML_LINES:
            pieces.append("\x03")
        elif name in ("td", "th"):
            pieces.append(" ")
    if not hidden:
        pieces.append(text[at:])
    return MarkupText(_shape_html(html.unescape("".join(pieces))), "", {"title": title} if title else {})


def _shape_html(text: str) -> str:
    text = re.sub(r"[ \t\r\n]+", " ", text)
    blocks = []
    for block in text.split("\x02"):
        lines = [line.strip(" ") for line in block.split("\x03")]
        shaped = "\n".join(lines).strip(" \n").replace("\x04", "\n").replace("\x06", " ")
        if shaped.strip():
            blocks.append(shaped.strip("\n"))
    return "\n\n".join(blocks)


# ---------------------------------------------------------------- TEI (TEI.2 or P5)
#
# The layout of the file itself (line ends and indentation beside elements) is not taken for blanks of the text. Of a pair (sic
# and corr, orig and reg, abbr and expan) the original is taken. Where lines are marked with <lb/> inside words and not between
# them, which the words of the file itself tell, the words are put together.

_SKIPPED = {"teiheader", "interp", "interpgrp", "xptr", "join", "fw", "figdesc", "corr", "reg", "expan", "index", "anchor", "facsimile", "standoff"}  # fmt: skip
_TEI_BLOCKS = {"p", "head", "lg", "sp", "list", "table", "quote", "opener", "closer", "trailer", "byline", "epigraph", "front", "body", "back", "titlepage", "floatingtext", "argument", "salute", "signed", "dateline", "ab", "figure", "text"}  # fmt: skip
_TEI_LINES = {"l", "item", "row", "speaker", "stage", "label", "titlepart", "docauthor", "docdate"}
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
        self.skipping = self.kept = 0  # elements that are open in what is skipped; how many pieces there were before it
        self.title: list[str] = []
        self.title_at = -1  # where the pieces of the title begin, while it is read

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        name = _local_name(tag)
        if self.skipping:
            self.skipping += 1
            self._end_title()
            if name == "title" and not self.title:
                self.title_at = len(self.pieces)
        elif name in _SKIPPED:
            self.skipping = 1
            self.pieces.append(INLINE)
            self.kept = len(self.pieces)
        elif name == "lb":
            self.pieces.append("" if "no" in attributes.values() else BREAK)
        else:
            if name.startswith("div"):
                part = attributes.get("id") or attributes.get("xml:id", "")
                self.open.append(_Division(len(self.open), len(self.pieces), attributes.get("type", ""), part))
                self.divisions.append(self.open[-1])
            elif name == "head" and self.open and not self.open[-1].head[0]:
                self.open[-1].head = (len(self.pieces), 0)
            self.pieces.append(_mark_of(name))

    def end(self, tag: str) -> None:
        name = _local_name(tag)
        if self.skipping:
            self.skipping -= 1
            self._end_title()
            if not self.skipping:
                del self.pieces[self.kept :]
        elif name != "lb":
            self.pieces.append(_mark_of(name))
            if name == "head" and self.open and not self.open[-1].head[1]:
                self.open[-1].head = (self.open[-1].head[0], len(self.pieces))
            elif name.startswith("div"):
                self.open.pop().end = len(self.pieces)

    def _end_title(self) -> None:
        if self.title_at >= 0:
            self.title, self.title_at = self.pieces[self.title_at :], -1


@lru_cache(1024)
def _local_name(tag: str) -> str:
    return tag.rpartition(":")[2].lower()


def _mark_of(name: str) -> str:
    if name in _TEI_BLOCKS or name.startswith("div"):
        return BLOCK
    return LINE if name in _TEI_LINES else " " if name == "cell" else INLINE


def _read_tei(data: bytes, split: str) -> list[MarkupText]:
    """The documents. Divisions of a collection are documents each; chapters of a book are not."""
    reader = _TeiParser()
    parser = expat.ParserCreate()
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
        return [MarkupText(_shape_tei(pieces), "", named)]
    ordered: list[str] = []
    at, loose = 0, []
    for one in top:
        loose += pieces[at : one.start]
        ordered += [*pieces[one.start : one.end], APART]
        at = one.end
    texts = _shape_tei([*ordered, *loose, *pieces[at:]]).split(
        APART
    )  # all at once: the same few searches for all trials
    found = []
    for number, (one, text) in enumerate(zip(top, texts, strict=False), 1):
        head = " ".join(_shape_tei(pieces[slice(*one.head)]).split()) if one.head[1] else ""
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


def _shape_tei(pieces: list[str]) -> str:
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


# ---------------------------------------------------------------- ALTO
#
# One document for each page, in reading order; words that a hyphen cuts are written once; blocks are apart by a blank line,
# paragraphs in a block by the layout of its lines.

INDENT, SHORT = 0.025, 0.12  # of the width of a block: a line that begins a paragraph, a line that ends one


@dataclass
class _TextLine:
    left: float
    right: float
    pieces: list[str] = field(default_factory=list)
    whole: bool = False  # its last word is written in full, and goes on in the next line
    cut: bool = False  # its last word is cut by a hyphen that is not in the word
    text: str = ""


@dataclass
class _Page:
    name: str
    blocks: list[tuple[str, list[_TextLine]]] = field(default_factory=list)
    spaced: bool = False


class _AltoParser:
    """Takes the parser's events."""

    def __init__(self) -> None:
        self.pages: list[_Page] = []
        self.order: list[str] = []

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        name = tag.rpartition(":")[2]
        if name == "Page":
            self.pages.append(_Page(attributes.get("ID") or str(len(self.pages) + 1)))
        elif name == "TextBlock":
            self.pages[-1].blocks.append((attributes.get("ID", ""), []))
        elif name == "TextLine":
            left = _number(attributes, "HPOS")
            self.pages[-1].blocks[-1][1].append(_TextLine(left, left + _number(attributes, "WIDTH")))
        elif name == "String":
            self._string(attributes)
        elif name == "SP":
            self.pages[-1].spaced = True
            self.pages[-1].blocks[-1][1][-1].pieces.append(" ")
        elif name == "HYP":
            self.pages[-1].blocks[-1][1][-1].cut = True
        elif name == "ElementRef":
            self.order.append(attributes.get("REF", ""))

    def _string(self, attributes: dict[str, str]) -> None:
        lines = self.pages[-1].blocks[-1][1]
        line, kind, whole = lines[-1], attributes.get("SUBS_TYPE"), attributes.get("SUBS_CONTENT")
        if kind == "HypPart2" and len(lines) > 1 and lines[-2].whole and not "".join(line.pieces).strip():
            return
        line.whole = line.whole or bool(kind == "HypPart1" and whole)
        line.pieces += ["\0", whole if kind == "HypPart1" and whole else attributes.get("CONTENT", "")]


def _number(attributes: dict[str, str], name: str) -> float:
    try:
        return float(attributes.get(name) or 0)
    except ValueError:  # a position that is no number sorts first, as a missing one does
        return 0.0


def _read_alto(data: bytes) -> list[MarkupText]:
    """The pages."""
    reader = _AltoParser()
    parser = expat.ParserCreate()
    parser.StartElementHandler = reader.start
    parser.Parse(data, True)
    places = {name: place for place, name in enumerate(reader.order)}
    found = []
    for page in reader.pages:
        blocks = sorted(page.blocks, key=lambda block: places.get(block[0], len(places))) if places else page.blocks
        texts = (_block(lines, " " if not page.spaced else "") for _, lines in blocks)
        found.append(MarkupText("\n\n".join(text for text in texts if text), page.name))
    return found


def _block(lines: list[_TextLine], between: str) -> str:
    """`between`: what parts two words where the file has no spaces of its own."""
    for line in lines:
        line.text = " ".join("".join(line.pieces).replace("\0", between).split())
    lines = [line for line in lines if line.text]
    if not lines:
        return ""
    left, right = min(line.left for line in lines), max(line.right for line in lines)
    wide = max(1.0, right - left)
    out = [lines[0].text]
    for before, line in itertools.pairwise(lines):
        begins = line.left - left > INDENT * wide or before.right < right - SHORT * wide
        if before.cut and not before.whole:
            out.append(line.text if line.text[:1].islower() else "-" + line.text)
        elif before.whole:
            out.append(" " + line.text)
        else:
            out.append(("\n" if begins else " ") + line.text)
    return "".join(out)
