"""What is read back from a folder, which may be damaged, huge or somebody else's: opened, bounded and checked in one place.

In:  a path; for a JSON object also its fields, each with the kind of value that it may hold.
Out: the bytes of a regular file, or OSError, never a wait; the fields that are as they should be, and in words what is not.

Plain Python, because every command reads records at its start, and a validator's library would cost it 20 ms (decision 024).
"""

from __future__ import annotations

import errno
import json
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

MOST_BYTES = 1 << 26  # of a manifest: 64 MB list half a million files
SMALL_BYTES = 1 << 20  # of status.json, a lock, latest.json, a request: a thousand times what we write
LINE_BYTES = 1 << 24  # of one line in a .jsonl file
_MOST_WHOLE = 1 << 62  # a whole number beyond it is damage, and would not fit into a slot

# ---------------------------------------------------------------- opening


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
    """A descriptor of a regular file; OSError where something else is there (a pipe would be waited for without end)."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    kind = os.fstat(fd).st_mode
    if stat.S_ISREG(kind):
        return fd
    os.close(fd)
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
    what = f"{os.path.basename(path)} is {kinds.get(stat.S_IFMT(kind), 'a device')}, not a file"  # noqa: PTH119
    raise OSError(errno.EINVAL, what, os.fspath(path))


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """The same as a file to read from."""
    return os.fdopen(open_regular(path), "rb")


def read_whole(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> bytes:
    """All bytes of a regular file; OSError where there are more than `most_bytes`, before they are read."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(most_bytes + 1) if size <= most_bytes else b""
    if max(size, len(data)) > most_bytes:
        size = max(size, len(data))
        raise OSError(errno.EFBIG, f"it has {size / 1e6:,.1f} MB, at most {most_bytes / 1e6:,.1f} are read", str(path))
    return data


