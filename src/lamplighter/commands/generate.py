"""lamp generate: text from a model, by a prompt or in a conversation.

In:  a run or a model folder, how to choose.
Out: text on stdout as it is; the rate in a note. The model runs in a child, under watch.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import report
from lamplighter.commands.arguments import find_run, parse
from lamplighter.errors import DONE, NoCheckpoint, UsageError
from lamplighter.rundir import RunDir, checkpoint_name, newest_first
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
    raw: bool = False,
    system: str = "",
    threads: int | None = None,
    model_family: str | None = None,
    model_init_from: str | None = None,
    runs_dir: Path = Path("runs"),
) -> None:
    """How to generate."""


def generate(words: list[str]) -> int:
    """Text from a run's checkpoint or from any model folder."""
    from lamplighter.commands.session import session

    flags = parse("generate", _generate_flags, [_ours(word) for word in words])
    try:
        (flags["prompt"] + flags["system"]).encode()
    except UnicodeEncodeError as error:
        raise UsageError("the prompt is not valid UTF-8", str(error), "give it in UTF-8") from error
    runs_dir = flags.pop("runs_dir")
    folder = Path(flags["model"])
    is_folder = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    flags["model"] = str((folder if is_folder else find_run(flags["model"], runs_dir).path).resolve())
    if flags["model_init_from"]:
        flags["model_init_from"] = str(Path(flags["model_init_from"]).resolve())
    flags["command"] = shlex.join(["lamp", "generate", *words])
    return session("generate", flags, interactive=flags["interactive"])


def _ours(word: str) -> str:
    """Two fields of a run are flags of this verb as well."""
    return re.sub(r"^--model\.(family|init_from)(?==|$)", lambda found: f"--model-{found[1].replace('_', '-')}", word)


# ---------------------------------------------------------------- in the child


def generate_child(_: RunDir, request: dict[str, Any]) -> int:
    """Load once, then answer one prompt or many."""
    with report.phase("import"):
        import torch

        from lamplighter.data import tokenizer as tokenizers
        from lamplighter.data.chat import template as templates
        from lamplighter.model.build import load_folder
    torch.set_num_threads(request["threads"] or torch.get_num_threads())
    with report.phase("model"):
        folder = choose_folder(Path(request["model"]), request["checkpoint"], raw=request["raw"])
        built = load_folder(folder, request["model_family"], request["command"], base=request["model_init_from"])
        tokenizer = tokenizers.load(folder)
        template = None if request["raw"] else templates.of_folder(folder, tokenizer)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        built.model.to(device).eval()
    report.note(f"{folder}: {built.parameters:,} parameters, on {device.type}")
    if template is not None:
        report.note(f"asked by its {template.describe()}; --raw leaves the template out")
        if not request["prompt"] and not request["interactive"]:
            report.note("no --prompt: the question is empty")
    elif request["system"]:
        why = "--raw leaves the template out" if request["raw"] else "it was not trained on conversations"
        raise UsageError("--system needs a chat model", why, "leave --system out, or put it into the prompt")
    talk = _Talk(built, tokenizer, template, request)
    if not request["interactive"]:
        talk.answer(request["prompt"], 0)
        return DONE
    for number, prompt in enumerate(_prompts(request["tty"])):
        talk.answer(prompt, number)
    return DONE


def choose_folder(path: Path, wanted: str, raw: bool = False) -> Path:
    """A model folder as it is; of a run the latest valid checkpoint, the best, or the named one."""
    from lamplighter.data.chat import template as templates
    from lamplighter.train import checkpoint

    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        checkpoint.refuse_newer(path)
        return path
    root = path / "checkpoints"
    if wanted == "best":
        best = checkpoint.best_of(root)
        if best is None:
            raise NoCheckpoint(f"{path.name} has no best checkpoint", "no validation was made", "--checkpoint latest")
        wanted = checkpoint_name(best[0])
    asked = newest_first(root)[:1] if wanted == "latest" else [root / wanted]
    for folder in asked if not raw else ():
        templates.check_folder(folder)  # before its hashes: what differs in a template is said in words
    found = checkpoint.find(root, "auto" if wanted == "latest" else wanted)
    if found is None:
        raise NoCheckpoint(
            f"{path.name} has no checkpoint yet", "nothing was saved", "lamp save RUN, or wait for the first save"
        )
    return found


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
    request: dict[str, Any]
    said: list[Message] = field(default_factory=list)

    def answer(self, prompt: str, number: int) -> None:
        """Continue the prompt, or answer it."""
        if self.template is not None and self.request["interactive"] and not prompt.strip():
            self.said = []
            report.note("a new conversation")
            return
        ids, shown = self._begin(prompt)
        stops = {self.tokenizer.end_of_text, *([self.template.stop_id] if self.template else [])}
        started = time.perf_counter()
        steps = _until(self._stream(ids, number), stops)
        samples, limit = self.request["num_samples"], self.request["max_tokens"]
        made = (
            [_stream_one(self.tokenizer, steps, shown, limit, self._say)]
            if samples == 1
            else _collect_many(steps, samples, limit)
        )
        for index, text in enumerate(made if samples > 1 else (), 1):
            self._say(f"--- sample {index} ---\n{self.tokenizer.decode([*shown, *text])}\n")
        count, seconds = sum(map(len, made)), time.perf_counter() - started
        report.note(f"{count} tokens in {seconds:.2f} s: {count / seconds:,.0f} tokens per second")
        if self.template is not None and self.request["interactive"]:
            self.said.append({"role": "assistant", "content": self.tokenizer.decode(made[0])})

    def _say(self, text: str) -> None:
        """The model's words: as they are for a file or a pipe; on a terminal, control characters are shown, not obeyed."""
        report.result(clean_text(text) if self.request["tty"] else text, raw=True)

    def _begin(self, prompt: str) -> tuple[list[int], list[int]]:
        """The ids that the model reads, and those of them that are shown before what it makes."""
        if self.template is None:
            ids = [self.tokenizer.end_of_text, *self.tokenizer.encode(prompt).tolist()]
            return ids, ids[1:]
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
        if len(ids) > self.built.positions:
            report.warn(
                f"the question has {len(ids):,} tokens; the model reads the last {self.built.positions:,} of them"
            )
        return ids, []

    def _stream(self, ids: list[int], number: int) -> Iterator[list[int | None]]:
        from lamplighter.model.generate import stream

        request = self.request
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


def _until(steps: Iterator[list[int | None]], stops: set[int]) -> Iterator[list[int | None]]:
    """None for a sample from its first stop token on; ends when all have stopped."""
    stopped: list[bool] = []
    for step in steps:
        stopped = stopped or [False] * len(step)
        stopped = [done or token is None or token in stops for done, token in zip(stopped, step, strict=True)]
        yield [None if done else token for done, token in zip(stopped, step, strict=True)]
        if all(stopped):
            return


def _stream_one(
    tokenizer: Tokenizer,
    steps: Iterator[list[int | None]],
    prompt: list[int],
    max_tokens: int,
    say: Callable[[str], None],
) -> list[int]:
    """Each piece as it comes, the prompt first: some tokenizers decode a token by the one before it."""
    made: list[int] = []

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
        for piece in tokenizer.decode_stream(ids()):
            say(piece)
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
