"""A checkpoint, opened for export: the model with its adapters merged, its tokenizer, its template; and a place that is whole or not there.

In:  a run's checkpoint or a model folder.
Out: an Opened; `written(path)`, which gives a temporary name and renames it only when nothing was raised.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lamplighter import report
from lamplighter.data import tokenizer as tokenizers
from lamplighter.data.chat import template as templates
from lamplighter.data.chat.template import ChatTemplate
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import BadData, CannotWrite, UsageError
from lamplighter.model.build import Built, load_folder
from lamplighter.procs import procfs
from lamplighter.rundir import cannot_write, free_bytes, fsync_folder, human_bytes


class ExportFailed(BadData):
    """What was written does not say what the checkpoint says; it is removed."""

    cause = "export_differs"


@dataclass(frozen=True)
class Opened:
    """A model that is to be used elsewhere."""

    folder: Path
    name: str
    built: Built
    tokenizer: Tokenizer
    template: ChatTemplate | None
    base: str | None = None  # of an adapter, where the user says that it is


def open_model(folder: Path, name: str, base: str | None, merged: bool = True) -> Opened:
    """Template and end mark are compared with those of training, as everywhere."""
    with report.phase("model"):
        built = load_folder(folder, None, f"lamp export {name}", base=base, merged=merged)
        tokenizer = tokenizers.load(folder)
        template = templates.of_folder(folder, tokenizer)
        built.model.eval()
    if tokenizer.vocab_size > built.vocab_size:
        why = f"the tokenizer has {tokenizer.vocab_size:,} tokens, the model {built.vocab_size:,}"
        raise BadData(f"{folder} does not fit together", why, "use an intact folder")
    return Opened(folder, name, built, tokenizer, template, base)


@contextlib.contextmanager
def written(path: Path, need: int, force: bool) -> Iterator[Path]:
    """A temporary name beside `path`; it becomes `path` when all went well, and is gone otherwise."""
    if path.exists() and not force:
        raise UsageError(
            f"{path} exists already", "nothing is overwritten unasked", "--out ELSEWHERE, or --force to replace it"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_left_over(path)
        have = free_bytes(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    if have < need:
        why = f"it needs {human_bytes(need)}, {human_bytes(have)} are free"
        raise CannotWrite(f"no room for {path}", why, "free some space, or --out ELSEWHERE")
    temporary = path.with_name(f".writing-{os.getpid()}-{path.name}")
    try:
        yield temporary
        _sync(temporary)
        if path.exists():
            _remove(path)
        temporary.rename(path)
        fsync_folder(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        _remove(temporary)


def _sync(path: Path) -> None:
    for one in [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]:
        with open(one, "rb") as file:
            os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _remove_left_over(path: Path) -> None:
    """What an export that was killed has left beside."""
    for one in path.parent.glob(f".writing-*-{path.name}"):
        found = re.match(r"\.writing-(\d+)-", one.name)
        if found and not procfs.exists(int(found[1])):
            _remove(one)
