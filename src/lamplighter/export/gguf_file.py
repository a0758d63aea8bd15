"""A GGUF file, written by the library `gguf`: sizes, tokenizer, template, tensors in f32, f16, bf16 or q8_0.

In:  an Opened whose family llama.cpp knows, a Vocabulary, how to quantise.
Out: the file, one tensor after the other, so that no second copy of the model is held. Whether it is right is found by
     llama.cpp (llama_cpp.py, reference.py), not here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamplighter import report
from lamplighter.errors import BadConfig
from lamplighter.export.opened import Opened
from lamplighter.export.vocabulary import Vocabulary, as_fields, no_way
from lamplighter.model.weights import stored_tensors

QUANTS = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}


_AT_ONCE = 1 << 22  # numbers of a tensor that are converted together


@dataclass(frozen=True)
class _Family:
    """How llama.cpp calls a model_type, and in what its numbers differ from those of Hugging Face."""

    architecture: str
    rotates_neighbours: bool = False  # the rows of q and k are wanted in another order
    norms_from_one: bool = False  # a norm is stored as its distance from one
    activations: tuple[str, ...] = ("silu", "swish")


_GELU = ("gelu_pytorch_tanh", "gelu_new")
_FAMILIES = {
    "llama": _Family("llama", rotates_neighbours=True),
    "mistral": _Family("llama", rotates_neighbours=True),
    "gpt2": _Family("gpt2", activations=_GELU),
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3"),
    "phi3": _Family("phi3"),
    "gemma": _Family("gemma", norms_from_one=True, activations=(*_GELU, "gelu")),  # its "gelu" is the tanh one, too
    "gemma2": _Family("gemma2", norms_from_one=True, activations=_GELU),
    "gemma3_text": _Family("gemma3", norms_from_one=True, activations=_GELU),
}
_ROPES = ("default", "linear", "llama3")
_GEMMA3_LOCAL_THETA = 10_000.0  # llama.cpp has it as a constant


def refuse_family(config: dict[str, Any]) -> None:
    """What llama.cpp, or this writer, cannot hold."""
    kind = str(config.get("model_type"))
    if kind not in _FAMILIES:
        known = set(library().MODEL_ARCH_NAMES.values())
        names = {kind.lower(), kind.lower().replace("_", ""), kind.lower().replace("_", "-")}
        told = "llama.cpp has it, but this writer does not" if names & known else "llama.cpp has no such architecture"
        raise no_way(f"its family is {kind!r}: {told} ({', '.join(_FAMILIES)} are written)")
    activation = config.get("hidden_activation") or config.get("hidden_act") or config.get("activation_function")
    if activation is not None and activation not in _FAMILIES[kind].activations:
        raise no_way(f"llama.cpp's {kind} does not compute the activation {activation!r}")
    if (rope := _rope(config)["rope_type"]) not in _ROPES:
        raise no_way(f"rope scaling of type {rope!r} is not written ({', '.join(_ROPES)} are)")
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise no_way(f"biases of attention or MLP are not written for {kind}")
    if kind == "gemma3_text" and _local_theta(config) != _GEMMA3_LOCAL_THETA:
        raise no_way(f"llama.cpp has {_GEMMA3_LOCAL_THETA:g} as rope_theta of its local layers, and it {_local_theta(config):g}")  # fmt: skip
    if kind in ("mistral", "qwen2", "qwen3", "phi3") and _window(config) < _positions(config):
        report.note(f"its attention window of {_window(config):,} tokens is shorter than its {_positions(config):,} positions, and llama.cpp's {kind} has none: the file is for {_window(config):,} tokens")  # fmt: skip


def needed_bytes(opened: Opened, quantize: str) -> int:
    return int(opened.built.parameters * BYTES.get(quantize, 4.0) * 1.02) + (32 << 20)


def write_gguf(path: Path, opened: Opened, vocabulary: Vocabulary, quantize: str) -> None:
    """The whole model."""
    gguf = library()
    config, template = opened.built.config, opened.template
    family = _FAMILIES[config["model_type"]]
    writer = gguf.GGUFWriter(path, family.architecture)
    writer.add_name(opened.name)
    _add_sizes(writer, config)
    writer.add_file_type(gguf.LlamaFileType[QUANTS[quantize]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _add(writer, as_fields(vocabulary, template.stop_id if template else None, template.text if template else None))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.architecture.upper()], _layers(config))
    sizes = {}
    for name, tensor in _tensors(opened, family):
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if ours is None:
            raise no_way(f"llama.cpp's {family.architecture} has no {name}")
        kind = _kind_of(quantize, tensor)
        sizes[name] = (ours, kind, round(tensor.numel() * BYTES[kind]))
        raw = gguf.GGMLQuantizationType[kind.upper()]
        writer.add_tensor_info(ours, list(tensor.shape), np.dtype(np.float32), sizes[name][2], raw)
    with report.phase("write", total=sum(size for _, _, size in sizes.values()), unit="B") as phase:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in _tensors(opened, family):
            ours, kind, size = sizes[name]
            phase.tick(0, ours)
            writer.write_tensor_data(_Rows(gguf, tensor, kind, size))
            phase.tick(size)
    writer.close()


def _kind_of(quantize: str, tensor: Tensor) -> str:
    """Vectors stay as they are; a row that is no multiple of 32 cannot be q8_0."""
    if tensor.ndim == 1:
        return "f32"
    return "f16" if quantize == "q8_0" and tensor.shape[-1] % 32 else quantize


def library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise BadConfig(
            "GGUF files are written by gguf, which is missing", str(error), "pip install 'lamplighter[export]'"
        ) from error
    return gguf


# ---------------------------------------------------------------- sizes


def _layers(config: dict[str, Any]) -> int:
    return int(config.get("num_hidden_layers", config.get("n_layer", 0)))


def _positions(config: dict[str, Any]) -> int:
    return int(config.get("max_position_embeddings", config.get("n_positions", 0)))


def _window(config: dict[str, Any]) -> int:
    """Of attention; without one, all positions."""
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return int(window or _positions(config))


def _heads(config: dict[str, Any]) -> tuple[int, int]:
    heads = int(config.get("num_attention_heads", config.get("n_head", 1)))
    return heads, int(config.get("num_key_value_heads") or heads)


def _head_width(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or int(config["hidden_size"]) // _heads(config)[0])


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """rope_type, rope_theta and what goes with them; of a family with two rotations, the one of its global layers."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = found.get("full_attention", found) if isinstance(found, dict) else {}
    theta = found.get("rope_theta", config.get("rope_theta", 10_000.0))
    return {**found, "rope_theta": float(theta), "rope_type": found.get("rope_type", found.get("type")) or "default"}


