"""One more token for each row: the same network as `transformer`, laid out for a single new token.

In:  a Transformer, the cache of what it has read, one new id per row.
Out: the logits after that id.

`Transformer.forward` serves any number of tokens; for one of them most of its time goes into calls and copies, not into
products. Here the weights are taken out of the modules once (nothing is copied), a token has no time axis, keys and
values that several heads share are never repeated, and every product reads its weight in the order that is fastest for
a few rows. Axes: B rows, C width, H heads, G heads that share a key, K keys' heads, D head width, S time, V vocabulary,
I and O what a product takes and gives.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from lamplighter.model.transformer import (
    GPT2Layer,
    KVCache,
    LlamaLayer,
    RMSNorm,
    Transformer,
    are_ours,
    is_bare,
    turn_of,
)

LARGE = 1 << 18  # numbers of a weight, from which on it is read in pieces
PIECES = 8  # of a weight [O, I]
PARTS = 4  # of a weight [I, O], whose products are added up
FEW_ROWS = 16  # in which that pays
TURNED = 4  # rows, for which even a flat weight is better taken first


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
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    norm_2: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def can_decode(model: nn.Module) -> bool:
    """Whether every part is one of `transformer`'s own, as it is: what somebody put, hung or wrapped there is asked."""
    if type(model) is not Transformer:
        return False
    gpt2 = model.shape.family == "gpt2"
    layers = model.transformer.h if gpt2 else model.model.layers
    body: nn.Module = model.transformer if gpt2 else model.model
    ends = [part for part in body.children() if part is not layers]
    plain = all(type(part) in (nn.Embedding, nn.LayerNorm, RMSNorm) and is_bare(part) for part in ends)
    return plain and is_bare(body) and all(are_ours(layer) for layer in layers)


