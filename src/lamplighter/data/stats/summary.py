"""The figures of a corpus in words: what `lamp data stats` says, and the files it leaves.

In:  Stats.
Out: lines for people; stats.json, stats.txt and lengths.svg in a folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lamplighter.data.stats import Found, Quality, Stats
from lamplighter.data.stats.lengths import draw, svg
from lamplighter.data.stats.overlap import GRAM_SHARE, GRAM_WORDS, Duplicates, Pair, Sides, TestSet
from lamplighter.data.tokenizer_training import escaped
from lamplighter.errors import CannotWrite
from lamplighter.rundir import cannot_write, write_atomic

_HEAD = 56


def as_record(stats: Stats) -> dict[str, Any]:
    """What --json prints."""
    return asdict(stats)


def marks(stats: Stats) -> dict[str, int]:
    facts = stats.lengths
    return {"p50": facts.p50, "p95": facts.p95, "p99": facts.p99, "seq_len": stats.seq_len}


def written(stats: Stats, folder: Path) -> None:
    """The record, the words and the picture."""
    facts = stats.lengths
    title = f"Lengths of {facts.count:,} {_units(stats)}, in tokens"
    about = f"{stats.source}; {stats.tokenizer}; mean {facts.mean:,.1f}, longest {facts.longest:,}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "lengths.svg", svg(stats.histogram, marks(stats), title, about))
        write_atomic(folder / "stats.txt", told(stats))
        write_atomic(folder / "stats.json", json.dumps(as_record(stats), indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        found = cannot_write(folder, error)
        raise CannotWrite(found.what, found.why, "choose another place with --out", found.cause) from error


def _units(stats: Stats) -> str:
    return "examples" if stats.kind == "chat" else "documents"


def told(stats: Stats) -> str:
    """All of it, for people."""
    lines = [
        *_head(stats),
        "",
        *_lengths(stats),
        "",
        *_padding(stats),
        "",
        *_duplicates(stats.duplicates, _units(stats)),
    ]
    lines += _sides(stats.sides)
    if stats.test_set is not None:
        lines += _test_set(stats.test_set)
    if stats.quality is not None:
        lines += ["", *_quality(stats.quality)]
    lines.append("")
    for one in stats.advice:
        lines += [f"advice   {one.advice}", f"because  {one.because}", f"set      {one.set}"]
    lines += [f"note     {note}" for note in stats.notes]
    return "\n".join(lines) + "\n"


def _head(stats: Stats) -> list[str]:
    counts = stats.counts
    lines = [
        f"source      {stats.source}" + (f"; template {stats.template}" if stats.template else ""),
        f"tokenizer   {stats.tokenizer}" + (f"; {stats.tokenizer_path}" if stats.tokenizer_path else ""),
    ]
    if stats.sampled:
        lines.append(f"SAMPLE      every figure below is of {stats.sampled}")
    lines += [
        f"{_units(stats):<11} {counts.documents:,}",
        f"characters  {counts.characters:,}; {counts.bytes:,} bytes as UTF-8"
        if counts.characters
        else f"bytes       {counts.bytes:,} as UTF-8",
        _tokens(stats),
        f"counted in  {stats.seconds:.1f} s: {stats.bytes_per_second / 1e6:.1f} MB/s over all" + _alone(stats),
    ]
    if counts.empty_documents:
        lines.append(f"empty       {counts.empty_documents:,} empty documents are not counted")
    if counts.set_aside_lines:
        why = ", ".join(f"{reason}: {count:,}" for reason, count in counts.set_aside_reasons.items())
        lines.append(f"set aside   {counts.set_aside_lines:,} lines that are not text or rows ({why})")
    return lines


def _alone(stats: Stats) -> str:
    if not stats.tokens_per_second:
        return ""
    by = "template and tokenizer" if stats.kind == "chat" else "the tokenizer"
    return f", {stats.tokens_per_second:,} tokens/s by {by} alone"


def _tokens(stats: Stats) -> str:
    counts = stats.counts
    if counts.learned_tokens is not None:
        share = counts.learned_tokens / max(1, counts.tokens)
        return (
            f"tokens      {counts.tokens:,} with the template, {counts.learned_tokens:,} of them in answers ({share:.1%});"
            f" {counts.bytes_per_token:.3f} bytes of text per token"
        )
    return (
        f"tokens      {counts.tokens:,}, {counts.bytes_per_token:.3f} bytes per token; with end-of-text"
        f" {counts.tokens_with_ends:,}" + (f"; {counts.used_tokens:,} different ones" if counts.used_tokens else "")
    )


def _lengths(stats: Stats) -> list[str]:
    facts = stats.lengths
    mean = f"mean {facts.mean:,.1f}, p50 {facts.p50:,}, p95 {facts.p95:,}, p99 {facts.p99:,}, longest {facts.longest:,}"
    what = "with the template" if stats.kind == "chat" else "with its end-of-text"
    lines = [f"length of {_units(stats)}, in tokens, each {what}: {mean}", *draw(stats.histogram, marks(stats))]
    now = stats.window
    lines.append(
        f"window      seq_len {now.seq_len:,}: {now.whole:,} of {facts.count:,} are whole in one window ({now.whole_share:.1%});"
        f" {now.over:,} are longer, {now.beyond:,} tokens ({now.beyond_share:.1%}) lie beyond"
    )
    whole = "  ".join(f"{one.seq_len:,}: {one.whole_share:.1%}" for one in stats.windows)
    lines.append(f"whole in    {whole}")
    return [*lines, *_found("longest", stats.longest), *_found("shortest", stats.shortest)]


def _found(name: str, found: Sequence[Found]) -> list[str]:
    return [
        f"{name if not number else '':<11} {one.tokens:>9,} tokens  {one.place}{_quoted(one.head)}"
        for number, one in enumerate(found)
    ]


def _quoted(text: str) -> str:
    shown = escaped(" ".join(text[: 2 * _HEAD].split()))
    return f'  "{shown[:_HEAD]}{"..." if len(shown) > _HEAD else ""}"' if shown else ""


def _padding(stats: Stats) -> list[str]:
    lines = [f"padding     with seq_len {stats.seq_len:,} and batches of {stats.batch_size}:"]
    for one in stats.padding:
        lines.append(f"  {one.strategy:<16} {one.share:>7.2%} padding, {one.work:>6.2f} x the work   ({one.about})")
    return lines


def _pairs(pairs: Sequence[Pair], exact: bool = False) -> list[str]:
    lines = []
    for pair in pairs:
        alike = "the same" if exact else f"{pair.similarity:.0%} alike"
        many = f", {pair.copies:,} times" if pair.copies > 2 else ""
        between = f"{pair.first}  =  {pair.second}" if pair.first else pair.second
        lines.append(f"            {alike}{many}: {between}{_quoted(pair.head)}")
    return lines


def _duplicates(found: Duplicates, units: str) -> list[str]:
    lines = [
        f"duplicates  {found.exact:,} {units} repeat an earlier one, case and white space apart ({found.exact_groups:,} texts)",
        *_pairs(found.exact_examples, exact=True),
    ]
    if found.near is None:
        return [*lines, f"            near ones are not counted: {found.near_reason}"]
    sample = f"{'a sample of' if found.near_sampled else 'the'} {found.near_documents:,}"
    lines.append(
        f"            {found.near:,} more are near duplicates of an earlier one (MinHash of 5-word runs, 80 % alike), among"
        f" {sample} {units} of 5 words or more"
    )
    return [*lines, *_pairs(found.near_examples)]


def _sides(sides: Sides) -> list[str]:
    if not sides.by:
        return [f"validation  {sides.reason}"]
    lines = [
        f"validation  as lamp train would divide, by {sides.by}: {sides.train:,} to train on, {sides.val:,} held back;"
        f" {sides.exact} texts on both sides (the side is decided by the text's hash)"
    ]
    if sides.near is None:
        return [*lines, f"            near duplicates across the sides are not counted: {sides.reason}"]
    lines.append(
        f"            {sides.near:,} of {sides.near_val:,} held-back {sides.by} looked at have a near duplicate among"
        f" {sides.near_train:,} that are trained on"
    )
    return [*lines, *_pairs(sides.near_examples)]


def _test_set(test: TestSet) -> list[str]:
    lines = [
        f"test set    {test.name}: {test.documents:,} documents",
        f"            {test.exact:,} stand in the training text as they are (by hash, case and white space apart)",
        *_pairs(test.exact_examples, exact=True),
        f"            {test.grams:,} more have {GRAM_SHARE:.0%} or more of their {GRAM_WORDS}-word runs in it,"
        f" {test.grams_any:,} more have at least one; {test.grams_short:,} are too short to have any",
        *[f"            {pair.similarity:.0%} of it: {pair.second}{_quoted(pair.head)}" for pair in test.gram_examples],
    ]
    if test.near is not None:
        lines.append(
            f"            {test.near:,} more are near duplicates of one of {test.near_train:,} training documents looked at"
        )
    return [*lines, *_pairs(test.near_examples)]


def _quality(quality: Quality) -> list[str]:
    lines = [
        f"quality     score {quality.score:.1f} of 100 = {quality.formula}",
        f"            {quality.rows:,} rows, {quality.faulty:,} faulty, {quality.doubtful:,} doubtful;"
        f" answers have {quality.answer_words_mean:,.1f} words on average",
    ]
    for one in quality.reasons:
        if one.count:
            lines.append(f"  {one.count:>7,} {one.reason:<17} {one.kind}: {one.about}")
            lines += [f"          {example.place}{_quoted(example.text)}" for example in one.examples]
    return lines
