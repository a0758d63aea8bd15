"""Probes of the settings and the disk: the plan's verdict, saves, warm-up, threads; room and speed where runs are kept.

In:  the run; the plan's figures, by `lamp plan` itself (one arithmetic for both); the cores; the runs folder.
Out: Findings, with the fields that would be changed. The only file that is written has no name: it is gone whatever happens.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamplighter.config import OPTIMIZERS, OptimizerKind, Resolved, dump, parse_overrides
from lamplighter.doctor.probe import Finding, ProbeContext, fault, ok, warn
from lamplighter.doctor.runner import patience
from lamplighter.doctor.system import memory_left
from lamplighter.errors import BadConfig, LampError, RefusedByPlan
from lamplighter.procs import cgroup
from lamplighter.procs.pool import usable_cores
from lamplighter.rundir import NETWORK_FILE_SYSTEMS, file_system, free_bytes, human_bytes, write_atomic

_PLAN_S = 45.0
_NOT_PLANNED = "the data must be counted for it, and that takes longer than a probe may (lamp plan, lamp data stats)"


@dataclass(frozen=True)
class PlanFigures:
    """The plan's figures, as --json gives them."""

    figures: dict[str, Any]
    optimizer: OptimizerKind = OPTIMIZERS["adamw"]

    @property
    def checkpoint_bytes(self) -> int:
        return self.optimizer.checkpoint_bytes * int(self.figures["params"])

    @property
    def seconds(self) -> float:
        return 3600.0 * float(self.figures["hours"])


def plan(context: ProbeContext) -> PlanFigures | None:
    """`lamp plan --json` of the very settings, on the device that it chooses by itself."""
    known = context.scratch / "paper.json"  # of an earlier probe of this examination
    if known.exists():
        return PlanFigures(json.loads(known.read_text()), context.run.train.optimizer_kind)
    file = context.scratch / "paper.yaml"
    file.write_text(dump(Resolved(context.run)))
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "lamplighter.commands",
                "plan",
                str(file),
                "--json",
                "--runs-dir",
                str(context.runs_dir),
            ],
            capture_output=True,
            text=True,
            timeout=_PLAN_S * patience(),
            check=False,
            env={name: value for name, value in os.environ.items() if not name.startswith("LAMP_")},
        )
    except subprocess.TimeoutExpired:  # the data takes too long to count for a probe: NOT_PLANNED is said
        return None
    if done.returncode in (0, RefusedByPlan.code):
        write_atomic(known, done.stdout)
        return PlanFigures(json.loads(done.stdout), context.run.train.optimizer_kind)
    if context.run.train.steps is None:
        return None
    said = dict(line.split(":", 1) for line in done.stderr.splitlines() if ":" in line)
    what, why, advice = (said.get(name, "").strip() for name in ("error", "why", "next"))
    raise BadConfig(what or f"lamp plan left with {done.returncode}", why or done.stderr[-300:], advice)


_GIB = 1 << 30


def planned(context: ProbeContext) -> Iterator[Finding]:
    """Memory, time, money and disk, as `lamp plan` sees them."""
    context.now("planning on paper")
    paper = plan(context)
    if paper is None:
        yield ok(f"not planned on paper: {_NOT_PLANNED}")
        return
    figures = paper.figures
    remedy, neutral = _cheapest(figures)
    for number, reason in enumerate(figures["reasons"]):
        settings = neutral if number == 0 else {}  # one change is for all reasons
        yield fault(
            f"this run cannot succeed: {reason}",
            f"lamp plan has the arithmetic; on {figures['device']}",
            remedy,
            "no_go",
            settings=settings,
        )
    for warning in figures["warnings"]:
        if not str(warning).startswith("warm-up"):  # the next probe says it, with the setting
            yield warn(str(warning), "from lamp plan", "lamp plan shows the whole")
    budget = context.run.budget
    if budget.usd_per_hour is not None and budget.usd is None and budget.hours is None:
        yield warn(
            f"the machine costs ${budget.usd_per_hour}/h, and nothing stops this run before the credit ends",
            f"it is expected to cost ${figures['usd']:,.2f}",
            f"--budget.usd {max(1.0, 1.2 * figures['usd']):.0f} stops it, saved, before more is spent",
            "budget",
        )
    if figures["device"] == "cpu":
        yield from judge_memory(float(figures["memory_gib"]), *memory_left())
    money = f", ${figures['usd']:,.2f}" if figures["usd"] is not None else ""
    yield ok(
        f"{figures['params']:,} parameters, {figures['tokens']:,} tokens, {figures['memory_gib']:.1f} GiB, about {_span(paper.seconds)}{money} on {figures['device']}",
        figures={"hours": float(figures["hours"]), "memory_gib": float(figures["memory_gib"])},
    )


