"""Sources that are ill: one blocks in next(), one raises, one is well."""

from __future__ import annotations

import threading
from collections.abc import Iterator


def blocks() -> Iterator[str]:
    """System A: a few documents, then a wait that nobody ends."""
    yield from ("a letter from London " * 20 for _ in range(3))
    threading.Event().wait()  # the line that the doctor must name
    yield "never"


def raises() -> Iterator[str]:
    yield "a letter from London " * 20
    raise KeyError("text")
