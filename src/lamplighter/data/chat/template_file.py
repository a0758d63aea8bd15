"""A chat template between training and use: announced, kept with the model, compared again before generation.

In:  a ChatTemplate; a model folder.
Out: chat.json (the record of training) and the files where transformers looks; a refusal where the two differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lamplighter import report
from lamplighter.data.chat.template import ChatTemplate, around, own_template
from lamplighter.data.tokenizer import Tokenizer
from lamplighter.errors import BadConfig
from lamplighter.rundir import read_json, read_record, write_atomic, write_json

RECORD = "chat.json"
RECORDED = {"name", "template", "stop_token", "stop_token_id", "eos_token", "eos_token_id"}


def announce(template: ChatTemplate, folder: str | None) -> None:
    """Say which template it is, what it does not have as single tokens, and where it differs from a model's own."""
    report.note(template.describe())
    if missing := template.missing_marks():
        report.note(
            f"{', '.join(missing)}: ordinary text for this tokenizer, several tokens each (it has no such special token)"
        )
    if not template.opens:
        report.warn(f"{template} does not open an answer for generation: its heading is learned as part of the answer")
    if "strftime_now" in template.text:
        report.note(f"{template} writes today's date into every example; generation will write the date of its own day")
    own = own_template(template.tokenizer.files)
    if folder is not None and own is not None and own != template.text:
        report.warn(
            f"{folder} was made with another chat template than {template.name}: {around(own, template.text)};"
            " what it has learned about turns will have to be learned anew (leave data.template out to keep its own)"
        )


# ---------------------------------------------------------------- with the model


def record_of(template: ChatTemplate) -> dict[str, Any]:
    """What training knew; generation compares it with what it finds."""
    return {
        "format": 1,
        "name": template.name,
        "template": template.text,
        "stop_token": template.stop,
        "stop_token_id": template.stop_id,
        "eos_token": template.tokenizer.end_name,
        "eos_token_id": template.tokenizer.end_of_text,
    }


def keep(template: ChatTemplate, folder: Path) -> None:
    """Beside the tokenizer's files: the template where transformers looks for it, the stop tokens, the record."""
    config = read_json(folder / "tokenizer_config.json")
    record = record_of(template)
    write_json(folder / "tokenizer_config.json", {**config, "chat_template": template.text})
    if (folder / "chat_template.jinja").exists():
        write_atomic(folder / "chat_template.jinja", template.text)
    known = read_json(folder / "generation_config.json")
    stops = list(dict.fromkeys([record["stop_token_id"], record["eos_token_id"]]))
    settings = known if isinstance(known, dict) else {"bos_token_id": record["eos_token_id"]}
    write_json(folder / "generation_config.json", {**settings, "eos_token_id": stops if stops[1:] else stops[0]})
    write_json(folder / RECORD, record)


# ---------------------------------------------------------------- between training and use


def check_folder(folder: Path) -> dict[str, Any] | None:
    """The record of a chat model, None for other models; refused where template or end mark are not as in training."""
    record = read_json(folder / RECORD)
    if not isinstance(record, dict) or not record.keys() >= RECORDED:
        was_chat = read_record(folder / "training" / "state.json").get("chat")
        if not was_chat and not (folder / RECORD).exists():
            return None
        why = "without it nobody knows by which template it was trained, and where its answers end"
        raise BadConfig(
            f"{folder / RECORD} is missing or damaged", why, "use an intact copy, or --raw", cause="template_differs"
        )
    config = read_json(folder / "tokenizer_config.json")
    config = config if isinstance(config, dict) else {}
    _same_template(folder, record, config)
    eos = config.get("eos_token")
    eos = eos.get("content") if isinstance(eos, dict) else eos
    if eos != record["eos_token"]:
        raise _differs(folder / "tokenizer_config.json", "eos_token", record["eos_token"], eos)
    generation = read_json(folder / "generation_config.json")
    stops = generation.get("eos_token_id") if isinstance(generation, dict) else None
    if record["stop_token_id"] not in (stops if isinstance(stops, list) else [stops]):
        raise _differs(folder / "generation_config.json", "eos_token_id", record["stop_token_id"], stops)
    return record


def _same_template(folder: Path, record: dict[str, Any], config: dict[str, Any]) -> None:
    found = {"tokenizer_config.json": config.get("chat_template")}
    if (jinja := folder / "chat_template.jinja").exists():  # transformers takes this one first
        found = {name: text for name, text in found.items() if text is not None}
        found[jinja.name] = jinja.read_text("utf-8", "replace")
    for name, text in found.items():
        if text != record["template"]:
            raise _differs(folder / name, "chat_template", record["template"], text)


def _differs(path: Path, what: str, then: object, now: object) -> BadConfig:
    if isinstance(then, str) and isinstance(now, str) and what == "chat_template":
        at = next((n for n, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
        then, now = f"...{then[max(0, at - 30) : at + 50]}...", f"...{now[max(0, at - 30) : at + 50]}..."
    return BadConfig(
        f"{path}: {what} is not the one that this model was trained with",
        f"in training {then!r}, now {now!r}",
        "put the old one back (it is in chat.json), or train with another (data.template); generate --raw asks without any",
        cause="template_differs",
    )


def of_folder(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a chat model: checked against its record, or just found in a folder from elsewhere."""
    record = check_folder(folder)
    if record is None:
        own = None if (folder / "training").is_dir() else own_template(tokenizer.files)
        return ChatTemplate("of the tokenizer", own, tokenizer) if own else None
    template = ChatTemplate(record["name"], record["template"], tokenizer)
    for what, then, now in (
        ("stop token", record["stop_token"], template.stop),
        ("id of the stop token", record["stop_token_id"], template.stop_id),
        ("id of eos_token", record["eos_token_id"], tokenizer.end_of_text),
    ):
        if then != now:
            raise _differs(folder / "tokenizer.json", what, then, now)
    return template
