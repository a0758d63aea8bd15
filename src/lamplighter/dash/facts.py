"""What a page shows of one run besides its curves: now, verdicts, samples, checkpoints, where the time went, plan and outcome.

In:  a run folder.
Out: plain values for JSON, each checked, bounded and without control characters and secrets; what is damaged is said as such.
"""

from __future__ import annotations

import math
import shlex
import stat
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lamplighter import read_back
from lamplighter.dash.machine import cards
from lamplighter.dash.series import RunSeries
from lamplighter.errors import LampError
from lamplighter.rundir import (
    EVALUATED,
    FORMAT,
    RunDir,
    is_running,
    newest_first,
    number,
    read_events,
    read_record,
    read_status,
    step_of,
    verify_manifest,
    version_of,
)
from lamplighter.safe_text import clean, clean_text, mask, mask_record
from lamplighter.schedule import expected_losses
from lamplighter.watch import time_report
from lamplighter.watch.status import standing_flags
from lamplighter.watch.trackers.follower import read_evaluation
from lamplighter.watch.trackers.following import tracking

STALE_S = 10.0
_MOST_EVENTS = 400
_MOST_SAMPLES = 60
_MOST_TEXT = 20_000
_TIMELINE = ("verdict", "well again", "start", "resumed", "went back", "rolled back", "warning", "error", "stop", "ended early", "asked")  # fmt: skip


@dataclass(frozen=True)
class RunsDir:
    """A folder of runs and the number by which the page calls it."""

    number: int
    path: Path


def find(dirs: Iterable[RunsDir], key: str) -> RunDir | None:
    """The run that a key such as 0/name means; None for all that is not a folder directly in one of ours."""
    place, _, name = key.partition("/")
    for one in dirs:
        if place == str(one.number) and name and name not in (".", "..") and "/" not in name and "\0" not in name:
            path = one.path / name
            try:
                if path.is_dir() and path.resolve().parent == one.path.resolve():
                    return RunDir(path)
            except OSError:  # a name that no file system takes
                return None
    return None


def rows(dirs: Iterable[RunsDir]) -> list[dict[str, Any]]:
    """One row for each run, newest first."""
    found = []
    for one in dirs:
        for path in one.path.glob("*/events.jsonl"):
            if path.parent.resolve().parent == one.path.resolve():
                found.append(row(one, RunDir(path.parent)))
    return sorted(found, key=lambda row: row["age_s"])


def row(where: RunsDir, run: RunDir) -> dict[str, Any]:
    """How a run stands, from status.json and its lock alone."""
    status, live = read_status(run), is_running(run)
    state = clean(str(status.get("state") or "unknown"))
    if not live and state in ("running", "stopping"):
        state = "lost"
    if (found := version_of(status)) > FORMAT:
        state = f"format {found}"
    if status["damage"]:
        state = "damaged"
    numbers = ("step", "steps", "tokens", "tokens_per_s", "loss", "val_loss", "best_val_loss", "usd", "durable_step", "spent_s", "eta_s",
               "attempt", "end_usd", "mirrored_step")  # fmt: skip
    return {
        "id": f"{where.number}/{run.name}",
        "name": clean(run.name),
        "dir": clean(str(where.path)),
        "live": live,
        "state": state,
        "damage": clean(status["damage"]),
        "verb": clean(str(status.get("verb") or "")),
        "phase": clean(str(status.get("phase") or "")),
        "now": clean(mask(str(status.get("now") or ""))),
        "stall": clean(mask(str(status.get("stall") or ""))),
        "outcome": clean(mask(str(status.get("outcome") or ""))),
        "flags": list(standing_flags(status)),
        "age_s": max(0.0, time.time() - changed_at(run)),
        "stale": live and time.time() - number(status.get("t")) > STALE_S,
        "track": mask_record(tracking(run, int(finite(status.get("step")) or 0), status.get("track") or [], live)),
        **{name: finite(status.get(name)) for name in numbers},
    }


def changed_at(run: RunDir) -> float:
    """When the run last said anything."""
    times = [0.0]
    for path in (run.events, run.metrics, run.status):
        try:
            times.append(path.stat().st_mtime)
        except OSError:  # not written yet
            continue
    return max(times)


def finite(value: object) -> float | None:
    found = number(value, math.nan)
    return None if math.isnan(found) else found


# ---------------------------------------------------------------- one run


