"""LoRA: what PEFT makes of our folder, what is trained, frozen bases in fewer bits, merging, a base that is not the one of then."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lamplighter.config import Lora, Model, Run, Train
from lamplighter.errors import BadConfig, InputMissing, LampError
from lamplighter.gpus import Device
from lamplighter.model import lora as adapters
from lamplighter.model import origin
from lamplighter.model import weights as stored_weights
from lamplighter.model.build import Built, build, load_folder
from lamplighter.model.lora import LoraLinear, adapter_tensors, apply_lora, check_places, check_targets, merge
from lamplighter.model.lora_targets import lora_parameters
from lamplighter.model.recompute import recompute_blocks
from lamplighter.model.shape import Shape, count_parameters, shape_to_hf
from lamplighter.model.transformer import Transformer, token_loss
from lamplighter.model.weights import init_weights, load_weights, stored_tensors, weights
from lamplighter.plan.estimate import completed, make
from lamplighter.plan.job import Job, job_of, refuse_unknown_targets, shape_of
from lamplighter.rundir import write_json
from lamplighter.train.optimizers import make_optimizer

SHAPES = {
    "gpt2": Shape("gpt2", 64, 32, layers=2, width=32, heads=4),
    "llama": Shape("llama", 64, 32, layers=2, width=32, heads=4, kv_heads=2, tie_embeddings=False),
}
IDS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(3))
TINY_LLAMA = Shape(
    "llama", 32_000, 2048, layers=22, width=2048, heads=32, kv_heads=4, mlp_width=5632, tie_embeddings=False
)


def folder_of(family: str, place: Path) -> Path:
    """A base on disk, with random weights that are large enough to matter."""
    place.mkdir(exist_ok=True, parents=True)
    model = Transformer(SHAPES[family])
    init_weights(model, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    save_file(weights(model), place / "model.safetensors", metadata={"format": "pt"})
    write_json(place / "config.json", shape_to_hf(SHAPES[family]))
    return place


def a_built(place: Path, section: Lora) -> Built:
    return build(Model(init_from=str(place)), 64, 16, 0, 1, lora=section)


def learn(built: Built, steps: int = 5) -> None:
    """A few steps, so that B is no longer zero."""
    optimizer = make_optimizer(built.model, Train(steps=steps, lr=1e-2))
    for _ in range(steps):
        token_loss(built.model, IDS[:, :-1], IDS[:, 1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step(1e-2)
        optimizer.zero_grad()


def kept(built: Built, base: Path, place: Path, dtype: str = "fp32") -> Path:
    """The files of an adapter checkpoint."""
    place.mkdir()
    save_file(weights(built.model), place / adapters.WEIGHTS, metadata={"format": "pt"})
    write_json(place / adapters.SETTINGS, built.adapter)
    write_json(place / origin.RECORD, origin.identify(base, dtype).record())
    return place


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("targets", [["auto"], ["all-linear"], ["by name"]])
def test_peft_opens_the_folder_and_gives_the_same_logits(tmp_path: Path, family: str, targets: list[str]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = folder_of(family, tmp_path / "base")
    if targets == ["by name"]:
        targets = ["c_proj"] if family == "gpt2" else ["o_proj", "mlp.up_proj"]
    built = a_built(base, Lora(r=4, targets=targets))
    learn(built)
    place = kept(built, base, tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), place).eval()
    with torch.no_grad():
        ours, other, plain = built.model.eval()(IDS), theirs(IDS).logits, load_folder(base).model(IDS)
    assert torch.allclose(ours, other, atol=1e-5), (ours - other).abs().max()
    assert not torch.allclose(ours, plain, atol=1e-2), "the adapter does something"
    again = load_folder(place)
    assert torch.allclose(again.model(IDS), ours, atol=1e-5), "merged, it is the same model"
    assert again.adapter is None and not adapters.is_adapted(again.model)


def test_an_adapter_that_peft_made_is_read(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = folder_of("llama", tmp_path / "base")
    torch.manual_seed(1)
    settings = LoraConfig(
        r=3, lora_alpha=7, target_modules=["q_proj", "up_proj"], init_lora_weights=False, use_rslora=True
    )
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings).eval()
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        assert torch.allclose(load_folder(tmp_path / "adapter").model(IDS), theirs(IDS).logits, atol=1e-5)
    kept_settings = json.loads((tmp_path / "adapter" / adapters.SETTINGS).read_text())
    write_json(tmp_path / "adapter" / adapters.SETTINGS, {**kept_settings, "use_dora": True})
    with pytest.raises(BadConfig, match="use_dora"):
        load_folder(tmp_path / "adapter")


def test_only_adapters_are_trained_and_only_they_have_state(tmp_path: Path) -> None:
    base = folder_of("llama", tmp_path / "base")
    built = a_built(base, Lora(r=4))
    before = {name: p.detach().clone() for name, p in built.model.named_parameters() if not p.requires_grad}
    optimizer = make_optimizer(built.model, Train(steps=1))
    token_loss(built.model, IDS[:, :-1], IDS[:, 1:]).backward()  # type: ignore[no-untyped-call]
    optimizer.step(1e-2)
    after = dict(built.model.named_parameters())
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert {name.rsplit(".", 3)[-2] for name in optimizer.state_tensors()} == {"lora_A", "lora_B"}
    assert (
        built.trained
        == lora_parameters(SHAPES["llama"], 4, ["auto"])
        == sum(t.numel() for t in stored_tensors(built.model).values())
    )
    assert built.parameters == count_parameters(SHAPES["llama"]) + built.trained
    check_places(built.model, torch.device("cpu"))
    built.model.register_buffer("stray", torch.empty(1, device="meta"))
    with pytest.raises(BadConfig, match="1 tensors are not on cpu"):
        check_places(built.model, torch.device("cpu"))


def test_the_first_loss_is_that_of_the_base_and_the_seed_decides_the_adapters(tmp_path: Path) -> None:
    base = folder_of("gpt2", tmp_path / "base")
    plain = load_folder(base).model
    one, same, other = (build(Model(init_from=str(base)), 64, 16, 0, seed, lora=Lora(r=4)) for seed in (1, 1, 2))
    assert torch.equal(one.model(IDS), plain(IDS))
    mine, its, others = (adapter_tensors(built.model) for built in (one, same, other))
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    assert any(not torch.equal(mine[name], others[name]) for name in mine)


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize(("dtype", "near"), [("bf16", 0.02), ("int8", 0.05)])
def test_a_narrow_base_is_near_learns_and_merges_as_it_acts(
    tmp_path: Path, family: str, dtype: str, near: float
) -> None:
    base = folder_of(family, tmp_path / "base")
    plain = load_folder(base).model
    built = a_built(base, Lora(r=4, targets=["all-linear"], base_dtype=dtype))  # type: ignore[arg-type]
    with torch.no_grad():
        narrow, whole = built.model(IDS), plain(IDS)
    far = float((narrow - whole).norm() / whole.norm())
    assert 0 < far < near
    first = float(token_loss(built.model, IDS[:, :-1], IDS[:, 1:]).detach())
    learn(built, 20)
    assert float(token_loss(built.model, IDS[:, :-1], IDS[:, 1:]).detach()) < 0.9 * first
    frozen = [p for p in built.model.parameters() if not p.requires_grad and p.ndim == 2]
    assert {p.dtype for p in frozen} >= {torch.bfloat16 if dtype == "bf16" else torch.int8}
    again = load_folder(kept(built, base, tmp_path / "adapter", dtype))
    with torch.no_grad():
        assert torch.allclose(again.model(IDS), built.model(IDS), atol=2e-4), "what was validated is what is merged"
    on_whole = a_built(base, Lora(r=4, targets=["all-linear"]))
    load_weights(on_whole.model, tmp_path / "adapter")
    again = load_folder(tmp_path / "adapter", base_dtype="fp32")
    with torch.no_grad():
        assert torch.allclose(again.model(IDS), on_whole.model(IDS), atol=2e-4), "as peft puts it on the base"


def test_a_large_tensor_is_read_some_rows_at_a_time_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = folder_of("llama", tmp_path / "base")
    whole = load_folder(base).model.state_dict()
    monkeypatch.setattr(stored_weights, "_PIECE_BYTES", 1000)  # neither a multiple of a row nor of a tensor
    pieces = load_folder(base).model.state_dict()
    assert all(torch.equal(pieces[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("family", SHAPES)
def test_a_base_that_is_narrowed_as_it_is_read_has_the_same_bits(tmp_path: Path, family: str) -> None:
    base = folder_of(family, tmp_path / "base")
    wide = load_folder(base).model
    apply_lora(wide, Lora(r=4, base_dtype="int8"), 1)
    mine, others = (
        dict(a_built(base, Lora(r=4, base_dtype="int8")).model.named_parameters()),
        dict(wide.named_parameters()),
    )
    assert mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)
    assert {name for name in mine if mine[name].requires_grad} == {
        name for name in others if others[name].requires_grad
    }
    (base / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(LampError):
        a_built(base, Lora(r=4, base_dtype="int8"))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_narrow_base_keeps_no_file_mapped(tmp_path: Path) -> None:
    """Each mapping is the whole file: sixty of them were more address space than a trial of lamp plan --measure is given."""
    base = folder_of("llama", tmp_path / "base")
    built = a_built(base, Lora(r=2, base_dtype="bf16"))
    assert str(base) not in Path("/proc/self/maps").read_text()
    assert built.parameters > 0


def test_gradients_through_a_narrow_base_are_those_of_the_wide_one() -> None:
    torch.manual_seed(0)
    layer = adapters.FrozenLinear(torch.randn(8, 6), torch.randn(8), "int8")
    x = torch.randn(3, 6, requires_grad=True)
    y = torch.randn(3, 6, requires_grad=True)
    y.data.copy_(x.data)
    layer(x).square().sum().backward()
    assert layer.bias is not None
    (y @ layer.wide().t() + layer.bias).square().sum().backward()
    assert torch.allclose(x.grad, y.grad, atol=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_recompute_gives_the_same_bits(tmp_path: Path, dtype: str) -> None:
    base = folder_of("llama", tmp_path / "base")
    found = []
    for again in (False, True):
        built = a_built(base, Lora(r=4, dropout=0.1, base_dtype=dtype))  # type: ignore[arg-type]
        built.model.train()
        if again:
            recompute_blocks(built.model)
        torch.manual_seed(7)
        token_loss(built.model, IDS[:, :-1], IDS[:, 1:]).backward()  # type: ignore[no-untyped-call]
        found.append({name: p.grad for name, p in built.model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_merging_adds_what_the_adapter_adds(tmp_path: Path) -> None:
    built = a_built(folder_of("llama", tmp_path / "base"), Lora(r=2))
    learn(built)
    with torch.no_grad():
        before = built.model(IDS)
        assert merge(built.model) == 8
        assert torch.allclose(built.model(IDS), before, atol=1e-5)
    assert not any(isinstance(part, LoraLinear) for part in built.model.modules())


def test_another_base_is_refused_and_a_moved_one_is_found_by_its_hash(tmp_path: Path) -> None:
    base = folder_of("llama", tmp_path / "base")
    place = kept(a_built(base, Lora(r=4)), base, tmp_path / "adapter")
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(InputMissing, match="is not there") as gone:
        load_folder(place, command="lamp generate x")
    assert "lamp generate x --model.init_from" in gone.value.next
    load_folder(place, base=str(moved))
    shutil.copytree(moved, base)
    model = load_folder(base).model
    with torch.no_grad():
        next(model.parameters())[0, 0] += 1
    save_file(weights(model), base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadConfig, match="is not the base") as other:
        load_folder(place)
    assert "model.safetensors: then" in other.value.why


@pytest.mark.parametrize("targets", [["c_attn"], ["q_proj", "v_prj"], ["auto", "q_proj"]])
def test_targets_that_name_no_layer_are_an_error_with_what_there_is(tmp_path: Path, targets: list[str]) -> None:
    """One of several, too; by the model, and by its shape before it is built."""
    base = folder_of("llama", tmp_path / "base")
    run = Run(model=Model(init_from=str(base)), lora=Lora(r=1, targets=targets))
    model = a_built(base, Lora(r=1, targets=["q_proj"])).model
    check_targets(model, ["self_attn.q_proj", "o_proj"])
    for refused in (lambda: check_targets(model, targets), lambda: refuse_unknown_targets(run)):
        with pytest.raises(BadConfig) as error:
            refused()
        assert (
            f"lora.targets {targets[1] if 'v_prj' in targets else targets[0]} names no linear layer" in error.value.what
        )
        assert "q_proj" in error.value.why and ("v_proj?" in error.value.next) == ("v_prj" in targets)


def test_adapters_of_another_family_are_planned_by_the_names_in_its_files(tmp_path: Path) -> None:
    sizes = {
        "self_attn.qkv_proj": (48, 16),
        "self_attn.o_proj": (16, 16),
        "mlp.gate_up_proj": (64, 16),
        "input_norm": (16,),
    }
    stored = {f"model.layers.{n}.{name}.weight": torch.zeros(size) for n in range(3) for name, size in sizes.items()}
    save_file({**stored, "model.embed_tokens.weight": torch.zeros(64, 16)}, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {"model_type": "phi3", "hidden_size": 16, "vocab_size": 64, "num_hidden_layers": 3,
               "num_attention_heads": 2, "intermediate_size": 32})  # fmt: skip

    def trained(*targets: str) -> int:
        run = Run(model=Model(init_from=str(tmp_path)), lora=Lora(r=2, targets=list(targets)))
        refuse_unknown_targets(run)  # a file may have other names than the model: nothing is refused by it
        return job_of(run, shape_of(run), 1, "fp32").trained

    assert trained("qkv_proj") == 3 * 2 * (48 + 16)
    assert trained("auto") == 3 * 2 * (48 + 16 + 16 + 16)
    assert trained("qkv_prj") == 0


def test_an_adapter_made_elsewhere_may_name_layers_that_its_base_lacks() -> None:
    """PEFT leaves them out when it makes one; so do we when we read it, as long as one is there."""
    model = Transformer(SHAPES["llama"])
    apply_lora(model, Lora(r=1, targets=["q_proj", "c_attn"]), 1)
    assert len(adapters.adapters_of(model)) == SHAPES["llama"].layers
    with pytest.raises(BadConfig, match="names no linear layer"):
        apply_lora(Transformer(SHAPES["llama"]), Lora(r=1, targets=["c_attn"]), 1)


@pytest.mark.parametrize(("name", "word"), [("m.gguf", "GGUF"), ("model.safetensors", "is a file")])
def test_a_file_in_the_place_of_a_folder_is_told_as_that(tmp_path: Path, name: str, word: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    places = [tmp_path / name, tmp_path] if word == "GGUF" else [tmp_path / name]
    for place in places:
        with pytest.raises(BadConfig) as error:
            origin.with_local_model(Run(model=Model(init_from=str(place))))
        assert word in error.value.what
        assert ("gguf_file='m.gguf'" in error.value.next) == (word == "GGUF")


def test_a_damaged_adapter_is_a_word_and_no_traceback(tmp_path: Path) -> None:
    base = folder_of("llama", tmp_path / "base")
    place = kept(a_built(base, Lora(r=4)), base, tmp_path / "adapter")
    good = {name: (place / name).read_bytes() for name in (adapters.SETTINGS, origin.RECORD, adapters.WEIGHTS)}
    for name in good:
        for data in (b"", b"[]", b"\xff" * 40, good[name][: len(good[name]) // 2]):
            (place / name).write_bytes(data)
            with pytest.raises(LampError):
                load_folder(place)
        (place / name).write_bytes(good[name])
    load_folder(place)
    load_weights(a_built(base, Lora(r=4)).model, place)


# ---------------------------------------------------------------- on paper


def on_paper(**change: object) -> Job:
    job = Job(TINY_LLAMA, seq_len=512, batch_size=16, micro_batch=1, steps=1000, pretrained=True)
    return replace(job, **change)  # type: ignore[arg-type]


LAPTOP = Device("cpu", 15.5, None, 1e11, total_gib=15.5)


def test_a_chat_model_of_1_1b_fits_a_laptop_with_adapters_and_not_without() -> None:
    full = completed(make(on_paper(), LAPTOP))
    assert not full.go and full.memory.peak_gib > 16
    assert any("--lora.r 16" in change.settings for change in full.changes)
    sizes = {}
    for dtype in ("fp32", "bf16", "int8"):
        plan = make(on_paper(lora=Lora(r=16, base_dtype=dtype)), LAPTOP)  # type: ignore[arg-type]
        assert plan.go, (dtype, plan.reasons)
        sizes[dtype] = plan.memory.weights
    assert sizes["fp32"] > 1.7 * sizes["bf16"] > 2.2 * sizes["int8"]


def test_fp32_arithmetic_on_a_narrower_base_is_planned_with_what_is_widened() -> None:
    """Measured with one window of 256 tokens: 4.82 GiB, of which the plan had counted 4.04."""
    one = {"seq_len": 256, "batch_size": 1, "lora": Lora(r=16, base_dtype="bf16")}
    wide = make(on_paper(dtype="fp32", **one), LAPTOP).memory
    assert 4.7 < wide.peak_gib < 5.2, wide.peak_gib
    assert make(on_paper(dtype="fp32", **{**one, "lora": Lora(r=16)}), LAPTOP).memory.cast == 0
    narrow = make(on_paper(dtype="bf16", **one), LAPTOP).memory
    assert narrow.peak_gib < 4.2, "nothing is widened there"


def test_the_paper_knows_adapters_by_number(tmp_path: Path) -> None:
    for family, shape in SHAPES.items():
        base = folder_of(family, tmp_path / family)
        for targets in (["auto"], ["all-linear"], ["c_attn" if family == "gpt2" else "q_proj"]):
            built = a_built(base, Lora(r=4, targets=targets))
            assert built.trained == lora_parameters(shape, 4, targets)
            for dtype in ("fp32", "bf16", "int8"):
                section = Lora(r=4, targets=targets, base_dtype=dtype)  # type: ignore[arg-type]
                real = sum(p.numel() * p.element_size() for p in a_built(base, section).model.parameters())
                job = Job(shape, 16, 4, 4, 10, lora=section)
                assert job.weight_bytes == real, (family, targets, dtype)


def test_a_layer_that_does_something_else_with_its_matrix_is_left_alone() -> None:
    class Grouped(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x, self.weight.view(2, -1, self.in_features).mT)

    class Plain(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.T + self.bias

    model = torch.nn.ModuleDict({"grouped": Grouped(4, 6, bias=False), "plain": Plain(4, 6)})
    apply_lora(model, Lora(r=2, targets=["all-linear"]), 1)
    assert list(adapters.adapters_of(model)) == ["plain"] and type(model["grouped"]) is Grouped
