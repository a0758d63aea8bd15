"""Config: layers, provenance, nearest matches, ranges with advice, drift."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from lamplighter import config
from lamplighter.config import drift, dump, load_dump, names, parse_overrides, resolve
from lamplighter.errors import BadConfig, InputMissing, LampError, UsageError


def from_words(*words: str, preset: str | None = None, file: Path | None = None) -> config.Resolved:
    return resolve(preset, file, parse_overrides(list(words))[1])


def test_layers_lie_over_each_other_and_remember_where_they_came_from(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("train:\n  lr: 3e-4\n  batch_size: 8\nmodel:\n  layers: 3\n")
    found = from_words("--train.batch-size", "4", preset="demo", file=file)
    assert found.run.train.lr == 3e-4
    assert found.run.train.batch_size == 4
    assert found.run.model.layers == 3
    assert found.run.model.width == 192
    assert found.origin["train.lr"] == "my.yaml:2"
    assert found.origin["model.layers"] == "my.yaml:5"
    assert found.origin["train.batch_size"] == "command line"
    assert found.origin["model.width"] == "derived: 64 for each of 3 layers"
    assert found.origin["data.seq_len"] == "preset demo"


def test_names_of_a_list_may_stand_with_commas_and_paths_keep_theirs() -> None:
    for words in (("csv,tensorboard",), ("csv", "tensorboard"), ("csv,", "tensorboard")):
        assert from_words("--track.to", *words).run.track.to == ["csv", "tensorboard"]
    assert from_words("--data.paths", "a,b.txt").run.data.paths == ["a,b.txt"]
    with pytest.raises(BadConfig, match=r"track\.to"):
        from_words("--track.to", "csv,aim")


@pytest.mark.parametrize("text", ["3e-4", "3E-4", "0.0003", "3.0e-04"])
def test_3e_4_in_yaml_is_a_number(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(f"train: {{lr: {text}}}\n")
    assert from_words(file=file).run.train.lr == 3e-4


def test_the_dump_reads_back_as_the_same_run(tmp_path: Path) -> None:
    found = from_words("--data.paths", "a b.txt", "c:d.txt", "--data.separator", "\n# x: y\n", preset="slm")
    file = tmp_path / "config.yaml"
    file.write_text(dump(found))
    assert load_dump(file) == found.run
    assert "# preset slm" in file.read_text()


@pytest.mark.parametrize(
    ("flag", "meant"),
    [("--train.lrr", "--train.lr"), ("--train.learning-rate", "--train.lr"), ("--data.max_seq_length", "--data.seq_len"),
     ("--model.n_layer", "--model.layers"), ("--save.evry_steps", "--save.every_steps"), ("--trian.seed", "--train.seed")],
)  # fmt: skip
def test_an_unknown_field_on_the_command_line_names_the_nearest(flag: str, meant: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_overrides([flag, "3"])
    assert caught.value.code == 2
    assert meant in caught.value.why
    assert len(caught.value.lines()) == 3


@pytest.mark.parametrize(
    ("name", "meant"),
    [("max_seq_length", "data.seq_len"), ("learning_rate", "train.lr"), ("no_pretokenized", "data.cache"),
     ("resume_from_checkpoint", "--resume"), ("max_iters", "train.steps"), ("gradient_accumulation_steps", "train.micro_batch"),
     ("output_dir", "--runs-dir")],
)  # fmt: skip
def test_names_of_other_trainers_are_understood(name: str, meant: str) -> None:
    assert names.nearest(name) == meant


def test_an_unknown_key_in_yaml_is_an_error_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("train:\n  lr: 1e-3\n  batchsize: 3\n")
    with pytest.raises(BadConfig) as caught:
        from_words(file=file)
    assert caught.value.code == 78
    assert "bad.yaml:3" in caught.value.what
    assert "train.batch_size" in caught.value.why


def test_an_unknown_section_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text("trian: {lr: 1}\n")
    with pytest.raises(BadConfig, match="trian is not a section") as caught:
        from_words(file=file)
    assert "train" in caught.value.why


@pytest.mark.parametrize(
    ("words", "part"),
    [(["--train.lr", "7"], "usual"), (["--train.lr", "abc"], "number"), (["--model.dropout", "1.5"], "dropout"),
     (["--model.heads", "5"], "multiple"), (["--train.steps", "3.5"], "integer"), (["--data.cache", "maybe"], "auto"),
     (["--train.micro_batch", "99"], "larger"), (["--model.family", "lama"], "llama"), (["--budget.usd", "5"], "usd_per_hour")],
)  # fmt: skip
def test_a_value_out_of_range_is_an_error_with_advice(words: list[str], part: str) -> None:
    with pytest.raises(BadConfig) as caught:
        from_words(*words)
    assert caught.value.code == 78
    assert part in " ".join(caught.value.lines())


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(InputMissing):
        from_words(file=tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("train: [1, 2\n")
    with pytest.raises(BadConfig, match="not valid YAML"):
        from_words(file=broken)
    broken.write_text("- a\n- b\n")
    with pytest.raises(BadConfig, match="mapping"):
        from_words(file=broken)


def test_steps_on_the_command_line_replace_epochs_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.write_text("train: {epochs: 3}\n")
    assert from_words(file=file).run.train.steps is None
    found = from_words("--train.steps", "7", file=file).run.train
    assert (found.steps, found.epochs) == (7, None)
    with pytest.raises(LampError, match="both given"):
        from_words("--train.steps", "7", "--train.epochs", "2")


def test_a_list_field_takes_many_words_and_a_switch_needs_none() -> None:
    rest, found = parse_overrides(
        ["my.yaml", "--data.paths", "a.txt", "b.txt", "--train.compile", "--test", "--train.seed=5"]
    )
    assert rest == ["my.yaml", "--test"]
    assert found == {"data.paths": ["a.txt", "b.txt"], "train.compile": ["true"], "train.seed": ["5"]}


def test_test_makes_every_preset_small_and_valid() -> None:
    for preset in config.preset_names():
        found = resolve(preset, None, {}, test=True)
        assert found.run.train.steps is not None
        assert found.run.train.steps <= 10
        assert found.run.model.width <= 256
        assert found.origin["train.steps"] == "--test"
        assert found.run.eval.limit is None
    for given, most in ((None, 20), (7, 7), (900, 20)):
        asked = {"eval.tasks": ["held-back,piqa"]} | ({"eval.limit": [str(given)]} if given else {})
        assert resolve("demo", None, asked, test=True).run.eval.limit == most


def test_drift_names_what_may_not_change() -> None:
    old = from_words(preset="slm").run
    assert (
        drift(old, from_words("--save.keep", "9", "--train.steps", "999", "--data.cache", "require", preset="slm").run)
        == []
    )
    changes = drift(old, from_words("--train.lr", "0.1", "--model.layers", "9", preset="slm").run)
    assert changes == ["model.layers: 12 -> 9", "train.lr: 0.0003 -> 0.1"]


def test_the_presets_carry_the_numbers_of_the_source_documents() -> None:
    slm, regular = from_words(preset="slm").run, from_words(preset="regular").run
    assert (slm.model.layers, slm.model.width, slm.model.heads, slm.tokenizer.vocab_size) == (12, 768, 12, 30000)
    assert (slm.data.seq_len, slm.train.batch_size, slm.train.micro_batch, slm.train.lr) == (512, 36, 18, 3e-4)
    assert (slm.train.steps, slm.save.every_steps, slm.model.dropout) == (60000, 500, 0.1)
    assert (regular.model.layers, regular.model.width, regular.model.heads, regular.data.seq_len) == (
        24,
        1024,
        16,
        1024,
    )
    assert (regular.train.batch_size, regular.train.micro_batch, regular.train.lr) == (16, 2, 3e-5)
    assert (regular.train.steps, regular.save.every_steps) == (60000, 250)


def test_the_budget_counts_the_nearest_limit() -> None:
    budget = from_words("--budget.usd", "2", "--budget.usd_per_hour", "4", "--budget.hours", "1").run.budget
    assert budget.left_s(600) == pytest.approx(1200)
    assert budget.spent_usd(900) == pytest.approx(1.0)
    assert config.Budget().left_s(1e9) == float("inf")


def test_a_flag_given_twice_is_replaced_and_a_list_grows() -> None:
    words = ["--save.every_steps", "0", "--data.paths", "a", "--save.every_steps", "1", "--data.paths", "b"]
    assert parse_overrides(words)[1] == {"save.every_steps": ["1"], "data.paths": ["a", "b"]}


def test_weights_without_paths_are_not_passed_over() -> None:
    with pytest.raises(BadConfig, match=r"data\.weights"):
        from_words("--data.weights", "[1, 2]")


@pytest.mark.parametrize("name", ["texts", "a.jsonl", "b.csv.gz", "large.json"])
def test_text_in_the_place_of_a_run_yaml_is_told_where_text_goes(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix:
        path.write_text('{"text": "a"}\n' * 100_000)
    else:
        path.mkdir()
    with pytest.raises(UsageError, match=r"run\.yaml") as caught:
        resolve(None, path, {})
    assert f"--data.paths {shlex.quote(str(path))}" in caught.value.next
