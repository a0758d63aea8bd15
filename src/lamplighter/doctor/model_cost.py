"""Model probes of what a step costs: one real step in pieces, Python loops over tokens, precision, memory, the compiler.

In:  a ProbeContext.
Out: Findings: true parameters, time of a step, slow modules and loops by their line; fp32 against bf16; peak and available
     memory, measured or from smaller batches, and said which; how long torch.compile takes, and what it saves.
"""

from __future__ import annotations

import ast
import math
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from lamplighter.config import validated
from lamplighter.data.batches import Batch
from lamplighter.doctor.model import MODEL_FAILS, SHORT, ModelFixture, no_gradient_at_all, prepare, prepare_again
from lamplighter.doctor.probe import Finding, ProbeContext, failed, fault, finding, ok, warn
from lamplighter.gpus import Device
from lamplighter.model.transformer import Transformer
from lamplighter.plan.job import job_of
from lamplighter.plan.memory import GIB
from lamplighter.plan.memory import memory as memory_of
from lamplighter.procs import child, procfs, stacks
from lamplighter.procs.child import Say
from lamplighter.procs.stacks import Frame
from lamplighter.rundir import human_bytes
from lamplighter.train import bf16, optimizers

_MUCH_TIME = 0.3  # of a forward pass in one Python loop
_SAMPLE_S = 0.001
_LOOK_S = 0.6
_PER_TOKEN = 0.9  # a line counts as run for each token from so many times per added token on
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
_MEMORY_S = 20.0  # so long the longest micro-batch may take for real
_MARGIN = 0.92  # of the available memory
_WORTH = 1.1
COMPILE_S, _CURIOUS_S = 40.0, 20.0  # where the run compiles, and where it is only tried


# ---------------------------------------------------------------- one step


def one_step(context: ProbeContext) -> Iterator[Finding]:
    """Forward, backward and optimizer, uncompiled, on the run's own data."""
    fixture = prepare(context)
    yield from fixture.remarks
    yield _parameters(fixture)
    yield from _step(fixture, context)


def _parameters(fixture: ModelFixture) -> Finding:
    """The true count, whatever the name says."""
    total = fixture.built.parameters
    frozen = sum(p.numel() for p in fixture.model.parameters() if not p.requires_grad)
    what = f"{total:,} parameters, {total / 1e6:.1f}M" + (f", of which {frozen:,} are frozen" if frozen else "")
    why = f"counted, with a vocabulary of {fixture.built.vocab_size:,} and {fixture.built.positions:,} positions"
    return ok(what, why, figures={"parameters": float(total)})


def _step(fixture: ModelFixture, context: ProbeContext) -> Iterator[Finding]:
    context.now("a first, short forward pass")
    if (small_vocabulary := _vocabulary(fixture)) is not None:
        yield small_vocabulary
        return
    try:
        small = fixture.loss(fixture.piece(1, SHORT))
    except MODEL_FAILS as error:
        yield failed(error, f"a forward pass of 1 x {SHORT} tokens fails")
        return
    if not math.isfinite(first := float(small.detach())):
        yield fault(f"the first loss is {first}", "before any step", "check the init", "nan_batch")
        return
    if not small.requires_grad:
        yield no_gradient_at_all()
        return
    yield from _loop(fixture, context)
    context.now("one forward, backward and step")
    batch, words = fixture.quick_rows()
    yield _timed(fixture, batch, words)
    yield _slowest_modules(fixture, batch)


@torch.no_grad()
def _vocabulary(fixture: ModelFixture) -> Finding | None:
    """The highest id goes in, and as many logits come out."""
    size, length = fixture.built.vocab_size, min(SHORT, fixture.run.data.seq_len)
    advice = "give the embedding and the head vocab_size rows"
    try:
        shape = tuple(fixture.logits(torch.full((1, length), size - 1)).shape)
    except IndexError as error:
        place = stacks.line_to_name(stacks.frames_of_error(error))
        where = f", at {place.place}" if place else ""
        what = f"the embedding is smaller than the vocabulary: id {size - 1:,} of {size:,} cannot be looked up{where}"
        return fault(what, str(error), advice, "token_range", at=place)
    except MODEL_FAILS as error:
        return failed(error, f"a forward pass of 1 x {length} tokens fails")
    if shape != (1, length, size):
        what = f"the model gives logits of shape {shape}, wanted {(1, length, size)}: [batch, time, vocabulary]"
        return fault(what, f"the tokenizer has {size:,} tokens", advice, "token_range")
    return None


