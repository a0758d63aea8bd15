"""What looking costs: sending 100,000 steps to each tracker, the page's weight, its drawing, the server's memory over many runs.

In:  nothing (the metrics are made up; the trackers, the server and the browser are real).
Out: seconds, kilobytes, megabytes and frames a second, each beside its goal; --json keeps them. The peer of sending and of following
     is a script that gives the same rows to the tracker's own library, one call a step, as people do in a training loop.

    python benchmarks/looking.py [--steps 100000] [--runs 50] [--only send,follow,serve] [--json benchmarks/results/looking.json]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import psutil

PAGE = Path(__file__).parents[1] / "src" / "lamplighter" / "dash" / "page"
LINE = ('{"step": %d, "attempt": 1, "t": %r, "train/loss": %r, "train/lr": 0.0003, "train/grad_norm": 0.92, "train/iter": %d, "train/dt_ms": 17.95,'
        ' "train/tok_per_sec": 7130.7, "train/mfu": 0.31, "train/tokens": %d, "train/epoch": 0.0015, "train/pad_frac": 0.0, "train/data_wait_ms": 0.04}\n')  # fmt: skip
DRAW = """async () => {
  const { Chart } = await import('/page/chart.js');
  const n = 100000, x = Float64Array.from({ length: n }, (_, i) => i), y = Float64Array.from({ length: n }, (_, i) => 5 / (1 + i / 9000) + Math.random());
  const host = document.createElement('div'); host.className = 'plot'; host.style.width = '1200px'; host.style.height = '330px'; document.body.append(host);
  const shared = { charts: new Set(), hover: null, range: null, log: false, smooth: 0, x: 'step', zoom() {} };
  const chart = new Chart(host, shared);
  const began = performance.now(); chart.curves = [{ x, y, label: 'loss' }]; chart.draw(); const first = performance.now() - began;
  const from = performance.now(); let frames = 0;
  while (performance.now() - from < 2000) { shared.range = [frames * 50, 60000 + frames * 50]; chart.draw(); frames++; await new Promise(requestAnimationFrame); }
  return { first_ms: first, fps: frames / ((performance.now() - from) / 1000) };
}"""


# The tracker's own library in a loop: a first argument of 0 is as quick as it can, else steps a second; rows, folder, seconds to warm up.
PEERS = {
    "tensorboard": "from tensorboard.compat.proto.event_pb2 import Event\nfrom tensorboard.compat.proto.summary_pb2 import Summary\n"
    "from tensorboard.summary.writer.event_file_writer import EventFileWriter\nwriter = EventFileWriter(folder)\n"
    "def log(n, row): writer.add_event(Event(wall_time=1.7e9 + n, step=n, summary=Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in row.items()])))\n"
    "end = writer.close",
    "trackio": "import trackio\nrun = trackio.init(project='peer', name='peer', embed=False, auto_log_gpu=False, auto_log_cpu=False)\n"
    "def log(n, row): run.log(row, step=n)\nend = run.finish",
    "wandb": "import wandb\nquiet = wandb.Settings(silent=True, console='off', disable_git=True, save_code=False, x_disable_stats=True)\n"
    "run = wandb.init(project='peer', dir=folder, mode='offline', settings=quiet)\ndef log(n, row): run.log(row, step=n)\nend = run.finish",
    "mlflow": "import os\nos.environ['MLFLOW_DISABLE_TELEMETRY'] = 'true'\nimport mlflow\nmlflow.set_tracking_uri('sqlite:///' + folder + '.db')\nmlflow.start_run()\n"
    "def log(n, row): mlflow.log_metrics(row, step=n)\nend = mlflow.end_run",
}  # fmt: skip
LOOP = """
import json, sys, time, psutil
rate, rows, folder = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
began = time.monotonic()
%s
me, warm = psutil.Process(), 5.0
cpu = lambda: sum(sum(one.cpu_times()[:2]) for one in [me, *me.children(recursive=True)])
line = json.loads(sys.stdin.read())
row, before, since = {k: float(v) for k, v in line.items() if "/" in k}, cpu() if not rate else 0.0, time.monotonic()
for n in range(1, rows + 1):
    log(n, row)
    if rate:
        time.sleep(1 / rate)
        if not before and time.monotonic() - since > warm:
            before, since = cpu(), time.monotonic()