class Decoder:
    """A model and its cache, one token at a time. `step` moves the cache's position."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.shape, self.cache, self.head_VC = model.shape, cache, model.head_weight().detach()
        if model.shape.family == "gpt2":
            body = model.transformer
            self.embedding, self.places = body.wte.weight.detach(), body.wpe.weight.detach()
            self.last_norm = norm_of(body.ln_f)
            self.gpt2 = [gpt2_weights(layer) for layer in body.h]
        else:
            self.embedding = model.model.embed_tokens.weight.detach()
            self.end_norm = model.model.norm.weight.detach()
            self.llama = [llama_weights(layer) for layer in model.model.layers]
            every_S = torch.arange(cache.length, device=self.embedding.device)
            cos, sin = turn_of(every_S, model.shape.head_width, model.shape.rope_theta)
            half = model.shape.head_width // 2
            self.cos_SD, self.sin_SD = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)

    @torch.inference_mode()
    def step(self, ids_B: Tensor) -> Tensor:
        """Logits [B, V] after one more id per row."""
        if self.cache.position >= self.cache.length:
            raise ValueError(f"one more token does not fit the cache's {self.cache.length}")
        x_BC = self.gpt2_step(ids_B) if self.shape.family == "gpt2" else self.llama_step(ids_B)
        self.cache.position += 1
        return product(x_BC, self.head_VC)

    def gpt2_step(self, ids_B: Tensor) -> Tensor:
        shape, size = self.shape, (self.shape.width,)
        B, heads = len(ids_B), (len(ids_B), 3, shape.kv_heads, shape.head_width)
        x_BC = self.embedding[ids_B] + self.places[self.cache.position]
        for layer, part in enumerate(self.gpt2):
            normed_BC = functional.layer_norm(x_BC, size, *part.norm_1, shape.norm_eps)
            qkv_B3HD = product_and_bias(normed_BC, *part.c_attn).view(heads)
            mixed_BC = self.look(layer, qkv_B3HD[:, 0], qkv_B3HD[:, 1:]).view(B, -1)
            x_BC = x_BC + product_and_bias(mixed_BC, *part.c_proj)
            normed_BC = functional.layer_norm(x_BC, size, *part.norm_2, shape.norm_eps)
            inner_BM = functional.gelu(product_and_bias(normed_BC, *part.c_fc), approximate="tanh")
            x_BC = x_BC + product_and_bias(inner_BM, *part.c_out)
        return functional.layer_norm(x_BC, size, *self.last_norm, shape.norm_eps)

    def llama_step(self, ids_B: Tensor) -> Tensor:
        shape, B = self.shape, len(ids_B)
        cos_D, sin_D = self.cos_SD[self.cache.position], self.sin_SD[self.cache.position]
        heads, kv_heads = (B, shape.heads, shape.head_width), (B, shape.kv_heads, shape.head_width)
        x_BC = self.embedding[ids_B]
        for layer, part in enumerate(self.llama):
            normed_BC = rms_norm(x_BC, part.norm_1, shape.norm_eps)
            q_BHD, k_BKD = product(normed_BC, part.q).view(heads), product(normed_BC, part.k).view(kv_heads)
            qk = torch.cat((q_BHD, k_BKD), dim=1)  # turned together
            first, second = qk.chunk(2, dim=-1)
            qk = (qk * cos_D + torch.cat((second, first), dim=-1) * sin_D).type_as(x_BC)
            v_BKD = product(normed_BC, part.v).view(kv_heads)
            kv_B2KD = torch.stack((qk[:, shape.heads :], v_BKD), dim=1)
            mixed_BC = self.look(layer, qk[:, : shape.heads], kv_B2KD).reshape(B, -1)
            x_BC = x_BC + product(mixed_BC, part.o)
            normed_BC = rms_norm(x_BC, part.norm_2, shape.norm_eps)
            inner_BM = functional.silu(product(normed_BC, part.gate)) * product(normed_BC, part.up)
            x_BC = x_BC + product(inner_BM, part.down)
        return rms_norm(x_BC, self.end_norm, shape.norm_eps)

    def look(self, layer: int, q_BHD: Tensor, kv_B2KD: Tensor) -> Tensor:
        """Store the new key and value, and look at all so far: heads that share a key ask it side by side, as rows."""
        cache_B2KSD, place = self.cache.stored[layer], self.cache.position
        cache_B2KSD.select(3, place).copy_(kv_B2KD)
        k_BKSD, v_BKSD = cache_B2KSD.narrow(3, 0, place + 1).unbind(1)
        q_BKGD = q_BHD.view(len(q_BHD), self.shape.kv_heads, -1, self.shape.head_width)
        return functional.scaled_dot_product_attention(q_BKGD, k_BKSD, v_BKSD)


def product(x_BI: Tensor, weight_OI: Tensor) -> Tensor:
    """x times the weight. For a few rows and a tall weight the libraries are twice as fast the other way round; for one row
    and a weight beyond the nearest caches if it is given to them in pieces.
    """
    if len(x_BI) > 1 and (weight_OI.shape[0] >= weight_OI.shape[1] or len(x_BI) <= TURNED):
        return (weight_OI @ x_BI.t()).t()
    return one_row(x_BI, weight_OI) if len(x_BI) == 1 and in_pieces(weight_OI) else functional.linear(x_BI, weight_OI)


def product_and_bias(x_BI: Tensor, bias_O: Tensor, weight_IO: Tensor) -> Tensor:
    """The same for a weight that is stored the other way round: a few rows are multiplied with it part by part."""
    if len(x_BI) > FEW_ROWS or len(weight_IO) % PARTS or not in_pieces(weight_IO):
        return torch.addmm(bias_O, x_BI, weight_IO)
    parts = x_BI.view(len(x_BI), PARTS, -1).transpose(0, 1)
    return torch.bmm(parts, weight_IO.view(PARTS, -1, weight_IO.shape[1])).sum(0).add_(bias_O)


def in_pieces(weight: Tensor) -> bool:
    """Measured in float32, on a CPU."""
    return weight.numel() >= LARGE and weight.dtype == torch.float32 and weight.device.type == "cpu"


def one_row(x_1I: Tensor, weight_OI: Tensor) -> Tensor:
    """The weight as some pieces of equal height, each times the same row; what is left over is small."""
    whole = len(weight_OI) // PIECES * PIECES
    pieces = weight_OI[:whole].view(PIECES, whole // PIECES, -1)
    made_1O = torch.bmm(pieces, x_1I.t().expand(PIECES, -1, 1)).view(1, whole)
    if whole == len(weight_OI):
        return made_1O
    return torch.cat((made_1O, functional.linear(x_1I, weight_OI[whole:])), dim=-1)


def rms_norm(x_BC: Tensor, weight_C: Tensor, eps: float) -> Tensor:
    return weight_C * functional.rms_norm(x_BC.float(), weight_C.shape, None, eps).type_as(x_BC)


def norm_of(norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    return norm.weight.detach(), norm.bias.detach()


def gpt2_weights(layer: nn.Module) -> GPT2Weights:
    assert isinstance(layer, GPT2Layer)
    products = (layer.attn.c_attn, layer.attn.c_proj, layer.mlp.c_fc, layer.mlp.c_proj)
    attn, proj, fc, out = ((part.bias.detach(), part.weight.detach()) for part in products)
    return GPT2Weights(norm_of(layer.ln_1), attn, proj, norm_of(layer.ln_2), fc, out)


def llama_weights(layer: nn.Module) -> LlamaWeights:
    assert isinstance(layer, LlamaLayer)
    look, mlp = layer.self_attn, layer.mlp
    parts = (layer.input_layernorm, look.q_proj, look.k_proj, look.v_proj, look.o_proj, layer.post_attention_layernorm)
    return LlamaWeights(*(part.weight.detach() for part in (*parts, mlp.gate_proj, mlp.up_proj, mlp.down_proj)))
