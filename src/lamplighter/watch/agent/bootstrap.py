"""The counters inside a watched process: what it works on, where it waits, and a thread that answers for its stacks.

In:  LAMP_WATCH, the folder of the slots; modules of torch, tqdm and multiprocessing, as the script imports them.
Out: p<pid>.slot (mapped memory), p<pid>.ask (a FIFO), p<pid>.stacks.json (the answers), p<pid>.dump (the last resort).

It lives in somebody else's script, so: standard library only, Python 3.9 on, nothing printed, nothing raised, nothing
imported that costs a start-up. Importing this file does nothing; `install` does.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` drags `enum` along
import _thread
import faulthandler
import gc
import mmap
import os
import sys
from time import monotonic_ns

TYPE_CHECKING = False  # `typing` costs a millisecond of everybody's start-up
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Any

if TYPE_CHECKING:
    from lamplighter import slot as layout
else:
    layout = sys.modules.get("_lamplighter_slot")  # loaded by the door, from the file that the watcher reads slots with


class _Descriptor:
    """A descriptor that knows whether its number is still ours: a script that becomes a daemon closes all of them."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.file = os.fstat(fd)[1:3]

    def is_ours(self) -> bool:
        try:
            return os.fstat(self.fd)[1:3] == self.file
        except OSError:  # the script has closed it
            return False

    def close(self) -> None:
        if self.is_ours():
            os.close(self.fd)


_nowhere = layout.SlotWriter()
slot = _nowhere
_stem = ""  # <folder>/p<pid>, once installed
_main_ident = _sampler_ident = 0
_ask: _Descriptor | None = None
_dump: _Descriptor | None = None
_kept: list[object] = []  # pages of parents: freeing one would close a number that may be somebody else's by now


def never_raises(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, but its errors are nobody's business: a change in torch must never break a script."""

    def guarded(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception:  # errors of ours must never reach the script
            return None

    return guarded


# ---------------------------------------------------------------- stacks: the thread that answers

_ANSWER_BYTES = 1 << 16
_answers: mmap.mmap | None = None
_answered = 0  # bytes of the last answer
_own_stacks: Any = None


def _answer(number: int, stem: str) -> None:
    """Write the answer into mapped memory, its id last: a system call would give the GIL away, and each costs a turn."""
    global _answers, _answered, _own_stacks
    if _own_stacks is None:
        _own_stacks = _load("own_stacks")  # few processes are ever asked
    head, blank = (f'{{"id":{word:>20},'.encode() for word in (number, -1))
    body = f'"answer":{_own_stacks.answer_as_json(_main_ident)}}}'.encode("utf-8", "replace")
    slot.add("answers")  # once before and once after: what is written in between is none of the script's work
    if _answers is None or len(head) + len(body) > len(_answers):
        _kept.append(_answers)
        _answers = layout.map_file(stem + ".stacks", ".json", (head + body).ljust(_ANSWER_BYTES + len(body)))
        _answered = len(head) + len(body)
        slot.add("answers")
        return
    end = len(head) + len(body)
    _answers[: len(head)] = blank
    _answers[len(head) : end] = body
    if end < _answered:  # no more pages are made dirty than the answer needs
        _answers[end:_answered] = b" " * (_answered - end)
    _answered = end
    _answers[: len(head)] = head
    slot.add("answers")


def _listen(ask: _Descriptor, stem: str) -> None:
    """Sleep on the FIFO; each line `stacks <id>` is a question."""
    pending = b""
    while ask.is_ours():
        try:
            pending += os.read(ask.fd, 4096)
        except OSError:  # the script has closed it: nobody can ask any more
            return
        *lines, pending = pending.split(b"\n")
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"stacks" and number.isdigit():
                never_raises(_answer)(int(number), stem)


def _start_listening(stem: str) -> None:
    """A raw thread, unknown to `threading`, with a small stack, that takes no signal away from the script's threads."""
    global _ask, _sampler_ident
    path = stem + ".ask"
    if os.path.exists(path):
        os.unlink(path)
    os.mkfifo(path, 0o600)
    _ask = _Descriptor(os.open(path, os.O_RDWR))
    size = _thread.stack_size(1 << 18)
    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, _signal.valid_signals())
    try:
        _sampler_ident = _thread.start_new_thread(_listen, (_ask, stem))
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, mask)
        _thread.stack_size(size)


