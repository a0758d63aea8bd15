"""Every causal language model of transformers, in a tiny config: does it train here packed, grouped by length, or not at all, and why?

In:  the installed transformers; a tiny config with random weights of each of its causal families.
Out: a table (docs/families.md) of what `lamp train` makes of each: built from its folder, packing tried, adapters put in, one
     loss and its gradients, exported to GGUF or not.

    python benchmarks/families.py [--only qwen2 mamba] [--write docs/families.md]

With --only the page keeps its other rows.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

_SECONDS = 60
_MOST = 60_000_000
_LENGTH, _VOCABULARY = 16, 128
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "embed_dim", "dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "n_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim", "ffn_hidden_size", "encoder_ffn_dim", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size", "block_ff_dim"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "num_experts_per_token", "top_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 128),
    **dict.fromkeys(("head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank", "global_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "n_group", "topk_group"), 8),
    "vocab_size": _VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "first_k_dense_replace": 1, "is_decoder": True,
    "rotary_dim": 8, "n_group": 1, "topk_group": 1, "mamba_num_heads": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_head_dim": 16, "n_groups": 1, "mamba_n_groups": 1, "state_size": 8,
    "vocab_size_per_layer_input": _VOCABULARY, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0, "pad_token": 0,
}  # fmt: skip

_COMMON: dict[str, Any] = {"vocab_size": _VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
                           "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_TWO = {**_COMMON, "num_key_value_heads": 2}
_FOUR = {**_COMMON, "num_key_value_heads": 4}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
_SIGHT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_BOTH = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
_GEMMA4 = {
    **_TWO,
    **_BOTH,
    "vocab_size_per_layer_input": _VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "per_layer_config": {},
}
_QWEN4: dict[str, Any] = {
    **_TWO,
    **_EXPERTS,
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "hc_count": 2,
    "hc_lowrank": 8,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "ple_embed_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
# Families whose sizes depend on each other: what their config is made with.
_OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {**_FOUR, **_LATENT, **_EXPERTS, "num_experts": 4, "num_experts_per_token": 2, "num_expert_group": 2, "topk_group": 1,
                       "linear_num_heads": 4, "linear_head_dim": 16, "layer_group_size": 2, "num_nextn_predict_layers": 0},
    "cohere_compass_text": {**_FOUR, **_BOTH, "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128, "vocab_size": _VOCABULARY, "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
             "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64}},
    "deepseek_v2": {**_FOUR, **_LATENT, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 8},
    "dots1": {**_FOUR, **_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "head_dim": 16},
    "falcon_h1": {**_TWO, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8, "head_dim": 16},
    "gemma3": {"text_config": {**_TWO, **_BOTH}, "vision_config": _SIGHT, "mm_tokens_per_image": 4, "boi_token_index": 5, "eoi_token_index": 6, "image_token_index": 7},
    "gemma3n_text": {**_TWO, **_BOTH, "vocab_size_per_layer_input": _VOCABULARY, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0, "laurel_rank": 8,
                     "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0, 0.0]},
    "gemma4": {"text_config": _GEMMA4, "vision_config": None, "audio_config": None},
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "git": {**_COMMON, "vision_config": _SIGHT},
    "got_ocr2": {"text_config": _TWO, "vision_config": {"hidden_size": 32, "output_channels": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64, "patch_size": 16, "mlp_dim": 32, "window_size": 2, "global_attn_indexes": [0]}, "image_token_index": 7, "image_seq_length": 4},
    "lfm2_moe": {**_TWO, **_EXPERTS, "num_experts": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"vocab_size": _VOCABULARY, "hidden_size": 64, "num_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "ffn_hidden_size": 96, **_LATENT, "head_dim": 8,
                      "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2, "expert_ffn_hidden_size": 32, "max_position_embeddings": 128},
    "mamba2": {"num_heads": 8, "head_dim": 16, "vocab_size": _VOCABULARY, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "n_groups": 1, "chunk_size": 8, "pad_token_id": 0, "bos_token_id": 1},
    "qwen4_exp": {"text_config": _QWEN4, "vision_config": {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64}},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"vocab_size": _VOCABULARY, "hidden_size": 64, "num_attention_heads": 4, "attention_head_size": 16, "feed_forward_size": 96, "attn_layers": ["local", "lsh"], "axial_pos_embds": False, "axial_pos_shape": [8, 16],
                 "axial_pos_embds_dim": [16, 48], "max_position_embeddings": 128, "is_decoder": True, "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8, "num_buckets": 4},
    "xlm": {"vocab_size": _VOCABULARY, "emb_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 128, "causal": True, "pad_token_id": 0},
    "xlnet": {"vocab_size": _VOCABULARY, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96, "pad_token_id": 0},
    "phi4_multimodal": {**_TWO, "vision_config": {**_SIGHT, "num_hidden_layers": 2, "crop_size": 28}, "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 2, "num_attention_heads": 2, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8, "input_size": 80}, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    "moss_transcribe_diarize": {"text_config": {**_TWO, "head_dim": 16}, "audio_config": {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "hidden_size": 32, "max_source_positions": 32}, "audio_token_id": 7},
    "xlstm": {"vocab_size": _VOCABULARY, "hidden_size": 64, "embedding_dim": 64, "num_hidden_layers": 2, "num_blocks": 2, "num_heads": 4, "chunk_size": 8, "pad_token_id": 0},
    "xmod": {**_COMMON, "is_decoder": True, "default_language": "en_XX"},
    "zamba": {**_FOUR, "num_hidden_layers": 6, "attention_hidden_size": 128, "attention_head_dim": 32, "n_mamba_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    "zamba2": {**_FOUR, "num_hidden_layers": 4, "hybrid_layer_ids": [1, 3], "layer_types": ["mamba", "hybrid", "mamba", "hybrid"], "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_d_state": 8, "chunk_size": 8, "attention_hidden_size": 128, "attention_head_dim": 32,
               "adapter_rank": 4, "kv_channels": 16, "num_query_groups": 4},
    "zaya": {**_TWO, "moe_intermediate_size": 32, "num_experts": 4, "head_dim": 16, "router_hidden_size": 16},
}  # fmt: skip
# No text alone makes these write: an image, a sound or another model comes first.
_OTHER_INPUT = {
    "gemma4_assistant": "it drafts for another model, whose keys and values it reads",
    "gemma4_unified_assistant": "it drafts for another model, whose keys and values it reads",
    "emu3": "AutoModelForCausalLM of transformers does not open its config (images come with it)",
    "mllama": "AutoModelForCausalLM of transformers does not open its config (images come with it)",
    "musicgen": "it writes codes of sound, not text",
    "musicgen_melody": "it writes codes of sound, not text",
}


@dataclass(frozen=True)
class Verdict:
    """What became of one family."""

    kind: str
    how: str  # packed, grouped, refused
    why: str = ""
    gguf: bool = False


class _TooLong(Exception):
    pass


def tiny(kind: str, place: Path) -> str | None:
    """A folder with random weights of this family; the reason where transformers itself does not build one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if kind in _OTHER_INPUT:
        return _OTHER_INPUT[kind]
    config = AutoConfig.for_model(kind, **_OWN.get(kind, {}))
    if kind not in _OWN:
        _shrink(config)
        for inner in ("text_config", "decoder"):
            if getattr(config, inner, None) is not None and not isinstance(getattr(config, inner), dict):
                _shrink(getattr(config, inner))
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > _MOST:
        return f"its smallest config here has {size / 1e6:,.0f} M parameters"
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(3)
    ids = torch.arange(3, 3 + _LENGTH)[None]
    model.eval()(input_ids=ids, use_cache=False)  # what fails here is the tiny config, not a family
    model.save_pretrained(place)
    AutoModelForCausalLM.from_pretrained(place)(input_ids=ids, use_cache=False)
    return None


