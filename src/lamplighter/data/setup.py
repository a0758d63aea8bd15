"""A run's text, opened: the source, the tokenizer, the token cache or the examples, and the batches made of them.

In:  a resolved run, the folder of caches.
Out: each of the things that training reads from, made if need be; every step under its phase.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lamplighter import report
from lamplighter.errors import BadConfig

if TYPE_CHECKING:
    from lamplighter.config import Run
    from lamplighter.data.batch_source import BatchSource
    from lamplighter.data.batches import BatchLayout
    from lamplighter.data.chat.example_cache import Examples
    from lamplighter.data.chat.rows import RowSource
    from lamplighter.data.chat.template import ChatTemplate
    from lamplighter.data.sources import Source
    from lamplighter.data.stream import StreamBatches
    from lamplighter.data.token_cache.reader import Tokens
    from lamplighter.data.tokenizer import Tokenizer


_LOOK_BYTES = 1 << 20  # of a stream, before its first step: text to validate on is taken from these


@dataclass(frozen=True)
class OpenedText:
    """What is opened before the model is known."""

    source: Source
    tokenizer: Tokenizer
    chat: ChatTemplate | None  # None: plain text


def open_text(run: Run, cache: Path) -> tuple[Source, Tokenizer]:
    """The source of documents and the tokenizer for it, trained if need be and kept in the cache."""
    source = open_source(run, cache)
    with report.phase("tokenizer"):
        return source, _tokenizer(run, cache, source)


def open_source(run: Run, cache: Path) -> Source:
    """The source of documents that the configuration asks for."""
    from lamplighter.data import sources
    from lamplighter.data.chat.rows import find_rows

    data = run.data
    with report.phase("data"):
        cache.mkdir(parents=True, exist_ok=True)
        opened: sources.Opened = {}
        rows = find_rows(data, cache / "file_hashes.json", opened, pairs=run.train.objective == "dpo")
        if rows is not None and data.weights:
            why = "weights mix text; of instruction rows every one is learned, in an order of its own"
            raise BadConfig("data.weights is set, and the data is instruction rows", why, "leave data.weights out")
        if rows is not None:
            source: Source = rows
        elif not data.paths and data.source is None:
            report.note(f"no data given: the embedded corpus, {data.embedded_documents:,} letters and diary entries")
            source = sources.EmbeddedCorpus(0, data.embedded_documents)
        else:
            source = sources.open_data(data, cache / "file_hashes.json", opened)
        if rows is None and data.max_documents is not None:
            source = sources.First(source, data.max_documents)
    return source


def _tokenizer(run: Run, cache: Path, source: Source) -> Tokenizer:
    """The given one, the bytes, or one trained on the source and kept for the next time."""
    from lamplighter.data import tokenizer as tokenizers
    from lamplighter.data import tokenizer_training
    from lamplighter.data.stream import AsItComes

    section = run.tokenizer
    path = section.path or run.model.init_from
    if path is not None:
        found = tokenizers.load(Path(path))
        report.note(f"tokenizer of {path}: {found.vocab_size:,} tokens")
        return found
    if section.kind == "bytes":
        return tokenizers.byte_level()
    if run.data.stream:
        source = AsItComes(source)
    return tokenizer_training.trained(source, section.vocab_size, section.sample_mb, cache)


def obtain_tokens(run: Run, cache: Path, source: Source, tokenizer: Tokenizer) -> tuple[Tokens, bool]:
    """The token cache, and whether it was made just now."""
    from lamplighter.data.split import CacheSettings
    from lamplighter.data.token_cache import reader as tokens

    with report.phase("cache"):
        settings = CacheSettings(run.data.val_fraction)
        found, is_new = tokens.obtain(cache, source, tokenizer, settings, mode=run.data.cache, workers=run.data.workers)
    share = len(found.val) / max(1, len(found.val) + len(found.train))
    if share > 0.1 and share > 2 * run.data.val_fraction:
        report.warn(
            f"{share:.0%} of the tokens are held back for validation, {run.data.val_fraction:.0%} were asked for: few distinct texts"
        )
    pieces = "documents" if found.manifest["divided_by"] == "documents" else "runs of blocks"
    report.note(
        f"{found.train.documents:,} {pieces}, {len(found.train):,} tokens to train on;"
        f" {found.val.documents:,} {pieces}, {len(found.val):,} tokens to validate on"
    )
    return found, is_new


def _check_objective(run: Run, source: RowSource) -> None:
    """Pairs are for train.objective dpo, and nothing else is."""
    wanted, first = run.train.objective, source.kinds[0]
    if source.is_pairs and wanted != "dpo":
        what = "the rows are preference pairs (chosen, rejected), and train.objective is sft"
        why = "half of each row would be left unread"
        raise BadConfig(what, why, "--train.objective dpo (or rows of prompt and completion)")
    if wanted == "dpo" and not source.is_pairs:
        from lamplighter.data.chat.rows import KIND_WORDS

        why = f"the rows have {KIND_WORDS[first]}: nothing says which of two answers is preferred"
        raise BadConfig("train.objective dpo needs preference pairs", why, "rows with prompt, chosen, rejected")


def choose_template(run: Run, source: Source, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of a run on instruction rows; None where it learns from text."""
    from lamplighter.data.chat import template
    from lamplighter.data.chat.rows import RowSource
    from lamplighter.data.chat.template import load_template

    if not isinstance(source, RowSource):
        if run.train.objective == "dpo":
            why = "the data is text"
            raise BadConfig("train.objective dpo needs preference pairs", why, "rows with prompt, chosen, rejected")
        if run.data.packing in ("packed", "grouped"):
            raise BadConfig(
                f"data.packing is {run.data.packing}, and the data is text",
                "text is cut into windows without any padding; packing is for instruction rows",
                "--data.packing auto",
            )
        return None
    _check_objective(run, source)
    with report.phase("template"):
        if run.model.init_from is not None and run.data.template is None:
            template.check_folder(Path(run.model.init_from))
        found = load_template(run.data.template, tokenizer)
        template.announce(found, run.model.init_from)
    return found


