"""Text out of markup: which reader an XML file needs, faults with line and column, and HTML.

In:  the bytes or the text of one file.
Out: documents with paragraphs between blank lines. Nothing outside the file is ever loaded.
"""

from __future__ import annotations

import html
import html.entities
import re
from collections.abc import Callable
from xml.parsers import expat

from lamplighter.clean import alto, tei
from lamplighter.clean.rules import BadMarkup, MarkupText

_NAMED = re.compile(rb"&([A-Za-z][A-Za-z0-9]*);")
_XML_OWN = {b"amp", b"lt", b"gt", b"quot", b"apos"}
_ROOT = re.compile(rb"<(?:[A-Za-z_][\w.-]*:)?([A-Za-z_][\w.-]*)[\s/>]")
_NOT_ROOT = re.compile(rb"<\?.*?\?>|<!--.*?-->|<!DOCTYPE[^>\[]*(?:\[.*?\]\s*)?>", re.S)


def read_xml(data: bytes, split: str) -> list[MarkupText]:
    """The documents of an XML file, by its root."""
    name = _root_of(data)
    if name in ("tei.2", "tei", "teicorpus", "teicorpus.2", "text", "body"):
        return _parsed(data, lambda one: tei.read(one, split))
    if name == "alto":
        return _parsed(data, alto.read)
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
_BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "dl", "table", "blockquote", "pre", "section", "article", "main", "header", "body", "html", "hr", "figure", "figcaption", "address", "fieldset", "details", "center"}  # fmt: skip
_LINES = {"br", "li", "tr", "dt", "dd", "caption", "option", "summary"}
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
        elif name in _BLOCKS:
            pieces.append("\x02")
            kept = max(0, kept + (-1 if closes else 1)) if name == "pre" else kept
        elif name in _LINES:
            pieces.append("\x03")
        elif name in ("td", "th"):
            pieces.append(" ")
    if not hidden:
        pieces.append(text[at:])
    return MarkupText(_shaped(html.unescape("".join(pieces))), "", {"title": title} if title else {})


def _shaped(text: str) -> str:
    text = re.sub(r"[ \t\r\n]+", " ", text)
    blocks = []
    for block in text.split("\x02"):
        lines = [line.strip(" ") for line in block.split("\x03")]
        shaped = "\n".join(lines).strip(" \n").replace("\x04", "\n").replace("\x06", " ")
        if shaped.strip():
            blocks.append(shaped.strip("\n"))
    return "\n\n".join(blocks)
