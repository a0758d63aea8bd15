"""Every other causal language model that transformers can build, behind the interface of our own: ids in, logits out.

In:  a folder with config.json and safetensors; never code out of it.
Out: a FromTransformers, in fp32; whether it keeps packed examples apart, found by trying.

The library is loaded here alone and only when such a folder is opened. Files are stored under the names of the model
inside, so that a checkpoint is a Hugging Face folder as it is.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lamplighter.errors import BadConfig, BadData, InputMissing

_PROBE_LENGTHS = (7, 5, 4)
_PROBE_ERRORS = (
    AssertionError,
    ValueError,
    RuntimeError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    NotImplementedError,
)
_CLOSE = 1e-4  # of the largest logit; fp32 in another order differs by a hundredth of it


class FromTransformers(nn.Module):
    """A model of transformers; `segments_BT` keeps packed examples apart where `keeps_apart` says that it works."""

    def __init__(self, inner: Any, positions: int) -> None:
        super().__init__()
        self.inner, self.positions = inner, positions
        self.keeps_apart, self.why_not = False, "not tried"
        self.adds_mask = False  # to the scores, as numbers: some families take a mask of yes and no for such numbers
        self._read: tuple[Tensor, Any] | None = None  # ids that were read last, and the library's cache of them

    def forward(self, ids_BT: Tensor, segments_BT: Tensor | None = None) -> Tensor:
        if segments_BT is None:
            logits: Tensor = self.inner(input_ids=ids_BT, use_cache=False).logits
            return logits
        T = ids_BT.shape[1]
        causal_TT = torch.ones(T, T, dtype=torch.bool, device=ids_BT.device).tril()
        visible_BTT = causal_TT & (segments_BT[:, :, None] == segments_BT[:, None, :])
        positions_BT = visible_BTT.sum(-1) - 1
        mask_B1TT = visible_BTT[:, None]
        if self.adds_mask:
            device = ids_BT.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
            mask_B1TT = torch.zeros_like(mask_B1TT, dtype=dtype).masked_fill(~mask_B1TT, torch.finfo(dtype).min)
        found: Tensor = self.inner(
            input_ids=ids_BT, attention_mask=mask_B1TT, position_ids=positions_BT, use_cache=False
        ).logits
        return found

    @torch.no_grad()
    def next_logits(self, visible_BT: Tensor) -> Tensor:
        """The logits after the last token; what was read before is taken from the library's cache where it has one."""
        known, past = self._read if self._read is not None else (visible_BT[:, :0], None)
        count = known.shape[1]
        goes_on = past is not None and known.shape[0] == len(visible_BT) and count < visible_BT.shape[1]
        if not goes_on or not torch.equal(visible_BT[:, :count], known):
            count, past = 0, None
        out = self.inner(input_ids=visible_BT[:, count:], past_key_values=past, use_cache=True)
        past = getattr(out, "past_key_values", None)
        self._read = None if past is None else (visible_BT.clone(), past)
        logits: Tensor = out.logits[:, -1].float()
        return logits


def open_family(
    folder: Path, config: dict[str, Any], dropout: float | None = None, seq_len: int | None = None
) -> FromTransformers:
    """The model in a folder, with its weights; `dropout` sets every rate that its config has."""
    kind = str(config.get("model_type"))[:60]
    if config.get("quantization_config") is not None:
        advice = "use the plain folder that it was made from"
        raise BadConfig(f"{folder} holds quantised weights", "they cannot be trained, nor merged with adapters", advice)
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        what = f"{folder} holds a {kind!r} model, which is built by transformers"
        raise BadConfig(what, f"gpt2 and llama are built here ({error})", "pip install 'lamplighter[hf]'") from error
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        read = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if dropout is not None:
            _set_dropout(read, dropout)
        opened: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            output_loading_info=True,
            config=read,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError, StrictDataclassError) as error:
        why = " ".join(str(error).split())[:300]
        raise BadConfig(
            f"{folder}/config.json is of no family known here",
            f"transformers cannot build {kind!r}: {why}",
            "gpt2, llama and what transformers knows by itself",
        ) from error
    except OSError as error:
        why = " ".join(str(error).split())[:300]
        raise InputMissing(f"{folder} has no usable weights", why, "safetensors are wanted, never pickles") from error
    inner, told = opened  # what was filled in comes with it
    model = FromTransformers(inner, positions_of(config) or seq_len or 1024)
    _refuse_new_weights(folder, told)
    _refuse_if_it_sees_ahead(folder, model, vocabulary_of(config))
    if seq_len is not None:
        model.keeps_apart, model.why_not = keeps_examples_apart(model, vocabulary_of(config), seq_len, config)
    return model


def _refuse_new_weights(folder: Path, told: dict[str, Any]) -> None:
    """transformers fills in what a file lacks with random numbers; that is no model."""
    missing, other = sorted(told.get("missing_keys") or ()), list(told.get("mismatched_keys") or ())
    if missing or other:
        shapes = f"; of another shape: {', '.join(str(one[0]) for one in other[:3])}" if other else ""
        raise BadData(
            f"the weights in {folder} are not those of its config.json",
            f"missing: {', '.join(missing[:3]) or 'none'}{shapes}",
            "use the whole folder of one model, with its own config.json",
        )


