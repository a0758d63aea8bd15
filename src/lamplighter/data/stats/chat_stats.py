"""Instruction data in figures: rows counted with their template applied, and looked at for faults.

In:  files of rows, a chat template and its tokenizer, the settings of a run.
Out: the same Stats as for text, with a Quality of the rows.
"""

from __future__ import annotations

import math
import re
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from lamplighter import report
from lamplighter.data.chat import example_cache, rows
from lamplighter.data.chat.rendering import Refused
from lamplighter.data.chat.rows import Message, RowSource
from lamplighter.data.chat.template import ChatTemplate
from lamplighter.data.chat.tool_calls import NotAnExample
from lamplighter.data.sampling import Quota
from lamplighter.data.stats import About, Example, Quality, Reason, Request, Stats, conclude, minhash
from lamplighter.data.stats.collect import NOTHING_HELD, Tally, would_refuse
from lamplighter.data.stats.minhash import normalised, text_hash
from lamplighter.data.stats.overlap import Sides, TestGrams, compare_test, find_duplicates, near_across, no_near
from lamplighter.errors import BadData
from lamplighter.readers.bad_records import BadRecords
from lamplighter.rundir import human_bytes

_CHUNK = 256  # rows that are rendered and encoded together
EXAMPLES = 3
_SHORT_CHARS = 2  # an answer of so many characters or fewer
_SENTENCE_WORDS = 8  # an answer of fewer words need not be a sentence
_DOUBT = 0.25
_FORMULA = f"100 x (1 - (faulty rows + {_DOUBT} x doubtful rows) / rows); a row counts once, the worse kind first"
_REASONS = {
    "unreadable": ("faulty", "it is no row, or no conversation: set aside, with the reason"),
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


def count_rows(source: RowSource, template: ChatTemplate, path: str, request: Request, test: TestGrams | None) -> Stats:
    """All figures of instruction rows."""
    started = time.monotonic()
    reason = no_near(request.near_documents)
    near = 0 if reason else request.near_documents
    counter = _Counter(source, template, Tally(template.tokenizer, None, near, test.meet if test else None))
    sampled = counter.read(request)
    tally, inspector = counter.tally, counter.inspector
    if not len(tally.places):
        raise BadData(f"no example in {source}", "no row has a question and an answer", "check data.paths")
    inspector.set_aside(counter.aside.total(), counter.aside_places)
    seconds = time.monotonic() - started
    about = About(str(source), "chat", template.name, str(template.tokenizer), path, sampled=sampled, seconds=seconds)
    duplicates = find_duplicates(tally, reason)
    sides = _compare_sides(counter, request.val_fraction, reason)
    compared = compare_test(tally, test, reason) if test else None
    notes = [f"lamp train keeps equal examples once: {len(set(counter.hashes)):,} are left"] if duplicates.exact else []
    return conclude(
        about,
        request,
        tally,
        dirt=dict(counter.aside),
        duplicates=duplicates,
        apart=sides,
        test_set=compared,
        quality=inspector.result(),
        notes=notes,
    )


class _Counter:
    """One reading of the rows."""

    def __init__(self, source: RowSource, template: ChatTemplate, tally: Tally) -> None:
        self.source, self.template, self.tally = source, template, tally
        self.inspector, self.hashes = Inspector(), array("Q")
        self.aside: Counter[str] = Counter()
        self.aside_places: dict[str, str] = {}
        self._waiting: list[tuple[list[Message], str]] = []
        tally.learned = 0

    def set_aside(self, place: str, why: str) -> None:
        self.aside[why] += 1
        if len(self.aside_places) < EXAMPLES:
            self.aside_places[place] = why

    def read(self, request: Request) -> str:
        """Every row, or a sample; says how much of what, '' for all."""
        total, bad = self.source.total_bytes(), BadRecords(self.source.policy, math.inf, quiet=True)
        quota = Quota(total, request.sample_bytes) if request.sample_bytes else None
        done, left_out, number = 0, 0, 0
        with report.phase("count", total=quota.end if quota else total, unit="B") as p:
            for row, kind, place in self.source.rows(bad):
                done = self.source.position().bytes_done
                p.set(done, place)
                if (quota and quota.is_over(done)) or (self.source.limit is not None and number >= self.source.limit):
                    break
                number += 1
                if quota and not quota.wants(done):
                    left_out += 1
                    continue
                size = self.add(row, kind, place, request.seq_len)
                if quota:
                    quota.kept += size
            self.flush(request.seq_len)
            p.set(self.source.position().bytes_done)
        for one in bad.listed:
            self.set_aside(f"{one['path']}:{one['line']}", str(one["error"][1]).split(":")[0])
        if quota is None or not left_out:
            return ""
        return f"a sample of {human_bytes(quota.kept)} in {number - left_out:,} of {number:,} rows, spread over {self.source}"

    def add(self, row: rows.Row, kind: str, place: str, seq_len: int) -> int:
        """The conversations of one row; returns how many bytes of text they hold."""
        size = 0
        try:
            here = rows.kind_of_row(row, kind == rows.PAIR)
            if here not in (kind, None):
                raise NotAnExample("it is a row of another kind than those before it")
            if here is None and not {"instruction", "prompt", "messages"} & set(row):
                raise NotAnExample(rows.no_kind(row, kind))
            for messages in rows.conversations(row, kind, self.template.between):
                size += sum(len(message["content"]) for message in messages)
                self._waiting.append((messages, place))
        except NotAnExample as error:
            self.set_aside(place, str(error))
        if len(self._waiting) >= _CHUNK:
            self.flush(seq_len)
        return size

    def flush(self, seq_len: int) -> None:
        """Render, encode and look at what waits."""
        whole: list[tuple[list[Message], str]] = []
        for messages, place in self._waiting:
            try:
                whole.append((rows.complete(messages), place))
            except NotAnExample as error:
                if not self.inspector.look(Row(place, *_exchange(messages))):
                    self.set_aside(place, str(error))
        self._waiting = []
        started = time.monotonic()
        bare = [[example_cache.without_end(one, self.template) for one in messages] for messages, _ in whole]
        made = self.template.encode(bare)
        self.tally.encode_s += time.monotonic() - started
        for (messages, place), cleaned, one in zip(whole, bare, made, strict=True):
            if isinstance(one, Refused):
                self.set_aside(place, str(one))
                continue
            self.inspector.look(Row(place, *_exchange(cleaned)), len(one.ids) > seq_len)
            if not all(message["content"].strip() for message in cleaned):
                continue  # nothing but an end mark: not an example for lamp train either
            text = "\n".join(message["content"] for message in messages)
            self.tally.add_counted(text, place, len(one.ids))
            self.tally.used[one.ids] = True
            self.tally.learned = (self.tally.learned or 0) + int(one.learned.sum())
            self.hashes.append(example_cache.hash_of(cleaned))


def _exchange(messages: Sequence[Message]) -> tuple[str, str]:
    """What is asked, and the last answer."""
    last = max((n for n, one in enumerate(messages) if one["role"] == "assistant"), default=len(messages))
    asked = "\n".join(one["content"] for one in messages[:last])
    return asked, messages[last]["content"] if last < len(messages) else ""


def _compare_sides(counter: _Counter, val_fraction: float, reason: str) -> Sides:
    """The division that `lamp train` would make of these examples, and near duplicates across it."""
    if not val_fraction:
        return Sides("", NOTHING_HELD)
    unique = array("Q", dict.fromkeys(counter.hashes))
    try:
        is_val = dict(zip(unique, example_cache.sides_of(unique, val_fraction, counter.source).tolist(), strict=True))
    except BadData as error:
        return Sides("", would_refuse(error))
    val = sum(is_val.values())
    sides = Sides("examples", reason, len(is_val) - val, val)
    if reason:
        return sides
    rows, numbers = minhash.joined([counter.tally.signers["train"]])
    held = np.array([is_val[counter.hashes[n]] for n in numbers.tolist()], np.int64)
    order = np.argsort(held, kind="stable")
    return near_across(sides, counter.tally, rows[order], numbers[order], int((held == 0).sum()))


# ---------------------------------------------------------------- faults that can be seen without a model


@dataclass(frozen=True)
class Row:
    """One exchange, as plain text: all that is asked, and the answer that is learned."""

    place: str
    prompt: str
    answer: str


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
