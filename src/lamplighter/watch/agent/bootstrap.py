"""The counters inside a watched process: what it works on, where it waits, and a thread that answers for its stacks.

In:  LAMP_WATCH, the folder of the slots; modules of torch, tqdm and multiprocessing, as the script imports them.
Out: p<pid>.slot (mapped memory), p<pid>.ask (a FIFO), p<pid>.stacks.json (the answers), p<pid>.dump (the last resort).

It lives in somebody else's script, so: standard library only, Python 3.9 on, nothing printed, nothing raised, nothing
imported that costs a start-up. Importing this file does nothing; `install` does. The watcher imports it for its tables.
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
    from types import FrameType, TracebackType
    from typing import Any

# ---------------------------------------------------------------- the slot: two pages of mapped memory

SLOT_BYTES = 8192
MAGIC = b"LAMPPRC1"
_WHOLE = [
    "pid",
    "pid_start",
    "ppid",
    "forked",
    "hello_ns",
    "rank",
    "world",
    "answers",
    "answered_bytes",
    "steps",
    "step_ns",
    "step_first_ns",
    "optimizers",
    "fetches",
    "in_fetch",
    "fetch_since_ns",
    "fetch_wait_ns",
    "loader_workers",
    "wait_worker",
    "loader_len",
    "items",
    "in_item",
    "item_since_ns",
    "worker",
    "coll_seq",
    "in_coll",
    "coll_since_ns",
    "compiles",
    "compiling",
    "compile_since_ns",
    "recompiles",
    "bar_n",
    "bar_total",
    "bar_ns",
    "collecting",
    "gc_since_ns",
    "phase_since_ns",
    "failed",
]
_REAL = ("done", "total")
_SIZES = {
    "phase": 128, "unit": 32, "phase_item": 256, "item": 128, "coll": 128, "coll_at": 256, "compile_id": 32, "bar": 128,
    "error": 512, "forked_beside": 512, "python": 32, "argv": 256,
}  # fmt: skip
NUMBERS: dict[str, tuple[int, str]] = {  # name -> (offset, struct code); 8 bytes each: nobody sees half a number
    name: (16 + 8 * place, "d" if name in _REAL else "q") for place, name in enumerate((*_WHOLE, *_REAL))
}
TEXTS: dict[str, tuple[int, int]] = {}  # name -> (offset, bytes)
_at = 1024
for _name, _size in _SIZES.items():
    TEXTS[_name] = (_at, _size)
    _at += _size
AT = {name: offset // 8 for name, (offset, _) in NUMBERS.items()}
UNKNOWN = {"rank": -1, "worker": -1, "wait_worker": -1, "loader_len": -1, "bar_total": -1}  # all others start at zero


class _Slot:
    """Writes numbers and short texts into the page."""

    __slots__ = ("page", "reals", "wholes")

    def __init__(self, page: mmap.mmap | bytearray) -> None:
        self.page = page
        view = memoryview(page)
        self.wholes, self.reals = view.cast("q"), view.cast("d")

    def set(self, name: str, value: int) -> None:
        self.wholes[AT[name]] = value

    def add(self, name: str, value: int = 1) -> None:
        self.wholes[AT[name]] += value

    def get(self, name: str) -> int:
        return self.wholes[AT[name]]

    def real(self, name: str, value: float) -> None:
        self.reals[AT[name]] = value

    def text(self, name: str, value: str) -> None:
        at, size = TEXTS[name]
        self.page[at : at + size] = value.encode("utf-8", "replace")[: size - 1].ljust(size, b"\0")


class _Descriptor:
    """A descriptor that knows whether its number is still ours: a script that becomes a daemon closes all of them."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.file = os.fstat(fd)[1:3]

    def is_ours(self) -> bool:
        try:
            return os.fstat(self.fd)[1:3] == self.file
        except OSError:
            return False

    def close(self) -> None:
        if self.is_ours():
            os.close(self.fd)


_nowhere = _Slot(bytearray(SLOT_BYTES))
slot = _nowhere
_stem = ""  # <folder>/p<pid>, once installed
_main_ident = _sampler_ident = 0
_ask: _Descriptor | None = None
_dump: _Descriptor | None = None
_kept: list[object] = []  # pages of parents: freeing one would close a number that may be somebody else's by now


