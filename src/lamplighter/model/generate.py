"""Sampling: a prompt goes in, the next tokens come out one step at a time.

In:  a model, the ids of a prompt, how to choose.
Out: per step, one id for each sample.

Tensors carry their axes as a suffix: B batch (one row per sample), T time, V vocabulary, K the candidates kept of V.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lamplighter.model.decode import Decoder, can_decode
from lamplighter.model.transformer import KVCache, Transformer

LIKELY = 512  # how many of the likeliest tokens are looked at before all are sorted for top_p


@dataclass(frozen=True)
class Choice:
    """How the next token is chosen from the logits."""

    temperature: float
    top_k: int
    top_p: float

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature must be 0 (always the likeliest) or above, not {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all tokens) or above, not {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1 (all tokens), not {self.top_p}")


def stream(
    model: nn.Module,
    prompt_ids: list[int],
    *,
    samples: int = 1,
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_id: int | None = None,
    window: int | None = None,
) -> Iterator[list[int | None]]:
    """Continue a prompt: each step yields one id per sample, and None for a sample that has stopped.

    A sample's stop id is yielded, then it has stopped; the stream ends when all have, or after max_tokens steps. An
    empty prompt starts from stop_id, the mark between documents. Sample i draws from (seed, i), however many run
    beside it. When the window is full, its older half is forgotten; of a longer prompt, the last window is read.

    `window` is the model's positions unless given. A model of your own reads the whole window again at each step, and
    needs `window` or an attribute `positions`. Give the bare module, not a compiled or wrapped one. Wrong arguments
    are a ValueError here, before the first step. The model is in eval mode until the stream ends or is closed.
    """
    choice = Choice(temperature, top_k, top_p)
    if samples < 1 or max_tokens < 0:
        raise ValueError(f"samples must be at least 1 and max_tokens at least 0, not {samples} and {max_tokens}")
    window = window_of(model, window)
    text = list(prompt_ids)
    if not text:
        if stop_id is None:
            raise ValueError("the prompt is empty, and there is no stop_id to start from; give one of them")
        text = [stop_id]
    check_ids(model, [*text, *([] if stop_id is None else [stop_id])])
    generators = [sample_generator(seed, index) for index in range(samples)]
    return run(model, text, max_tokens, choice, generators, stop_id, window)


def run(
    model: nn.Module,
    prompt_ids: list[int],
    max_tokens: int,
    choice: Choice,
    generators: list[torch.Generator],
    stop_id: int | None,
    window: int,
) -> Iterator[list[int | None]]:
    device = next(model.parameters()).device
    samples, length = len(generators), len(prompt_ids)
    text_BT = torch.tensor(prompt_ids, device=device).repeat(samples, 1)
    text_BT = torch.cat((text_BT, text_BT.new_zeros(samples, max_tokens)), dim=1)
    cache = new_cache(model, samples, min(window, length + max_tokens))
    decoder = Decoder(model, cache) if isinstance(model, Transformer) and cache and can_decode(model) else None
    stopped = [False] * samples
    start = max(0, length - window)
    with evaluating(model):
        for end in range(length, length + max_tokens):
            if end - start > window:
                start = end - max(1, window // 2)
                if cache is not None:
                    cache.position = 0
            if decoder is not None and decoder.cache.position == end - start - 1:
                logits_BV = decoder.step(text_BT[:, end - 1]).float()
            elif end == length:  # the prompt, which all samples have in common, is read once
                logits_BV = next_logits(model, cache, text_BT[:1, start:end]).expand(samples, -1)
            else:
                logits_BV = next_logits(model, cache, text_BT[:, start:end])
            next_B = choose(logits_BV, choice, generators)
            text_BT[:, end] = next_B
            ids = next_B.tolist()
            yield [None if done else token for done, token in zip(stopped, ids, strict=True)]
            stopped = [done or token == stop_id for done, token in zip(stopped, ids, strict=True)]
            if all(stopped):
                return


@torch.no_grad()
def next_logits(model: nn.Module, cache: KVCache | None, visible_BT: Tensor) -> Tensor:
    """The logits after the last visible token. With a cache, only what it has not yet read is computed."""
    if cache is None:
        logits_BTV: Tensor = model(visible_BT)
    else:
        logits_BTV = model(visible_BT[:, cache.position :], cache=cache, last_only=True)
    return logits_BTV[:, -1].float()


def choose(logits_BV: Tensor, choice: Choice, generators: list[torch.Generator]) -> Tensor:
    """One id per row: top_k first, then top_p of what is left, as Hugging Face does."""
    best_B1, likeliest_B1 = logits_BV.max(-1, keepdim=True)  # carries a NaN along
    if not torch.isfinite(best_B1).all():
        raise ValueError("the model's logits are not finite: its weights are damaged, or its training diverged")
    if choice.temperature == 0.0:
        return likeliest_B1.squeeze(-1)
    odds_BK, ids_BK = candidates((logits_BV - best_B1) / choice.temperature, choice)
    if choice.top_p < 1.0:
        before_BK = odds_BK.cumsum(-1) - odds_BK
        odds_BK = odds_BK * (before_BK < choice.top_p)
    picked_B1 = pick(odds_BK, generators)
    return (picked_B1 if ids_BK is None else ids_BK.gather(-1, picked_B1)).squeeze(-1)


def candidates(scaled_BV: Tensor, choice: Choice) -> tuple[Tensor, Tensor | None]:
    """The odds that can win, likeliest first where that matters, and their ids; None: the ids are the places."""
    if choice.top_k > 0:
        top = scaled_BV.topk(min(choice.top_k, scaled_BV.shape[-1]))
        return top.values.double().softmax(-1), top.indices
    odds_BV = scaled_BV.double().softmax(-1)
    if choice.top_p == 1.0:
        return odds_BV, None
    if odds_BV.shape[-1] > 2 * LIKELY:  # a sort of all takes longer than a small model's step
        likely = odds_BV.topk(LIKELY)
        if (likely.values.sum(-1) > choice.top_p).all():
            return likely.values, likely.indices
    return odds_BV.sort(descending=True, stable=True)


def pick(odds_BK: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Draw one place per row, by one number of that row's own generator. A place with odds 0 is never drawn."""
    draws = torch.cat([torch.rand(1, generator=generator) for generator in generators])  # float32: x * total < total
    heights_BK = odds_BK.cumsum(-1)
    target_B1 = draws.to(heights_BK)[:, None] * heights_BK[:, -1:]
    return torch.searchsorted(heights_BK, target_B1, right=True)


