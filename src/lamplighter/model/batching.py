"""Continuous batching: texts begin and end at any time, and all that are under way get their next token together.

In:  a model, wishes (a prompt in ids, how to choose, when to stop).
Out: at each step the new token of each text, with its log-probability where that is wanted, and why a text has ended.

A prompt is read in stretches between the steps of the others, so that nobody waits long for anybody. A greedy text is the
same alone and beside others, but where the two likeliest tokens are nearly equal: products of other sizes round otherwise.

Tensors carry their axes as a suffix: B rows, T time, S time in the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
from torch import Tensor, nn

from lamplighter.model.generate import Choice, Decoder, _choose, _sample_generator, can_decode, evaluating
from lamplighter.model.row_cache import OneRow, RowCache
from lamplighter.model.transformer import AttentionContext, KVCache, Transformer

PREFILL_TOKENS = 256  # of a prompt between two steps of the others
GREEDY = Choice(0.0, 0, 1.0)
End = Literal["", "stop", "length"]


@dataclass(frozen=True)
class TextRequest:
    """What is to be written."""

    prompt: tuple[int, ...]
    max_tokens: int
    choice: Choice = GREEDY
    seed: int = 0
    sample: int = 0  # the number of this text among several of one seed
    stop_ids: frozenset[int] = frozenset()
    repetition_penalty: float = 1.0
    logprobs: int = -1  # -1: none; else of so many of the likeliest tokens besides


@dataclass(frozen=True)
class Made:
    """One more token of a text; `end` says that it was the last, and why. A stop token is not a part of the text."""

    key: int
    token: int | None
    end: End = ""
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class _Text:
    key: int
    wish: TextRequest
    generator: torch.Generator
    read: int = 0  # tokens of the prompt that are in the cache
    last: int = 0  # the token that goes in next
    made: list[int] = field(default_factory=list)


class Batcher:
    """A model, a cache of some rows, and the texts that are under way in them."""

    def __init__(self, model: nn.Module, rows: int, length: int, vocab_size: int) -> None:
        parameter = next(model.parameters())
        self.model, self.rows, self.length, self.vocab_size = model, rows, length, vocab_size
        self.device = parameter.device
        self.texts: list[_Text] = []  # in the order of the cache's rows; those that still read come last
        self.cache: RowCache | None = None
        self.decoder: Decoder | None = None
        if isinstance(model, Transformer):
            self.cache = RowCache(model.shape, rows, length, parameter.device, parameter.dtype)
            self.decoder = Decoder(model, self.cache) if can_decode(model) else None

    @property
    def cache_bytes(self) -> int:
        return self.cache.stored.nbytes if self.cache is not None else 0

    @property
    def free(self) -> int:
        return self.rows - len(self.texts)

    def add(self, key: int, wish: TextRequest) -> None:
        """One more text; ValueError where it cannot be begun."""
        if not self.free:
            raise ValueError("every row is in use")
        if not wish.prompt or len(wish.prompt) >= self.length:
            raise ValueError(f"a prompt of {len(wish.prompt)} tokens does not fit rows of {self.length}")
        if not all(0 <= token < self.vocab_size for token in wish.prompt):
            raise ValueError(f"the prompt holds ids outside the model's vocabulary of {self.vocab_size}")
        self.texts.append(_Text(key, wish, _sample_generator(wish.seed, wish.sample)))
        if self.cache is not None:
            self.cache.take_row()

    def drop(self, key: int) -> None:
        """End a text that nobody waits for any more."""
        for row, text in enumerate(self.texts):
            if text.key == key:
                self._remove(row)
                return

    def step(self) -> list[Made]:
        """A stretch of one prompt, if one is being read; then one token for every text that has read its own."""
        with evaluating(self.model), torch.inference_mode():
            made = self._read_some()
            ready = [text for text in self.texts if text.read == len(text.wish.prompt) and text.made]
            fresh = {one.key for one in made}
            going = [text for text in ready if text.key not in fresh]
            if going and len(going) == len(ready):
                made += self._next(going)
            return made

    # -- prompts

    def _read_some(self) -> list[Made]:
        for row, text in enumerate(self.texts):
            if text.read < len(text.wish.prompt):
                return self._read(row, text)
        return []

    def _read(self, row: int, text: _Text) -> list[Made]:
        prompt = text.wish.prompt
        if self.cache is None or not isinstance(self.model, Transformer):
            text.read = len(prompt)
            return self._choose([text], self._whole(text)[None])
        end = min(text.read + PREFILL_TOKENS, len(prompt))
        ids_BT = torch.tensor([prompt[text.read : end]], device=self.device)
        places_T = torch.arange(text.read, end, device=self.device)
        mask = None
        if text.read and end - text.read > 1:
            mask = torch.ones(end - text.read, end, dtype=torch.bool, device=self.device).tril(diagonal=text.read)
        context = AttentionContext(places_T, mask, cast(KVCache, OneRow(self.cache, row)))
        body = self.model.transformer if self.model.shape.family == "gpt2" else self.model.model
        x_BTC = body(ids_BT, context)
        self.cache.lengths[row] = text.read = end
        if end < len(prompt):
            return []
        logits_BV = torch.nn.functional.linear(x_BTC[:, -1], self.model.head_weight())
        ready = sum(one.read == len(one.wish.prompt) for one in self.texts) - 1
        if row != ready:  # rows that are ready come first
            self.cache.swap(row, ready)
            self.texts[row], self.texts[ready] = self.texts[ready], self.texts[row]
        return self._choose([text], logits_BV.float())

    # -- steps

    def _next(self, going: list[_Text]) -> list[Made]:
        if self.cache is None:
            return self._choose(going, torch.stack([self._whole(text) for text in going]))
        ids_B = torch.tensor([text.last for text in going], device=self.device)
        self.cache.begin_step(len(going))
        if self.decoder is not None:
            logits_BV = self.decoder.step(ids_B).float()
        else:
            logits_BV = torch.cat([self._one_row(row, text) for row, text in enumerate(going)])
        return self._choose(going, logits_BV)

    def _one_row(self, row: int, text: _Text) -> Tensor:
        """A Transformer that somebody has wrapped or hooked: by its own forward pass, a row at a time."""
        assert self.cache is not None
        model = cast(Transformer, self.model)
        place = torch.tensor([self.cache.lengths[row]], device=self.device)
        context = AttentionContext(place, None, cast(KVCache, OneRow(self.cache, row)))
        body = model.transformer if model.shape.family == "gpt2" else model.model
        x_BTC = body(torch.tensor([[text.last]], device=self.device), context)
        self.cache.lengths[row] += 1
        return torch.nn.functional.linear(x_BTC[:, -1], model.head_weight()).float()

    def _whole(self, text: _Text) -> Tensor:
        """A model of one's own has no cache: it reads all again."""
        ids = [*text.wish.prompt, *text.made][-self.length :]
        logits: Tensor = self.model(torch.tensor([ids], device=self.device))[0, -1].float()
        return logits

    def _choose(self, texts: Sequence[_Text], logits_BV: Tensor) -> list[Made]:
        """The next token of each text, and whether it ends by it."""
        if not torch.isfinite(logits_BV.max(-1).values).all():
            raise ValueError("the model's logits are not finite: its weights are damaged, or its training diverged")
        found = []
        likeliest = logits_BV.argmax(-1).tolist()
        for row, text in enumerate(texts):
            wish, line_1V = text.wish, logits_BV[row : row + 1]
            if wish.repetition_penalty != 1.0:
                line_1V = _penalised(line_1V, [*wish.prompt, *text.made], wish.repetition_penalty)
            plain = wish.choice.temperature == 0.0 and wish.repetition_penalty == 1.0
            token = likeliest[row] if plain else int(_choose(line_1V, wish.choice, [text.generator])[0])
            found.append(self._made(text, token, logits_BV[row]))
        for made in found:
            if made.end:
                self.drop(made.key)
        return found

    def _made(self, text: _Text, token: int, logits_V: Tensor) -> Made:
        wish = text.wish
        if token in wish.stop_ids:
            return Made(text.key, None, "stop")
        text.made.append(token)
        text.last = token
        full = len(wish.prompt) + len(text.made) >= self.length + (self.cache is None)
        end: End = "length" if full or len(text.made) >= wish.max_tokens else ""
        if wish.logprobs < 0:
            return Made(text.key, token, end)
        logs_V = logits_V.log_softmax(-1)
        top = logs_V.topk(min(wish.logprobs, len(logs_V))) if wish.logprobs else None
        pairs = tuple(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top else ()
        return Made(text.key, token, end, float(logs_V[token]), pairs)

    # -- rows

    def _remove(self, row: int) -> None:
        """The rows stay together: the last ready one takes the place, then the last of all."""
        ready = sum(one.read == len(one.wish.prompt) for one in self.texts)
        if row < ready:
            self._move(ready - 1, row)
            row = ready - 1
        self._move(len(self.texts) - 1, row)
        self.texts.pop()
        if self.cache is not None:
            self.cache.drop_last()

    def _move(self, source: int, target: int) -> None:
        if source == target:
            return
        self.texts[target] = self.texts[source]
        if self.cache is not None:
            self.cache.move(source, target)


def _penalised(logits_1V: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    """Tokens that were seen made less likely, as Hugging Face does it."""
    ids = torch.tensor(sorted(set(seen)), device=logits_1V.device)
    found = logits_1V[:, ids]
    changed = logits_1V.clone()
    changed[:, ids] = torch.where(found < 0, found * penalty, found / penalty)
    return changed


def write_all(batcher: Batcher, wishes: Sequence[TextRequest]) -> list[tuple[list[int], End]]:
    """Every wish to its end, in the order given; for callers that want no stream."""
    waiting = list(enumerate(wishes))[::-1]
    texts: list[list[int]] = [[] for _ in wishes]
    ends: list[End] = ["" for _ in wishes]
    while waiting or batcher.texts:
        while waiting and batcher.free:
            batcher.add(*waiting.pop())
        for made in batcher.step():
            if made.token is not None:
                texts[made.key].append(made.token)
            ends[made.key] = made.end
    return list(zip(texts, ends, strict=True))
