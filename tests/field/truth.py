"""The field scripts and the truth about each: what goes wrong, where, and what a watcher may say of it.

In: the scripts beside this file.
Out: CASES, and the helpers that turn a case into a command and a marker into line numbers.

Each script appends "fault TIME PID" to the file named by LAMP_FIELD_MARK right before its fault (or its long part), and
"over TIME PID" right after it if it ends; the PID is that of the process in which it happens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent
Kind = Literal["healthy", "slow", "stuck", "dead", "innocent"]
PLAIN = ("{python}",)
RANKS = ("{python}", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SMALL_SHM = "mount -t tmpfs -o size=8m tmpfs /dev/shm && exec {python} {here}/zoo_shm_small.py"


@dataclass(frozen=True)
class Case:
    """One command and the truth about it.

    kind       healthy: ends with 0, no verdict; slow: alive, to be named as slow, ends with 0; stuck: never goes on;
               dead: ends by itself with exit_code because of the fault; innocent: never to be called stuck.
    causes     the names that are right, the best first. Empty: nothing is to be named.
    culprit    file: the script; marker: the comment on the line(s) to be named; also: a marker of the second line that a
               good sentence has; worker, item, rank; pid: "mark", the process that wrote the mark; signal, code of the
               one that died; other facts that the sentence should hold.
    within_s   named so many seconds after the mark.
    exit_code  of the command when it is left alone; None if it never ends.
    signals    what the test has to do: "end" = end the whole tree once the case is named.
    seconds    the value of --seconds that the name promises; scale it with command_of.
    needs      "mount": root and unshare -m; "half_minute": cannot be made shorter.
    """

    name: str
    command: tuple[str, ...]
    kind: Kind
    causes: tuple[str, ...] = ()
    culprit: dict[str, Any] = field(default_factory=dict)
    within_s: float = 7.0
    exit_code: int | None = 0
    signals: tuple[str, ...] = ()
    seconds: float | None = None
    needs: tuple[str, ...] = ()


def command_of(case: Case, python: str, scale: float = 1.0) -> list[str]:
    """The words to run; scale shortens what has a duration."""
    words = [word.format(python=python, here=HERE) for word in case.command]
    return words + (["--seconds", f"{case.seconds * scale:g}"] if case.seconds else [])


def lines_of(file: str, marker: str) -> range:
    """The lines that a marker names: one, or from it to the line marked with the same words and "ends"."""
    source = (HERE / file).read_text().splitlines()

    def numbers(words: str) -> list[int]:
        return [n for n, text in enumerate(source, 1) if re.search(re.escape(words) + r"(:.*)?$", text)]

    first, last = numbers(marker), numbers(f"{marker} ends")
    assert len(first) == 1 and len(last) <= 1, f"{file}: {marker!r} is on lines {first}, its end on {last}"
    return range(first[0], (last or first)[0] + 1)


def culprit_lines(case: Case) -> range:
    """The lines of which any one is the right one to name."""
    return lines_of(case.culprit["file"], case.culprit["marker"])


def style(
    script: str,
    slow: tuple[tuple[str, ...], dict[str, Any]],
    stuck: tuple[tuple[str, ...], dict[str, Any]],
    start: tuple[str, ...] = PLAIN,
) -> list[Case]:
    """The three cases of one style: as it should be, slow, stuck."""
    run = (*start, "{here}/" + f"{script}.py", "--mode")
    where = {"file": f"{script}.py", "pid": "mark"}
    at_slow, at_stuck = where | {"marker": "# the culprit of slow"}, where | {"marker": "# the culprit of stuck"}
    return [
        Case(f"{script}_healthy", (*run, "healthy"), "healthy"),
        Case(f"{script}_slow", (*run, "slow"), "slow", slow[0], at_slow | slow[1], seconds=12.0),
        Case(
            f"{script}_stuck", (*run, "stuck"), "stuck", stuck[0], at_stuck | stuck[1], exit_code=None, signals=("end",)
        ),
    ]


ITEM = {"worker": 1, "item": 85}
STYLES = [
    *style("plain_loop", (("python_loop", "running"), {}), (("deadlock",), {})),
    *style(
        "loader_workers",
        (("slow_worker", "python_loop", "running"), ITEM),
        (("worker_hang", "waiting"), ITEM),
    ),
    *style("hf_trainer", (("python_loop", "running"), {}), (("event", "dead_producer", "waiting", "deadlock"), {})),
    *style(
        "datasets_map",
        (("slow_worker", "python_loop", "running"), {"item": 310}),
        (("file_lock", "deadlock", "worker_hang", "waiting"), {"item": 310, "also": "# the other side"}),
    ),
    *style(
        "pool",
        (("slow_worker", "python_loop", "running"), {"item": 137}),
        (("pool_child_lost",), {"marker": "# the one who waits", "item": 137, "signal": 9}),
    ),
    *style("silent", (("slow_disk", "sleep", "polling"), {}), (("dead_producer", "deadlock"), {})),
    *style(
        "accumulate_compile",
        (("recompile_storm", "compile_slow"), {}),
        (("deadlock",), {"also": "# the other side"}),
    ),
    *style(
        "two_ranks",
        (("python_loop", "running", "rank_late"), {"rank": 1}),
        (("rank_late",), {"rank": 1, "also": "# the one who waits"}),
        RANKS,
    ),
    *style(
        "ddp",
        (("python_loop", "running", "rank_late"), {"rank": 0}),
        (
            ("rank_uneven", "rank_order", "rank_late"),
            {"rank": 1, "also": "# the one who waits"},
        ),
        RANKS,
    ),
]


def zoo(
    name: str, kind: Kind, within_s: float, script: str = "", start: tuple[str, ...] = PLAIN, **culprit: Any
) -> Case:
    """A case of the zoo, under its name there; its script, or a mode of a style's script."""
    file, mode = f"{script or 'zoo_' + name}.py", name.partition("_")[2]
    marker = f"# the culprit of {mode}" if script else "# the culprit"
    words = (*start, "{here}/" + file, *(("--mode", mode) if script else ()))
    where = {"file": file, "marker": marker, "pid": "mark"} | culprit
    ends: dict[str, Any] = {"exit_code": 1} if kind == "dead" else {"exit_code": None, "signals": ("end",)}
    return Case(f"zoo_{name}", words, kind, (name,), where, within_s, **ends)