def judge_memory(need_gib: float, left: int, limit: int | None) -> Iterator[Finding]:
    """The machine may have it while our control group may not: the kernel kills the run then, without a word."""
    if limit is not None and need_gib * _GIB > left:
        yield fault(
            f"{need_gib:.1f} GiB are needed, and the control group leaves {left / _GIB:.1f} of {limit / _GIB:.1f} GiB",
            "the kernel kills the process that goes beyond it",
            "a larger container, a smaller train.micro_batch, or train.recompute true",
            "rss_oom",
            settings={"train.recompute": True},
        )


def _cheapest(figures: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The plan's cheapest change in words; as fields too where the model stays what it is, for that is not ours to change."""
    if not figures["changes"]:
        return "another device (lamp plan --on), or a much smaller model", {}
    words = str(figures["changes"][0]["settings"])
    _, found = parse_overrides(shlex.split(words))
    same_model = not any(name.startswith(("model.", "data.")) for name in found)
    return words, {name: given[0] for name, given in found.items()} if same_model else {}


def _span(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:,.1f} h"
    )


def schedule_and_saves(context: ProbeContext) -> Iterator[Finding]:
    """A toy on a long run, no save before the end, a warm-up that takes most of it."""
    context.now("importing torch")
    from lamplighter.train import guard

    run = context.run
    try:
        paper: PlanFigures | None = plan(context)
    except LampError:
        paper = None  # said by the stage before
    steps = run.train.steps or (int(paper.figures["steps"]) if paper else None)
    if steps is None:
        yield ok("how many steps there will be, only the data can tell")
        return
    if paper is not None:
        try:
            guard.refuse_long_runs(run.save, context.preset, paper.seconds, steps, force=False)
        except BadConfig as error:
            saves = {"save.every_s": 600.0} if "save" in error.what else {}
            yield fault(error.what, error.why, error.next, "toy" if not saves else "no_save", settings=saves)
    if not 0 < run.save.every_steps < steps and not run.save.every_s:
        yield warn(
            f"no save is due before the end: save.every_steps is {run.save.every_steps}, the run has {steps} steps",
            "a crash would cost everything",
            "--save.every_s 600",
            "no_save",
            settings={"save.every_s": 600.0},
        )
    if run.train.warmup_steps is not None:
        yield from judge_warmup(run.train.warmup_steps, steps, guard.WARMUP_SHARE)
    else:
        yield ok("warm-up by default: 5 % of the run, at most 2,000 steps")


