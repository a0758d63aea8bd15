"""The child's side of the spine: phase, span, tick, metric, note, warn; and the thread that answers the parent.

In:  calls from the code that works, each well under a microsecond or a short line.
Out: a slot (mapped memory that the parent reads), events.rank<r>.jsonl, metrics.jsonl. It never raises into training.

Not started (a notebook, a test): everything works and writes nothing.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import mmap
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, BinaryIO

from lamplighter.errors import STOPPED_EARLY
from lamplighter.procs.procfs import pid_start
from lamplighter.rundir import LineFile, RunDir, write_atomic

# ---------------------------------------------------------------- the slot: one page of mapped memory

SLOT_BYTES = 4096
MAGIC = b"LAMPSLT1"
NUMBERS = {  # name -> (offset, struct code); 8 bytes each, so a reader never sees half a number
    "pid": (8, "Q"),
    "pid_start": (16, "Q"),
    "phase_since_ns": (24, "q"),
    "tick_ns": (32, "q"),
    "ticks": (40, "Q"),
    "done": (48, "d"),
    "total": (56, "d"),
    "step": (64, "Q"),
    "steps": (72, "Q"),
    "tokens": (80, "Q"),
    "durable_step": (88, "Q"),
    "dropped": (96, "Q"),
    "flags": (104, "Q"),
    "loss": (112, "d"),
    "tokens_per_s": (120, "d"),
    "span_since_ns": (128, "q"),
    "mfu": (144, "d"),
    "answered_bytes": (152, "Q"),
    "planned_step_s": (160, "d"),
}
TEXTS = {"phase": (256, 128), "span": (384, 64), "unit": (448, 32), "item": (512, 256), "last_words": (1024, 1024)}
LOCALS = 12
ANSWER_OVERHEAD_BYTES = 16384  # the request, and the pages that a small file makes dirty
FLAGS_AT = NUMBERS["flags"][0]  # one byte each, so that no thread can undo another's
FLAGS = ("saving", "compiling", "collecting garbage", "stopping", "waiting for a person", "writing the result")


@dataclass(frozen=True)
class Slot:
    """What one look at a slot shows."""

    pid: int = 0
    pid_start: int = 0
    phase_since_ns: int = 0
    tick_ns: int = 0
    ticks: int = 0
    done: float = 0.0
    total: float = -1.0
    step: int = 0
    steps: int = 0
    tokens: int = 0
    durable_step: int = 0
    dropped: int = 0
    flags: int = 0
    loss: float = math.nan
    tokens_per_s: float = 0.0
    span_since_ns: int = 0
    mfu: float = 0.0
    answered_bytes: int = 0  # moved by the listener itself: no sign of work
    planned_step_s: float = 0.0  # what a step should take, by the plan
    phase: str = ""
    span: str = ""
    unit: str = ""
    item: str = ""
    last_words: str = ""

    def flag(self, name: str) -> bool:
        return bool(self.flags >> 8 * FLAGS.index(name) & 1)


def read_slot(path: Path) -> Slot | None:
    """One look; None where there is no slot yet."""
    try:
        page = path.read_bytes()
    except OSError:
        return None
    if len(page) < SLOT_BYTES or page[:8] != MAGIC:
        return None
    values: dict[str, Any] = {name: struct.unpack_from("=" + code, page, at)[0] for name, (at, code) in NUMBERS.items()}
    for name, (at, size) in TEXTS.items():
        values[name] = page[at : at + size].split(b"\0", 1)[0].decode("utf-8", "replace")
    return Slot(**values)


class _SlotWriter:
    """Writes numbers and short texts into the page."""

    def __init__(self, path: Path | None) -> None:
        if path is None:
            self.page: mmap.mmap | bytearray = bytearray(SLOT_BYTES)
        else:
            with open(path, "w+b") as file:
                file.write(bytes(SLOT_BYTES))  # real blocks: a hole in a full file system would be a bus error later
                file.flush()
                self.page = mmap.mmap(file.fileno(), SLOT_BYTES)
        self._pack = {name: (struct.Struct("=" + code).pack_into, at) for name, (at, code) in NUMBERS.items()}
        self.set("total", -1.0)
        self.set("loss", math.nan)
        self.page[:8] = MAGIC

    def set(self, name: str, value: float) -> None:
        pack, at = self._pack[name]
        pack(self.page, at, value)

    def text(self, name: str, value: str) -> None:
        at, size = TEXTS[name]
        self.page[at : at + size] = value.encode("utf-8", "replace")[: size - 1].ljust(size, b"\0")


# ---------------------------------------------------------------- state of this process's reporting


class _Reporter:
    """All that a process reports through; module functions below are its face."""

    def __init__(self) -> None:
        self.run: RunDir | None = None
        self.rank = 0
        self.attempt = 1
        self.slot = _SlotWriter(None)
        self.owner = threading.get_ident()
        self.stack: list[Phase | _Span] = []
        self.ledger: dict[str, float] = {}
        self.ledger_at = self.ledger_written = time.monotonic()
        self.ticks = 0
        self.dropped = 0
        self.events: LineFile | None = None
        self.metrics: LineFile | None = None
        self.stop_reason = ""
        self.stop_event = threading.Event()
        self.on_stop: Callable[[], None] | None = None
        self.on_save: Callable[[], object] | None = None
        self.result_fd = -1
        self.answered_bytes = 0
        self.dump: BinaryIO | None = None

    # -- writing

    def write(self, file: LineFile | None, record: Mapping[str, Any]) -> None:
        if file is None:
            return
        try:
            line = json.dumps(record, allow_nan=False, default=str)
        except ValueError:  # NaN and infinity are not JSON
            line = json.dumps(_finite(record), default=str)
        if not file.write(line):  # a full disk must not stop training: the parent reads the count and says so
            self.dropped += 1
            self.slot.set("dropped", self.dropped)

    def event(self, type: str, **fields: Any) -> None:
        self.write(self.events, {"type": type, "t": time.time(), **fields})

    def set_flag(self, name: str, on: bool) -> None:
        self.slot.page[FLAGS_AT + FLAGS.index(name)] = on

    # -- time: every moment belongs to the innermost phase or span

    def charge(self) -> float:
        now = time.monotonic()
        name = self.stack[-1].name if self.stack else "other"
        self.ledger[name] = self.ledger.get(name, 0.0) + now - self.ledger_at
        self.ledger_at = now
        return now

    def write_ledger(self, final: bool = False) -> None:
        self.charge()
        self.ledger_written = self.ledger_at
        seconds = {name: round(value, 4) for name, value in self.ledger.items()}
        self.event("ledger", attempt=self.attempt, final=final, seconds=seconds)


def _finite(value: Any) -> Any:
    """The same value with null in place of every number that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_reporter = _Reporter()


