"""curves.svg: the picture of a run that report.md links to, kept up to date while the run goes on.

In:  metrics.jsonl, a bounded part of it at each look, and the floor where it is known.
Out: a small SVG for light and dark ground: loss with validation, learning rate, tokens per second. No library: the parent draws it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from html import escape
from typing import Any

from lamplighter import read_back
from lamplighter.rundir import RunDir, Tail, write_atomic
from lamplighter.safe_text import clean
from lamplighter.watch.status import large

_BUCKETS = 400  # along the x axis, at most
_LOOK_BYTES = 1 << 18
_EVERY_S = 30.0
_FIRST_S = 3.0
_NAMES = ("train/loss", "train/lr", "train/tok_per_sec")
_WIDE, _HIGH = 900, 430


class CurveSketch:
    """Averages and extremes over at most so many stretches of steps."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.tail = Tail(run.metrics)
        self.width = 1
        self.buckets: dict[str, dict[int, list[float]]] = {name: {} for name in _NAMES}  # sum, count, lowest, highest
        self.scores: dict[int, float] = {}
        self.last = 0
        self.drawn_at = time.monotonic() - _EVERY_S + _FIRST_S
        self.fresh = False

    def look(self, floor: float | None = None) -> None:
        """A little of what is new; the picture when one is due."""
        self._read()
        if self.fresh and self.last and time.monotonic() - self.drawn_at > _EVERY_S:
            self.write(floor)

    def write_all(self, floor: float | None = None) -> None:
        """To the end of the file, however long it is."""
        while self._read():
            continue
        self.write(floor)

    def _read(self) -> bool:
        lines = self.tail.lines(_LOOK_BYTES)
        for line in lines:
            record = read_back.parse_object(line)
            if record is not None and read_back.is_metric(record):
                self._take(record)
        return bool(lines)

    def _take(self, record: Mapping[str, Any]) -> None:
        step, self.fresh = int(record["step"]), True
        if isinstance(score := record.get("eval/val_loss"), int | float):
            self.scores[step] = float(score)
        if "train/loss" not in record:
            return
        if step <= self.last:  # done again: what came after it is as if it had not been
            for found in self.buckets.values():
                for place in [place for place in found if place >= step // self.width]:
                    del found[place]
        self.last = step
        for name in _NAMES:
            if isinstance(value := record.get(name), int | float):
                one = self.buckets[name].setdefault(step // self.width, [0.0, 0.0, math.inf, -math.inf])
                one[0], one[1] = one[0] + value, one[1] + 1
                one[2], one[3] = min(one[2], value), max(one[3], value)
        if step // self.width >= _BUCKETS:
            self._halve()

    def _halve(self) -> None:
        """Twice as wide, half as many."""
        self.width *= 2
        for name, before in self.buckets.items():
            after: dict[int, list[float]] = {}
            for place, (total, count, low, high) in before.items():
                found = after.setdefault(place // 2, [0.0, 0.0, math.inf, -math.inf])
                found[0], found[1], found[2], found[3] = (
                    found[0] + total,
                    found[1] + count,
                    min(found[2], low),
                    max(found[3], high),
                )
            self.buckets[name] = after

    def write(self, floor: float | None = None) -> None:
        self.drawn_at, self.fresh = time.monotonic(), False
        with contextlib.suppress(OSError):  # a full disk: the next picture is as good
            write_atomic(self.run.path / "curves.svg", self.draw(floor), durable=False)

    # ---------------------------------------------------------------- the picture

    def draw(self, floor: float | None = None) -> str:
        """One SVG."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" height="{_HIGH}" role="img">',
            f"<title>{escape(clean(self.run.name))}: loss, learning rate, tokens per second</title>",
            "<style>text{font:12px system-ui,sans-serif;fill:#5d6570}.t{font-weight:600;fill:#1f2328}.g{stroke:#e3e0d9}.a{fill:none;stroke:#0072b2;"
            "stroke-width:1.6}.r{fill:#0072b2;opacity:.16}.v{fill:none;stroke:#d98200;stroke-width:1.6}.p{fill:#d98200}.f{stroke:#8b929c;stroke-dasharray:5 4}"
            "@media(prefers-color-scheme:dark){text{fill:#a4acb8}.t{fill:#e6e8eb}.g{stroke:#2e333b}.a{stroke:#56b4e9}.r{fill:#56b4e9}.v{stroke:#f0b040}.p{fill:#f0b040}}</style>",
        ]
        parts += self._panel("train/loss", (0, 0, _WIDE, 250), "Loss (blue: training, orange: validation)", floor)
        parts += self._panel("train/lr", (0, 255, _WIDE // 2, 170), "Learning rate")
        parts += self._panel("train/tok_per_sec", (_WIDE // 2, 255, _WIDE // 2, 170), "Tokens per second")
        return "\n".join([*parts, "</svg>", ""])

    def _panel(self, name: str, box: tuple[int, int, int, int], title: str, floor: float | None = None) -> list[str]:
        left, top, wide, high = box
        found = sorted(self.buckets[name].items())
        head = f'<text class="t" x="{left + 14}" y="{top + 20}">{title}</text>'
        if not found:
            return [
                head,
                f'<text x="{left + wide / 2}" y="{top + high / 2}" text-anchor="middle">no numbers yet</text>',
            ]
        scored = sorted(self.scores.items()) if name == "train/loss" else []
        values = [part[i] for _, part in found for i in (2, 3)] + [value for _, value in scored]
        low, most = min(values), max(values)
        if floor is not None:
            low = min(low, floor)
        room = (most - low) * 0.05 or abs(most) * 0.05 or 1.0
        low, most = low - room, most + room
        last = max(1, self.last)

        def px(step: float) -> str:
            return f"{left + 62 + step / last * (wide - 80):.1f}"

        def py(value: float) -> str:
            return f"{top + 30 + (most - value) / (most - low) * (high - 52):.1f}"

        lines = [head]
        for share in (0.0, 0.5, 1.0):
            value = low + room + (most - low - 2 * room) * share
            lines.append(f'<path class="g" d="M{left + 62} {py(value)}H{left + wide - 18}"/>')
            lines.append(f'<text x="{left + 56}" y="{float(py(value)) + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        middle = [((place + 0.5) * self.width, part) for place, part in found]
        upper = " ".join(f"{px(step)},{py(part[3])}" for step, part in middle)
        lower = " ".join(f"{px(step)},{py(part[2])}" for step, part in reversed(middle))
        lines.append(f'<polygon class="r" points="{upper} {lower}"/>')
        lines.append(
            f'<polyline class="a" points="{" ".join(f"{px(step)},{py(part[0] / part[1])}" for step, part in middle)}"/>'
        )
        if scored:
            lines.append(
                f'<polyline class="v" points="{" ".join(f"{px(step)},{py(value)}" for step, value in scored[-200:])}"/>'
            )
            lines += [f'<circle class="p" cx="{px(step)}" cy="{py(value)}" r="2.5"/>' for step, value in scored[-60:]]
        if floor is not None:
            lines.append(f'<path class="f" d="M{left + 62} {py(floor)}H{left + wide - 18}"/>')
            lines.append(
                f'<text x="{left + wide - 22}" y="{float(py(floor)) - 5:.1f}" text-anchor="end">entropy bound {floor:.3f}</text>'
            )
        lines.append(
            f'<text x="{left + wide - 18}" y="{top + high - 6}" text-anchor="end">step {large(self.last)}</text>'
        )
        return lines
