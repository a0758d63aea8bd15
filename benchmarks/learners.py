"""The recipes that time_to_loss.py compares, each a program of its own in the form of source text.

In:  once, the settings and where text, batches and tokenizer are; then {"steps": n}; at last {"held": file}.
Out: the number of parameters; seconds and losses of the next n steps; the nats of the held-back windows.
"""

from trainers import TURNS

# The nats of all windows under a model, in the precision that it trains in.
HELD = """
import contextlib, numpy, torch
import torch.nn.functional as F

def nats(logits_of, path, low):
    rows, total = torch.from_numpy(numpy.load(path).astype(numpy.int64)), 0.0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
        for part in rows.split(8):
            logits = logits_of(part[:, :-1].contiguous())
            total += F.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    return total
"""

# `lamp train` as it is: its own loop, data, records; its saves and validations are out of the way, as the peers' are. It stops
# one step before the end of its schedule: the last step saves and validates.
LAMP = (
    HELD
    + """
from pathlib import Path
from lamplighter.commands.start_up import prepare
from lamplighter.config import dump, resolve
from lamplighter.rundir import RunDir
from lamplighter.train.loop import training

def start(ask):
    global context
    folder = RunDir(Path(ask["run"]))
    folder.create()
    found = resolve(ask["preset"], None, {name: [str(value)] for name, value in ask["settings"].items()})
    folder.config.write_text(dump(found))
    context, state = prepare(found.run, folder, {"cache": ask["cache"]})
    with training(context, state) as steps:
        yield {"parameters": sum(p.numel() for p in context.model.parameters()), "compiled": state.compiled}
        while True:
            yield [next(steps) for _ in range(wanted)]

def answer(ask):
    global run, wanted
    if "run" in ask:
        run = start(ask)
        return next(run)
    if "held" in ask:
        context.model.eval()
        return {"nats": nats(context.model, ask["held"], context.machine.dtype_name == "bf16")}
    wanted, began = ask["steps"], time.perf_counter()
    records = next(run)
    return {"s": time.perf_counter() - began, "losses": [r.loss for r in records]}
"""
)

# Hugging Face's Trainer around its own GPT-2, with the best settings that it has here: fused AdamW, compiled, bf16 where it works.
HF_TRAINER = (
    HELD
    + TURNS
    + """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __init__(self, path):
        self.rows = numpy.load(path, mmap_mode="r")
    def __len__(self):
        return len(self.rows)
    def __getitem__(self, at):
        row = torch.from_numpy(self.rows[at].astype(numpy.int64))
        return {"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]}

class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)
    def training_step(self, *given):
        self.newest = super().training_step(*given)
        return self.newest

class Watch(TrainerCallback):
    def on_step_begin(self, *_, **__):
        turns.begin()
    def on_step_end(self, *_, **__):
        turns.end(float(trainer.newest))

def peak_mb():
    return 0.0

def answer(ask):
    global trainer, low
    if "rows" in ask:
        torch.set_num_threads(ask["threads"])
        torch.manual_seed(ask["seed"])
        sizes, low = ask["settings"], ask["dtype"] == "bf16"
        width = int(sizes["width"])
        model = GPT2LMHeadModel(GPT2Config(vocab_size=ask["vocab"], n_positions=ask["length"], n_layer=int(sizes["layers"]), n_embd=width,
            n_head=width // 64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))
        arguments = TrainingArguments(ask["out"], per_device_train_batch_size=int(sizes["batch"]), max_steps=ask["planned"], seed=ask["seed"],
            learning_rate=float(sizes["lr"]), lr_scheduler_type="cosine", warmup_steps=round(0.05 * ask["planned"]), weight_decay=0.1,
            adam_beta2=0.95, max_grad_norm=1.0, logging_strategy="no", save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
            dataloader_drop_last=True, remove_unused_columns=False, optim="adamw_torch_fused", torch_compile=True, bf16=low)
        trainer = InOrder(model=model, args=arguments, train_dataset=Rows(ask["rows"]), callbacks=[Watch()])
        turns.start(trainer.train)
        return {"parameters": sum(p.numel() for p in model.parameters()), "compiled": True}
    if "held" in ask:
        model = trainer.model.eval()
        return {"nats": nats(lambda ids: model(input_ids=ids).logits, ask["held"], low)}
    return turns.take(ask["steps"])
"""
)

# nanoGPT: its model (GPT-2 without biases, a tied head, residual projections that begin smaller), its optimizer groups, clipping and schedule
# (linear warm-up, cosine to a tenth), compiled as a whole.
NANOGPT = (
    HELD
    + """
import math
from torch import nn

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.c_attn, self.attn_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.c_fc, self.c_proj = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))

class GPT(nn.Module):
    def __init__(self, vocab, length, layers, width):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width, bias=False)
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if name.endswith("proj.weight") else 0.02)
    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)

def lr_at(step):
    if step < warmup:
        return lr * (step + 1) / (warmup + 1)
    share = (step - warmup) / max(1, planned - warmup)
    return lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))

def answer(ask):
    global model, whole, optimizer, rows, step, batch, lr, low, planned, warmup
    if "rows" in ask:
        torch.set_num_threads(ask["threads"])
        torch.manual_seed(ask["seed"])
        sizes, low = ask["settings"], ask["dtype"] == "bf16"
        model = GPT(ask["vocab"], ask["length"], int(sizes["layers"]), int(sizes["width"]))
        decay = [p for p in model.parameters() if p.dim() >= 2]
        rest = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        batch, lr, step, planned = int(sizes["batch"]), float(sizes["lr"]), 0, ask["planned"]
        warmup = round(0.05 * planned)
        optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
        rows = numpy.load(ask["rows"], mmap_mode="r")
        def loss_of(ids, targets):
            with torch.autocast("cpu", torch.bfloat16, enabled=low):
                logits = model(ids)
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        whole = torch.compile(loss_of, dynamic=False)
        return {"parameters": sum(p.numel() for p in model.parameters()), "compiled": True}
    if "held" in ask:
        model.eval()
        return {"nats": nats(model, ask["held"], low)}
    losses, began = [], time.perf_counter()
    for _ in range(ask["steps"]):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step)
        part = torch.from_numpy(rows[step * batch : (step + 1) * batch].astype(numpy.int64))
        loss = whole(part[:, :-1].contiguous(), part[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        step += 1
    return {"s": time.perf_counter() - began, "losses": losses}
"""
)
PROGRAMS = {"lamp": LAMP, "trainer": HF_TRAINER, "nanogpt": NANOGPT}