class Phase:
    """A named stretch of work with a count; use as a context manager, call `tick` as work gets done."""

    def __init__(self, name: str, total: float | None, unit: str) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done, self.item = 0.0, ""
        self.started = 0.0

    def __enter__(self) -> Phase:
        r = _reporter
        self.started = time.monotonic()
        if threading.get_ident() == r.owner:
            r.charge()
            r.stack.append(self)
            self._show()
        r.event("phase", name=self.name, state="start", path=self._path(), total=self.total, unit=self.unit)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        r = _reporter
        seconds = time.monotonic() - self.started
        path = self._path()
        if threading.get_ident() == r.owner:
            r.charge()
            while r.stack and r.stack.pop() is not self:
                pass
            _show_innermost()
        state = "end" if error is None else "failed"
        if not r.stack and threading.get_ident() == r.owner:
            r.write_ledger()
        r.event(
            "phase", name=self.name, state=state, path=path, seconds=round(seconds, 4), done=self.done, unit=self.unit
        )

    def tick(self, n: float = 1, item: str | None = None) -> None:
        """`n` more units are done; `item` is what is being worked on now."""
        self.set(self.done + n, item)

    def set(self, done: float, item: str | None = None) -> None:
        """The count as a whole."""
        self.done, self.item = done, self.item if item is None else item
        r = _reporter
        if not r.stack or r.stack[-1] is not self:
            return
        r.slot.set("done", done)
        _count_tick()
        if item is not None:
            r.slot.text("item", item)

    def _path(self) -> str:
        """Where it is; a phase of another thread is beside whatever the main one is in."""
        return _path() if threading.get_ident() == _reporter.owner else f"beside > {self.name}"

    def _show(self) -> None:
        slot = _reporter.slot
        slot.text("phase", _path())
        slot.text("span", "")
        slot.text("unit", self.unit)
        slot.text("item", "")
        slot.set("done", self.done)
        slot.set("total", -1.0 if self.total is None else float(self.total))
        slot.set("phase_since_ns", int(self.started * 1e9))
        slot.set("span_since_ns", 0)
        _count_tick()


