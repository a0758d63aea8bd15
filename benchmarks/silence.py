"""How long each verb is quiet: its first word, the processor time before it, and the longest gap, calm and on a busy machine.

In:  how many processes take the cores meanwhile (default 0; 27 make a load of 28 with the verb itself).
Out: one row a verb. Limits: the first word in 0.15 s calm and in 1 s busy, 40 ms of processor time before it, no gap over 2.5 s.

    python benchmarks/silence.py [--hogs 27] [--pty] [--only WORD] [--json FILE]

A first round of each verb fills the caches of byte code and files and is not counted. The hogs run for one verb at a time,
at most a minute, and end by themselves after that, whatever becomes of this script.
"""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import measured

LAMP = [sys.executable, "-m", "lamplighter"]
TINY = [
    "--tokenizer.kind", "bytes", "--model.layers", "2", "--model.width", "32", "--model.heads", "2", "--data.seq_len", "32",
    "--train.batch_size", "4", "--train.dtype", "fp32", "--train.threads", "1", "--data.embedded_documents", "300",
    "--data.val_fraction", "0.05", "--eval.windows", "4", "--eval.sample_every_steps", "0", "--eval.every_steps", "0",
]  # fmt: skip
HOG_S = 60
HOG = f"""
import os, time
for _ in range(int(__import__('sys').argv[1]) - 1):
    if os.fork() == 0: break
until = time.monotonic() + {HOG_S}
while time.monotonic() < until: pass
"""
LIMITS = {"cpu_ms": 40.0, "gap_s": 2.5}
LEAVE_AFTER_S = 8.0  # what would go on for ever is left with Ctrl+C


@dataclass(frozen=True)
class Silence:
    """What was heard of one command."""

    first_s: float
    cpu_ms: float  # of the command's own process, before its first word
    gap_s: float
    before: str  # what was said before that gap
    total_s: float
    code: int


def listen(words: list[str], cwd: Path, on_pty: bool, leave: bool) -> Silence:
    """Run a command and measure its silence, its end included."""
    reading, writing = pty.openpty() if on_pty else os.pipe()
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(measured.ROOT / "src")}
    began = last = time.monotonic()
    process = subprocess.Popen(
        words, cwd=cwd, stdout=writing, stderr=writing, stdin=subprocess.DEVNULL, env=environment
    )
    os.close(writing)
    first_s, cpu_ms, gap_s, said, before = float("inf"), 0.0, 0.0, "(the start)", ""
    while True:
        ready, _, _ = select.select([reading], [], [], 0.5)
        now = time.monotonic()
        if leave and now - began > LEAVE_AFTER_S:
            process.send_signal(signal.SIGINT)
            leave = False
        if not ready:
            continue
        if first_s == float("inf"):
            first_s, cpu_ms = now - began, _cpu_ms(process.pid)
        try:
            data = os.read(reading, 65536)
        except OSError:  # a terminal that nobody writes to any more
            data = b""
        if now - last > gap_s:
            gap_s, before = now - last, said
        if not data:
            break
        last = now
        said = (data.decode(errors="replace").strip().splitlines() or [said])[-1][:100]
    os.close(reading)
    code = process.wait()
    return Silence(first_s, cpu_ms, gap_s, before, time.monotonic() - began, code)


