"""lamp plan: memory, time, money and disk of a run, before anything is started; and the plan phase of a training run.

In:  a run as `lamp train` takes it, and a device; of a training run, its data open and its machine known.
Out: the arithmetic on stdout (or JSON); 0 for go, 77 for no-go. On paper it happens in the parent, without torch and in a
     second; where there is text to count, or steps to measure, in a child under watch. Nothing is written, but by a training
     run: plan.txt and plan.json in its folder.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.commands import write
from lamplighter.commands.arguments import parse
from lamplighter.errors import RefusedByPlan, UsageError
from lamplighter.rundir import CACHE_NAME, RunDir, cannot_write, free_bytes, human_bytes, write_atomic

if TYPE_CHECKING:
    from lamplighter.config import Run
    from lamplighter.data.batch_source import Feed
    from lamplighter.model.build import Built
    from lamplighter.plan.estimate import Plan
    from lamplighter.plan.job import Job
    from lamplighter.plan.request import Known
    from lamplighter.train.gpus import Device
    from lamplighter.train.hardware import Machine

QUICK_S = 0.1  # to measure how fast numbers move: every start pays it
LONG_H = 0.25  # from here on many epochs are worth a warning at the start of a run


def _plan_flags(
    run_yaml: Path | None = None,
    /,
    *,
    preset: str | None = None,
    on: str | None = None,
    mfu: float | None = None,
    measure: bool = False,
    fit: bool = False,
    what_if: bool = False,
    json: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp plan` takes besides fields."""


def plan(words: list[str]) -> int:
    """On paper here; with text to count or steps to try, in a child."""
    from lamplighter.config import dump, parse_overrides, resolve
    from lamplighter.plan import request as paper

    rest, overrides = parse_overrides(words)
    flags = parse("plan", _plan_flags, rest)
    resolved = resolve(flags["preset"], flags["run_yaml"], overrides)
    wish = paper.Wish(
        on=flags["on"],
        mfu=flags["mfu"],
        what_if=flags["what_if"],
        as_json=flags["json"],
        runs_dir=str(flags["runs_dir"]),
    )
    tries = flags["measure"] or flags["fit"]
    if tries and wish.on:
        why = "a few real steps can only be made on this machine"
        raise UsageError("--measure and --fit do not go with --on", why, "leave one of them out")
    data = resolved.run.data
    if tries or data.paths or data.source or paper.is_own(resolved.run):
        from lamplighter.commands.session import session

        request = {"wish": asdict(wish), "measure": flags["measure"], "fit": flags["fit"]}
        return session("plan", request, config=dump(resolved))
    text, code = paper.page(resolved.run, wish)
    write(1, text)
    return code


# ---------------------------------------------------------------- lamp plan in the child


def plan_child(folder: RunDir, request: dict[str, Any]) -> int:
    """Count or estimate the text, try a few steps where that is wished for, then the same arithmetic as on paper."""
    with report.phase("import"):
        from lamplighter.config import load_dump
        from lamplighter.plan import request as paper
    run, wish = load_dump(folder.config), paper.Wish(**request["wish"])
    known = paper.Known()
    if (run.data.paths or run.data.source) and not run.data.stream:
        known = _look_at_text(run, Path(wish.runs_dir) / CACHE_NAME, folder.path)
    if request["measure"] or request["fit"]:
        known = _try_steps(run, known, request["fit"])
    with report.phase("plan"):
        text, code = paper.page(run, wish, known)
    report.result(text)
    return code


def _look_at_text(run: Run, cache: Path, scratch: Path) -> Known:
    from lamplighter.data import token_estimate
    from lamplighter.data.setup import open_source
    from lamplighter.plan.job import Text
    from lamplighter.plan.request import Known

    source = open_source(run, cache if cache.is_dir() else scratch / CACHE_NAME)
    found = token_estimate.look(run, source, cache)
    text = Text(found.tokens, found.how, found.counted, found.val_tokens, found.padding, found.samples, found.noun)
    return Known(text, found.vocab_size, segments=found.segments, row_tokens=found.row_tokens)


def _try_steps(run: Run, known: Known, fit: bool) -> Known:
    from lamplighter.plan import dry_run
    from lamplighter.plan.job import vocabulary

    vocab_size = known.vocab_size or vocabulary(run)
    micro = run.train.micro_batch or run.train.batch_size
    tried = dry_run.attempt(run, vocab_size, micro)
    own = tried.told.get("parameters")
    known = replace(known, measured=tried.measured, device=_device_of(tried.told))
    if ":" in run.model.family and run.model.init_from is None:
        known = replace(known, own_params=own)
    return replace(known, largest=dry_run.largest_that_fits(run, vocab_size, tried.measured)) if fit else known


def _device_of(told: dict[str, Any]) -> Device | None:
    """The GPU on which the steps were tried; None for the processor, which is measured anyway."""
    from lamplighter.plan.devices import host_room
    from lamplighter.train.gpus import Device

    if told.get("on_cpu", True):
        return None
    peak = float(told["peak_flops"])
    return Device(told["device"], told["memory_bytes"] / (1 << 30), peak, peak, host_gib=host_room().gib)


# ---------------------------------------------------------------- the plan phase of a run


