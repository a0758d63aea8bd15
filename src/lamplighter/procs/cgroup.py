"""Control groups: what of the machine's memory, time and processes we may use. A container is one; both versions.

In:  /proc/self/cgroup and the files of /sys/fs/cgroup.
Out: folders, numbers, the limits of memory with what they leave. Nothing where there are none (another system than Linux).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes a huge number where there is no limit
_MEMORY = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


@dataclass(frozen=True)
class MemoryLimit:
    """One group that limits memory; files in its cache that the kernel can drop are not counted as used."""

    folder: Path
    bytes: int
    used: int

    @property
    def left(self) -> int:
        return max(0, self.bytes - self.used)


def folders(controller: str, pid: int | None = None) -> list[Path]:
    """The groups of a process (ours) for one controller, from its own to the outermost; a limit anywhere on the way up counts."""
    found: list[Path] = []
    for row in _read(OWN if pid is None else Path(f"/proc/{pid}/cgroup")).splitlines():
        _, controllers, path = row.split(":", 2)
        if controllers == "":
            bases = [ROOT, ROOT / "unified"]
        elif controller in controllers.split(","):
            bases = [ROOT / controller, ROOT / controllers]
        else:
            continue
        for base in bases:  # inside a container the path is the host's, and only the base is there
            inner = base / path.lstrip("/")
            found += [folder for folder in (inner, *inner.parents) if folder.is_relative_to(base)]
    return list(dict.fromkeys(found))


def smallest(controller: str, *names: str) -> int | None:
    """The smallest number in any of these files of our groups; 'max' and absent files do not count."""
    found = [_number(folder / name) for folder in folders(controller) for name in names]
    return min((number for number in found if number is not None), default=None)


def memory_limits() -> list[MemoryLimit]:
    """Every limit of memory that holds for us."""
    found = []
    for folder in folders("memory"):
        for limit, usage in _MEMORY:
            most, now = _number(folder / limit), _number(folder / usage)
            if most is not None and now is not None:
                found.append(MemoryLimit(folder, most, max(0, now - _droppable(folder))))
    return found


def is_frozen(pid: int) -> bool:
    """Whether nothing of its group runs until somebody thaws it (docker pause, systemctl freeze, a suspended job)."""
    states = [_read(folder / "freezer.state").strip() for folder in folders("freezer", pid)]
    events = [_read(folder / "cgroup.events") for folder in folders("freezer", pid)]
    return "FROZEN" in states or any("frozen 1" in one.splitlines() for one in events)


def core_quota() -> float | None:
    """Cores' worth of time that the groups allow; None without a limit."""
    found = []
    for folder in folders("cpu"):
        words = _read(folder / "cpu.max").split() or [
            _read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        ]
        if len(words) == 2 and all(word.isdecimal() for word in words):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def _droppable(folder: Path) -> int:
    rows = [row.split() for row in _read(folder / "memory.stat").splitlines()]
    sizes = {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
    return sizes.get("total_inactive_file", sizes.get("inactive_file", 0))


def _number(path: Path) -> int | None:
    word = _read(path).strip()
    return int(word) if word.isdecimal() and int(word) < _UNLIMITED else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # no such controller here
        return ""
