"""What follows from a few numbers: the sizes of a model from its layers, its batch and length from those; never over what is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamplighter.config import Resolved, dump, parse_overrides, read_dump, resolve
from lamplighter.config.recipe import fitting_rate, fitting_rows, fitting_tokens, misfits
from lamplighter.config.recorded import carry_over
from lamplighter.model.shape import Shape, count_parameters


def resolved(*words: str, preset: str | None = "modern") -> Resolved:
    rest, overrides = parse_overrides(list(words))
    assert not rest
    return resolve(preset, None, overrides)


def test_one_number_makes_a_model() -> None:
    for layers, width in ((2, 128), (6, 384), (12, 768), (24, 1536)):
        found = resolved("--model.layers", str(layers))
        assert (found.run.model.width, found.run.model.heads) == (width, width // 64)
        assert found.origin["model.width"] == f"derived: 64 for each of {layers} layers"
        run = found.run
        shape = Shape(
            "qwen3", run.tokenizer.vocab_size, run.data.seq_len, layers, width, width // 64, tie_embeddings=False
        )
        tokens = (run.train.steps or 0) * run.train.batch_size * run.data.seq_len
        assert tokens == pytest.approx(20 * count_parameters(shape), rel=0.05)


def test_larger_models_take_larger_batches_at_the_same_rate() -> None:
    runs = [resolved("--model.layers", str(layers)).run for layers in (2, 6, 12, 24)]
    assert all((run.train.micro_batch or run.train.batch_size) * run.data.seq_len <= 8192 for run in runs)
    batches = [run.train.batch_size for run in runs]
    assert batches == sorted(batches) and batches[0] < batches[-1]
    assert {run.train.lr for run in runs} == {0.02}


def test_what_is_given_is_never_derived() -> None:
    words = [
        "--model.width",
        "96",
        "--model.heads",
        "4",
        "--train.batch_size",
        "6",
        "--train.steps",
        "50",
        "--train.lr",
        "0.01",
    ]
    found = resolved(*words)
    run = found.run
    assert (run.model.width, run.model.heads, run.train.batch_size, run.train.steps, run.train.lr) == (
        96,
        4,
        6,
        50,
        0.01,
    )
    assert not [origin for origin in found.origin.values() if origin.startswith("derived")]
    epochs = resolved("--train.epochs", "2")
    assert epochs.run.train.steps is None and "train.steps" not in epochs.origin
    other = resolved("--model.layers", "8", "--model.family", "gpt2", preset=None)
    assert other.run.model.width == 384 and "model.width" not in other.origin, "gpt2 has no rule"
    assert (other.run.train.optimizer, other.run.train.schedule, other.run.train.lr) == ("adamw", "cosine", 3e-4)


def test_a_model_from_scratch_has_the_recipe_without_any_setting() -> None:
    found = resolved(preset=None)
    model, train = found.run.model, found.run.train
    assert (model.family, model.layers, model.width, model.heads, model.tie_embeddings) == ("qwen3", 6, 384, 6, False)
    assert (train.optimizer, train.lr, train.schedule, train.min_lr_ratio) == ("muon", 0.02, "wsd", 0.0)
    assert (train.steps, train.batch_size) == (2000, 16), "nobody asked for a size: nothing says how much may be spent"
    assert found.origin["train.optimizer"] == "derived: the recipe of a model from scratch"
    dial = resolved("--model.layers", "4", preset=None)
    assert dial.run == resolved("--model.layers", "4").run, "the preset says the same"


def test_what_is_not_from_scratch_keeps_adamw(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for words in (
        ["--model.init_from", str(tmp_path / "a")],
        ["--model.family", "llama"],
        ["--model.family", "mine:Model"],
    ):
        train = resolved(*words, preset=None).run.train
        assert (train.optimizer, train.lr, train.schedule, train.min_lr_ratio) == ("adamw", 3e-4, "cosine", 0.1)
    for preset in ("slm", "regular", "llama"):
        assert resolved(preset=preset).run.train.optimizer == "adamw"


def test_a_rate_alone_is_one_for_adamw_and_weights_in_parts_are_too() -> None:
    given = resolved("--train.lr", "1e-3", preset=None)
    assert (given.run.train.optimizer, given.run.train.schedule) == ("adamw", "cosine")
    assert given.origin["train.optimizer"] == "derived: train.lr is given without an optimizer"
    both = resolved("--train.lr", "0.01", "--train.optimizer", "muon", preset=None)
    assert (both.run.train.optimizer, both.run.train.lr, both.run.train.schedule) == ("muon", 0.01, "wsd")
    parts = resolved("--train.shard", "full", preset=None)
    assert parts.run.train.optimizer == "adamw" and "train.shard" in parts.origin["train.optimizer"]


def test_a_short_run_has_a_smaller_batch() -> None:
    assert resolved("--train.steps", "100").run.train.batch_size < resolved().run.train.batch_size
    assert fitting_rows(1e8, 256, 100, None) < fitting_rows(1e8, 256, 10_000, None)
    rows = fitting_rows(6e8, 512, 1000, None)
    assert fitting_tokens(6e8 * 1000 * rows * 512) == pytest.approx(rows * 512, rel=0.5), "both ways say the same"
    assert fitting_rate(1e13) > fitting_rate(1e18)


def test_a_wrong_number_is_refused_where_it_stands() -> None:
    from lamplighter.errors import BadConfig

    for words in (["--model.layers", "many"], ["--model.width", "100", "--model.heads", "7"], ["--data.seq_len", "x"]):
        with pytest.raises(BadConfig):
            resolved(*words)


def test_a_resumed_run_keeps_what_was_derived_then(tmp_path: Path) -> None:
    first = resolved("--model.layers", "2")
    (tmp_path / "config.yaml").write_text(dump(first))
    before = read_dump(tmp_path / "config.yaml")
    assert before.origin["model.width"].startswith("derived")
    again, words = carry_over(resolved("--model.layers", "2", "--train.steps", "9999"), before)
    assert again.run.train.batch_size == first.run.train.batch_size and again.run.train.steps == 9999
    assert any("train.batch_size" in word for word in words)


def test_what_does_not_fit_is_said_with_what_would() -> None:
    known = {"optimizer": "adamw", "batch_size": 16, "flops_per_token": 9.1e7, "step_tokens": 4096.0}
    (slow,) = misfits(lr=3e-4, steps=118, **known)
    assert "0.0003 is small for 118 steps" in slow and "--train.lr 0.006" in slow
    assert misfits(lr=2e-3, steps=118, **known) == []
    (fast,) = misfits(lr=0.2, steps=118, **known)
    assert "is large" in fast
    (large,) = misfits(lr=2e-3, steps=200, **{**known, "batch_size": 2048, "step_tokens": 524_288.0})
    assert "many for a run" in large and "--train.batch_size" in large
    assert misfits(lr=3e-4, steps=50, **known) == [], "a try"
    muon = {**known, "optimizer": "muon"}
    (small,) = misfits(lr=3e-4, steps=118, **muon)
    assert "0.02 is usual with Muon: --train.lr 0.02" in small and misfits(lr=0.04, steps=118, **muon) == []
    (absurd,) = misfits(lr=1.0, steps=30, **known)
    assert "is large for 30 steps" in absurd, "of a try, too"
