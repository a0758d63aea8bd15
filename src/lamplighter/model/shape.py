"""The shape of a model: its sizes, what they cost, and how Hugging Face writes them down.

In:  sizes chosen by a run, or the content of a config.json.
Out: a checked Shape, the config.json content for it, parameter and FLOP counts. No torch: plans are made without it.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Family = Literal["gpt2", "llama", "qwen3"]
FAMILIES: tuple[str, ...] = get_args(Family)  # built here; others by transformers, or by code of one's own


OWN_TYPE = "lamplighter-own"  # model_type in the config.json of a model by the user's own code


class NotOurs(ValueError):
    """A config.json that asks for something that the families here do not compute; transformers may."""


_LARGEST_SIZE = 1 << 40  # no size of a model; beyond it arithmetic itself gets slow
_LLAMA_MLP_MULTIPLE = 64  # matrix units like round sizes; 8/3 of the width is rounded up to this


@dataclass(frozen=True)
class Shape:
    """The sizes of one model. A zero for kv_heads or mlp_width stands for the family's usual value.

    `dropout` is the family's own: embeddings, attention and residuals for gpt2; attention alone for the others. qwen3 is llama with
    queries and keys that are normalised in each head.
    """

    family: Family
    vocab_size: int
    positions: int
    layers: int
    width: int
    heads: int
    kv_heads: int = 0  # 0: as many as heads
    mlp_width: int = 0  # 0: 4 x width (gpt2); 8/3 x width, rounded up to a multiple of 64 (the others)
    dropout: float = 0.0
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0  # not of gpt2
    tie_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"model family {self.family!r} is not known here; built in are {', '.join(FAMILIES)}")
        # A frozen dataclass is filled in once, here; after this every number is the real one.
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)
        object.__setattr__(self, "mlp_width", self.mlp_width or _usual_mlp_width(self.family, self.width))
        _check_sizes(self)
        _check_heads(self)
        _check_numbers(self)

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def _usual_mlp_width(family: str, width: int) -> int:
    if family == "gpt2":
        return 4 * width
    return -(-8 * width // (3 * _LLAMA_MLP_MULTIPLE)) * _LLAMA_MLP_MULTIPLE


def _check_sizes(shape: Shape) -> None:
    for name in ("vocab_size", "positions", "layers", "width", "heads", "kv_heads", "mlp_width"):
        value = getattr(shape, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


def _check_heads(shape: Shape) -> None:
    if shape.width % shape.heads:
        raise ValueError(f"width {shape.width} cannot be shared out over {shape.heads} heads; make it a multiple")
    if shape.heads % shape.kv_heads:
        raise ValueError(f"heads {shape.heads} must be a multiple of kv_heads {shape.kv_heads}")
    if shape.family == "gpt2" and shape.kv_heads != shape.heads:
        raise ValueError(
            f"kv_heads {shape.kv_heads}: gpt2 has one per head ({shape.heads}); llama and qwen3 can share them"
        )
    if shape.family != "gpt2" and shape.head_width % 2:
        raise ValueError(
            f"width / heads is {shape.head_width}, but {shape.family} turns pairs of numbers by position: it must be even"
        )


def _check_numbers(shape: Shape) -> None:
    if not 0.0 <= shape.dropout < 1.0:
        raise ValueError(f"dropout must be at least 0 and below 1, not {shape.dropout}")
    if not shape.norm_eps > 0.0:
        raise ValueError(f"norm_eps must be above 0, not {shape.norm_eps}")
    if not shape.rope_theta > 0.0:
        raise ValueError(f"rope_theta must be above 0, not {shape.rope_theta}")


# --- what it costs -------------------------------------------------------------------------------------------------


def count_parameters(shape: Shape) -> int:
    """Every trained number, once: a tied head is the embedding itself and is not counted again."""
    width = shape.width
    embeddings = shape.vocab_size * width
    head = 0 if shape.tie_embeddings else shape.vocab_size * width
    layers = shape.layers * matmul_parameters_per_layer(shape)
    if shape.family == "gpt2":
        positions = shape.positions * width
        biases_per_layer = 3 * width + width + shape.mlp_width + width
        norms = (2 * shape.layers + 1) * 2 * width  # weight and bias
        return embeddings + positions + layers + shape.layers * biases_per_layer + norms + head
    norms = (2 * shape.layers + 1) * width  # weight alone
    if shape.family == "qwen3":
        norms += 2 * shape.layers * shape.head_width
    return embeddings + layers + norms + head


def block_parameters(shape: Shape) -> int:
    """Of one block, with its norms and biases."""
    return count_parameters(replace(shape, layers=2)) - count_parameters(replace(shape, layers=1))


def matmul_parameters_per_layer(shape: Shape) -> int:
    """The weights of one layer that multiply every token: attention projections and MLP, no biases, no norms."""
    width, mlp_width = shape.width, shape.mlp_width
    if shape.family == "gpt2":
        return 4 * width * width + 2 * width * mlp_width
    kv_width = shape.kv_heads * shape.head_width
    return 2 * width * width + 2 * width * kv_width + 3 * width * mlp_width


def hidden_parameters(shape: Shape) -> int:
    """Of all matrices inside the blocks."""
    return shape.layers * matmul_parameters_per_layer(shape)


def orthogonalising_flops(shape: Shape) -> float:
    """Of the five Newton-Schulz steps that Muon takes with every matrix of the blocks, once for each optimizer step.

    A step of a matrix with m rows and n columns, m the smaller: two products with n and one of m x m.
    """
    sizes = (sorted(size) for size in block_linears(shape).values())
    return 5.0 * shape.layers * sum(4.0 * m * m * n + 2.0 * m**3 for m, n in sizes)


def block_linears(shape: Shape) -> dict[str, tuple[int, int]]:
    """The linear layers of one block: their names within it, and how many numbers go in and come out."""
    width, inner, kv = shape.width, shape.mlp_width, shape.kv_heads * shape.head_width
    if shape.family == "gpt2":
        return {
            "attn.c_attn": (width, 3 * width),
            "attn.c_proj": (width, width),
            "mlp.c_fc": (width, inner),
            "mlp.c_proj": (inner, width),
        }
    return {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width, kv),
        "self_attn.v_proj": (width, kv),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (width, inner),
        "mlp.up_proj": (width, inner),
        "mlp.down_proj": (inner, width),
    }


def frozen_bytes(shape: Shape, base_dtype: str) -> int:
    """A frozen model in memory: matrices of the layers as base_dtype says, the rest in fp32."""
    matrices, everything = shape.layers * matmul_parameters_per_layer(shape), count_parameters(shape)
    each = {"fp32": 4, "bf16": 2, "int8": 1}[base_dtype]
    scales = 4 * shape.layers * sum(out for _, out in block_linears(shape).values()) if base_dtype == "int8" else 0
    return each * matrices + 4 * (everything - matrices) + scales


def flops_per_token(shape: Shape, seq_len: int) -> float:
    """FLOPs to train on one token, in a sequence of seq_len tokens: 6 * N + 12 * layers * width * seq_len.

    N = layers * matmul_parameters_per_layer + vocab_size * width. The last term is the head, which is a matrix product
    whether tied or not; looking up tokens and positions is no arithmetic. 6 = a multiply and an add, forward once and
    backward twice. Attention: scores and mixing are 2 * 2 * width * seq_len forward in each layer, three times that to
    train. The causal mask is not deducted (the usual convention); nothing is added for norms, biases, activations.
    """
    matmul = shape.layers * matmul_parameters_per_layer(shape) + shape.vocab_size * shape.width
    return 6.0 * matmul + 12.0 * shape.layers * shape.width * seq_len


# --- as Hugging Face writes it -------------------------------------------------------------------------------------


def shape_to_hf(shape: Shape) -> dict[str, Any]:
    """The content of a config.json that AutoModelForCausalLM.from_pretrained opens."""
    written = {"gpt2": _gpt2_to_hf, "llama": _llama_to_hf, "qwen3": _qwen3_to_hf}[shape.family](shape)
    return written | {
        "vocab_size": shape.vocab_size,
        "initializer_range": 0.02,
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": shape.eos_token_id,
        "use_cache": True,
        "dtype": "float32",
    }


def _gpt2_to_hf(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_positions": shape.positions,
        "n_embd": shape.width,
        "n_layer": shape.layers,
        "n_head": shape.heads,
        "n_inner": shape.mlp_width,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": shape.norm_eps,
        "embd_pdrop": shape.dropout,
        "attn_pdrop": shape.dropout,
        "resid_pdrop": shape.dropout,
    }


def _llama_to_hf(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": shape.positions,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_width,
        "intermediate_size": shape.mlp_width,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        # Both spellings: transformers 5 reads the second, everything older (and llama.cpp) the first.
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "attention_bias": False,
        "attention_dropout": shape.dropout,
        "mlp_bias": False,
    }


def _qwen3_to_hf(shape: Shape) -> dict[str, Any]:
    same = {name: value for name, value in _llama_to_hf(shape).items() if name != "mlp_bias"}
    return same | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}


def shape_from_hf(config: dict[str, Any]) -> Shape:
    """Read a config.json. A field that asks for something we do not compute is a ValueError that names it."""
    _refuse_unless(config, "quantization_config", None)
    family = config.get("model_type")
    try:
        if family == "gpt2":
            return _gpt2_from_hf(config)
        if family == "llama" or family == "qwen3":
            return _llama_from_hf(config, family)
    except (TypeError, AttributeError, OverflowError) as error:  # text, a list or null where a number belongs
        raise ValueError(f"config.json: a field holds the wrong kind of value: {error}") from error
    raise NotOurs(f"config.json: model_type {family!r} is not supported; {', '.join(FAMILIES)} are")


def approximate_shape(config: dict[str, Any]) -> Shape:
    """The sizes of another family in the words of ours, for a plan: near enough for memory and time, never for weights."""
    inner = config.get("text_config")
    known = {**config, **inner} if isinstance(inner, dict) else config

    def first(*names: str, default: int = 0) -> int:
        return next((known[name] for name in names if type(known.get(name)) is int and known[name] > 0), default)

    width, heads = (
        first("hidden_size", "n_embd", "d_model"),
        first("num_attention_heads", "n_head", "num_heads", default=1),
    )
    layers = first("num_hidden_layers", "n_layer", "num_layers")
    if not width or not layers or not first("vocab_size"):
        raise ValueError("config.json says neither width, layers nor vocabulary in names that are known here")
    heads = heads if width % heads == 0 and (width // heads) % 2 == 0 else 1
    kv_heads = first("num_key_value_heads", default=heads)
    return Shape(
        "llama",
        first("vocab_size"),
        first("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", default=_LARGEST_SIZE),
        layers,
        width,
        heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        mlp_width=first("intermediate_size", "n_inner", "ffn_dim", default=4 * width),
        tie_embeddings=bool(known.get("tie_word_embeddings", True)),
    )


def _gpt2_from_hf(config: dict[str, Any]) -> Shape:
    _refuse_unless(config, "activation_function", "gelu_new", "gelu_pytorch_tanh")  # two names of one function
    _refuse_unless(config, "scale_attn_weights", True)
    _refuse_unless(config, "scale_attn_by_inverse_layer_idx", False)
    _refuse_unless(config, "add_cross_attention", False)
    dropouts = {name: float(config.get(name, 0.1)) for name in ("embd_pdrop", "attn_pdrop", "resid_pdrop")}
    if len(set(dropouts.values())) > 1:
        raise NotOurs(f"config.json: {dropouts}: one dropout for all three is supported; make them equal")
    return Shape(
        family="gpt2",
        vocab_size=required(config, "vocab_size"),
        positions=required(config, "n_positions"),
        layers=required(config, "n_layer"),
        width=required(config, "n_embd"),
        heads=required(config, "n_head"),
        mlp_width=config.get("n_inner") or 0,
        dropout=dropouts["resid_pdrop"],
        norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        bos_token_id=_one_token_id(config, "bos_token_id"),
        eos_token_id=_one_token_id(config, "eos_token_id"),
    )


def _llama_from_hf(config: dict[str, Any], family: Literal["llama", "qwen3"]) -> Shape:
    _refuse_unless(config, "hidden_act", "silu", "swish")
    _refuse_unless(config, "attention_bias", False)
    _refuse_unless(config, "mlp_bias", False)
    _refuse_unless(config, "use_sliding_window", False)
    if any(kind != "full_attention" for kind in config.get("layer_types") or []):
        raise NotOurs("config.json: layer_types other than full_attention are not supported")
    width, heads = required(config, "hidden_size"), required(config, "num_attention_heads")
    head_width = config.get("head_dim", 128 if family == "qwen3" else None)
    if head_width is not None and head_width * heads != width:
        raise NotOurs(f"config.json: head_dim {head_width} x {heads} heads is not hidden_size {width}: unsupported")
    return Shape(
        family=family,
        vocab_size=required(config, "vocab_size"),
        positions=required(config, "max_position_embeddings"),
        layers=required(config, "num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or 0,
        mlp_width=required(config, "intermediate_size"),
        dropout=float(config.get("attention_dropout") or 0.0),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta_of(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        bos_token_id=_one_token_id(config, "bos_token_id"),
        eos_token_id=_one_token_id(config, "eos_token_id"),
    )


def _rope_theta_of(config: dict[str, Any]) -> float:
    """The base of the rotation; newer files keep it inside rope_parameters or rope_scaling."""
    theta = config.get("rope_theta", 10_000.0)
    for name in ("rope_scaling", "rope_parameters"):
        inner = config.get(name) or {}
        kind = inner.get("rope_type", inner.get("type", "default"))
        if kind != "default":
            raise NotOurs(f"config.json: {name} of type {kind!r} is not supported; only plain RoPE is")
        if inner.get("partial_rotary_factor", 1.0) != 1.0:
            raise NotOurs(f"config.json: {name}.partial_rotary_factor is not supported; only the whole head turns")
        theta = inner.get("rope_theta", theta)
    return float(theta)


def required(config: dict[str, Any], name: str) -> int:
    if name not in config:
        raise ValueError(f"config.json: {name} is missing; without it the size of the model is unknown")
    value = config[name]
    if type(value) is not int or not 0 < value < _LARGEST_SIZE:
        raise ValueError(f"config.json: {name} must be a whole number above 0, not {str(value)[:40]}")
    return value


def _refuse_unless(config: dict[str, Any], name: str, *allowed: object) -> None:
    """Absent is fine: Hugging Face's own default is the first of the allowed values."""
    value = config.get(name, allowed[0])
    if value not in allowed:
        raise NotOurs(f"config.json: {name} {value!r} is not supported; {' or '.join(map(repr, allowed))} is")


