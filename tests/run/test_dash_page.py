"""The page in a real browser: live steps, overlays, verdicts with stacks, stop by a button, damage, hostile words, foreign pages."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import lamplighter
from lamplighter import rundir
from lamplighter.dash import report_page
from lamplighter.errors import InputMissing
from lamplighter.procs.lock import hold
from lamplighter.rundir import RunDir, read_last_lines, read_status
from running import LAMP, clean_env, wait_for, write_model
from tracked import write_cards, write_evaluation, write_killed_run

CHROMIUM = Path("/usr/bin/chromium")
HOSTILE = '<img src=x onerror="window.hacked=1">'
WIDTHS = (380, 1000, 1600)


@dataclass
class Look:
    """A server over a folder of runs, and a browser's page that notes what should not be."""

    address: str
    folder: Path
    page: Any = None
    faults: list[str] = field(default_factory=list)

    def open(self, where: str = "") -> Any:
        self.page.goto("about:blank")
        self.page.goto(self.address + where)
        return self.page


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    in_ci = os.environ.get("CI") == "true"
    if not CHROMIUM.exists():
        if in_ci:
            pytest.fail("there is no chromium: the page is not tested")
        pytest.skip("there is no chromium here")
    if in_ci and importlib.util.find_spec("playwright") is None:
        pytest.fail("there is no playwright: the page is not tested")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-background-networking"]
        )
        yield started
        started.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Look]:
    """Finished, damaged and hostile runs, one with a verdict and its stacks, and a live one that takes its time."""
    folder = tmp_path_factory.mktemp("dash")
    runs = folder / "runs"
    write_evaluation(write_killed_run(runs / "first"), 40)  # beside one of step 100
    write_cards(write_killed_run(runs / "second", steps=300, kills=2), cards=4)
    long = RunDir(runs / "long")
    long.create()
    long.events.touch()
    with open(long.metrics, "w") as file:
        for step in range(1, 20_001):
            loss = 77.0 if step == 12_345 else 4.0 / (1 + step / 5000)
            file.write(
                f'{{"step": {step}, "attempt": 1, "t": {1.7e9 + step!r}, "train/loss": {loss}, "train/dt_ms": 9.5}}\n'
            )
    (runs / "broken").mkdir()
    (runs / "broken" / "events.jsonl").write_text('{"type":"start","t":1}\n')
    (runs / "broken" / "status.json").write_text('{"state": [1')
    _write_hostile(runs)
    for name in ("quiet", "dead"):  # both say that they run, and one of them is held by somebody
        silent = write_killed_run(runs / name, steps=40, kills=1)
        silent.status.write_text(json.dumps({"state": "running", "step": 40, "steps": 90, "t": 1.7e9, "format": 1}))
        silent.lock.touch()
    told = json.loads((runs / "dead" / "status.json").read_text())
    (runs / "dead" / "status.json").write_text(json.dumps({**told, "durable_step": 40, "mirrored_step": 30}))
    write_killed_run(folder / "archive" / "first", steps=60, kills=1)
    held = hold(runs / "quiet" / "lock")
    assert held is not None
    slow = write_model(folder, "time.sleep(0.05)")
    words = ["train", "--run", "live", "--model.family", slow, "--model.width", "8", "--model.heads", "2", "--data.embedded_documents", "300",
             "--tokenizer.vocab_size", "300", "--data.seq_len", "16", "--train.batch_size", "2", "--train.steps", "5000", "--train.threads", "1",
             "--eval.every_steps", "100", "--eval.sample_every_steps", "0", "--train.dtype", "fp32"]  # fmt: skip
    with open(folder / "live.txt", "w") as out:
        live = subprocess.Popen([*LAMP, *words], cwd=folder, stdout=out, stderr=out, env=clean_env())
    log = folder / "dash.txt"
    with open(log, "w") as out:
        server = subprocess.Popen(
            [*LAMP, "dash", "--runs-dir", "runs", "--runs-dir", "archive", "--port", "0"],
            cwd=folder,
            stdout=out,
            stderr=out,
            env=clean_env(),
        )
    try:
        found = wait_for(lambda: re.search(r"open (http://\S+)", log.read_text()), process=server)
        assert "ssh -L" in log.read_text()
        wait_for(lambda: (read_status(RunDir(runs / "live")).get("step") or 0) > 3, process=live, deadline_s=150)
        yield Look(found[1], folder)
        server.send_signal(signal.SIGINT)
        assert server.wait(15) == 0, "Ctrl+C ends the page"
    finally:
        os.close(held)
        for process in (server, live):
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in (server, live):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _write_hostile(runs: Path) -> None:
    run = write_killed_run(runs / HOSTILE.replace("/", ""), steps=30, kills=1)
    name = "20260101-000000-why.txt"
    (run.stacks / name).write_text(f"Thread 1 waits in lock.py:12 {HOSTILE}")
    events = [
        {"type": "verdict", "t": 1.7e9 + 20, "state": "stuck", "cause": "deadlock", "why": f"a waits for b {HOSTILE}", "next": "</script><script>window.hacked=2</script>", "kept": str(run.stacks / name)},
        {"type": "sample", "t": 1.7e9 + 21, "step": 20, "text": f"{HOSTILE}\u202e\x1b[31m<svg onload=window.hacked=3>"},
        {"type": "checkpoint", "t": 1.7e9 + 22, "step": 20, "path": "x", "bytes": 1, "seconds": 1},
    ]  # fmt: skip
    with open(run.events, "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    run.status.write_text(
        json.dumps({"state": HOSTILE, "step": 30, "now": HOSTILE, "outcome": HOSTILE, "phase": HOSTILE, "format": 1})
    )
    (run.path / "plan.json").write_text(json.dumps({"params": 10, HOSTILE: HOSTILE}))


