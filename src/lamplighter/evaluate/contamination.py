"""What of a task stands in the text that a model was trained on: one pass over the token cache for all tasks, kept for the next time.

In:  tasks, the training side of a token cache, its tokenizer.
Out: of each task the share of its items that have 13 words in a row in common with the training text. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from lamplighter import report
from lamplighter.data.ngrams import NgramIndex
from lamplighter.data.token_cache.reader import Tokens
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.evaluate.items import Task, TaskItem
from lamplighter.rundir import cannot_write, read_record, write_json

WORDS = 13  # in a row, as the field looks for contamination
_BLOCK, _OVERLAP = 1 << 18, 512  # tokens of the training text at a time; 13 words are fewer than the overlap


def measure(tasks: Sequence[Task], tokens: Tokens, tokenizer: Tokenizer, kept: Path) -> dict[str, dict[str, Any]]:
    """By the name of the task. `kept`: a folder for what was found, by the token cache and the task's own text."""
    stream = tokens.train
    files = {task.name: kept / f"contamination-{_digest(task, tokens)}.json" for task in tasks if task.kind not in ("pairs", "period")}  # fmt: skip
    found = {name: record for name, path in files.items() if (record := read_record(path)).get("n") == WORDS}
    new = {task.name: task for task in tasks if task.name in files and task.name not in found}
    if not new:
        return found
    index = {name: NgramIndex([_own_words(item) for item in task.items], WORDS) for name, task in new.items()}
    with report.phase("contamination", total=len(stream), unit="tokens") as phase:
        for begin in range(0, len(stream), _BLOCK):
            text = tokenizer.decode(stream.read(begin, min(begin + _BLOCK + _OVERLAP, len(stream))))
            documents = text.split(tokenizer.end_name)
            for one in index.values():
                one.meet(documents)
            phase.tick(min(_BLOCK, len(stream) - begin))
    for name, one in index.items():
        shares = [float(share) for share in one.shares() if not math.isnan(float(share))]
        met = sum(share > 0 for share in shares) / len(shares) if shares else 0.0
        found[name] = {"share": met, "n": WORDS, "items": len(shares), "grams": math.fsum(shares) / max(1, len(shares))}
        try:
            kept.mkdir(parents=True, exist_ok=True)
            write_json(files[name], found[name])
        except OSError as error:
            raise cannot_write(files[name], error) from error
    return found


def _digest(task: Task, tokens: Tokens) -> str:
    """Of what it depends on; a token cache has the hash of all that it was made of as its name."""
    facts = [
        tokens.folder.name,
        len(tokens.train),
        task.sha256,
        len(task.items),
        sorted(task.settings.items(), key=str),
    ]
    return xxhash.xxh3_64_hexdigest(repr([task.name, *facts]).encode())


def _own_words(item: TaskItem) -> str:
    """The question itself, without the solved examples before it, and its answer."""
    question = item.context.rsplit("\n\n", 1)[-1] if item.group else item.context
    return question + (item.answers[item.gold] if item.answers else f" {item.reference}")
