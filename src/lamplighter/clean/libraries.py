"""The libraries that only cleaning needs (extra `data`), loaded at first use; where one is missing, one clear line.

In:  a name.
Out: the module.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from lamplighter.errors import InputMissing


@cache
def _load(name: str, use: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputMissing(f"{name} is not installed", f"{use} needs it", "pip install 'lamplighter[data]'") from error


def ftfy() -> Any:
    return _load("ftfy", "mending misread encodings")


def py3langid() -> Any:
    return _load("py3langid", "the language check")


def rensa() -> Any:
    return _load("rensa", "finding near duplicates")


@cache
def has_language(needed: bool) -> bool:
    """Whether the language can be told; where it must be and cannot, an error."""
    try:
        py3langid()
    except InputMissing:
        if needed:
            raise
        return False
    return True
