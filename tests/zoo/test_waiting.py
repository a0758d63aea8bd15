"""Programs that wait, under `lamp watch`: a hang is named by its line and by what it waits for; a healthy wait is left alone.

The programs and the truth about each are tests/field/waits_*.py and public_*.py. Those that a session's tests ask for run
before the first of them, several at a time; then each program passes or fails by its name. LAMP_ZOO_RESULTS=FILE keeps the
figures, e.g. LAMP_ZOO_RESULTS=benchmarks/results/waits.json.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import public_gpt
import public_libraries
import pytest
import waits_asyncio
import waits_busy
import waits_children
import waits_events
import waits_files
import waits_loaders
import waits_locks
import waits_pipes
import waits_pools
import waits_processes
import waits_prompts
import waits_ranks
import waits_sockets
from waits import Program, programs_in

from running import LONG, events_of, four_hogs, verdicts_of
from watched import marks, watching

MODULES = (
    waits_asyncio, waits_busy, waits_children, waits_events, waits_files, waits_loaders, waits_locks, waits_pipes, waits_pools,
    waits_processes, waits_prompts, waits_ranks, waits_sockets, public_gpt, public_libraries,
)  # fmt: skip
PROGRAMS = [program for module in MODULES for program in programs_in(vars(module))]
HANGS, HEALTHY, PUBLIC = ([p for p in PROGRAMS if p.kind == kind] for kind in ("hang", "healthy", "public"))

WATCHED_S = 10.0  # after a hang began
NAMED_S = 7.0
QUICK = (
    "thread_that_waits_for_a_child", "lock_of_a_live_child", "long_task_and_workers_that_come_and_go", "slow_producer",
    "cycle_with_a_timeout", "event_set_by_an_interval_timer",
)  # fmt: skip

# What is known to be weak, by test: name of the program -> reason. Who mends one takes it out: a test that passes against this
# table fails. None is, as of now.
WEAK: dict[str, dict[str, str]] = {"line": {}, "cause": {}, "state": {}, "time": {}}


@dataclass(frozen=True)
class Seen:
    """What was said of a program, and what became of it: when its hang began, if it is one; its code, None if it still ran."""

    program: Program
    code: int | None
    began: float
    holders: tuple[int, ...]
    verdicts: tuple[dict[str, Any], ...]
    starts: int
    output: str

    def told(self) -> str:
        """What a failure should show."""
        said = [
            f"{v['t'] - self.began:.1f} s: {v['state']} {v['cause']} {v['culprit']} {v['action']}: {v['why']} {v.get('waits_for')}"
            for v in self.verdicts
        ]
        return f"{self.program.name}: code {self.code}\n" + "\n".join(said) + f"\n{self.output[-2000:]}"

    def after(self, right: Callable[[Seen, dict[str, Any]], bool]) -> float | None:
        """Seconds until the first verdict on the hang of which this holds."""
        times = [v["t"] - self.began for v in self.verdicts if v["t"] > self.began - 0.3 and right(self, v)]
        return min(times, default=None)


# ---------------------------------------------------------------- what a verdict says


def words_of(seen: Seen, verdict: dict[str, Any]) -> str:
    """The words about the cause, without the names of script, program and functions, which would give it away."""
    waits_for = json.dumps(verdict.get("waits_for") or {}, ensure_ascii=False)
    text = f"{verdict['cause'].replace('_', ' ')} | {verdict['why']} | {waits_for}"
    return re.sub(rf"[\w/.-]+\.py(:\d+ \([\w<>.]+\))?|\b{seen.program.name}\b", "SCRIPT", text)


def has_line(seen: Seen, verdict: dict[str, Any]) -> bool:
    """The culprit's line, or a line in the sentence, is one that may be named."""
    right = seen.program.lines()
    culprit = verdict["culprit"]
    if (Path(str(culprit.get("file", ""))).name, culprit.get("line")) in right:
        return True
    text = verdict["why"] + json.dumps(verdict.get("waits_for") or {})
    return any(re.search(rf"\b{re.escape(file)}:{line}\b", text) for file, line in right)


def has_what(seen: Seen, verdict: dict[str, Any]) -> bool:
    return re.search(seen.program.what, words_of(seen, verdict), re.IGNORECASE) is not None


def has_cause(seen: Seen, verdict: dict[str, Any]) -> bool:
    """What is waited for, and who has it."""
    holder = "|".join(rf"\b{pid}\b" for pid in seen.holders) or "(?!)"
    who = seen.program.who.replace("{holder}", f"({holder})")
    return has_what(seen, verdict) and re.search(who, words_of(seen, verdict), re.IGNORECASE) is not None


