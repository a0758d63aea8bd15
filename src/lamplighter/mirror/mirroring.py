"""The parent's side of save.mirror: starts the process that copies, says once what is wrong, and waits for it at the end, not for long.

In:  the run folder, its save section, the id of the run in the store.
Out: a process of mirror/copying.py; sentences for people; at the end `mirrored_step` in status.json and a line in report.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lamplighter.mirror.copying import MirrorState, read_state
from lamplighter.rundir import RunDir, human_bytes, read_record, write_json

if TYPE_CHECKING:
    from lamplighter.config import Save

Say = Callable[..., None]
SILENT_S = 20.0  # so long may a store take for a piece before that is said
HUNG_S = 30.0  # at the end of a run: so long is a store waited for that takes nothing
PAUSES_S = (5.0, 20.0, 60.0, 300.0)  # before a process that ended is started again
_LOOK_S = 0.5
_TELL_S = 2.0


def new_id() -> str:
    """Of a run in a store: one that begins anew under the same name does not mix with the one before."""
    return secrets.token_hex(4)


@dataclass
class Mirroring:
    """The copies of one run, beside it. Nothing here waits for the store but `finish`."""

    run: RunDir
    section: Save
    id: str
    say: Say
    said: set[str] = field(default_factory=set)  # kinds of problems, until a copy succeeds
    step: int = 0
    failures: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _thread: threading.Thread | None = None
    _over: threading.Event = field(default_factory=threading.Event)
    _left_at: float = 0.0

    @property
    def is_wanted(self) -> bool:
        return self.section.mirror is not None

    def begin(self) -> None:
        """From now on each finished checkpoint is copied."""
        if self.is_wanted:
            self._start()
            self._thread = threading.Thread(target=self._beside, name="lamp-mirror", daemon=True)
            self._thread.start()

    def _start(self) -> None:
        """What it shall do comes by standard input: an address may hold a key, and arguments can be read by everybody."""
        told = {
            "folder": str(self.run.path),
            "address": self.section.mirror,
            "id": self.id,
            "keep": self.section.keep,
        }
        log = os.open(self.run.path / "mirror.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "lamplighter.mirror.copying"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(told).encode())
            self._process.stdin.close()
        except OSError as error:  # no process to be had: the run goes on
            self._say_once("no process", f"no process can be started for it: {error.strerror}")
        finally:
            os.close(log)

    def _beside(self) -> None:
        while not self._over.wait(_LOOK_S):
            self.look()

    def look(self) -> None:
        """How far it is; what is wrong is said once; one that ended is started again, after a while."""
        now = read_state(self.run)
        if now.step > self.step:
            if self.said:
                self.say(f"the mirror works again: step {now.step} is in {now.store}")
            self.step, self.failures = now.step, 0
            self.said.clear()
        silent_s = _silent_s(now)
        if now.problem:
            self._say_once(now.kind, now.problem)
        elif silent_s > SILENT_S:
            self._say_once("stalled", f"{now.doing}: nothing was taken for {silent_s:.0f} s")
        process = self._process
        if process is None or process.poll() is None:
            self._left_at = 0.0
            return
        self._left_at = self._left_at or time.monotonic()
        if not now.problem:
            self._say_once("ended", f"its process ended with {process.returncode}; see {self.run.path / 'mirror.log'}")
        if time.monotonic() - self._left_at >= PAUSES_S[min(self.failures, len(PAUSES_S) - 1)]:
            self.failures += 1
            self._start()

    def _say_once(self, kind: str, words: str) -> None:
        if kind not in self.said:
            self.said.add(kind)
            how = {"refused": "refuses what is copied to it", "stalled": "does not answer"}.get(kind, "cannot be used")
            self.say(
                f"WARNING  the mirror {how} ({words}); the run goes on and is safe here, and it is tried again",
                "bold yellow",
            )

    # ---------------------------------------------------------------- the end

    def stop(self) -> None:
        """At once: the parent itself fails."""
        self._over.set()
        self._kill()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(OSError):  # it has just ended
                self._process.kill()
            self._process.wait()

    def finish(self) -> None:
        """The last checkpoint goes out, for as long as bytes are taken and save.mirror_wait_s allows; then it is said what is missing."""
        if not self.is_wanted:
            return
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._process is None or self._process.poll() is not None:
            self._start()
        until = time.monotonic() + self.section.mirror_wait_s
        with self._interruptible() as left:
            self._wait(until, left)
        self._kill()
        self._tell_end()

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[list[float]]:
        """Ctrl+C ends the wait at once; TERM, which comes before a kill, leaves it some seconds. Gives the time of its end."""
        until: list[float] = []

        def heed(which: int, _frame: object) -> None:
            until.append(time.monotonic() + (0.0 if which == signal.SIGINT else 20.0))

        before = {which: signal.signal(which, heed) for which in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield until
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)

    def _wait(self, until: float, left: list[float]) -> None:
        process, told_at = self._process, time.monotonic()
        taken, taken_at = (0, ""), time.monotonic()
        if process is None:
            return
        process.terminate()
        while process.poll() is None and time.monotonic() < min([until, *left]):
            time.sleep(0.05)
            now = read_state(self.run)
            if (now.bytes, now.doing) != taken:
                taken, taken_at = (now.bytes, now.doing), time.monotonic()
            if time.monotonic() - taken_at > HUNG_S:
                return
            if time.monotonic() - told_at > _TELL_S:
                told_at = time.monotonic()
                part = f", {human_bytes(now.bytes)} of {human_bytes(now.total)}" if now.total else ""
                at_most = min([until, *left]) - told_at
                self.say(f"mirror: {now.doing or 'waiting'}{part}; at most {at_most:.0f} s more (save.mirror_wait_s)")

    def _tell_end(self) -> None:
        now = read_state(self.run)
        durable = int(read_record(self.run.status).get("durable_step") or 0)
        where = now.store or "the mirror"
        if now.step >= durable:
            words = f"mirrored: step {now.step} is in {where}" if now.step else ""
        else:
            why = now.problem or (f"{now.doing}, and no more was taken" if now.doing else "there was no time for more")
            have = f"has step {now.step}" if now.step else "has no checkpoint"
            words = f"{where} {have} of {durable}: {why}; the same command again copies the rest"
        if words:
            self.say(words, "" if now.step >= durable else "bold yellow")
        record: dict[str, Any] = read_record(self.run.status)
        try:
            if record:
                write_json(self.run.status, {**record, "mirrored_step": now.step}, durable=False)
            if words and self.run.report.exists():
                with open(self.run.report, "a", encoding="utf-8") as file:
                    file.write(f"\n{words}\n")
        except OSError as error:  # a full disk: it was said
            self.say(f"WARNING  {self.run.status} cannot be written: {error.strerror}", "bold yellow")


def _silent_s(now: MirrorState) -> float:
    return time.time() - now.since if now.doing and now.since else 0.0
