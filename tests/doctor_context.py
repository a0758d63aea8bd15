"""What the doctor's tests share: a context out of dotted settings, and its findings by cause."""

from __future__ import annotations

from pathlib import Path

from lamplighter.config import parse_overrides, resolve
from lamplighter.doctor.probe import Finding, ProbeContext, ProbeFunction, findings_of
from running import TINY

SICK = Path(__file__).parent / "sick"


def context(folder: Path, *words: str) -> ProbeContext:
    """A tiny run with some settings changed; its scratch is in `folder`."""
    resolved = resolve(None, None, parse_overrides([*TINY, *words])[1])
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    return ProbeContext(resolved.run, None, folder / "runs", scratch, lambda _: None)


def all_of(probe: ProbeFunction, who: ProbeContext) -> list[Finding]:
    """Its findings, as the runner gets them."""
    return list(findings_of(probe, who))


def examine(probe: ProbeFunction, who: ProbeContext) -> dict[str, Finding]:
    """What is not as it should be, by cause."""
    return {found.cause or found.what: found for found in all_of(probe, who) if found.level in ("warn", "fault")}


def line_of(file: str, text: str) -> int:
    """The number of the first line of a sick file that holds the text."""
    lines = (SICK / file).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)
