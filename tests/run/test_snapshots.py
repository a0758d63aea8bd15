"""What users see, as it was recorded: help, defaults, events, files and fields of a run, exit codes, bits of the losses.

In:  tests/snapshots/*.txt and loss_bits.json. A wanted change is recorded with LAMP_SNAPSHOTS=write and read in the diff.
Out: a failure with the difference. Three finished runs, one for each kind of data, serve all tests that read a run.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from running import Command, copy_run, lamp
from snapshots.loss_bits import losses, machine, train_words, write_rows

FOLDER = Path(__file__).parents[1] / "snapshots"
WRITE = os.environ.get("LAMP_SNAPSHOTS") == "write"
# kind of data: name of a run in loss_bits.py
KINDS = {"cache": "cache-dropout", "rows": "rows-llama", "stream": "stream"}
VERBS = ("demo", "train", "watch", "why", "stop", "save", "runs", "checkpoints", "generate", "plan", "doctor", "data",
         "tokenizer", "track", "dash", "compare", "report", "launch")  # fmt: skip
PRESETS = ("demo", "llama", "regular", "slm")


def check(name: str, found: str) -> None:
    """The same text as recorded in the file, or the difference."""
    path = FOLDER / name
    if WRITE:
        path.write_text(found)
    recorded = path.read_text()
    lines = difflib.unified_diff(recorded.splitlines(), found.splitlines(), f"recorded {name}", "found", lineterm="")
    assert found == recorded, "\n".join(lines)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one finished run of each kind."""
    cwd = tmp_path_factory.mktemp("snapshots")
    write_rows(cwd)
    for name in KINDS.values():
        done = lamp(*train_words(name), cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr
    return cwd


# ---------------------------------------------------------------- help and defaults


def test_help_says_what_it_said(command: Command, tmp_path: Path) -> None:
    said = [command("--help", cwd=tmp_path)] + [command(verb, "--help", cwd=tmp_path) for verb in VERBS]
    assert {done.returncode for done in said} == {0}
    titles = ["lamp --help", *(f"lamp {verb} --help" for verb in VERBS)]
    check("help.txt", "\n".join(f"$ {title}\n{done.stdout}" for title, done in zip(titles, said, strict=True)))


def test_every_field_has_the_default_it_had(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: {lr: 1e-3}\nmodel: {layers: 3}\n")
    asked = [[], ["--test"], ["run.yaml", "--train.seed", "9"], *(["--preset", name] for name in PRESETS)]
    pages = []
    for words in asked:
        done = command("train", *words, "--print-config", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        changed = [line for line in done.stdout.splitlines() if words == [] or "# default" not in line]
        pages.append("\n".join([f"$ lamp train {' '.join([*words, '--print-config'])}", *changed, ""]))
    check("defaults.txt", "\n".join(pages))


# ---------------------------------------------------------------- a run: events, files, fields

BY_TIME = ("verdict", "ledger")  # they come when they come


def masked(text: str) -> str:
    """A note without its figures; what was measured on this machine is cut down to its first word."""
    first = text.split()[0]
    if first in ("peak", "about", "memory:", "disk:"):
        return first + " ..."
    return re.sub(r"\d[\d.,]*", "#", re.sub(r"[0-9a-f]{20}", "KEY", text))


def event_line(event: dict[str, Any]) -> str:
    """One event: its type and what of it is the same each time."""
    kind = event["type"]
    if kind == "phase":
        return f"phase {event['state']:<5} {event['path']}"
    said = masked(event["text"]) if kind == "note" else ""
    step = f"step {event['step']}" if "step" in event else ""
    return " ".join(word for word in (kind, step, said) if word)


def fields_by_type(events: list[dict[str, Any]]) -> list[str]:
    found: dict[str, set[str]] = {}
    for event in events:
        if event["type"] != "verdict":
            kind = f"phase {event['state']}" if event["type"] == "phase" else event["type"]
            found.setdefault(kind, set()).update(event)
    return [f"{kind}: {' '.join(sorted(names))}" for kind, names in sorted(found.items())]


def keys(value: Any, before: str = "") -> list[str]:
    """The names of a JSON object, those within it behind a dot."""
    if not isinstance(value, dict):
        return [before]
    return [name for key in sorted(value) for name in keys(value[key], f"{before}.{key}" if before else key)]


def files_of(folder: Path) -> list[str]:
    """Every file; what is written only when somebody asked or a verdict fell is left out."""
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() or path.is_fifo())
    return [name for name in found if not name.startswith("stacks/") and name != "slots/rank0.stacks.json"]


def _is_ahead(line: str) -> bool:
    """A chunk that is read ahead has a phase only where the loop had to wait for it."""
    return "> fill chunk" in line


def of_run(run: Path, cache: Path) -> str:
    """All that is recorded of a finished run."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training = {key for r in records if "train/loss" in r for key in r if not key.startswith("sys/")}
    evaluation = {key for r in records if "eval/val_loss" in r for key in r}
    checkpoint = run / "checkpoints" / "checkpoint-20"
    state = json.loads((checkpoint / "training" / "state.json").read_text())
    sections = {
        "files": files_of(run),
        "files of its cache": files_of(cache) if cache.exists() else [],
        "events": [
            line for event in events if event["type"] not in BY_TIME and not _is_ahead(line := event_line(event))
        ],
        "fields of events": fields_by_type(events),
        "fields of metrics.jsonl": [" ".join(sorted(training)), " ".join(sorted(evaluation))],
        "fields of status.json": keys(json.loads((run / "status.json").read_text())),
        "fields of state.json": keys(state),
        "fields of manifest.json": keys(json.loads((checkpoint / "manifest.json").read_text())),
        "fields of latest.json": keys(json.loads((run / "checkpoints" / "latest.json").read_text())),
        "fields of best.json": keys(json.loads((run / "checkpoints" / "best.json").read_text())),
        "config.json": (checkpoint / "config.json").read_text().splitlines(),
    }
    return "\n".join("\n".join([f"## {title}", *lines, ""]) for title, lines in sections.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_leaves_the_events_files_and_fields_that_it_left(kind: str, runs: Path) -> None:
    run = runs / "runs" / KINDS[kind]
    state = json.loads((run / "checkpoints" / "checkpoint-20" / "training" / "state.json").read_text())
    check(f"run_{kind}.txt", of_run(run, runs / "runs" / ".cache" / state["cache"]))


def test_the_token_cache_holds_the_same_tokens_under_the_same_key(runs: Path) -> None:
    """An existing cache is found again: its name and its bytes do not depend on the machine."""
    found = []
    for manifest in sorted((runs / "runs" / ".cache").glob("*/manifest.json")):
        content = json.loads(manifest.read_text())
        found += [manifest.parent.name, json.dumps(content, indent=1, sort_keys=True)]
    check("token_cache.txt", "\n".join(found) + "\n")


def test_the_losses_have_the_same_bits(runs: Path) -> None:
    """Compared where they were recorded: other processors and other versions of torch may round otherwise."""
    recorded = json.loads((FOLDER / "loss_bits.json").read_text())
    here = machine()
    if here != recorded["machine"]:
        pytest.skip(f"bits were recorded on {recorded['machine']}, this is {here}; compare with loss_bits.py --against")
    for name in KINDS.values():
        assert losses(runs / "runs" / name) == recorded["losses"][name], name


# ---------------------------------------------------------------- exit codes

AT_ONCE: list[list[str]] = [
    ["--version"],
    ["trian"],
    ["train", "--train.lrr", "3"],
    ["train", "--tset"],
    ["train", "--preset", "smal"],
    ["train", "--run", ""],
    ["train", "--run", "a/b"],
    ["train", "--train.lr", "abc"],
    ["train", "--train.lr", "50"],
    ["train", "--model.heads", "7"],
    ["train", "bad.yaml"],
    ["train", "nothing.yaml"],
    ["train", "--runs-dir", "file.txt/runs"],
    ["train", "--print-config"],
    ["demo", "--tset"],
    ["watch", "--"],
    ["watch", "nothing"],
    ["watch", "--run", "old", "--", "true"],
    ["why", "nothing"],
    ["why", "old"],
    ["stop", "nothing"],
    ["stop", "old"],
    ["save", "old"],
    ["runs"],
    ["runs", "--json"],
    ["runs", "--jsno"],
    ["checkpoints"],
    ["checkpoints", "nothing"],
    ["generate"],
    ["generate", "nothing"],
    ["plan", "--preset", "slm", "--on", "a100-80gb"],
    ["plan", "--preset", "slm", "--on", "a100"],
    ["plan", "--preset", "slm", "--on", "t4", "--budget.usd", "2", "--budget.usd_per_hour", "0.5"],
    ["plan", "--train.epochs", "3", "--on", "l4"],
    ["doctor", "--only", "nonsense"],
    ["data"],
    ["data", "nonsense"],
    ["data", "clean", "x.txt"],
    ["data", "prepare", "--data.seq_len", "x"],
    ["tokenizer"],
    ["tokenizer", "show"],
    ["tokenizer", "train"],
]
OLD = train_words(KINDS["cache"])[3:]  # the settings of the run `old`
BY_A_CHILD: list[list[str]] = [
    ["train", *OLD, "--data.paths", "empty.txt"],
    ["train", *OLD, "--data.paths", "nothing/*.txt"],
    ["train", *OLD, "--run", "old", "--resume", "checkpoint-5", "--train.steps", "30"],
    ["train", *OLD, "--run", "slow", "--train.steps", "1000000000", "--budget.hours", "0.2"],
    ["train", *OLD, "--run", "nan", "--model.family", "broken:Model", "--train.on_nonfinite", "stop"],
    ["checkpoints", "old"],
    ["generate", "empty"],
    ["data", "stats", "--data.paths", "empty.txt"],
    ["data", "clean", "nothing.txt", "--out", "clean"],
    ["tokenizer", "show", "nowhere"],
    ["watch", "--", sys.executable, "-c", "raise SystemExit(3)"],
]
BROKEN = """
import torch
class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(vocab_size, width), torch.nn.Linear(width, vocab_size)
    def forward(self, ids):
        return self.head(self.embed(ids)) * float("nan")
"""


@pytest.fixture
def desk(runs: Path, tmp_path: Path) -> Path:
    """A folder with a finished run `old`, a run without checkpoints, and a few bad files."""
    copy_run(runs / "runs" / KINDS["cache"], tmp_path / "runs" / "old")
    (tmp_path / "runs" / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "bad.yaml").write_text("train: [1\n")
    (tmp_path / "broken.py").write_text(BROKEN)
    return tmp_path


def code_line(code: int, words: list[str]) -> str:
    tiny = len(OLD) if words[1 : 1 + len(OLD)] == OLD else 0
    shown = [*words[:1], *(["..."] if tiny else []), *words[1 + tiny :]]
    return f"{code:>3}  lamp {shlex.join(shown).replace(sys.executable, 'python')}"


def test_a_mistake_has_the_exit_code_it_had(command: Command, desk: Path) -> None:
    found = []
    for words in AT_ONCE:
        done = command(*words, cwd=desk)
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        found.append(code_line(done.returncode, words))
    check("exit_codes.txt", "\n".join(found) + "\n")


def test_an_end_has_the_exit_code_it_had(here: Command, desk: Path) -> None:
    found = []
    for words in BY_A_CHILD:
        done = here(*words, cwd=desk)
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        found.append(code_line(done.returncode, words))
    check("exit_codes_of_children.txt", "\n".join(found) + "\n")
