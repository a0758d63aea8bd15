"""lamp generate: text from a model, by a prompt or in a conversation.

In:  a run or a model folder, how to choose.
Out: text on stdout as it is; the rate in a note. The model runs in a child, under watch.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.commands.arguments import find_run, many, parse, with_own_fields
from lamplighter.commands.model_folder import base_given, choose_folder, is_model_folder, located, resolved_model
from lamplighter.errors import DONE, UsageError
from lamplighter.rundir import RunDir
from lamplighter.safe_text import clean_text

if TYPE_CHECKING:
    from lamplighter.data.chat.rows import Message
    from lamplighter.data.chat.template import ChatTemplate
    from lamplighter.data.tokenizer import Tokenizer
    from lamplighter.model.build import Built


def _generate_flags(
    model: str,
    /,
    *,
    prompt: str = "",
    num_samples: int = 1,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1,
    checkpoint: str = "latest",
    interactive: bool = False,
    prompts: Path | None = None,
    out: Path | None = None,
    repetition_penalty: float = 1.0,
    json: bool = False,
    raw: bool = False,
    system: str = "",
    threads: int | None = None,
    model_family: str | None = None,
    data_template: str | None = None,
    model_init_from: str | None = None,
    runs_dir: Path = Path("runs"),
) -> None:
    """How to generate."""


def generate(words: list[str]) -> int:
    """Text from a run's checkpoint or from any model folder."""
    from lamplighter.commands.session import session

    rest, lists = many(words, "stop")
    flags = parse("generate", _generate_flags, with_own_fields(rest))
    flags["stop"] = lists["stop"]
    if flags["raw"] and flags["data_template"]:
        raise UsageError("--raw and --data.template", "one leaves the template out, one chooses it", "give one of them")
    _refuse_misfits(flags)
    try:
        (flags["prompt"] + flags["system"]).encode()
    except UnicodeEncodeError as error:
        raise UsageError("the prompt is not valid UTF-8", str(error), "give it in UTF-8") from error
    runs_dir = flags.pop("runs_dir")
    for name in ("prompts", "out"):
        flags[name] = str(flags[name].resolve()) if flags[name] else None
    folder = Path(flags["model"])
    is_folder = is_model_folder(folder)
    if is_folder or not re.fullmatch(r"[\w.-]+/[\w.-]+", flags["model"]) or folder.exists():
        flags["model"] = str((folder if is_folder else find_run(flags["model"], runs_dir).path).resolve())
    else:
        flags["model"] = located(flags["model"], runs_dir)["model"]
    flags["model_init_from"] = base_given(flags["model_init_from"])
    flags["command"] = shlex.join(["lamp", "generate", *words])
    return session("generate", flags, interactive=flags["interactive"])


def _refuse_misfits(flags: dict[str, Any]) -> None:
    if flags["repetition_penalty"] <= 0:
        raise UsageError(
            "--repetition-penalty must be above 0", "1 changes nothing, 1.1 is usual", "lamp generate --help"
        )
    if flags["prompts"] and (flags["interactive"] or flags["prompt"]):
        raise UsageError("--prompts goes with neither --prompt nor --interactive", "", "lamp generate --help")
    if flags["out"] and not flags["prompts"]:
        raise UsageError("--out needs --prompts", "one text goes to stdout", "lamp generate RUN > FILE")


# ---------------------------------------------------------------- in the child


def generate_child(_: RunDir, request: dict[str, Any]) -> int:
    """Load once, then answer one prompt or many."""
    with report.phase("import"):
        import torch

        from lamplighter.data import tokenizer as tokenizers
        from lamplighter.data.chat import template as templates
        from lamplighter.model.build import load_folder
        from lamplighter.model.generate import lay_out
    torch.set_num_threads(request["threads"] or torch.get_num_threads())
    with report.phase("model"):
        other = request["data_template"]
        raw = request["raw"] or other is not None
        folder = choose_folder(Path(resolved_model(request["model"])), request["checkpoint"], raw=raw)
        built = load_folder(folder, request["model_family"], request["command"], base=request["model_init_from"])
        tokenizer = tokenizers.load(folder)
        if other is not None:
            template: ChatTemplate | None = templates.load_template(other, tokenizer)
            report.warn(f"asked by {template} and not by the template of the model itself: it may not know such turns")
        else:
            template = None if request["raw"] else templates.of_folder(folder, tokenizer)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        built.model.to(device).eval()
        lay_out(built.model)
    report.note(f"{folder}: {built.parameters:,} parameters, on {device.type}")
    if template is not None:
        report.note(f"asked by its {template.describe()}; --raw leaves the template out")
        if not request["prompt"] and not request["interactive"]:
            report.note("no --prompt: the question is empty")
    elif request["system"]:
        why = "--raw leaves the template out" if request["raw"] else "it was not trained on conversations"
        raise UsageError("--system needs a chat model", why, "leave --system out, or put it into the prompt")
    before = tokenizers.ids_before_prompt(tokenizer, folder)
    talk = _Talk(built, tokenizer, template, before, request)
    if request["prompts"]:
        from lamplighter.commands.generate_many import answer_all

        return answer_all(built, tokenizer, template, before, request)
    if not request["interactive"]:
        talk.answer(request["prompt"], 0)
        return DONE
    from lamplighter.commands.chat import Chat

    chat = Chat(talk.said, request, template is not None)
    for number, prompt in enumerate(_prompts(request["tty"] and not request["readline"])):
        asked = chat.heard(prompt)
        if chat.left:
            break
        if asked is not None:
            talk.said = chat.said
            talk.answer(asked, number)
            chat.said, chat.last = talk.said, asked
    return DONE


