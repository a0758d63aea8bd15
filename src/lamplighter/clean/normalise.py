"""Characters and lines made ordinary: misread encodings mended, unseen characters taken out, wrapped lines joined; no word is rewritten.

In:  a text.
Out: the same text, with what was changed; doing it again changes nothing.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lamplighter.clean.rules import Edit

_ORDINARY = bytes([0x09, 0x0A, *range(0x20, 0x7F)])
_UNSEEN = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u200b\u2060\ufeff\ufffe\uffff]")
_LINE_ENDS = ("\r\n", "\r", "\x0b", "\x0c", "\x85", "\u2028", "\u2029")
_ALWAYS_NFC = re.compile("[\x00-\u02ff\u2010-\u2027\u2030-\u205e\u20ac\u2122]*")  # whatever stands beside them
_SOFT_BREAK = re.compile("\u00ad[ \t]*\n[ \t]*(?=\\w)")
_MANY_LINES = re.compile("\n\n\n+")
_BLANK_END = re.compile("\n(?<=[ \t\u00a0]\n)")
_TRAILING = ("        ", "  ", " ", "\t", "\u00a0")

# A first byte and a later byte of UTF-8, both read as Windows-1252 or Latin-1: the only sign for which ftfy is asked.
_LATER = "\u0080-\u00bf\u20ac\u201a\u0192\u201e\u2026\u2020\u2021\u02c6\u2030\u0160\u2039\u0152\u017d\u2018\u2019\u201c\u201d\u2022\u2013\u2014\u02dc\u2122\u0161\u203a\u0153\u017e\u0178"
_MISREAD = re.compile(f"[\u00c2-\u00f4][{_LATER}]")
_MISREAD_BYTES = re.compile(  # the same in UTF-8: with a first byte that is always the same, it is found ten times faster
    b"\xc3[\x82-\xb4](?:\xc2[\x80-\xbf]|\xe2[\x80\x82\x84]|\xc5[\x92\x93\xa0\xa1\xb8\xbd\xbe]|\xc6\x92|\xcb[\x86\x9c])"
)


def odd_ones(text: str) -> str:
    """Only those characters that are not printable ASCII, blank, tab or line end, in their order.

    In most texts they are few or none: what is looked for among them need not be looked for in the whole text.
    """
    return text.encode().translate(None, _ORDINARY).decode()


def characters(text: str, odd: str | None = None) -> tuple[str, int]:
    """(the text with line ends of one kind, in NFC, without controls and unseen characters; how many of those went).

    `odd`: the odd characters of the text, where they are known.
    """
    odd = odd_ones(text) if odd is None else odd
    unseen = 0
    if odd:
        for old in _LINE_ENDS:
            if old[0] in odd:
                text = text.replace(old, "\n")
        if "\u00ad" in odd:
            text = _SOFT_BREAK.sub("", text)
        for one in sorted(set(_UNSEEN.findall(odd))):
            unseen += text.count(one)
            text = text.replace(one, "")
        if not _ALWAYS_NFC.fullmatch(odd) and not unicodedata.is_normalized("NFC", text):
            text = "\n\n".join(
                unicodedata.normalize("NFC", one) for one in text.split("\n\n")
            )  # quick where nothing is to do
    return trailing(text), unseen


def trailing(text: str) -> str:
    """No blanks before a line's end, whatever their order."""
    while _BLANK_END.search(text):
        for blanks in _TRAILING:
            if f"{blanks}\n" in text:
                text = text.replace(f"{blanks}\n", "\n")
    return text


def blank_lines(text: str) -> str:
    """One blank line at most between two lines, none at the beginning, no blanks at the end."""
    text = _MANY_LINES.sub("\n\n", text) if "\n\n\n" in text else text
    return text.lstrip("\n").rstrip()


