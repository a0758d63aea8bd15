"""All that a training loop needs, in one place; made by work, a notebook or a test.

In:  what the start-up phases made: model, optimizer, data, tokenizer, sections.
Out: Parts, whose `progress` is the one thing that changes from step to step.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lamplighter.config import Run
from lamplighter.data.batch_source import Feed
from lamplighter.data.chat.example_cache import Examples
from lamplighter.data.chat.template import ChatTemplate
from lamplighter.data.chat.template_file import keep as keep_template
from lamplighter.data.stream import Live
from lamplighter.data.token_cache.reader import Tokens
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.model.build import Built
from lamplighter.rundir import RunDir
from lamplighter.train import hardware as machine
from lamplighter.train import optimizers, validation
from lamplighter.train.anomalies.detector import Board
from lamplighter.train.checkpoint import Progress

if TYPE_CHECKING:
    from lamplighter.train.compiled import Compiled


@dataclass
class Parts:
    """All that a loop needs; made by work.py, a notebook or a test."""

    run: Run
    folder: RunDir
    machine: machine.Machine
    built: Built
    optimizer: optimizers.Optimizer
    schedule: optimizers.Schedule
    tokens: Tokens | Examples | Live
    feed: Feed
    tokenizer: Tokenizer
    steps: int
    facts: dict[str, Any]
    progress: Progress = field(default_factory=Progress)
    compiled: Compiled | None = None
    floor: validation.Floor | None = None
    chat: ChatTemplate | None = None
    flags: Board | None = None
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)

    @property
    def model(self) -> torch.nn.Module:
        return self.built.model

    def save_tokenizer(self, folder: Path) -> None:
        """The tokenizer's files; of a chat model also its template and where to stop.

        Made once: a large vocabulary takes a while to write out, and steps would compete with that for the interpreter.
        """
        if not self.tokenizer_files:
            with tempfile.TemporaryDirectory() as place:
                self.tokenizer.save(Path(place))
                self.tokenizer_files = {path.name: path.read_bytes() for path in sorted(Path(place).iterdir())}
        for name, data in self.tokenizer_files.items():
            (folder / name).write_bytes(data)
        if self.chat is not None:
            keep_template(self.chat, folder)
