"""The looping pictures of the README (docs/hang.svg, docs/kill.svg), read back: the words of their last screen, and what these claim.

In:  an SVG of benchmarks/recording.py.
Out: an assertion that fails where the picture does not show what the README says of it.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

SCENES = Path(__file__).parents[1] / "benchmarks" / "scenes"
MOST_BYTES = 200_000


def last_screen(svg: str) -> list[str]:
    """The rows of the last frame, from the top."""
    rows = {
        name: "".join(html.unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", content))
        for name, content in re.findall(r'<g id="(r\d+)">(.*?)</g>', svg)
    }
    placed = [(int(x), int(y), rows[name]) for name, x, y in re.findall(r'<use href="#(r\d+)" x="(\d+)" y="(\d+)"/>', svg)]  # fmt: skip
    last = max(x for x, _, _ in placed)
    return [row for x, _, row in sorted(placed) if x == last]


def check_hang(screen: list[str]) -> None:
    """The verdict names the line that waits, by its number in the scene's own script, and items with the bad one among them."""
    lines = (SCENES / "data.py").read_text().splitlines()
    [waits] = [number for number, line in enumerate(lines, start=1) if "link.recv" in line]
    [bad] = [int(line.split("=")[1]) for line in lines if line.startswith("BAD_ITEM")]
    words = "".join(screen)  # the terminal breaks lines wherever they end
    named = re.search(r"(?:waiting|stuck): worker \d has been at \S*data\.py:(\d+) \(ask\) \(item (\d+)\.\.(\d+)\)", words)  # fmt: skip
    assert named, screen
    assert int(named[1]) == waits
    assert int(named[2]) <= bad <= int(named[3])
    assert "next: " in words


def check_kill(screen: list[str]) -> None:
    """Each step that was done twice has one loss, in all its bits; and there are some."""
    pairs = [row.split()[2:] for row in screen if row.startswith("step ")]
    assert len(pairs) >= 3 and all(first == second for first, second in pairs), screen
    told = re.search(r"(\d+) steps were done twice; (\d+) of them are equal to the last bit", "\n".join(screen))
    assert told and int(told[1]) == int(told[2]) >= len(pairs), screen


CHECKS = {"hang": check_hang, "kill": check_kill}
