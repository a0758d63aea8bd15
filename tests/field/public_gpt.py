"""Small training programs around one GPT, in the style of public ones: nanoGPT, minGPT, long evaluations, torch.compile."""

import math
import os
import tempfile
import time
from collections import defaultdict

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812
from torch.utils.data import DataLoader, Dataset, RandomSampler
from waits import main, public


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.project = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab=65, width=64, layers=2, heads=4, positions=64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def forward(self, ids, targets=None):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def begin(**shape):
    torch.set_num_threads(1)
    torch.manual_seed(1337)
    model = GPT(**shape)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def take_step(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


@public()
def nanogpt(seconds):
    """A memory map of ids, an evaluation and a checkpoint every 100 steps, a cosine."""
    model, optimizer = begin()
    folder = tempfile.mkdtemp()
    np.random.randint(0, 65, 400_000).astype(np.uint16).tofile(f"{folder}/train.bin")

    def get_batch():
        data = np.memmap(f"{folder}/train.bin", dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - 64, (12,))
        windows = torch.stack([torch.from_numpy(data[at : at + 65].astype(np.int64)) for at in starts])
        return windows[:, :-1], windows[:, 1:]

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        losses = [model(*get_batch())[1].item() for _ in range(80)]
        model.train()
        return sum(losses) / len(losses)

    until, step, before = time.monotonic() + seconds, 0, time.monotonic()
    while time.monotonic() < until:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 0.5 * (1 + math.cos(min(1, step / 1000)))
        if step % 100 == 0:
            print(f"step {step}: val loss {estimate_loss():.4f}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": step}
            torch.save(state, os.path.join(folder, "ckpt.pt"))
        loss = model(*get_batch())[1]
        take_step(loss, optimizer)
        if step % 10 == 0:
            took, before = time.monotonic() - before, time.monotonic()
            print(f"iter {step}: loss {loss.item():.4f}, time {took * 1000:.2f}ms", flush=True)
        step += 1


class SortDataset(Dataset):
    def __len__(self):
        return 10000

    def __getitem__(self, index):
        digits = torch.randint(3, (16,), generator=torch.Generator().manual_seed(index))
        both = torch.cat((digits, digits.sort()[0]))
        return both[:-1], both[1:]


class MinTrainer:
    """A class with callbacks, and a DataLoader with workers."""

    def __init__(self):
        (self.model, self.optimizer), self.callbacks, self.iter_num = begin(vocab=3), defaultdict(list), 0

    def run(self, seconds):
        data = SortDataset()
        sampler = RandomSampler(data, replacement=True, num_samples=int(1e10))
        batches, until = (
            iter(DataLoader(data, sampler=sampler, batch_size=32, num_workers=2)),
            time.monotonic() + seconds,
        )
        while time.monotonic() < until:
            _, self.loss = self.model(*next(batches))
            take_step(self.loss, self.optimizer)
            for callback in self.callbacks["on_batch_end"]:
                callback(self)
            self.iter_num += 1


@public()
def mingpt(seconds):
    def on_batch_end(trainer):
        if trainer.iter_num % 100 == 0:
            print(f"iter_num {trainer.iter_num} train loss {trainer.loss.item():.5f}", flush=True)

    trainer = MinTrainer()
    trainer.callbacks["on_batch_end"].append(on_batch_end)
    trainer.run(seconds)


@public()
def long_evaluations(seconds):
    """Short phases of training, then a quarter of the time in silent generation."""
    model, optimizer = begin()
    until, step = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        for _ in range(60):
            ids = torch.randint(0, 65, (8, 64))
            loss = model(ids, ids)[1]
            take_step(loss, optimizer)
            step += 1
            if step % 20 == 0:
                print(f"step {step} loss {loss.item():.4f}", flush=True)
        model.eval()
        ready, samples = time.monotonic() + seconds / 4, 0
        with torch.no_grad():
            while time.monotonic() < ready:
                ids = torch.zeros((1, 1), dtype=torch.long)
                for _ in range(40):
                    ids = torch.cat([ids, model(ids)[0][:, -1:].argmax(-1)], 1)
                samples += 1
        model.train()
        print(f"evaluated {samples} samples", flush=True)


@public()
def compiled(seconds):
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=tempfile.mkdtemp(), TORCHINDUCTOR_COMPILE_THREADS="1")
    model, optimizer = begin(width=32)
    faster, until, step = torch.compile(model), time.monotonic() + seconds, 0
    while time.monotonic() < until or step < 50:
        ids = torch.randint(0, 65, (8, 64))
        loss = faster(ids, ids)[1]
        take_step(loss, optimizer)
        step += 1
        if step % 50 == 1:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main(globals())
