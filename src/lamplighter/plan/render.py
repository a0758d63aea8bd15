"""A plan in words: the arithmetic line by line, go or no-go, and what would make it go.

In:  a Plan (or several, for a what-if table).
Out: lines for people: the whole page, a few lines for the start of a run, a table; no torch, no colours.
"""

from __future__ import annotations

from lamplighter.model.shape import matmul_parameters_per_layer
from lamplighter.plan import charts, sanity
from lamplighter.plan.estimate import Plan, cache_bytes, checkpoint_bytes
from lamplighter.plan.memory import GIB, LOGIT_BYTES, host_gib
from lamplighter.plan.speed import again_flops

WIDE = 12
SHORT_WARNINGS = 3


def _line(name: str, text: str) -> str:
    return f"  {name:<{WIDE}} {text}"


def large(number: float) -> str:
    """1.11 G, 705 M, 42."""
    for size, letter in ((1e21, "Z"), (1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"


def span(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.2g} s"
    return f"{hours * 60:.0f} min" if hours < 2 else f"{hours:,.1f} h" if hours < 72 else f"{hours / 24:,.1f} days"


def tell(plan: Plan) -> list[str]:
    """The whole plan."""
    return [
        f"plan on {plan.device}, {plan.job.dtype}{', recomputing' if plan.job.recompute else ''}",
        *_work(plan),
        *_time(plan),
        *_memory(plan),
        *_disk(plan),
        *_sanity(plan),
        *charts.draw(plan),
        *verdict(plan),
    ]


# ---------------------------------------------------------------- work and time


def _work(plan: Plan) -> list[str]:
    job, shape = plan.job, plan.job.shape
    sizes = f"{shape.family}, {shape.layers} layers, {shape.width} wide, vocabulary {shape.vocab_size:,}, {shape.positions} positions"
    matrices = shape.layers * matmul_parameters_per_layer(shape) + shape.vocab_size * shape.width
    attention = 12 * shape.layers * shape.width * job.seq_len
    each = job.flops_per_token
    of = f"6 x {large(matrices)} + attention {large(attention)} = " if not job.own_params else "6 x parameters = "
    rows = f"{job.steps:,} steps x {job.batch_size} x {job.row_tokens or job.seq_len:g} = {large(job.tokens)}"
    lines = [
        _line("parameters", f"{plan.params:,} ({sizes if not job.own_params else 'a model of your own, counted'})"),
        _line("per token", f"{of}{large(each)}FLOP"),
        _line("tokens", rows + (f" = {job.epochs:.1f} epochs of {large(job.text.tokens)}" if job.text and job.epochs else "")),
    ]  # fmt: skip
    if job.text is not None:
        lines.append(_line("", f"data: {job.text.how}"))
    lines.append(_line("work", f"{large(each)} x {large(job.tokens)} = {large(plan.flops)}FLOP"))
    if again := again_flops(job):
        lines.append(_line("", f"+ {large(again)}FLOP to compute the layers again ({again / plan.flops:.0%})"))
    return lines


def time_words(plan: Plan) -> str:
    """How the time was found."""
    job, device, found = plan.job, plan.device, plan.measured
    steps = f"{job.steps:,} x {span(plan.step_s / 3600)}"
    if found is not None and found.fits:
        return f"{steps} = {span(plan.hours)}, measured over {found.steps} real steps; {plan.mfu:.0%} of the peak"
    if device.rates is not None and not job.own_params:
        rates = f"{large(device.rates.gemm_flops)}FLOP/s and {device.rates.bytes_per_s / 1e9:.1f} GB/s"
        return f"{steps} = {span(plan.hours)}, from what was measured here ({rates}); {plan.mfu:.0%} of the peak"
    work = large(plan.flops + again_flops(job))
    return f"{work} / ({large(device.peak(job.dtype))}FLOP/s x {device.mfu:.0%}) = {span(plan.hours)}"


def _time(plan: Plan) -> list[str]:
    job, lines = plan.job, [_line("time", time_words(plan))]
    if plan.usd is not None:
        of = f" of ${job.budget_usd:,.2f}" if job.budget_usd is not None else ""
        lines.append(_line("money", f"{plan.hours:,.2f} h x ${job.usd_per_hour}/h = ${plan.usd:,.2f}{of}"))
    return lines


# ---------------------------------------------------------------- memory and disk


def _memory(plan: Plan) -> list[str]:
    m, job, device = plan.memory, plan.job, plan.device
    named = [("weights", m.weights), ("gradients", m.gradients), ("Adam", m.optimizer), ("bf16 copies", m.cast),
             ("activations", m.activations), ("one layer", m.layer), ("logits", m.held),
             ("copy for a save", m.staging if m.staging_here else 0), ("the rest", m.own)]  # fmt: skip
    sums = " + ".join(f"{name} {size / GIB:.2f}" for name, size in named if size)
    note = "" if m.gradients_meanwhile else "; gradients and activations are not at their largest together"
    holes = f"; {m.holes - 1:.0%} of activations and logits added for the allocator's holes" if m.holes > 1 else ""
    tokens = job.micro_batch * job.seq_len
    held = "" if job.whole_logits else f"; in blocks, with the head's gradients, {m.held / GIB:.2f} (train.loss)"
    lines = [
        _line("memory", f"{sums} GiB"),
        _line("", f"at most {m.peak_gib:.2f} of {device.memory_gib:.1f} GiB{note}{holes}"),
        _line("", f"micro-batch {job.micro_batch} x {job.seq_len} = {tokens:,} tokens, {job.accumulation} a step"),
        _line("logits", f"{tokens:,} x {job.shape.vocab_size:,} x {LOGIT_BYTES} bytes = {m.logits / GIB:.2f} GiB as a whole{held}"),
    ]  # fmt: skip
    if job.own_params:
        lines.append(_line("", "activations of a model of your own are not known on paper: --measure tries it"))
    if not device.is_cpu:
        here = f" of {device.host_gib:.1f}" if device.host_gib is not None else ""
        need = host_gib(job, device)
        lines.append(
            _line("host RAM", f"{need:.1f}{here} GiB, {m.staging / GIB:.2f} of it the copy that a save stages")
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
    kept = f"{job.keep} kept + best + one being written, {size:.2f} GiB each"
    return [_line("disk", f"{kept}{cache} = {plan.disk_bytes / GIB:.1f}{free}")]


# ---------------------------------------------------------------- sanity and verdict


def _sanity(plan: Plan) -> list[str]:
    return [_line(found.name, ("WARNING  " if found.warns else "") + found.text) for found in sanity.check(plan)]


def verdict(plan: Plan) -> list[str]:
    """Go; or no-go, why, and what would go."""
    if plan.go:
        return ["GO"]
    lines = ["NO GO", *(_line("", reason) for reason in plan.reasons)]
    if plan.changes:
        lines.append("what would go:")
    for change in plan.changes:
        money = f", ${change.usd:,.2f}" if change.usd is not None else ""
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
    money = f", ${plan.usd:,.2f}" if plan.usd is not None else ""
    cost = plan.between_saves_h
    crash = f"${cost * job.usd_per_hour:,.2f}" if job.usd_per_hour is not None else span(cost)
    return [
        f"{plan.params:,} parameters ({'your own' if job.own_params else job.shape.family}); {large(job.flops_per_token)}FLOP per token",
        f"{job.steps:,} steps of {job.step_tokens:,.0f} tokens{epochs}; {step}, {job.row_tokens or job.seq_len:g} tokens each",
        f"about {span(plan.hours)}{money}: {time_words(plan)}",
        f"memory: at most {m.peak_gib:.2f} of {plan.device.memory_gib:.1f} GiB ({parts})",
        f"disk: {plan.disk_bytes / GIB:.2f} GiB; a crash can cost {crash}",
    ]


def table(plans: list[tuple[str, Plan]]) -> list[str]:
    """What if: one line each."""
    lines = [
        f"{'':<14}{'device':<16}{'parameters':>14}{'memory GiB':>12}{'of':>7}{'logits':>8}{'time':>12}{'usd':>10}  verdict"
    ]
    for name, plan in plans:
        usd = "-" if plan.usd is None else f"{plan.usd:,.2f}"
        why = "go" if plan.go else "no: " + ", ".join(r.split(":")[0] for r in plan.reasons)
        lines.append(
            f"{name:<14}{plan.device!s:<16}{plan.params:>14,}{plan.memory.peak_gib:>12.1f}{plan.device.memory_gib:>7.1f}"
            f"{plan.memory.held / GIB:>8.1f}{span(plan.hours):>12}{usd:>10}  {why}"
        )
    return lines
