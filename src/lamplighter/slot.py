"""What a process tells about itself from inside: its slot, mapped memory that the watcher reads.

In:  counters and short texts of a process that reports: ours (report.py), or a watched one (watch/agent).
Out: one page per process, `<name>.slot`, written by SlotWriter and read by `read_slot`; whose line a frame is.

The class Slot is the only description of the layout; the offsets follow from its fields. The agent loads this file into
somebody else's Python, so: standard library only, Python 3.9 on, no import that costs a start-up (no struct, json, typing,
dataclasses).
"""

from __future__ import annotations

import mmap
import os
import sys

TYPE_CHECKING = False  # `typing` costs a millisecond of every start-up
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType
    from typing import Any

# ---------------------------------------------------------------- the layout

OF_ALL_RANKS = 2  # Slot.passing: no rank can go on by itself, all start again


class Slot:
    """One look at a process's slot. Times are monotonic nanoseconds; -1 is unknown; states such as `in_fetch` are 0 or 1."""

    # who it is
    pid: int = 0
    pid_start: int = 0
    ppid: int = 0
    forked: int = 0
    hello_ns: int = 0
    rank: int = -1
    world: int = 0
    # how far it is
    ticks: int = 0
    tick_ns: int = 0
    step: int = 0
    steps: int = 0  # how many there will be
    step_ns: int = 0
    step_first_ns: int = 0
    optimizers: int = 0
    tokens: int = 0
    durable_step: int = 0
    memory_step: int = 0  # kept in memory that outlives the process
    phase_since_ns: int = 0
    span_since_ns: int = 0
    # a data loader: in the process that asks, and in the one that reads
    fetches: int = 0
    in_fetch: int = 0
    fetch_since_ns: int = 0
    fetch_wait_ns: int = 0
    loader_workers: int = 0
    wait_worker: int = -1
    loader_len: int = -1
    items: int = 0
    in_item: int = 0
    item_since_ns: int = 0
    worker: int = -1
    # collectives, the compiler, progress bars, garbage
    coll_seq: int = 0
    in_coll: int = 0
    coll_since_ns: int = 0
    coll_ns: int = 0  # in those that have ended
    compiles: int = 0
    compiling: int = 0
    compile_since_ns: int = 0
    recompiles: int = 0
    bar_n: int = 0
    bar_total: int = -1
    bar_ns: int = 0
    collecting: int = 0
    gc_since_ns: int = 0
    # what else it is doing
    saving: int = 0
    stopping: int = 0
    prompting: int = 0  # a person is asked, and may take any time
    printing: int = 0  # the result appears on the screen by itself
    # what we caused ourselves, and how it ended
    answers: int = 0  # questions of ours begun and answered: two for each
    dropped: int = 0  # lines that a full disk did not take
    passing: int = 0  # it ended by an error that a second try may not meet: of a network, of a disk; OF_ALL_RANKS
    # how long it still takes, by its own measurements
    measured: int = 0  # steps
    left_ns: int = 0  # when the seconds left were counted
    documents: int = 0  # learned from
    best_step: int = 0
    closing: int = 0  # 1 + the exit code, said at the very end: without it, an exit code proves nothing
    # numbers with a fraction
    done: float = 0.0
    total: float = -1.0
    loss: float = float("nan")
    tokens_per_s: float = 0.0
    mfu: float = 0.0
    planned_step_s: float = 0.0  # what a step should take, by the plan
    left_s: float = -1.0  # from left_ns to the end of the run
    left_now_s: float = 0.0  # of that, what is going on now should take
    mean_loss: float = float("nan")  # over all steps of the run
    mean_tokens_per_s: float = 0.0  # over the steps of this attempt
    best_loss: float = float("nan")  # of the validations
    # texts; their sizes are in TEXT_BYTES
    phase: str = ""
    span: str = ""
    unit: str = ""
    phase_item: str = ""
    item: str = ""  # what a loader's worker has in hand
    coll: str = ""
    coll_at: str = ""
    compile_id: str = ""
    bar: str = ""
    error: str = ""  # its last words
    forked_beside: str = ""  # where the other threads of the parent were at the fork
    python: str = ""
    argv: str = ""

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slot) and self.told() == other.told()

    __hash__ = None  # type: ignore[assignment]

    def told(self) -> dict[str, Any]:
        """The fields that differ from an untouched slot."""
        found = {name: getattr(self, name) for name in Slot.__annotations__}
        return {name: value for name, value in found.items() if value == value and value != getattr(Slot, name)}

    def closed_with(self, code: int) -> bool:
        """Whether the process itself said, as its last word, that it leaves with this code."""
        return self.closing == code + 1


SURE_STEPS = 10  # measured, from which on the end of a run is foretold
SLOT_BYTES = 4096
MAGIC = b"LAMPSLT5"
TEXT_BYTES = {
    "phase": 128, "span": 64, "unit": 32, "phase_item": 256, "item": 128, "coll": 128, "coll_at": 256, "compile_id": 32,
    "bar": 128, "error": 1024, "forked_beside": 512, "python": 32, "argv": 256,
}  # fmt: skip
_NUMBERS = [name for name, kind in Slot.__annotations__.items() if kind != "str"]
REALS = frozenset(name for name, kind in Slot.__annotations__.items() if kind == "float")
AT = {name: 2 + place for place, name in enumerate(_NUMBERS)}  # in words of 8 bytes: a reader never sees half a number
TEXTS: dict[str, tuple[int, int]] = {}  # name -> (offset, bytes)
_at = 1024
for _name, _size in TEXT_BYTES.items():
    TEXTS[_name] = (_at, _size)
    _at += _size