def plan_run(
    run: Run,
    folder: RunDir,
    where: Machine,
    feed: Feed,
    *,
    vocab_size: int,
    steps: int,
    built: Built | None,
    request: dict[str, Any],
    resumes: bool,
) -> float:
    """Say it, keep it, refuse what cannot be; gives the seconds that the run is expected to take.

    `built` is a model of one's own, whose size only its code knows.
    """
    from lamplighter.plan import render as told
    from lamplighter.plan.alternatives import completed
    from lamplighter.plan.estimate import make, sure_reasons
    from lamplighter.train import guard

    job = _job(run, where, feed, vocab_size=vocab_size, steps=steps, built=built)
    made = make(job, _device(where), free_bytes(folder.path))
    sure = [reason for reason in sure_reasons(made) if not (resumes and reason.startswith(("time", "money")))]
    refused = completed(replace(made, reasons=tuple(sure)))
    _keep(folder, completed(made))
    for line in told.short(made):
        report.note(line)
    report.number(planned_step_s=made.step_s)
    force = bool(request.get("force"))
    if sure and not force:
        first = f"{refused.changes[0].settings} would go, or " if refused.changes else ""
        raise RefusedByPlan(
            f"this run cannot be on {made.device}",
            "; ".join(sure),
            f"{first}insist with --force; all of it: {folder.path}/plan.txt",
        )
    for reason in dict.fromkeys([*sure, *(r for r in made.reasons if r.startswith(("memory", "money", "time")))]):
        report.warn(f"the plan says no: {reason}" + (" (going on: --force)" if sure else ""))
    _warn(run, made, feed)
    guard.refuse_long_runs(run, request.get("preset"), made.hours * 3600, steps, force)
    _check_disk(run, folder, made)
    return made.hours * 3600


def _job(run: Run, where: Machine, feed: Feed, *, vocab_size: int, steps: int, built: Built | None) -> Job:
    from lamplighter.plan.job import Text, job_of, shape_of

    tokens = round(feed.samples * feed.positions_per_step / run.train.batch_size * (1 - feed.padding))
    text = None
    if feed.samples:
        text = Text(tokens, "counted", True, feed.held.targets, feed.padding, feed.samples, feed.noun)
    rows = feed.positions_per_step / run.train.batch_size
    return job_of(
        run,
        shape_of(run, vocab_size),
        steps,
        where.dtype_name,
        text,
        own_params=built.parameters if built is not None else None,
        tokenizer_vocab=vocab_size,
        segments=bool(feed.fingerprint) and not feed.whole_batches and run.data.packing != "windows",
        row_tokens=None if round(rows) == run.data.seq_len else rows,
    )


def _device(where: Machine) -> Device:
    """The machine as it is: torch's own numbers of a GPU, measured rates of a processor."""
    import torch

    from lamplighter.plan import devices
    from lamplighter.train.gpus import Device, Rates

    if where.device.type == "cuda":
        free, total = (size / (1 << 30) for size in torch.cuda.mem_get_info(where.device))
        room = devices.host_room().gib
        return Device(where.name, free, where.peak_flops, where.peak_flops, host_gib=room, total_gib=total)
    device = devices.cpu(Rates(where.peak_flops, devices.stream_rate(QUICK_S)))
    return replace(device, bf16_flops=where.peak_flops if where.dtype_name == "bf16" else None)


def _keep(folder: RunDir, made: Plan) -> None:
    """The whole page in the run's folder."""
    from lamplighter.plan import render as told
    from lamplighter.plan import sanity
    from lamplighter.plan.estimate import as_json

    try:
        write_atomic(folder.path / "plan.txt", "\n".join([*told.tell(made), ""]), durable=False)
        write_atomic(
            folder.path / "plan.json", json.dumps(as_json(made, sanity.warnings(made)), indent=1), durable=False
        )
    except OSError as error:
        raise cannot_write(folder.path / "plan.txt", error) from error


def _warn(run: Run, made: Plan, feed: Feed) -> None:
    """What is odd enough to be said before the first step; the rest is on the page."""
    from lamplighter.plan import sanity

    if feed.padding > sanity.MUCH_PADDING and feed.noun == "windows" and not feed.fingerprint:
        report.warn(
            f"{feed.padding:.0%} of each pass is padding: data.seq_len {run.data.seq_len} is longer than the data"
        )
    for found in sanity.check(made):
        if found.warns and found.name in ("epochs", "saves") and made.hours > LONG_H:
            report.warn(f"{found.name}: {found.text}")


def _check_disk(run: Run, folder: RunDir, made: Plan) -> None:
    """One checkpoint must fit now; the kept ones should."""
    from lamplighter.plan.estimate import checkpoint_bytes
    from lamplighter.train import checkpoint

    size = checkpoint_bytes(made.job)
    room, wanted = free_bytes(folder.path), size * (run.save.keep + 2)
    checkpoint.require_room(folder.checkpoints, int(size * checkpoint.SPARE))
    if room < wanted:
        report.warn(f"{human_bytes(room)} are free; {run.save.keep} checkpoints and a spare need {human_bytes(wanted)}")
    if not 0 < run.save.every_steps < made.job.steps and not run.save.every_s:
        report.warn("no save is due before the end: a crash would cost everything; set save.every_s 600")
