"""The live display of a terminal: a few lines at the bottom that move, with what was said above them.

In:  the status of now.
Out: frames drawn by rich into the console's stream.
"""

from __future__ import annotations

import io
import re
import time
from collections import deque

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lamplighter.braille import chart, wide_enough
from lamplighter.safe_text import clean, safe
from lamplighter.watch.rank_lines import SLOWEST, rank_lines
from lamplighter.watch.status import Status, alert, averaged, duration, sentence, sparkline

_SPINNER = "◐◓◑◒"
_LEAST_ROWS, _MOST_ROWS = 4, 30  # of a chart
_LAST_WORDS = 5  # of a page that is left
_COMMAND = re.compile(r"(^|; |  )(next|or|the whole run): ")  # a line that is there to be pasted into a shell


class Live:
    """Owns the bottom of the terminal."""

    def __init__(self, stream: io.TextIOBase) -> None:
        self.console = RichConsole(file=stream, force_terminal=True, highlight=False, soft_wrap=False)  # type: ignore[arg-type]
        self.live = RichLive(
            console=self.console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self.open = False
        self.frames = 0

    def line(self, stamp: str, text: str, style: str) -> None:
        """Broken between words where it must be, each part under the first; a command is left to the terminal to break."""
        if _COMMAND.search(text):
            _print_whole(self.console, Text(stamp + text, style=style))
            return
        body = text.lstrip(" ")
        before = stamp + " " * (len(text) - len(body))
        parts = Text(body, style=style).wrap(self.console, max(20, self.console.width - len(before)), overflow="fold")
        for part in parts or [Text()]:
            part.rstrip()
            _print_whole(self.console, Text(before, style=style).append_text(part))
            before = " " * len(before)

    def frame(self, status: Status) -> None:
        if not self.open:
            self.live.start()
            self.open = True
        self.frames += 1
        self.live.update(self._draw(status), refresh=True)

    def close(self) -> None:
        if self.open:
            self.live.stop()
            self.open = False

    def _draw(self, status: Status) -> Group:
        width = self.console.width
        spin = _SPINNER[self.frames % len(_SPINNER)]
        head = Text(f"{spin} {shortened(clean(status.name), width // 6)} ", style="bold yellow")
        head.append(safe(sentence(status)), style="default")
        head.truncate(max(10, width - 1), overflow="ellipsis")
        rows: list[object] = [head]
        if warning := alert(status):
            rows.append(Text(f"  {safe(warning)}", style="bold yellow", overflow="fold"))
        slot = status.slot
        if slot is not None:
            training = status.training and slot.steps > 0
            total = float(slot.steps) if training else slot.total
            done = float(slot.step) if training else slot.done
            if total > 0:
                rows.append(_bar(done, total, status, width))
        if status.training and len(status.losses) > 1:
            rows.append(_curve(status, width))
        return Group(*rows)  # type: ignore[arg-type]


class Page:
    """Owns the whole terminal, for somebody who looks at a run from elsewhere: now, the curve, the last sample, what was said.

    Every frame is drawn anew for the window as it is then, on the terminal's second screen; what was said last stays on the
    first one when it is left.
    """

    def __init__(self, stream: io.TextIOBase) -> None:
        self.console = RichConsole(file=stream, force_terminal=True, highlight=False)  # type: ignore[arg-type]
        self.live = RichLive(
            console=self.console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self.open = False
        self.frames = 0
        self.said: deque[Text] = deque(maxlen=200)
        self.sample: list[Text] = []
        self.in_sample = False

    def line(self, stamp: str, text: str, style: str) -> None:
        """A sample has a place of its own; its lines follow its head and are indented."""
        found = Text(stamp + text, style=style)
        begins = text.startswith("sample at step")
        self.in_sample = begins or (self.in_sample and text.startswith("   "))
        if begins:
            self.sample = [found]
        elif self.in_sample:
            self.sample.append(found)
        else:
            self.said.append(found)

    def frame(self, status: Status) -> None:
        if not self.open:
            self.live.start()
            self.open = True
        self.frames += 1
        self.live.update(Group(*self._draw(status)), refresh=True)

    def close(self) -> None:
        """The first screen again, with the last words."""
        if self.open:
            self.live.stop()
            self.open = False
        for text in [*self.said][-_LAST_WORDS:]:
            if _COMMAND.search(text.plain):
                _print_whole(self.console, text)
            else:
                self.console.print(text, overflow="fold")

    def _draw(self, status: Status) -> list[Text | Table]:
        width, height = self.console.size
        head = Text(f"{_SPINNER[self.frames % len(_SPINNER)]} {status.name} ", style="bold yellow")
        head.append(sentence(status), style="default")
        if warning := alert(status):
            head.append(f"  {warning}", style="bold yellow")
        rows: list[Text | Table] = [*head.wrap(self.console, width)][: max(1, height // 3)]
        if (slot := status.slot) is not None and slot.steps > 0:
            rows.append(_bar(float(slot.step), float(slot.steps), status, width))
        for text in rank_lines(status.ranks, max(1, height // 3)):
            row = Text(f"  {safe(text)}", style="bold yellow" if SLOWEST in text else "", no_wrap=True)
            row.truncate(max(10, width - 1), overflow="ellipsis")
            rows.append(row)
        sample = [part for text in self.sample for part in text.wrap(self.console, width)][: height // 3]
        said = [part for text in self.said for part in text.wrap(self.console, width)]
        left = height - len(rows) - len(sample) - min(len(said), max(3, height // 4))
        rows += [*_chart(status, width, left), *sample]
        return rows + said[len(said) - max(0, height - len(rows)) :]


def _print_whole(console: RichConsole, text: Text) -> None:
    """Without a newline of ours in it, however long it is."""
    console.print(text, no_wrap=True, overflow="ignore", crop=False)


def _bar(done: float, total: float, status: Status, width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    elapsed = duration(time.monotonic() - status.started)
    bar = ProgressBar(total=total, completed=min(done, total), width=max(10, width - 30))
    table.add_row("  ", bar, f"{done / total:4.0%}", f"after {elapsed}")
    return table


def shortened(text: str, width: int) -> str:
    """With its end cut off where it is too long."""
    width = max(8, width)
    return text if len(text) <= width else text[: width - 1] + "…"


def _chart(status: Status, width: int, height: int) -> list[Text]:
    """The loss as far as it was read, over the rows that are left; of a command that tells none, how many steps it makes."""
    watched = bool(status.told) and len(status.losses) < 2
    values = averaged(status.paces if watched else status.losses, wide_enough(width))
    if len(values) < 2 or not (watched or status.told or status.training):
        return []
    if height < _LEAST_ROWS:
        return [] if status.told else [_curve(status, width)]
    drawn = [Text(row, style="green") for row in chart(values, min(_MOST_ROWS, height - 1))]
    name = "steps a second" if watched else "training loss"
    return [*drawn, _curve(status, width, f"{'':>8} └ {name}")]


def _curve(status: Status, width: int, below: str = "") -> Text:
    """The loss in one row; or what stands below a chart."""
    text = Text(below or "   loss ", style="dim")
    if not below:
        text.append(sparkline(status.losses, max(10, width - 60)), style="green")
    if status.told:
        return text
    if status.val_loss is not None:
        text.append(f"  val {status.val_loss:.3f}", style="cyan")
    if status.floor is not None:
        text.append(f"  floor {status.floor:.3f}", style="dim")
    text.append(f"  lr {status.lr:.2e}  data wait {status.data_wait:.1%}", style="dim")
    if status.durable_age_s is not None:
        text.append(f"  saved {duration(status.durable_age_s)} ago", style="dim")
    text.truncate(max(10, width - 1), overflow="ellipsis")
    return text
