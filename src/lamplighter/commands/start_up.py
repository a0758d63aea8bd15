"""The start-up phases of a run, in the child: from its settings to what the loop works with.

In:  a Run, its folder, the request.
Out: a RunContext and a TrainState. Data and tokenizer come first, torch after them: what is wrong with the data is found
     without paying for it.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.data.setup import OpenedText, choose_template, open_batches, open_text
from lamplighter.errors import BadConfig
from lamplighter.model.origin import with_local_model
from lamplighter.rundir import CACHE_NAME, NUMERICS, RunDir, read_last_lines, version_of

if TYPE_CHECKING:
    from lamplighter.config import Run
    from lamplighter.data.batch_source import DataFacts
    from lamplighter.data.chat.template import ChatTemplate
    from lamplighter.data.tokenizer import Tokenizer
    from lamplighter.model.build import Built
    from lamplighter.plan.estimate import Plan
    from lamplighter.train.exactness import GradientProbe
    from lamplighter.train.hardware import Machine
    from lamplighter.train.state import RunContext, TrainState
    from lamplighter.train.validation import EntropyBound


def prepare(run: Run, folder: RunDir, request: dict[str, Any]) -> tuple[RunContext, TrainState]:
    """The start-up phases: data, tokenizer, cache, import (torch), plan, model, resume."""
    cache = folder.path.parent / CACHE_NAME
    run = with_local_model(run, folder.path)
    source, tokenizer = open_text(run, cache)
    text = OpenedText(source, tokenizer, choose_template(run, source, tokenizer))
    lay_out = open_batches(run, folder.path, cache, text)
    with report.phase("import"):  # after the data: what is wrong with it is found without paying for torch
        from lamplighter.commands.plan import plan_run
        from lamplighter.model.recompute import recompute_blocks
        from lamplighter.plan.estimate import smaller_models
        from lamplighter.plan.job import family_of, is_built_first, known_shape
        from lamplighter.train import checkpoint, exactness, guard, hardware, loop, loss_scale, optimizers, path, ranks  # noqa: F401
        from lamplighter.train.pace import Smaller
        from lamplighter.train.state import RunContext, TrainState
    with report.phase("machine"):
        found = checkpoint.find(folder.checkpoints, request.get("resume", "auto"))
        before = _state_of(found)
        world = ranks.world_of(os.environ)
        where = hardware.detect(run.train, dict(before.get("machine", {})), known_shape(run), world)
        exact, why = exactness.choose(run.train, where.device, where.name, cache, family_of(run))
        exactness.require(exact, where.device)
        where = replace(where, exact=exact)
        if where.device.type == "cuda":
            report.note(f"{'exact' if exact else 'fastest'} kernels: {why}")
        for reason in where.reasons:
            report.note(reason)
    own = None
    if is_built_first(run):  # only its own code knows its size, or whether it keeps examples apart: planned then
        with report.phase("model"):
            own = _build_model(run, tokenizer)
            _say_packing(own, text.chat)
            _settle_tokenizer(own, tokenizer)
    batches = lay_out(own is None or own.takes_segments)
    data = batches.describe()
    steps = _count_steps(run, data)
    with report.phase("plan"):
        planned = plan_run(
            run,
            folder,
            where,
            data,
            vocab_size=tokenizer.vocab_size,
            steps=steps,
            built=own,
            request=request,
            resumes=found is not None,
            ranks=world.size,
            leads=world.leads,
        )
    with report.phase("model" if own is None else "optimizer"):
        built = own or _build_model(run, tokenizer)
        if run.train.recompute:
            report.note(f"activations of {recompute_blocks(built.model)} blocks are computed again (train.recompute)")
        batches.check_ids(built.vocab_size)
        built.model.to(where.device)
        if built.adapter is not None:
            built = _with_base(run, folder, built, where)
        optimizer = optimizers.make_optimizer(built.model, run.train)
        scale = loss_scale.LossScale(where.device) if where.dtype_name == "fp16" else None
        if scale is not None:
            optimizer = loss_scale.ScaledOptimizer(optimizer, scale)
    probe = _probe_exactness(run, built, where, planned, data=data, before=before.get("exact"), cache=cache)
    compiled, why = hardware.choose_compile(
        run.train,
        where,
        family_of(run),
        before=before.get("compiled"),
        expected_s=planned.hours * 3600,
        one_shape=not data.whole_batches,
        seq_len=run.data.seq_len,
    )
    if compiled and built.adapter is not None and run.train.compile == "auto" and "compiled" not in before:
        compiled, why = False, "adapters are compiled if you ask for it"
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
        recorded=_recorded(run, where, data, steps, text.chat) | _of_probe(probe, before),
        loss_scale=scale,
        world=world,
        planned_step_s=planned.step_s,
        smaller=tuple(Smaller(*one) for one in smaller_models(planned)) if math.isfinite(run.budget.left_s(0)) else (),
    )
    state = TrainState(steps, compiled, probe=probe)
    path.say_path(context, compiled)
    guard.explain_schedule(schedule)
    if found is not None:
        with report.phase("resume"):
            _resume(context, state, found)
            if (asked := request.get("resume", "auto")) != "auto":
                report.event("went back", to=asked, step=state.progress.step)
    elif request.get("same_settings"):  # it was ended before its first save: its steps are done again
        state.redone = exactness.Redone.of(read_last_lines(folder.metrics), 0)
    exactness.say(exactness.words(probe, state.redone, where), probe, state.redone)
    if world.size > 1:
        _meet(context, state)
    if run.data.source is None and not run.data.paths:
        with report.phase("floor"):
            context = replace(context, entropy_bound=_entropy_bound(context))
    return context, state


def _meet(context: RunContext, state: TrainState) -> None:
    """All ranks, with the same run in their hands."""
    from lamplighter.model.weights import weights
    from lamplighter.train import exactness, ranks

    world, device = context.world, context.machine.device
    attempt = os.environ.get("LAMP_ATTEMPT", "1")
    ranks.meet(world, context.folder.slots / f"meeting-{attempt}", "nccl" if device.type == "cuda" else "gloo")
    facts = {
        "settings": exactness.short_hash(repr(context.run)),
        "data": exactness.short_hash(f"{context.data.name} {context.data.fingerprint}"),
        "weights": exactness.short_hash(*(exactness.hash_of(one) for one in weights(context.model).values())),
        "steps": exactness.short_hash(f"{state.progress.step} of {state.steps}"),
    }
    ranks.refuse_strangers(world, facts, device)
    leaves = math.ceil(context.run.train.batch_size / (context.run.train.micro_batch or context.run.train.batch_size))
    nodes = min(leaves, context.run.train.tree)
    idle = "" if world.size <= nodes else f"; {world.size - nodes} of them idle: a batch has {nodes} parts to share out"
    report.note(
        f"{world.size} ranks, {leaves} micro-batches a step summed by one tree: the bits of a single rank{idle}"
    )


def _probe_exactness(
    run: Run,
    built: Built,
    where: Machine,
    planned: Plan,
    *,
    data: DataFacts,
    before: dict[str, Any] | None,
    cache: Path,
) -> GradientProbe | None:
    """On the first weights, before a checkpoint is loaded: the same for every start of this run."""
    from lamplighter.train import exactness, hardware
    from lamplighter.train.gradients import batch_loss

    if ":" in run.model.family and run.model.init_from is None:
        return None  # code of one's own may count its calls: it is called for steps alone
    packed = bool(data.fingerprint) and not data.whole_batches and built.takes_segments
    rows = run.train.micro_batch or run.train.batch_size
    length = min(
        run.data.seq_len, math.ceil(data.positions_per_step / run.train.batch_size)
    )  # batches of like length: shorter
    size = exactness.Size(rows, length, built.vocab_size, packed)
    small = exactness.affordable(size, planned.step_s * rows / run.train.batch_size, planned.hours * 3600)
    then = ((before or {}).get("rows") or 0, (before or {}).get("tokens") or 0)
    known = 0 < then[0] <= rows and 0 < then[1] <= run.data.seq_len  # as at the first start, for the same hash
    size = replace(size, rows=then[0], tokens=then[1]) if known else small
    settings = {"model": built.config, "train": [run.train.seed, run.train.loss, run.train.recompute, repr(run.lora)]}
    place = exactness.Place(cache, {**where.facts(), **settings, "size": asdict(size), "numerics": NUMERICS})
    with report.phase("exactness", total=exactness.PASSES, unit="passes") as phase:
        gradients = exactness.Gradients(
            built.model,
            size,
            lambda batch: batch_loss(
                built.model, batch, where, whole=run.train.loss == "whole", scale=1 / batch.real_tokens
            ),
            lambda: hardware.seed_step(run.train.seed, 0, 0),
        )
        return exactness.probe(gradients, before, place, phase)


def _of_probe(found: GradientProbe | None, before: dict[str, Any]) -> dict[str, Any]:
    """What every checkpoint keeps of it: that of the run's first start."""
    if "exact" in before:
        return {"exact": before["exact"]}
    if found is None or found.differs:
        return {}
    return {"exact": {"hash": found.hash, "rows": found.rows, "tokens": found.tokens}}


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

    sizes = (tokenizer.vocab_size, run.data.seq_len, tokenizer.end_of_text, run.train.seed)
    return build(run.model, *sizes, lora=run.lora)


