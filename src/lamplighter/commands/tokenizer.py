"""lamp tokenizer train and show: a tokenizer from any source; what a tokenizer is and what it makes of text.

In:  the words after the verb.
Out: a folder that transformers opens; a table or JSON on stdout. The work happens in a child, under watch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lamplighter import own_code, report
from lamplighter.commands.arguments import many, one_of, parse
from lamplighter.data.setup import open_source
from lamplighter.errors import DONE, BadConfig, UsageError
from lamplighter.rundir import CACHE_NAME, RunDir


def tokenizer(words: list[str]) -> int:
    """One of the verbs about tokenizers."""
    return one_of("tokenizer", words, {"train": _train, "show": _show})


# ---------------------------------------------------------------- lamp tokenizer train


def _train_flags(
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


def _train(words: list[str]) -> int:
    """A tokenizer from any source."""
    from lamplighter.commands.session import session
    from lamplighter.config import dump, parse_overrides, resolve

    rest, overrides = parse_overrides(words)
    rest, lists = many(rest, "special", "compare")
    flags = parse("tokenizer train", _train_flags, rest)
    resolved = resolve(flags["preset"], flags["run_yaml"], overrides)
    own_code.look_beside(flags["run_yaml"])
    if flags["out"] is None:
        raise UsageError("--out is missing", "a tokenizer is a folder of files", "--out my-tokenizer")
    if resolved.run.tokenizer.path is not None:
        why = f"tokenizer.path is {resolved.run.tokenizer.path} ({resolved.origin.get('tokenizer.path', 'default')})"
        raise BadConfig("there is nothing to train", why, "--tokenizer.path none, to train one all the same")
    request = {"out": str(flags["out"]), "force": flags["force"], "json": flags["json"],
               "runs_dir": str(flags["runs_dir"]), **lists}  # fmt: skip
    return session("tokenizer-train", request, config=dump(resolved))


def train_child(folder: RunDir, request: dict[str, Any]) -> int:
    """A tokenizer from any source, checked by a round trip."""
    with report.phase("import"):
        from lamplighter.config import load_dump
        from lamplighter.data import tokenizer_training
    run, cache = load_dump(folder.config), Path(request["runs_dir"]) / CACHE_NAME
    size = 257 + len(request["special"]) if run.tokenizer.kind == "bytes" else run.tokenizer.vocab_size
    wish = tokenizer_training.Wish(
        Path(request["out"]),
        size,
        run.tokenizer.sample_mb,
        special=tuple(request["special"]),
        compare=tuple(map(Path, request["compare"])),
        force=request["force"],
    )
    result = tokenizer_training.make(open_source(run, cache), wish, cache)
    report.result(json.dumps(result, indent=1) + "\n" if request["json"] else tokenizer_training.told(result))
    return DONE


# ---------------------------------------------------------------- lamp tokenizer show


def _show_flags(
    target: str,
    /,
    *files: str,
    text: str | None = None,
    sample_mb: float = 50.0,
    json: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp tokenizer show` takes besides fields and --compare."""


def _show(words: list[str]) -> int:
    """What a tokenizer is, and what it does with text."""
    from lamplighter.commands.session import session
    from lamplighter.config import dump, parse_overrides, resolve

    rest, overrides = parse_overrides(words)
    rest, lists = many(rest, "compare")
    flags = parse("tokenizer show", _show_flags, rest)
    if flags["files"]:
        overrides["data.paths"] = [*overrides.get("data.paths", []), *flags["files"]]
    resolved = resolve(None, None, overrides)
    runs_dir = flags["runs_dir"]
    named = Path(flags["target"])
    path = named if named.exists() or not (runs_dir / named).is_dir() else runs_dir / named
    try:
        (flags["text"] or "").encode()
    except UnicodeEncodeError as error:
        raise UsageError("--text is not valid UTF-8", str(error), "give it in UTF-8") from error
    request = {"path": str(path), "text": flags["text"], "json": flags["json"],
               "sample_mb": flags["sample_mb"], **lists}  # fmt: skip
    return session("tokenizer-show", request, config=dump(resolved))


def show_child(folder: RunDir, request: dict[str, Any]) -> int:
    """What a tokenizer is, and what it makes of text."""
    with report.phase("import"):
        from lamplighter.config import load_dump
        from lamplighter.data import tokenizer_report
    run = load_dump(folder.config)
    given = bool(run.data.paths or run.data.source)
    source = open_source(run, folder.path / CACHE_NAME) if given else None
    compare = [Path(one) for one in request["compare"]]
    record = tokenizer_report.portray(
        Path(request["path"]), request["text"], source, int(request["sample_mb"] * 1e6), compare
    )
    report.result(
        json.dumps(record, indent=1) + "\n" if request["json"] else tokenizer_report.told(record, request["tty"]),
        raw=request["tty"],  # with colours of ours; everything else in it is escaped
    )
    return DONE
