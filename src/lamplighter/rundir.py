"""One run is one folder: its layout, its lock, and files that are either whole or not there.

In:  a runs folder and a name.
Out: paths, atomic writes, append-only line files, the lock, manifests and their verification.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lamplighter import read_back
from lamplighter.errors import AlreadyRunning, CannotWrite
from lamplighter.procs import procfs
from lamplighter.procs.lock import is_held, open_lock, try_lock
from lamplighter.procs.procfs import boot_id, pid_start

CACHE_NAME = ".cache"
EVALUATED = ".evaluations"  # of models that are no runs, beside the runs
FORMAT = (
    1  # of the files of a run: raised when an older version could no longer read them (a manifest keeps its `check`)
)
NUMERICS = 2  # of the arithmetic: raised when the same run would give other bits
VERSIONS = {"format": FORMAT, "numerics": NUMERICS}
_HEARTBEAT_DEAD_S = 10.0
_MOST_ATTEMPTS = 10**6  # a larger number is damage
EVENTS_BYTES = 1 << 27  # of a file of events, from its end on, that is read back: months of a run, in a second or two
NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "ceph", "gluster", "gpfs", "beegfs", "9p", "fuse.sshfs", "afs")


@dataclass(frozen=True)
class RunDir:
    """The paths of one run. Every file has exactly one writing process (named in docs/MAP.md)."""

    path: Path
    whole: Path | None = None  # of a rank beside node 0: the folder of the run itself, where all nodes see it

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def address(self) -> str:
        """The words by which another command finds this run, as they can be pasted into a shell."""
        import shlex

        usual = self.path.parent in (Path("runs"), Path.cwd() / "runs")
        return shlex.join([self.name] if usual else [self.name, "--runs-dir", str(self.path.parent)])

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def system(self) -> Path:
        return self.path / "system.jsonl"

    @property
    def output(self) -> Path:
        return self.path / "output.log"

    @property
    def console(self) -> Path:
        return self.path / "console.log"

    @property
    def stacks(self) -> Path:
        return self.path / "stacks"

    @property
    def slots(self) -> Path:
        return self.path / "slots"

    @property
    def ask(self) -> Path:
        return self.path / "ask"

    @property
    def checkpoints(self) -> Path:
        return (self.whole or self.path) / "checkpoints"

    @property
    def nodes(self) -> Path:
        """What several nodes have in common, and a folder for each of the others."""
        return (self.whole or self.path) / "nodes"

    @property
    def report(self) -> Path:
        return self.path / "report.md"

    @property
    def mirror(self) -> Path:
        return self.path / "mirror.json"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    def rank_events(self, rank: int) -> Path:
        return self.path / f"events.rank{rank}.jsonl"

    def slot(self, rank: int) -> Path:
        return self.slots / f"rank{rank}.slot"

    @property
    def standby_slot(self) -> Path:
        return self.slots / "standby.slot"

    def fifo(self, rank: int) -> Path:
        return self.slots / f"rank{rank}.ask"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / checkpoint_name(step)

    def create(self) -> None:
        """Make the folder and its sub-folders, or say why that is impossible."""
        try:
            for folder in (self.path, self.stacks, self.ask, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            if not self.slots.exists():
                _make_slots(self.slots)
        except OSError as error:
            raise cannot_write(self.path, error) from error


def checkpoint_name(step: int) -> str:
    return f"checkpoint-{step}"


def step_of(path: Path) -> int:
    """checkpoint-500 -> 500; -1 for any other name."""
    name, _, number = path.name.rpartition("-")
    return int(number) if name == "checkpoint" and number.isascii() and number.isdecimal() else -1


def newest_first(root: Path) -> list[Path]:
    """The checkpoints in a folder, by their names."""
    return sorted((path for path in root.glob("checkpoint-*") if step_of(path) >= 0), key=step_of, reverse=True)


def _make_slots(slots: Path) -> None:
    """Slots are mapped memory: on a network file system they live in /dev/shm behind a link."""
    if slots.is_symlink():
        slots.unlink()
    if not _is_network_file_system(slots.parent):
        slots.mkdir(exist_ok=True)
        return
    import hashlib

    digest = hashlib.sha256(str(slots.resolve()).encode()).hexdigest()[:16]
    real = Path("/dev/shm") / f"lamplighter-{os.getuid()}-{digest}"
    real.mkdir(mode=0o700, exist_ok=True)
    slots.symlink_to(real)


def file_system(path: Path) -> str:
    """The kind of file system that holds `path`, as the kernel calls it; empty where that cannot be seen."""
    best, kind = "", ""
    where = str(path.resolve())
    for mount, fstype in procfs.mounts():
        inside = where == mount or where.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, fstype
    return kind


def _is_network_file_system(path: Path) -> bool:
    """Whether the mount that holds `path` is a network file system."""
    return file_system(path).startswith(NETWORK_FILE_SYSTEMS)


def cannot_write(path: Path, error: OSError) -> CannotWrite:
    """The three lines for a path that cannot be written."""
    if error.errno == errno.ENOSPC:
        return CannotWrite(
            f"the disk is full: {path}",
            f"{human_bytes(free_bytes(path))} are free there",
            "free some space or choose another place with --runs-dir; what was saved before is intact",
        )
    why, advice = error.strerror or str(error), "choose another place with --runs-dir"
    return CannotWrite(f"cannot write to {path}", why, advice, cause="cannot_write")


def free_bytes(path: Path) -> int:
    """Free space of the file system that holds `path` (or its nearest existing parent)."""
    while not path.exists():
        path = path.parent
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def dollars(amount: float) -> str:
    """$1,234.50, and of cents as many digits as say something: $0.042, $0.00018."""
    if abs(amount) >= 1:
        return f"${amount:,.2f}"
    digits = 2 if amount == 0 else max(2, 1 - math.floor(math.log10(abs(amount))))
    return f"${amount:.{min(digits, 9)}f}"


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KB'."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


# ---------------------------------------------------------------- files that are whole or not there


def fsync_folder(folder: Path) -> None:
    """Make a rename in this folder survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes | str, durable: bool = True, mode: int = 0o666) -> None:
    """Replace `path` in one instant; readers see the old file or the new one, never a part. `mode`: who may read it."""
    data = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a process of this number that was killed: its mode would stay
        with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, mode)) as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        try:
            temporary.replace(path)
        except IsADirectoryError:  # somebody has put a folder there: kept, under another name
            move_aside(path)
            temporary.replace(path)
        if durable:
            fsync_folder(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any, durable: bool = True, indent: int | None = 1) -> None:
    write_atomic(path, json.dumps(value, indent=indent) + "\n", durable)


