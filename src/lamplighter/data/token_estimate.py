"""How many tokens a run will find in its text, before it begins: counted where a cache has them, else estimated and said so.

In:  the run's source, its tokenizer section, the folder of caches.
Out: a TokenEstimate: tokens to train and to validate on, padding, windows; and in words where the numbers come from.

Nothing is built and nothing is written. An estimate is: text of the source x tokens per byte of a sample spread over it. Where
the tokenizer is still to be trained, one is trained on the sample for this and forgotten; it is measured on the sample and on text
beside it, because the one that the run will train sees more text than the sample and less than all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from lamplighter import report
from lamplighter.config import Run
from lamplighter.data import tokenizer as tokenizers
from lamplighter.data import tokenizer_training
from lamplighter.data.batches import Int64s
from lamplighter.data.chat import example_cache
from lamplighter.data.chat.packing import WORDS, padding_share
from lamplighter.data.chat.rows import RowSource, SetAside
from lamplighter.data.chat.template import ChatTemplate, EncodedExample, load_template
from lamplighter.data.sampling import TextSample, take
from lamplighter.data.sources import Source
from lamplighter.data.sources.file_source import FileSource
from lamplighter.data.split import CacheSettings
from lamplighter.data.token_cache.reader import locate_token_cache
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.rundir import human_bytes, read_record

_SAMPLE_BYTES = 600_000
_ROWS = 1500  # conversations that stand for all of them
_HASH_BYTES = 1_500_000_000  # of files that nobody has hashed yet; more would take longer than a plan may
_PACKINGS = {"packed": "packed", "grouped": "grouped", "windows": "to seq_len", "auto": "packed"}


@dataclass(frozen=True)
class TokenEstimate:
    """What a run will find."""

    tokens: int
    val_tokens: int
    how: str
    counted: bool
    vocab_size: int
    padding: float = 0.0
    samples: int | None = None
    noun: str = "windows"
    row_tokens: float | None = None
    segments: bool = False


def estimate_tokens(run: Run, source: Source, cache: Path) -> TokenEstimate:
    """Counted or estimated."""
    may_hash = cache.is_dir() and _unknown_bytes(source, cache) <= _HASH_BYTES
    tokenizer = _ready_tokenizer(run, source, cache if may_hash else None)
    if isinstance(source, RowSource):
        return _look_at_rows(run, source, tokenizer, cache if may_hash else None)
    if tokenizer is not None and may_hash:
        found = locate_token_cache(cache, source, tokenizer, CacheSettings(run.data.val_fraction))
        if found.fault is None:
            splits = read_record(found.folder / found.kind.manifest)["splits"]
            train, val = (int(splits[side]["tokens"]) for side in ("train", "val"))
            how = f"counted: token cache {found.folder.name}"
            return _text(run, train, val, how=how, counted=True, vocab_size=tokenizer.vocab_size)
    return _estimate(run, source, tokenizer)


def _unknown_bytes(source: Source, cache: Path) -> int:
    """Of the files, those that would have to be hashed to know whether their cache is there."""
    files = source.local_files() if isinstance(source, FileSource | RowSource) else None
    if files is None:
        return source.total_bytes() or 0
    known = read_record(cache / "file_hashes.json")
    return sum(file.size for file in files if str(file.path.absolute()) not in known)


def _ready_tokenizer(run: Run, source: Source, cache: Path | None) -> Tokenizer | None:
    """The given one, the bytes, or the one that an earlier run has trained on the same text."""
    section = run.tokenizer
    if (path := section.path or run.model.init_from) is not None:
        return tokenizers.load(Path(path))
    if section.kind == "bytes":
        return tokenizers.byte_level()
    if cache is None:
        return None
    return tokenizer_training.find_trained(source, section.vocab_size, section.sample_mb, cache)


# ---------------------------------------------------------------- text


def _text(run: Run, train: int, val: int, how: str, counted: bool, vocab_size: int) -> TokenEstimate:
    """Windows over a stream: no padding but in the last one."""
    windows = max(1, math.ceil(max(1, train - 1) / run.data.seq_len))
    padding = 1 - max(0, train - 1) / (windows * run.data.seq_len)
    return TokenEstimate(
        train, val, how, counted=counted, vocab_size=vocab_size, padding=max(0.0, padding), samples=windows
    )


def _estimate(run: Run, source: Source, tokenizer: Tokenizer | None) -> TokenEstimate:
    sample = take(source, _SAMPLE_BYTES, 0 if tokenizer is not None else _SAMPLE_BYTES)
    with report.phase("estimate tokens"):
        texts, by = sample.texts, "the run's own tokenizer"
        if tokenizer is None:
            size = run.tokenizer.vocab_size
            tokenizer = tokenizers.train(sample.texts, size)
            texts = [*sample.texts, *sample.others]
            by = f"a tokenizer of {tokenizer.vocab_size:,} trained on the sample"
        encoded = tokenizer.encode_batch(texts)
        size_bytes = sum(len(text.encode()) for text in texts)
        per_byte = (len(encoded.ids) + len(texts)) / max(1, size_bytes)  # each text and the mark that ends it
    whole = _all_bytes(source, sample)
    total = round(whole * per_byte)
    val = round(total * run.data.val_fraction)
    at_least = " (at least: the source does not say how large it is)" if sample.share is None else ""
    how = (
        f"estimated: {human_bytes(whole)} of text x {per_byte:.3f} tokens per byte{at_least},"
        f" from {sample.words}, by {by}; lamp data prepare counts them"
    )
    known = run.tokenizer.path or run.model.init_from or run.tokenizer.kind == "bytes"
    vocab_size = tokenizer.vocab_size if known else run.tokenizer.vocab_size
    return _text(run, total - val, val, how=how, counted=False, vocab_size=vocab_size)


def _all_bytes(source: Source, sample: TextSample) -> float:
    """Of text: what was passed on the way, over the part of the source that it was."""
    return sample.read_bytes / sample.share if sample.share else float(sample.read_bytes)


# ---------------------------------------------------------------- instruction rows


def _look_at_rows(run: Run, source: RowSource, tokenizer: Tokenizer | None, cache: Path | None) -> TokenEstimate:
    """Lengths with the template applied; the padding that the run's packing will have."""
    if tokenizer is None:
        tokenizer = tokenizers.train(take(source, _SAMPLE_BYTES).texts, run.tokenizer.vocab_size)
    template = load_template(run.data.template, tokenizer)
    found = example_cache.locate_example_cache(cache, source, template, run.data.val_fraction) if cache else None
    if found is not None and found.fault is None:
        index = np.load(found.folder / "index.npy")
        columns = dict(zip(example_cache.FIELDS, index.T, strict=True))
        is_val = columns["is_val"] == 1
        train, val = columns["length"][~is_val], int(columns["length"][is_val].sum())
        how = f"counted: examples {found.folder.name}"
        return _rows(
            run, train, 1.0, val=val, how=how, counted=True, vocab_size=tokenizer.vocab_size, pairs=source.is_pairs
        )
    lengths, share = _sample_rows(source, template)
    val = round(int(lengths.sum()) / share * run.data.val_fraction)
    noun, count = ("pairs", len(lengths) // 2) if source.is_pairs else ("examples", len(lengths))
    how = f"estimated: the first {count:,} {noun}, {share:.1%} of {human_bytes(source.total_bytes() or 0)}, with the template"
    share /= 1 - run.data.val_fraction
    return _rows(
        run, lengths, share, val=val, how=how, counted=False, vocab_size=tokenizer.vocab_size, pairs=source.is_pairs
    )


def _sample_rows(source: RowSource, template: ChatTemplate) -> tuple[Int64s, float]:
    """The lengths of the first examples, and the share of the rows that they are; of pairs, those of both answers."""
    if source.is_pairs:
        return _sample_pairs(source, template)
    with report.phase("estimate tokens", total=_ROWS, unit="examples") as p:
        read = list(islice(source.conversations(SetAside(source.policy, quiet=True), template.between), _ROWS + 1))
        share = 1.0 if len(read) <= _ROWS else source.position().bytes_done / max(1, source.total_bytes() or 0)
        encoded = template.encode([messages for messages, _ in read[:_ROWS]])
        p.tick(len(read))
    lengths = [len(one.ids) for one in encoded if isinstance(one, EncodedExample)]
    return np.array(lengths, np.int64), max(1e-9, min(1.0, share))


def _sample_pairs(source: RowSource, template: ChatTemplate) -> tuple[Int64s, float]:
    """Two lengths for each pair, each with the prompt."""
    with report.phase("estimate tokens", total=_ROWS // 2, unit="pairs") as p:
        read = list(islice(source.pairs(SetAside(source.policy, quiet=True), template.between), _ROWS // 2 + 1))
        share = 1.0 if len(read) <= _ROWS // 2 else source.position().bytes_done / max(1, source.total_bytes() or 0)
        encoded = template.encode([side for pair, _ in read[: _ROWS // 2] for side in (pair.chosen, pair.rejected)])
        p.tick(len(read))
    lengths = [
        [len(chosen.ids), len(rejected.ids)]
        for chosen, rejected in zip(encoded[::2], encoded[1::2], strict=True)
        if isinstance(chosen, EncodedExample) and isinstance(rejected, EncodedExample)
    ]
    return np.array(lengths, np.int64).reshape(-1), max(1e-9, min(1.0, share))


def _rows(
    run: Run, lengths: Int64s, share: float, val: int, how: str, counted: bool, vocab_size: int, pairs: bool = False
) -> TokenEstimate:
    """`pairs`: two lengths for each, which share a window; where answers have rows of their own, a batch has two for each pair."""
    seq_len, batch = run.data.seq_len, run.train.batch_size
    positions = np.minimum(np.maximum(0, lengths - 1), seq_len)
    padded, grouped = positions, run.data.packing == "grouped"
    if pairs and grouped:  # both answers of a pair are as long as the longer one
        padded, batch = np.repeat(positions.reshape(-1, 2).max(1), 2), 2 * batch
    elif pairs:
        padded = positions = np.minimum(positions.reshape(-1, 2).sum(1), seq_len)
    packing = "packed" if run.data.packing == "auto" else run.data.packing
    padding = padding_share(padded, _PACKINGS[packing], seq_len, batch)
    padding = 1 - (1 - padding) * float(positions.sum()) / max(1, float(padded.sum()))
    filled = float(positions.sum()) / share
    rows = filled / (1 - padding) / seq_len
    row_tokens, samples, noun = None, max(1, math.ceil(rows)), "windows"
    if packing == "grouped":
        samples, noun = max(1, round(len(lengths) / (2 if pairs else 1) / share)), "pairs" if pairs else "examples"
        row_tokens = filled / (1 - padding) / samples
    words = f"{how}; data.packing {packing} ({WORDS[packing]})"
    return TokenEstimate(
        round(filled),
        val,
        words,
        counted=counted,
        vocab_size=vocab_size,
        padding=padding,
        samples=samples,
        noun=noun,
        row_tokens=row_tokens,
        segments=packing == "packed",
    )
