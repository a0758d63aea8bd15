"""lamp eval: how good a model is, by tasks on local files.

In:  a run, a model folder or a hub name; tasks and the folder with their data.
Out: a table or JSON on stdout, and one file per task in the run's evaluations/. The model runs in a child, under watch.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.commands.arguments import many, named_again, parse, with_own_fields
from lamplighter.commands.model_folder import (
    base_given,
    folders_of,
    load_candidate,
    located,
    own_family,
    resolved_model,
)
from lamplighter.errors import DONE, BadData, InputMissing, LampError, UsageError
from lamplighter.procs import procfs
from lamplighter.rundir import (
    CACHE_NAME,
    RunDir,
    is_running,
    read_record,
)

if TYPE_CHECKING:
    from lamplighter.data.token_cache.reader import CachedStream, Tokens
    from lamplighter.evaluate.evaluation import Candidate
    from lamplighter.evaluate.items import Task

SUITES = {
    "quick": ("held-back", "hellaswag", "lambada", "arc_easy", "piqa"),
    "comprehensive": (
        "held-back",
        "hellaswag",
        "lambada",
        "mmlu",
        "arc_easy",
        "arc_challenge",
        "piqa",
        "rouge",
        "period",
        "wikitext-2",
    ),
}  # fmt: skip  of these, what the run and --data have
_QUICK_ITEMS = 200
_NICENESS = 10  # beside a training
_MUCH = 20_000  # tokens: the time of fewer is not worth a measurement
_PROBE = 256  # tokens of that measurement


def _eval_flags(
    model: str,
    other: str = "",
    /,
    *,
    suite: str = "",
    checkpoint: str = "latest",
    data: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    window: int | None = None,
    chat: bool = False,
    human: bool = False,
    prompts: Path | None = None,
    page: bool = False,
    json: bool = False,
    threads: int | None = None,
    model_family: str | None = None,
    model_init_from: str | None = None,
    runs_dir: Path = Path("runs"),
) -> None:
    """How to evaluate."""


def eval(words: list[str]) -> int:
    """Tasks of our own on local files, lm-eval's by its adapter; or pairs for people."""
    from lamplighter.commands.session import session

    rest, lists = many(with_own_fields(words), "tasks")
    flags = parse("eval", _eval_flags, rest)
    tasks = [one for word in lists["tasks"] for one in word.split(",") if one]
    if "--tasks" in " ".join(words) and not tasks:
        raise UsageError("--tasks names no task", "", "--tasks hellaswag,lambada --data DIR")
    if flags["suite"] and (flags["suite"] not in SUITES or tasks):
        raise UsageError(f"--suite {flags['suite']} cannot be used", f"there are {', '.join(SUITES)}, without --tasks", "lamp eval --help")  # fmt: skip
    for name, least in (("limit", 1), ("window", 2), ("threads", 1), ("num_fewshot", 0)):
        if flags[name] is not None and flags[name] < least:
            raise UsageError(
                f"--{name.replace('_', '-')} must be {least} or more", "", "leave it out for what is usual"
            )
    request = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    request["model_init_from"] = base_given(flags["model_init_from"])
    request |= {"tasks": tasks, "typed": flags["model"], "command": shlex.join(["lamp", "eval", *words])}
    _refuse_what_would_be_ignored(flags, bool(tasks))
    if flags["human"]:
        from lamplighter.commands.human import compare

        return compare(request)
    if flags["other"]:
        raise UsageError("two models are compared by people", "only --human takes two", "lamp eval A B --human")
    request |= located(flags["model"], flags["runs_dir"])
    return session("eval", request)


def _refuse_what_would_be_ignored(flags: Mapping[str, Any], has_tasks: bool) -> None:
    """People answer no tasks, and tasks have no pairs."""
    of_tasks = {"--tasks": has_tasks, "--suite": flags["suite"], "--data": flags["data"], "--limit": flags["limit"], "--num-fewshot": flags["num_fewshot"], "--window": flags["window"], "--checkpoint all": flags["checkpoint"] == "all"}  # fmt: skip
    of_people = {"--prompts": flags["prompts"], "--page": flags["page"]}
    unused = [
        name for name, value in (of_tasks if flags["human"] else of_people).items() if value not in (None, False, "")
    ]
    if unused:
        why = "people compare one set of weights of each model" if flags["human"] else "it is for --human"
        raise UsageError(f"{unused[0]} cannot be used here", why, "lamp eval --help")


# ---------------------------------------------------------------- in the child