def judge_warmup(warmup: int, steps: int, most: float) -> Iterator[Finding]:
    """A warm-up that was counted in the wrong unit takes most of the run, or never ends."""
    share, less = warmup / steps, max(1, steps // 20)
    if share > most:
        whole = "never ends" if share > 1 else f"takes {share:.0%} of the run"
        yield Finding(
            "fault" if share > 1 else "warn",
            f"warm-up {whole}: {warmup:,} of {steps:,} optimizer steps",
            "under 10 % is usual; was it counted in micro-batches?",
            f"--train.warmup_steps {less}",
            "lr_zero",
            settings={"train.warmup_steps": less},
            figures={"share": share},
        )
    else:
        yield ok(f"warm-up {warmup:,} of {steps:,} steps ({share:.1%})", figures={"share": share})


def threads(context: ProbeContext) -> Iterator[Finding]:
    """Threads and workers against the cores that may be used."""
    run, quota = context.run, cgroup.core_quota()
    cores = usable_cores() if quota is None else max(1, min(usable_cores(), int(quota)))
    wanted, workers = run.train.threads, run.data.workers
    if wanted is not None and wanted > cores:
        yield warn(
            f"train.threads is {wanted}, and {cores} cores may be used",
            "threads that wait for a core make every product slower",
            f"--train.threads {cores}",
            "oversubscribed",
            settings={"train.threads": cores},
        )
    if workers is not None and workers > 2 * cores:
        yield warn(
            f"data.workers is {workers}, and {cores} cores may be used",
            "each takes memory and a core's time; more than there are cores is no faster",
            f"--data.workers {cores}",
            "oversubscribed",
            settings={"data.workers": cores},
        )
    if (wanted or 0) <= cores and (workers or 0) <= 2 * cores:
        yield ok(f"{wanted or cores} threads, {workers or cores} workers, {cores} cores")


_BLOCK = 4 << 20
_MOST_BYTES = 64 << 20
_MOST_S = 3.0
_FEW_INODES = 5_000
_SLOW_SHARE = 0.1  # of the time between two saves
_CHECKPOINT_SPARE = 1.1


def disk(context: ProbeContext) -> Iterator[Finding]:
    """Room, inodes, kind, speed."""
    where = nearest(context.runs_dir)
    context.now("planning what will be written")
    try:
        paper = plan(context)
    except LampError:
        paper = None  # the probe of the plan says why
    yield from judge_room(context, paper, where, free_bytes(where))
    kind = file_system(where)
    if kind.startswith(NETWORK_FILE_SYSTEMS) or kind.startswith("fuse"):
        yield warn(
            f"{where} is on {kind}, a file system over a network or in user space",
            "a save waits for it; locks and mapped memory behave otherwise there",
            "--runs-dir on a local disk, and copy checkpoints later",
            "",
            culprit={"path": str(where)},
        )
    context.now(f"writing to {where}")
    try:
        written, read = measure(where)
    except OSError as error:
        yield fault(
            f"cannot write to {where}: {error.strerror}",
            f"tried {human_bytes(_MOST_BYTES)} in a file without a name",
            "free some space, or another place with --runs-dir",
            "disk_full" if error.errno == 28 else "cannot_write",
            culprit={"path": str(where)},
        )
        return
    yield judge_speed(context, paper, where, written, read)


def nearest(folder: Path) -> Path:
    """The folder, or the first above it that exists."""
    while not folder.exists():
        folder = folder.parent
    return folder


def judge_room(context: ProbeContext, paper: PlanFigures | None, where: Path, free: int) -> Iterator[Finding]:
    """What the run writes against what is free."""
    room = os.statvfs(where)
    if room.f_files and room.f_favail < _FEW_INODES:
        yield Finding(
            "fault" if room.f_favail < 100 else "warn",
            f"{room.f_favail:,} more files can be made on {where} (inodes)",
            "space may be free all the same",
            "remove folders of many small files",
            "disk_full",
            culprit={"path": str(where)},
        )
    if paper is None:
        yield ok(f"{human_bytes(free)} are free in {where}", figures={"free_bytes": free})
        return
    save, keep = paper.checkpoint_bytes, context.run.save.keep
    need = save * (keep + 2)
    sums = f"{keep} kept, the best and one being written, {human_bytes(save)} each"
    figures = {"free_bytes": float(free), "need_bytes": float(need)}
    if free < save * _CHECKPOINT_SPARE:
        yield fault(
            f"not even one checkpoint fits: {human_bytes(save)} are needed, {human_bytes(free)} are free in {where}",
            "the first save would fail",
            "free some space, or another place with --runs-dir",
            "disk_full",
            culprit={"path": str(where)},
            figures=figures,
        )
    elif free < need:
        fits = max(1, int(free / save) - 2)
        advice = {"save.keep": fits} if fits < keep else {}
        yield warn(
            f"{human_bytes(need)} are needed for checkpoints, {human_bytes(free)} are free in {where}",
            sums,
            f"--save.keep {fits}, or another place with --runs-dir",
            "disk_full",
            culprit={"path": str(where)},
            settings=advice,
            figures=figures,
        )
    else:
        yield ok(f"{human_bytes(free)} are free in {where}, {human_bytes(need)} are needed ({sums})", figures=figures)


@contextmanager
def _nameless(where: Path) -> Iterator[int]:
    """A file that nobody else can see, and that is gone when we are."""
    with tempfile.TemporaryFile(dir=where, prefix=".lamp-doctor-") as file:
        yield file.fileno()


def measure(where: Path) -> tuple[float, float]:
    """Bytes a second, written through to the disk and read back, over at most 64 MB or 3 s each."""
    block = os.urandom(_BLOCK)  # some file systems compress
    with _nameless(where) as fd:
        started, done = time.perf_counter(), 0
        while done < _MOST_BYTES and time.perf_counter() - started < _MOST_S:
            view = memoryview(block)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
            done += _BLOCK
        written = done / (time.perf_counter() - started)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # what is kept in memory would be read from there
        os.lseek(fd, 0, os.SEEK_SET)
        started, done = time.perf_counter(), 0
        while time.perf_counter() - started < _MOST_S and (data := os.read(fd, _BLOCK)):
            done += len(data)
    return written, done / max(1e-6, time.perf_counter() - started)


def judge_speed(context: ProbeContext, paper: PlanFigures | None, where: Path, written: float, read: float) -> Finding:
    """What a save takes, against how often one is due."""
    speeds = f"{human_bytes(written)}/s written through, {human_bytes(read)}/s read in {where}"
    figures = {"write_bytes_per_s": written, "read_bytes_per_s": read}
    if paper is None:
        return ok(speeds, figures=figures)
    takes, every = paper.checkpoint_bytes / written, context.run.save.every_s
    figures["checkpoint_s"] = takes
    if every and takes > _SLOW_SHARE * every:
        longer = float(round(takes / _SLOW_SHARE, -1))
        return warn(
            f"a checkpoint takes about {takes:.0f} s: {speeds}",
            f"one is due every {every:.0f} s, so {takes / every:.0%} of the time the disk is at it",
            f"--save.every_s {longer:.0f}, or --runs-dir on a faster disk",
            "slow_disk",
            culprit={"path": str(where)},
            settings={"save.every_s": longer},
            figures=figures,
        )
    return ok(f"{speeds}; a checkpoint takes about {takes:.1f} s", figures=figures)
