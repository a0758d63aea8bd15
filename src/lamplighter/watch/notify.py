"""Telling somebody who is not looking: a command, a webhook, Slack, Discord, ntfy or mail, bounded, never in the way.

In:  the events that matter: stuck, dead, diverged, budget, finished.
Out: the event as JSON, on the command's stdin or in a POST, tried again with growing pauses; what could not be told is said.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from lamplighter.rundir import RunDir, dollars, read_status
from lamplighter.watch import picture, services

_DEADLINE_S = 10.0  # of one try
_PAUSES_S = (1.0, 4.0, 16.0)  # before the second, third and fourth try
_LAST_PAUSE_S = 0.5  # between tries at the end of a run
_LAST_S = 3.0  # for all that is still to be told when the run has ended
_WAITING = 20
_KINDS = ("stuck", "dead", "diverged", "budget", "finished", "stopped", "paused", "lost", "failed")
_NOT_THERE = (126, 127)  # what sh says of a command that it cannot run
_REFUSED_FOR_NOW = (408, 425, 429)


class _Undelivered(Exception):
    """What went wrong, and whether another try may go better."""

    def __init__(self, why: str, may_pass: bool = True) -> None:
        super().__init__(why)
        self.may_pass = may_pass


class Notifier:
    """One thread, a short queue; what does not fit is dropped and counted."""

    def __init__(
        self, target: str | None, run_name: str, say: Callable[[str], None], run: RunDir | None = None
    ) -> None:
        """`run`: its losses are drawn, for services that take a picture."""
        self.target, self.run_name, self.say, self.run = target, run_name, say, run
        self.waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(maxsize=_WAITING)
        self.untold = 0
        self.failed = False
        self.thread: threading.Thread | None = None
        self.closing = threading.Event()
        self.until = 0.0  # from the end of the run on: when the last try may begin
        self.command: subprocess.Popen[bytes] | None = None

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
            self.untold += 1

    def tell_verdict(self, state: str, why: str, **fields: Any) -> None:
        """A process that a signal holds is paused: `stopped` is the word for a run that has ended early."""
        self.tell("paused" if state == "stopped" else state, why, **fields)

    def tell_end(self, state: str, words: str, ours: bool, **fields: Any) -> None:
        """How it ended, and what to do about it."""
        where = f"lamp report {self.run.address if self.run is not None else self.run_name}"
        again = "the same command goes on where it stopped" if ours else "start the command again when it shall go on"
        advice = {"finished": f"{where} shows it", "stopped": again}
        self.tell(state, words + self._sum(), **fields, next=advice.get(state, f"{where} shows what is known of it"))

    def _sum(self) -> str:
        """What the run came to, by its status: who reads a message on a phone has nothing else."""
        told = read_status(self.run) if self.run is not None else {}
        steps = f" of {told['steps']:,}" if told.get("steps") else ""
        parts = [
            f"step {told['step']:,}{steps}" if told.get("step") else "",
            *(f"{name} {told[key]:.4f}" for name, key in (("loss", "loss"), ("validation", "val_loss")) if told.get(key) is not None),
            dollars(told["usd"]) if told.get("usd") else "",
        ]  # fmt: skip
        return "".join(f"; {part}" for part in parts if part)

    def close(self) -> None:
        """Let the last words out, for a few seconds; a command that hangs is ended with all that it started."""
        if self.thread is None:
            return
        until = self.until = time.monotonic() + _LAST_S
        self.closing.set()
        with contextlib.suppress(queue.Full):  # then the thread ends by itself when the queue is empty
            self.waiting.put_nowait(None)
        self.thread.join(_LAST_S)
        late = self.thread.is_alive()
        if late and (command := self.command) is not None:
            _end(command)
        if late:
            self.say(f"WARNING  watch.notify took longer than {_LAST_S:.0f} s for the last message: not waited for")
        left = self.untold + (self.waiting.qsize() if late else 0)
        if left and time.monotonic() < until + 1:
            self.say(f"WARNING  {left} message{'s' * (left > 1)} of watch.notify could not be delivered")

    def _work(self) -> None:
        while True:
            try:
                message = self.waiting.get(timeout=0.0 if self.closing.is_set() else None)
            except queue.Empty:  # all is told
                return
            if message is None:
                return
            problem = self._deliver_at_last(message)
            if problem:
                self.untold += 1
            if problem and not self.failed:
                self.failed = True
                self.say(f"WARNING  watch.notify does not work: {problem}")

    def _deliver_at_last(self, message: dict[str, Any]) -> str:
        """Tried again after pauses, which the end of the run cuts short; empty, or what went wrong the last time."""
        for pause_s in (*_PAUSES_S, None):
            try:
                self._deliver(message)
            except _Undelivered as problem:
                if not problem.may_pass or pause_s is None:
                    return str(problem)
                if self.closing.wait(pause_s):  # the end of the run: the tries that are left come quickly
                    if time.monotonic() + _LAST_PAUSE_S > self.until:
                        return str(problem)
                    time.sleep(_LAST_PAUSE_S)
            else:
                return ""
        return ""

    def _deliver(self, message: dict[str, Any]) -> None:
        """With a picture of the losses; a service that refuses it (an ntfy server without attachments) gets the words alone."""
        curve, drawn = self._drawn()
        try:
            self._send(message, curve, drawn)
        except _Undelivered as problem:
            if problem.may_pass or not drawn:
                raise
            self._send(message, curve, b"")

    def _drawn(self) -> tuple[str, bytes]:
        if (
            self.run is None or services.letter(str(self.target), {}) is None
        ):  # a command reads the run's folder if it likes
            return "", b""
        return picture.loss_words(self.run), picture.loss_picture(self.run)

    def _send(self, message: dict[str, Any], curve: str, drawn: bytes) -> None:
        target = str(self.target)
        try:
            sent = services.letter(target, message, drawn, curve)
            if sent is not None and sent.mail:
                _within(_DEADLINE_S, lambda: services.send_mail(sent))
            elif sent is not None:
                _within(_DEADLINE_S, lambda: _post(sent.address, sent.body, sent.headers))
            else:
                self._run(target, message)
        except _Undelivered:
            raise
        except Exception as error:  # whatever a server answers or a command does must not end this thread
            raise _Undelivered(f"{type(error).__name__}: {error}") from error

    def _run(self, target: str, message: dict[str, Any]) -> None:
        """The command, in a session of its own, with the message as its input."""
        told = {f"LAMP_{name.upper()}": _plain(message[name]) for name in ("run", "kind", "text")}
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
            given.write(json.dumps(message).encode())
            given.seek(0)
            self.command = subprocess.Popen(
                ["sh", "-c", target],
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=printed,
                env={**os.environ, **told},
                start_new_session=True,
            )
            try:
                code = self.command.wait(_DEADLINE_S)
            except subprocess.TimeoutExpired:
                raise _Undelivered(f"the command had not ended after {_DEADLINE_S:.0f} s", may_pass=False) from None
            finally:
                if self.command.poll() is None:
                    _end(self.command)
                self.command = None
            if code:
                what = f"the command ended with {code}: {_end_of(printed)}"
                raise _Undelivered(what, may_pass=code not in _NOT_THERE)


def _end(command: subprocess.Popen[bytes]) -> None:
    """It and all that it started."""
    with contextlib.suppress(OSError):  # it has just ended
        os.killpg(command.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel, where no signal reaches it: left behind
        command.wait(1.0)


def _plain(value: object) -> str:
    """As an environment can hold it."""
    return str(value).replace("\0", " ").encode("utf-8", "replace").decode()


def _end_of(printed: IO[bytes]) -> str:
    size = printed.seek(0, os.SEEK_END)
    printed.seek(max(0, size - 200))
    return " ".join(printed.read().decode("utf-8", "replace").split())


def _within(deadline_s: float, act: Callable[[], None]) -> None:
    """In a thread that is left behind where it takes longer: a server may answer one byte every few seconds, without end."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001  handed over to whoever waits
            raised.append(error)

    thread = threading.Thread(target=run, name="lamp-notify-post", daemon=True)
    thread.start()
    thread.join(deadline_s)
    if thread.is_alive():
        raise _Undelivered(f"no answer in {deadline_s:.0f} s")
    if raised:
        raise raised[0]


