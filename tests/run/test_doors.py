"""Three doors that stay shut: code out of a model folder, success without proof, a damaged manifest that blocks a run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lamplighter.errors import BadConfig, BadData
from lamplighter.rundir import FORMAT, RunDir, newer_format, read_json, verify_manifest, write_manifest
from running import (
    TINY,
    Command,
    Finished,
    clean_env,
    copy_run,
    events_of,
    lamp,
    line_in,
    losses_of,
    verdicts_of,
    write_model,
)

TRAIN = ["train", "--run", "r", *TINY]
EIGHT = [*TINY, "--train.steps", "8", "--save.every_steps", "4"]

# ---------------------------------------------------------------- no code out of a model folder

OWN = """
import pathlib, torch
pathlib.Path("imported").touch()

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Linear(width, vocab_size)
    def forward(self, ids):
        return self.head(self.embed(ids))
"""


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a module and a run of the model in it."""
    cwd = tmp_path_factory.mktemp("own")
    (cwd / "mine.py").write_text(OWN)
    done = lamp("train", "--run", "r", *TINY, "--model.family", "mine:Model", "--train.steps", "2", cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd


def test_a_model_folder_never_causes_an_import(own_run: Path, here: Command) -> None:
    """The run's own code is named by the user, or it is not loaded; the command to type is said."""
    (own_run / "imported").unlink()
    asked = ["--prompt", "A", "--max-tokens", "4"]
    for model in ("r", "runs/r/checkpoints/checkpoint-2"):
        refused = here("generate", model, *asked, cwd=own_run)
        assert refused.returncode == 78, refused.stderr
        assert not (own_run / "imported").exists()
        assert f"lamp generate {model} --prompt A --max-tokens 4 --model.family mine:Model" in refused.stderr
    for given in (["--model.family", "mine:Model"], ["--model.family=mine:Model"]):
        made = here("generate", "r", *asked, *given, cwd=own_run)
        assert made.returncode == 0, made.stderr
        assert made.stdout.startswith("A")
    assert (own_run / "imported").exists()


@pytest.mark.parametrize(
    "named", ["mine:Model; rm -rf .", "$(touch imported):x", 7, None, ["a:b"], "\x1b[2Jmine:Model"]
)
def test_a_name_that_is_no_name_is_not_offered_for_pasting(own_run: Path, tmp_path: Path, named: object) -> None:
    folder = tmp_path / "model"
    shutil.copytree(own_run / "runs" / "r" / "checkpoints" / "checkpoint-2", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "family": named}))
    from lamplighter.model.build import load_folder

    with pytest.raises(BadConfig) as caught:
        load_folder(folder)
    assert caught.value.next.endswith("--model.family module:name")
    assert "\x1b" not in "".join(caught.value.lines())


@pytest.mark.parametrize(
    "arguments",
    [None, [], {}, {"vocab_size": "os"}, {"extra": 1}, {"width": True}, {"layers": -1}, {"dropout": "0"}],
)
def test_sizes_of_a_model_folder_are_numbers_or_it_is_damaged(
    own_run: Path, tmp_path: Path, arguments: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_run)
    folder = tmp_path / "model"
    shutil.copytree(own_run / "runs" / "r" / "checkpoints" / "checkpoint-2", folder)
    config = json.loads((folder / "config.json").read_text())
    changed = {**config["arguments"], **arguments} if isinstance(arguments, dict) and arguments else arguments
    (folder / "config.json").write_text(json.dumps({**config, "arguments": changed}))
    from lamplighter.model.build import load_folder

    with pytest.raises(BadData, match="damaged"):
        load_folder(folder, "mine:Model")


