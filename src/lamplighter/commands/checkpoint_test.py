"""lamp checkpoints RUN test: every checkpoint against what was to be expected, texts of the newest, and what to do.

In:  a run, prompts.
Out: a table with a curve, texts and red flags, the next command; a result in evaluations/. The model runs in a child.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import read_back, report
from lamplighter.commands.arguments import find_run, named_again, parse, with_own_fields
from lamplighter.commands.model_folder import base_given
from lamplighter.errors import DONE, NoCheckpoint, UsageError
from lamplighter.rundir import RunDir, is_running, newest_first, number, read_lines, read_record, step_of

if TYPE_CHECKING:
    from lamplighter.data.token_cache.reader import Tokens
    from lamplighter.evaluate.evaluation import Candidate

_DOCUMENTS = 48  # held-back ones that are read for each checkpoint
_TOKENS = 80
_SEEN = 200_000  # tokens of the training text that are looked at: its words, its language
_BEGINNING = 12  # tokens of a document, as a prompt


def _test_flags(
    run: str,
    checkpoint: str = "",
    /,
    *,
    prompts: Path | None = None,
    interactive: bool = False,
    json: bool = False,
    threads: int | None = None,
    model_family: str | None = None,
    model_init_from: str | None = None,
    runs_dir: Path = Path("runs"),
) -> None:
    """What to test."""


def test(words: list[str]) -> int:
    """`words` without the word test: the run, perhaps a checkpoint, flags."""
    from lamplighter.commands.session import session

    flags = parse("checkpoints", _test_flags, with_own_fields(words))
    run = find_run(flags["run"], flags["runs_dir"])
    if flags["interactive"]:
        if flags["prompts"] or flags["json"]:
            raise UsageError("--interactive goes with neither --prompts nor --json", "it is a conversation", "first the one, then the other")  # fmt: skip
        from lamplighter.commands.generate import generate

        chosen = ["--checkpoint", flags["checkpoint"]] if flags["checkpoint"] else []
        for name in ("model_family", "model_init_from"):
            chosen += [f"--{name.replace('_', '.', 1)}", flags[name]] if flags[name] else []
        chosen += ["--threads", str(flags["threads"])] if flags["threads"] else []
        return generate([flags["run"], "--interactive", *chosen, "--runs-dir", str(flags["runs_dir"])])
    request = {
        "place": str(run.path.resolve()), "address": run.address, "checkpoint": flags["checkpoint"], "json": flags["json"],
        "prompts": str(flags["prompts"].resolve()) if flags["prompts"] else None, "threads": flags["threads"],
        "model_family": flags["model_family"], "model_init_from": base_given(flags["model_init_from"]), "command": shlex.join(["lamp", "checkpoints", flags["run"], "test", *named_again(flags["runs_dir"])]),
    }  # fmt: skip
    return session("checkpoint_test", request)


# ---------------------------------------------------------------- in the child


def checkpoint_test_child(_: RunDir, request: dict[str, Any]) -> int:
    """Losses of all checkpoints (or the one), texts of the last of them."""
    from lamplighter.commands.generate_many import read_prompts
    from lamplighter.commands.model_folder import choose_folder, load_candidate
    from lamplighter.evaluate import checkpoint_test as testing

    run = RunDir(Path(request["place"]))
    names = [request["checkpoint"]] if request["checkpoint"] else [one.name for one in reversed(newest_first(run.checkpoints))]  # fmt: skip
    if not names:
        raise NoCheckpoint(f"{run.name} has no checkpoint yet", "nothing was saved", "lamp save RUN")
    prompts = read_prompts(Path(request["prompts"])) if request["prompts"] else []
    with report.phase("import"):
        import torch

        if request["threads"]:
            torch.set_num_threads(request["threads"])
    rows: list[dict[str, Any]] = []
    candidate, tokens = None, None
    for name in names:
        folder = choose_folder(run.path, name, raw=True)
        candidate = load_candidate(folder, {**request, "chat": False})
        tokens = _tokens(folder, run.path)
        rows.append(_row(run, folder, candidate, tokens, [row["loss"] for row in rows]))
    assert candidate is not None
    texts = _texts(candidate, tokens, prompts or _default_prompts(candidate, tokens))
    flags = testing.red_flags([one["figures"] for one in texts])
    last = rows[-1]
    if flags and last["action"] == "ready":
        last |= {"action": "check convergence", "why": f"{last['why']}, but its texts have red flags"}
    record = {"checkpoints": rows, "texts": texts, "red_flags": flags, "next": _next(request, last, flags)}
    _keep(run, candidate, last, record)
    report.result(json.dumps(record, indent=1) + "\n" if request["json"] else _words(record))
    return DONE


def _tokens(folder: Path, place: Path) -> Tokens:
    from lamplighter.commands.eval import training_tokens

    found = training_tokens(folder, place)
    if found is None or not len(found.val):
        why = "its token cache is gone, or it was trained on rows or a stream"
        raise UsageError(
            f"the held-back text of {folder.name} is not here", why, "lamp eval RUN --data DIR --tasks NAME"
        )
    return found


def _row(run: RunDir, folder: Path, candidate: Candidate, tokens: Tokens, before: list[float]) -> dict[str, Any]:
    """The loss of one checkpoint, what was expected of it, and what to do."""
    from lamplighter.commands.eval import held_back
    from lamplighter.evaluate import checkpoint_test as testing
    from lamplighter.evaluate.evaluation import Manner, evaluate

    task = held_back(candidate, folder, tokens, _DOCUMENTS)
    scores = {one["name"]: one for one in evaluate(candidate, task, Manner(run.path / "evaluations"))["scores"]}
    loss, step = scores["loss"]["value"], step_of(folder)
    state = read_record(folder / "training" / "state.json")
    steps = max(step, int(number(state.get("steps"), 0)))
    progress = step / steps if steps else 1.0
    curve = _curve(run)
    recent = [value for at, value in curve.items() if step - max(3, 0.1 * steps) < at <= step]
    earlier = [value for at, value in curve.items() if at <= step / 2]
    found = testing.expected(progress, candidate.built.parameters, candidate.built.vocab_size, recent)
    action, why = testing.act(loss, found, {
        "progress": progress, "vocab_size": float(candidate.built.vocab_size), "best_before": min(before, default=None),
        "train_now": sum(recent) / len(recent) if recent else None, "train_then": sum(earlier) / len(earlier) if earlier else None,
    })  # fmt: skip
    return {
        "checkpoint": folder.name, "step": step, "progress": progress, "loss": loss, "stderr": scores["loss"]["stderr"], "n": scores["loss"]["n"],
        "perplexity": scores["perplexity"]["value"], "expected": found.words() if found else None,
        "source": found.source if found else None, "action": action, "why": why,
    }  # fmt: skip


def _curve(run: RunDir) -> dict[int, float]:
    """The training loss of each step."""
    rows = (row for row in read_lines(run.metrics) if read_back.is_metric(row) and row.get("train/loss") is not None)
    return {row["step"]: float(row["train/loss"]) for row in rows}


def _default_prompts(candidate: Candidate, tokens: Tokens | None) -> list[str]:
    """Four of English; of a run on another language, the beginnings of held-back documents."""
    from lamplighter.commands.eval import held_back_documents
    from lamplighter.evaluate import checkpoint_test as testing

    decode = candidate.tokenizer.decode
    if tokens is None or testing.is_english(decode(tokens.train.read(0, min(len(tokens.train), _SEEN)).tolist())):
        return list(testing.PROMPTS)
    documents = held_back_documents(tokens.val, candidate.tokenizer.end_of_text)
    report.note("the training text is not English: the prompts are the beginnings of held-back documents")
    return [decode(ids[:_BEGINNING]) for ids in documents[: len(testing.PROMPTS)]]


def _texts(candidate: Candidate, tokens: Tokens | None, prompts: list[str]) -> list[dict[str, Any]]:
    """What the model makes of the prompts, in figures."""
    import torch

    from lamplighter.evaluate import checkpoint_test as testing
    from lamplighter.model.batching import Batcher, TextRequest
    from lamplighter.model.generate import Choice

    tokenizer, built = candidate.tokenizer, candidate.built
    seen = tokens.train.read(0, min(len(tokens.train), _SEEN)).tolist() if tokens is not None else list[int]()
    dictionary = testing.dictionary_of([tokenizer.decode(seen)])
    most = min(_TOKENS, built.positions // 2)
    found = []
    with report.phase("write", total=len(prompts), unit="texts") as phase:
        batcher = Batcher(built.model, 1, built.positions, built.vocab_size)
        for n, prompt in enumerate(prompts):
            ids = [tokenizer.end_of_text, *tokenizer.encode(prompt).tolist()][-(built.positions - most - 1) :]
            batcher.add(n, TextRequest(tuple(ids), most, Choice(0.8, 0, 0.95), 1, n, frozenset([tokenizer.end_of_text]), logprobs=0))  # fmt: skip
            made, end = [], ""
            while batcher.texts:
                for one in batcher.step():
                    made += [] if one.token is None else [one.token]
                    end = one.end
                    phase.tick(0)
            with torch.inference_mode():
                device = next(built.model.parameters()).device
                logits = built.model(torch.tensor([[*ids, *made]], device=device))[0, len(ids) - 1 :].float()
                logs = logits.log_softmax(-1)
                entropy = float(-(logs.exp() * logs).sum(-1).mean()) / math.log(built.vocab_size)
            text = tokenizer.decode(made)
            found.append({"prompt": prompt, "text": text, "figures": testing.text_figures(text, end == "stop", dictionary, entropy)})  # fmt: skip
            phase.tick()
    return found


def _next(request: Mapping[str, Any], last: Mapping[str, Any], flags: list[str]) -> str:
    """One command that can be pasted."""
    address, family = request["address"], request["model_family"]
    named = f" --model.family {shlex.quote(family)}" if family else ""
    if last["action"] in ("broken", "overfitting"):
        return f"lamp eval {address} --checkpoint best{named}"
    if last["action"] == "ready" and not flags:
        return f"lamp eval {address} --suite comprehensive{named}"
    if last["progress"] < 1 and is_running(RunDir(Path(request["place"]))):
        return f"lamp watch {address}"
    return f"lamp generate {address} --checkpoint {last['checkpoint']} --interactive{named}"


def _keep(run: RunDir, candidate: Candidate, last: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    from lamplighter.evaluate.items import Task, TaskItem
    from lamplighter.evaluate.results import log_name, write_result
    from lamplighter.evaluate.scores import TaskScore

    items = tuple(TaskItem(one["prompt"], ()) for one in record["texts"])
    task = Task("checkpoint-test", "generate", items, run.path, "", "{prompt}")
    score = TaskScore("loss", last["loss"], last["stderr"], last["n"], None, higher_is_better=False)
    more = {"action": last["action"], "why": last["why"], "red_flags": list(record["red_flags"]), "examples": record["texts"]}  # fmt: skip
    name = log_name(task.name, candidate.subject, {})
    write_result(run.path / "evaluations", name, candidate.subject, task, [score], seconds=0.0, **more)


def _words(record: Mapping[str, Any]) -> str:
    from lamplighter.evaluate.checkpoint_test import sparkline

    rows = record["checkpoints"]
    lines = [f"{'checkpoint':<18} {'progress':>8}  {'expected':<16} {'measured':>8}  action"]
    for row in rows:
        lines.append(f"{row['checkpoint']:<18} {row['progress']:>8.0%}  {row['expected'] or '-':<16} {row['loss']:>8.3f}  {row['action']}: {row['why']}")  # fmt: skip
    if rows[-1]["source"]:
        lines.append(f"expected by {rows[-1]['source']}")
    if len(rows) > 1:
        lines.append(
            f"loss  {sparkline([row['loss'] for row in rows])}  {rows[0]['loss']:.3f} -> {rows[-1]['loss']:.3f}"
        )
    for one in record["texts"]:
        shown = one["figures"]
        ended = "ended by itself" if shown["ended"] else "cut at the limit"
        lines += ["", f"> {one['prompt']}", one["text"].strip()[:600]]
        lines.append(f"  ({shown['words']} words, {ended}; repetition {shown['repetition']:.0%}, known words {shown['known_words']:.0%}, entropy {shown['entropy']:.0%})")  # fmt: skip
    figures, flags = [one["figures"] for one in record["texts"]], record["red_flags"]
    ended, open_ = sum(one["ended"] for one in figures), sum(one["unfinished"] for one in figures)
    mean = sum(one["words"] for one in figures) / max(1, len(figures))
    lines += ["", f"{ended} of {len(figures)} texts were ended by the model, {open_} stop within a sentence, {mean:.0f} words on average"]  # fmt: skip
    lines += ["", *(f"red flag  {flag}" for flag in flags)] if flags else ["", "no red flag in these texts"]
    return "\n".join([*lines, f"next: {record['next']}", ""])
