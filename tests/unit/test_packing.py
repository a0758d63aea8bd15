"""Packing: nothing lost, little padding, and the very losses of each example by itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lamplighter import report
from lamplighter.config import Data, validated
from lamplighter.data.batch_source import StepBatches
from lamplighter.data.batches import NO_TARGET, BatchLayout
from lamplighter.data.chat.example_cache import LEARNED, Examples, Side
from lamplighter.data.chat.packing import STRATEGIES, arrange, example_batches, fit, group, pack, padding_share
from lamplighter.errors import BadConfig, BadData
from lamplighter.model.build import Built
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer, next_token_loss
from lamplighter.model.weights import init_weights
from lamplighter.train.gradients import micro_batches, micro_loss
from lamplighter.train.hardware import Machine
from lamplighter.train.ranks import ALONE

PAD = 0


def source_like(count: int = 2000) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Lengths like those of the fine-tuning set that was padded to 1024: mean 34, p95 44, max 67."""
    rng = np.random.default_rng(5)
    lengths = np.clip(rng.normal(33.6, 6.2, count).round().astype(np.int64), 18, 60)
    lengths[:3] = 67
    return lengths


def side_of(lengths: Any, name: str = "train", prompt: int = 2, vocab: int = 50) -> Side:
    """Made-up examples: the first `prompt` tokens are a question, the last one is 1, the end mark."""
    rng = np.random.default_rng(len(lengths))
    lengths = np.asarray(lengths, np.int64)
    begin = np.cumsum(lengths) - lengths
    tokens = rng.integers(2, vocab, int(lengths.sum())).astype(np.uint32)
    tokens[begin + lengths - 1] = 1
    for start, length in zip(begin.tolist(), lengths.tolist(), strict=True):
        tokens[start + prompt : start + length] |= LEARNED
    learned = lengths - prompt
    return Side(
        name, tokens, begin, lengths, np.full_like(lengths, prompt), lengths - 1, learned, lengths * 4, learned * 4
    )


def examples_of(lengths: Any, val: Any = (5, 9)) -> Examples:
    return Examples(Path("nowhere"), {}, side_of(lengths), side_of(val, "val"))


def reference(lengths: list[int], seq_len: int) -> list[int]:
    """Best fit, longest first, one by one: the room that is left in each window."""
    room: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(left, place) for place, left in enumerate(room) if left >= length]
        if fitting:
            room[min(fitting)[1]] -= length
        else:
            room.append(seq_len - length)
    return sorted(room)


# ---------------------------------------------------------------- the assignment


@pytest.mark.parametrize("trial", range(12))
def test_packing_is_best_fit_and_loses_nothing(trial: int) -> None:
    rng = np.random.default_rng(trial)
    seq_len = int(rng.integers(50, 130))
    lengths = rng.integers(1, 51, int(rng.integers(1, 300)))
    packed = pack(lengths, seq_len, seed=trial)
    assert sorted(packed.members.tolist()) == list(range(len(lengths)))
    used = np.add.reduceat(lengths[packed.members], packed.starts[:-1])
    assert sorted((seq_len - used).tolist()) == reference(lengths.tolist(), seq_len)


def test_packing_is_decided_by_lengths_and_seed_alone() -> None:
    lengths = source_like()
    one, same, other = pack(lengths, 256, 3), pack(lengths, 256, 3), pack(lengths, 256, 4)
    assert np.array_equal(one.members, same.members) and np.array_equal(one.starts, same.starts)
    assert not np.array_equal(one.members, other.members)
    assert one.windows == other.windows


def test_packing_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="do not fit windows of 10"):
        pack(np.array([3, 11]), 10)


def test_groups_hold_each_example_once_per_epoch_and_differ_between_epochs() -> None:
    lengths = source_like(1000)
    first, second = group(lengths, 32, 7, 0), group(lengths, 32, 7, 1)
    for batches in (first, second):
        assert sorted(batches.members.tolist()) == list(range(1000))
        assert sorted(np.diff(batches.starts).tolist()) == [1000 % 32] + [32] * 31
    assert not np.array_equal(first.members, second.members)
    assert np.array_equal(first.members, group(lengths, 32, 7, 0).members)


# ---------------------------------------------------------------- padding


