"""Sampling: a prompt goes in, the next tokens come out one step at a time.

In:  a model, the ids of a prompt, how to choose.
Out: per step, one id for each sample.

Tensors carry their axes as a suffix: B batch (one row per sample), T time, S time in the cache, V vocabulary, K the candidates
kept of V, C width, H heads, D head width, G query heads that share a key head, I and O inputs and outputs of a product.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lamplighter.model.cpu import decode_linear, decode_linear_t
from lamplighter.model.families import FromTransformers
from lamplighter.model.recompute import RecomputedForward
from lamplighter.model.row_cache import RowCache
from lamplighter.model.transformer import GPT2Layer, KVCache, LlamaAttention, LlamaLayer, Transformer, rotary_cos_sin

_LIKELY = 512  # how many of the likeliest tokens are looked at before all are sorted for top_p


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
    window = _window_of(model, window)
    text = list(prompt_ids)
    if not text:
        if stop_id is None:
            raise ValueError("the prompt is empty, and there is no stop_id to start from; give one of them")
        text = [stop_id]
    _check_ids(model, [*text, *([] if stop_id is None else [stop_id])])
    generators = [_sample_generator(seed, index) for index in range(samples)]
    return run(model, text, max_tokens, choice, generators, stop_id=stop_id, window=window)


def run(
    model: nn.Module,
    prompt_ids: list[int],
    max_tokens: int,
    choice: Choice,
    generators: list[torch.Generator],
    *,
    stop_id: int | None,
    window: int,
) -> Iterator[list[int | None]]:
    device = next(model.parameters()).device
    samples, length = len(generators), len(prompt_ids)
    text_BT = torch.tensor(prompt_ids, device=device).repeat(samples, 1)
    text_BT = torch.cat((text_BT, text_BT.new_zeros(samples, max_tokens)), dim=1)
    cache = _new_cache(model, samples, min(window, length + max_tokens))
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
                logits_BV = _next_logits(model, cache, text_BT[:1, start:end]).expand(samples, -1)
            else:
                logits_BV = _next_logits(model, cache, text_BT[:, start:end])
            next_B = _choose(logits_BV, choice, generators)
            text_BT[:, end] = next_B
            ids = next_B.tolist()
            yield [None if done else token for done, token in zip(stopped, ids, strict=True)]
            stopped = [done or token == stop_id for done, token in zip(stopped, ids, strict=True)]
            if all(stopped):
                return


@torch.no_grad()
def _next_logits(model: nn.Module, cache: KVCache | None, visible_BT: Tensor) -> Tensor:
    """The logits after the last visible token. With a cache, only what it has not yet read is computed."""
    if isinstance(model, FromTransformers):
        return model.next_logits(visible_BT)
    if cache is None:
        logits_BTV: Tensor = model(visible_BT)
    else:
        logits_BTV = model(visible_BT[:, cache.position :], cache=cache, last_only=True)
    return logits_BTV[:, -1].float()


def _choose(logits_BV: Tensor, choice: Choice, generators: list[torch.Generator]) -> Tensor:
    """One id per row: top_k first, then top_p of what is left, as Hugging Face does."""
    best_B1, likeliest_B1 = logits_BV.max(-1, keepdim=True)  # carries a NaN along
    if not torch.isfinite(best_B1).all():
        raise ValueError("the model's logits are not finite: its weights are damaged, or its training diverged")
    if choice.temperature == 0.0:
        return likeliest_B1.squeeze(-1)
    device = logits_BV.device
    # Drawn on the CPU: where exact kernels are asked for, a GPU refuses running sums.
    logits_BV, best_B1 = logits_BV.cpu(), best_B1.cpu()
    odds_BK, ids_BK = _candidates((logits_BV - best_B1) / choice.temperature, choice)
    if choice.top_p < 1.0:
        before_BK = odds_BK.cumsum(-1) - odds_BK
        odds_BK = odds_BK * (before_BK < choice.top_p)
    picked_B1 = _pick(odds_BK, generators)
    return (picked_B1 if ids_BK is None else ids_BK.gather(-1, picked_B1)).squeeze(-1).to(device)


def _candidates(scaled_BV: Tensor, choice: Choice) -> tuple[Tensor, Tensor | None]:
    """The odds that can win, likeliest first where that matters, and their ids; None: the ids are the places."""
    if choice.top_k > 0:
        top = scaled_BV.topk(min(choice.top_k, scaled_BV.shape[-1]))
        return top.values.double().softmax(-1), top.indices
    odds_BV = scaled_BV.double().softmax(-1)
    if choice.top_p == 1.0:
        return odds_BV, None
    if odds_BV.shape[-1] > 2 * _LIKELY:  # a sort of all takes longer than a small model's step
        likely = odds_BV.topk(_LIKELY)
        if (likely.values.sum(-1) > choice.top_p).all():
            return likely.values, likely.indices
    return odds_BV.sort(descending=True, stable=True)


def _pick(odds_BK: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Draw one place per row, by one number of that row's own generator. A place with odds 0 is never drawn."""
    draws = torch.cat([torch.rand(1, generator=generator) for generator in generators])  # float32: x * total < total
    heights_BK = odds_BK.cumsum(-1)
    target_B1 = draws.to(heights_BK)[:, None] * heights_BK[:, -1:]
    return torch.searchsorted(heights_BK, target_B1, right=True)