@pytest.fixture
def look(served: Look, browser: Any) -> Iterator[Look]:
    """A fresh page; whatever it asks elsewhere, says on its console or shows as a dialog is a fault."""
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page, faults = context.new_page(), []
    page.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
    page.on(
        "request",
        lambda request: (
            None if request.url.startswith((served.address, "about:", "data:")) else faults.append(request.url)
        ),
    )
    yield Look(served.address, served.folder, page, faults)
    assert not faults
    assert page.evaluate("window.hacked") is None
    context.close()


def _until(page: Any, condition: str, timeout: float = 15_000) -> None:
    """The page's policy forbids what playwright's own wait does (eval): so it is asked again and again from here."""
    deadline = time.monotonic() + timeout / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        time.sleep(0.01)


def _key(name: str) -> str:
    from urllib.parse import quote

    return quote(f"0/{name}", safe="")


def _shown_step(look: Look) -> int:
    text = look.page.locator("#step").inner_text().split("/")[0]
    return int(re.sub(r"\D", "", text) or 0)


WATCH_STEP = """() => {
  window.seen = [];
  const look = () => window.seen.push([Date.now() / 1000, Number(document.querySelector('#step').textContent.split('/')[0].replace(/\\D/g, ''))]);
  new MutationObserver(look).observe(document.querySelector('#part-tiles'), { childList: true, subtree: true, characterData: true });
}"""


