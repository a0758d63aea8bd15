"""Other families by transformers: packed where a probe shows that examples stay apart, stored as a Hugging Face folder, no code taken."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lamplighter.config import Lora, Model, Run
from lamplighter.errors import BadConfig, LampError
from lamplighter.model.build import Built, build, load_folder
from lamplighter.model.families import FromTransformers, check_adapters_are_used
from lamplighter.model.generate import stream
from lamplighter.model.transformer import Transformer, token_loss
from lamplighter.model.weights import load_weights, weights
from lamplighter.plan.job import is_built_first, shape_of
from lamplighter.rundir import write_json

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}  # fmt: skip
FAMILIES = {
    "qwen2": ("Qwen2", {}, True),
    "mistral": ("Mistral", {"sliding_window": None}, True),
    "gemma": ("Gemma", {}, True),
    "gemma2": ("Gemma2", {"attn_implementation": "eager"}, True),
    "phi": ("Phi", {"num_key_value_heads": 4}, True),
    "gpt_neox": ("GPTNeoX", {}, True),
    "mamba": ("Mamba", {"state_size": 8, "num_hidden_layers": 2}, False),
}
IDS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(1))


def folder_of(kind: str, place: Path) -> Path:
    import transformers

    name, more, _ = FAMILIES[kind]
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **more})
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(place)
    return place


def a_built(folder: Path, **more: Any) -> Built:
    return build(Model(init_from=str(folder)), 64, 16, 0, 1, **more)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_is_built_trained_with_adapters_stored_and_opened_again(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = folder_of(kind, tmp_path / "base")
    assert is_built_first(Run(model=Model(init_from=str(folder))))
    assert shape_of(Run(model=Model(init_from=str(folder)))).layers == 2
    built = a_built(folder)
    assert isinstance(built.model, FromTransformers) and built.takes_segments is FAMILIES[kind][2], built.model.why_not
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.allclose(built.model.eval()(IDS), theirs(IDS).logits, atol=1e-5)
    token_loss(built.model, IDS[:, :-1], IDS[:, 1:]).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in built.model.parameters())
    (tmp_path / "again").mkdir()
    save_file(weights(built.model), tmp_path / "again" / "model.safetensors", metadata={"format": "pt"})
    write_json(tmp_path / "again" / "config.json", built.config)
    with torch.no_grad():
        assert torch.allclose(
            AutoModelForCausalLM.from_pretrained(tmp_path / "again")(IDS).logits, theirs(IDS).logits, atol=1e-5
        )
    load_weights(built.model, tmp_path / "again")
    if kind == "mamba":
        with pytest.raises(BadConfig, match="reads the weights of some layers by itself"):
            a_built(folder, lora=Lora(r=2, targets=["all-linear"]))
    adapted = a_built(folder, lora=Lora(r=2, targets=["in_proj"] if kind == "mamba" else ["all-linear"]))
    loss = token_loss(adapted.model, IDS[:, :-1], IDS[:, 1:])
    loss.backward()  # type: ignore[no-untyped-call]
    assert 0 < adapted.trained < adapted.parameters and adapted.adapter is not None
    words = [
        token for (token,) in stream(load_folder(folder).model, [1, 2, 3], max_tokens=8, temperature=0.0, window=32)
    ]
    slow = IDS.new_tensor([[1, 2, 3]])
    with torch.no_grad():
        for _ in range(8):
            slow = torch.cat((slow, theirs(slow).logits[:, -1:].argmax(-1)), dim=1)
    assert words == slow[0, 3:].tolist(), "the library's cache changes nothing"


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_packed_examples_have_the_loss_that_they_have_alone(tmp_path: Path, kind: str) -> None:
    built = a_built(folder_of(kind, tmp_path / "base"))
    assert isinstance(built.model, FromTransformers) and built.model.adds_mask is (kind == "gemma2")
    segments = torch.tensor([[0] * 5 + [1] * 7, [0] * 8 + [1] * 4])
    with torch.no_grad():
        together = built.model(IDS, segments_BT=segments)
        assert torch.allclose(together[0, 5:], built.model(IDS[:1, 5:])[0], atol=1e-5)
        assert torch.allclose(together[1, 8:], built.model(IDS[1:, 8:])[0], atol=1e-5)


def test_a_window_that_is_shorter_than_a_row_is_not_packed(tmp_path: Path) -> None:
    folder = folder_of("mistral", tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    write_json(folder / "config.json", {**config, "sliding_window": 8})
    built = a_built(folder)
    assert not built.takes_segments and "attention window of 8" in built.model.why_not  # type: ignore[operator]


def test_a_model_that_sees_ahead_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertLMHeadModel

    small = {name: value for name, value in SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
    BertLMHeadModel(BertConfig(**small, is_decoder=True)).save_pretrained(tmp_path / "bert")
    assert a_built(tmp_path / "bert").parameters > 0
    config = json.loads((tmp_path / "bert" / "config.json").read_text())
    write_json(tmp_path / "bert" / "config.json", {**config, "is_decoder": False})
    with pytest.raises(BadConfig, match="sees the tokens that it shall predict"):
        a_built(tmp_path / "bert")


def test_adapters_that_cannot_be_asked_or_get_no_gradient_are_refused() -> None:
    class Inner(torch.nn.Module):
        def __init__(self, fault: Exception | None) -> None:
            super().__init__()
            self.fault, self.weight = fault, torch.nn.Parameter(torch.ones(8))

        def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
            if self.fault is not None:
                raise self.fault
            return SimpleNamespace(logits=self.weight.detach().expand(*input_ids.shape, 8))

    with pytest.raises(BadConfig, match="would get a gradient"):  # Reformer's reversible layers are such
        check_adapters_are_used(FromTransformers(Inner(None), 16))
    with pytest.raises(BadConfig, match="cannot be asked with adapters"):
        check_adapters_are_used(FromTransformers(Inner(ValueError("4 is not divisible by 8")), 16))


def test_no_code_is_taken_from_a_folder(tmp_path: Path) -> None:
    folder = folder_of("qwen2", tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    auto = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
    write_json(folder / "config.json", {**config, "model_type": "evil", "auto_map": auto})
    with pytest.raises(BadConfig, match="no family known here"):
        a_built(folder)
    write_json(folder / "config.json", {**config, "auto_map": auto})
    a_built(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"quantization_config": {"quant_method": "gptq"}},
        {"vocab_size": None},
        {"hidden_size": "x"},
        {"num_hidden_layers": 3},
    ],
)
def test_a_folder_that_cannot_be_is_a_word_and_no_traceback(change: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_of("qwen2", tmp_path / "base")
    write_json(folder / "config.json", {**json.loads((folder / "config.json").read_text()), **change})
    with pytest.raises(LampError):
        a_built(folder)


def test_ours_stay_ours(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(tmp_path / "llama")
    assert isinstance(a_built(tmp_path / "llama").model, Transformer)
