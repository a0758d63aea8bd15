"""report.html: one run as one file, with its numbers and our own scripts inlined; opens without a server, asks nobody for anything.

In:  a run folder.
Out: HTML of under 2 MB, whatever the length of the run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from lamplighter.dash import facts
from lamplighter.dash.panels import panels_of
from lamplighter.dash.series import RunSeries
from lamplighter.dash.server_answers import plain, points_of, rounded, usd_per_hour
from lamplighter.rundir import RunDir, write_atomic

PAGE = Path(__file__).parent / "page"
_SCRIPTS = ("format", "chart", "source", "runs", "run", "compare", "app")  # each after what it uses
_POINTS = 2000  # of a curve
_MOST_STACKS = 20
_MOST_TEXT = 20_000


def write(run: RunDir) -> Path:
    """report.html in the run's folder."""
    path = run.path / "report.html"
    write_atomic(path, build(run), durable=False)
    return path


def build(run: RunDir, live: bool = False) -> str:
    """The whole file. `live`: it is shown now, and shall say when it has become old."""
    series = RunSeries(run)
    series.update()
    where = facts.RunsDir(0, run.path.parent)
    told = facts.describe(where, run, series)
    told |= {"dir": "", "panels": panels_of(series, told), "live": live, "stale": False}
    price = usd_per_hour(run)
    window = (float("-inf"), float("inf"), _POINTS)
    names = {
        by: [name for panel in told["panels"] if panel.get("by") == by for name in panel["curves"]]
        for by in ("", "wall")
    }
    found = points_of(series, names[""], "step", price, window)
    by_clock = points_of(series, names["wall"], "wall", price, (*window[:2], _wall_points(len(names["wall"]))))
    data = {
        "run": told,
        "curves": found["curves"],
        "by_clock": by_clock["curves"],
        "axes": _axes(series, price),
        "rows": found["rows"],
        "stacks": _stacks(run, told["timeline"]),
    }
    return _page(told["name"], json.dumps(plain(data), separators=(",", ":"), allow_nan=False))


def _wall_points(curves: int) -> int:
    """So many cards and ranks share the room of a few curves."""
    return max(120, min(_POINTS, 12_000 // max(1, curves)))


def _axes(series: RunSeries, price: float) -> dict[str, Any]:
    """The other x of some steps, so that the page can change between them."""
    count = len(series.steps)
    rows = np.unique(np.linspace(0, max(0, count - 1), min(count, _POINTS)).astype(int)) if count else np.empty(0, int)
    kinds = ("step", "tokens", "time", "usd")
    return {kind: rounded(series.x_of(kind, price)[rows], 7) if count else [] for kind in kinds}


def _stacks(run: RunDir, timeline: list[dict[str, Any]]) -> dict[str, str]:
    names = [one["stacks"] for one in timeline if one.get("stacks")][-_MOST_STACKS:]
    found = {name: facts.read_inside(run, "stacks", name) for name in names}
    return {name: text[:_MOST_TEXT] for name, text in found.items() if text}


def _page(title: str, data: str) -> str:
    html = (PAGE / "index.html").read_text()
    style = (PAGE / "style.css").read_text()
    script = "\n".join(_without_modules((PAGE / f"{name}.js").read_text()) for name in _SCRIPTS)
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    html = html.replace('<link rel="stylesheet" href="/page/style.css">', head)
    html = html.replace('<script type="module" src="/page/app.js"></script>', "")
    html = html.replace("<title>Lamplighter</title>", f"<title>{_escaped(title)} - Lamplighter</title>")
    inlined = data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    tail = f'<script type="application/json" id="data">{inlined}</script>\n<script type="module">{script}</script>\n</body>'
    return html.replace("</body>", tail)


def _without_modules(script: str) -> str:
    """Our own scripts are written so that they can stand one after another: one-line imports, names that occur once."""
    script = re.sub(r'^import \{[^}]*\} from "\./\w+\.js";\n', "", script, flags=re.MULTILINE)
    return re.sub(r"^export ", "", script, flags=re.MULTILINE)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _escaped(text: str) -> str:
    import html

    return html.escape(text, quote=True)