def _post(target: str, data: bytes, headers: Mapping[str, str]) -> None:
    """2xx or an error; a redirect is one too, because a POST that follows it arrives as an empty GET."""
    import base64
    import urllib.error
    import urllib.parse
    import urllib.request  # 15 ms of every start, for a few runs

    class Refuse(urllib.request.HTTPRedirectHandler):
        """None: the redirect itself is the answer, raised as an HTTPError."""

        def redirect_request(self, *_: Any) -> None:
            return None

    sent, address = dict(headers), urllib.parse.urlsplit(target)
    if address.username is not None:  # user:password@host: urllib would take them for a part of the host's name
        pair = f"{urllib.parse.unquote(address.username)}:{urllib.parse.unquote(address.password or '')}"
        sent["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        target = address._replace(netloc=address.netloc.rpartition("@")[2]).geturl()
    request = urllib.request.Request(target, data, sent)
    try:
        with urllib.request.build_opener(Refuse).open(request, timeout=_DEADLINE_S):
            return
    except urllib.error.HTTPError as answer:
        where = answer.headers.get("Location", "") if 300 <= answer.code < 400 else ""
        words = f"HTTP {answer.code} {answer.reason}"
        if where:
            words += f", a redirect to {where[:200]!r}: give the address that takes the POST"
        raise _Undelivered(words, may_pass=answer.code >= 500 or answer.code in _REFUSED_FOR_NOW) from None
