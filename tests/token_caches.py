"""The folder of a token cache, for tests that look at its files."""

from __future__ import annotations

from pathlib import Path

from lamplighter.data.cache_location import Mode
from lamplighter.data.sources import Source
from lamplighter.data.split import CacheSettings
from lamplighter.data.token_cache.reader import obtain
from lamplighter.data.tokenizer import Tokenizer


def ensure(
    root: Path,
    source: Source,
    tokenizer: Tokenizer,
    settings: CacheSettings,
    mode: Mode = "auto",
    workers: int | None = None,
) -> Path:
    return obtain(root, source, tokenizer, settings, mode=mode, workers=workers)[0].folder
