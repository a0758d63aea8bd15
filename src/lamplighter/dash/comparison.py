"""Two runs or more beside each other: their numbers, their settings, and what may be said of the difference.

In:  run folders and the columns of their metrics.
Out: a table, sentences on convergence, generalisation, efficiency, stability and what to take, each with its numbers. A difference
     within the noise is called not distinguishable; losses of different tokenizers are never compared, only bits per byte.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lamplighter.dash import facts
from lamplighter.dash.series import Floats, RunSeries, SeriesCache
from lamplighter.rundir import RunDir, hash_file, newest_first, read_record, read_status
from lamplighter.safe_text import clean, mask_record
from lamplighter.watch import time_report
from lamplighter.watch.status import duration, large

_SURE = 2.0  # standard errors
_NORMAL = 1.4826  # from a median distance to a standard deviation
_SPIKE = 8.0  # median distances
_TINY = 0.005  # as a share: where the noise is not known, less than this is no difference
_CHEAPER = 0.95  # of the time of the other one


@dataclass(frozen=True)
class Summary:
    """What a run comes to; nan where it is not known."""

    name: str
    train_loss: float = math.nan
    train_error: float = math.nan  # standard error of it
    val_loss: float = math.nan
    val_error: float = math.nan
    best_val: float = math.nan
    best_step: int = 0
    bpb: float = math.nan
    mfu: float = math.nan
    lr: float = math.nan
    wall_s: float = math.nan
    usd: float = math.nan
    parameters: float = math.nan
    tokens: float = math.nan
    epochs: float = math.nan
    tokens_per_s: float = math.nan
    step: float = math.nan
    spikes: float = math.nan
    attempts: float = math.nan
    flags: tuple[str, ...] = ()
    rose: float = 0.0  # of validation, from its best to its end, as a share
    tokenizer: str = ""
    curve: tuple[Floats, Floats] = field(
        default_factory=lambda: (np.empty(0), np.empty(0)), compare=False
    )  # tokens, loss

    @property
    def gap(self) -> float:
        return self.val_loss - self.train_loss


def summarise(run: RunDir, series: RunSeries) -> Summary:
    """From the folder alone."""
    status, config = read_status(run), facts.read_config(run)[0]
    plan = read_record(run.path / "plan.json")
    loss = series.finite("train/loss")
    tail = loss[-max(1, min(len(loss), max(20, len(loss) // 20))) :]
    steps, losses = _scores(series, "eval/val_loss")
    best = int(np.argmin(losses)) if len(losses) else 0
    _, bits = _scores(series, "eval/val_bpb")
    tokens = _last(series, "train/tokens")
    wall_s = time_report.read_time_report(run).wall_s
    price = facts.finite(config.get("budget", {}).get("usd_per_hour"))
    falls = len(losses) > 2 and best < len(losses) - 1
    return Summary(
        clean(run.name),
        train_loss=float(np.median(tail)) if len(tail) else math.nan,
        train_error=float(1.2533 * np.std(tail) / math.sqrt(len(tail))) if len(tail) > 1 else math.nan,
        val_loss=float(losses[-1]) if len(losses) else math.nan,
        val_error=_noise(losses),
        best_val=float(losses[best]) if len(losses) else math.nan,
        best_step=int(steps[best]) if len(steps) else 0,
        bpb=float(bits[-1]) if len(bits) else math.nan,
        mfu=_known(series.median("train/mfu")),
        lr=_last(series, "train/lr"),
        wall_s=wall_s or math.nan,
        usd=wall_s / 3600 * price if price else math.nan,
        parameters=facts.finite(plan.get("params")) or math.nan,
        tokens=tokens,
        epochs=_last(series, "train/epoch"),
        tokens_per_s=_known(series.median("train/tok_per_sec")),
        step=float(series.steps[-1]) if series.steps else math.nan,
        spikes=_spikes(loss),
        attempts=facts.finite(status.get("attempt")) or math.nan,
        flags=tuple(clean(str(one["cause"])) for one in status.get("flags") or []),
        rose=float(losses[-1] / losses[best] - 1) if falls else 0.0,
        tokenizer=_tokenizer(run, config),
        curve=_smooth(series),
    )


def _tokenizer(run: RunDir, config: Mapping[str, Any]) -> str:
    """What makes losses comparable: the tokenizer that the newest checkpoint holds, else what the settings say of it."""
    for path in newest_first(run.checkpoints)[:1]:
        file = path / "tokenizer.json"
        if file.is_file() and file.stat().st_size < 1 << 26:
            return hash_file(file)
    if not config:  # a watched command: nobody knows
        return ""
    return repr(sorted(config.get("tokenizer", {}).items())) + repr(config.get("data", {}).get("paths"))


def _scores(series: RunSeries, name: str) -> tuple[Floats, Floats]:
    pairs = [(step, value) for step, value in sorted(series.scores.get(name, {}).items()) if math.isfinite(value)]
    found = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _last(series: RunSeries, name: str) -> float:
    values = series.finite(name)
    return float(values[-1]) if len(values) else math.nan


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _noise(losses: Floats) -> float:
    """How much a validation differs from the line through its neighbours: what is left when the trend is taken off.

    By the median and over the newer half: where a run has few validations, the bend of its first fall is no noise.
    """
    tail = losses[-max(4, min(12, len(losses) // 2)) :]
    if len(tail) < 4:
        return math.nan
    bends = tail[2:] - 2 * tail[1:-1] + tail[:-2]
    return float(_NORMAL * np.median(np.abs(bends)) / math.sqrt(6))


def _spikes(loss: Floats) -> float:
    if not len(loss):
        return math.nan
    if len(loss) < 50:
        return 0.0
    window = max(5, len(loss) // 100)
    padded = np.convolve(loss, np.ones(window) / window, mode="valid")
    away = loss[window - 1 :] - padded
    spread = float(np.median(np.abs(away))) or 1e-12
    high = away > _SPIKE * spread
    return float(np.sum(high[1:] & ~high[:-1]))


def _smooth(series: RunSeries) -> tuple[Floats, Floats]:
    """Loss by tokens, averaged over a hundredth of the run."""
    if "train/loss" not in series.columns:  # a watched command that tells none
        return np.empty(0), np.empty(0)
    loss = np.array(series.columns["train/loss"], dtype=np.float64)
    tokens = np.array(series.columns.get("train/tokens", series.steps), dtype=np.float64)
    known = np.isfinite(loss) & np.isfinite(tokens)
    loss, tokens = loss[known], tokens[known]
    width = max(1, len(loss) // 100)
    if len(loss) < 2 * width:
        return tokens, loss
    return tokens[width - 1 :], np.convolve(loss, np.ones(width) / width, mode="valid")


# ---------------------------------------------------------------- beside each other


def compare(runs: Sequence[tuple[RunDir, SeriesCache]]) -> dict[str, Any]:
    """The table, the differences, the sentences."""
    with np.errstate(over="ignore", invalid="ignore"):  # of a damaged run, numbers that no double can square
        found = _told_apart([summarise(run, cache.of(run)) for run, cache in runs], [run for run, _ in runs])
    told = [one for one in found if not (math.isnan(one.train_loss) and math.isnan(one.val_loss))] or found
    same = len({one.tokenizer for one in told}) == 1  # one without a loss keeps nobody from comparing the others
    states = [_state(run, cache.of(run)) for run, cache in runs]
    hurt = [
        f"{one.name}: {'; '.join(state['damage'])}" for one, state in zip(found, states, strict=True) if state["damage"]
    ]
    folders = [run for run, _ in runs]
    return {
        "names": [one.name for one in found],
        "states": states,
        "same_tokenizer": same,
        "rows": [*table(found, same), *evaluation_rows(folders, same)],
        "says": [
            *({"name": "Damage", "text": f"{'. '.join(hurt)}. What is said below leaves that out."} for _ in hurt[:1]),
            *_unknown_tokenizers(found, same),
            *conclusions(found, same),
        ],
        "unread_settings": [one.name for one, run in zip(found, folders, strict=True) if facts.read_config(run)[1]],
        "config": _differences([facts.read_config(run)[0] for run in folders]),
        "environment": _differences([_environment(run) for run in folders]),
    }


def _unknown_tokenizers(found: Sequence[Summary], same: bool) -> list[dict[str, str]]:
    """Of commands that are not ours no tokenizer is known: losses are put beside each other, and the condition is said."""
    told = [one for one in found if not math.isnan(one.train_loss)]
    if not same or not told or told[0].tokenizer:
        return []
    text = "Nothing is known of the tokenizers of these runs. What is said of losses holds only if they have the same one and the same text."
    return [{"name": "Tokenizers", "text": text}]


def _told_apart(found: Sequence[Summary], runs: Sequence[RunDir]) -> list[Summary]:
    """Runs of several folders may have one name: then each says which folder it is in."""
    names = [one.name for one in found]
    return [replace(one, name=f"{one.name} ({clean(str(run.path.parent))})") if names.count(one.name) > 1 else one
            for one, run in zip(found, runs, strict=True)]  # fmt: skip


def _state(run: RunDir, series: RunSeries) -> dict[str, Any]:
    """Whether it goes on, and how old its newest point is."""
    told = facts.row(facts.RunsDir(0, run.path.parent), run)
    newest = series.newest_t or facts.changed_at(run)
    damage = _damage(told["damage"], run, series)
    return {"state": told["state"], "live": told["live"], "age_s": max(0.0, time.time() - newest), "damage": damage}


def _damage(status: str, run: RunDir, series: RunSeries) -> list[str]:
    """What of the folder cannot be read, in words."""
    problem = facts.read_config(run)[1]
    invalid = [one["name"] for one in facts.checkpoints(run, series) if not one["valid"]]
    lines = f"{series.damaged} line{'s' * (series.damaged != 1)} of metrics.jsonl cannot be read"
    return [
        *([status] if status else []),
        *([f"config.yaml cannot be read ({problem})"] if problem else []),
        *([lines] if series.damaged else []),
        *([f"not valid: {', '.join(invalid[:5])}"] if invalid else []),
    ]


def _environment(run: RunDir) -> dict[str, Any]:
    record = mask_record(read_record(run.path / "environment.json"))
    attempts = record.get("attempts")
    newest = attempts[-1] if isinstance(attempts, list) and attempts and isinstance(attempts[-1], dict) else {}
    kept = {name: value for name, value in newest.items() if name not in ("t", "attempt")}
    if isinstance(git := kept.get("git"), dict) and git.get("diff"):  # which differ is the news, not their first words
        kept["git"] = {**git, "diff": f"{str(git['diff']).count(chr(10))} lines, {_mark_of(str(git['diff']))}"}
    return kept


def _mark_of(text: str) -> str:
    """A few characters that are others for another text."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:8]