spent, passed = cpu() - before, time.monotonic() - since
end()
print(json.dumps({"share": spent / passed, "wall_s": time.monotonic() - began}))
"""


def peer(folder: Path, tracker: str, rows: int, rate: float = 0.0) -> dict[str, float]:
    """The same rows by the tracker's own library: wall and CPU seconds, and the share of a core while it follows a pace."""
    env = {**os.environ, "TRACKIO_DIR": str(folder / "trackio-peer"), "WANDB_SILENT": "true"}
    words = [sys.executable, "-c", LOOP % PEERS[tracker], str(rate), str(rows), str(folder / f"peer-{tracker}")]
    line, before = LINE % (1, 1.7e9, 5.0, 1, 2048), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(words, input=line, capture_output=True, text=True, env=env, check=True)
    told: dict[str, float] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"share"')))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {**told, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def write_run(path: Path, steps: int) -> None:
    for folder in ("stacks", "ask", "checkpoints", "slots"):
        (path / folder).mkdir(parents=True)
    (path / "events.jsonl").write_text('{"type": "start", "t": 1700000000.0, "attempt": 1}\n')
    (path / "status.json").write_text(
        json.dumps({"state": "finished", "step": steps, "steps": steps, "format": 1, "numerics": 2})
    )
    with open(path / "metrics.jsonl", "w") as file:
        file.writelines(LINE % (n, 1.7e9 + n, 5 / (1 + n / 9000), n, 2048 * n) for n in range(1, steps + 1))


