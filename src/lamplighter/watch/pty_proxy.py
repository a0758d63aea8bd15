"""The pty proxy: a small process that carries a command's output to the person's terminal, and outlives the watcher.

In:  the masters of the command's output ptys, and words from the watcher (`footer`, `say`, `say!`, `command`, `end`).
Out: the same bytes on the terminal and in output.log; our own words only where the command's line has ended.

terminal.py starts it as a script of its own (`python -I -S`): it needs the standard library alone, shares no memory or
lock with the watcher, and a watcher that is killed takes nothing away from the run. It stays as long as anybody holds the
command's side of a pty open, as the terminal itself would, and as long as a stopped terminal has not taken the last bytes.

How it works. Each terminal of the command (stdout, and stderr where that is another one) is a Screen; a route leads from the
master of a pty to its screen. One poll loop (PtyProxy.run) moves bytes along the routes, takes messages from the watcher's
socket, and lets every screen write what is due. Three things make it more than a copy loop:

- Whose line it is. Our footer and sentences may appear only while the cursor is at the start of a line that the command has
  ended, and not while it draws (cursor movements in the last seconds). Otherwise the footer goes into the window's title.
- How slow the terminal is. A terminal that takes bytes slowly slows the command down, as it would without us; one that has
  stopped (Ctrl+S, a hung ssh) does not: then up to LIMIT bytes wait for it, the oldest are skipped, and the gap is told.
- Which signals came to the whole process group. The proxy sits in the command's group and counts every signal that it
  gets in shared memory; the watcher reads from that whether the command has had the signal already.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SHARED_BYTES = 1024  # bytes passed so far, then one count for each signal number: all 8 bytes wide
_PIECE = 65536
_BACKLOG = 65536  # a slow terminal slows the command down, as it would without us
_LIMIT = 4 << 20  # a stopped terminal does not: this much is kept for it
_STOPPED_AFTER_S = 0.5  # a terminal that has taken nothing for so long has stopped
_AGAIN_S = 0.05  # until a full terminal is tried again
_SETTLE_S = 0.1  # after the command's last byte, before we draw
_DRAW_EVERY_S = 0.25
_URGENT_S = 3.0  # an urgent sentence does not wait longer for the command's line to end
_DRAWING_S = 10.0  # after a cursor movement, the screen counts as the command's own
_DRAIN_S = 0.5  # for bytes that are still on their way when the command has ended
_UNKNOWN_COLUMNS = 60  # a terminal of 0 x 0: it has not been told
CLEAR = b"\r\x1b[2K"
SAID_LIMIT = 500

# A command that moves the cursor up or over the screen owns more than its line.
_MOVES = re.compile(rb"\x1b(?:\[[0-9;]*[ABEFHJdfr]|\[\?(?:47|1047|1049)[hl]|M)")
_HALF_SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*)?\Z")

# These stop, continue or end a process for its own reasons; all others are counted and outlived.
_LEFT_ALONE = "KILL STOP TSTP TTIN TTOU CONT CHLD WINCH URG PIPE SEGV BUS FPE ILL ABRT TRAP SYS"
SURVIVED = frozenset(signal.valid_signals() - {getattr(signal, f"SIG{name}") for name in _LEFT_ALONE.split()})


def count_at(shared: mmap.mmap, index: int) -> int:
    """Count 0 is the bytes passed; count N is how often signal N came to the proxy."""
    return int(struct.unpack_from("q", shared, index * 8)[0])


def _add_to(shared: mmap.mmap, index: int, more: int) -> None:
    struct.pack_into("q", shared, index * 8, count_at(shared, index) + more)


def fit(text: str, columns: int) -> str:
    """The text in one line of at most so many columns; a wide character takes two."""
    used, kept = 0, []
    for char in text:
        char = char if char.isprintable() else " "
        used += 0 if unicodedata.combining(char) else 1 + (unicodedata.east_asian_width(char) in "WF")
        if used > columns:
            break
        kept.append(char)
    return "".join(kept)


# ---------------------------------------------------------------- one terminal


class Screen:
    """A terminal: what it has yet to take, whose line the cursor is on, and what we would like to say there."""

    def __init__(self, tty: int, style: str, line_open: bool) -> None:
        self.tty = tty
        self.out = tty if fcntl.fcntl(tty, fcntl.F_GETFL) & os.O_NONBLOCK else _by_thread(tty)
        self.style = style  # plain, footer, or footer and title
        self.line_open = line_open
        self.gone = False
        self.waiting: deque[bytes] = deque()
        self.waiting_bytes = 0
        self.skipped = 0
        self.took = self.retry_at = self.last_output = self.last_draw = 0.0
        self.moved = -_DRAWING_S
        self.tail = b""
        self.said: deque[tuple[float, str]] = deque()
        self.footer = self.shown = self.title = ""

    # -- the command's bytes

    def carry(self, data: bytes, now: float) -> None:
        """The command's own bytes, as they are; our footer makes way."""
        self._put(self._hide() + data, now)
        self.line_open = not data.endswith(b"\n")
        self.last_output = now
        self.tail = data[-64:]
        if b"\x1b" in data and _MOVES.search(data):
            self.moved = now

    def takes_more(self, now: float) -> bool:
        """Whether to read on: yes if the terminal keeps up, and yes if it has stopped; no if it is merely slow."""
        return self.waiting_bytes < _BACKLOG or now - self.took >= _STOPPED_AFTER_S

    def _put(self, data: bytes, now: float) -> None:
        if self.gone or not data:
            return
        idle = not self.waiting
        self.waiting.append(data)
        self.waiting_bytes += len(data)
        if idle:
            self.took = now
            self.flush(now)
        elif self.waiting_bytes > _LIMIT:
            self._skip_the_oldest()

    def _skip_the_oldest(self) -> None:
        """The newest is worth most (a traceback); what is being written now is never cut."""
        first = self.waiting.popleft()
        while self.waiting and self.waiting_bytes > _LIMIT * 3 // 4:
            self._skip(len(self.waiting.popleft()))
        if self.waiting:
            cut = self.waiting[0].find(b"\n") + 1
            self.waiting[0] = self.waiting[0][cut:]
            self._skip(cut)
        self.waiting.appendleft(first)

    def _skip(self, size: int) -> None:
        self.skipped += size
        self.waiting_bytes -= size

    def flush(self, now: float) -> None:
        """Write what the terminal takes, and no more."""
        while self.waiting and not self.gone:
            piece = self.waiting[0]
            try:
                written = os.write(self.out, piece)
            except BlockingIOError:  # it takes no more just now
                self.retry_at = now + _AGAIN_S
                return
            except OSError:  # the terminal is closed: output.log still has every byte
                self._give_up()
                return
            self.took = now
            self.waiting_bytes -= written
            if written < len(piece):
                self.waiting[0] = piece[written:]
                return
            self.waiting.popleft()
            if self.skipped:
                self._tell_of_the_gap()

    def _tell_of_the_gap(self) -> None:
        words = f"... {self.skipped} bytes not shown while the terminal was stopped; all of it is in output.log"
        note = f"\r\n{words}\r\n".encode()
        self.waiting.appendleft(note)
        self.waiting_bytes += len(note)
        self.skipped = 0

    def _give_up(self) -> None:
        self.gone = True
        self.waiting.clear()
        self.said.clear()
        self.waiting_bytes = 0

    # -- our own words

    def say(self, text: str, urgent: bool, now: float) -> None:
        """Lines that stay. They wait for the command's line to end; an urgent one not for longer than 3 s."""
        if len(self.said) < SAID_LIMIT and not self.gone:
            self.said.append((now + _URGENT_S if urgent else float("inf"), text))

    def speak(self, now: float, at_once: bool = False) -> None:
        """Write what is ours and due."""
        if self.said and (at_once or not self._owned(now) or min(self.said)[0] <= now):
            self._say_all(now)
        if self.style == "plain" or self.waiting or self.gone or now < self._draw_at():
            return
        if self._owned(now):
            self._draw_title(now)
        elif self.footer != self.shown:
            self._draw_footer(now)

    def due_at(self, now: float) -> float:
        """When speak() will have something to do."""
        moments = [float("inf")]
        if self.gone:
            return moments[0]
        if self.said:
            moments.append(min(min(self.said)[0], self.moved + _DRAWING_S if not self.line_open else float("inf")))
        if self.waiting:
            moments += [moment for moment in (self.retry_at, self.took + _STOPPED_AFTER_S) if moment > now]
        elif self.style != "plain" and self._wants_something(now):
            moments.append(self._draw_at())
        return min(moments)

    def close(self, now: float) -> None:
        """Take the footer and the title away, and say what is left to say."""
        self.footer = ""
        self._put(self._hide(), now)
        if self.title:
            self._put(b"\x1b[23;2t", now)
            self.title = ""
        self.speak(now, at_once=True)

    def _owned(self, now: float) -> bool:
        """Whether the command's own line, bar or drawing is under the cursor."""
        return self.line_open or now - self.moved < _DRAWING_S

    def _draw_at(self) -> float:
        return max(self.last_output + _SETTLE_S, self.last_draw + _DRAW_EVERY_S)

    def _wants_something(self, now: float) -> bool:
        return self._wants_title() if self._owned(now) else self.footer != self.shown

    def _wants_title(self) -> bool:
        return self.style == "title" and self.footer not in ("", self.title) and self._between_sequences()

    def _between_sequences(self) -> bool:
        return self.tail[-1:] < b"\x80" and not _HALF_SEQUENCE.search(self.tail)

    def _say_all(self, now: float) -> None:
        lines = [line for _, text in self.said for line in text.splitlines()]
        self.said.clear()
        words = "".join(f"{line}\r\n" for line in lines).encode("utf-8", "replace")
        with _not_stopped_for_writing():
            self._put(self._hide() + (b"\r\n" if self.line_open else b"") + words, now)
        self.line_open = False

    def _draw_footer(self, now: float) -> None:
        self.last_draw = now
        columns = _columns_of(self.tty) or _UNKNOWN_COLUMNS
        if not self.foreground() or columns < 2:
            return
        line = fit(self.footer, columns - 1)
        self._put(self._hide() + line.encode("utf-8", "replace") + b"\r", now)
        self.shown = self.footer

    def _draw_title(self, now: float) -> None:
        if self._wants_title() and self.foreground():
            push = b"" if self.title else b"\x1b[22;2t"
            self._put(push + b"\x1b]2;" + fit(self.footer, 200).encode("utf-8", "replace") + b"\x07", now)
            self.title = self.footer
        self.last_draw = now

    def _hide(self) -> bytes:
        clear = CLEAR if self.shown else b""
        self.shown = ""
        return clear

    def foreground(self) -> bool:
        """A job in the background does not draw over the shell's prompt."""
        try:
            return os.tcgetpgrp(self.tty) == os.getpgrp()
        except OSError:  # not the terminal of our session: then there is no shell on it either
            return True