def read_json(path: Path) -> Any:
    """The parsed file, or None where it is missing, too large or not JSON (a torn or hostile file of somebody else)."""
    try:
        return json.loads(read_back.read_whole(path))
    except (OSError, ValueError, RecursionError):  # the caller names what is missing or damaged
        return None


def read_record(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none."""
    found = read_json(path)
    return found if isinstance(found, dict) else {}


def read_status(run: RunDir) -> dict[str, Any]:
    """The fields of status.json that are as they should be; `damage` says in words what is not, and is empty otherwise."""
    status, damage = read_back.read_object(run.status, read_back.STATUS)
    named = damage if damage.startswith(run.status.name) or not damage else f"{run.status.name} is damaged: {damage}"
    return {**status, "damage": named}


def number(value: object, default: float = 0.0) -> float:
    """A finite number out of somebody's JSON; the default for anything else (true and false are no numbers)."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return default
    return value if -sys.float_info.max <= value <= sys.float_info.max else default


def version_of(record: Mapping[str, Any], name: str = "format") -> int:
    """`format` or `numerics` of a record; what was written before there were such numbers counts as 1."""
    found = record.get(name, 1)
    return found if type(found) is int else 1


def open_lines(path: Path, mode: int = 0o644) -> int:
    """Open for appending; a file that was killed in mid-line gets its newline first."""
    fd = read_back.open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, mode)
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        os.write(fd, b"\n")
    return fd


