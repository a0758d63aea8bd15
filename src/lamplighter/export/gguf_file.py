"""A GGUF file, written by the library `gguf`: sizes, tokenizer, template, tensors in f32, f16, bf16 or q8_0.

In:  an Opened whose family llama.cpp knows, a Vocabulary, how to quantise.
Out: the file. Whether it is right is found by llama.cpp (llama_cpp.py, reference.py), not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lamplighter import report
from lamplighter.errors import BadConfig
from lamplighter.export.opened import Opened
from lamplighter.export.vocabulary import Vocabulary, as_fields
from lamplighter.model.weights import stored_tensors

QUANTS = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
# model_type -> (architecture of llama.cpp, whether its rotation wants the rows of q and k in another order)
_FAMILIES = {
    "llama": ("llama", True),
    "mistral": ("llama", True),
    "gpt2": ("gpt2", False),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}


def refuse_family(config: dict[str, Any]) -> None:
    """What llama.cpp, or this writer, cannot hold."""
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        why = f"the family {kind!r} is not written here ({', '.join(_FAMILIES)} are)"
        raise BadConfig(
            "this model cannot be a GGUF file", why, "lamp export RUN --to hf, then llama.cpp's convert_hf_to_gguf.py"
        )
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
    if rope_type not in (None, "default"):
        why = f"rope scaling of type {rope_type!r} is not written here"
        raise BadConfig(
            "this model cannot be a GGUF file", why, "lamp export RUN --to hf, then llama.cpp's convert_hf_to_gguf.py"
        )
    if config.get("attention_bias") or config.get("mlp_bias"):
        raise BadConfig(
            "this model cannot be a GGUF file",
            "biases of attention or MLP are not written for llama",
            "lamp export RUN --to hf",
        )


def needed_bytes(opened: Opened, quantize: str) -> int:
    return int(opened.built.parameters * BYTES.get(quantize, 4.0) * 1.02) + (32 << 20)


def write_gguf(path: Path, opened: Opened, vocabulary: Vocabulary, quantize: str) -> None:
    """The whole model."""
    gguf = library()
    config = opened.built.config
    architecture, permutes = _FAMILIES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(opened.name)
    _add_sizes(writer, config)
    writer.add_file_type(gguf.LlamaFileType[QUANTS[quantize]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    template = opened.template
    _add(writer, as_fields(vocabulary, template.stop_id if template else None, template.text if template else None))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], _layers(config))
    tensors = dict(_tensors(opened, permutes, _heads(config)))
    with report.phase("write", total=sum(tensor.numel() for tensor in tensors.values()), unit="numbers") as phase:
        for name, tensor in tensors.items():
            ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if ours is None:
                raise BadConfig(
                    "this model cannot be a GGUF file",
                    f"llama.cpp's {architecture} has no {name}",
                    "lamp export RUN --to hf",
                )
            kind = "f32" if tensor.ndim == 1 else _kind_of(quantize, tensor)
            data, raw = _converted(gguf, tensor, kind)
            writer.add_tensor(ours, data, raw_dtype=raw)
            phase.tick(tensor.numel(), ours)
        phase.tick(0, "writing the file")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def _kind_of(quantize: str, tensor: Tensor) -> str:
    """A row that is no multiple of 32 cannot be q8_0."""
    return "f16" if quantize == "q8_0" and tensor.shape[-1] % 32 else quantize


def library() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise BadConfig(
            "GGUF files are written by gguf, which is missing", str(error), "pip install 'lamplighter[export]'"
        ) from error
    return gguf


def _layers(config: dict[str, Any]) -> int:
    return int(config.get("num_hidden_layers", config.get("n_layer", 0)))


def _heads(config: dict[str, Any]) -> tuple[int, int]:
    heads = int(config.get("num_attention_heads", config.get("n_head", 1)))
    return heads, int(config.get("num_key_value_heads") or heads)


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    heads, kv_heads = _heads(config)
    width = int(config.get("hidden_size", config.get("n_embd", 0)))
    writer.add_vocab_size(int(config["vocab_size"]))
    writer.add_block_count(_layers(config))
    writer.add_context_length(int(config.get("max_position_embeddings", config.get("n_positions", 0))))
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(int(config.get("intermediate_size") or config.get("n_inner") or 4 * width))
    writer.add_head_count(heads)
    if config["model_type"] == "gpt2":
        writer.add_layer_norm_eps(float(config["layer_norm_epsilon"]))
        return
    rope = config.get("rope_parameters") or {}
    head_width = int(config.get("head_dim") or width // heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(head_width)
    writer.add_key_length(head_width)
    writer.add_value_length(head_width)
    writer.add_rope_freq_base(float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))


def _add(writer: Any, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)


def _tensors(opened: Opened, permutes: bool, heads: tuple[int, int]) -> Iterator[tuple[str, Tensor]]:
    """Under Hugging Face's names, as llama.cpp wants their numbers."""
    for name, tensor in stored_tensors(opened.built.model).items():
        if name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")):
            continue  # computed, not learned
        found = tensor.detach().float()
        if opened.built.config["model_type"] == "gpt2" and name.endswith(
            ("c_attn.weight", "c_proj.weight", "c_fc.weight")
        ):
            found = found.t()
        if permutes and name.endswith(("q_proj.weight", "k_proj.weight")):
            found = _interleaved(found, heads[0] if "q_proj" in name else heads[1])
        yield name, found


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Hugging Face rotates the pairs (i, i + D/2); llama.cpp's llama rotates neighbours."""
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def _converted(gguf: Any, tensor: Tensor, kind: str) -> tuple[np.ndarray, Any]:
    if kind == "f32":
        return tensor.contiguous().numpy(), None
    if kind == "f16":
        largest = float(tensor.abs().max())
        if largest > torch.finfo(torch.float16).max:
            raise BadConfig("this model does not fit into f16", f"it has a weight of {largest:.3g}", "--quantize bf16")
        return tensor.to(torch.float16).contiguous().numpy(), None
    wanted = gguf.GGMLQuantizationType.BF16 if kind == "bf16" else gguf.GGMLQuantizationType.Q8_0
    return gguf.quants.quantize(tensor.contiguous().numpy(), wanted), wanted


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
