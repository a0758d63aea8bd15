"""The looping pictures of the README: the real commands in a terminal, recorded and written as an animated SVG.

In:  the name of a scene (hang, kill) and the file to write.
Out: an SVG that plays in a browser and on a README page, without a script; the clock in its corner is that of the recording.

Run: .venv/bin/python benchmarks/recording.py hang docs/hang.svg      (needs pyte: pip install 'lamplighter[docs]')

A scene is a list of actions on a shell in a pseudo-terminal. pyte turns what is written there into rows of coloured text. Each
different row is stored once; a frame places rows, and CSS moves a strip of frames past a window. Where waiting is dull (importing
torch), a scene plays faster, and the clock shows it.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCENES = Path(__file__).parent / "scenes"
COLUMNS, ROWS = 104, 16
CELL_W, CELL_H, MARGIN, TITLE = 8.2, 18.0, 14.0, 34.0
STRIDE = 1000  # from one frame of a strip to the next; wider than the window
FRAME_S, CLOCK_S = 0.125, 0.25
COLOURS = {
    "default": "#d5dae0", "black": "#56606b", "red": "#ff7b72", "green": "#7ee787", "brown": "#f2cc60", "blue": "#79c0ff",
    "magenta": "#d2a8ff", "cyan": "#76e3ea", "white": "#f0f3f6",
}  # fmt: skip
Run = tuple[int, str, str, bool]  # column, text, colour, bold
Row = tuple[Run, ...]


@dataclass
class Strip:
    """What is shown when: (seconds of the film, content), each until the next one."""

    items: list[tuple[float, object]] = field(default_factory=list)

    def add(self, at: float, what: object) -> None:
        if not self.items or self.items[-1][1] != what:
            self.items.append((at, what))


class Recorder:
    """A shell in a pseudo-terminal, and three strips: the screen, the clock and the caption."""

    def __init__(self, folder: Path) -> None:
        import pyte

        self.screen = pyte.Screen(COLUMNS, ROWS)
        self.stream = pyte.ByteStream(self.screen)
        self.frames, self.clock, self.captions = Strip(), Strip(), Strip()
        self.text, self.film_s, self.real_s, self.speed = "", 0.0, 0.0, 1.0
        self.folder = folder
        self.pid, self.master = _shell(folder)
        self.last = time.monotonic()
        self.wait(lambda: "$ " in self.text, 10)
        self.clock.items.clear()
        self.frames.items.clear()
        self.film_s = self.real_s = 0.0

    def play(self, seconds: float) -> None:
        """Let the shell write for so long, and take frames."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            ready, _, _ = select.select([self.master], [], [], FRAME_S / 4)
            if ready:
                data = os.read(self.master, 65536)
                self.text += data.decode(errors="replace")
                self.stream.feed(data)
            now = time.monotonic()
            self.real_s += now - self.last
            self.film_s += (now - self.last) / self.speed
            self.last = now
            if not self.frames.items or self.film_s - self.frames.items[-1][0] >= FRAME_S:
                self.frames.add(self.film_s, _rows(self.screen))
            faster = f"  x{self.speed:.0f}" if self.speed > 1 else ""
            self.clock.add(self.film_s, f"{int(self.real_s / CLOCK_S) * CLOCK_S:.1f} s{faster}")

    def wait(self, condition: Callable[[], bool], deadline_s: float = 90.0) -> None:
        until = time.monotonic() + deadline_s
        while not condition():
            if time.monotonic() > until:
                raise SystemExit(f"nothing came of it within {deadline_s:.0f} s: {self.text[-2000:]}")
            self.play(FRAME_S)

    def wait_for_text(self, pattern: str, deadline_s: float = 90.0) -> None:
        seen = len(self.text)
        self.wait(lambda: re.search(pattern, self.text[seen:]) is not None, deadline_s)

    def type(self, words: str) -> None:
        for letter in words:
            os.write(self.master, letter.encode())
            self.play(0.03)
        self.play(0.3)
        os.write(self.master, b"\n")

    def caption(self, text: str) -> None:
        self.captions.add(self.film_s, text)