def test_a_library_of_the_same_name_in_the_model_folder_is_not_imported(finished: Finished) -> None:
    """`cd MODEL; lamp generate .` loads our libraries, not files that lie there."""
    folder = finished(*EIGHT).checkpoints / "checkpoint-8"
    for name in ("torch", "safetensors", "jinja2", "secrets"):
        (folder / f"{name}.py").write_text("import pathlib; pathlib.Path('imported').touch()\n")
    words = ["-P", "-m", "lamplighter", "generate", ".", "--max-tokens", "2"]  # -P: as `lamp` itself starts
    said = subprocess.run(
        [sys.executable, *words], cwd=folder, env=clean_env(), capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    assert not (folder / "imported").exists()


def test_a_family_that_the_folder_does_not_have_is_refused(tmp_path: Path, finished: Finished, here: Command) -> None:
    finished(*EIGHT)
    refused = here("generate", "r", "--model.family", "os:system", cwd=tmp_path)
    assert refused.returncode == 78
    assert "gpt2" in refused.stderr
    assert here("generate", "r", "--max-tokens", "2", "--model.family", "gpt2", cwd=tmp_path).returncode == 0
    assert here("generate", "r", "--model.family", cwd=tmp_path).returncode == 2


# ---------------------------------------------------------------- success is proved

WORDS = [*TRAIN, *["--train.steps", "12", "--save.every_steps", "4", "--save.staged", "false"]]


def leave(cwd: Path, how: str, *more: str) -> tuple[Any, RunDir]:
    """A run whose process leaves at step 7."""
    return lamp(*WORDS, "--model.family", write_model(cwd, how), *more, cwd=cwd), RunDir(cwd / "runs" / "r")


@pytest.mark.parametrize("code", [0, 73, 75])
def test_a_process_that_leaves_in_mid_run_has_not_finished(tmp_path: Path, code: int) -> None:
    done, run = leave(tmp_path, f"if model.calls == 7: os._exit({code})", "--watch.on_stuck", "stop")
    assert done.returncode == 71, done.stdout
    assert f"left with exit code {code} at step 6" in done.stdout
    assert "os._exit" in done.stdout
    status = read_json(run.status)
    assert (status["state"], status["exit_code"]) == ("lost", 71)
    (found,) = verdicts_of(run, "exit")
    assert (found["state"], found["culprit"]["step"]) == ("dead", 6)
    assert not events_of(run, "finished")


def test_the_same_exit_twice_at_the_same_step_is_a_bug(tmp_path: Path) -> None:
    done, run = leave(tmp_path, "if model.calls == 7: os._exit(0)", "--save.every_steps", "0")
    assert done.returncode == 71, done.stdout
    assert "attempt 2: going on from step 0" in done.stdout
    assert "attempt 3" not in done.stdout
    assert read_json(run.status)["state"] == "lost"


def test_an_exit_that_happens_once_is_outlived(tmp_path: Path) -> None:
    once = """
def before(model):
    if model.calls == 7 and not os.path.exists("left"):
        open("left", "w").close()
        os._exit(0)
"""
    done, run = leave(tmp_path, once)
    assert done.returncode == 0, done.stdout
    assert "restarting from step 4" in done.stdout
    assert read_json(run.status)["step"] == 12
    assert sorted(losses_of(run)) == list(range(1, 13))


@pytest.mark.parametrize(
    ("how", "said"), [("sys.exit(0)", "SystemExit: 0"), ("raise KeyboardInterrupt", "KeyboardInterrupt")]
)
def test_an_exit_by_exception_in_mid_run_is_a_crash_with_its_line(
    tmp_path: Path, here: Command, how: str, said: str
) -> None:
    family = write_model(tmp_path, f"if model.calls == 7: {how}")
    done = here(*WORDS, "--model.family", family, cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    assert said in done.stdout
    assert f"own.py:{line_in(tmp_path / 'own.py', how)}" in done.stdout
    assert read_json(tmp_path / "runs" / "r" / "status.json")["state"] == "failed"


def test_a_verb_whose_process_leaves_without_its_last_word_has_failed(own_run: Path, tmp_path: Path) -> None:
    """generate, and any other verb in a child: code 0 alone is not a result."""
    copy_run(own_run / "runs", tmp_path / "runs")
    (tmp_path / "mine.py").write_text("import os\nos._exit(0)\n")
    said = lamp("generate", "r", "--model.family", "mine:Model", cwd=tmp_path)
    assert said.returncode == 71
    assert "left with exit code 0" in said.stderr
    (tmp_path / "texts.py").write_text("import os\ndef documents():\n    yield 'a b c'\n    os._exit(0)\n")
    for verb in (["data", "prepare"], ["plan"]):
        said = lamp(*verb, "--data.source", "texts:documents", "--tokenizer.kind", "bytes", cwd=tmp_path)
        assert said.returncode == 71, (verb, said.stdout, said.stderr)


# ---------------------------------------------------------------- a manifest that is damaged


def damaged(manifest: dict[str, Any], how: str) -> str:
    """The text of a manifest that something happened to."""
    first = next(iter(manifest["files"]))
    entry = manifest["files"][first]
    if how == "key of a size":
        manifest["files"][first] = {"cytes": entry["bytes"], "xxh3_128": entry["xxh3_128"]}
    elif how == "size is text":
        entry["bytes"] = str(entry["bytes"])
    elif how == "size is true":
        entry["bytes"] = True
    elif how == "entry is a list":
        manifest["files"][first] = [1]
    elif how == "no checksum":
        del entry["xxh3_128"]
    elif how == "files is a list":
        manifest["files"] = [first]
    elif how == "no files":
        manifest["files"] = {}
    elif how == "outside":
        manifest["files"] = {"../../config.yaml": entry}
    elif how == "absolute":
        manifest["files"] = {"/etc/passwd": entry}
    elif how == "long name":
        manifest["files"]["x" * 5000] = entry
    elif how == "not a file name":
        manifest["files"]["a\0b"] = entry
    elif how == "a list":
        return "[1, 2]"
    elif how == "not JSON":
        return json.dumps(manifest)[:-9]
    elif how == "deep":
        return "[" * 100_000
    elif how == "empty":
        return ""
    return json.dumps(manifest)


HOWS = ["key of a size", "size is text", "size is true", "entry is a list", "no checksum", "files is a list", "no files", "outside",
        "absolute", "long name", "not a file name", "a list", "not JSON", "deep", "empty"]  # fmt: skip


@pytest.mark.parametrize("of_old", [False, True], ids=["now", "of an earlier version"])
@pytest.mark.parametrize("how", HOWS)
def test_any_damage_in_a_manifest_is_a_reason_in_words(finished: Finished, how: str, of_old: bool) -> None:
    folder = finished(*EIGHT).checkpoints / "checkpoint-8"
    manifest = json.loads((folder / "manifest.json").read_text())
    if of_old:
        manifest = {"step": manifest["step"], "files": manifest["files"]}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        assert verify_manifest(folder) is None
    (folder / "manifest.json").write_text(damaged(manifest, how))
    assert verify_manifest(folder)


def test_every_single_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    write_manifest(tmp_path, step=8)
    path = tmp_path / "manifest.json"
    whole = path.read_bytes()
    assert verify_manifest(tmp_path) is None
    for bit in range(8 * len(whole)):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert verify_manifest(tmp_path), f"bit {bit}: {bytes(flipped)!r}"
        assert newer_format(tmp_path) is None, "damage is not taken for a newer version"
    path.write_bytes(whole)
    assert json.loads(whole)["format"] == FORMAT


def test_a_run_goes_on_past_a_damaged_manifest(tmp_path: Path, finished: Finished, here: Command) -> None:
    """Passed over, and said: by lamp train, generate and checkpoints; lamp runs lists the run."""
    path = finished(*EIGHT).checkpoints / "checkpoint-8" / "manifest.json"
    path.write_text(damaged(json.loads(path.read_text()), "key of a size"))
    (path.parent.parent / "latest.json").write_text('{"step": "x"}')
    listed = here("checkpoints", "r", cwd=tmp_path)
    assert listed.returncode == 0, listed.stderr
    assert "invalid: manifest.json is damaged" in listed.stdout
    made = here("generate", "r", "--max-tokens", "3", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert "checkpoint-8 is passed over: manifest.json is damaged" in made.stderr
    assert here("runs", cwd=tmp_path).returncode == 0
    done = here(*TRAIN, "--train.steps", "10", "--save.every_steps", "4", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "checkpoint-8 is passed over: manifest.json is damaged" in done.stdout
    assert "resumed from checkpoint-4" in done.stdout
