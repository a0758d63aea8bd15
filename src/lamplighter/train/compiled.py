"""torch.compile for the blocks of a model: compiles are counted, recompiles explained, and eager is always a way back.

In:  a model.
Out: compiled blocks; the flag `compiling` while it lasts; a verdict where torch keeps recompiling; errors that mean "use eager".
"""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

import torch
from torch._dynamo import config as dynamo_config
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import get_compilation_metrics

from lamplighter import report
from lamplighter.model.recompute import RecomputedForward, blocks_of
from lamplighter.report import Verdict

STORM, STORM_STEPS = 3, 8  # so many compiles within so many steps
CompileError = TorchDynamoException  # the compiler's own failures; a mistake in the model's code is not one of them


class Compiled:
    """The compiled blocks of one model, and how often they were compiled."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.blocks = blocks_of(model) or [model]
        self.running = self.compiles = self.seen = 0
        self.recent: deque[int] = deque()
        self.said = False

    def compile(self, cache: Path) -> None:
        """Compile each transformer block by itself (repeats to the last bit, and compiles once for all).

        The compiler's cache is kept beside the runs, so that the next start is a warm one also on another machine.
        """
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache.resolve()))
        callback_handler.register_start_callback(self._on_start)
        callback_handler.register_end_callback(self._on_end)
        for block in self.blocks:
            if isinstance(block.forward, RecomputedForward):  # a recomputed block is compiled once
                block.forward.forward = torch.compile(block.forward.plain, dynamic=False)
            else:
                block.compile(dynamic=False)

    def undo(self) -> None:
        """Eager again."""
        callback_handler.remove_start_callback(self._on_start)
        callback_handler.remove_end_callback(self._on_end)
        for block in self.blocks:
            block._compiled_call_impl = None  # what Module.compile has set
            if isinstance(block.forward, RecomputedForward):
                block.forward.forward = block.forward.plain
        torch._dynamo.reset()
        report.flag("compiling", False)

    def ready(self) -> None:
        """What was compiled so far is the first compile, not a recompile."""
        self.seen = self.compiles

    def check_recompiles(self, step: int) -> Verdict | None:
        """After a step: many compiles in few steps are said once, with the guard that failed."""
        self.recent.extend([step] * (self.compiles - self.seen))
        self.seen = self.compiles
        while self.recent and self.recent[0] <= step - STORM_STEPS:
            self.recent.popleft()
        if len(self.recent) < STORM or self.said:
            return None
        self.said = True
        reason, where = _last_reason()
        limit = getattr(dynamo_config, "recompile_limit", 8)
        return Verdict(
            "slow",
            "recompile_storm",
            f"recompiled {len(self.recent)} times within {STORM_STEPS} steps at {where}: {reason};"
            f" after {limit} torch gives up and runs that code uncompiled",
            "feed a few fixed lengths (buckets) instead of a new one each step, or --train.compile false",
            evidence=(f"{self.compiles} compiles so far",),
            culprit={"step": step, "guard": reason, **where.fields},
        )

    def _on_start(self, _: Any = None) -> None:
        self.running += 1
        self.compiles += 1
        report.flag("compiling", True)

    def _on_end(self, _: Any = None) -> None:
        self.running = max(0, self.running - 1)
        report.flag("compiling", self.running > 0)


class _Where:
    """The code that was compiled."""

    def __init__(self, file: str, line: int, func: str) -> None:
        self.fields = {"file": file, "line": line, "func": func}

    def __str__(self) -> str:
        return "{file}:{line} ({func})".format(**self.fields)


def _last_reason() -> tuple[str, _Where]:
    """Why torch compiled again, in its own words, and which code."""
    for metrics in reversed(get_compilation_metrics()):
        if metrics.co_filename:
            reason = getattr(metrics, "recompile_reason", None) or "a guard failed"
            where = _Where(metrics.co_filename, metrics.co_firstlineno or 0, metrics.co_name or "?")
            return " ".join(reason.split())[:200], where
    return "a guard failed", _Where("?", 0, "?")
