"""The verbs about text and tokenizers: lamp data stats | clean | prepare, lamp tokenizer train | show.

In:  the words after the verb.
Out: an exit code; the work happens in a child, under watch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from lamplighter.commands import parse


def data(words: list[str]) -> int:
    """One of the verbs about text."""
    return _one_of("data", words, {"stats": data_stats, "clean": data_clean, "prepare": data_prepare})


def tokenizer(words: list[str]) -> int:
    """One of the verbs about tokenizers."""
    return _one_of("tokenizer", words, {"train": tokenizer_train, "show": tokenizer_show})


def _one_of(verb: str, words: list[str], choices: dict[str, Callable[[list[str]], int]]) -> int:
    import difflib

    from lamplighter.errors import UsageError

    if words and words[0] in choices:
        return choices[words[0]](words[1:])
    near = difflib.get_close_matches(words[0], choices, 1, 0.4) if words else []
    why = f"did you mean lamp {verb} {near[0]}?" if near else f"choose one of: {', '.join(choices)}"
    what = f"lamp {verb} has no {words[0]}" if words else f"lamp {verb} needs a second word"
    raise UsageError(what, why, f"lamp {verb} --help")


def _data_stats_flags(
    run_yaml: Path | None = None,
    /,
    *,
    preset: str | None = None,
    json: bool = False,
    out: Path | None = None,
    sample_mb: float | None = None,
    near_documents: int = 50_000,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp data stats` takes besides fields and --val."""


def data_stats(words: list[str]) -> int:
    """A corpus in figures."""
    from lamplighter.config import dump, parse_overrides, resolve
    from lamplighter.errors import UsageError
    from lamplighter.watch.run_commands import session

    rest, overrides = parse_overrides(words)
    rest, lists = many(rest, "val")
    flags = parse("data stats", _data_stats_flags, rest)
    sample_mb, near = flags.get("sample_mb"), flags.get("near_documents", 50_000)
    if (sample_mb is not None and sample_mb <= 0) or near < 0:
        raise UsageError(
            "--sample-mb and --near-documents count something", "one of them is not positive", "--sample-mb 100"
        )
    given: Path | None = flags.get("run_yaml")
    cache = given if given is not None and (given / "manifest.json").is_file() else None
    resolved = resolve(flags.get("preset"), given if cache is None else None, overrides)
    request = {"json": flags.get("json", False), "out": str(flags["out"]) if flags.get("out") else None,
               "cache": str(cache) if cache else None,
               "sample_mb": sample_mb, "near_documents": near, "runs_dir": str(flags.get("runs_dir", Path("runs"))),
               **lists}  # fmt: skip
    return session("data-stats", request, config=dump(resolved))


def _clean_flags(
    *paths: str,
    out: Path | None = None,
    dry_run: bool = False,
    workers: int | None = None,
    language: str = "any",
    min_quality: float = 0.0,
    min_words: int = 10,
    near: float = 0.8,
    keep_duplicates: bool = False,
    keep_lines: bool = False,
    split: Literal["auto", "div", "file"] = "auto",
    text_key: str = "text",
    separator: str = "",
    max_document_mb: float = 64.0,
    shard_mb: float = 256.0,
    json: bool = False,
) -> None:
    """How to clean."""


def data_clean(words: list[str]) -> int:
    """Raw files to clean documents, in a child under watch."""
    from inspect import signature

    from lamplighter.errors import UsageError
    from lamplighter.watch.run_commands import session

    given = parse("data clean", _clean_flags, words)
    defaults = {name: p.default for name, p in signature(_clean_flags).parameters.items()}
    flags = {**defaults, "paths": (), **given}
    paths, out, dry, workers, as_json = (flags.pop(name) for name in ("paths", "out", "dry_run", "workers", "json"))
    if not paths:
        raise UsageError("nothing to clean", "no path was given", "lamp data clean PATH... --out DIR")
    if out is None and not dry:
        raise UsageError("where to?", "--out DIR is needed", "add --out DIR, or --dry-run to see what would change")
    if not 0 <= flags["near"] <= 1 or not 0 <= flags["min_quality"] < 1 or (workers is not None and workers < 1):
        raise UsageError("a number is out of range", "--near is 0 to 1, --min-quality 0 to below 1, --workers 1 or more", "lamp data --help")  # fmt: skip
    flags["separator"] = flags["separator"].replace("\\n", "\n").replace("\\t", "\t")
    request = {
        "paths": list(paths),
        "out": str(out) if out else "",
        "dry_run": dry,
        "workers": workers,
        "json": as_json,
    }
    return session("data-clean", {**request, "rules": flags})


