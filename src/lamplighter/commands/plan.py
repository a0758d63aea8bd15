"""lamp plan: memory, time, money and disk of a run, before anything is started; and the plan phase of a training run.

In:  a run as `lamp train` takes it, and a device; of a training run, its data open and its machine known.
Out: the arithmetic on stdout (or JSON); 0 for go, 77 for no-go. On paper it happens in the parent, without torch and in a
     second; where there is text to count, or steps to measure, in a child under watch. Nothing is written, but by a training
     run: plan.txt and plan.json in its folder.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import own_code, report
from lamplighter.commands import result
from lamplighter.commands.arguments import parse
from lamplighter.errors import RefusedByPlan, UsageError
from lamplighter.leaves import leaf_size
from lamplighter.model.origin import is_hub_name, with_local_model
from lamplighter.procs import nvml, procfs
from lamplighter.rundir import CACHE_NAME, RunDir, cannot_write, free_bytes, human_bytes, write_atomic
from lamplighter.safe_text import mask_record, safe

if TYPE_CHECKING:
    import torch

    from lamplighter.config import Run
    from lamplighter.data.batch_source import DataFacts
    from lamplighter.gpus import Device
    from lamplighter.model.build import Built
    from lamplighter.plan.estimate import Plan
    from lamplighter.plan.job import Job, Known
    from lamplighter.procs.child import Say
    from lamplighter.train.hardware import Machine
    from lamplighter.train.optimizers import Optimizer

_QUICK_S = 0.1  # to measure how fast numbers move: every start pays it
_LONG_H = 0.25  # from here on many epochs are worth a warning at the start of a run


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
    from lamplighter.plan import render
    from lamplighter.plan.job import is_own

    rest, overrides = parse_overrides(words)
    flags = parse("plan", _plan_flags, rest)
    resolved = resolve(flags["preset"], flags["run_yaml"], overrides)
    own_code.look_beside(flags["run_yaml"])
    wanted = render.PlanRequest(
        on=flags["on"],
        mfu=flags["mfu"],
        what_if=flags["what_if"],
        as_json=flags["json"],
        runs_dir=str(flags["runs_dir"]),
    )
    tries = flags["measure"] or flags["fit"]
    if tries and wanted.on:
        why = "a few real steps can only be made on this machine"
        raise UsageError("--measure and --fit do not go with --on", why, "leave one of them out")
    data = resolved.run.data
    of_hub = is_hub_name(resolved.run.model.init_from or "")
    if tries or data.paths or data.source or is_own(resolved.run) or of_hub:
        from lamplighter.commands.session import session

        request = {"wanted": asdict(wanted), "measure": flags["measure"], "fit": flags["fit"]}
        return session("plan", request, config=dump(resolved))
    text, code = render.page(with_local_model(resolved.run), wanted)
    result(text)
    return code


# ---------------------------------------------------------------- lamp plan in the child


def plan_child(folder: RunDir, request: dict[str, Any]) -> int:
    """Count or estimate the text, try a few steps where that is wished for, then the same arithmetic as on paper."""
    with report.phase("import"):
        from lamplighter.config import load_dump
        from lamplighter.plan import render
        from lamplighter.plan.job import Known
    run, wanted = load_dump(folder.config), render.PlanRequest(**request["wanted"])
    run = with_local_model(run, weights=request["measure"] or request["fit"])
    known = Known()
    if (run.data.paths or run.data.source) and not run.data.stream:
        known = _look_at_text(run, Path(wanted.runs_dir) / CACHE_NAME, folder.path)
    if request["measure"] or request["fit"]:
        known = _try_steps(run, known, request["fit"])
    with report.phase("plan"):
        text, code = render.page(run, wanted, known)
    report.result(text)
    return code


def _look_at_text(run: Run, cache: Path, scratch: Path) -> Known:
    from lamplighter.data import token_estimate
    from lamplighter.data.setup import open_source
    from lamplighter.plan.job import Known, Text

    source = open_source(run, cache if cache.is_dir() else scratch / CACHE_NAME)
    found = token_estimate.estimate_tokens(run, source, cache)
    text = Text(
        found.tokens,
        found.how,
        found.counted,
        val_tokens=found.val_tokens,
        padding=found.padding,
        samples=found.samples,
        noun=found.noun,
    )
    return Known(text, found.vocab_size, segments=found.segments, row_tokens=found.row_tokens)


def _try_steps(run: Run, known: Known, fit: bool) -> Known:
    from lamplighter.plan import dry_run
    from lamplighter.plan.job import vocabulary

    vocab_size = known.vocab_size or vocabulary(run)
    ranks, _ = nvml.count_ranks(run.train.ranks, run.train.device)
    micro = run.train.micro_batch or leaf_size(run.train.batch_size, ranks)
    tried = dry_run.attempt(run, vocab_size, micro)
    own = tried.told.get("parameters")
    known = replace(known, measured=tried.measured, device=_device_of(tried.told, ranks))
    if ":" in run.model.family and run.model.init_from is None:
        known = replace(known, own_params=own)
    return replace(known, largest=dry_run.largest_that_fits(run, vocab_size, tried.measured)) if fit else known


def _device_of(told: dict[str, Any], ranks: int) -> Device | None:
    """The GPU on which the steps were tried, and as many like it; None for the processor, which is measured anyway."""
    from lamplighter.gpus import Device, link_of
    from lamplighter.plan.devices import host_room

    if told.get("on_cpu", True):
        return None
    peak = float(told["peak_flops"])
    gib, link = told["memory_bytes"] / (1 << 30), link_of(told["device"])
    return Device(told["device"], gib, peak, peak, host_gib=host_room().gib, count=ranks, link=link)


# ---------------------------------------------------------------- the plan phase of a run


def plan_run(
    run: Run,
    folder: RunDir,
    where: Machine,
    data: DataFacts,
    *,
    vocab_size: int,
    steps: int,
    built: Built | None,
    request: dict[str, Any],
    resumes: bool,
    ranks: int = 1,
    leads: bool = True,
) -> Plan:
    """Say it, keep it, refuse what cannot be.

    `built` is a model of one's own, whose size only its code knows.
    """
    from lamplighter.plan import render
    from lamplighter.plan.estimate import completed, make, sure_reasons
    from lamplighter.train import guard

    job = _job(run, where, data, vocab_size=vocab_size, steps=steps, built=built)
    made = make(job, _device(where, ranks), free_bytes(folder.path))
    sure = [reason for reason in sure_reasons(made) if not (resumes and reason.startswith(("time", "money")))]
    refused = completed(replace(made, reasons=tuple(sure)))
    if leads:
        _keep(folder, completed(made))
    for line in render.short(made):
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
    _warn(run, made, data)
    guard.refuse_long_runs(run.save, request.get("preset"), made.hours * 3600, steps, force)
    _check_disk(run, folder, made)
    return made


def _job(run: Run, where: Machine, data: DataFacts, *, vocab_size: int, steps: int, built: Built | None) -> Job:
    from lamplighter.plan.job import Text, job_of, shape_of

    tokens = round(data.samples * data.positions_per_step / run.train.batch_size * (1 - data.padding))
    text = None
    if data.samples:
        held_out = data.held_out.targets
        if data.pairs is not None:  # targets are of the answers alone; the reference reads the prompts too
            held_out = round(tokens * data.pairs.val.pairs / data.pairs.train.pairs)
        text = Text(tokens, "counted", True, held_out, padding=data.padding, samples=data.samples, noun=data.noun)
    rows = data.positions_per_step / run.train.batch_size
    return job_of(
        run,
        shape_of(run, vocab_size),
        steps,
        where.dtype_name,
        text,
        own_params=built.parameters if built is not None else None,
        tokenizer_vocab=vocab_size,
        segments=bool(data.fingerprint) and not data.whole_batches and run.data.packing != "windows",
        row_tokens=None if round(rows) == run.data.seq_len else rows,
        spent_s=report.spent_s(),
    )


def _device(where: Machine, ranks: int = 1) -> Device:
    """The machine as it is: torch's own numbers of a GPU, measured rates of a processor; what a rank has of its memory."""
    import torch

    from lamplighter.gpus import Device, Rates, link_of
    from lamplighter.plan import devices

    nodes, here = (
        int(os.environ.get("LAMP_NODES", "1")),
        int(os.environ.get("LAMP_NODE_RANKS", ranks)),
    )  # most on a node
    here, peak = min(here, ranks), where.peak_flops  # of one rank
    if where.device.type == "cuda":
        free, total = (size / (1 << 30) for size in torch.cuda.mem_get_info(where.device))
        room = devices.host_room().gib
        device = Device(where.name, free, peak, peak, host_gib=room, total_gib=total)
        return replace(device, count=ranks, link=link_of(where.name), nodes=nodes)
    device = devices.for_ranks(devices.cpu(Rates(peak, devices.stream_rate(_QUICK_S))), here)
    return replace(device, count=ranks, nodes=nodes, bf16_flops=peak if where.dtype_name == "bf16" else None)


