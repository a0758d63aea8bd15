"""The ward: each probe in a child process of its own, with a deadline, and a word about how it ended.

In:  a Stage, and the Case that all stages share.
Out: a Visit: what was found, in how many seconds. A probe that hangs, dies, raises or eats the memory is a finding too.

Only what a probe started is ever killed: its process group, and what of its descendants was left to us. Where it hangs it is
asked for its stack first (faulthandler on SIGURG, one thread: that works while C code holds the GIL).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lamplighter.doctor.code_owner import Place
from lamplighter.doctor.probe import Finding, Stage
from lamplighter.doctor.user_frame import culprit, frames_in, guilty
from lamplighter.procs.pool import usable_cores
from lamplighter.rundir import human_bytes, parse_record

PR_SET_CHILD_SUBREAPER = 36
LOOK_EVERY_S = 0.1
WEIGH_EVERY_S = 0.4
STACK_S = 1.5  # for the stack to be written
LEAVE_S = 1.0  # for its own children to end with it
MOST_FINDINGS = 200
MOST_LINE = 1 << 20
MOST_OUTPUT = 1 << 15
MEMORY_SHARE = 0.85  # of what is free at the start
MOST_PATIENCE = 4.0


@dataclass(frozen=True)
class Case:
    """What all probes of one examination share."""

    config: Path
    preset: str | None
    runs_dir: Path
    scratch: Path
    memory_bytes: int | None = None  # what a probe and its children may take; none: most of what is free


@dataclass(frozen=True)
class Visit:
    """One stage, looked at."""

    stage: Stage
    findings: tuple[Finding, ...]
    seconds: float


@dataclass
class _Probe:
    """A probe's process while it lives, and what it has said."""

    process: subprocess.Popen[bytes]
    words: int  # the descriptor that it answers on
    stack: Path
    before: set[psutil.Process]
    oom_before: int
    findings: list[Finding] = field(default_factory=list)
    left_out: int = 0
    unreadable: int = 0
    now: str = "starting"
    death: dict[str, Any] = field(default_factory=dict)
    done: bool = False
    pending: bytes = b""
    output: bytes = b""
    peak_bytes: int = 0
    open: list[int] = field(default_factory=list)  # the descriptors that have not come to their end