def _sample_generator(seed: int, index: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _new_cache(model: nn.Module, samples: int, length: int) -> KVCache | None:
    if not isinstance(model, Transformer):
        return None
    parameter = next(model.parameters())
    return KVCache(model.shape, samples, length, parameter.device, parameter.dtype)


def _window_of(model: nn.Module, window: int | None) -> int:
    positions = model.shape.positions if isinstance(model, Transformer) else getattr(model, "positions", None)
    chosen = positions if window is None else window
    if not isinstance(chosen, int) or chosen < 1:
        raise ValueError(f"window is {chosen}; give how many tokens to read, or the model an attribute `positions`")
    if isinstance(positions, int) and chosen > positions:
        raise ValueError(f"a window of {chosen} tokens does not fit the model's {positions} positions")
    return chosen


def _check_ids(model: nn.Module, ids: list[int]) -> None:
    vocab_size = _vocab_size_of(model)
    outside = sorted({token for token in ids if not 0 <= token < vocab_size})
    if outside:
        raise ValueError(
            f"token ids {outside[:5]} are outside the model's vocabulary of {vocab_size}; "
            "the tokenizer and the model do not belong together"
        )


@torch.no_grad()
def _vocab_size_of(model: nn.Module) -> int:
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


# --- one more token for each row ---------------------------------------------------------------------------------------
#
# The same network as transformer.py, laid out for a single new token. Transformer.forward serves any number of tokens; for one
# of them most of its time goes into calls and copies, not into products. Here the weights are taken out of the modules once
# (nothing is copied), a token has no time axis, and keys and values that several heads share are never repeated.


class GPT2Weights(NamedTuple):
    """Of one layer, in the order of use."""

    norm_1: tuple[Tensor, Tensor]
    c_attn: tuple[Tensor, Tensor]  # bias, weight [I, O]
    c_proj: tuple[Tensor, Tensor]
    norm_2: tuple[Tensor, Tensor]
    c_fc: tuple[Tensor, Tensor]
    c_out: tuple[Tensor, Tensor]


class LlamaWeights(NamedTuple):
    """Of one layer, in the order of use; every weight [O, I]."""

    norm_1: Tensor
    qkv: tuple[Tensor, ...]  # one, where they lie one behind the other (lay_out), else three
    qk_norm: Tensor | None  # qwen3: of each head of queries, then of keys
    o: Tensor
    norm_2: Tensor
    gate_up: tuple[Tensor, ...]  # the same, one or two
    down: Tensor


def can_decode(model: nn.Module) -> bool:
    """Whether every module is transformer.py's own, and nobody hooked, wrapped or replaced any of them."""
    return type(model) is Transformer and all(_is_plain(part) for part in model.modules() if part is not model)


def _is_plain(part: nn.Module) -> bool:
    torchs = type(part) in (nn.Embedding, nn.LayerNorm, nn.Linear, nn.ModuleList)
    ours = torchs or type(part).__module__ == "lamplighter.model.transformer"
    wrapped = "forward" in part.__dict__ and not isinstance(part.forward, RecomputedForward)
    hooks = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
    global_hooks = nn.modules.module._has_any_global_hook()  # type: ignore[no-untyped-call]
    return ours and not wrapped and not hooks and not global_hooks


class Decoder:
    """A model and its cache, one token at a time. `step` moves the cache's position; of a RowCache, each row's own."""

    def __init__(self, model: Transformer, cache: KVCache | RowCache) -> None:
        self.shape, self.cache, self.head_VC = model.shape, cache, model.head_weight().detach()
        if model.shape.family == "gpt2":
            body = model.transformer
            self.embedding, self.positions = body.wte.weight.detach(), body.wpe.weight.detach()
            self.last_norm = _norm_of(body.ln_f)
            self.gpt2 = [_gpt2_weights(layer) for layer in body.h]
        else:
            self.embedding = model.model.embed_tokens.weight.detach()
            self.end_norm = model.model.norm.weight.detach()
            self.llama = [_llama_weights(layer) for layer in model.model.layers]
            every_S = torch.arange(cache.length, device=self.embedding.device)
            cos, sin = rotary_cos_sin(every_S, model.shape.head_width, model.shape.rope_theta)
            half = model.shape.head_width // 2
            self.cos_SD, self.sin_SD = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    @torch.inference_mode()
    def step(self, ids_B: Tensor) -> Tensor:
        """Logits [B, V] after one more id per row."""
        furthest = self.cache.furthest if isinstance(self.cache, RowCache) else self.cache.position
        if furthest >= self.cache.length:
            raise ValueError(f"one more token does not fit the cache's {self.cache.length}")
        x_BC = self.gpt2_step(ids_B) if self.shape.family == "gpt2" else self.llama_step(ids_B)
        if isinstance(self.cache, RowCache):
            self.cache.advance()
        else:
            self.cache.position += 1
        return decode_linear(x_BC, self.head_VC)

    def gpt2_step(self, ids_B: Tensor) -> Tensor:
        shape, size = self.shape, (self.shape.width,)
        B, heads = len(ids_B), (len(ids_B), 3, shape.kv_heads, shape.head_width)
        x_BC = self.embedding[ids_B] + self.positions[self.cache.position]
        for layer, part in enumerate(self.gpt2):
            normed_BC = functional.layer_norm(x_BC, size, *part.norm_1, shape.norm_eps)
            qkv_B3HD = decode_linear_t(normed_BC, *part.c_attn).view(heads)
            mixed_BC = self.attend(layer, qkv_B3HD[:, 0], qkv_B3HD[:, 1:]).view(B, -1)
            x_BC = x_BC + decode_linear_t(mixed_BC, *part.c_proj)
            normed_BC = functional.layer_norm(x_BC, size, *part.norm_2, shape.norm_eps)
            inner_BM = functional.gelu(decode_linear_t(normed_BC, *part.c_fc), approximate="tanh")
            x_BC = x_BC + decode_linear_t(inner_BM, *part.c_out)
        return functional.layer_norm(x_BC, size, *self.last_norm, shape.norm_eps)

    def llama_step(self, ids_B: Tensor) -> Tensor:
        shape, B = self.shape, len(ids_B)
        cos_D, sin_D = self.cos_SD[self.cache.position], self.sin_SD[self.cache.position]
        if isinstance(self.cache, RowCache):  # each row at a place of its own
            cos_D, sin_D = cos_D[:, None], sin_D[:, None]
        heads, turned = (B, -1, shape.head_width), shape.heads + shape.kv_heads
        x_BC = self.embedding[ids_B]
        for layer, part in enumerate(self.llama):
            normed_BC = rms_norm(x_BC, part.norm_1, shape.norm_eps)
            qkv = _side_by_side(normed_BC, part.qkv).view(heads)
            qk = qkv[:, :turned]  # rotated together
            if part.qk_norm is not None:
                qk = part.qk_norm * functional.rms_norm(qk.float(), heads[2:], None, shape.norm_eps).type_as(qk)
            first, second = qk.chunk(2, dim=-1)
            qk = (qk * cos_D + torch.cat((second, first), dim=-1) * sin_D).type_as(x_BC)
            kv_B2KD = torch.stack((qk[:, shape.heads :], qkv[:, turned:]), dim=1)
            mixed_BC = self.attend(layer, qk[:, : shape.heads], kv_B2KD).reshape(B, -1)
            x_BC = x_BC + decode_linear(mixed_BC, part.o)
            normed_BC = rms_norm(x_BC, part.norm_2, shape.norm_eps)
            gate_BM, up_BM = _side_by_side(normed_BC, part.gate_up).chunk(2, dim=-1)
            x_BC = x_BC + decode_linear(functional.silu(gate_BM) * up_BM, part.down)
        return rms_norm(x_BC, self.end_norm, shape.norm_eps)

    def attend(self, layer: int, q_BHD: Tensor, kv_B2KD: Tensor) -> Tensor:
        """Store the new key and value, and attend to all so far; heads that share a key are rows of one query matrix."""
        q_BKGD = q_BHD.view(len(q_BHD), self.shape.kv_heads, -1, self.shape.head_width)
        if isinstance(self.cache, RowCache):
            k_BKSD, v_BKSD = self.cache.put(layer, kv_B2KD)
            return functional.scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD, self.cache.mask)
        cache_B2KSD, position = self.cache.stored[layer], self.cache.position
        cache_B2KSD.select(3, position).copy_(kv_B2KD)
        k_BKSD, v_BKSD = cache_B2KSD.narrow(3, 0, position + 1).unbind(1)
        return functional.scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD)