def _open_dump(stem: str) -> None:
    """The last resort for a silent process: SIGURG, one thread only. After a fork the same number gets a new file."""
    global _dump
    fd = os.open(stem + ".dump", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    if _dump is not None and _dump.is_ours():
        os.dup2(fd, _dump.fd, inheritable=False)
        os.close(fd)
        _dump = _Descriptor(_dump.fd)
    elif _dump is None and _signal.getsignal(_signal.SIGURG) == _signal.SIG_DFL:
        faulthandler.register(_signal.SIGURG, file=fd, all_threads=False, chain=False)
        _dump = _Descriptor(fd)
    else:
        os.close(fd)


# ---------------------------------------------------------------- modules, counted in right after they were executed

_WATCHED = {
    "torch.optim.optimizer",
    "torch.utils.data.dataloader",
    "torch.utils.data._utils.fetch",
    "torch.distributed.distributed_c10d",
    "torch._dynamo.callback",
    "tqdm.std",
    "multiprocessing.reduction",
}
_load: Any = None  # how a file beside this one is loaded: the door knows
_counters: Any = None
forgets: list[Callable[[], None]] = []  # what the counters have to forget in a child
named_error = 0  # the exception that the counters have already written about


@never_raises
def _count_in(module: Any, name: str) -> None:
    """The counters are a file of their own, loaded when the first of these modules is."""
    global _counters
    if _counters is None:
        _counters = _load("hooks")
    _counters.COUNTED[name](module)


class _Loader:
    """The module's own loader, and our counters after it; it leaves the module as if it had never been here."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader, self._name = loader, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _count_in(module, self._name)


class _Finder:
    """Answers for the few modules that we count in, with what the other finders say; no import is caused."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _WATCHED:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, name)
                return spec
        return None


# ---------------------------------------------------------------- phases that the script declares itself

_phases: list[list[Any]] = []  # name, total, unit, done, item, since


def _show_phase() -> None:
    name, total, unit, done, item, since = _phases[-1] if _phases else ("", None, "", 0.0, "", 0)
    slot.text("phase", " > ".join(phase[0] for phase in _phases) if name else "")
    slot.text("unit", unit)
    slot.text("phase_item", item)
    slot.set("done", done)
    slot.set("total", -1.0 if total is None else float(total))
    slot.set("phase_since_ns", since)


def _phase_begin(name: str, total: float | None = None, unit: str = "") -> None:
    _phases.append([str(name), total, str(unit), 0.0, "", monotonic_ns()])
    _show_phase()


def _phase_tick(n: float = 1, item: str | None = None) -> None:
    if not _phases:
        return
    phase = _phases[-1]
    phase[3] += n
    slot.set("done", phase[3])
    if item is not None:
        phase[4] = str(item)
        slot.text("phase_item", phase[4])


def _phase_end() -> None:
    if _phases:
        _phases.pop()
        _show_phase()


phase_begin, phase_tick, phase_end = never_raises(_phase_begin), never_raises(_phase_tick), never_raises(_phase_end)

# ---------------------------------------------------------------- garbage, errors, forks


def _on_gc(when: str, info: Mapping[str, int]) -> None:
    if info["generation"] == 2:
        slot.set("gc_since_ns", monotonic_ns())
        slot.set("collecting", int(when == "start"))


@never_raises
def note_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None, prefix: str = "") -> None:
    if id(error) == named_error:
        return  # the slot already says which part could not be pickled
    frame = None
    while trace is not None:
        if frame is None or layout.kind_of(trace.tb_frame.f_code.co_filename) == layout.USERS:
            frame = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    text = str(error)
    frame = _line_in_worker(text) or frame
    where = f" ({frame[0][-200:]}:{frame[1]})" if frame is not None else ""
    text = " ".join(text.split())
    if len(text) > 280:  # the end says more than the middle
        text = f"{text[:100]} ... {text[-175:]}"
    slot.text("error", f"{prefix}{kind.__name__}: {text}{where}")


