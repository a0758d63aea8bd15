"""The child's door: runs one verb; calls the start-up phases in order, each under its name.

In:  `python -m lamplighter.work VERB REQUEST`, a run folder made by the parent.
Out: the verb's exit code; everything else goes through report.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.data.setup import choose_template, obtain_tokens, open_feed, open_rows, open_text
from lamplighter.errors import CRASHED, DONE, BadConfig, CannotWrite, LampError, StoppedEarly
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
    from lamplighter.data.batch_source import Feed
    from lamplighter.data.batches import TokenStream
    from lamplighter.data.chat.example_cache import Examples
    from lamplighter.data.sources import Source
    from lamplighter.data.stream import Live
    from lamplighter.data.token_cache.reader import Tokens
    from lamplighter.data.tokenizer import Tokenizer
    from lamplighter.model.build import Built
    from lamplighter.train.state import Parts
    from lamplighter.train.validation import Floor

Verb = Callable[[RunDir, dict[str, Any]], int]
PR_SET_PDEATHSIG, PR_SET_PTRACER = 1, 0x59616D61


def main() -> int:
    verb, request = sys.argv[1], json.loads(sys.argv[2])
    _belong_to_parent()
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


def _belong_to_parent() -> None:
    """Die with the parent, and let it (and its py-spy) read our stacks."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    parent = int(os.environ.get("LAMP_PARENT_PID", "0"))
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent and os.getppid() != parent:
        os._exit(CRASHED)  # it died before we could ask
    libc.prctl(PR_SET_PTRACER, parent, 0, 0, 0)


# ---------------------------------------------------------------- train


def train(folder: RunDir, request: dict[str, Any]) -> int:
    """From a config to a trained model."""
    with report.phase("import"):
        from lamplighter.config import load_dump
        from lamplighter.train.loop import training
    run = load_dump(folder.config)
    parts = prepare(run, folder, request)
    with training(parts) as steps:
        for _ in steps:
            pass
    _finish(parts)
    return DONE


def prepare(run: Run, folder: RunDir, request: dict[str, Any]) -> Parts:
    """The start-up phases: data, tokenizer, cache, plan, model, resume."""
    from lamplighter.data.stream import Live
    from lamplighter.model.recompute import recompute_blocks
    from lamplighter.plan.job import family_of, is_own, known_shape
    from lamplighter.train import checkpoint, guard, hardware, optimizers
    from lamplighter.train.state import Parts
    from lamplighter.work.planning import plan_run

    cache = folder.path.parent / CACHE_NAME
    source, tokenizer = open_text(run, cache)
    chat = choose_template(run, source, tokenizer)
    tokens: Tokens | Examples | Live
    if run.data.stream:
        tokens = _open_live(run, folder, source, tokenizer)
    else:
        tokens = _open_tokens(run, cache, source, tokenizer) if chat is None else open_rows(run, cache, source, chat)
    with report.phase("plan"):
        found = checkpoint.find(folder.checkpoints, request.get("resume", "auto"))
        where = hardware.detect(run.train, dict(_state_of(found).get("machine", {})), known_shape(run))
        for reason in where.reasons:
            report.note(reason)
    own = None
    if is_own(run):  # only its own code knows its size: built first, planned then
        with report.phase("model"):
            own = _build_model(run, tokenizer)
    feed = open_feed(run, tokens, tokenizer, own is None or own.takes_segments)
    steps = _count_steps(run, feed)
    with report.phase("plan"):
        expected_s = plan_run(run, folder, where, tokenizer.vocab_size, feed, steps, own, request, found is not None)
    with report.phase("model"):
        built = own or _build_model(run, tokenizer)
        if run.train.recompute:
            report.note(f"activations of {recompute_blocks(built.model)} blocks are computed again (train.recompute)")
        if not isinstance(tokens, Live):
            tokens.check_ids(built.vocab_size)
        built.model.to(where.device)
        optimizer = optimizers.make_optimizer(built.model, run.train)
    facts = {"machine": where.facts(), "cache": _name_of(tokens), "seed": run.train.seed, "steps": steps}
    if feed.fingerprint:
        facts["packing"] = feed.fingerprint
    if chat is not None:
        facts["chat"] = chat.fingerprint()
    before = _state_of(found).get("compiled")
    compiled, why = hardware.choose_compile(
        run.train, before, expected_s, where, family_of(run), not feed.whole_batches
    )
    if compiled and request.get("eager"):
        compiled, why = False, "compiling did not work out in an earlier attempt"
    facts["compiled"] = compiled
    report.note(f"{'compiled' if compiled else 'not compiled'}: {why}")
    schedule = optimizers.schedule(run.train, steps)
    parts = Parts(run, folder, where, built, optimizer, schedule, tokens, feed, tokenizer, steps, facts, chat=chat)
    guard.explain_schedule(schedule)
    if found is not None:
        with report.phase("resume"):
            _resume(parts, found)
    if run.data.source is None and not run.data.paths:
        with report.phase("floor"):
            parts.floor = _floor(parts)
    return parts


