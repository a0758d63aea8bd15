"""Memory, time, money and disk before they are spent: go or no-go, what would make it go, and settings that are odd. No torch.

In:  a Job (what is to be trained) and a Device (on what); what was measured, where something was.
Out: a Plan: every figure, what speaks against it, and the cheapest changes that would make it go (first those that leave the
     result as it is, then shorter runs, then smaller models); Checks: a line for each setting that was looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from lamplighter.config.recipe import misfits
from lamplighter.gpus import ONE_MACHINE, Device
from lamplighter.leaves import leaf_size
from lamplighter.model.shape import count_parameters
from lamplighter.plan.job import Job, Measured, on_devices
from lamplighter.plan.memory import GIB, Memory, host_gib, memory
from lamplighter.plan.ranks import division_words, idle, reduction, share, without_idle
from lamplighter.plan.speed import as_hours, least_hours, reference_seconds, step_seconds, total_flops
from lamplighter.rundir import dollars

_SPARE = 0.92  # of the memory that may be planned for
_TOKEN_BYTES = 2


@dataclass(frozen=True)
class Change:
    """One way to make it go."""

    settings: str
    what: str
    hours: float
    usd: float | None
    memory_gib: float


@dataclass(frozen=True)
class Plan:
    """The figures, and what speaks against it."""

    job: Job
    device: Device
    memory: Memory
    flops: float
    step_s: float
    disk_bytes: int
    reference_s: float = 0.0  # of preference pairs: the pass before the first step
    free_disk: int | None = None
    measured: Measured | None = None
    largest: int | None = None  # the largest micro-batch that fits, where it was looked for
    reasons: tuple[str, ...] = ()
    changes: tuple[Change, ...] = field(default=())

    @property
    def go(self) -> bool:
        return not self.reasons

    @property
    def params(self) -> int:
        return self.job.params

    @property
    def training_hours(self) -> float:
        return self.step_s * self.job.steps / 3600

    @property
    def hours(self) -> float:
        """With what comes before the first step."""
        return self.training_hours + self.reference_s / 3600

    @property
    def usd(self) -> float | None:
        return self.hours * self.job.budget.usd_per_hour if self.job.budget.usd_per_hour is not None else None

    @property
    def tokens_per_s(self) -> float:
        return self.job.step_tokens / self.step_s if self.step_s else 0.0

    @property
    def mfu(self) -> float:
        """That the time stands for."""
        return self.flops / (self.training_hours * 3600 * self.device.peak(self.job.dtype)) if self.hours else 0.0

    @property
    def usable_gib(self) -> float:
        return self.device.memory_gib * _SPARE

    @property
    def between_saves_h(self) -> float:
        """What a crash can cost, at most."""
        job = self.job
        by_steps = job.save.every_steps * self.step_s / 3600 if job.save.every_steps else math.inf
        by_time = job.save.every_s / 3600 if job.save.every_s else math.inf
        return min(by_steps, by_time, self.hours)


def checkpoint_bytes(job: Job) -> int:
    return job.optimizer.checkpoint(job.trained, job.hidden)


def cache_bytes(job: Job) -> int:
    if job.text is None:
        return 0
    each = _TOKEN_BYTES if job.shape.vocab_size <= 1 << 16 else 2 * _TOKEN_BYTES
    return each * (job.text.tokens + (job.text.val_tokens or 0))


def make(job: Job, device: Device, free_disk: int | None = None, measured: Measured | None = None) -> Plan:
    """All figures and the reasons against."""
    job = placed(job, device)
    step_s, reference_s = step_seconds(job, device), reference_seconds(job, device)
    if measured and measured.fits:
        found_s = _measured_seconds(job, device, measured)
        step_s, reference_s = found_s, reference_s * found_s / step_s
    disk = checkpoint_bytes(job) * (job.save.keep + 2) + cache_bytes(job)
    plan = Plan(
        job,
        device,
        memory(job, device),
        total_flops(job),
        step_s,
        disk_bytes=disk,
        reference_s=reference_s,
        free_disk=free_disk,
        measured=measured,
    )
    return replace(plan, reasons=tuple(_against(plan)))


def _measured_seconds(job: Job, device: Device, measured: Measured) -> float:
    """One process has made whole steps; of several GPUs each does its part of one. Ranks of a processor share its cores."""
    part = 1.0 if device.is_cpu else share(job, device.count).rows / job.batch_size
    return measured.step_s * part + reduction(job, device).seconds


def placed(job: Job, device: Device) -> Job:
    """Replicated or sharded: train.shard auto is replicated where that fits."""
    whole = replace(job, sharded=False)
    if device.count == 1 or job.shard == "none":
        return whole
    if job.shard == "auto" and (job.optimizer.split == "matrix" or _has_room(whole, device)):
        return whole
    return replace(job, sharded=True)


def _against(plan: Plan) -> Iterator[str]:
    yield from _misfits(plan)
    yield from _memory_against(plan)
    yield from _time_against(plan, plan.hours)
    if plan.free_disk is not None and plan.disk_bytes > plan.free_disk:
        yield f"disk: {plan.disk_bytes / GIB:.1f} GiB are needed, {plan.free_disk / GIB:.1f} GiB are free"


def _misfits(plan: Plan) -> Iterator[str]:
    job, shape = plan.job, plan.job.shape
    if job.tokenizer_vocab is not None and job.tokenizer_vocab > shape.vocab_size:
        yield (
            f"vocabulary: the tokenizer has {job.tokenizer_vocab:,} tokens, the model knows {shape.vocab_size:,};"
            " use the model's own tokenizer"
        )
    if job.seq_len > shape.positions:
        yield f"length: data.seq_len {job.seq_len:,} is longer than the {shape.positions:,} positions of the model"
    if job.sharded and job.optimizer.split == "matrix":
        yield f"train.shard full: {job.optimizer.name} moves whole matrices, which no rank holds; train.shard none, or adamw"


def _memory_against(plan: Plan) -> Iterator[str]:
    job, device, found = plan.job, plan.device, plan.measured
    if found is not None and not found.fits:
        yield f"memory: tried with a micro-batch of {found.micro_batch}, and it does not fit ({found.why})"
        return
    if found is not None:  # real steps have been made: a peak on paper is no argument against them
        return
    need = plan.memory.peak_gib
    if need > plan.usable_gib:
        yield (
            f"memory: {need:.1f} GiB are needed on each {device.name}, {device.memory_gib:.1f} GiB are there"
            f" ({plan.usable_gib:.1f} may be planned for){_of_logits(plan)}"
        )
    if not device.is_cpu and device.host_gib is not None and host_gib(job, device) > device.host_gib:
        yield f"memory of the host: {host_gib(job, device):.1f} GiB are needed, {device.host_gib:.1f} GiB are free"


def _of_logits(plan: Plan) -> str:
    size = f"{plan.memory.logits / GIB:.1f} GiB"
    return f"; the logits alone are {size}" if plan.job.whole_logits else f" (logits as a whole would add {size})"


def _time_against(plan: Plan, hours: float) -> Iterator[str]:
    job, device = plan.job, plan.device
    usd, spent = hours * (job.budget.usd_per_hour or 0.0), job.budget.spent_usd(job.spent_s)
    if job.budget.usd is not None and usd + spent > job.budget.usd:
        before = f", and {dollars(spent)} are spent" if spent else ""
        yield (
            f"money: {dollars(usd)} ({as_hours(hours)} x ${job.budget.usd_per_hour:g}/h){before};"
            f" the budget is {dollars(job.budget.usd)}"
        )
    limit = job.limit_hours
    if limit <= 0:
        yield f"time: {as_hours(hours)}, and the budget is spent: {as_hours(job.spent_s / 3600)} went by before the first step"
    elif hours > limit:
        wanted = plan.flops / (limit * 3600)
        left = "leaves" if job.spent_s else "allows"
        yield (
            f"time: {as_hours(hours)}, the budget {left} {as_hours(limit)}; that would take {wanted / 1e12:,.2f} TFLOP/s,"
            f" {wanted / device.peak(job.dtype):.1f} times the peak of {device}"
        )


def sure_reasons(plan: Plan) -> list[str]:
    """What cannot be: more memory than there is, even without holes; more time or money than the budget at the best MFU."""
    found, exists = [], plan.device.total_gib or plan.device.memory_gib
    if plan.memory.least > exists * GIB:
        found.append(
            f"memory: at least {plan.memory.least / GIB:.1f} GiB are needed on {plan.device.name},"
            f" {exists:.1f} GiB exist{_of_logits(plan)}"
        )
    return [*found, *_time_against(plan, least_hours(plan.job, plan.device))]


_MOST_CHANGES = 4


@dataclass(frozen=True)
class _Option:
    """A job that differs a little, and in what."""

    settings: str
    what: str
    job: Job
    device: Device | None = None  # where it is another number of them


def completed(plan: Plan) -> Plan:
    """With what would help, where it is needed."""
    return replace(plan, changes=tuple(_changes(plan))) if plan.reasons else plan


def _changes(plan: Plan) -> Iterator[Change]:
    found = 0
    for option in _options(plan.job, plan.device):
        made = make(option.job, option.device or plan.device, plan.free_disk)
        if made.go and found < _MOST_CHANGES:
            found += 1
            yield Change(option.settings, option.what, made.hours, made.usd, made.memory.peak_gib)


def _options(job: Job, device: Device) -> Iterator[_Option]:
    """Ordered by what they change: nothing of the result, then the length of the run, then the model."""
    for_memory = list(_for_memory(job, device))
    yield from for_memory
    yield from _other_devices(job, device)
    if not _fits(job, device):
        yield from _adapters(job, device)
    for base in [_Option("", "", job), *for_memory[:1]]:
        for change in (_fewer_steps, _smaller_model, _shorter_window):
            for option in change(base.job, device):
                if make(option.job, device).go:
                    both = f"{base.settings} {option.settings}".strip()
                    words = f"{base.what}, and {option.what}" if base.what else option.what
                    yield _Option(both, words, option.job)
                    break


def _fits(job: Job, device: Device) -> bool:
    return _has_room(placed(job, device), device)


def _has_room(job: Job, device: Device) -> bool:
    return memory(job, device).peak_gib <= device.memory_gib * _SPARE


def largest_micro_batch(job: Job, device: Device) -> int | None:
    """On paper; None where not even one row fits. Smaller pieces are more of them, and the tree that adds up their gradients
    takes memory too: so from the largest sizes down, those of one number of pieces after another.
    """
    high = leaf_size(job.batch_size, device.count)  # larger ones would leave devices idle
    for pieces in range(math.ceil(job.batch_size / high), job.tree + 1):
        low = math.ceil(job.batch_size / pieces) if pieces < job.tree else 1
        found = _largest_between(job, device, low, high)
        if found is not None:
            return found
        high = min(high, low - 1)
    return None


def _largest_between(job: Job, device: Device, low: int, high: int) -> int | None:
    """Sizes with the same tree: of those, a smaller one never takes more."""
    if low > high or not _fits(replace(job, micro_batch=low), device):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _fits(replace(job, micro_batch=middle), device) else (low, middle - 1)
    return low


_LIGHTER = 0.95  # less than that is not worth a setting


def lighter(job: Job, device: Device) -> list[tuple[str, float]]:
    """Settings with which the same batch gives the same losses in less memory, and what they take by the plan, in GiB: for a run
    that the plan let begin and the device could not hold.
    """
    options: list[tuple[str, Job]] = []
    if job.micro_batch > 1:
        half = _even(job.micro_batch // 2, job, device)
        options.append((f"--train.micro_batch {half}", replace(job, micro_batch=half)))
    if not job.recompute and not job.own_params:
        options.append(("--train.recompute true", replace(job, recompute=True)))
    now = memory(job, device).peak_gib
    found = [(settings, memory(other, device).peak_gib) for settings, other in options]
    return [(settings, gib) for settings, gib in found if gib < _LIGHTER * now]


def _for_memory(job: Job, device: Device) -> Iterator[_Option]:
    """Batch and learning rate untouched, and the losses too: smaller pieces, or activations computed again."""
    if _fits(job, device):
        return
    blocks = ""
    if job.whole_logits and not job.own_params:
        job, blocks = replace(job, whole_logits=False), "--train.loss blocks "
        if _fits(job, device):
            yield _Option(blocks.strip(), "logits a few rows at a time", job)
            return
    if (size := largest_micro_batch(job, device)) is not None:
        size = _even(size, job, device)
        words = f"micro-batch {size}, the same batch of {job.batch_size}"
        yield _Option(f"{blocks}--train.micro_batch {size}", words, replace(job, micro_batch=size))
    elif device.count == 1 and job.tree > 1 and (size := largest_micro_batch(replace(job, tree=1), device)) is not None:
        size = _even(size, job, device)
        words = f"micro-batch {size}, gradients added one after another (not the same bits on another number of ranks)"
        plain = replace(job, tree=1, micro_batch=size)
        yield _Option(f"{blocks}--train.tree 1 --train.micro_batch {size}", words, plain)
    if device.count == 1 and job.nodes > 1 and _fits(plain := replace(job, tree=1), device):
        words = "gradients added one after another (other bits on several ranks)"
        yield _Option(f"{blocks}--train.tree 1", words, plain)
    if job.recompute or job.own_params:
        return
    again = replace(job, recompute=True)
    slower = step_seconds(again, device) / step_seconds(job, device) - 1
    words = f"activations computed again (the same losses, {slower:.0%} more time)"
    if _fits(again, device):
        yield _Option(f"{blocks}--train.recompute true", words, again)
    elif (size := largest_micro_batch(again, device)) is not None:
        size = _even(size, job, device)
        settings = f"{blocks}--train.recompute true --train.micro_batch {size}"
        yield _Option(settings, f"{words}, micro-batch {size}", replace(again, micro_batch=size))


def _other_devices(job: Job, device: Device) -> Iterator[_Option]:
    """Sharded instead of replicated; where devices are rented by the piece, the fewest of them with which it goes."""
    if device.count > 1 and job.shard == "none":
        yield _Option("--train.shard full", "weights, gradients and optimizer divided", replace(job, shard="full"))
    if not device.is_elsewhere:
        return
    for count in (1, 2, 4, ONE_MACHINE):
        other = replace(device, count=count)
        moved = on_devices(job, device, other)
        if count != device.count and make(moved, other).go:
            words = "sharded" if placed(moved, other).sharded else "replicated"
            few = "fewer" if count < device.count else "more"
            yield _Option(f"--on {device.name}:{count}", f"{few} devices, {words}", moved, other)
            return


_LORA_R = 16


def _adapters(job: Job, device: Device) -> Iterator[_Option]:
    """A model that exists may stay as it is, with adapters beside it; then its matrices may also take fewer bytes."""
    if not job.pretrained or job.own_params:
        return
    given = job.lora.r is not None
    for base_dtype in ("fp32", "bf16", "int8"):
        lora = replace(job.lora, r=job.lora.r or _LORA_R, base_dtype=base_dtype)
        if lora == job.lora or (given and base_dtype == "fp32"):
            continue
        settings = "" if given else f"--lora.r {lora.r}"
        settings += "" if base_dtype == "fp32" else f" --lora.base_dtype {base_dtype}"
        words = f"adapters of rank {lora.r} on the frozen model" + ("" if base_dtype == "fp32" else f" in {base_dtype}")
        yield _Option(settings.strip(), words, replace(job, lora=lora))


def _even(size: int, job: Job, device: Device) -> int:
    """The smallest piece that needs no more rounds: 5 of 16 are four pieces, and so are 4; on 8 devices 6 of 64 are two rounds,
    and so are 4.
    """
    at_once = min(device.count, job.tree, job.batch_size)
    rounds = math.ceil(job.batch_size / size / at_once)
    return math.ceil(job.batch_size / (rounds * at_once))


def _fewer_steps(job: Job, device: Device) -> Iterator[_Option]:
    took, limit = step_seconds(job, device) * job.steps / 3600, job.limit_hours - reference_seconds(job, device) / 3600
    steps = int(job.steps * limit / took * 0.98) if took and limit < math.inf else 0
    if 1 <= steps < job.steps:
        yield _Option(f"--train.steps {steps}", f"{steps / job.steps:.1%} of the steps", replace(job, steps=steps))


def _shorter_window(job: Job, _: Device) -> Iterator[_Option]:
    """As many windows, each shorter: less text in all."""
    length = job.seq_len // 2
    while length >= 128:
        shorter = replace(job, seq_len=length, row_tokens=None, shape=replace(job.shape, positions=length))
        yield _Option(f"--data.seq_len {length}", f"windows of {length} tokens", shorter)
        length //= 2


def _smaller_model(job: Job, _: Device) -> Iterator[_Option]:
    if job.own_params or job.pretrained:  # the size of a model that exists is what it is
        return
    shape = job.shape
    for layers in range(shape.layers - 1, 0, -1):
        unit = 2 * shape.heads
        width = max(unit, round(shape.width * layers / shape.layers / unit) * unit)
        mlp = max(8, round(shape.mlp_width * width / shape.width))
        smaller = replace(shape, layers=layers, width=width, mlp_width=mlp)
        settings = f"--model.layers {layers} --model.width {width}"
        params = count_parameters(smaller) / 1e6
        yield _Option(settings, f"a model of {params:,.0f}M parameters", replace(job, shape=smaller))


def smaller_models(plan: Plan) -> list[tuple[str, str, float]]:
    """Settings, words, and the time of a step as a share of this plan's; largest first."""
    options = _smaller_model(plan.job, plan.device)
    whole_s = step_seconds(plan.job, plan.device)
    return [(one.settings, one.what, step_seconds(one.job, plan.device) / whole_s) for one in options]


_TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv:2203.15556
_WARMUP_SHARE = 0.30
_MANY_EPOCHS = 5
MUCH_PADDING = 0.20
_DEAR_CRASH = 0.05  # of the whole run
_TEN_MINUTES_H = 0.17
_LITTLE_VALIDATION = 10_000  # tokens
_MUCH_VALIDATION = 0.20  # of the time
_UNUSED_ROWS = 0.10


# ---------------------------------------------------------------- odd settings


@dataclass(frozen=True)
class Check:
    """One setting, looked at."""

    name: str
    text: str
    warns: bool = False


def check(plan: Plan) -> list[Check]:
    return [
        *_ranks(plan),
        *_rate(plan),
        *_recipe(plan),
        *_saves(plan),
        *_validation(plan),
        *_data(plan),
        *_vocabulary(plan),
        *_size(plan),
    ]


def _ranks(plan: Plan) -> Iterator[Check]:
    job, count = plan.job, plan.device.count
    if lazy := idle(job, count):
        yield Check(
            "ranks",
            f"{lazy} of {count} stay idle: a step has {division_words(job)}; for a new run {without_idle(job, count)}",
            True,
        )
    if plan.device.nodes > 1 or (count > ONE_MACHINE and not plan.device.is_cpu):
        words = f"{count} devices are more than one machine has: the network between machines is not counted"
        if plan.device.nodes > 1:
            words = f"{plan.device.nodes} machines: the network between them is not counted"
        yield Check("link", f"{words}, only {plan.device.link}", True)


