"""Telling somebody who is not looking: a command or a webhook, bounded, never in the way.

In:  the events that matter: stuck, dead, diverged, budget, finished.
Out: the event as JSON, on the command's stdin or in a POST; a failure is said once.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import threading
from collections.abc import Callable
from typing import Any

_DEADLINE_S = 10.0
_WAITING = 20
_KINDS = ("stuck", "dead", "diverged", "budget", "finished", "stopped", "lost", "failed")


class Notifier:
    """One thread, a short queue; what does not fit is dropped and counted."""

    def __init__(self, target: str | None, run_name: str, say: Callable[[str], None]) -> None:
        self.target, self.run_name, self.say = target, run_name, say
        self.waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=_WAITING)
        self.dropped = 0
        self.failed = False
        self.thread: threading.Thread | None = None

    def tell(self, kind: str, text: str, **fields: Any) -> None:
        """Put it in the queue; never waits."""
        if self.target is None or kind not in _KINDS:
            return
        if self.thread is None:
            self.thread = threading.Thread(target=self._work, name="lamp-notify", daemon=True)
            self.thread.start()
        try:
            self.waiting.put_nowait({"run": self.run_name, "kind": kind, "text": text, **fields})
        except queue.Full:  # counted; notifying must never wait
            self.dropped += 1

    def close(self) -> None:
        """Let the last word out, but do not wait for ever."""
        if self.thread is not None:
            try:
                self.waiting.put_nowait(None)
            except queue.Full:  # nobody takes the messages: the last one is lost too
                return
            self.thread.join(_DEADLINE_S)

    def _work(self) -> None:
        while (message := self.waiting.get()) is not None:
            problem = _deliver(str(self.target), message)
            if problem and not self.failed:
                self.failed = True
                self.say(f"WARNING  watch.notify does not work: {problem}")


def _deliver(target: str, message: dict[str, Any]) -> str | None:
    """None, or what went wrong."""
    data = json.dumps(message).encode()
    try:
        if target.startswith(("http://", "https://")):
            import urllib.request  # 15 ms of every start, for a few runs

            request = urllib.request.Request(target, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=_DEADLINE_S):
                return None
        environment = {
            **os.environ,
            "LAMP_RUN": message["run"],
            "LAMP_KIND": message["kind"],
            "LAMP_TEXT": message["text"],
        }
        done = subprocess.run(
            ["sh", "-c", target], input=data, env=environment, timeout=_DEADLINE_S, capture_output=True, check=False
        )
        return (
            None if done.returncode == 0 else f"the command ended with {done.returncode}: {done.stderr.decode()[-200:]}"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
