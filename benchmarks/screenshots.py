"""The pictures of docs/dash.md, docs/evaluation.md and of the README, from real runs, in a real browser.

In:  a folder with the runs `foggy` and `narrow`, evaluated; without one they are trained and evaluated, which takes some minutes.
Out: docs/dash.jpg, docs/compare.jpg, docs/dash_phone.jpg, docs/evaluation.jpg.

    python benchmarks/screenshots.py [FOLDER]
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
LAMP = [sys.executable, "-m", "lamplighter"]
RUNS = {"foggy": "", "narrow": "--model.width 64 --model.heads 2"}
COMMON = "--preset demo --budget.usd_per_hour 0.6 --eval.every_steps 10 --train.steps 240"
SHOTS = (
    ("dash.jpg", "#/run/0%2Ffoggy", 1280, 900, "dark", 72),
    ("compare.jpg", "#/compare/0%2Ffoggy|0%2Fnarrow", 1280, 900, "light", 70),
    ("dash_phone.jpg", "#/run/0%2Ffoggy", 390, 844, "light", 72),
)
SCORES = ("evaluation.jpg", "#/run/0%2Ffoggy", 1000, 4500, "light", 78)  # of that page, the table alone


def main() -> None:
    if sys.argv[1:]:
        _serve(Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as place:
        for name, more in RUNS.items():
            words = [*LAMP, "train", "--run", name, *COMMON.split(), *more.split()]
            subprocess.run(words, cwd=place, check=True, stdout=subprocess.DEVNULL)
        asked = [*LAMP, "eval", "foggy", "--checkpoint", "all", "--tasks", "held-back,period"]
        subprocess.run(asked, cwd=place, check=True, stdout=subprocess.DEVNULL)
        _serve(Path(place))


def _serve(folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    log = folder / "dash.txt"
    with open(log, "w") as out:
        server = subprocess.Popen([*LAMP, "dash", "--port", "0"], cwd=folder, stdout=out, stderr=out)
    try:
        while not (found := re.search(r"open (http://\S+)", log.read_text())):
            time.sleep(0.05)
        with sync_playwright() as playwright:
            _shoot(playwright, found[1])
    finally:
        server.terminate()
        server.wait()


def _shoot(playwright: Any, address: str) -> None:
    browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
    for name, where, width, height, scheme, quality in (*SHOTS, SCORES):
        page = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme).new_page()
        page.goto(address + where)
        page.wait_for_selector(".plot canvas")
        page.wait_for_timeout(1500)
        shown = page.locator("#part-scores") if name == SCORES[0] else page
        shown.screenshot(path=str(DOCS / name), type="jpeg", quality=quality)
        print(f"{DOCS / name}: {(DOCS / name).stat().st_size / 1e3:.0f} kB")
    browser.close()


if __name__ == "__main__":
    main()
