"""What a command says before its console speaks: a line at once, then one every moment, by a thread that needs nothing loaded.

In:  the stream and the verb; what is being done now.
Out: lines, until the supervisor's loop begins to speak or the command ends.

Loading modules costs a parent 60 to 120 ms of processor time. On a machine with 28 others in line for two cores that is
seconds; the thread gets its turn in between. Only modules that every Python has loaded already are imported here.
"""

from __future__ import annotations

import _thread
import os
import time

_EVERY_S = 1.5  # without another word


class _Speaker:
    """The words of one command, from its first to those of its console."""

    def __init__(self, fd: int, verb: str) -> None:
        self.fd, self.verb, self.doing = fd, verb, "loading"
        self.began = self.spoke = time.monotonic()
        self.open = True
        self.lock = _thread.allocate_lock()  # held while a line is written: nothing is said after the end

    def line(self, text: str) -> None:
        try:
            os.write(self.fd, f"{time.strftime('%H:%M:%S')}  lamp {self.verb}: {text}\n".encode())
        except OSError:  # nobody reads any more; what was asked for still happens
            self.open = False
        self.spoke = time.monotonic()

    def run(self) -> None:
        while self.open:
            time.sleep(max(0.05, self.spoke + _EVERY_S - time.monotonic()))
            with self.lock:
                now = time.monotonic()
                if self.open and now - self.spoke >= _EVERY_S:
                    self.line(f"{self.doing}, for {now - self.began:.1f} s")


_now: _Speaker | None = None


def begin(fd: int, verb: str) -> None:
    """The first line, and the thread for those that follow if it takes longer."""
    global _now
    end()
    _now = _Speaker(fd, verb)
    _now.line("reading the request")
    _thread.start_new_thread(_now.run, ())


def doing(text: str) -> None:
    """What the next line says, if one is due before anything else speaks."""
    if _now is not None:
        _now.doing = text


def spoke() -> None:
    """Something else has just said a line: the next one of ours is due later."""
    if _now is not None:
        _now.spoke = time.monotonic()


def last_s() -> float:
    """When the last word was said, by the monotonic clock; now, where nothing was."""
    return _now.spoke if _now is not None else time.monotonic()


def end() -> None:
    """From here on something else speaks: the supervisor, or nobody, because this is the end."""
    global _now
    speaker, _now = _now, None
    if speaker is None:
        return
    speaker.open = False
    if speaker.lock.acquire(
        timeout=0.2
    ):  # a line that is being written comes first; a reader that stopped reading is not waited for
        speaker.lock.release()
