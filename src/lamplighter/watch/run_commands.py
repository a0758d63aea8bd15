"""Readers of runs: the live display from another terminal, why, stop, save, the list; and sessions that end with a result.

In:  a run folder (never a signal, never a guess by pid: requests go through ask/).
Out: words and tables for people.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from lamplighter.config import Budget, load_dump
from lamplighter.errors import CHILD_LOST, DONE, ChildLost, LampError
from lamplighter.rundir import RunDir, is_running, read_record, write_atomic
from lamplighter.watch import redflags
from lamplighter.watch.console import LINE_EVERY_S, Console, result
from lamplighter.watch.observe import Observer, Tail
from lamplighter.watch.status import duration, tell
from lamplighter.watch.supervisor import LOOK_EVERY_S, ChildSpec, Supervisor, ask


def watch_run(run: RunDir) -> int:
    """Show a run until it ends; Ctrl+C leaves it alone."""
    try:
        budget = load_dump(run.config).budget
    except LampError:  # damaged, or not written yet: the rest can be shown all the same
        budget = Budget()
    console = Console(1)
    observer = Observer(run, run.events, budget, fresh=True)
    observer.metrics.offset = max(0, observer.metrics.offset - (1 << 20))  # enough for a curve
    status = read_record(run.status)
    observer.picture.flags = redflags.recall(status)  # those that went up before we looked
    for text in redflags.tell(observer.picture.flags):
        console.say(text, "bold yellow")
    if not is_running(run):
        console.say(
            f"{run.name} is not running: {status.get('outcome') or status.get('now', 'it has said nothing yet')}"
        )
        console.close()
        return DONE
    try:
        console.say(f"watching {run.name}; Ctrl+C leaves it alone")
        if read_record(run.status).get("verb") == "watch":
            return _follow_foreign(run, console)
        while True:
            alive = is_running(run)
            spent_s = float(read_record(run.status).get("spent_s", 0.0))
            for event in observer.look(spent_s):
                for text, style in tell(event):
                    console.say(text, style)
            if not alive:
                break
            console.show(observer.picture)
            time.sleep(LOOK_EVERY_S)
    except KeyboardInterrupt:
        console.say(f"left; {run.name} goes on")
        console.close()
        return DONE
    status = read_record(run.status)
    lost = f"{run.name} was lost: its parent was killed; step {status.get('durable_step', 0)} is safe; run the same command again"
    console.say(str(status.get("outcome", lost)))
    console.close()
    return DONE


def _follow_foreign(run: RunDir, console: Console) -> int:
    """Somebody else's command: its watcher has the words."""
    events = Tail(run.events, from_end=True)
    while is_running(run):
        for event in events.records():
            for text, style in tell(event):
                console.say(text, style)
        if time.monotonic() - console.last_line > LINE_EVERY_S:
            console.say(_now(run))
        time.sleep(LOOK_EVERY_S)
    console.say(str(read_record(run.status).get("outcome", "it has ended")))
    console.close()
    return DONE


def explain(run: RunDir) -> int:
    """lamp why: answered by the run's parent within a second."""
    answer = ask(run, "why")
    if answer is None:
        raise _no_answer(run)
    result(answer["text"].rstrip() + "\n")
    return DONE


def stop_run(run: RunDir) -> int:
    """lamp stop: ask, then wait for the end."""
    console = Console(1, live=False)
    if ask(run, "stop") is None:
        console.close()
        raise _no_answer(run)
    started = time.monotonic()
    while is_running(run):
        if time.monotonic() - console.last_line > 1.5:
            console.say(f"stopping {run.name} for {duration(time.monotonic() - started)}: {_now(run)}")
        time.sleep(0.1)
    console.say(str(read_record(run.status).get("outcome", "stopped")))
    console.close()
    return DONE