def _open_tokens(run: Run, cache: Path, source: Source, tokenizer: Tokenizer) -> Tokens:
    return obtain_tokens(run, cache, source, tokenizer)[0]


def _open_live(run: Run, folder: RunDir, source: Source, tokenizer: Tokenizer) -> Live:
    """A stream: the validation side is decided by its first documents, once; the rest is read as it is needed."""
    from lamplighter.data.chat.row_source import RowSource
    from lamplighter.data.stream import Filler, Live, Settings
    from lamplighter.data.stream_split import hold_back

    data, train = run.data, run.train
    if isinstance(source, RowSource):
        why = "instruction rows are packed by their lengths, which must all be known before"
        raise BadConfig("data.stream is for text", why, "--data.stream false (rows are small), or --data.format text")
    with report.phase("hold back"):
        place, sample = folder.path / "stream", min(1 << 22, max(1 << 18, 4 * data.tokens_per_chunk))
        division, held = hold_back(place, source, tokenizer, data.val_fraction, sample)
    report.note(
        f"streaming {source}: chunks of {data.tokens_per_chunk:,} tokens; {held.documents:,} documents,"
        f" {len(held):,} tokens are held back to validate on, and later ones of that side are never trained on"
    )
    settings = Settings(
        train.seed, train.batch_size, data.seq_len, data.tokens_per_chunk, data.max_chunks, data.at_end == "repeat"
    )
    return Live(Filler(source, tokenizer, division, settings), held)


def _name_of(tokens: Tokens | Examples | Live) -> str:
    """What may not change between two starts of a run."""
    from lamplighter.data.stream import Live

    return tokens.name if isinstance(tokens, Live) else tokens.folder.name


def _build_model(run: Run, tokenizer: Tokenizer) -> Built:
    from lamplighter.model.build import build

    return build(run.model, tokenizer.vocab_size, run.data.seq_len, tokenizer.end_of_text, run.train.seed)


def _state_of(found: Path | None) -> dict[str, Any]:
    """What a checkpoint says of the run that made it."""
    state = read_json(found / "training" / "state.json") if found else None
    return state if isinstance(state, dict) else {}


