"""Data probe: the first documents as the model will see them, and what the lengths, repeats and sides of the data cost.

In:  a ProbeContext.
Out: Findings: text, tokens and loss mask; over-length, padding, duplicates, overlap with validation, epochs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lamplighter.data.chat.rendering import Refused
from lamplighter.data.chat.rows import RowSource, SetAside
from lamplighter.data.chat.template import ChatTemplate, around, own_template
from lamplighter.data.setup import choose_template, open_text
from lamplighter.data.stats import Request, Stats, chat_stats, count_text
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.data.tokenizer_training import escaped
from lamplighter.doctor.probe import CannotExamine, Finding, Level, ProbeContext, as_flags, fault, finding, ok, warn
from lamplighter.doctor.sample_data import SampledRun, take
from lamplighter.rundir import read_record

_SHOWN_TOKENS = 24
_MUCH, _SOME = 0.5, 0.2  # padding
_MANY_EPOCHS = 5
_NEAR_DOCUMENTS = 2000
_STRATEGY = {"auto": "packed", "packed": "packed", "grouped": "grouped", "windows": "to seq_len"}
_FAULTY = ("empty", "no_answer", "no_prompt")
_CLEAN = "lamp data clean PATH... --out DIR"


def documents(context: ProbeContext) -> Iterator[Finding]:
    """What comes out of the tokenizer, the template and the window."""
    try:
        sample = take(context)
    except CannotExamine as end:
        yield warn("the documents were not looked at", f"the data could not be read: {end}")
        return
    source, tokenizer = open_text(sample.run, sample.cache)
    template = choose_template(sample.run, source, tokenizer)
    data, train = sample.run.data, sample.run.train
    request = Request(data.seq_len, train.batch_size, data.val_fraction, None, _NEAR_DOCUMENTS)
    context.now("the first documents as the model sees them")
    if template is not None and isinstance(source, RowSource):
        yield from _first_rows(source, template)
        yield from _template(context, template)
        context.now(f"lengths, padding and repeats of {sample.words}")
        stats = chat_stats.count_rows(source, template, "", request, None)
    else:
        yield _first_text(next(iter(source.documents())), tokenizer)
        context.now(f"lengths, padding and repeats of {sample.words}")
        stats = count_text(source, tokenizer, "", request, None)
    yield _lengths(stats, context, sample)
    yield _padding(stats, context)
    yield from _repeats(stats, sample)
    yield from _loss(stats, context)
    yield from _epochs(stats, context, sample)


# ---------------------------------------------------------------- as the model sees them


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    names = tokenizer.special
    return [names.get(i) or escaped(tokenizer.token_bytes(i)) for i in ids]


def _first_text(text: str, tokenizer: Tokenizer) -> Finding:
    ids = tokenizer.encode(text).tolist()
    head = "|".join(_pieces(tokenizer, ids[:_SHOWN_TOKENS]))
    more = f"| ... {len(ids) - _SHOWN_TOKENS:,} more" if len(ids) > _SHOWN_TOKENS else ""
    what = f"the first document: {head}{more}|{tokenizer.end_name}"
    return ok(what, f"{len(ids):,} tokens and the end of text; every one of them is learned")


def _first_rows(source: RowSource, template: ChatTemplate) -> Iterator[Finding]:
    """A conversation with its template; what is learned stands in brackets."""
    found = next(source.conversations(SetAside(source.policy, quiet=True), template.between), None)
    if found is None:
        yield fault(f"no row of {source} has a question and an answer", "", "check data.paths")
        return
    made = template.encode([found[0]])[0]
    if isinstance(made, Refused):
        yield fault(f"{found[1]} cannot be learned with {template}", str(made), "--data.template chatml")
        return
    names, text, inside = _pieces(template.tokenizer, made.ids.tolist()), "", False
    for name, is_learned in zip(names, made.learned.tolist(), strict=True):
        text += ("[" if is_learned and not inside else "]" if inside and not is_learned else "") + name
        inside = is_learned
    text += "]" * inside
    shown = text if len(text) <= 400 else f"{text[:240]} ... {text[-150:]}"
    what = f"the first example, learned in brackets: {shown}"
    yield ok(what, f"{int(made.learned.sum()):,} of {len(names):,} tokens are learned, by {template.name}")
    if not np.any(made.ids[made.learned] == template.stop_id):
        why = f"{template.stop} is not among what is learned: the model will not learn to stop"
        yield fault("the answer does not end with its end mark", why, "--data.template chatml", "eos_not_trained")


def _template(context: ProbeContext, template: ChatTemplate) -> Iterator[Finding]:
    """A model that is given has been trained with a template of its own."""
    folder, own = context.run.model.init_from, own_template(template.tokenizer.files)
    if folder is not None and own is not None and own != template.text:
        what = f"{folder} was made with another chat template than {template.name}"
        why = f"{around(own, template.text)}; what it knows about turns and ends would have to be learned anew"
        advice, settings = "leave data.template out: its own is used then", {"data.template": None}
        yield fault(what, why, advice, "template_differs", culprit={"path": folder}, settings=settings)
    if missing := template.missing_marks():
        what = f"{', '.join(missing)}: ordinary text for this tokenizer, several tokens each"
        why = "it has no such special tokens; that works, but costs tokens in every turn"
        advice = "a template of marks that the tokenizer has, or a tokenizer with them (lamp tokenizer train --special)"
        yield warn(what, why, advice)


# ---------------------------------------------------------------- lengths and padding


def _lengths(stats: Stats, context: ProbeContext, sample: SampledRun) -> Finding:
    window, facts, is_chat = stats.window, stats.lengths, stats.kind == "chat"
    words = f"{facts.count:,} {'examples' if is_chat else 'documents'}, p50 {facts.p50:,}, p95 {facts.p95:,}, longest"
    words += f" {facts.longest:,} tokens"
    figures = {"over_length_share": 1 - window.whole_share, "p50": facts.p50, "p95": facts.p95}
    if not is_chat or not window.over:
        kept = "" if is_chat else "; longer ones go on in the next window, nothing is cut"
        return ok(f"lengths: {words}{kept}", sample.words, figures=figures)
    share, policy = window.over / max(1, facts.count), context.run.data.over_length
    most = _positions(context)
    best = min(most or 1 << 20, max(32, 1 << (facts.longest - 1).bit_length()))
    settings: dict[str, Any] = {"data.seq_len": best} if best > window.seq_len else {"data.over_length": "drop"}
    limit = f" (the model has {most:,} positions)" if most and most == best else ""
    return finding(
        "fault" if share > _MUCH else "warn",
        f"{share:.0%} of the examples are longer than data.seq_len {window.seq_len:,} ({words})",
        f"with data.over_length {policy} {window.beyond_share:.1%} of the tokens are lost, ends of answers among them",
        as_flags(settings) + limit,
        "eos_not_trained" if share > _MUCH else "",
        settings=settings,
        figures=figures,
    )


def _positions(context: ProbeContext) -> int | None:
    """The longest window that a given model can take; None where it is still to be made."""
    folder = context.run.model.init_from
    config = read_record(Path(folder) / "config.json") if folder else {}
    most = config.get("n_positions") or config.get("max_position_embeddings")
    return most if isinstance(most, int) else None


def _padding(stats: Stats, context: ProbeContext) -> Finding:
    """Of the strategy that is set, against the others; and the setting that makes the difference."""
    data = context.run.data
    shares = {one.strategy: one for one in stats.padding}
    name = "windows" if stats.kind == "text" else _STRATEGY[data.packing]
    now, best = shares[name], min(stats.padding, key=lambda one: one.share)
    table = ", ".join(f"{one.strategy} {one.share:.0%}" for one in stats.padding)
    figures = {f"padding_{one.strategy.replace(' ', '_')}": one.share for one in stats.padding}
    if now.share <= _SOME:
        saved = f" (each alone in a window would be {shares['to seq_len'].share:.0%})"
        return ok(f"padding {now.share:.1%} with data.packing {data.packing}{saved}", table, figures=figures)
    settings: dict[str, Any]
    if stats.kind == "text":
        tokens = stats.counts.tokens_with_ends
        settings = {"data.seq_len": max(8, 1 << int(math.log2(max(8, tokens - 1))))}
        what = f"{now.share:.0%} padding: data.seq_len {data.seq_len:,} is longer than all of the text"
        why = f"{tokens:,} tokens in all of what was looked at"
        return warn(what, why, cause="padding", settings=settings, figures=figures)
    what = f"{now.share:.0%} padding: {stats.lengths.mean:.0f} tokens on average in windows of {data.seq_len:,}"
    why = f"padding by strategy: {table}; {best.strategy} would be {best.work / now.work:.1%} of this work"
    if name == "packed":
        held = [one.seq_len for one in stats.windows if one.whole_share >= 0.98]
        settings = {"data.seq_len": min(held, default=stats.seq_len)}
    else:
        settings = {"data.packing": "packed"}
        why += f", {(1 - shares['packed'].share) / (1 - now.share):.0f} x faster"
    level: Level = "fault" if now.share > _MUCH else "warn"
    return finding(level, what, why, cause="padding", settings=settings, figures=figures)


# ---------------------------------------------------------------- repeats, loss, epochs


def _repeats(stats: Stats, sample: SampledRun) -> Iterator[Finding]:
    found, sides, count = stats.duplicates, stats.sides, stats.counts.documents
    share = (found.exact + (found.near or 0)) / max(1, count)
    what = f"{found.exact:,} of {count:,} are repeats, {found.near or 0:,} nearly so"
    if share > 0.005:
        example = (found.exact_examples or found.near_examples)[:1]
        where = f": {example[0].second} repeats {example[0].first}" if example else ""
        why = f"they are learned by heart, and cost steps; {sample.words}"
        yield warn(f"{what} ({share:.0%}){where}", why, _CLEAN, "duplicates", figures={"duplicate_share": share})
    else:
        yield ok(what, sample.words)
    if sides.near and sides.near > 0.01 * sides.near_val:
        pair = sides.near_examples[0] if sides.near_examples else None
        yield finding(
            "fault" if sides.near > 0.2 * sides.near_val else "warn",
            f"{sides.near:,} of {sides.near_val:,} held-back {sides.by} nearly stand among what is trained on",
            "the validation loss will look better than it is" + (f": {pair.first} and {pair.second}" if pair else ""),
            _CLEAN,
            "validation_overlap",
            figures={"overlap_share": sides.near / max(1, sides.near_val)},
        )
    elif sides.reason and not sides.by and "refuse" in sides.reason:
        yield fault(sides.reason, "", "--data.val_fraction 0, or more data")


def _loss(stats: Stats, context: ProbeContext) -> Iterator[Finding]:
    """What the rows leave to be learned."""
    counts = stats.counts
    if stats.kind != "chat" or counts.learned_tokens is None:
        return
    asked = 1 - counts.learned_tokens / max(1, counts.tokens)
    if context.run.data.loss_on == "all":
        what = f"the loss is taken on the prompt too: {asked:.0%} of the tokens are questions and template"
        why = "the model learns to ask as well as to answer, and a good loss says little about its answers"
        settings, figures = {"data.loss_on": "response"}, {"prompt_share": asked}
        yield warn(what, why, cause="loss_on_prompt", settings=settings, figures=figures)
    for reason in stats.quality.reasons if stats.quality else ():
        if reason.reason in _FAULTY and reason.count:
            place = reason.examples[0].place if reason.examples else ""
            what, why = (
                f"{reason.count:,} rows: {reason.about} (the first: {place})",
                "such rows are set aside, not learned",
            )
            yield warn(what, why, "mend them, or take them out", "empty_answer", culprit={"path": place})


def _epochs(stats: Stats, context: ProbeContext, sample: SampledRun) -> Iterator[Finding]:
    """How often the run would see each token, by the true tokens of the sample."""
    train, data = context.run.train, context.run.data
    if train.steps is None:
        if train.epochs is not None and train.epochs > _MANY_EPOCHS:
            yield _many(train.epochs, f"train.epochs is {train.epochs:g}", {"train.epochs": 3})
        return
    if sample.share is None or not stats.counts.tokens:
        return
    if stats.kind == "chat":  # padding is work too, and what is cut off is none
        padding = next(one.share for one in stats.padding if one.strategy == _STRATEGY[data.packing])
        tokens = (stats.counts.tokens - stats.window.beyond) / max(1e-9, 1 - padding) / sample.share
    else:
        tokens = stats.counts.tokens_with_ends / sample.share
    tokens *= 1 - data.val_fraction
    per_step = train.batch_size * data.seq_len
    epochs = train.steps * per_step / max(1.0, tokens)
    why = f"{train.steps:,} steps x {train.batch_size} x {data.seq_len:,} = {train.steps * per_step:,} tokens out of"
    why += f" {'' if sample.share == 1.0 else 'about '}{tokens:,.0f}"
    if epochs > _MANY_EPOCHS:
        yield _many(epochs, why, {"train.steps": max(1, round(3 * tokens / per_step))})
    else:
        yield ok(f"{epochs:.1f} epochs", why, figures={"epochs": epochs})


def _many(epochs: float, why: str, settings: dict[str, Any]) -> Finding:
    what = f"{epochs:.0f} epochs: every text is seen {epochs:.0f} times; 1 to 4 are usual"
    advice = f"{as_flags(settings)} (3 epochs), or more text"
    return warn(what, why, advice, "many_epochs", settings=settings, figures={"epochs": epochs})
