"""What an evaluation leaves behind: one JSON file when it is done, and a line per item as it goes, so that a kill loses none.

In:  the folder for evaluations, what was asked of which model.
Out: evaluations/NAME.json, created whole; evaluations/items/NAME.jsonl, appended to and read back at the next start.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from lamplighter.errors import AlreadyRunning, CannotWrite
from lamplighter.evaluate.items import Task
from lamplighter.evaluate.scores import TaskScore
from lamplighter.procs import lock
from lamplighter.rundir import LineFile, cannot_write, hash_file, read_lines, read_record, write_json

FORMAT = 1


@dataclass(frozen=True)
class Subject:
    """Which model is evaluated: the folder of its weights, by what name and step it goes, and a mark of its content."""

    folder: Path
    name: str
    step: int | None
    mark: str


def mark_of(folder: Path) -> str:
    """Changes with any weight: the checksum of a checkpoint's manifest, else of the weights themselves."""
    check = read_record(folder / "manifest.json").get("check")
    if isinstance(check, str):
        return check
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json", *folder.glob("tokenizer*.json")])
    return xxhash.xxh3_128_hexdigest(
        "".join(hash_file(one, digest=xxhash.xxh3_128()) for one in files if one.is_file()).encode()
    )


@dataclass
class ItemLog:
    """The items of one evaluation that are done; `asked` (of model, data and settings) must be the same to go on."""

    path: Path
    asked: Mapping[str, Any]
    done: dict[int, dict[str, Any]] = field(default_factory=dict)
    _file: LineFile | None = None
    _lock: int | None = None

    def open(self) -> int:
        """How many items were done by an earlier start; one evaluation writes them at a time."""
        self._take()
        lines = read_lines(self.path)
        first = next(lines, None)
        if first is not None and first.get("asked") == json.loads(json.dumps(self.asked)):
            self.done = {line["item"]: line for line in lines if isinstance(line.get("item"), int)}
        try:
            if first is not None and not self.done:  # of other data or settings under the same name
                self.path.unlink()
                self.close()
                self._take()
            self._file = LineFile(self.path)
            if not self.done:
                self._write({"asked": self.asked})
        except OSError as error:
            raise cannot_write(self.path, error) from error
        return len(self.done)

    def _take(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = lock.hold(self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        if self._lock is None:
            raise AlreadyRunning(f"another lamp eval writes {self.path.name}", "it is the same task of the same weights", "wait for it; what it has done is kept")  # fmt: skip

    def close(self) -> None:
        """Let the next one in."""
        for fd in (self._lock, self._file.fd if self._file is not None else None):
            if fd is not None:
                os.close(fd)
        self._lock = self._file = None

    def add(self, item: int, **found: Any) -> None:
        record = {"item": item, **found}
        self._write(record)
        self.done[item] = record

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._file is None or not self._file.write(json.dumps(record)):
            raise CannotWrite(
                f"cannot write to {self.path}", "the disk is full", "free some space; done items are kept"
            )


def log_name(task: str, subject: Subject, asked: Mapping[str, Any]) -> str:
    """NAME of both files: the same question of the same weights has the same name."""
    digest = xxhash.xxh3_64_hexdigest(json.dumps([subject.mark, dict(asked)], sort_keys=True, default=str).encode())[:8]
    return f"{task.replace(':', '-').replace('/', '-')}-{subject.name.replace('/', '-')}-{digest}"


def write_result(
    folder: Path, name: str, subject: Subject, task: Task, scores: Sequence[TaskScore], **more: Any
) -> dict[str, Any]:
    """The result of a task, as a file that is there whole or not at all."""
    record = {
        "format": FORMAT,
        "task": task.name,
        "checkpoint": subject.name,
        "step": subject.step,
        "t": time.time(),
        "scores": [one.record() for one in scores],
        "data": {"path": str(task.path), "sha256": task.sha256, "items": len(task.items)},
        "prompt": task.prompt,
        "template": None,
        "contamination": None,
        "settings": dict(task.settings),
        **more,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{name}.json", record)
    except OSError as error:
        raise cannot_write(folder, error) from error
    return record
