"""lamp eval A B --human: two models answer the same prompts, a person says blindly which answer is better.

In:  two models, prompts (one a line), choices from a terminal or from the local page.
Out: wins with their 95 % interval, as a result of both models; every choice is kept at once, the same command goes on.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamplighter import first_words, read_back, report
from lamplighter.commands import result, say_on_leaving, write
from lamplighter.errors import DONE, STOPPED_EARLY, BadData, InputMissing, UsageError
from lamplighter.rundir import (
    EVALUATED,
    LineFile,
    RunDir,
    cannot_write,
    checkpoint_name,
    newest_first,
    read_lines,
    read_record,
)
from lamplighter.safe_text import clean_text

_ANSWERS = {"1": 0, "2": 1, "=": 2}
_TOKENS = 120


@dataclass(frozen=True)
class Weights:
    """Which ones a model's texts were written by: of a run a checkpoint and its step."""

    name: str
    step: int | None


@dataclass(frozen=True)
class BlindPair:
    """One prompt and both answers; `order` says which model's stands first."""

    number: int
    prompt: str
    texts: tuple[str, str]
    order: tuple[int, int]

    def shown(self) -> tuple[str, str]:
        return self.texts[self.order[0]], self.texts[self.order[1]]


@dataclass
class Comparison:
    """Two models, their pairs, and the choices so far."""

    folder: Path
    names: tuple[str, str]
    pairs: list[BlindPair]
    chosen: dict[int, int]  # pair -> 0, 1 or 2 (neither), by model
    weights: tuple[Weights, Weights]  # that wrote the texts

    def left(self) -> Iterator[BlindPair]:
        return (pair for pair in self.pairs if pair.number not in self.chosen)

    def choose(self, pair: BlindPair, answer: int) -> None:
        """Kept at once: 0 and 1 are what was shown first and second."""
        winner = answer if answer == 2 else pair.order[answer]
        if not LineFile(self.folder / "choices.jsonl").write(json.dumps({"pair": pair.number, "winner": winner, "t": time.time()})):  # fmt: skip
            raise cannot_write(self.folder, OSError(28, "no space left"))
        self.chosen[pair.number] = winner


