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
from lamplighter.commands.standby import wait_for_turn
from lamplighter.data.setup import OpenedText, choose_template, open_batches, open_text
from lamplighter.errors import BadConfig
from lamplighter.model.origin import with_local_model
from lamplighter.plan.job import refuse_unknown_targets
from lamplighter.rundir import CACHE_NAME, NUMERICS, RunDir, newest_first, read_last_lines, step_of, version_of

if TYPE_CHECKING:
    from lamplighter.config import Run
    from lamplighter.data.batch_source import DataFacts
    from lamplighter.data.chat.template import ChatTemplate
    from lamplighter.data.tokenizer import Tokenizer
    from lamplighter.model.build import Built
    from lamplighter.plan.estimate import Plan
    from lamplighter.plan.job import Job
    from lamplighter.train.checkpoint import Progress
    from lamplighter.train.exactness import GradientProbe
    from lamplighter.train.hardware import Machine
    from lamplighter.train.memory_copy import Restored
    from lamplighter.train.ranks import World
    from lamplighter.train.sharding import Shards
    from lamplighter.train.state import RunContext, TrainState
    from lamplighter.train.validation import EntropyBound


def prepare(run: Run, folder: RunDir, request: dict[str, Any]) -> tuple[RunContext, TrainState]:
    """The start-up phases: data, tokenizer, cache, import (torch), plan, model, resume."""
    cache = Path(request.get("cache") or folder.path.parent / CACHE_NAME)
    run = with_local_model(run, folder.path)
    begins = not newest_first(folder.checkpoints)  # a run of an earlier version may name more layers than there are
    if begins:
        refuse_unknown_targets(run)
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
    if ":" in run.model.family:
        from lamplighter.train import own_collectives

        own_collectives.watch(folder)
    if "standby_fd" in request and hardware.may_use_gpu(run.train):  # whose memory belongs to the process that trains
        wait_for_turn(folder, request)
    with report.phase("machine"):
        kept, found = _newest_state(folder, request)
        before = kept.facts if kept is not None else _state_of(found) or request.get("facts", {})
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
            own = _build_model(run, tokenizer, begins)
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
            resumes=found is not None or kept is not None,
            ranks=world.size,
            leads=world.leads,
        )
    with report.phase("model" if own is None else "optimizer"):
        built = own or _build_model(run, tokenizer, begins)
        if run.train.recompute:
            report.note(f"activations of {recompute_blocks(built.model)} blocks are computed again (train.recompute)")
        batches.check_ids(built.vocab_size)
        shards = _place(run, folder, request, built, where, world, planned)
        if built.adapter is not None:
            built = _with_base(run, folder, built, where)
        if data.pairs is not None:
            from lamplighter.train import reference

            reference.fill(run, built, where, data.pairs, cache)
        optimizer = optimizers.make_optimizer(built.model, run.train, where.newton_schulz)
        scale = loss_scale.LossScale(where.device) if where.dtype_name == "fp16" else None
        if scale is not None:
            optimizer = loss_scale.ScaledOptimizer(optimizer, scale)
    probe = None
    if shards is None:
        probe = _probe_exactness(run, built, where, planned, data=data, before=before.get("exact"), cache=cache)
    if "standby_fd" in request:
        wait_for_turn(folder, request)
        world = ranks.world_of(os.environ)
        with report.phase("newest"):
            kept, found = (None, None) if request.get("joins") else _newest_state(folder, request)
        if _agree_first(run, world, request) and _agreed_to_shard(run, folder, built, where, world, planned):
            raise BadConfig("a process that stood by cannot hold a part of the model", "it was built whole", "the same command again")  # fmt: skip
    met = _agree_first(run, world, request)
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
    if compiled and shards is not None:
        if run.train.compile is True:
            raise BadConfig("a sharded model is not compiled", "units are gathered between the blocks, which is not tried with the compiler", "--train.compile auto, or --train.shard none")  # fmt: skip
        compiled, why = False, "a sharded model is not compiled"
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
        recorded=_recorded(run, where, data, steps, text.chat)
        | _of_probe(probe, before)
        | {"ranks": world.size, "sharded": shards is not None},
        loss_scale=scale,
        world=world,
        shards=shards,
        planned_step_s=planned.step_s,
        smaller=tuple(Smaller(*one) for one in smaller_models(planned)) if math.isfinite(run.budget.left_s(0)) else (),
    )
    state = TrainState(steps, compiled, probe=probe)
    path.say_path(context, compiled)
    guard.explain_schedule(schedule)
    if found is None and kept is None:
        step_tokens = run.train.batch_size * run.data.seq_len
        guard.warn_misfits(run, built.flops_per_token(run.data.seq_len), steps, step_tokens)
    if request.pop("joins", False):  # ranks that are there hand over what they hold
        state.whole = False
    elif kept is not None:
        with report.phase("resume"):
            _resume_from_memory(context, state, kept)
    elif found is not None:
        with report.phase("resume"):
            _resume(context, state, found)
            if (asked := request.get("resume", "auto")) != "auto":
                report.event("went back", to=asked, step=state.progress.step)
    elif request.get("same_settings"):  # it was ended before its first save: its steps are done again
        state.redone = exactness.Redone.of(read_last_lines(folder.metrics), 0)
    exactness.say(exactness.words(probe, state.redone, where, shards is not None), probe, state.redone)
    if world.size > 1:
        _meet(context, state, met, planned.job)
    if run.data.source is None and not run.data.paths:
        with report.phase("floor"):
            context = replace(context, entropy_bound=_entropy_bound(context))
    return context, state


