"""The weight files of a model folder: which they are, and how many numbers they hold. No torch.

In:  a folder with model.safetensors, or with an index and the files that it names.
Out: their paths; the count of their numbers and the sizes of their matrices, by their headers alone.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from lamplighter.rundir import read_record


def weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    paths = [folder / name for name in (_named_files(index) if index.exists() else ["model.safetensors"])]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(
                f"no {path.name} in {folder}; weights are read from safetensors, never from pickles"
            )
    return paths


def _named_files(index: Path) -> list[str]:
    """The files that an index names: beside it, and nowhere else."""
    found = read_record(index).get("weight_map")
    names = (
        set(found.values()) if isinstance(found, dict) and all(isinstance(n, str) for n in found.values()) else set()
    )
    if not names or any(Path(name).name != name for name in names):
        raise ValueError(f"{index} is damaged, or names files outside its folder")
    return sorted(names)


def stored_numbers(folder: Path) -> int:
    """How many numbers a folder's safetensors hold, by their headers: nothing else is read."""
    return sum(numbers_in(path) for path in weight_files(folder))


def numbers_in(path: Path) -> int:
    with open_safetensors(path, "np") as file:
        return int(sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys()))  # noqa: SIM118  not a dict


def stored_matrices(folder: Path) -> dict[str, tuple[int, int]]:
    """The size of every tensor of two dimensions, by its name."""
    found = {}
    for path in weight_files(folder):
        with open_safetensors(path, "np") as file:
            sizes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  not a dict
        found.update({name: size for name, size in sizes.items() if len(size) == 2})
    return found


def open_safetensors(path: Path, framework: str = "pt") -> Any:
    try:
        return safe_open(path, framework=framework)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
