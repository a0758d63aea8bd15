"""Text from a model: a prompt or a conversation with prompts, several samples, tokens per second.

In:  a run or a model folder, how to choose.
Out: text on stdout as it is; the rate in a note.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lamplighter import report
from lamplighter.data.tokenizer import Tokenizer, load
from lamplighter.errors import NoCheckpoint, UsageError
from lamplighter.model.build import Built, load_folder
from lamplighter.model.sample import stream
from lamplighter.train import checkpoint


def choose_folder(path: Path, wanted: str) -> Path:
    """A model folder as it is; of a run the latest valid checkpoint, the best, or the named one."""
    if (path / "config.json").is_file():
        return path
    root = path / "checkpoints"
    if wanted == "best":
        best = checkpoint.best_of(root)
        if best is None:
            raise NoCheckpoint(f"{path.name} has no best checkpoint", "no validation was made", "--checkpoint latest")
        wanted = f"{checkpoint.PREFIX}{best[0]}"
    found = checkpoint.find(root, "auto" if wanted == "latest" else wanted)
    if found is None:
        raise NoCheckpoint(
            f"{path.name} has no checkpoint yet", "nothing was saved", "lamp save RUN, or wait for the first save"
        )
    return found


def generate(request: dict[str, Any]) -> None:
    """Load once, then answer one prompt or many."""
    torch.set_num_threads(request["threads"] or torch.get_num_threads())
    with report.phase("model"):
        folder = choose_folder(Path(request["model"]), request["checkpoint"])
        built = load_folder(folder)
        tokenizer = load(folder)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        built.model.to(device).eval()
    report.note(f"{folder}: {built.parameters:,} parameters, on {device.type}")
    if not request["interactive"]:
        _answer(built, tokenizer, request, request["prompt"], 0)
        return
    for number, prompt in enumerate(_prompts(request["tty"])):
        _answer(built, tokenizer, request, prompt, number)


def _prompts(tty: bool) -> Iterator[str]:
    """One line, one prompt; waiting for a person is not being stuck."""
    while True:
        if tty:
            report.result("\n> ")
        report.flag("waiting for a person", True)
        line = sys.stdin.readline()
        report.flag("waiting for a person", False)
        if not line:
            return
        yield line.rstrip("\n")


def _answer(built: Built, tokenizer: Tokenizer, request: dict[str, Any], prompt: str, number: int) -> None:
    samples = request["num_samples"]
    ids = [tokenizer.end_of_text, *tokenizer.encode(prompt).tolist()]
    started = time.perf_counter()
    try:
        steps = stream(
            built.model,
            ids,
            samples=samples,
            max_tokens=request["max_tokens"],
            temperature=request["temperature"],
            top_k=request["top_k"],
            top_p=request["top_p"],
            seed=request["seed"] + number,
            stop_id=tokenizer.end_of_text,
            window=built.positions,
        )
    except ValueError as error:
        raise UsageError("cannot generate with these settings", str(error), "lamp generate --help") from error
    if samples == 1:
        count = _stream_one(tokenizer, steps, ids[1:], request["max_tokens"])
    else:
        count = _collect_many(tokenizer, steps, ids[1:], samples, request["max_tokens"])
    seconds = time.perf_counter() - started
    report.note(f"{count} tokens in {seconds:.2f} s: {count / seconds:,.0f} tokens per second")


def _stream_one(tokenizer: Tokenizer, steps: Iterator[list[int | None]], prompt: list[int], max_tokens: int) -> int:
    """Each piece as it comes, the prompt first: some tokenizers decode a token by the one before it."""
    count = 0

    def ids() -> Iterator[int]:
        nonlocal count
        yield from prompt
        for (token,) in steps:
            phase.tick()
            if token is None or token == tokenizer.end_of_text:
                return
            count += 1
            yield token

    report.flag("writing the result", True)
    with report.phase("generate", total=max_tokens, unit="tokens") as phase:
        for piece in tokenizer.decode_stream(ids()):
            report.result(piece)
    report.flag("writing the result", False)
    report.result("\n")
    return count


def _collect_many(
    tokenizer: Tokenizer, steps: Iterator[list[int | None]], prompt: list[int], samples: int, max_tokens: int
) -> int:
    """Several samples side by side, shown one after the other."""
    texts: list[list[int]] = [list(prompt) for _ in range(samples)]
    with report.phase("generate", total=max_tokens, unit="tokens") as phase:
        for step in steps:
            phase.tick()
            for text, token in zip(texts, step, strict=True):
                if token is not None and token != tokenizer.end_of_text:
                    text.append(token)
    for index, text in enumerate(texts, 1):
        report.result(f"--- sample {index} ---\n{tokenizer.decode(text)}\n")
    return sum(map(len, texts)) - samples * len(prompt)