def compare(request: dict[str, Any]) -> int:
    """Both models write (in a child), then the person chooses."""
    from lamplighter.commands.model_folder import located
    from lamplighter.commands.session import session

    if not request["other"]:
        raise UsageError("--human compares two models", "one was given", "lamp eval A B --human")
    runs_dir = Path(request["runs_dir"])
    both = [located(request["model"], runs_dir), located(request["other"], runs_dir)]
    prompts = _prompts(request["prompts"])
    asked = json.dumps([[_weights_of(one["model"], request["checkpoint"]) for one in both], prompts])
    folder = runs_dir.resolve() / EVALUATED / f"human-{hashlib.sha256(asked.encode()).hexdigest()[:12]}"
    if not (folder / "texts.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        code = session("human", {**request, "both": both, "prompts": prompts, "folder_of_pairs": str(folder)})
        if code != DONE:
            return code
    comparison = opened(folder, (request["model"], request["other"]))
    say_on_leaving("- what was chosen is kept; the same command goes on")
    if request["page"]:
        from lamplighter.serve.pairs_page import choose_by_page

        choose_by_page(comparison, lambda words: write(2, words))
    else:
        _choose_by_terminal(comparison)
    record = conclude(comparison, both)
    shown = json.dumps(record, indent=1) if request["json"] else _words(comparison, record)
    result(shown + "\n")
    return DONE if len(comparison.chosen) == len(comparison.pairs) else STOPPED_EARLY


def _weights_of(model: str, wanted: str) -> list[object]:
    """Which weights these are: a newer checkpoint, or a run trained anew, is asked anew."""
    folder = Path(model)
    root = folder / "checkpoints"
    if root.is_dir():
        best = read_record(root / "best.json").get("step")
        step = best if wanted == "best" and isinstance(best, int) else int(wanted) if wanted.isdecimal() else None
        newest = next(iter(newest_first(root)), root)
        folder = newest if wanted == "latest" else root / (wanted if step is None else checkpoint_name(step))
    files = [folder / "manifest.json"] if (folder / "manifest.json").is_file() else sorted(folder.glob("*.safetensors"))
    return [str(folder), *((one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in files)]


def _prompts(path: str | None) -> list[str]:
    if path is None:
        from lamplighter.evaluate.checkpoint_test import PROMPTS

        return list(PROMPTS)
    try:
        lines = read_back.read_whole(path, read_back.SMALL_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputMissing(f"cannot read the prompts in {path}", str(error), "one prompt a line, in UTF-8") from error
    found = [line for line in lines if line.strip()]
    if not found:
        raise BadData(f"{path} holds no prompt", "it is empty", "one prompt a line")
    return found


def opened(folder: Path, names: tuple[str, str]) -> Comparison:
    """The pairs of a folder, and what was chosen before; which model stands first is drawn once, by the folder's name."""
    record = read_record(folder / "texts.json")
    rows = record.get("pairs", [])
    draw = random.Random(folder.name)
    pairs = []
    for number, row in enumerate(rows):
        order = (0, 1) if draw.random() < 0.5 else (1, 0)
        pairs.append(BlindPair(number, str(row["prompt"]), (str(row["texts"][0]), str(row["texts"][1])), order))
    draw.shuffle(pairs)
    chosen = {line["pair"]: line["winner"] for line in read_lines(folder / "choices.jsonl") if line.get("winner") in (0, 1, 2)}  # fmt: skip
    first, second = (_weights(name, one) for name, one in zip(names, record.get("weights") or ({}, {}), strict=True))
    return Comparison(folder, names, pairs, {n: w for n, w in chosen.items() if 0 <= n < len(pairs)}, (first, second))


def _weights(model: str, record: Mapping[str, Any]) -> Weights:
    return Weights(str(record.get("name") or Path(model).name), record.get("step"))


def _choose_by_terminal(comparison: Comparison) -> None:
    """1, 2 or = for each pair; q or the end of input leaves, and the same command goes on."""
    first_words.end()  # nothing is loading any more, and its lines would stand in the open question
    for pair in comparison.left():
        first, second = pair.shown()
        done = len(comparison.chosen)
        write(2, clean_text(f"\n[{done + 1} of {len(comparison.pairs)}]  {pair.prompt}\n\n--- 1 ---\n{first}\n\n--- 2 ---\n{second}\n\n"))  # fmt: skip
        while True:
            write(2, "which is better? 1, 2, = (alike), q (leave): ")
            line = sys.stdin.readline()
            word = line.strip().lower()
            if not line or word == "q":
                write(2, "\nkept; the same command goes on\n")
                return
            if word in _ANSWERS:
                comparison.choose(pair, _ANSWERS[word])
                break


def conclude(comparison: Comparison, both: list[dict[str, Any]]) -> dict[str, Any]:
    """The share of wins of the first model (a draw counts half), written as a result of each."""
    from lamplighter.evaluate.items import Task, TaskItem
    from lamplighter.evaluate.results import Subject, write_result
    from lamplighter.evaluate.scores import TaskScore, mean_score, wilson

    wins = [{0: 1.0, 1: 0.0, 2: 0.5}[winner] for winner in comparison.chosen.values()]
    if not wins:
        return {"scores": [], "chosen": 0, "pairs": len(comparison.pairs)}
    records = []
    for side in (0, 1):
        mine = wins if side == 0 else [1.0 - one for one in wins]
        score: TaskScore = mean_score("win_rate", mine, 0.5)
        other = comparison.names[1 - side]
        task = Task(f"human-vs-{Path(other).name}", "generate", tuple(TaskItem(p.prompt, ()) for p in comparison.pairs), comparison.folder, comparison.folder.name, "{prompt}")  # fmt: skip
        wrote = comparison.weights[side]
        subject = Subject(Path(both[side]["model"]), wrote.name, wrote.step, "")
        low, high = wilson(sum(mine), len(mine))
        records.append(write_result(
            Path(both[side]["place"]) / "evaluations", f"{task.name}-{comparison.folder.name}", subject, task, [score],
            interval=[low, high], against=other, seconds=0.0,
        ))  # fmt: skip
    return records[0]


def _words(comparison: Comparison, record: Mapping[str, Any]) -> str:
    if not record["scores"]:
        return "nothing was chosen yet"
    [score], (low, high) = record["scores"], record["interval"]
    wins = [list(comparison.chosen.values()).count(n) for n in (0, 1, 2)]
    return (
        f"{comparison.names[0]} won {wins[0]}, {comparison.names[1]} won {wins[1]}, alike {wins[2]},"
        f" of {len(comparison.pairs)} pairs\n"
        f"win rate of {comparison.names[0]}: {score['value']:.3f} (95 % interval {low:.3f} to {high:.3f}, chance 0.5)"
    )


# ---------------------------------------------------------------- in the child


def human_child(_: RunDir, request: dict[str, Any]) -> int:
    """Both models continue every prompt."""
    from lamplighter.commands.model_folder import folders_of, load_candidate, resolved_model
    from lamplighter.evaluate.evaluation import HowLong, Manner, write_texts
    from lamplighter.model.generate import Choice
    from lamplighter.rundir import write_json

    with report.phase("import"):
        import torch

        if request["threads"]:
            torch.set_num_threads(request["threads"])
    written: list[dict[int, str]] = []
    weights: list[dict[str, Any]] = []
    for one in request["both"]:
        [folder] = folders_of(Path(resolved_model(one["model"])), request["checkpoint"])
        candidate = load_candidate(folder, {**request, "place": one["place"], "chat": True})
        weights.append({"name": candidate.subject.name, "step": candidate.subject.step})
        manner = Manner(Path(request["folder_of_pairs"]), chat=True)
        how = HowLong(_TOKENS, Choice(0.8, 0, 0.95))
        written.append(dict(write_texts(candidate, "write", list(enumerate(request["prompts"])), manner, how)))
    pairs = [{"prompt": prompt, "texts": [written[0][n], written[1][n]]} for n, prompt in enumerate(request["prompts"])]
    write_json(Path(request["folder_of_pairs"]) / "texts.json", {"format": 1, "weights": weights, "pairs": pairs})
    return DONE
