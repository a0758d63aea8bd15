"""lamp watch: somebody else's command under supervision, a process that runs already, or the live display of a run.

In:  `-- CMD...`, a pid, or a run's name.
Out: the command's own exit code; or the display until the run ends. Ctrl+C leaves a run alone.
"""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lamplighter import first_words
from lamplighter.commands.arguments import named_run, parse, refuse_controls
from lamplighter.errors import DONE, AlreadyRunning, BadConfig, LampError, UsageError
from lamplighter.procs import procfs
from lamplighter.procs.signals import left_by_ctrl_c
from lamplighter.rundir import RunDir, is_running, number, read_last_lines, read_status, take_lock
from lamplighter.slot import read_slot

_RECENT_BYTES = 1 << 16  # of events.jsonl
_RANKS_EVERY_S = 20.0

if TYPE_CHECKING:
    from lamplighter.watch.console import Console
    from lamplighter.watch.status import Observer


def watch(words: list[str]) -> int:
    """Somebody else's command, or the live display of a run."""
    if "--" in words:
        place = words.index("--")
        return _watch_command(words[:place], words[place + 1 :])
    if words and words[0].isdecimal():
        return _watch_process(int(words[0]), words[1:])
    return _watch_run(named_run("watch", words))


# ---------------------------------------------------------------- somebody else's command


def _watch_flags(
    *,
    run: str | None = None,
    runs_dir: Path = Path("runs"),
    on_stuck: Literal["report", "stop", "restart"] = "report",
    patience_s: float = 600.0,
    notify: str | None = None,
) -> None:
    """What `lamp watch -- CMD` takes."""


def _watch_command(words: list[str], command: list[str]) -> int:
    from lamplighter.watch.command import POLICIES, WatchedCommand
    from lamplighter.watch.restart_policy import RestartPolicy
    from lamplighter.watch.supervisor import Supervisor
    from lamplighter.watch.terminal import leave_as

    flags = parse("watch", _watch_flags, words)
    if not command:
        raise UsageError("nothing to watch", "no command after --", "lamp watch -- python train.py")
    run = _folder_for(command, flags["run"], flags["runs_dir"])
    policy = RestartPolicy(POLICIES[flags["on_stuck"]], flags["patience_s"])
    target = WatchedCommand(run, command, again=flags["on_stuck"] == "restart")
    code = Supervisor(run, target, policy, flags["notify"]).supervise()
    _write_page(run)
    return leave_as(code)


def _write_page(run: RunDir) -> None:
    """report.html where steps were counted; nothing of ours may spoil the end of somebody's command."""
    with contextlib.suppress(OSError, ValueError):  # no metrics, a full disk, a damaged line: `lamp report RUN` says it
        if run.metrics.stat().st_size:
            from lamplighter.dash import report_page

            report_page.write(run)


def _watch_process(pid: int, words: list[str]) -> int:
    """A process that runs already."""
    from lamplighter.watch.attached import AttachedProcess
    from lamplighter.watch.command import POLICIES
    from lamplighter.watch.restart_policy import RestartPolicy
    from lamplighter.watch.supervisor import Supervisor

    flags = parse("watch", _watch_flags, words)
    if flags["on_stuck"] == "restart":
        raise UsageError(
            "a process that runs already cannot be restarted", "lamp has not started it", "--on-stuck stop"
        )
    run = _folder_for([procfs.look(pid).name or "process"], flags["run"] or f"pid-{pid}", flags["runs_dir"])
    policy = RestartPolicy(POLICIES[flags["on_stuck"]], flags["patience_s"])
    return Supervisor(run, AttachedProcess(run, pid), policy, flags["notify"]).supervise()


def _folder_for(command: list[str], wanted: str | None, runs_dir: Path) -> RunDir:
    """--run, else the script's name; a second one at the same time gets a number."""
    name = wanted or _script_name(command)
    refuse_controls(name)
    for place in range(1, 100):
        run = RunDir(runs_dir / (name if place == 1 else f"{name}-{place}"))
        if run.config.exists():
            if wanted:
                raise BadConfig(f"{wanted} is a training run", f"in {run.path}", "choose another name with --run")
            continue
        run.create()
        try:
            take_lock(run)
        except AlreadyRunning:
            if wanted:
                raise
            continue
        return run
    raise AlreadyRunning(f"{name} is watched a hundred times already", f"in {runs_dir}", "choose a name with --run")


def _script_name(command: list[str]) -> str:
    """train for `python train.py`, litgpt for `python -m litgpt`, run for `bash run.sh`."""
    named = next((word for word in command if word.endswith((".py", ".sh"))), None)
    if named is None and "-m" in command[:-1]:
        named = command[command.index("-m") + 1]
    name = Path(named or command[0]).name
    return (
        "".join(c if c.isalnum() or c in "-_" else "-" for c in name.removesuffix(".py").removesuffix(".sh")) or "cmd"
    )


