"""lamp train and lamp demo: from a config to a trained model.

In:  a preset, a run.yaml, `--section.key value` pairs.
Out: a run folder. The parent part resolves the config, takes the run and supervises; the child part calls the start-up
     phases in order, each under its name, and then the loop.
"""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.commands import write
from lamplighter.commands.arguments import parse
from lamplighter.data.setup import choose_template, obtain_tokens, open_feed, open_rows, open_text
from lamplighter.errors import DONE, BadConfig, LampError, UsageError
from lamplighter.rundir import (
    CACHE_NAME,
    RunDir,
    cannot_write,
    is_running,
    move_aside,
    open_lines,
    read_json,
    read_last_lines,
    read_record,
    take_lock,
    write_atomic,
)

if TYPE_CHECKING:
    from lamplighter.config import Resolved, Run
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
    from lamplighter.watch.console import Console


def _train_flags(
    run_yaml: Path | None = None,
    /,
    *,
    preset: str | None = None,
    run: str | None = None,
    resume: str = "auto",
    test: bool = False,
    verbose: bool = False,
    force: bool = False,
    print_config: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp train` takes besides fields."""


def train(words: list[str]) -> int:
    """Resolve the config, take the run, start the child, stay with it."""
    return _start_training("train", words)


def demo(words: list[str]) -> int:
    """The demo preset under its own name."""
    return _start_training("demo", ["--preset", "demo", *words])


def _start_training(verb: str, words: list[str]) -> int:
    from lamplighter.config import dump, parse_overrides, resolve

    rest, overrides = parse_overrides(words)
    flags = parse(verb, _train_flags, rest)
    resolved = resolve(flags["preset"], flags["run_yaml"], overrides, flags["test"])
    if flags["print_config"]:
        return write(1, dump(resolved))
    return _train(verb, words, resolved, flags)


def _run_name(flags: dict[str, Any]) -> str:
    yaml: Path | None = flags["run_yaml"]
    if flags["run"] == "":
        raise UsageError("--run is empty", "a run needs a name", "--run my-run")
    name = str(flags["run"] or (yaml.stem if yaml else None) or flags["preset"] or "train")
    if "/" in name or name.startswith("."):
        raise UsageError(f"{name} cannot be a run's name", "a run is one folder of --runs-dir", "--run my-run")
    return name + ("-test" if flags["test"] else "")


def _train(verb: str, words: list[str], resolved: Resolved, flags: dict[str, Any]) -> int:
    from lamplighter.config import dump
    from lamplighter.watch.console import Console
    from lamplighter.watch.restart_policy import RestartPolicy
    from lamplighter.watch.supervisor import ChildSpec, Supervisor

    began = time.time()
    run = RunDir(flags["runs_dir"] / _run_name(flags))
    resume = flags["resume"]
    moved = None
    if resume == "never" and not is_running(run):
        moved = move_aside(run.path) if run.path.exists() else None
        resume = "auto"
    run.create()
    try:
        lock_fd = take_lock(run)
        console = Console(1, log_fd=open_lines(run.console))
    except OSError as error:
        raise cannot_write(run.path, error) from error
    if moved is not None:
        console.say(f"the old run is kept as {moved}")
    try:
        _refuse_drift(run, resolved, console)
        code = _finished_already(run, resolved, console) if resume == "auto" else None
        if code is not None:
            return code
        write_atomic(run.config, dump(resolved))
        console.say(
            f"run {run.path}: everything about it is in this folder; look from elsewhere with: lamp watch {run.name}"
        )
        request = {"resume": resume, "preset": resolved.preset, "force": flags["force"]}
        care = resolved.run.watch
        order = ChildSpec(
            "train",
            request,
            resume_command=same_command(verb, words),
            budget=resolved.run.budget,
            recovery=RestartPolicy(care.on_stuck, care.patience_s),
            notify=care.notify,
            grace_s=care.stop_grace_s,
            began=began,
            lock_fd=lock_fd,
            verbose=flags["verbose"],
        )
        code = Supervisor(run, order, console).supervise()
        if code == 0:
            _say_next(run, flags, console, read_record(run.status).get("step", 0))
        return code
    except OSError as error:
        raise cannot_write(run.path, error) from error
    finally:
        console.close()


def same_command(verb: str, words: list[str]) -> str:
    import shlex

    kept = list(words[2:] if verb == "demo" and words[:2] == ["--preset", "demo"] else words)
    while "--resume" in kept:
        at = kept.index("--resume")
        del kept[at : at + 2]
    return shlex.join(["lamp", verb, *kept])


def _finished_already(run: RunDir, resolved: Resolved, console: Console) -> int | None:
    """A finished run says so and exits 0, unless train.steps or train.epochs was raised; after an early end, the patience."""
    from lamplighter.config import load_dump

    status = read_record(run.status)
    if status.get("state") != "finished" or not run.config.exists():
        return None
    before = load_dump(run.config)
    old, new = before.train, resolved.run.train
    raised = (new.steps or 0) > status.get("steps", 0) or (new.epochs is not None and new.epochs > (old.epochs or 0))
    raised = raised or (before.data.max_chunks or 0) < (resolved.run.data.max_chunks or 0)
    early, patience = status.get("ended_early"), resolved.run.eval.patience
    if early and (not patience or patience > early.get("since_best", 0)):
        return None  # more patience: it goes on
    if raised and not early:
        return None
    if early:
        console.say(
            f"{run.name} is finished, early, at step {status.get('step')} of {status.get('steps')}: {early.get('why')}"
        )
        console.say("A larger eval.patience (0 = without end) goes on, --resume never begins anew.")
    else:
        console.say(
            f"{run.name} is finished: {status.get('step')} steps. Raise train.steps to go on, or --resume never to begin anew."
        )
    console.say(f"next: lamp generate {run.name}")
    return 0


def _refuse_drift(run: RunDir, resolved: Resolved, console: Console) -> None:
    """A resume may change save, eval, watch and budget; train.steps with a warning; nothing else."""
    from lamplighter.config import LENGTH, drift, load_dump

    if not run.config.exists() or not any(run.checkpoints.glob("checkpoint-*")):
        return
    try:
        old = load_dump(run.config)
    except LampError as error:
        raise BadConfig(
            f"{run.config} is damaged",
            error.what,
            "put it back, or begin anew with --resume never (the old folder is kept)",
        ) from error
    changes = drift(old, resolved.run)
    if changes:
        raise BadConfig(
            f"run {run.name} was started with other settings",
            "; ".join(changes),
            "give the old settings to go on, --run NAME for a new run, or --resume never to begin anew",
        )
    for name in LENGTH:
        field = name.split(".")[1]
        before, now = getattr(old.train, field), getattr(resolved.run.train, field)
        if before != now:
            console.say(f"WARNING  {name}: {before} -> {now}; the schedule changes from here", "bold yellow")


def _say_next(run: RunDir, flags: dict[str, Any], console: Console, step: int) -> None:
    where = "" if flags["runs_dir"] == Path("runs") else f" --runs-dir {flags['runs_dir']}"
    console.say(f"made: {run.checkpoints}/checkpoint-{step} (opens with transformers as it is), {run.report}")
    console.say(f"next: lamp generate {run.name}{where}    or: lamp checkpoints {run.name}{where}", "bold")


# ---------------------------------------------------------------- in the child


def train_child(folder: RunDir, request: dict[str, Any]) -> int:
    """From a config to a trained model."""
    with report.phase("config"):
        from lamplighter.config import load_dump

        run = load_dump(folder.config)
    parts = prepare(run, folder, request)
    from lamplighter.train.loop import training  # loaded by prepare, after the data

    with training(parts) as steps:
        for _ in steps:
            pass
    final = parts.folder.checkpoints / f"checkpoint-{parts.progress.step}"
    report.event("finished", step=parts.progress.step, path=str(final), tokens=parts.progress.tokens)
    return DONE


def prepare(run: Run, folder: RunDir, request: dict[str, Any]) -> Parts:
    """The start-up phases: data, tokenizer, cache, import (torch), plan, model, resume."""
    from lamplighter.data.stream import Live

    cache = folder.path.parent / CACHE_NAME
    source, tokenizer = open_text(run, cache)
    chat = choose_template(run, source, tokenizer)
    tokens: Tokens | Examples | Live
    if run.data.stream:
        tokens = _open_live(run, folder, source, tokenizer)
    else:
        tokens = _open_tokens(run, cache, source, tokenizer) if chat is None else open_rows(run, cache, source, chat)
    with report.phase("import"):  # after the data: what is wrong with it is found without paying for torch
        from lamplighter.commands.plan import plan_run
        from lamplighter.model.recompute import recompute_blocks
        from lamplighter.plan.job import family_of, is_own, known_shape
        from lamplighter.train import checkpoint, guard, hardware, loop, optimizers  # noqa: F401
        from lamplighter.train.state import Parts
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
        expected_s = plan_run(
            run,
            folder,
            where,
            feed,
            vocab_size=tokenizer.vocab_size,
            steps=steps,
            built=own,
            request=request,
            resumes=found is not None,
        )
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


def _resume(parts: Parts, found: Path) -> None:
    """Weights, optimizer and counters of the checkpoint; what differs from then is named."""
    from lamplighter.model.transformer import load_weights
    from lamplighter.train import checkpoint

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
    parts.optimizer.load_state_tensors(tensors)
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
