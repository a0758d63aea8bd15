"""What watching costs: the real supervisor over simulated ranks, whose slots change every second.

In:  nothing. A rank is a sleeping process; one more process writes the slots of all of them, as training ranks would.
Out: share of a core that the supervisor takes, for 1, 100 and 1,000 ranks in turn, with the ratio to one rank; how many of them it sees; and
     with --profile where the time goes. Goal: 1,000 ranks under 5 % of a core.

    python benchmarks/supervisor_ranks.py [--ranks 1 100 1000] [--seconds 15] [--step-s 1] [--rounds 3] [--json benchmarks/results/supervisor_ranks.json]
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import measured
import psutil

from lamplighter.procs import prctl
from lamplighter.rundir import RunDir
from lamplighter.slot import SlotWriter

_STARTED_S = 180.0
_SETTLE_S = 4.0


# ---------------------------------------------------------------- the simulated ranks


def write_slots(folder: Path, pids: list[int], step_s: float) -> None:
    """Every rank makes a step at the same time, as ranks do, and is in a collective for most of it."""
    run, slots = RunDir(folder), []
    for rank, pid in enumerate(pids):
        slot = SlotWriter()
        for name, value in (("pid", pid), ("rank", rank), ("world", len(pids)), ("steps", 1_000_000)):
            slot.set(name, value)
        slot.text("phase", "train")
        slots.append(slot.publish(str(run.slot(rank).with_suffix(""))))
    while True:
        now = time.monotonic_ns()
        for slot in slots:
            for name, by in (
                ("step", 1),
                ("ticks", 1),
                ("coll_seq", 1),
                ("tokens", 4096),
                ("coll_ns", int(0.6e9 * step_s)),
            ):
                slot.add(name, by)
            slot.set("tick_ns", now)
        time.sleep(step_s)


def supervise(folder: Path, ranks: int, seconds: float, profile: bool) -> None:
    """In a process of its own: the supervisor as `lamp train` makes it, over sleepers."""
    from lamplighter.watch.console import Console
    from lamplighter.watch.launcher import Launcher
    from lamplighter.watch.restart_policy import RestartPolicy
    from lamplighter.watch.supervisor import Supervisor
    from lamplighter.watch.trainer import ChildSpec, Trainer

    class Simulated(Launcher):
        """Its ranks sleep; what they would report is written by somebody else."""

        def place(self, *_: object) -> subprocess.Popen[bytes]:  # type: ignore[override]
            return subprocess.Popen(["sleep", "3600"], start_new_session=True, stdin=subprocess.DEVNULL)

    run = RunDir(folder)
    run.create()
    trainer = Trainer(run, ChildSpec("train", {}, ranks=ranks, keeps_report=False), Console(1, live=False))
    trainer.launcher = Simulated(run, "train", ranks, -1, -1, subprocess.DEVNULL, elastic=False)
    profiler = cProfile.Profile() if profile else None
    begun = False
    looked = Supervisor._look

    def look(self: Supervisor) -> None:
        nonlocal begun
        if not begun:
            begun = True
            pids = [process.pid for process in trainer.processes]
            (folder / "pids.json").write_text(json.dumps(pids))
            if profiler is not None:
                profiler.enable()
        looked(self)

    Supervisor._look = look  # type: ignore[method-assign]
    with contextlib.suppress(KeyboardInterrupt):
        Supervisor(run, trainer, RestartPolicy("report", 600.0)).supervise()
    if profiler is not None:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(22)


# ---------------------------------------------------------------- measuring it


def share_of_a_core(ranks: int, seconds: float, step_s: float, profile: bool) -> tuple[float, int]:
    """CPU seconds of the supervisor in a second, and how many ranks its status has with a step."""
    with tempfile.TemporaryDirectory(prefix="lamp-ranks-") as place:
        folder = Path(place) / "r"
        words = [sys.executable, __file__, "--supervise", str(folder), "--ranks", str(ranks), "--seconds", str(seconds)]
        said = None if profile else subprocess.DEVNULL
        child = subprocess.Popen([*words, *(["--profile"] if profile else [])], stdout=subprocess.DEVNULL, stderr=said)
        pids: list[int] = []
        writer = None
        try:
            until = time.monotonic() + _STARTED_S
            while not (folder / "pids.json").exists():
                if child.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"the supervisor of {ranks} ranks did not start")
                time.sleep(0.1)
            pids = json.loads((folder / "pids.json").read_text())
            writer = subprocess.Popen(
                [sys.executable, __file__, "--write", str(folder), "--step-s", str(step_s)], stdin=subprocess.DEVNULL
            )
            time.sleep(_SETTLE_S)
            process = psutil.Process(child.pid)
            before, began = sum(process.cpu_times()[:2]), time.monotonic()
            time.sleep(seconds)
            used, passed = sum(process.cpu_times()[:2]) - before, time.monotonic() - began
            status = json.loads(RunDir(folder).status.read_text())
            seen = status.get("ranks") or [status]
            return used / passed, sum(one["step"] > 0 for one in seen)
        finally:
            for pid in pids:  # our own sleepers, each in a session of its own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if writer is not None:
                writer.kill()
                writer.wait()
            try:
                child.wait(30 if profile else 10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def main() -> None:
    wanted = argparse.ArgumentParser(description=__doc__)
    wanted.add_argument("--ranks", type=int, nargs="+", default=[1, 100, 1000])
    wanted.add_argument("--seconds", type=float, default=15.0)
    wanted.add_argument("--step-s", type=float, default=1.0)
    wanted.add_argument("--rounds", type=int, default=3)
    wanted.add_argument("--json", type=Path)
    wanted.add_argument("--profile", action="store_true")
    wanted.add_argument("--supervise", type=Path, help=argparse.SUPPRESS)
    wanted.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = wanted.parse_args()
    if given.supervise is not None:
        supervise(given.supervise, given.ranks[0], given.seconds, given.profile)
        return
    if given.write is not None:
        prctl.belong_to(os.getppid())
        write_slots(given.write, json.loads((given.write / "pids.json").read_text()), given.step_s)
    measured.say_machine()
    found: dict[int, list[float]] = {count: [] for count in given.ranks}
    seen: dict[int, int] = {}
    for _ in range(given.rounds):
        for count in given.ranks:
            share, seen[count] = share_of_a_core(count, given.seconds, given.step_s, given.profile)
            found[count].append(share)
    base = sorted(found[given.ranks[0]])[given.rounds // 2]
    rows = []
    for count, shares in found.items():
        middle = sorted(shares)[len(shares) // 2]
        row = {
            "ranks": count,
            "seen": seen[count],
            "share_of_a_core": middle,
            "least": min(shares),
            "most": max(shares),
        }
        rows.append({**row, "times_of_first": middle / base if base else None, "load": os.getloadavg()[0]})
        ratio = f"{middle / base:6.1f} x" if base else ""
        print(f"{count:>6} ranks, {seen[count]:>5} seen: {middle:7.2%} of a core ({min(shares):.2%} to {max(shares):.2%}) {ratio}")  # fmt: skip
    print(f"load {os.getloadavg()[0]:.1f}; goal: 1,000 ranks under 5 % of a core")
    if given.json is not None:
        given.json.write_text(
            json.dumps(
                {"rows": rows, "seconds": given.seconds, "step_s": given.step_s, "rounds": given.rounds}, indent=1
            )
        )


if __name__ == "__main__":
    main()
