"""What starts processes: The token cache: nothing lost or doubled, never mixed up, never half built, and it says what it does."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_tokens import Texts, content, letters, made

from lamplighter import report
from lamplighter.data.token_cache.reader import CacheSettings
from lamplighter.data.tokenizer import byte_level
from lamplighter.errors import CannotWrite
from opening import ensure


@pytest.fixture
def notes(monkeypatch: Any) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(report, "note", lambda text, **_: said.append(text))
    monkeypatch.setattr(report, "verdict", lambda verdict: said.append(verdict.why))
    return said


CHILD = """
import os, sys, time
from pathlib import Path
from lamplighter.data.token_cache import builder
from lamplighter.data.token_cache import reader as tokens
from lamplighter.data.sources import EmbeddedCorpus
from lamplighter.data.tokenizer import byte_level

builder.COMMIT_S = 0.1

class Slow(EmbeddedCorpus):
    def documents(self, start=None):
        for number, text in enumerate(super().documents(start), (start or {}).get("document", 0)):
            if PAUSE:
                PAUSE(number)
            yield text + "\\n" + text[:50] * (number % 37)

def gate(number):
    if number == 600 and list(Path(sys.argv[1]).glob("*/unit-*.json")):  # not in the first look
        Path("reached").write_text(str(os.getpid()))
        while not Path("go").exists():
            time.sleep(0.01)

def slow(number):
    if list(Path(sys.argv[1]).glob("*/build.json")):  # not in the first look
        time.sleep(0.002)

PAUSE = {"": None, "slow": slow, "gate": gate}[sys.argv[2]]
tokenizer = byte_level()
tokenizer.batch_bytes = 20_000
settings = tokens.CacheSettings(0.2, 0, 20_000)
print(tokens.obtain(Path(sys.argv[1]), Slow(5, 1200), tokenizer, settings)[0].folder, flush=True)
"""


def child(folder: Path, root: str, pause: str = "") -> subprocess.Popen[str]:
    (folder / "child.py").write_text(CHILD)
    words = [sys.executable, "child.py", root, pause]
    return subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> Path:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return Path(out.strip().splitlines()[-1])


def wait_until(condition: Any, deadline_s: float = 30.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def _holds(folder: Path, pid: int) -> bool:
    return (folder / "lock").exists() and f'"pid": {pid},' in (folder / "lock").read_text()


def _units(folder: Path) -> int:
    return len(list(folder.glob("unit-*.json")))


def test_killed_at_any_moment_it_ends_the_same(tmp_path: Path) -> None:
    whole = tmp_path / ended(child(tmp_path, "whole"))
    truth = content(whole)
    assert len([name for name in truth if name.endswith(".bin")]) > 20
    rng = random.Random(1)
    folder = tmp_path / "torn" / whole.name
    seen, kills = set(), 0
    while len(seen) < 4 and kills < 30:
        process = child(tmp_path, "torn", "slow")
        wait_until(lambda p=process: _holds(folder, p.pid) or p.poll() is not None)
        if kills % 2:  # on a slow machine the random moments alone would all lie before the first unit
            before = _units(folder)
            wait_until(lambda b=before, p=process: _units(folder) > b or p.poll() is not None)
        time.sleep(rng.uniform(0.0, 0.6 + kills / 5))  # any moment: in the first look, between shards, in a write
        process.kill()
        if process.wait() == 0:
            break
        kills += 1
        seen.add(_units(folder))
    assert kills >= 3 and len(seen) >= 3, "it went on where it had stopped, again and again"
    assert tmp_path / ended(child(tmp_path, "torn")) == folder
    assert content(folder) == truth


def test_one_builds_and_the_other_waits(tmp_path: Path, monkeypatch: Any, notes: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    builder = child(tmp_path, "cache", "gate")
    wait_until((tmp_path / "reached").exists)
    events: list[dict[str, Any]] = []
    shown: list[str] = []
    monkeypatch.setattr(report._reporter, "event", lambda type, **fields: events.append({"type": type, **fields}))

    def watch() -> None:
        wait_until(lambda: any(event.get("name") == "waiting for the token cache" for event in events))
        slot = report._reporter.slot
        try:
            wait_until(lambda: "units, at document" in slot.get_text("phase_item"))
            shown.append(slot.get_text("phase_item"))
        finally:
            (tmp_path / "go").write_text("")

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    code = CHILD.rsplit("print", 1)[0].replace("sys.argv[2]", '""')
    scope: dict[str, Any] = {}
    exec(code, scope)
    found = ensure(Path("cache"), scope["Slow"](5, 1200), scope["tokenizer"], CacheSettings(0.2, 0, 20_000))
    watcher.join()
    assert ended(builder) == found
    assert any(f"process {builder.pid} on" in note and "waiting" in note for note in notes)
    assert f"process {builder.pid}" in shown[0]
    assert "another process has built it" in notes[-1]
    assert not any(event.get("name") == "tokenise" for event in events)


def test_a_dead_builders_lock_is_taken_over(tmp_path: Path, notes: list[str], monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    builder = child(tmp_path, "cache", "gate")
    wait_until((tmp_path / "reached").exists)
    builder.kill()
    builder.communicate()
    scope: dict[str, Any] = {}
    exec(CHILD.rsplit("print", 1)[0].replace("sys.argv[2]", '""'), scope)
    folder = ensure(Path("cache"), scope["Slow"](5, 1200), scope["tokenizer"], CacheSettings(0.2, 0, 20_000))
    assert any(f"taken over from dead pid {builder.pid}" in note for note in notes)
    assert any("goes on after" in note for note in notes)
    assert (
        sorted(path.suffix for path in folder.iterdir() if path.name.startswith(("progress", "open", "unit", "build")))
        == []
    )
    assert (folder / "lock").read_bytes() == b""


def test_a_real_full_disk(tmp_path: Path) -> None:
    """A file system of 1 MB; skipped where mounting is not allowed."""
    place = tmp_path / "small"
    place.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.decode().strip()}")
    try:
        with pytest.raises(CannotWrite) as caught:
            made(place, letters(3000))
        assert "are free" in caught.value.why
        source = Texts(letters(3000))
        source.total_bytes = lambda: None  # type: ignore[method-assign]
        with pytest.raises(CannotWrite):
            ensure(place, source, byte_level(), CacheSettings(0.1, 0, 10_000))
    finally:
        subprocess.run(["umount", str(place)], check=True)
