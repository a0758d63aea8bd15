"""lora.targets: which linear layers get an adapter, what that costs, and names that no layer has. No torch.

In:  the names of a model's linear layers, or its shape, or the headers of its weight files; lora.targets.
Out: the chosen layers and the endings that say so to PEFT; the trained numbers; BadConfig for a name that is none.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from lamplighter.errors import BadConfig
from lamplighter.model.shape import Shape, block_linears
from lamplighter.model.stored import stored_matrices

_KINDS = (["auto"], ["all-linear"])


def wanted_layers(names: list[str], targets: list[str]) -> tuple[set[str], list[str]]:
    """Which of these linear layers get an adapter, and the endings that say so to PEFT: as `attn.c_proj`, by PEFT's own rule."""
    endings = sorted({_within_block(name) for name in names})
    if targets == ["auto"]:
        attention = [end for end in endings if "attn" in end.lower() or "attention" in end.lower()]
        targets = attention or endings
    elif targets == ["all-linear"]:
        targets = endings
    chosen = {name for name in names if any(_ends_in(name, end) for end in targets)}
    return chosen, list(targets)


def _ends_in(name: str, end: str) -> bool:
    """PEFT's own rule."""
    return name == end or name.endswith(f".{end}")


def _within_block(name: str) -> str:
    """The name of a layer after the number of its block."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[numbers[-1] + 1 :]) if numbers and numbers[-1] + 1 < len(parts) else name


def lora_parameters(shape: Shape, r: int, targets: list[str]) -> int:
    """The trained numbers of adapters on this model."""
    layers = block_linears(shape)
    chosen, _ = wanted_layers([f"layers.0.{name}" for name in layers], targets)
    return shape.layers * sum(r * sum(size) for name, size in layers.items() if f"layers.0.{name}" in chosen)


def stored_lora_parameters(folder: Path, r: int, targets: list[str]) -> int | None:
    """The same of another family, by the headers of its files; None where those do not tell: which matrices are layers, say."""
    matrices = {name.removesuffix(".weight"): sum(size) for name, size in stored_matrices(folder).items()}
    chosen, endings = wanted_layers(list(matrices), targets)
    if targets == ["all-linear"] or (targets == ["auto"] and not all("att" in end.lower() for end in endings)):
        return None
    return r * sum(matrices[name] for name in chosen)


def refuse_unknown(names: list[str], targets: list[str]) -> None:
    """BadConfig where one of the targets names none of these layers: it would be left out without a word."""
    unknown = [end for end in targets if not any(_ends_in(name, end) for name in names)]
    if targets in _KINDS or not unknown:
        return
    last = sorted({name.rsplit(".", 1)[-1] for name in names})
    near = [found[0] for end in unknown if (found := get_close_matches(end.rsplit(".", 1)[-1], last, 1))]
    meant = f"{', '.join(dict.fromkeys(near))}? Or " if near else ""
    raise BadConfig(
        f"lora.targets {' '.join(unknown)} names no linear layer of this model",
        f"it has: {', '.join(last[:12]) or 'none'}",
        f"{meant}--lora.targets auto, or all-linear, or some of these names",
    )


def refuse_unknown_in(shape: Shape, targets: list[str]) -> None:
    """The same of a model that is built here, before it is."""
    refuse_unknown([f"layers.0.{name}" for name in block_linears(shape)], targets)
