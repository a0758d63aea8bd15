"""The items of a task: what the model reads, the answers it is offered or must write, and which of them is right.

In:  nothing; tasks.py fills them from files.
Out: TaskItem and Task. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from lamplighter import read_back

MOST_BYTES = 1 << 30  # of one file
Kind = Literal["choice", "last_word", "text", "generate", "pairs", "period"]


@dataclass(frozen=True)
class TaskItem:
    """One question. `answers` are scored as continuations of `context`; `gold` is the number of the right one."""

    context: str
    answers: tuple[str, ...]
    gold: int = 0
    group: str = ""  # a subject: items of one group may begin alike
    lengths: tuple[int, ...] = ()  # characters of each answer, without what separates it from the context
    reference: str = ""  # generation: what should have been written
    given: str = ""  # pairs: what was written, by whom ever

    def __post_init__(self) -> None:
        """JSON and YAML may hold halves of surrogates, which are no text: a ValueError, before a tokenizer meets them."""
        "\n".join((self.context, *self.answers, self.reference)).encode()


@dataclass(frozen=True)
class Task:
    """A named list of items, and where they came from."""

    name: str
    kind: Kind
    items: tuple[TaskItem, ...]
    path: Path
    sha256: str
    prompt: str  # in words: how an item becomes what the model reads
    settings: Mapping[str, object] = field(default_factory=dict)


def sha256_of(files: Sequence[Path]) -> str:
    """Of all files of a task, in order, each with its name."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0")
        digest.update(read_back.read_whole(path, MOST_BYTES))
    return digest.hexdigest()
