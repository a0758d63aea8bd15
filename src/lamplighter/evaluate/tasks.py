"""Tasks from files: HellaSwag, LAMBADA, MMLU, ARC, PIQA, described multiple choice, text, pairs and prompts.

In:  a folder with one folder or file per task (`hellaswag/*.jsonl`, `mmlu/{dev,test}/*.csv`, ...), how many examples to show.
Out: Task. A missing or broken file is an error, never an empty task. No torch.

The prompts are those of lm-eval 0.4.13, so that figures can be compared (tests/run/test_eval_runs.py does, item by item).
"""

from __future__ import annotations

import csv
import io
import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lamplighter import read_back
from lamplighter.errors import BadData, InputMissing, UsageError
from lamplighter.evaluate.items import MOST_BYTES, Task, TaskItem, sha256_of

Row = Mapping[str, Any]
_LETTERS = string.ascii_uppercase
_ENDINGS = (".jsonl", ".json", ".csv", ".txt")
_DESCRIPTIONS = ("task.yaml", "task.json")


@dataclass(frozen=True)
class Shots:
    """How many solved examples stand before a question; None: the task's own number."""

    count: int | None = None

    def or_else(self, usual: int) -> int:
        return usual if self.count is None else self.count


# ---------------------------------------------------------------- finding


def find_tasks(data: Path) -> dict[str, Path]:
    """The tasks in a folder, by name."""
    if not data.is_dir():
        raise InputMissing(f"there is no folder {data}", "--data holds a folder or file per task", "check --data")
    found = {}
    for path in sorted(data.iterdir()):
        if path.name.startswith(".") or path.name.upper().startswith("README"):
            continue
        if path.is_dir() or path.suffix in _ENDINGS:
            found[path.name if path.is_dir() else path.stem] = path
    return found


def open_task(name: str, data: Path | None, shots: Shots) -> Task:
    """The items of one task, all of them."""
    path = _path_of(name, data)
    for prefix, make in _KNOWN.items():
        if name == prefix or name.startswith((f"{prefix}_", f"{prefix}-")):
            return make(name, path, shots)
    if path.is_dir() and (described := [path / one for one in _DESCRIPTIONS if (path / one).is_file()]):
        return _described(name, path, described[0], shots)
    files = _files(path)
    if all(file.suffix == ".txt" for file in files):
        return _text(name, path, shots)
    return _guessed(name, path, shots)


def _path_of(name: str, data: Path | None) -> Path:
    if data is None:
        what = f"the task {name} needs data"
        raise UsageError(what, "nothing is fetched by itself", "--data DIR, with a folder or file per task")
    known = find_tasks(data)
    if name not in known:
        have = ", ".join(known) or "nothing"
        raise InputMissing(f"there is no task {name} in {data}", f"it holds: {have}", "--tasks with one of these")
    return known[name]


def _files(path: Path, *endings: str) -> list[Path]:
    """The data files of a task; an error where there are none."""
    wanted = endings or _ENDINGS
    found = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.suffix in wanted)
    found = [one for one in found if one.name not in _DESCRIPTIONS]
    if not found:
        raise InputMissing(f"the task in {path} has no data", f"no {', '.join(wanted)} there", "see docs/evaluation.md")
    return found


# ---------------------------------------------------------------- reading


def _read(path: Path) -> str:
    try:
        data = read_back.read_whole(path, MOST_BYTES)
    except OSError as error:
        raise InputMissing(f"cannot read {path}", error.strerror or str(error), "check --data") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadData(f"{path} is not UTF-8", str(error), "save it as UTF-8") from error


def _rows(path: Path) -> list[tuple[str, Row]]:
    """The records of a JSONL, JSON or CSV file (with a header), each with where it stands: its line, in JSON its number."""
    text = _read(path)
    if path.suffix == ".csv":
        found: list[tuple[str, Any]] = list(_csv_of(text, path))
    elif path.suffix == ".json":
        listed = _json_of(text, path, 1)
        found = [(f"item {n}", row) for n, row in enumerate(listed, 1)] if isinstance(listed, list) else []
    else:
        lines = enumerate(text.split("\n"), 1)
        found = [(f"line {n}", _json_of(line, path, n)) for n, line in lines if line.strip()]
    if not found:
        raise BadData(f"{path} holds no items", "a list of records is needed", "see docs/evaluation.md")
    for place, row in found:
        if not isinstance(row, Mapping):
            raise BadData(f"{path}, {place} is no record", f"it is {str(row)[:40]!r}", "see docs/evaluation.md")
    return found


