"""Period accuracy: does a model that writes of a time stay in it? Words and years that do not belong there, facts that do.

In:  a folder with period.yaml (from, to, prompts), words.csv (word,from,to) and facts.jsonl (prompt, right, wrong).
Out: a Task; and of each written text its anachronisms and its years. No torch.

A small one of our own, for the invented London of 1837 that the demo learns, is in london/ beside this file.
"""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lamplighter import read_back
from lamplighter.errors import BadData, InputMissing
from lamplighter.evaluate.generation import words_of
from lamplighter.evaluate.items import Task, TaskItem, sha256_of

LONDON = Path(__file__).parent / "london"
_YEAR = re.compile(r"(?<![\d.,£$])1[0-9]{3}(?![\d.,]\d|\d)|(?<![\d.,£$])20[0-9]{2}(?![\d.,]\d|\d)")


@dataclass(frozen=True)
class Period:
    """The time that is written of, and what had no name yet or no longer in it."""

    begin: int
    end: int
    words: dict[str, tuple[int | None, int | None]]  # a word or phrase: in use from, until

    def looked_at(self, text: str) -> dict[str, Any]:
        """What in a text does not belong: words not yet or no longer in use, years after the period."""
        plain = f" {' '.join(words_of(text))} "
        wrong = [
            word
            for word, (since, until) in self.words.items()
            if f" {word} " in plain and self.is_outside(since, until)
        ]
        years = [int(year) for year in _YEAR.findall(text)]
        return {
            "anachronisms": wrong,
            "words": len(plain.split()),
            "years": years,
            "years_that_fit": sum(self.begin <= year <= self.end for year in years),
        }

    def is_outside(self, since: int | None, until: int | None) -> bool:
        return (since is not None and since > self.end) or (until is not None and until < self.begin)


def open_period(name: str, path: Path) -> Task:
    """Prompts to be continued (reference: none) and facts to be chosen."""
    description, facts = path / "period.yaml", path / "facts.jsonl"
    read_period(path)
    found = _yaml(description)
    prompts = found.get("prompts")
    if not isinstance(prompts, list) or not prompts or not all(isinstance(one, str) for one in prompts):
        raise BadData(f"{description} has no prompts", "a list of texts to be continued", "see docs/evaluation.md")
    texts, most = (_count(description, found, name, usual) for name, usual in (("texts", 4), ("max_tokens", 80)))
    try:
        items = [TaskItem(prompt, (), group="prompt") for prompt in prompts for _ in range(texts)]
    except ValueError as error:
        raise BadData(f"{description} has a prompt that is no text", str(error), "save it as UTF-8") from error
    items += _facts(facts) if facts.is_file() else []
    files = [one for one in (description, path / "words.csv", facts) if one.is_file()]
    settings = {"from": found["from"], "to": found["to"], "max_tokens": most}
    return Task(name, "period", tuple(items), path, sha256_of(files), "{prompt}; facts: {prompt} | {answer}", settings)


def _count(path: Path, found: dict[str, Any], name: str, usual: int) -> int:
    value = found.get(name, usual)
    if type(value) is not int or value < 1:
        line = next((n for n, text in enumerate(_text(path).split("\n"), 1) if name in text), 1)
        why = f"it is {str(value)[:40]!r}, and must be a whole number of 1 or more"
        raise BadData(f"{path}, line {line}: {name} cannot be used", why, f"{name}: {usual}")
    return value


def read_period(path: Path) -> Period:
    """The period and its word list."""
    found = _yaml(path / "period.yaml")
    begin, end = found.get("from"), found.get("to")
    if type(begin) is not int or type(end) is not int or begin > end:
        raise BadData(f"{path}/period.yaml names no period", "from and to are years", "from: 1830, to: 1837")
    words, line = path / "words.csv", 1
    rows, listed = csv.DictReader(io.StringIO(_text(words)), strict=True), dict[str, tuple[int | None, int | None]]()
    try:
        for row in rows:
            line = rows.line_num
            since, until = _year(row.get("from")), _year(row.get("to"))
            if since is not None and until is not None and since > until:
                raise ValueError(f"{row['word']!r} is in use from {since} to {until}")
            word = " ".join(words_of(row["word"]))
            if not word:
                raise ValueError(f"{row['word']!r} is no word")
            if listed.setdefault(word, (since, until)) != (since, until):
                raise ValueError(f"{word!r} stands twice, with other years")
    except (KeyError, ValueError, AttributeError, TypeError, csv.Error) as error:
        why = f"{type(error).__name__}: {error}"
        raise BadData(
            f"{words}, line {line} is of no word list", why, "its columns are word,from,to; years may be empty"
        ) from error
    if not listed:
        raise BadData(f"{words} is empty", "no word can be out of its time", "columns word,from,to")
    period = Period(begin, end, listed)
    if not any(period.is_outside(*years) for years in listed.values()):  # every text would have a perfect score
        why = f"all its words were in use from {begin} to {end}"
        raise BadData(f"by {words} no word can be out of its time", why, "words that came later, or had gone before")
    return period


def _facts(path: Path) -> list[TaskItem]:
    found = []
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row["wrong"], list) or not row["wrong"]:
                raise ValueError("wrong is no list with something wrong to choose")
            answers = [_answer(one) for one in (row["right"], *row["wrong"])]
            if answers[0] in answers[1:]:
                raise ValueError(f"{answers[0]!r} is right and wrong at once")
            if not isinstance(prompt := row["prompt"], str):
                raise ValueError(f"prompt is no text but {str(prompt)[:40]!r}")
            between = "" if prompt[-1:].isspace() else " "
            lengths = tuple(map(len, answers))
            found.append(TaskItem(prompt, tuple(between + one for one in answers), 0, "fact", lengths))
        except (ValueError, KeyError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise BadData(
                f"{path}, line {number} is no fact", why, 'it needs "prompt", "right" and "wrong": [...]'
            ) from error
    return found


def _answer(found: object) -> str:
    """A text, or a number such as a year."""
    if isinstance(found, bool) or not isinstance(found, str | int) or not str(found).strip():
        raise ValueError(f"an answer is {str(found)[:40]!r}, and no text")
    return str(found)


def _year(text: str | None) -> int | None:
    return int(text) if text and text.strip() else None


def _text(path: Path) -> str:
    try:
        return read_back.read_whole(path).decode("utf-8-sig")
    except OSError as error:
        raise InputMissing(f"cannot read {path}", error.strerror or str(error), "see docs/evaluation.md") from error
    except UnicodeDecodeError as error:
        raise BadData(f"{path} is not UTF-8", str(error), "save it as UTF-8") from error


def _yaml(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(_text(path))
    except yaml.YAMLError as error:
        raise BadData(f"{path} is no YAML", str(error)[:160], "see docs/evaluation.md") from error
    if not isinstance(found, dict):
        raise BadData(f"{path} describes no period", "it needs from, to and prompts", "see docs/evaluation.md")
    return found
