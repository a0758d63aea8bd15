"""What stands on a verb's command line: flags bound to a function's parameters, flags with several values, a run by its name.

In:  the words after the verb.
Out: values by name, a run folder; or an error with the nearest match.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from lamplighter.commands.help import VERB_HELP
from lamplighter.errors import BadConfig, InputMissing, LampError, UsageError
from lamplighter.rundir import RunDir, is_running, read_status


def parse(verb: str, function: Callable[..., Any], words: list[str]) -> dict[str, Any]:
    """Every parameter of the function by name, from the words or by default; an unknown flag gets its nearest match.

    Written here because the libraries for it cost every command 40 ms of its start and more.
    """
    kinds, parameters = get_type_hints(function), signature(function).parameters
    named = {name: one for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    flags = {f"--{name.replace('_', '-')}": name for name in named}
    flags |= {f"--no-{flag[2:]}": name for flag, name in flags.items() if kinds[name] is bool}
    found: dict[str, Any] = {}
    loose: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        if not _is_flag(word):
            loose.append(word)
            continue
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        name = flags.get(flag)
        if name is None:
            raise _no_such_flag(verb, word.partition("=")[0], [one for one in flags if not one.startswith("--no-")])
        if name in found:
            raise _misused(verb, f"Parameter {flag} specified multiple times.")
        if kinds[name] is bool and not equals:
            found[name] = not flag.startswith("--no-")
            continue
        if not equals and (not left or _is_flag(left[0])):
            raise _misused(verb, f"Parameter {flag} requires an argument.")
        found[name] = _convert(verb, flag, value if equals else left.pop(0), kinds[name])
    defaults = {name: one.default for name, one in named.items()}
    return {**_places(verb, parameters, loose, kinds), **defaults, **found}


def _is_flag(word: str) -> bool:
    """-5 and - are values."""
    return word.startswith("-") and not word[1:2].isdecimal() and word[1:2] not in ("", ".")


def _no_such_flag(verb: str, flag: str, own: list[str]) -> LampError:
    """A flag of other verbs is told as that; else the nearest of this verb's own, and of the fields where it takes any."""
    import difflib

    from lamplighter.config import fields
    from lamplighter.config.names import known_by, unknown

    usage = _usage_by_verb()
    takes_fields = _ANY_FIELD in usage.get(verb, [_ANY_FIELD])
    as_flag, field = flag.replace("_", "-"), flag[2:].replace("-", "_")
    wanted = _ANY_FIELD if field in fields() else as_flag
    others = [one for one, known in usage.items() if one != verb and wanted in known]
    named = dict.fromkeys(one for one in usage.get(verb, own) if one != _ANY_FIELD)
    takes = f"lamp {verb} takes {', '.join(named)}{' and every field' if takes_fields else ''}"
    near = difflib.get_close_matches(as_flag, own, 1, 0.75)
    meant = known_by(flag) if takes_fields else None  # --seed, --max-steps
    if others and not near and (meant is None or (meant.startswith("--") and meant not in own)):
        what = f"{flag} is not a flag of lamp {verb}"
        return UsageError(what, f"it belongs to lamp {', '.join(others)}; {takes}", f"lamp {verb} --help")
    if takes_fields:
        return unknown(flag, "", UsageError, own, f"lamp {verb} --help")
    near = near or difflib.get_close_matches(as_flag, own, 1, 0.6)
    why = f"did you mean {near[0]}?" if near else f"nothing has a name like it; {takes}"
    return UsageError(f"{flag} is not a flag", why, f"lamp {verb} --help")


_ANY_FIELD = "--section.key"


def _usage_by_verb() -> dict[str, list[str]]:
    """The flags in the first lines of each verb's help, `data stats` and its like apart."""
    found: dict[str, list[str]] = {}
    for text in VERB_HELP.values():
        for part in re.split(r"(?:usage:|\n {7})(?=\s*lamp )", text.partition("\n\n")[0])[1:]:
            if named := re.match(r"\s*lamp ([a-z]+(?: [a-z]+\b)?)", part):
                found.setdefault(named[1], []).extend(re.findall(r"--[a-z][a-z._-]*", part))
    return found


