"""Sampling: the same text as transformers, never a token outside what was allowed, the same seed the same text."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lamplighter.model import cpu
from lamplighter.model.generate import Decoder, can_decode, stream
from lamplighter.model.shape import Shape, shape_from_hf
from lamplighter.model.transformer import KVCache, Transformer
from lamplighter.model.weights import init_weights, load_weights
from running import shared

GPT2 = Shape(family="gpt2", vocab_size=40, positions=12, layers=2, width=16, heads=2, dropout=0.3)
LLAMA = Shape(family="llama", vocab_size=40, positions=12, layers=2, width=16, heads=4, kv_heads=2)
QWEN3 = replace(LLAMA, family="qwen3")
both_families = pytest.mark.parametrize("shape", [GPT2, LLAMA, QWEN3], ids=["gpt2", "llama", "qwen3"])


def a_model(shape: Shape) -> Transformer:
    model = Transformer(shape)
    init_weights(model, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)  # opinions strong enough to be told apart
    return model


def texts(steps: Iterator[list[int | None]]) -> list[list[int | None]]:
    """The steps, turned round: one row per sample."""
    return [list(row) for row in zip(*steps, strict=True)]


class Fixed(nn.Module):
    """A model of one's own: always the same logits, whatever it reads. It notes how much it was shown."""

    positions = 6

    def __init__(self, logits: list[float]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))
        self.lengths: list[int] = []

    def forward(self, ids_BT: Tensor) -> Tensor:
        self.lengths.append(ids_BT.shape[1])
        return self.logits.expand(*ids_BT.shape, -1)


