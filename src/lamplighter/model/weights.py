"""The tensors of a model: made from a seed, stored, and loaded from safetensors under Hugging Face's own names.

In:  a model; a seed, or a folder of safetensors.
Out: initial weights, the tensors to store, weights loaded in place.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lamplighter.model import lora
from lamplighter.model.families import FromTransformers
from lamplighter.model.stored import open_safetensors, weight_files
from lamplighter.model.transformer import INIT_STD, Transformer

_RESIDUAL_PROJECTIONS = ("c_proj.weight", "o_proj.weight", "down_proj.weight")
_PIECE_BYTES = 16 << 20  # of a large tensor are read at a time
# Constants that older transformers stored beside the weights; they are computed, not trained.
_COMPUTED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """In place. gpt2 and llama by GPT-2's scheme: normal(0, 0.02), residual projections smaller by sqrt(2 * layers), norms 1,
    biases 0. qwen3: as large as inputs are many, what ends a branch and an untied head 0, so that each layer begins as nothing.

    Drawn on the CPU in float32 by a generator of its own, so the same seed gives the same weights on every device,
    whatever else drew random numbers. Also fills a model built on the meta device and moved by to_empty.
    """
    generator = torch.Generator().manual_seed(seed)
    if model.shape.family == "qwen3":
        _init_from_zero(model, generator)
        return
    residual_std = INIT_STD / math.sqrt(2 * model.shape.layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        std = residual_std if name.endswith(_RESIDUAL_PROJECTIONS) else INIT_STD
        parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


def _init_from_zero(model: Transformer, generator: torch.Generator) -> None:
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        elif name.endswith((*_RESIDUAL_PROJECTIONS, "lm_head.weight")):
            parameter.zero_()
        else:
            embedding = name.endswith("embed_tokens.weight")
            untied = 1.0 if not model.shape.tie_embeddings else INIT_STD
            std = untied if embedding else parameter.shape[1] ** -0.5
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


# --- sharded (train/sharding.py) ----------------------------------------------------------------------------------------


def rows_of(length: int, size: int, rank: int) -> slice:
    """Of a tensor with so many rows, those that one of several ranks holds: as torch.chunk divides them, the last ones may have none."""
    each = -(-length // size)
    return slice(min(rank * each, length), min((rank + 1) * each, length))


def local(tensor: Tensor) -> Tensor:
    """What this process holds of it: all of a plain tensor, some rows of a sharded one."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part.detach()


def local_rows(tensor: Tensor) -> slice:
    """Which rows these are."""
    mesh = getattr(tensor, "device_mesh", None)
    return slice(None) if mesh is None else rows_of(len(tensor), mesh.size(), mesh.get_local_rank())


def local_part(whole: Tensor, tensor: Tensor) -> Tensor:
    """The same rows of a whole tensor; a single number has none, and every process holds it."""
    return whole[local_rows(tensor)] if whole.dim() else whole


# --- on disk -------------------------------------------------------------------------------------------------------


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The tensors to store, contiguous, as far as this process holds them; one that is used under several names is there once,
    under its first."""
    return {name: local(tensor).contiguous() for name, tensor in stored_tensors(model).items()}


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Of a model with adapters, the adapters alone, under PEFT's names."""
    if lora.is_adapted(model):
        return lora.adapter_tensors(model)
    if isinstance(model, FromTransformers):
        model = model.inner
    first_names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in model.state_dict().items() if name in first_names}


def stored_buffers(model: nn.Module) -> set[str]:
    """Which of the stored tensors are no parameters: a forward pass may change them."""
    if lora.is_adapted(model):
        return set()
    inner = model.inner if isinstance(model, FromTransformers) else model
    return stored_tensors(model).keys() - {name for name, _ in inner.named_parameters()}


@torch.no_grad()
def load_weights(model: nn.Module, folder: Path) -> None:
    """Copy a folder's safetensors into the model's own tensors, in place. Nothing is touched unless everything fits.

    A missing file is a FileNotFoundError; a damaged file, or tensors that do not fit, a ValueError that names them.
    """
    with _fitting(model, folder) as found:
        places = {name: (path, stored) for name, (_, stored, path) in found.items()}
    for name, target in stored_tensors(model).items():
        if target.dim() and target.nbytes > 2 * _PIECE_BYTES and not hasattr(target, "to_local"):
            _read_into(target, *places[name])
        else:
            local(target).copy_(local_part(_read(*places[name]), target))


