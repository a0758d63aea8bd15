"""README.md of a published model: written from the run, with front matter that the hub understands.

In:  a run's folder, the checkpoint that is published, what the user says about the licence.
Out: the text of the card; a picture of the curves. Nothing is made up: what the run does not know is not in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamplighter import read_back
from lamplighter.config import Run
from lamplighter.rundir import RunDir, number, read_json, read_lines, read_record, read_status, step_of
from lamplighter.safe_text import mask, safe

_ROWS = 2000  # looked at for licences
_POINTS = 300


@dataclass(frozen=True)
class Published:
    """What is published."""

    to: str
    checkpoint: Path
    parameters: int
    trained: int
    is_adapter: bool
    base: str | None  # on the hub
    license: str | None
    template: str | None


def write_card(run: RunDir, settings: Run, config_text: str, facts: Published) -> str:
    status, step = read_status(run), step_of(facts.checkpoint)
    parts = [
        _front_matter(run, settings, facts),
        f"# {facts.to.rsplit('/', 1)[-1]}",
        _about(settings, facts, step),
        "## How to use",
        _usage(facts),
        "## Training",
        _training(run, settings, status, facts, step),
        "![loss](curves.svg)",
        "## Evaluation",
        _evaluation(run, step),
        "## Data",
        _data(settings),
        "## Limits",
        _limits(facts),
        "## Settings",
        f"```yaml\n{mask(config_text).strip()}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(run: RunDir, settings: Run, facts: Published) -> str:
    import yaml

    found: dict[str, Any] = {
        "library_name": "peft" if facts.is_adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": [
            "lamplighter",
            *(["lora", "peft"] if settings.lora.r else []),
            *(["conversational"] if facts.template else []),
        ],
    }
    if facts.license:
        found["license"] = facts.license
    if facts.base:
        found["base_model"] = facts.base
        found["base_model_relation"] = "adapter" if facts.is_adapter else "finetune"
    datasets = [path.partition(":")[2] for path in settings.data.paths if path.startswith("dataset:")]
    datasets = [name for name in datasets if re.fullmatch(r"[\w.-]+/[\w.-]+", name)]
    if datasets:
        found["datasets"] = datasets
    if results := _results(run):
        found["model-index"] = [{"name": facts.to.rsplit("/", 1)[-1], "results": results}]
    return f"---\n{yaml.safe_dump(found, sort_keys=False, allow_unicode=True)}---"


def evaluations(run: RunDir) -> Iterator[dict[str, Any]]:
    """One record for each file of evaluations/ that is whole."""
    folder = run.path / "evaluations"
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        found, _ = read_back.read_object(
            path, {"task": read_back.TEXT, "checkpoint": read_back.TEXT, "step": read_back.COUNT}, 1 << 22
        )
        record = read_json(path)
        scores = record.get("scores") if isinstance(record, dict) else None
        if found.get("task") and isinstance(scores, list):
            yield {
                **record,
                "scores": [
                    one for one in scores if isinstance(one, dict) and isinstance(one.get("value"), int | float)
                ],
            }


def _results(run: RunDir) -> list[dict[str, Any]]:
    return [
        {
            "task": {"type": "text-generation"},
            "dataset": {"name": safe(str(one["task"])), "type": safe(str(one["task"]))},
            "metrics": [
                {"type": safe(str(score.get("name"))), "value": float(score["value"])} for score in one["scores"]
            ],
        }
        for one in evaluations(run)
        if one["scores"]
    ]


def _about(settings: Run, facts: Published, step: int) -> str:
    origin = f"[{facts.base}](https://huggingface.co/{facts.base})" if facts.base else "a model folder of its author's"
    if settings.model.init_from is None:
        return f"A language model of {facts.parameters:,} parameters, trained from scratch; this is step {step:,}."
    if facts.is_adapter:
        return f"A LoRA adapter (rank {settings.lora.r}, {facts.trained:,} trained parameters) for {origin}; this is step {step:,}."
    how = f"with LoRA (rank {settings.lora.r}), merged" if settings.lora.r else "in full"
    return (
        f"A language model of {facts.parameters:,} parameters, fine-tuned {how} from {origin}; this is step {step:,}."
    )


def _usage(facts: Published) -> str:
    kind = (
        "from peft import AutoPeftModelForCausalLM as Model"
        if facts.is_adapter
        else "from transformers import AutoModelForCausalLM as Model"
    )
    lines = [
        kind,
        "from transformers import AutoTokenizer",
        "",
        f'model = Model.from_pretrained("{facts.to}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{facts.to}")',
    ]
    if facts.template:
        lines += ['asked = [{"role": "user", "content": "Who lights the lamps?"}]',
                  'inputs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)']  # fmt: skip
    else:
        lines += ['inputs = tokenizer("Once upon a time", return_tensors="pt")']
    lines += ["print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))"]
    return "\n".join(["```python", *lines, "```"])


def _training(run: RunDir, settings: Run, status: dict[str, Any], facts: Published, step: int) -> str:
    state = read_record(facts.checkpoint / "training" / "state.json")
    train, machine = settings.train, state.get("machine") if isinstance(state.get("machine"), dict) else {}
    rows = [
        ("steps", f"{step:,} of {train.batch_size} sequences of up to {settings.data.seq_len} tokens"),
        ("tokens", f"{int(number(state.get('tokens'))):,}"),
        ("parameters", f"{facts.parameters:,}, {facts.trained:,} of them trained"),
        *(
            [("objective", f"preference pairs (DPO, beta {train.dpo_beta:g}); the reference is the model as it began")]
            if train.objective == "dpo"
            else []
        ),
        (
            "optimizer",
            f"{train.optimizer}, peak rate {train.lr:g}, {train.schedule}, weight decay {train.weight_decay:g}",
        ),
        (
            "precision",
            f"{(machine or {}).get('dtype', '?')} on {(machine or {}).get('device_name', '?')}, torch {(machine or {}).get('torch', '?')}",
        ),
        ("last training loss", f"{number(state.get('loss'), float('nan')):.4f}"),
        ("time", f"{number(status.get('spent_s')) / 3600:.2f} hours"),
    ]
    if settings.budget.usd_per_hour is not None:
        rows.append(
            (
                "cost",
                f"${settings.budget.spent_usd(number(status.get('spent_s'))):.2f} at ${settings.budget.usd_per_hour}/h",
            )
        )
    return _table(("", ""), rows)


def _evaluation(run: RunDir, step: int) -> str:
    scored = {r["step"]: r for r in read_lines(run.metrics) if "eval/val_loss" in r and read_back.is_metric(r)}
    rows = []
    if scored:
        last = scored[max((s for s in scored if s <= step), default=max(scored))]
        where, perplexity, told_apart = "held-out part of the training data", *(last.get(f"eval/{name}") for name in ("val_ppl", "reward_accuracy"))  # fmt: skip
        is_pairs = isinstance(told_apart, int | float)
        measure = f"loss of a pair ({math.log(2):.4f}: no preference)" if is_pairs else "loss (nats per token)"
        rows.append((where, measure, f"{number(last['eval/val_loss']):.4f}", ""))
        if isinstance(perplexity, int | float):
            rows.append((where, "perplexity", f"{perplexity:.2f}", ""))
        if is_pairs:
            rows.append(
                (where, "pairs of which the chosen answer has the larger reward", f"{number(told_apart):.1%}", "")
            )
    for one in evaluations(run):
        for score in one["scores"]:
            error = f"± {score['stderr']:.4f}" if isinstance(score.get("stderr"), int | float) else ""
            chance = f"chance {score['chance']:.3f}" if isinstance(score.get("chance"), int | float) else ""
            ends = one.get("interval")
            if isinstance(ends, list) and len(ends) == 2 and all(isinstance(end, int | float) for end in ends):
                error = f"(95 %: {ends[0]:.3f} to {ends[1]:.3f})"
            elif chance and isinstance(score.get("verdict"), str):
                chance += f": {safe(score['verdict'])}"
            count = f"{score['n']:,} items" if isinstance(score.get("n"), int) else ""
            about = ", ".join(part for part in (count, chance) if part)
            rows.append(
                (
                    f"{one['task']} ({one.get('checkpoint', '')})",
                    str(score.get("name")),
                    f"{float(score['value']):.4f} {error}".strip(),
                    about,
                )
            )
    return _table(("on what", "measure", "value", ""), rows) if rows else "The run has no evaluation."


def _data(settings: Run) -> str:
    if not settings.data.paths:
        return (
            "The embedded corpus of lamplighter: letters and diary entries made by a grammar."
            if settings.data.source is None
            else "A source of the author's own."
        )
    lines = []
    for path in settings.data.paths:
        licences = licences_of(path)
        about = f"licence: {', '.join(licences)}" if licences else "no licence is written in it"
        lines.append(
            f"- `{mask(Path(path).name if '://' not in path and not path.startswith('dataset:') else path)}` ({about})"
        )
    return "\n".join(lines)


def licences_of(path: str) -> list[str]:
    """What local rows or a file beside them say of their licence; nothing is guessed."""
    file = Path(path)
    found: dict[str, None] = {}
    if file.is_file() and file.suffix in (".jsonl", ".ndjson"):
        for count, record in enumerate(read_lines(file)):
            if count >= _ROWS:
                break
            meta = record.get("meta") if isinstance(record.get("meta"), dict) else {}
            for place in (record, meta):
                for name in ("license", "licence"):
                    if isinstance(place, dict) and isinstance(place.get(name), str) and place[name].strip():
                        found[safe(place[name].strip()[:60])] = None
    folder = file if file.is_dir() else file.parent
    if folder.is_dir() and not file.is_absolute() | (str(folder) == "."):
        for name in ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE"):
            if (folder / name).is_file():
                found[f"see {name} of its folder"] = None
    return list(found)[:10]


def _limits(facts: Published) -> str:
    size = "Small models state falsehoods with confidence. " if facts.parameters < 3_000_000_000 else ""
    return f"{size}It was evaluated on what the table above names and on nothing else. Its data was not checked for bias or for personal details by this tool."


def _table(head: tuple[str, ...], rows: list[Any]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join(
        [*lines, *(f"| {' | '.join(safe(str(cell)).replace('|', '/') for cell in row)} |" for row in rows)]
    )


# ---------------------------------------------------------------- the curves


def draw_curves(run: RunDir) -> str:
    """Training and validation loss over the steps, as an SVG without anything from elsewhere."""
    train: dict[int, float] = {}
    held: dict[int, float] = {}
    unit = "in nats per token"
    for record in read_lines(run.metrics):
        if not read_back.is_metric(record):
            continue
        if "train/reward_margin" in record:
            unit = "of a preference pair"
        for name, kept in (("train/loss", train), ("eval/val_loss", held)):
            if isinstance(record.get(name), int | float):
                kept[record["step"]] = float(record[name])
    values = [*train.values(), *held.values()]
    if not values:
        return '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="40"><text x="10" y="25">no step was recorded</text></svg>\n'
    low, high, last = min(values), max(values), max([*train, *held])

    def place(step: int, value: float) -> str:
        return f"{50 + 570 * step / max(1, last):.1f},{20 + 240 * (high - value) / ((high - low) or 1):.1f}"

    every = max(1, len(train) // _POINTS)
    points = [place(step, train[step]) for n, step in enumerate(sorted(train)) if n % every == 0]
    dots = "".join(
        f'<circle cx="{place(s, v).split(",")[0]}" cy="{place(s, v).split(",")[1]}" r="3" fill="#c60"/>'
        for s, v in held.items()
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="300" font-family="sans-serif" font-size="12">'
        '<rect width="640" height="300" fill="white"/><path d="M50 20V260H620" stroke="#888" fill="none"/>'
        f'<text x="4" y="24">{high:.2f}</text><text x="4" y="262">{low:.2f}</text><text x="560" y="280">step {last:,}</text>'
        f'<polyline points="{" ".join(points)}" fill="none" stroke="#06c"/>{dots}'
        f'<text x="60" y="292">loss {unit}: line training, dots validation</text></svg>\n'
    )


def hub_base(folder: Path) -> str | None:
    """The base of an adapter on the hub, as base.json has it."""
    found = read_json(folder / "base.json")
    name = found.get("name") if isinstance(found, dict) else None
    return name if isinstance(name, str) else None


def without_path(folder: Path) -> None:
    """A published base.json says who the base is, and not where it lay."""
    record = json.loads((folder / "base.json").read_text())
    record.pop("path", None)
    (folder / "base.json").write_text(json.dumps({**record, "path": record.get("name") or ""}, indent=1) + "\n")