def open_rows(run: Run, cache: Path, source: Source, chat: ChatTemplate) -> Examples:
    """The examples of a run on instruction rows, made if need be and kept in the cache."""
    from lamplighter.data.chat import example_cache
    from lamplighter.data.chat.rows import RowSource

    assert isinstance(source, RowSource)
    with report.phase("cache"):
        folder = example_cache.ensure(
            cache, source, chat, run.data.val_fraction, mode=run.data.cache, workers=run.data.workers
        )
        found = example_cache.open_examples(folder)
        found.tell()
        found.check_ends(chat.stop_id, chat.stop)
    return found


def _open_stream(run: Run, folder: Path, source: Source, tokenizer: Tokenizer) -> StreamBatches:
    """Documents as they arrive: what is held out is decided by the first of them, once, and kept in the run's folder."""
    from lamplighter.data.shared_chunks import SharedFiller, in_turn
    from lamplighter.data.stream import Filler, ReadOnce, StreamBatches, StreamSettings, hold_back

    data, train = run.data, run.train
    source = ReadOnce(source)
    shared = int(os.environ.get("LAMP_WORLD", "1")) > 1
    with report.phase("hold back") as phase, in_turn(folder / "stream", phase) if shared else nullcontext():
        sample_bytes = min(_LOOK_BYTES, max(1 << 18, 4 * data.tokens_per_chunk))
        division, held = hold_back(folder / "stream", source, tokenizer, data.val_fraction, sample_bytes)
    report.note(
        f"streaming {source}: chunks of {data.tokens_per_chunk:,} tokens; {held.documents:,} documents,"
        f" {len(held):,} tokens are held back to validate on, and later ones of that side are never trained on"
    )
    settings = StreamSettings(
        train.seed,
        train.batch_size,
        data.seq_len,
        data.tokens_per_chunk,
        max_chunks=data.max_chunks,
        repeat=data.at_end == "repeat",
    )
    if shared:
        return StreamBatches(SharedFiller(source, tokenizer, division, settings, folder / "stream" / "chunks"), held)
    return StreamBatches(Filler(source, tokenizer, division, settings), held)


def open_batches(run: Run, folder: Path, cache: Path, text: OpenedText) -> Callable[[bool], BatchSource]:
    """Open the data of a run, made if need be. What is returned lays it out in batches, as soon as it is known whether the
    model keeps packed examples apart (takes segments). `folder` is the run's own.
    """
    from lamplighter.data.batch_source import text_batches
    from lamplighter.data.batches import BatchLayout

    if run.data.stream:
        if text.chat is not None:
            why = "instruction rows are packed by their lengths, which must all be known before"
            next = "--data.stream false (rows are small), or --data.format text"
            raise BadConfig("data.stream is for text", why, next)
        stream = _open_stream(run, folder, text.source, text.tokenizer)
        return lambda _: stream
    layout = BatchLayout(run.train.seed, run.train.batch_size, run.data.seq_len, text.tokenizer.end_of_text)
    if text.chat is not None:
        examples = open_rows(run, cache, text.source, text.chat)
        text.chat.close()  # every row is rendered
        return lambda takes_segments: _lay_out_rows(run, examples, layout, takes_segments)
    tokens, _ = obtain_tokens(run, cache, text.source, text.tokenizer)
    return lambda _: text_batches(tokens.train, tokens.val, layout, tokens.folder.name, tokens.check_ids)


def _lay_out_rows(run: Run, examples: Examples, layout: BatchLayout, takes_segments: bool) -> BatchSource:
    from lamplighter.data.chat.packing import arrange
    from lamplighter.data.chat.pairs import arrange_pairs

    with report.phase("packing"):
        lay_out = arrange_pairs if examples.is_pairs else arrange
        found = lay_out(examples, run.data, layout, takes_segments)
    if run.train.compile is True and found.facts.whole_batches:
        report.warn("every new length of a batch is compiled anew with data.packing grouped; packed has one length")
    return found
