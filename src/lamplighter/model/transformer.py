"""The network: GPT-2, Llama and Qwen3, with Hugging Face's own names and layouts, so nothing is converted on the way to disk.

In:  a Shape; token ids.
Out: logits, or the next-token loss.

Tensors carry their axes as a suffix: B batch, T time (new tokens), S time (all tokens looked at), C width, H heads,
D head width, V vocabulary, M MLP width. No module holds a buffer: the state dict is the parameters and nothing else.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from lamplighter.model import cpu
from lamplighter.model.chunked_loss import Counted, LossBuffers, chunked_loss, token_nats
from lamplighter.model.shape import Shape
from lamplighter.model.varlen import VarlenRows, attend_varlen

INIT_STD = 0.02
RotaryCosSin = tuple[Tensor, Tensor]


class LanguageModel(Protocol):
    """What a model of your own must do. Any nn.Module with a fitting forward does all of it.

    `model.family: "module:name"` imports `module` and calls
    `name(vocab_size=..., positions=..., layers=..., width=..., heads=..., dropout=...)`, which returns an nn.Module.
    Its forward takes ids of shape [batch, time] (int64) and returns logits of shape [batch, time, vocab_size]; those
    at time t may depend on ids up to t only. An attribute `positions` lets the sampler know its window.
    """

    def forward(self, ids_BT: Tensor) -> Tensor: ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...


class KVCache:
    """The keys and values of the tokens read so far, in memory taken once. `position` counts those tokens."""

    def __init__(self, shape: Shape, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        size = (shape.layers, batch, 2, shape.kv_heads, length, shape.head_width)  # 2: keys, values
        self.stored = torch.empty(size, device=device, dtype=dtype)
        self.length = length
        self.position = 0

    def extend(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new tokens of one layer; return all of that layer so far. The model then moves `position`.

        Tokens that every row has in common may be given as one row: it is stored in all of them.
        """
        rows, end = k_BHTD.shape[0], self.position + k_BHTD.shape[2]
        self.stored[layer, :, 0, :, self.position : end] = k_BHTD
        self.stored[layer, :, 1, :, self.position : end] = v_BHTD
        return self.stored[layer, :rows, 0, :, :end], self.stored[layer, :rows, 1, :, :end]


class AttentionContext(NamedTuple):
    """Where the new tokens stand, and what each may attend to."""

    positions: Tensor  # T, or BT when segments restart the count
    mask: (
        Tensor | None
    )  # true where a token may attend, or what is added to the scores; None: every token to all before it
    cache: KVCache | None
    varlen: VarlenRows | None = None  # packed rows without a mask


def attention_context(
    ids_BT: Tensor, cache: KVCache | None, segments_BT: Tensor | None, varlen: VarlenRows | None = None
) -> AttentionContext:
    if varlen is not None:
        return AttentionContext(varlen.positions, None, None, varlen)
    T = ids_BT.shape[1]
    start = 0 if cache is None else cache.position
    if segments_BT is not None:
        causal_TT = torch.ones(T, T, dtype=torch.bool, device=ids_BT.device).tril()
        visible_BTT = causal_TT & (segments_BT[:, :, None] == segments_BT[:, None, :])
        mask_B1TT = visible_BTT[:, None]
        if ids_BT.device.type != "cpu":
            mask_B1TT = as_added(mask_B1TT)
        return AttentionContext(visible_BTT.sum(-1) - 1, mask_B1TT, None)  # position = how many come before
    positions_T = torch.arange(start, start + T, device=ids_BT.device)
    if start == 0 or T == 1:
        return AttentionContext(positions_T, None, cache)
    mask_TS = torch.ones(T, start + T, dtype=torch.bool, device=ids_BT.device).tril(diagonal=start)
    return AttentionContext(positions_T, mask_TS, cache)


def as_added(mask: Tensor) -> Tensor:
    """The mask as what is added to the scores, in the type that is computed in: a GPU's kernels turn a mask of booleans into
    this in every layer, and each layer keeps its own until the backward pass."""
    kind = mask.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, float("-inf"))


def attend_in(context: AttentionContext, q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, dropout: float) -> Tensor:
    """Attention as the context wants it."""
    if context.varlen is not None:
        return attend_varlen(q_BHTD, k_BHSD, v_BHSD, context.varlen)
    return attend(q_BHTD, k_BHSD, v_BHSD, context.mask, dropout)