def _timed(fixture: ModelFixture, batch: Batch, words: str) -> Finding:
    """The second of two steps: the first one allocates."""
    optimizer = optimizers.make_optimizer(fixture.model, fixture.run.train, fixture.machine.newton_schulz)
    for _ in range(2):
        marks = [time.perf_counter()]
        loss = fixture.loss(batch)
        fixture.wait()
        marks.append(time.perf_counter())
        loss.backward()  # type: ignore[no-untyped-call]
        fixture.wait()
        marks.append(time.perf_counter())
        optimizer.step(1e-9)
        optimizer.zero_grad()
        fixture.wait()
        marks.append(time.perf_counter())
    forward, backward, update = (after - before for before, after in pairwise(marks))
    sequences = fixture.run.train.batch_size
    tokens = sequences * fixture.rows_each * fixture.run.data.seq_len
    step_s = update + (forward + backward) * tokens / batch.inputs.size
    rate = tokens / step_s
    mfu = rate * fixture.built.flops_per_token(batch.inputs.shape[1]) / max(1.0, fixture.machine.peak_flops)
    parts = f"forward {forward * 1000:,.0f} ms, backward {backward * 1000:,.0f} ms, optimizer {update * 1000:,.0f} ms"
    figures = {"step_s": step_s, "tokens_per_s": rate, "mfu": mfu}
    return ok(
        f"one step, uncompiled, {fixture.machine.dtype_name}: {parts}; {rate:,.0f} tokens/s, {mfu:.0%} of the peak",
        f"{words}, {fixture.words}; a whole step of {sequences} sequences takes about {step_s:.2f} s",
        figures={**figures, "forward_s": forward, "backward_s": backward, "optimizer_s": update},
    )


def _slowest_modules(fixture: ModelFixture, batch: Batch) -> Finding:
    """Time of each module in a forward pass, its children apart."""
    spent: dict[str, float] = defaultdict(float)
    began: list[float] = []
    inner = [0.0]  # by depth: seconds spent in the modules below

    def enter(*_: object) -> None:
        inner.append(0.0)
        began.append(time.perf_counter())

    def leave(name: str, *_: object) -> None:
        fixture.wait()
        took = time.perf_counter() - began.pop()
        spent[name] += took - inner.pop()
        inner[-1] += took

    handles = []
    for name, module in fixture.model.named_modules():
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(partial(leave, name or type(module).__name__)))
    try:
        with torch.no_grad():
            fixture.loss(batch)
    finally:
        for handle in handles:
            handle.remove()
    total = sum(spent.values()) or 1e-9
    shares = {name: spent[name] / total for name in sorted(spent, key=lambda name: -spent[name])[:4]}
    shown = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    figures = {f"share:{name}": share for name, share in shares.items()}
    return ok(f"the slowest modules of a forward pass ({total * 1000:,.0f} ms): {shown}", figures=figures)


# ---------------------------------------------------------------- a Python loop over tokens