def _prompts(tty: bool) -> Iterator[str]:
    """One line, one prompt; waiting for a person is not being stuck."""
    while True:
        if tty:
            report.result("\n> ")
        report.flag("prompting", True)
        line = sys.stdin.readline()
        report.flag("prompting", False)
        if not line:
            return
        yield line.rstrip("\n")


@dataclass
class _Talk:
    """One model and what was said to it so far; without a template every prompt stands alone."""

    built: Built
    tokenizer: Tokenizer
    template: ChatTemplate | None
    before: list[int]  # ids before a text that is continued
    request: dict[str, Any]
    said: list[Message] = field(default_factory=list)

    def answer(self, prompt: str, number: int) -> None:
        """Continue the prompt, or answer it."""
        if self.template is not None and self.request["interactive"] and not prompt.strip():
            self.said = []
            report.note("a new conversation")
            return
        ids, shown = self._begin(prompt)
        self._say_cut(ids)
        stops = {self.tokenizer.end_of_text, *([self.template.stop_id] if self.template else [])}
        started = time.perf_counter()
        steps = _until(self._stream(ids, number), stops)
        samples, limit = self.request["num_samples"], self.request["max_tokens"]
        plain = samples == 1 and not self.request["json"]
        if not plain and self.request["stop"]:
            steps = _until_text(steps, self.tokenizer, self.request["stop"])
        made = (
            [_stream_one(self.tokenizer, steps, shown, limit, self._say, self.request["stop"])]
            if plain
            else _collect_many(steps, samples, limit)
        )
        texts = [_cut(self.tokenizer.decode(text), self.request["stop"]) for text in made]
        if self.request["json"]:
            self._say_json(prompt, made, texts)
        for index, text in enumerate(made if samples > 1 and not self.request["json"] else (), 1):
            whole = self.tokenizer.decode([*shown, *text]) if not self.request["stop"] else self.tokenizer.decode(shown) + texts[index - 1]  # fmt: skip
            self._say(f"--- sample {index} ---\n{whole}\n")
        count, seconds = sum(map(len, made)), time.perf_counter() - started
        report.note(f"{count} tokens in {seconds:.2f} s: {count / seconds:,.0f} tokens per second")
        if self.template is not None and self.request["interactive"]:
            self.said.append({"role": "assistant", "content": texts[0]})

    def _say_json(self, prompt: str, made: list[list[int]], texts: list[str]) -> None:
        """One object a prompt: what was asked, and every text with its tokens."""
        most = self.request["max_tokens"]
        rows = [
            {
                "text": text,
                "tokens": len(ids),
                "finish_reason": "length" if len(ids) >= most and text == self.tokenizer.decode(ids) else "stop",
            }
            for ids, text in zip(made, texts, strict=True)
        ]
        report.result(json.dumps({"prompt": prompt, "samples": rows}) + "\n", raw=True)

    def _say(self, text: str) -> None:
        """The model's words: as they are for a file or a pipe; on a terminal, control characters are shown, not obeyed."""
        report.result(clean_text(text) if self.request["tty"] else text, raw=True)

    def _begin(self, prompt: str) -> tuple[list[int], list[int]]:
        """The ids that the model reads, and those of them that are shown before what it makes."""
        if self.template is None:
            shown = self.tokenizer.encode(prompt).tolist()
            return [*self.before, *shown] or [self.tokenizer.begin_of_text], shown
        self.said = [*self.said, {"role": "user", "content": prompt}] if self.request["interactive"] else []
        said = self.said or [{"role": "user", "content": prompt}]
        system: list[Message] = (
            [{"role": "system", "content": self.request["system"]}] if self.request["system"] else []
        )
        ids = self.template.prompt_ids([*system, *said])
        while len(ids) + self.request["max_tokens"] > self.built.positions and len(said) > 1:
            said = self.said = said[2:]  # the oldest question and its answer
            report.note("the conversation is longer than the model's window: its beginning is forgotten")
            ids = self.template.prompt_ids([*system, *said])
        return ids, []

    def _say_cut(self, ids: list[int]) -> None:
        """What is not read is not left out in silence."""
        most = self.built.positions
        if self.request["repetition_penalty"] != 1.0:  # the batch does not move its window: the answer must fit as well
            most = max(1, most - self.request["max_tokens"])
        if len(ids) > most:
            asked = "question" if self.template else "prompt"
            report.warn(f"the {asked} has {len(ids):,} tokens; the model reads the last {most:,} of them")

    def _stream(self, ids: list[int], number: int) -> Iterator[list[int | None]]:
        from lamplighter.model.generate import stream

        request = self.request
        if request["repetition_penalty"] != 1.0:
            return self._penalised(ids, number)
        try:
            return stream(
                self.built.model,
                ids,
                samples=request["num_samples"],
                max_tokens=request["max_tokens"],
                temperature=request["temperature"],
                top_k=request["top_k"],
                top_p=request["top_p"],
                seed=request["seed"] + number,
                stop_id=self.template.stop_id if self.template else self.tokenizer.end_of_text,
                window=self.built.positions,
            )
        except ValueError as error:
            raise UsageError("cannot generate with these settings", str(error), "lamp generate --help") from error

    def _penalised(self, ids: list[int], number: int) -> Iterator[list[int | None]]:
        """The same by the batch, which knows what was said before."""
        from lamplighter.model.batching import Batcher, TextRequest
        from lamplighter.model.generate import Choice

        request, built = self.request, self.built
        ids = ids[-max(1, built.positions - request["max_tokens"]) :]
        try:
            choice = Choice(request["temperature"], request["top_k"], request["top_p"])
        except ValueError as error:
            raise UsageError("cannot generate with these settings", str(error), "lamp generate --help") from error
        samples = request["num_samples"]
        length = min(built.positions, len(ids) + request["max_tokens"] + 1)
        batcher = Batcher(built.model, samples, length, built.vocab_size)
        wishes = [
            TextRequest(tuple(ids), request["max_tokens"], choice, request["seed"] + number, n, repetition_penalty=request["repetition_penalty"])
            for n in range(samples)
        ]  # fmt: skip
        for n, wish in enumerate(wishes):
            batcher.add(n, wish)
        rows: list[list[int]] = [[] for _ in range(samples)]
        given = 0
        while batcher.texts or any(len(row) > given for row in rows):
            for made in batcher.step() if batcher.texts else ():
                rows[made.key] += [] if made.token is None else [made.token]
            going = {text.key for text in batcher.texts}
            if all(len(row) > given or n not in going for n, row in enumerate(rows)):
                yield [row[given] if len(row) > given else None for row in rows]
                given += 1