def _agree_first(run: Run, world: World, request: dict[str, Any]) -> bool:
    """Whether ranks meet before their models are placed. Who joins ranks that train already, joins whole models."""
    return world.size > 1 and run.train.shard != "none" and not request.get("joins")


def _agreed_to_shard(run: Run, folder: RunDir, built: Built, where: Machine, world: World, planned: Plan) -> bool:
    """What rank 0 has planned: what is free differs a little from rank to rank. Said with the reason."""
    from lamplighter.plan.memory import memory
    from lamplighter.train import joining, ranks

    job, setting = planned.job, f"train.shard {run.train.shard}"
    joining.meet(world, folder, where.device)
    if not ranks.told_by_first(world, int(job.sharded), where.device):
        return False
    from lamplighter.train import sharding

    why = sharding.why_not(
        built.model, run.lora.r is not None and run.lora.base_dtype != "fp32", run.train.optimizer_kind
    )
    if run.train.objective == "dpo":
        why = "the reference of preference pairs is made by the whole model"
    if why:
        if run.train.shard == "full":
            raise sharding.refuse(why)
        report.warn(f"every rank holds the whole model, which may not fit ({setting}): it cannot be sharded, as {why}")
        return False
    whole, part = (memory(replace(job, sharded=way), planned.device).peak_gib for way in (False, True))
    report.note(
        f"sharded: each of {world.size} ranks holds its rows of weights, gradients and optimizer ({setting}; on paper"
        f" {part:.2f} GiB each, whole it would be {whole:.2f}, and {planned.usable_gib:.2f} may be taken)"
    )
    off = ["the newest step is not kept in memory and nobody stands by (launch.spare), so a lost rank takes all back to the durable step"]  # fmt: skip
    off += ["samples are not shown"] if run.eval.sample_every_steps else []
    report.note(f"while sharded, {' and '.join(off)}")
    report.event("sharded", ranks=world.size)
    return True


def _place(
    run: Run, folder: RunDir, request: dict[str, Any], built: Built, where: Machine, world: World, planned: Plan
) -> Shards | None:
    """The model where it is computed with: whole, or a part of it on each rank."""
    agrees = "standby_fd" not in request and _agree_first(run, world, request)
    if agrees and _agreed_to_shard(run, folder, built, where, world, planned):
        from lamplighter.train.sharding import Shards

        native = run.train.reduction == "native"
        return Shards(built.model, world, where.device, native, apart=folder.whole is not None)
    built.model.to(where.device)
    return None


def _meet(context: RunContext, state: TrainState, met: bool, job: Job) -> None:
    """All ranks, with the same run in their hands."""
    from lamplighter.plan.ranks import idle_words
    from lamplighter.train.joining import join

    world = context.world
    join(context, state, met)
    lazy = idle_words(job, world.size)
    idle = f"; {lazy}" if lazy else ""
    how = "summed by one tree: the bits of a single rank"
    if context.run.train.reduction == "native":
        how = f"summed by torch's all_reduce (train.reduction native): the same bits on {world.size} ranks alone"
    leaves = f"{job.accumulation} micro-batch{'es' if job.accumulation > 1 else ''}"
    report.note(f"{world.size} rank{'s' * (world.size > 1)}, {leaves} a step {how}{idle}")


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