def test_the_padding_of_each_strategy_on_the_set_that_was_padded_to_1024() -> None:
    lengths = source_like()
    share = {strategy: padding_share(lengths, strategy, 1024, 2) for strategy in STRATEGIES}
    assert lengths.mean() == pytest.approx(34, abs=0.5) and lengths.max() == 67
    assert share["to seq_len"] == pytest.approx(0.967, abs=0.002)
    assert share["packed"] <= 0.05
    assert padding_share(lengths, "packed", 256, 8) <= 0.05
    assert share["packed"] < share["grouped"] < share["to 128-multiple"] < share["to seq_len"]
    assert 0 < share["dynamic"] < share["to 128-multiple"]


def test_padding_by_hand() -> None:
    lengths = np.array([4, 4, 8, 16])
    assert padding_share(lengths, "to seq_len", 16, 2) == 0.5
    assert padding_share(lengths, "packed", 16, 2) == 0.0
    assert padding_share(lengths, "grouped", 16, 4) == 0.5
    assert padding_share(np.array([500]), "to 128-multiple", 256, 1) == 0.0, "longer ones count as seq_len"
    assert padding_share(np.array([], np.int64), "packed", 16, 2) == 0.0
    with pytest.raises(ValueError, match="none of to seq_len"):
        padding_share(lengths, "tight", 16, 2)


# ---------------------------------------------------------------- batches


def feed_of(lengths: Any, how: str, batch_size: int = 4, seq_len: int = 32, **more: Any) -> StepBatches:
    options = {"over_length": "truncate", "learn_all": False, **more}
    sides = [fit(side, seq_len, **options) for side in (side_of(lengths), side_of([5, 9, 30, 7], "val"))]
    return example_batches(sides[0], sides[1], how, BatchLayout(3, batch_size, seq_len, PAD))


@pytest.mark.parametrize("how", ["packed", "grouped", "windows"])
def test_every_answer_token_is_a_target_once_per_epoch(how: str) -> None:
    lengths = np.random.default_rng(0).integers(4, 33, 100)
    feed = feed_of(lengths, how, batch_size=1)
    steps = feed.facts.steps_for(1)
    assert steps == feed.facts.samples and feed.facts.epochs(steps) == 1.0
    batches = [feed.make(step) for step in range(1, steps + 1)]
    targets = np.concatenate([batch.targets[batch.targets != NO_TARGET] for batch in batches])
    side = side_of(lengths)
    expected = side.tokens[side.tokens >= LEARNED] & ~LEARNED
    assert sorted(targets.tolist()) == sorted(expected.tolist())
    assert sum(batch.real_tokens for batch in batches) == len(expected)
    assert sum(batch.filled for batch in batches) == int((lengths - 1).sum()), "padding is counted apart from prompts"
    padding = 1 - sum(batch.filled for batch in batches) / sum(batch.targets.size for batch in batches)
    assert padding == pytest.approx(feed.facts.padding), "what was said before the first step"


@pytest.mark.parametrize("how", ["packed", "grouped"])
def test_a_batch_is_a_pure_function_of_seed_and_step(how: str) -> None:
    lengths = np.random.default_rng(1).integers(4, 33, 60)
    one, two = feed_of(lengths, how), feed_of(lengths, how)
    ahead = {step: one.make(step) for step in (40, 3, 1, 17, 2)}
    for step in (1, 2, 3, 17, 40):
        again = two.make(step)
        assert np.array_equal(again.inputs, ahead[step].inputs) and np.array_equal(again.targets, ahead[step].targets)
        assert again.epoch == ahead[step].epoch == one.facts.epochs(step)
    assert one.facts.fingerprint == two.facts.fingerprint


def test_grouped_batches_are_as_long_as_their_longest_rounded_up_to_a_pair() -> None:
    feed = feed_of([5] * 8 + [30] * 8, "grouped", batch_size=8)
    assert sorted(feed.make(step).inputs.shape for step in (1, 2)) == [(8, 4), (8, 30)]
    assert feed.facts.steps_per_epoch == 2 and feed.facts.noun == "examples"


# ---------------------------------------------------------------- too long