def _say_packing(built: Built, chat: ChatTemplate | None) -> None:
    """Of another family: whether examples may share a window, which was found by trying."""
    why_not = getattr(built.model, "why_not", None)
    if chat is None or why_not is None:
        return
    kind = built.config.get("model_type")
    if built.takes_segments:
        report.note(f"{kind} keeps packed examples apart: in a probe each had the logits that it has alone")
    else:
        report.note(f"{kind} is not packed, but grouped by length: {why_not}")


def _settle_tokenizer(built: Built, tokenizer: Tokenizer) -> None:
    """Of another family: checkpoints must give AutoTokenizer the ids that are trained on; where they cannot, it is said now."""
    from lamplighter.export.tokenizer_class import settle_class

    if getattr(built.model, "why_not", None) is None:  # a model of one's own, which transformers does not open
        return
    if differs := settle_class(tokenizer, built.config):
        report.warn(
            f"{differs}. The ids of tokenizer.json are trained on; other programs must open it by PreTrainedTokenizerFast,"
            " and lamp export --to hf will refuse it (--to gguf will not)"
        )


def _with_base(run: Run, folder: RunDir, built: Built, where: Machine) -> Built:
    """Adapters are in: everything is on the device, the base is known by its hash, and what is trained is said."""
    from lamplighter.model import lora, origin

    lora.check_places(built.model, where.device)
    place = Path(str(run.model.init_from))
    hub = origin.hub_name_of(folder.path) if "snapshots" in place.parts else {}
    base = origin.identify(place, run.lora.base_dtype, hub)
    layers = len(lora.adapters_of(built.model))
    share = built.trained / built.parameters
    report.note(
        f"LoRA: {built.trained:,} of {built.parameters:,} parameters are trained ({share:.2%}), in {layers} layers of rank"
        f" {run.lora.r}, scale {run.lora.scale:g}; the base is frozen, its matrices in {run.lora.base_dtype};"
        f" every parameter and buffer is on {where.device.type}"
    )
    settings = {**(built.adapter or {}), "revision": base.commit}
    if base.name:
        settings["base_model_name_or_path"] = base.name
    return replace(built, adapter=settings, base=base)


