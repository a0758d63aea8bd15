"""Probes of the settings alone: the plan's verdict, saves, warm-up, threads. Nothing is trained.

In:  the run, the plan's figures, the cores.
Out: Findings, with the fields that would be changed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from lamplighter.config import parse_overrides
from lamplighter.doctor.limits import memory_left
from lamplighter.doctor.plan_probe import NOT_PLANNED, Paper, plan
from lamplighter.doctor.probe import Finding, Patient, Stage
from lamplighter.errors import BadConfig, LampError
from lamplighter.procs import cgroup
from lamplighter.procs.pool import usable_cores

STAGES = (
    Stage("settings / plan", "lamplighter.doctor.settings:planned", 60.0),
    Stage("settings / schedule and saves", "lamplighter.doctor.settings:schedule_and_saves", 60.0),
    Stage("settings / threads", "lamplighter.doctor.settings:threads", 20.0),
)
GIB = 1 << 30


def planned(patient: Patient) -> Iterator[Finding]:
    """Memory, time, money and disk, as `lamp plan` sees them."""
    patient.now("planning on paper")
    paper = plan(patient)
    if paper is None:
        yield Finding("ok", f"not planned on paper: {NOT_PLANNED}")
        return
    figures = paper.figures
    remedy, neutral = _cheapest(figures)
    for number, reason in enumerate(figures["reasons"]):
        settings = neutral if number == 0 else {}  # one change is for all reasons
        yield Finding("fault", f"this run cannot succeed: {reason}", f"lamp plan has the arithmetic; on {figures['device']}", remedy, "no_go", settings=settings)  # fmt: skip
    for warning in figures["warnings"]:
        if not str(warning).startswith("warm-up"):  # the next probe says it, with the setting
            yield Finding("warn", str(warning), "from lamp plan", "lamp plan shows the whole")
    budget = patient.run.budget
    if budget.usd_per_hour is not None and budget.usd is None and budget.hours is None:
        yield Finding(
            "warn",
            f"the machine costs ${budget.usd_per_hour}/h, and nothing stops this run before the credit ends",
            f"it is expected to cost ${figures['usd']:,.2f}",
            f"--budget.usd {max(1.0, 1.2 * figures['usd']):.0f} stops it, saved, before more is spent",
            "budget",
        )
    if figures["device"] == "cpu":
        yield from judge_memory(float(figures["memory_gib"]), *memory_left())
    money = f", ${figures['usd']:,.2f}" if figures["usd"] is not None else ""
    yield Finding("ok", f"{figures['params']:,} parameters, {figures['tokens']:,} tokens, {figures['memory_gib']:.1f} GiB, about {_span(paper.seconds)}{money} on {figures['device']}",
                  figures={"hours": float(figures["hours"]), "memory_gib": float(figures["memory_gib"])})  # fmt: skip


def judge_memory(need_gib: float, left: int, limit: int | None) -> Iterator[Finding]:
    """The machine may have it while our control group may not: the kernel kills the run then, without a word."""
    if limit is not None and need_gib * GIB > left:
        yield Finding("fault", f"{need_gib:.1f} GiB are needed, and the control group leaves {left / GIB:.1f} of {limit / GIB:.1f} GiB", "the kernel kills the process that goes beyond it",
                      "a larger container, a smaller train.micro_batch, or train.recompute true", "rss_oom", settings={"train.recompute": True})  # fmt: skip


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


def schedule_and_saves(patient: Patient) -> Iterator[Finding]:
    """A toy on a long run, no save before the end, a warm-up that takes most of it."""
    patient.now("importing torch")
    from lamplighter.train import guard

    run = patient.run
    try:
        paper: Paper | None = plan(patient)
    except LampError:
        paper = None  # said by the stage before
    steps = run.train.steps or (int(paper.figures["steps"]) if paper else None)
    if steps is None:
        yield Finding("ok", "how many steps there will be, only the data can tell")
        return
    if paper is not None:
        try:
            guard.refuse_long_runs(run, patient.preset, paper.seconds, steps, force=False)
        except BadConfig as error:
            saves = {"save.every_s": 600.0} if "save" in error.what else {}
            yield Finding("fault", error.what, error.why, error.next, "toy" if not saves else "no_save", settings=saves)
    if not 0 < run.save.every_steps < steps and not run.save.every_s:
        yield Finding("warn", f"no save is due before the end: save.every_steps is {run.save.every_steps}, the run has {steps} steps", "a crash would cost everything",
                      "--save.every_s 600", "no_save", settings={"save.every_s": 600.0})  # fmt: skip
    if run.train.warmup_steps is not None:
        yield from judge_warmup(run.train.warmup_steps, steps, guard.WARMUP_SHARE)
    else:
        yield Finding("ok", "warm-up by default: 5 % of the run, at most 2,000 steps")


def judge_warmup(warmup: int, steps: int, most: float) -> Iterator[Finding]:
    """A warm-up that was counted in the wrong unit takes most of the run, or never ends."""
    share, less = warmup / steps, max(1, steps // 20)
    if share > most:
        whole = "never ends" if share > 1 else f"takes {share:.0%} of the run"
        yield Finding("fault" if share > 1 else "warn", f"warm-up {whole}: {warmup:,} of {steps:,} optimizer steps", "under 10 % is usual; was it counted in micro-batches?",
                      f"--train.warmup_steps {less}", "lr_zero", settings={"train.warmup_steps": less}, figures={"share": share})  # fmt: skip
    else:
        yield Finding("ok", f"warm-up {warmup:,} of {steps:,} steps ({share:.1%})", figures={"share": share})


def threads(patient: Patient) -> Iterator[Finding]:
    """Threads and workers against the cores that may be used."""
    run, quota = patient.run, cgroup.core_quota()
    cores = usable_cores() if quota is None else max(1, min(usable_cores(), int(quota)))
    wanted, workers = run.train.threads, run.data.workers
    if wanted is not None and wanted > cores:
        yield Finding("warn", f"train.threads is {wanted}, and {cores} cores may be used", "threads that wait for a core make every product slower",
                      f"--train.threads {cores}", "oversubscribed", settings={"train.threads": cores})  # fmt: skip
    if workers is not None and workers > 2 * cores:
        yield Finding("warn", f"data.workers is {workers}, and {cores} cores may be used", "each takes memory and a core's time; more than there are cores is no faster",
                      f"--data.workers {cores}", "oversubscribed", settings={"data.workers": cores})  # fmt: skip
    if (wanted or 0) <= cores and (workers or 0) <= 2 * cores:
        yield Finding("ok", f"{wanted or cores} threads, {workers or cores} workers, {cores} cores")