def adopt_orphans() -> None:
    """Processes that lose their parent below us come to us, so that none can get away."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def patience() -> float:
    """Deadlines are for a calm machine: on a crowded one they grow with the crowd, at most fourfold."""
    return min(MOST_PATIENCE, max(1.0, os.getloadavg()[0] / usable_cores()))


def visit(stage: Stage, case: Case, tell: Callable[[str], None] = lambda _: None) -> Visit:
    """One probe from its start to its end, whatever that is; `tell` gets the live line ten times a second."""
    started, deadline_s = time.monotonic(), stage.deadline_s * patience()
    most = case.memory_bytes or int(MEMORY_SHARE * psutil.virtual_memory().available)
    try:
        probe = _start(stage, case)
    except OSError as error:  # no more processes, files or memory to be had: that is a finding too
        return Visit(stage, (_not_started(error),), time.monotonic() - started)
    weighed, last = 0.0, None
    try:
        while last is None:
            _listen(probe, LOOK_EVERY_S)
            if not probe.open:
                time.sleep(LOOK_EVERY_S)  # it has closed everything, and lives on
            spent = time.monotonic() - started
            tell(f"{probe.now} ({spent:.0f} s of at most {deadline_s:.0f})")
            if spent - weighed > WEIGH_EVERY_S:
                weighed, probe.peak_bytes = spent, max(probe.peak_bytes, _weigh(probe))
            if _has_ended(probe):
                _let_children_leave(probe)
                last = []
            elif probe.peak_bytes > most:
                last = [_too_heavy(probe, most)]
            elif spent > deadline_s:
                last = [_too_late(probe, spent, tell)]
    finally:
        _end(probe)
    _listen(probe, 0)
    os.close(probe.words)
    if probe.process.stdout is not None:
        probe.process.stdout.close()
    last = last or _how_it_ended(probe)
    return Visit(stage, tuple(probe.findings + _about_its_words(probe) + last), time.monotonic() - started)


def _start(stage: Stage, case: Case) -> _Probe:
    case.scratch.mkdir(parents=True, exist_ok=True)
    stack = case.scratch / "stack.txt"
    stack.unlink(missing_ok=True)
    reading, writing = os.pipe()
    request = {
        "function": stage.function,
        "config": str(case.config),
        "preset": case.preset,
        "runs_dir": str(case.runs_dir),
        "scratch": str(case.scratch),
        "stack": str(stack),
        "fd": writing,
        "parent": os.getpid(),
    }
    before, oom_before = set(psutil.Process().children(recursive=True)), _oom_kills()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "lamplighter.doctor", json.dumps(request)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=[writing],
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    assert process.stdout is not None
    os.set_blocking(reading, False)
    os.set_blocking(process.stdout.fileno(), False)
    return _Probe(process, reading, stack, before, oom_before, open=[reading, process.stdout.fileno()])


def _not_started(error: OSError) -> Finding:
    what = f"the probe could not be started: {error.strerror or error}"
    why = "no process, file or memory could be had for it"
    return Finding("fault", what, why, "lamp doctor --only limits; ulimit -a", "not_started")


def _oom_kills() -> int:
    """How many processes the kernel has killed for memory since boot; 0 where it does not count."""
    with contextlib.suppress(OSError):
        for row in Path("/proc/vmstat").read_text().splitlines():
            if row.startswith("oom_kill "):
                return int(row.split()[1])
    return 0


# ---------------------------------------------------------------- while it lives


def _listen(probe: _Probe, wait_s: float) -> None:
    """What it says, as it comes; of what it prints the end is kept, however much it is."""
    ready, _, _ = select.select(probe.open, [], [], wait_s)
    for fd in ready:
        data, at_end = _read(fd)
        if at_end:
            probe.open.remove(fd)
        if fd != probe.words:
            probe.output = (probe.output + data)[-MOST_OUTPUT:]
            continue
        *lines, probe.pending = (probe.pending + data).split(b"\n")
        for line in lines:
            _hear(probe, line)
        if len(probe.pending) > MOST_LINE:
            probe.pending, probe.unreadable = b"", probe.unreadable + 1


def _read(fd: int) -> tuple[bytes, bool]:
    """All that is there now, at most a few megabytes; and whether that was the end of it."""
    parts: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while len(parts) < 64:
            parts.append(os.read(fd, 1 << 16))
            if not parts[-1]:
                return b"".join(parts), True
    return b"".join(parts), False


def _hear(probe: _Probe, line: bytes) -> None:
    record = parse_record(line) if len(line) <= MOST_LINE else None
    if record is None:
        probe.unreadable += 1
    elif "now" in record:
        probe.now = str(record["now"])
    elif "finding" in record:
        if len(probe.findings) < MOST_FINDINGS or record["finding"]["level"] == "fault":
            probe.findings.append(Finding(**record["finding"]))
        else:
            probe.left_out += 1
    elif "died" in record:
        probe.death = record
    else:
        probe.done = True


def _has_ended(probe: _Probe) -> bool:
    """Without taking its number away yet: while it is ours, its process group cannot be anybody else's."""
    return os.waitid(os.P_PID, probe.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _descendants(probe: _Probe) -> list[psutil.Process]:
    """Whatever came below us since the probe was started, the probe itself left out."""
    now = psutil.Process().children(recursive=True)
    return [one for one in now if one not in probe.before and one.pid != probe.process.pid]


def _weigh(probe: _Probe) -> int:
    """Resident bytes of the probe and all that it started."""
    total = 0
    for one in [psutil.Process(probe.process.pid), *_descendants(probe)]:
        with contextlib.suppress(psutil.Error):
            total += one.memory_info().rss
    return total


# ---------------------------------------------------------------- its end


def _let_children_leave(probe: _Probe) -> None:
    """Helpers of its own (a resource tracker, loader workers) notice by themselves that it is gone."""
    until = time.monotonic() + LEAVE_S
    while time.monotonic() < until and any(_lives(one) for one in _descendants(probe)):
        time.sleep(0.02)


def _lives(one: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(one.status() != psutil.STATUS_ZOMBIE)
    return False


def _end(probe: _Probe) -> None:
    """The probe and all that it started, and nothing else."""
    for _ in range(50):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(probe.process.pid, signal.SIGKILL)
        left = _descendants(probe)
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        if not any(_lives(one) for one in left):
            break
        time.sleep(0.02)
    probe.process.wait()
    for one in _descendants(probe):
        with contextlib.suppress(psutil.Error, ChildProcessError):
            os.waitpid(one.pid, os.WNOHANG)


def _too_heavy(probe: _Probe, most: int) -> Finding:
    what = f"out of memory: {human_bytes(probe.peak_bytes)} were taken while {probe.now}, {human_bytes(most)} may be"
    why = "more would have brought the machine down, so the probe was ended"
    frames = frames_in(_ask_for_stack(probe))
    return Finding("fault", _with_place(what, frames), why, "a smaller train.micro_batch, data.seq_len or model; fewer workers", "rss_oom",
                   culprit(frames), figures={"bytes": probe.peak_bytes})  # fmt: skip


def _too_late(probe: _Probe, spent: float, tell: Callable[[str], None]) -> Finding:
    """Beyond its deadline: where it is, from its own stack."""
    tell(f"{probe.now}: beyond its deadline, its stack is being taken")
    state = psutil.Process(probe.process.pid).status()
    frames = frames_in(_ask_for_stack(probe))
    what = _with_place(f"no answer in {spent:.0f} s, {state}, while {probe.now}", frames)
    inside = frames[0] if frames and frames[0] != guilty(frames) else None
    why = f"inside {inside}" if inside else "" if frames else "its stack could not be read"
    words = "look at that line; lamp watch -- CMD names what a whole script waits for"
    return Finding("fault", what, why, words, "hang", {"pid": probe.process.pid, **culprit(frames)})


def _with_place(what: str, frames: list[Place]) -> str:
    found = culprit(frames)
    return f"{what}, at {found['file']}:{found['line']} in {found['func']}" if found else what


def _ask_for_stack(probe: _Probe) -> str:
    """SIGURG is ignored by a process that has not registered it yet. Read until it grows no more."""
    os.kill(probe.process.pid, signal.SIGURG)
    until, before, text = time.monotonic() + STACK_S, "", ""
    while time.monotonic() < until and not (text and text == before):
        time.sleep(0.05)
        before, text = text, probe.stack.read_text(errors="replace") if probe.stack.exists() else ""
    return text


def _how_it_ended(probe: _Probe) -> list[Finding]:
    """Nothing to say about a probe that came to its end."""
    code = probe.process.returncode
    said = probe.output.decode(errors="replace").strip().splitlines()
    last = f"its last words: {said[-1][:300]}" if said else "it said nothing"
    if probe.death:
        where = probe.death.get("culprit") or {}
        place = f", at {where['file']}:{where['line']} in {where['func']}" if where else ""
        first = str(probe.death["died"]).splitlines()[0][:400]
        why = f"while {probe.now}; the whole: {' | '.join(said[-3:])[:600]}" if said else f"while {probe.now}"
        missing = first.startswith("ModuleNotFoundError")
        remedy = "install it, or check PYTHONPATH" if missing else "mend what that line does"
        return [Finding("fault", f"{first}{place}", why, remedy, "raised", where)]
    if code < 0:
        name = signal.Signals(-code).name
        by_kernel = -code == signal.SIGKILL and _oom_kills() > probe.oom_before
        memory = "; the kernel killed a process for memory meanwhile" if by_kernel else ""
        what = f"killed by {name} (signal {-code}) while {probe.now}"
        figures = {"peak_bytes": float(probe.peak_bytes)}
        return [Finding("fault", what, f"{last}{memory}", "lamp watch -- CMD keeps the evidence of such a death", "rss_oom" if by_kernel else "killed", {"pid": probe.process.pid}, figures=figures)]  # fmt: skip
    if not probe.done:
        what = f"left with exit code {code} before its end, while {probe.now}"
        return [Finding("fault", what, last, "something called os._exit; a library, or your own code", "exit", {"pid": probe.process.pid})]  # fmt: skip
    return [] if probe.findings or probe.unreadable else [Finding("ok", "nothing amiss")]


def _about_its_words(probe: _Probe) -> list[Finding]:
    found = []
    if probe.left_out:
        found.append(Finding("warn", f"{probe.left_out:,} more findings like these were left out"))
    if probe.unreadable:
        why = "what they would have said is not known"
        found.append(
            Finding("fault", f"{probe.unreadable:,} lines of the probe could not be read", why, cause="garbled")
        )
    return found