def parse_object(data: bytes | str) -> dict[str, Any] | None:
    """A JSON object; None for anything else (torn, nested too deeply, a list, no text)."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):  # the caller names what is damaged
        return None
    return found if isinstance(found, dict) else None


# ---------------------------------------------------------------- checking


@dataclass(frozen=True)
class Kind:
    """What one field may hold."""

    words: str
    types: tuple[type, ...]
    least: float = -sys.float_info.max
    may_be_none: bool = True
    needed: bool = False
    of: Kind | Mapping[str, Kind] | None = None  # the values of a list or an object

    def fits(self, value: object) -> bool:
        if value is None:
            return self.may_be_none
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            return False
        if isinstance(value, int | float) and not self.least <= value <= self._most(value):
            return False
        if isinstance(self.of, Kind):
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            return all(self.of.fits(one) for one in inner)
        if self.of is not None:
            each = value if isinstance(value, list) else [value]
            return all(isinstance(one, dict) and not find_damage(one, self.of) for one in each)
        return True

    @staticmethod
    def _most(value: float) -> float:
        return _MOST_WHOLE if isinstance(value, int) else sys.float_info.max


Fields = Mapping[str, Kind]
TEXT = Kind("text", (str,))
NUMBER = Kind("a number", (int, float))
COUNT = Kind("a whole number from 0 on", (int,), 0)
SECONDS = Kind("seconds", (int, float), 0)
TIME = Kind("a time", (int, float), 0)
FLAG = Kind("true or false", (bool,))
OBJECT = Kind("an object", (dict,))
TEXTS = Kind("a list of texts", (list,), of=Kind("text", (str,), may_be_none=False))


def needed(kind: Kind) -> Kind:
    """A field without which the record is of no use."""
    return replace(kind, may_be_none=False, needed=True)


def find_damage(record: Mapping[str, Any], fields: Fields) -> list[str]:
    """In words, each known field that holds what it cannot hold, or is missing and needed; others are not looked at."""
    found = []
    for name, kind in fields.items():
        if name not in record:
            found += [f"{name} is missing"] if kind.needed else []
        elif not kind.fits(record[name]):
            found.append(f"{name} is not {kind.words}")
    return found


def without_damage(record: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """The record without the fields that are wrong."""
    return {name: value for name, value in record.items() if name not in fields or fields[name].fits(value)}


def read_object(
    path: str | os.PathLike[str], fields: Fields, most_bytes: int = SMALL_BYTES
) -> tuple[dict[str, Any], str]:
    """The fields of a JSON object that are as they should be, and in words what is wrong; a missing file is no damage."""
    try:
        record = parse_object(read_whole(path, most_bytes))
    except FileNotFoundError:  # not written yet
        return {}, ""
    except OSError as error:
        return {}, error.strerror or str(error)
    if record is None:
        return {}, "it is not a JSON object"
    return without_damage(record, fields), "; ".join(find_damage(record, fields))


# ---------------------------------------------------------------- the files of a run

FLAGS = Kind(
    "a list of red flags",
    (list,),
    of={**dict.fromkeys(("cause", "why", "next"), needed(TEXT)), "state": TEXT, "step": needed(COUNT)},
)
RANKS = Kind(
    "a list of ranks",
    (list,),
    of={
        "rank": needed(COUNT),
        **dict.fromkeys(("pid", "step", "collectives", "node"), COUNT),
        **dict.fromkeys(("host", "state", "phase", "span"), TEXT),
        **dict.fromkeys(("waiting_s", "in_collective", "tokens_per_s", "ram_gb"), SECONDS),
    },
)
STATUS: Fields = {
    **dict.fromkeys(("state", "verb", "now", "phase", "stall", "outcome", "host", "boot_id", "exact", "path"), TEXT),
    **dict.fromkeys(("step", "steps", "tokens", "durable_step", "mirrored_step", "documents", "best_step"), COUNT),
    **dict.fromkeys(("attempt", "pid", "pid_start", "child_pid"), COUNT),
    **dict.fromkeys(("tokens_per_s", "spent_s", "eta_s", "last_progress_s", "usd"), SECONDS),
    **dict.fromkeys(("mean_loss", "best_val_loss", "end_hours", "end_usd", "short_hours", "short_usd"), NUMBER),
    **dict.fromkeys(("loss", "val_loss", "t", "exit_code", "format", "numerics"), NUMBER),
    "flags": FLAGS,
    "ranks": RANKS,
    "track": Kind("a list of trackers", (list,), of={"to": needed(TEXT), "step": COUNT, "lag": COUNT, "problem": TEXT, "url": TEXT}),
    "ended_early": Kind("an object", (dict,), of={"step": COUNT, "steps": COUNT, "since_best": COUNT, "best_step": COUNT, "why": TEXT}),
}  # fmt: skip
MIRROR: Fields = {
    **dict.fromkeys(("id", "store", "problem", "kind", "doing"), TEXT),
    **dict.fromkeys(("step", "most", "bytes", "total"), COUNT),
    **dict.fromkeys(("t", "since"), TIME),
    "done": FLAG,
}
HOLDER: Fields = {"host": TEXT, "boot_id": TEXT, "pid": COUNT, "pid_start": COUNT, "t": TIME}
_LIGHTER = {"settings": needed(TEXT), "gib": Kind("a number", (float,), may_be_none=False, needed=True)}
PLAN: Fields = {"memory_gib": NUMBER, "lighter": Kind("a list of settings", (list,), of=_LIGHTER)}  # what is read of it
LATEST: Fields = {"step": needed(COUNT), "path": TEXT, "t": TIME}
BEST: Fields = {"step": needed(COUNT), "val_loss": Kind("a number", (float,), may_be_none=False, needed=True)}
ANSWER: Fields = {"kind": TEXT, "text": TEXT, "step": COUNT}

_VERDICT: Fields = {
    **dict.fromkeys(("state", "cause", "why", "next"), needed(TEXT)),
    **dict.fromkeys(("action", "kept"), TEXT),
    **dict.fromkeys(("since_s", "left_s"), NUMBER),
    **dict.fromkeys(("culprit", "waits_for"), OBJECT),
    "step": COUNT,
    "flag": FLAG,
    "said": FLAG,
    "evidence": TEXTS,
}
_EVENTS: Mapping[str, Fields] = {
    "start": {"attempt": COUNT, "began": TIME},
    "phase": {"name": needed(TEXT), "state": needed(TEXT), "path": needed(TEXT), "seconds": SECONDS, "done": NUMBER, "unit": TEXT},
    "note": {"text": needed(TEXT)},
    "warning": {"text": needed(TEXT)},
    "checkpoint": {"step": COUNT, "path": needed(TEXT), "bytes": needed(COUNT), "seconds": needed(SECONDS), "blocked_s": SECONDS},
    "eval": {"step": needed(COUNT), "text": needed(TEXT)},
    "sample": {"step": needed(COUNT), "text": needed(TEXT)},
    "verdict": _VERDICT,
    "well again": {"cause": needed(TEXT), "since_step": needed(COUNT), "step": needed(COUNT)},
    "ended early": {"step": needed(COUNT), "steps": needed(COUNT), "since_best": COUNT, "best_step": COUNT, "why": needed(TEXT)},
    "error": {"lines": needed(TEXTS), "code": NUMBER},
    "flags": {"standing": needed(FLAGS)},
    "path": {"text": needed(TEXT)},
    "exact": {"text": needed(TEXT), "redone_equal": COUNT, "first_other": COUNT},
    "floor": {"nats_per_token": needed(NUMBER)},
    "ledger": {"seconds": needed(Kind("seconds by name", (dict,), of=Kind("seconds", (int, float), 0, False))), "final": FLAG},
    "resumed": {"step": COUNT, "redone_steps": COUNT},
}  # fmt: skip
_EVENT: Fields = {"type": needed(TEXT), "t": needed(TIME)}
_PHASE_END: Fields = {"seconds": needed(SECONDS), "unit": needed(TEXT)}


def is_event(record: Mapping[str, Any]) -> bool:
    """Whether a line of events.jsonl holds what its type needs, so that it can be shown and counted."""
    if find_damage(record, _EVENT) or find_damage(record, _EVENTS.get(str(record["type"]), {})):
        return False
    if record["type"] == "phase" and record["state"] == "end":
        return not find_damage(record, _PHASE_END)
    return not (record["type"] == "verdict" and record.get("flag") and "step" not in record)


def is_metric(record: Mapping[str, Any]) -> bool:
    """Whether a line of metrics.jsonl is a step and numbers; null stands for one that is not finite."""
    if find_damage(record, {"step": needed(COUNT)}):
        return False
    return all(NUMBER.fits(value) for name, value in record.items() if "/" in name)