def _keep(folder: RunDir, made: Plan) -> None:
    """The whole page in the run's folder."""
    from lamplighter.plan import render

    try:
        write_atomic(folder.path / "plan.txt", safe("\n".join([*render.tell(made), ""])), durable=False)
        write_atomic(folder.path / "plan.json", json.dumps(mask_record(render.as_json(made)), indent=1), durable=False)
    except OSError as error:
        raise cannot_write(folder.path / "plan.txt", error) from error


def _warn(run: Run, made: Plan, data: DataFacts) -> None:
    """What is odd enough to be said before the first step; the rest is on the page."""
    from lamplighter.plan import estimate

    if data.padding > estimate.MUCH_PADDING and data.noun == "windows" and not data.fingerprint:
        report.warn(
            f"{data.padding:.0%} of each pass is padding: data.seq_len {run.data.seq_len} is longer than the data"
        )
    for found in estimate.check(made):
        if found.warns and found.name in ("epochs", "saves") and made.hours > _LONG_H:
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


# ---------------------------------------------------------------- a few real steps, in a process of its own
#
# The process is the first that the kernel takes when memory ends, and on a CPU it may not take more than it was given
# (RLIMIT_AS): so a trial that does not fit ends itself, and nothing else on the machine.


@dataclass(frozen=True)
class _Took:
    """Seconds that have passed, and seconds that all threads have worked: on a shared machine they differ."""

    wall_s: float
    cpu_s: float