def test_truncation_is_counted() -> None:
    side = side_of([10, 41, 20])
    cut = fit(side, 16, "truncate", learn_all=False)
    assert (len(cut), cut.cut, cut.cut_tokens, cut.dropped) == (3, 2, (40 - 16) + (19 - 16), 0)
    assert cut.targets.tolist() == [8, 15, 15] and cut.positions.tolist() == [9, 16, 16]
    dropped = fit(side, 16, "drop", learn_all=False)
    assert (len(dropped), dropped.cut, dropped.dropped) == (1, 0, 2)
    with pytest.raises(BadData, match=r"2 of 3 examples are longer than data\.seq_len 16") as error:
        fit(side, 16, "refuse", learn_all=False)
    assert "--data.seq_len 64" in error.value.next
    prompts = fit(side_of([10, 41], prompt=20), 16, "truncate", learn_all=False)
    assert prompts.unlearnable == 2 and len(prompts) == 0
    with pytest.raises(BadData, match="no example is left"):
        example_batches(prompts, prompts, "packed", BatchLayout(1, 2, 16, PAD))


# ---------------------------------------------------------------- the losses


def small(family: str) -> Transformer:
    shape = Shape(family=family, vocab_size=50, positions=48, layers=2, width=32, heads=4, kv_heads=2 if family == "llama" else 0)  # type: ignore[arg-type]  # fmt: skip
    model = Transformer(shape)
    init_weights(model, 1)
    with torch.no_grad():  # far from flat, so that a leak between examples would show
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model.eval()


@torch.no_grad()
def losses_one_by_one(model: Transformer, side: Side) -> list[float]:
    found = []
    for number in range(side.examples):
        ids = torch.from_numpy(side.ids(number))
        targets = ids[1:].clone()
        targets[: int(side.first_answer[number]) - 1] = NO_TARGET
        found.append(float(next_token_loss(model(ids[None, :-1]), targets[None])))
    return found


