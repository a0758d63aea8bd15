"""What stands on a verb's command line: flags bound to a function's parameters, flags with several values, a run by its name.

In:  the words after the verb.
Out: values by name, a run folder; or an error with the nearest match.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lamplighter.errors import InputMissing, UsageError
from lamplighter.rundir import RunDir, is_running, read_record


def parse(verb: str, function: Callable[..., Any], words: list[str]) -> dict[str, Any]:
    """Every parameter of the function by name, from the words or by default; an unknown flag gets its nearest match."""
    import cyclopts

    from lamplighter.config import unknown

    app = cyclopts.App(name=f"lamp {verb}", help_flags=[], version_flags=[])
    app.default(function)
    try:
        _, bound, *_ = app.parse_args(words, exit_on_error=False, print_error=False)
    except cyclopts.UnknownOptionError as error:
        names = [f"--{name.replace('_', '-')}" for name in function.__annotations__ if name != "return"]
        given = (error.token.keyword or error.token.value) if error.token else ""
        raise unknown(given or "that", "", UsageError, names) from None
    except cyclopts.CycloptsError as error:
        raise UsageError(" ".join(str(error).split()), "", f"lamp {verb} --help") from None
    bound.apply_defaults()
    return dict(bound.arguments)


def many(words: list[str], *names: str) -> tuple[list[str], dict[str, list[str]]]:
    """Take `--name a b c` out of a command line for each of the names; the rest is for the verb."""
    rest: list[str] = []
    found: dict[str, list[str]] = {name: [] for name in names}
    now: list[str] | None = None
    for word in words:
        name, equals, value = word[2:].partition("=") if word.startswith("--") else ("", "", "")
        if name in found:
            now = found[name]
            now += [value] if equals else []
        elif word.startswith("--") or now is None:
            now = None
            rest.append(word)
        else:
            now.append(word)
    return rest, found


def one_of(verb: str, words: list[str], choices: dict[str, Callable[[list[str]], int]]) -> int:
    """A verb's second word: `lamp data stats`."""
    import difflib

    if words and words[0] in choices:
        return choices[words[0]](words[1:])
    near = difflib.get_close_matches(words[0], choices, 1, 0.4) if words else []
    why = f"did you mean lamp {verb} {near[0]}?" if near else f"choose one of: {', '.join(choices)}"
    what = f"lamp {verb} has no {words[0]}" if words else f"lamp {verb} needs a second word"
    raise UsageError(what, why, f"lamp {verb} --help")


def _run_flags(run: str, /, *, runs_dir: Path = Path("runs")) -> None:
    """A run by name."""


def named_run(verb: str, words: list[str], need_running: bool = False) -> RunDir:
    """The one run that a verb is about."""
    flags = parse(verb, _run_flags, words)
    run = find_run(flags["run"], flags["runs_dir"])
    if need_running and not is_running(run):
        status = read_record(run.status)
        raise InputMissing(
            f"{run.name} is not running",
            str(status.get("outcome") or f"its last state was {status.get('state', 'unknown')}"),
            f"all it said is in {run.console}",
        )
    return run


def find_run(name: str, runs_dir: Path) -> RunDir:
    """A run by name or by path; the nearest name if there is none."""
    import difflib

    for path in (runs_dir / name, Path(name)):
        if (path / "events.jsonl").exists() or (path / "checkpoints").is_dir():
            return RunDir(path)
    known = [path.parent.name for path in runs_dir.glob("*/events.jsonl")]
    near = difflib.get_close_matches(name, known, 1, 0.4)
    why = f"did you mean {near[0]}?" if near else f"runs in {runs_dir}: {', '.join(sorted(known)) or 'none'}"
    raise InputMissing(f"there is no run {name}", why, "lamp runs lists them; --runs-dir looks elsewhere")