class _Clock:
    """Two clocks, started together."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def took(self) -> _Took:
        return _Took(time.perf_counter() - self.wall, time.process_time() - self.cpu)


def real_steps(request: dict[str, Any], say: Say) -> None:
    """Build, step, tell; the last record says whether it fitted, how long a step takes, and the peak."""
    say(doing="importing torch")
    import torch

    try:
        say(**_steps(request, say))
    except (torch.OutOfMemoryError, MemoryError) as error:
        say(fits=False, why=_first_line(error))
    except RuntimeError as error:
        if "allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        say(fits=False, why=_first_line(error))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__


def _steps(request: dict[str, Any], say: Say) -> dict[str, Any]:
    """The model as the run would build it, and rounds of at most two micro-batches and one optimizer step."""
    import torch

    from lamplighter.config import validated
    from lamplighter.model.build import build
    from lamplighter.model.recompute import recompute_blocks
    from lamplighter.plan.job import known_shape
    from lamplighter.procs.child import limit_own_memory
    from lamplighter.train import exactness, hardware, optimizers

    run = validated(request["run"])
    where = hardware.detect(run.train, shape=known_shape(run))
    exactness.require(run.train.exact is not False, where.device)
    if where.device.type == "cpu" and request.get("bytes"):
        limit_own_memory(int(request["bytes"]))
    say(doing="building the model")
    built = build(run.model, request["vocab_size"], run.data.seq_len, 0, run.train.seed, lora=run.lora)
    if run.train.recompute:
        recompute_blocks(built.model)
    model = built.model.to(where.device)
    model.train()
    optimizer = optimizers.make_optimizer(model, run.train, where.newton_schulz)
    rows, warm_up, rounds = int(request["micro_batch"]), int(request["warm_up"]), int(request["rounds"])
    accumulation = math.ceil(run.train.batch_size / rows)
    micros: list[_Took] = []
    ends: list[_Took] = []
    until = time.perf_counter() + float(request["seconds"])
    for number in range(warm_up + rounds):
        for _ in range(min(2, accumulation)):
            whole = run.train.loss == "whole"
            micros.append(
                _micro_batch(
                    model, where, rows=rows, length=run.data.seq_len, vocabulary=request["vocab_size"], whole=whole
                )
            )
            say(doing=f"step {number + 1} of {warm_up + rounds}", seconds=round(micros[-1].wall_s, 4))
        ends.append(_optimizer_step(optimizer, run.train.grad_clip, where))
        if time.perf_counter() > until and number >= 1:
            break
    first = min(warm_up, len(ends) - 1)
    micro, end = _middle(micros[min(2, accumulation) * first :]), _middle(ends[first:])
    return {
        "fits": True,
        "micro_batch": rows,
        "steps": len(ends),
        "micro_s": micro.wall_s,
        "optimizer_s": end.wall_s,
        "step_s": accumulation * micro.wall_s + end.wall_s,
        "step_cpu_s": (accumulation * micro.cpu_s + end.cpu_s) / where.threads,
        "peak_bytes": _peak_bytes(where),
        "parameters": built.parameters,
        "dtype": where.dtype_name,
        "device": where.name,
        "on_cpu": where.device.type == "cpu",
        "peak_flops": where.peak_flops,
        "flops_per_token": built.flops_per_token(run.data.seq_len),
        "memory_bytes": None
        if where.device.type == "cpu"
        else torch.cuda.get_device_properties(where.device).total_memory,
    }


def _micro_batch(model: torch.nn.Module, where: Machine, rows: int, length: int, vocabulary: int, whole: bool) -> _Took:
    """Forward and backward as the loop does them."""
    import torch

    ids = torch.randint(0, vocabulary, (rows, length)).to(where.device)
    clock = _Clock()
    _loss(model, where, ids, whole).backward()  # type: ignore[no-untyped-call]
    _wait(where)
    return clock.took()


def _loss(model: torch.nn.Module, where: Machine, ids: torch.Tensor, whole: bool) -> torch.Tensor:
    """In a function of its own, as in the loop: the logits are let go before the backward pass."""
    from lamplighter.model.transformer import token_loss

    with where.precision():
        return token_loss(model, ids, ids, whole=whole, scale=1 / ids.numel())


def _optimizer_step(optimizer: Optimizer, clip: float, where: Machine) -> _Took:
    from lamplighter.train.optimizers import clip_factor

    clock = _Clock()
    optimizer.step(0.0, clip_factor(float(optimizer.grad_norm()), clip))
    optimizer.zero_grad()
    _wait(where)
    return clock.took()


def _wait(where: Machine) -> None:
    import torch

    if where.device.type == "cuda":
        torch.cuda.synchronize(where.device)


def _middle(times: list[_Took]) -> _Took:
    return sorted(times, key=lambda took: took.wall_s)[len(times) // 2]


def _peak_bytes(where: Machine) -> int:
    """Of the device: what torch took at most; of a CPU, the resident memory of this process at its highest."""
    import torch

    if where.device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(where.device))
    return procfs.own_peak()