def attend(q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Causal attention; keys and values shared by a group of heads are repeated for each.

    Repeated by hand where there is a mask: with one, CUDA's fused kernels refuse enable_gqa and fall back to a slow one that
    stores all scores. Without one a GPU shares them by itself.
    """
    groups = q_BHTD.shape[1] // k_BHSD.shape[1]
    shares = mask is None and q_BHTD.device.type == "cuda"
    if groups > 1 and not shares:
        k_BHSD = k_BHSD.repeat_interleave(groups, dim=1)
        v_BHSD = v_BHSD.repeat_interleave(groups, dim=1)
    if cpu.suits_attention(q_BHTD, k_BHSD.shape[2], dropout):  # a kernel of our own, the same arithmetic
        mixed_BHTD = cpu.block_attention(q_BHTD, k_BHSD, v_BHSD, mask)
    else:
        is_causal = mask is None and q_BHTD.shape[2] > 1
        mixed_BHTD = functional.scaled_dot_product_attention(
            q_BHTD, k_BHSD, v_BHSD, mask, dropout, is_causal=is_causal, enable_gqa=shares and groups > 1
        )
    return mixed_BHTD.transpose(1, 2).flatten(2)


def _split_heads(x_BTC: Tensor, head_width: int, norm: nn.Module | None = None) -> Tensor:
    B, T, C = x_BTC.shape
    x_BTHD = x_BTC.view(B, T, C // head_width, head_width)
    return (x_BTHD if norm is None else norm(x_BTHD)).transpose(1, 2)


# --- GPT-2 ---------------------------------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """A linear layer whose weight is stored [in, out], as GPT-2's files hold it."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_in, width_out))
        self.bias = nn.Parameter(torch.zeros(width_out))
        nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.t(), self.bias)


class GPT2Attention(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.layer, self.head_width, self.dropout = layer, shape.head_width, shape.dropout
        self.c_attn = Conv1D(shape.width, 3 * shape.width)
        self.c_proj = Conv1D(shape.width, shape.width)

    def forward(self, x_BTC: Tensor, context: AttentionContext) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (_split_heads(part, self.head_width) for part in self.c_attn(x_BTC).chunk(3, dim=-1))
        if context.cache is not None:
            k_BHTD, v_BHTD = context.cache.extend(self.layer, k_BHTD, v_BHTD)
        mixed_BTC = attend_in(context, q_BHTD, k_BHTD, v_BHTD, self.dropout if self.training else 0.0)
        return functional.dropout(self.c_proj(mixed_BTC), self.dropout, self.training)


class GPT2MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.c_fc = Conv1D(shape.width, shape.mlp_width)
        self.c_proj = Conv1D(shape.mlp_width, shape.width)

    def forward(self, x_BTC: Tensor) -> Tensor:
        x_BTM = functional.gelu(self.c_fc(x_BTC), approximate="tanh")
        return functional.dropout(self.c_proj(x_BTM), self.dropout, self.training)


class GPT2Layer(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width, eps=shape.norm_eps)
        self.attn = GPT2Attention(shape, layer)
        self.ln_2 = nn.LayerNorm(shape.width, eps=shape.norm_eps)
        self.mlp = GPT2MLP(shape)

    def forward(self, x_BTC: Tensor, context: AttentionContext) -> Tensor:
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC), context)
        out_BTC: Tensor = x_BTC + self.mlp(self.ln_2(x_BTC))
        return out_BTC


class GPT2Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.wte = nn.Embedding(shape.vocab_size, shape.width)
        self.wpe = nn.Embedding(shape.positions, shape.width)
        self.h = nn.ModuleList(GPT2Layer(shape, layer) for layer in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width, eps=shape.norm_eps)

    def forward(self, ids_BT: Tensor, context: AttentionContext) -> Tensor:
        x_BTC: Tensor = self.wte(ids_BT) + self.wpe(context.positions)
        x_BTC = functional.dropout(x_BTC, self.dropout, self.training)
        for layer in self.h:
            x_BTC = layer(x_BTC, context)
        normed_BTC: Tensor = self.ln_f(x_BTC)
        return normed_BTC


# --- Llama, and Qwen3: the same with queries and keys that are normalised ------------------------------------------------


