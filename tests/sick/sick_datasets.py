"""torch Datasets that are ill with workers, each in one way; and one that is well."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info


class Well(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> Any:
        return torch.full((16,), number)


class Hangs(Well):
    def __getitem__(self, number: int) -> Any:
        if number == 5 and get_worker_info() is not None:
            time.sleep(3600)  # hangs here
        return super().__getitem__(number)


class HoldsGil(Well):
    def __getitem__(self, number: int) -> Any:
        if number == 5 and get_worker_info() is not None:
            re.match(r"(a+)+$", "a" * 40 + "b")  # holds the GIL here
        return super().__getitem__(number)


class Killed(Well):
    def __getitem__(self, number: int) -> Any:
        if number == 5 and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(number)


class Exits(Well):
    def __getitem__(self, number: int) -> Any:
        if number == 5 and get_worker_info() is not None:
            os._exit(3)
        return super().__getitem__(number)


class OutOfMemory(Well):
    def __getitem__(self, number: int) -> Any:
        if number == 5 and get_worker_info() is not None:
            raise MemoryError("cannot allocate")
        return super().__getitem__(number)


class HoldsLock(Well):
    """A thread holds a lock while the workers are forked."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        taken = threading.Event()
        threading.Thread(target=self.keep, args=(taken,), daemon=True).start()
        taken.wait()

    def keep(self, taken: threading.Event) -> None:
        with self.lock:
            taken.set()
            time.sleep(3600)  # holds the lock here

    def __getitem__(self, number: int) -> Any:
        if get_worker_info() is not None:
            with self.lock:  # waits for the lock here
                pass
        return super().__getitem__(number)


class HasLambda(Well):
    def __init__(self) -> None:
        self.options = {"transform": lambda item: item + 1}  # the lambda


class Raises(Well):
    def __getitem__(self, number: int) -> Any:
        raise ValueError(f"no item {number}")  # raises here


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(64).split(1))


def make() -> Dataset[Any]:
    return Well()


LOADER = DataLoader(Well(), batch_size=3, num_workers=1)