# ---------------------------------------------------------------- the live display of a run


def _watch_run(run: RunDir) -> int:
    """Show a run until it ends; Ctrl+C leaves it alone."""
    from lamplighter.watch.console import Console
    from lamplighter.watch.status import standing_flags, tell_flags

    running, status = is_running(run), read_status(run)
    console = Console(1, whole=running)
    if status["damage"]:
        console.say(f"WARNING  {status['damage']}", "bold yellow")
    flags = standing_flags(status)  # those that went up before we looked
    for text in tell_flags(flags):
        console.say(text, "bold yellow")
    if not running:
        console.say(
            f"{run.name} is not running: {status.get('outcome') or status.get('now', 'it has said nothing yet')}"
        )
        console.close()
        return DONE
    left = left_by_ctrl_c()
    _say_recent(run, console)
    console.say(f"watching {run.name}; Ctrl+C leaves it alone")
    _show_until_the_end(run, console, flags, left)
    if left.is_set():
        console.say(f"left; {run.name} goes on")
    else:
        status = read_status(run)
        safe = f"step {status.get('durable_step', 0)} is safe; run the same command again"
        lost = f"{run.name} was lost: its parent was killed; {safe}"
        console.say(str(status.get("outcome", "it has ended" if status.get("verb") == "watch" else lost)))
    console.close()
    return DONE


def _say_recent(run: RunDir, console: Console) -> None:
    """What the run has said before we looked, on a terminal that has the room for it."""
    from lamplighter.watch.status import tell

    if console.display is None:
        return
    for event in read_last_lines(run.events, _RECENT_BYTES):
        if event.get("type") in ("eval", "sample", "checkpoint", "warning", "verdict", "well again"):
            for text, style in tell(event):
                console.say(text, style, at=number(event.get("t"), time.time()))


def _show_until_the_end(run: RunDir, console: Console, flags: dict[str, dict[str, Any]], left: threading.Event) -> None:
    """Events in words, and now: of our own run as we see it, of somebody else's command in the words of its watcher."""
    from lamplighter.config import Budget, load_dump
    from lamplighter.watch.stall import LOOK_EVERY_S
    from lamplighter.watch.status import Observer, tell

    first_words.end()
    try:
        budget = load_dump(run.config).budget
    except LampError:  # damaged, or not written yet, or somebody else's command: the rest can be shown all the same
        budget = Budget()
    observer = Observer(run, [run.events], budget)
    observer.metrics.offset = max(0, observer.metrics.offset - (1 << 20))  # enough for a curve
    observer.status.flags = flags
    ranks = _Ranks(console)
    while not left.is_set():
        alive, status = is_running(run), read_status(run)
        for event in _look(observer, status):
            for text, style in tell(event):
                console.say(text, style)
        observer.status.started = time.monotonic() - number(status.get("spent_s")) - _age_of(status)
        if not alive:
            return
        ranks.look(status)
        observer.status.ranks = ranks.now
        if status.get("verb") == "watch":
            observer.status.told = str(status.get("now") or "starting")
        console.show(observer.status)
        left.wait(LOOK_EVERY_S)


class _Ranks:
    """A line for each rank: part of the page on a terminal; in a pipe now and then, and whenever another one is the slowest."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.now: list[dict[str, Any]] = []
        self.said_at = -_RANKS_EVERY_S
        self.said: int | None = None

    def look(self, status: dict[str, Any]) -> None:
        from lamplighter.watch.rank_lines import rank_lines, ranks_of, slowest

        self.now = ranks_of(status)
        if not self.now or self.console.display is not None:
            return
        found = slowest(self.now)
        changed = (found and found[0]) != self.said
        if changed or time.monotonic() - self.said_at > _RANKS_EVERY_S:
            self.said_at, self.said = time.monotonic(), found and found[0]
            self.console.say("\n".join(rank_lines(self.now)))


def _age_of(status: dict[str, Any]) -> float:
    """Seconds since a status was written."""
    now = time.time()
    return max(0.0, now - number(status.get("t"), now))


def _look(observer: Observer, status: dict[str, Any]) -> list[dict[str, Any]]:
    """The run's first rank from outside; what a stall is judged to be, the run's own supervisor says."""
    slot = read_slot(observer.run.slot(0))
    process = procfs.look(slot.pid) if slot is not None else None
    stalled_s = max(0.0, time.monotonic() - slot.tick_ns / 1e9) if slot is not None else 0.0
    observer.status.stall_words = str(status.get("stall") or "")
    return [event for _, event in observer.look(slot, process, stalled_s, number(status.get("spent_s")))]