class LineFile:
    """A file of whole lines. A line that did not fit (full disk) is counted by the caller and closed before the next one."""

    def __init__(self, path: Path) -> None:
        self.fd = open_lines(path)
        self.torn = False

    def write(self, line: str) -> bool:
        """False if the line is not there, or not as a whole."""
        data = (b"\n" if self.torn else b"") + line.encode("utf-8", "replace") + b"\n"
        try:
            written = os.write(self.fd, data)
        except OSError:  # a full disk; the caller counts what is missing
            return False
        self.torn = written < len(data)
        return not self.torn


def parse_record(line: bytes | str) -> dict[str, Any] | None:
    """One line of a .jsonl file; None for a torn one (a killed writer) or anything that is no object."""
    return read_back.parse_object(line)


def read_lines(path: Path, most_bytes: int | None = None, having: bytes = b"") -> Iterator[dict[str, Any]]:
    """The records of a .jsonl file; torn lines (a killed writer) are passed over.

    `most_bytes`: only so much of it, the newest. `having`: only lines with these bytes, which is quicker than to read all.
    """
    for line in _whole_lines(path, most_bytes):
        if having in line and (record := parse_record(line)) is not None:
            yield record


def _whole_lines(path: Path, most_bytes: int | None) -> Iterator[bytes]:
    """The lines that may be objects: a hole of zeros takes long to parse."""
    try:
        file = read_back.open_file(path)
    except OSError:  # not there yet, or no file: no records
        return
    with file:
        if most_bytes is not None and (size := os.fstat(file.fileno()).st_size) > most_bytes:
            file.seek(size - most_bytes - 1)
            file.readline(read_back.LINE_BYTES)  # the rest of a line that began before
        while line := file.readline(read_back.LINE_BYTES):
            if line[:1] == b"{":
                yield line


class Tail:
    """Complete new lines of a growing file; a half-written line waits for its end. Another file in its place is read from its start."""

    def __init__(self, path: Path, from_end: bool = False, start: int = 0) -> None:
        self.path = path
        self.offset = path.stat().st_size if from_end and path.exists() else start
        self.part = b""
        self.file: tuple[int, int] | None = None  # device and inode
        self.replaced = 0  # how often: what was read before is of another file then

    def blocks(self, block_bytes: int = 1 << 20) -> Iterator[list[bytes]]:
        """The lines of each part of the file that is read at once."""
        try:
            with read_back.open_file(self.path) as file:
                self._begin(os.fstat(file.fileno()))
                file.seek(self.offset)
                while data := file.read(block_bytes):
                    self.offset += len(data)
                    *whole, self.part = (self.part + data).split(b"\n")
                    if len(self.part) > read_back.LINE_BYTES:  # a line without an end must not fill the memory
                        self.part = b""
                    yield whole
        except OSError:  # not there yet, gone, or no file
            return

    def _begin(self, found: os.stat_result) -> None:
        if found.st_size < self.offset or self.file not in (None, (found.st_dev, found.st_ino)):
            self.offset, self.part = 0, b""
            self.replaced += 1
        self.file = (found.st_dev, found.st_ino)

    def lines(self, limit_bytes: int = 1 << 20) -> list[str]:
        return [line.decode("utf-8", "replace") for line in next(self.blocks(limit_bytes), [])]

    def records(self) -> list[dict[str, Any]]:
        return [record for line in self.lines() if (record := parse_record(line)) is not None]


def read_events(run: RunDir) -> Iterator[dict[str, Any]]:
    """The newest part of events.jsonl: the lines that hold what their type needs.

    Every five seconds a ledger replaces the one before: only the last of an attempt is given, or months would take minutes.
    """
    return filter(read_back.is_event, filter(None, map(parse_record, _without_old_ledgers(run.events))))


def _without_old_ledgers(path: Path) -> Iterator[bytes]:
    ledger = b""
    for line in _whole_lines(path, EVENTS_BYTES):
        if line.startswith(b'{"type": "ledger"') and line.endswith(b"}\n"):  # a torn one replaces nothing
            ledger = line
            continue
        if ledger and any(word in line for word in (b'"start"', b'"hello"', b'"child_end"')):
            yield ledger
            ledger = b""
        yield line
    if ledger:
        yield ledger


