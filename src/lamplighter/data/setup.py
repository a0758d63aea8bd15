"""A run's text, opened: the source, the tokenizer, the token cache or the examples, and the batches made of them.

In:  a resolved run, the folder of caches.
Out: each of the things that training reads from, made if need be; every step under its phase.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lamplighter import report
from lamplighter.errors import BadConfig

if TYPE_CHECKING:
    from lamplighter.config import Run
    from lamplighter.data.batch_source import Feed
    from lamplighter.data.chat.example_cache import Examples
    from lamplighter.data.chat.template import ChatTemplate
    from lamplighter.data.sources import Source
    from lamplighter.data.stream import Live
    from lamplighter.data.token_cache.reader import Tokens
    from lamplighter.data.tokenizer import Tokenizer


def open_text(run: Run, cache: Path) -> tuple[Source, Tokenizer]:
    """The source of documents and the tokenizer for it, trained if need be and kept in the cache."""
    source = open_source(run, cache)
    with report.phase("tokenizer"):
        return source, _tokenizer(run, cache, source)


def open_source(run: Run, cache: Path) -> Source:
    """The source of documents that the configuration asks for."""
    from lamplighter.data import sources
    from lamplighter.data.chat.row_source import find_rows

    data = run.data
    with report.phase("data"):
        cache.mkdir(parents=True, exist_ok=True)
        rows = find_rows(data.paths, data.format, data.text_key, data.bad_text, data.max_documents)
        if rows is not None and data.weights:
            why = "weights mix text; of instruction rows every one is learned, in an order of its own"
            raise BadConfig("data.weights is set, and the data is instruction rows", why, "leave data.weights out")
        if rows is not None:
            source: Source = rows
        elif not data.paths and data.source is None:
            report.note(f"no data given: the embedded corpus, {data.embedded_documents:,} letters and diary entries")
            source = sources.EmbeddedCorpus(0, data.embedded_documents)
        else:
            source = sources.open_data(data, cache / "file_hashes.json")
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
    from lamplighter.data.split import Settings
    from lamplighter.data.token_cache import reader as tokens

    with report.phase("cache"):
        settings = Settings(run.data.val_fraction)
        found, is_new = tokens.obtain(cache, source, tokenizer, settings, run.data.cache, run.data.workers)
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


def choose_template(run: Run, source: Source, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of a run on instruction rows; None where it learns from text."""
    from lamplighter.data.chat import template_file
    from lamplighter.data.chat.row_source import RowSource
    from lamplighter.data.chat.template import choose

    if not isinstance(source, RowSource):
        if run.data.packing in ("packed", "grouped"):
            raise BadConfig(
                f"data.packing is {run.data.packing}, and the data is text",
                "text is cut into windows without any padding; packing is for instruction rows",
                "--data.packing auto",
            )
        return None
    with report.phase("template"):
        if run.model.init_from is not None and run.data.template is None:
            template_file.check_folder(Path(run.model.init_from))
        found = choose(run.data.template, tokenizer)
        template_file.announce(found, run.model.init_from)
    return found


def open_rows(run: Run, cache: Path, source: Source, chat: ChatTemplate) -> Examples:
    """The examples of a run on instruction rows, made if need be and kept in the cache."""
    from lamplighter.data.chat import example_cache
    from lamplighter.data.chat.row_source import RowSource

    assert isinstance(source, RowSource)
    with report.phase("cache"):
        folder = example_cache.ensure(cache, source, chat, run.data.val_fraction, run.data.cache, run.data.workers)
        found = example_cache.open_examples(folder)
        found.tell()
        found.check_ends(chat.stop_id, chat.stop)
    return found


def open_feed(run: Run, tokens: Tokens | Examples | Live, tokenizer: Tokenizer, takes_segments: bool) -> Feed:
    """Where the loop's batches come from."""
    from lamplighter.data.batch_source import live_feed, text_feed
    from lamplighter.data.chat.example_cache import Examples
    from lamplighter.data.chat.layout import arrange
    from lamplighter.data.stream import Live

    seq_len, train, pad = run.data.seq_len, run.train, tokenizer.end_of_text
    if isinstance(tokens, Live):
        return live_feed(tokens, train.batch_size, seq_len, pad)
    if not isinstance(tokens, Examples):
        return text_feed(tokens.train, tokens.val, train.seed, train.batch_size, seq_len, pad)
    with report.phase("packing"):
        feed = arrange(tokens, run.data, train.seed, train.batch_size, pad, takes_segments)
    if run.train.compile is True and feed.whole_batches:
        report.warn("every new length of a batch is compiled anew with data.packing grouped; packed has one length")
    return feed
