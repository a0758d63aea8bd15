"""Small training programs in the style of public ones, with what others bring: transformers, accelerate, datasets, pools, loaders."""

import multiprocessing
import os
import random
import tempfile
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from waits import PLAIN, TORCHRUN, main, public

ACCELERATE = "{python} -m accelerate.commands.launch --cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"


class RandomRows(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, _index):
        ids = torch.randint(0, 500, (48,))
        return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


@public()
def transformers_trainer(seconds):
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Stop(TrainerCallback):
        until = time.monotonic() + seconds

        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = time.monotonic() > self.until

    torch.set_num_threads(1)
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=500, num_key_value_heads=2, **shape))
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, per_device_eval_batch_size=8, max_steps=5000,
        logging_steps=20, eval_strategy="steps", eval_steps=200, save_steps=200, save_total_limit=2, report_to=[], use_cpu=True,
    )  # fmt: skip
    rows = RandomRows()
    few = torch.utils.data.Subset(rows, range(200))
    Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=few, callbacks=[Stop()]).train()


@public(*ACCELERATE.split(), *PLAIN[1:])
def accelerate_launch(seconds):
    from accelerate import Accelerator

    torch.set_num_threads(1)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), DataLoader(data, batch_size=32, shuffle=True)
    )
    until, step = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            time.sleep(0.005)
            if step % 50 == 0:
                accelerator.print(f"step {step} loss {loss.item():.4f}", flush=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()


@public(*TORCHRUN)
def torchrun_ddp(seconds):
    import torch.distributed as dist
    from torch.utils.data.distributed import DistributedSampler

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = TensorDataset(torch.randn(2048, 64), torch.randn(2048, 1))
    sampler = DistributedSampler(data)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    until, epoch, go_on = time.monotonic() + seconds, 0, torch.ones(1)
    while go_on.item():
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=32, sampler=sampler):
            loss = (model(x) - y).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.01)
        if dist.get_rank() == 0:
            torch.save(model.module.state_dict(), os.path.join(tempfile.gettempdir(), "snapshot.pt"))
            print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)
        go_on[0] = float(time.monotonic() < until)
        dist.broadcast(go_on, src=0)
        epoch += 1
    dist.destroy_process_group()


@public()
def datasets_map_then_train(seconds):
    os.environ.update(HF_DATASETS_CACHE=tempfile.mkdtemp(), HF_HUB_OFFLINE="1")
    from datasets import Dataset as HubDataset

    def encode(row):
        ids = [sum(ord(letter) * 31**k for k, letter in enumerate(word)) % 5000 for word in row["text"].split()]
        time.sleep(0.004)
        return {"ids": ids, "n": len(ids)}

    torch.set_num_threads(1)
    texts = [f"the quick brown fox number {n} jumps over the lazy dog " * 4 for n in range(int(100 * seconds))]
    rows = HubDataset.from_dict({"text": texts}).map(encode, num_proc=2)
    rows = rows.filter(lambda row: row["n"] > 3).with_format("torch")
    bag, head = torch.nn.EmbeddingBag(5000, 16), torch.nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*bag.parameters(), *head.parameters()])
    until, step = time.monotonic() + seconds / 2, 0
    while time.monotonic() < until:
        loss = (head(bag(rows[step % len(rows)]["ids"][None])) - 1).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 200 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)


def tokenise(document):
    pieces = [word[at : at + 3] for word in document.split() for at in range(0, len(word), 3)]
    return np.array([hash(piece) % 50257 for piece in pieces], dtype=np.uint16)


@public()
def pool_that_tokenises(seconds):
    until, shard, total = time.monotonic() + seconds, 0, 0
    with multiprocessing.Pool(2) as pool:
        while time.monotonic() < until:
            documents = (" ".join(f"w{random.randrange(10**6)}" for _ in range(3000)) for _ in range(400))
            shard += 1
            total += sum(len(tokens) for tokens in pool.imap(tokenise, documents, chunksize=16))
            print(f"shard {shard}: {total / 1e6:.1f}M tokens", flush=True)


class Images(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        return torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(index)), index % 10


@public()
def persistent_workers(seconds):
    """Workers by spawn that stay over the epochs, a schedule, a progress bar."""
    from tqdm import tqdm

    torch.set_num_threads(1)
    layers = (torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 14 * 14, 10))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    kept = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "spawn"}
    loader = DataLoader(Images(), batch_size=16, shuffle=True, **kept)
    until, epoch = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        for x, y in tqdm(loader, desc=f"epoch {epoch}"):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.01)
        schedule.step()
        epoch += 1


if __name__ == "__main__":
    main(globals())