class RMSNorm(nn.Module):
    """Hugging Face's arithmetic: the norm in float32, then back to the input's type, then the weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.weight * functional.rms_norm(x_BTC.float(), self.weight.shape, None, self.eps).type_as(x_BTC)


def rotary_cos_sin(positions: Tensor, head_width: int, theta: float) -> RotaryCosSin:
    """Cosine and sine of how far each position rotates each pair of dimensions: 1TD, or B1TD with segments."""
    # Always float32: a bfloat16 angle would be wrong by whole radians after a few hundred positions.
    exponents_D = torch.arange(0, head_width, 2, device=positions.device, dtype=torch.float32) / head_width
    angles = positions.float()[..., None] * (1.0 / theta**exponents_D)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-3)
    return angles.cos(), angles.sin()


def _apply_rotary(x_BHTD: Tensor, rotary: RotaryCosSin) -> Tensor:
    """RoPE: rotate the pairs (i, i + D/2), the "rotate half" convention of Hugging Face's llama files."""
    cos, sin = rotary
    first, second = x_BHTD.chunk(2, dim=-1)
    half_BHTD = torch.cat((-second, first), dim=-1)
    return (x_BHTD * cos + half_BHTD * sin).type_as(x_BHTD)


class LlamaAttention(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.layer, self.head_width, self.dropout = layer, shape.head_width, shape.dropout
        kv_width = shape.kv_heads * shape.head_width
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.width, kv_width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)
        normalises = shape.family == "qwen3"
        self.q_norm = RMSNorm(shape.head_width, shape.norm_eps) if normalises else None
        self.k_norm = RMSNorm(shape.head_width, shape.norm_eps) if normalises else None

    def forward(self, x_BTC: Tensor, context: AttentionContext, rotary: RotaryCosSin) -> Tensor:
        q_BHTD = _apply_rotary(_split_heads(self.q_proj(x_BTC), self.head_width, self.q_norm), rotary)
        k_BHTD = _apply_rotary(_split_heads(self.k_proj(x_BTC), self.head_width, self.k_norm), rotary)
        v_BHTD = _split_heads(self.v_proj(x_BTC), self.head_width)
        if context.cache is not None:
            k_BHTD, v_BHTD = context.cache.extend(self.layer, k_BHTD, v_BHTD)
        mixed_BTC = attend_in(context, q_BHTD, k_BHTD, v_BHTD, self.dropout if self.training else 0.0)
        out_BTC: Tensor = self.o_proj(mixed_BTC)
        return out_BTC


class LlamaMLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = nn.Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out_BTC: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))
        return out_BTC


class LlamaLayer(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(shape, layer)
        self.mlp = LlamaMLP(shape)
        self.input_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_eps)

    def forward(self, x_BTC: Tensor, context: AttentionContext, rotary: RotaryCosSin) -> Tensor:
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), context, rotary)
        out_BTC: Tensor = x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))
        return out_BTC