def _differences(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each setting by its dotted name that is not the same in all."""
    if not all(found):  # of one of them nothing is known
        return []
    flat = [dict(_flat(one)) for one in found]
    names = sorted({name for one in flat for name in one})
    rows = [{"name": clean(name), "values": [_shown(one.get(name)) for one in flat]} for name in names]
    return [row for row in rows if len(set(row["values"])) > 1][:200]


def _flat(value: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _flat(inner, f"{before}{name}.")
        else:
            yield f"{before}{name}", inner


def _shown(value: Any) -> str:
    return "-" if value is None else clean(str(value))[:200]


_TABLE = (
    ("train loss", "train_loss", "{:.4f}", "low"), ("validation loss", "val_loss", "{:.4f}", "low"), ("best validation", "best_val", "{:.4f}", "low"),
    ("perplexity", "ppl", "{:.2f}", "low"), ("bits per byte", "bpb", "{:.4f}", "low"), ("MFU", "mfu", "{:.1%}", "high"),
    ("final rate", "lr", "{:.2e}", ""), ("tokens/s", "tokens_per_s", "{:,.0f}", "high"), ("time", "wall_s", "time", "low"),
    ("cost", "usd", "${:.4f}", "low"), ("parameters", "parameters", "large", ""), ("steps", "step", "{:,}", ""), ("tokens", "tokens", "large", ""),
    ("epochs", "epochs", "{:.2f}", ""), ("loss spikes", "spikes", "{}", "low"), ("attempts", "attempts", "{}", ""),
)  # fmt: skip
_BY_LENGTH = ("wall_s", "usd")  # the shorter run is not the better one
_BY_TOKENIZER = ("train_loss", "val_loss", "best_val", "ppl")


def table(found: Sequence[Summary], same: bool) -> list[dict[str, Any]]:
    """Rows with words for each run and, of two, the difference; which one is better, where that can be said."""
    rows = []
    alike = len({one.step for one in found}) == 1
    for title, name, form, better in _TABLE:
        values = [math.exp(min(one.val_loss, 50)) if name == "ppl" else float(getattr(one, name)) for one in found]
        if all(math.isnan(value) for value in values):
            continue
        comparable = same or name not in _BY_TOKENIZER
        row: dict[str, Any] = {
            "name": title,
            "words": [_word(value, form) for value in values],
            "best": [],
            "difference": "",
        }
        known = [value for value in values if not math.isnan(value)]
        if not comparable and len(known) > 1:
            unknown = any(not one.tokenizer for one in found)
            row["difference"] = f"not comparable: {'unknown' if unknown else 'other'} tokenizers"
        elif len(known) > 1:
            row["difference"] = _difference(known, form) if len(known) == len(values) or len(known) > 2 else ""
            best = _best(found, name, values, better) if better and (name not in _BY_LENGTH or alike) else []
            if len(best) < len(known):
                row["best"] = best
            elif len(set(known)) > 1:
                row["difference"] += " (not distinguishable)"
        rows.append(row)
    return rows


def _best(found: Sequence[Summary], name: str, values: Sequence[float], better: str) -> list[int]:
    """All that are as good as the best one: the same, or for a loss not to be told from it."""
    known = [value for value in values if not math.isnan(value)]
    best = values.index(min(known) if better == "low" else max(known))
    return [
        i
        for i, value in enumerate(values)
        if i == best or (not math.isnan(value) and (value == values[best] or _tie([found[best], found[i]], name)))
    ]


_MOST_SCORES = 60  # MMLU alone has 57 subjects
_TWO_SIDED_95 = 1.96
_BY_TOKENS = ("loss", "perplexity")  # per token


def evaluation_rows(runs: Sequence[RunDir], same: bool) -> list[dict[str, Any]]:
    """The fullest result of every score that one of the runs has, the newest among equals; the better one where the difference
    is beyond chance. (Not simply the newest: a few items tried with --limit say less than all of them did before.)
    """
    fullest: list[dict[tuple[str, str], dict[str, Any]]] = []
    for run in runs:
        ordered = sorted(facts.evaluations(run), key=lambda one: (one["items"], one["step"] or 0.0, one["t"]))
        fullest.append({(one["task"], one["name"]): one for one in ordered})
    names = list(dict.fromkeys(name for one in fullest for name in one))
    rows = []
    for task, name in [one for one in names if "/" not in one[1]][:_MOST_SCORES]:  # not by subject
        mine = [one.get((task, name)) for one in fullest]
        row: dict[str, Any] = {"name": f"{task} {name}", "words": [_score_words(one) for one in mine], "best": [], "difference": ""}  # fmt: skip
        known = [one for one in mine if one is not None]
        if len({one["data"] for one in known}) > 1:
            row["difference"] = "not comparable: other data"
        elif not same and name in _BY_TOKENS and len(known) > 1:
            row["difference"] = "not comparable: other tokenizers"
        elif len(known) == len(mine) == 2:
            first, second = known
            row["difference"] = f"{second['value'] - first['value']:+.4f}"
            margin = _TWO_SIDED_95 * math.hypot(first["stderr"] or 0.0, second["stderr"] or 0.0)
            if first["stderr"] is not None and abs(second["value"] - first["value"]) > margin:
                row["best"] = [int((second["value"] > first["value"]) == first["higher_is_better"])]
            else:
                row["difference"] += " (not distinguishable)"
        rows.append(row)
    return rows


def _score_words(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return "-"
    count = "" if one["n"] is None else f"n {one['n']:,.0f}"
    if one["interval"]:
        return f"{one['value']:.3f} ({one['interval'][0]:.3f} to {one['interval'][1]:.3f}{count and ', '}{count})"
    error = "" if one["stderr"] is None else f" ± {one['stderr']:.4f}"
    return f"{one['value']:.4f}{error}{count and f' ({count})'}"


def _word(value: float, form: str) -> str:
    if math.isnan(value):
        return "-"
    if form == "time":
        return duration(value)
    if form == "large":
        return large(value)
    return form.format(int(value) if form in ("{}", "{:,}") else value)


def _difference(values: Sequence[float], form: str) -> str:
    if math.isclose(min(values), max(values), rel_tol=1e-9):
        return "the same"
    if len(values) != 2:
        low, high = _word(min(values), form), _word(max(values), form)
        return f"{low} to {high}" if low != high else "about the same"
    first, second = values
    share = f" ({second / first - 1:+.1%})" if first else ""
    shown = _word(abs(second - first), form)
    return f"{'+' if second >= first else '-'}{shown}{share}"


def _tie(found: Sequence[Summary], name: str) -> bool:
    """Whether the best two are closer than twice their common standard error; only losses have one."""
    errors = {
        "train_loss": "train_error",
        "val_loss": "val_error",
        "best_val": "val_error",
        "ppl": "val_error",
        "bpb": "val_error",
    }
    if name not in errors:
        return False
    value = "val_loss" if name == "ppl" else name
    ranked = sorted(
        (one for one in found if not math.isnan(getattr(one, value))), key=lambda one: float(getattr(one, value))
    )
    if len(ranked) < 2:
        return True
    first, second = ranked[0], ranked[1]
    scale = first.bpb / first.val_loss if name == "bpb" and first.val_loss else 1.0
    noise = math.hypot(getattr(first, errors[name]), getattr(second, errors[name])) * scale
    apart = abs(float(getattr(second, value)) - float(getattr(first, value)))
    if not apart:
        return True
    return apart <= (_SURE * noise if not math.isnan(noise) else _TINY * abs(float(getattr(first, value))))


# ---------------------------------------------------------------- what may be said


def conclusions(found: Sequence[Summary], same: bool) -> list[dict[str, str]]:
    """A sentence each, with its numbers."""
    return [
        {"name": "Convergence", "text": _convergence(found, same)},
        {"name": "Generalisation", "text": _generalisation(found, same)},
        {"name": "Efficiency", "text": _efficiency(found)},
        {"name": "Stability", "text": _stability(found)},
        {"name": "Recommendation", "text": _recommendation(found, same)},
    ]


def _convergence(found: Sequence[Summary], same: bool) -> str:
    if not same:
        return "The tokenizers differ or are not known, so a loss per token may mean something else in each run; only bits per byte are compared."
    curves = [one for one in found if len(one.curve[1])]
    if len(curves) < 2:
        return "There are not two loss curves to compare."
    target = max(float(np.min(one.curve[1])) for one in curves)
    reached = sorted(curves, key=lambda one: _reached(one, target))
    first, last = reached[0], reached[-1]
    words = ", ".join(f"{one.name} after {large(_reached(one, target))} tokens" for one in reached)
    noise = _SURE * max(_wobble(one) for one in curves)
    lead = "that is not distinguishable within the noise of the losses"
    if _reached(first, target - noise) < _reached(last, target + noise):
        lead = f"{first.name} needs {_reached(last, target) / max(1.0, _reached(first, target)):.2f} times fewer tokens than {last.name}"
    return f"A training loss of {target:.3f}, which all of them reach, was reached by {words}: {lead}."


def _reached(one: Summary, target: float) -> float:
    """After how many tokens."""
    tokens, loss = one.curve
    below = loss <= target
    return float(tokens[int(np.argmax(below))]) if np.any(below) else math.inf


def _wobble(one: Summary) -> float:
    """How much the averaged loss still moves up and down beside its trend, over the newer half."""
    tail = one.curve[1][len(one.curve[1]) // 2 :]
    if len(tail) < 8:
        return 0.0
    width = max(3, len(tail) // 8)
    trend = np.convolve(tail, np.ones(width) / width, mode="valid")
    return float(_NORMAL * np.median(np.abs(tail[width // 2 : width // 2 + len(trend)] - trend)))


def _generalisation(found: Sequence[Summary], same: bool) -> str:
    sentences = []
    for one in found:
        if math.isnan(one.val_loss):
            sentences.append(f"{one.name} has no validation.")
            continue
        gap = f"{one.name}: {_gap_words(one)}"
        if one.rose > 0.01:
            gap += f", and rose by {one.rose:.1%} since step {one.best_step}: it learns the text by heart (overfitting); use checkpoint-{one.best_step}"
        sentences.append(gap + ".")
    sized = sorted(
        (one for one in found if not math.isnan(one.parameters) and not math.isnan(one.val_loss)),
        key=lambda one: one.parameters,
    )
    if same and len(sized) > 1 and sized[-1].parameters > 1.3 * sized[0].parameters:
        small, big = sized[0], sized[-1]
        times = big.parameters / small.parameters
        if big.rose <= 0.01 and (_tie([small, big], "val_loss") or big.val_loss > small.val_loss):
            per = big.tokens / big.parameters if big.parameters else math.nan
            sentences.append(
                f"{big.name} has {times:.1f} times the parameters of {small.name} and no better validation, without overfitting: it is larger"
                f" than its {large(big.tokens)} tokens ({per:.1f} per parameter; about 20 are balanced) can fill."
            )
    return " ".join(sentences)


def _gap_words(one: Summary) -> str:
    if math.isnan(one.gap):
        return f"validation {one.val_loss:.3f}"
    if abs(one.gap) < 0.0005:  # what is shown of a loss
        return "validation is as training"
    return f"validation is {abs(one.gap):.3f} {'above' if one.gap > 0 else 'below'} training"


def _efficiency(found: Sequence[Summary]) -> str:
    parts = []
    for one in found:
        words = [f"{one.tokens_per_s:,.0f} tokens/s" if not math.isnan(one.tokens_per_s) else ""]
        words.append(f"MFU {one.mfu:.1%}" if not math.isnan(one.mfu) else "")
        words.append(f"{duration(one.wall_s)}" if not math.isnan(one.wall_s) else "")
        words.append(f"${one.usd:.4f}" if not math.isnan(one.usd) else "")
        parts.append(f"{one.name}: {', '.join(word for word in words if word) or 'not measured'}")
    return "; ".join(parts) + "."


def _stability(found: Sequence[Summary]) -> str:
    parts = []
    for one in found:
        if math.isnan(one.spikes):
            parts.append(f"{one.name}: no losses are known")
            continue
        again = "" if math.isnan(one.attempts) else f", {one.attempts:.0f} attempt{'s' * (one.attempts != 1)}"
        flags = f", red flags at the end: {', '.join(one.flags)}" if one.flags else ", no red flag at the end"
        parts.append(f"{one.name}: {one.spikes:.0f} loss spike{'s' * (one.spikes != 1)}{again}{flags}")
    return "; ".join(parts) + "."


def _recommendation(found: Sequence[Summary], same: bool) -> str:
    measure = "best_val" if same else "bpb"
    known = [one for one in found if not math.isnan(getattr(one, measure))]
    if len(known) < 2:
        return "There are not two validations to choose by: set eval.every_steps and data.val_fraction."
    ranked = sorted(known, key=lambda one: float(getattr(one, measure)))
    best, second = ranked[0], ranked[1]
    words = "best validation loss" if same else "bits per byte"
    if _tie([best, second], measure):
        cheap, dear = sorted([best, second], key=lambda one: one.wall_s if not math.isnan(one.wall_s) else math.inf)
        cheaper = cheap.wall_s < _CHEAPER * dear.wall_s
        take = f"take the cheaper one, {cheap.name}; or run" if cheaper else "neither is recommended; to know more, run"
        return (
            f"{best.name} and {second.name} are not distinguishable by {words} ({getattr(best, measure):.4f} and {getattr(second, measure):.4f}):"
            f" {take} both again with another train.seed."
        )
    unsure = (
        " (the noise is not known: fewer than four validations)"
        if math.isnan(best.val_error) or math.isnan(second.val_error)
        else ""
    )
    where = f", checkpoint-{best.best_step}" if same and best.best_step else ""
    return f"{best.name}{where}: {words} {getattr(best, measure):.4f} against {getattr(second, measure):.4f} of {second.name}{unsure}."