def test_a_new_step_is_on_the_page_within_a_second(look: Look) -> None:
    """By the time that stands in its record, and the browser's clock when the page first shows it or a later one."""
    run = RunDir(look.folder / "runs" / "live")
    page = look.open(f"#/run/{_key('live')}")
    page.wait_for_selector("#step")
    first = wait_for(lambda: _shown_step(look))
    page.evaluate(WATCH_STEP)
    wait_for(lambda: page.wait_for_timeout(50) or _shown_step(look) >= first + 34)
    seen = page.evaluate("window.seen")
    written = {one["step"]: one["t"] for one in read_last_lines(run.metrics, 1 << 16) if "train/loss" in one}
    lags = sorted(
        min(at for at, step in seen if step >= wanted) - written[wanted] for wanted in range(first + 4, first + 30)
    )
    assert lags[len(lags) // 2] < 1.0 and lags[0] > 0, f"seconds until a step was on the page: {lags}"
    assert page.locator(".badge").first.inner_text() == "live"
    assert "newest point" in page.locator("#age").inner_text()


def test_a_run_that_says_nothing_is_stale_and_a_dead_one_never_looks_live(look: Look) -> None:
    badge, age = look.page.locator(".badge").first, look.page.locator("#age")
    page = look.open(f"#/run/{_key('quiet')}")
    page.wait_for_selector("#step")
    assert badge.inner_text() == "stale" and age.inner_text().endswith("stale")
    assert page.locator("#do-stop").is_enabled()
    status = RunDir(look.folder / "runs" / "quiet").status
    told = json.loads(status.read_text())
    now, left = page.locator(".tile").first, page.locator(".tile", has_text="Time left")
    assert "no word" in now.inner_text() and "–" in left.inner_text()
    status.write_text(json.dumps({**told, "stall": "stuck: process 7 is stopped by a signal", "phase": "train", "eta_s": 99.0, "t": time.time()}))  # fmt: skip
    _until(page, "document.querySelector('.tile').textContent.includes('process 7 is stopped')")
    assert "stalled" in now.inner_text() and "–" in left.inner_text()
    status.write_text(json.dumps(told))
    look.open(f"#/run/{_key('dead')}")
    _until(page, "document.querySelector('h1')?.textContent === 'dead'")
    assert badge.inner_text() == "lost" and "This run is dead" in page.locator("#part-flags").inner_text()
    assert all(page.locator(f"#do-{kind}").is_disabled() for kind in ("why", "save", "stop"))
    assert "old" in age.inner_text()
    mirrored = page.locator(".tile", has_text="Mirrored to step").inner_text()
    assert "30" in mirrored and "10 steps behind" in mirrored
    look.open()
    page.wait_for_selector("tbody tr")
    words = {name: page.locator("tbody tr", has=page.get_by_role("link", name=name, exact=True)).inner_text() for name in ("quiet", "dead")}  # fmt: skip
    assert "stale" in words["quiet"] and "lost" in words["dead"] and "live" not in words["quiet"] + words["dead"]
    happened = look.open(f"#/run/{_key('first')}").locator("#part-time li")
    happened.first.wait_for()
    scores = page.locator("#part-scores tbody tr").all_inner_texts()
    assert len(scores) == 1 and "100" in scores[0] and "0.31 (40)" in scores[0], (
        "the newest, and before it the older one"
    )
    times = happened.locator(".when").all_inner_texts()
    assert len(times) == 2 and "stuck: deadlock" in happened.first.inner_text(), "newest first"


def test_runs_are_listed_sorted_searched_and_drawn_over_each_other(look: Look) -> None:
    page = look.open()
    page.wait_for_selector("tbody tr:nth-child(5)")
    names = page.locator("tbody a").all_inner_texts()
    assert {"first", "second", "long", "broken", "live"} <= set(names)
    _until(page, "[...window.lampView.shared.charts][0].curves.length >= 2")
    page.get_by_label("Search runs").fill("seco")
    assert page.locator("tbody a").all_inner_texts() == ["second"]
    page.get_by_label("Search runs").fill("no such run")
    assert "No run is like that" in page.locator("tbody").inner_text()
    page.get_by_label("Search runs").fill("")
    page.get_by_role("button", name=re.compile("^Run")).click()
    ordered = page.locator("tbody a").all_inner_texts()
    assert ordered == sorted(ordered)
    page.goto(f"{look.address}#/compare/{_key('first')}|{_key('second')}")
    page.wait_for_selector("#compared")
    assert "Recommendation" in page.locator("main").inner_text()
    _until(page, "[...window.lampView.shared.charts][0].curves.length === 2")


def test_runs_of_one_name_in_two_folders_are_told_apart(look: Look) -> None:
    page = look.open()
    page.wait_for_selector("tbody tr:nth-child(5)")
    both = page.locator("tbody tr", has=page.get_by_role("link", name="first", exact=True))
    assert sorted(one.locator(".soft").first.inner_text().strip() for one in both.all()) == ["archive", "runs"]
    look.open(f"#/compare/{_key('first')}|{_key('first').replace('0', '1', 1)}")
    page.wait_for_selector("#compared")
    legend = page.locator(".legend").first.inner_text()
    assert "first (runs)" in legend and "first (archive)" in legend
    assert "first (archive)" in page.locator("#compared thead").first.inner_text()


def test_an_axis_has_two_numbers_at_least(look: Look) -> None:
    """At the width of a phone too, where there is room for three."""
    page = look.open()
    code = "async () => { const { ticks } = await import('/page/chart.js'); return [[1, 399], [1, 343], [0, 1], [600, 880000], [0.3, 0.301]].map(([low, high]) => ticks(low, high, 3).length); }"
    assert all(2 <= count <= 8 for count in page.evaluate(code)), page.evaluate(code)


def test_a_verdict_is_shown_with_its_stack_and_hostile_words_are_inert(look: Look) -> None:
    page = look.open(f"#/run/{_key(HOSTILE.replace('/', ''))}")
    page.wait_for_selector(".verdict")
    assert "why: a waits for b <img" in page.locator(".verdict").first.inner_text()
    page.locator(".verdict summary").first.click()
    _until(page, "document.querySelector('.verdict pre')?.textContent.includes('lock.py:12')")
    assert "<svg onload" in page.locator("#part-samples pre").inner_text()
    assert page.locator("main img, main svg, main script, main iframe").count() == 0


def test_a_damaged_run_is_shown_as_such_and_a_missing_one_too(look: Look) -> None:
    page = look.open()
    page.wait_for_selector("tbody tr")
    row = page.locator("tbody tr", has_text="broken")
    assert "damaged" in row.inner_text() and "status.json is damaged" in row.inner_text()
    row.locator("a").click()
    page.wait_for_selector(".flag")
    assert (
        "This run is damaged" in page.locator("main").inner_text()
        and "No numbers yet" in page.locator("main").inner_text()
    )


def test_at_most_4000_points_a_panel_and_a_zoom_keeps_the_extremes(look: Look) -> None:
    page = look.open(f"#/run/{_key('long')}")
    _until(page, "[...(window.lampView?.shared?.charts || [])][0]?.curves[0]?.x.length > 100")
    chart = "[...window.lampView.shared.charts][0]"
    assert page.evaluate(f"{chart}.curves[0].x.length") <= 4000
    assert page.evaluate(f"Math.max(...{chart}.curves[0].y)") == 77
    page.evaluate("window.lampView.shared.zoom([12000, 13000])")
    _until(page, f"{chart}.curves[0].x.length === 1001")
    assert page.evaluate(f"Math.max(...{chart}.curves[0].y)") == 77
    box = page.locator(".plot canvas >> nth=1").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + 400, box["y"] + 60)
    page.mouse.up()
    _until(page, "window.lampView.shared.range[1] - window.lampView.shared.range[0] < 900")
    page.locator(".plot canvas >> nth=1").focus()
    before = page.evaluate("window.lampView.shared.range")
    page.keyboard.press("Shift+ArrowRight")
    _until(page, f"window.lampView.shared.range[0] > {before[0]} && window.lampView.shared.range[1] > {before[1]}")
    page.keyboard.press("Home")
    _until(page, "window.lampView.shared.range === null")
    page.get_by_label("Log x").check()
    _until(page, f"{chart}.at.logX && {chart}.at.x0 === 1 && {chart}.px(100) - {chart}.px(10) > 100")
    page.locator(".plot canvas >> nth=1").press("ArrowRight")
    assert 1 < page.evaluate("window.lampView.shared.hover") < 20_000


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_jumps_and_nothing_is_cut_off(look: Look, width: int) -> None:
    page = look.page
    page.set_viewport_size({"width": width, "height": 900})
    page.add_init_script(
        "window.shift = 0; new PerformanceObserver((list) => { for (const one of list.getEntries()) if (!one.hadRecentInput) window.shift += one.value; }).observe({ type: 'layout-shift', buffered: true });"
    )
    for where in ("", f"#/run/{_key('first')}", f"#/compare/{_key('first')}|{_key('second')}"):
        look.open(where)
        _until(page, "[...(window.lampView?.shared?.charts || [])][0]?.curves.length > 0")
        page.wait_for_timeout(100)  # some frames more
        assert page.evaluate("window.shift") < 0.1, where
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), where
        cut = "[...document.querySelectorAll('.tile b')].filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"
        assert page.evaluate(cut) == [], "the main value of a tile"
        thin = "[...document.querySelectorAll('.scroll td.name')].filter((one) => one.clientWidth < 80).map((one) => one.textContent)"
        assert page.evaluate(thin) == [], "a first column that breaks letter by letter"