def _local_theta(config: dict[str, Any]) -> float:
    nested = config.get("rope_parameters") or {}
    return float(nested.get("sliding_attention", {}).get("rope_theta", config.get("rope_local_base_freq", 1e4)))


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    heads, kv_heads = _heads(config)
    kind, width = config["model_type"], int(config.get("hidden_size", config.get("n_embd", 0)))
    is_gemma = kind in ("gemma2", "gemma3_text")
    writer.add_vocab_size(int(config["vocab_size"]))
    writer.add_block_count(_layers(config))
    writer.add_context_length(_positions(config) if is_gemma else _window(config))
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(int(config.get("intermediate_size") or config.get("n_inner") or 4 * width))
    writer.add_head_count(heads)
    if kind == "gpt2":
        writer.add_layer_norm_eps(float(config["layer_norm_epsilon"]))
        return
    head_width, rope = _head_width(config), _rope(config)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(int(head_width * float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))))  # fmt: skip
    writer.add_key_length(head_width)
    writer.add_value_length(head_width)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(library().RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if is_gemma:
        writer.add_sliding_window(_window(config))
    for name, add in (("attn_logit_softcapping", writer.add_attn_logit_softcapping), ("final_logit_softcapping", writer.add_final_logit_softcapping)):  # fmt: skip
        if config.get(name):
            add(float(config[name]))


def _add(writer: Any, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)


# ---------------------------------------------------------------- tensors


def _tensors(opened: Opened, family: _Family) -> Iterator[tuple[str, Tensor]]:
    """Under Hugging Face's names, as llama.cpp wants their numbers; made one by one."""
    config = opened.built.config
    if _rope(config)["rope_type"] == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config)
    for name, tensor in stored_tensors(opened.built.model).items():
        if name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")):
            continue  # computed, not learned
        found = tensor.detach().float()
        if family.architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            found = found.t()
        if family.rotates_neighbours and name.endswith(("q_proj.weight", "k_proj.weight")):
            found = _interleaved(found, _heads(config)["k_proj" in name])
        if family.norms_from_one and name.endswith("norm.weight"):
            found = found + 1
        yield name, found


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Hugging Face rotates the pairs (i, i + D/2); llama.cpp's llama rotates neighbours."""
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def _llama3_factors(config: dict[str, Any]) -> Tensor:
    """By what each frequency is divided: the fast ones by 1, the slow ones by `factor`, smoothly between."""
    rope, width = _rope(config), _head_width(config)
    factor, low, high, before = (float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))  # fmt: skip
    found = []
    for frequency in (rope["rope_theta"] ** (-n / width) for n in range(0, width, 2)):
        turns = before * frequency / (2 * math.pi)  # within the length that it was first trained on
        smooth = (turns - low) / (high - low)
        found.append(factor if turns < low else 1.0 if turns > high else 1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(found, dtype=torch.float32)


class _Rows:
    """A tensor as gguf's writer asks an array for it, converted some rows at a time: no second copy of a large one."""

    def __init__(self, gguf: Any, tensor: Tensor, kind: str, size: int) -> None:
        self.gguf, self.tensor, self.kind, self.nbytes = gguf, tensor, kind, size

    def tofile(self, file: Any) -> None:
        if self.kind == "f16":
            smallest, largest = (float(one) for one in self.tensor.aminmax())  # without a copy
            largest = max(-smallest, largest)
            if largest > torch.finfo(torch.float16).max:
                raise BadConfig("this model does not fit into f16", f"it has a weight of {largest:.3g}", "--quantize bf16")  # fmt: skip
        for rows in self.tensor.split(max(1, _AT_ONCE // (self.tensor[:1].numel() or 1))):  # type: ignore[no-untyped-call]
            _converted(self.gguf, rows, self.kind).tofile(file)


def _converted(gguf: Any, tensor: Tensor, kind: str) -> np.ndarray:
    if kind == "f32":
        return tensor.contiguous().numpy()
    if kind == "bf16":
        return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    if kind == "f16":
        return tensor.to(torch.float16).contiguous().numpy()
    found: np.ndarray = gguf.quants.quantize(tensor.contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0)
    return found


# ---------------------------------------------------------------- a vocabulary alone


def write_probe(path: Path, vocabulary: Vocabulary) -> None:
    """A llama of one small layer with this vocabulary: only its tokenizer is asked."""
    gguf = library()
    writer = gguf.GGUFWriter(path, "llama")
    width, inner = 32, 32
    config = {"model_type": "llama", "vocab_size": len(vocabulary.tokens), "num_hidden_layers": 1, "max_position_embeddings": 64,
              "hidden_size": width, "intermediate_size": inner, "num_attention_heads": 1, "rms_norm_eps": 1e-5}  # fmt: skip
    _add_sizes(writer, config)
    _add(writer, as_fields(vocabulary, None, None))
    square, row = np.zeros((width, width), np.float32), np.ones(width, np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((len(vocabulary.tokens), width), np.float16))
    writer.add_tensor("output_norm.weight", row)
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", row)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", square)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
