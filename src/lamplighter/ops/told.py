"""A plan in words: the arithmetic line by line, go or no-go, and what would make it go.

In:  a Plan (or several, for a what-if table).
Out: lines for people; no torch, no colours.
"""

from __future__ import annotations

from lamplighter.model.shape import flops_per_token, matmul_parameters_per_layer
from lamplighter.ops.plan import GIB, TOKENS_PER_PARAMETER, Plan, checkpoint_bytes

WIDE = 12


def _line(name: str, text: str) -> str:
    return f"  {name:<{WIDE}} {text}"


def large(number: float) -> str:
    """1.11 G, 705 M, 42."""
    for size, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"


def span(hours: float) -> str:
    if hours < 1 / 60:
        return f"{hours * 3600:.0f} s"
    return f"{hours * 60:.0f} min" if hours < 2 else f"{hours:,.1f} h" if hours < 72 else f"{hours / 24:,.1f} days"


def tell(plan: Plan) -> list[str]:
    """The whole plan."""
    job, shape, device = plan.job, plan.job.shape, plan.device
    matrices = shape.layers * matmul_parameters_per_layer(shape) + shape.vocab_size * shape.width
    attention = 12 * shape.layers * shape.width * job.seq_len
    each = flops_per_token(shape, job.seq_len)
    rate = device.peak(job.dtype)
    ratio = job.tokens / plan.params
    epochs = f" = {job.tokens / job.data_tokens:.1f} epochs of {large(job.data_tokens)}" if job.data_tokens else ""
    lines = [
        f"plan on {device}, {job.dtype}",
        _line("parameters", f"{plan.params:,} ({shape.family}, {shape.layers} layers, {shape.width} wide,"
              f" vocabulary {shape.vocab_size:,}, {shape.positions} positions)"),
        _line("per token", f"6 x {large(matrices)} + attention {large(attention)} = {large(each)}FLOP"),
        _line("tokens", f"{job.steps:,} steps x {job.batch_size} x {job.seq_len} = {large(job.tokens)}{epochs};"
              f" {ratio:.1f} per parameter (about {TOKENS_PER_PARAMETER} is balanced: arXiv:2203.15556)"),
        _line("work", f"{large(each)} x {large(job.tokens)} = {large(plan.flops)}FLOP"),
        _line("time", f"{large(plan.flops)} / ({large(rate)}FLOP/s x {device.mfu:.0%}) = {span(plan.hours)}"),
    ]  # fmt: skip
    if plan.usd is not None:
        of = f" of ${job.budget_usd:,.2f}" if job.budget_usd is not None else ""
        lines.append(_line("money", f"{plan.hours:,.2f} h x ${job.usd_per_hour}/h = ${plan.usd:,.2f}{of}"))
    return lines + _memory(plan) + _disk(plan) + _verdict(plan)


def _memory(plan: Plan) -> list[str]:
    m, job = plan.memory, plan.job
    named = [("weights", m.weights), ("gradients", m.gradients), ("Adam", m.optimizer), ("bf16 copies", m.cast),
             ("activations", m.activations), ("logits", m.logits), ("the rest", m.own)]  # fmt: skip
    sums = " + ".join(f"{name} {size / GIB:.2f}" for name, size in named if size)
    note = "" if m.gradients_meanwhile else "; gradients and activations are not at their largest together"
    tokens = job.micro_batch * job.seq_len
    return [
        _line("memory", f"{sums} GiB; at most {m.peak_gib:.2f} of {plan.device.memory_gib:.1f} GiB{note}"),
        _line("", f"micro-batch {job.micro_batch} x {job.seq_len} = {tokens:,} tokens, {job.accumulation} a step;"
              f" logits {tokens:,} x {job.shape.vocab_size:,} x {14 if job.dtype == 'bf16' else 12} bytes"),
    ]  # fmt: skip


def _disk(plan: Plan) -> list[str]:
    size, job = checkpoint_bytes(plan.job) / GIB, plan.job
    cache = f" + token cache {2 * job.data_tokens / GIB:.2f}" if job.data_tokens else ""
    return [_line("disk", f"{job.keep} kept + best + one being written, {size:.2f} GiB each{cache} = {plan.disk_bytes / GIB:.1f} GiB")]  # fmt: skip


def _verdict(plan: Plan) -> list[str]:
    lines = [_line("WARNING", text) for text in plan.warnings]
    if plan.go:
        return [*lines, "GO"]
    lines += ["NO GO", *(_line("", reason) for reason in plan.reasons)]
    if plan.changes:
        lines.append("what would go:")
    for change in plan.changes:
        money = f", ${change.usd:,.2f}" if change.usd is not None else ""
        lines.append(_line("", f"{change.settings}"))
        lines.append(_line("", f"   {change.what}: {span(change.hours)}{money}, {change.memory_gib:.1f} GiB"))
    return lines if plan.changes else [*lines, _line("", "no single change makes it go: another device (--on), or a much smaller model")]  # fmt: skip


def table(plans: list[Plan]) -> list[str]:
    """What if: one line each."""
    lines = [f"{'device':<16}{'parameters':>14}{'memory GiB':>12}{'of':>7}{'time':>12}{'usd':>10}  verdict"]
    for plan in plans:
        usd = "-" if plan.usd is None else f"{plan.usd:,.2f}"
        lines.append(
            f"{plan.device!s:<16}{plan.params:>14,}{plan.memory.peak_gib:>12.1f}{plan.device.memory_gib:>7.1f}"
            f"{span(plan.hours):>12}{usd:>10}  {'go' if plan.go else 'no: ' + ', '.join(r.split(':')[0] for r in plan.reasons)}"
        )
    return lines
