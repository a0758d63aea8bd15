"""The network: GPT-2 and Llama, with Hugging Face's own names and layouts, so nothing is converted on the way to disk.

In:  a Shape; token ids; a folder of safetensors.
Out: logits, the next-token loss, initial weights, the tensors to store.

Tensors carry their axes as a suffix: B batch, T time (new tokens), S time (all tokens looked at), C width, H heads,
D head width, V vocabulary, M MLP width. No module holds a buffer: the state dict is the parameters and nothing else.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from lamplighter.model import attention, by_hand, products
from lamplighter.model import tied_embedding as tied
from lamplighter.model.chunked_loss import Blocks, head_loss
from lamplighter.model.recompute import Again
from lamplighter.model.shape import Shape
from lamplighter.model.tied_embedding import Tie

INIT_STD = 0.02
RESIDUAL_PROJECTIONS = ("c_proj.weight", "o_proj.weight", "down_proj.weight")
# Constants that older transformers stored beside the weights; they are computed, not trained.
COMPUTED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


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


class Sight(NamedTuple):
    """Where the new tokens stand, and what each may look at."""

    places: Tensor  # T, or BT when segments restart the count
    mask: Tensor | None  # true where a token may look; None: every token at all before it
    cache: KVCache | None


def sight(ids_BT: Tensor, cache: KVCache | None, segments_BT: Tensor | None) -> Sight:
    T = ids_BT.shape[1]
    start = 0 if cache is None else cache.position
    if segments_BT is not None:
        causal_TT = torch.ones(T, T, dtype=torch.bool, device=ids_BT.device).tril()
        visible_BTT = causal_TT & (segments_BT[:, :, None] == segments_BT[:, None, :])
        return Sight(visible_BTT.sum(-1) - 1, visible_BTT[:, None], None)  # a place = how many come before it
    places_T = torch.arange(start, start + T, device=ids_BT.device)
    if start == 0 or T == 1:
        return Sight(places_T, None, cache)
    mask_TS = torch.ones(T, start + T, dtype=torch.bool, device=ids_BT.device).tril(diagonal=start)
    return Sight(places_T, mask_TS, cache)


def attend(q_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    """Causal attention; keys and values shared by a group of heads are repeated for each.

    Repeated by hand rather than by enable_gqa: with a mask, CUDA's fused kernels refuse the latter and fall back to a
    slow one that stores all scores.
    """
    groups = q_BHTD.shape[1] // k_BHSD.shape[1]
    if groups > 1:
        k_BHSD = k_BHSD.repeat_interleave(groups, dim=1)
        v_BHSD = v_BHSD.repeat_interleave(groups, dim=1)
    if attention.suits(q_BHTD, k_BHSD.shape[2], dropout):
        return attention.by_products(q_BHTD, k_BHSD, v_BHSD, mask).transpose(1, 2).flatten(2)
    causal = mask is None and q_BHTD.shape[2] > 1
    mixed_BHTD = functional.scaled_dot_product_attention(
        q_BHTD, k_BHSD, v_BHSD, attn_mask=mask, dropout_p=dropout, is_causal=causal
    )
    return mixed_BHTD.transpose(1, 2).flatten(2)


def split_heads(x_BTC: Tensor, head_width: int) -> Tensor:
    B, T, C = x_BTC.shape
    return x_BTC.view(B, T, C // head_width, head_width).transpose(1, 2)


# --- GPT-2 ---------------------------------------------------------------------------------------------------------


class Conv1D(nn.Module):
    """A linear layer whose weight is stored [in, out], as GPT-2's files hold it."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_in, width_out))
        self.bias = nn.Parameter(torch.zeros(width_out))
        nn.init.normal_(self.weight, std=INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        return products.turned(x, self.weight, self.bias)


class GPT2Attention(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.layer, self.head_width, self.dropout = layer, shape.head_width, shape.dropout
        self.c_attn = Conv1D(shape.width, 3 * shape.width)
        self.c_proj = Conv1D(shape.width, shape.width)

    def forward(self, x_BTC: Tensor, seen: Sight) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (split_heads(part, self.head_width) for part in self.c_attn(x_BTC).chunk(3, dim=-1))
        if seen.cache is not None:
            k_BHTD, v_BHTD = seen.cache.extend(self.layer, k_BHTD, v_BHTD)
        mixed_BTC = attend(q_BHTD, k_BHTD, v_BHTD, seen.mask, self.dropout if self.training else 0.0)
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

    def forward(self, x_BTC: Tensor, seen: Sight) -> Tensor:
        if by_hand.suits(x_BTC, seen.cache is not None) and are_ours(self):
            parts = (self.ln_1, self.attn.c_attn, self.attn.c_proj, self.ln_2, self.mlp.c_fc, self.mlp.c_proj)
            tensors = [tensor for part in parts for tensor in (part.weight, part.bias)]
            plain = not self.attn.dropout and not self.mlp.dropout and self.ln_1.eps == self.ln_2.eps
            if plain and by_hand.can_take(tensors):
                return by_hand.gpt2(x_BTC, seen.mask, self.attn.head_width, self.ln_1.eps, *tensors)
        x_BTC = x_BTC + self.attn(self.ln_1(x_BTC), seen)
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

    def forward(self, ids_BT: Tensor, seen: Sight, tie: Tie | None) -> Tensor:
        x_BTC: Tensor = tied.look_up(self.wte, ids_BT, tie) + self.wpe(seen.places)
        x_BTC = functional.dropout(x_BTC, self.dropout, self.training)
        for layer in self.h:
            x_BTC = layer(x_BTC, seen)
        normed_BTC: Tensor = self.ln_f(x_BTC)
        return normed_BTC


# --- Llama ---------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Hugging Face's arithmetic: the norm in float32, then back to the input's type, then the weight."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.eps = shape.norm_eps
        self.weight = nn.Parameter(torch.ones(shape.width))

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.weight * functional.rms_norm(x_BTC.float(), self.weight.shape, None, self.eps).type_as(x_BTC)


Turn = tuple[Tensor, Tensor]  # cosine and sine of how far each place turns each pair: 1TD, or B1TD with segments


def turn_of(places: Tensor, head_width: int, theta: float) -> Turn:
    # Always float32: a bfloat16 angle would be wrong by whole radians after a few hundred places.
    exponents_D = torch.arange(0, head_width, 2, device=places.device, dtype=torch.float32) / head_width
    angles = places.float()[..., None] * (1.0 / theta**exponents_D)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(-3)
    return angles.cos(), angles.sin()


def rotate(x_BHTD: Tensor, turn: Turn) -> Tensor:
    """RoPE: turn the pairs (i, i + D/2), the "rotate half" convention of Hugging Face's llama files."""
    cos, sin = turn
    first, second = x_BHTD.chunk(2, dim=-1)
    half_BHTD = torch.cat((-second, first), dim=-1)
    return (x_BHTD * cos + half_BHTD * sin).type_as(x_BHTD)


class Linear(nn.Linear):
    """torch's own, without a bias; a small step has its way of multiplying."""

    def forward(self, x: Tensor) -> Tensor:
        return products.linear(x, self.weight)


class LlamaAttention(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.layer, self.head_width, self.dropout = layer, shape.head_width, shape.dropout
        kv_width = shape.kv_heads * shape.head_width
        self.q_proj = Linear(shape.width, shape.width, bias=False)
        self.k_proj = Linear(shape.width, kv_width, bias=False)
        self.v_proj = Linear(shape.width, kv_width, bias=False)
        self.o_proj = Linear(shape.width, shape.width, bias=False)

    def forward(self, x_BTC: Tensor, seen: Sight, turn: Turn) -> Tensor:
        q_BHTD = rotate(split_heads(self.q_proj(x_BTC), self.head_width), turn)
        k_BHTD = rotate(split_heads(self.k_proj(x_BTC), self.head_width), turn)
        v_BHTD = split_heads(self.v_proj(x_BTC), self.head_width)
        if seen.cache is not None:
            k_BHTD, v_BHTD = seen.cache.extend(self.layer, k_BHTD, v_BHTD)
        mixed_BTC = attend(q_BHTD, k_BHTD, v_BHTD, seen.mask, self.dropout if self.training else 0.0)
        out_BTC: Tensor = self.o_proj(mixed_BTC)
        return out_BTC


class LlamaMLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.width, shape.mlp_width, bias=False)
        self.up_proj = Linear(shape.width, shape.mlp_width, bias=False)
        self.down_proj = Linear(shape.mlp_width, shape.width, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out_BTC: Tensor = self.down_proj(functional.silu(self.gate_proj(x_BTC)) * self.up_proj(x_BTC))
        return out_BTC


class LlamaLayer(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(shape, layer)
        self.mlp = LlamaMLP(shape)
        self.input_layernorm = RMSNorm(shape)
        self.post_attention_layernorm = RMSNorm(shape)

    def forward(self, x_BTC: Tensor, seen: Sight, turn: Turn) -> Tensor:
        if by_hand.suits(x_BTC, seen.cache is not None) and are_ours(self):
            attn, mlp, norm, norm_2 = self.self_attn, self.mlp, self.input_layernorm, self.post_attention_layernorm
            parts = (norm, attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, norm_2,
                     mlp.gate_proj, mlp.up_proj, mlp.down_proj)  # fmt: skip
            weights = [part.weight for part in parts]
            if not attn.dropout and norm.eps == norm_2.eps and by_hand.can_take(weights):
                return by_hand.llama(x_BTC, seen.mask, turn, attn.head_width, norm.eps, *weights)
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), seen, turn)
        out_BTC: Tensor = x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))
        return out_BTC