class _Span:
    """A short stretch inside a phase: charged in the ledger, visible in the slot, no event."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> _Span:
        r = _reporter
        now = r.charge()
        r.stack.append(self)
        r.slot.text("span", self.name)
        r.slot.set("span_since_ns", int(now * 1e9))
        return self

    def __exit__(self, *_: object) -> None:
        r = _reporter
        r.charge()
        while r.stack and r.stack.pop() is not self:
            pass
        r.slot.text("span", r.stack[-1].name if r.stack and isinstance(r.stack[-1], _Span) else "")


def _path() -> str:
    return " > ".join(item.name for item in _reporter.stack if isinstance(item, Phase))


def _show_innermost() -> None:
    for item in reversed(_reporter.stack):
        if isinstance(item, Phase):
            item._show()
            return


def _count_tick() -> None:
    r = _reporter
    r.ticks += 1
    r.slot.set("ticks", r.ticks)
    r.slot.set("tick_ns", time.monotonic_ns())


# ---------------------------------------------------------------- the face


def phase(name: str, total: float | None = None, unit: str = "") -> Phase:
    """`with report.phase("tokenise", total=n_bytes, unit="B") as p: ... p.tick(len(block))`."""
    return Phase(name, total, unit)


def span(name: str) -> _Span:
    """`with report.span("data wait"): ...`: main thread only; half a microsecond."""
    return _Span(name)


def note(text: str, **fields: Any) -> None:
    """Something that a person wants to read once."""
    _reporter.event("note", text=text, **fields)


def warn(text: str, **fields: Any) -> None:
    """Something that a person should read."""
    _reporter.event("warning", text=text, **fields)


def event(type: str, **fields: Any) -> None:
    """A record for the folder; the parent merges it into events.jsonl and says it where it has words for it."""
    _reporter.event(type, **fields)


def last_words(lines: list[str], code: int, cause: str = "", why: str = "", next: str = "") -> None:
    """An error for people: as an event, and in the slot in case the disk is full; as a verdict where it has a name."""
    _reporter.slot.text("last_words", "\n".join(lines))
    _reporter.event("error", lines=lines, code=code)
    if cause:  # in the words of the error, so it is not said twice
        _reporter.event("verdict", said=True, **asdict(Verdict("broken", cause, why, next, "stop")))


@dataclass(frozen=True)
class Verdict:
    """verdict / why / next: the one form of every judgement, by the child's numbers or the parent's eyes."""

    state: str  # slow, stuck, dead, broken, waste, diverged
    cause: str
    why: str
    next: str
    action: str = "none"
    evidence: tuple[str, ...] = ()
    culprit: Mapping[str, object] = field(default_factory=dict)
    since_s: float = 0.0


def verdict(found: Verdict, **more: Any) -> None:
    """A judgement on numbers, for the parent to say and to keep; `flag=True`: it stands until it is well again."""
    _reporter.event("verdict", **asdict(found), **more)


def flag(name: str, on: bool) -> None:
    """Raise or lower one of FLAGS in the slot."""
    _reporter.set_flag(name, on)


def number(**values: float) -> None:
    """Set numbers of the slot by name (steps, durable_step, ...)."""
    for name, value in values.items():
        _reporter.slot.set(name, value)


def metric(step: int, values: Mapping[str, float]) -> None:
    """One flat record per optimizer step, written at once, unrounded; a non-finite number is null."""
    r = _reporter
    r.write(r.metrics, {"step": step, "attempt": r.attempt, "t": time.time(), **values})
    if (loss := values.get("train/loss")) is not None:
        r.slot.set("loss", loss)
        r.slot.set("step", step)
        r.slot.set("done", step)
        r.slot.set("tokens", int(values.get("train/tokens", 0)))
        r.slot.set("tokens_per_s", values.get("train/tok_per_sec", 0.0))
        r.slot.set("mfu", values.get("train/mfu", 0.0))
        _count_tick()
    if time.monotonic() - r.ledger_written > 5:
        r.write_ledger()


def result(text: str) -> None:
    """What was asked for, straight to the asker's stdout; nobody reading it is no reason to fail."""
    fd = _reporter.result_fd
    data = text.encode("utf-8", "replace")
    while data and fd >= 0:
        try:
            data = data[os.write(fd, data) :]
        except BrokenPipeError:
            _reporter.result_fd = -1
            return


def stopping() -> bool:
    """Whether somebody has asked this process to stop."""
    return _reporter.stop_event.is_set()


def stop_reason() -> str:
    return _reporter.stop_reason


def when_asked(stop: Callable[[], None] | None, save: Callable[[], object] | None) -> None:
    """What to do, in a thread of its own, on a request to stop or to save. None: stop leaves at once, save says no."""
    _reporter.on_stop, _reporter.on_save = stop, save


def spent_s() -> float:
    """Wall time of this run so far, over all attempts; what a budget is measured by."""
    before, since = os.environ.get("LAMP_SPENT_S", "0"), os.environ.get("LAMP_STARTED_MONOTONIC", "")
    return float(before) + (time.monotonic() - float(since) if since else 0.0)


