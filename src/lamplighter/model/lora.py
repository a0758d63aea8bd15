"""LoRA: a frozen model with small trained matrices beside its own, in the names and files of PEFT.

In:  a model and the lora section; or a model and a PEFT folder.
Out: the same model with adapters in place (only they require gradients), their tensors under PEFT's names, the content of
     adapter_config.json; the adapters added into the weights.

An adapter of a layer y = Wx is y = Wx + scale * B(Ax). B begins at zero, so the first loss is the base's own. Frozen matrices
may be kept in bf16 or int8 (a scale for each output); embeddings, norms and the head stay in fp32.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lamplighter.config import Lora
from lamplighter.errors import BadConfig, BadData
from lamplighter.model.lora_targets import refuse_unknown, wanted_layers

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_WRAPPED = "inner."  # of model/families.py: PEFT sees the model inside


class _FrozenProduct(torch.autograd.Function):
    """x W' with a W that is kept in fewer bits: it is widened for each product and never kept wide."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, scale_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight_OI, scale_O)
        ctx.x_dtype = x.dtype
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        y = x.to(dtype) @ weight_OI.to(dtype).t()
        return y if scale_O is None else y * scale_O.to(dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        weight_OI, scale_O = ctx.saved_tensors
        (dy,) = upstream
        if scale_O is not None:
            dy = dy * scale_O.to(dy.dtype)
        return (dy @ weight_OI.to(dy.dtype)).to(ctx.x_dtype), None, None


class FrozenLinear(nn.Module):
    """A linear layer that is not trained, its matrix in bf16 or int8."""

    def __init__(self, weight_OI: Tensor, bias: Tensor | None, dtype: str) -> None:
        super().__init__()
        self.scale: nn.Parameter | None = None
        if dtype == "int8":
            largest_O = weight_OI.abs().amax(1).clamp_min(1e-12)
            self.scale = _frozen(largest_O / 127)
            weight_OI = (weight_OI / self.scale[:, None]).round_().clamp_(-127, 127).to(torch.int8)
        else:
            weight_OI = weight_OI.to(torch.bfloat16)
        self.weight = _frozen(weight_OI.contiguous())
        self.bias = None if bias is None else _frozen(bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _FrozenProduct.apply(x, self.weight, self.scale)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def wide(self) -> Tensor:
        """The matrix as it acts, in fp32."""
        return self.weight.float() if self.scale is None else self.weight.float() * self.scale[:, None]


class LoraLinear(nn.Module):
    """A frozen layer and its adapter."""

    def __init__(self, inner: nn.Module, r: int, scale: float, dropout: float) -> None:
        super().__init__()
        weight_OI = matrix_of(inner)
        self.base_layer, self.scale, self.dropout = inner, scale, dropout
        device = weight_OI.device
        self.lora_A = nn.Linear(weight_OI.shape[1], r, bias=False, device=device)
        self.lora_B = nn.Linear(r, weight_OI.shape[0], bias=False, device=device)

    def forward(self, x: Tensor) -> Tensor:
        read = functional.dropout(x, self.dropout, self.training) if self.dropout else x
        out: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(read)) * self.scale
        return out

    def delta(self) -> Tensor:
        """What the adapter adds to the matrix, [out, in]."""
        return self.lora_B.weight.detach().float() @ self.lora_A.weight.detach().float() * self.scale


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.detach(), requires_grad=False)


def is_conv(layer: nn.Module) -> bool:
    """GPT-2's layer, ours or that of transformers: its matrix is stored [in, out]."""
    return type(layer).__name__ == "Conv1D"


def is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, FrozenLinear) or is_conv(layer) or (isinstance(layer, nn.Linear) and _is_plain(layer))


@torch.no_grad()
def _is_plain(layer: nn.Linear) -> bool:
    """y = Wx + b. Some families have layers of this class with a forward of their own: Falcon's is the same product, DeepSeek
    V4's is one for each group of heads. Tried, where it is not torch's own."""
    if type(layer).forward is nn.Linear.forward:
        return True
    weight_OI = layer.weight
    x = torch.linspace(-1, 1, weight_OI.shape[1], dtype=weight_OI.dtype, device=weight_OI.device)[None, None]
    try:
        y = layer(x)
    except (RuntimeError, ValueError, TypeError, IndexError):  # it wants another shape: no plain product
        return False
    expected = functional.linear(x, weight_OI, layer.bias)
    same = isinstance(y, Tensor) and y.shape == expected.shape  # a router of experts gives several things
    return same and torch.allclose(y, expected, rtol=1e-3, atol=1e-5)