def _shrink(config: Any) -> None:
    known = config.to_dict()
    for name, value in _SIZES.items():
        may_be_none = known.get(name) is None and (name.endswith("_id") or name in ("head_dim", "num_key_value_heads"))
        if name in known and (isinstance(known[name], int | float | bool) or may_be_none):
            setattr(config, name, value)
    if "qk_rope_head_dim" in known:  # there head_dim is the part of a head that is rotated, and keys are not shared
        config.head_dim = _SIZES["qk_rope_head_dim"]
        config.num_key_value_heads = _SIZES["num_attention_heads"]
    for name, value in known.items():  # one entry for each layer, whatever it is called
        if isinstance(value, list) and len(value) > 2 and ("layer" in name or name.endswith("_types")):
            other = next((one for one in value if one != value[0]), value[0])
            setattr(config, name, [value[0], other])


def judge(kind: str, place: Path) -> Verdict:
    """As `lamp train` would, in this process."""
    import torch

    from lamplighter.config import Lora, Model
    from lamplighter.errors import LampError
    from lamplighter.export import gguf_file
    from lamplighter.model.build import build
    from lamplighter.model.families import FromTransformers
    from lamplighter.model.transformer import token_loss

    try:
        if (reason := tiny(kind, place)) is not None:
            return Verdict(kind, "not tried", reason)
    except _TooLong:
        return Verdict(kind, "not tried", "transformers takes over a minute to build it")
    except Exception as error:  # noqa: BLE001  of any of two hundred families
        return Verdict(kind, "not tried", f"no tiny config was found ({_short(error)})")
    ids = torch.randint(3, _VOCABULARY, (2, _LENGTH + 1), generator=torch.Generator().manual_seed(1))
    try:
        built = build(Model(init_from=str(place)), _VOCABULARY, _LENGTH, 2, 1)
        how, why = ("packed", "") if built.takes_segments else ("grouped", getattr(built.model, "why_not", ""))
        token_loss(built.model.train(), ids[:, :-1], ids[:, 1:]).backward()  # type: ignore[no-untyped-call]
        try:
            adapted = build(Model(init_from=str(place)), _VOCABULARY, _LENGTH, 2, 1, lora=Lora(r=2))
            token_loss(adapted.model, ids[:, :-1], ids[:, 1:]).backward()  # type: ignore[no-untyped-call]
            if not any(p.grad is not None for p in adapted.model.parameters()):
                why = f"{why}; no adapter gets a gradient".lstrip("; ")
        except LampError as error:
            why = f"{why}; LoRA: {error.what} ({error.why})".lstrip("; ")
        try:
            gguf_file.refuse_family(built.config)
            gguf = True
        except LampError:
            gguf = False
        if not isinstance(built.model, FromTransformers):
            why = "built here"
        return Verdict(kind, how, _clean(why, place), gguf)
    except LampError as error:
        return Verdict(kind, "refused", _clean(f"{error.what}: {error.why}", place))
    except _TooLong:
        return Verdict(kind, "refused", "one step takes over a minute")
    except Exception as error:  # noqa: BLE001  it is a row of the table
        return Verdict(kind, "FAILED", _short(error))


