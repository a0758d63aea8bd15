"""Limits of control groups, both versions, as a container sees them; made-up files in place of the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamplighter.procs import cgroup
from lamplighter.procs.cgroup import core_quota, folders, memory_limits, smallest


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroup, "ROOT", tmp_path)
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_version_two_counts_every_limit_on_the_way_up(root: Path) -> None:
    (root / "own").write_text("0::/outer/inner\n")
    write(root / "outer" / "inner", memory__max="max", memory__current="5", cpu__max="max 100000")
    write(root / "outer", memory__max="1000", memory__current="900", cpu__max="150000 100000", pids__max="64")
    (root / "outer" / "memory.stat").write_text("anon 500\ninactive_file 300\n")
    (limit,) = memory_limits()
    assert (limit.folder, limit.bytes, limit.used, limit.left) == (root / "outer", 1000, 600, 400)
    assert core_quota() == 1.5 and smallest("pids", "pids.max") == 64


def test_version_one_has_a_folder_for_each_controller(root: Path) -> None:
    (root / "own").write_text("4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n")
    huge = str(9223372036854771712)
    write(root / "memory", memory__limit_in_bytes=huge, memory__usage_in_bytes="7")
    assert memory_limits() == [], "a huge number is no limit"
    write(root / "memory", memory__limit_in_bytes="500", memory__usage_in_bytes="600")
    (limit,) = memory_limits()
    assert limit.left == 0, "inside a container the path is the host's, and the base counts"
    write(root / "cpu,cpuacct", **{"cpu__cfs_quota_us": "50000", "cpu__cfs_period_us": "100000"})
    assert core_quota() == 0.5
    write(root / "cpu,cpuacct", **{"cpu__cfs_quota_us": "-1"})
    assert core_quota() is None


def test_without_groups_there_is_no_limit(root: Path) -> None:
    assert (folders("memory"), memory_limits(), core_quota(), smallest("pids", "pids.max")) == ([], [], None, None)