def misread(text: str, odd: str | None = None) -> tuple[str, list[Edit]]:
    """(the text with UTF-8 that was read as Latin-1 or Windows-1252 read rightly, the lines that changed).

    Line by line, only where the sign is there, and only by a change of encoding: quotes, ligatures and widths stay as they are.
    `odd`: the odd characters of the text, where they are known.
    """
    if text.isascii() or not _MISREAD.search(odd_ones(text) if odd is None else odd):
        return text, []
    data, out, changes, done = text.encode(), [], [], 0
    for found in _MISREAD_BYTES.finditer(data):
        if found.start() < done:
            continue
        start, end = data.rfind(b"\n", 0, found.start()) + 1, data.find(b"\n", found.end())
        end = end if end >= 0 else len(data)
        line = data[start:end].decode()
        if _MISREAD.search(line) and (right := _reread(line)) != line:
            changes.append(Edit("mojibake", line, right))
            out += [data[done:start], right.encode()]
            done = end
    return (b"".join([*out, data[done:]]).decode(), changes) if changes else (text, [])


def _reread(line: str) -> str:
    from lamplighter.clean.rules import ftfy

    library = ftfy()
    config = library.TextFixerConfig(
        unescape_html=False, restore_byte_a0=True, replace_lossy_sequences=False, fix_c1_controls=False,
        decode_inconsistent_utf8=True,
    )  # fmt: skip
    right = str(library.fix_encoding(line, config))
    good = len(right) < len(line) and right.count("\ufffd") <= line.count("\ufffd") and "\n" not in right
    return unicodedata.normalize("NFC", _UNSEEN.sub("", right)) if good else line


# ---------------------------------------------------------------- joining wrapped lines


NARROWEST, WIDEST = 40, 100  # what a person or a program wraps at
_SLACK = 6  # hand-made changes leave lines a little short
_LONG_SHARE = 0.02  # of the lines are longer than any wrap: then the text is not wrapped
_SHORT_LINE = 0.62  # of the width
_ENOUGH = 0.15  # of the paragraphs of three lines or more must be wrapped, or none is joined
_SHORT_TEXT = 20_000  # characters
_LOOKED_AT = 200_000  # characters, for what the text writes elsewhere

_ITEM = re.compile(r"(?:[-*\u2022\u00b7]|\(?\d{1,3}[.)\]]|\(\w\)|\[\d+\]|[|+])[ \t]")
_ITEM_HEADS = np.zeros(256, dtype=bool)
_ITEM_HEADS[[ord(one) for one in "-*([|+0123456789"]] = True
_SPEAKER = re.compile(r"[A-Z][A-Z .'\u2019-]{1,30}[.:]?$|[A-Z][\w .'\u2019-]{0,30}:$")
_SINGLE = re.compile(r"\n(?<!\n\n)(?!\n)")
_Array = np.ndarray


@dataclass(frozen=True)
class Joined:
    """The text, how many paragraphs were joined, and the first ones as examples."""

    text: str
    count: int = 0
    hyphens: int = 0
    changes: tuple[Edit, ...] = ()
    data: bytes | None = None  # the text in UTF-8, where it is at hand


def join(text: str, real_hyphens: bool = False) -> Joined:
    """`real_hyphens`: a hyphen at a line's end was one in print too (Project Gutenberg's proofreaders see to that).

    Joining must come to rest: where a second pass would join more (a page of short pieces, whose width cannot be told), nothing is joined.
    """
    found = _find(text)
    if found is None:
        return Joined(text)
    first = _joined(text, *found, real_hyphens)
    return first if _at_rest(*found) or _find(first.text) is None else Joined(text)


@dataclass(frozen=True)
class _Layout:
    """Every line in numbers, and which lines make a block (a paragraph of two lines or more)."""

    data: bytes
    starts: _Array  # of lines, in bytes
    lengths: _Array  # of lines, in characters
    heads: _Array  # first bytes
    first: _Array  # of each block: its first line
    last: _Array  # its last line

    def span(self, block: int) -> tuple[int, int]:
        end = self.last[block] + 1
        return int(self.starts[self.first[block]]), int(self.starts[end]) - 1 if end < len(self.starts) else len(
            self.data
        )

    def block(self, block: int) -> str:
        start, end = self.span(block)
        return self.data[start:end].decode()


