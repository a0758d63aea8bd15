"""What the readers of markup hand over: documents, or a fault with its place.

In:  nothing.
Out: the values that markup, tei and alto share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


class BadMarkup(ValueError):
    """Markup that cannot be read: where, and why."""

    def __init__(self, reason: str, why: str, line: int = 0, column: int = 0) -> None:
        super().__init__(why)
        self.reason, self.why, self.line, self.column = reason, why, line, column


@dataclass(frozen=True)
class Piece:
    """One document of a file; `part` is its place within it."""

    text: str
    part: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
