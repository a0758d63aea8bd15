"""A place for an export that is whole or not there: a temporary name beside it, renamed when nothing was raised. No torch.

In:  where the file or folder shall be, how many bytes it needs.
Out: the temporary name while it is written; `sweep(folder)`, which removes what a process that died has left.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from lamplighter.errors import CannotWrite, UsageError
from lamplighter.procs import procfs
from lamplighter.rundir import cannot_write, free_bytes, fsync_folder, human_bytes

_WRITTEN = (".json", ".safetensors", ".jinja", ".txt", ".gguf", ".md", ".svg")


@contextlib.contextmanager
def written(path: Path, need: int, force: bool) -> Iterator[Path]:
    """A temporary name beside `path`; it becomes `path` when all went well, and is gone otherwise."""
    refuse_taken(path, force)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sweep(path.parent)
        have = free_bytes(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    if have < need:
        why = f"it needs {human_bytes(need)}, {human_bytes(have)} are free"
        raise CannotWrite(f"no room for {path}", why, "free some space, or --out ELSEWHERE")
    temporary = path.with_name(f".writing-{os.getpid()}-{_host()}-{path.name}")
    try:
        yield temporary
        _sync(temporary)
        before = temporary.with_name(f"{temporary.name}-before")
        if path.exists():
            path.rename(before)
        temporary.rename(path)
        _remove(before)
        fsync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        _remove(temporary)


def refuse_taken(path: Path, force: bool) -> None:
    """UsageError where something stands there that shall not be replaced."""
    if path.exists() and not force:
        raise UsageError(
            f"{path} exists already", "nothing is overwritten unasked", "--out ELSEWHERE, or --force to replace it"
        )
    if path.exists() and not _looks_like_an_export(path):
        why = "--force replaces an earlier export, and this holds something else"
        raise UsageError(f"{path} is no export", why, "--out ELSEWHERE")


def _looks_like_an_export(path: Path) -> bool:
    """A file, or a folder of nothing but files of the kinds that are written: never somebody's work."""
    if not path.is_dir() or path.is_symlink():
        return path.suffix == ".gguf"
    entries = list(path.iterdir())
    return all(one.is_file() and (one.suffix in _WRITTEN or one.name == "Modelfile") for one in entries)


def sweep(folder: Path) -> None:
    """Remove what exports that were killed on this machine have left in a folder; one that still goes on keeps its own."""
    for one in folder.glob(".writing-*") if folder.is_dir() else ():
        found = re.match(rf"\.writing-(\d+)-{re.escape(_host())}-", one.name)
        if found and not procfs.exists(int(found[1])):
            _remove(one)


def _host() -> str:
    return re.sub(r"\W+", "", socket.gethostname())


def _sync(path: Path) -> None:
    for one in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        with open(one, "rb") as file:
            os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
