"""Probes of the settings and the disk: the plan's verdict, saves, warm-up, threads; room and speed where runs are kept.

In:  the run; the plan's figures, by `lamp plan` itself (one arithmetic for both); the cores; the runs folder.
Out: Findings, with the fields that would be changed. The only file that is written has no name: it is gone whatever happens.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamplighter.config import OPTIMIZERS, OptimizerKind, Resolved, dump, parse_overrides
from lamplighter.doctor.probe import Finding, ProbeContext, fault, finding, ok, skip, warn
from lamplighter.doctor.runner import patience
from lamplighter.doctor.system import memory_left, oversubscribed
from lamplighter.errors import BadConfig, LampError, RefusedByPlan
from lamplighter.plan.memory import GIB
from lamplighter.plan.speed import span
from lamplighter.procs import cgroup
from lamplighter.procs.pool import usable_cores
from lamplighter.rundir import NETWORK_FILE_SYSTEMS, dollars, file_system, free_bytes, human_bytes, write_atomic

_PLAN_S = 45.0
_NOT_PLANNED = "the data must be counted for it, and that takes longer than a probe may (lamp plan, lamp data stats)"
_BLOCK = 4 << 20
_MOST_BYTES = 64 << 20
_MOST_S = 3.0
_FEW_INODES = 5_000
_SLOW_SHARE = 0.1  # of the time between two saves
_CHECKPOINT_SPARE = 1.1
_OTHER_PLACE = "free some space, or another place with --runs-dir"


# ---------------------------------------------------------------- the plan


@dataclass(frozen=True)
class PlanFigures:
    """The plan's figures, as --json gives them."""

    figures: dict[str, Any]
    optimizer: OptimizerKind = OPTIMIZERS["adamw"]

    @property
    def checkpoint_bytes(self) -> int:
        return self.optimizer.checkpoint(int(self.figures["params"]), int(self.figures.get("hidden", 0)))

    @property
    def seconds(self) -> float:
        return 3600.0 * float(self.figures["hours"])