def _misused(verb: str, what: str) -> UsageError:
    return UsageError(what, "", f"lamp {verb} --help")


def _places(verb: str, parameters: Mapping[str, Parameter], loose: list[str], kinds: dict[str, Any]) -> dict[str, Any]:
    """The words without a flag, in order; those of a `*name` as a tuple."""
    found: dict[str, Any] = {}
    for name, one in parameters.items():
        if one.kind is one.VAR_POSITIONAL:
            found[name], loose = tuple(loose), []
        elif one.kind is one.POSITIONAL_ONLY:
            if not loose and one.default is one.empty:
                raise _misused(verb, f"Parameter {name.upper()} requires an argument.")
            found[name] = _convert(verb, name.upper(), loose[0], kinds[name]) if loose else one.default
            loose = loose[1:]
    if loose:
        names = [name.upper() for name, one in parameters.items() if one.kind is one.POSITIONAL_ONLY]
        takes = f"{' and '.join(names)} alone" if names else "no word"
        raise UsageError(
            f"{' '.join(loose)}: nothing is expected here",
            f"lamp {verb} takes {takes} beside its flags",
            f"lamp {verb} --help",
        )
    return found


def _convert(verb: str, flag: str, text: str, kind: Any) -> Any:
    """A word as its parameter's type wants it."""
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            choices = ", ".join(f'"{one}"' for one in get_args(kind))
            raise _misused(verb, f'Invalid value "{text}" for {flag}. Choose from: {choices}.')
        return text
    wanted = next(one for one in get_args(kind) or (kind,) if one is not type(None))
    try:
        if wanted is bool:
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text.lower()]
        if wanted is int and not text.lstrip("+-").isdecimal() and float(text).is_integer():
            return int(float(text))  # 1e4 is a whole number too
        return wanted(text)
    except (ValueError, KeyError, OverflowError):
        raise _misused(verb, f'Invalid value for {flag}: unable to convert "{text}" into {wanted.__name__}.') from None


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
        status = read_status(run)
        raise InputMissing(
            f"{run.name} is not running",
            status["damage"] or str(status.get("outcome") or f"its last state was {status.get('state', 'unknown')}"),
            f"all it said is in {run.console}",
        )
    return run


def refuse_controls(name: str) -> None:
    """A new run's name goes to terminals, logs and shells: no control characters, no bytes that are no text."""
    from lamplighter.safe_text import clean, has_controls

    if has_controls(name):
        why = "it holds control characters, or bytes that are no text"
        raise BadConfig(f"{clean(name)} cannot be a run's name", why, "--run my-run")


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


def named_again(runs_dir: Path | str) -> list[str]:
    """The words by which the next command looks into the same folder of runs; none for the usual one."""
    return [] if Path(runs_dir) == Path("runs") else ["--runs-dir", str(runs_dir)]


_BENEATH = """
import sys
from lamplighter.procs import prctl
prctl.belong_to(int(sys.argv.pop(1)))
from lamplighter.commands import main
sys.exit(main())
"""


def verb_of_ours(words: list[str]) -> list[str]:
    """The command line of another verb, in a process that dies with this one."""
    return [sys.executable, "-P", "-c", _BENEATH, str(os.getpid()), *words]


def with_own_fields(words: list[str]) -> list[str]:
    """Some fields of a run are flags of verbs that open a model: --model.family is its --model-family."""
    return [
        re.sub(r"^--(model)\.(family|init_from)(?==|$)|^--(data)\.(template)(?==|$)", _as_flag, word) for word in words
    ]


def _as_flag(found: re.Match[str]) -> str:
    return found[0].replace(".", "-").replace("_", "-")