def _state_of(found: Path | None) -> dict[str, Any]:
    """What a checkpoint says of the run that made it."""
    from lamplighter.train import checkpoint

    return checkpoint.read_state(found) if found else {}


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


def _resume(context: RunContext, state: TrainState, found: Path) -> None:
    """Weights, optimizer and counters of the checkpoint; what differs from then is named."""
    from lamplighter.model.origin import read_base, refuse_other_base
    from lamplighter.model.weights import load_weights
    from lamplighter.train import checkpoint
    from lamplighter.train.exactness import Redone

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
    if context.built.base is not None and (base := read_base(found)) is not None:
        refuse_other_base(base, context.built.base, found.name)
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
    if (numerics := version_of(before, "numerics")) != NUMERICS:
        told = (
            f"the arithmetic of this version (numerics {NUMERICS}) is not that of the checkpoint (numerics {numerics})"
        )
        report.warn(f"{told}: from step {progress.step + 1} on no longer bit-identical")
    if before.get("compiled", state.compiled) != state.compiled:
        then, is_now = ("compiled", "uncompiled") if before["compiled"] else ("uncompiled", "compiled")
        report.warn(f"it was {then}, is {is_now}: from step {progress.step + 1} on no longer bit-identical")
    if before.get("steps") not in (None, state.steps):
        report.warn(
            f"the run was planned for {before['steps']} steps, now {state.steps}: the schedule changes from here"
        )
    moved = checkpoint.go_back(root, progress) if context.world.leads else []  # one of the ranks moves files
    if moved:
        report.note(f"set aside (not deleted): {', '.join(moved)}")
    report.note(f"resumed from {found.name}: step {progress.step + 1} is next")
    records = list(read_last_lines(context.folder.metrics))
    state.redone = Redone.of(records, progress.step)
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
