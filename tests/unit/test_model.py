"""The model room: the same numbers as transformers, the same names on disk, true arithmetic about sizes."""

import json
import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from lamplighter.model.shape import Family, Shape, count_parameters, flops_per_token, shape_from_hf, shape_to_hf
from lamplighter.model.transformer import KVCache, LanguageModel, Transformer, next_token_loss
from lamplighter.model.weights import init_weights, load_weights, weights
from running import LONG, shared

GPT2 = Shape(family="gpt2", vocab_size=61, positions=32, layers=2, width=24, heads=3, mlp_width=40, dropout=0.1)
LLAMA = Shape(family="llama", vocab_size=61, positions=32, layers=2, width=32, heads=4, kv_heads=2, mlp_width=48)
QWEN3 = replace(LLAMA, family="qwen3", norm_eps=1e-6)
SHAPES = {
    "gpt2": GPT2,
    "gpt2-untied": replace(GPT2, tie_embeddings=False),
    "llama-grouped": replace(LLAMA, rope_theta=50_000.0, norm_eps=1e-6),
    "llama-untied": replace(LLAMA, tie_embeddings=False, kv_heads=4, bos_token_id=1, eos_token_id=2),
    "qwen3": QWEN3,
    "qwen3-untied": replace(QWEN3, tie_embeddings=False),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
both_families = pytest.mark.parametrize("shape", [GPT2, LLAMA, QWEN3], ids=["gpt2", "llama", "qwen3"])


def a_model(shape: Shape, seed: int = 0) -> Transformer:
    """Weights far from their starting values, norms and biases too, so that no term can hide."""
    model = Transformer(shape)
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.eval()


def some_ids(shape: Shape, batch: int = 2, length: int = 17, seed: int = 0) -> Tensor:
    return torch.randint(shape.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def store(model: Transformer, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape_to_hf(model.shape)))
    return folder


def open_with_transformers(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


# --- the same as transformers --------------------------------------------------------------------------------------


@every_shape
def test_transformers_opens_our_folder_and_gets_our_logits(shape: Shape, tmp_path: Path) -> None:
    model, ids = a_model(shape), some_ids(shape)
    theirs = open_with_transformers(store(model, tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-5, rtol=0)
    assert count_parameters(shape) == sum(parameter.numel() for parameter in theirs.parameters())


@every_shape
def test_we_open_their_folder_and_get_their_logits(shape: Shape, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**shape_to_hf(shape)))
    theirs.eval().save_pretrained(tmp_path)
    ours = Transformer(shape_from_hf(json.loads((tmp_path / "config.json").read_text()))).eval()
    load_weights(ours, tmp_path)
    ids = some_ids(shape)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=0)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in weights(ours).items()} == {n: t.shape for n, t in stored.items()}


def test_we_open_their_sharded_folder(tmp_path: Path) -> None:
    theirs = open_with_transformers(store(a_model(LLAMA), tmp_path / "whole"))
    theirs.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    ours = Transformer(LLAMA)
    load_weights(ours, tmp_path / "shards")
    assert_same_weights(ours, a_model(LLAMA))


def test_a_published_model_has_the_same_logits_as_in_transformers() -> None:
    folder = shared("models", "stories260K_hf_llama")
    shape = shape_from_hf(json.loads((folder / "config.json").read_text()))
    ours, theirs = Transformer(shape).eval(), open_with_transformers(folder)
    load_weights(ours, folder)
    ids = some_ids(shape, batch=2, length=200)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=0)
    assert count_parameters(shape) == sum(parameter.numel() for parameter in theirs.parameters())


@every_shape
def test_a_shape_survives_config_json(shape: Shape) -> None:
    assert shape_from_hf(json.loads(json.dumps(shape_to_hf(shape)))) == shape


# --- what the network promises -------------------------------------------------------------------------------------


@every_shape
def test_the_cache_changes_nothing(shape: Shape) -> None:
    model, ids = a_model(shape), some_ids(shape)
    cache = KVCache(shape, batch=2, length=20, device=torch.device("cpu"), dtype=torch.float32)
    with torch.no_grad():
        whole = model(ids)
        parts = [model(ids[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 13), (13, 17))]
        last = model(ids, last_only=True)
    assert cache.position == 17
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=0)
    torch.testing.assert_close(last, whole[:, -1:], atol=1e-5, rtol=0)