def warnings(plan: Plan) -> list[str]:
    return [f"{found.name}: {found.text}" for found in check(plan) if found.warns]


def _rate(plan: Plan) -> Iterator[Check]:
    job, rate = plan.job, plan.job.rate
    if rate is None:
        return
    share = rate.warmup / job.steps
    unit = f"{rate.warmup:,} of {job.steps:,} optimizer steps = {share:.0%} of the run"
    micro = f" (not micro-batches: {job.accumulation} of them make a step)" if job.accumulation > 1 else ""
    if share > 1:
        never = f"{unit}{micro}: the peak rate would never be reached; --train.warmup_steps {max(1, job.steps // 20)}"
        yield Check("warm-up", never, True)
    elif share > _WARMUP_SHARE and rate.warmup > max(1, job.steps // 20):
        advice = f"under 10 % is usual: --train.warmup_steps {max(1, job.steps // 20)}"
        yield Check("warm-up", f"{unit}{micro}; {advice}", True)
    else:
        yield Check("warm-up", unit)
    last = rate.lr_at(job.steps)
    how = f"{rate.shape}, from {rate.peak:.2e} to {last:.2e} at step {job.steps:,}, which is the last"
    yield Check("schedule", how if rate.shape != "constant" else f"constant at {rate.peak:.2e}: it never falls")


def _recipe(plan: Plan) -> Iterator[Check]:
    """Batch, rate and steps that do not fit each other."""
    job = plan.job
    if job.rate is None or job.pretrained:
        return
    found = misfits(
        optimizer=job.optimizer.name, lr=job.rate.peak, batch_size=job.batch_size, flops_per_token=job.flops_per_token,
        steps=job.steps, step_tokens=job.step_tokens,
    )  # fmt: skip
    yield from (Check("recipe", words, True) for words in found)


def _saves(plan: Plan) -> Iterator[Check]:
    job, hours = plan.job, plan.between_saves_h
    due = [f"every {job.save.every_steps:,} steps"] if job.save.every_steps else []
    due += [f"every {job.save.every_s:g} s"] if job.save.every_s else []
    lost = f"{hours * 60:,.1f} min" if hours < 2 else f"{hours:,.1f} h"
    cost = dollars(hours * job.budget.usd_per_hour) if job.budget.usd_per_hour is not None else lost
    none = hours >= plan.hours and plan.hours > 1 / 6
    words = f"{' or '.join(due) or 'only at the end'}: a crash can cost {cost}"
    dear = hours > _TEN_MINUTES_H and (none or (hours > _DEAR_CRASH * plan.hours and plan.hours > 2))
    yield Check("saves", words + (" (save.every_s 600 would be ten minutes)" if dear else ""), dear)


def _validation(plan: Plan) -> Iterator[Check]:
    job = plan.job
    if job.text is None or job.text.val_tokens is None:
        return
    held = job.text.val_tokens
    windows = -(-held // job.seq_len)
    used = min(windows, job.eval.windows) if job.eval.windows else windows
    tokens = min(held, used * job.seq_len)
    times = job.steps // job.eval.every_steps if job.eval.every_steps else 1
    share = times * tokens / 3 / max(1, job.tokens)  # a forward pass alone is a third of the work
    words = f"{tokens:,} of {held:,} tokens, {max(1, times):,} times: {share:.1%} of the work"
    if not held:
        yield Check("validation", "nothing is held back: nobody will know whether it learns (data.val_fraction)", True)
    elif held < _LITTLE_VALIDATION:
        yield Check("validation", f"{words}; so few tokens are a coarse measure (data.val_fraction)", True)
    elif share > _MUCH_VALIDATION:
        yield Check("validation", f"{words}; fewer eval.windows, or a larger eval.every_steps", True)
    else:
        yield Check("validation", words)


def _data(plan: Plan) -> Iterator[Check]:
    job = plan.job
    if job.epochs is not None and job.text is not None:
        words = f"{job.epochs:.1f} over {job.text.tokens:,} tokens"
        many = job.epochs > _MANY_EPOCHS
        advice = f"; 1 to 4 are usual: --train.epochs 3 is {job.steps * 3 / job.epochs:,.0f} steps" if many else ""
        yield Check("epochs", words + advice, many)
    if job.text is not None and job.text.padding > MUCH_PADDING:
        words = f"{job.text.padding:.0%} of the positions that are computed are padding"
        yield Check("padding", f"{words}: a smaller data.seq_len, or --data.packing packed", True)
    elif job.text is not None:
        yield Check("padding", f"{job.text.padding:.1%} of the positions")


def _vocabulary(plan: Plan) -> Iterator[Check]:
    known, given = plan.job.shape.vocab_size, plan.job.tokenizer_vocab
    if given is None:
        return
    words = f"the tokenizer has {given:,} tokens, the model {known:,}"
    if given < known * (1 - _UNUSED_ROWS):
        yield Check("vocabulary", f"{words}: {1 - given / known:.0%} of the embedding is never used", True)
    else:
        yield Check("vocabulary", words)


def _size(plan: Plan) -> Iterator[Check]:
    if plan.job.pretrained:
        return
    ratio = plan.job.tokens / plan.params
    words = f"{ratio:.1f} tokens per parameter; about {_TOKENS_PER_PARAMETER} is balanced (Hoffmann et al. 2022, arXiv:2203.15556)"
    few = ratio < _TOKENS_PER_PARAMETER / 10
    yield Check("balance", words + ("; more text, or a smaller model" if few else ""), few)
