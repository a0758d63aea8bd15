"""Characters and lines made ordinary: misread encodings mended, unseen characters taken out, wrapped lines joined; no word is rewritten.

In:  a text.
Out: the same text, with what was changed; doing it again changes nothing.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
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
_LOOKED_AT = 200_000  # characters, for what the text writes elsewhere

_ITEM = re.compile(r"(?:[-*\u2022\u00b7]|\(?\d{1,3}[.)\]]|\(\w\)|\[\d+\]|[|+])[ \t]")
_ITEM_HEADS = np.isin(np.arange(256), [ord(one) for one in "-*([|+0123456789"])
_BLANK = ord(" ")
_Array = np.ndarray
_SPEAKER = re.compile(r"[A-Z][A-Z .'\u2019-]{1,30}[.:]?$|[A-Z][\w .'\u2019-]{0,30}:$")
_SINGLE = re.compile(r"\n(?<!\n\n)(?!\n)")
_GAP = re.compile(r"[^ \n] {3}")  # an indent is none
_LEFT, _RIGHT = re.compile(r"([A-Za-z\u00c0-\u024f]+)-$"), re.compile(r"[a-z\u00df-\u024f]+")


@dataclass(frozen=True)
class Joined:
    """The text, how many paragraphs were joined, and the first ones as examples."""

    text: str
    count: int = 0
    hyphens: int = 0
    changes: tuple[Edit, ...] = ()


def join(text: str, real_hyphens: bool = False) -> Joined:
    """`real_hyphens`: a hyphen at a line's end was one in print too (Project Gutenberg's proofreaders see to that).

    Joining must come to rest: where a second pass would join more (a page of short pieces, whose width cannot be told), nothing is joined.
    """
    text = blank_lines(text)
    paragraphs = text.split("\n\n")
    wrapped = _wrapped_paragraphs(text, paragraphs)
    if not wrapped:
        return Joined(text)
    hyphens = _Hyphens(text, real_hyphens)
    changes = tuple(
        Edit("joined lines", paragraphs[number], paragraphs[number].replace("\n", " ")) for number in wrapped[:3]
    )
    for number in wrapped:
        paragraphs[number] = hyphens.join(paragraphs[number])
    joined = "\n\n".join(paragraphs)
    if _wrapped_paragraphs(joined, paragraphs):
        return Joined(text)
    return Joined(joined, len(wrapped), hyphens.closed, changes)


def _wrapped_paragraphs(text: str, paragraphs: list[str]) -> list[int]:
    """The numbers of the paragraphs whose lines are to be joined; none where the text as a whole is not wrapped.

    A book has some ten thousand lines: their lengths and first bytes are looked at all at once, and one by one only in doubt.
    """
    if not _SINGLE.search(text):  # every paragraph is one line
        return []
    lengths, heads = _lines(text)
    blank = np.flatnonzero(lengths == 0)
    if np.count_nonzero(lengths > WIDEST + 10) / (len(lengths) - len(blank)) > _LONG_SHARE:
        return []
    first, last = np.append(0, blank + 1), np.append(blank - 1, len(lengths) - 1)  # lines of each paragraph
    numbers = np.flatnonzero(last > first)
    first, last = first[numbers], last[numbers]
    body = last - first
    longest = _over(np.maximum, lengths, first, last)
    width = _width(longest[(body > 1) & (heads[first] != _BLANK)])
    if not width:
        return []
    smalls = _over(np.add, (heads >= ord("a")) & (heads <= ord("z")), first + 1, last)
    shorts = _over(np.add, lengths < _SHORT_LINE * width, first, last - 1)
    plain = (body > 1) & (smalls * 2 > body) & (shorts * 8 <= body + 1)
    plain |= (body == 1) & (smalls == 1) & (lengths[first] > 0.8 * width)
    tight = _over(np.minimum, lengths, first, last - 1) + _SLACK + 16 >= width
    possible = ~_over(np.logical_or, heads == _BLANK, first + 1, last) & (longest <= width + 12) & (plain | tight)
    clear = plain & ~_over(np.logical_or, _ITEM_HEADS[heads], first + 1, last)
    wrapped = [
        number
        for number, is_plain, is_clear in zip(*(one[possible].tolist() for one in (numbers, plain, clear)), strict=True)
        if not _is_table(paragraphs[number])
        and (is_clear or _is_prose(paragraphs[number].split("\n"), width, is_plain))
    ]
    return wrapped if len(wrapped) >= _ENOUGH * np.count_nonzero(body > 1) else []


def _lines(text: str) -> tuple[_Array, _Array]:
    """(how many characters each line has, its first byte: a line end for an empty one)."""
    data = np.frombuffer(f"{text}\n".encode(), dtype=np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    starts = np.append(0, ends[:-1] + 1)
    lengths = ends - starts
    if not text.isascii():
        later = np.flatnonzero(data & 0xC0 == 0x80)  # the bytes of a character after its first
        lengths -= np.diff(np.searchsorted(later, ends), prepend=0)
    return lengths, data[starts]


def _over(what: np.ufunc, values: _Array, first: _Array, last: _Array) -> _Array:
    """A sum, an extreme or a disjunction over the lines of each paragraph."""
    values = np.append(values, values[-1:]).astype(np.int32 if what is np.add else values.dtype)  # `last + 1` is in it
    found: _Array = what.reduceat(values, np.stack((first, last + 1), axis=1).ravel())[::2]
    return found


def _width(longest: _Array) -> int:
    """The width to which prose is wrapped, from the longest line of each of its paragraphs; 0 if it is not."""
    width = int(np.sort(longest)[len(longest) * 3 // 4]) if len(longest) else 0
    return width if NARROWEST <= width <= WIDEST else 0


def _is_table(paragraph: str) -> bool:
    """Wide gaps, tabs or rows of dots inside a line."""
    marked = "\t" in paragraph or "....." in paragraph or " . . " in paragraph
    return marked or ("   " in paragraph and _GAP.search(paragraph) is not None)


def _is_prose(lines: list[str], width: int, plain: bool) -> bool:
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


class _Hyphens:
    """What to do with a word that is cut by a hyphen at a line's end, by what the same text writes elsewhere."""

    def __init__(self, text: str, real: bool) -> None:
        self.text, self.real = text, real
        self.words: set[str] | None = None
        self.closes = False
        self.closed = 0

    def join(self, paragraph: str) -> str:
        """Every line end becomes a blank; but for those after a hyphen or a dash."""
        if "-\n" not in paragraph and "\u2014\n" not in paragraph:
            return paragraph.replace("\n", " ")
        lines, pieces = paragraph.split("\n"), []
        for line, after in itertools.pairwise(lines):
            pieces.append(self._join_to(line, after) if line.endswith(("-", "\u2014")) else f"{line} ")
        return "".join([*pieces, lines[-1]])

    def _join_to(self, line: str, after: str) -> str:
        """A line that ends in a hyphen or a dash, as it stands before the next one."""
        left, right = _LEFT.search(line[-40:]), _RIGHT.match(after)
        if line[-1] == "\u2014" or line.endswith("--"):
            return line
        if left is None:
            return f"{line} "
        if right and self._is_one(left.group(1), right.group()):
            self.closed += 1
            return line[:-1]
        return line

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
        lines = itertools.pairwise(some.split("\n"))
        ends = [(_LEFT.search(line[-40:]), _RIGHT.match(after)) for line, after in lines if line.endswith("-")]
        cut = [(left.group(1), right.group()) for left, right in ends if left and right]
        solid = sum((a + b).lower() in self.words and f"{a}-{b}".lower() not in self.words for a, b in cut)
        hyphened = sum(f"{a}-{b}".lower() in self.words for a, b in cut)
        self.closes = not self.real and solid > 2 * hyphened and solid * 4 >= len(cut)