@both_families
def test_no_token_sees_the_future(shape: Shape) -> None:
    model, ids = a_model(shape), some_ids(shape)
    with torch.no_grad():
        before = model(ids)
        for t in (0, 6, 16):
            changed = ids.clone()
            changed[:, t] = (ids[:, t] + 1) % shape.vocab_size
            after = model(changed)
            torch.testing.assert_close(after[:, :t], before[:, :t], atol=1e-6, rtol=0)
            assert not torch.allclose(after[:, t:], before[:, t:], atol=1e-3)


@both_families
def test_packed_documents_are_as_good_as_alone(shape: Shape) -> None:
    model = a_model(shape)
    lengths = [5, 1, 9, 12]
    documents = [some_ids(shape, batch=1, length=length, seed=length) for length in lengths]
    packed = torch.cat(documents, dim=1).repeat(2, 1)
    segments = torch.cat([torch.full((2, length), 7 - n) for n, length in enumerate(lengths)], dim=1)
    with torch.no_grad():
        together = model(packed, segments_BT=segments).split(lengths, dim=1)
        for document, logits in zip(documents, together, strict=True):
            targets = document.roll(-1, dims=1)
            alone = next_token_loss(model(document), targets) / document.numel()
            for row in logits:
                inside = next_token_loss(row[None], targets) / document.numel()
                torch.testing.assert_close(inside, alone, atol=1e-5, rtol=0)


@every_shape
def test_gradients_reach_every_parameter(shape: Shape) -> None:
    model, ids = a_model(shape).train(), some_ids(shape, length=shape.positions)
    next_token_loss(model(ids), ids.roll(-1, dims=1)).backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_dropout_works_in_training_and_is_off_in_eval() -> None:
    model, ids = a_model(GPT2), some_ids(GPT2)
    with torch.no_grad():
        assert torch.equal(model(ids), model(ids))
        model.train()
        assert not torch.equal(model(ids), model(ids))


def test_the_loss_is_a_float32_sum_that_leaves_negative_targets_out() -> None:
    logits = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[4, -1, 0], [-100, 10, -7]])
    kept = [(0, 0, 4), (0, 2, 0), (1, 1, 10)]
    expected = sum(-functional.log_softmax(logits[b, t], dim=-1)[v] for b, t, v in kept)
    torch.testing.assert_close(next_token_loss(logits, targets), torch.as_tensor(expected))
    assert next_token_loss(logits.bfloat16(), targets).dtype == torch.float32
    assert next_token_loss(logits, torch.full((2, 3), -1)) == 0.0


@both_families
def test_too_many_tokens_are_refused(shape: Shape) -> None:
    model = a_model(shape)
    with pytest.raises(ValueError, match="33 tokens do not fit the model's 32 positions"):
        model(some_ids(shape, length=33))
    cache = KVCache(shape, 2, 8, torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="9 tokens do not fit the cache's 8"):
        model(some_ids(shape, length=9), cache=cache)
    with pytest.raises(ValueError, match="cache and segments"):
        model(some_ids(shape, length=4), cache=cache, segments_BT=torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize("shape", [pytest.param(GPT2, marks=LONG), LLAMA], ids=["gpt2", "llama"])
def test_it_compiles_whole_and_computes_the_same(shape: Shape) -> None:
    shape = replace(shape, dropout=0.0)
    model, ids = a_model(shape).train(), some_ids(shape)
    segments = torch.arange(17).div(6, rounding_mode="floor").expand(2, 17)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for more in ({}, {"segments_BT": segments}):
        losses, gradients = [], []
        for run in (model, compiled):
            model.zero_grad()
            loss = next_token_loss(run(ids, **more), ids.roll(-1, dims=1))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            gradients.append(model.head_weight().grad)
        torch.testing.assert_close(losses[0], losses[1])
        torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # torch says so whenever oneDNN is switched
@both_families
def test_bf16_autocast_trains_and_caches(shape: Shape) -> None:
    model, ids = a_model(shape), some_ids(shape)
    cache = KVCache(shape, 2, 17, torch.device("cpu"), torch.float32)
    exact = model(ids).detach()
    # oneDNN is off: virtual machines exist that announce AMX and then die of SIGILL in its bfloat16 kernels.
    with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            logits = torch.cat([model(ids[:, :9], cache=cache), model(ids[:, 9:], cache=cache)], dim=1)
        loss = next_token_loss(model.train()(ids), ids)
        loss.backward()  # type: ignore[no-untyped-call]
    assert loss.dtype == torch.float32
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - exact).abs().mean() < 0.02 * exact.abs().mean()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


