"""lamp doctor, model: real models on real batches, each ill in one way; the five source systems are named by what ailed them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from doctor_context import SICK, all_of, context, examine
from lamplighter.doctor import model, model_cost, sample_data
from lamplighter.doctor.model import learning
from lamplighter.doctor.model_cost import compiling, memory, one_step, precision
from lamplighter.model.lora import LoraLinear
from lamplighter.model.shape import Shape, count_parameters
from lamplighter.procs.child import Outcome
from running import shared


@pytest.fixture(autouse=True)
def among_the_sick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(SICK)
    torch.set_num_threads(1)


# ---------------------------------------------------------------- sound ones


def test_a_sound_model_is_told_with_its_figures(tmp_path: Path) -> None:
    found = all_of(one_step, context(tmp_path))
    assert [one.level for one in found] == ["ok"] * len(found)
    by_figure = {name: value for one in found for name, value in one.figures.items()}
    assert by_figure["parameters"] == count_parameters(Shape("gpt2", 257, 32, 2, 32, 2))
    assert by_figure["tokens_per_s"] > 0
    assert "300 documents" in found[1].why
    assert "4 x 32 tokens, the whole micro-batch" in found[1].why


@pytest.mark.parametrize("words", [(), ("--model.family", "models:Well"), ("--model.family", "llama")])
def test_sound_models_can_learn(tmp_path: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "OVERFIT_S", 120.0)  # a busy machine makes few steps in a few seconds
    found = all_of(learning, context(tmp_path, *words))
    assert [one.level for one in found] == ["ok"] * 5, [one.what for one in found if one.level != "ok"]
    assert found[-1].figures["last_loss"] < 0.8 * found[-1].figures["first_loss"]


@pytest.mark.parametrize("packing", ["packed", "grouped"])
def test_adapters_on_preference_pairs_are_sound(tmp_path: Path, packing: str) -> None:
    """At its start B of an adapter is zero, so A has no gradient: that is no fault. Pairs begin at ln 2."""
    rows = [{"prompt": f"Add {n} and 1.", "chosen": f"It is {n + 1}.", "rejected": "No idea."} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = str(shared("models", "stories260K_hf_llama"))
    words = ["--model.init_from", base, "--lora.r", "2", "--train.objective", "dpo", "--data.template", "plain"]
    words += ["--data.paths", str(tmp_path / "rows.jsonl"), "--data.packing", packing, "--data.seq_len", "128"]
    who = context(tmp_path, *words, "--train.batch_size", "2")
    found = all_of(learning, who)
    assert [one.level for one in found] == ["ok"] * 6, [one.what for one in found if one.level != "ok"]
    by_figure = {name: value for one in found for name, value in one.figures.items()}
    assert abs(by_figure["pair_loss"] - math.log(2)) < 1e-4
    assert any("gradients reach all 20 parameter tensors" in one.what for one in found), "B of 20 layers"
    biggest = all_of(memory, who)[-1]
    assert ("4 x" if packing == "grouped" else "2 x") in biggest.what, "two rows of a pair, or one window"


def test_adapters_without_a_gradient_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraLinear, "forward", lambda self, x: self.base_layer(x) + 0 * self.lora_B(self.lora_A(x)))
    base = str(shared("models", "stories260K_hf_llama"))
    words = ["--model.init_from", base, "--lora.r", "2", "--data.paths", str(tmp_path / "rows.jsonl")]
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}", "completion": "so"}}\n' for n in range(60)))
    found = examine(learning, context(tmp_path, *words, "--data.template", "plain"))
    assert found["no_gradient"].level == "fault" and "20 of 20" in found["no_gradient"].what


def test_no_loop_is_cried_where_there_is_none(tmp_path: Path) -> None:
    assert not examine(one_step, context(tmp_path, "--model.family", "models:Well"))


# ---------------------------------------------------------------- the source systems


def test_a_model_that_cannot_learn_stands_at_ln_vocab(tmp_path: Path) -> None:
    """System A."""
    found = examine(learning, context(tmp_path, "--model.family", "models:Detached"))
    assert found["no_gradient"].level == "fault"
    assert "embed.weight" in found["no_gradient"].what
    assert "ln(vocab)" in found["not_learning"].what
    assert found["not_learning"].level == "fault"


def test_a_loss_that_hangs_on_nothing_is_named(tmp_path: Path) -> None:
    who = context(tmp_path, "--model.family", "models:Frozen")
    assert set(examine(learning, who)) == set(examine(one_step, who)) == {"not_learning"}


def test_a_model_that_is_too_slow_to_judge_is_not_called_ill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "AT_MOST_S", 0.0)
    monkeypatch.setattr(model, "SLOW_S", 0.0)
    found = all_of(learning, context(tmp_path))[-1]
    assert found.level == "ok"
    assert "1 steps only" in found.what


def test_a_stream_that_blocks_does_not_keep_the_model_from_being_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """System A."""
    monkeypatch.setattr(sample_data, "QUIET_S", 0.5)
    found = all_of(one_step, context(tmp_path, "--data.source", "streams:blocks"))
    assert "random ids" in found[0].what
    assert found[0].level == "warn"
    assert "parameters" in found[1].what
    assert len(found) > 3


def test_a_leak_and_a_loop_over_tokens_are_named(tmp_path: Path) -> None:
    """System B; situations 15 and 29."""
    who = context(tmp_path, "--model.family", "models:Leaky")
    leak = examine(learning, who)["future_leak"]
    assert leak.level == "fault"
    assert leak.culprit == {"position": 0, "changed": 1}
    loop = examine(one_step, who)["python_loop"]
    assert loop.level == "fault"
    lines = (SICK / "models.py").read_text().splitlines()
    leaky = next(n for n, line in enumerate(lines, 1) if "class Leaky" in line)
    assert loop.culprit["line"] == next(n for n, line in enumerate(lines, 1) if "# the loop" in line and n > leaky)
    assert loop.figures["runs"] == 32
    assert loop.figures["share"] > 0.5


def test_a_loop_over_tokens_is_named_and_the_compiler_advised_against(tmp_path: Path) -> None:
    """System D."""
    found = examine(one_step, context(tmp_path, "--model.family", "models:Looped", "--train.compile", "true"))
    assert found["python_loop"].settings == {"train.compile": False}
    assert "32 times per forward" in found["python_loop"].what


def test_parameters_are_counted_whatever_the_label_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """System E: its 117M were not 117M."""
    monkeypatch.setattr(model_cost, "_step", lambda *_: iter(()))
    words = ["--model.layers", "12", "--model.width", "768", "--model.heads", "12", "--data.seq_len", "512"]
    words += ["--tokenizer.kind", "bpe", "--tokenizer.vocab_size", "30000"]
    found = all_of(one_step, context(tmp_path, *words))[0]
    assert "108.5M" in found.what


# ---------------------------------------------------------------- other ills


def test_unused_parts_and_a_random_eval_are_named(tmp_path: Path) -> None:
    found = examine(learning, context(tmp_path, "--model.family", "models:Unused"))
    assert "forgotten.weight" in found["no_gradient"].what
    assert "eval_random" in found


def test_an_init_that_is_too_large_and_one_that_is_not_a_number(tmp_path: Path) -> None:
    assert "init_too_large" in examine(learning, context(tmp_path, "--model.family", "models:Large"))
    found = examine(learning, context(tmp_path, "--model.family", "models:Broken"))
    assert found["nan_batch"].level == "fault"
    assert examine(one_step, context(tmp_path, "--model.family", "models:Broken"))["nan_batch"].level == "fault"


@pytest.mark.parametrize("name", ["Small", "Narrow"])
def test_an_embedding_or_a_head_that_is_smaller_than_the_tokenizer(tmp_path: Path, name: str) -> None:
    found = examine(one_step, context(tmp_path, "--model.family", f"models:{name}"))["token_range"]
    assert found.level == "fault"
    assert "257" in found.what


def test_of_a_model_that_does_not_fit_some_layers_are_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "available_bytes", lambda: 16 * 30_000)
    found = all_of(one_step, context(tmp_path, "--model.layers", "8"))
    assert "with 1 of its 8 layers" in found[0].what
    assert found[-1].level == "ok"


def test_a_model_that_cannot_be_built_is_named(tmp_path: Path) -> None:
    found = all_of(one_step, context(tmp_path, "--model.family", "models:Absent"))
    assert [one.level for one in found] == ["fault"]


def test_weights_with_a_tokenizer_that_is_not_theirs_guess_worse_than_chance(tmp_path: Path) -> None:
    from lamplighter.model.build import Built

    who = context(tmp_path, "--model.init_from", str(tmp_path))
    lying = model.ModelFixture(who.run, None, Built(torch.nn.Linear(1, 1), {}, 1000, 8), None, "")  # type: ignore[arg-type]
    assert model.first_loss(lying, 9.0).cause == "tokenizer_differs"
    assert model.first_loss(lying, 3.0).level == "ok"


# ---------------------------------------------------------------- precision and memory


def test_the_longest_micro_batch_is_measured(tmp_path: Path) -> None:
    (found,) = memory(context(tmp_path))
    assert found.level == "ok"
    assert "whole micro-batch of 4" in found.why
    assert 0 < found.figures["peak_bytes"] < found.figures["available_bytes"]


def test_a_micro_batch_that_cannot_fit_is_told_before_it_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cost, "_available", lambda _: 200_000_000)
    (found,) = memory(context(tmp_path))
    assert found.cause == "rss_oom"
    assert found.settings["train.micro_batch"] < 4
    own = next(iter(memory(context(tmp_path, "--model.family", "models:Well"))))
    assert own.cause == "rss_oom"
    assert "rows" in own.why


def test_bf16_is_compared_or_said_to_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cost.bf16, "cpu_has_it", lambda: False)
    (absent,) = precision(context(tmp_path, "--train.dtype", "bf16"))
    assert absent.level == "fault"
    assert absent.settings == {"train.dtype": "fp32"}
    monkeypatch.setattr(model_cost.bf16, "cpu_has_it", lambda: True)
    monkeypatch.setattr(model_cost.bf16, "make_it_work", lambda: False)
    (dies,) = precision(context(tmp_path))
    assert dies.level == "ok"
    assert "died" in dies.what


# ---------------------------------------------------------------- the compiler


def _outcome(code: int | None, *records: dict[str, object]) -> Outcome:
    return Outcome(list(records), code or 0, 40.0, "", 1, ended_for="" if code is not None else "deadline")


def test_the_compiler_is_judged_by_what_its_trial_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    who, without = context(tmp_path, "--train.compile", "true"), context(tmp_path)

    def judged(outcome: Outcome, which: object = who) -> list[object]:
        monkeypatch.setattr(model_cost.child, "run", lambda *_, **__: outcome)
        (found,) = compiling(which)  # type: ignore[arg-type]
        return [found.level, found.cause, found.settings]

    off = {"train.compile": False}
    assert judged(_outcome(None, {"now": "compiling", "own": True})) == ["fault", "compile_slow", off]
    assert judged(_outcome(0, {"error": "Unsupported"})) == ["fault", "compile_failed", off]
    assert judged(_outcome(-11)) == ["fault", "compile_failed", off]
    slower = {"eager_s": 0.1, "compiled_s": 0.2, "compile_s": 9.0, "words": "4 x 32 tokens"}
    assert judged(_outcome(0, slower)) == ["warn", "compile_slow", off]
    assert judged(_outcome(0, slower), without) == ["ok", "", {}]
    assert judged(_outcome(None), without)[0] == "ok"