def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, but its errors are nobody's business: a change in torch must never break a script."""

    def guarded(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception:
            return None

    return guarded


# ---------------------------------------------------------------- the user's lines

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
USERS, _LIBRARY, _HIDDEN = 0, 1, 2
_kinds: dict[str, int] = {}


def kind_of(file: str) -> int:
    """Whose file this is: the user's, some library's, or of no interest (Python, torch, us)."""
    kind = _kinds.get(file)
    if kind is None:
        if "/site-packages/" in file or "/dist-packages/" in file:
            kind = _HIDDEN if "/torch/" in file else _LIBRARY
        elif (
            "/lib/python3" in file
            or "/lib64/python3" in file
            or file.startswith((_HERE, "<frozen", sys.prefix + "/bin/"))
        ):
            kind = _HIDDEN
        else:
            kind = _LIBRARY if file.startswith("<") else USERS
        _kinds[file] = kind
    return kind


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code; else of a library; else the innermost."""
    second = None
    walk = frame
    while walk is not None:
        kind = kind_of(walk.f_code.co_filename)
        if kind == USERS:
            return walk
        if kind == _LIBRARY and second is None:
            second = walk
        walk = walk.f_back
    return second or frame


def place(frame: FrameType | None) -> str:
    return f"{frame.f_code.co_filename[-200:]}:{frame.f_lineno}" if frame is not None else ""


# ---------------------------------------------------------------- stacks: the thread that answers

_ESCAPES = {**{code: f"\\u{code:04x}" for code in range(32)}, ord('"'): '\\"', ord("\\"): "\\\\"}
_DEEPEST = 256
_ANSWER_BYTES = 1 << 16
_answers: mmap.mmap | None = None
_SNAPSHOT_WORDS = {"locals", "vars", "eval", "exec", "dir"}


def _quote(text: str) -> str:
    return '"' + text.translate(_ESCAPES) + '"'


def _whole_numbers(frame: FrameType) -> dict[str, int]:
    """The integers among a frame's variables, at most 12: enough to see a loop advance, and no data of the user's.

    Up to Python 3.12 `f_locals` of a function is a copy that stays with the frame. It would keep the user's tensors
    alive, so it is emptied again; and frames where the script or a debugger may hold that same copy are left alone.
    """
    code = frame.f_code
    in_function = bool(code.co_flags & 1)
    copies = in_function and sys.version_info < (3, 13)
    if copies and (
        frame.f_trace is not None
        or frame.f_lineno == code.co_firstlineno
        or not _SNAPSHOT_WORDS.isdisjoint(code.co_names)
    ):
        return {}
    values: Mapping[str, Any] = frame.f_locals
    if not in_function and values is not frame.f_globals:
        return {}
    found: dict[str, int] = {}
    for name in code.co_varnames + code.co_cellvars if in_function else code.co_names:
        value: Any = values.get(name)
        if type(value) in (int, bool) and abs(value) < 1 << 63 and len(found) < 12:
            found[name] = value
    if copies:
        values.clear()  # type: ignore[attr-defined]
    return found


def _frames_as_json(frame: FrameType) -> str:
    rows: list[str] = []
    walk: FrameType | None = frame
    while walk is not None and len(rows) < _DEEPEST:
        rows.append(f"[{_quote(walk.f_code.co_filename)},{walk.f_lineno},{_quote(walk.f_code.co_name)}]")
        walk = walk.f_back
    return "[" + ",".join(rows) + "]"


def _thread_as_json(ident: int, frame: FrameType, known: Mapping[int, Any]) -> str:
    is_main = ident == _main_ident
    thread = known.get(ident)
    name = str(thread.name) if thread is not None else "MainThread" if is_main else "?"
    tid = getattr(thread, "native_id", None) or (os.getpid() if is_main else "null")
    users = users_frame(frame)
    numbers = _whole_numbers(users) if users is not None and kind_of(users.f_code.co_filename) != _HIDDEN else {}
    values = ",".join(f"{_quote(name)}:{str(value).lower()}" for name, value in numbers.items())
    return (
        f'{{"name":{_quote(name)},"tid":{tid},"main":{str(is_main).lower()},'
        f'"frames":{_frames_as_json(frame)},"locals":{{{values}}}}}'
    )


def _threads_as_json() -> list[str]:
    """All threads but ours, main thread first. The frames are let go on return: they hold the user's variables."""
    threading = sys.modules.get("threading")
    known = dict(getattr(threading, "_active", {}))
    frames = sys._current_frames()
    frames.pop(_thread.get_ident(), None)
    idents = sorted(frames, key=lambda ident: ident != _main_ident)
    return [_thread_as_json(ident, frames[ident], known) for ident in idents]


def _answer(number: int, stem: str) -> None:
    """Write the answer into mapped memory, its id last: a system call would give the GIL away, and each costs a turn.

    By hand: an import in this thread could hold a lock while the script forks.
    """
    global _answers
    head, blank = (f'{{"id":{word:>20},'.encode() for word in (number, -1))
    body = f'"threads":[{",".join(_threads_as_json())}]}}'.encode("utf-8", "replace")
    slot.add("answers")
    slot.add("answered_bytes", len(head) + len(body))
    if _answers is None or len(head) + len(body) > len(_answers):
        _kept.append(_answers)
        _answers = _new_file(stem + ".stacks", ".json", (head + body).ljust(_ANSWER_BYTES + len(body)))
        return
    _answers[: len(head)] = blank
    _answers[len(head) :] = body.ljust(len(_answers) - len(head))
    _answers[: len(head)] = head


def _new_file(stem: str, ending: str, content: bytes | bytearray) -> mmap.mmap:
    """Written whole, then named: nobody sees half of it. Real blocks: a hole on a full disk is a bus error later."""
    fd = os.open(stem + ".new", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        if os.write(fd, content) != len(content):
            raise OSError("the disk is full")
        page = mmap.mmap(fd, len(content))
    finally:
        os.close(fd)
    os.rename(stem + ".new", stem + ending)
    return page


def _listen(ask: _Descriptor, stem: str) -> None:
    """Sleep on the FIFO; each line `stacks <id>` is a question."""
    pending = b""
    while ask.is_ours():
        try:
            pending += os.read(ask.fd, 4096)
        except OSError:
            return
        *lines, pending = pending.split(b"\n")
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"stacks" and number.isdigit():
                quiet(_answer)(int(number), stem)


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


@quiet
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
    slot.real("done", done)
    slot.real("total", -1.0 if total is None else float(total))
    slot.set("phase_since_ns", since)


def _phase_begin(name: str, total: float | None = None, unit: str = "") -> None:
    _phases.append([str(name), total, str(unit), 0.0, "", monotonic_ns()])
    _show_phase()


def _phase_tick(n: float = 1, item: str | None = None) -> None:
    if not _phases:
        return
    phase = _phases[-1]
    phase[3] += n
    slot.real("done", phase[3])
    if item is not None:
        phase[4] = str(item)
        slot.text("phase_item", phase[4])


def _phase_end() -> None:
    if _phases:
        _phases.pop()
        _show_phase()


phase_begin, phase_tick, phase_end = quiet(_phase_begin), quiet(_phase_tick), quiet(_phase_end)

# ---------------------------------------------------------------- garbage, errors, forks


def _on_gc(when: str, info: Mapping[str, int]) -> None:
    if info["generation"] == 2:
        slot.set("gc_since_ns", monotonic_ns())
        slot.set("collecting", when == "start")


@quiet
def note_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None, prefix: str = "") -> None:
    if id(error) == named_error:
        return  # the slot already says which part could not be pickled
    frame = None
    while trace is not None:
        if frame is None or kind_of(trace.tb_frame.f_code.co_filename) == USERS:
            frame = (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    where = f" ({frame[0][-200:]}:{frame[1]})" if frame is not None else ""
    text = " ".join(str(error).split())
    if len(text) > 280:  # the end says more than the middle
        text = f"{text[:100]} ... {text[-175:]}"
    slot.text("error", f"{prefix}{kind.__name__}: {text}{where}")


def _wrap_excepthook() -> None:
    old = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            old(kind, error, trace)
        finally:
            note_error(kind, error, trace)

    sys.excepthook = excepthook


_beside = ""


@quiet
def _before_fork() -> None:
    """Where the other threads are now: a lock that one of them holds will never be released in the child."""
    global _beside
    _beside = ""
    frames = sys._current_frames() if "threading" in sys.modules else {}
    others = [ident for ident in frames if ident not in (_sampler_ident, _thread.get_ident())]
    if others:
        known = dict(getattr(sys.modules["threading"], "_active", {}))
        names = [getattr(known.get(ident), "name", "?") for ident in others[:3]]
        _beside = "; ".join(f"{place(users_frame(frames[ident]))} ({name})" for ident, name in zip(others, names))


@quiet
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


def _started_ticks() -> int:
    fd = os.open("/proc/self/stat", os.O_RDONLY)
    try:
        return int(os.read(fd, 4096).rpartition(b")")[2].split()[19])
    finally:
        os.close(fd)


def _command() -> str:
    fd = os.open("/proc/self/cmdline", os.O_RDONLY)
    try:
        return os.read(fd, 800).replace(b"\0", b" ").decode("utf-8", "replace").strip()[:200]
    finally:
        os.close(fd)


def _number_of(name: str, default: int) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else default


def _new_slot(stem: str, forked: bool) -> _Slot:
    """The slot of this process, with all that is known from the start."""
    blank = _Slot(bytearray(SLOT_BYTES))
    facts = {
        **UNKNOWN, "pid": os.getpid(), "pid_start": _started_ticks(), "ppid": os.getppid(), "forked": forked,
        "hello_ns": monotonic_ns(), "rank": _number_of("RANK", -1), "world": _number_of("WORLD_SIZE", 0),
    }  # fmt: skip
    for name, value in facts.items():
        blank.set(name, value)
    blank.real("total", -1.0)
    blank.text("python", ".".join(str(part) for part in sys.version_info[:3]))
    blank.text("argv", _command())
    blank.page[:8] = MAGIC
    return _Slot(_new_file(stem, ".slot", blank.page[:]))


def _open(folder: str, forked: bool) -> None:
    global slot, _stem, _main_ident
    stem = f"{folder}/p{os.getpid()}"
    slot = _new_slot(stem, forked)
    _stem, _main_ident = stem, _thread.get_ident()
    quiet(_start_listening)(stem)
    quiet(_open_dump)(stem)


@quiet
def install(load: Callable[[str], Any]) -> None:
    """Take part in the watch that LAMP_WATCH names. A folder that cannot be written: nothing happens at all."""
    global _load
    if _stem:
        return
    _load = load
    _open(os.path.abspath(os.environ["LAMP_WATCH"]), forked=False)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
    gc.callbacks.append(_on_gc)
    _wrap_excepthook()
    sys.meta_path.insert(0, _Finder())
    for name in _WATCHED.intersection(sys.modules):
        _count_in(sys.modules[name], name)
