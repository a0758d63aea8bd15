"""A plan as it is asked for and told: on paper, in words line by line, as JSON, as a table; its curves as characters.

In:  a Run and a PlanRequest (device, MFU, table, JSON), and what is known of the text; a Plan, or several for a what-if table.
Out: the page or JSON and the exit code; a few lines for the start of a run. No torch, no colours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lamplighter import gpus
from lamplighter.braille import curve
from lamplighter.config import Run, preset_names, resolve
from lamplighter.errors import DONE, RefusedByPlan
from lamplighter.gpus import Device
from lamplighter.model.shape import matmul_parameters_per_layer
from lamplighter.plan import devices
from lamplighter.plan.estimate import Plan, cache_bytes, check, checkpoint_bytes, completed, lighter, make, warnings
from lamplighter.plan.job import Job, Known, job_on
from lamplighter.plan.memory import GIB, LOGIT_BYTES, host_gib, memory
from lamplighter.plan.ranks import idle, reduction, share
from lamplighter.plan.speed import as_hours, compute_seconds, is_launch_bound, recompute_flops, span
from lamplighter.rundir import dollars, human_bytes

_WHAT_IF = ("t4", "l4", "a10", "rtx3090", "rtx4090", "l40s", "a100-40gb", "a100-80gb", "h100-80gb")
_PRESETS_ON = "a100-80gb"
_WIDE = 12


@dataclass(frozen=True)
class PlanRequest:
    """What was asked for."""

    on: str | None = None
    mfu: float | None = None
    what_if: bool = False
    as_json: bool = False
    runs_dir: str = "runs"


def _plan_of(run: Run, device: Device, free_disk: int | None, known: Known) -> Plan:
    made = make(job_on(run, device, known), device, free_disk, known.measured)
    return replace(completed(made), largest=known.largest)


def page(run: Run, request: PlanRequest, known: Known | None = None) -> tuple[str, int]:
    """What to say, and the exit code."""
    known = known or Known()
    room = devices.free_disk(Path(request.runs_dir)) if not request.on else None  # elsewhere there are other disks
    nodes = run.launch.nodes
    if known.device is not None:
        device = devices.on_nodes(known.device, nodes)
    else:
        device = devices.choose(request.on, request.mfu, run.train, nodes)
    run = replace(run, budget=run.budget.of_nodes(1 if request.on else nodes))
    found = _plan_of(run, device, room, known)
    code = DONE if found.go else RefusedByPlan.code
    if request.as_json:
        record = as_json(found)
        if request.what_if:
            record["what_if"] = [{"run": name, **as_json(row)} for name, row in _what_if(run, request, known)]
        return json.dumps(record, indent=1) + "\n", code
    lines = tell(found)
    if request.what_if:
        lines += ["", *table(_what_if(run, request, known))]
    return "\n".join([*lines, _next(found), ""]), code


def estimate_of(run: Run, runs_dir: str) -> str:
    """Time and money of a run on this machine, in a few words; BadConfig where paper does not say."""
    device = devices.choose(None, None, run.train, run.launch.nodes)
    found = _plan_of(run, device, devices.free_disk(Path(runs_dir)), Known())
    money = f", {dollars(found.usd)}" if found.usd is not None else ""
    verdict = "" if found.go else f"; the plan says no: {'; '.join(found.reasons)}"
    return f"about {span(found.hours)}{money} on {found.device} by the plan{verdict}"


def _next(found: Plan) -> str:
    if found.go:
        return "next: lamp train with the same words"
    return "next: one of the changes above, or --on another device; lamp train --force insists"


def _in_a_dtype_of(run: Run, device: Device) -> Run:
    """As it would run there: bf16 on a card without it is that card's own choice."""
    if run.train.dtype != "bf16" or device.bf16_flops or device.is_cpu:
        return run
    return replace(run, train=replace(run.train, dtype="auto"))