def sample_generator(seed: int, index: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def new_cache(model: nn.Module, samples: int, length: int) -> KVCache | None:
    if not isinstance(model, Transformer):
        return None
    parameter = next(model.parameters())
    return KVCache(model.shape, samples, length, parameter.device, parameter.dtype)


def window_of(model: nn.Module, window: int | None) -> int:
    positions = model.shape.positions if isinstance(model, Transformer) else getattr(model, "positions", None)
    chosen = positions if window is None else window
    if not isinstance(chosen, int) or chosen < 1:
        raise ValueError(f"window is {chosen}; give how many tokens to read, or the model an attribute `positions`")
    if isinstance(positions, int) and chosen > positions:
        raise ValueError(f"a window of {chosen} tokens does not fit the model's {positions} positions")
    return chosen


def check_ids(model: nn.Module, ids: list[int]) -> None:
    vocab_size = vocab_size_of(model)
    outside = sorted({token for token in ids if not 0 <= token < vocab_size})
    if outside:
        raise ValueError(
            f"token ids {outside[:5]} are outside the model's vocabulary of {vocab_size}; "
            "the tokenizer and the model do not belong together"
        )


@torch.no_grad()
def vocab_size_of(model: nn.Module) -> int:
    if isinstance(model, Transformer):
        return model.shape.vocab_size
    one_B1 = torch.zeros(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    with evaluating(model):
        return int(model(one_B1).shape[-1])  # a model of one's own is asked, with a single token


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode for a while; afterwards every part is as it was, also where only some were training."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