class LlamaBody(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width, self.theta = shape.head_width, shape.rope_theta
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.width)
        self.layers = nn.ModuleList(LlamaLayer(shape, layer) for layer in range(shape.layers))
        self.norm = RMSNorm(shape)

    def forward(self, ids_BT: Tensor, seen: Sight, tie: Tie | None) -> Tensor:
        turn = turn_of(seen.places, self.head_width, self.theta)
        x_BTC = tied.look_up(self.embed_tokens, ids_BT, tie)
        for layer in self.layers:
            x_BTC = layer(x_BTC, seen, turn)
        normed_BTC: Tensor = self.norm(x_BTC)
        return normed_BTC


# --- both ----------------------------------------------------------------------------------------------------------

PARTS = {GPT2Attention, GPT2MLP, Conv1D, nn.LayerNorm, LlamaAttention, LlamaMLP, Linear, RMSNorm}


def are_ours(layer: nn.Module) -> bool:
    """Whether a layer and every part of it are of this file as they are; what somebody put, hung or wrapped there is asked."""
    wrapped = "forward" in layer.__dict__ and not isinstance(layer.forward, Again)  # recompute's own is known
    if wrapped or hooks_of(layer) or type(layer) not in (GPT2Layer, LlamaLayer):
        return False
    return all(part is layer or (type(part) in PARTS and is_bare(part)) for part in layer.modules())