def describe(where: RunsDir, run: RunDir, series: RunSeries) -> dict[str, Any]:
    """All of it; every part by itself, so that damage in one leaves the others."""
    events = list(read_events(run))
    config, config_problem = read_config(run)
    plan = read_record(run.path / "plan.json")
    floor = next((finite(one["nats_per_token"]) for one in reversed(events) if one["type"] == "floor"), None)
    told = row(where, run)
    times = time_report.read_time_report(run)
    price = finite(config.get("budget", {}).get("usd_per_hour"))
    return {
        **told,
        "t": time.time(),
        "newest_t": series.newest_t or changed_at(run),
        "damaged_lines": series.damaged,
        "config": config,
        "config_problem": config_problem,
        "events_problem": _events_problem(run) if not events else "",
        "usd_per_hour": price,
        "budget": {name: finite(value) for name, value in config.get("budget", {}).items()},
        "phases": _phases(events),
        "timeline": _placed(timeline(events), series, price),
        "began": series.began,
        "cards": cards(series),
        "samples": _samples(events),
        "checkpoints": checkpoints(run, series),
        "ledger": _ledger(times),
        "plan": _plan(plan, told, times, series),
        "floor": floor,
        "band": band(plan, config, told["steps"]),
        "vocab_size": vocab_size(plan, run),
        "evaluations": evaluations(run),
        "environment": mask_record(read_record(run.path / "environment.json")),
        "metrics": sorted([*series.columns, *series.scores]),
        "parameters": finite(plan.get("params")),
        "command": _command(run),
    }


def _events_problem(run: RunDir) -> str:
    """Why nothing is known of what happened, where there is something that should say it."""
    try:
        found = run.events.lstat()
    except OSError:  # a run that has only begun
        return ""
    if not stat.S_ISREG(found.st_mode):
        return "events.jsonl is no file"
    return "no line of events.jsonl is an event" if found.st_size else ""


def _command(run: RunDir) -> str:
    """Of a watched run, what was started."""
    words = read_record(run.status).get("command")
    return clean(mask(shlex.join(str(one) for one in words)))[:2000] if isinstance(words, list) else ""


