"""The field scripts do what their truth says, with plain Python and nobody watching: they end, they die, or they stand."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from field.truth import CASES, Case, command_of, culprit_lines, lines_of
from running import LONG, clean_env, shared, wait_for

pytestmark = LONG  # the quick ones run under the watcher in zoo/test_field.py

STILL_S = 5.0
SETTLE_S = 1.5  # what was under way beside the fault may come to its end


def cases_of(kind: str) -> list[Case]:
    return [case for case in CASES if case.kind == kind and "half_minute" not in case.needs]


def groups(cases: list[Case], size: int) -> list[object]:
    """Dealt like cards, so that the heavy ones, which stand together in the table, meet light ones."""
    hands = -(-len(cases) // size)
    return [pytest.param(cases[n::hands], id="+".join(case.name for case in cases[n::hands])) for n in range(hands)]


@dataclass
class Going:
    """A script that runs, its output and its marks."""

    case: Case
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def output(self) -> str:
        return (self.folder / "out.txt").read_text(errors="replace")

    @property
    def marks(self) -> list[list[str]]:
        path = self.folder / "mark"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def told(self) -> str:
        """What a failure should show."""
        return f"{self.case.name}: code {self.process.poll()}, marks {self.marks}\n{self.output[-6000:]}"

    def processes(self) -> list[int]:
        """Every process of it, also those in sessions of their own: they all have the path of the marks in common."""
        sign, found = f"LAMP_FIELD_MARK={self.folder / 'mark'}".encode(), []
        for proc in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if proc.name.isdigit() and sign in (proc / "environ").read_bytes().split(b"\0"):
                    found.append(int(proc.name))
        return found

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + 5
        while left := self.processes():
            assert time.monotonic() < deadline, f"{self.case.name}: {left} cannot be ended"
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


def start(case: Case, scale: float = 1.0, **extra: str) -> Going:
    # A short path: the sockets of multiprocessing live below it and may have 108 letters.
    folder = Path(tempfile.mkdtemp(prefix="field-"))
    env = clean_env(LAMP_FIELD_MARK=str(folder / "mark"), TMPDIR=str(folder), HF_HOME=str(folder), **extra)
    with open(folder / "out.txt", "wb") as out:
        process = subprocess.Popen(
            command_of(case, sys.executable, scale), cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return Going(case, folder, process)


@contextlib.contextmanager
def running(cases: list[Case], scale: float = 1.0, **extra: str) -> Iterator[list[Going]]:
    """All of them at once; whatever happens, nothing of them is left."""
    going: list[Going] = []
    try:
        for case in cases:
            going.append(start(case, scale, **extra))
        yield going
    finally:
        for one in going:
            one.end()
            shutil.rmtree(one.folder, ignore_errors=True)


def can_mount() -> bool:
    tried = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, check=False
    )
    return tried.returncode == 0


def without_what_is_missing(cases: list[Case]) -> list[Case]:
    if any("mount" in case.needs for case in cases) and not can_mount():
        cases = [case for case in cases if "mount" not in case.needs]
    if not cases:
        pytest.skip("no right to mount here")
    return cases


def did_its_work(one: Going) -> bool:
    if one.case.name == "silent_healthy":
        return not one.output and (one.folder / "silent_model.pt").stat().st_size > 10_000
    return "done: " in one.output


@pytest.mark.parametrize("cases", groups(cases_of("healthy"), 2))
def test_a_healthy_one_does_its_work_and_ends(cases: list[Case]) -> None:
    with running(cases) as going:
        for one in going:
            assert one.process.wait(40) == 0, one.told()
            assert did_its_work(one), one.told()
            assert not one.marks, one.told()


def test_the_trainer_takes_a_model_from_a_folder() -> None:
    folder = shared("models", "stories260K_hf_llama")
    healthy = next(case for case in CASES if case.name == "hf_trainer_healthy")
    with running([healthy], LAMP_FIELD_MODEL=str(folder)) as (one,):
        assert one.process.wait(40) == 0, one.told()
        assert "done: 60 steps" in one.output


@pytest.mark.parametrize("cases", groups(cases_of("slow"), 3))
def test_a_slow_one_ends_when_its_slow_part_is_short(cases: list[Case]) -> None:
    with running(cases, scale=0.1) as going:
        for one in going:
            assert one.process.wait(60) == 0, one.told()
            assert did_its_work(one) or one.case.name == "silent_slow", one.told()
            assert [mark[0] for mark in one.marks] == ["fault", "over"], one.told()


@pytest.mark.parametrize("cases", groups(cases_of("innocent"), 4))
def test_an_innocent_ends(cases: list[Case]) -> None:
    with running(cases, scale=0.1) as going:
        for one in going:
            assert one.process.wait(40) == 0, one.told()
            assert did_its_work(one), one.told()
            assert [mark[0] for mark in one.marks] == ["fault", "over"], one.told()


@pytest.mark.parametrize("cases", groups(cases_of("dead"), 3))
def test_a_dead_one_dies_by_itself(cases: list[Case]) -> None:
    with running(without_what_is_missing(cases)) as going:
        for one in going:
            assert one.process.wait(40) == one.case.exit_code, one.told()
            assert [mark[0] for mark in one.marks] == ["fault"], one.told()
            assert "Error" in one.output, one.told()
            assert "done" not in one.output


@pytest.mark.parametrize("cases", groups(cases_of("stuck"), 3))
def test_a_stuck_one_stands_still(cases: list[Case]) -> None:
    with running(cases) as going:
        for one in going:
            wait_for(lambda one=one: one.marks, 40, one.process)
        time.sleep(SETTLE_S)
        before = [(one.output, one.marks) for one in going]
        time.sleep(STILL_S)
        for one, (output, marks) in zip(going, before, strict=True):
            assert one.process.poll() is None, f"it ended: {one.told()}"
            assert (one.output, one.marks) == (output, marks), f"{one.case.name} went on"
            assert [mark[0] for mark in marks] == ["fault"], one.told()


def test_the_truth_names_lines_that_exist() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert (case.exit_code is None) == (case.kind == "stuck") == (case.signals == ("end",)), case.name
        assert bool(case.causes) == (case.kind != "healthy"), case.name
        if case.culprit:
            assert 1 <= len(culprit_lines(case)) <= 6, case.name
        if "also" in case.culprit:
            assert len(lines_of(case.culprit["file"], case.culprit["also"])) == 1, case.name


def test_no_script_knows_the_watcher() -> None:
    for path in (Path(__file__).parents[1] / "field").glob("*.py"):
        assert "lamplighter" not in path.read_text(), path.name