def named_after(seen: Seen) -> float | None:
    """Line and cause in one verdict."""
    return seen.after(lambda seen, verdict: has_line(seen, verdict) and has_cause(seen, verdict))


def is_said_rightly(seen: Seen) -> bool:
    """A state that the program has, or, where that it is stuck could be proved, at least that it waits."""
    allowed = {*seen.program.states, "waiting"} if "stuck" in seen.program.states else set(seen.program.states)
    return any(verdict["state"] in allowed for verdict in seen.verdicts)


# ---------------------------------------------------------------- running them


def see(program: Program, seconds: float, *flags: str) -> Seen:
    """One program: a hang until it has been watched for a while, any other to its end."""
    folder = Path(tempfile.mkdtemp(prefix="field-"))  # short: the sockets of multiprocessing live below it
    try:
        words = program.command(sys.executable, seconds)
        with watching(words, folder, *flags, stdin=program.stdin, TMPDIR=str(folder)) as (going, run):
            began, code = math.inf, None
            if program.kind == "hang":
                began = await_hang(going, folder)
                code = going.poll()
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):  # code stays None
                    code = going.wait(timeout=10 * seconds + 120)
            holders = tuple(pid for _, pid in marks(folder)["holder"])
            output = (folder / "out.txt").read_text(errors="replace")
            starts = len(events_of(run, "start"))
            return Seen(program, code, began, holders, tuple(verdicts_of(run)), starts, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def await_hang(going: subprocess.Popen[bytes], folder: Path) -> float:
    """When it began, after it has lasted for a while; infinity if it never did."""
    deadline = time.monotonic() + 120
    while not marks(folder)["fault"]:
        if going.poll() is not None or time.monotonic() > deadline:
            return math.inf
        time.sleep(0.1)
    time.sleep(WATCHED_S)
    times = [at for at, _ in marks(folder)["fault"]]
    return max(at for at in times if at < times[0] + 4)  # of several ranks or threads the last


def see_all(programs: list[Program], at_once: int, seconds: float, *flags: str) -> dict[str, Seen]:
    pool = ThreadPoolExecutor(at_once)
    try:
        going = [pool.submit(see, program, seconds, *flags) for program in programs]
        return {program.name: seen.result() for program, seen in zip(programs, going, strict=True)}
    finally:
        pool.shutdown(cancel_futures=True)  # at Ctrl+C no more are begun


def asked_for(request: pytest.FixtureRequest) -> list[Program]:
    """The programs of those tests of this session that look at this fixture, in this way."""
    fixture, way = request.fixturename, getattr(request, "param", None)
    items = [item for item in request.session.items if fixture in getattr(item, "fixturenames", ())]
    wanted = [item.callspec.params for item in items]  # type: ignore[attr-defined]
    names = {params["program"].name for params in wanted if params.get(fixture) == way}
    return [program for program in PROGRAMS if program.name in names]


def keep(name: str, figures: dict[str, Any]) -> None:
    """Beside those that are in the file already."""
    if path := os.environ.get("LAMP_ZOO_RESULTS"):
        file = Path(path)
        before = json.loads(file.read_text()) if file.exists() else {"command": "make zoo", "figures": {}}
        before["figures"][name] = figures
        file.write_text(json.dumps(before | {"date": time.strftime("%Y-%m-%d")}, indent=1) + "\n")


@pytest.fixture(scope="session")
def hangs(request: pytest.FixtureRequest) -> dict[str, Seen]:
    """Those that keep a core busy come after the others, one at a time: else it is true that they are starved."""
    wanted = asked_for(request)
    seen = see_all([one for one in wanted if not one.heavy], 6, 60.0)
    seen |= see_all([one for one in wanted if one.heavy], 1, 60.0)
    named = sorted(after for one in seen.values() if (after := named_after(one)) is not None)
    keep(
        "hangs",
        {
            "programs": len(seen),
            "line_right": sum(one.after(has_line) is not None for one in seen.values()),
            "what_right": sum(one.after(has_what) is not None for one in seen.values()),
            "cause_right": sum(one.after(has_cause) is not None for one in seen.values()),
            "called_stuck_wrongly": sum(bool(stuck_wrongly(one)) for one in seen.values()),
            "p50_s": round(named[len(named) // 2], 1) if named else None,
            "p95_s": round(named[int(0.95 * (len(named) - 1))], 1) if named else None,
            "max_s": round(named[-1], 1) if named else None,
            "named_s": {name: round(after, 1) for name, one in seen.items() if (after := named_after(one)) is not None},
        },
    )
    return seen


WAYS = {"stop": ("--on-stuck", "stop"), "restart": ("--on-stuck", "restart"), "beside hogs": ("--on-stuck", "stop")}


@pytest.fixture(scope="session", params=WAYS)
def healthy(request: pytest.FixtureRequest) -> dict[str, Seen]:
    with four_hogs() if request.param == "beside hogs" else contextlib.nullcontext():
        seen = see_all(asked_for(request), 8, 60.0, *WAYS[request.param])
    keep(f"healthy, {request.param}", left_alone(seen))
    return seen


@pytest.fixture(scope="session")
def public(request: pytest.FixtureRequest) -> dict[str, Seen]:
    with four_hogs():
        seen = see_all(asked_for(request), 2, 45.0, "--on-stuck", "stop")
    keep("public, beside hogs", left_alone(seen))
    return seen


def left_alone(seen: dict[str, Seen]) -> dict[str, int]:
    return {
        "programs": len(seen),
        "called_stuck": sum(any(v["state"] == "stuck" for v in one.verdicts) for one in seen.values()),
        "stopped": sum(bool(one.code) or one.starts > 1 for one in seen.values()),
    }


# ---------------------------------------------------------------- the tests


def by_name(programs: list[Program], aspect: str = "") -> pytest.MarkDecorator:
    weak = WEAK.get(aspect, {})
    marks_of = {name: pytest.mark.xfail(reason=reason, strict=True) for name, reason in weak.items()}
    params = [pytest.param(one, id=one.name, marks=marks_of.get(one.name, ())) for one in programs]
    return pytest.mark.parametrize("program", params)


def stuck_wrongly(seen: Seen) -> list[str]:
    """What was said as stuck before the hang began, or at all where somebody alive may end the wait."""
    early = [v["why"] for v in seen.verdicts if v["state"] == "stuck" and v["t"] < seen.began - 0.3]
    return early or [v["why"] for v in seen.verdicts if v["state"] == "stuck" and "stuck" not in seen.program.states]


@LONG
@by_name(HANGS, "line")
def test_the_line_is_named(program: Program, hangs: dict[str, Seen]) -> None:
    seen = hangs[program.name]
    assert seen.began < math.inf and seen.code is None, f"it does not hang\n{seen.told()}"
    assert seen.after(has_line) is not None, seen.told()


@LONG
@by_name(HANGS, "cause")
def test_what_is_waited_for_is_named(program: Program, hangs: dict[str, Seen]) -> None:
    seen = hangs[program.name]
    assert seen.after(has_cause) is not None, seen.told()


@LONG
@by_name(HANGS, "state")
def test_stuck_is_said_only_where_nobody_can_end_it(program: Program, hangs: dict[str, Seen]) -> None:
    seen = hangs[program.name]
    assert stuck_wrongly(seen) == [], seen.told()
    assert is_said_rightly(seen), seen.told()


@LONG
@by_name(HANGS, "time")
def test_a_hang_is_named_in_seven_seconds(program: Program, hangs: dict[str, Seen]) -> None:
    seen = hangs[program.name]
    after = seen.after(has_line) if program.name in WEAK["cause"] else named_after(seen)
    assert after is not None and after < NAMED_S, seen.told()


def check_left_alone(seen: Seen) -> None:
    assert [v["why"] for v in seen.verdicts if v["state"] == "stuck"] == [], seen.told()
    assert {v["action"] for v in seen.verdicts} <= {"none"}, seen.told()
    assert seen.starts == 1, seen.told()
    assert seen.code == 0, seen.told()
    assert re.findall(r"^DONE\s*$", seen.output, re.MULTILINE) == ["DONE"], seen.told()


@LONG
@by_name(HEALTHY)
def test_a_healthy_wait_is_left_alone(program: Program, healthy: dict[str, Seen]) -> None:
    check_left_alone(healthy[program.name])


@LONG
@by_name(PUBLIC)
def test_a_public_program_beside_hogs_is_left_alone(program: Program, public: dict[str, Seen]) -> None:
    check_left_alone(public[program.name])


def test_a_few_healthy_waits_are_left_alone() -> None:
    few = [program for program in HEALTHY if program.name in QUICK]
    assert len(few) == len(QUICK)
    for seen in see_all(few, 6, 8.0, "--on-stuck", "stop").values():
        check_left_alone(seen)


def test_every_program_has_a_name_of_its_own_and_a_line_to_stand_at() -> None:
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
    for program in HANGS:
        assert sum(program.lines().values()) == 1, program.name
        re.compile(program.what + program.who)
    for weak in WEAK.values():
        assert weak.keys() <= {program.name for program in HANGS}
