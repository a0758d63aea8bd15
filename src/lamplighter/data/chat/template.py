"""Chat templates: messages become text with its answers marked, then ids with a mask of what is learned; and the file of a template.

In:  a template (built in, the tokenizer's own, or a Jinja file), a tokenizer, messages.
Out: ids with what is learned of them; a template is checked before it is used, and kept with the model that learned it.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import tokenizers

from lamplighter import report
from lamplighter.data.chat import rendering
from lamplighter.data.chat.rendering import Job, Refused, RowRefused
from lamplighter.data.chat.rows import Message
from lamplighter.data.tokenizer import END_OF_TEXT, Tokenizer, first_difference
from lamplighter.errors import BadConfig, InputMissing
from lamplighter.readers.records import digest
from lamplighter.rundir import read_json, read_record, write_atomic, write_json

_MARKERS = "\ufdd0\ufdd1\ufdd2\ufdd3\ufdd4\ufdd5"  # never characters of a text: one of them breaks a control token up
PROBE_QUESTION, PROBE_ANSWER = "Which lamp is lit?", "The third one from the bridge."
_PROBE = [{"role": "user", "content": PROBE_QUESTION}, {"role": "assistant", "content": PROBE_ANSWER}]
_Uint32s = np.ndarray[Any, np.dtype[np.uint32]]

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + END + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_ALPACA = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '### Response:\n' + message['content'] + eos_token + '\n\n' }}"
    "{% elif message['role'] == 'user' %}{{ '### Instruction:\n' + message['content'] | trim + '\n\n' }}"
    "{% else %}{{ message['content'] | trim + '\n\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"
)
_PLAIN = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token + '\n' }}"
    "{% else %}{{ message['content'] | trim + '\n' }}{% endif %}"
    "{% endfor %}"
)
_BUILT_IN = {"chatml": _CHATML, "alpaca": _ALPACA, "plain": _PLAIN}
_INPUT_HEADS = {"alpaca": "\n\n### Input:\n"}  # what stands between an instruction and its input


@dataclass(frozen=True)
class EncodedExample:
    """The ids of a conversation; `learned` is true for the tokens of its answers."""

    ids: _Uint32s
    learned: np.ndarray[Any, np.dtype[np.bool_]]
    moved: bool  # the tokenizer would join a prompt and its answer into one token; the border was kept
    begins: tuple[int, ...] = ()  # where each answer begins


# ---------------------------------------------------------------- a template and its tokenizer


class ChatTemplate:
    """A template bound to a tokenizer, checked: it opens answers as it closes them, and each ends in a stop token."""

    def __init__(self, name: str, text: str, tokenizer: Tokenizer) -> None:
        self.name, self.text, self.tokenizer = name, text, tokenizer
        self.marks = _named_tokens(tokenizer)
        ours = text in [_built_in(name, tokenizer) for name in _BUILT_IN]
        self._renderer = rendering.Here(text) if ours else rendering.Elsewhere(text)
        added = {token["content"]: token for token in tokenizer.content.get("added_tokens", [])}
        named = {name: token["id"] for name, token in added.items() if token.get("special") or name in text}
        self.controls: dict[str, int] = {**named, tokenizer.end_name: tokenizer.end_of_text}
        self._soft = [name for name in named if not added[name].get("special")]
        longest_first = sorted(self.controls, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)))
        self._whole: tokenizers.Tokenizer | None = None
        self.stop, self.opens = self._probe()
        self.stop_id = self.controls[self.stop]
        self._choose_path()

    def __str__(self) -> str:
        return f"chat template {self.name}"

    def fingerprint(self) -> str:
        return digest([self.text, self.marks, self.stop, 1])

    @property
    def between(self) -> str:
        """What stands between an instruction and its input."""
        return _INPUT_HEADS.get(self.name, "\n\n")

    # -- text

    def render(self, messages: Sequence[Message], open_answer: bool = False) -> str:
        """The text of a conversation; with `open_answer`, up to where the next answer begins."""
        (found,) = self._render_all([(messages, [(len(messages), open_answer)])])
        if isinstance(found, Refused):
            raise found
        return found[0]

    def _render_all(self, jobs: Sequence[Job]) -> list[list[str] | Refused]:
        """All at once: a template of somebody else's is asked in its own process."""
        try:
            found = self._renderer.render(jobs, self.marks)
        except BadConfig as error:
            raise BadConfig(f"{self}: {error.what}", error.why, error.next) from error
        return [
            RowRefused(f"{self} refuses it: {str(one)[:200]}") if isinstance(one, Refused) else one for one in found
        ]

    def close(self) -> None:
        """End its process, if it has one; the next conversation starts it again."""
        self._renderer.close()

    def _probe(self) -> tuple[str, bool]:
        """The token that ends an answer, and whether the template opens one for generation."""
        (found,) = self._render_all([([*_PROBE, *_PROBE], [(1, True), (1, False), (2, False), (4, False), (3, True)])])
        if isinstance(found, Refused):
            raise BadConfig(f"{self} cannot render a question and its answer", str(found), _ANOTHER)
        before, plain, whole, two, again = found
        for part, of in ((before, whole), (again, two)):
            if not of.startswith(part):
                raise BadConfig(
                    f"{self} cannot be trained with",
                    "a conversation up to an answer is not the beginning of the conversation with it, so which tokens are"
                    f" answers cannot be known: {around(part, of)}",
                    _ANOTHER,
                )
        question, answered, after = whole[len(before) :].partition(PROBE_ANSWER)
        stop = self._control.search(after)
        if not answered or stop is None:
            raise BadConfig(
                f"{self} never ends an answer",
                f"after an answer it writes {after!r}, in which there is no special token of this tokenizer: a model"
                " trained so would never stop",
                f"put {{{{ eos_token }}}} after the answers in the template, or {_ANOTHER}",
                cause="eos_not_trained",
            )
        return stop.group(), before != plain or not question

    def _choose_path(self) -> None:
        """Encoding between control tokens is quick; where it is not exactly what transformers does, all at once."""
        text = self.render([*_PROBE, *_PROBE])
        whole = tokenizers.Tokenizer.from_str(json.dumps(self.tokenizer.content))
        whole.no_truncation()
        whole.no_padding()
        pieces = self._by_pieces([(text, "")])[0].tolist()
        if pieces != whole.encode(text, add_special_tokens=False).ids:
            self._whole = whole

    def describe(self) -> str:
        kind = "one token" if self.stop in self.controls else "text"
        return f"{self}; answers end in {self.stop} (id {self.stop_id}, {kind}), where generation stops"

    def missing_marks(self) -> list[str]:
        """What looks like a control token in the template, and is ordinary text for this tokenizer."""
        written = re.findall(r"<\|[A-Za-z0-9_ ]+\|>|<[a-z_]+_of_[a-z]+>|</?s>|\[/?INST\]", self.text)
        return [mark for mark in dict.fromkeys(written) if mark not in self.controls]

    # -- ids

    def _marker(self, texts: list[str]) -> str:
        return next(mark for mark in _MARKERS if not any(mark in text for text in texts))

    def _defused(self, messages: Sequence[Message]) -> tuple[list[Message], str]:
        """The messages with a marker inside everything that reads like a control token; '' where nothing does."""
        texts = [message["content"] for message in messages]
        if not any(self._control.search(text) for text in texts):
            return list(messages), ""
        mark = self._marker(texts)
        broken = [self._control.sub(lambda found: found.group()[0] + mark + found.group()[1:], text) for text in texts]
        return [{**message, "content": text} for message, text in zip(messages, broken, strict=True)], mark

    def encode(self, conversations: Sequence[Sequence[Message]]) -> list[EncodedExample | Refused]:
        """Each conversation as ids with its answers marked, or why that cannot be."""
        texts: list[tuple[str, str]] = []  # (text, marker)
        plans: list[tuple[int, int] | Refused] = []
        defused = [self._defused(messages) for messages in conversations]
        rendered = self._render_all([_whole_and_beginnings(safe) for safe, _ in defused])
        for found, (_, mark) in zip(rendered, defused, strict=True):
            if isinstance(found, Refused):
                plans.append(found)
            elif changed := next((before for before in found[1:] if not found[0].startswith(before)), None):
                plans.append(Refused(f"{self} changes what comes before an answer: {around(changed, found[0])}"))
            else:
                plans.append((len(texts), len(texts) + len(found)))
                texts += [(text, mark) for text in found]
        ids = self._ids(texts)
        return [
            plan if isinstance(plan, Refused) else self._assemble(texts[slice(*plan)], ids[slice(*plan)])
            for plan in plans
        ]

    def _assemble(self, texts: list[tuple[str, str]], ids: list[_Uint32s]) -> EncodedExample | Refused:
        """Find each answer in the ids of the whole: from the end of what comes before it to its stop token."""
        whole, begins, moved = ids[0], [len(before) for before in ids[1:]], False
        if any(not np.array_equal(whole[: len(before)], before) for before in ids[1:]):
            (whole, begins), moved = self._with_borders(texts), True
        learned = np.zeros(len(whole), bool)
        for begin in begins:
            ends = np.flatnonzero(whole[begin:] == self.stop_id)
            if not len(ends):
                return Refused(f"{self} does not end its answer with {self.stop}")
            learned[begin : begin + int(ends[0]) + 1] = True
        return EncodedExample(whole, learned, moved, tuple(begins))

    def _with_borders(self, texts: list[tuple[str, str]]) -> tuple[_Uint32s, list[int]]:
        """The ids with every answer's beginning kept as a border between tokens, as it is in generation."""
        whole, mark = texts[0]
        cuts = [0, *(len(text) for text, _ in texts[1:]), len(whole)]
        stretches = self._ids([(whole[begin:end], mark) for begin, end in itertools.pairwise(cuts)])
        return np.concatenate(stretches), np.cumsum([len(part) for part in stretches])[:-1].tolist()

    def _ids(self, texts: list[tuple[str, str]]) -> list[_Uint32s]:
        """Of (text, marker): by pieces where that is exact and where a marker must be taken out, else at once."""
        by_pieces = [self._whole is None or bool(mark) for _, mark in texts]
        pieces = iter(self._by_pieces([pair for pair, is_piece in zip(texts, by_pieces, strict=True) if is_piece]))
        wholes = iter(self._at_once([pair[0] for pair, is_piece in zip(texts, by_pieces, strict=True) if not is_piece]))
        return [next(pieces if is_piece else wholes) for is_piece in by_pieces]

    def _at_once(self, texts: list[str]) -> list[_Uint32s]:
        found = self._whole.encode_batch(texts, add_special_tokens=False) if self._whole is not None else []
        return [np.array(one.ids, np.uint32) for one in found]

    def _by_pieces(self, texts: list[tuple[str, str]]) -> list[_Uint32s]:
        """Control tokens by their ids, and the text between them as text, all texts in one call."""
        pieces: list[str] = []
        plans: list[list[int]] = []  # per text: the id of a control token, or -1 for the next piece
        for text, mark in texts:
            plan, at = [], 0
            for found in self._control.finditer(text):
                plan += self._cut(text[at : found.start()], mark, pieces)
                plan.append(self.controls[found.group()])
                at = found.end()
            plans.append(plan + self._cut(text[at:], mark, pieces))
        encoded = self.tokenizer.encode_batch(pieces)
        number, out = 0, []
        for plan in plans:
            parts = [np.zeros(0, np.uint32)]
            for step in plan:
                if step >= 0:
                    parts.append(np.array([step], np.uint32))
                else:
                    parts.append(encoded.ids[encoded.offsets[number] : encoded.offsets[number + 1]])
                    number += 1
            out.append(np.concatenate(parts))
        return out

    def _cut(self, text: str, mark: str, pieces: list[str]) -> list[int]:
        """Add a stretch of text to the pieces; a broken control token is joined again, or kept apart where the
        tokenizer would know it in a text."""
        whole = text.replace(mark, "") if mark else text
        parts = text.split(mark) if mark and any(name in whole for name in self._soft) else [whole]
        found = [part for part in parts if part]
        pieces += found
        return [-1] * len(found)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """What generation begins with: the conversation so far, and the opening of an answer."""
        safe, mark = self._defused(messages)
        try:
            text = self.render(safe, True)
        except Refused as error:
            raise BadConfig(
                "the template of this model cannot take that", str(error), "--raw, or no --system"
            ) from error
        return [int(i) for i in self._ids([(text, mark)])[0]]

    def without_end(self, answer: str) -> str:
        """An answer whose end mark was written out in the data, without it."""
        bare = answer.rstrip()
        for end in (self.stop, self.tokenizer.end_name, END_OF_TEXT):
            if bare.endswith(end):
                return bare.removesuffix(end)
        return answer


