"""The way between somebody else's command and the person's terminal.

In:  our own stdout and stderr, and the words of the watcher.
Out: descriptors for the command that behave as the terminal does; its bytes untouched; its end as our own.

A stream that is a file, a pipe or /dev/null is handed on as it is. A stream that is a terminal is replaced by a pty for
output alone, in the same session and process group: the kernel gives Ctrl+C, Ctrl+Z and the window's size to the command
as without us. A process of its own (pty_proxy.py) drains the pty, so that a killed watcher does not harm the run.

Not carried: terminal modes that a command sets through stdout instead of stdin (curses), because its stdout is the pty.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import termios
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from lamplighter.procs import prctl, procfs
from lamplighter.procs.signals import requests_to_stop
from lamplighter.watch import pty_proxy
from lamplighter.watch.process_tree import open_pidfd, send_signal

if TYPE_CHECKING:
    from lamplighter.watch.console import Stream

_WITNESS_S = 0.5
_REVIVALS = 5
_WORDS_LIMIT = 32_000
_PTY_MASTER = os.makedev(5, 2)  # a terminal to isatty(), but the wrong end of it
_TIOCGDEV = 0x80045432  # the kernel's number for the device behind a terminal, /dev/tty too
_TITLED = ("xterm", "screen", "tmux", "rxvt", "alacritty", "foot", "kitty", "wezterm", "konsole", "vte", "gnome")
_FROM_THE_KEYBOARD = (signal.SIGINT, signal.SIGQUIT)


# ---------------------------------------------------------------- descriptors


@dataclass
class _Pty:
    """One terminal and the pty that stands for it."""

    tty: int
    master: int
    slave: int


def _open_pty(fd: int) -> _Pty:
    """A pty that looks like the terminal on `fd`, but for the newlines: those the real terminal makes."""
    master, slave = os.openpty()
    modes = termios.tcgetattr(fd)
    modes[1] &= ~termios.OPOST
    termios.tcsetattr(slave, termios.TCSANOW, modes)
    pty_proxy.copy_window_size(fd, master)
    return _Pty(_open_anew(fd), master, slave)


def _open_anew(fd: int) -> int:
    """The same terminal with a file description of our own: non-blocking there must not mean non-blocking for others."""
    paths = [procfs.own_descriptor(fd)]
    with contextlib.suppress(OSError):  # not the terminal of our session
        os.tcgetpgrp(fd)  # it is the terminal of our session, so it is known by this name too
        paths.append("/dev/tty")
    for path in paths:
        with contextlib.suppress(OSError):  # not by this name
            return os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    return os.dup(fd)  # the proxy then writes by a thread


def _is_terminal(fd: int) -> bool:
    return os.isatty(fd) and os.fstat(fd).st_rdev != _PTY_MASTER


def _which(fd: int) -> bytes:
    """Which terminal it is, whatever name it was opened by."""
    try:
        return fcntl.ioctl(fd, _TIOCGDEV, b"\0" * 4)
    except OSError:  # not Linux, or not a terminal: its device number will do
        return str(os.fstat(fd).st_rdev).encode()


def _never_closed(fd: int) -> None:
    """A closed stdout would lend its number to the next file that is opened."""
    try:
        os.fstat(fd)
    except OSError:  # it is closed
        null = os.open(os.devnull, os.O_RDWR)
        if null != fd:
            os.dup2(null, fd)
            os.close(null)


def _file_sizes() -> dict[tuple[int, int], int]:
    """The sizes of the regular files behind stdout and stderr, each file once."""
    found = [os.fstat(fd) for fd in (1, 2)]
    return {(one.st_dev, one.st_ino): one.st_size for one in found if stat.S_ISREG(one.st_mode)}


def _style() -> str:
    term = os.environ.get("TERM", "dumb")
    if term in ("", "dumb") or os.environ.get("NO_COLOR"):
        return "plain"
    return "title" if term.startswith(_TITLED) else "footer"


# ---------------------------------------------------------------- the terminal


class Terminal:
    """What the watcher holds of it; nothing here blocks for long or raises into the watcher."""

    def __init__(self, output_log: Path) -> None:
        self.output_log = output_log
        self.stdout, self.stderr = 1, 2
        self.is_tty = False
        self._ptys: list[_Pty] = []
        self._log = -1
        self._sizes_before = _file_sizes()
        self._shared_fd = os.memfd_create("lamp-pty-proxy")
        os.truncate(self._shared_fd, pty_proxy.SHARED_BYTES)
        self._shared = mmap.mmap(self._shared_fd, pty_proxy.SHARED_BYTES)
        self._words: socket.socket | None = None
        self._unsent: deque[bytes] = deque()
        self._proxy: subprocess.Popen[bytes] | None = None
        self._revivals = 0
        self._pid = self._pidfd = -1
        self._owed: list[int] = []
        self._witnessed: dict[int, int] = {}
        self._stream: Stream | None = None
        self._own_bytes = 0  # our words in a file that the command's output goes to as well
        self._finished = False

    @classmethod
    def open(cls, output_log: Path) -> Terminal:
        """Open the ptys and start the proxy; before any thread, before the command."""
        for fd in (0, 1, 2):
            _never_closed(fd)
        terminal = cls(output_log)
        try:
            terminal._open_ptys()
        except (OSError, termios.error):  # no pty to be had: the command gets the terminal itself
            terminal._close_ptys()
        terminal._start_proxy("new")
        return terminal

    def _open_ptys(self) -> None:
        by_terminal: dict[bytes, _Pty] = {}
        for fd in (1, 2):
            if not _is_terminal(fd):
                continue
            which = _which(fd)
            if which not in by_terminal:
                by_terminal[which] = _open_pty(fd)
                self._ptys.append(by_terminal[which])
            if fd == 1:
                self.stdout = by_terminal[which].slave
            else:
                self.stderr = by_terminal[which].slave
        if self._ptys:
            self.is_tty = True
            self._log = _append_to(self.output_log)

    def _close_ptys(self) -> None:
        for pty in self._ptys:
            for fd in (pty.tty, pty.master, pty.slave):
                _close(fd)
        self._ptys.clear()
        self.stdout, self.stderr, self.is_tty = 1, 2, False

    def _start_proxy(self, state: str) -> None:
        """A clean process in our group; it may be struck by no signal before it can stand one."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        fds = [theirs.fileno(), self._log, self._shared_fd]
        pairs = [f"{pty.master}:{pty.tty}" for pty in self._ptys]
        shared = [fd for pty in self._ptys for fd in (pty.master, pty.tty)]
        words = [sys.executable, "-I", "-S", pty_proxy.__file__, *map(str, fds), _style(), state, *pairs]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, pty_proxy.SURVIVED)
        try:
            self._proxy = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[fd for fd in fds + shared if fd >= 0],
            )
        except OSError:  # no process to be had
            if state == "new":
                self._close_ptys()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._words = ours

    def started(self, pid: int) -> None:
        """The command lives: only it holds its side of the ptys from now on."""
        for pty in self._ptys:
            _close(pty.slave)
            pty.slave = -1
        self._pidfd = open_pidfd(pid)
        self._pid = pid
        self._send(f"command {pid}", keep=True)
        while self._owed:
            self._forward(self._owed.pop(0))

    # -- words

    def footer(self, text: str) -> None:
        """One line below the command's output, while its own line has ended."""
        self._send(f"footer {text}")

    def say(self, text: str, urgent: bool = False) -> None:
        """Lines that stay."""
        if self.is_tty and not self._finished:
            self._send(f"say{'!' if urgent else ''} {text}", keep=True)
        else:
            self._say_on_stderr(text)

    def _say_on_stderr(self, text: str) -> None:
        if self._stream is None:
            from lamplighter.watch.console import Stream

            self._stream = Stream(2)
        lines = "".join(f"{line}\n" for line in text.splitlines())
        words = ("\n" if _ends_within_a_line(2) else "") + lines
        if stat.S_ISREG(os.fstat(2).st_mode):
            self._own_bytes += len(words.encode("utf-8", "replace"))
        self._stream.write(words)

    def _send(self, message: str, keep: bool = False) -> None:
        """Never waits: a footer that finds no room is forgotten, other words are tried again with the next ones."""
        self._revive()
        if self._words is None:
            return
        self._unsent.append(message.encode("utf-8", "replace")[:_WORDS_LIMIT])
        try:
            while self._unsent:
                self._words.send(self._unsent[0])
                self._unsent.popleft()
        except OSError:  # no room, or the proxy is gone: tried again with the next words
            if not keep or len(self._unsent) > pty_proxy.SAID_LIMIT:
                self._unsent.pop()

    def _revive(self) -> None:
        """Killed by somebody, the proxy is started again: the pty is still ours, and the command has noticed nothing."""
        if self._finished or self._proxy is None or self._proxy.poll() is None or self._revivals >= _REVIVALS:
            return
        self._revivals += 1
        if self._words is not None:
            self._words.close()
        self._start_proxy("unknown")
        if self._pidfd >= 0:
            self._unsent.appendleft(f"command {self._pid}".encode())

    # -- how much, and the end

    def output_bytes(self) -> int:
        """What the command has written, as far as it can be known; -1 if it cannot."""
        self._revive()
        sizes = _file_sizes()
        if not self.is_tty and not sizes:
            return -1
        grown = sum(size - self._sizes_before.get(which, 0) for which, size in sizes.items())
        return max(0, grown - self._own_bytes) + pty_proxy.count_at(self._shared, 0)

    def finish(self, deadline_s: float = 2.0) -> None:
        """The command has ended: let its last bytes and our last words out. A stopped terminal is not waited for."""
        if self._finished:
            return
        deadline = time.monotonic() + deadline_s
        self._send("end", keep=True)
        self._finished = True
        while self._words is not None and self._proxy is not None and self._proxy.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0 or self._answered(left):
                break
        if self._words is not None:
            self._words.close()
        if self._stream is not None:
            self._stream.finish(max(0.0, deadline - time.monotonic()))
        for pty in self._ptys:
            _close(pty.master)
            _close(pty.tty)
        if self._proxy is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may stay for a stopped terminal
                self._proxy.wait(0.2)  # longer only for a stopped terminal, or somebody the command left behind

    def _answered(self, wait_s: float) -> bool:
        """Whether the proxy has said that all is out, or has left."""
        assert self._words is not None
        if self._unsent:
            with contextlib.suppress(OSError):  # no room yet, or the proxy is gone
                self._words.send(self._unsent.popleft())
            wait_s = min(wait_s, 0.05)
        return bool(select.select([self._words], [], [], wait_s)[0]) and not self._unsent

    # -- signals

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """While the command lives, its signals do not end the watcher; around Popen and wait, in the main thread.

        What came to the whole process group (Ctrl+C, a scheduler) the command has already; the proxy is the witness.
        What came to the watcher alone is handed on, once. What was ignored stays so, for the command too (nohup).
        """
        changed = requests_to_stop()
        before = {number: signal.getsignal(number) for number in changed}
        for number in changed:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number in changed:
                signal.signal(number, before[number])

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if not self._came_to_the_group(number):
            if self._pidfd >= 0:
                self._forward(number)
            else:
                self._owed.append(number)

    def _came_to_the_group(self, number: int) -> bool:
        known = self._witnessed.get(number, 0)
        if self._proxy is None or self._proxy.poll() is not None:
            return number in _FROM_THE_KEYBOARD
        deadline = time.monotonic() + _WITNESS_S
        while (seen := pty_proxy.count_at(self._shared, number)) <= known and time.monotonic() < deadline:
            time.sleep(0.002)
        self._witnessed[number] = seen
        return seen > known

    def _forward(self, number: int) -> None:
        send_signal(self._pidfd, number)


def _append_to(path: Path) -> int:
    """output.log, at the start of a line; -1 if it cannot be had, and the terminal goes on without a copy."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            os.write(fd, b"\n")
    except OSError:  # no copy is kept
        return -1
    return fd


def _ends_within_a_line(fd: int) -> bool:
    """Whether it is a regular file whose last byte is not a newline."""
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            return False
        with open(procfs.own_descriptor(fd), "rb") as file:
            return os.pread(file.fileno(), 1, status.st_size - 1) != b"\n"
    except OSError:  # it cannot be read, so nothing is known of its last line
        return False


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # it was closed before
        os.close(fd)


def leave_as(returncode: int) -> int:
    """The command's end as our own: its exit code to return, or death by the same signal."""
    if returncode >= 0:
        return returncode
    with contextlib.suppress(OSError, ValueError):  # nobody reads our output any more
        sys.stdout.flush()
        sys.stderr.flush()
    number = -returncode
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    prctl.leave_no_core()
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no other handler; a number that Python does not know
        signal.signal(number, signal.SIG_DFL)  # SIGKILL has no other
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number