def rms_norm(x_BC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    return weight_C * functional.rms_norm(x_BC.float(), weight_C.shape, None, eps).type_as(x_BC)


def _norm_of(norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    return norm.weight.detach(), norm.bias.detach()


def _gpt2_weights(layer: nn.Module) -> GPT2Weights:
    assert isinstance(layer, GPT2Layer)
    products = (layer.attn.c_attn, layer.attn.c_proj, layer.mlp.c_fc, layer.mlp.c_proj)
    attn, proj, fc, out = ((part.bias.detach(), part.weight.detach()) for part in products)
    return GPT2Weights(
        norm_1=_norm_of(layer.ln_1), c_attn=attn, c_proj=proj, norm_2=_norm_of(layer.ln_2), c_fc=fc, c_out=out
    )


def _llama_weights(layer: nn.Module) -> LlamaWeights:
    assert isinstance(layer, LlamaLayer)
    qkv, gate_up = (_joined([part.weight.detach() for part in parts]) for parts in _used_together(layer))
    return LlamaWeights(
        layer.input_layernorm.weight.detach(), qkv, _qk_norm(layer.self_attn), layer.self_attn.o_proj.weight.detach(),
        layer.post_attention_layernorm.weight.detach(), gate_up, layer.mlp.down_proj.weight.detach(),
    )  # fmt: skip


def _qk_norm(attn: LlamaAttention) -> Tensor | None:
    """A row for each head."""
    if attn.q_norm is None or attn.k_norm is None:
        return None
    q_heads, k_heads = (part.out_features // attn.head_width for part in (attn.q_proj, attn.k_proj))
    q_norm, k_norm = attn.q_norm.weight.detach(), attn.k_norm.weight.detach()
    return torch.cat((q_norm.expand(q_heads, -1), k_norm.expand(k_heads, -1)))


def _used_together(layer: LlamaLayer) -> tuple[tuple[nn.Linear, ...], tuple[nn.Linear, ...]]:
    """The products of one layer that have their input in common."""
    attn, mlp = layer.self_attn, layer.mlp
    return (attn.q_proj, attn.k_proj, attn.v_proj), (mlp.gate_proj, mlp.up_proj)


def _side_by_side(x_BI: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    made = [decode_linear(x_BI, weight_OI) for weight_OI in weights]
    return made[0].contiguous() if len(made) == 1 else torch.cat(made, dim=-1)


def _joined(weights: list[Tensor]) -> tuple[Tensor, ...]:
    """One weight, where these are the parts of one, in order; else as they are."""
    first, at = weights[0], weights[0].data_ptr()
    for weight in weights:
        if weight.data_ptr() != at or not weight.is_contiguous():
            return tuple(weights)
        at += weight.nbytes
    if first.untyped_storage().data_ptr() != weights[-1].untyped_storage().data_ptr():
        return tuple(weights)
    return (first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride(), first.storage_offset()),)


@torch.no_grad()
def lay_out(model: nn.Module) -> None:
    """For a model that is only read: weights with one input lie one behind the other, as parts of one, in no more memory.

    A step is then fewer and larger products. Not for a model that is trained: its optimizer knows where its weights are.
    """
    if not isinstance(model, Transformer) or not can_decode(model) or model.shape.family == "gpt2":
        return
    for layer in model.model.layers:
        assert isinstance(layer, LlamaLayer)
        for parts in _used_together(layer):
            whole, at = torch.cat([part.weight for part in parts]), 0
            for part in parts:
                part.weight.data = whole[at : at + len(part.weight)]
                at += len(part.weight)