def _loop(fixture: ModelFixture, context: ProbeContext) -> Iterator[Finding]:
    """A Python loop over tokens, which no device makes fast."""
    if isinstance(fixture.model, Transformer):
        return
    context.now("lines of the model that run once per token")

    def forward(length: int) -> None:
        with torch.no_grad():
            fixture.loss(fixture.piece(1, length))

    tokens = fixture.run.data.seq_len
    length = min(2 * SHORT, tokens)
    try:
        found = find_loop(forward, max(8, length // 2), length)
    except (RuntimeError, IndexError) as error:
        yield failed(error, "the model takes no shorter input than data.seq_len, so its loops were not counted")
        return
    if found is None:
        yield ok("no line of the model runs once per token")
        return
    runs, place = round(found.runs * tokens), found.place
    yield finding(
        "fault" if found.share > _MUCH_TIME else "warn",
        f"a Python loop over tokens: {place.place} runs {runs:,} times per forward, {found.share:.0%} of its time",
        f"{place.text} is run for every token ({tokens:,} in a sequence), and each turn waits for the one before it; it"
        " looks like a hang, and a compiler unrolls it",
        "compute all positions at once (one matrix product, a scan or a cumulative sum); --train.compile false until then",
        "python_loop",
        at=place,
        settings={"train.compile": False} if fixture.run.train.compile else {},
        figures={"runs": runs, "share": found.share},
    )


@dataclass(frozen=True)
class HotLoop:
    """A line that runs for every token."""

    place: Frame  # the loop
    runs: float  # in one forward pass, per token
    share: float  # of the time of a forward pass


def find_loop(forward: Callable[[int], object], short: int, long: int) -> HotLoop | None:
    """Count lines at two lengths: what grows with the tokens runs for each of them. Then sample its share of the time."""
    few, many = _count_lines(lambda: forward(short)), _count_lines(lambda: forward(long))
    runs: dict[tuple[str, int, int, str], float] = {}  # by loop: file, first and last line, function
    for (file, line, func), count in many.items():
        per_token = (count - few[file, line, func]) / (long - short)
        if per_token >= _PER_TOKEN:
            key = (file, *_loop_around(file, line), func)
            runs[key] = max(per_token, runs.get(key, 0.0))
    if not runs:
        return None
    on_stack, samples = _sample(lambda: forward(long))
    found = []
    for (file, first, last, func), per_token in runs.items():
        hits = sum(on_stack[file, line] for line in range(first, last + 1))
        found.append(HotLoop(Frame(file, first, func), per_token, min(1.0, hits / max(1, samples))))
    return max(found, key=lambda one: one.share)


def _count_lines(work: Callable[[], object]) -> Counter[tuple[str, int, str]]:
    """How often each line of the user's code runs."""
    lines: Counter[tuple[str, int, str]] = Counter()

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            lines[frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name] += 1
        return on_line

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        return on_line if stacks.is_users(frame.f_code.co_filename) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def _sample(work: Callable[[], object]) -> tuple[Counter[tuple[str, int]], int]:
    """Do it again and again, and look at this thread a thousand times a second: which lines of the user's are on its
    stack, and how many looks there were.
    """
    on_stack: Counter[tuple[str, int]] = Counter()
    looks, me, over = [0], threading.get_ident(), threading.Event()

    def look_on() -> None:
        while not over.wait(_SAMPLE_S):
            looks[0] += 1
            frames = stacks.frames_of(sys._current_frames().get(me))
            on_stack.update({(frame.file, frame.line) for frame in frames if stacks.is_users(frame.file)})

    thread = threading.Thread(target=look_on, daemon=True)
    interval, until = sys.getswitchinterval(), time.monotonic() + _LOOK_S
    sys.setswitchinterval(_SAMPLE_S / 2)
    thread.start()
    try:
        work()
        while time.monotonic() < until:
            work()
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(interval)
    return on_stack, looks[0]


def _loop_around(file: str, line: int) -> tuple[int, int]:
    """The first and last line of the innermost loop that holds the line; the line itself where there is none, as in a
    function that is called per token.
    """
    try:
        tree = ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):  # no source that can be read: no loop to name
        return line, line
    loops = [(node.lineno, node.end_lineno or node.lineno) for node in ast.walk(tree) if isinstance(node, _LOOPS)]
    return max(((first, last) for first, last in loops if first <= line <= last), default=(line, line))


# ---------------------------------------------------------------- precision


def precision(context: ProbeContext) -> Iterator[Finding]:
    """bf16 against fp32: does it work, is it faster, does it give the same loss."""
    context.now("bf16 in a process that may die")
    if why := _why_no_bf16(context.run.train.device):
        if context.run.train.dtype == "bf16":
            yield fault("train.dtype is bf16, and it does not work here", why, settings={"train.dtype": "fp32"})
        else:
            yield ok(f"fp32: {why}")
        return
    fixture = prepare_again(context)
    context.now("one step in fp32 and in bf16")
    yield _compare(fixture)


def _why_no_bf16(device: str) -> str:
    """Empty where it works. Asked before the first product: a fork after it would hang."""
    if device != "cpu" and torch.cuda.is_available():
        return "" if torch.cuda.is_bf16_supported() else "the GPU has no bf16"
    if not bf16.cpu_has_it():
        return "the CPU has no bf16 instructions: each product would be emulated"
    return "" if bf16.make_it_work() else "bf16 crashes on this CPU: a trial process died"


def _compare(fixture: ModelFixture) -> Finding:
    wanted, (batch, words) = fixture.run.train.dtype, fixture.quick_rows()
    spent, loss = {}, {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        fixture.seconds_of(batch, dtype)
        spent[name] = min(fixture.seconds_of(batch, dtype) for _ in range(2))
        with torch.no_grad():
            loss[name] = float(fixture.loss(batch, dtype))
    gain = spent["fp32"] / spent["bf16"]
    what = f"bf16 {spent['bf16'] * 1000:,.0f} ms against fp32 {spent['fp32'] * 1000:,.0f} ms: {gain:.2f} x"
    why = f"forward and backward of {words}; loss {loss['bf16']:.4f} against {loss['fp32']:.4f}"
    figures = {"bf16_s": spent["bf16"], "fp32_s": spent["fp32"], "gain": gain}
    if not math.isfinite(loss["bf16"]) or abs(loss["bf16"] - loss["fp32"]) > 0.05 * abs(loss["fp32"]):
        other, settings = partial(finding, "fault" if wanted == "bf16" else "warn"), {"train.dtype": "fp32"}
        return other(f"bf16 gives another loss: {why}", what, "", "bf16_differs", settings=settings, figures=figures)
    best = "bf16" if gain > _WORTH else "fp32"
    if wanted in ("auto", best):
        return ok(what, why, figures=figures)
    return warn(f"{what}, and train.dtype is {wanted}", why, settings={"train.dtype": best}, figures=figures)


# ---------------------------------------------------------------- memory


def memory(context: ProbeContext) -> Iterator[Finding]:
    """The longest micro-batch, for real where that is quick and safe; else from smaller ones."""
    fixture = prepare_again(context, quick_dtype=False)
    have, wanted = _available(fixture), fixture.rows
    paper = _on_paper(fixture, have)
    sums = f"by arithmetic {human_bytes(paper)}" if paper else "of a model of your own there is no arithmetic"
    if paper > _MARGIN * have:
        why = f"{sums}: weights, gradients, optimizer, activations and logits; not tried"
        yield _judge_peak(fixture, paper, have, why, paper)
        return
    rows, before = 1, 0
    while True:
        context.now(f"{rows} x {fixture.run.data.seq_len} tokens, the memory of a step")
        began = time.monotonic()
        peak = _peak(fixture, rows)
        spent = time.monotonic() - began
        if rows == wanted:
            yield _judge_peak(
                fixture, peak, have, f"measured on the whole micro-batch of {wanted}; {sums}", paper, fits=True
            )
            return
        each = (peak - before) / (rows - rows // 2) if rows > 1 else 0.0
        guess = int(peak + each * (wanted - rows))
        if rows > 1 and (guess > _MARGIN * have or spent * 2 > _MEMORY_S):
            why = f"from {rows // 2} and {rows} rows, {human_bytes(int(each))} a row; {sums}"
            yield _judge_peak(fixture, guess, have, why, paper)
            return
        rows, before = min(2 * rows, wanted), peak


def _available(fixture: ModelFixture) -> int:
    if fixture.machine.device.type == "cuda":
        return int(torch.cuda.mem_get_info(fixture.machine.device)[0])
    return procfs.memory_available() + procfs.own_memory()[0]


def _on_paper(fixture: ModelFixture, have: int) -> int:
    """The plan's arithmetic, which knows the built-in families; 0 of another model."""
    if not isinstance(fixture.model, Transformer):
        return 0
    run, machine, shape = fixture.run, fixture.machine, fixture.model.shape
    if not run.model.init_from:
        shape = replace(shape, layers=run.model.layers)  # it may be examined with fewer
    job = job_of(run, shape, run.train.steps or 1, machine.dtype_name)
    name = "cpu" if machine.device.type == "cpu" else machine.name
    return memory_of(job, Device(name, have / GIB, None, machine.peak_flops)).training


def _peak(fixture: ModelFixture, rows: int) -> int:
    """Of one step of so many rows: the device's own count, or how high the resident memory rose."""
    optimizer = optimizers.make_optimizer(fixture.model, fixture.run.train, fixture.machine.newton_schulz)
    batch, device = fixture.piece(rows), fixture.machine.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with _watched_memory() as highest:
        fixture.loss(batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step(1e-9)
        optimizer.zero_grad()
        fixture.wait()
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else highest[0]


@contextmanager
def _watched_memory() -> Iterator[list[int]]:
    """How high the resident memory of this process rises, looked at every few milliseconds."""
    highest, over = [0], threading.Event()

    def look_on() -> None:
        while not over.wait(0.002):
            highest[0] = max(highest[0], procfs.own_memory()[0])

    thread = threading.Thread(target=look_on, daemon=True)
    thread.start()
    try:
        yield highest
    finally:
        over.set()
        thread.join()
        highest[0] = max(highest[0], procfs.own_memory()[0])


def _judge_peak(fixture: ModelFixture, peak: int, have: int, why: str, paper: int, fits: bool = False) -> Finding:
    """`paper`: by the plan's arithmetic; `fits`: it was tried, and did."""
    what = f"the longest micro-batch, {fixture.rows} x {fixture.run.data.seq_len} tokens,"
    figures = {"peak_bytes": float(peak), "available_bytes": float(have)}
    if fits or peak <= _MARGIN * have:
        planned = f" ({human_bytes(paper)} by the plan)" if paper else ""
        return ok(f"{what} takes {human_bytes(peak)}{planned} of {human_bytes(have)}", why, figures=figures)
    smaller = max(1, fixture.rows // 2 ** max(1, math.ceil(math.log2(peak / (_MARGIN * have)))))
    what += f" needs {human_bytes(peak)}; {human_bytes(have)} are available"
    advice = f"--train.micro_batch {smaller} (the batch of {fixture.run.train.batch_size} stays)"
    return fault(what, why, advice, "rss_oom", settings={"train.micro_batch": smaller}, figures=figures)


# ---------------------------------------------------------------- the compiler


def compiling(context: ProbeContext) -> Iterator[Finding]:
    """The same step with torch.compile, in a process of its own with a deadline."""
    request = {"run": asdict(context.run), "runs_dir": str(context.runs_dir), "scratch": str(context.scratch)}
    wanted = context.run.train.compile is True
    done = child.run(
        "lamplighter.doctor.model_cost:measure_compile",
        request,
        deadline_s=COMPILE_S if wanted else _CURIOUS_S,
        on_record=lambda record: context.now(str(record.get("now", ""))),
    )
    last = done.records[-1] if done.records else {}
    if wanted:
        trouble = partial(fault, settings={"train.compile": False})
    else:
        trouble = partial(ok, next="nothing to do: train.compile is not asked for")
    if done.ended_for:
        at = f" ({last.get('now')})" if last.get("now") else ""
        unrolled, busy = "a Python loop in the model is unrolled, turn by turn", "a busy machine, or a slow compiler"
        what = f"torch.compile had not ended after {done.seconds:.0f} s{at}"
        yield trouble(what, unrolled if last.get("own") else busy, cause="compile_slow")
    elif "error" in last:
        yield trouble(f"torch.compile fails: {last['error']}", last.get("where", ""), cause="compile_failed")
    elif done.code != 0 or "compiled_s" not in last:
        yield trouble(f"the compile trial {done.how()}", done.last_line, cause="compile_failed")
    else:
        yield _worth(last, wanted, context.run.train.steps or 0)


def _worth(measured: dict[str, Any], wanted: bool, steps: int) -> Finding:
    eager_s, compiled_s, compile_s = (float(measured[name]) for name in ("eager_s", "compiled_s", "compile_s"))
    gain, saved_s = eager_s / compiled_s, (eager_s - compiled_s) * steps
    what = f"compiled {compiled_s * 1000:,.0f} ms against uncompiled {eager_s * 1000:,.0f} ms: {gain:.2f} x,"
    what += f" after {compile_s:.0f} s of compiling"
    why = f"forward and backward of {measured['words']}"
    figures = {"compile_s": compile_s, "compiled_s": compiled_s, "eager_s": eager_s, "gain": gain}
    if wanted and gain < 1.0:
        settings = {"train.compile": False}
        return warn(f"{what}: slower", why, cause="compile_slow", settings=settings, figures=figures)
    if not wanted and gain > _WORTH and saved_s > 2 * compile_s:
        what += f"; --train.compile true would save about {saved_s / 60:.0f} min"
    return ok(what, why, figures=figures)


def measure_compile(request: dict[str, Any], say: Say) -> None:
    """Eager first, then the same blocks compiled as lamp train would."""
    run, runs_dir, scratch = validated(request["run"]), Path(request["runs_dir"]), Path(request["scratch"])
    fixture = prepare(ProbeContext(run, None, runs_dir, scratch, lambda text: say(now=text)), quick_dtype=False)
    is_own = not isinstance(fixture.model, Transformer)
    say(now="the same step, uncompiled", own=is_own)
    batch, words = fixture.quick_rows()
    eager_s = min(fixture.seconds_of(batch) for _ in range(3))
    from lamplighter.train.compiled import Compiled, CompileError

    say(now=f"compiling for {words}", own=is_own)
    blocks, began = Compiled(fixture.model), time.monotonic()
    try:
        blocks.compile(scratch / "compiled")
        fixture.seconds_of(batch)
        compile_s = time.monotonic() - began
        say(now="the same step, compiled", own=is_own)
        compiled_s = min(fixture.seconds_of(batch) for _ in range(3))
    except CompileError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        where = next((line for line in lines if line.startswith("File ")), "")  # the user's line, where it says one
        say(error=lines[0] if lines else type(error).__name__, where=where)
        return
    say(eager_s=eager_s, compiled_s=compiled_s, compile_s=compile_s, words=words)
