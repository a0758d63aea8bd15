"""The child's door: runs one verb; calls the start-up phases in order, each under its name.

In:  `python -m lamplighter.work VERB REQUEST`, a run folder made by the parent.
Out: the verb's exit code; everything else goes through report.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import itertools
import json
import math
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.errors import CRASHED, DONE, BadConfig, CannotWrite, LampError, StoppedEarly
from lamplighter.rundir import (
    CACHE_NAME,
    RunDir,
    cannot_write,
    free_bytes,
    human_bytes,
    read_json,
    read_last_lines,
    read_lines,
    read_record,
    verify_manifest,
)

if TYPE_CHECKING:
    from lamplighter.config import Run
    from lamplighter.data.sources import Source
    from lamplighter.data.tokenizer import Tokenizer
    from lamplighter.data.tokens import Tokens
    from lamplighter.model.build import Built
    from lamplighter.train.loop import Parts
    from lamplighter.train.score import Floor

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
    from lamplighter.train import checkpoint, guard, machine, optim
    from lamplighter.train.loop import Parts

    cache = folder.path.parent / CACHE_NAME
    source, tokenizer = open_text(run, cache)
    tokens = _open_tokens(run, cache, source, tokenizer)
    with report.phase("model"):
        found = checkpoint.find(folder.checkpoints, request.get("resume", "auto"))
        where = machine.detect(run.train, _facts_of(found))
        for reason in where.reasons:
            report.note(reason)
        built = _build_model(run, tokenizer)
        tokens.check_ids(built.vocab_size)
        built.model.to(where.device)
        optimizer = optim.make_optimizer(built.model, run.train)
    steps = _count_steps(run, tokens)
    facts = {"machine": where.facts(), "cache": tokens.folder.name, "seed": run.train.seed, "steps": steps}
    facts["compiled"] = run.train.compile and not request.get("eager")
    if run.train.compile and request.get("eager"):
        report.note("running uncompiled, because compiling did not work out in an earlier attempt")
    schedule = optim.schedule(run.train, steps)
    parts = Parts(run, folder, where, built, optimizer, schedule, tokens, tokenizer, steps, facts)
    with report.phase("plan"):
        _plan(parts, request)
    guard.explain_schedule(schedule)
    if found is not None:
        with report.phase("resume"):
            _resume(parts, found)
    if run.data.source is None and not run.data.paths:
        with report.phase("floor"):
            parts.floor = _floor(parts)
    return parts


def open_text(run: Run, cache: Path) -> tuple[Source, Tokenizer]:
    """The source of documents and the tokenizer for it, trained if need be and kept in the cache."""
    from lamplighter.data import sources

    data = run.data
    with report.phase("data"):
        cache.mkdir(parents=True, exist_ok=True)
        if not data.paths and data.source is None:
            report.note(f"no data given: the embedded corpus, {data.embedded_documents:,} letters and diary entries")
            source: Source = sources.EmbeddedCorpus(0, data.embedded_documents)
        else:
            source = sources.open_source(
                data.paths, data.source, data.separator, data.text_key, cache / "file_hashes.json", data.bad_text
            )
        if data.max_documents is not None:
            source = sources.First(source, data.max_documents)
    with report.phase("tokenizer"):
        return source, _tokenizer(run, cache, source)


def _tokenizer(run: Run, cache: Path, source: Source) -> Tokenizer:
    """The given one, the bytes, or one trained on the source and kept for the next time."""
    from lamplighter.data import tokenizer as tokenizers

    section = run.tokenizer
    path = section.path or run.model.init_from
    if path is not None:
        found = tokenizers.load(Path(path))
        report.note(f"tokenizer of {path}: {found.vocab_size:,} tokens")
        return found
    if section.kind == "bytes":
        return tokenizers.byte_level()
    parts = [source.fingerprint(), section.vocab_size, section.sample_mb, "byte-level BPE 1"]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    kept = cache / f"tokenizer-{key}"
    if (kept / "tokenizer.json").exists():
        report.note(f"tokenizer kept from before: {kept}")
        return tokenizers.load(kept)
    total = source.total_bytes()
    made = tokenizers.train(source.documents(), section.vocab_size, int(section.sample_mb * 1e6), total)
    temporary = kept.with_name(f".{kept.name}.{os.getpid()}")
    temporary.mkdir(exist_ok=True)
    made.save(temporary)
    if not kept.exists():
        temporary.rename(kept)
    return made


def _open_tokens(run: Run, cache: Path, source: Source, tokenizer: Tokenizer) -> Tokens:
    from lamplighter.data import tokens
    from lamplighter.data.division import Settings

    with report.phase("cache"):
        folder = tokens.ensure(cache, source, tokenizer, Settings(run.data.val_fraction), run.data.cache)
        found = tokens.open_tokens(folder, verify=True)
    share = len(found.val) / max(1, len(found.val) + len(found.train))
    if share > 0.1 and share > 2 * run.data.val_fraction:
        report.warn(
            f"{share:.0%} of the tokens are held back for validation, {run.data.val_fraction:.0%} were asked for: few distinct texts"
        )
    report.note(
        f"{found.train.documents:,} documents, {len(found.train):,} tokens to train on;"
        f" {found.val.documents:,} documents, {len(found.val):,} tokens to validate on"
    )
    return found


def _build_model(run: Run, tokenizer: Tokenizer) -> Built:
    from lamplighter.model.build import build

    return build(run.model, tokenizer.vocab_size, run.data.seq_len, tokenizer.end_of_text, run.train.seed)


def _facts_of(found: Path | None) -> dict[str, Any]:
    state = read_json(found / "training" / "state.json") if found else None
    return dict(state.get("machine", {})) if isinstance(state, dict) else {}


def _count_steps(run: Run, tokens: Tokens) -> int:
    """train.steps, or the epochs in optimizer steps."""
    if run.train.steps is not None:
        return run.train.steps
    assert run.train.epochs is not None
    windows = math.ceil((len(tokens.train) - 1) / run.data.seq_len)
    steps = max(1, math.ceil(run.train.epochs * windows / run.train.batch_size))
    report.note(
        f"{run.train.epochs:g} epochs of {windows:,} windows in batches of {run.train.batch_size}: {steps:,} steps"
    )
    return steps


def _plan(parts: Parts, request: dict[str, Any]) -> None:
    """Parameters, epochs, expected time, disk; what cannot succeed is refused here."""
    from lamplighter.train import checkpoint, guard

    run, built, steps = parts.run, parts.built, parts.steps
    micro = run.train.micro_batch or run.train.batch_size
    report.note(
        f"{built.parameters:,} parameters ({run.model.family if not run.model.init_from else run.model.init_from})"
    )
    accumulation = math.ceil(run.train.batch_size / micro)
    report.note(f"batch {run.train.batch_size} = {accumulation} x micro-batch {micro}, {run.data.seq_len} tokens each")
    step_tokens = run.train.batch_size * run.data.seq_len
    epochs = steps * step_tokens / max(1, len(parts.tokens.train))
    flops = built.flops_per_token(run.data.seq_len) * step_tokens * steps
    expected_s = flops / (0.4 * parts.machine.peak_flops)
    report.note(
        f"{steps:,} steps of {step_tokens:,} tokens = {epochs:.1f} epochs; about {_hours(expected_s)} at 40 % of the peak"
    )
    windows = math.ceil((len(parts.tokens.train) - 1) / run.data.seq_len)
    padding = 1 - (len(parts.tokens.train) - 1) / (windows * run.data.seq_len)
    if padding > 0.2:
        report.warn(f"{padding:.0%} of each pass is padding: data.seq_len {run.data.seq_len} is longer than the data")
    guard.refuse_long_runs(run, request.get("preset"), expected_s, steps, bool(request.get("force")))
    size = 3 * 4 * built.parameters
    room, wanted = free_bytes(parts.folder.path), size * (run.save.keep + 2)
    checkpoint.require_room(parts.folder.checkpoints, int(size * checkpoint.SPARE))
    if room < wanted:
        report.warn(f"{human_bytes(room)} are free; {run.save.keep} checkpoints and a spare need {human_bytes(wanted)}")
    if not 0 < run.save.every_steps < steps and not run.save.every_s:
        report.warn("no save is due before the end: a crash would cost everything; set save.every_s 600")


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
    from lamplighter.train import checkpoint, optim

    progress, tensors, facts = checkpoint.load_state(found)
    if facts.get("cache") not in (None, parts.tokens.folder.name):
        raise BadConfig(
            f"the data or the tokenizer changed since {found.name}",
            f"token cache then {facts['cache']}, now {parts.tokens.folder.name}",
            "put the old data back, or begin anew with --resume never",
        )
    load_weights(parts.model, found)
    optim.load_state(parts.model, parts.optimizer, tensors)
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
    from lamplighter.train.score import Floor

    split = parts.tokens.val
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


def data_stats(folder: RunDir, request: dict[str, Any]) -> int:
    raise NotImplementedError


def data_clean(_: RunDir, request: dict[str, Any]) -> int:
    """Raw files to clean documents."""
    with report.phase("import"):
        from lamplighter.data.clean import job, table
        from lamplighter.data.clean.rules import Rules
        from lamplighter.data.pool import usable_cores
    rules, dry = Rules(**request["rules"]), request["dry_run"]
    out = Path(request["out"]) if request["out"] else None
    done = job.run(request["paths"], out, rules, request["workers"] or usable_cores(), dry)
    shown = table.table(done.totals, examples=dry)
    if request["json"]:
        shown = json.dumps({**done.totals, "out": str(out) if out else None, "shards": done.shards}, indent=1) + "\n"
    report.result(shown)
    job.refuse_nothing(done, None if dry else out)
    rate = done.totals["bytes_in"] / max(done.seconds, 1e-3)
    if dry:
        report.note("a dry run: nothing was written; without --dry-run the documents go to --out DIR")
    elif done.found:
        report.note(
            f"nothing has changed: {done.totals['kept']:,} documents are in {out}; next: lamp train --data.paths {out}"
        )
    else:
        report.note(
            f"{done.totals['kept']:,} clean documents in {out} ({human_bytes(rate)}/s), the rejected in {out}/log/rejected.log;"
            f" next: lamp train --data.paths {out}"
        )
    return DONE


def data_prepare(folder: RunDir, request: dict[str, Any]) -> int:
    raise NotImplementedError


def tokenizer_train(folder: RunDir, request: dict[str, Any]) -> int:
    raise NotImplementedError


def tokenizer_show(folder: RunDir, request: dict[str, Any]) -> int:
    raise NotImplementedError


VERBS = {
    "train": train,
    "generate": generate,
    "checkpoints": checkpoints,
    "data-stats": data_stats,
    "data-clean": data_clean,
    "data-prepare": data_prepare,
    "tokenizer-train": tokenizer_train,
    "tokenizer-show": tokenizer_show,
}

if __name__ == "__main__":
    sys.exit(main())
