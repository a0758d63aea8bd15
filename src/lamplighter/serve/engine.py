"""The child's part of the server: texts are read, put into the batch, and sent back piece by piece; newer weights are followed.

In:  lines of JSON on stdin (bridge.py), a model folder, a run to follow.
Out: lines of JSON: pieces of text, ends, errors, and what is being served.

A text ends on the weights that it began with: after a swap the old model goes on until its last text has ended. Where the
memory does not hold both, no text is begun, the old ones end, the old weights go, and then the new ones are loaded.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lamplighter import report
from lamplighter.data.chat.template import ChatTemplate
from lamplighter.data.pieces import TextPieces
from lamplighter.data.tokenizer import Tokenizer, ids_before_prompt
from lamplighter.errors import LampError
from lamplighter.model.batching import Batcher, Made, TextRequest
from lamplighter.model.build import Built
from lamplighter.model.generate import Choice
from lamplighter.procs.procfs import pid_start
from lamplighter.rundir import newest_first, step_of, verify_manifest
from lamplighter.train import held

_IDLE_S = 0.25
_LOOK_S = 0.05
_FOLLOW_S = 1.0


@dataclass(frozen=True)
class Loaded:
    """A model that can be served."""

    built: Built
    tokenizer: Tokenizer
    template: ChatTemplate | None
    name: str  # the run or folder
    step: int | None
    folder: Path  # where its weights are

    @property
    def model(self) -> str:
        """As clients see it: the step of a checkpoint stands in the name."""
        return self.name if self.step is None else f"{self.name}:checkpoint-{self.step}"


@dataclass
class _Text:
    """A text under way."""

    pieces: TextPieces
    prompt_tokens: int
    said_prompt: bool = False


@dataclass
class _Serving:
    """One set of weights, its batch, and the texts that began with it."""

    loaded: Loaded
    batcher: Batcher
    texts: dict[int, _Text] = field(default_factory=dict)


class Engine:
    """The loop: take requests, step every batch, send what was made."""

    def __init__(self, loaded: Loaded, rows: int, length: int, send: Callable[[dict[str, Any]], None]) -> None:
        self.rows, self.length, self.send = rows, length, send
        self.servings = [self._serving(loaded)]
        self.waiting: deque[dict[str, Any]] = deque()
        self.next: Loaded | None = None  # newer weights, to be swapped in
        self.draining = False  # no text is begun; when the last has ended, the weights go
        self.inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.answered = 0

    def _serving(self, loaded: Loaded) -> _Serving:
        length = min(self.length, loaded.built.positions)
        return _Serving(loaded, Batcher(loaded.built.model, self.rows, length, loaded.built.vocab_size))

    @property
    def current(self) -> _Serving:
        return self.servings[-1]

    def say_ready(self) -> None:
        one = self.current.loaded
        self.send({"ready": {
            "model": one.model, "name": one.name, "step": one.step, "template": one.template is not None, "pid": os.getpid(),
            "pid_start": pid_start(os.getpid()), "length": self.current.batcher.length, "vocab_size": one.built.vocab_size,
        }})  # fmt: skip

    # ---------------------------------------------------------------- the loop

    def run(self, phase: report.Phase) -> None:
        """Until stdin ends or a stop is asked for."""
        while not report.stopping():
            busy = any(serving.texts for serving in self.servings) or self._can_begin()
            report.flag("prompting", not busy)
            if not self._take_requests(0.0 if busy else _IDLE_S):
                return
            self._swap()
            self._begin_texts()
            self._let_go()
            self._step_all(phase)  # no name of this loop keeps weights that are let go

    def _let_go(self) -> None:
        """Weights that have written their last text."""
        for serving in list(self.servings):
            if not serving.texts and (self.draining or serving is not self.current):
                self.servings.remove(serving)
                if not self.draining:  # else they may be needed again
                    held.let_go(serving.loaded.folder)
                report.note(f"{serving.loaded.model} has written its last text and is let go")

    def _take_requests(self, wait_s: float) -> bool:
        """What has come in; False at the end of all."""
        while True:
            try:
                message = self.inbox.get(timeout=wait_s) if wait_s else self.inbox.get_nowait()
            except queue.Empty:  # nothing new: the batch goes on
                return True
            if message is None:
                return False
            wait_s = 0.0
            if message.get("op") == "add" and not self._knows(message["key"]):
                self.waiting.append(message)
            elif message.get("op") == "drop":
                self._drop(message["key"])

    def _knows(self, key: int) -> bool:
        """What was still in the pipe when a process died before us is sent once more to us."""
        return any(one["key"] == key for one in self.waiting) or any(key in one.texts for one in self.servings)

    def _drop(self, key: int) -> None:
        self.waiting = deque(one for one in self.waiting if one["key"] != key)
        for serving in self.servings:
            if serving.texts.pop(key, None) is not None:
                serving.batcher.drop(key)

    def _can_begin(self) -> bool:
        return bool(self.waiting and self.servings and not self.draining and self.current.batcher.free)

    def _begin_texts(self) -> None:
        while self._can_begin():
            message = self.waiting.popleft()
            try:
                self._begin(message)
            except (ValueError, LampError) as error:
                words = error.what if isinstance(error, LampError) else str(error)
                why = f": {error.why}" if isinstance(error, LampError) and error.why else ""
                code = "context_length_exceeded" if "does not fit" in words else None
                self.send({"key": message["key"], "error": words + why, "status": 400, "code": code})

    def _begin(self, message: dict[str, Any]) -> None:
        serving = self.current
        loaded, length = serving.loaded, serving.batcher.length
        ids = prompt_ids(loaded, message)
        if len(ids) >= length:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, which does not fit the {length} that this server reads"
            )
        stops = {loaded.tokenizer.end_of_text, *([loaded.template.stop_id] if loaded.template else [])}
        most = message.get("max_tokens") or length
        choice = Choice(message["temperature"], message["top_k"], message["top_p"])
        wish = TextRequest(
            tuple(ids), min(most, length - len(ids)), choice, message["seed"], message["sample"], frozenset(stops),
            message["repetition_penalty"], message["logprobs"],
        )  # fmt: skip
        serving.batcher.add(message["key"], wish)
        serving.texts[message["key"]] = _Text(TextPieces(loaded.tokenizer, message["stop"]), len(ids))

    def _step_all(self, phase: report.Phase) -> None:
        for serving in self.servings:
            if serving.texts:
                self._step(serving, phase)

    def _step(self, serving: _Serving, phase: report.Phase) -> None:
        report.flag("printing", True)
        for made in serving.batcher.step():
            text = serving.texts.get(made.key)
            if text is not None:
                self._made(serving, text, made)
                phase.tick(made.token is not None)
        phase.tick(0)

    def _made(self, serving: _Serving, text: _Text, made: Made) -> None:
        """One more token of a text: what of it can be shown is sent; a stop ends it."""
        tokenizer = serving.loaded.tokenizer
        end: str = made.end
        shown = text.pieces.add(made.token) if made.token is not None else ""
        if text.pieces.stopped:
            end = "stop"
            serving.batcher.drop(made.key)
        elif end:
            shown += text.pieces.end()
        said: dict[str, Any] = {"key": made.key, "text": shown, "tokens": int(made.token is not None), "end": end}
        if not text.said_prompt:
            text.said_prompt = True
            said |= {"prompt_tokens": text.prompt_tokens, "model": serving.loaded.model}
        if made.logprob is not None and made.token is not None:
            top = [[tokenizer.decode([token]), value] for token, value in made.top]
            said["logprobs"] = [{"token": tokenizer.decode([made.token]), "logprob": made.logprob, "top": top}]
        self.send(said)
        if end:
            serving.texts.pop(made.key, None)
            self.answered += 1
            report.number(step=self.answered, durable_step=self.answered)

    # ---------------------------------------------------------------- newer weights

    def _swap(self) -> None:
        """The newest weights for all texts that begin from now on."""
        found = self.next
        if found is None:
            return
        self.servings.append(self._serving(found))
        self.next, self.draining = None, False
        count = sum(len(one.texts) for one in self.servings)
        report.note(f"serving {found.model} from now on; {count} texts end on what they began with")
        self.say_ready()

    def read_requests(self) -> None:
        """Lines of stdin, in a thread of its own."""
        for line in sys.stdin.buffer:
            try:
                message = json.loads(line)
            except ValueError:  # a line that a killed parent left half
                continue
            self.inbox.put(message)
        self.inbox.put(None)

    def follow(self, root: Path, load: Callable[[Path], Loaded], has_room: Callable[[Path], bool]) -> None:
        """A thread: the newest valid checkpoint of a run is loaded beside the one that is served."""
        served = self.current.loaded.folder
        known, refused = step_of(served), -1
        while not report.stopping():
            time.sleep(_FOLLOW_S)
            newest = next((path for path in newest_first(root) if step_of(path) > known), None)
            if newest is None or step_of(newest) == refused or self.next is not None or not held.hold(newest):
                continue
            if reason := verify_manifest(newest):
                refused = step_of(newest)
                report.warn(f"{newest.name} is not served: {reason}")
                held.let_go(newest)
                continue
            if not has_room(newest):
                self._drain(newest)
            try:
                found = load(newest)
            except (
                LampError,
                OSError,
                ValueError,
                RuntimeError,
            ) as error:  # damaged in a way that hashes do not show, or too big
                refused = step_of(newest)
                report.warn(f"{newest.name} could not be loaded: {error}")
                held.let_go(newest)
                if self.draining:
                    self.next = load(served)
                continue
            if self.draining:
                held.let_go(served)
            known, served = step_of(newest), newest
            self.next = found
            del found

    def _drain(self, newest: Path) -> None:
        """Wait until nothing is written any more and the old weights are gone."""
        report.note(f"no memory for {newest.name} beside what is served: its texts end first, new ones wait")
        self.draining = True
        while self.servings and not report.stopping():
            time.sleep(_LOOK_S)


def prompt_ids(loaded: Loaded, message: dict[str, Any]) -> list[int]:
    """What the model reads: ids as they are, a conversation by its template, a text after what stands before texts."""
    if message.get("ids") is not None:
        return list(message["ids"])
    if message.get("messages") is not None:
        if loaded.template is None:
            raise ValueError("this model has no chat template")
        return loaded.template.prompt_ids(message["messages"])
    ids = [
        *ids_before_prompt(loaded.tokenizer, loaded.folder),
        *loaded.tokenizer.encode(message["prompt"] or "").tolist(),
    ]
    return ids or [loaded.tokenizer.begin_of_text]


def serve_all(engine: Engine, follower: Callable[[], None] | None) -> None:
    """Start the threads, say that we are ready, and work."""
    torch.set_grad_enabled(False)
    threading.Thread(target=engine.read_requests, name="lamp-requests", daemon=True).start()
    if follower is not None:
        threading.Thread(target=follower, name="lamp-follow", daemon=True).start()
    engine.say_ready()
    with report.phase("serve", unit="tokens") as phase:
        engine.run(phase)