def unread_events(run: RunDir) -> int:
    """How many bytes of events.jsonl stand before what `read_events` gives."""
    try:
        return max(0, run.events.stat().st_size - EVENTS_BYTES)
    except OSError:  # not there yet
        return 0


def last_attempt(run: RunDir) -> int:
    """The number of the newest attempt, counted; by its own word where not all of them are read. 0: none was ever started."""
    found = [one for one in read_lines(run.events, EVENTS_BYTES, b'"start"') if one.get("type") == "start"]
    told = int(number(found[-1].get("attempt"))) if found and unread_events(run) else 0
    return max(len(found), min(told, _MOST_ATTEMPTS))


def read_last_lines(path: Path, limit_bytes: int = 1 << 22) -> Iterator[dict[str, Any]]:
    """The records at the end of a .jsonl file, however long it is."""
    try:
        with read_back.open_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes))
            lines = file.read().split(b"\n")
    except OSError:  # not there yet, or no file: no records
        return
    for line in lines[1:] if size > limit_bytes else lines:
        if (record := parse_record(line)) is not None:
            yield record


def move_aside(path: Path) -> Path:
    """Rename `path` to the first free `path.1`, `path.2`, ... and say which."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


# ---------------------------------------------------------------- manifests


class Digest(Protocol):
    """What hashlib and xxhash have in common."""

    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def hash_file(path: Path, tick: Callable[[int], None] | None = None, digest: Digest | None = None) -> str:
    """sha256 of a file unless another digest is given, in blocks; `tick` gets the bytes as they pass."""
    if digest is None:
        import hashlib

        digest = hashlib.sha256()
    with os.fdopen(read_back.open_regular(path), "rb", buffering=0) as file:
        block = memoryview(bytearray(1 << 20))  # one that stays in the processor's cache
        while count := file.readinto(block):
            digest.update(block[:count])
            if tick:
                tick(count)
    return digest.hexdigest()


def write_manifest(folder: Path, known: Mapping[str, str] | None = None, **extra: Any) -> None:
    """List every file with its size and checksum (`known`: as it was written); written last, so its presence means 'complete'.

    XXH3 finds damage as surely as SHA-256 does, for a tenth of the processor's time, which a save takes from the steps.
    The list has a checksum of its own: without it, a flipped bit in `format` would look like a newer version.
    """
    import xxhash

    files = {
        (name := str(path.relative_to(folder))): {
            "bytes": path.stat().st_size,
            "xxh3_128": (known or {}).get(name) or hash_file(path, digest=xxhash.xxh3_128()),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
    manifest = {**extra, **VERSIONS, "files": files}
    write_json(folder / "manifest.json", sealed(manifest))


def _check(manifest: Mapping[str, Any]) -> str:
    """The checksum of a manifest's content, its own `check` left out."""
    import xxhash

    content = {name: value for name, value in manifest.items() if name != "check"}
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the checksum of its content, so that damage in it is found when it is read."""
    return {**content, "check": _check(json.loads(json.dumps(content)))}  # as a reader will find it


def is_whole(record: Mapping[str, Any]) -> bool:
    """Whether a sealed record is as it was written."""
    try:
        return record.get("check") == _check(record)
    except (RecursionError, ValueError):  # nested deeper than anything that we write; text that is no text
        return False


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder; None where it is missing or damaged in any way."""
    found = read_json(folder / "manifest.json")
    if not isinstance(found, dict):
        return None
    if {"check", *VERSIONS} & found.keys() and not is_whole(found):  # earlier versions had no check
        return None
    files = found.get("files")
    return found if version_of(found) > FORMAT or (files and isinstance(files, dict)) else None


def newer_format(folder: Path) -> int | None:
    """The format of a folder that a newer version wrote; None where this one can read it, or it is damaged."""
    manifest = _read_manifest(folder)
    found = version_of(manifest) if manifest else FORMAT
    return found if found > FORMAT else None