def _shell(folder: Path) -> tuple[int, int]:
    (folder / ".inputrc").write_text("set enable-bracketed-paste off\n")
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(folder)
        environment = {
            "PATH": f"{ROOT / '.venv/bin'}:/usr/bin:/bin", "TERM": "xterm-256color", "PS1": "$ ", "LANG": "C.UTF-8",
            "HOME": str(folder), "INPUTRC": str(folder / ".inputrc"), "HISTFILE": "",
        }  # fmt: skip
        os.execve("/bin/bash", ["bash", "--norc", "--noprofile", "-i"], environment)
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    return pid, master


def _rows(screen: object) -> tuple[Row, ...]:
    return tuple(_row(screen.buffer[number]) for number in range(ROWS))  # type: ignore[attr-defined]


def _row(cells: object) -> Row:
    """Neighbours of one colour are one run; blanks at its ends are not drawn."""
    runs: list[Run] = []
    for column in range(COLUMNS):
        cell = cells[column]  # type: ignore[index]
        colour = COLOURS.get(cell.fg, f"#{cell.fg}" if re.fullmatch("[0-9a-f]{6}", cell.fg) else COLOURS["default"])
        if runs and runs[-1][2:] == (colour, cell.bold) and runs[-1][0] + len(runs[-1][1]) == column:
            runs[-1] = (runs[-1][0], runs[-1][1] + cell.data, colour, cell.bold)
        else:
            runs.append((column, cell.data, colour, cell.bold))
    return tuple((at, text.rstrip(), colour, bold) for at, text, colour, bold in runs if text.strip())


# ---------------------------------------------------------------- the scenes


def hang(recorder: Recorder) -> None:
    """A DataLoader's worker waits for a server that never answers; `lamp watch` names the line."""
    recorder.caption("an ordinary script, unchanged")
    recorder.type("lamp watch -- python train.py")
    recorder.speed = 4.0
    recorder.wait_for_text(r"step +10 ")
    recorder.speed = 1.0
    recorder.wait_for_text(r"waiting for (worker|a batch)")
    recorder.caption("a worker of its DataLoader has stopped answering")
    recorder.wait_for_text(r"(stuck|waiting): worker")
    recorder.caption("named: the worker, the line, the item, and who waits for it")
    recorder.play(5.0)


def kill(recorder: Recorder) -> None:
    """A training run is killed; the same command goes on, and every step that is done twice has the same loss."""
    run = recorder.folder / "runs" / "letters"
    recorder.caption("a small model, saved every 50 steps")
    recorder.type("lamp train letters.yaml")
    recorder.speed = 4.0
    recorder.wait(lambda: _step(run) >= 1)
    recorder.speed = 1.0
    recorder.wait(lambda: _step(run) >= 92)
    pids = _pids(run)
    recorder.caption(f"another terminal: kill -9 {' '.join(map(str, pids))}")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    recorder.play(1.5)
    reached = _step(run)  # on a fast machine well beyond
    began = recorder.real_s
    recorder.caption("the same command again")
    recorder.type("lamp train letters.yaml")
    recorder.wait(lambda: _attempts(run) == 2)
    recorder.caption(f"the next step, {recorder.real_s - began:.1f} s after the command")
    recorder.wait(lambda: _step(run) >= reached + 4)
    os.kill(_pids(run)[0], signal.SIGINT)
    recorder.wait_for_text(r"\$ $", 30)
    recorder.caption("steps that were done twice: each loss equal to the last bit")
    recorder.type("clear")
    recorder.type("python redone.py runs/letters")
    recorder.wait_for_text(r"done twice")
    recorder.play(5.0)


def _metrics(run: Path) -> list[dict[str, float]]:
    try:
        text = (run / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines() if "train/loss" in line and line.endswith("}")]


def _step(run: Path) -> int:
    return int(max((record["step"] for record in _metrics(run)), default=0))


def _attempts(run: Path) -> int:
    return len({record["attempt"] for record in _metrics(run)})


def _pids(run: Path) -> list[int]:
    """The parent and the training process."""
    status = json.loads((run / "status.json").read_text())
    return [int(status["pid"]), int(status["child_pid"])]


# ---------------------------------------------------------------- the SVG


