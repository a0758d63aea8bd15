"""Curves of characters: braille, two by four dots each, with the numbers of their axes.

In:  values, and how many characters there are.
Out: rows of text.
"""

from __future__ import annotations

from collections.abc import Sequence

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))  # of a character, by column and row
_NUMBERS = 9  # characters before the axis


def curve(values: Sequence[float], top: float, high: int) -> list[str]:
    """Two values to a character, `top` at the upper edge and zero at the lower one."""
    wide = -(-len(values) // 2)
    cells = [[0] * wide for _ in range(high)]
    last: int | None = None
    for x, value in enumerate(values):
        y = min(4 * high - 1, max(0, round((1 - value / top) * (4 * high - 1)) if top > 0 else 4 * high - 1))
        for row in range(min(y, last if last is not None else y), max(y, last if last is not None else y) + 1):
            cells[row // 4][x // 2] |= _DOTS[x % 2][row % 4]
        last = y
    return ["".join(chr(0x2800 + cell) for cell in row) for row in cells]


def chart(values: Sequence[float], high: int, scale: tuple[float, float] | None = None) -> list[str]:
    """With the highest and the lowest number on its axis; `scale`: those of several charts that are to be compared."""
    low, top = scale or (min(values), max(values))
    rows = curve([value - low for value in values], (top - low) or 1.0, high)
    numbers = {0: f"{top:.4g}", high - 1: f"{low:.4g}"}
    return [f"{numbers.get(i, ''):>{_NUMBERS - 1}} ┤{row}" for i, row in enumerate(rows)]


def wide_enough(characters: int) -> int:
    """How many values a chart of so many characters shows."""
    return max(8, 2 * (characters - _NUMBERS - 1))