def _what_if(run: Run, request: PlanRequest, known: Known) -> list[tuple[str, Plan]]:
    """The same run on other devices, and the presets on one of them."""
    on_paper = replace(known, measured=None, largest=None, device=None)
    kind, _, count = (request.on or "").lower().partition(":")
    many = f":{count}" if count else ""
    counts = [f"{kind}:{one}" for one in (1, 2, 4, 8)] if count else []
    others = (_named(name, request) for name in (*counts, *(f"{name}{many}" for name in _WHAT_IF)))
    rows = [("this run", make(job_on(_in_a_dtype_of(run, d), d, on_paper), d)) for d in others]
    device = _named(_PRESETS_ON, request)
    for name in preset_names():
        if name != "demo":
            other = replace(resolve(name).run, budget=run.budget)
            rows.append((f"{name}", make(job_on(other, device, Known()), device)))
    return rows


def _named(name: str, request: PlanRequest) -> Device:
    device = gpus.find(name)
    return replace(device, mfu=request.mfu) if request.mfu else device


# ---------------------------------------------------------------- as JSON


def as_json(plan: Plan) -> dict[str, Any]:
    """Stable keys, for scripts."""
    job, parts = plan.job, plan.memory
    return {
        "go": plan.go,
        "device": str(plan.device),
        "dtype": job.dtype,
        "params": plan.params,
        "hidden": plan.job.hidden,
        "vocab_size": job.shape.vocab_size,
        "tokens": job.tokens,
        "tokens_per_param": job.tokens / plan.params,
        "data_tokens": job.text.tokens if job.text else None,
        "data_tokens_how": job.text.how if job.text else None,
        "padding": job.text.padding if job.text else None,
        "steps": job.steps,
        "epochs": job.epochs,
        "flops": plan.flops,
        "flops_per_token": job.flops_per_token,
        "step_s": plan.step_s,
        "reference_s": plan.reference_s,
        "tokens_per_s": plan.tokens_per_s,
        "mfu": plan.mfu,
        "hours": plan.hours,
        "usd": plan.usd,
        "memory_gib": parts.peak_gib,
        "memory_parts_gib": {
            name: value / GIB
            for name, value in asdict(parts).items()
            if type(value) is int and value and name != "logits"
        },
        **_ranks_json(plan),
        "memory_there_gib": plan.device.memory_gib,
        "logits_gib": parts.logits / GIB,  # as a whole; what is there at once:
        "logits_held_gib": parts.held / GIB,
        "host_gib": host_gib(job, plan.device),
        "disk_gib": plan.disk_bytes / GIB,
        "crash_costs_h": plan.between_saves_h,
        "crash_costs_usd": plan.between_saves_h * job.budget.usd_per_hour
        if job.budget.usd_per_hour is not None
        else None,
        "micro_batch": job.micro_batch,
        "largest_micro_batch": plan.largest,
        "lighter": [{"settings": settings, "gib": gib} for settings, gib in lighter(job, plan.device)],
        "measured": asdict(plan.measured) if plan.measured else None,
        "reasons": list(plan.reasons),
        "warnings": warnings(plan),
        "changes": [asdict(change) for change in plan.changes],
    }


def _ranks_json(plan: Plan) -> dict[str, Any]:
    """Of several devices: how they share a step, and what that costs."""
    job, device = plan.job, plan.device
    traffic = reduction(job, device)
    return {
        "devices": device.count,
        "idle": idle(job, device.count),
        "shard": "full" if job.sharded else "none",
        "memory_by_shard_gib": {name: memory(way, device).peak_gib for name, way in _ways(plan)},
        "link": str(device.link) if device.count > 1 else None,
        "link_bytes_per_step": traffic.bytes,
        "reduction_s": traffic.seconds,
    }


def _ways(plan: Plan) -> list[tuple[str, Job]]:
    whole = [("none", replace(plan.job, sharded=False))]
    return [*whole, ("full", replace(plan.job, sharded=True))] if plan.device.count > 1 else whole


# ---------------------------------------------------------------- in words


def _line(name: str, text: str) -> str:
    return f"  {name:<{_WIDE}} {text}"


