"""Hugging Face datasets: a folder of `save_to_disk`, a folder of data files, or a name on the hub.

In:  a folder or a name, a configuration, a split, the column of the texts.
Out: a Source by rows. A folder never asks the hub for anything; a name without a network is an error within seconds.
"""

from __future__ import annotations

import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from lamplighter import report
from lamplighter.errors import BadConfig, BadData, InputMissing, LampError, Unreachable
from lamplighter.readers.bad_records import BadInReading, BadRecords
from lamplighter.readers.local import hash_files, local_file
from lamplighter.readers.records import Cursor, Position, Record, check_text, digest, in_parts, text_of
from lamplighter.readers.tables import no_column

if TYPE_CHECKING:
    from lamplighter.config import Data

REACH_S = 8.0
BATCH_ROWS = 256
PART_CHARS = 1 << 20
Result = TypeVar("Result")
_Opened = tuple[Any, list[Any], int | None]
"""The rows, what changes when they change, their size."""


class HubSource:
    """The rows of one split, as texts."""

    def __init__(self, name: str, dataset: Any, key: str, marks: list[Any], size: int | None, bad: BadRecords) -> None:
        self.name, self.dataset, self.key, self.marks, self.size = name, dataset, key, marks, size
        self.indexed = hasattr(dataset, "num_rows") and hasattr(dataset, "__len__")
        self.first_state = None if self.indexed else dataset.state_dict()
        self.bad = bad
        self._row = self._done = 0
        self._cursor: Cursor = {}

    def __str__(self) -> str:
        return f"dataset {self.name}" + (f", {len(self.dataset):,} rows" if self.indexed else ", streamed")

    def fingerprint(self) -> str:
        return digest(["dataset", self.marks, self.key, self.bad.policy, PART_CHARS])

    def total_bytes(self) -> int | None:
        return self.size

    def position(self) -> Position:
        return Position(f"dataset {self.name}, row {self._row + 1:,}", self._done, self._cursor)

    def documents(self, start: Cursor | None = None) -> Iterator[str]:
        """Every text that is not empty, after `start`."""
        start = start or {}
        self._cursor, self._row, self._done = start, int(start.get("row", 0)), int(start.get("bytes", 0))
        return self._read(start)

    def _read(self, start: Cursor) -> Iterator[str]:
        reading = self.bad.begin(int(start.get("bad", 0)))
        bad = reading.file(f"dataset {self.name}", None, "rows")
        skipped, some = int(start.get("part", 0)), bool(start)
        for number, record, place in self._rows(start):
            where = f"dataset {self.name}, row {number + 1:,}"
            try:
                text = text_of(record, self.key, where)
                check_text(text, where)
            except BadData as error:
                bad.set_aside(number + 1, number, error)
                self._row = number + 1
                continue
            done = self._done + len(text)
            if self.indexed and self.size:
                done = self.size * (number + 1) // max(1, len(self.dataset))
            extra = {**({"bad": bad.count} if bad.count else {}), "bytes": done}
            before, after = place | extra | {"row": number}, place | extra | {"row": number + 1}
            if "over" in place:
                after["over"] = place["over"] + 1
            for piece, cursor in in_parts(text, PART_CHARS, skipped, before, after):
                self._cursor, some = cursor, True
                yield piece
            self._row, self._done, skipped = number + 1, done, 0
        bad.end(self._row)
        reading.end()
        if not some:
            raise BadData(f"no text in {self}", "every document is empty", "check data.text_key")

    def narrowed(self, key: str) -> HubSource:
        """The same dataset, of which only the column of the texts is read."""
        return _made(self.name, self.dataset, key, marks=self.marks, size=self.size, bad=self.bad)

    def records(self, bad: BadInReading) -> Iterator[Record]:
        """The rows, whole."""
        self._row, number = 0, -1
        for number, value, cursor in self._rows({}):
            self._row = number + 1
            if self.indexed and self.size:
                self._done = self.size * (number + 1) // max(1, len(self.dataset))
            yield Record(value, number + 1, number, cursor, cursor)
        bad.lines += number + 1

    def _rows(self, start: Cursor) -> Iterator[tuple[int, Any, Cursor]]:
        """(number, row, what a cursor needs to come back to just before it)."""
        number = int(start.get("row", 0))
        if self.indexed:
            while number < len(self.dataset):
                batch = self.dataset[number : number + BATCH_ROWS]
                columns = list(batch)
                for values in zip(*batch.values(), strict=True):
                    yield number, dict(zip(columns, values, strict=True)), {}
                    number += 1
            return
        state, over = start.get("state"), int(start.get("over", 0))
        self.dataset.load_state_dict(state or self.first_state)
        rows = iter(self.dataset)
        if over:
            with report.phase("skip to where it stopped", total=over, unit="rows") as p:
                for _ in range(over):
                    p.tick(1, f"dataset {self.name}, row {number + 1:,}")
                    next(rows, None)
        while (row := self._next(rows, number)) is not None:
            yield number, row, {"state": state, "over": over}
            number, over = number + 1, over + 1
            if over >= BATCH_ROWS:  # a state is dear: taken now and then, with the rows since counted
                state, over = self.dataset.state_dict(), 0

    def _next(self, rows: Iterator[Any], number: int) -> Any:
        """The next row; what the library raises in the middle, after its own retries, gets a place."""
        try:
            return next(rows, None)
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            what = f"lost dataset {self.name} at row {number + 1:,}"
            raise InputMissing(
                what, why, "check the files or the network, then run it again: it goes on there"
            ) from error


