"""lamp why, stop and save: requests to the parent of a run, put into its ask/ folder; and one look at any process.

In:  a run's name (never a signal, never a guess by pid); for why also any process by its pid.
Out: the answer; stop and save wait until it is done. A look at a process disturbs nothing, and says what it may not see.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import first_words
from lamplighter.commands import result, write
from lamplighter.commands.arguments import named_run, parse
from lamplighter.errors import DONE, ChildLost, InputMissing
from lamplighter.procs import procfs
from lamplighter.rundir import RunDir, is_running, read_status
from lamplighter.watch.rank_lines import rank_lines, ranks_of

if TYPE_CHECKING:
    from lamplighter.procs.stacks import Stacks
    from lamplighter.watch.console import Console
    from lamplighter.watch.process_tree import Snapshot

_SAY_EVERY_S = 1.5
_BETWEEN_LOOKS_S = 1.0


def _why_flags(run: str, /, *, runs_dir: Path = Path("runs")) -> None:
    """A run by name, or a process by its number."""


def why(words: list[str]) -> int:
    """What a run, or any process, is doing right now."""
    flags = parse("why", _why_flags, words)
    name, runs_dir = flags["run"], flags["runs_dir"]
    if name.isascii() and name.isdecimal() and not (runs_dir / name).exists():
        looking = f"looking at process {name} twice, a second apart"
        write(2, f"{time.strftime('%H:%M:%S')}  {looking}\n")
        first_words.doing(looking)
        return result(_inspect(int(name)))
    run = named_run("why", words, need_running=True)
    answer = _ask(run, "why")
    text = str(answer.get("text") or "it has nothing to say").rstrip()
    return result("\n".join([*rank_lines(ranks_of(read_status(run))), text]) + "\n")


def stop(words: list[str]) -> int:
    """End a run with everything saved: ask, then wait for the end."""
    from lamplighter.watch.console import Console

    run = named_run("stop", words, need_running=True)
    _ask(run, "stop")
    console, started = Console(1, live=False), time.monotonic()
    while is_running(run):
        _wait(console, f"stopping {run.name}", started, str(read_status(run).get("now", "")))
    console.say(str(read_status(run).get("outcome", "stopped")))
    console.close()
    return DONE


def save(words: list[str]) -> int:
    """Save now and go on: ask, then wait until the step is durable."""
    from lamplighter.watch.console import Console

    run = named_run("save", words, need_running=True)
    step = _ask(run, "save").get("step") or 0
    console, started = Console(1, live=False), time.monotonic()
    while is_running(run) and (safe := read_status(run).get("durable_step") or 0) < step:
        _wait(console, f"saving {run.name}", started, f"safe to step {safe}, wanted {step}")
    if step:
        safe = read_status(run).get("durable_step") or 0
        console.say(f"{run.name}: safe to step {safe}; next: lamp checkpoints {run.address}")
    else:
        console.say(f"{run.name} has not made a step yet: there is nothing to save")
    console.close()
    return DONE


def _ask(run: RunDir, kind: str) -> dict[str, Any]:
    """Answered by the run's parent within a second."""
    from lamplighter.watch.supervisor import ask

    first_words.doing(f"waiting for the answer of {run.name}")
    answer = ask(run, kind)
    if answer is None:
        raise ChildLost(
            f"{run.name} holds its lock, but nobody answers",
            "its parent process is stopped or very busy",
            f"look at {run.status} and {run.console}",
        )
    return answer


def _wait(console: Console, doing: str, started: float, words: str) -> None:
    """A moment; a line when one is due."""
    from lamplighter.watch.status import duration

    first_words.end()
    if time.monotonic() - console.last_line > _SAY_EVERY_S:
        console.say(f"{doing} for {duration(time.monotonic() - started)}: {words}")
    time.sleep(0.1)


# ---------------------------------------------------------------- any process


def _inspect(pid: int) -> str:
    """Two looks and two samples of every stack, a second apart, and what they mean."""
    from lamplighter.procs.waits import look_when_settled
    from lamplighter.watch import tree_diagnosis
    from lamplighter.watch.evidence import GroupSample
    from lamplighter.watch.process_tree import ProcessTree
    from lamplighter.watch.stall import explain, take_all
    from lamplighter.watch.status import duration

    if procfs.look(pid).state in "XZ":
        raise InputMissing(f"there is no process {pid}", "it has ended, or never was", "lamp runs lists our own runs")
    with tempfile.TemporaryDirectory(prefix="lamp-why-") as folder:
        tree = ProcessTree([pid], Path(folder))
        first = tree.look(closely=True)
        taken = take_all(tree, first.processes, everybody=True)
        samples = {one: (stacks,) for one, stacks in taken.items() if stacks is not None}
        waits = look_when_settled([process.pid for process in first.processes])
        snapshots = [tree.look(closely=True)]  # after the stacks: who traces a thread makes it run a little
        time.sleep(_BETWEEN_LOOKS_S)
        snapshots.append(tree.look(closely=True))
        tree.close()
    finding = tree_diagnosis.judge(GroupSample(snapshots[0], snapshots[-1], samples, 0.0, waits))
    age = duration(_age_s(pid))
    head = f"process {pid}, running for {age}, looked at for {snapshots[-1].at - snapshots[0].at:.1f} s from outside"
    text = [explain(head, snapshots[-1], taken, finding), *_unseen(snapshots[-1], taken)]
    text.append("next: start it with  lamp watch -- CMD...  and its steps, batches and collectives are counted too")
    return "\n".join(text) + "\n"


def _age_s(pid: int) -> float:
    age_s = procfs.age_s(pid)
    if age_s is None:
        raise InputMissing(f"process {pid} has just ended", "it is not there any more", "lamp runs lists our own runs")
    return age_s


def _unseen(snapshot: Snapshot, taken: dict[int, Stacks | None]) -> list[str]:
    """What we may not look at, and what would let us."""
    lines = []
    blind = [m.pid for m in snapshot.processes if procfs.is_python(m.pid) and taken.get(m.pid) is None]
    if blind:
        lines.append(
            f"not seen: the stacks of {', '.join(map(str, blind))} (reading another process needs ptrace);"
            " try: sudo lamp why, or sysctl kernel.yama.ptrace_scope=0, or docker run --cap-add SYS_PTRACE"
        )
    if unknown := procfs.not_known(snapshot.processes[0].look):
        lines.append(unknown)
    elif any(not m.look.wchan.strip("0") and not m.look.syscall for m in snapshot.processes):
        lines.append("not seen: system calls and bytes moved of a process of another user; try: sudo lamp why")
    return lines