def _large(number: float) -> str:
    """1.11 G, 705 M, 42."""
    for size, letter in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"


def tell(plan: Plan) -> list[str]:
    """The whole plan."""
    return [
        f"plan on {plan.device}, {plan.job.dtype}{', recomputing' if plan.job.recompute else ''}",
        *_work(plan),
        *_time(plan),
        *_memory(plan),
        *_disk(plan),
        *_sanity(plan),
        *draw(plan),
        *_verdict(plan),
    ]


# ---------------------------------------------------------------- work and time


def _work(plan: Plan) -> list[str]:
    job, shape = plan.job, plan.job.shape
    sizes = f"{shape.family}, {shape.layers} layers, {shape.width} wide, vocabulary {shape.vocab_size:,}, {shape.positions} positions"
    matrices = shape.layers * matmul_parameters_per_layer(shape) + shape.vocab_size * shape.width
    attention = 12 * shape.layers * shape.width * job.seq_len
    each = job.flops_per_token
    of = f"6 x {_large(matrices)} + attention {_large(attention)} = " if not job.own_params else "6 x parameters = "
    if job.lora.r is not None:
        of = f"4 x {_large(matrices)} + 6 x {_large(job.trained)} + attention {_large(attention)} = "
    rows = f"{job.steps:,} steps x {job.batch_size} x {job.row_tokens or job.seq_len:g} = {_large(job.tokens)}"
    lines = [
        _line("parameters", f"{plan.params:,} ({sizes if not job.own_params else 'a model of your own, counted'})"),
        _line("per token", f"{of}{_large(each)}FLOP"),
        _line("tokens", rows + (f" = {job.epochs:.1f} epochs of {_large(job.text.tokens)}" if job.text and job.epochs else "")),
    ]  # fmt: skip
    if job.lora.r is not None:
        part = f"{job.trained:,} ({job.trained / plan.params:.2%}): adapters of rank {job.lora.r} ({' '.join(job.lora.targets)})"
        none = "  WARNING  no matrix in its files has such a name; which there are is told when it is built"
        lines.insert(
            1,
            _line(
                "trained",
                f"{part}; the base is frozen, its matrices in {job.lora.base_dtype}{'' if job.trained else none}",
            ),
        )
    if job.text is not None:
        lines.append(_line("", f"data: {job.text.how}"))
    lines.append(_line("work", f"{_large(each)} x {_large(job.tokens)} = {_large(plan.flops)}FLOP"))
    if again := recompute_flops(job):
        lines.append(_line("", f"+ {_large(again)}FLOP to compute the layers again ({again / plan.flops:.0%})"))
    return lines


def _time_words(plan: Plan) -> str:
    """How the time was found."""
    job, device, found = plan.job, plan.device, plan.measured
    steps = f"{job.steps:,} x {span(plan.step_s / 3600)}"
    if found is not None and found.fits:
        return (
            f"{steps} = {span(plan.training_hours)}, measured over {found.steps} real steps; {plan.mfu:.0%} of the peak"
        )
    if device.rates is not None and not job.own_params:
        rates = f"{_large(device.rates.gemm_flops)}FLOP/s and {device.rates.bytes_per_s / 1e9:.1f} GB/s"
        return (
            f"{steps} = {span(plan.training_hours)}, from what was measured here ({rates}); {plan.mfu:.0%} of the peak"
        )
    work = _large(plan.flops + recompute_flops(job))
    if device.count > 1:
        part, slow = share(job, device.count), "launching" if is_launch_bound(job, device) else "work"
        parts = f"{span(compute_seconds(job, device) / 3600)} {slow} ({part.rows} of {job.batch_size} rows) + {span(reduction(job, device).seconds / 3600)} reduction"
        return f"{steps} = {span(plan.training_hours)}: {parts}; {plan.mfu:.0%} of the peak of all"
    if is_launch_bound(job, device):
        return f"{steps} = {span(plan.training_hours)}: launching a step takes longer than its work of {work}FLOP; a larger batch is free"
    return f"{work} / ({_large(device.peak(job.dtype))}FLOP/s x {device.mfu:.0%}) = {span(plan.training_hours)}"


