"""Sources and token caches opened as a run would open them, for tests that name only what they are about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamplighter.config import Data
from lamplighter.data.cache_location import Mode
from lamplighter.data.sources import Source, open_data
from lamplighter.data.split import CacheSettings
from lamplighter.data.token_cache.reader import obtain
from lamplighter.data.tokenizer import Tokenizer


def open_source(
    paths: list[str],
    source: str | None = None,
    separator: str | None = None,
    hash_store: Path | None = None,
    **data: Any,
) -> Source:
    return open_data(Data(paths=paths, source=source, separator=separator, **data), hash_store)


def ensure(
    root: Path,
    source: Source,
    tokenizer: Tokenizer,
    settings: CacheSettings,
    mode: Mode = "auto",
    workers: int | None = None,
) -> Path:
    """The folder of a token cache."""
    return obtain(root, source, tokenizer, settings, mode=mode, workers=workers)[0].folder