def _one_token_id(config: dict[str, Any], name: str) -> int | None:
    value = config.get(name)
    if isinstance(value, list):
        if len(value) != 1:
            raise NotOurs(
                f"config.json: {name} {value} holds several; keep one, and the rest in generation_config.json"
            )
        value = value[0]
    if value is not None and type(value) is not int:
        raise ValueError(f"config.json: {name} must be a whole number, not {str(value)[:40]}")
    return value


# ---------------------------------------------------------------- the loss, a few rows of logits at a time

CPU_BLOCK_BYTES = 64 << 20
_GPU_BLOCK_BYTES = 512 << 20
BLOCK_ROWS = 64  # a block has a multiple of so many
_ALIGNED_WORDS = 64


def block_rows(vocab_size: int, device_type: str) -> int:
    """Rows of logits that are worked on together: a function of nothing that may change between two starts."""
    room = CPU_BLOCK_BYTES if device_type == "cpu" else _GPU_BLOCK_BYTES
    return max(BLOCK_ROWS, room // (4 * vocab_size) // BLOCK_ROWS * BLOCK_ROWS)


def widened_vocab(words: int, device: str) -> int:
    """Words that the last matrix is computed with: on a GPU a multiple of 64, with zeros behind the vocabulary."""
    return words if device == "cpu" else -(-words // _ALIGNED_WORDS) * _ALIGNED_WORDS


def strip_rows(rows: int, device_type: str) -> int:
    """Of these, how many become a gradient together: on a CPU few, so that the passes over them stay in its caches."""
    return min(rows, BLOCK_ROWS) if device_type == "cpu" else rows


# ---------------------------------------------------------------- attention in blocks of queries, on a CPU (model/cpu.py)

BLOCK_ATTENTION_TOKENS = 512  # of a row, up to which it is faster than torch's in bf16: docs/decisions/021-kernels.md
BLOCK_QUERIES = 128  # a block of them meets only the keys before its end
KEPT_BYTES = 8  # a token and a unit of width: probabilities up to this size are kept, larger ones worked out again


def keeps_probabilities(seq_len: int, head_width: int, number_bytes: int) -> bool:
    """Whether the probabilities of a layer wait for the backward pass: where they are small beside its other numbers."""
    return number_bytes * seq_len <= KEPT_BYTES * head_width
