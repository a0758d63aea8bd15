"""What the doctor's tests share: a context out of dotted settings, and its findings by cause."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from lamplighter.config import parse_overrides, resolve
from lamplighter.doctor.probe import Finding, ProbeContext
from running import TINY

SICK = Path(__file__).parent / "sick"


def context(folder: Path, *words: str) -> ProbeContext:
    """A tiny run with some settings changed; its scratch is in `folder`."""
    resolved = resolve(None, None, parse_overrides([*TINY, *words])[1])
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    return ProbeContext(resolved.run, None, folder / "runs", scratch, lambda _: None)


def examine(probe: Callable[[ProbeContext], Iterator[Finding]], who: ProbeContext) -> dict[str, Finding]:
    """Its findings that are not ok, by cause."""
    return {found.cause or found.what: found for found in probe(who) if found.level != "ok"}


def line_of(file: str, text: str) -> int:
    """The number of the first line of a sick file that holds the text."""
    lines = (SICK / file).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)