def _by_thread(tty: int) -> int:
    """A terminal that could not be opened anew is written by a thread behind a pipe: its description is not ours to change."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def copy() -> None:
        try:
            while data := os.read(reading, _PIECE):
                while data:
                    data = data[os.write(tty, data) :]
        except OSError:  # the terminal is gone: our end of the pipe says so to the screen
            os.close(reading)

    threading.Thread(target=copy, daemon=True).start()
    return writing


@contextmanager
def _not_stopped_for_writing() -> Iterator[None]:
    """With `stty tostop` a background job that writes is stopped: right for the command's words, wrong for ours."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _columns_of(tty: int) -> int:
    """How wide it is; 0 for a terminal that does not say."""
    try:
        return int(struct.unpack("HHHH", fcntl.ioctl(tty, termios.TIOCGWINSZ, b"\0" * 8))[1])
    except OSError:  # it is gone, or has no size
        return 0


def copy_window_size(tty: int, pty: int) -> bool:
    """Whether it had changed."""
    try:
        size = fcntl.ioctl(tty, termios.TIOCGWINSZ, b"\0" * 8)
        changed = fcntl.ioctl(pty, termios.TIOCGWINSZ, b"\0" * 8) != size
        fcntl.ioctl(pty, termios.TIOCSWINSZ, size)
    except OSError:  # one of the two is gone
        return False
    return changed