def _line_in_worker(text: str) -> tuple[str, int] | None:
    """The user's innermost line in the traceback that a DataLoader puts into the message of a worker's error."""
    found = None
    for row in text.splitlines() if "Original Traceback" in text else ():
        before, _, rest = row.strip().partition('File "')
        file, _, number = rest.partition('", line ')
        if not before and number and layout.kind_of(file) == layout.USERS:
            found = (file, int(number.partition(",")[0]))
    return found


def _wrap_excepthook() -> None:
    old = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            old(kind, error, trace)
        finally:
            note_error(kind, error, trace)

    sys.excepthook = excepthook


_beside = ""


@never_raises
def _before_fork() -> None:
    """Where the other threads are now: a lock that one of them holds will never be released in the child."""
    global _beside
    _beside = ""
    frames = sys._current_frames() if "threading" in sys.modules else {}
    others = [ident for ident in frames if ident not in (_sampler_ident, _thread.get_ident())]
    if others:
        known = dict(getattr(sys.modules["threading"], "_active", {}))
        names = [getattr(known.get(ident), "name", "?") for ident in others[:3]]
        _beside = "; ".join(
            f"{layout.place(layout.users_frame(frames[ident]))} ({name})" for ident, name in zip(others, names)
        )


@never_raises
def _after_fork() -> None:
    """A child is a process of its own: new slot, counters at zero, its own thread to answer."""
    global slot, _answers
    _kept.extend((slot, _answers))
    slot, _answers = _nowhere, None  # never the parent's pages, not even if the next line fails
    if _ask is not None:
        _ask.close()
    _phases.clear()
    for forget in forgets:
        forget()
    _open(os.path.dirname(_stem), forked=True)
    slot.text("forked_beside", _beside)


# ---------------------------------------------------------------- install


def _read_own(name: str) -> bytes:
    """What the kernel says of this process; nothing where there is no /proc."""
    try:
        fd = os.open("/proc/self/" + name, os.O_RDONLY)
    except OSError:  # macOS: the slot does without
        return b""
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _started_ticks() -> int:
    fields = _read_own("stat").rpartition(b")")[2].split()
    return int(fields[19]) if fields else 0


def _command() -> str:
    return _read_own("cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()[:200]


def number_of(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else default


def _new_slot(stem: str, forked: bool) -> layout.SlotWriter:
    """The slot of this process, with all that is known from the start."""
    blank = layout.SlotWriter()
    facts = {
        "pid": os.getpid(), "pid_start": _started_ticks(), "ppid": os.getppid(), "forked": forked,
        "hello_ns": monotonic_ns(), "rank": number_of("RANK", -1), "world": number_of("WORLD_SIZE", 0),
    }  # fmt: skip
    for name, value in facts.items():
        blank.set(name, value)
    blank.text("span", "compute")  # all that a script does is its work
    blank.text("python", ".".join(str(part) for part in sys.version_info[:3]))
    blank.text("argv", _command())
    return blank.publish(stem)


def _open(folder: str, forked: bool) -> None:
    global slot, _stem, _main_ident
    stem = f"{folder}/p{os.getpid()}"
    slot = _new_slot(stem, forked)
    _stem, _main_ident = stem, _thread.get_ident()
    never_raises(_start_listening)(stem)
    never_raises(_open_dump)(stem)


@never_raises
def install(load: Callable[[str], Any]) -> None:
    """Take part in the watch that LAMP_WATCH names. A folder that cannot be written: nothing happens at all."""
    global _load
    if _stem:
        return
    _load = load
    layout.hidden_folders.append(os.path.dirname(os.path.abspath(__file__)) + os.sep)
    _open(os.path.abspath(os.environ["LAMP_WATCH"]), forked=False)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
    gc.callbacks.append(_on_gc)
    _wrap_excepthook()
    sys.meta_path.insert(0, _Finder())
    for name in _WATCHED.intersection(sys.modules):
        _count_in(sys.modules[name], name)