def test_the_cards_are_seen_with_what_slowed_them_down_and_what_the_driver_told(look: Look) -> None:
    page = look.open(f"#/run/{_key('second')}")
    page.wait_for_selector("#part-cards .plot")
    words = page.locator("#part-cards").inner_text()
    assert all(
        title in words for title in ("GPU utilisation", "GPU memory", "GPU power", "GPU temperature", "GPU clock")
    )
    last = page.locator("#part-cards tbody tr").last.inner_text()
    assert "3 NVIDIA H100" in last and "too hot (driver) 58 s" in last and "61.5 of 80 GB" in last
    charts = "[...window.lampView.wall.charts]"
    _until(page, f"{charts}.find((one) => one.options.title === 'GPU clock')?.curves.length === 4")
    assert page.evaluate(f"{charts}.find((one) => one.options.title === 'GPU clock').bands.length") == 1
    assert "Xid 63 · waste: rows_remapped" in page.evaluate(f"{charts}[0].moments.map((one) => one.label)")
    assert "stuck: deadlock" in page.evaluate("[...window.lampView.shared.charts][0].moments.map((one) => one.label)")
    canvas = page.locator("#part-cards .plot canvas >> nth=1")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 60)
    page.keyboard.down("Shift")
    page.mouse.down()
    page.mouse.move(box["x"] + 100, box["y"] + 60, steps=5)
    moved = page.evaluate("window.lampView.wall.range")
    assert moved and moved[0] > 0, "it moves with the hand, before it is let go"
    page.mouse.up()
    page.keyboard.up("Shift")
    assert page.evaluate("window.lampView.shared.range") is None, "the other axis stays where it was"