def _build_model(run: Run, tokenizer: Tokenizer, begins: bool) -> Built:
    from lamplighter.model.build import build
    from lamplighter.model.lora import check_targets

    sizes = (tokenizer.vocab_size, run.data.seq_len, tokenizer.end_of_text, run.train.seed)
    built = build(run.model, *sizes, lora=run.lora)
    if begins and built.adapter is not None:
        check_targets(built.model, run.lora.targets)
    return built


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


def _newest_state(folder: RunDir, request: dict[str, Any]) -> tuple[Restored | None, Path | None]:
    """What an earlier attempt of this parent's has left in memory, where that is newer than the disk; else the checkpoint."""
    from lamplighter.train import checkpoint, memory_copy, parts

    wanted, root = request.get("resume", "auto"), folder.checkpoints
    if folder.whole is not None:
        parts.see_anew(root)
    if wanted == "auto":
        durable = {step_of(path) for path in newest_first(root)}
        kept = memory_copy.newest(memory_copy.given(os.environ), durable)
        if kept is not None and kept.step > checkpoint.latest_step(root):
            return kept, None
    return None, checkpoint.find(root, wanted)


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
    _go_on(context, state, progress, before)
    moved = checkpoint.go_back(root, state.progress) if context.world.leads else []  # one of the ranks moves files
    if moved:
        report.note(f"set aside (not deleted): {', '.join(moved)}")
    _say_resumed(context, state, found.name, before)


def _resume_from_memory(context: RunContext, state: TrainState, kept: Restored) -> None:
    """The same out of memory; the run is that of a moment ago, on the same machine."""
    from lamplighter.model.weights import fill_weights
    from lamplighter.train import checkpoint

    fill_weights(context.model, kept.model)
    context.optimizer.load_state_tensors(kept.optimizer)
    _go_on(context, state, checkpoint.progress_of(kept.progress), kept.facts)
    state.from_disk = False
    _say_resumed(context, state, "memory", kept.facts)


def _go_on(context: RunContext, state: TrainState, progress: Progress, before: dict[str, Any]) -> None:
    """The counters; what has changed since then is named."""
    from lamplighter.train import checkpoint

    best = checkpoint.best_of(context.folder.checkpoints)
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
    if (size := context.world.size) != (then_size := before.get("ranks", size)):
        native = context.run.train.reduction == "native"
        words = "no longer bit-identical (train.reduction native)" if native else "with the same bits"
        report.note(
            f"{then_size} rank{'s' * (then_size > 1)} then, {size} now: from step {progress.step + 1} on {words}"
        )
    if (now := context.shards is not None) != before.get("sharded", now):
        report.note(f"{'replicated then, sharded' if now else 'sharded then, replicated'} now, with the same bits")
    if before.get("compiled", state.compiled) != state.compiled:
        then, is_now = ("compiled", "uncompiled") if before["compiled"] else ("uncompiled", "compiled")
        report.warn(f"it was {then}, is {is_now}: from step {progress.step + 1} on no longer bit-identical")
    if _has_other_schedule(state, before):
        report.warn(
            f"the run was planned for {before['steps']} steps, now {state.steps}: the schedule changes from here"
        )


def _has_other_schedule(state: TrainState, before: dict[str, Any]) -> bool:
    return before.get("steps") not in (None, state.steps)


def _say_resumed(context: RunContext, state: TrainState, where: str, before: dict[str, Any]) -> None:
    from lamplighter.train.exactness import Redone

    step = state.progress.step
    report.note(f"resumed from {where}: step {step + 1} is next")
    records = list(read_last_lines(context.folder.metrics))
    state.redone = Redone() if _has_other_schedule(state, before) else Redone.of(records, step)
    reached = max((r["step"] for r in records if "train/loss" in r and isinstance(r.get("step"), int)), default=0)
    report.event("resumed", step=step, path=where, redone_steps=max(0, reached - step))


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