# ---------------------------------------------------------------- opening


def open_dataset(name: str, data: Data, key: str, hash_store: Path | None) -> HubSource:
    """The dataset of "dataset:NAME", by data.dataset_config and data.dataset_split."""
    folder = Path(name).expanduser()
    if not name:
        why = "nothing stands behind dataset:"
        raise BadConfig("data.paths names no dataset", why, "dataset:/path/to/folder, or a name on the hub")
    if not folder.is_dir() and (name.startswith(("/", "./", "../", "~")) or folder.exists()):
        raise InputMissing(
            f"no such folder: {name}", "dataset: wants a folder or a name on the hub", "check data.paths"
        )
    bad = BadRecords(data.bad_text, data.bad_limit)
    with report.phase(f"open dataset {name}") as p:
        p.tick(0, "import datasets")
        datasets = _datasets(name)
        p.tick(0, name)
        in_folder = folder.is_dir()
        found, marks, size = (
            _open_folder(datasets, folder, data, hash_store) if in_folder else _open_hub(datasets, name, data, p)
        )
        return _made(str(folder) if in_folder else name, found, key, marks=marks, size=size, bad=bad)


def _datasets(name: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        advice = "pip install 'lamplighter[hf]'"
        raise InputMissing(
            f"cannot open dataset {name}", "it needs the package datasets, which is missing", advice
        ) from error
    datasets.disable_progress_bars()
    return datasets


def _open_folder(datasets: Any, folder: Path, data: Data, hash_store: Path | None) -> _Opened:
    """A folder; its rows are read in place, nothing is copied and nobody is asked."""
    split = data.dataset_split
    with _offline(datasets):
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            found = _tried(lambda: datasets.load_from_disk(str(folder)), str(folder))
            if isinstance(found, datasets.DatasetDict):
                if split not in found:
                    raise _no_split(str(folder), split, list(found))
                found = found[split]
            elif found.split is not None and str(found.split) != split:
                raise _no_split(str(folder), split, [str(found.split)])
        else:
            found, _ = _streamed(datasets, str(folder), data.dataset_config, split)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    local = [local_file(path) for path in files]
    names = [str(path.relative_to(folder)) for path in files]
    contents = [file.content for file in hash_files(local, hash_store)]
    return found, [names, contents, data.dataset_config, split], sum(file.size for file in local)


def _open_hub(datasets: Any, name: str, data: Data, p: report.Phase) -> _Opened:
    """A name on the hub, streamed; where the hub cannot be reached, the copy in the cache of `datasets`, or an error."""
    import huggingface_hub

    config, split = data.dataset_config, data.dataset_split
    host = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT)
    fault = _unreached(host.hostname or "", host.port or (80 if host.scheme == "http" else 443), p)
    if fault is None:
        found, revision = _streamed(datasets, name, config, split)
    else:
        try:
            with _offline(datasets):
                found, revision = _streamed(datasets, name, config, split)
        except LampError as error:
            why = f"{host.hostname} cannot be reached ({fault}), and there is no copy of it on this machine"
            advice = "check the network, or name a folder that holds the dataset: dataset:/path/to/folder"
            raise Unreachable(f"cannot open dataset {name}", why, advice) from error
        report.warn(f"{host.hostname} cannot be reached ({fault}): the copy of {name} on this machine is read")
    report.note(f"dataset {name}, split {split}: counts as changed when its revision changes ({revision})")
    info = (found.info.splits or {}).get(split) if found.info else None
    return found, [name, config, split, revision], getattr(info, "num_bytes", None)


