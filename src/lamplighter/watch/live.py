"""The live display of a terminal: a few lines at the bottom that move, with what was said above them.

In:  the status of now.
Out: frames drawn by rich into the console's stream.
"""

from __future__ import annotations

import io
import time

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live as RichLive
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lamplighter.safe_text import clean, safe
from lamplighter.watch.status import Status, alert, duration, sentence, sparkline

_SPINNER = "◐◓◑◒"


class Live:
    """Owns the bottom of the terminal."""

    def __init__(self, stream: io.TextIOBase) -> None:
        self.console = RichConsole(file=stream, force_terminal=True, highlight=False, soft_wrap=False)  # type: ignore[arg-type]
        self.live = RichLive(
            console=self.console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
        )
        self.open = False
        self.frames = 0

    def line(self, text: str, style: str) -> None:
        self.console.print(Text(text, style=style, overflow="fold"))

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
        head = Text(f"{spin} {clean(status.name)} ", style="bold yellow")
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


def _bar(done: float, total: float, status: Status, width: int) -> Table:
    table = Table.grid(padding=(0, 1))
    elapsed = duration(time.monotonic() - status.started)
    left = f"{duration(status.eta_s)} left" if status.eta_s is not None else ""
    bar = ProgressBar(total=total, completed=min(done, total), width=max(10, width - 40))
    table.add_row("  ", bar, f"{done / total:4.0%}", elapsed, left)
    return table


def _curve(status: Status, width: int) -> Text:
    text = Text("   loss ", style="dim")
    text.append(sparkline(status.losses, max(10, width - 60)), style="green")
    if status.val_loss is not None:
        text.append(f"  val {status.val_loss:.3f}", style="cyan")
    if status.floor is not None:
        text.append(f"  floor {status.floor:.3f}", style="dim")
    text.append(f"  lr {status.lr:.2e}  data wait {status.data_wait:.1%}", style="dim")
    if status.durable_age_s is not None:
        text.append(f"  saved {duration(status.durable_age_s)} ago", style="dim")
    text.truncate(max(10, width - 1), overflow="ellipsis")
    return text