def _time(plan: Plan) -> list[str]:
    job, lines = plan.job, [_line("time", _time_words(plan)), _line("", f"{plan.tokens_per_s:,.0f} tokens/s")]
    if plan.reference_s:
        lines.append(_line("reference", _reference_words(plan)))
    if plan.device.count > 1:
        lines.append(_line("reduction", _reduction_words(plan)))
    if plan.usd is not None:
        of = f" of {dollars(job.budget.usd)}" if job.budget.usd is not None else ""
        lines.append(
            _line(
                "money",
                f"{as_hours(plan.hours)} x ${job.budget.usd_per_hour:g}/h{_each(plan)} = {dollars(plan.usd)}{of}",
            )
        )
    return lines


def _reference_words(plan: Plan) -> str:
    pass_s = plan.reference_s
    return (
        f"a forward pass over {_large(plan.job.reference_positions)} positions, once before the first step = {span(pass_s / 3600)};"
        f" {span(plan.hours)} in all"
    )


def _each(plan: Plan) -> str:
    """The price of several is that of one, so many times; a run counts the price of its machine."""
    count, price = plan.device.count, plan.job.budget.usd_per_hour
    if price is None or count == 1 or not plan.device.is_elsewhere:
        return ""
    return f" ({count} x ${price / count:g}; for lamp train on that machine --budget.usd_per_hour {price:g})"


def _reduction_words(plan: Plan) -> str:
    traffic = reduction(plan.job, plan.device)
    return (
        f"{human_bytes(traffic.bytes)} each way of a device and step ({traffic.words}) = {span(traffic.seconds / 3600)},"
        f" {traffic.seconds / plan.step_s:.0%} of a step; no overlap is counted"
    )


# ---------------------------------------------------------------- memory and disk


def _memory(plan: Plan) -> list[str]:
    m, job, device = plan.memory, plan.job, plan.device
    named = [("weights", m.weights), ("gradients", m.gradients), ("their sums", m.sums), (job.optimizer.name, m.optimizer), (f"{job.dtype} copies", m.cast),
             ("gathered", m.gathered), ("activations", m.activations), ("one layer", m.layer), ("logits", m.held),
             ("copy for a save", m.staging if m.staging_here else 0), ("the rest", m.own)]  # fmt: skip
    sums = " + ".join(f"{name} {size / GIB:.2f}" for name, size in named if size)
    note = "" if m.gradients_meanwhile else "; gradients and activations are not at their largest together"
    holes = f"; {m.holes - 1:.0%} of activations and logits added for the allocator's holes" if m.holes > 1 else ""
    if m.loading == m.peak:
        note, holes = "; while the model is opened, in fp32", ""
    tokens = job.micro_batch * job.seq_len
    held = "" if job.whole_logits else f"; in blocks, with the head's gradients, {m.held / GIB:.2f} (train.loss)"
    lines = [
        _line("memory", f"{sums} GiB"),
        _line("", f"at most {m.peak_gib:.2f} of {device.memory_gib:.1f} GiB{note}{holes}"),
        _line("", f"micro-batch {job.micro_batch} x {job.seq_len} = {tokens:,} tokens, {job.accumulation} a step"),
        _line("logits", f"{tokens:,} x {job.shape.vocab_size:,} x {LOGIT_BYTES} bytes = {m.logits / GIB:.2f} GiB as a whole{held}"),
    ]  # fmt: skip
    if device.count > 1:
        lines[2:2] = _shard_lines(plan)
    if job.own_params:
        lines.append(_line("", "activations of a model of your own are not known on paper: --measure tries it"))
    if not device.is_cpu:
        here = f" of {device.host_gib:.1f}" if device.host_gib is not None else ""
        need = host_gib(job, device)
        lines.append(
            _line(
                "host RAM", f"{need:.1f}{here} GiB, {checkpoint_bytes(job) / GIB:.2f} of it the copy that a save stages"
            )
        )
    lines.append(_line("", "the token cache is mapped: it takes no memory of its own"))
    if plan.measured is not None and plan.measured.fits:
        real = plan.measured.peak_gib
        lines.append(
            _line("measured", f"{real:.2f} GiB at the peak, {m.training / GIB:.2f} on paper (no save beside it)")
        )
    if plan.largest is not None:
        lines.append(_line("micro-batch", _largest(plan, plan.largest)))
    return lines


