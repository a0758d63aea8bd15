"""Continuous batching: the same text alone, beside others and from lamp generate; rows come and go; stops and penalties hold."""

import pytest
import torch
from test_sample import GPT2, LLAMA, Uncached, a_model, both_families

from lamplighter.model.batching import PREFILL_TOKENS, Batcher, Made, TextRequest, write_all
from lamplighter.model.generate import Choice, Decoder, lay_out, stream
from lamplighter.model.shape import Shape


def longer(shape: Shape) -> Shape:
    from dataclasses import replace

    return replace(shape, positions=40, dropout=0.0)


def alone(model: torch.nn.Module, prompt: list[int], count: int, **more: float) -> list[int | None]:
    return [step[0] for step in stream(model, prompt, max_tokens=count, temperature=0.0, window=40, **more)]


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [3, 3], [9, 8, 7, 6], [39, 1]]


@both_families
def test_greedy_texts_are_those_of_generate_whoever_is_beside_them(shape: Shape) -> None:
    model = a_model(longer(shape))
    wishes = [TextRequest(tuple(prompt), 5 + number) for number, prompt in enumerate(PROMPTS)]
    for rows in (1, 3, 6):
        made = write_all(Batcher(model, rows, 40, 40), wishes)
        assert [text for text, _ in made] == [alone(model, p, 5 + n) for n, p in enumerate(PROMPTS)]
        assert {end for _, end in made} == {"length"}


@both_families
def test_a_text_that_joins_later_or_is_dropped_changes_nobody_elses(shape: Shape) -> None:
    model = a_model(longer(shape))
    batcher = Batcher(model, 4, 40, 40)
    texts: dict[int, list[int | None]] = {n: [] for n in range(4)}
    for number in range(3):
        batcher.add(number, TextRequest(tuple(PROMPTS[number]), 20))
        _take(texts, batcher.step())
    batcher.drop(0)
    batcher.add(3, TextRequest(tuple(PROMPTS[3]), 20))
    while batcher.texts:
        _take(texts, batcher.step())
    for number in (1, 2, 3):
        assert texts[number] == alone(model, PROMPTS[number], 20)
    assert len(texts[0]) < 20
    assert texts[0] == alone(model, PROMPTS[0], 20)[: len(texts[0])]


def _take(texts: dict[int, list[int | None]], made: list[Made]) -> None:
    for one in made:
        texts[one.key].append(one.token)


def test_sampling_draws_what_generate_draws_from_the_same_seed() -> None:
    model = a_model(longer(LLAMA))
    wish = TextRequest((1, 2), 12, Choice(0.9, 10, 0.95), seed=7)
    expected = [s[0] for s in stream(model, [1, 2], max_tokens=12, temperature=0.9, top_k=10, top_p=0.95, seed=7)]
    assert write_all(Batcher(model, 2, 40, 40), [TextRequest((5,), 12), wish])[1][0] == expected


def test_a_stop_token_ends_a_text_and_is_no_part_of_it() -> None:
    model = a_model(longer(GPT2))
    whole = alone(model, [1, 2, 3], 9)
    stop = whole[4]
    assert isinstance(stop, int)
    [(text, end)] = write_all(Batcher(model, 1, 40, 40), [TextRequest((1, 2, 3), 9, stop_ids=frozenset([stop]))])
    assert (text, end) == (whole[: whole.index(stop)], "stop")


def test_a_row_that_is_full_ends_its_text() -> None:
    model = a_model(longer(GPT2))
    [(text, end)] = write_all(Batcher(model, 1, 12, 40), [TextRequest((1, 2, 3), 30)])
    assert (len(text), end) == (9, "length")
    with pytest.raises(ValueError, match="does not fit"):
        Batcher(model, 1, 3, 40).add(0, TextRequest((1, 2, 3), 1))
    with pytest.raises(ValueError, match="vocabulary"):
        Batcher(model, 1, 9, 40).add(0, TextRequest((1, 40), 1))


def test_a_long_prompt_is_read_in_stretches_and_says_the_same() -> None:
    from dataclasses import replace

    model = a_model(replace(LLAMA, positions=700))
    prompt = [n * 7 % 40 for n in range(2 * PREFILL_TOKENS + 31)]
    expected = [s[0] for s in stream(model, prompt, max_tokens=6, temperature=0.0)]
    [(short, _), (text, _)] = write_all(
        Batcher(model, 2, 700, 40), [TextRequest((1,), 40), TextRequest(tuple(prompt), 6)]
    )
    assert text == expected
    assert short == [s[0] for s in stream(model, [1], max_tokens=40, temperature=0.0)]


def test_a_model_of_ones_own_reads_all_again() -> None:
    model = a_model(longer(GPT2))
    made = write_all(Batcher(Uncached(model), 3, 40, 40), [TextRequest(tuple(p), 6) for p in PROMPTS])
    assert [text for text, _ in made] == [alone(model, p, 6) for p in PROMPTS]


def test_repetition_is_penalised_as_transformers_does() -> None:
    transformers = pytest.importorskip("transformers")
    model = a_model(longer(LLAMA))
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(3))
    from lamplighter.model.batching import _penalised

    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 2, 3]]), logits.clone())
    assert torch.equal(_penalised(logits, [1, 2, 3], 1.7), theirs)
    [(text, _)] = write_all(Batcher(model, 1, 40, 40), [TextRequest((1, 2), 20, repetition_penalty=50.0)])
    assert len(set(text)) > len(set(alone(model, [1, 2], 20)))


def test_log_probabilities_are_those_of_the_logits() -> None:
    model = a_model(longer(LLAMA))
    batcher = Batcher(model, 1, 40, 40)
    batcher.add(0, TextRequest((1, 2, 3), 1, logprobs=3))
    [made] = batcher.step()
    with torch.no_grad():
        logs = model(torch.tensor([[1, 2, 3]]))[0, -1].log_softmax(-1)
    assert made.token == int(logs.argmax())
    assert made.logprob == pytest.approx(float(logs.max()), abs=1e-5)
    assert [token for token, _ in made.top] == logs.topk(3).indices.tolist()


def test_weights_that_are_laid_out_for_decoding_are_the_same_model_in_no_more_memory() -> None:
    model = a_model(longer(LLAMA))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    texts = [alone(model, prompt, 9) for prompt in PROMPTS]
    assert len(Decoder(model, Batcher(model, 1, 40, 40).cache).llama[0].qkv) == 3
    lay_out(model)
    assert len(Decoder(model, Batcher(model, 1, 40, 40).cache).llama[0].qkv) == 1
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert [alone(model, prompt, 9) for prompt in PROMPTS] == texts
    attn = model.model.layers[0].self_attn
    assert attn.q_proj.weight.untyped_storage().data_ptr() == attn.v_proj.weight.untyped_storage().data_ptr()
    sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    assert sum(sizes.values()) == sum(one.nbytes for one in model.parameters())