def _whole_and_beginnings(messages: Sequence[Message]) -> Job:
    """The whole conversation, and what comes before each of its answers."""
    answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return messages, [(len(messages), False), *((place, True) for place in answers)]


_ANOTHER = "another template: --data.template chatml, or a .jinja file"


def around(part: str, of: str) -> str:
    """Where the two differ, in a few characters."""
    at = first_difference(part, of)
    return f"{part[max(0, at - 20) : at + 20]!r} became {of[max(0, at - 20) : at + 20]!r}"


def _named_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """bos_token, eos_token and so on, as templates know them."""
    found: dict[str, str] = {"bos_token": "", "eos_token": tokenizer.end_name}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in json.loads(tokenizer.files.get(name) or b"{}").items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    if not tokenizer.files:  # as Tokenizer.save writes it
        found["bos_token"] = found["unk_token"] = tokenizer.end_name
    return found


# ---------------------------------------------------------------- which template


def own_template(files: dict[str, bytes]) -> str | None:
    """The chat template among a tokenizer's files."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    found = json.loads(files.get("tokenizer_config.json") or b"{}").get("chat_template")
    if isinstance(found, list):  # several, by name
        found = {one.get("name"): one.get("template") for one in found}.get("default")
    return found if isinstance(found, str) else None


def _built_in(name: str, tokenizer: Tokenizer) -> str:
    """A template of ours, with the end mark of this tokenizer."""
    known = {token["content"] for token in tokenizer.content.get("added_tokens", []) if token.get("special")}
    end = "<|im_end|>" if "<|im_end|>" in known else tokenizer.end_name
    return _BUILT_IN[name].replace("END", json.dumps(end))


def load_template(wanted: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """The template that the configuration asks for; the tokenizer's own, else chatml, where it asks for none."""
    own = own_template(tokenizer.files)
    if wanted is None and own is not None:
        return ChatTemplate("of the tokenizer", own, tokenizer)
    name = wanted or "chatml"
    if name in _BUILT_IN:
        return ChatTemplate(name, _built_in(name, tokenizer), tokenizer)
    path = Path(name).expanduser()
    if not path.is_file():
        why = f"it is none of {', '.join(_BUILT_IN)}, and there is no such file"
        raise InputMissing(f"no chat template {name}", why, "--data.template chatml, or the path of a .jinja file")
    try:
        return ChatTemplate(str(path), path.read_text("utf-8"), tokenizer)
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path} is not a text", str(error), "give a Jinja template in UTF-8") from error