# --- initial weights -----------------------------------------------------------------------------------------------


def assert_same_weights(one: nn.Module, two: nn.Module) -> None:
    ours, theirs = weights(one), weights(two)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@both_families
def test_initial_weights_depend_on_the_seed_alone(shape: Shape) -> None:
    torch.manual_seed(1)
    one, two, other = Transformer(shape), Transformer(shape), Transformer(shape)
    init_weights(one, seed=3)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    init_weights(two, seed=3)
    init_weights(other, seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_weights(one, two)
    assert not torch.equal(one.head_weight(), other.head_weight())


def test_a_qwen3_begins_with_branches_that_are_nothing() -> None:
    shape = replace(QWEN3, layers=3, width=128, heads=4, kv_heads=4, mlp_width=256, tie_embeddings=False)
    model = Transformer(shape)
    init_weights(model, seed=0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.all(parameter == 1.0), name
        elif name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            assert not parameter.any(), name
        else:
            wanted = 1.0 if "embed" in name else 128**-0.5
            assert parameter.std().item() == pytest.approx(wanted, rel=0.05), name
    ids = some_ids(shape)
    loss = next_token_loss(model.eval()(ids), ids.roll(-1, dims=1)).item() / ids.numel()
    assert loss == pytest.approx(math.log(shape.vocab_size), rel=1e-5)


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_initial_weights_have_the_sizes_of_gpt2(shape: Shape) -> None:
    shape = replace(shape, layers=8, width=128, heads=4, kv_heads=4, mlp_width=256)
    model = Transformer(shape)
    init_weights(model, seed=0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.all(parameter == (0.0 if name.endswith("bias") else 1.0)), name
        else:
            residual = name.endswith(("c_proj.weight", "o_proj.weight", "down_proj.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.05), name
    ids = some_ids(shape)
    loss = next_token_loss(model.eval()(ids), ids.roll(-1, dims=1)).item() / ids.numel()
    assert loss == pytest.approx(math.log(shape.vocab_size), rel=0.05)  # at the start it knows nothing


@both_families
def test_a_model_built_on_the_meta_device_ends_up_the_same(shape: Shape) -> None:
    with torch.device("meta"):
        late = Transformer(shape)
    late.to_empty(device="cpu")
    early = Transformer(shape)
    init_weights(late, seed=5)
    init_weights(early, seed=5)
    assert_same_weights(late, early)
    assert torch.equal(late.eval()(some_ids(shape)), early.eval()(some_ids(shape)))


# --- loading -------------------------------------------------------------------------------------------------------


def test_loading_copies_into_the_tensors_that_are_there(tmp_path: Path) -> None:
    store(a_model(LLAMA), tmp_path)
    model = Transformer(LLAMA)
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    load_weights(model, tmp_path)
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert_same_weights(model, a_model(LLAMA))


def test_old_gpt2_files_are_read(tmp_path: Path) -> None:
    """Without the prefix, with mask buffers, with the tied head stored, in half precision."""
    tensors = {name.removeprefix("transformer."): tensor.half() for name, tensor in weights(a_model(GPT2)).items()}
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, tmp_path / "model.safetensors")
    model = Transformer(GPT2)
    load_weights(model, tmp_path)
    torch.testing.assert_close(model.head_weight(), a_model(GPT2).head_weight(), atol=1e-3, rtol=0)
    assert model.head_weight().dtype == torch.float32


def damaged(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    name = "model.layers.0.mlp.up_proj.weight"
    without = {key: tensor for key, tensor in tensors.items() if key != name}
    return {
        f"{name} is missing": without,
        "model.extra is unexpected": tensors | {"model.extra": torch.zeros(1)},
        rf"{name} is \[48, 31\] in the file, \[48, 32\] in the model": without | {name: torch.zeros(48, 31)},
        "lm_head.weight differs from model.embed_tokens.weight": tensors | {"lm_head.weight": torch.zeros(61, 32)},
        r"(?s)( is missing.*){5}and 14 more": {"model.norm.weight": tensors["model.norm.weight"]},
    }


@pytest.mark.parametrize("words", damaged(weights(Transformer(LLAMA))))
def test_weights_that_do_not_fit_are_listed_and_nothing_is_touched(words: str, tmp_path: Path) -> None:
    save_file(damaged(weights(a_model(LLAMA, seed=1)))[words], tmp_path / "model.safetensors")
    model = a_model(LLAMA)
    with pytest.raises(ValueError, match=words):
        load_weights(model, tmp_path)
    assert_same_weights(model, a_model(LLAMA))


def test_a_missing_or_torn_file_is_named(tmp_path: Path) -> None:
    model = Transformer(LLAMA)
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors in"):
        load_weights(model, tmp_path)
    file = store(model, tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="damaged"):
        load_weights(model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-2.safetensors"}}')
    with pytest.raises(FileNotFoundError, match=r"no model-2\.safetensors in"):
        load_weights(model, tmp_path)


class Own(nn.Module):
    """Somebody's own model: tied by sharing a parameter, with one buffer that is stored and one that is not."""

    def __init__(self, vocab_size: int = 13, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(width))
        self.register_buffer("scratch", torch.rand(width), persistent=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        logits_BTV: Tensor = self.head(self.embed(ids_BT) * self.scale)
        return logits_BTV


def test_somebodys_own_model_is_stored_once_and_loaded(tmp_path: Path) -> None:
    one, two = Own(), Own()
    fits: LanguageModel = one  # what the Protocol asks for, an nn.Module has
    assert weights(one).keys() == {"embed.weight", "scale"}
    save_file(weights(one), tmp_path / "model.safetensors")
    load_weights(two, tmp_path)
    assert torch.equal(fits.forward(torch.arange(13)[None]), two(torch.arange(13)[None]))


# --- sizes and costs -----------------------------------------------------------------------------------------------


def test_parameter_counts_are_those_of_the_module() -> None:
    families: tuple[Family, ...] = ("gpt2", "llama")
    for family, layers, width, tied, mlp_width in product(families, (1, 3), (16, 48), (True, False), (0, 20)):
        for kv_heads in (4,) if family == "gpt2" else (1, 2, 4):
            shape = Shape(family, 50, 24, layers, width, 4, kv_heads, mlp_width, tie_embeddings=tied)
            with torch.device("meta"):
                model = Transformer(shape)
            assert count_parameters(shape) == sum(parameter.numel() for parameter in model.parameters()), shape


def test_known_parameter_counts() -> None:
    small = Shape(family="gpt2", vocab_size=30_000, positions=512, layers=12, width=768, heads=12)
    assert count_parameters(small) == 108_489_216
    assert count_parameters(replace(small, vocab_size=50_257, positions=1024)) == 124_439_808  # GPT-2 as published
    llama2 = Shape("llama", 32_000, 4096, 32, 4096, 32, mlp_width=11_008, tie_embeddings=False)
    assert count_parameters(llama2) == 6_738_415_616  # Llama 2 7B as published


def test_flops_are_six_per_weight_that_multiplies_plus_attention() -> None:
    gpt2 = Shape(family="gpt2", vocab_size=100, positions=64, layers=2, width=8, heads=2)
    matmul = 2 * (12 * 8 * 8) + 100 * 8
    assert flops_per_token(gpt2, 64) == 6 * matmul + 12 * 2 * 8 * 64
    assert flops_per_token(replace(gpt2, tie_embeddings=False, positions=999), 64) == flops_per_token(gpt2, 64)
    llama = Shape(family="llama", vocab_size=100, positions=64, layers=2, width=8, heads=4, kv_heads=2, mlp_width=20)
    matmul = 2 * (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 20) + 100 * 8
    assert flops_per_token(llama, 32) == 6 * matmul + 12 * 2 * 8 * 32


@both_families
def test_flops_are_what_torch_counts(shape: Shape) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model, ids = Transformer(replace(shape, dropout=0.0)), some_ids(shape, batch=2, length=16)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        next_token_loss(model(ids), ids).backward()  # type: ignore[no-untyped-call]
    assert counter.get_total_flops() == flops_per_token(shape, 16) * ids.numel()


def test_usual_sizes_are_filled_in() -> None:
    gpt2 = Shape(family="gpt2", vocab_size=10, positions=8, layers=1, width=48, heads=4)
    assert (gpt2.kv_heads, gpt2.mlp_width, gpt2.head_width) == (4, 192, 12)
    assert Shape(family="llama", vocab_size=10, positions=8, layers=1, width=48, heads=4).mlp_width == 128


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"family": "bert"}, "'bert' is not known"),
        ({"heads": 5}, "width 32 cannot be shared out over 5 heads"),
        ({"kv_heads": 3}, "heads 4 must be a multiple of kv_heads 3"),
        ({"width": 36, "heads": 12, "kv_heads": 12}, "must be even"),
        ({"layers": 0}, "layers must be a whole number of at least 1, not 0"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"norm_eps": 0.0}, "norm_eps must be"),
        ({"rope_theta": -1.0}, "rope_theta must be"),
        ({"family": "gpt2"}, "kv_heads 2: gpt2 has one per head"),
    ],
)
def test_impossible_shapes_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(LLAMA, **wrong)


# --- config.json ---------------------------------------------------------------------------------------------------


def test_config_json_of_many_ages_is_read() -> None:
    old = {k: v for k, v in shape_to_hf(LLAMA).items() if k not in ("rope_theta", "rope_parameters", "head_dim")}
    assert shape_from_hf(old | {"rope_theta": 5e5, "rope_scaling": None}).rope_theta == 5e5
    assert shape_from_hf(old | {"rope_parameters": {"rope_type": "default", "rope_theta": 6e5}}).rope_theta == 6e5
    assert shape_from_hf(old | {"rope_scaling": {"type": "default", "rope_theta": 7e5}}).rope_theta == 7e5
    assert shape_from_hf(old).rope_theta == 1e4
    assert shape_from_hf(old | {"num_key_value_heads": None}).kv_heads == 4
    assert shape_from_hf(old | {"eos_token_id": [2]}).eos_token_id == 2
    gpt2 = shape_from_hf(shape_to_hf(GPT2) | {"n_inner": None})
    assert gpt2.mlp_width == 4 * GPT2.width


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("llama", "rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("llama", "rope_parameters", {"rope_type": "linear", "factor": 2.0}),
        ("llama", "rope_parameters", {"partial_rotary_factor": 0.5}),
        ("llama", "head_dim", 16),
        ("llama", "attention_bias", True),
        ("llama", "mlp_bias", True),
        ("llama", "hidden_act", "gelu"),
        ("llama", "eos_token_id", [2, 3]),
        ("llama", "quantization_config", {"bits": 4}),
        ("llama", "model_type", "mistral"),
        ("gpt2", "activation_function", "relu"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "scale_attn_weights", False),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "attn_pdrop", 0.5),
    ],
)
def test_what_we_do_not_compute_is_refused_by_name(family: str, field: str, value: object) -> None:
    config = shape_to_hf(GPT2 if family == "gpt2" else LLAMA)
    with pytest.raises(ValueError, match=field):
        shape_from_hf(config | {field: value})


@both_families
def test_a_missing_size_is_named(shape: Shape) -> None:
    config = shape_to_hf(shape)
    del config["vocab_size"]
    with pytest.raises(ValueError, match="vocab_size is missing"):
        shape_from_hf(config)