def _clean(text: str, place: Path) -> str:
    return text.replace(str(place), "the folder")


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:110]}"


def _alarm(*_: object) -> None:
    raise _TooLong


def families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def judge_all(kinds: list[str]) -> list[Verdict]:
    signal.signal(signal.SIGPROF, _alarm)
    found = []
    for kind in kinds:
        signal.setitimer(signal.ITIMER_PROF, _SECONDS)  # of the processor: the machine may be busy
        with tempfile.TemporaryDirectory() as place:
            try:
                found.append(judge(kind, Path(place) / "m"))
            except _TooLong:
                found.append(Verdict(kind, "not tried", "it takes over a minute"))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(found[-1].__dict__), flush=True)
    return found


def page(found: list[Verdict]) -> str:
    import transformers

    count = {
        how: sum(one.how == how for one in found) for how in ("packed", "grouped", "refused", "not tried", "FAILED")
    }
    lines = [
        "# Families",
        "",
        f"What `lamp train` makes of each causal language model of transformers {transformers.__version__}, found by trying: a tiny config with random weights,",
        "opened from its folder, one loss with its gradients, in full and with LoRA. Made by `python benchmarks/families.py --write docs/families.md`",
        "(with `--only NAME ...` single rows are made anew).",
        "",
        f"Of {len(found)} families {count['packed']} train with several examples in a window (packed), {count['grouped']} with batches of like length (grouped), {count['refused'] + count['FAILED']} are",
        f"refused, and {count['not tried']} were not tried, for the reason in the last column: of those nothing is said.",
        "GGUF: `lamp export --to gguf` writes the family; every file is compared with llama.cpp before it is there.",
        "",
        "| family | trains | GGUF | |",
        "|---|---|---|---|",
    ]
    for one in found:
        why = one.why.replace("|", "/").replace("<", "&lt;")
        lines.append(f"| `{one.kind}` | {one.how} | {'yes' if one.gguf else ''} | {why[:220]} |")
    return "\n".join(lines) + "\n"


def rows_of(text: str) -> list[Verdict]:
    """What a page says already."""
    found = re.findall(r"^\| `([^`]+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \|$", text, re.MULTILINE)
    return [Verdict(kind, how.strip(), why.strip().replace("&lt;", "<"), bool(gguf.strip())) for kind, how, gguf, why in found]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="these families")
    parser.add_argument("--write", type=Path, help="the page")
    wanted = parser.parse_args()
    warnings.simplefilter("ignore")
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    found = judge_all(wanted.only or families())
    if wanted.write and wanted.only:
        renewed = {one.kind: one for one in [*rows_of(wanted.write.read_text()), *found]}
        found = [renewed[kind] for kind in sorted(renewed)]
    if wanted.write:
        wanted.write.write_text(page(found))


if __name__ == "__main__":
    main()