def svg(recorder: Recorder, title: str) -> str:
    width, height = COLUMNS * CELL_W + 2 * MARGIN, TITLE + ROWS * CELL_H + MARGIN
    total = recorder.film_s
    rows: dict[Row, str] = {}
    frames = [_frame(number, content, rows) for number, (_, content) in enumerate(recorder.frames.items)]  # type: ignore[arg-type]
    defs = [f'<g id="{name}">{"".join(map(_text, row))}</g>' for row, name in rows.items()]
    clocks = _words(recorder.clock, width - MARGIN, "end", "#8b949e")
    captions = _words(recorder.captions, width / 2, "middle", "#f2cc60")
    styles = [
        _film("screen", recorder.frames, total),
        _film("clock", recorder.clock, total),
        _film("caption", recorder.captions, total),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img">'
        f"<title>{html.escape(title)}</title>"
        f"<style>text{{font:13.6px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre}}{''.join(styles)}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#0d1117"/><rect width="100%" height="{TITLE - 8:.0f}" rx="8" fill="#161b22"/>'
        + "".join(f'<circle cx="{16 + 18 * n}" cy="13" r="5" fill="{c}"/>' for n, c in enumerate(("#ff7b72", "#f2cc60", "#7ee787")))
        + f'<defs>{"".join(defs)}</defs>'
        f'<g class="clock">{clocks}</g><g class="caption">{captions}</g>'
        f'<svg x="{MARGIN}" y="{TITLE}" width="{COLUMNS * CELL_W}" height="{ROWS * CELL_H}"><g class="screen">{"".join(frames)}</g></svg>'
        "</svg>\n"
    )  # fmt: skip


def _frame(number: int, content: tuple[Row, ...], rows: dict[Row, str]) -> str:
    places = []
    for line, row in enumerate(content):
        if row:
            name = rows.setdefault(row, f"r{len(rows)}")
            places.append(f'<use href="#{name}" x="{number * STRIDE}" y="{line * CELL_H:.0f}"/>')
    return "".join(places)


def _text(run: Run) -> str:
    at, text, colour, bold = run
    weight = ' font-weight="bold"' if bold else ""
    length = f' textLength="{len(text) * CELL_W:.1f}"' if len(text) > 1 else ""
    return f'<text x="{at * CELL_W:.1f}" y="14" fill="{colour}"{weight}{length}>{html.escape(text)}</text>'


def _words(strip: Strip, x: float, anchor: str, colour: str) -> str:
    """One text per item, each a stride further to the right than the one before."""
    return "".join(
        f'<text x="{x + number * STRIDE:.0f}" y="18" text-anchor="{anchor}" fill="{colour}">{html.escape(str(text))}</text>'
        for number, (_, text) in enumerate(strip.items)
    )


def _film(name: str, strip: Strip, total: float) -> str:
    keys = [
        f"{100 * at / total:.3f}%{{transform:translateX({-number * STRIDE}px)}}"
        for number, (at, _) in enumerate(strip.items)
    ]
    if strip.items[0][0] > 0:
        keys.insert(0, "0%{transform:translateX(0)}")
    last = f"transform:translateX({-(len(strip.items) - 1) * STRIDE}px)"
    moving = f".{name}{{animation:{name} {total:.2f}s step-end infinite;{last}}}"  # the last frame, where nothing moves
    still = f"@media(prefers-reduced-motion:reduce){{.{name}{{animation:none}}}}"
    return f"@keyframes {name}{{{''.join(keys)}100%{{{last}}}}}{moving}{still}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scene", choices=("hang", "kill"))
    parser.add_argument("out", type=Path)
    wanted = parser.parse_args()
    scene = {"hang": hang, "kill": kill}[wanted.scene]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "reviews"
        folder.mkdir()
        for path in SCENES.iterdir():
            if path.is_file():
                shutil.copy(path, folder)
        recorder = Recorder(folder)
        try:
            scene(recorder)
        finally:
            os.kill(recorder.pid, signal.SIGHUP)
            os.close(recorder.master)
            time.sleep(1)  # its children leave before their folder does
    wanted.out.write_text(svg(recorder, (scene.__doc__ or "").strip()))
    size = wanted.out.stat().st_size / 1000
    print(f"{wanted.out}: {len(recorder.frames.items)} frames, {recorder.film_s:.0f} s, {size:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main()