@torch.no_grad()
def fill_weights(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """From tensors by the names that `stored_tensors` has; a missing one is a KeyError."""
    for name, target in stored_tensors(model).items():
        local(target).copy_(local_part(tensors[name], target))


def _read(path: Path, stored: str) -> Tensor:
    """One tensor; the file is closed again, for what is mapped of it counts as memory of this process."""
    with open_safetensors(path) as file:
        tensor: Tensor = file.get_tensor(stored)
    return tensor


def _read_into(target: Tensor, path: Path, stored: str) -> None:
    """A large tensor some rows at a time: what is mapped of a whole embedding would be the peak of all memory."""
    rows = max(1, _PIECE_BYTES * len(target) // target.nbytes)
    for begin in range(0, len(target), rows):
        with open_safetensors(path) as file:
            target[begin : begin + rows].copy_(file.get_slice(stored)[begin : begin + rows])


@torch.no_grad()
def load_narrow(model: Transformer, folder: Path, dtype: str) -> None:
    """The same for a model on the meta device, whose layers become frozen ones in bf16 or int8: one at a time is ever wide."""
    with _fitting(model, folder) as found:
        places = {name: (path, stored) for name, (_, stored, path) in found.items()}

    def read(name: str) -> Tensor:
        return _read(*places[name]).float()

    for name in lora.linear_names(model):
        layer = model.get_submodule(name)
        bias = None if getattr(layer, "bias", None) is None else read(f"{name}.bias")
        weight = read(f"{name}.weight")
        model.set_submodule(name, lora.FrozenLinear(weight.t() if lora.is_conv(layer) else weight, bias, dtype))
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            owner, _, last = name.rpartition(".")
            own = _read(*places[name]).to(
                torch.float32, copy=True
            )  # or the whole file would stay mapped for each of them
            setattr(model.get_submodule(owner), last, nn.Parameter(own))


@contextmanager
def _fitting(model: nn.Module, folder: Path) -> Iterator[dict[str, tuple[Any, str, Path]]]:
    """Our name of each tensor -> the open file, the name in it, its path; all of them fit, or a ValueError says which do not."""
    with ExitStack() as open_files:
        found: dict[str, tuple[Any, str, Path]] = {}
        for path in [folder / lora.WEIGHTS] if lora.is_adapted(model) else weight_files(folder):
            if not path.is_file():
                raise FileNotFoundError(f"no {path.name} in {folder}")
            file = open_files.enter_context(open_safetensors(path))
            names = [name for name in sorted(file.keys()) if not _is_computed(model, name)]
            found |= {_own_name(model, name): (file, name, path) for name in names}
        problems = _tied_head_problems(model, found) + _misfits(stored_tensors(model), found)
        if problems:
            more = f"\n  and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError(f"the weights in {folder} do not fit this model:\n  " + "\n  ".join(problems[:5]) + more)
        yield found


def _is_computed(model: nn.Module, stored: str) -> bool:
    return isinstance(model, Transformer) and stored.endswith(_COMPUTED)


def _own_name(model: nn.Module, stored: str) -> str:
    """GPT-2's original files lack the "transformer." that came later."""
    bare = not stored.startswith(("transformer.", "lm_head.", "base_model."))
    is_gpt2 = isinstance(model, Transformer) and model.shape.family == "gpt2"
    return f"transformer.{stored}" if bare and is_gpt2 else stored


def _tied_head_problems(model: nn.Module, found: dict[str, tuple[Any, str, Path]]) -> list[str]:
    """A tied head may be stored as well; then it must be the embedding. It is taken out of what was found."""
    if not (isinstance(model, Transformer) and model.shape.tie_embeddings and "lm_head.weight" in found):
        return []
    embedding = "transformer.wte.weight" if model.shape.family == "gpt2" else "model.embed_tokens.weight"
    head_file, head_name, _ = found.pop("lm_head.weight")
    if embedding not in found:
        return []  # reported as missing
    file, name, _ = found[embedding]
    if torch.equal(head_file.get_tensor(head_name), file.get_tensor(name)):
        return []
    return [f"lm_head.weight differs from {embedding}, although the config ties them"]


def _misfits(targets: dict[str, Tensor], found: dict[str, tuple[Any, str, Path]]) -> list[str]:
    missing = [f"{name} is missing" for name in targets if name not in found]
    unexpected = [f"{name} is unexpected" for name in found if name not in targets]
    misshapen = []
    for name in targets.keys() & found.keys():
        file, stored, _ = found[name]
        here, there = list(targets[name].shape), list(file.get_slice(stored).get_shape())
        if here != there:
            misshapen.append(f"{name} is {there} in the file, {here} in the model")
    return missing + unexpected + sorted(misshapen)
