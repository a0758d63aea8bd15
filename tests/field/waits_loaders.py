"""Workers of a DataLoader: behind a lock that is never given back, a queue that nobody fills; and slow ones."""

import fcntl
import os
import tempfile
import threading
import time

import torch
import torch.multiprocessing as torch_processes
from marking import mark
from torch.utils.data import DataLoader, Dataset, IterableDataset
from waits import EITHER, hang, healthy, main, train

fork = torch_processes.get_context("fork")


class Rows(Dataset):
    """So many rows; something is done before each."""

    def __init__(self, rows, before):
        self.rows, self.before = rows, before

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        self.before(row)
        return torch.randn(8)


def step_over(batch, step):
    time.sleep(0.03)
    print(f"step {step} loss {batch.pow(2).mean().item():.3f}", flush=True)


@hang(r"flock|file lock|lock on|\block\b.{0,80}features", "{holder}|main", states=EITHER)
def loader_flock():
    """The workers want a file lock that main holds, which waits for them."""
    path = os.path.join(tempfile.mkdtemp(), "features.h5")
    kept = open(path, "w")
    fcntl.flock(kept, fcntl.LOCK_EX)
    mark("holder")

    def before(row):
        if row == 100:
            mark("fault")
        if row >= 100:
            with open(path) as file:
                fcntl.flock(file, fcntl.LOCK_EX)  # HANG

    torch.set_num_threads(1)
    for step, batch in enumerate(DataLoader(Rows(400, before), batch_size=4, num_workers=2)):  # HANG-ALSO
        step_over(batch, step)


@hang(r"\block\b", "fork|inherit")
def loader_fork_lock():
    """The worker wants a lock that a thread of main held at the fork."""
    vocab = threading.Lock()

    def reload():
        with vocab:
            time.sleep(0.8)

    def before(_row):
        time.sleep(0.01)
        vocab.acquire()  # HANG
        vocab.release()

    train()
    threading.Thread(target=reload, name="vocab").start()
    time.sleep(0.2)
    batches = iter(DataLoader(Rows(64, before), batch_size=4, num_workers=1))
    mark("fault")
    print(next(batches))  # HANG-ALSO


@hang("queue|worker", "worker|pid", states=EITHER)
def loader_queue():
    """The worker waits for a ticket that only main could give; main waits for the worker."""
    tickets = fork.Queue()
    for number in range(15):
        tickets.put(number)

    class Stream(IterableDataset):
        def __iter__(self):
            for number in range(100):
                if number == 15:
                    mark("fault")
                yield torch.ones(4) * tickets.get()  # HANG

    torch.set_num_threads(1)
    for step, batch in enumerate(DataLoader(Stream(), batch_size=None, num_workers=1)):  # HANG-ALSO
        step_over(batch, step)


# ---------------------------------------------------------------- healthy


@healthy()
def rows_that_take_long(wait):
    torch.set_num_threads(1)
    rows = Rows(160, lambda row: time.sleep(wait if row in (60, 120) else 0.0))
    for step, batch in enumerate(DataLoader(rows, batch_size=4, num_workers=1)):
        step_over(batch, step)


@healthy()
def worker_behind_a_lock(wait):
    """A sleeping sibling holds the lock that the worker wants."""
    torch.set_num_threads(1)
    lock = fork.Lock()

    def export(ready):
        with lock:
            ready.set()
            time.sleep(wait)

    def before(_row):
        with lock:
            pass

    for _ in range(2):
        train(30)
        ready = fork.Event()
        sibling = fork.Process(target=export, args=(ready,))
        sibling.start()
        ready.wait()
        for step, batch in enumerate(DataLoader(Rows(40, before), batch_size=4, num_workers=1)):
            step_over(batch, step)
        sibling.join()


if __name__ == "__main__":
    main(globals())
