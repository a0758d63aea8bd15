"""Preference pairs: rows, whole pairs in every micro-batch, the loss by other arithmetic, red flags, the reference cache."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from lamplighter import report
from lamplighter.config import Data, validated
from lamplighter.data.batches import NO_TARGET, Batch, BatchLayout
from lamplighter.data.chat import example_cache
from lamplighter.data.chat.example_cache import LEARNED, Examples, Side
from lamplighter.data.chat.pairs import arrange_pairs
from lamplighter.data.chat.rows import find_rows, kind_of_row, pair_of
from lamplighter.data.chat.template import load_template
from lamplighter.data.chat.tool_calls import NotAnExample
from lamplighter.data.token_estimate import estimate_tokens
from lamplighter.data.tokenizer import byte_level
from lamplighter.errors import BadConfig, BadData
from lamplighter.model.chunked_loss import LossBuffers, token_nats
from lamplighter.model.shape import Shape
from lamplighter.model.transformer import Transformer
from lamplighter.model.weights import init_weights
from lamplighter.train.anomalies.detector import Detector
from lamplighter.train.anomalies.history import Facts
from lamplighter.train.gradients import batch_loss, micro_batches
from lamplighter.train.preference import CHANCE, Notes
from lamplighter.train.ranks import ALONE

ASKED = [{"role": "user", "content": "Who?"}]
GOOD, BAD = [{"role": "assistant", "content": "Me."}], [{"role": "assistant", "content": "You."}]


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Who?", "chosen": "Me.", "rejected": "You."},
        {"question": "Who?", "chosen": "Me.", "rejected": "You."},
        {"instruction": "Who?", "chosen": "Me.", "rejected": "You."},
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        {"prompt": ASKED, "chosen": "Me.", "rejected": "You."},
        {"chosen": ASKED + GOOD, "rejected": ASKED + BAD},
        {"prompt": "Who?", "chosen": ASKED + GOOD, "rejected": ASKED + BAD, "messages": ASKED + GOOD},
        {
            "conversations": [{"from": "human", "value": "Who?"}],
            "chosen": {"from": "gpt", "value": "Me."},
            "rejected": {"from": "gpt", "value": "You."},
        },
    ],
)
def test_every_form_of_a_pair_is_the_same_pair(row: dict[str, Any]) -> None:
    assert kind_of_row(row, pairs=True) == "pair"
    pair = pair_of(row)
    assert (pair.chosen, pair.rejected, pair.shared) == (ASKED + GOOD, ASKED + BAD, 1)


def test_a_row_of_other_kinds_stays_what_it_was_unless_pairs_are_wanted() -> None:
    row = {"messages": ASKED + GOOD, "chosen": GOOD, "rejected": BAD}
    assert kind_of_row(row) == "messages" and kind_of_row(row, pairs=True) == "pair"
    assert kind_of_row({"prompt": "Who?", "chosen": "Me.", "rejected": "You."}) == "pair", "it is nothing else"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "Who?", "chosen": "Me.", "rejected": "Me."}, "chosen and rejected are the same"),
        ({"prompt": "Who?", "chosen": "Me.", "rejected": None}, "the rejected answer is empty"),
        ({"prompt": "Who?", "chosen": "  ", "rejected": "You."}, "the answer is empty"),
        ({"prompt": "", "chosen": "Me.", "rejected": "You."}, "the question is empty"),
        ({"chosen": "Human: Who? Assistant: Me.", "rejected": "Human: Who? Assistant: You."}, "it has no prompt"),
        ({"prompt": "Who?", "chosen": 5, "rejected": [3]}, "a message is not an object"),
        ({"chosen": ASKED + GOOD, "rejected": ASKED + GOOD + ASKED + BAD}, "the beginning of the other"),
    ],
)
def test_a_row_that_is_no_pair_says_why(row: dict[str, Any], why: str) -> None:
    with pytest.raises(NotAnExample, match=why):
        pair_of(row)


def written(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_pair_is_stored_together_and_the_prompts_own_answers_are_not_learned(tmp_path: Path) -> None:
    before = [*ASKED, {"role": "assistant", "content": "An earlier answer."}, {"role": "user", "content": "And now?"}]
    rows = [{"prompt": before, "chosen": f"Good {n}.", "rejected": f"Bad {n}."} for n in range(20)]
    rows += [rows[0], {"prompt": "x", "chosen": "y", "rejected": "y"}]
    source = find_rows(Data(paths=[str(written(tmp_path, rows))]))
    assert source is not None and source.is_pairs
    tokenizer = byte_level()
    template = load_template("chatml", tokenizer)
    folder = example_cache.ensure(tmp_path / "cache", source, template, val_fraction=0.2)
    found = example_cache.open_examples(folder)
    assert found.is_pairs and found.manifest["examples"] == 20
    assert {reason for reason, *_ in found.manifest["set_aside"]} == {
        "the same as an earlier one",
        "chosen and rejected are the same",
    }
    assert found.train.examples + found.val.examples == 40 and found.val.examples >= 2
    assert found.train.examples % 2 == 0, "both answers are on the same side"
    for answer in range(found.train.examples):
        begin = int(found.train.begin[answer])
        stored = found.train.tokens[begin : begin + int(found.train.length[answer])]
        learned = tokenizer.decode((stored[stored >= LEARNED] & ~LEARNED).astype(np.int64))
        assert learned.startswith("Bad" if answer % 2 else "Good"), learned
        whole = tokenizer.decode((stored & ~LEARNED).astype(np.int64))
        assert "An earlier answer." in whole and "An earlier answer." not in learned


@pytest.mark.parametrize("packing", ["auto", "grouped"])
def test_the_plan_estimates_pairs_as_they_are_laid_out(tmp_path: Path, packing: str) -> None:
    """Two answers a row, each with its prompt, and both in one window."""
    rows = [{"prompt": f"Add {n} and 1.", "chosen": f"{n + 1}" * (1 + n % 7), "rejected": "No."} for n in range(200)]
    path = str(written(tmp_path, rows))
    known = {"data": {"paths": [path], "packing": packing, "seq_len": 192, "val_fraction": 0.1, "template": "chatml"},
             "tokenizer": {"kind": "bytes"}, "train": {"batch_size": 4}}  # fmt: skip
    run = validated(known)
    source = find_rows(run.data, pairs=True)
    assert source is not None
    guess = estimate_tokens(run, source, tmp_path / "none")
    folder = example_cache.ensure(tmp_path, source, load_template("chatml", byte_level()), val_fraction=0.1)
    counted = estimate_tokens(run, source, tmp_path)
    assert counted.counted and not guess.counted and "the first 200 pairs, 100.0%" in guess.how
    laid = arrange_pairs(example_cache.open_examples(folder), run.data, BatchLayout(1, 4, 192, 0), packing == "auto")
    facts = laid.describe()
    assert counted.samples == facts.samples and counted.noun == facts.noun
    filled = facts.samples * facts.positions_per_step / 4 * (1 - facts.padding)
    assert counted.tokens == pytest.approx(filled, rel=0.05) and counted.padding == pytest.approx(
        facts.padding, abs=0.04
    )
    assert guess.tokens == pytest.approx(filled, rel=0.1) and guess.noun == facts.noun
    alone = sum(len(row["prompt"]) + len(row["chosen"]) for row in rows) * 0.9
    assert counted.tokens > 1.5 * alone, "the prompt is read twice"


# ---------------------------------------------------------------- batches


def side_of(prompts: Any, lengths: Any, name: str = "train", vocab: int = 50) -> Side:
    """Pairs: a prompt of so many tokens, and two answers; the last token is 1, the end mark."""
    rng = np.random.default_rng(7)
    parts, numbers = [], []
    for prompt, both in zip(prompts, lengths, strict=True):
        asked = rng.integers(2, vocab, prompt).astype(np.uint32)
        for answer in both:
            said = rng.integers(2, vocab, answer).astype(np.uint32)
            said[-1] = 1
            numbers.append((sum(map(len, parts)), prompt + answer, prompt, prompt + answer - 1, answer, 9, 5))
            parts.append(np.concatenate([asked, said | LEARNED]))
    return Side(name, np.concatenate(parts), *np.array(numbers, np.int64).T)


PROMPTS = [3, 5, 2, 8, 4, 6, 3]
LENGTHS = [(4, 6), (2, 9), (7, 3), (5, 5), (1, 2), (10, 4), (6, 6)]


def made(packing: str = "auto", seq_len: int = 48, over: str = "truncate", **more: Any) -> Any:
    examples = Examples(
        Path("nowhere"), {"pairs": True}, side_of(PROMPTS, LENGTHS), side_of([4, 2], [(3, 2), (2, 5)], "val")
    )
    data = validated({"data": {"packing": packing, "seq_len": seq_len, "over_length": over}}).data
    return arrange_pairs(examples, data, BatchLayout(1, 2, seq_len, 0), more.get("takes_segments", True))


@pytest.mark.parametrize("packing", ["packed", "grouped"])
def test_a_micro_batch_holds_whole_pairs_and_every_pair_is_seen_once_an_epoch(packing: str) -> None:
    batches = made(packing)
    facts = batches.describe()
    steps, seen = math.ceil(facts.steps_per_epoch), []
    for step in range(1, steps + 1):
        batch = batches.make(step)
        for rows in micro_batches(batch, 1):
            answers = batch.pairs.answers[rows]
            numbers = np.unique(answers[answers >= 0])
            assert len(numbers) and (numbers[::2] + 1 == numbers[1::2]).all() and (numbers[::2] % 2 == 0).all()
            seen += (numbers[::2] // 2).tolist()
        assert batch.real_tokens == len(np.unique(batch.pairs.answers)[1:]) // 2
        assert ((batch.pairs.answers >= 0) == (batch.targets != NO_TARGET)).all()
    if facts.whole_batches or facts.samples % 2 == 0:
        assert sorted(seen) == list(range(7))
    assert set(seen) == set(range(7))


def test_what_is_too_long_is_cut_left_out_or_refused_as_a_pair() -> None:
    cut = made(seq_len=22).describe().pairs
    assert cut is not None
    both = cut.train.fitted.positions.reshape(-1, 2)
    assert (both.sum(1) <= 22).all() and cut.train.fitted.cut == 2
    assert both[5].tolist() == [13, 9], "only the longer answer is cut where the other fits in half of the window"
    assert both[3].tolist() == [11, 11]
    left = made(seq_len=22, over="drop").describe().pairs
    assert left is not None and left.train.pairs == 5
    with pytest.raises(BadData, match="2 of 7 pairs are longer"):
        made(seq_len=22, over="refuse")
    with pytest.raises(BadData, match="no pair is left"):
        made(seq_len=8, over="drop")
    with pytest.raises(BadConfig, match="windows is not for preference pairs"):
        made("windows")
    assert made(takes_segments=False).describe().noun == "pairs", "grouped, where a model does not keep answers apart"


# ---------------------------------------------------------------- the loss


def tiny(family: str = "llama") -> Transformer:
    model = Transformer(Shape(family, 50, 64, layers=2, width=32, heads=4))  # type: ignore[arg-type]
    init_weights(model, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return model


def by_hand(model: Transformer, data: Any, batch: Batch, beta: float) -> torch.Tensor:
    """Every answer alone, log-probabilities from all logits, no window and no cache."""
    fitted, losses = data.train.fitted, []
    for number in np.unique(batch.pairs.answers)[1::2].tolist():  # type: ignore[union-attr]
        rewards = []
        for answer in (number, number + 1):
            begin, length = int(fitted.begin[answer]), int(fitted.positions[answer]) + 1
            stored = fitted.side.tokens[begin : begin + length]
            ids = torch.from_numpy((stored & ~LEARNED).astype(np.int64))[None]
            logps = functional.log_softmax(model(ids[:, :-1])[0].double(), -1)
            mine = logps.gather(1, ids[0, 1:, None])[:, 0][torch.from_numpy(stored[1:] >= LEARNED)].sum()
            rewards.append(beta * (mine - float(data.train.reference[answer])))
        losses.append(-torch.log(torch.sigmoid(rewards[0] - rewards[1])))
    return torch.stack(losses).sum()


@pytest.mark.parametrize("packing", ["packed", "grouped"])
@pytest.mark.parametrize("whole", [False, True])
def test_loss_and_gradients_are_those_of_the_formula(packing: str, whole: bool) -> None:
    model, batches = tiny(), made(packing)
    data = batches.describe().pairs
    rng = np.random.default_rng(1)
    data.train.beta, data.train.reference = 0.3, rng.normal(-20, 3, 14)
    batch = batches.make(2)
    wanted = by_hand(model, data, batch, 0.3)
    wanted.backward()  # type: ignore[no-untyped-call]
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    notes, total = Notes(), 0.0
    leaves = micro_batches(batch, 1)
    for leaf, rows in enumerate(leaves):
        part = batch_loss(model, batch, Here(), whole=whole, rows=rows, notes=notes, leaf=leaf)  # type: ignore[arg-type]
        part.backward()  # type: ignore[no-untyped-call]
        total += float(part.detach())
    assert total == pytest.approx(float(wanted.detach()), rel=1e-5)
    for one, parameter in zip(expected, model.parameters(), strict=True):
        assert torch.allclose(one, parameter.grad, atol=1e-5), (one - parameter.grad).abs().max()  # type: ignore[operator, arg-type]
    means = notes.means(ALONE, len(leaves), torch.device("cpu"))
    assert means["reward_margin"] == pytest.approx(means["reward_chosen"] - means["reward_rejected"])
    assert 0 <= means["reward_accuracy"] <= 1


class Here:
    """As much of a Machine as a loss needs."""

    device = torch.device("cpu")

    def copied(self, *arrays: Any) -> list[torch.Tensor]:
        return [torch.from_numpy(np.ascontiguousarray(one)) for one in arrays]

    def has_varlen(self, _: object) -> bool:
        return False

    def precision(self) -> Any:
        return torch.autocast("cpu", enabled=False)


def test_figures_that_are_recorded() -> None:
    """Two pairs by arithmetic that can be followed: rewards of beta x (log p - log r)."""
    from lamplighter.data.batches import Pairs
    from lamplighter.train.preference import pair_loss

    nats = torch.tensor([1.0, 2.0, 4.0, 0.5, 0.25, 3.0])
    answers = np.array([0, 0, 1, 2, 3, 3])
    pairs = Pairs(answers[None], 1, 0.5, np.array([-4.0, -3.0, -0.5, -2.0]))
    loss, told = pair_loss(nats, answers, pairs)
    # pair 1: 0.5 x (-3 + 4) = 0.5 and 0.5 x (-4 + 3) = -0.5, margin 1; pair 2: 0 and 0.5 x (-3.25 + 2) = -0.625
    assert float(loss) == pytest.approx(math.log(1 + math.exp(-1)) + math.log(1 + math.exp(-0.625)), abs=1e-6)
    assert float(loss) == pytest.approx(0.7419624, abs=1e-6)
    assert told.tolist() == pytest.approx([2, 0.5, -1.125, 2, -3.5, -7.25])
    same, _ = pair_loss(nats, answers, Pairs(answers[None], 1, 0.5, np.array([-3.0, -4.0, -0.5, -3.25])))
    assert float(same) / 2 == pytest.approx(CHANCE, abs=1e-7), "nothing learned yet: ln 2"


def test_the_loss_of_each_token_has_the_gradients_of_autograd() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 150, 32, requires_grad=True), torch.randn(517, 32, requires_grad=True)
    targets = torch.randint(0, 517, (2, 150))
    targets[:, ::3] = NO_TARGET
    found = token_nats(x, weight, targets, buffers=LossBuffers())
    factor = torch.randn(len(found))
    grads = torch.autograd.grad((found * factor).sum(), (x, weight))
    kept = targets.flatten() >= 0
    plain = functional.cross_entropy((x @ weight.t()).flatten(0, 1)[kept], targets.flatten()[kept], reduction="none")
    expected = torch.autograd.grad((plain * factor).sum(), (x, weight))
    assert torch.allclose(found, plain, atol=1e-5)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(grads, expected, strict=True))


# ---------------------------------------------------------------- red flags


def detector(steps: int = 400) -> Detector:
    return Detector(Facts(1000, steps, 10, 1e-4, objective="dpo", from_scratch=False, chat=True))


def raised(series: Any, steps: int = 400) -> dict[str, report.Verdict]:
    """The flags that such figures raise."""
    found, watched = {}, detector(steps)
    for step in range(1, steps // 2):
        values = {"train/lr": 1e-4, "train/dt_ms": 10.0, "train/grad_norm": 1.0, **series(step)}
        found |= {change.verdict.cause: change.verdict for change in watched.step(step, values) if change.up}
    return found


def figures(loss: float, margin: float, accuracy: float, chosen: float, rejected: float) -> dict[str, float]:
    return {"train/loss": loss, "train/reward_margin": margin, "train/reward_accuracy": accuracy,
            "train/logp_chosen": chosen, "train/logp_rejected": rejected}  # fmt: skip


def test_each_red_flag_of_pairs_goes_up_and_a_good_run_raises_none() -> None:
    good = raised(lambda n: figures(0.69 - n / 800, n / 200, 0.8, -50 - n / 100, -60 - n / 10))
    assert not good, good
    stuck = raised(lambda n: figures(0.6931, 0.0001, 0.5, -50, -60))
    assert "no answer is preferred" in stuck["not_learning"].why and "ln 2" in stuck["not_learning"].why
    wrong = raised(lambda n: figures(0.7 + n / 400, -n / 100, 0.3, -50, -60))
    assert "margin_negative" in wrong and "right way round" in wrong["margin_negative"].next
    falling = raised(lambda n: figures(0.69 - n / 800, n / 50, 0.9, -50 - n / 2, -60 - n))
    assert "both become less probable" in falling["chosen_falls"].why
    easy = raised(lambda n: figures(0.001, 9.0, 1.0, -40, -90))
    assert "told apart already" in easy["too_good"].why