def is_bare(part: nn.Module) -> bool:
    return not hooks_of(part) and "forward" not in part.__dict__


def hooks_of(part: nn.Module) -> bool:
    own = part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
    return bool(own) or bool(nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


class Transformer(nn.Module):
    """Either family. A tied head has no parameter of its own: it is the embedding, so every tensor exists once.

    A new one holds numbers nobody chose: init_weights or load_weights comes next.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.blocks = Blocks()
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
        scale: float = 1.0,
    ) -> Tensor:
        """Logits [B, T, V], or [B, 1, V] with last_only; with targets_BT their loss instead: scale x the sum of nats.

        With a cache, ids_BT continue what it holds. With segments_BT (an integer per token), tokens look only at
        tokens of the same segment, and each segment counts its positions from zero: packed documents stay apart.
        """
        self.check_room(ids_BT, cache, segments_BT)
        seen = sight(ids_BT, cache, segments_BT)
        body = self.transformer if self.shape.family == "gpt2" else self.model
        tie = None if targets_BT is None else self.tie()
        x_BTC: Tensor = body(ids_BT, seen, tie)
        if cache is not None:
            cache.position += ids_BT.shape[1]
        if targets_BT is not None:
            return head_loss(x_BTC, self.head_weight(), targets_BT, scale, self.blocks, tie)
        return functional.linear(x_BTC[:, -1:] if last_only else x_BTC, self.head_weight())

    def head_weight(self) -> Tensor:
        """The [V, C] matrix that turns the last layer into logits: the embedding itself where they are tied."""
        if not self.shape.tie_embeddings:
            return self.lm_head.weight
        return self.transformer.wte.weight if self.shape.family == "gpt2" else self.model.embed_tokens.weight

    def tie(self) -> Tie | None:
        """Where the embedding is tied to the head, is torch's own without options, and nothing between the two can cut the graph:
        one gradient for both ends.
        """
        gpt2 = self.shape.family == "gpt2"
        table, layers = (
            (self.transformer.wte, self.transformer.h) if gpt2 else (self.model.embed_tokens, self.model.layers)
        )
        if not self.shape.tie_embeddings or type(table) is not nn.Embedding or not is_bare(table):
            return None
        plain = table.padding_idx is None and table.max_norm is None and not (table.scale_grad_by_freq or table.sparse)
        return tied.tie_for(table.weight) if plain and all(are_ours(layer) for layer in layers) else None

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


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """GPT-2's scheme, in place: normal(0, 0.02), residual projections smaller by sqrt(2 * layers), norms 1, biases 0.

    Drawn on the CPU in float32 by a generator of its own, so the same seed gives the same weights on every device,
    whatever else drew random numbers. Also fills a model built on the meta device and moved by to_empty.
    """
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / math.sqrt(2 * model.shape.layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        std = residual_std if name.endswith(RESIDUAL_PROJECTIONS) else INIT_STD
        parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


# --- on disk -------------------------------------------------------------------------------------------------------


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors to store, contiguous; one that is used under several names is there once, under its first."""
    return {name: tensor.contiguous() for name, tensor in stored_tensors(model).items()}


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    first_names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in model.state_dict().items() if name in first_names}


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Copy a folder's safetensors into the model's own tensors, in place. Nothing is touched unless everything fits.

    A missing file is a FileNotFoundError; a damaged file, or tensors that do not fit, a ValueError that names them.
    """
    targets = stored_tensors(model)
    with ExitStack() as open_files:
        found: dict[str, tuple[Any, str]] = {}  # our name -> the open file, and the name in it
        for path in weight_files(folder):
            file = open_files.enter_context(open_safetensors(path))
            names = [name for name in sorted(file.keys()) if not is_computed(model, name)]
            found |= {own_name(model, name): (file, name) for name in names}
        problems = tied_head_problems(model, found) + misfits(targets, found)
        if problems:
            more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError(f"the weights in {folder} do not fit this model:\n  " + "\n  ".join(problems[:5]) + more)
        for name, target in targets.items():
            file, stored = found[name]
            target.copy_(file.get_tensor(stored))


def weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        paths = [folder / "model.safetensors"]
    else:
        paths = [folder / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"no {path.name} in {folder}; weights are read from safetensors, never from pickles"
            )
    return paths


def open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error


def is_computed(model: nn.Module, stored: str) -> bool:
    return isinstance(model, Transformer) and stored.endswith(COMPUTED)


def own_name(model: nn.Module, stored: str) -> str:
    """GPT-2's original files lack the "transformer." that came later."""
    bare = not stored.startswith(("transformer.", "lm_head."))
    is_gpt2 = isinstance(model, Transformer) and model.shape.family == "gpt2"
    return f"transformer.{stored}" if bare and is_gpt2 else stored