def eval_child(_: RunDir, request: dict[str, Any]) -> int:
    """Every task of every checkpoint that was asked for."""
    names = request["tasks"]
    data = Path(request["data"]) if request["data"] else None
    with report.phase("tasks"):
        opened = [_opened(name, data, request) for name in _names(request, names, data)]
    place = Path(request["place"])
    _say_items(opened, request["limit"])
    beside = _training_beside(place)
    if beside:
        procfs.yield_cores(_NICENESS)
        report.note(f"{beside} is being trained: this yields to it (niceness {_NICENESS}, half of the threads)")
    with report.phase("import"):
        import torch

        if request["threads"] or beside:
            torch.set_num_threads(request["threads"] or max(1, torch.get_num_threads() // 2))
    folders = folders_of(Path(resolved_model(request["model"])), request["checkpoint"])
    records: list[dict[str, Any]] = []
    failed: list[LampError] = []
    for folder in folders:
        if not folder.is_dir():
            report.warn(f"{folder.name} is left out: the run has pruned it meanwhile (save.keep keeps more)")
            continue
        records += _evaluate_folder(folder, opened, request, 0 if records else len(folders), failed)
    if failed and not records:
        raise failed[0]
    report.result(json.dumps(records, indent=1) + "\n" if request["json"] else _table(records))
    again = shlex.join(
        [
            "lamp",
            "generate",
            request["typed"],
            "--interactive",
            *own_family(folders[-1]),
            *named_again(request["runs_dir"]),
        ]
    )
    report.note(f"results are in {place / 'evaluations'}; next: {again}")
    if failed:
        raise failed[0]
    return DONE


def _training_beside(place: Path) -> str:
    """The run of the same folder of runs that is being trained right now; '' where there is none."""
    folder = place.parent if (place / "checkpoints").is_dir() else place.parent.parent
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_over = (
            read_record(path / "status.json").get("state") == "finished"
        )  # its parent may still live, in eval.tasks
        if (path / "events.jsonl").exists() and not is_over and is_running(RunDir(path)):
            return path.name
    return ""


def _names(request: Mapping[str, Any], names: list[str], data: Path | None) -> list[str]:
    """The tasks that were asked for; without any: the run's own held-back text, and all that --data has."""
    from lamplighter.evaluate import tasks as all_tasks

    own = ["held-back"] if (Path(request["place"]) / "checkpoints").is_dir() else []
    if request["suite"]:
        known = {*own, *(all_tasks.find_tasks(data) if data else ())}
        found = [one for one in SUITES[request["suite"]] if one in known]
        if left := [one for one in SUITES[request["suite"]] if one not in known]:
            report.note(f"of the suite {request['suite']} there is no data for: {', '.join(left)}")
    else:
        found = names or [*own, *(all_tasks.find_tasks(data) if data else ())]
    if not found and request["suite"]:
        raise InputMissing(f"there is no data for any task of the suite {request['suite']}", f"--data is {data or 'not given'}", f"a folder or file for each: {', '.join(SUITES[request['suite']])}")  # fmt: skip
    if not found:
        raise UsageError("there is nothing to evaluate on", "a model folder has no text of its own", "--data DIR --tasks NAME,...")  # fmt: skip
    return found


def _opened(name: str, data: Path | None, request: Mapping[str, Any]) -> Task | str:
    """A task of ours with its items; tasks of lm-eval and the run's own text are opened with the model."""
    from lamplighter.evaluate import tasks as all_tasks
    from lamplighter.evaluate.period import LONDON, open_period

    if name == "held-back" or name.startswith("lm-eval:"):
        return name
    limit = request["limit"] or (_QUICK_ITEMS if request["suite"] == "quick" else None)
    if name == "period" and (data is None or name not in all_tasks.find_tasks(data)):
        return all_tasks.limited(open_period("period", LONDON), limit)
    return all_tasks.limited(all_tasks.open_task(name, data, all_tasks.Shots(request["num_fewshot"])), limit)


def _say_items(opened: list[Task | str], limit: int | None) -> None:
    """What lies ahead, before the model is loaded."""
    counts = [f"{task.name} {len(task.items):,}" for task in opened if not isinstance(task, str)]
    if counts:
        report.note(f"items: {', '.join(counts)}")
    whole = [one if isinstance(one, str) else one.name for one in opened if one == "held-back" or (not isinstance(one, str) and one.kind == "text")]  # fmt: skip
    if limit and whole:
        report.note(f"--limit counts items: {', '.join(whole)} are texts, and read whole")


def _say_time(candidate: Candidate, tasks: list[Task | str], models: int) -> None:
    """What each task will take, by a measured pass of this model; of small ones nothing, they are done sooner."""
    from lamplighter.evaluate.evaluation import tokens_of
    from lamplighter.evaluate.likelihood import seconds_to_read

    ahead = {task.name: tokens_of(task) for task in tasks if not isinstance(task, str)}
    if sum(read + 4 * written for read, written in ahead.values()) * models < _MUCH:
        return
    model, positions = candidate.built.model, candidate.built.positions
    with report.phase("pace"):
        each = seconds_to_read(model, _PROBE, positions) / min(_PROBE, positions)
        # texts are written eight at a time, and each step of theirs is a pass of eight tokens
        step = seconds_to_read(model, 8, positions) / 8 if any(written for _, written in ahead.values()) else 0.0
    times = {name: models * (read * each + written * step) for name, (read, written) in ahead.items()}
    listed = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in times.items())
    unknown = [task for task in tasks if isinstance(task, str)]
    rest = f"; of {', '.join(unknown)} the time is not known" if unknown else ""
    report.note(f"this takes about {_seconds(sum(times.values()))} ({1 / each:,.0f} tokens/s now): {listed}{rest}")


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 120 else f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"  # fmt: skip


def _evaluate_folder(
    folder: Path, opened: list[Task | str], request: dict[str, Any], models: int, failed: list[LampError]
) -> list[dict[str, Any]]:
    """Every task on one set of weights; `models`: how many lie ahead, for the first, where the time is said.

    A task that cannot be scored is an error and no score, but the others are done first.
    """
    from lamplighter.evaluate import contamination
    from lamplighter.evaluate.evaluation import Manner, evaluate

    candidate = load_candidate(folder, request)
    tokens, kept = training_tokens(folder, Path(request["place"])), Path(request["place"]) / "evaluations"
    tasks = [held_back(candidate, folder, tokens) if one == "held-back" else one for one in opened]
    ours = [one for one in tasks if not isinstance(one, str)]
    if models:
        _say_time(candidate, tasks, models)
    met = contamination.measure(ours, tokens, candidate.tokenizer, kept / "items") if tokens is not None else {}
    manner = Manner(kept, request["window"], request["chat"], met)
    records = []
    for task in tasks:
        if isinstance(task, str):
            from lamplighter.evaluate.harness import run_harness

            records += run_harness(candidate, task.removeprefix("lm-eval:"), manner, request)
            continue
        try:
            record = evaluate(candidate, task, manner)
        except BadData as error:
            failed.append(error)
            report.warn(f"{error.what}: {error.why}")
            continue
        records.append(record)
        _say(record)
    return records


def training_tokens(folder: Path, place: Path) -> Tokens | None:
    """The token cache that a checkpoint was trained from, where it still is."""
    from lamplighter.data.token_cache.reader import open_tokens

    name = read_record(folder / "training" / "state.json").get("cache")
    cache = place.parent / CACHE_NAME / str(name)
    if not isinstance(name, str) or Path(name).name != name or not cache.is_dir():
        report.note("contamination is not measured: the token cache of this model is not here")
        return None
    try:
        return open_tokens(cache)
    except LampError as error:
        report.note(f"contamination is not measured: {error.what}: {error.why}")
        return None


def held_back(candidate: Candidate, folder: Path, tokens: Tokens | None, most: int | None = None) -> Task:
    """The run's own validation text as a task."""
    from lamplighter.evaluate.items import Task, TaskItem

    if tokens is None or not len(tokens.val):
        why = "its token cache is gone, or it was trained on rows or a stream"
        raise InputMissing(f"the held-back text of {folder} is not here", why, "--tasks NAME --data DIR")
    texts = held_back_documents(tokens.val, candidate.tokenizer.end_of_text)[:most]
    items = tuple(TaskItem("", (candidate.tokenizer.decode(ids),)) for ids in texts)
    return Task(
        "held-back",
        "text",
        items,
        tokens.folder,
        tokens.folder.name,
        "each held-back document by itself",
        {"documents": len(texts)},
    )


def held_back_documents(stream: CachedStream, end_of_text: int) -> list[list[int]]:
    """The documents of a stream without the marks between them."""
    ids = stream.read(0, len(stream)).tolist()
    found, begin = [], 0
    for at, token in enumerate([*ids, end_of_text]):
        if token == end_of_text:
            if at > begin:
                found.append(ids[begin:at])
            begin = at + 1
    return found


# ---------------------------------------------------------------- words


def _say(record: Mapping[str, Any]) -> None:
    from lamplighter.evaluate.scores import TaskScore

    scores = [TaskScore.of(one) for one in record["scores"]]
    said = "; ".join(f"{one.name} {one.words()}" for one in scores[:3])
    found = record["contamination"]
    met = f"; {found['share']:.1%} of the items share {found['n']} words in a row with the training text" if found else ""  # fmt: skip
    report.note(f"{record['checkpoint']} {record['task']}: {said}{met}")


def _table(records: list[dict[str, Any]]) -> str:
    from lamplighter.evaluate.scores import TaskScore, shown

    lines = [f"{'checkpoint':<18} {'task':<14} {'score':<24} {'value':>9} {'stderr':>8} {'n':>7} {'chance':>7}"]
    for record in records:
        for one in (TaskScore.of(found) for found in record["scores"]):
            error = "-" if one.stderr is None else shown(one.stderr)
            chance = "-" if one.chance is None else f"{one.chance:.4f}"
            lines.append(f"{record['checkpoint']:<18} {record['task']:<14} {one.name:<24} {shown(one.value):>9} {error:>8} {one.n:>7,} {chance:>7}  {one.verdict}".rstrip())  # fmt: skip
    return "\n".join(lines) + "\n"
