"""The child's door: runs one verb; calls the start-up phases in order, each under its name.

In:  `python -m lamplighter.work VERB REQUEST`, a run folder made by the parent.
Out: the verb's exit code; everything else goes through report.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.data.setup import OpenedText, choose_template, open_batches, open_text
from lamplighter.errors import CRASHED, DONE, BadConfig, CannotWrite, LampError, StoppedEarly
from lamplighter.procs import prctl
from lamplighter.rundir import (
    CACHE_NAME,
    RunDir,
    cannot_write,
    human_bytes,
    read_json,
    read_last_lines,
    read_lines,
    read_record,
    verify_manifest,
)

if TYPE_CHECKING:
    from lamplighter.config import Run
    from lamplighter.data.batch_source import DataFacts
    from lamplighter.data.chat.template import ChatTemplate
    from lamplighter.data.tokenizer import Tokenizer
    from lamplighter.model.build import Built
    from lamplighter.train.hardware import Machine
    from lamplighter.train.state import RunContext, TrainState
    from lamplighter.train.validation import EntropyBound

Verb = Callable[[RunDir, dict[str, Any]], int]


def main() -> int:
    verb, request = sys.argv[1], json.loads(sys.argv[2])
    prctl.belong_to(int(os.environ.get("LAMP_PARENT_PID", "0")))
    folder = RunDir(Path(request["folder"]))
    try:
        report.start(folder, attempt=int(os.environ.get("LAMP_ATTEMPT", "1")), result_fd=request["result_fd"])
    except OSError as error:
        os.write(2, ("\n".join(cannot_write(folder.path, error).lines()) + "\n").encode())
        return CannotWrite.code
    try:
        code = VERBS[verb](folder, request)
    except StoppedEarly as stop:
        code = stop.code
    except LampError as error:
        report.last_words(error.lines(), error.code, error.cause, f"{error.what}: {error.why}", error.next)
        code = error.code
    except MemoryError:
        traceback.print_exc()
        lines = ["error: out of memory", "next:  a smaller train.micro_batch, data.seq_len or model"]
        report.last_words(lines, CRASHED)
        code = CRASHED
    except Exception as crash:  # noqa: BLE001  the traceback is kept in output.log, the last line is said
        if isinstance(crash, OSError) and crash.errno == errno.ENOSPC:
            full = cannot_write(folder.path, crash)
            report.last_words(full.lines(), full.code, full.cause, f"{full.what}: {full.why}", full.next)
            report.leave(full.code)
        traceback.print_exc()
        where = traceback.extract_tb(crash.__traceback__)[-1]
        lines = [
            f"error: {type(crash).__name__}: {crash}",
            f"why:   raised at {where.filename}:{where.lineno} in {where.name}",
        ]
        report.last_words(lines, CRASHED)
        code = CRASHED
    report.leave(code)  # at once: nothing is buffered, and torch takes a second to unload itself
    return code


# ---------------------------------------------------------------- train


def train(folder: RunDir, request: dict[str, Any]) -> int:
    """From a config to a trained model."""
    with report.phase("import"):
        from lamplighter.config import load_dump
        from lamplighter.train.loop import training
    run = load_dump(folder.config)
    context, state = prepare(run, folder, request)
    with training(context, state) as steps:
        for _ in steps:
            pass
    _finish(context, state)
    return DONE


def prepare(run: Run, folder: RunDir, request: dict[str, Any]) -> tuple[RunContext, TrainState]:
    """The start-up phases: data, tokenizer, cache, plan, model, resume."""
    from lamplighter.model.recompute import recompute_blocks
    from lamplighter.plan.job import family_of, is_own, known_shape
    from lamplighter.train import checkpoint, guard, hardware, optimizers
    from lamplighter.train.state import RunContext, TrainState
    from lamplighter.work.planning import plan_run

    cache = folder.path.parent / CACHE_NAME
    source, tokenizer = open_text(run, cache)
    text = OpenedText(source, tokenizer, choose_template(run, source, tokenizer))
    lay_out = open_batches(run, folder.path, cache, text)
    with report.phase("plan"):
        found = checkpoint.find(folder.checkpoints, request.get("resume", "auto"))
        before = _state_of(found)
        where = hardware.detect(run.train, dict(before.get("machine", {})), known_shape(run))
        for reason in where.reasons:
            report.note(reason)
    own = None
    if is_own(run):  # only its own code knows its size: built first, planned then
        with report.phase("model"):
            own = _build_model(run, tokenizer)
    batches = lay_out(own is None or own.takes_segments)
    data = batches.describe()
    steps = _count_steps(run, data)
    with report.phase("plan"):
        expected_s = plan_run(run, folder, where, tokenizer.vocab_size, data, steps, own, request, found is not None)
    with report.phase("model"):
        built = own or _build_model(run, tokenizer)
        if run.train.recompute:
            report.note(f"activations of {recompute_blocks(built.model)} blocks are computed again (train.recompute)")
        batches.check_ids(built.vocab_size)
        built.model.to(where.device)
        optimizer = optimizers.make_optimizer(built.model, run.train)
    compiled, why = hardware.choose_compile(
        run.train,
        where,
        family_of(run),
        before=before.get("compiled"),
        expected_s=expected_s,
        one_shape=not data.whole_batches,
    )
    if compiled and request.get("eager"):
        compiled, why = False, "compiling did not work out in an earlier attempt"
    report.note(f"{'compiled' if compiled else 'not compiled'}: {why}")
    schedule = optimizers.schedule(run.train, steps)
    context = RunContext(
        run=run,
        folder=folder,
        machine=where,
        built=built,
        optimizer=optimizer,
        schedule=schedule,
        source=batches,
        tokenizer=tokenizer,
        chat=text.chat,
        recorded=_recorded(run, where, data, steps, text.chat),
    )
    state = TrainState(steps, compiled)
    guard.explain_schedule(schedule)
    if found is not None:
        with report.phase("resume"):
            _resume(context, state, found)
    if run.data.source is None and not run.data.paths:
        with report.phase("floor"):
            context = replace(context, entropy_bound=_entropy_bound(context))
    return context, state


def _recorded(run: Run, where: Machine, data: DataFacts, steps: int, chat: ChatTemplate | None) -> dict[str, Any]:
    """What every checkpoint says of the run: compared at resume."""
    recorded = {"machine": where.facts(), "cache": data.name, "seed": run.train.seed, "steps": steps}
    if data.fingerprint:
        recorded["packing"] = data.fingerprint
    if chat is not None:
        recorded["chat"] = chat.fingerprint()
    return recorded


def _build_model(run: Run, tokenizer: Tokenizer) -> Built:
    from lamplighter.model.build import build

    return build(run.model, tokenizer.vocab_size, run.data.seq_len, tokenizer.end_of_text, run.train.seed)


def _state_of(found: Path | None) -> dict[str, Any]:
    """What a checkpoint says of the run that made it."""
    state = read_json(found / "training" / "state.json") if found else None
    return state if isinstance(state, dict) else {}


def _count_steps(run: Run, data: DataFacts) -> int:
    """train.steps, or the epochs in optimizer steps."""
    if run.train.steps is not None:
        return run.train.steps
    if not data.samples:
        assert run.data.max_chunks is not None
        total = run.data.max_chunks * run.data.tokens_per_chunk
        steps = max(1, math.ceil(total / data.positions_per_step))
        report.note(f"{run.data.max_chunks:,} chunks of {run.data.tokens_per_chunk:,} tokens: {steps:,} steps")
        return steps
    assert run.train.epochs is not None
    steps = data.steps_for(run.train.epochs)
    report.note(
        f"{run.train.epochs:g} epochs of {data.samples:,} {data.noun} in batches of {run.train.batch_size}: {steps:,} steps"
    )
    return steps


def _hours(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def _resume(context: RunContext, state: TrainState, found: Path) -> None:
    """Weights, optimizer and counters of the checkpoint; what differs from then is named."""
    from lamplighter.model.transformer import load_weights
    from lamplighter.train import checkpoint

    progress, tensors, before = checkpoint.load_state(found)
    now, root = context.recorded, context.folder.checkpoints
    if before.get("cache") not in (None, now["cache"]):
        raise BadConfig(
            f"the data or the tokenizer changed since {found.name}",
            f"token cache then {before['cache']}, now {now['cache']}",
            "put the old data back, or begin anew with --resume never",
        )
    if before.get("packing") != now.get("packing"):
        why = f"packing then {before.get('packing')}, now {now.get('packing')}"
        advice = "another version of numpy? use that of then, or begin anew with --resume never"
        raise BadConfig(f"examples are packed otherwise than in {found.name}", why, advice)
    load_weights(context.model, found)
    context.optimizer.load_state_tensors(tensors)
    best = checkpoint.best_of(root)
    if best is not None and best[0] <= progress.step:
        progress = progress.scored(*best)
    state.progress = progress
    for name, value in context.machine.facts().items():
        if before.get("machine", {}).get(name, value) != value:
            then = before["machine"][name]
            report.warn(f"{name} was {then}, is {value}: from step {progress.step + 1} on no longer bit-identical")
    if before.get("compiled", state.compiled) != state.compiled:
        then, is_now = ("compiled", "uncompiled") if before["compiled"] else ("uncompiled", "compiled")
        report.warn(f"it was {then}, is {is_now}: from step {progress.step + 1} on no longer bit-identical")
    if before.get("steps") not in (None, state.steps):
        report.warn(
            f"the run was planned for {before['steps']} steps, now {state.steps}: the schedule changes from here"
        )
    moved = checkpoint.go_back(root, progress)
    if moved:
        report.note(f"set aside (not deleted): {', '.join(moved)}")
    report.note(f"resumed from {found.name}: step {progress.step + 1} is next")
    records = read_last_lines(context.folder.metrics)
    reached = max((r["step"] for r in records if "train/loss" in r and isinstance(r.get("step"), int)), default=0)
    report.event("resumed", step=progress.step, path=str(found), redone_steps=max(0, reached - progress.step))


def _entropy_bound(context: RunContext) -> EntropyBound | None:
    """The embedded corpus knows its own probability: the loss that no model can beat on these very documents."""
    from lamplighter.data import corpus
    from lamplighter.train.validation import EntropyBound

    text = context.data.held_out.text
    assert text is not None, "the embedded corpus is text"
    starts = [*text.document_starts().tolist(), len(text)]
    nats = [
        corpus.nats(context.tokenizer.decode(text.read(start, stop - 1))) for start, stop in itertools.pairwise(starts)
    ]
    if len(nats) < 2:
        return None
    mean = sum(nats) / len(nats)
    error = math.sqrt(sum((one - mean) ** 2 for one in nats) / (len(nats) - 1) / len(nats))
    bound = EntropyBound(mean, error, sum(nats) / (len(text) - 1), len(nats))
    report.event("floor", nats_per_document=mean, standard_error=error, nats_per_token=bound.nats_per_token)
    report.note(
        f"the floor: {mean:.1f} nats per document ({bound.nats_per_token:.3f} per token) over {len(nats)} validation"
        f" documents, from the grammar itself; no model can do better"
    )
    return bound


def _finish(context: RunContext, state: TrainState) -> None:
    final = context.folder.checkpoints / f"checkpoint-{state.progress.step}"
    report.event("finished", step=state.progress.step, path=str(final), tokens=state.progress.tokens)


# ---------------------------------------------------------------- verbs that end with a result


def generate(_: RunDir, request: dict[str, Any]) -> int:
    """Text from a model."""
    with report.phase("import"):
        from lamplighter.use.generate import generate as run_generate
    run_generate(request)
    return DONE


def checkpoints(_: RunDir, request: dict[str, Any]) -> int:
    """Every checkpoint of a run, verified against its manifest."""
    run = RunDir(Path(request["run"]))
    losses = {r.get("step"): r["eval/val_loss"] for r in read_lines(run.metrics) if "eval/val_loss" in r}
    best = read_record(run.checkpoints / "best.json").get("step")
    rows = []
    folders = [
        path for path in run.checkpoints.glob("checkpoint-*") if path.name[11:].isascii() and path.name[11:].isdecimal()
    ]
    for path in sorted(folders, key=lambda path: int(path.name.split("-")[1])):
        total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        with report.phase("verify", total=total, unit="B") as phase:
            reason = verify_manifest(path, tick=lambda n, phase=phase, path=path: phase.tick(n, path.name))  # type: ignore[misc]
        state = read_record(path / "training" / "state.json")
        step = int(path.name.split("-")[1])
        rows.append({"checkpoint": path.name, "step": step, "loss": state.get("loss"), "val_loss": losses.get(step),
                     "bytes": total, "age_s": time.time() - path.stat().st_mtime, "valid": reason is None,
                     "reason": reason, "best": step == best})  # fmt: skip
    report.result(json.dumps(rows, indent=1) + "\n" if request["json"] else _checkpoint_table(run, rows))
    return DONE


def _checkpoint_table(run: RunDir, rows: list[dict[str, Any]]) -> str:
    if not rows:
        return f"no checkpoints in {run.checkpoints}\n"
    lines = [f"{'checkpoint':<20} {'loss':>8} {'val':>8} {'size':>10} {'age':>9}  state"]
    for row in rows:
        loss, val = (f"{row[name]:.4f}" if row[name] is not None else "-" for name in ("loss", "val_loss"))
        state = ("valid" + (", best" if row["best"] else "")) if row["valid"] else f"invalid: {row['reason']}"
        size, age = human_bytes(row["bytes"]), _hours(row["age_s"])
        lines.append(f"{row['checkpoint']:<20} {loss:>8} {val:>8} {size:>10} {age:>9}  {state}")
    return "\n".join([*lines, f"next: lamp generate {run.name} --checkpoint {rows[-1]['checkpoint']}", ""])


def doctor(folder: RunDir, request: dict[str, Any]) -> int:
    """Staged probes; they have a file of their own."""
    from lamplighter.work import examining

    return examining.doctor(folder, request)


def plan(folder: RunDir, request: dict[str, Any]) -> int:
    """Memory, time, money and disk, where there is text to count or steps to try."""
    from lamplighter.work import planning

    return planning.plan(folder, request)


def _texts(name: str) -> Verb:
    """A verb about text or tokenizers; they have a file of their own."""

    def run(folder: RunDir, request: dict[str, Any]) -> int:
        from lamplighter.work import texts

        verb: Verb = getattr(texts, name)
        return verb(folder, request)

    return run


VERBS: dict[str, Verb] = {
    "train": train,
    "generate": generate,
    "checkpoints": checkpoints,
    "doctor": doctor,
    "plan": plan,
    "data-stats": _texts("data_stats"),
    "data-clean": _texts("data_clean"),
    "data-prepare": _texts("data_prepare"),
    "tokenizer-train": _texts("tokenizer_train"),
    "tokenizer-show": _texts("tokenizer_show"),
}