def tied_head_problems(model: nn.Module, found: dict[str, tuple[Any, str]]) -> list[str]:
    """A tied head may be stored as well; then it must be the embedding. It is taken out of what was found."""
    if not (isinstance(model, Transformer) and model.shape.tie_embeddings and "lm_head.weight" in found):
        return []
    embedding = "transformer.wte.weight" if model.shape.family == "gpt2" else "model.embed_tokens.weight"
    head_file, head_name = found.pop("lm_head.weight")
    if embedding not in found:
        return []  # reported as missing
    file, name = found[embedding]
    if torch.equal(head_file.get_tensor(head_name), file.get_tensor(name)):
        return []
    return [f"lm_head.weight differs from {embedding}, although the config ties them"]


def misfits(targets: dict[str, Tensor], found: dict[str, tuple[Any, str]]) -> list[str]:
    missing = [f"{name} is missing" for name in targets if name not in found]
    unexpected = [f"{name} is unexpected" for name in found if name not in targets]
    misshapen = []
    for name in targets.keys() & found.keys():
        file, stored = found[name]
        here, there = list(targets[name].shape), list(file.get_slice(stored).get_shape())
        if here != there:
            misshapen.append(f"{name} is {there} in the file, {here} in the model")
    return missing + unexpected + sorted(misshapen)