def _streamed(datasets: Any, name: str, config: str | None, split: str) -> tuple[Any, str]:
    """The split as a stream, and its revision."""

    def load() -> tuple[Any, str]:
        builder = datasets.load_dataset_builder(name, config)
        known = [str(one) for one in (builder.config.data_files or {})] or list(builder.info.splits or {})
        if known and split.partition("[")[0] not in known:
            raise _no_split(name, split, known)
        found = datasets.load_dataset(name, config, split=split, streaming=True)
        base = str(builder.base_path or "")
        return found, base if "@" in base else str(builder.hash)

    return _tried(load, name)


def _tried(load: Callable[[], Result], name: str) -> Result:
    try:
        return load()
    except LampError:
        raise
    except Exception as error:  # the library has many kinds, all with words
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputMissing(
            f"cannot open dataset {name}", why, "check data.paths, data.dataset_config and data.dataset_split"
        ) from error


def _made(name: str, dataset: Any, key: str, marks: list[Any], size: int | None, bad: BadRecords) -> HubSource:
    columns = list(dataset.column_names or [])
    if columns and key != "*":
        top = key if key in columns else key.split(".")[0]
        if top not in columns:
            raise no_column(f"dataset {name}", key, columns)
        dataset = dataset.select_columns([top])
    return HubSource(name, dataset, key, marks=marks, size=size, bad=bad)


def _no_split(name: str, split: str, known: list[str]) -> BadConfig:
    near = get_close_matches(split, known, n=1, cutoff=0.3)
    advice = f"did you mean --data.dataset_split {near[0]}?" if near else "set data.dataset_split"
    return BadConfig(f"no split {split} in dataset {name}", f"its splits are: {', '.join(known)}", advice)


@contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """As HF_HUB_OFFLINE=1, for the time of a call."""
    import huggingface_hub

    homes = [datasets.config, huggingface_hub.constants]
    before = [home.HF_HUB_OFFLINE for home in homes]
    for home in homes:
        home.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for home, value in zip(homes, before, strict=True):
            home.HF_HUB_OFFLINE = value


def _unreached(host: str, port: int, p: report.Phase) -> str | None:
    """Why a host cannot be reached, within seconds: in a thread, as looking up a name knows no time limit."""
    import huggingface_hub

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    if urllib.request.getproxies():
        return None
    fault: list[str | None] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=REACH_S).close()
            fault.append(None)
        except OSError as error:
            fault.append(error.strerror or str(error))

    threading.Thread(target=connect, name="lamp-reach", daemon=True).start()
    began = time.monotonic()
    while not fault and (spent := time.monotonic() - began) < REACH_S:
        p.tick(0, f"{host}: connecting, {spent:.0f} s")
        time.sleep(0.1)
    return fault[0] if fault else f"no answer in {REACH_S:.0f} s"
