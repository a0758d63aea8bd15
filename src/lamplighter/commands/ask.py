"""lamp why, stop and save: requests to the parent of a run, put into its ask/ folder.

In:  a run's name (never a signal, never a guess by pid); for why also any process by its pid.
Out: the answer; stop and save wait until it is done.
"""

from __future__ import annotations

import time
from pathlib import Path

from lamplighter.commands import write
from lamplighter.commands.arguments import named_run
from lamplighter.errors import DONE, ChildLost
from lamplighter.rundir import RunDir, is_running, read_record


def why(words: list[str]) -> int:
    """What a run, or any process, is doing right now."""
    if len(words) == 1 and words[0].isascii() and words[0].isdecimal() and not (Path("runs") / words[0]).exists():
        from lamplighter.watch.inspect_pid import inspect_pid

        write(2, f"{time.strftime('%H:%M:%S')}  looking at process {words[0]} twice, a second apart\n")
        return inspect_pid(int(words[0]))
    return explain(named_run("why", words, need_running=True))


def stop(words: list[str]) -> int:
    """End a run with everything saved."""
    return stop_run(named_run("stop", words, need_running=True))


def save(words: list[str]) -> int:
    """Save now and go on."""
    return save_run(named_run("save", words, need_running=True))


def explain(run: RunDir) -> int:
    """Answered by the run's parent within a second."""
    from lamplighter.watch.console import result
    from lamplighter.watch.supervisor import ask

    answer = ask(run, "why")
    if answer is None:
        raise _no_answer(run)
    result(answer["text"].rstrip() + "\n")
    return DONE


def stop_run(run: RunDir) -> int:
    """Ask, then wait for the end."""
    from lamplighter.watch.console import Console
    from lamplighter.watch.status import duration
    from lamplighter.watch.supervisor import ask

    console = Console(1, live=False)
    if ask(run, "stop") is None:
        console.close()
        raise _no_answer(run)
    started = time.monotonic()
    while is_running(run):
        if time.monotonic() - console.last_line > 1.5:
            console.say(
                f"stopping {run.name} for {duration(time.monotonic() - started)}: {read_record(run.status).get('now', '')}"
            )
        time.sleep(0.1)
    console.say(str(read_record(run.status).get("outcome", "stopped")))
    console.close()
    return DONE


def save_run(run: RunDir) -> int:
    """Ask, then wait until the step is durable."""
    from lamplighter.watch.console import Console
    from lamplighter.watch.status import duration
    from lamplighter.watch.supervisor import ask

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
        f"{run.name}: safe to step {read_record(run.status).get('durable_step', 0)}; next: lamp checkpoints {run.address}"
    )
    console.close()
    return DONE


def _no_answer(run: RunDir) -> ChildLost:
    return ChildLost(
        f"{run.name} holds its lock, but nobody answers",
        "its parent process is stopped or very busy",
        f"look at {run.status} and {run.console}",
    )