def _layout(text: str) -> _Layout:
    data = text.encode()
    raw = np.frombuffer(data, dtype=np.uint8)
    newlines = np.flatnonzero(raw == 10)
    starts = np.concatenate(([0], newlines + 1))
    ends = np.concatenate((newlines, [len(raw)]))
    lengths = ends - starts
    if not text.isascii():
        inner = np.flatnonzero(raw.view(np.int8) < -64)  # bytes of a character after its first
        lengths = lengths - np.diff(np.searchsorted(inner, ends), prepend=0)
    heads = raw[np.minimum(starts, len(raw) - 1)]  # an empty last line has the line end before it
    full = np.concatenate(([False], lengths > 0, [False]))
    edges = np.flatnonzero(full[1:] != full[:-1])
    first, last = edges[::2], edges[1::2] - 1
    several = last > first
    return _Layout(data, starts, lengths, heads=heads, first=first[several], last=last[several])


def _is_wide(text: str) -> bool:
    """What `_width` asks first, for a short text: whether too many of its lines are longer than any wrap."""
    lengths = [len(line) for line in text.split("\n") if line]
    return bool(lengths) and sum(length > WIDEST + 10 for length in lengths) / len(lengths) > _LONG_SHARE


def _width(layout: _Layout) -> int:
    """The width to which the prose of this text is wrapped; 0 if it is not."""
    lines = layout.lengths[layout.lengths > 0]
    if not len(lines) or np.mean(lines > WIDEST + 10) > _LONG_SHARE:
        return 0
    tall = (layout.last - layout.first >= 2) & (layout.heads[layout.first] != 32)
    if not tall.any():
        return 0
    longest = np.sort(_over_blocks(np.maximum, layout.lengths, layout)[tall])
    width = int(longest[len(longest) * 3 // 4])
    return width if NARROWEST <= width <= WIDEST else 0


def _over_blocks(what: np.ufunc, values: _Array, layout: _Layout, skip_first: int = 0, skip_last: int = 0) -> _Array:
    """A sum, minimum or maximum over the lines of each block."""
    bounds = np.stack((layout.first + skip_first, layout.last + 1 - skip_last), axis=1).ravel()
    padded = np.append(values, values[-1:])
    found: _Array = what.reduceat(padded, bounds)[::2]
    return found


def _find(text: str) -> tuple[_Layout, _Array] | None:
    """The lines, and which blocks are to be joined; None where none is."""
    if not _SINGLE.search(text):  # every paragraph is one line
        return None
    if len(text) < _SHORT_TEXT and _is_wide(text):
        return None
    layout = _layout(text)
    width = _width(layout)
    if not width:
        return None
    wrapped = _wrapped(layout, width)
    several = int(np.sum(layout.last - layout.first > 1))
    if not wrapped.any() or int(wrapped.sum()) < _ENOUGH * several:
        return None
    return layout, np.flatnonzero(wrapped)


def _at_rest(layout: _Layout, blocks: _Array) -> bool:
    """Whether the joined paragraphs alone are so long that a second pass cannot take the text for a wrapped one.

    A line loses at most its hyphen. This settles it for nearly every book, without a look at the new text.
    """
    long = int(np.sum(_over_blocks(np.add, layout.lengths - 1, layout)[blocks] > WIDEST + 10))
    lines = int(np.sum(layout.lengths > 0) - np.sum((layout.last - layout.first)[blocks]))
    return long / lines > _LONG_SHARE


def _wrapped(layout: _Layout, width: int) -> _Array:
    """Which blocks are one paragraph of prose: by bulk figures where they are clear, by a closer look where not."""
    body = layout.last - layout.first
    indented = (layout.heads == 32) | (layout.heads == 9)
    small = ((layout.heads >= 97) & (layout.heads <= 122)).astype(np.int32)
    smalls = _over_blocks(np.add, small, layout, skip_first=1)
    possible = ~_over_blocks(np.logical_or, indented, layout, skip_first=1)
    possible &= _over_blocks(np.maximum, layout.lengths, layout) <= width + 12
    possible &= ~_tables(layout)
    short = (layout.lengths < _SHORT_LINE * width).astype(np.int32)
    shorts = _over_blocks(np.add, short, layout, skip_last=1)
    plain = (smalls * 2 > body) & (body > 1) & (shorts * 8 <= body + 1)
    plain |= (body == 1) & (smalls == 1) & (layout.lengths[layout.first] > 0.8 * width)
    items = _over_blocks(np.add, _ITEM_HEADS[layout.heads].astype(np.int32), layout, skip_first=1)
    doubtful = possible & (~plain | (items > 0))
    out: _Array = possible & plain & (items == 0)
    tight = _over_blocks(np.minimum, layout.lengths, layout, skip_last=1) + _SLACK + 16 >= width
    for block in np.flatnonzero(doubtful & (plain | tight)).tolist():
        out[block] = _is_wrapped(layout.block(block).split("\n"), width, bool(plain[block]))
    return out


def _is_wrapped(lines: list[str], width: int, plain: bool) -> bool:
    body = lines[1:]
    if (in_body := sum(1 for line in body if _ITEM.match(line))) and in_body + bool(_ITEM.match(lines[0])) > 1:
        return False
    if plain:
        return True
    tight = all(
        len(line) + _SLACK + len(after.split(" ", 1)[0]) >= width for line, after in zip(lines, body, strict=False)
    )
    small = any(line[:1].islower() for line in body)
    few_capitals = len(lines) <= 3 and not _is_verse(lines)  # a longer paragraph goes on with a small letter somewhere
    return tight and (small or few_capitals) and not _SPEAKER.match(lines[0])


def _is_verse(lines: list[str]) -> bool:
    """Every line begins with a capital, and most end with a stop."""
    stopped = sum(line[-1] in ",;:.!?\u2019\u201d'\"-\u2014" for line in lines)
    return stopped * 10 >= 7 * len(lines)


def _tables(layout: _Layout) -> _Array:
    """Blocks with wide gaps, tabs or rows of dots inside a line."""
    raw = np.frombuffer(layout.data, dtype=np.uint8)
    blank, dot = raw == 32, np.flatnonzero(raw == 46)
    gaps = np.flatnonzero(blank[:-2] & blank[1:-1] & blank[2:])
    rows = dot[:-4][dot[4:] - dot[:-4] == 4]
    pairs = dot[:-1][dot[1:] - dot[:-1] == 2]
    pairs = pairs[(pairs > 0) & (pairs + 3 < len(raw))]
    spaced = pairs[blank[pairs - 1] & blank[pairs + 1] & blank[pairs + 3]]
    tabs = np.flatnonzero(raw == 9) if b"\t" in layout.data else dot[:0]
    owners = np.searchsorted(layout.starts, gaps, side="right") - 1
    begins = layout.starts[owners]
    rank = np.arange(len(gaps)) - np.searchsorted(gaps, begins)
    inside = gaps - begins != rank  # an indent is not a gap: its blanks are the line's first ones
    marked = np.zeros(len(layout.lengths), dtype=bool)
    marked[owners[inside]] = True
    for places in (rows, tabs, spaced):
        if len(places):
            marked[np.searchsorted(layout.starts, places, side="right") - 1] = True
    return _over_blocks(np.logical_or, marked, layout)


# ---------------------------------------------------------------- joining


def _joined(text: str, layout: _Layout, blocks: _Array, real_hyphens: bool) -> Joined:
    """Every line end in these blocks becomes a blank; but for those after a hyphen or a dash."""
    data = bytearray(layout.data)
    raw = np.frombuffer(data, dtype=np.uint8)
    breaks = _breaks(layout, blocks)
    before = raw[breaks - 1]
    raw[breaks] = 32
    hyphens = _Hyphens(text, real_hyphens)
    special = breaks[(before == 45) | (before == 0x94)]
    cuts = [cut for place in special.tolist() if (cut := hyphens.cut(layout.data, place))]
    del raw
    for start, end in reversed(cuts):
        del data[start:end]
    after = bytes(data)
    examples = []
    for block in blocks[:3].tolist():
        start, end = layout.span(block)
        examples.append(
            Edit("joined lines", layout.data[start:end].decode(), layout.data[start:end].replace(b"\n", b" ").decode())
        )
    return Joined(after.decode(), len(blocks), hyphens.closed, tuple(examples), after)


def _breaks(layout: _Layout, blocks: _Array) -> _Array:
    """Where the lines of these blocks end, without the last of each."""
    counts = layout.last[blocks] - layout.first[blocks]
    lines = np.repeat(layout.first[blocks] - np.concatenate(([0], np.cumsum(counts)[:-1])), counts) + np.arange(
        counts.sum()
    )
    found: _Array = layout.starts[lines + 1] - 1
    return found


class _Hyphens:
    """What to do with a word that is cut by a hyphen at a line's end, by what the same text writes elsewhere."""

    def __init__(self, text: str, real: bool) -> None:
        self.text, self.real = text, real
        self.words: set[str] | None = None
        self.closes = False
        self.closed = 0

    def cut(self, data: bytes, place: int) -> tuple[int, int] | None:
        """The bytes to take out at the line end at `place`: none, the break alone, or the hyphen with it."""
        if data[place - 1] == 0x94:
            return (place, place + 1) if data[place - 3 : place] == b"\xe2\x80\x94" else None
        around = data[max(0, place - 40) : place + 40].decode("utf-8", "ignore")
        middle = data[max(0, place - 40) : place].decode("utf-8", "ignore")
        left, right = _LEFT.search(middle), _RIGHT.match(around[len(middle) + 1 :])
        if left is None or right is None:
            return (place, place + 1) if data[place - 2 : place] == b"--" or left else None
        if self._is_one(left.group(1), right.group()):
            self.closed += 1
            return place - 1, place + 1
        return place, place + 1

    def _is_one(self, left: str, right: str) -> bool:
        if self.words is None:
            self._learn()
        assert self.words is not None
        solid, hyphened = (left + right).lower() in self.words, f"{left}-{right}".lower() in self.words
        return not hyphened and (solid or self.closes)

    def _learn(self) -> None:
        """A text in which most cut words are elsewhere written in one was hyphenated to fit its lines; in any other the hyphens are its own."""
        some = self.text[:_LOOKED_AT]
        self.words = {word.strip(".,;:!?\"'()[]\u201c\u201d\u2018\u2019") for word in set(some.lower().split())}
        cut = [(left + right, f"{left}-{right}") for left, right in _broken(some)]
        solid = sum(one.lower() in self.words and two.lower() not in self.words for one, two in cut)
        hyphened = sum(two.lower() in self.words for _, two in cut)
        self.closes = not self.real and solid > 2 * hyphened and solid * 4 >= len(cut)


def _broken(text: str) -> Iterator[tuple[str, str]]:
    """The words that a hyphen cuts at a line's end: a plain search for it, then what is on its two sides."""
    done, at = 0, text.find("-\n")
    while at >= 0:
        left = _LEFT.search(text, max(done, text.rfind("\n", 0, at) + 1), at + 1)
        right = _RIGHT.match(text, at + 2)
        if left and right:
            yield left.group(1), right.group()
            done = right.end()
        at = text.find("-\n", at + 1)


_LEFT, _RIGHT = re.compile(r"([A-Za-z\u00c0-\u024f]+)-$"), re.compile(r"[a-z\u00df-\u024f]+")
