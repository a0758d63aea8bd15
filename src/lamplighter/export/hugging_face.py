"""A Hugging Face folder of a checkpoint: the model (adapters merged), or the PEFT adapter as it is; opened again and compared.

In:  an Opened.
Out: a folder that transformers (or peft) opens, without optimizer and counters, with logits within 1e-4 in fp32.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lamplighter import report
from lamplighter.errors import BadConfig
from lamplighter.export.opened import ExportFailed, Opened
from lamplighter.export.reference import PROMPTS, Limits, Reference, compare_scores, logits_of, prompt_of
from lamplighter.export.tokenizer_class import compare_tokens, settle_class
from lamplighter.model.build import load_folder
from lamplighter.model.lora import SETTINGS, WEIGHTS
from lamplighter.model.origin import RECORD
from lamplighter.model.weights import weights
from lamplighter.rundir import read_json, write_json
from lamplighter.train import tensorfile

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_NAMES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_NEAR = 1e-4
_COMPARED = PROMPTS[:5]
_BESIDE = ("generation_config.json", "chat.json", "chat_template.jinja")


def write_model(place: Path, opened: Opened, quantize: str) -> None:
    """config.json, model.safetensors, tokenizer, template, stop tokens."""
    if find_spec("transformers") is None:
        why = "a folder that was not opened by transformers is not handed out"
        raise BadConfig("transformers is missing", why, "pip install 'lamplighter[hf]'")
    place.mkdir()
    settle_class(opened.tokenizer, opened.built.config)
    tensors, dtype = weights(opened.built.model), DTYPES[quantize]
    total = sum(one.numel() * dtype.itemsize for one in tensors.values())
    with report.phase("write", total=total, unit="B") as phase:
        tensorfile.write(place / "model.safetensors", tensors, lambda n: phase.tick(n, "model.safetensors"), dtype)
    write_json(place / "config.json", {**opened.built.config, "dtype": _NAMES[quantize]})
    _write_beside(place, opened)


def write_adapter(place: Path, opened: Opened) -> None:
    """The files of a PEFT folder, as the checkpoint has them."""
    place.mkdir()
    for name in (SETTINGS, WEIGHTS, RECORD):
        if (opened.folder / name).exists():
            shutil.copyfile(opened.folder / name, place / name)
    _write_beside(place, opened)


def _write_beside(place: Path, opened: Opened) -> None:
    opened.tokenizer.save(place)
    for name in _BESIDE:
        if (opened.folder / name).exists():
            shutil.copyfile(opened.folder / name, place / name)
    if opened.template is not None:
        config = read_json(place / "tokenizer_config.json")
        write_json(place / "tokenizer_config.json", {**config, "chat_template": opened.template.text})


def check_model(place: Path, opened: Opened, quantize: str, reference: Reference | None) -> str:
    """Opened by transformers: the same logits, the same prompt by its template, the same ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    expected = _logits(opened) if reference is None else []
    opened.release()  # one model at a time is in memory
    with report.phase("check"):
        theirs: Any = AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
        theirs.eval()
        _same_tokens(place, opened)
        _same_prompt(AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False), opened)
        if reference is None:
            return _same_logits(theirs, opened, expected)
        scores = []
        for one in reference.scored:
            with torch.no_grad():
                logits = theirs(torch.tensor([one.ids])).logits[0, one.start - 1 : -1].float()
            picked = logits.log_softmax(-1)[torch.arange(len(logits)), torch.tensor(one.ids[one.start :])]
            scores.append((picked.tolist(), logits.argmax(-1).tolist()))
    return f"{quantize}: {compare_scores(reference, scores, Limits(0.005, 0.95))}"


def check_adapter(place: Path, opened: Opened) -> str:
    """Opened by peft on its base: the logits of the merged model."""
    try:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise BadConfig(
            f"peft is missing ({error})", "the adapter cannot be checked", "pip install 'lamplighter[hf]'"
        ) from error
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    record = json.loads((place / RECORD).read_text()) if (place / RECORD).exists() else {}
    base = opened.base or record.get("path") or json.loads((place / SETTINGS).read_text())["base_model_name_or_path"]
    if record.get("dtype", "fp32") == "fp32":
        expected = _logits(opened)
        opened.release()
    else:  # peft puts it on the base as it is stored
        report.note(
            f"the adapter was trained on a base in {record['dtype']}: on the whole base its logits differ a little; --merge keeps them"
        )
        opened.release()
        whole = load_folder(opened.folder, base=opened.base, base_dtype="fp32")
        whole.model.eval()
        expected = _logits(replace(opened, built=whole))
        del whole
    with report.phase("check"):
        theirs = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True), place
        ).eval()
        told = _same_logits(theirs, opened, expected)
        return told if record.get("dtype", "fp32") == "fp32" else f"on the whole base, {told}"


def _logits(opened: Opened) -> list[torch.Tensor]:
    return [logits_of(opened, prompt_of(opened, text)) for text in _COMPARED]


@torch.no_grad()
def _same_logits(theirs: Any, opened: Opened, expected: list[torch.Tensor]) -> str:
    far = 0.0
    for text, ours in zip(_COMPARED, expected, strict=True):
        other = theirs(torch.tensor([prompt_of(opened, text)])).logits[0].float()
        if ours.shape != other.shape:
            raise ExportFailed(
                "the exported model has another vocabulary",
                f"{list(other.shape)}, here {list(ours.shape)}",
                "please report it",
            )
        apart = float((ours - other).abs().max() / max(1.0, float(ours.abs().max())))
        far = apart if not apart <= far else far  # what is no number is kept, and refused
    if not far <= _NEAR:
        raise ExportFailed(
            "the exported model gives other logits",
            f"up to {far:.2g} apart (of the largest), allowed {_NEAR:g}",
            "please report it",
        )
    return f"logits within {far:.1e} of the checkpoint's"


def _same_tokens(place: Path, opened: Opened) -> None:
    if differs := compare_tokens(opened.tokenizer, place):
        raise ExportFailed(
            "transformers reads the exported tokenizer otherwise",
            f"{differs}; for models of the kind {opened.built.config.get('model_type')} it has rules of its own",
            "lamp export RUN --to gguf, whose ids are those of training",
            cause="tokenizer_differs",
        )


def _same_prompt(theirs: Any, opened: Opened) -> None:
    if opened.template is None:
        return
    asked = [{"role": "user", "content": "Who lights the lamps?"}]
    ids = opened.template.prompt_ids(asked)
    rendered = theirs.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    found = list(theirs(rendered, add_special_tokens=False)["input_ids"])
    if ids != found:
        why = f"in training {opened.tokenizer.decode(ids)[:120]!r}, exported {rendered[:120]!r}"
        raise ExportFailed(
            "the exported chat template is another one", why, "please report it", cause="template_differs"
        )
