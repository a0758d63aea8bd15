"""Lines that were broken to fit a width, joined into paragraphs again; verse, tables, lists and addresses left as they are.

In:  a text with one blank line between paragraphs.
Out: the same words. A paragraph is joined as a whole or not at all: where its lines are not plainly wrapped prose, it stays.

A break is a wrapped one if the next word would not have fitted. Verse fails that at nearly every line, and prose at none; the
second sign is that most lines of prose go on with a small letter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lamplighter.data.clean.rules import Change

WIDTHS = range(40, 101)  # what a person or a program wraps at
SLACK = 6  # hand-made changes leave lines a little short
LONG_SHARE = 0.02  # of the lines are longer than any wrap: then the text is not wrapped
SHORT_LINE = 0.62  # of the width
LOOKED_AT = 200_000  # characters, for the width

_ITEM = re.compile(r"(?:[-*\u2022\u00b7]|\(?\d{1,3}[.)\]]|\(\w\)|\[\d+\]|[|+])[ \t]")
_ITEM_HEADS = frozenset("-*\u2022\u00b7([|+0123456789")
_TABLE = re.compile(r"\S {3,}\S|\t\S|\.{5,}| \. \. ")
_SPEAKER = re.compile(r"[A-Z][A-Z .'\u2019-]{1,30}[.:]?$|[A-Z][\w .'\u2019-]{0,30}:$")
_BROKEN = re.compile(r"([A-Za-z\u00c0-\u024f]+)-\n([a-z\u00df-\u024f]+)")


@dataclass(frozen=True)
class Joined:
    """The text, how many paragraphs were joined, and the first ones as examples."""

    text: str
    count: int = 0
    hyphens: int = 0
    changes: tuple[Change, ...] = ()


def join(text: str, real_hyphens: bool = False) -> Joined:
    """`real_hyphens`: a hyphen at a line's end was one in print too (Project Gutenberg's proofreaders see to that).

    Joining must come to rest: where a second pass would join more (a page of short pieces, whose width cannot be told), nothing is joined.
    """
    first = _join_once(text, real_hyphens)
    if first.count and _join_once(first.text, real_hyphens).count:
        return Joined(text)
    return first


def _join_once(text: str, real_hyphens: bool) -> Joined:
    blocks = text.split("\n\n")
    width = _width(blocks)
    if not width:
        return Joined(text)
    wrapped = [number for number, block in enumerate(blocks) if "\n" in block and _is_wrapped(block, width)]
    several = sum(1 for block in blocks if block.count("\n") > 1)
    if len(wrapped) < 0.15 * several:
        return Joined(text)
    hyphens = _Hyphens(text, real_hyphens)
    changes = []
    for number in wrapped:
        block = blocks[number]
        blocks[number] = hyphens.join(block)
        if len(changes) < 3:
            changes.append(Change("joined lines", block, blocks[number]))
    return Joined("\n\n".join(blocks), len(wrapped), hyphens.closed, tuple(changes))


def _width(blocks: list[str]) -> int:
    """The width to which the prose of this text is wrapped; 0 if it is not."""
    longest, lines, long, seen = [], 0, 0, 0
    for block in blocks:
        lengths = [len(line) for line in block.split("\n")]
        lines += len(lengths)
        top = max(lengths)
        if top > WIDTHS[-1] + 10:
            long += sum(length > WIDTHS[-1] + 10 for length in lengths)
        if len(lengths) >= 3 and block[:1] != " ":
            longest.append(top)
            seen += len(block)
            if seen > LOOKED_AT and lines > 4000:
                break
    if not longest or long > LONG_SHARE * lines:
        return 0
    longest.sort()
    width = longest[len(longest) * 3 // 4]
    return width if width in WIDTHS else 0


def _is_wrapped(block: str, width: int) -> bool:
    """Whether the lines of this block are one paragraph of prose. The cheap signs first: this is asked of every paragraph."""
    lines = block.split("\n")
    body = lines[1:]
    heads = [line[:1] for line in body]
    if " " in heads or "\t" in heads or block.startswith("         "):
        return False
    lengths = list(map(len, lines))
    if max(lengths) > width + 12 or _is_table(block) or _is_list(lines, heads):
        return False
    small = sum(map(str.islower, heads))
    filled = lengths[:-1]
    if small * 2 > len(body) and len(body) > 1:
        shortest = SHORT_LINE * width
        if min(filled) >= shortest or sum(length < shortest for length in filled) * 8 <= len(lines):
            return True
    if small == len(body) and len(body) == 1 and lengths[0] > 0.8 * width:
        return True
    return _is_tight(filled, body, width) and (small > 0 or not _is_verse(lines)) and not _SPEAKER.match(lines[0])


def _is_tight(lengths: list[int], body: list[str], width: int) -> bool:
    """At no break would the next word have fitted."""
    return all(
        length + SLACK + len(after.split(" ", 1)[0]) >= width for length, after in zip(lengths, body, strict=True)
    )


def _is_table(block: str) -> bool:
    wide = "   " in block or "\t" in block or "....." in block or " . . " in block
    return wide and bool(_TABLE.search(block))


def _is_list(lines: list[str], heads: list[str]) -> bool:
    if _ITEM_HEADS.isdisjoint(heads):
        return False
    return sum(1 for line in lines if _ITEM.match(line)) > (1 if len(lines) > 2 else 0)


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

    def join(self, block: str) -> str:
        if "-\n" in block:
            block = _BROKEN.sub(self._one, block)
            block = block.replace("-\n", "-") if not block.startswith("-\n") else block
        if "\u2014\n" in block:
            block = block.replace("\u2014\n", "\u2014")
        return block.replace("\n", " ")

    def _one(self, found: re.Match[str]) -> str:
        left, right = found.groups()
        if self.words is None:
            self._learn()
        assert self.words is not None
        solid, hyphened = (left + right).lower() in self.words, f"{left}-{right}".lower() in self.words
        if solid and not hyphened or (not hyphened and self.closes):
            self.closed += 1
            return left + right
        return f"{left}-{right}"

    def _learn(self) -> None:
        """A text in which most cut words are elsewhere written in one was hyphenated to fit its lines; in any other the hyphens are its own."""
        some = self.text[: 2 * LOOKED_AT]
        self.words = {word.strip(".,;:!?\"'()[]\u201c\u201d\u2018\u2019").lower() for word in set(some.split())}
        cut = [(left + right, f"{left}-{right}") for left, right in _BROKEN.findall(some)] if "-\n" in some else []
        solid = sum(one.lower() in self.words and two.lower() not in self.words for one, two in cut)
        hyphened = sum(two.lower() in self.words for _, two in cut)
        self.closes = not self.real and solid > 2 * hyphened and solid * 4 >= len(cut)