def _count_steps(run: Run, feed: Feed) -> int:
    """train.steps, or the epochs in optimizer steps."""
    if run.train.steps is not None:
        return run.train.steps
    if not feed.samples:
        assert run.data.max_chunks is not None
        total = run.data.max_chunks * run.data.tokens_per_chunk
        steps = max(1, math.ceil(total / feed.positions_per_step))
        report.note(f"{run.data.max_chunks:,} chunks of {run.data.tokens_per_chunk:,} tokens: {steps:,} steps")
        return steps
    assert run.train.epochs is not None
    steps = feed.steps_for(run.train.epochs)
    report.note(
        f"{run.train.epochs:g} epochs of {feed.samples:,} {feed.noun} in batches of {run.train.batch_size}: {steps:,} steps"
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


def _resume(parts: Parts, found: Path) -> None:
    """Weights, optimizer and counters of the checkpoint; what differs from then is named."""
    from lamplighter.model.transformer import load_weights
    from lamplighter.train import checkpoint, optimizers

    progress, tensors, facts = checkpoint.load_state(found)
    if facts.get("cache") not in (None, _name_of(parts.tokens)):
        raise BadConfig(
            f"the data or the tokenizer changed since {found.name}",
            f"token cache then {facts['cache']}, now {_name_of(parts.tokens)}",
            "put the old data back, or begin anew with --resume never",
        )
    if facts.get("packing") != parts.facts.get("packing"):
        why = f"packing then {facts.get('packing')}, now {parts.facts.get('packing')}"
        advice = "another version of numpy? use that of then, or begin anew with --resume never"
        raise BadConfig(f"examples are packed otherwise than in {found.name}", why, advice)
    load_weights(parts.model, found)
    optimizers.load_state(parts.model, parts.optimizer, tensors)
    best = checkpoint.best_of(parts.folder.checkpoints)
    if best is not None and best[0] <= progress.step:
        progress = progress.scored(*best)
    parts.progress = progress
    for name, value in parts.machine.facts().items():
        if facts.get("machine", {}).get(name, value) != value:
            then = facts["machine"][name]
            report.warn(f"{name} was {then}, is {value}: from step {progress.step + 1} on no longer bit-identical")
    if facts.get("compiled", parts.facts["compiled"]) != parts.facts["compiled"]:
        then, now = ("compiled", "uncompiled") if facts["compiled"] else ("uncompiled", "compiled")
        report.warn(f"it was {then}, is {now}: from step {progress.step + 1} on no longer bit-identical")
    if facts.get("steps") not in (None, parts.steps):
        report.warn(
            f"the run was planned for {facts['steps']} steps, now {parts.steps}: the schedule changes from here"
        )
    moved = checkpoint.go_back(parts.folder.checkpoints, progress)
    if moved:
        report.note(f"set aside (not deleted): {', '.join(moved)}")
    report.note(f"resumed from {found.name}: step {progress.step + 1} is next")
    records = read_last_lines(parts.folder.metrics)
    reached = max((r["step"] for r in records if "train/loss" in r and isinstance(r.get("step"), int)), default=0)
    report.event("resumed", step=progress.step, path=str(found), redone_steps=max(0, reached - progress.step))


def _floor(parts: Parts) -> Floor | None:
    """The embedded corpus knows its own probability: the loss that no model can beat on these very documents."""
    from lamplighter.data import corpus
    from lamplighter.data.chat.example_cache import Examples
    from lamplighter.train.validation import Floor

    assert not isinstance(parts.tokens, Examples)
    split: TokenStream = parts.tokens.val
    starts = [*split.document_starts().tolist(), len(split)]
    nats = [
        corpus.nats(parts.tokenizer.decode(split.read(start, stop - 1))) for start, stop in itertools.pairwise(starts)
    ]
    if len(nats) < 2:
        return None
    mean = sum(nats) / len(nats)
    error = math.sqrt(sum((one - mean) ** 2 for one in nats) / (len(nats) - 1) / len(nats))
    floor = Floor(mean, error, sum(nats) / (len(split) - 1), len(nats))
    report.event("floor", nats_per_document=mean, standard_error=error, nats_per_token=floor.nats_per_token)
    report.note(
        f"the floor: {mean:.1f} nats per document ({floor.nats_per_token:.3f} per token) over {len(nats)} validation"
        f" documents, from the grammar itself; no model can do better"
    )
    return floor


def _finish(parts: Parts) -> None:
    final = parts.folder.checkpoints / f"checkpoint-{parts.progress.step}"
    report.event("finished", step=parts.progress.step, path=str(final), tokens=parts.progress.tokens)


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
