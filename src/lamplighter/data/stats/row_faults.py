"""Faults of instruction rows, by what can be seen without a model: empty, repeated, incomplete, cut off.

In:  rows (prompt, answer, place), one after the other.
Out: for each reason a count and the first examples, and a score with its formula.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from lamplighter.data.stats.minhash import normalised, text_hash

EXAMPLES = 3
_SHORT_CHARS = 2  # an answer of so many characters or fewer
_SENTENCE_WORDS = 8  # an answer of fewer words need not be a sentence
_DOUBT = 0.25
_FORMULA = f"100 x (1 - (faulty rows + {_DOUBT} x doubtful rows) / rows); a row counts once, the worse kind first"
_REASONS = {
    "unreadable": ("faulty", "not a row of a known kind: set aside by the reader"),
    "empty": ("faulty", "neither prompt nor answer holds text"),
    "no_answer": ("faulty", "the answer is missing or empty"),
    "no_prompt": ("faulty", "the prompt is missing or empty"),
    "repeated": ("faulty", "the same prompt and answer stand in an earlier row (case and white space apart)"),
    "answer_is_prompt": ("faulty", "the answer repeats the prompt"),
    "same_prompt": ("doubtful", "an earlier row has the same prompt and another answer"),
    "mid_sentence": (
        "doubtful",
        f"a guess: an answer of {_SENTENCE_WORDS} words or more that ends in a letter, comma or opening bracket,"
        " though other lines of it end sentences",
    ),
    "very_short": ("doubtful", f"the answer has {_SHORT_CHARS} characters or fewer"),
    "very_long": ("doubtful", "longer than data.seq_len tokens with the template: data.over_length decides"),
}
_OPEN = re.compile(r"[\w,(\[{–—-]$")


@dataclass(frozen=True)
class Row:
    """One exchange, as plain text: all that is asked, and the answer that is learned."""

    place: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Example:
    place: str
    text: str


@dataclass(frozen=True)
class Reason:
    """One kind of fault."""

    reason: str
    kind: str
    """faulty or doubtful."""
    about: str
    count: int
    examples: list[Example]


@dataclass(frozen=True)
class Quality:
    """What is wrong with the rows."""

    rows: int
    faulty: int
    doubtful: int
    score: float
    formula: str
    reasons: list[Reason]
    answer_words_mean: float
    """Of the answers that there are."""


@dataclass
class Inspector:
    """Looks at rows as they pass; remembers two hashes of each, some 150 bytes."""

    rows: int = 0
    faulty: int = 0
    doubtful: int = 0
    words: int = 0
    answers: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_REASONS, 0))
    examples: dict[str, list[Example]] = field(default_factory=lambda: {name: [] for name in _REASONS})
    _prompts: set[int] = field(default_factory=set)
    _wholes: set[int] = field(default_factory=set)

    def set_aside(self, count: int, places: Mapping[str, str]) -> None:
        """Rows that the reader could not use; where, and why."""
        self.rows += count
        self.faulty += count
        self.counts["unreadable"] += count
        self.examples["unreadable"] = [Example(place, why) for place, why in places.items()][:EXAMPLES]

    def look(self, row: Row, over_length: bool = False) -> list[str]:
        """The reasons that hold for one row."""
        prompt, answer = normalised(row.prompt), normalised(row.answer)
        found = self._missing(prompt, answer) or self._known(prompt, answer)
        if answer:
            self.answers += 1
            self.words += answer.count(" ") + 1
            if len(answer) <= _SHORT_CHARS:
                found.append("very_short")
            if ends_mid_sentence(row.answer):
                found.append("mid_sentence")
        if over_length:
            found.append("very_long")
        self._count(row, found)
        return found

    def _missing(self, prompt: str, answer: str) -> list[str]:
        if not prompt and not answer:
            return ["empty"]
        if not answer:
            return ["no_answer"]
        return [] if prompt else ["no_prompt"]

    def _known(self, prompt: str, answer: str) -> list[str]:
        found = []
        asked, whole = text_hash(prompt), text_hash(f"{prompt}\0{answer}")
        if whole in self._wholes:
            found.append("repeated")
        elif asked in self._prompts:
            found.append("same_prompt")
        self._prompts.add(asked)
        self._wholes.add(whole)
        if prompt == answer:
            found.append("answer_is_prompt")
        return found

    def _count(self, row: Row, found: list[str]) -> None:
        self.rows += 1
        kinds = {_REASONS[name][0] for name in found}
        self.faulty += "faulty" in kinds
        self.doubtful += kinds == {"doubtful"}
        for name in found:
            self.counts[name] += 1
            if len(self.examples[name]) < EXAMPLES:
                shown = row.answer if name in ("mid_sentence", "very_short") else row.prompt or row.answer
                shown = shown[-60:] if name == "mid_sentence" else shown[:60]
                self.examples[name].append(Example(row.place, shown))

    def result(self) -> Quality:
        made = [Reason(name, *_REASONS[name], self.counts[name], self.examples[name]) for name in _REASONS]
        bad = (self.faulty + _DOUBT * self.doubtful) / max(1, self.rows)
        words = self.words / max(1, self.answers)
        return Quality(
            self.rows,
            self.faulty,
            self.doubtful,
            score=round(100 * (1 - bad), 2),
            formula=_FORMULA,
            reasons=made,
            answer_words_mean=words,
        )


def ends_mid_sentence(answer: str) -> bool:
    """A guess: prose that stops without a full stop. Lists, code, single words and numbers may end as they like."""
    text = answer.rstrip()
    if len(text.split()) < _SENTENCE_WORDS or not _OPEN.search(text) or "```" in text:
        return False
    last = text.splitlines()[-1]
    if last.split()[-1].startswith(("#", "@", "http")):
        return False
    is_list = bool(re.match(r"\s*([-*•]|\d+[.)])\s", last)) or (
        "\n" in text.strip() and len(last.split()) < _SENTENCE_WORDS
    )
    return (not is_list and bool(re.search(r"[.!?。！？](\s|$)", text))) or text[-1] in ",(["