def save_run(run: RunDir) -> int:
    """lamp save: ask, then wait until the step is durable."""
    console = Console(1, live=False)
    answer = ask(run, "save")
    if answer is None:
        console.close()
        raise _no_answer(run)
    step, started = int(answer.get("step", 0)), time.monotonic()
    if not step:
        console.say(f"{run.name} has not made a step yet: there is nothing to save")
        console.close()
        return DONE
    while is_running(run) and (durable := int(read_record(run.status).get("durable_step", 0))) < step:
        if time.monotonic() - console.last_line > 1.5:
            console.say(
                f"saving {run.name} for {duration(time.monotonic() - started)}: safe to step {durable}, wanted {step}"
            )
        time.sleep(0.1)
    console.say(
        f"{run.name}: safe to step {read_record(run.status).get('durable_step', 0)}; next: lamp checkpoints {run.name}"
    )
    console.close()
    return DONE


def _now(run: RunDir) -> str:
    return str(read_record(run.status).get("now", ""))


def _no_answer(run: RunDir) -> ChildLost:
    return ChildLost(
        f"{run.name} holds its lock, but nobody answers",
        "its parent process is stopped or very busy",
        f"look at {run.status} and {run.console}",
    )


def list_runs(runs_dir: Path, as_json: bool) -> int:
    """One row a run, newest first."""
    rows = []
    for path in runs_dir.glob("*/events.jsonl"):
        run = RunDir(path.parent)
        status = read_record(run.status)
        running = is_running(run)
        state = status.get("state", "unknown")
        if not running and state in ("running", "stopping"):
            state = "lost"  # killed with its parent: nobody wrote the end
        rows.append({**status, "run": run.name, "state": state, "age_s": time.time() - path.stat().st_mtime})
    rows.sort(key=lambda row: row["age_s"])
    if as_json:
        result(json.dumps(rows, indent=1) + "\n")
        return DONE
    if not rows:
        result(f"no runs in {runs_dir}; next: lamp demo\n")
        return DONE
    head = f"{'run':<24} {'state':<10} {'step':>14} {'safe to':>8} {'loss':>8} {'val':>8} {'spent':>9} {'last':>10}  red flags\n"
    result(
        head + "".join(_row(row) for row in rows) + "next: lamp watch RUN, lamp checkpoints RUN, lamp generate RUN\n"
    )
    return DONE


def _row(row: dict[str, Any]) -> str:
    steps = f"{row.get('step', 0)}/{row.get('steps') or '?'}"
    loss, val = (f"{row[name]:.3f}" if row.get(name) is not None else "-" for name in ("loss", "val_loss"))
    spent, age = duration(row.get("spent_s", 0.0)), duration(row["age_s"])
    safe = row.get("durable_step", 0)
    flags = f"  {', '.join(redflags.recall(row))}".rstrip()
    return f"{row['run']:<24} {row['state']:<10} {steps:>14} {safe:>8} {loss:>8} {val:>8} {spent:>9} {age + ' ago':>10}{flags}\n"


# ---------------------------------------------------------------- a child for one result


def session(verb: str, request: dict[str, Any], interactive: bool = False, config: str | None = None) -> int:
    """Run a verb in a child of its own; its result goes to stdout, our words to stderr, the folder is thrown away."""
    folder = Path(tempfile.mkdtemp(prefix=f"lamp-{verb}-"))
    run = RunDir(folder)
    run.create()
    if config is not None:
        write_atomic(run.config, config)
    console = Console(2, live=False)
    request["tty"] = sys.stdout.isatty()
    read_end, write_end = os.pipe() if interactive else (subprocess.DEVNULL, -1)
    if interactive:
        threading.Thread(target=_forward_lines, args=(write_end,), daemon=True).start()
    order = ChildSpec(verb, request, keeps_books=False, result_fd=os.dup(1), child_stdin=read_end, grace_s=2.0)
    try:
        code = Supervisor(run, order, console).supervise()
        if code in (1, CHILD_LOST):
            kept = Path(tempfile.mkdtemp(prefix="lamp-crash-")) / "output.log"
            shutil.copy(run.output, kept)
            console.say(f"its output is kept in {kept}")
        return code
    finally:
        console.close()
        shutil.rmtree(folder, ignore_errors=True)


def _forward_lines(fd: int) -> None:
    """What the person types goes to the child, line by line; the end of input ends the talk."""
    with os.fdopen(fd, "w") as pipe:
        for line in sys.stdin:
            try:
                pipe.write(line)
                pipe.flush()
            except BrokenPipeError:
                return