class SlotWriter:
    """Writes numbers and short texts into the page."""

    __slots__ = ("page", "reals", "wholes")

    def __init__(self, page: mmap.mmap | bytearray | None = None) -> None:
        """Without a page: an untouched slot in memory that nobody reads."""
        self.page = page if page is not None else bytearray(SLOT_BYTES)
        view = memoryview(self.page)
        self.wholes, self.reals = view.cast("q"), view.cast("d")
        if page is None:
            for name in _NUMBERS:
                self.set(name, getattr(Slot, name))

    def set(self, name: str, value: float) -> None:
        if name in REALS:
            self.reals[AT[name]] = value
        else:
            self.wholes[AT[name]] = value  # type: ignore[call-overload]

    def add(self, name: str, value: int = 1) -> None:
        self.wholes[AT[name]] += value

    def get(self, name: str) -> int:
        return self.wholes[AT[name]]

    def text(self, name: str, value: str) -> None:
        at, size = TEXTS[name]
        self.page[at : at + size] = value.encode("utf-8", "replace")[: size - 1].ljust(size, b"\0")

    def get_text(self, name: str) -> str:
        return _text_at(bytes(self.page[:]), name)

    def publish(self, stem: str) -> SlotWriter:
        """The same slot as a file, `<stem>.slot`, with whatever was written so far."""
        self.page[:8] = MAGIC
        return SlotWriter(map_file(stem, ".slot", bytes(self.page[:])))


def map_file(stem: str, ending: str, content: bytes) -> mmap.mmap:
    """Written whole, then named: nobody sees half of it. Real blocks: a hole on a full disk is a bus error later."""
    fd = os.open(stem + ".new", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        if os.write(fd, content) != len(content):
            raise OSError(28, "the disk is full", stem + ending)
        page = mmap.mmap(fd, len(content))
    finally:
        os.close(fd)
    os.rename(stem + ".new", stem + ending)
    return page


def read_slot(path: str | os.PathLike[str]) -> Slot | None:
    """One look; None where there is no slot yet, or something else in its place."""
    page = read_page(path)
    return parse_page(page) if page is not None else None


def read_page(path: str | os.PathLike[str]) -> bytes | None:
    """As it is: of a page that has not changed, nothing has to be taken apart again."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:  # not there yet
        return None
    try:
        page = os.read(fd, SLOT_BYTES + 1)
    except OSError:  # a folder, or a pipe without a writer
        return None
    finally:
        os.close(fd)
    return page if len(page) == SLOT_BYTES and page[:8] == MAGIC else None


def parse_page(page: bytes) -> Slot:
    view, end = memoryview(page), 2 + len(_NUMBERS)
    values: dict[str, Any] = dict(zip(_NUMBERS, view.cast("q")[2:end].tolist()))
    reals = view.cast("d")
    for name in REALS:
        values[name] = reals[AT[name]]
    for name, (at, _) in TEXTS.items():
        if page[at]:  # an empty text is the class's own
            values[name] = _text_at(page, name)
    return Slot(**values)


def _text_at(page: bytes, name: str) -> str:
    at, size = TEXTS[name]
    return page[at : at + size].split(b"\0", 1)[0].decode("utf-8", "replace")


# ---------------------------------------------------------------- collectives of the user's own

CALLED_BY_ALL = (
    "all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "barrier",
    "reduce", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter",
    "gather_object", "broadcast_object_list", "scatter_object_list", "monitored_barrier",
)  # fmt: skip
MEETING = "rendezvous"  # where a rank waits that has lost the others, which may still be elsewhere


def differing_calls(every: Mapping[int, Slot]) -> tuple[str, str]:
    """Ranks that have come to the same collective with different calls, one of them the user's own: the name of the fault, and
    what each of them calls where. Nothing where there are none; what is just being written down has no name yet.
    """
    for mine in every.values():
        same = {
            rank: one for rank, one in every.items() if one.coll_seq == mine.coll_seq and one.coll not in ("", MEETING)
        }
        names = {one.coll.partition(" ")[0] for one in same.values()}
        if len({one.coll for one in same.values()}) > 1 and not names.isdisjoint(CALLED_BY_ALL):
            told = "; ".join(f"rank {rank} in {one.coll} at {one.coll_at}" for rank, one in sorted(same.items()))
            return "rank_order" if len(names) > 1 else "rank_shape", told
    return "", ""


# ---------------------------------------------------------------- whose line it is

USERS, LIBRARY, HIDDEN = 0, 1, 2
hidden_folders = ["<frozen", sys.prefix + "/bin/"]  # the agent adds its own
_kinds: dict[str, int] = {}


def kind_of(file: str) -> int:
    """Whose file this is: the user's, some library's, or of no interest (Python, torch, the agent)."""
    kind = _kinds.get(file)
    if kind is None:
        if "/site-packages/" in file or "/dist-packages/" in file:
            kind = HIDDEN if "/torch/" in file else LIBRARY
        elif "/lib/python3" in file or "/lib64/python3" in file or file.startswith(tuple(hidden_folders)):
            kind = HIDDEN
        else:
            kind = LIBRARY if file.startswith("<") else USERS
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
        if kind == LIBRARY and second is None:
            second = walk
        walk = walk.f_back
    return second or frame


def place(frame: FrameType | None) -> str:
    return f"{frame.f_code.co_filename[-200:]}:{frame.f_lineno}" if frame is not None else ""