def plan(context: ProbeContext) -> PlanFigures | None:
    """`lamp plan --json` of the very settings, on the device that it chooses by itself; None where that takes too long."""
    known, file = context.scratch / "plan.json", context.scratch / "plan.yaml"
    if known.exists():  # of an earlier probe of this examination
        return PlanFigures(json.loads(known.read_text()), context.run.train.optimizer_kind)
    file.write_text(dump(Resolved(context.run)))
    command = [sys.executable, "-m", "lamplighter", "plan", str(file), "--json"]
    try:
        done = subprocess.run(
            [*command, "--runs-dir", str(context.runs_dir)],
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


def _plan_if_any(context: ProbeContext) -> PlanFigures | None:
    """For the probes after that of the plan, which has told what is wrong with it."""
    try:
        return plan(context)
    except LampError:  # the probe of the plan has said it
        return None


def planned(context: ProbeContext) -> Iterator[Finding]:
    """Memory, time, money and disk, as `lamp plan` sees them."""
    context.now("planning on paper")
    paper = plan(context)
    if paper is None:
        yield skip(f"not planned on paper: {_NOT_PLANNED}")
        return
    figures, budget = paper.figures, context.run.budget
    device, hours, memory, usd = (figures[name] for name in ("device", "hours", "memory_gib", "usd"))
    remedy, settings = _cheapest(figures)
    for reason in figures["reasons"]:
        why = f"lamp plan has the arithmetic; on {device}"
        yield fault(f"this run cannot succeed: {reason}", why, remedy, "no_go", settings=settings)
        settings = {}  # one change is for all reasons
    for warning in figures["warnings"]:
        if not str(warning).startswith("warm-up"):  # the next probe says it, with the setting
            yield warn(str(warning), "from lamp plan", "lamp plan shows the whole")
    if budget.usd_per_hour is not None and budget.usd is None and budget.hours is None:
        what = f"the machine costs ${budget.usd_per_hour}/h, and nothing stops this run before the credit ends"
        advice = f"--budget.usd {max(1.0, 1.2 * usd):.0f} stops it, saved, before more is spent"
        yield warn(what, f"it is expected to cost {dollars(usd)}", advice, "budget")
    if device == "cpu":
        yield from judge_memory(float(memory), *memory_left())
    money = f", {dollars(usd)}" if usd is not None else ""
    sums = f"{figures['params']:,} parameters, {figures['tokens']:,} tokens, {memory:.1f} GiB"
    told = {"hours": float(hours), "memory_gib": float(memory)}
    yield ok(f"{sums}, about {span(float(hours))}{money} on {device}", figures=told)


def judge_memory(need_gib: float, left: int, limit: int | None) -> Iterator[Finding]:
    """The machine may have it while our control group may not: the kernel kills the run then, without a word."""
    if limit is not None and need_gib * GIB > left:
        what = f"{need_gib:.1f} GiB are needed, and the control group leaves {left / GIB:.1f} of {limit / GIB:.1f} GiB"
        advice = "a larger container, a smaller train.micro_batch, or train.recompute true"
        why, settings = "the kernel kills the process that goes beyond it", {"train.recompute": True}
        yield fault(what, why, advice, "rss_oom", settings=settings)


def _cheapest(figures: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The plan's cheapest change in words; as fields too where the model stays what it is, for that is not ours to change."""
    if not figures["changes"]:
        return "another device (lamp plan --on), or a much smaller model", {}
    words = str(figures["changes"][0]["settings"])
    _, found = parse_overrides(shlex.split(words))
    same_model = not any(name.startswith(("model.", "data.")) for name in found)
    return words, {name: given[0] for name, given in found.items()} if same_model else {}


# ---------------------------------------------------------------- schedule, saves, threads


def schedule_and_saves(context: ProbeContext) -> Iterator[Finding]:
    """A toy on a long run, no save before the end, a warm-up that takes most of it."""
    context.now("importing torch")
    from lamplighter.train import guard

    run, paper = context.run, _plan_if_any(context)
    steps = run.train.steps or (int(paper.figures["steps"]) if paper else None)
    if steps is None:
        yield ok("how many steps there will be, only the data can tell")
        return
    saves = {"save.every_s": 600.0}
    if paper is not None:
        try:
            guard.refuse_long_runs(run.save, context.preset, paper.seconds, steps, force=False)
        except BadConfig as error:
            is_toy = "save" not in error.what
            cause, settings = ("toy", {}) if is_toy else ("no_save", saves)
            yield fault(error.what, error.why, error.next, cause, settings=settings)
    if not 0 < run.save.every_steps < steps and not run.save.every_s:
        what = f"no save is due before the end: save.every_steps is {run.save.every_steps}, the run has {steps} steps"
        yield warn(what, "a crash would cost everything", cause="no_save", settings=saves)
    if run.train.warmup_steps is not None:
        yield judge_warmup(run.train.warmup_steps, steps, guard.WARMUP_SHARE)
    else:
        yield ok("warm-up by default: 5 % of the run, at most 2,000 steps")


def judge_warmup(warmup: int, steps: int, most: float) -> Finding:
    """A warm-up that was counted in the wrong unit takes most of the run, or never ends."""
    share, settings = warmup / steps, {"train.warmup_steps": max(1, steps // 20)}
    if share <= most:
        return ok(f"warm-up {warmup:,} of {steps:,} steps ({share:.1%})", figures={"share": share})
    whole = "never ends" if share > 1 else f"takes {share:.0%} of the run"
    return finding(
        "fault" if share > 1 else "warn",
        f"warm-up {whole}: {warmup:,} of {steps:,} optimizer steps",
        "under 10 % is usual; was it counted in micro-batches?",
        cause="lr_zero",
        settings=settings,
        figures={"share": share},
    )


def threads(context: ProbeContext) -> Iterator[Finding]:
    """Threads and workers against the cores that may be used."""
    quota, wanted, workers = cgroup.core_quota(), context.run.train.threads or 0, context.run.data.workers or 0
    cores = usable_cores() if quota is None else max(1, min(usable_cores(), int(quota)))
    if wanted > cores:
        yield oversubscribed("train.threads", wanted, cores, settings={"train.threads": cores})
    if workers > 2 * cores:
        yield oversubscribed("data.workers", workers, cores, settings={"data.workers": cores})
    if wanted <= cores and workers <= 2 * cores:
        yield ok(f"{wanted or cores} threads, {workers or cores} workers, {cores} cores")


# ---------------------------------------------------------------- the disk


def disk(context: ProbeContext) -> Iterator[Finding]:
    """Room, inodes, kind, speed."""
    where = context.runs_dir
    while not where.exists():
        where = where.parent
    context.now("planning what will be written")
    paper = _plan_if_any(context)
    yield from judge_room(context, paper, where, free_bytes(where))
    kind = file_system(where)
    if kind.startswith(NETWORK_FILE_SYSTEMS) or kind.startswith("fuse"):
        what = f"{where} is on {kind}, a file system over a network or in user space"
        why = "a save waits for it; locks and mapped memory behave otherwise there"
        yield warn(what, why, "--runs-dir on a local disk, and copy checkpoints later", culprit={"path": str(where)})
    context.now(f"writing to {where}")
    try:
        written, read = measure(where)
    except OSError as error:
        cause = "disk_full" if error.errno == errno.ENOSPC else "cannot_write"
        what, why = f"cannot write to {where}: {error.strerror}", f"tried {human_bytes(_MOST_BYTES)} in a nameless file"
        yield fault(what, why, _OTHER_PLACE, cause, culprit={"path": str(where)})
        return
    yield judge_speed(context, paper, where, written, read)


def judge_room(context: ProbeContext, paper: PlanFigures | None, where: Path, free: int) -> Iterator[Finding]:
    """What the run writes against what is free."""
    room, place = os.statvfs(where), {"path": str(where)}
    if room.f_files and room.f_favail < _FEW_INODES:
        what, why = f"{room.f_favail:,} more files can be made on {where} (inodes)", "space may be free all the same"
        advice = "remove folders of many small files"
        yield finding("fault" if room.f_favail < 100 else "warn", what, why, advice, "disk_full", culprit=place)
    if paper is None:
        yield ok(f"{human_bytes(free)} are free in {where}", figures={"free_bytes": free})
        return
    save, keep = paper.checkpoint_bytes, context.run.save.keep
    need = save * (keep + 2)
    sums = f"{keep} kept, the best and one being written, {human_bytes(save)} each"
    figures, have = {"free_bytes": float(free), "need_bytes": float(need)}, f"{human_bytes(free)} are free in {where}"
    if free < save * _CHECKPOINT_SPARE:
        what, why = f"not even one checkpoint fits: {human_bytes(save)} are needed, {have}", "the first save would fail"
        yield fault(what, why, _OTHER_PLACE, "disk_full", culprit=place, figures=figures)
    elif free < need:
        fits = max(1, int(free / save) - 2)
        settings = {"save.keep": fits} if fits < keep else {}
        what = f"{human_bytes(need)} are needed for checkpoints, {have}"
        advice = f"--save.keep {fits}, or another place with --runs-dir"
        yield warn(what, sums, advice, "disk_full", culprit=place, settings=settings, figures=figures)
    else:
        yield ok(f"{have}, {human_bytes(need)} are needed ({sums})", figures=figures)


def measure(where: Path) -> tuple[float, float]:
    """Bytes a second, written through to the disk and read back, over at most 64 MB or 3 s each."""
    block = os.urandom(_BLOCK)  # some file systems compress
    with tempfile.TemporaryFile(dir=where, prefix=".lamp-doctor-", buffering=0) as file:
        fd, started, done = file.fileno(), time.perf_counter(), 0
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
    if not every or takes <= _SLOW_SHARE * every:
        return ok(f"{speeds}; a checkpoint takes about {takes:.1f} s", figures=figures)
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
