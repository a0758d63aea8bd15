"""Text of somebody else, for people: control characters are shown, not obeyed; passwords and tokens are masked.

In:  words that hold names, paths, data, addresses or what a library has said.
Out: the same words, safe on a terminal and in a log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

# What a terminal obeys (C0 and C1 controls: escape sequences, OSC, carriage return), what turns the reading direction
# around, and halves of surrogates, which cannot be written at all.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
MASK = "***"
_FLAG = r"--(?:(?:hf|hub|auth|access|api|github|wandb|bearer)[-_])?(?:token|api[-_]?key|secret|password|passwd)"


def clean(text: str) -> str:
    """For the inside of a line: everything that is not printable is shown as Python writes it."""
    return "".join(c if c.isprintable() else _escape(c) for c in text)


def clean_text(text: str) -> str:
    """For text of several lines: newlines, tabs and all that a terminal only draws stay. What was JSON still is."""
    return _OBEYED.sub(lambda found: _escape(found[0]) if found[0] < " " else f"\\u{ord(found[0]):04x}", text)


def has_controls(text: str) -> bool:
    """Whether it holds anything that `clean_text` would change, or more than one line."""
    return _OBEYED.search(text) is not None or "\n" in text or "\t" in text


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()


def mask(text: str) -> str:
    """Without passwords and tokens, as far as they can be told by their form or by the name before them."""
    if not _hint().search(text):
        return text
    for pattern, shown in _secrets():
        text = pattern.sub(shown, text)
    return text


def mask_record(value: Any) -> Any:
    """The same for every text in something that becomes JSON; a word after a flag such as --hf-token goes as a whole."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {name: mask_record(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        before = [None, *value]
        return [MASK if _is_secret_flag(flag) else mask_record(one) for flag, one in zip(before, value, strict=False)]
    return value


def _is_secret_flag(word: object) -> bool:
    return isinstance(word, str) and re.fullmatch(_FLAG, word, re.IGNORECASE) is not None


def mask_address(address: str) -> str:
    """An address without who asks and with which key: of a query nothing is kept, as every store has names of its own for those."""
    return re.sub(r"\?[^\s]*", f"?{MASK}", mask(address))


def safe(text: str) -> str:
    """Both: for every word of ours that goes to a person."""
    return clean_text(mask(text))


@cache
def _hint() -> re.Pattern[str]:
    """What every secret below has in it: most sentences have nothing of the kind, and cost one search."""
    return re.compile(
        r"://|ntfy:|hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox|AKIA|eyJ|[Bb]earer|[Bb]asic|(?i:token|key|secret|passw|auth)"
    )


@cache
def _secrets() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Each with what stands in its place. A value ends before a quote, a bracket or a separator."""
    value = r"""[^\s"'\\&#<>|;,)\]}]+"""
    named = r"token|api[-_]?key|apikey|key|secret|password|passwd|pwd|sig|signature|credential|auth|sas|code"
    found = (
        # https://user:word@host; the password may hold @ itself
        (r"""(\b[a-z][a-z0-9+.-]{1,15}://)[^\s"'\\/?#]*@""", rf"\1{MASK}@"),
        # hooks whose path is the password
        (rf"(hooks\.slack\.com/(?:services|workflows|triggers)/){value}", rf"\1{MASK}"),
        (rf"(discord(?:app)?\.com/api/webhooks/){value}", rf"\1{MASK}"),
        (rf"(api\.telegram\.org/bot){value}", rf"\1{MASK}"),
        (rf"(\.webhook\.office\.com/){value}", rf"\1{MASK}"),
        (rf"(?<![\w/])(ntfy:(?!TOPIC)(?://[^\s/]+/)?){value}", rf"\1{MASK}"),
        (r"""(--(?:watch\.)?notify(?:=|["']?,?\s+)["']?https?://[^\s"'\\/?#]*/?)[^\s"'\\]+""", rf"\1{MASK}"),
        # ?token=...&X-Amz-Signature=...
        (rf"(?i)([?&](?:[\w.-]{{0,30}}[-_.])?(?:{named})=){value}", rf"\1{MASK}"),
        # Authorization: Bearer ...; a JSON or Python header too
        (rf"""(?i)(authorization["']?\s*[:=]\s*["']?(?:(?:bearer|basic|token)\s+)?)(?!(?:bearer|basic|token)\s){value}""", rf"\1{MASK}"),
        (r"(?i)\b(bearer|basic)(\s+)(?=[\w.~+/=-]*\d)[\w.~+/=-]{16,}", rf"\1\2{MASK}"),
        # HF_TOKEN=..., WANDB_API_KEY: ..., password=..., --hf-token ...
        (rf"""(\b(?:[A-Z0-9]{{1,20}}_){{1,6}}(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD)["']?\s*[=:]\s*["']?){value}""", rf"\1{MASK}"),
        (rf"""(?i)(\b(?:[a-z]{{1,20}}[-_])?(?:api[-_]?key|access[-_]token|auth[-_]token|client[-_]secret|password|passwd)["']?\s*[=:]\s*["']?){value}""", rf"\1{MASK}"),
        (rf"""(?i)({_FLAG}(?:=|["']?,?\s+)["']?){value}""", rf"\1{MASK}"),
        # by their own form
        (r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abeoprs]-)[A-Za-z0-9_-]{10,}", MASK),
        (r"\bAKIA[0-9A-Z]{16}\b", MASK),
        (r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+", MASK),
    )  # fmt: skip
    return tuple((re.compile(pattern), shown) for pattern, shown in found)