ZOO = [
    zoo("worker_sigkill", "dead", 1.0, "loader_workers", signal=9, **ITEM),
    zoo("worker_oom", "dead", 2.0, "loader_workers", **ITEM),
    zoo("worker_exit", "dead", 1.0, "loader_workers", code=3, **ITEM),
    zoo("worker_hang", "stuck", 3.0, "loader_workers", **ITEM),
    zoo("worker_gil", "stuck", 3.0, "loader_workers", **ITEM),  # to a watcher it is slow: a long C call looks the same
    zoo("worker_sigstop", "stuck", 3.0, "loader_workers", **ITEM),
    zoo("fork_lock", "stuck", 4.0, worker=0, item=0, also="# taken here"),
    zoo("spawn_pickle", "dead", 2.0, attribute="transform", also="# defined here"),
    Case(
        "zoo_shm_small",
        ("unshare", "-m", "sh", "-c", SMALL_SHM),
        "dead",
        ("shm_small",),
        {"file": "zoo_shm_small.py", "marker": "# the culprit", "pid": "mark", "need_mb": 16, "have_mb": 8},
        exit_code=1,
        needs=("mount",),
    ),
    # rank_late is two_ranks_stuck above
    zoo("rank_sigstop", "stuck", 4.0, "two_ranks", RANKS, rank=1, also="# the one who waits"),
    zoo("rank_sigkill", "dead", 1.0, "two_ranks", RANKS, rank=1, signal=9),
]


def calm(name: str, seconds: float | None, *causes: str, **extra: Any) -> Case:
    """An innocent: the causes are what may be said of it, as slow or as a remark, never as stuck."""
    where = {"file": f"calm_{name}.py", "marker": "# the long part", "pid": "mark"}
    return Case(
        f"calm_{name}", (*PLAIN, "{here}/" + f"calm_{name}.py"), "innocent", causes, where, seconds=seconds, **extra
    )


INNOCENTS = [
    calm("pure_python_30s", 30.0, "python_loop", "running"),
    calm("long_matmul", 20.0, "running"),
    calm("pauses_5s", 5.0, "sleep"),
    calm("slow_download", 15.0, "waiting", "slow_disk", "slow_network"),
    calm("notebook_idle", 20.0, "waiting"),
    calm("web_server", 6.0, "waiting"),
    calm("gc_pause", 8.0, "gc", "running"),
    calm("big_save", 10.0, "saving", "slow_disk", "slow_output", "running"),
    calm("long_eval", 15.0, "running", "python_loop"),
    calm("compile_20s", 20.0, "compile_slow"),
    calm("retry_backoff", 15.0, "sleep"),
    Case(
        "calm_compile_inductor",
        (*PLAIN, "{here}/calm_compile_20s.py", "--inductor"),
        "innocent",
        ("compile_slow",),
        needs=("half_minute",),
    ),
]

CASES = [*STYLES, *ZOO, *INNOCENTS]
