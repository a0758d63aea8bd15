"""lamp selftest: the promises, tried on this very machine in about three minutes.

In:  --gpu for the card, else the CPU; --test for the quick form.
Out: a table, and one text file that can be sent to others: no paths, no names, no secrets. 0 where nothing failed.
"""

from __future__ import annotations

import getpass
import os
import platform
import time
from pathlib import Path
from typing import Any

from lamplighter import report
from lamplighter.commands.arguments import parse
from lamplighter.errors import CRASHED, DONE, FAULTS_FOUND, InputMissing
from lamplighter.procs import prctl
from lamplighter.procs.nvml import cards_here
from lamplighter.rundir import RunDir, cannot_write, write_atomic

_FILE = "lamplighter-selftest.txt"


def _selftest_flags(
    *, gpu: bool = False, test: bool = False, json: bool = False, out: Path = Path(_FILE), runs_dir: Path = Path("runs")
) -> None:
    """What `lamp selftest` takes."""


def selftest(words: list[str]) -> int:
    """Every self-test, each in a process of its own; a failure of one never ends the others."""
    from lamplighter.commands.session import session
    from lamplighter.config import dump, resolve
    from lamplighter.doctor.self_tests import settings

    flags = parse("selftest", _selftest_flags, words)
    resolved = resolve(None, None, settings(flags["gpu"], flags["test"]))
    request = {
        "json": flags["json"],
        "out": str(flags["out"].absolute()),
        "runs_dir": str(flags["runs_dir"].absolute()),
    }
    if flags["gpu"] and not cards_here():
        raise InputMissing(
            "no GPU to test",
            "nvidia-smi names no card that CUDA_VISIBLE_DEVICES leaves to this command",
            "lamp selftest",
        )
    code = session("selftest", request, config=dump(resolved))
    return CRASHED if code == FAULTS_FOUND else code


# ---------------------------------------------------------------- in the child


def selftest_child(folder: RunDir, request: dict[str, Any]) -> int:
    """The table on stdout, and the same in the file."""
    began = time.monotonic()
    with report.phase("import"):
        from lamplighter.commands.doctor import end_probes
        from lamplighter.doctor import findings, probe, runner
    config = runner.ProbeConfig(folder.config, None, Path(request["runs_dir"]), folder.path / "scratch")
    prctl.adopt_orphans()
    report.when_asked(end_probes, None)
    results = []
    with report.phase("selftest", total=len(probe.SELF_TESTS), unit="tests") as phase:
        for number, one in enumerate(probe.SELF_TESTS):
            seen = runner.run(one, config, lambda text, n=number, name=one.name: phase.set(n, f"{name}: {text}"))  # type: ignore[misc]
            phase.set(number + 1)
            report.note(f"{findings.worst(seen):<10}  {one.name}  ({seen.seconds:.1f} s)")
            results.append(seen)
    whole = findings.Report(tuple(results), time.monotonic() - began)
    text = findings.table(whole, "lamp demo, or lamp train with your text")
    place = Path(request["out"])
    try:
        write_atomic(place, _anonymous(f"lamp selftest on {_machine()}\n\n{text}", folder), durable=False)
    except OSError as error:
        raise cannot_write(place, error) from error
    report.result(findings.as_json(whole) if request["json"] else text)
    report.note(f"made: {place} (no paths, no names: it can be sent with a report of what went wrong or right)")
    return DONE if whole.ok else FAULTS_FOUND


def _machine() -> str:
    """What the figures depend on."""
    import torch

    from lamplighter import __version__

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return f"{card}, {os.cpu_count()} cores; lamplighter {__version__}, torch {torch.__version__}, Python {platform.python_version()}"


def _anonymous(text: str, folder: RunDir) -> str:
    """Without the folders, the user and the name of this machine."""
    private = {
        str(folder.path): "FOLDER",
        str(Path.cwd()): "HERE",
        str(Path.home()): "~",
        platform.node(): "HOST",
        _user(): "USER",
    }
    for words, instead in private.items():
        if len(words) > 3:  # "/" and "" are in every text, and so are short names
            text = text.replace(words, instead)
    return text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a number without a name, as in many containers
        return ""