def start(run: RunDir, rank: int = 0, attempt: int = 1, result_fd: int = -1) -> None:
    """Open the slot and the files, and start the listening thread. Called once, by the child's main thread."""
    r = _reporter
    r.run, r.rank, r.attempt, r.result_fd = run, rank, attempt, result_fd
    r.owner = threading.get_ident()
    r.slot = _SlotWriter(run.slot(rank))
    r.slot.set("pid", os.getpid())
    r.slot.set("pid_start", pid_start(os.getpid()))
    r.events = LineFile(run.rank_events(rank))
    if rank == 0:
        r.metrics = LineFile(run.metrics)
    r.ledger_at = r.ledger_written = time.monotonic()
    r.event("hello", pid=os.getpid(), attempt=attempt)
    gc.callbacks.append(_on_gc)
    if threading.current_thread() is threading.main_thread():
        # The last resort for stacks: one thread only, never all_threads, which crashes healthy processes.
        r.dump = open(run.stack_dump(rank), "wb")
        faulthandler.register(signal.SIGURG, file=r.dump, all_threads=False, chain=False)
    _listen(run.fifo(rank))


def close() -> None:
    """The last ledger; nothing is buffered, so there is nothing else to flush."""
    _reporter.write_ledger(final=True)


def leave(code: int) -> None:
    """End this process now, from any thread, with the last word written. Files are atomic, so nothing tears."""
    close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _on_gc(when: str, info: dict[str, int]) -> None:
    if info["generation"] == 2:
        _reporter.set_flag("collecting garbage", when == "start")


# ---------------------------------------------------------------- the thread that answers


def _listen(fifo: Path) -> None:
    """Sleep on the FIFO; signals arrive there too, by the wake-up descriptor, even while the main thread is in C."""
    if not fifo.exists():
        os.mkfifo(fifo, 0o600)
    wake = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    read = os.open(fifo, os.O_RDONLY)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
                signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    threading.Thread(target=_answer_all, args=(read,), name="lamp-listener", daemon=True).start()


def _answer_all(fd: int) -> None:
    pending = b""
    while True:
        pending += os.read(fd, 4096)
        while pending:
            if pending[0] < 32:  # a signal number from the wake-up descriptor
                number, pending = pending[0], pending[1:]
                if number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                    _ask_stop(signal.Signals(number).name)
                continue
            line, newline, rest = pending.partition(b"\n")
            if not newline:
                break
            pending = rest
            try:
                _answer(line.decode("utf-8", "replace"))
            except OSError:  # a full disk: the request goes unanswered, the thread lives on
                _reporter.dropped += 1
                _reporter.slot.set("dropped", _reporter.dropped)


def _answer(request: str) -> None:
    word, _, rest = request.partition(" ")
    if word == "stacks":
        write_stacks(int(rest))
    elif word == "stop":
        _ask_stop(rest)
    elif word == "save":
        save = _reporter.on_save
        if save is None:
            note("nothing to save yet: no step has been made")
        else:
            threading.Thread(target=save, name="lamp-saver", daemon=True).start()


def _ask_stop(reason: str) -> None:
    r = _reporter
    if r.stop_event.is_set():
        return
    r.stop_reason = reason
    r.stop_event.set()
    r.set_flag("stopping", True)
    r.event("stopping", reason=reason)
    action = r.on_stop or (lambda: leave(STOPPED_EARLY))
    threading.Thread(target=action, name="lamp-stopper", daemon=True).start()


def _whole_numbers(frame: FrameType) -> dict[str, int]:
    """The int locals of a frame that is not a library's: loop counters. No other values: they are the user's data."""
    if any(part in frame.f_code.co_filename for part in ("/lib/python3", "site-packages", "<frozen")):
        return {}
    found = {name: value for name, value in frame.f_locals.items() if type(value) is int and abs(value) < 1 << 62}
    return dict(list(found.items())[:LOCALS])


def write_stacks(number: int) -> None:
    """The stacks of all threads, taken under the GIL, as one small JSON file for the parent."""
    r = _reporter
    if r.run is None:
        return
    me = threading.get_ident()
    known = {thread.ident: thread for thread in threading.enumerate()}
    threads: list[dict[str, Any]] = []
    for ident, frame in sys._current_frames().items():
        if ident == me:
            continue
        thread = known.get(ident)
        frames = []
        walk = frame
        while walk is not None:
            frames.append([walk.f_code.co_filename, walk.f_lineno, walk.f_code.co_name, _whole_numbers(walk)])
            walk = walk.f_back  # type: ignore[assignment]
        name = thread.name if thread else "?"
        threads.append(
            {"name": name, "tid": thread.native_id if thread else None, "main": ident == r.owner, "frames": frames}
        )
    threads.sort(key=lambda item: not item["main"])
    answer = json.dumps({"id": number, "threads": threads})
    r.answered_bytes += len(answer) + ANSWER_OVERHEAD_BYTES
    r.slot.set("answered_bytes", r.answered_bytes)
    write_atomic(r.run.stack_answer(r.rank), answer, durable=False)
