"""environment.json: in which surroundings each attempt of a run was made, and what changed since the one before.

In:  this Python (of a watched command: its own), its packages, the driver, the variables that matter, the git working directory.
Out: one file (0600), one entry for each attempt; secrets masked, the diff bounded. Sentences on what changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lamplighter import read_back
from lamplighter.procs import procfs
from lamplighter.rundir import RunDir, read_record, write_atomic
from lamplighter.safe_text import MASK, mask

_VARIABLES = ("CUDA_", "NVIDIA_", "NCCL_", "OMP_", "MKL_", "KMP_", "GOMP_", "TORCH", "PYTORCH_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "XLA_",
              "PYTHON", "LD_LIBRARY_PATH", "LD_PRELOAD", "WANDB_", "TRACKIO_", "SLURM_")  # fmt: skip
_OF_ONE_START = "TORCHELASTIC_"  # names and ports that torchrun makes up each time
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "AUTH")
_MOST_DIFF = 64_000
_MOST_ATTEMPTS = 30
_GIT_S = 5.0


def gather(folder: Path, command: Sequence[str] = ()) -> dict[str, Any]:
    """The surroundings of now, seen from the folder where the command was given; Python and packages are those of a watched command."""
    version, places = _python_of(command) if command else (platform.python_version(), sys.path)
    return {
        "python": version,
        "platform": f"{os.uname().sysname} {os.uname().release}",
        "machine": os.uname().machine,
        "cores": os.cpu_count(),
        "driver": procfs.nvidia_driver(),
        "packages": _packages(places),
        "variables": {
            name: _value(name, value)
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not name.startswith(_OF_ONE_START)
        },
        "git": _git(folder),
    }


def _python_of(command: Sequence[str]) -> tuple[str, list[str]]:
    """Version and package folders of the Python that a command is, or is a script of, without starting it; ("", []) where it is none."""
    found = shutil.which(command[0])
    program = Path(found) if found else None
    if program is not None and not program.name.startswith("python"):
        program = _script_python(program)
    if program is None:
        return "", []
    if os.path.realpath(program) == os.path.realpath(sys.executable) and program.parent == Path(sys.executable).parent:
        return platform.python_version(), sys.path
    settings, version = program.parent.parent / "pyvenv.cfg", ""
    with contextlib.suppress(OSError):  # no virtual environment
        told = dict(re.findall(r"(?m)^(\w[\w-]*) = (.*)$", settings.read_text(errors="replace")[:10_000]))
        version = told.get("version") or told.get("version_info", "")
    roots = [program.parent.parent, Path(os.path.realpath(program)).parent.parent][: 1 if version else 2]
    kinds = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")
    return version, [str(path) for root in roots for kind in kinds for path in sorted(root.glob(kind))]


def _script_python(script: Path) -> Path | None:
    """The interpreter that its first line names."""
    try:
        with read_back.open_file(script) as file:
            first = file.readline(512).decode("utf-8", "replace").split()
    except OSError:  # not to be read: then it is not known
        return None
    named = (
        first[-1]
        if first and first[0] == "#!/usr/bin/env"
        else first[0][2:]
        if first and first[0].startswith("#!")
        else ""
    )
    found = shutil.which(named) if Path(named).name.startswith("python") else None
    return Path(found) if found else None


def _packages(places: Sequence[str]) -> dict[str, str]:
    """By the names of their folders: reading their metadata would take a quarter of a second."""
    found: dict[str, str] = {}
    for place in places:
        with contextlib.suppress(OSError):  # a path that is not there
            for name in os.listdir(place or "."):
                if name.endswith((".dist-info", ".egg-info")) and "-" in name:
                    package, _, version = name.rpartition(".")[0].partition("-")
                    found.setdefault(package.lower().replace("_", "-"), version)
    return dict(sorted(found.items()))


def _value(name: str, value: str) -> str:
    return MASK if any(word in name for word in _SECRET) else mask(value)[:500]


def _git(folder: Path) -> dict[str, Any]:
    """Commit and what differs from it; empty outside of a repository, or without git."""
    commit = _run_git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    diff = _run_git(folder, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", ".")
    told = {"commit": commit.strip(), "dirty": bool(diff), "diff": mask(diff)[:_MOST_DIFF]}
    return {**told, "diff_cut": len(diff) > _MOST_DIFF}


def _run_git(folder: Path, *words: str) -> str:
    """Without the repository's own hooks, pagers and monitors: a folder of somebody else must not start anything."""
    safe = ["git", "-c", "core.fsmonitor=false", "-c", "core.pager=cat", "-c", "core.hooksPath=/dev/null"]
    try:
        done = subprocess.run([*safe, *words], cwd=folder, capture_output=True, timeout=_GIT_S, stdin=subprocess.DEVNULL, check=False,
                              env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"})  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):  # no git here, or a repository that is too large: then it is not known
        return ""
    return done.stdout[: 4 * _MOST_DIFF].decode("utf-8", "replace") if done.returncode == 0 else ""


def record(run: RunDir, attempt: int, folder: Path, command: Sequence[str] = ()) -> list[str]:
    """Write the entry of an attempt; in words, what is not as in the attempt before."""
    before = read_record(run.path / "environment.json").get("attempts")
    known = [one for one in before if isinstance(one, dict)] if isinstance(before, list) else []
    now = gather(folder, command)
    entries = [*known, {"attempt": attempt, "t": time.time(), **now}][-_MOST_ATTEMPTS:]
    for old in entries[:-1]:  # one diff is enough: the newest
        if isinstance(old.get("git"), dict):
            old["git"] = {name: value for name, value in old["git"].items() if name != "diff"}
    with contextlib.suppress(OSError):  # a full disk: the run goes on without it
        write_atomic(
            run.path / "environment.json",
            json.dumps({"format": 1, "attempts": entries}, indent=1) + "\n",
            durable=False,
            mode=0o600,
        )
    return changes(known[-1], now) if known else []


def told_changes(changed: Sequence[str]) -> str:
    """A line for people."""
    more = f" and {len(changed) - 8} more, in environment.json" if len(changed) > 8 else ""
    return f"note  changed since the attempt before: {'; '.join(changed[:8])}{more}"


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, in words: a package by both its versions, a variable, the commit."""
    found = [f"{name} {before.get(name)} -> {now.get(name)}" for name in ("python", "platform", "machine", "cores", "driver") if before.get(name) != now.get(name)]  # fmt: skip
    for kind in ("packages", "variables"):
        then, there = _part(before, kind), _part(now, kind)
        for name in sorted(then.keys() | there.keys()):
            if then.get(name) != there.get(name):
                found.append(f"{name} {then.get(name, 'not there')} -> {there.get(name, 'not there')}")
    old, new = _part(before, "git"), _part(now, "git")
    if old.get("commit") != new.get("commit"):
        found.append(f"commit {str(old.get('commit', 'none'))[:10]} -> {str(new.get('commit', 'none'))[:10]}")
    elif old.get("dirty") != new.get("dirty"):
        found.append(
            "the working directory is " + ("changed since the commit" if new.get("dirty") else "as committed again")
        )
    return found


def _part(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A part of what may be a damaged record."""
    found = record.get(name)
    return found if isinstance(found, dict) else {}
