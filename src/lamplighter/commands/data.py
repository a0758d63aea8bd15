"""lamp data stats, clean and prepare: a corpus in figures, raw files to clean documents, the token cache of a run.

In:  the words after the verb.
Out: a table or JSON on stdout, files; the work happens in a child, under watch.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from lamplighter import own_code, report
from lamplighter.commands.arguments import many, one_of, parse
from lamplighter.data.setup import choose_template, obtain_tokens, open_rows, open_source, open_text
from lamplighter.errors import DONE, BadConfig, UsageError
from lamplighter.model.origin import with_local_model
from lamplighter.rundir import CACHE_NAME, RunDir, human_bytes

if TYPE_CHECKING:
    from lamplighter.config import Run
    from lamplighter.data.chat.rows import RowSource
    from lamplighter.data.chat.template import ChatTemplate
    from lamplighter.data.sources import Source
    from lamplighter.data.stats import Stats


def data(words: list[str]) -> int:
    """One of the verbs about text."""
    return one_of("data", words, {"stats": stats, "clean": clean, "prepare": prepare})


# ---------------------------------------------------------------- lamp data stats


def _stats_flags(
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


def stats(words: list[str]) -> int:
    """A corpus in figures."""
    from lamplighter.commands.session import session
    from lamplighter.config import dump, parse_overrides, resolve

    rest, overrides = parse_overrides(words)
    rest, lists = many(rest, "val")
    flags = parse("data stats", _stats_flags, rest)
    sample_mb, near = flags["sample_mb"], flags["near_documents"]
    if (sample_mb is not None and sample_mb <= 0) or near < 0:
        raise UsageError(
            "--sample-mb and --near-documents count something", "one of them is not positive", "--sample-mb 100"
        )
    given: Path | None = flags["run_yaml"]
    cache = given if given is not None and (given / "manifest.json").is_file() else None
    resolved = resolve(flags["preset"], given if cache is None else None, overrides)
    own_code.look_beside(given if cache is None else None)
    request = {"json": flags["json"], "out": str(flags["out"]) if flags["out"] else None,
               "cache": str(cache) if cache else None,
               "sample_mb": sample_mb, "near_documents": near, "runs_dir": str(flags["runs_dir"]),
               **lists}  # fmt: skip
    return session("data-stats", request, config=dump(resolved))


def stats_child(folder: RunDir, request: dict[str, Any]) -> int:
    """Documents, true tokens, lengths, padding, duplicates, advice."""
    with report.phase("import"):
        from lamplighter.config import load_dump
        from lamplighter.data import stats, tokenizer_training
        from lamplighter.data.stats import chat_stats, overlap
    run = with_local_model(load_dump(folder.config), weights=False)
    cache = Path(request["runs_dir"]) / CACHE_NAME
    wanted = stats.Request(
        run.data.seq_len,
        run.train.batch_size,
        run.data.val_fraction,
        int(request["sample_mb"] * 1e6) if request["sample_mb"] else None,
        request["near_documents"],
    )
    if request["out"]:
        tokenizer_training.check_writable(Path(request["out"]))
    if request["cache"]:
        found = stats.count_cache(Path(request["cache"]), wanted)
        return _tell_stats(found, lambda: [request["cache"], wanted], request)
    source, tokenizer = open_text(run, cache)
    test = None
    if request["val"]:
        mine = replace(run, data=replace(run.data, paths=request["val"], source=None))
        test = overlap.TestGrams(", ".join(request["val"]), open_source(mine, cache))
    made = "the bytes as they are" if run.tokenizer.kind == "bytes" else f"trained on this source, kept in {cache}"
    path = run.tokenizer.path or run.model.init_from or made
    template = choose_template(run, source, tokenizer)
    if template is not None:  # only rows have one
        found = chat_stats.count_rows(cast("RowSource", source), template, path, wanted, test)
    else:
        found = stats.count_text(source, tokenizer, path, wanted, test)
    key = lambda: [source.fingerprint(), tokenizer.fingerprint(), wanted, request["val"]]  # noqa: E731
    return _tell_stats(found, key, request)


def _tell_stats(found: Stats, key: Callable[[], list[Any]], request: dict[str, Any]) -> int:
    """The record to disk and to the asker; `key` names its folder where the asker does not."""
    from lamplighter.data.stats import summary

    if request["out"]:
        out = Path(request["out"])
    else:
        out = Path(request["runs_dir"]) / ".stats" / hashlib.sha256(repr(key()).encode()).hexdigest()[:16]
    as_json = json.dumps(summary.as_record(found), indent=1, ensure_ascii=False) + "\n"
    report.result(as_json if request["json"] else summary.told(found))
    summary.written(found, out)
    report.note(f"made: {out}/stats.json, stats.txt and lengths.svg (open it in a browser)")
    report.note("next: lamp train with the settings that are advised; lamp data clean takes repeated texts out")
    return DONE


# ---------------------------------------------------------------- lamp data clean


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
    bad_files: Literal["set_aside", "refuse"] = "set_aside",
    json: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """How to clean; --runs-dir is on every verb, and nothing of this one goes there."""


def clean(words: list[str]) -> int:
    """Raw files to clean documents, in a child under watch."""
    from lamplighter.commands.session import session

    flags = parse("data clean", _clean_flags, words)
    flags.pop("runs_dir")
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


def clean_child(_: RunDir, request: dict[str, Any]) -> int:
    """Raw files to clean documents."""
    with report.phase("import"):
        from lamplighter.clean import pipeline
        from lamplighter.clean.rules import Rules
        from lamplighter.procs.pool import usable_cores
    rules, dry = Rules(**request["rules"]), request["dry_run"]
    out = Path(request["out"]) if request["out"] else None
    done = pipeline.run(request["paths"], out, rules, request["workers"] or usable_cores(), dry)
    shown = pipeline.table(done.totals, examples=dry)
    if request["json"]:
        shown = json.dumps({**done.totals, "out": str(out) if out else None, "shards": done.shards}, indent=1) + "\n"
    report.result(shown)
    pipeline.refuse_nothing(done, None if dry else out)
    rate = done.totals["bytes_in"] / max(done.seconds, 1e-3)
    following = f"next: lamp train --data.paths {shlex.quote(str(out))}"
    if dry:
        report.note("a dry run: nothing was written; without --dry-run the documents go to --out DIR")
    elif done.found:
        report.note(f"nothing has changed: {done.totals['kept']:,} documents are in {out}; {following}")
    else:
        report.note(
            f"{done.totals['kept']:,} clean documents in {out} ({human_bytes(rate)}/s), the rejected in {out}/log/rejected.log;"
            f" {following}"
        )
    return DONE


# ---------------------------------------------------------------- lamp data prepare


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


def prepare(words: list[str]) -> int:
    """The tokenizer and the token cache of a training run, without the training."""
    from lamplighter.commands.session import session
    from lamplighter.config import dump, parse_overrides, resolve

    rest, overrides = parse_overrides(words)
    flags = parse("data prepare", _prepare_flags, rest)
    resolved = resolve(flags["preset"], flags["run_yaml"], overrides, flags["test"])
    own_code.look_beside(flags["run_yaml"])
    request = {
        "cache": str(flags["runs_dir"] / CACHE_NAME),
        "json": flags["json"],
        "next": shlex.join(["lamp", "train", *(word for word in words if word != "--json")]),
    }
    return session("data-prepare", request, config=dump(resolved))


def prepare_child(folder: RunDir, request: dict[str, Any]) -> int:
    """The tokenizer and the token cache that a training run with the same settings would make or reuse."""
    started = time.monotonic()
    with report.phase("import"):
        from lamplighter.config import load_dump
    run, cache = with_local_model(load_dump(folder.config), weights=False), Path(request["cache"])
    if run.data.stream:
        why = "data.stream trains while documents arrive, without a cache of all tokens"
        raise BadConfig("there is nothing to prepare", why, "leave data.stream out, or start the training")
    source, tokenizer = open_text(run, cache)
    tokenizer_s = time.monotonic() - started
    if (template := choose_template(run, source, tokenizer)) is not None:
        return _prepare_rows(run, cache, source, template, request)
    tokens, is_new = obtain_tokens(run, cache, source, tokenizer)
    seconds = time.monotonic() - started
    files = [tokens.folder / name for name in tokens.manifest["files"]]
    text_bytes = tokens.train.text_bytes + tokens.val.text_bytes
    made: dict[str, Any] = {
        "cache": str(tokens.folder),
        "made": is_new,
        "source": str(source),
        "tokenizer": str(tokenizer),
        "divided_by": tokens.manifest["divided_by"],
        "splits": {
            split.name: {"documents": split.documents, "tokens": len(split), "text_bytes": split.text_bytes}
            for split in (tokens.train, tokens.val)
        },
        "disk_bytes": sum(file.stat().st_size for file in files),
        "files": len(files),
        "seconds": round(seconds, 3),
        "tokenizer_s": round(tokenizer_s, 3),
        "mb_per_s": round(text_bytes / 1e6 / max(1e-9, seconds - tokenizer_s), 1),
        "next": request["next"],
    }
    report.result(json.dumps(made, indent=1) + "\n" if request["json"] else _prepared(made))
    return DONE


def _prepare_rows(run: Run, cache: Path, source: Source, template: ChatTemplate, request: dict[str, Any]) -> int:
    """Of instruction rows, the examples; packing is arithmetic, done at each start."""
    found = open_rows(run, cache, source, template)
    files = [path for path in found.folder.iterdir() if path.is_file()]
    made: dict[str, Any] = {
        "cache": str(found.folder),
        "source": str(source),
        "template": template.name,
        "splits": {
            side.name: {"examples": side.examples, "tokens": int(side.length.sum())}
            for side in (found.train, found.val)
        },
        "disk_bytes": sum(file.stat().st_size for file in files),
        "next": request["next"],
    }
    rows = [
        f"{name:<8} {split['examples']:>12,} examples {split['tokens']:>14,} tokens"
        for name, split in made["splits"].items()
    ]
    words = [
        f"examples: {made['cache']}",
        f"  of {source}, template {template.name}",
        *rows,
        f"  on disk: {human_bytes(made['disk_bytes'])}",
        f"next: {request['next']}",
        "",
    ]
    report.result(json.dumps(made, indent=1) + "\n" if request["json"] else "\n".join(words))
    return DONE


def _prepared(made: dict[str, Any]) -> str:
    """What was made, where, how much of it, how fast, and what to do next."""
    pieces = "documents" if made["divided_by"] == "documents" else "runs of blocks"
    rows = [f"{'':<12} {pieces:>14} {'tokens':>16} {'text':>12}"]
    for name, counts in made["splits"].items():
        size = human_bytes(counts["text_bytes"])
        rows.append(f"{name:<12} {counts['documents']:>14,} {counts['tokens']:>16,} {size:>12}")
    size = human_bytes(sum(counts["text_bytes"] for counts in made["splits"].values()))
    cache_s = made["seconds"] - made["tokenizer_s"]
    speed = (
        f"{size} at {made['mb_per_s']:.0f} MB/s" if made["made"] else "it was there already, and every byte is right"
    )
    return "\n".join(
        [
            f"token cache {'made' if made['made'] else 'found'}: {made['cache']}",
            f"  of {made['source']}, divided by {made['divided_by']}",
            f"  tokenizer: {made['tokenizer']}",
            *rows,
            f"  on disk: {human_bytes(made['disk_bytes'])} in {made['files']} files",
            f"  {made['seconds']:.1f} s: {made['tokenizer_s']:.1f} s source and tokenizer, {cache_s:.1f} s cache ({speed})",
            f"next: {made['next']}",
            "",
        ]
    )
