"""lamp generate --prompts FILE: many prompts, several at a time; with --out each answer is kept as it ends, and a kill loses none.

In:  a file with a prompt a line, or JSON lines with "prompt"; a loaded model.
Out: JSON lines, on stdout or appended to --out: number, prompt, text, tokens, finish_reason. In the child of lamp generate.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import read_back, report
from lamplighter.errors import DONE, BadData, CannotWrite, InputMissing, UsageError
from lamplighter.rundir import LineFile, cannot_write, parse_record, read_lines

if TYPE_CHECKING:
    from lamplighter.data.chat.template import ChatTemplate
    from lamplighter.data.tokenizer import Tokenizer
    from lamplighter.model.build import Built

_ROWS = 8
_BEGIN = b'{"number": '  # of every line that is kept


def read_prompts(path: Path) -> list[str]:
    """One prompt a line; of .jsonl the field "prompt"."""
    try:
        lines = [line for line in read_back.read_whole(path).decode().split("\n") if line.strip()]
    except OSError as error:
        raise InputMissing(f"cannot read {path}", error.strerror or str(error), "check --prompts") from error
    except UnicodeDecodeError as error:
        raise BadData(f"{path} is not UTF-8", str(error), "save it as UTF-8") from error
    if path.suffix == ".jsonl":
        rows = [read_back.parse_object(line) for line in lines]
        wrong = [n for n, row in enumerate(rows, 1) if row is None or not isinstance(row.get("prompt"), str)]
        if wrong:
            raise BadData(f"{path}, line {wrong[0]} has no prompt", 'each line is an object with "prompt"', "mend it")
        lines = [row["prompt"] for row in rows if row is not None]
    if not lines:
        raise BadData(f"{path} holds no prompt", "it is empty", "one prompt a line")
    return lines


def answer_all(
    built: Built, tokenizer: Tokenizer, template: ChatTemplate | None, before: list[int], request: dict[str, Any]
) -> int:
    """Every prompt that has no answer in --out yet; `before`: what stands before a text where there is no template."""
    from lamplighter.data.pieces import TextPieces
    from lamplighter.model.batching import Batcher, TextRequest
    from lamplighter.model.generate import Choice

    prompts = read_prompts(Path(request["prompts"]))
    done, out = _opened(request["out"], prompts)
    most = request["max_tokens"]
    try:
        choice = Choice(request["temperature"], request["top_k"], request["top_p"])
    except ValueError as error:
        raise UsageError("cannot generate with these settings", str(error), "lamp generate --help") from error
    stops = frozenset({tokenizer.end_of_text, *([template.stop_id] if template else [])})
    wishes, room = {}, max(1, built.positions - most)
    cut: list[tuple[int, int]] = []  # prompts that are too long: number, tokens
    for n, prompt in enumerate(prompts):
        ids = _asked(prompt, template, request["system"]) if template else [*before, *tokenizer.encode(prompt).tolist()]
        if len(ids) > room and n not in done:
            cut.append((n, len(ids)))
        ids = (ids or [tokenizer.begin_of_text])[-room:]
        for sample in range(request["num_samples"]) if (n not in done) else ():
            wishes[n * request["num_samples"] + sample] = TextRequest(tuple(ids), most, choice, request["seed"] + n, sample, stops, request["repetition_penalty"])  # fmt: skip
    if cut:
        first, tokens = cut[0]
        report.warn(f"{len(cut):,} of the prompts are longer than the model reads beside {most:,} tokens of answer: of the first of them, number {first}, with {tokens:,} tokens, the last {room:,} are read")  # fmt: skip
    length = min(built.positions, max((len(one.prompt) for one in wishes.values()), default=1) + most + 1)
    batcher = Batcher(built.model, _ROWS, length, built.vocab_size)
    waiting, pieces, texts = sorted(wishes, reverse=True), dict[int, TextPieces](), dict[int, str]()
    answered: dict[int, dict[int, dict[str, Any]]] = {}
    began, count = time.monotonic(), 0
    with report.phase("generate", total=len(wishes), unit="texts") as phase:
        while waiting or batcher.texts:
            while waiting and batcher.free:
                key = waiting.pop()
                batcher.add(key, wishes[key])
                pieces[key], texts[key] = TextPieces(tokenizer, request["stop"]), ""
            for made in batcher.step():
                if made.key not in pieces:  # it met a stop in this very step
                    continue
                mine, end = pieces[made.key], str(made.end)
                if made.token is not None:
                    texts[made.key] += mine.add(made.token)
                    count += 1
                if mine.stopped:
                    end = "stop"
                    batcher.drop(made.key)
                elif end:
                    texts[made.key] += mine.end()
                phase.tick(0)
                if end:
                    n, sample = divmod(made.key, request["num_samples"])
                    found = {"text": texts[made.key], "tokens": len(mine.ids), "finish_reason": end}
                    answered.setdefault(n, {})[sample] = found
                    del pieces[made.key]
                    phase.tick()
                    if len(answered[n]) == request["num_samples"]:
                        _keep(out, {"number": n, "prompt": prompts[n], "samples": [answered[n][s] for s in sorted(answered[n])]})  # fmt: skip
    seconds = time.monotonic() - began
    report.note(
        f"{len(wishes):,} texts, {count:,} tokens in {seconds:.2f} s: {count / max(seconds, 1e-9):,.0f} tokens per second"
    )
    if request["out"]:
        report.note(f"made: {request['out']}")
    return DONE


def _asked(prompt: str, template: ChatTemplate, system: str) -> list[int]:
    head = [{"role": "system", "content": system}] if system else []
    return template.prompt_ids([*head, {"role": "user", "content": prompt}])


def _opened(path: str | None, prompts: list[str]) -> tuple[set[int], LineFile | None]:
    """The prompts that are answered already, and the file to go on with; another file's answers are not ours."""
    if path is None:
        return set(), None
    done = {}
    for line in read_lines(Path(path)):
        n = line.get("number")
        if not isinstance(n, int) or not 0 <= n < len(prompts) or line.get("prompt") != prompts[n]:
            why = "it holds answers to other prompts"
            raise BadData(f"{path} cannot be gone on with", why, "another --out")
        done[n] = line
    try:
        _cut_fragment(Path(path))
        out = LineFile(Path(path))
    except OSError as error:
        raise cannot_write(Path(path), error) from error
    if done:
        report.note(f"{len(done):,} of {len(prompts):,} prompts were answered before, they are kept")
    return set(done), out


def _cut_fragment(path: Path) -> None:
    """Without the line that a kill tore: whoever reads the answers line by line would stumble over it."""
    try:
        fd = read_back.open_regular(path, os.O_RDWR)
    except FileNotFoundError:  # nothing was answered yet
        return
    with os.fdopen(fd, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - read_back.LINE_BYTES))
        fragment = file.read().rpartition(b"\n")[2]
        if not fragment or parse_record(fragment) is not None:  # only its newline is missing
            return
        if not fragment.startswith(_BEGIN[: len(fragment)]):
            raise BadData(f"{path} cannot be gone on with", "its last line is no answer of ours", "another --out")
        file.truncate(size - len(fragment))
        report.note(f"a torn line of {len(fragment):,} bytes at the end of {path} was cut off: that prompt is answered again")  # fmt: skip


def _keep(out: LineFile | None, record: dict[str, Any]) -> None:
    line = json.dumps(record)
    if out is None:
        report.result(line + "\n", raw=True)
    elif not out.write(line):
        raise CannotWrite(
            "the answers cannot be written", "the disk is full", "free some space; what is written is kept"
        )
