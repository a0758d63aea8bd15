"""The loss of a run as a small PNG for notifications, drawn with nothing but the standard library: the parent has no plotting library.

In:  the newest part of metrics.jsonl.
Out: the bytes of a picture, and the same curve as a row of characters for services that take no picture; both empty without losses.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Sequence

from lamplighter import read_back
from lamplighter.rundir import RunDir, read_last_lines
from lamplighter.watch.status import averaged, large, sparkline

_WIDE, _HIGH = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 26, 30
_BYTES = 1 << 22  # of metrics.jsonl: the newest fifteen thousand steps
_GROUND, _GRID, _INK, _LOSS, _VALIDATION = range(5)
_PALETTE = bytes.fromhex("ffffff e3e0d9 5d6570 0072b2 d98200")
# Five columns of seven dots each, the lowest bit above: what the axes need.
_LETTERS = dict(zip("0123456789.e-+kMBlostpvaidnrgTG, ", (bytes.fromhex(one) for one in ["3e5149453e", "00427f4000", "4261514946", "2141454b31", "1814127f10", "2745454539", "3c4a494930", "0171090503", "3649494936", "064949291e", "0060600000", "3854545418", "0808080808", "08083e0808", "7f10284400", "7f020c027f", "7f49494936", "00417f4000", "3844444438", "4854545420", "043f444020", "7c14141408", "1c2040201c", "2054545478", "00447d4000", "384444487f", "7c08040478", "7c08040408", "0c5252523e", "01017f0101", "3e4149497a", "0050300000", "0000000000"]), strict=True))  # fmt: skip


def loss_of(run: RunDir) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Step and value of the newest training losses, and of the validations among them; a step that was done again counts once."""
    losses: dict[int, float] = {}
    scores: dict[int, float] = {}
    for record in filter(read_back.is_metric, read_last_lines(run.metrics, _BYTES)):
        for name, found in (("train/loss", losses), ("eval/val_loss", scores)):
            if isinstance(value := record.get(name), int | float):
                found[int(record["step"])] = float(value)
    return sorted(losses.items()), sorted(scores.items())


def loss_words(run: RunDir) -> str:
    """The curve in one row."""
    losses, _ = loss_of(run)
    if len(losses) < 2:
        return ""
    return f"loss {sparkline((value for _, value in losses), 24)} {losses[0][1]:.4g} to {losses[-1][1]:.4g}"


def loss_picture(run: RunDir) -> bytes:
    """Training and validation over the steps."""
    losses, scores = loss_of(run)
    if len(losses) < 2:
        return b""
    first, last = losses[0][0], losses[-1][0]
    scores = [one for one in scores if first <= one[0] <= last]
    means = averaged([value for _, value in losses], (_WIDE - _LEFT - _RIGHT) // 2)
    values = [*means, *(value for _, value in scores)]
    low, high = min(values), max(values)
    canvas = _Canvas()

    def place(share: float, value: float) -> tuple[int, int]:
        return (_LEFT + round(share * (_WIDE - _LEFT - _RIGHT)),
                _TOP + round((high - value) / ((high - low) or 1.0) * (_HIGH - _TOP - _BOTTOM)))  # fmt: skip

    for value in dict.fromkeys((high, (high + low) / 2, low)):
        _, y = place(0, value)
        canvas.line((_LEFT, y), (_WIDE - _RIGHT, y), _GRID, 1)
        canvas.write(f"{value:.4g}", _LEFT - 8, y - 3, right=True)
    canvas.curve([place(i / (len(means) - 1), value) for i, value in enumerate(means)], _LOSS)
    canvas.curve([place((step - first) / (last - first), value) for step, value in scores], _VALIDATION)
    canvas.write("loss", _LEFT, 8)
    if scores:
        canvas.write("validation", _LEFT + 60, 8, colour=_VALIDATION)
    canvas.write(f"step {large(first)}", _LEFT, _HIGH - 18)
    canvas.write(large(last), _WIDE - _RIGHT, _HIGH - 18, right=True)
    return canvas.png()


class _Canvas:
    """Dots, by the number of their colour."""

    def __init__(self) -> None:
        self.rows = [bytearray(_WIDE) for _ in range(_HIGH)]

    def dot(self, x: int, y: int, colour: int, size: int) -> None:
        for row in self.rows[max(0, y) : max(0, y + size)]:
            row[max(0, x) : min(_WIDE, x + size)] = bytes([colour]) * max(0, min(_WIDE, x + size) - max(0, x))

    def line(self, begin: tuple[int, int], end: tuple[int, int], colour: int, size: int = 2) -> None:
        steps = max(abs(end[0] - begin[0]), abs(end[1] - begin[1]), 1)
        for i in range(steps + 1):
            self.dot(
                begin[0] + (end[0] - begin[0]) * i // steps, begin[1] + (end[1] - begin[1]) * i // steps, colour, size
            )

    def curve(self, points: Sequence[tuple[int, int]], colour: int) -> None:
        for begin, end in itertools.pairwise(points):
            self.line(begin, end, colour)
        if len(points) == 1:
            self.dot(points[0][0] - 2, points[0][1] - 2, colour, 5)

    def write(self, text: str, x: int, y: int, right: bool = False, colour: int = _INK) -> None:
        x -= 6 * len(text) if right else 0
        for letter in text:
            for column, bits in enumerate(_LETTERS.get(letter, _LETTERS[" "])):
                for row in range(7):
                    if bits >> row & 1:
                        self.dot(x + column, y + row, colour, 1)
            x += 6

    def png(self) -> bytes:
        def part(kind: bytes, data: bytes) -> bytes:
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        head = struct.pack(">IIBBBBB", _WIDE, _HIGH, 8, 3, 0, 0, 0)
        body = zlib.compress(b"".join(b"\0" + bytes(row) for row in self.rows), 9)
        return (
            b"\x89PNG\r\n\x1a\n"
            + part(b"IHDR", head)
            + part(b"PLTE", _PALETTE)
            + part(b"IDAT", body)
            + part(b"IEND", b"")
        )
