"""The parent's side of the model's process: texts go out as lines of JSON, pieces come back, and a death is noticed.

In:  a pipe to the child and one from it; requests of the HTTP server.
Out: for each text a queue of what happens to it. What was not begun when a child died is given to the next one. No torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lamplighter.procs.procfs import pid_start
from lamplighter.rundir import parse_record
from lamplighter.serve.protocol import ApiError, Asked


@dataclass
class _Waiting:
    asked: Asked
    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[dict[str, Any]]
    begun: bool = False


@dataclass
class Bridge:
    """Texts under way, by number. At most `most` at a time; one more is refused, not kept waiting."""

    to_child: int
    most: int
    facts: dict[str, Any] = field(default_factory=dict)  # what the child said of itself when it was ready
    counts: Counter[str] = field(default_factory=Counter)
    waiting: dict[int, _Waiting] = field(default_factory=dict)
    ended: bool = False
    began: float = field(default_factory=time.time)
    _number: int = 0
    _outbox: queue.SimpleQueue[bytes] = field(default_factory=queue.SimpleQueue)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # -- for the HTTP server, in its loop

    @property
    def is_ready(self) -> bool:
        pid = self.facts.get("pid")
        return isinstance(pid, int) and pid_start(pid) == self.facts.get("pid_start")

    def state(self) -> str:
        return "ok" if self.is_ready else "restarting" if self.facts else "loading"

    def add(self, texts: list[Asked]) -> tuple[list[int], asyncio.Queue[dict[str, Any]]]:
        """Take these texts, all or none: their numbers, and the queue of what happens to them. 429 where there is no room now,
        400 where there never is.
        """
        if len(texts) > self.most:
            why = f"{len(texts)} texts were asked for, and this server holds {self.most} at a time (--max-batch and --max-queue)"  # fmt: skip
            raise ApiError(400, why, code="too_many_texts", param="n")
        loop, queue, numbers = asyncio.get_running_loop(), asyncio.Queue[dict[str, Any]](), []
        with self._lock:
            if len(self.waiting) + len(texts) > self.most:
                self.counts["refused"] += 1
                raise ApiError(429, f"{len(self.waiting)} texts are under way, and {self.most} is the most; try again soon", "rate_limit_error", "queue_full")  # fmt: skip
            for asked in texts:
                self._number += 1
                self.waiting[self._number] = _Waiting(asked, loop, queue)
                numbers.append(self._number)
            self.counts["texts"] += len(texts)
        for number, asked in zip(numbers, texts, strict=True):
            self._send({"op": "add", "key": number, **asked.record()})
        return numbers, queue

    def drop(self, number: int) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            known = self.waiting.pop(number, None)
        if known is not None:
            self._send({"op": "drop", "key": number})

    # -- the child's words, in a thread of their own

    def listen(self, from_child: int) -> None:
        """Until the pipe ends."""
        with os.fdopen(from_child, "rb") as lines:
            for line in lines:
                if (said := parse_record(line)) is not None:
                    self._hear(said)
        self.ended = True

    def _hear(self, said: dict[str, Any]) -> None:
        if "ready" in said:
            again = bool(self.facts) and self.facts.get("pid") != said["ready"].get("pid")
            self.counts["swaps"] += bool(self.facts) and not again
            self.facts = said["ready"]
            if again:
                self.counts["restarts"] += 1
                self._begin_again()
            return
        number = said.get("key", 0)
        known = self.waiting.get(number)
        if known is None:
            return
        known.begun = True
        self.counts["tokens"] += said.get("tokens", 0)
        if said.get("end") or "error" in said:
            with self._lock:
                self.waiting.pop(number, None)
        self._give(known, said)

    def _give(self, known: _Waiting, said: dict[str, Any]) -> None:
        try:
            known.loop.call_soon_threadsafe(known.queue.put_nowait, said)
        except RuntimeError:  # the HTTP server has ended
            self.ended = True

    def _begin_again(self) -> None:
        """A new child: what had begun is lost and said so, the rest is asked again."""
        for number, known in list(self.waiting.items()):
            if known.begun:
                with self._lock:
                    self.waiting.pop(number, None)
                lost = {
                    "key": number,
                    "error": "the model's process died while it wrote this; it has been started again",
                }
                self._give(known, {**lost, "status": 500})
            else:
                self._send({"op": "add", "key": number, **known.asked.record()})

    def _send(self, message: dict[str, Any]) -> None:
        self._outbox.put((json.dumps(message) + "\n").encode())

    def write(self) -> None:
        """What was sent, into the pipe: in a thread of its own, since a pipe is full while no child reads it."""
        while True:
            data = self._outbox.get()
            try:
                while data:
                    data = data[os.write(self.to_child, data) :]
            except OSError:  # the server ends
                return
