"""Fixtures and hooks of all tests: the command in this process, finished runs, the zoo left out and its table, no process in tests/unit."""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing.process
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lamplighter import rundir
from lamplighter.rundir import RunDir
from lamplighter.watch import supervisor
from lamplighter.watch.launcher import Launcher
from running import FULL, STARTED, Command, Finished, Row, copy_run, four_hogs, run_child_here, trained_once

PR_SET_CHILD_SUBREAPER = 36
UNIT = Path(__file__).parent / "unit"
ZOO_HEAD = ("case", "named in", "cause", "culprit", "action", "exit")


def pytest_configure() -> None:
    """A shell that starts us in the background has us ignore some signals; what we start shall not inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What belongs to make zoo is left out unless -m names it, and counted as such, not as skipped."""
    if not FULL and "zoo" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("zoo")])
        items[:] = [item for item in items if not item.get_closest_marker("zoo")]
    for item in items:
        if item.get_closest_marker("zoo"):
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """`lamp WORDS` in this process: for mistakes of the command line, and for all that ends before a child is started."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    entry = importlib.import_module("lamplighter.commands")
    locks: list[int] = []

    def take_lock(run: RunDir) -> int:
        locks.append(rundir.take_lock(run))
        return locks[-1]

    monkeypatch.setattr(importlib.import_module("lamplighter.commands.train"), "take_lock", take_lock)

    def call(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["lamp", *words])
        capfd.readouterr()
        code = entry.main()
        while locks:
            os.close(locks.pop())
        said = capfd.readouterr()
        return subprocess.CompletedProcess(["lamp", *words], code, said.out, said.err)

    yield call
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def here(command: Command, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """`lamp WORDS` with its child's part in this process too: the second and a half in which a process loads torch is saved.

    The supervisor is the real one and finds a process that has already ended; so this is for what a run says, refuses and
    leaves on disk, not for how it is watched, killed or stopped; and with train.threads 1, as the threads of this process spin.
    """
    path, modules = list(sys.path), set(sys.modules)
    monkeypatch.setattr(
        Launcher,
        "place",
        lambda launcher, rank, request, told: run_child_here(launcher, request, int(told["LAMP_ATTEMPT"])),
    )
    monkeypatch.setattr(supervisor, "LOOK_EVERY_S", 0.0)
    yield command
    sys.path[:] = path
    for name in set(sys.modules) - modules:  # a model of the test's own
        if not name.startswith("lamplighter") and str(Path.cwd()) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def finished(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The run `r` of `lamp train WORDS` in tmp_path/runs, its token cache beside it: trained once for the same words, copied here.

    What it said is in its console.log. The copy belongs to the test, which may damage or continue it.
    """

    def give(*words: str) -> RunDir:
        copy_run(trained_once(tmp_path_factory, words) / "runs", tmp_path / "runs")
        return RunDir(tmp_path / "runs" / "r")

    return give


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Small tensors gain nothing from a second thread, and two workers of pytest on two cores would wait for each other."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def no_process_in_unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test in tests/unit that starts a process belongs into tests/run."""
    if UNIT not in request.path.parents:
        return

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("tests/unit starts no process: this test belongs into tests/run")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
    for name in ("fork", "posix_spawn", "posix_spawnp", "system"):
        monkeypatch.setattr(os, name, refuse)


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """A failed test must not leave its run behind; and orphans of later tests go to init again, which buries them.

    Code that runs a child in this process (procs/child.py) makes it the one who adopts orphans, for good.
    """
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    while STARTED:
        process = STARTED.pop()
        if process.poll() is None:
            leads = os.getpgid(process.pid) == process.pid  # then its workers and forkservers go with it
            os.killpg(process.pid, signal.SIGKILL) if leads else process.kill()
            process.wait()


@pytest.fixture
def hogs() -> Iterator[None]:
    with four_hogs():
        yield


@pytest.fixture
def zoo_row(record_property: Callable[[str, object], None]) -> Row:
    """Called when all assertions on cause and culprit have held: (case, named in, action, exit code)."""

    def add(case: str, named: float | str, action: str, code: int) -> None:
        words = f"{named:.1f} s" if isinstance(named, float) else named
        record_property("zoo", json.dumps([case, words, "right", "right", action, code]))

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = []
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", []):
                if name == "zoo" and getattr(report, "when", "") == "call":
                    rows.append(json.loads(value))
    if not rows:
        return
    terminalreporter.section("the zoo")
    for row in [ZOO_HEAD, *sorted(rows)]:
        terminalreporter.write_line("{:<18} {:>9} {:>8} {:>8} {:>9} {:>5}".format(*map(str, row)))
    if not any(row[1].endswith(" s") for row in rows):
        return
    times = sorted(float(row[1].split()[0]) for row in rows if row[1].endswith(" s"))
    middle, late = times[len(times) // 2], times[min(len(times) - 1, int(0.95 * len(times)))]
    terminalreporter.write_line(
        f"named in: p50 {middle:.1f} s, p95 {late:.1f} s, max {times[-1]:.1f} s, over {len(times)} cases"
    )
