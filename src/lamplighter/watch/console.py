"""What people read: a live display on a terminal, whole timestamped lines in a pipe.

In:  sentences to keep, and the status of now.
Out: bytes on a stream and a copy in console.log. A reader that does not read never blocks the caller.
"""

from __future__ import annotations

import io
import os
import queue
import threading
import time
from typing import TYPE_CHECKING

from lamplighter import first_words
from lamplighter.safe_text import safe
from lamplighter.watch.status import Status, line

if TYPE_CHECKING:
    from lamplighter.watch.live import Live, Page

LINE_EVERY_S = 1.6  # a pipe hears something at least every 2 s, also when the loop is late by a look
CALM_AFTER_S = 600.0
CALM_EVERY_S = 9.5
FRAME_EVERY_S = 0.45


# ---------------------------------------------------------------- the stream, written by a thread of its own


class Stream(io.TextIOBase):
    """A text stream whose reader may stop reading: what does not fit is counted, and the caller goes on."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.waiting: queue.Queue[bytes | None] = queue.Queue(maxsize=2000)
        self.lost = 0
        self.busy_since = 0.0
        self.broken = False
        self.thread = threading.Thread(target=self._drain, name="lamp-console", daemon=True)
        self.thread.start()

    def write(self, text: str) -> int:
        try:
            self.waiting.put_nowait(text.encode("utf-8", "replace"))
        except queue.Full:  # counted, and said once the reader reads again
            self.lost += 1
        return len(text)

    def isatty(self) -> bool:
        return os.isatty(self.fd)

    def fileno(self) -> int:
        return self.fd

    @property
    def blocked_s(self) -> float:
        """How long the reader has not taken what is offered."""
        since = self.busy_since
        return time.monotonic() - since if since else 0.0

    def _drain(self) -> None:
        while (data := self.waiting.get()) is not None:
            self.busy_since = time.monotonic()
            while data and not self.broken:
                try:
                    data = data[os.write(self.fd, data) :]
                except BlockingIOError:  # the reader is slow
                    time.sleep(0.05)
                except OSError:  # the reader is gone (closed terminal, broken pipe): console.log still has every word
                    self.broken = True
            self.busy_since = 0.0

    def finish(self, deadline_s: float = 2.0) -> None:
        try:
            self.waiting.put(None, timeout=0.2)
        except queue.Full:  # the reader has stopped: nobody would see the end
            return
        self.thread.join(deadline_s)


# ---------------------------------------------------------------- the console


class Console:
    """Says sentences and shows the status; `live` on a terminal, lines elsewhere."""

    def __init__(self, fd: int = 1, live: bool | None = None, log_fd: int = -1, whole: bool = False) -> None:
        """`whole`: the display may have all of the terminal, not only its last rows."""
        self.stream = Stream(fd)
        self.log_fd = log_fd
        self.last_line = first_words.last_s()
        self.calm_since: float | None = None
        self.blocked_said = False
        self.display: Live | Page | None = None
        wanted = live if live is not None else os.isatty(fd) and os.environ.get("TERM", "dumb") != "dumb"
        if wanted:
            from lamplighter.watch.live import Live, Page

            self.display = Page(self.stream) if whole else Live(self.stream)

    def say(self, text: str, style: str = "", at: float | None = None) -> None:
        """One or more lines that stay; `at`: when it happened, where that is not now."""
        for one in safe(text).splitlines() or [""]:
            stamp = f"{time.strftime('%H:%M:%S', time.localtime(at))}  "
            self._copy(stamp + one)
            if self.display is not None:
                self.display.line(stamp, one, style)
            else:
                self.stream.write(stamp + one + "\n")
        self.last_line = time.monotonic()
        first_words.spoke()

    def show(self, status: Status) -> None:
        """Now. On a terminal a frame, in a pipe a line when one is due."""
        now = time.monotonic()
        self._watch_reader()
        slot = status.slot
        if slot is not None and (slot.prompting or (slot.printing and status.stalled_s < 1.5)):
            self.last_line = now
            return
        if self.display is not None and not self.stream.broken:
            if now - self.last_line > FRAME_EVERY_S:
                self.display.frame(status)
                self.last_line = now
            return
        if now - self.last_line >= self._line_every_s(status, now):
            self.say(line(status))

    def _line_every_s(self, status: Status, now: float) -> float:
        """After ten calm minutes of training, every 10 s."""
        calm = status.training and not status.stall_words and not status.stopping
        self.calm_since = (self.calm_since or now) if calm else None
        return CALM_EVERY_S if self.calm_since and now - self.calm_since > CALM_AFTER_S else LINE_EVERY_S

    def _watch_reader(self) -> None:
        if self.stream.blocked_s > 2 and not self.blocked_said:
            self.blocked_said = True
            self._copy(f"{time.strftime('%H:%M:%S')}  output is blocked (nobody reads it); the work goes on")
        elif not self.stream.blocked_s and self.blocked_said:
            self.blocked_said = False
            self.say(
                f"output was blocked; the work went on; {self.stream.lost} pieces of output left out, all in console.log"
            )

    def _copy(self, line: str) -> None:
        if self.log_fd >= 0:
            try:
                os.write(self.log_fd, (line + "\n").encode("utf-8", "replace"))
            except OSError:  # a full disk must not silence the screen
                self.log_fd = -1

    def close(self) -> None:
        """Take the live display down and let the last words out."""
        if self.display is not None:
            self.display.close()
        self.stream.finish()