def _shard_lines(plan: Plan) -> list[str]:
    """What each device holds either way, and which is planned."""
    job, device = plan.job, plan.device
    sizes = {name: memory(way, device) for name, way in _ways(plan)}
    buffers = (
        f", {sizes['none'].reduction / GIB:.2f} of it at a time for the reduction" if sizes["none"].reduction else ""
    )
    why = f"train.shard {job.shard}" + ("" if job.shard != "auto" else ": replicated does not fit" if job.sharded else ": it fits")  # fmt: skip
    return [
        _line("on each", f"replicated {sizes['none'].peak_gib:.2f} GiB{buffers}; sharded {sizes['full'].peak_gib:.2f} GiB"),
        _line("", f"{'sharded' if job.sharded else 'replicated'} is planned ({why})"),
    ]  # fmt: skip


def _largest(plan: Plan, largest: int) -> str:
    job = plan.job
    if not largest:
        return "not even one row fits: a shorter data.seq_len, train.recompute, or a smaller model"
    tried = f"{largest} is the largest that fits, tried in processes of their own"
    if largest == job.batch_size:
        return f"{tried}: the whole batch at once"
    pieces = -(-job.batch_size // largest)
    return (
        f"{tried} (--train.micro_batch {largest}, now {job.micro_batch}): batch {job.batch_size} in {pieces} pieces;"
        " batch size and learning rate stay as they are"
    )


def _disk(plan: Plan) -> list[str]:
    size, job = checkpoint_bytes(plan.job) / GIB, plan.job
    cache = f" + token cache {cache_bytes(job) / GIB:.2f}" if job.text else ""
    free = f" of {plan.free_disk / GIB:,.0f} GiB free" if plan.free_disk is not None else " GiB"
    kept = f"{job.save.keep} kept + best + one being written, {size:.2f} GiB each"
    return [_line("disk", f"{kept}{cache} = {plan.disk_bytes / GIB:.1f}{free}")]


# ---------------------------------------------------------------- sanity and verdict


def _sanity(plan: Plan) -> list[str]:
    return [_line(found.name, ("WARNING  " if found.warns else "") + found.text) for found in check(plan)]


def _verdict(plan: Plan) -> list[str]:
    """Go; or no-go, why, and what would go."""
    if plan.go:
        return ["GO"]
    lines = ["NO GO", *(_line("", reason) for reason in plan.reasons)]
    if plan.changes:
        lines.append("what would go:")
    for change in plan.changes:
        money = f", {dollars(change.usd)}" if change.usd is not None else ""
        lines.append(_line("", f"{change.settings}"))
        lines.append(_line("", f"   {change.what}: {span(change.hours)}{money}, {change.memory_gib:.1f} GiB"))
    if plan.changes:
        return lines
    return [*lines, _line("", "no single change makes it go: another device (--on), or a much smaller model")]


def short(plan: Plan) -> list[str]:
    """The few lines that a run begins with; the page is in its folder."""
    job, m = plan.job, plan.memory
    epochs = f" = {job.epochs:.1f} epochs" if job.epochs is not None else ""
    step = f"batch {job.batch_size} = {job.accumulation} x micro-batch {job.micro_batch}"
    parts = f"activations {m.activations / GIB:.2f}, logits {m.held / GIB:.2f}, copy for a save {m.staging / GIB:.2f}"
    money = f", {dollars(plan.usd)}" if plan.usd is not None else ""
    each = (" on each, sharded" if job.sharded else " on each, replicated") if plan.device.count > 1 else ""
    cost = plan.between_saves_h
    crash = dollars(cost * job.budget.usd_per_hour) if job.budget.usd_per_hour is not None else span(cost)
    return [
        f"{plan.params:,} parameters ({'your own' if job.own_params else job.shape.family}); {_large(job.flops_per_token)}FLOP per token"
        + (f"; {job.trained:,} are trained" if job.lora.r is not None else ""),
        f"{job.steps:,} steps of {job.step_tokens:,.0f} tokens{epochs}; {step}, {job.row_tokens or job.seq_len:g} tokens each",
        f"about {span(plan.hours)}{money}: {_time_words(plan)}",
        f"memory: at most {m.peak_gib:.2f} of {plan.device.memory_gib:.1f} GiB{each} ({parts})",
        *([f"reduction: {_reduction_words(plan)}"] if plan.device.count > 1 else []),
        f"disk: {plan.disk_bytes / GIB:.2f} GiB; a crash can cost {crash}",
    ]


def table(plans: list[tuple[str, Plan]]) -> list[str]:
    """What if: one line each."""
    lines = [
        f"{'':<14}{'device':<18}{'parameters':>14}{'memory GiB':>12}{'of':>7}{'logits':>8}{'time':>12}{'usd':>10}  verdict"
    ]
    for name, plan in plans:
        usd = "-" if plan.usd is None else dollars(plan.usd)[1:]
        why = "go" if plan.go else "no: " + ", ".join(r.split(":")[0] for r in plan.reasons)
        lines.append(
            f"{name:<14}{plan.device!s:<18}{plan.params:>14,}{plan.memory.peak_gib:>12.1f}{plan.device.memory_gib:>7.1f}"
            f"{plan.memory.held / GIB:>8.1f}{span(plan.hours):>12}{usd:>10}  {why}"
        )
    return lines


_CURVE_WIDE, _CURVE_HIGH = 56, 4  # in characters; each is 2 x 4 dots


# ---------------------------------------------------------------- curves of characters


def draw(plan: Plan) -> list[str]:
    """The rate, and what is spent by when; the budget is a line where there is one."""
    job = plan.job
    lines: list[str] = []
    if job.rate is not None:
        rate = job.rate
        lines += _picture("learning rate", _sampled(rate.lr_at, job.steps), rate.peak, f"{rate.peak:.1e}", job.steps)
    if job.budget.usd_per_hour is not None and plan.usd:
        price = plan.usd / job.steps
        top = max(plan.usd, job.budget.usd or 0.0)
        lines += _picture("spending", _sampled(lambda step: price * step, job.steps), top, dollars(top), job.steps)
        if job.budget.usd is not None:
            lines.append(f"{'':<14}{_budget_words(job.budget.usd, plan.usd, job.steps)}")
    return lines


def _sampled(at: Callable[[int], float], steps: int) -> list[float]:
    return [at(max(1, round(steps * (x + 1) / (2 * _CURVE_WIDE)))) for x in range(2 * _CURVE_WIDE)]


def _picture(name: str, values: list[float], top: float, most: str, steps: int) -> list[str]:
    rows = curve(values, top, _CURVE_HIGH)
    marks = [most, *[""] * (len(rows) - 2), "0"]
    names = [name, *[""] * (len(rows) - 1)]
    lines = [f"  {n:<13}{mark:>9} ┤{row}" for n, mark, row in zip(names, marks, rows, strict=True)]
    foot = f"{steps:,} steps"
    return [*lines, f"{'':<24} └1{foot:>{_CURVE_WIDE - 1}}"]


def _budget_words(budget: float, usd: float, steps: int) -> str:
    if usd <= budget:
        return f"the budget of {dollars(budget)} is not reached; {dollars(budget - usd)} are left"
    return f"the budget of {dollars(budget)} ends at step {int(steps * budget / usd):,}, {budget / usd:.0%} of the run"