# ---------------------------------------------------------------- the process


class PtyProxy:
    """Carries until nobody is left who could write, or, with nothing to carry, until the watcher is gone."""

    def __init__(self, words: socket.socket, log: int, shared: mmap.mmap, routes: dict[int, Screen]) -> None:
        self.words = words
        self.log = log
        self.shared = shared
        self.routes = routes  # master of a pty -> the terminal it leads to
        self.screens = list(routes.values())
        self.own = self.screens[-1] if self.screens else None
        self.command = -1
        self.told_end = self.answered = False
        self.untold = False  # a new window size that the command may not have heard of
        self.end_at = 0.0
        for number in SURVIVED:
            signal.signal(number, self._survive)
        signal.signal(signal.SIGWINCH, self._resize)
        signal.signal(signal.SIGCONT, self._continue)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())

    def run(self) -> None:
        while not self._over():
            ending = self.told_end
            ready = self._wait()
            busy = [master for master in self.routes if master in ready]
            for master in busy:
                self._carry(master)
            now = time.monotonic()
            for screen in self.screens:
                if screen.out in ready:
                    screen.flush(now)
            if self.words.fileno() in ready:
                self._hear()
            for screen in self.screens:
                screen.speak(now)
            if ending and not self.answered:
                self._answer(bool(busy))

    def _over(self) -> bool:
        return self.answered and not self.routes and not any(screen.waiting for screen in self.screens)

    def _wait(self) -> set[int]:
        now = time.monotonic()
        poll = select.poll()
        if self.words.fileno() >= 0:
            poll.register(self.words, select.POLLIN)
        for master, screen in self.routes.items():
            if screen.gone or screen.takes_more(now):
                poll.register(master, select.POLLIN)
        for screen in self.screens:
            if screen.waiting and now >= screen.retry_at:
                poll.register(screen.out, select.POLLOUT)
        until = min([screen.due_at(now) for screen in self.screens], default=float("inf"))
        if self.told_end and not self.answered:
            until = min(until, now + _AGAIN_S if any(screen.waiting for screen in self.screens) else now)
        wait_ms = None if until == float("inf") else max(0.0, until - now) * 1000
        return {fd for fd, _ in poll.poll(wait_ms)}

    def _carry(self, master: int) -> None:
        screen = self.routes[master]
        data, closed = _drain(master)
        if data:
            _add_to(self.shared, 0, len(data))
            self._keep(data)
            screen.carry(data, time.monotonic())
        if closed:
            del self.routes[master]
            os.close(master)

    def _keep(self, data: bytes) -> None:
        """The copy in output.log; a full disk does not stop the command."""
        while data and self.log >= 0:
            try:
                data = data[os.write(self.log, data) :]
            except OSError as error:
                self.log = -1
                if self.own:
                    self.own.say(f"output.log ends here: {error.strerror}", False, time.monotonic())

    # -- the watcher's words

    def _hear(self) -> None:
        while self.words.fileno() >= 0:
            try:
                message = self.words.recv(_PIECE)
            except BlockingIOError:  # no more messages
                return
            except OSError:  # the watcher was killed: that is a message too
                message = b""
            self._obey(message.decode("utf-8", "replace"))

    def _obey(self, message: str) -> None:
        kind, _, text = message.partition(" ")
        now = time.monotonic()
        if kind == "command":
            with suppress(OSError):  # it may have ended already
                self.command = os.pidfd_open(int(text))
            if self.untold:
                self._tell_size()
        elif kind == "end":
            self._end(now)
        elif kind == "":  # the watcher is gone
            self._end(now)
            self.answered = True
            self.words.close()
            self._close(now)
        elif self.own and kind == "footer":
            self.own.footer = text
        elif self.own and kind in ("say", "say!"):
            self.own.say(text, kind == "say!", now)

    def _end(self, now: float) -> None:
        self.told_end = True
        self.end_at = now
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # nobody would continue us now

    def _answer(self, busy: bool) -> None:
        """Tell the watcher that the last bytes are out; a grandchild that goes on writing is not waited for."""
        now = time.monotonic()
        if any(screen.waiting for screen in self.screens) or (busy and now - self.end_at < _DRAIN_S):
            return
        self._close(now)
        if any(screen.waiting for screen in self.screens):
            return
        self.answered = True
        with suppress(OSError):  # the watcher is gone
            self.words.send(b"done")
        self.words.close()

    def _close(self, now: float) -> None:
        for screen in self.screens:
            screen.close(now)

    # -- signals: they come to the whole process group, so what we get, the command got too

    def _survive(self, number: int, _frame: FrameType | None) -> None:
        _add_to(self.shared, number, 1)

    def _resize(self, _number: int, _frame: FrameType | None) -> None:
        """The command heard of the new size before its own terminal had it: tell it once more."""
        changed = [copy_window_size(screen.tty, master) for master, screen in self.routes.items()]
        if any(changed):
            self.untold = True
            self._tell_size()

    def _tell_size(self) -> None:
        """Now, or as soon as we know who the command is."""
        if self.command < 0:
            return
        self.untold = False
        try:
            signal.pidfd_send_signal(self.command, signal.SIGWINCH)
        except OSError:  # it has ended
            self.command = -1

    def _continue(self, number: int, frame: FrameType | None) -> None:
        """After a stop the shell has written over our footer; the window may be another."""
        for screen in self.screens:
            screen.shown = ""
        self._resize(number, frame)


def _drain(master: int) -> tuple[bytes, bool]:
    """What is there to read, and whether the last holder of the other side is gone."""
    pieces: list[bytes] = []
    size = 0
    while size < _PIECE:
        try:
            piece = os.read(master, _PIECE)
        except BlockingIOError:  # all is read
            break
        except OSError:  # EIO: nobody holds the other side any more
            piece = b""
        if not piece:
            return b"".join(pieces), True
        pieces.append(piece)
        size += len(piece)
    return b"".join(pieces), False


def main(words: str, log: str, shared: str, style: str, state: str, *pairs: str) -> None:
    """Numbers of inherited descriptors; each pair is `master:terminal`."""
    ends = [[int(fd) for fd in pair.split(":")] for pair in pairs]
    for master, _ in ends:
        os.set_blocking(master, False)
    routes = {master: Screen(tty, style, line_open=state == "unknown") for master, tty in ends}
    channel = socket.socket(fileno=int(words))
    channel.setblocking(False)
    PtyProxy(channel, int(log), mmap.mmap(int(shared), SHARED_BYTES), routes).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
