"""One model through one task, to the file with its scores: items that are done are kept, and left out at the next start.

In:  a loaded model, a Task, the folder for evaluations.
Out: evaluations/NAME.json (results.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lamplighter import report
from lamplighter.data.chat.template import ChatTemplate
from lamplighter.data.tokenizer import Tokenizer, first_difference
from lamplighter.errors import BadData
from lamplighter.evaluate import generation
from lamplighter.evaluate.encoding import QuestionEncoder
from lamplighter.evaluate.items import Task, TaskItem
from lamplighter.evaluate.likelihood import answer_all
from lamplighter.evaluate.period import read_period
from lamplighter.evaluate.results import ItemLog, Subject, log_name, write_result
from lamplighter.evaluate.scores import TaskScore, exponential, mean_score, ratio_score
from lamplighter.model.batching import Batcher, TextRequest
from lamplighter.model.build import Built
from lamplighter.model.generate import Choice

TEXT_WINDOW = 1024  # tokens of context at most for the loss on a text, unless told otherwise
_ROWS = 8  # texts that are written together
_SEED = 1
_ANSWER = 64  # tokens that a generation task may write, unless it says otherwise
_CHARACTERS = 4  # of a token, to say a time before anything is encoded


@dataclass(frozen=True)
class Candidate:
    """A model that is evaluated."""

    subject: Subject
    built: Built
    tokenizer: Tokenizer
    template: ChatTemplate | None = None


@dataclass(frozen=True)
class Manner:
    """How to evaluate."""

    folder: Path  # for evaluations
    window: int | None = None
    chat: bool = False  # questions of generation tasks by the model's own template
    contamination: Mapping[str, dict[str, Any]] = field(
        default_factory=dict
    )  # by task, where the training text is at hand
    pause: Callable[[], None] = field(default=lambda: None)  # between batches


def evaluate(candidate: Candidate, task: Task, manner: Manner) -> dict[str, Any]:
    """The record of one task, also when it was made before: nothing is computed twice."""
    settings = {**task.settings, **_settings(candidate, task, manner)}
    asked = {"task": task.name, "mark": candidate.subject.mark, "sha256": task.sha256, "prompt": task.prompt, "settings": settings}  # fmt: skip
    name = log_name(task.name, candidate.subject, asked)
    log = ItemLog(manner.folder / "items" / f"{name}.jsonl", asked)
    began = time.monotonic()
    work = {"choice": _likelihoods, "last_word": _likelihoods, "text": _texts, "generate": _written, "pairs": _pairs, "period": _period_items}  # fmt: skip
    try:
        log.open()
        log.done = {n: line for n, line in log.done.items() if _is_whole(task, n, line)}
        if log.done:
            report.note(f"{task.name}: {len(log.done):,} items were done before, they are kept")
        work[task.kind](candidate, task, manner, log)
    finally:
        log.close()
    conclude = {"choice": choice_scores, "last_word": _last_words, "text": _losses, "generate": _averages, "pairs": _averages, "period": _period_scores}  # fmt: skip
    scores = conclude[task.kind](task, log.done)
    more = _examples(task, log.done)
    return write_result(
        manner.folder, name, candidate.subject, task, scores, contamination=manner.contamination.get(task.name), settings=settings,
        seconds=round(time.monotonic() - began, 3), template=_template_words(candidate, task, manner), **more,
    )  # fmt: skip


_KEPT = {"choice": ("nats", "greedy"), "last_word": ("nats", "greedy"), "text": ("nats", "tokens", "document", "bytes"), "generate": ("text", "found"), "pairs": ("found",)}  # fmt: skip


def _is_whole(task: Task, number: int, line: Mapping[str, Any]) -> bool:
    """Whether a line of the log is all of an item; what is damaged is computed anew, and never scored."""
    if number < 0 or (task.kind != "text" and number >= len(task.items)):
        return False
    of_period = ("nats", "greedy") if task.kind == "period" and task.items[number].group == "fact" else ("text", "seen")
    names, nats = _KEPT.get(task.kind, of_period), line.get("nats", [])
    if any(name not in line for name in names) or not isinstance(nats, list):
        return False
    answers = 1 if task.kind == "text" else len(task.items[number].answers)
    finite = all(isinstance(one, int | float) and math.isfinite(one) for one in nats)
    return finite and ("nats" not in names or len(nats) == answers)


def tokens_of(task: Task) -> tuple[int, int]:
    """About how many tokens a task has to read, and to write at most; what the items of a group begin with is read once."""
    first = {item.group: item.context for item in task.items}
    common = {group: len(text) if group else 0 for group, text in first.items()}
    for item in task.items:
        common[item.group] = min(common[item.group], first_difference(first[item.group], item.context))
    read = sum(common.values()) + sum(len(one.context) - common[one.group] + sum(map(len, one.answers)) for one in task.items)  # fmt: skip
    writes = sum(not item.answers for item in task.items) if task.kind in ("generate", "period") else 0
    return read // _CHARACTERS, writes * int(str(task.settings.get("max_tokens", _ANSWER)))


def _settings(candidate: Candidate, task: Task, manner: Manner) -> dict[str, Any]:
    if task.kind == "text":
        return {"window": _window(candidate, manner)}
    if task.kind in ("generate", "period"):
        return {"seed": _SEED, "temperature": 0.8 if task.kind == "period" else 0.0, "chat": _by_template(candidate, manner)}  # fmt: skip
    return {}


def _by_template(candidate: Candidate, manner: Manner) -> bool:
    return manner.chat and candidate.template is not None


def _template_words(candidate: Candidate, task: Task, manner: Manner) -> str | None:
    asked = task.kind == "generate" and _by_template(candidate, manner)
    return str(candidate.template) if asked else None


def _window(candidate: Candidate, manner: Manner) -> int:
    return min(candidate.built.positions, manner.window or TEXT_WINDOW)


# ---------------------------------------------------------------- likelihood


def _likelihoods(candidate: Candidate, task: Task, manner: Manner, log: ItemLog, only: str | None = None) -> None:
    """The log-probability of every answer of every item that is not done yet."""
    encoder = QuestionEncoder(candidate.tokenizer)
    todo = [n for n, item in enumerate(task.items) if n not in log.done and only in (None, item.group)]
    with report.phase(task.name, total=len(todo), unit="items") as phase:
        try:
            questions = [encoder.question(n, task.items[n].context, task.items[n].answers) for n in todo]
            groups = [task.items[n].group for n in todo]
            for batch in answer_all(candidate.built.model, questions, candidate.built.positions, groups):
                for one in batch:
                    log.add(one.number, nats=one.nats, greedy=one.greedy)
                phase.tick(len(batch))
                manner.pause()
        except ValueError as error:
            raise BadData(
                f"{task.name} cannot be scored", str(error), "another task, or a model that reads more tokens"
            ) from error


def _texts(candidate: Candidate, task: Task, manner: Manner, log: ItemLog) -> None:
    """Every token of every document once; an item of the log is a window."""
    encoder, most = QuestionEncoder(candidate.tokenizer), _window(candidate, manner)
    windows = [one for n, item in enumerate(task.items) for one in encoder.windows(n, item.answers[0], most)]
    todo = [replace(one, number=n) for n, one in enumerate(windows) if n not in log.done]
    total = sum(len(one.answers[0]) for one in todo)
    with report.phase(task.name, total=total, unit="tokens") as phase:
        for batch in answer_all(candidate.built.model, todo, candidate.built.positions, [""] * len(todo)):
            for one in batch:
                ids = windows[one.number].answers[0]
                size = len(candidate.tokenizer.decode(ids).encode())
                log.add(one.number, nats=one.nats, tokens=len(ids), document=windows[one.number].number, bytes=size)
                phase.tick(len(ids))
            manner.pause()
    windows_of: dict[int, list[int]] = {}
    for n, window in enumerate(windows):
        windows_of.setdefault(window.number, []).append(n)
    for document, mine in windows_of.items():  # what windows decode to may differ by half characters at their ends
        item = task.items[document]
        decoded = sum(log.done[n]["bytes"] for n in mine)
        exact = len(item.answers[0].encode())
        for n in mine:
            log.done[n] = {**log.done[n], "bytes": log.done[n]["bytes"] * exact / max(1, decoded)}


def choice_scores(task: Task, done: Mapping[int, Mapping[str, Any]], group: str | None = None) -> list[TaskScore]:
    """acc and acc_norm (by characters, as lm-eval), over all and by subject; the chance level of each."""
    numbers = [n for n, item in enumerate(task.items) if group in (None, item.group)]
    chance = sum(1 / len(task.items[n].answers) for n in numbers) / len(numbers)
    right = {n: _right(task.items[n], done[n]["nats"]) for n in numbers}
    letters = all(len(set(task.items[n].lengths)) == 1 for n in numbers)
    scores = [mean_score("acc", [right[n][0] for n in numbers], chance)]
    if not letters:  # answers of one length are ranked alike by both
        scores.append(mean_score("acc_norm", [right[n][1] for n in numbers], chance))
    groups = sorted({task.items[n].group for n in numbers} - {""}) if group is None else []
    for name in groups if len(groups) > 1 else []:
        mine = [n for n in numbers if task.items[n].group == name]
        level = sum(1 / len(task.items[n].answers) for n in mine) / len(mine)
        scores.append(mean_score(f"acc/{name}", [right[n][0] for n in mine], level))
    return scores


def _right(item: TaskItem, nats: Sequence[float]) -> tuple[float, float]:
    plain = max(range(len(nats)), key=lambda k: nats[k])
    norm = max(range(len(nats)), key=lambda k: nats[k] / max(1, item.lengths[k]))
    return float(plain == item.gold), float(norm == item.gold)


def _last_words(task: Task, done: Mapping[int, Mapping[str, Any]]) -> list[TaskScore]:
    """LAMBADA: is the last word what the model would have written, and its perplexity."""
    order = range(len(task.items))
    nats = mean_score("nats", [-done[n]["nats"][0] for n in order], higher_is_better=False)
    return [mean_score("acc", [float(done[n]["greedy"][0]) for n in order]), exponential("perplexity", nats)]


def _losses(_: Task, done: Mapping[int, Mapping[str, Any]]) -> list[TaskScore]:
    """Nats per token, perplexity, bits per byte; the standard error is over windows."""
    rows = [done[n] for n in sorted(done)]
    nats, tokens = [-row["nats"][0] for row in rows], [float(row["tokens"]) for row in rows]
    loss = ratio_score("loss", nats, tokens)
    bits = ratio_score("bits_per_byte", [one / math.log(2) for one in nats], [float(row["bytes"]) for row in rows])
    return [loss, exponential("perplexity", loss), bits]


# ---------------------------------------------------------------- written text


def _written(candidate: Candidate, task: Task, manner: Manner, log: ItemLog) -> None:
    """Each prompt continued greedily, then compared with its reference."""
    scorer = generation.rouge_scorer()
    todo = [n for n in range(len(task.items)) if n not in log.done]
    prompts = [task.items[n].context for n in todo]
    for n, text in write_texts(candidate, task.name, list(zip(todo, prompts, strict=True)), manner, _greedy(task)):
        reference = task.items[n].reference
        found = {**generation.rouge(scorer, reference, text), **generation.exact(reference, text), **generation.variety(text)}  # fmt: skip
        log.add(n, text=text, found=found)


@dataclass(frozen=True)
class HowLong:
    """How a prompt is continued."""

    max_tokens: int
    choice: Choice


def _greedy(task: Task) -> HowLong:
    return HowLong(int(str(task.settings.get("max_tokens", _ANSWER))), Choice(0.0, 0, 1.0))


def write_texts(
    candidate: Candidate, name: str, prompts: Sequence[tuple[int, str]], manner: Manner, how: HowLong
) -> list[tuple[int, str]]:
    """Every prompt continued, several at a time, as they end; the number of each is its own seed."""
    return list(stream_texts(candidate, name, prompts, manner, how))


def stream_texts(
    candidate: Candidate, name: str, prompts: Sequence[tuple[int, str]], manner: Manner, how: HowLong
) -> Any:
    """The same as they end: (number, text)."""
    tokenizer, template, built = candidate.tokenizer, candidate.template, candidate.built
    stops = frozenset({tokenizer.end_of_text, *([template.stop_id] if template is not None else [])})
    encoder, wishes = QuestionEncoder(tokenizer), {}
    for n, prompt in prompts:
        if template is not None and _by_template(candidate, manner):
            ids = template.prompt_ids([{"role": "user", "content": prompt}])
        else:
            ids = encoder.ids(prompt) or [encoder.first]
        ids = ids[-max(1, built.positions - how.max_tokens) :]
        wishes[n] = TextRequest(tuple(ids), how.max_tokens, how.choice, seed=_SEED, sample=n, stop_ids=stops)
    longest = max((len(one.prompt) for one in wishes.values()), default=1) + how.max_tokens
    batcher = Batcher(built.model, min(_ROWS, max(1, len(wishes))), min(built.positions, longest), built.vocab_size)
    waiting, made = sorted(wishes, reverse=True), {n: list[int]() for n in wishes}
    with report.phase(name, total=len(wishes), unit="texts") as phase:
        while waiting or batcher.texts:
            while waiting and batcher.free:
                n = waiting.pop()
                batcher.add(n, wishes[n])
            for one in batcher.step():
                if one.token is not None:
                    made[one.key].append(one.token)
                if one.end:
                    yield one.key, tokenizer.decode(made[one.key])
                    phase.tick()
                else:
                    phase.tick(0)
            manner.pause()


def _pairs(_: Candidate, task: Task, __: Manner, log: ItemLog) -> None:
    """Given pairs: no model is asked."""
    scorer = generation.rouge_scorer()
    with report.phase(task.name, total=len(task.items), unit="pairs") as phase:
        for n, item in enumerate(task.items):
            if n not in log.done:
                log.add(n, found=generation.rouge(scorer, item.reference, item.given) | generation.exact(item.reference, item.given))  # fmt: skip
            phase.tick()


def _averages(task: Task, done: Mapping[int, Mapping[str, Any]]) -> list[TaskScore]:
    return generation.average([done[n]["found"] for n in range(len(task.items))])


# ---------------------------------------------------------------- period accuracy


def _period_items(candidate: Candidate, task: Task, manner: Manner, log: ItemLog) -> None:
    """Prompts are continued and looked at; facts are chosen by their likelihood."""
    _likelihoods(candidate, task, manner, log, only="fact")
    period = read_period(task.path)
    how = HowLong(int(str(task.settings["max_tokens"])), Choice(0.8, 0, 0.95))
    todo = [(n, item.context) for n, item in enumerate(task.items) if item.group == "prompt" and n not in log.done]
    for n, text in stream_texts(candidate, task.name, todo, manner, how):
        log.add(n, text=text, seen=period.looked_at(text))


def _period_scores(task: Task, done: Mapping[int, Mapping[str, Any]]) -> list[TaskScore]:
    seen = [done[n]["seen"] for n, item in enumerate(task.items) if item.group == "prompt"]
    wrong = [float(bool(one["anachronisms"])) for one in seen]
    scores = [mean_score("texts_with_anachronisms", wrong, higher_is_better=False)]
    dated = [one for one in seen if one["years"]]
    if dated:
        scores.append(mean_score("dates_that_fit", [one["years_that_fit"] / len(one["years"]) for one in dated]))
    else:
        report.note(f"{task.name}: none of the {len(seen)} texts names a year, so there is no score of dates that fit")
    texts = [done[n]["text"] for n, item in enumerate(task.items) if item.group == "prompt"]
    scores += generation.average([generation.variety(text) for text in texts])
    if any(item.group == "fact" for item in task.items):
        [facts, *_] = choice_scores(task, done, "fact")
        scores.append(TaskScore("facts", facts.value, facts.stderr, facts.n, facts.chance))
    return scores


def _examples(task: Task, done: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """A few of the texts, for people: of a period those with anachronisms first."""
    texts = [(n, done[n]) for n in range(len(task.items)) if "text" in done.get(n, {})]
    if not texts:
        return {}
    ranked = sorted(texts, key=lambda pair: (not pair[1].get("seen", {}).get("anachronisms"), pair[0]))
    shown = [{"prompt": task.items[n].context, "text": one["text"], **one.get("seen", {})} for n, one in ranked[:8]]
    return {"examples": shown}