class Uncached(nn.Module):
    """The same network, hidden, so that the cache cannot be used."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.inner = model

    def forward(self, ids_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.inner(ids_BT)
        return logits_BTV


def test_greedy_text_is_that_of_transformers() -> None:
    folder = shared("models", "stories260K_hf_llama")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ours = Transformer(shape_from_hf(json.loads((folder / "config.json").read_text())))
    load_weights(ours, folder)
    prompt = [1, 403, 407, 261, 378]
    with torch.no_grad():
        ids = torch.tensor([prompt])
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=100, min_new_tokens=100, do_sample=False
        )
    assert texts(stream(ours, prompt, max_tokens=100, temperature=0.0)) == [expected[0, len(prompt) :].tolist()]


@both_families
def test_greedy_text_ignores_the_seed_and_is_the_same_in_every_sample(shape: Shape) -> None:
    model = a_model(shape)
    one, two = texts(stream(model, [3, 4], samples=2, max_tokens=9, temperature=0.0, seed=1))
    assert one == two == texts(stream(model, [3, 4], max_tokens=9, temperature=0.0, seed=2))[0]


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_seed_gives_one_text_whatever_the_number_of_samples(shape: Shape) -> None:
    model = a_model(shape)
    three = texts(stream(model, [3, 4], samples=3, max_tokens=40, seed=7))
    assert texts(stream(model, [3, 4], samples=1, max_tokens=40, seed=7)) == three[:1]
    torch.manual_seed(0)  # nothing global counts
    assert texts(stream(model, [3, 4], samples=3, max_tokens=40, seed=7)) == three
    assert len({tuple(text) for text in three}) == 3
    assert texts(stream(model, [3, 4], samples=1, max_tokens=40, seed=8)) != three[:1]


@both_families
def test_a_full_window_goes_on_and_the_cache_changes_nothing(shape: Shape) -> None:
    model = a_model(shape)
    for prompt in ([5], list(range(11)), list(range(12)), list(range(30))):
        for temperature in (0.0, 1.0):
            how: dict[str, Any] = {"samples": 2, "max_tokens": 40, "temperature": temperature}
            cached = texts(stream(model, prompt, **how))
            assert cached == texts(stream(Uncached(model), prompt, window=12, **how))
            assert len(cached[0]) == 40


@both_families
def test_a_window_of_one_token_works(shape: Shape) -> None:
    model = a_model(shape)
    text = texts(stream(model, [5, 6], max_tokens=8, temperature=0.0, window=1))[0]
    assert text == texts(stream(Uncached(model), [6], max_tokens=8, temperature=0.0, window=1))[0]


def test_a_full_window_keeps_its_newer_half() -> None:
    model = Fixed([0.0, 9.0, 0.0])
    steps = stream(model, [0, 2], max_tokens=12, temperature=0.0)
    model.lengths.clear()  # it was asked once already, for its vocabulary
    assert texts(steps) == [[1] * 12]
    assert model.lengths == [2, 3, 4, 5, 6, 3, 4, 5, 6, 3, 4, 5]


FAIR = [2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, 1.75]  # likeliest first: 0, 7, 1, 2, 3, ...


def drawn(**how: Any) -> list[int]:
    steps = stream(Fixed(FAIR), [0], samples=50, max_tokens=40, **how)
    return [token for step in steps for token in step if token is not None]


def test_draws_follow_the_odds() -> None:
    for temperature in (1.0, 0.5):
        ids = torch.tensor(drawn(temperature=temperature))
        shares = torch.bincount(ids, minlength=8) / len(ids)
        expected = (torch.tensor(FAIR) / temperature).softmax(-1)
        assert (shares - expected).abs().max() < 0.04  # four standard errors of 2,000 draws


def test_top_k_never_leaves_the_k_likeliest() -> None:
    assert set(drawn(top_k=3, temperature=5.0)) == {0, 7, 1}
    assert set(drawn(top_k=1, temperature=5.0)) == {0}
    assert set(drawn(top_k=100, temperature=5.0)) == set(range(8))
    ties = stream(Fixed([0.0] * 8), [0], samples=50, max_tokens=40, top_k=3)
    assert len({token for step in ties for token in step}) == 3


def test_top_p_keeps_the_fewest_that_hold_p() -> None:
    odds = torch.tensor(FAIR).softmax(-1).sort(descending=True).values.cumsum(-1)
    assert odds[1] < 0.6 < odds[2]
    assert set(drawn(top_p=0.6)) == {0, 7, 1}
    assert set(drawn(top_p=1e-9)) == {0}
    assert set(drawn(top_p=0.5, top_k=3)) == {0, 7}  # of the three likeliest, the two that hold half


def test_top_p_of_a_large_vocabulary_keeps_the_same_tokens_without_sorting_it() -> None:
    """A steep choice is held by a few hundred tokens; a flat one needs more of them than are looked at first."""
    for steepness, top_p in ((4.0, 0.9), (0.01, 0.6)):
        logits = torch.randn(3000, generator=torch.Generator().manual_seed(1)) * steepness
        odds, order = logits.double().softmax(-1).sort(descending=True)
        kept = set(order[odds.cumsum(-1) - odds < top_p].tolist())
        assert (len(kept) < 512) == (steepness > 1.0)
        steps = stream(Fixed(logits.tolist()), [0], samples=50, max_tokens=40, top_p=top_p)
        found = {token for step in steps for token in step}
        assert found <= kept
        assert len(found) > min(len(kept), 2000) // 4


def test_a_part_that_somebody_replaced_is_asked_as_it_is() -> None:
    class Shifted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 3.0

    model = a_model(LLAMA)
    before = texts(stream(model, [3, 4], max_tokens=10, temperature=0.0))
    assert can_decode(model)
    own = Shifted(model.model.layers[0].mlp.down_proj.in_features, LLAMA.width, bias=False)
    own.weight = model.model.layers[0].mlp.down_proj.weight
    model.model.layers[0].mlp.down_proj = own
    assert not can_decode(model)
    after = texts(stream(model, [3, 4], max_tokens=10, temperature=0.0))
    assert after == texts(stream(Uncached(model), [3, 4], max_tokens=10, temperature=0.0, window=12))
    assert after != before


@both_families
def test_one_token_at_a_time_gives_the_logits_of_the_whole_text(shape: Shape) -> None:
    model = a_model(shape).eval()
    ids_BT = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(2))
    cache = KVCache(shape, 3, 12, torch.device("cpu"), torch.float32)
    decoder = Decoder(model, cache)
    with torch.no_grad():
        whole_BTV = model(ids_BT)
        model(ids_BT[:, :4], cache=cache)
    for place in range(4, 12):
        torch.testing.assert_close(decoder.step(ids_BT[:, place]), whole_BTV[:, place], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="does not fit the cache's 12"):
        decoder.step(ids_BT[:, 0])


def test_a_cold_temperature_is_greedy_and_masked_tokens_are_never_drawn() -> None:
    assert set(drawn(temperature=1e-30)) == {0}
    masked = stream(Fixed([0.0, float("-inf"), 0.0]), [0], samples=50, max_tokens=40)
    assert {token for step in masked for token in step} == {0, 2}


def test_the_lowest_draw_does_not_pick_a_masked_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *size, generator: torch.zeros(*size))
    assert next(stream(Fixed([float("-inf"), 0.0, 0.0]), [0], max_tokens=1)) == [1]


def test_a_stopped_sample_is_silent_and_the_stream_ends_with_the_last() -> None:
    rows = texts(stream(Fixed([0.0, 0.0, 0.0]), [0], samples=4, max_tokens=1000, stop_id=2))
    for row in rows:
        end = row.index(2)
        assert None not in row[:end]
        assert row[end + 1 :] == [None] * (len(row) - end - 1)
    assert max(row.index(2) for row in rows) == len(rows[0]) - 1
    assert len({row.index(2) for row in rows}) > 1


def test_an_empty_prompt_starts_from_the_stop_id() -> None:
    model = a_model(LLAMA)
    how: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0}
    assert texts(stream(model, [], stop_id=7, **how)) == texts(stream(model, [7], stop_id=7, **how))
    assert list(stream(model, [7], max_tokens=0)) == []


@pytest.mark.parametrize(
    ("prompt", "how", "words"),
    [
        ([], {}, "the prompt is empty"),
        ([40], {}, r"\[40\] are outside the model's vocabulary of 40"),
        ([1, -1], {}, r"\[-1\] are outside"),
        ([1], {"stop_id": 50256}, r"\[50256\] are outside"),
        ([1], {"temperature": -0.1}, "temperature must be"),
        ([1], {"temperature": float("nan")}, "temperature must be"),
        ([1], {"top_k": -1}, "top_k must be"),
        ([1], {"top_p": 0.0}, "top_p must be"),
        ([1], {"samples": 0}, "samples must be"),
        ([1], {"window": 13}, "does not fit the model's 12 positions"),
        ([1], {"window": 0}, "window is 0"),
    ],
)
def test_wrong_requests_are_refused_before_the_first_step(prompt: list[int], how: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        stream(a_model(GPT2), prompt, max_tokens=3, **how)


def test_a_model_of_ones_own_is_asked_for_its_vocabulary_and_its_window() -> None:
    with pytest.raises(ValueError, match=r"\[3\] are outside the model's vocabulary of 3"):
        stream(Fixed([0.0, 0.0, 0.0]), [3], max_tokens=3)
    with pytest.raises(ValueError, match="an attribute `positions`"):
        stream(Uncached(a_model(GPT2)), [1], max_tokens=3)


def test_damaged_weights_are_said_not_sampled() -> None:
    with pytest.raises(ValueError, match="not finite"):
        next(stream(Fixed([0.0, float("nan"), 1.0]), [0], max_tokens=3))


def test_eval_mode_during_and_every_part_as_it_was_after() -> None:
    model = a_model(GPT2).train()
    model.transformer.h[0].eval()
    before = [part.training for part in model.modules()]
    steps = stream(model, [1], max_tokens=5)
    next(steps)
    assert not any(part.training for part in model.modules())
    steps.close()  # type: ignore[attr-defined]
    assert [part.training for part in model.modules()] == before
    dropout_free = texts(stream(model, [1], max_tokens=8, temperature=0.0))
    assert dropout_free == texts(stream(model, [1], max_tokens=8, temperature=0.0))
    assert [part.training for part in model.modules()] == before


@pytest.mark.parametrize(("rows", "inner"), [(1, 512), (8, 512), (16, 512), (17, 512), (8, 514)])
def test_a_few_rows_part_by_part_are_the_same_product(rows: int, inner: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(size, generator=generator) for size in ((rows, inner), (inner, 520), (520,)))
    parts: list[int] = []
    real = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: (parts.append(len(a)), real(a, b))[1])
    found = cpu.decode_linear_t(x, bias, weight)
    torch.testing.assert_close(found, torch.addmm(bias, x, weight), rtol=1e-4, atol=1e-4)
    assert parts == ([cpu.DECODE_PARTS] if rows <= cpu.FEW_ROWS and inner % cpu.DECODE_PARTS == 0 else [])
    assert not cpu._in_pieces(weight.bfloat16()) and not cpu._in_pieces(weight[:, :500])


@pytest.mark.parametrize("words", [64, 67])
def test_one_row_in_pieces_is_the_same_product(words: int) -> None:
    rng = torch.Generator().manual_seed(3)
    row, weight = torch.randn(1, 24, generator=rng), torch.randn(words, 24, generator=rng)
    torch.testing.assert_close(cpu._one_row(row, weight), torch.nn.functional.linear(row, weight))


def test_a_large_weight_is_given_in_pieces_and_a_small_one_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = cpu._one_row
    monkeypatch.setattr(cpu, "_one_row", lambda row, weight: asked.append(len(weight)) or real(row, weight))  # type: ignore[func-returns-value]
    monkeypatch.setattr(cpu, "LARGE_WEIGHT", 40 * 8)
    for words in (39, 40):
        cpu.decode_linear(torch.ones(1, 8), torch.ones(words, 8))
        cpu.decode_linear(torch.ones(2, 8), torch.ones(words, 8))
        cpu.decode_linear(torch.ones(1, 8).bfloat16(), torch.ones(words, 8).bfloat16())
    assert asked == [40]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_wrapped_part_or_a_hook_is_not_decoded_past(family: str) -> None:
    model = Transformer(Shape(family, 60, 16, 2, 32, 4))  # type: ignore[arg-type]
    init_weights(model, 1)
    mlp = model.transformer.h[0].mlp if family == "gpt2" else model.model.layers[0].mlp
    assert can_decode(model)
    handle = mlp.register_forward_hook(lambda *_: None)
    assert not can_decode(model)
    handle.remove()
    name = "c_proj" if family == "gpt2" else "down_proj"
    inner = getattr(mlp, name)
    setattr(mlp, name, torch.nn.Sequential(inner))
    assert not can_decode(model)
    setattr(mlp, name, inner)
    assert can_decode(model)