def _cpu_ms(pid: int) -> float:
    """Processor time of a process so far; NaN where the kernel does not tell."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e6
    except OSError:
        return float("nan")


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """Processes that take the cores."""
    if not count:
        yield
        return
    group = subprocess.Popen([sys.executable, "-c", HOG, str(count)], start_new_session=True)
    try:
        time.sleep(1.0)
        yield
    finally:
        os.killpg(group.pid, signal.SIGKILL)
        group.wait()


def verbs(pid: int) -> dict[str, list[str]]:
    """Every verb; `r` is finished, `live` goes on, `pid` is a process."""
    plan = ["plan", "--preset", "slm"]
    return {
        "runs": ["runs"],
        "runs --json": ["runs", "--json"],
        "checkpoints": ["checkpoints", "r"],
        "why RUN": ["why", "live"],
        "why PID": ["why", str(pid)],
        "save": ["save", "live"],
        "watch RUN": ["watch", "live"],
        "watch PID": ["watch", str(pid)],
        "watch -- CMD": ["watch", "--", sys.executable, "-c", "import time; time.sleep(4)"],
        "plan": plan,
        "plan --json": [*plan, "--json"],
        "plan --data.paths": [*plan, "--data.paths", "text.txt"],
        "tokenizer show": ["tokenizer", "show", "r"],
        "tokenizer train": ["tokenizer", "train", "--data.paths", "text.txt", "--out", "tok", "--force", "--tokenizer.vocab_size", "300"],
        "data stats": ["data", "stats", "--data.paths", "text.txt", "--tokenizer.kind", "bytes"],
        "data prepare": ["data", "prepare", *TINY],
        "data clean": ["data", "clean", "text.txt", "--dry-run"],
        "generate": ["generate", "r", "--prompt", "the", "--max-tokens", "20"],
        "train": ["train", "--run", "again", "--resume", "never", *TINY, "--train.steps", "20"],
        "demo": ["demo", "--resume", "never", "--train.steps", "10", "--train.warmup_steps", "2"],
        "doctor": ["doctor", "--only", "environment", "disk"],
        "stop": ["stop", "live"],
    }  # fmt: skip


def prepare(cwd: Path) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
    """A finished run, one that goes on, and a process to look at."""
    (cwd / "text.txt").write_text("".join(f"The lamp at house {i} stood by the cold river.\n\n" for i in range(2000)))
    subprocess.run(
        [*LAMP, "train", "--run", "r", *TINY, "--train.steps", "20"], cwd=cwd, check=True, capture_output=True
    )
    live = _start([*LAMP, "train", "--run", "live", *TINY, "--train.steps", "10000000", "--save.every_s", "5"], cwd)
    other = _start([sys.executable, "-c", "import time; time.sleep(3600)"], cwd)
    while not (cwd / "runs" / "live" / "metrics.jsonl").exists():
        time.sleep(0.1)
    return live, other


def _start(words: list[str], cwd: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = measured.arguments(__doc__ or "", rounds=1)
    parser.add_argument("--hogs", type=int, default=0, help="processes that take the cores meanwhile")
    parser.add_argument("--pty", action="store_true", help="on a terminal instead of a pipe")
    parser.add_argument("--only", default="", help="verbs whose name holds this word")
    wanted = parser.parse_args()
    measured.say_machine()
    chosen = "runs" if wanted.quick else wanted.only
    figures: dict[str, float] = {}
    print(f"{'':<18} {'first word':>10} {'CPU before':>10} {'longest gap':>11} {'all':>7} {'exit':>5}  before the gap")
    with tempfile.TemporaryDirectory(prefix="lamp-silence-") as place:
        cwd = Path(place)
        live, other = prepare(cwd)
        try:
            for name, words in verbs(other.pid).items():
                if chosen not in name:
                    continue
                leave = name in ("watch RUN", "watch PID")
                if name not in ("stop", "watch RUN", "watch PID"):
                    listen([*LAMP, *words], cwd, wanted.pty, leave)
                with hogs(wanted.hogs):
                    heard = listen([*LAMP, *words], cwd, wanted.pty, leave)
                over = heard.gap_s > LIMITS["gap_s"] or heard.cpu_ms > LIMITS["cpu_ms"]
                print(
                    f"{name:<18} {heard.first_s:>8.2f} s {heard.cpu_ms:>7.0f} ms {heard.gap_s:>9.2f} s {heard.total_s:>5.1f} s"
                    f" {heard.code:>5}  {'OVER  ' if over else ''}{heard.before}",
                    flush=True,
                )
                figures |= {
                    f"{name}: first_s": heard.first_s,
                    f"{name}: cpu_ms": heard.cpu_ms,
                    f"{name}: gap_s": heard.gap_s,
                }
        finally:
            for process in (live, other):
                process.terminate()
            for process in (live, other):
                process.wait()
    measured.keep(wanted.json, figures)


if __name__ == "__main__":
    main()
