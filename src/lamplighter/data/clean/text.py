"""The characters of a text: line ends, NFC, controls, misread encodings, blanks. No character inside a good word changes.

In:  a decoded text.
Out: the same text without what nobody can see or read; and what was done.
"""

from __future__ import annotations

import re
import unicodedata

from lamplighter.data.clean.rules import Change

_CONTROLS = bytes([*range(0x09), *range(0x0E, 0x20), 0x7F])
_UNSEEN = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u200b\u2060\ufeff\ufffe\uffff]")
_UNSEEN_BYTES = re.compile(b"\xc2[\x80-\x84\x86-\x9f\xad]")
_UNSEEN_WIDE = ("\u200b", "\u2060", "\ufeff", "\ufffe", "\uffff")
_SOFT_BREAK = re.compile("\u00ad[ \t]*\n[ \t]*(?=\\w)")
_TRAILING = ("        ", "  ", " ", "\t", "\u00a0")

# A first byte and a later byte of UTF-8, both read as Windows-1252 or Latin-1: the only sign for which ftfy is asked.
_LATER = "\u0080-\u00bf\u20ac\u201a\u0192\u201e\u2026\u2020\u2021\u02c6\u2030\u0160\u2039\u0152\u017d\u2018\u2019\u201c\u201d\u2022\u2013\u2014\u02dc\u2122\u0161\u203a\u0153\u017e\u0178"
_MISREAD = re.compile(f"[\u00c2-\u00f4][{_LATER}]")
_MISREAD_BYTES = re.compile(  # the same in UTF-8: with a first byte that is always the same, it is found ten times faster
    b"\xc3[\x82-\xb4](?:\xc2[\x80-\xbf]|\xe2[\x80\x82\x84]|\xc5[\x92\x93\xa0\xa1\xb8\xbd\xbe]|\xc6\x92|\xcb[\x86\x9c])"
)


def characters(text: str) -> tuple[str, int]:
    """(the text with line ends of one kind, in NFC, without controls and unseen characters; how many of those went).

    Plain searches first: most texts have none of these, and a regular expression over a whole book costs more than all the rest.
    """
    text = _line_ends(text)
    data = text.encode()
    kept = data.translate(None, _CONTROLS)
    unseen = len(data) - len(kept)
    if text.isascii():
        text = kept.decode() if unseen else text
    elif unseen or _UNSEEN_BYTES.search(data) or any(one in text for one in _UNSEEN_WIDE):
        text, unseen = _UNSEEN.subn("", _SOFT_BREAK.sub("", text))
    if not text.isascii() and not unicodedata.is_normalized("NFC", text):
        text = "\n\n".join(
            unicodedata.normalize("NFC", one) for one in text.split("\n\n")
        )  # quick where nothing is to do
    if b" \n" in data or b"\t\n" in data or b"\xa0\n" in data:
        text = trailing(text)
    return text, unseen


def _line_ends(text: str) -> str:
    for old in (
        ("\r\n", "\r", "\x0b", "\x0c") if text.isascii() else ("\r\n", "\r", "\x0b", "\x0c", "\x85", "\u2028", "\u2029")
    ):
        if old in text:
            text = text.replace(old, "\n")
    return text


def trailing(text: str) -> str:
    """No blanks before a line's end, whatever their order."""
    while any(f"{blank}\n" in text for blank in (" ", "\t", "\u00a0")):
        for blanks in _TRAILING:
            text = text.replace(f"{blanks}\n", "\n")
    return text


def blank_lines(text: str) -> str:
    """One blank line at most between two lines, none at the beginning, no blanks at the end."""
    if "\n\n\n" in text:
        blocks = (block.strip("\n") for block in text.split("\n\n"))
        text = "\n\n".join(block for block in blocks if block)
    return text.lstrip("\n").rstrip()


def misread(text: str) -> tuple[str, list[Change]]:
    """(the text with UTF-8 that was read as Latin-1 or Windows-1252 read rightly, the lines that changed).

    Line by line, only where the sign is there, and only by a change of encoding: quotes, ligatures and widths stay as they are.
    """
    if text.isascii() or not _MISREAD_BYTES.search(text.encode()):
        return text, []
    lines, changes = text.split("\n"), []
    for number, line in enumerate(lines):
        if _MISREAD.search(line) and (right := _reread(line)) != line:
            changes.append(Change("mojibake", line, right))
            lines[number] = right
    return ("\n".join(lines), changes) if changes else (text, [])


def _reread(line: str) -> str:
    from lamplighter.data.clean.libraries import ftfy

    library = ftfy()
    config = library.TextFixerConfig(
        unescape_html=False, restore_byte_a0=True, replace_lossy_sequences=False, fix_c1_controls=False,
        decode_inconsistent_utf8=True,
    )  # fmt: skip
    right = str(library.fix_encoding(line, config))
    good = len(right) < len(line) and right.count("\ufffd") <= line.count("\ufffd") and "\n" not in right
    return unicodedata.normalize("NFC", _UNSEEN.sub("", right)) if good else line