def matrix_of(layer: nn.Module) -> Tensor:
    """[out, in], whatever the layer stores."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    return weight.t() if is_conv(layer) else weight


# ---------------------------------------------------------------- putting adapters in


def apply_lora(model: nn.Module, section: Lora, seed: int) -> dict[str, Any]:
    """Freeze the model, narrow its matrices, put the adapters in; the content of adapter_config.json."""
    assert section.r is not None
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    linear = linear_names(model)
    chosen, suffixes = wanted_layers([name.removeprefix(_WRAPPED) for name in linear], section.targets)
    if not chosen:
        shown = ", ".join(sorted({name.rsplit(".", 1)[-1] for name in linear})[:12])
        what = f"lora.targets {' '.join(section.targets)} names no linear layer of this model"
        raise BadConfig(what, f"it has: {shown or 'none'}", "--lora.targets auto, all-linear, or some of these names")
    fan_in_fan_out = any(is_conv(model.get_submodule(name)) for name in linear if name.removeprefix(_WRAPPED) in chosen)
    generator = torch.Generator().manual_seed(seed)
    for name in linear:
        layer = model.get_submodule(name)
        if section.base_dtype != "fp32" and not isinstance(layer, FrozenLinear):  # it may have been read as one
            bias = getattr(layer, "bias", None)
            layer = FrozenLinear(matrix_of(layer), bias, section.base_dtype)
        if name.removeprefix(_WRAPPED) in chosen:
            layer = LoraLinear(layer, section.r, section.scale, section.dropout)
            bound = 1 / math.sqrt(layer.lora_A.in_features)
            drawn = torch.empty(layer.lora_A.weight.shape).uniform_(-bound, bound, generator=generator)
            with torch.no_grad():
                layer.lora_A.weight.copy_(drawn)
                layer.lora_B.weight.zero_()
        model.set_submodule(name, layer)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,  # the caller knows it
        "r": section.r,
        "lora_alpha": section.scale * section.r,
        "lora_dropout": section.dropout,
        "target_modules": suffixes,
        "fan_in_fan_out": fan_in_fan_out,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
    }


def linear_names(model: nn.Module) -> list[str]:
    """Every linear layer but the head, by its name."""
    return [name for name, layer in model.named_modules() if is_linear(layer) and not _is_head(model, name, layer)]


def _is_head(model: nn.Module, name: str, layer: nn.Module) -> bool:
    given = getattr(getattr(model, "inner", None), "get_output_embeddings", lambda: None)()
    return layer is given or name.removeprefix(_WRAPPED) in ("lm_head", "embed_out")


def check_targets(model: nn.Module, targets: list[str]) -> None:
    """BadConfig where one of them names no layer of a model that has its adapters."""
    inside = (".lora_A", ".lora_B")
    names = [name.removeprefix(_WRAPPED) for name in linear_names(model) if not name.endswith(inside)]
    refuse_unknown([name.removesuffix(".base_layer") for name in names], targets)


def adapters_of(model: nn.Module) -> dict[str, LoraLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLinear)}


def is_adapted(model: nn.Module) -> bool:
    return any(isinstance(layer, LoraLinear) for layer in model.modules())


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The live tensors under PEFT's names."""
    found: dict[str, Tensor] = {}
    for name, layer in adapters_of(model).items():
        place = f"{_PREFIX}{name.removeprefix(_WRAPPED)}"
        found[f"{place}.lora_A.weight"] = layer.lora_A.weight.detach()
        found[f"{place}.lora_B.weight"] = layer.lora_B.weight.detach()
    return found


def check_places(model: nn.Module, device: torch.device) -> None:
    """After adapters are in, every number must be where the run computes."""
    named = [*model.named_parameters(), *model.named_buffers()]
    lost = [f"{name} on {tensor.device}" for name, tensor in named if tensor.device.type != device.type]
    if lost:
        raise BadConfig(f"{len(lost)} tensors are not on {device.type}", "; ".join(lost[:3]), "--train.device cpu")


# ---------------------------------------------------------------- reading and merging


_PLAIN = {"use_dora": False, "modules_to_save": None, "rank_pattern": None, "alpha_pattern": None, "layer_replication": None,
          "trainable_token_indices": None, "target_parameters": None, "lora_bias": False, "bias": "none"}  # fmt: skip


def section_of(settings: dict[str, Any], folder: Path, base_dtype: str = "fp32") -> Lora:
    """The lora section that an adapter_config.json stands for; what is more than plain LoRA is refused by its name."""
    if settings.get("peft_type") != "LORA":
        raise BadConfig(
            f"{folder} is a {settings.get('peft_type')} adapter", "LoRA is known here", "merge it with peft"
        )
    for name, plain in _PLAIN.items():
        if settings.get(name) not in (plain, None, {}, []):
            raise BadConfig(
                f"{folder}/{SETTINGS}: {name} {settings[name]!r}", "plain LoRA is known here", "merge it with peft"
            )
    r, alpha, targets = settings.get("r"), settings.get("lora_alpha"), settings.get("target_modules")
    if isinstance(targets, str):
        targets = [targets]
    good = type(r) is int and r > 0 and isinstance(alpha, int | float) and isinstance(targets, list) and targets
    if not good or not all(isinstance(one, str) for one in targets or []):
        raise BadData(
            f"{folder}/{SETTINGS} is damaged", "r, lora_alpha or target_modules is wrong", "use an intact copy"
        )
    assert isinstance(alpha, int | float) and isinstance(r, int) and isinstance(targets, list)
    widened = math.sqrt(r) if settings.get("use_rslora") else 1.0
    return Lora(r=r, alpha=float(alpha) * widened, targets=list(targets), base_dtype=base_dtype)  # type: ignore[arg-type]


@torch.no_grad()
def merge(model: nn.Module) -> int:
    """Add every adapter into its matrix, in fp32, and make plain layers of all; how many there were.

    The base counts as it was trained with: a matrix in int8 is merged as it acts.
    """
    adapters = adapters_of(model)
    for name, layer in adapters.items():
        model.set_submodule(name, _plain_layer(layer.base_layer, layer.delta()))
    for name, part in list(model.named_modules()):
        if isinstance(part, FrozenLinear):
            model.set_submodule(name, _plain_layer(part, None))
    return len(adapters)


def _plain_layer(inner: nn.Module, delta_OI: Tensor | None) -> nn.Module:
    if isinstance(inner, FrozenLinear):
        wide = inner.wide()
        plain = nn.Linear(wide.shape[1], wide.shape[0], bias=inner.bias is not None, device="meta")
        plain.weight = _frozen(wide if delta_OI is None else wide + delta_OI)
        if inner.bias is not None:
            plain.bias = _frozen(inner.bias)
        return plain
    if delta_OI is not None:
        matrix_of(inner).add_(delta_OI)
    return inner
