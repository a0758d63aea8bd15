"""Probes of the disk that runs are kept on: room for what the run writes, speed, and what kind of file system it is.

In:  the runs folder, and the plan's figures.
Out: Findings. The only file that is written has no name: it is gone whatever happens.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lamplighter.doctor.plan_probe import Paper, plan
from lamplighter.doctor.probe import Finding, Patient, Stage
from lamplighter.errors import LampError
from lamplighter.rundir import NETWORK_FILE_SYSTEMS, file_system, free_bytes, human_bytes

STAGES = (Stage("settings / disk", "lamplighter.doctor.disk:disk", 60.0),)
BLOCK = 4 << 20
MOST_BYTES = 64 << 20
MOST_S = 3.0
FEW_INODES = 5_000
SLOW_SHARE = 0.1  # of the time between two saves
CHECKPOINT_SPARE = 1.1


def disk(patient: Patient) -> Iterator[Finding]:
    """Room, inodes, kind, speed."""
    where = nearest(patient.runs_dir)
    patient.now("planning what will be written")
    try:
        paper = plan(patient)
    except LampError:
        paper = None  # the probe of the plan says why
    yield from judge_room(patient, paper, where, free_bytes(where))
    kind = file_system(where)
    if kind.startswith(NETWORK_FILE_SYSTEMS) or kind.startswith("fuse"):
        yield Finding("warn", f"{where} is on {kind}, a file system over a network or in user space", "a save waits for it; locks and mapped memory behave otherwise there",
                      "--runs-dir on a local disk, and copy checkpoints later", "", {"path": str(where)})  # fmt: skip
    patient.now(f"writing to {where}")
    try:
        written, read = measure(where)
    except OSError as error:
        yield Finding("fault", f"cannot write to {where}: {error.strerror}", f"tried {human_bytes(MOST_BYTES)} in a file without a name",
                      "free some space, or another place with --runs-dir", "disk_full" if error.errno == 28 else "cannot_write", {"path": str(where)})  # fmt: skip
        return
    yield judge_speed(patient, paper, where, written, read)


def nearest(folder: Path) -> Path:
    """The folder, or the first above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def judge_room(patient: Patient, paper: Paper | None, where: Path, free: int) -> Iterator[Finding]:
    """What the run writes against what is free."""
    room = os.statvfs(where)
    if room.f_files and room.f_favail < FEW_INODES:
        yield Finding("fault" if room.f_favail < 100 else "warn", f"{room.f_favail:,} more files can be made on {where} (inodes)", "space may be free all the same",
                      "remove folders of many small files", "disk_full", {"path": str(where)})  # fmt: skip
    if paper is None:
        yield Finding("ok", f"{human_bytes(free)} are free in {where}", figures={"free_bytes": free})
        return
    save, keep = paper.checkpoint_bytes, patient.run.save.keep
    need = save * (keep + 2)
    sums = f"{keep} kept, the best and one being written, {human_bytes(save)} each"
    figures = {"free_bytes": float(free), "need_bytes": float(need)}
    if free < save * CHECKPOINT_SPARE:
        yield Finding("fault", f"not even one checkpoint fits: {human_bytes(save)} are needed, {human_bytes(free)} are free in {where}", "the first save would fail",
                      "free some space, or another place with --runs-dir", "disk_full", {"path": str(where)}, figures=figures)  # fmt: skip
    elif free < need:
        fits = max(1, int(free / save) - 2)
        advice = {"save.keep": fits} if fits < keep else {}
        yield Finding("warn", f"{human_bytes(need)} are needed for checkpoints, {human_bytes(free)} are free in {where}", sums,
                      f"--save.keep {fits}, or another place with --runs-dir", "disk_full", {"path": str(where)}, advice, figures)  # fmt: skip
    else:
        yield Finding("ok", f"{human_bytes(free)} are free in {where}, {human_bytes(need)} are needed ({sums})", figures=figures)  # fmt: skip


@contextmanager
def _nameless(where: Path) -> Iterator[int]:
    """A file that nobody else can see, and that is gone when we are."""
    with tempfile.TemporaryFile(dir=where, prefix=".lamp-doctor-") as file:
        yield file.fileno()


def measure(where: Path) -> tuple[float, float]:
    """Bytes a second, written through to the disk and read back, over at most 64 MB or 3 s each."""
    block = os.urandom(BLOCK)  # some file systems compress
    with _nameless(where) as fd:
        started, done = time.perf_counter(), 0
        while done < MOST_BYTES and time.perf_counter() - started < MOST_S:
            view = memoryview(block)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            done += BLOCK
        written = done / (time.perf_counter() - started)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what is kept in memory would be read from there
        os.lseek(fd, 0, os.SEEK_SET)
        started, done = time.perf_counter(), 0
        while time.perf_counter() - started < MOST_S and (data := os.read(fd, BLOCK)):
            done += len(data)
    return written, done / max(1e-6, time.perf_counter() - started)


def judge_speed(patient: Patient, paper: Paper | None, where: Path, written: float, read: float) -> Finding:
    """What a save takes, against how often one is due."""
    speeds = f"{human_bytes(written)}/s written through, {human_bytes(read)}/s read in {where}"
    figures = {"write_bytes_per_s": written, "read_bytes_per_s": read}
    if paper is None:
        return Finding("ok", speeds, figures=figures)
    takes, every = paper.checkpoint_bytes / written, patient.run.save.every_s
    figures["checkpoint_s"] = takes
    if every and takes > SLOW_SHARE * every:
        longer = float(round(takes / SLOW_SHARE, -1))
        return Finding("warn", f"a checkpoint takes about {takes:.0f} s: {speeds}", f"one is due every {every:.0f} s, so {takes / every:.0%} of the time the disk is at it",
                       f"--save.every_s {longer:.0f}, or --runs-dir on a faster disk", "slow_disk", {"path": str(where)}, {"save.every_s": longer}, figures)  # fmt: skip
    return Finding("ok", f"{speeds}; a checkpoint takes about {takes:.1f} s", figures=figures)
