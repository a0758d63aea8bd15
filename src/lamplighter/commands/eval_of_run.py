"""eval.tasks: the checkpoints of a run through tasks, in processes of their own; their death never touches the run.

In:  a run that is trained or has ended, its eval section.
Out: files in its evaluations/, a line about each; with eval.while_training also what that cost the steps.
"""

from __future__ import annotations

import glob
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from lamplighter.commands import say_on_leaving
from lamplighter.commands.arguments import verb_of_ours
from lamplighter.commands.model_folder import own_family
from lamplighter.rundir import RunDir, cannot_write, newest_first, number, open_lines, read_lines
from lamplighter.safe_text import clean_text

if TYPE_CHECKING:
    from lamplighter.config import Eval

Say = Callable[[str], None]
_LOOK_S = 0.5
_TAIL_BYTES = 2000
_LEAST_STEPS = 3  # inside and outside of evaluations, before their rates are compared


@dataclass
class Evaluations:
    """The evaluations of one run: one after the other, newest checkpoint first."""

    run: RunDir
    section: Eval
    say: Say
    done: set[str] = field(default_factory=set)
    spans: list[tuple[float, float]] = field(default_factory=list)  # wall time of each that ran beside the steps
    _process: subprocess.Popen[bytes] | None = None
    _thread: threading.Thread | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def is_wanted(self) -> bool:
        return bool(self.section.tasks)

    def begin(self) -> None:
        """Beside the training, where that was asked for."""
        if self.is_wanted and self.section.while_training:
            self.done = {path.name for path in newest_first(self.run.checkpoints)}  # of an earlier start
            self._thread = threading.Thread(target=self._beside, name="lamp-eval", daemon=True)
            self._thread.start()

    def _beside(self) -> None:
        while not self._over.wait(_LOOK_S):
            new = [path.name for path in newest_first(self.run.checkpoints) if path.name not in self.done]
            if new:
                began = time.time()
                self._evaluate(new[0])
                self.spans.append((began, time.time()))

    def stop(self) -> None:
        """No further one; one that runs is ended, and its items are kept."""
        self._over.set()
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        if self._thread is not None:
            self._thread.join(20)

    def finish(self) -> None:
        """After the last step, or of a finished run: what was not evaluated yet of the checkpoints that are kept."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if not self.is_wanted:
            return
        left = [path.name for path in newest_first(self.run.checkpoints) if path.name not in self.done]
        if left:
            say_on_leaving("in the evaluations after the training; the same command goes on with them")
        for name in left:
            if not self._has_results(name):
                self._evaluate(name)
        if self.spans:
            self.say(cost_words(self.run, self.spans))

    def _has_results(self, name: str) -> bool:
        """Of every task; a result is a file that is there whole or not at all."""
        tasks = [one for one in str(self.section.tasks).split(",") if one]
        folder = glob.escape(str(self.run.path / "evaluations"))
        return all(glob.glob(f"{folder}/{glob.escape(task.replace(':', '-').replace('/', '-'))}-{name}-*.json") for task in tasks)  # noqa: PTH207  Path.glob escapes nothing  # fmt: skip

    def _evaluate(self, name: str) -> None:
        """One checkpoint in a process of its own; whatever becomes of it is said, and the run goes on."""
        self.done.add(name)
        folder = self.run.path / "evaluations"
        words = ["eval", str(self.run.path.resolve()), "--checkpoint", name, "--tasks", str(self.section.tasks), "--runs-dir", str(self.run.path.parent.resolve())]  # fmt: skip
        words += own_family(self.run.checkpoints / name)
        words += ["--data", self.section.data] if self.section.data else []
        words += ["--limit", str(self.section.limit)] if self.section.limit else []
        began = time.monotonic()
        try:
            folder.mkdir(exist_ok=True)
            log = open_lines(folder / "output.log", mode=0o600)
            # It dies with the training's parent: two evaluations of one checkpoint at a time would be in each other's way.
            self._process = subprocess.Popen(verb_of_ours(words), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            code = self._wait(self._process, name, began)
        except OSError as error:
            self.say(f"evaluation of {name} could not be started: {cannot_write(folder, error).why}")
            return
        seconds = time.monotonic() - began
        if code == 0:
            self.say(f"evaluated {name} in {seconds:.0f} s: {folder}")
        elif not self._over.is_set() or code != 75:
            again = shlex.join(["lamp", *words])
            self.say(f"WARNING  evaluation of {name} ended with {code} (see {folder / 'output.log'}); again: {again}")

    def _wait(self, process: subprocess.Popen[bytes], name: str, began: float) -> int:
        """Until it ends; after the training nobody else speaks, so a line now and then does."""
        while True:
            try:
                return process.wait(1.8)
            except subprocess.TimeoutExpired:
                if self._thread is None or not self._thread.is_alive() or self._over.is_set():
                    self.say(
                        f"evaluating {name} (eval.tasks), for {time.monotonic() - began:.0f} s{self._last_words()}"
                    )

    def _last_words(self) -> str:
        """Where the evaluation is, by its own last line: task, items, rate, time left."""
        try:
            with (self.run.path / "evaluations" / "output.log").open("rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:  # it says nothing yet
            return ""
        return f" · {clean_text(lines[-1][10:])}" if lines else ""


def cost_words(run: RunDir, spans: list[tuple[float, float]]) -> str:
    """What evaluations beside the training cost: the time of a step meanwhile and otherwise, as it was measured."""
    inside: list[float] = []
    outside: list[float] = []
    for row in read_lines(run.metrics):
        at, took = number(row.get("t")), number(row.get("train/dt_ms"))
        if took > 0:
            (inside if any(a <= at <= b for a, b in spans) else outside).append(took)
    total = sum(end - begin for begin, end in spans)
    head = f"evaluations beside the training (eval.while_training): {len(spans)} in {total:.0f} s"
    if min(len(inside), len(outside)) < _LEAST_STEPS:
        return f"{head}; too few steps to say what they cost"
    slower = median(inside) / median(outside) - 1
    cost = f"{slower:+.0%}" if slower > 0 else "no slower"
    return f"{head}; a step took {median(inside):.1f} ms meanwhile and {median(outside):.1f} ms otherwise ({cost})"