def _cut(text: str, stops: list[str]) -> str:
    """The text before the first of the stops."""
    found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return text[: min(found)] if found else text


def _until(steps: Iterator[list[int | None]], stops: set[int]) -> Iterator[list[int | None]]:
    """None for a sample from its first stop token on; ends when all have stopped."""
    stopped: list[bool] = []
    for step in steps:
        stopped = stopped or [False] * len(step)
        stopped = [done or token is None or token in stops for done, token in zip(stopped, step, strict=True)]
        yield [None if done else token for done, token in zip(stopped, step, strict=True)]
        if all(stopped):
            return


def _until_text(
    steps: Iterator[list[int | None]], tokenizer: Tokenizer, stops: list[str]
) -> Iterator[list[int | None]]:
    """None for a sample after its text has met a stop; ends when all have."""
    from lamplighter.data.pieces import TextPieces

    pieces: list[TextPieces] = []
    for step in steps:
        pieces = pieces or [TextPieces(tokenizer, stops) for _ in step]
        shown = [None if one.stopped else token for one, token in zip(pieces, step, strict=True)]
        for one, token in zip(pieces, shown, strict=True):
            if token is not None:
                one.add(token)
        yield shown
        if all(one.stopped or token is None for one, token in zip(pieces, shown, strict=True)):
            return


def _stream_one(
    tokenizer: Tokenizer,
    steps: Iterator[list[int | None]],
    prompt: list[int],
    max_tokens: int,
    say: Callable[[str], None],
    stops: list[str],
) -> list[int]:
    """Each piece as it comes, the prompt first: some tokenizers decode a token by the one before it."""
    from lamplighter.data.pieces import TextPieces

    made: list[int] = []
    pieces = TextPieces(tokenizer, stops, prompt)

    def ids() -> Iterator[int]:
        yield from prompt
        for (token,) in steps:
            phase.tick()
            if token is None:
                return
            made.append(token)
            yield token

    report.flag("printing", True)
    with report.phase("generate", total=max_tokens, unit="tokens") as phase:
        if not stops:
            for piece in tokenizer.decode_stream(ids()):
                say(piece)
        else:
            say(tokenizer.decode(prompt))
            for (token,) in steps:
                phase.tick()
                if token is None or pieces.stopped:
                    break
                made.append(token)
                say(pieces.add(token))
            say(pieces.end())
    report.flag("printing", False)
    report.result("\n")
    return made


def _collect_many(steps: Iterator[list[int | None]], samples: int, max_tokens: int) -> list[list[int]]:
    """Several samples side by side."""
    made: list[list[int]] = [[] for _ in range(samples)]
    with report.phase("generate", total=max_tokens, unit="tokens") as phase:
        for step in steps:
            phase.tick()
            for text, token in zip(made, step, strict=True):
                if token is not None:
                    text.append(token)
    return made
