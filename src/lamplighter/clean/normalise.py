"""The characters of a text: line ends, NFC, controls, misread encodings, blanks. No character inside a good word changes.

In:  a decoded text.
Out: the same text without what nobody can see or read; and what was done.
"""

from __future__ import annotations

import re
import unicodedata

from lamplighter.clean.rules import Change

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


def misread(text: str, odd: str | None = None) -> tuple[str, list[Change]]:
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
            changes.append(Change("mojibake", line, right))
            out += [data[done:start], right.encode()]
            done = end
    return (b"".join([*out, data[done:]]).decode(), changes) if changes else (text, [])


def _reread(line: str) -> str:
    from lamplighter.clean.libraries import ftfy

    library = ftfy()
    config = library.TextFixerConfig(
        unescape_html=False, restore_byte_a0=True, replace_lossy_sequences=False, fix_c1_controls=False,
        decode_inconsistent_utf8=True,
    )  # fmt: skip
    right = str(library.fix_encoding(line, config))
    good = len(right) < len(line) and right.count("\ufffd") <= line.count("\ufffd") and "\n" not in right
    return unicodedata.normalize("NFC", _UNSEEN.sub("", right)) if good else line