@torch.no_grad()
def _refuse_if_it_sees_ahead(folder: Path, model: FromTransformers, vocab_size: int) -> None:
    """A model that reads the token which it shall predict learns nothing, with a fine loss: BERT without is_decoder, say."""
    ids = torch.arange(8)[None] % vocab_size
    other = ids.clone()
    other[0, -1] = (ids[0, -1] + 1) % vocab_size
    model.eval()
    try:
        one, two = model(ids)[0, :-1], model(other)[0, :-1]
    except _PROBE_ERRORS as error:
        why = f"a row of 8 tokens: {' '.join(str(error).split())[:200] or type(error).__name__}"
        raise BadConfig(f"the model in {folder} cannot be asked for the next token", why, "choose another") from error
    if float((one - two).abs().max()) > _CLOSE * float(one.abs().max().clamp_min(1e-6)):
        kind = type(model.inner).__name__
        why = "in a probe the last token changed the logits before it"
        raise BadConfig(f"{kind} sees the tokens that it shall predict", why, "a causal decoder, or is_decoder in config.json")  # fmt: skip


def _set_dropout(config: Any, rate: float) -> None:
    """Whatever the family calls its rates."""
    for name, value in config.to_dict().items():
        if (name.endswith(("dropout", "pdrop", "drop")) or name == "dropout") and isinstance(value, float | int):
            setattr(config, name, rate)


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def positions_of(config: dict[str, Any]) -> int | None:
    """How many tokens the model was made for; None where its config does not say it."""
    known = _text_config(config)
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"):
        if isinstance(known.get(name), int) and known[name] > 0:
            return int(known[name])
    return None


def vocabulary_of(config: dict[str, Any]) -> int:
    found = _text_config(config).get("vocab_size")
    if not isinstance(found, int) or found < 1:
        raise BadConfig("config.json has no vocab_size", "the model's size is not known", "use an intact folder")
    return found


def config_of(model: FromTransformers) -> dict[str, Any]:
    """The content of config.json for what is trained from here."""
    written: dict[str, Any] = json.loads(model.inner.config.to_json_string())
    written["architectures"] = [type(model.inner).__name__]
    written["dtype"] = "float32"
    return {name: value for name, value in written.items() if name not in ("_name_or_path", "auto_map")}


def check_adapters_are_used(model: FromTransformers) -> None:
    """Some families read the matrix of a layer past the layer itself: an adapter there would never be asked. Others work out
    gradients by themselves, and none reaches an adapter."""
    kind = type(model.inner).__name__
    try:
        logits = model(torch.zeros(1, 4, dtype=torch.long))
    except AttributeError as error:
        what = f"{kind} reads the weights of some layers by itself"
        raise BadConfig(
            what, f"adapters there would have no effect ({error})", "name others: --lora.targets in_proj, say"
        ) from error
    except _PROBE_ERRORS as error:
        why = f"a row of 4 tokens: {' '.join(str(error).split())[:200] or type(error).__name__}"
        raise BadConfig(f"{kind} cannot be asked with adapters in it", why, "choose another model") from error
    if not logits.requires_grad:
        why = "its layers work out their gradients by themselves, and the frozen embedding asks for none"
        raise BadConfig(f"no adapter of {kind} would get a gradient", why, "leave lora out, or choose another model")


# ---------------------------------------------------------------- are packed examples kept apart?


@torch.no_grad()
def keeps_examples_apart(
    model: FromTransformers, vocab_size: int, seq_len: int, config: dict[str, Any]
) -> tuple[bool, str]:
    """Three examples in one row must have the logits that each has alone: tried on the real weights."""
    known = _text_config(config)
    window = known.get("sliding_window")
    if isinstance(window, int) and known.get("use_sliding_window", True) and window < seq_len:
        return False, f"its attention window of {window} tokens is shorter than data.seq_len {seq_len}"
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab_size, (1, sum(_PROBE_LENGTHS)), generator=generator)
    segments = torch.repeat_interleave(torch.arange(len(_PROBE_LENGTHS)), torch.tensor(_PROBE_LENGTHS))[None]
    model.eval()
    why = ""
    for adds_mask in (False, True):
        model.adds_mask = adds_mask
        try:
            together = model(ids, segments_BT=segments)
            alone = torch.cat([model(part) for part in torch.split(ids, list(_PROBE_LENGTHS), dim=1)], dim=1)
        except _PROBE_ERRORS as error:
            words = " ".join(str(error).split())[:120] or type(error).__name__
            why = why or f"it does not take a mask of its own ({words})"
            continue
        far = float((together - alone).abs().max() / alone.abs().max().clamp_min(1e-6))
        if far <= _CLOSE:
            return True, ""
        why = f"in a probe an example saw its neighbour (logits differ by {far:.1%})"
    return False, why