def _prepare_flags(
    run_yaml: Path | None = None,
    /,
    *,
    preset: str | None = None,
    run: str | None = None,
    test: bool = False,
    json: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp data prepare` takes besides fields; what is for the training alone is passed on to it."""


def data_prepare(words: list[str]) -> int:
    """The tokenizer and the token cache of a training run, without the training."""
    import shlex

    from lamplighter.config import dump, parse_overrides, resolve
    from lamplighter.rundir import CACHE_NAME
    from lamplighter.watch.run_commands import session

    rest, overrides = parse_overrides(words)
    flags = parse("data prepare", _prepare_flags, rest)
    resolved = resolve(flags.get("preset"), flags.get("run_yaml"), overrides, flags.get("test", False))
    request = {
        "cache": str(flags.get("runs_dir", Path("runs")) / CACHE_NAME),
        "json": flags.get("json", False),
        "next": shlex.join(["lamp", "train", *(word for word in words if word != "--json")]),
    }
    return session("data-prepare", request, config=dump(resolved))


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


def _tokenizer_train_flags(
    run_yaml: Path | None = None,
    /,
    *,
    out: Path | None = None,
    preset: str | None = None,
    force: bool = False,
    json: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp tokenizer train` takes besides fields, --special and --compare."""


def tokenizer_train(words: list[str]) -> int:
    """A tokenizer from any source."""
    from lamplighter.config import dump, parse_overrides, resolve
    from lamplighter.errors import BadConfig, UsageError
    from lamplighter.watch.run_commands import session

    rest, overrides = parse_overrides(words)
    rest, lists = many(rest, "special", "compare")
    flags = parse("tokenizer train", _tokenizer_train_flags, rest)
    resolved = resolve(flags.get("preset"), flags.get("run_yaml"), overrides)
    if flags.get("out") is None:
        raise UsageError("--out is missing", "a tokenizer is a folder of files", "--out my-tokenizer")
    if resolved.run.tokenizer.path is not None:
        why = f"tokenizer.path is {resolved.run.tokenizer.path} ({resolved.origin.get('tokenizer.path', 'default')})"
        raise BadConfig("there is nothing to train", why, "--tokenizer.path none, to train one all the same")
    request = {"out": str(flags["out"]), "force": flags.get("force", False), "json": flags.get("json", False),
               "runs_dir": str(flags.get("runs_dir", Path("runs"))), **lists}  # fmt: skip
    return session("tokenizer-train", request, config=dump(resolved))


def _tokenizer_show_flags(
    target: str,
    /,
    *files: str,
    text: str | None = None,
    sample_mb: float = 50.0,
    json: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp tokenizer show` takes besides fields and --compare."""


def tokenizer_show(words: list[str]) -> int:
    """What a tokenizer is, and what it does with text."""
    from lamplighter.config import dump, parse_overrides, resolve
    from lamplighter.errors import UsageError
    from lamplighter.watch.run_commands import session

    rest, overrides = parse_overrides(words)
    rest, lists = many(rest, "compare")
    flags = parse("tokenizer show", _tokenizer_show_flags, rest)
    if flags.get("files"):
        overrides["data.paths"] = [*overrides.get("data.paths", []), *flags["files"]]
    resolved = resolve(None, None, overrides)
    runs_dir = flags.get("runs_dir", Path("runs"))
    named = Path(flags["target"])
    path = named if named.exists() or not (runs_dir / named).is_dir() else runs_dir / named
    try:
        (flags.get("text") or "").encode()
    except UnicodeEncodeError as error:
        raise UsageError("--text is not valid UTF-8", str(error), "give it in UTF-8") from error
    request = {"path": str(path), "text": flags.get("text"), "json": flags.get("json", False),
               "sample_mb": flags.get("sample_mb", 50.0), **lists}  # fmt: skip
    return session("tokenizer-show", request, config=dump(resolved))