# ---------------------------------------------------------------- the file of a template


RECORD = "chat.json"
_RECORDED = {
    "name": str,
    "template": str,
    "stop_token": str,
    "stop_token_id": int,
    "eos_token": str,
    "eos_token_id": int,
}


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


def _record_of(template: ChatTemplate) -> dict[str, Any]:
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
    record = _record_of(template)
    write_json(folder / "tokenizer_config.json", {**config, "chat_template": template.text})
    if (folder / "chat_template.jinja").exists():
        write_atomic(folder / "chat_template.jinja", template.text)
    known = read_json(folder / "generation_config.json")
    stops = list(dict.fromkeys([record["stop_token_id"], record["eos_token_id"]]))
    settings = known if isinstance(known, dict) else {"bos_token_id": record["eos_token_id"]}
    write_json(folder / "generation_config.json", {**settings, "eos_token_id": stops if stops[1:] else stops[0]})
    write_json(folder / RECORD, record)


# ---------------------------------------------------------------- between training and use


def _is_record(found: object) -> TypeGuard[dict[str, Any]]:
    """Whether a chat.json has all that it should, each of its kind."""
    return isinstance(found, dict) and all(type(found.get(name)) is kind for name, kind in _RECORDED.items())


def check_folder(folder: Path) -> dict[str, Any] | None:
    """The record of a chat model, None for other models; refused where template or end mark are not as in training."""
    record = read_json(folder / RECORD)
    if not _is_record(record):
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
        at = first_difference(then, now)
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
