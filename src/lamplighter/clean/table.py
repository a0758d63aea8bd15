"""The table at the end: kept, rejected by reason, what the rules did, and examples of it.

In:  the totals.
Out: lines for people.
"""

from __future__ import annotations

from typing import Any

from lamplighter.rundir import human_bytes

MEANINGS = {
    "empty": "no text",
    "too_short": "too few words",
    "too_long": "over the size limit",
    "language": "another language",
    "letters": "too few letters",
    "word_length": "words too short or too long",
    "odd_symbols": "too many odd symbols",
    "broken_words": "too many broken words",
    "common_words": "hardly any common English word",
    "repeated_lines": "the same lines again and again",
    "repeated_words": "the same words again and again",
    "distinct_words": "too few different words",
    "duplicate": "the same as an earlier one",
    "near_duplicate": "nearly the same as an earlier one",
    "not_text": "cannot be decoded",
    "bad_line": "single lines that cannot be decoded",
    "bad_json": "not JSON",
    "bad_xml": "not well-formed XML",
    "no_text": "no text under the key",
    "mets": "METS: a list of files",
    "unknown_xml": "XML of an unknown kind",
    "unreadable": "cannot be read",
    "unknown_kind": "neither text nor a table of texts",
    "bad_row": "rows that cannot be read",
    "cut_short": "packed file, torn or damaged",
    "changed": "changed while it was read",
    "error": "an error in cleaning it",
}


def table(totals: dict[str, Any], examples: bool = False) -> str:
    """Everything in one column of rows; with examples, what each rule did before and after."""
    documents, kept = totals["documents"], totals["kept"]
    rows = [
        f"{'files':<28}{totals['files']:>12,}   {human_bytes(totals['bytes_in'])}",
        f"{'documents':<28}{documents:>12,}",
        f"{'kept':<28}{kept:>12,}   {human_bytes(totals['bytes_out'])}   {_share(kept, documents)}",
    ]
    for reason, count in sorted(totals["rejected"].items(), key=lambda row: (-row[1], row[0])):
        unit = "lines" if reason == "bad_line" else ""
        rows.append(f"  {'rejected ' + reason:<26}{count:>12,}   {MEANINGS.get(reason, '')} {unit}".rstrip())
    rules = totals["rules"]
    if rules["counts"]:
        rows += ["", f"{'what was done':<28}{'times':>12}   characters"]
        for rule, count in sorted(rules["counts"].items()):
            chars = rules["chars"].get(rule, 0)
            rows.append(f"  {rule:<26}{count:>12,}   {f'{chars:,}' if chars else ''}".rstrip())
    if totals["languages"]:
        named = ", ".join(f"{name} {count:,}" for name, count in list(totals["languages"].items())[:8])
        rows += ["", f"languages: {named}"]
    if examples:
        rows += _examples(rules["examples"])
    return "\n".join(rows) + "\n"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _examples(found: dict[str, list[list[str]]]) -> list[str]:
    rows: list[str] = []
    for rule in sorted(found):
        for place, before, after in found[rule]:
            rows += [
                "",
                f"{rule}: {_safe(place)}",
                f"  - {_safe(before)}",
                f"  + {_safe(after)}" if after else "  + (taken away)",
            ]
    return rows


def _safe(text: str) -> str:
    """Text from data, in one line, with nothing that steers a terminal."""
    flat = text.replace("\n", "\u23ce")
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in flat)