class LlamaBody(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width, self.theta = shape.head_width, shape.rope_theta
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(LlamaLayer(shape, layer) for layer in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.norm_eps)

    def forward(self, ids_BT: Tensor, context: AttentionContext) -> Tensor:
        x_BTC: Tensor = self.embed_tokens(ids_BT)
        rotary = rotary_cos_sin(context.positions, self.head_width, self.theta)
        for layer in self.layers:
            x_BTC = layer(x_BTC, context, rotary)
        normed_BTC: Tensor = self.norm(x_BTC)
        return normed_BTC


# --- all ----------------------------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """Any of the families. A tied head has no parameter of its own: it is the embedding, so every tensor exists once.

    A new one holds numbers nobody chose: init_weights or load_weights comes next.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.loss_buffers = LossBuffers()
        if shape.family == "gpt2":
            self.transformer = GPT2Body(shape)
        else:
            self.model = LlamaBody(shape)
        if not shape.tie_embeddings:
            self.lm_head = nn.Linear(shape.width, shape.vocab_size, bias=False)

    def forward(
        self,
        ids_BT: Tensor,
        cache: KVCache | None = None,
        last_only: bool = False,
        segments_BT: Tensor | None = None,
        targets_BT: Tensor | None = None,
        scale: float | Tensor = 1.0,
        counted: Counted | None = None,
        varlen: VarlenRows | None = None,
        each: bool = False,
    ) -> Tensor:
        """Logits [B, T, V], or [B, 1, V] with last_only; with targets_BT their loss instead: scale x the sum of nats, or
        the nats of `each` counted target.

        With a cache, ids_BT continue what it holds. With segments_BT (an integer per token), tokens look only at
        tokens of the same segment, and each segment counts its positions from zero: packed documents stay apart;
        `varlen` says the same of a batch for a kernel that needs no mask.
        """
        self.check_room(ids_BT, cache, segments_BT)
        context = attention_context(ids_BT, cache, segments_BT, varlen)
        body = self.transformer if self.shape.family == "gpt2" else self.model
        x_BTC: Tensor = body(ids_BT, context)
        if cache is not None:
            cache.position += ids_BT.shape[1]
        if targets_BT is not None:
            head = self.head_weight()
            if each:
                return token_nats(x_BTC, head, targets_BT, buffers=self.loss_buffers, counted=counted)
            return chunked_loss(x_BTC, head, targets_BT, scale, buffers=self.loss_buffers, counted=counted)
        return functional.linear(x_BTC[:, -1:] if last_only else x_BTC, self.head_weight())

    def head_weight(self) -> Tensor:
        """The [V, C] matrix that turns the last layer into logits: the embedding itself where they are tied."""
        if not self.shape.tie_embeddings:
            return self.lm_head.weight
        return self.transformer.wte.weight if self.shape.family == "gpt2" else self.model.embed_tokens.weight

    def check_room(self, ids_BT: Tensor, cache: KVCache | None, segments_BT: Tensor | None) -> None:
        length = ids_BT.shape[1] + (0 if cache is None else cache.position)
        if length > self.shape.positions:
            raise ValueError(f"{length} tokens do not fit the model's {self.shape.positions} positions")
        if cache is not None and length > cache.length:
            raise ValueError(f"{length} tokens do not fit the cache's {cache.length}")
        if cache is not None and segments_BT is not None:
            raise ValueError("a cache and segments do not go together: a cache holds one document per row")


def next_token_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """The sum of cross entropy in nats over targets >= 0, in float32. A negative target is not counted."""
    targets_BT = targets_BT.masked_fill(targets_BT < 0, -1)
    return functional.cross_entropy(
        logits_BTV.float().flatten(0, 1), targets_BT.flatten(), ignore_index=-1, reduction="sum"
    )


def token_loss(
    model: nn.Module,
    ids_BT: Tensor,
    targets_BT: Tensor,
    segments_BT: Tensor | None = None,
    *,
    whole: bool = False,
    scale: float | Tensor = 1.0,
    counted: Counted | None = None,
    varlen: VarlenRows | None = None,
) -> Tensor:
    """`scale` times that sum: a chunk of rows of logits at a time, or from all logits as a whole.

    With segments, packed examples do not see each other. A model of one's own always gives its logits as a whole.
    """
    if isinstance(model, Transformer) and not whole:
        more = {"scale": scale, "counted": counted, "varlen": varlen}
        loss: Tensor = model(ids_BT, segments_BT=segments_BT, targets_BT=targets_BT, **more)
        return loss
    logits_BTV = model(ids_BT) if segments_BT is None else model(ids_BT, segments_BT=segments_BT)
    return next_token_loss(logits_BTV, targets_BT) * scale


def token_losses(
    model: nn.Module,
    ids_BT: Tensor,
    targets_BT: Tensor,
    segments_BT: Tensor | None = None,
    *,
    whole: bool = False,
    counted: Counted | None = None,
    varlen: VarlenRows | None = None,
) -> Tensor:
    """The cross entropy of each target >= 0, in their order, [N] in float32."""
    if isinstance(model, Transformer) and not whole:
        nats: Tensor = model(
            ids_BT, segments_BT=segments_BT, targets_BT=targets_BT, counted=counted, varlen=varlen, each=True
        )
        return nats
    logits_BTV = model(ids_BT) if segments_BT is None else model(ids_BT, segments_BT=segments_BT)
    flat_NV, targets_N = logits_BTV.flatten(0, 1), targets_BT.flatten()
    if counted is not None and counted.places is not None:
        flat_NV, targets_N = flat_NV.index_select(0, counted.places), targets_N.index_select(0, counted.places)
    return functional.cross_entropy(flat_NV.float(), targets_N, reduction="none")