def verify_manifest(folder: Path, deep: bool = True, tick: Callable[[int], None] | None = None) -> str | None:
    """None if the folder is what its manifest says, else the reason in words; damage in the manifest is a reason too."""
    if not (folder / "manifest.json").exists():
        return "manifest.json is missing (the save did not finish)"
    manifest = _read_manifest(folder)
    if manifest is None:
        return "manifest.json is damaged"
    if version_of(manifest) > FORMAT:
        return f"it has format {version_of(manifest)}, and this version reads up to format {FORMAT}"
    for name, expected in manifest["files"].items():
        try:
            reason = _verify_file(folder, name, expected, tick if deep else None, deep)
        except (OSError, ValueError) as error:  # a name that no file can have, a disk that cannot be read
            reason = f"{name!r} cannot be read: {error}"
        if reason:
            return reason
    return None


def _verify_file(folder: Path, name: str, expected: Any, tick: Callable[[int], None] | None, deep: bool) -> str | None:
    """The same for one file of the list."""
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    if not inside or not isinstance(expected, dict) or type(expected.get("bytes")) is not int:
        return f"manifest.json is damaged (at {name!r})"
    path = folder / name
    if not path.is_file():
        return f"{name} is missing"
    if (size := path.stat().st_size) != expected["bytes"]:
        return f"{name} has {size:,} bytes, expected {expected['bytes']:,}"
    if deep and not _matches(path, expected, tick):
        return f"{name} does not match its checksum"
    return None


def _matches(path: Path, expected: dict[str, Any], tick: Callable[[int], None] | None) -> bool:
    if "sha256" in expected:  # of earlier versions
        return bool(hash_file(path, tick) == expected["sha256"])
    import xxhash

    return hash_file(path, tick, xxhash.xxh3_128()) == str(expected.get("xxh3_128"))


# ---------------------------------------------------------------- who runs it


def identity() -> dict[str, Any]:
    """This process, as other processes and hosts can recognise it."""
    pid = os.getpid()
    return {"host": os.uname().nodename, "boot_id": boot_id(), "pid": pid, "pid_start": pid_start(pid)}


def is_alive(who: dict[str, Any]) -> bool:
    """Whether the process that `identity` described still runs on this host."""
    who = read_back.without_damage(who, read_back.HOLDER)
    same_boot = who.get("boot_id") == boot_id()
    return same_boot and bool(who.get("pid_start")) and pid_start(who.get("pid") or 0) == who["pid_start"]


def _status_age_s(run: RunDir) -> float:
    """Seconds since the run's parent last wrote its status; infinite if it never did."""
    try:
        return time.time() - run.status.stat().st_mtime
    except OSError:
        return float("inf")


def is_running(run: RunDir) -> bool:
    """Whether a process holds the run's lock, here or (by its heartbeat) on another host."""
    return run.lock.exists() and (is_held(run.lock) or _runs_elsewhere(run))


def _runs_elsewhere(run: RunDir) -> bool:
    status = read_status(run)
    other_host = status.get("host") not in (None, os.uname().nodename)
    return other_host and status.get("state") == "running" and _status_age_s(run) < _HEARTBEAT_DEAD_S


def take_lock(run: RunDir) -> int:
    """One run, one owner. The descriptor is passed to the child, so a surviving child still holds it."""
    try:
        fd = open_lock(run.lock)
    except OSError as error:
        raise cannot_write(run.lock, error) from error
    if not try_lock(fd, tries=8):
        holder = read_holder(run.lock)
        os.close(fd)
        raise _already_running(run, holder)
    if _runs_elsewhere(run):
        os.close(fd)
        raise _already_running(run, read_status(run))
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({**identity(), "t": time.time()}).encode(), 0)
    except OSError as error:
        os.close(fd)
        raise cannot_write(run.lock, error) from error
    return fd


def read_holder(lock: Path) -> dict[str, Any]:
    """Who wrote into a lock file; empty where nobody did, or it cannot be read."""
    return read_back.read_object(lock, read_back.HOLDER)[0]


def _already_running(run: RunDir, holder: dict[str, Any]) -> AlreadyRunning:
    who = f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}"
    return AlreadyRunning(
        f"run {run.name} is already running",
        f"{who} holds {run.lock}",
        f"look at it with: lamp watch {run.address}; or end it with: lamp stop {run.address}",
    )
