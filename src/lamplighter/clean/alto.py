"""ALTO: pages of OCR to text, in reading order, words that a hyphen cuts written once.

In:  the bytes of an ALTO file.
Out: one document for each page; blocks are apart by a blank line, paragraphs in a block by the layout of its lines.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from xml.parsers import expat

from lamplighter.clean.rules import MarkupText

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

    def start(self, tag: str, attributes: list[str]) -> None:
        name = tag.rpartition(":")[2]
        if name == "String":
            self._string(attributes)
        elif name == "SP":
            self.pages[-1].spaced = True
            self.pages[-1].blocks[-1][1][-1].pieces.append(" ")
        elif name == "HYP":
            self.pages[-1].blocks[-1][1][-1].cut = True
        elif name == "TextLine":
            left, wide = _number(attributes, "HPOS"), _number(attributes, "WIDTH")
            self.pages[-1].blocks[-1][1].append(_TextLine(left, left + wide))
        elif name == "TextBlock":
            self.pages[-1].blocks.append((_value(attributes, "ID"), []))
        elif name == "Page":
            self.pages.append(_Page(_value(attributes, "ID") or str(len(self.pages) + 1)))
        elif name == "ElementRef":
            self.order.append(_value(attributes, "REF"))

    def _string(self, attributes: list[str]) -> None:
        lines = self.pages[-1].blocks[-1][1]
        line = lines[-1]
        if "SUBS_TYPE" in attributes:
            kind, whole = _value(attributes, "SUBS_TYPE"), _value(attributes, "SUBS_CONTENT")
            if kind == "HypPart2" and len(lines) > 1 and lines[-2].whole and not "".join(line.pieces).strip():
                return
            if kind == "HypPart1" and whole:
                line.whole = True
                line.pieces += ["\0", whole]
                return
        line.pieces += ["\0", _value(attributes, "CONTENT")]


def _value(attributes: list[str], name: str) -> str:
    for at in range(0, len(attributes), 2):
        if attributes[at] == name:
            return attributes[at + 1]
    return ""


def _number(attributes: list[str], name: str) -> float:
    try:
        return float(_value(attributes, name) or 0)
    except ValueError:  # a position that is no number sorts first, as a missing one does
        return 0.0


def read(data: bytes) -> list[MarkupText]:
    """The pages."""
    reader = _AltoParser()
    parser = expat.ParserCreate()
    parser.ordered_attributes = True
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
            small = line.text[:1].islower()
            out.append(line.text if small else "-" + line.text)
        elif before.whole:
            out.append(" " + line.text)
        else:
            out.append(("\n" if begins else " ") + line.text)
    return "".join(out)