def test_report_html_opens_by_itself(look: Look, browser: Any, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(report_page.build(RunDir(look.folder / "runs" / HOSTILE.replace("/", ""))))
    page, faults = browser.new_page(), []
    page.on("console", lambda message: faults.append(message.text))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "request",
        lambda request: faults.append(request.url) if not request.url.startswith(("file://", "data:")) else None,
    )
    page.goto(f"file://{tmp_path / 'report.html'}")
    _until(page, "[...window.lampView.shared.charts][0].curves[0].x.length === 30")
    assert not faults and page.evaluate("window.hacked") is None
    page.close()


def test_a_notebook_shows_the_panels_of_a_run(look: Look, browser: Any) -> None:
    """In a frame of its own that can reach nothing: neither the notebook nor the network."""
    shown = lamplighter.show(str(look.folder / "runs" / "first"))
    page, faults = browser.new_page(), []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: faults.append(request.url) if request.url.startswith("http") else None)
    page.set_content(shown._repr_html_())
    frame = page.frames[1]
    frame.wait_for_selector("#step")
    _until(frame, "[...window.lampView.shared.charts][0].curves[0].x.length === 400")
    assert frame.locator("h1").inner_text() == "first" and frame.locator("#do-stop").count() == 0
    assert not faults
    page.close()
    with pytest.raises(InputMissing, match="no run elsewhere"):
        lamplighter.show("elsewhere")


