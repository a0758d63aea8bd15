"""A person at a terminal, for tests: a pty with a shell's stand-in on it, hands to type, and eyes that may look away."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

from running import clean_env, wait_for

ROWS, COLUMNS = 30, 101

# What lamp watch does, and no more: words come from a file of lines `seconds kind text`, timed from the start.
DRIVER = """
import subprocess, sys, time
from pathlib import Path
from lamplighter.watch.terminal import Terminal, leave_as
folder, *command = sys.argv[1:]
folder = Path(folder)
terminal = Terminal.open(folder / "output.log")
with terminal.signals():
    child = subprocess.Popen(command, stdout=terminal.stdout, stderr=terminal.stderr)
    terminal.started(child.pid)
    start = time.monotonic()
    plan = folder / "words"
    words = [line.split(" ", 2) for line in plan.read_text().splitlines()] if plan.exists() else []
    (folder / "pids").write_text(f"{child.pid} {terminal._proxy.pid}")
    while child.poll() is None:
        while words and time.monotonic() - start > float(words[0][0]):
            _, kind, text = words.pop(0)
            terminal.footer(text) if kind == "footer" else terminal.say(text, urgent=kind == "say!")
        (folder / "bytes").write_text(str(terminal.output_bytes()))
        time.sleep(0.02)
    for _, kind, text in words:
        terminal.say(text)
    terminal.finish()
    (folder / "bytes").write_text(str(terminal.output_bytes()))
sys.exit(leave_as(child.returncode))
"""

# What a shell does: a session, a job in a group of its own in the foreground, its end or stop reported on a pipe.
LEADER = """
import fcntl, os, signal, sys, termios
report, control, nohup = (int(word) for word in sys.argv[1:4])
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
job = os.fork()
if job == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    os.execvp(sys.argv[4], sys.argv[4:])
while True:
    _, status = os.waitpid(job, os.WUNTRACED | os.WCONTINUED)
    os.write(report, f"{job} {status}\\n".encode())
    if not os.WIFSTOPPED(status) and not os.WIFCONTINUED(status):
        break
os.read(control, 1)
"""


class Person:
    """Starts a command at a terminal of 101 columns and reads what comes, unless told to look away."""

    def __init__(self, *command: str, folder: Path | None = None, looking: bool = True, nohup: bool = False,
                 env: dict[str, str] | None = None, shell: bool = False, **streams: Any) -> None:  # fmt: skip
        """With a folder the command is watched; `stdout=` and `stderr=` may lead elsewhere than to the terminal."""
        self.folder = folder
        words = [sys.executable, "-c", DRIVER, str(folder), *command] if folder else list(command)
        self.master, slave = pty.openpty()
        self.resize(COLUMNS)
        self.seen = bytearray()
        self.looking = threading.Event()
        if looking:
            self.looking.set()
        self.report, report = os.pipe()
        control, self.control = os.pipe()
        leader = [] if shell else [sys.executable, "-c", LEADER, str(report), str(control), str(int(nohup))]
        self.leader = subprocess.Popen(
            [*leader, *words], start_new_session=True, pass_fds=[report, control], env=clean_env(**(env or {})),
            **{"stdin": slave, "stdout": slave, "stderr": slave, **streams},
            preexec_fn=(lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)) if shell else None,
        )  # fmt: skip
        for fd in (slave, report, control):
            os.close(fd)
        self.reader = threading.Thread(target=self._look, daemon=True)
        self.reader.start()

    def _look(self) -> None:
        while True:
            self.looking.wait()
            try:
                data = os.read(self.master, 65536)
            except OSError:
                return
            if not data:
                return
            self.seen += data

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))

    def hang_up(self) -> None:
        """Close the terminal: the reader sits in a read, which holds it open until the next byte has come."""
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, self.master)
        os.close(null)
        self.reader.join(5)

    def watch_in_bash(self, script: Path, after: str = "") -> None:
        """As a person would type it."""
        self.folder = script.parent
        driver = self.folder / "driver.py"
        driver.write_text(DRIVER)
        self.type(f"{sys.executable} {driver} {self.folder} {sys.executable} -u {script} {after}\n".encode())

    def sees(self, what: bytes, deadline_s: float = 20) -> None:
        try:
            wait_for(lambda: what in self.seen, deadline_s)
        except AssertionError:
            raise AssertionError(f"{what!r} did not appear; so far: {bytes(self.seen[-1500:])!r}") from None

    def status(self) -> tuple[int, int]:
        """The job's pid and the next thing that a shell would hear of it."""
        line = b""
        while not line.endswith(b"\n"):
            assert select.select([self.report], [], [], 60)[0], f"the job goes on and on: {bytes(self.seen[-500:])!r}"
            line += os.read(self.report, 1)
        pid, status = line.split()
        return int(pid), int(status)

    def code(self) -> int:
        """How the job ended, as Popen says it; stops and continuations before that are passed over."""
        while True:
            _, status = self.status()
            if os.WIFEXITED(status) or os.WIFSIGNALED(status):
                return os.waitstatus_to_exitcode(status)

    def others(self) -> list[int]:
        """Who else lives in this session."""
        return [pid for pid in session_members(self.leader.pid) if pid != self.leader.pid]

    def pids(self) -> tuple[int, int]:
        """The command and the proxy."""
        assert self.folder
        path = self.folder / "pids"
        wait_for(lambda: path.exists() and path.read_text().count(" ") == 1)
        command, proxy = path.read_text().split()
        return int(command), int(proxy)

    def watcher(self) -> int:
        return int(Path(f"/proc/{self.pids()[0]}/stat").read_text().rsplit(")", 1)[1].split()[1])

    def finish(self) -> bytes:
        """Let the shell go; nothing may be left running. All that the person saw."""
        wait_for(lambda: not self.others(), 15)
        self.leave()
        return bytes(self.seen)

    def leave(self) -> None:
        for fd in (self.control, self.report):
            if fd >= 0:
                os.close(fd)
        self.control = self.report = -1
        self.leader.wait(10)
        self.reader.join(5)

    def clean_up(self) -> None:
        for pid in [*session_members(self.leader.pid), self.leader.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.looking.set()
        self.leader.wait(10)


def session_members(leader: int) -> list[int]:
    found = []
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit():
            try:
                fields = (proc / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(proc.name))
    return found


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "gone"


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ---------------------------------------------------------------- a screen, as small as the tests need


_TOKEN = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|([\r\n])|([^\r\n\x1b])")


class Page:
    """Rows of text, made of what came: carriage return, newline, erase line, cursor up, and letters."""

    def __init__(self, data: bytes = b"") -> None:
        self.rows, self.row, self.column = [""], 0, 0
        for match in _TOKEN.finditer(data.decode(errors="replace")):
            _, code, move, letter = match.groups()
            if move == "\r":
                self.column = 0
            elif move == "\n":
                self.row += 1
                self.rows += [""] * (self.row + 1 - len(self.rows))
            elif code == "K":
                self.rows[self.row] = "" if match[1] == "2" else self.rows[self.row][: self.column]
            elif code == "A":
                self.row = max(0, self.row - int(match[1] or 1))
            elif letter:
                text = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = text[: self.column] + letter + text[self.column + 1 :]
                self.column += 1

    def text(self) -> list[str]:
        return [row.rstrip() for row in self.rows]


def sleep_until_quiet(person: Person, quiet_s: float = 0.4) -> None:
    """Until nothing new has come for a while."""
    size, since = -1, time.monotonic()
    while time.monotonic() - since < quiet_s:
        if len(person.seen) != size:
            size, since = len(person.seen), time.monotonic()
        time.sleep(0.02)
