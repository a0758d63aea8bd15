"""lamp doctor: what is wrong with this machine and this run, before anything is spent.

In:  a run as `lamp train` takes it.
Out: 0 where no fault was found, 1 where there is one; the probes happen in children of a child, under watch.
"""

from __future__ import annotations

from pathlib import Path

from lamplighter.commands import parse
from lamplighter.commands.data import many
from lamplighter.config import Resolved, dump, parse_overrides, resolve
from lamplighter.errors import CRASHED, FAULTS_FOUND, BadConfig, InputMissing, UsageError


def _doctor_flags(
    run_yaml: Path | None = None,
    /,
    *,
    preset: str | None = None,
    only: str = "",
    json: bool = False,
    print_config: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp doctor` takes besides fields; --only takes several words, and is taken out before."""


def doctor(words: list[str]) -> int:
    """The rounds. Settings that cannot be read are a finding; a word that is no flag is an error, as everywhere."""
    from lamplighter.watch.run_commands import session

    rest, overrides = parse_overrides(words)
    rest, lists = many(rest, "only")
    flags = parse("doctor", _doctor_flags, rest)
    if flags.get("json") and flags.get("print_config"):
        raise UsageError("--json and --print-config", "one result at a time", "give one of them")
    unread: dict[str, str] = {}
    try:
        resolved = resolve(flags.get("preset"), flags.get("run_yaml"), overrides)
    except (BadConfig, InputMissing) as error:
        if flags.get("print_config"):
            raise  # there is nothing to apply advice to
        unread = {"what": error.what, "why": error.why, "next": error.next}
        resolved = Resolved(resolve(None).run)
    request = {
        "only": lists["only"],
        "json": flags.get("json", False),
        "print_config": flags.get("print_config", False),
        "runs_dir": str(flags.get("runs_dir", Path("runs")).absolute()),
        "preset": resolved.preset,
        "origin": resolved.origin,
        "unread": unread,
    }
    code = session("doctor", request, config=dump(resolved))
    return CRASHED if code == FAULTS_FOUND else code