def backfill(folder: Path, tracker: str) -> tuple[float, float]:
    """Wall seconds and CPU seconds of `lamp track`, the start of the process and the import of the library included."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [sys.executable, "-m", "lamplighter", "track", "r", "--to", tracker, "--offline"]
    env = {**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "WANDB_MODE": "offline"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def following(folder: Path, tracker: str, seconds: float = 20.0, rate: int = 20) -> float:
    """The share of a core that the follower of a run with so many steps a second takes, once its library is loaded."""
    from lamplighter.procs.lock import hold
    from lamplighter.rundir import RunDir
    from lamplighter.watch.trackers.follower import read_state

    run = folder / "live" / tracker
    write_run(run, 10)
    held = hold(run / "lock")
    setting = {"run_name": tracker, "tags": [], "offline": True}
    words = [sys.executable, "-m", "lamplighter.watch.trackers.follower", str(run), tracker, json.dumps(setting)]
    env = {**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "WANDB_MODE": "offline"}
    follower = subprocess.Popen(words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process, step, before = psutil.Process(follower.pid), 10, 0.0
    try:
        with open(run / "metrics.jsonl", "a", buffering=1) as file:
            opened, since = 0.0, 0.0
            while not since or time.monotonic() - since < seconds:
                step += 1
                file.write(LINE % (step, 1.7e9 + step, 5 / (1 + step / 9000), step, 2048 * step))
                now = time.monotonic()
                if not opened and read_state(RunDir(run), tracker).step > 10:
                    opened = now
                if opened and not since and now - opened > 5:  # its library is loaded, and calm
                    before, since = _cpu_s(process), now
                time.sleep(1 / rate)
        return (_cpu_s(process) - before) / (time.monotonic() - since)
    finally:
        follower.terminate()
        follower.wait()
        if held is not None:
            os.close(held)


def _cpu_s(process: psutil.Process) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in [process, *process.children(recursive=True)])


def measure_server(folder: Path, runs: int) -> dict[str, Any]:
    """Start to first answer; memory after few runs were looked at, and after all of them."""
    began = time.monotonic()
    log = folder / "dash.txt"
    with open(log, "w") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "lamplighter", "dash", "--port", "0"], cwd=folder, stdout=out, stderr=out
        )
    try:
        while not (found := re.search(r"open (http://\S+)", log.read_text())):
            time.sleep(0.01)
        address = found[1]
        urllib.request.urlopen(address).read()
        opens_s = time.monotonic() - began
        process, sizes, answers = psutil.Process(server.pid), [], []
        for number in range(runs):
            key = urllib.parse.quote(f"0/many{number}" if number else "0/r")
            asked = time.monotonic()
            for path in (f"api/run?run={key}", f"api/series?run={key}&names=train/loss,train/lr,train/mfu"):
                urllib.request.urlopen(address + path).read()
            answers.append(time.monotonic() - asked)
            sizes.append(process.memory_info().rss / 1e6)
        told = {"opens_s": opens_s, "answer_s": sorted(answers)[len(answers) // 2], "memory_5_mb": sizes[min(9, len(sizes) - 1)], "memory_all_mb": sizes[-1], "memory_max_mb": max(sizes)}  # fmt: skip
        return {**told, **_in_a_browser(address)}
    finally:
        server.terminate()
        server.wait()


def _in_a_browser(address: str) -> dict[str, Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page, weight = browser.new_page(viewport={"width": 1300, "height": 900}), []
        page.on(
            "response",
            lambda answer: (
                weight.append(len(answer.body())) if "/page/" in answer.url or answer.url == address else None
            ),
        )
        began = time.monotonic()
        page.goto(address)
        page.wait_for_selector("tbody tr")
        shown_s = time.monotonic() - began
        page_kb = sum(weight) / 1e3
        looks = [_look(page, f"{address}#/run/{urllib.parse.quote('0/r', safe='')}") for _ in range(2)]
        drawn = page.evaluate(DRAW)
        browser.close()
    return {
        "page_kb": page_kb,
        "shown_s": shown_s,
        "first_look_s": looks[0],
        "next_look_s": looks[1],
        **drawn,
    }


def _look(page: Any, address: str) -> float:
    """Until the curves of a run are drawn; the server has looked at fifty others since, and reads it anew."""
    page.goto("about:blank")
    began = time.monotonic()
    page.goto(address)
    while not page.evaluate("([...(window.lampView?.shared?.charts || [])][0]?.curves[0]?.x.length || 0) > 100"):
        time.sleep(0.01)
    return time.monotonic() - began


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--steps", type=int, default=100_000)
    flags.add_argument("--runs", type=int, default=50)
    flags.add_argument("--only", default="send,follow,serve")
    flags.add_argument("--json", type=Path)
    given = flags.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_run(folder / "runs" / "r", given.steps)
        found: dict[str, Any] = {"steps": given.steps, "load": os.getloadavg()[0]}
        if "send" in given.only:
            found |= _sending(folder, given.steps)
        if "follow" in given.only:
            found |= _followers(folder)
        if "serve" in given.only:
            for number in range(1, given.runs):
                os.link(folder / "runs" / "r" / "metrics.jsonl", _linked(folder, number))
            found |= {"runs": given.runs, **measure_server(folder, given.runs)}
    for name, value in found.items():
        print(f"{name:<18} {value:,.4g}")
    if given.json:
        import measured

        measured.keep(given.json, found)


def _sending(folder: Path, steps: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for tracker in ("csv", "tensorboard", "trackio", "wandb", "mlflow"):
        found[f"{tracker}_s"], found[f"{tracker}_cpu_s"] = wall_s, cpu_s = backfill(folder, tracker)
        print(f"backfill of {steps:,} steps to {tracker:<12} {wall_s:6.1f} s wall, {cpu_s:6.1f} s of CPU (goal 30 s)", flush=True)  # fmt: skip
        if tracker in PEERS:
            own = peer(folder, tracker, steps)
            found |= {f"{tracker}_peer_s": own["wall_s"], f"{tracker}_peer_cpu_s": own["cpu_s"]}
            print(f"  its own library in a loop: {own['wall_s']:6.1f} s wall, {own['cpu_s']:6.1f} s of CPU: {wall_s / own['wall_s']:.2f} x, {cpu_s / own['cpu_s']:.2f} x", flush=True)  # fmt: skip
    return found


def _followers(folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for tracker in ("csv", "tensorboard", "trackio", "wandb", "mlflow"):
        found[f"{tracker}_share"] = share = following(folder, tracker)
        own = peer(folder, tracker, 500, 20.0)["share"] if tracker in PEERS else 0.0
        found |= {f"{tracker}_peer_share": own} if own else {}
        against = f"; logged step by step: {own:.2%}, {share / own:.2f} x" if own else ""
        print(f"following 20 steps a second with {tracker:<12} {share:.2%} of a core (goal 1 %){against}", flush=True)
    return found


def _linked(folder: Path, number: int) -> Path:
    """The same numbers under another name: what counts is that they are read and kept anew."""
    path = folder / "runs" / f"many{number}"
    path.mkdir()
    (path / "events.jsonl").write_text('{"type": "start", "t": 1700000000.0, "attempt": 1}\n')
    return path / "metrics.jsonl"


if __name__ == "__main__":
    main()