def test_a_notebook_follows_a_run_that_goes_on(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    """By IPython's own way to renew what is displayed; IPython itself is stood in for."""
    shown: list[str] = []
    handle = types.SimpleNamespace(update=shown.append)
    module = types.SimpleNamespace(HTML=str, display=lambda page, display_id: shown.append(page) or handle)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=module))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    lamplighter.show(str(look.folder / "runs" / "live"), every_s=0.3)._ipython_display_()

    def rows(page: str) -> int:
        return int(re.findall(r"&quot;rows&quot;:(\d+)", page)[-1])

    wait_for(lambda: rows(shown[-1]) > rows(shown[0]) > 0)
    assert "&quot;live&quot;:true" in shown[-1]
    monkeypatch.setattr(rundir, "is_running", lambda _: False)
    wait_for(lambda: not [one for one in threading.enumerate() if one.name == "lamp-show"])
    assert "&quot;live&quot;:false" in shown[-1], "the last picture shows the end, and nothing is made after it"


def _ask(look: Look, path: str, method: str = "GET", **headers: str) -> int:
    request = urllib.request.Request(
        look.address + path, method=method, headers={name.replace("_", "-"): value for name, value in headers.items()}
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def test_foreign_hosts_and_pages_are_refused_and_nothing_is_done_by_get(served: Look) -> None:
    assert _ask(served, "api/runs") == 200
    assert _ask(served, "api/runs", Host="evil.example") == 421
    assert _ask(served, "api/runs", Origin="http://evil.example") == 403
    assert _ask(served, "api/ask?run=0/live&kind=stop") == 405
    assert _ask(served, "api/ask", "POST", Origin="http://evil.example") == 403
    assert _ask(served, "api/ask", "POST") == 400
    for wrong in (
        "api/run?run=0/../..",
        "api/run?run=0/..%2F..",
        "page/..%2Fserver.py",
        "page/app.py",
        "api/stacks?run=0/first&name=../status.json",
    ):
        assert _ask(served, wrong) == 404, wrong
    assert _ask(served, "api/series?run=0/first&x=evil") == 400
    assert _ask(served, "api/series?run=0/first&names=train/loss&low=nan&most=1e99") == 200


def test_stop_by_the_button_ends_the_run_with_everything_saved(look: Look) -> None:
    """The last of this file: the live run ends here."""
    run = RunDir(look.folder / "runs" / "live")
    page = look.open(f"#/run/{_key('live')}")
    page.wait_for_selector("#do-stop")
    described: list[str] = []
    page.on("requestfinished", lambda one: described.append(one.url) if "/api/run?" in one.url else None)
    page.locator("#do-why").click()
    said = page.locator("#part-why pre")
    wait_for(lambda: "loop.py" in said.inner_text())
    page.locator("#part-settings summary").first.click()
    before = len(described)
    wait_for(lambda: page.wait_for_timeout(50) or len(described) > before)
    assert "loop.py" in said.inner_text(), "the answer stays when the page is drawn anew"
    assert page.locator("#part-settings details[open]").count() == 1, "and so does what somebody opened"
    page.locator("#part-why button").click()
    assert said.count() == 0
    page.locator("#do-stop").click()
    page.get_by_role("button", name="Cancel").click()
    page.locator("#do-stop").click()
    page.get_by_role("button", name="Do it").click()
    wait_for(lambda: read_status(run).get("state") == "stopped")
    told = read_status(run)
    assert told["durable_step"] == told["step"] > 0 and told["exit_code"] == 75
    _until(page, "document.querySelector('.badge').textContent === 'stopped'")
    wait_for(lambda: (run.path / "report.html").exists() and (run.path / "curves.svg").exists())
    assert "curves.svg" in run.report.read_text()
