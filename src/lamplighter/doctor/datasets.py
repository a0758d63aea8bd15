"""A user's own Dataset, by "module:name": a class, an instance, a function that makes one, or a whole DataLoader.

In:  the name.
Out: an Own: the dataset, whether torch can load it with workers, and how its items are put together.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamplighter.errors import BadConfig

BATCH = 8


@dataclass(frozen=True)
class Own:
    """What the name stands for."""

    name: str
    target: Any
    is_dataset: bool
    """A torch Dataset or DataLoader, rather than texts for lamp train."""


def find(name: str) -> Own:
    """Import it, with the current folder on the path; a function that is no generator is called, to see what it makes."""
    module_name, _, attribute = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    module = importlib.import_module(module_name)
    if not hasattr(module, attribute):
        raise BadConfig(f"no {attribute} in module {module_name}", f"looked in {module.__file__}", "check data.source")
    target = getattr(module, attribute)
    if inspect.isfunction(target) and not inspect.isgeneratorfunction(target) and _is_torch(made := target()):
        target = made
    return Own(name, target, _is_torch(target))


def _is_torch(target: Any) -> bool:
    """Only a module that has loaded torch can hold a Dataset of it; a map-style class without torch counts too."""
    torch = sys.modules.get("torch.utils.data")
    kinds = (torch.Dataset, torch.DataLoader) if torch is not None else ()
    if isinstance(target, type):
        return issubclass(target, kinds) or (not hasattr(target, "documents") and _is_map(target))
    return isinstance(target, kinds) or (not isinstance(target, (list, tuple, str)) and _is_map(target))


def _is_map(target: Any) -> bool:
    return hasattr(target, "__getitem__") and hasattr(target, "__len__") and not hasattr(target, "__class_getitem__")


@dataclass(frozen=True)
class Loading:
    """A dataset and how its user loads it."""

    dataset: Any
    batch_size: int
    collate: Callable[[list[Any]], Any] | None
    workers: int
    prefetch: int
    is_map: bool

    def options(self) -> dict[str, Any]:
        return {"batch_size": self.batch_size, "collate_fn": self.collate}


def make(own: Own, batch_size: int, workers: int | None) -> Loading:
    """The instance: a class is called without arguments; a DataLoader brings its own settings."""
    from torch.utils.data import DataLoader, IterableDataset

    target = own.target
    found = target() if isinstance(target, type) else target
    if isinstance(found, DataLoader):
        dataset, is_map = found.dataset, not isinstance(found.dataset, IterableDataset)
        count = workers or found.num_workers or 2
        size = found.batch_size or batch_size
        return Loading(dataset, size, found.collate_fn, count, found.prefetch_factor or 2, is_map)
    is_map = not isinstance(found, IterableDataset) and hasattr(found, "__getitem__")
    return Loading(found, batch_size, None, workers or 2, 2, is_map)