def read_config(run: RunDir) -> tuple[dict[str, Any], str]:
    from dataclasses import asdict

    from lamplighter.config import load_dump

    if not run.config.exists():
        return {}, ""
    try:
        found: dict[str, Any] = asdict(load_dump(run.config))
    except (LampError, OSError, ValueError) as error:
        return {}, clean(mask(str(error)))
    if found.get("watch", {}).get("notify"):
        found["watch"]["notify"] = "***"
    return dict(_cleaned(mask_record(found))), ""


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)[:_MOST_TEXT]
    if isinstance(value, Mapping):
        return {clean(str(name)): _cleaned(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(one) for one in value[:1000]]
    return value if not isinstance(value, float) or math.isfinite(value) else None


def _phases(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What it is in now, since when, and what that usually took."""
    usual: dict[str, float] = {}
    open_since: dict[str, float] = {}  # those that have not ended, the innermost last
    for event in events:
        if event["type"] == "start":
            open_since.clear()
        elif event["type"] == "phase" and event["state"] == "start":
            open_since[str(event["path"])] = float(event["t"])
        elif event["type"] == "phase":
            open_since.pop(str(event["path"]), None)
            usual[str(event["path"])] = float(event["seconds"])
    current = next(
        (path for path in reversed(open_since) if not path.startswith("beside")), ""
    )  # a save goes on beside the steps
    return {"current": clean(current), "since": open_since.get(current, 0.0), "usual_s": usual.get(current)}


def timeline(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Verdicts and what changed the run's course, each with why and next, and with its stacks where they were kept."""
    found = []
    for event in events:
        kind = str(event["type"])
        if kind not in _TIMELINE or (kind == "verdict" and event.get("said")):
            continue
        one: dict[str, Any] = {"kind": kind, "t": float(event["t"]), "step": finite(event.get("step"))}
        if kind == "verdict":
            kept = event.get("kept")
            one |= {name: event.get(name) for name in ("state", "cause", "why", "next", "action", "evidence")}
            one |= {
                "flag": bool(event.get("flag")),
                "stacks": Path(kept).name if isinstance(kept, str) and kept else "",
            }
        else:
            one["why"] = _words(event)
        found.append(_cleaned(mask_record(one)))
    return found[-_MOST_EVENTS:]


def _placed(events: list[dict[str, Any]], series: RunSeries, price: float | None) -> list[dict[str, Any]]:
    """Each with its place on every axis: by its step where it has one, else by the row that was the newest then."""
    steps = np.frombuffer(series.steps) if series.steps else np.empty(0)
    axes = {kind: series.x_of(kind, price or 0.0) for kind in ("step", "tokens", "time", "usd")} if len(steps) else {}
    for one in events:
        step = one["step"]
        row = series.at_time(one["t"]) if step is None else min(len(steps) - 1, int(np.searchsorted(steps, step)))
        before = (
            step is None and one["t"] < series.times[0] if len(steps) else True
        )  # of the start, which no step shows
        found = {} if before else {kind: finite(float(x[row])) for kind, x in axes.items()}
        one["at"] = {**found, "wall": (one["t"] - series.began) / 3600 if series.began else None}
    return events


def _words(event: Mapping[str, Any]) -> str:
    kind = event["type"]
    if kind == "start":
        return f"attempt {event.get('attempt', '?')} began"
    if kind == "resumed":
        return f"resumed after step {event.get('step')}; {event.get('redone_steps') or 0} steps are done again"
    if kind == "went back":
        return f"sent back to {event.get('to')} (step {event.get('step')})"
    if kind == "rolled back" and event.get("passed_to") is None:
        return f"rolled back to step {event.get('step')}"
    if kind == "rolled back":
        return f"rolled back to step {event.get('step')}; batches {event.get('passed_from')} to {event.get('passed_to')} are passed over"
    if kind == "well again":
        return f"{event['cause']} is over"
    if kind == "error":
        return "\n".join(event["lines"])
    if kind == "asked":
        return f"somebody asked: {event.get('kind')}"
    return str(event.get("text") or event.get("why") or event.get("outcome") or kind)


def _samples(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = [
        {"step": one["step"], "text": clean_text(one["text"])[:_MOST_TEXT]} for one in events if one["type"] == "sample"
    ]
    return found[-_MOST_SAMPLES:]


def checkpoints(run: RunDir, series: RunSeries) -> list[dict[str, Any]]:
    """Each with its losses; whether its files are those of its manifest, by their sizes (lamp checkpoints reads them all)."""
    scored = series.scores.get("eval/val_loss", {})
    best = read_back.read_object(run.checkpoints / "best.json", read_back.BEST)[0].get("step")
    found = []
    for path in newest_first(run.checkpoints)[:100]:
        try:
            reason = verify_manifest(path, deep=False)
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            t = path.stat().st_mtime
        except OSError as error:  # it is being removed
            reason, size, t = error.strerror or str(error), 0, 0.0
        state = read_record(path / "training" / "state.json")
        step = step_of(path)
        found.append({"name": path.name, "step": step, "bytes": size, "t": t, "valid": reason is None, "reason": clean(reason or ""),
                      "best": step == best, "loss": finite(state.get("loss")), "val_loss": finite(scored.get(step))})  # fmt: skip
    return found


def _ledger(times: time_report.TimeReport) -> dict[str, Any]:
    parts = sorted(times.seconds.items(), key=lambda one: -one[1])
    return {
        "wall_s": times.wall_s,
        "attempts": times.attempts,
        "redone_steps": times.redone_steps + times.returned_steps,
        "parts": [{"name": clean(name), "seconds": seconds} for name, seconds in parts if seconds > 0][:40],
        "unexplained_s": times.unexplained_s,
    }


def _plan(plan: Mapping[str, Any], told: Mapping[str, Any], times: time_report.TimeReport, series: RunSeries) -> list[dict[str, Any]]:  # fmt: skip
    """What was planned beside what came true."""
    if not plan:
        return []
    seen_ms, seen_mfu = series.median("train/dt_ms"), series.median("train/mfu")
    held = next((values for name in ("sys/gpu_mem_gb", "sys/ram_gb") if len(values := series.finite(name))), None)
    ram = None if held is None else float(held.max())
    hours = finite(plan.get("hours"))
    found: list[tuple[str, float | None, float | None, str]] = [
        ("time of a step", _times(plan.get("step_s"), 1000), seen_ms, "ms"),
        ("MFU", _times(plan.get("mfu"), 100), _times(seen_mfu, 100), "%"),
        ("whole run", _times(hours, 3600), times.wall_s if told["state"] == "finished" else None, "s"),
        ("cost", finite(plan.get("usd")), finite(told.get("usd")) if told["state"] == "finished" else None, "$"),
        ("memory", finite(plan.get("memory_gib")), _times(ram, 1e9 / 2**30), "GiB"),
        ("tokens", finite(plan.get("tokens")), finite(told.get("tokens")) if told["state"] == "finished" else None, ""),
    ]
    return [
        {"name": name, "planned": planned, "seen": seen, "unit": unit}
        for name, planned, seen, unit in found
        if planned is not None
    ]


def _times(value: object, factor: float) -> float | None:
    found = finite(value)
    return None if found is None else found * factor


def band(plan: Mapping[str, Any], config: Mapping[str, Any], steps: float | None) -> list[list[float]]:
    """The loss that is expected at shares of the run, where the sizes are those that it was measured for (docs/redflags.md)."""
    if not steps or config.get("model", {}).get("init_from") or config.get("data", {}).get("format") == "chat":
        return []
    vocabulary = finite(plan.get("vocab_size")) or finite(config.get("tokenizer", {}).get("vocab_size")) or 0.0
    return [[share * steps, loss] for share, loss in expected_losses(finite(plan.get("params")) or 0.0, vocabulary)]


def vocab_size(plan: Mapping[str, Any], run: RunDir) -> float | None:
    """Of the model, which may have fewer tokens than `tokenizer.vocab_size` asks for; None where nothing says it."""
    newest = newest_first(run.checkpoints)[:1]
    held = read_record(newest[0] / "config.json").get("vocab_size") if newest else None
    return finite(plan.get("vocab_size")) or finite(held)


def evaluations(run: RunDir) -> list[dict[str, Any]]:
    """Every score of every evaluation that is whole; what is not a number is left out."""
    folder = run.path / "evaluations"
    found = []
    for path in sorted(folder.glob("*.json"))[:500] if folder.is_dir() else ():
        values = read_evaluation(path)
        record = read_record(path) if values is not None else {}
        listed = [one for one in record.get("scores", []) if isinstance(one, dict)]
        items = max((finite(one.get("n")) or 0.0 for one in listed), default=0.0)
        for one in listed:
            if finite(one.get("value")) is not None:
                found.append({"task": clean(str(record.get("task")))[:80], "step": finite(record.get("step")), "name": clean(str(one.get("name")))[:80],
                              "verdict": clean(str(one.get("verdict") or ""))[:40], "t": finite(record.get("t")) or 0.0,
                              "higher_is_better": one.get("higher_is_better") is not False, "interval": _interval(record.get("interval")), "data": _data_mark(record),
                              "items": items, **{name: finite(one.get(name)) for name in ("value", "stderr", "n", "chance")}})  # fmt: skip
    return found


def evaluated_models(dirs: Iterable[RunsDir]) -> list[dict[str, Any]]:
    """Models that are no runs of ours and were evaluated here, with their scores."""
    folders = [path for one in dirs for path in sorted((one.path / EVALUATED).glob("*"))[:100] if path.is_dir()]
    found = [{"name": clean(path.name)[:120], "evaluations": evaluations(RunDir(path))} for path in folders]
    return [one for one in found if one["evaluations"]]


def _data_mark(record: Mapping[str, Any]) -> str:
    """Which items they were: two results of other items cannot be compared."""
    data = record.get("data")
    known = data if isinstance(data, Mapping) else {}
    return f"{str(known.get('sha256'))[:64]} {known.get('items')}"


def _interval(found: object) -> list[float] | None:
    """Two numbers, where a result has them: of people's choices."""
    ends = [finite(one) for one in found] if isinstance(found, list) and len(found) == 2 else []
    known = [one for one in ends if one is not None]
    return known if len(known) == 2 else None


def read_inside(run: RunDir, folder: str, name: str) -> str | None:
    """The text of a file of the run's folder; None where it leads out of it, by a name or by a link."""
    path = run.path / folder / name
    if "/" in name or name in ("", ".", "..") or "\0" in name:
        return None
    try:
        if path.resolve().parent != (run.path / folder).resolve() or not (run.path / folder).resolve().is_relative_to(
            run.path.resolve()
        ):
            return None
        return clean_text(mask(read_back.read_whole(path, 1 << 22).decode("utf-8", "replace")))
    except OSError:  # not there, too large, or no file
        return None
