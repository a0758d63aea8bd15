"""The live display of a terminal: a few lines at the bottom that move, with what was said above them.

In:  the picture of now.
Out: frames drawn by rich into the console's stream.
"""

from __future__ import annotations

import io
import time

from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lamplighter.watch.status import Status, alert, duration, sentence, sparkline

SPINNER = "◐◓◑◒"


class Live:
    """Owns the bottom of the terminal."""

    def __init__(self, stream: io.TextIOBase) -> None:
        self.console = Console(file=stream, force_terminal=True, highlight=False, soft_wrap=False)  # type: ignore[arg-type]
        self.live = RichLive(
            console=self.console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self.open = False
        self.frames = 0

    def line(self, text: str, style: str) -> None:
        self.console.print(Text(text, style=style, overflow="fold"))

    def frame(self, picture: Status) -> None:
        if not self.open:
            self.live.start()
            self.open = True
        self.frames += 1
        self.live.update(self._draw(picture), refresh=True)

    def close(self) -> None:
        if self.open:
            self.live.stop()
            self.open = False

    def _draw(self, picture: Status) -> Group:
        width = self.console.width
        spin = SPINNER[self.frames % len(SPINNER)]
        head = Text(f"{spin} {picture.name} ", style="bold yellow")
        head.append(sentence(picture), style="default")
        head.truncate(max(10, width - 1), overflow="ellipsis")
        rows: list[object] = [head]
        if warning := alert(picture):
            rows.append(Text(f"  {warning}", style="bold yellow", overflow="fold"))
        slot = picture.slot
        if slot is not None:
            training = picture.training and slot.steps > 0
            total = float(slot.steps) if training else slot.total
            done = float(slot.step) if training else slot.done
            if total > 0:
                rows.append(_bar(done, total, picture, width))
        if picture.training and len(picture.losses) > 1:
            rows.append(_curve(picture, width))
        return Group(*rows)  # type: ignore[arg-type]


def _bar(done: float, total: float, picture: Status, width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    elapsed = duration(time.monotonic() - picture.started)
    left = f"{duration(picture.eta_s)} left" if picture.eta_s is not None else ""
    bar = ProgressBar(total=total, completed=min(done, total), width=max(10, width - 40))
    table.add_row("  ", bar, f"{done / total:4.0%}", elapsed, left)
    return table


def _curve(picture: Status, width: int) -> Text:
    text = Text("   loss ", style="dim")
    text.append(sparkline(picture.losses, max(10, width - 60)), style="green")
    if picture.val_loss is not None:
        text.append(f"  val {picture.val_loss:.3f}", style="cyan")
    if picture.floor is not None:
        text.append(f"  floor {picture.floor:.3f}", style="dim")
    text.append(f"  lr {picture.lr:.2e}  data wait {picture.data_wait:.1%}", style="dim")
    if picture.durable_age_s is not None:
        text.append(f"  saved {duration(picture.durable_age_s)} ago", style="dim")
    text.truncate(max(10, width - 1), overflow="ellipsis")
    return text
