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


def _rows(path: Path) -> list[Row]:
    """The records of a JSONL, JSON or CSV file (with a header)."""
    text = _read(path)
    if path.suffix == ".csv":
        found: list[Row] = list(csv.DictReader(io.StringIO(text), strict=True))
    elif path.suffix == ".json":
        found = _json_of(text, path, 1)
    else:
        found = [_json_of(line, path, number) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not isinstance(found, list) or not found:
        raise BadData(f"{path} holds no items", "a list of records is needed", "see docs/evaluation.md")
    for number, row in enumerate(found, 1):
        if not isinstance(row, Mapping):
            raise BadData(f"{path}, item {number} is no record", f"it is {str(row)[:40]!r}", "see docs/evaluation.md")
    return found


def _json_of(text: str, path: Path, line: int) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadData(f"{path}, line {line} is not JSON", str(error)[:120], "mend or remove that line") from error


def _items(path: Path, make: Callable[[Row], TaskItem], *endings: str) -> tuple[tuple[TaskItem, ...], str]:
    """Every record of every file as an item; a record that does not fit is named."""
    files, found = _files(path, *endings), []
    for file in files:
        for number, row in enumerate(_rows(file), 1):
            try:
                found.append(make(row))
            except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
                why = f"{type(error).__name__}: {error}; its fields are {', '.join(map(str, row))}"
                raise BadData(f"{file}, item {number} is not of this task", why[:240], "docs/evaluation.md") from error
    return tuple(found), sha256_of(files)


def _choice(context: str, choices: Sequence[str], gold: int, group: str = "") -> TaskItem:
    """An item whose answers follow the context after one space, as lm-eval's do."""
    if len(choices) < 2 or not 0 <= gold < len(choices):
        raise ValueError(f"answer {gold} of {len(choices)} choices")
    return TaskItem(context, tuple(f" {one}" for one in choices), gold, group, tuple(len(one) for one in choices))


# ---------------------------------------------------------------- the known tasks


def _plain_wikihow(text: str) -> str:
    """Without the marks that WikiHow's part of HellaSwag carries."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def _in_one(row: Row) -> str:
    return f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"


def _hellaswag(name: str, path: Path, shots: Shots) -> Task:
    def item(row: Row) -> TaskItem:
        whole = row["ctx"] if "ctx_a" not in row else _in_one(row)
        return _choice(_plain_wikihow(whole), [_plain_wikihow(one) for one in row["endings"]], int(row["label"]))

    items, digest = _items(path, item, ".jsonl", ".json")
    return Task(name, "choice", items, path, digest, "{activity_label}: {ctx} | {ending}", {"num_fewshot": 0})


def _lambada(name: str, path: Path, shots: Shots) -> Task:
    def item(row: Row) -> TaskItem:
        words = row["text"].split(" ")
        if len(words) < 2:
            raise ValueError("a text of one word has no last word to guess")
        return TaskItem(" ".join(words[:-1]), (f" {words[-1]}",))

    items, digest = _items(path, item, ".jsonl", ".json")
    return Task(name, "last_word", items, path, digest, "{text without its last word} | {last word}")


def _arc(name: str, path: Path, shots: Shots) -> Task:
    def item(row: Row) -> TaskItem:
        question, choices = row["question"], row["choices"]
        if isinstance(question, Mapping):  # as AllenAI's own files have it
            question, choices = question["stem"], question["choices"]
        if isinstance(choices, Mapping):
            texts, labels = list(choices["text"]), list(choices["label"])
        else:
            texts, labels = [one["text"] for one in choices], [one["label"] for one in choices]
        return _choice(f"Question: {question}\nAnswer:", texts, labels.index(row["answerKey"]))

    items, digest = _items(path, item, ".jsonl", ".json")
    return Task(name, "choice", items, path, digest, "Question: {question}\\nAnswer: | {choice}", {"num_fewshot": 0})


def _piqa(name: str, path: Path, shots: Shots) -> Task:
    def item(row: Row) -> TaskItem:
        return _choice(f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], int(row["label"]))

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
    prompt = str(found["prompt"])
    if "reference" in found:
        items, digest = _items(path, lambda row: TaskItem(_filled(prompt, row), (), reference=str(row[found["reference"]])))  # fmt: skip
        return Task(name, "generate", items, path, digest, prompt, {"max_tokens": int(found.get("max_tokens", 64))})

    def item(row: Row) -> TaskItem:
        choices = _choices_of(row, found.get("choices", "choices"))
        gold = _gold(row[found.get("answer", "answer")], choices, int(found.get("first_answer", 0)))
        return _choice(_filled(prompt, row), choices, gold, str(row.get(found.get("group", ""), "")))

    items, digest = _items(path, item)
    return Task(name, "choice", items, path, digest, prompt, {"num_fewshot": 0})


def _filled(prompt: str, row: Row) -> str:
    """`{field}` by its value, and nothing else: no attributes, no formats."""
    return re.sub(r"\{(\w+)\}", lambda found: str(row[found[1]]), prompt)


def _choices_of(row: Row, names: object) -> list[str]:
    """One field that holds a list, or a list of fields."""
    found = [row[str(name)] for name in names] if isinstance(names, list) else row[str(names)]
    if isinstance(found, str):
        found = json.loads(found)  # a list in a column of a CSV
    if not isinstance(found, list):
        raise ValueError("its choices are no list")
    return [str(one) for one in found]


def _gold(answer: object, choices: Sequence[str], first: int) -> int:
    """A number (from `first` on), a letter, or the answer itself."""
    text = str(answer).strip()
    if text in choices:
        return list(choices).index(text)
    if text.lstrip("-").isdecimal():
        return int(text) - first
    if len(text) == 1 and text.upper() in _LETTERS:
        return _LETTERS.index(text.upper())
    raise ValueError(f"its answer {text[:40]!r} is none of the choices")


def _guessed(name: str, path: Path, shots: Shots) -> Task:
    """Files without a description, by the names of their fields."""
    fields = set(_rows(_files(path)[0])[0])
    for task, needed in (("hellaswag", {"ctx", "endings", "label"}), ("piqa", {"goal", "sol1", "sol2", "label"}),
                         ("arc", {"question", "choices", "answerKey"}), ("lambada", {"text"})):  # fmt: skip
        if needed <= fields:
            return replace(_KNOWN[task](name, path, shots), name=name)
    for question in ("question", "query", "prompt"):
        if {question, "choices", "answer"} <= fields:

            def item(row: Row, question: str = question) -> TaskItem:
                choices = _choices_of(row, "choices")
                return _choice(f"Question: {row[question]}\nAnswer:", choices, _gold(row["answer"], choices, 0))

            items, digest = _items(path, item)
            return Task(name, "choice", items, path, digest, f"Question: {{{question}}}\\nAnswer: | {{choice}}")
    for reference in ("reference", "target", "answer", "output"):
        if {"prompt", reference} <= fields:
            return _written(name, path, reference)
    why = f"its fields are {', '.join(sorted(map(str, fields)))}"
    raise BadData(f"what kind of task {path} is cannot be told", why, "describe it: task.yaml, see docs/evaluation.md")


def _written(name: str, path: Path, reference: str) -> Task:
    items, digest = _items(path, lambda row: TaskItem(str(row["prompt"]), (), reference=str(row[reference])))
    return Task(name, "generate", items, path, digest, "{prompt}", {"max_tokens": 64})


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
        fields = set(_rows(_files(path)[0])[0])
        reference = next((one for one in ("reference", "target", "answer", "output", "summary") if one in fields), "")
        return _written(name, path, reference)
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
