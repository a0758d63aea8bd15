"""Runs of earlier versions: listed, resumed and generated from; what is not given is as the run has it.

tests/fixtures/run_cc24f03 was made by commit cc24f03 (before `format` and `numerics` were written) and stopped after 23 of
60 steps; run_cc24f03.json holds what that commit computed for the whole run and generated from both checkpoints.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from lamplighter import config
from lamplighter.config import Recorded, carry_over, dump, load_dump, parse_overrides, read_dump, resolve
from lamplighter.errors import BadConfig
from lamplighter.rundir import (
    FORMAT,
    NUMERICS,
    RunDir,
    read_json,
    read_lines,
    verify_manifest,
    write_json,
    write_manifest,
)
from running import LONG, Command, lamp, losses_of

FIXTURES = Path(__file__).parents[1] / "fixtures"
NAME = "run_cc24f03"
THEN: dict[str, Any] = json.loads((FIXTURES / f"{NAME}.json").read_text())


@pytest.fixture
def old_run(tmp_path: Path) -> RunDir:
    """The old run in a runs folder of its own; its token cache and tokenizer are made again."""
    run = RunDir(tmp_path / "runs" / NAME)
    shutil.copytree(FIXTURES / NAME, run.path)
    return run


def home(run: RunDir) -> Path:
    return run.path.parent.parent


def same_machine() -> bool:
    """Whether exactness is promised here: processor, torch and threads are those of then."""
    from lamplighter.config import Train
    from lamplighter.train.hardware import detect

    return detect(Train(threads=1, dtype="fp32")).facts() == THEN["machine"]


def assert_near(found: dict[int, str], name: str, first: int) -> None:
    """The numbers that the old commit computed, but for the last bits: the arithmetic is another since (numerics 2)."""
    expected = {int(step): value for step, value in THEN[name].items() if int(step) >= first}
    mine = {step: value for step, value in found.items() if step >= first}
    assert mine.keys() == expected.keys()
    for step, value in expected.items():
        assert float.fromhex(mine[step]) == pytest.approx(float.fromhex(value), rel=1e-4)


# ---------------------------------------------------------------- the whole way


def test_an_old_run_is_listed_and_its_checkpoints_are_valid(old_run: RunDir, here: Command) -> None:
    listed = json.loads(here("runs", "--json", cwd=home(old_run)).stdout)
    assert [(row["run"], row["state"], row["step"], row["durable_step"]) for row in listed] == [
        (NAME, "stopped", 23, 23)
    ]
    assert "23/60" in here("runs", cwd=home(old_run)).stdout
    rows = json.loads(here("checkpoints", NAME, "--json", cwd=home(old_run)).stdout)
    assert [(row["step"], row["valid"]) for row in rows] == [(20, True), (23, True)]


def test_the_same_command_resumes_an_old_run(old_run: RunDir) -> None:
    done = lamp("train", "--run", NAME, *THEN["words"], cwd=home(old_run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed from checkpoint-23: step 24 is next" in done.stdout
    assert f"(numerics {NUMERICS}) is not that of the checkpoint (numerics 1)" in done.stdout
    assert "from step 24 on no longer bit-identical" in done.stdout
    told = [line for line in done.stdout.splitlines() if "not given" in line]
    assert len(told) == 1 and "train.tree 1 (without it: 8)" in told[0] and "gpt2 (without it: qwen3)" in told[0], (
        "as it was before the tree"
    )
    assert_near(losses_of(old_run), "train/loss", 1)
    scores = {r["step"]: r["eval/val_loss"].hex() for r in read_lines(old_run.metrics) if "eval/val_loss" in r}
    assert_near(scores, "eval/val_loss", 1)
    made = old_run.checkpoints / "checkpoint-60"
    for path in (old_run.status, made / "manifest.json", made / "training" / "state.json"):
        record = read_json(path)
        assert (record["format"], record["numerics"]) == (FORMAT, NUMERICS), path
    assert old_run.config.read_text().startswith(f"format: {FORMAT}\nnumerics: {NUMERICS}\n")


def test_a_resume_needs_no_more_than_the_name_and_lost_steps_are_redone(old_run: RunDir, here: Command) -> None:
    """The newest checkpoint is damaged: steps 21 to 23 are computed again, with the settings of the run's own config.yaml."""
    with open(old_run.checkpoints / "checkpoint-23" / "model.safetensors", "r+b") as file:
        file.seek(20_000)
        file.write(b"\x55")
    done = here("train", "--run", NAME, cwd=home(old_run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "checkpoint-23 is passed over" in done.stdout
    assert "resumed from checkpoint-20: step 21 is next" in done.stdout
    assert "from step 21 on no longer bit-identical" in done.stdout
    assert "train.batch_size 4 (without it: 16)" in done.stdout
    assert_near(losses_of(old_run), "train/loss", 21)
    redone = [record["step"] for record in read_lines(old_run.metrics) if record.get("attempt") == 2]
    assert min(redone) <= 21
    assert "  batch_size: 4                          # command line" in old_run.config.read_text()


@pytest.mark.parametrize("checkpoint", ["checkpoint-20", "checkpoint-23"])
def test_an_old_checkpoint_generates_the_same_ids(old_run: RunDir, checkpoint: str, here: Command) -> None:
    from lamplighter.data.tokenizer import load
    from lamplighter.model.build import load_folder
    from lamplighter.model.generate import stream

    folder = old_run.checkpoints / checkpoint
    built, tokenizer = load_folder(folder), load(folder)
    ids = [tokenizer.end_of_text, *tokenizer.encode(THEN["prompt"]).tolist()]
    for temperature in (0.0, 0.8) if same_machine() else (0.0,):
        choice: dict[str, Any] = {"max_tokens": 24, "seed": 1, "stop_id": tokenizer.end_of_text, "window": 32}
        made = [token for (token,) in stream(built.model.eval(), ids, temperature=temperature, **choice)]
        assert made == THEN["generated"][f"{checkpoint} {temperature}"]["ids"]
    words = ["--checkpoint", checkpoint, "--prompt", THEN["prompt"], "--max-tokens", "24", "--temperature", "0"]
    said = here("generate", NAME, *words, cwd=home(old_run))
    assert said.returncode == 0, said.stderr
    assert said.stdout == THEN["generated"][f"{checkpoint} 0.0"]["text"]


def test_the_fixture_is_small_and_knows_no_machine() -> None:
    files = [path for path in FIXTURES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 500_000
    for path in files:
        assert not any(word in path.read_bytes() for word in (b"/home/", b"/work/", b"/root/", b"/tmp/", b"/Users/"))


# ---------------------------------------------------------------- other numbers, other defaults


def rewrite(folder: Path, **changes: Any) -> None:
    """Other words in state.json, under a manifest that agrees with it."""
    state = read_json(folder / "training" / "state.json")
    write_json(folder / "training" / "state.json", {**state, **changes})
    write_manifest(folder, step=state["step"])
    assert verify_manifest(folder) is None


def claim_format(folder: Path, number: int) -> None:
    """The manifest that a version with this format would write."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lamplighter.rundir.VERSIONS", {"format": number, "numerics": 1})
        write_manifest(folder, step=23)


def test_an_older_default_stays_and_the_end_of_exactness_is_said(old_run: RunDir, here: Command) -> None:
    """As if the default of train.lr had been another, and the arithmetic too, when this run was begun."""
    text = old_run.config.read_text()
    assert "  lr: 0.0003 " in text
    old_run.config.write_text(text.replace("  lr: 0.0003 ", "  lr: 0.0007 "))
    rewrite(old_run.checkpoints / "checkpoint-23", numerics=NUMERICS - 1)
    done = here("train", "--run", NAME, *THEN["words"], "--train.steps", "30", cwd=home(old_run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train.lr 0.0007 (without it: 0.02)" in done.stdout
    assert "from step 24 on no longer bit-identical" in done.stdout
    assert f"numerics {NUMERICS - 1}" in done.stdout
    rates = [
        record["train/lr"]
        for record in read_lines(old_run.metrics)
        if record.get("attempt") == 2 and "train/lr" in record
    ]
    whole = config.Train(lr=0.0007)
    assert max(rates) > 0.1 * whole.lr
    assert load_dump(old_run.config).train.lr == 0.0007
    assert "  lr: 0.0007                             # default" in old_run.config.read_text()


def test_a_newer_format_is_refused_with_both_numbers(old_run: RunDir, here: Command) -> None:
    newer = FORMAT + 1
    both = (f"format {newer}", f"format {FORMAT}")
    words = ["train", "--run", NAME, *THEN["words"]]
    before = old_run.config.read_text()

    old_run.config.write_text(f"format: {newer}\nnumerics: 1\n{before}")
    refused = here(*words, cwd=home(old_run))
    assert refused.returncode == 78
    assert all(number in refused.stderr for number in both)
    old_run.config.write_text(before)

    status = read_json(old_run.status)
    write_json(old_run.status, {**status, "format": newer})
    refused = here(*words, cwd=home(old_run))
    assert refused.returncode == 78
    assert all(number in refused.stderr for number in both)
    assert f"format {newer}" in here("runs", cwd=home(old_run)).stdout
    write_json(old_run.status, status)

    claim_format(old_run.checkpoints / "checkpoint-23", newer)
    refused = here(*words, cwd=home(old_run))
    assert refused.returncode == 74, refused.stdout
    assert all(number in refused.stdout for number in both)
    assert (old_run.checkpoints / "checkpoint-23").is_dir(), "nothing is set aside"
    for model in (NAME, str(old_run.checkpoints / "checkpoint-23")):
        refused = here("generate", model, "--max-tokens", "2", cwd=home(old_run))
        assert refused.returncode == 74
        assert all(number in refused.stderr for number in both)
    rows = json.loads(here("checkpoints", NAME, "--json", cwd=home(old_run)).stdout)
    assert [row["valid"] for row in rows] == [True, False]
    assert all(number in rows[1]["reason"] for number in both)


@pytest.mark.parametrize("text", ["format: two\n", "format: [1]\n", "format:\n", "numerics: true\n"])
def test_a_damaged_format_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text + dump(resolve(None)).partition(f"numerics: {NUMERICS}\n")[2])
    with pytest.raises(BadConfig, match=r"config\.yaml"):
        read_dump(tmp_path / "config.yaml")


def test_a_bare_name_means_the_settings_of_that_run_also_before_its_first_checkpoint(
    old_run: RunDir, here: Command
) -> None:
    shutil.rmtree(old_run.checkpoints)
    before = load_dump(old_run.config)
    done = here("train", "--run", NAME, cwd=home(old_run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert load_dump(old_run.config) == before
    assert_near(losses_of(old_run), "train/loss", 1)


@LONG
def test_a_lost_config_is_neither_taken_for_defaults_nor_replaced_by_wrong_settings(
    old_run: RunDir, here: Command
) -> None:
    old_run.config.write_text("")
    done = here("train", "--run", NAME, cwd=home(old_run))
    assert done.returncode == 78 and "config.yaml is empty" in done.stdout + done.stderr
    old_run.config.unlink()
    done = here("train", "--run", NAME, "--tokenizer.kind", "bytes", cwd=home(old_run))  # other settings than the run's
    said = done.stdout + done.stderr
    assert done.returncode == 78 and "config.yaml is missing" in said
    assert not old_run.config.exists(), "the right settings must still be welcome"


def test_damaged_records_of_one_run_do_not_hide_the_others(old_run: RunDir, command: Command) -> None:
    for name, record in {
        "a": {"step": "x", "loss": [], "spent_s": {}, "flags": [7]},
        "b": [],
        "c": {"format": "x"},
    }.items():
        folder = home(old_run) / "runs" / name
        folder.mkdir()
        (folder / "events.jsonl").touch()
        write_json(folder / "status.json", record)
    listed = command("runs", cwd=home(old_run))
    assert listed.returncode == 0, listed.stderr
    assert "23/60" in listed.stdout
    assert listed.stdout.count("0/?") == 3


# ---------------------------------------------------------------- what is not given


def resolved(*words: str, preset: str | None = None) -> config.Resolved:
    return resolve(preset, None, parse_overrides(list(words))[1])


def recorded(tmp_path: Path, *words: str, preset: str | None = None) -> Recorded:
    path = tmp_path / "config.yaml"
    path.write_text(dump(resolved(*words, preset=preset)))
    return read_dump(path)


def test_what_is_given_counts_and_the_rest_is_as_the_run_has_it(tmp_path: Path) -> None:
    before = recorded(tmp_path, "--train.lr", "0.01", "--save.keep", "7", "--train.epochs", "3")
    found, words = carry_over(resolved("--save.keep", "5"), before)
    assert (found.run.train.lr, found.run.save.keep, found.run.train.epochs, found.run.train.steps) == (
        0.01,
        5,
        3,
        None,
    )
    assert found.origin["train.lr"] == "command line"
    kept = "steps epochs optimizer lr min_lr_ratio schedule"
    assert [text.split()[0] for text in words] == [f"train.{name}" for name in kept.split()], (
        "a rate of one's own is AdamW's"
    )
    longer, _ = carry_over(resolved("--train.steps", "9"), before)
    assert (longer.run.train.steps, longer.run.train.epochs) == (9, None)
    given = ("--train.lr", "0.01", "--save.keep", "7", "--train.epochs", "3")
    same, words = carry_over(resolved(*given), before)
    assert same.run == before.run
    assert not words


def test_a_preset_with_newer_numbers_does_not_change_a_run_of_that_preset(tmp_path: Path) -> None:
    before = recorded(tmp_path, preset="slm")
    text = (tmp_path / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text.replace("  lr: 0.0003 ", "  lr: 0.0002 "))
    before = read_dump(tmp_path / "config.yaml")
    assert before.run.train.lr == 0.0002
    found, words = carry_over(resolved(preset="slm"), before)
    assert found.run == before.run
    assert words == ["train.lr 0.0002 (without it: 0.0003)"]
    with pytest.raises(
        BadConfig, match="micro_batch"
    ):  # what another preset gives does not go with the rest of this run
        carry_over(resolved(preset="demo"), before)
    given, _ = carry_over(resolved("--train.lr", "0.1", preset="slm"), before)
    assert given.run.train.lr == 0.1


@pytest.mark.parametrize(
    ("name", "value"),
    [("model.family", "evil:Model"), ("data.source", "evil:texts"), ("watch.notify", "touch x"), ("data.paths", "http://evil/x"),
     ("data.paths", "dataset:evil"), ("data.paths", "source:evil:texts")],
)  # fmt: skip
def test_code_commands_and_addresses_are_never_taken_from_a_run_folder(tmp_path: Path, name: str, value: str) -> None:
    found, _ = carry_over(resolved(), recorded(tmp_path, f"--{name}", value))
    section, field = name.split(".")
    assert getattr(getattr(found.run, section), field) == getattr(getattr(resolved().run, section), field)


def test_a_source_of_ones_own_is_asked_for_by_name(old_run: RunDir, here: Command) -> None:
    text = old_run.config.read_text()
    line = next(line for line in text.splitlines() if line.strip().startswith("source:"))
    old_run.config.write_text(text.replace(line, "  source: mine:docs # --data.source"))
    done = here("train", "--run", NAME, cwd=home(old_run))
    said = done.stdout + done.stderr
    assert done.returncode == 78 and "never taken from a run folder" in said and "--data.source mine:docs" in said


def test_a_hint_finds_a_run_that_is_not_in_the_usual_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunDir(Path("runs/a")).address == RunDir(tmp_path / "runs" / "a").address == "a"
    assert RunDir(Path("my runs/a")).address == "a --runs-dir 'my runs'"


def test_renamed_removed_and_added_fields_of_an_older_run_are_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config.schema, "RENAMED", {"train.rate": "train.lr", "looks.every": "eval.every_steps"})
    monkeypatch.setattr(config.schema, "REMOVED", {"train.magic": "it is always on", "gone.x": "nothing needs it"})
    monkeypatch.setattr(config.schema, "ADDED", {"train.beta2": 0.99})
    text = dump(resolved("--train.lr", "0.01"))
    lines = [line for line in text.splitlines() if not line.startswith(("  beta2:", "  lr:"))]
    place = lines.index("train:")
    lines[place + 1 : place + 1] = ["  rate: 0.01       # command line", "  magic: 3     # default"]
    lines += ["looks:", "  every: 77     # default", "gone:", "  x: 1    # default"]
    lines = [line for line in lines if line != "  every_steps: 250                       # default"]
    (tmp_path / "config.yaml").write_text("\n".join(lines) + "\n")
    before = read_dump(tmp_path / "config.yaml")
    assert (before.run.train.lr, before.run.train.beta2, before.run.eval.every_steps) == (0.01, 0.99, 77)
    assert before.origin["train.lr"] == "command line"
    assert before.dropped == (
        "train.magic (3 in this run) no longer exists: it is always on",
        "gone.x (1 in this run) no longer exists: nothing needs it",
    )
    found, _ = carry_over(resolved(), before)
    assert math.isclose(found.run.train.beta2, 0.99)


def test_every_line_of_the_table_of_old_fields_leads_somewhere() -> None:
    known = config.fields()
    assert all(new in known for new in (*config.schema.RENAMED.values(), *config.schema.ADDED))
    assert not any(old in known for old in (*config.schema.RENAMED, *config.schema.REMOVED))