def _csv_of(text: str, path: Path) -> Iterator[tuple[str, Row]]:
    rows, line = csv.DictReader(io.StringIO(text), strict=True), 1
    try:
        for row in rows:
            yield f"line {rows.line_num}", row
            line = rows.line_num + 1
    except csv.Error as error:  # an unclosed quote is met at the end of the file: the row that it is in began here
        raise BadData(f"{path} is no CSV", f"the row from line {line} on: {error}", "close its quotes") from error


def _json_of(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadData(f"{path}, line {line} is not JSON", str(error)[:120], "mend or remove that line") from error


def _items(path: Path, make: Callable[[Row], TaskItem], *endings: str) -> tuple[tuple[TaskItem, ...], str]:
    """Every record of every file as an item; a record that does not fit is named."""
    files, found = _files(path, *endings), []
    for file in files:
        for place, row in _rows(file):
            try:
                found.append(make(row))
            except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
                why = f"{type(error).__name__}: {error}; its fields are {', '.join(map(str, row))}"
                raise BadData(f"{file}, {place} is not of this task", why[:240], "docs/evaluation.md") from error
    return tuple(found), sha256_of(files)


def _string(row: Row, name: str) -> str:
    """A text, and nothing that could be made one: a number or a list in its place is a mistake in the file."""
    found = row[name]
    if not isinstance(found, str):
        raise ValueError(f"{name} is no text but {str(found)[:40]!r}")
    return found


def _strings(found: object, name: str) -> list[str]:
    """A list of texts that are not empty. (A text is no list of its characters.)"""
    if not isinstance(found, list) or not all(isinstance(one, str) and one.strip() for one in found):
        raise ValueError(f"{name} is no list of texts but {str(found)[:60]!r}")
    return found


def _whole(found: object, name: str) -> int:
    """A whole number, or the digits of one."""
    if isinstance(found, str) and found.strip().isdecimal():
        return int(found)
    if type(found) is not int:
        raise ValueError(f"{name} is no whole number but {str(found)[:40]!r}")
    return found


def _plain(found: object, name: str) -> str:
    """What may stand in a prompt or be a choice: a text or a number."""
    if isinstance(found, bool) or not isinstance(found, str | int | float):
        raise ValueError(f"{name} is neither a text nor a number but {str(found)[:40]!r}")
    return str(found)


def _choice(context: str, choices: Sequence[str], gold: int, group: str = "") -> TaskItem:
    """An item whose answers follow the context after one space, as lm-eval's do."""
    if len(choices) < 2 or not 0 <= gold < len(choices):
        raise ValueError(f"answer {gold} of {len(choices)} choices")
    if not any(one.strip() for one in choices):
        raise ValueError("all of its choices are empty")
    return TaskItem(context, tuple(f" {one}" for one in choices), gold, group, tuple(len(one) for one in choices))


# ---------------------------------------------------------------- the known tasks


def _plain_wikihow(text: str) -> str:
    """Without the marks that WikiHow's part of HellaSwag carries."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _in_one(row: Row) -> str:
    return f"{_string(row, 'activity_label')}: {_string(row, 'ctx_a')} {_string(row, 'ctx_b').capitalize()}"


def _hellaswag(name: str, path: Path, shots: Shots) -> Task:
    def item(row: Row) -> TaskItem:
        whole = _string(row, "ctx") if "ctx_a" not in row else _in_one(row)
        endings = [_plain_wikihow(one) for one in _strings(row["endings"], "endings")]
        return _choice(_plain_wikihow(whole), endings, _whole(row["label"], "label"))

    items, digest = _items(path, item, ".jsonl", ".json")
    return Task(name, "choice", items, path, digest, "{activity_label}: {ctx} | {ending}", {"num_fewshot": 0})


def _lambada(name: str, path: Path, shots: Shots) -> Task:
    def item(row: Row) -> TaskItem:
        words = _string(row, "text").split(" ")
        if len(words) < 2:
            raise ValueError("a text of one word has no last word to guess")
        if not words[-1].strip():
            raise ValueError("it ends in white space, and not in a word to guess")
        return TaskItem(" ".join(words[:-1]), (f" {words[-1]}",))

    items, digest = _items(path, item, ".jsonl", ".json")
    return Task(name, "last_word", items, path, digest, "{text without its last word} | {last word}")


def _arc(name: str, path: Path, shots: Shots) -> Task:
    def item(row: Row) -> TaskItem:
        question, choices = row["question"], row["choices"]
        if isinstance(question, Mapping):  # as AllenAI's own files have it
            row = {**row, "question": question["stem"]}
            choices = question["choices"]
        if isinstance(choices, Mapping):
            texts, labels = list(choices["text"]), list(choices["label"])
        else:
            texts, labels = [one["text"] for one in choices], [one["label"] for one in choices]
        if len(texts) != len(labels):
            raise ValueError(f"{len(texts)} choices and {len(labels)} labels")
        asked = _string(row, "question")
        return _choice(f"Question: {asked}\nAnswer:", _strings(texts, "choices"), labels.index(row["answerKey"]))

    items, digest = _items(path, item, ".jsonl", ".json")
    return Task(name, "choice", items, path, digest, "Question: {question}\\nAnswer: | {choice}", {"num_fewshot": 0})


def _piqa(name: str, path: Path, shots: Shots) -> Task:
    def item(row: Row) -> TaskItem:
        choices = [_string(row, "sol1"), _string(row, "sol2")]
        return _choice(f"Question: {_string(row, 'goal')}\nAnswer:", choices, _whole(row["label"], "label"))

    items, digest = _items(path, item, ".jsonl", ".json", ".csv")
    return Task(name, "choice", items, path, digest, "Question: {goal}\\nAnswer: | {sol}", {"num_fewshot": 0})


# ---------------------------------------------------------------- MMLU


@dataclass(frozen=True)
class _Question:
    text: str
    choices: tuple[str, ...]
    gold: int

    def asked(self) -> str:
        lines = [f"{letter}. {choice}" for letter, choice in zip(_LETTERS, self.choices, strict=False)]
        return "\n".join([self.text.strip(), *lines, "Answer:"])


def _mmlu(name: str, path: Path, shots: Shots) -> Task:
    """By subject; solved examples are the first rows of `dev`, five unless told otherwise."""
    tests, dev = sorted((path / "test").glob("*.csv")), path / "dev"
    if not tests:
        why = "it needs test/SUBJECT_test.csv, and dev/SUBJECT_dev.csv for solved examples"
        raise InputMissing(f"{path} holds no MMLU", why, "see docs/evaluation.md")
    count, items, files = shots.or_else(5), [], list(tests)
    for file in tests:
        subject = file.stem.removesuffix("_test")
        about = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        solved: list[_Question] = []
        if count:
            files.append(dev / f"{subject}_dev.csv")
            solved = _questions(files[-1])
            if len(solved) < count:
                why = f"it has {len(solved)}, and {count} were asked for"
                raise BadData(f"{files[-1]} has too few solved examples", why, f"--num-fewshot {len(solved)}")
        head = about + "".join(f"{one.asked()} {_LETTERS[one.gold]}\n\n" for one in solved[:count])
        for question in _questions(file):
            letters = list(_LETTERS[: len(question.choices)])
            items.append(_choice(head + question.asked(), letters, question.gold, subject))
    prompt = "{about}{solved examples}{question}\\nA. {choice}...\\nAnswer: | {letter}"
    return Task(name, "choice", tuple(items), path, sha256_of(files), prompt, {"num_fewshot": count})


def _questions(file: Path) -> list[_Question]:
    """Rows of a subject: the original form (no header, answer A to D) or with a header and answers 0 to 3."""
    try:
        rows = [row for row in csv.reader(io.StringIO(_read(file)), strict=True) if row]
    except csv.Error as error:
        raise BadData(f"{file} is no CSV", str(error), "fetch it again") from error
    if rows and rows[0][0].strip().lower() == "question" and rows[0][-1].strip().lower() == "answer":
        rows = rows[1:]
    found = []
    for number, row in enumerate(rows, 1):
        answer = row[-1].strip()
        gold = int(answer) if answer.isdecimal() else _LETTERS.find(answer) if len(answer) == 1 else -1
        if len(row) < 4 or not 0 <= gold < len(row) - 2:
            raise BadData(f"{file}, question {number} is damaged", f"its answer is {answer!r}", "fetch it again")
        found.append(_Question(row[0], tuple(row[1:-1]), gold))
        if len(found[-1].choices) != len(found[0].choices):
            why = f"it has {len(row)} columns, the questions before it {len(found[0].choices) + 2}"
            raise BadData(f"{file}, question {number} is damaged", why, "fetch it again")
    if not found:
        raise BadData(f"{file} holds no question", "it is empty", "fetch it again")
    return found


# ---------------------------------------------------------------- described or guessed multiple choice


def _described(name: str, path: Path, description: Path, shots: Shots) -> Task:
    """task.yaml says which fields hold what: `prompt`, `choices`, `answer`; or `reference` for text to be written."""
    try:
        found = yaml.safe_load(_read(description))
    except yaml.YAMLError as error:
        raise BadData(f"{description} is no YAML", str(error)[:160], "see docs/evaluation.md") from error
    known = {"prompt", "choices", "answer", "first_answer", "group", "reference", "max_tokens"}
    if not isinstance(found, dict) or "prompt" not in found or found.keys() - known:
        why = f"it may hold {', '.join(sorted(known))}, and must hold prompt"
        raise BadData(f"{description} describes no task", why, "see docs/evaluation.md")
    prompt, numbers = found["prompt"], {"max_tokens": found.get("max_tokens", 64), "first_answer": found.get("first_answer", 0)}  # fmt: skip
    _refuse_misdescribed(prompt, numbers, description)
    if "reference" in found:
        items, digest = _items(path, lambda row: _to_write(_filled(prompt, row), row, found["reference"]))
        return Task(name, "generate", items, path, digest, prompt, {"max_tokens": numbers["max_tokens"]})

    def item(row: Row) -> TaskItem:
        choices = _choices_of(row, found.get("choices", "choices"))
        gold = _gold(row[found.get("answer", "answer")], choices, numbers["first_answer"])
        return _choice(
            _filled(prompt, row), [str(one) for one in choices], gold, str(row.get(found.get("group", ""), ""))
        )

    items, digest = _items(path, item)
    return Task(name, "choice", items, path, digest, prompt, {"num_fewshot": 0})


def _refuse_misdescribed(prompt: object, numbers: Mapping[str, object], description: Path) -> None:
    """A prompt that names more than fields would be asked as it stands there, and scored."""
    for name, number in numbers.items():
        least = 1 if name == "max_tokens" else 0
        if type(number) is not int or number < least:
            why = f"it is {str(number)[:40]!r}, and must be a whole number of {least} or more"
            raise BadData(f"{description}, line {_line_with(description, name)}: {name} cannot be used", why, "see docs/evaluation.md")  # fmt: skip
    if not isinstance(prompt, str):
        line = _line_with(description, "prompt")
        raise BadData(f"{description}, line {line}: prompt is no text", f"it is {str(prompt)[:40]!r}", "quote it")
    if beyond := re.search(r"\{\s*\w*\s*[.\[!:][^{}]*\}", prompt):
        why = f"{beyond[0][:60]} is more than the name of a field: attributes, indices and formats are not filled in"
        raise BadData(f"{description}, line {_line_with(description, beyond[0])}: prompt cannot be filled", why, "{field}")  # fmt: skip


def _line_with(path: Path, words: str) -> int:
    """The first line with these words, 1 where they are spread over several."""
    return next((n for n, line in enumerate(_read(path).split("\n"), 1) if words in line), 1)


def _filled(prompt: str, row: Row) -> str:
    """`{field}` by its value, and nothing else: no attributes, no formats."""
    return re.sub(r"\{(\w+)\}", lambda found: _plain(row[found[1]], found[1]), prompt)


def _choices_of(row: Row, names: object) -> list[str | int | float]:
    """One field that holds a list, or a list of fields."""
    found = [row[str(name)] for name in names] if isinstance(names, list) else row[str(names)]
    if isinstance(found, str):
        found = json.loads(found)  # a list in a column of a CSV
    if not isinstance(found, list):
        raise ValueError("its choices are no list")
    for one in found:
        _plain(one, "a choice")
    return found


def _gold(answer: object, choices: Sequence[str | int | float], first: int) -> int:
    """A number (from `first` on), a letter, or the answer itself."""
    text, texts = _plain(answer, "its answer").strip(), [str(one) for one in choices]
    if text in texts:
        place = int(text) - first if text.lstrip("-").isdecimal() else -1
        if not 0 <= place < len(texts) or texts[place] == text:
            return texts.index(text)
        if type(answer) is not int or not all(isinstance(one, str) for one in choices):
            raise ValueError(f"its answer {text} is a choice, and the number of another: name it by its letter")
    if text.lstrip("-").isdecimal():
        return int(text) - first
    if len(text) == 1 and text.upper() in _LETTERS:
        return _LETTERS.index(text.upper())
    raise ValueError(f"its answer {text[:40]!r} is none of the choices")


def _guessed(name: str, path: Path, shots: Shots) -> Task:
    """Files without a description, by the names of their fields."""
    fields = set(_rows(_files(path)[0])[0][1])
    for task, needed in (("hellaswag", {"ctx", "endings", "label"}), ("piqa", {"goal", "sol1", "sol2", "label"}),
                         ("arc", {"question", "choices", "answerKey"}), ("lambada", {"text"})):  # fmt: skip
        if needed <= fields:
            return replace(_KNOWN[task](name, path, shots), name=name)
    for question in ("question", "query", "prompt"):
        if {question, "choices", "answer"} <= fields:

            def item(row: Row, question: str = question) -> TaskItem:
                choices = _choices_of(row, "choices")
                gold = _gold(row["answer"], choices, 0)
                return _choice(f"Question: {_string(row, question)}\nAnswer:", [str(one) for one in choices], gold)

            items, digest = _items(path, item)
            return Task(name, "choice", items, path, digest, f"Question: {{{question}}}\\nAnswer: | {{choice}}")
    for reference in ("reference", "target", "answer", "output"):
        if {"prompt", reference} <= fields:
            return _written(name, path, reference)
    why = f"its fields are {', '.join(sorted(map(str, fields)))}"
    raise BadData(f"what kind of task {path} is cannot be told", why, "describe it: task.yaml, see docs/evaluation.md")


def _written(name: str, path: Path, reference: str) -> Task:
    items, digest = _items(path, lambda row: _to_write(_string(row, "prompt"), row, reference))
    return Task(name, "generate", items, path, digest, "{prompt}", {"max_tokens": 64})


def _to_write(prompt: str, row: Row, reference: str) -> TaskItem:
    expected = _plain(row[reference], reference)
    if not expected.strip():
        raise ValueError(f"{reference} is empty: there is nothing to compare with")
    return TaskItem(prompt, (), reference=expected)


# ---------------------------------------------------------------- text and pairs


def _text(name: str, path: Path, shots: Shots) -> Task:
    """Text to be predicted: of a folder the test file where there is one, else all files; a file is a document."""
    files = _files(path, ".txt")
    files = [file for file in files if file.stem.startswith("test")] or files
    texts = [_read(file) for file in files]
    for file, text in zip(files, texts, strict=True):
        if not text.strip():
            raise BadData(f"{file} is empty", "there is nothing to predict", "check --data")
    items = tuple(TaskItem("", (text,)) for text in texts)
    names = ", ".join(file.name for file in files)
    return Task(name, "text", items, path, sha256_of(files), f"{names}, each as one document")


def _rouge(name: str, path: Path, shots: Shots) -> Task:
    """Lines of prediction*.txt beside those of target*.txt; or rows with prompt and reference, to be written first."""
    predictions, targets = sorted(path.glob("prediction*.txt")), sorted(path.glob("target*.txt"))
    if not predictions and not targets:
        fields = set(_rows(_files(path)[0])[0][1])
        known = ("reference", "target", "answer", "output", "summary")
        if not (named := [one for one in known if one in fields]):
            why = f"its fields are {', '.join(sorted(map(str, fields)))}, and none is {', '.join(known)}"
            raise BadData(f"{path} has nothing to compare with", why, "see docs/evaluation.md")
        return _written(name, path, named[0])
    if len(predictions) != len(targets):
        why = f"{len(predictions)} files of predictions, {len(targets)} of targets"
        raise InputMissing(f"{path} has not both sides", why, "prediction*.txt and target*.txt, line by line")
    pairs: list[tuple[str, str]] = []
    for prediction, target in zip(predictions, targets, strict=True):
        ours, theirs = _read(prediction).splitlines(), _read(target).splitlines()
        if len(ours) != len(theirs) or not ours:
            why = f"{len(ours)} lines and {len(theirs)} lines"
            raise BadData(f"{prediction.name} and {target.name} do not go together", why, "one line is one pair")
        pairs += zip(ours, theirs, strict=True)
    items = tuple(TaskItem("", (), reference=theirs, given=ours) for ours, theirs in pairs)
    return Task(name, "pairs", items, path, sha256_of([*predictions, *targets]), "given pairs: no model is asked")


def _period(name: str, path: Path, shots: Shots) -> Task:
    from lamplighter.evaluate.period import open_period

    return open_period(name, path)


_KNOWN: dict[str, Callable[[str, Path, Shots], Task]] = {
    "hellaswag": _hellaswag,
    "lambada": _lambada,
    "mmlu": _mmlu,
    "arc": _arc,
    "piqa": _piqa,
    "rouge": _rouge,
    "period": _period,
}


def limited(task: Task, limit: int | None) -> Task:
    """The first `limit` items; of a task by subject, of each subject."""
    if limit is None or task.kind == "text":
        return task
    return replace(task, items=tuple(_first_of_each(task.items, limit)), settings={**task.settings, "limit": limit})


def _first_of_each(items: Sequence[TaskItem], limit: int) -> Iterator[TaskItem]:
    seen: dict[str, int] = {}
    for item in items:
        seen[item.group] = seen.get(item.group, 0) + 1
        if seen[item.group] <= limit:
            yield item