@pytest.mark.parametrize("how", ["packed", "grouped", "windows"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_each_example_has_the_loss_that_it_has_alone(family: str, how: str) -> None:
    model, lengths = small(family), [5, 9, 30, 7, 12, 3, 22, 8, 14, 40]
    alone = losses_one_by_one(model, side_of(lengths))
    feed = feed_of(lengths, how, batch_size=2, seq_len=48)
    by_length = dict(zip(lengths, alone, strict=True))
    seen = 0
    for step in range(1, feed.facts.steps_for(1) + 1):
        batch = feed.make(step)
        with torch.no_grad():
            segments = None if batch.segments is None else torch.from_numpy(batch.segments)
            logits = model(torch.from_numpy(batch.inputs), segments_BT=segments)
        total = float(next_token_loss(logits, torch.from_numpy(batch.targets)))
        for row in range(len(batch.inputs)):
            ends = np.flatnonzero(batch.targets[row] == 1)  # the end mark of each example
            begins = [0, *(ends[:-1] + 1)]
            for begin, end in zip(begins, ends, strict=True):
                mine = float(next_token_loss(logits[row : row + 1, begin : end + 1], torch.from_numpy(batch.targets[row : row + 1, begin : end + 1])))  # fmt: skip
                assert mine == pytest.approx(by_length[int(end - begin) + 2], abs=1e-5, rel=1e-5)
                seen += 1
        assert total > 0
    assert seen >= len(lengths)


@pytest.mark.parametrize("micro", [1, 2])
def test_the_training_loop_has_the_mean_of_those_losses(micro: int) -> None:
    model, lengths = small("gpt2"), [5, 9, 30, 7, 12, 3, 22, 8, 14, 40]
    alone = sum(losses_one_by_one(model, side_of(lengths)))
    feed = feed_of(lengths, "packed", batch_size=3, seq_len=48)
    assert feed.facts.samples == 3, "one batch is the whole epoch"
    batch = feed.make(1)
    run = validated({"train": {"batch_size": 3, "micro_batch": micro, "steps": 1}})
    where = Machine(torch.device("cpu"), torch.float32, 1, "a CPU", peak_flops=1e9, reasons=())
    context: Any = SimpleNamespace(run=run, machine=where, model=model, loss_scale=None, world=ALONE)
    with torch.no_grad():
        loss = sum(float(micro_loss(context, batch, rows)) for rows in micro_batches(batch, micro))
    assert loss == pytest.approx(alone / sum(length - 2 for length in lengths), abs=1e-5)


def test_loss_on_all_learns_the_questions_too() -> None:
    lengths = [5, 9, 30]
    batches = [feed_of(lengths, how, batch_size=8, seq_len=48, learn_all=True).make(1) for how in ("grouped", "packed")]
    assert batches[0].real_tokens == batches[0].filled == sum(lengths) - 3
    assert batches[1].real_tokens == batches[1].filled


def test_packed_without_segments_would_be_another_loss() -> None:
    """The net of the test above: it can fail."""
    model, lengths = small("llama"), [5, 9, 30, 7]
    feed = feed_of(lengths, "packed", batch_size=2, seq_len=48)
    batch = feed.make(1)
    ids, targets = torch.from_numpy(batch.inputs), torch.from_numpy(batch.targets)
    assert batch.segments is not None
    with torch.no_grad():
        segments = torch.from_numpy(batch.segments)
        apart, leaking = (float(next_token_loss(model(ids, segments_BT=s), targets)) for s in (segments, None))
    assert abs(apart - leaking) > 0.01


# ---------------------------------------------------------------- what is chosen, and what is said


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    monkeypatch.setattr(report._reporter, "event", lambda type, **fields: events.append({"type": type, **fields}))
    return events


def verdicts(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in said if event["type"] == "verdict"]


def test_97_percent_padding_is_avoided_and_said_with_the_speed_up(said: list[dict[str, Any]]) -> None:
    feed = arrange(examples_of(source_like()), Data(seq_len=1024), BatchLayout(1, 8, 1024, PAD), takes_segments=True)
    (verdict,) = verdicts(said)
    assert (verdict["state"], verdict["cause"], verdict["action"]) == ("waste", "padding", "fallback")
    assert "is 97% padding" in verdict["why"] and "x less work" in verdict["why"]
    assert "data.packing packed was chosen by auto" in verdict["next"]
    assert feed.facts.padding <= 0.05 and verdict["culprit"]["speed_up"] > 25
    assert any("nothing is cut" in str(event.get("text")) for event in said)


def test_a_forced_waste_is_a_verdict_with_the_remedy(said: list[dict[str, Any]]) -> None:
    feed = arrange(
        examples_of(source_like()),
        Data(seq_len=1024, packing="windows"),
        BatchLayout(1, 8, 1024, PAD),
        takes_segments=True,
    )
    (verdict,) = verdicts(said)
    assert (verdict["state"], verdict["cause"], verdict["action"]) == ("waste", "padding", "none")
    assert verdict["next"] == "--data.packing packed" and feed.facts.padding > 0.96


def test_windows_that_fit_badly_get_another_length(said: list[dict[str, Any]]) -> None:
    arrange(examples_of([131] * 64), Data(seq_len=256), BatchLayout(1, 8, 256, PAD), takes_segments=True)
    (verdict,) = verdicts(said)
    assert "fill windows of 256 badly" in verdict["why"] and verdict["next"].startswith("--data.seq_len ")
    length = int(verdict["next"].split()[1])
    assert padding_share(np.full(64, 130), "packed", length, 8) < 0.2


def test_examples_that_are_all_cut_never_end(said: list[dict[str, Any]]) -> None:
    arrange(examples_of([40] * 20), Data(seq_len=16), BatchLayout(1, 4, 16, PAD), takes_segments=True)
    assert [v["cause"] for v in verdicts(said) if v["state"] == "broken"] == ["eos_not_trained"]
    assert any("20 (100.0%) are cut, 460 tokens lost" in str(event.get("text")) for event in said)


def test_a_model_without_segments_gets_batches_of_like_length(said: list[dict[str, Any]]) -> None:
    examples = examples_of(source_like(200))
    assert arrange(examples, Data(), BatchLayout(1, 8, 256, PAD), takes_segments=False).facts.noun == "examples"
    assert any("forward has no segments_BT" in str(event.get("text")) for event in said)
    with pytest.raises(BadConfig, match="packed cannot be used") as error:
        arrange(examples, Data(packing="packed"), BatchLayout(1, 8, 256, PAD), takes_segments=False)
    assert "grouped" in error.value.next

    class Own(torch.nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return ids

    assert not Built(Own(), {}, 50, 48).takes_segments
    assert Built(small("gpt2"), {}, 50, 48).takes_segments
