"""The trainers that training.py and first_step.py let race, each a program of its own in the form of source text.

In:  {"folder" or "run": ...} once, with settings; then {"steps": n}.
Out: the seconds, the processor's seconds and the losses of the next n steps, and the peak memory of the process.
"""

# Of this process alone: rusage would also count what started it.
PEAK = """
def peak_mb():
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0]) / 1024
"""
# For frameworks that own the loop: it runs in a thread, and waits at the first step of each turn.
TURNS = """
import queue, threading

class Turn:
    def __init__(self):
        self.wanted, self.made, self.left = queue.Queue(), queue.Queue(), 0
    def start(self, work):
        threading.excepthook = lambda told: (sys.__excepthook__(*told[:3]), os._exit(1))  # else nobody would answer
        threading.Thread(target=work, daemon=True).start()
    def begin(self):
        if self.left == 0:
            self.left = self.wanted.get()
            self.losses, self.began, self.used = [], time.perf_counter(), time.process_time()
    def end(self, loss):
        self.losses.append(loss)
        self.left -= 1
        if self.left == 0:
            self.made.put({"s": time.perf_counter() - self.began, "cpu_s": time.process_time() - self.used,
                           "losses": self.losses, "mb": peak_mb()})
    def take(self, steps):
        self.wanted.put(steps)
        return self.made.get()

turns = Turn()
"""
# Each program answers {"steps": n} with the seconds and losses of its next n steps, and its peak memory.
OURS = (
    PEAK
    + """
import torch
from pathlib import Path
from lamplighter.config import load_dump
from lamplighter.rundir import RunDir
from lamplighter.commands.start_up import prepare
from lamplighter.train.loop import training

def start(ask):
    folder = RunDir(Path(ask["run"]))
    context, state = prepare(load_dump(folder.config), folder, {})
    with training(context, state) as steps:
        yield "ready"
        while True:
            yield [next(steps) for _ in range(ask["now"])]

def answer(ask):
    global run, given
    if "run" in ask:
        given = ask
        run = start(ask)
        return next(run)
    given["now"] = ask["steps"]
    began, used = time.perf_counter(), time.process_time()
    records = next(run)
    return {"s": time.perf_counter() - began, "cpu_s": time.process_time() - used, "losses": [r.loss for r in records],
            "mb": peak_mb()}
"""
)
PLAIN = (
    PEAK
    + """
import contextlib, numpy, torch
from transformers import AutoModelForCausalLM
import torch.nn.functional as F

def answer(ask):
    global model, whole, optimizer, batches, place, low, clip
    if "folder" in ask:
        torch.set_num_threads(ask["threads"])
        model = AutoModelForCausalLM.from_pretrained(ask["folder"], dtype=torch.float32).train()
        decay = [p for p in model.parameters() if p.dim() >= 2]
        rest = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=ask["lr"], betas=(0.9, 0.95), fused=True)
        batches, place, clip = numpy.load(ask["batches"], mmap_mode="r"), 0, ask["clip"]
        low = contextlib.nullcontext() if ask["dtype"] == "fp32" else torch.autocast("cpu", torch.bfloat16)
        def loss_of(ids, targets):
            with low:
                logits = model(input_ids=ids, use_cache=False).logits
            return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        whole = torch.compile(loss_of, dynamic=False) if ask["compile"] else loss_of
        return "ready"
    losses, began, used = [], time.perf_counter(), time.process_time()
    for _ in range(ask["steps"]):
        rows = torch.from_numpy(batches[place].astype(numpy.int64))
        place += 1
        loss = whole(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return {"s": time.perf_counter() - began, "cpu_s": time.process_time() - used, "losses": losses,
            "mb": peak_mb()}
"""
)
TRAINER = (
    PEAK
    + """
import queue, threading, numpy, torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

wanted, made = queue.Queue(), queue.Queue()

class Rows(torch.utils.data.Dataset):
    def __init__(self, path):
        self.batches = numpy.load(path, mmap_mode="r")
        self.size = self.batches.shape[1]
    def __len__(self):
        return len(self.batches) * self.size
    def __getitem__(self, at):
        row = torch.from_numpy(self.batches[at // self.size, at % self.size].astype(numpy.int64))
        return {"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]}

class InOrder(Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)

class Turns(TrainerCallback):
    left, losses = 0, []
    def on_step_begin(self, *_, **__):
        if self.left == 0:
            self.left = wanted.get()
            self.losses, self.began, self.used = [], time.perf_counter(), time.process_time()
    def on_log(self, args, state, control, logs=None, **_):
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
    def on_step_end(self, args, state, control, **_):
        self.left -= 1
        if self.left == 0:
            self.s, self.cpu_s = time.perf_counter() - self.began, time.process_time() - self.used
            threading.Timer(0.3, self.tell).start()  # the loss of this step is logged after it
    def tell(self):
        made.put({"s": self.s, "cpu_s": self.cpu_s, "losses": list(self.losses),
                  "mb": peak_mb()})

def answer(ask):
    if "folder" in ask:
        torch.set_num_threads(ask["threads"])
        model = AutoModelForCausalLM.from_pretrained(ask["folder"], dtype=torch.float32)
        model.config.use_cache = False
        best = {"optim": "adamw_torch_fused", "torch_compile": ask["compile"], "bf16": ask["dtype"] == "bf16"} if ask["best"] else {}
        arguments = TrainingArguments(ask["out"], per_device_train_batch_size=ask["batch"], max_steps=10**6, learning_rate=ask["lr"],
            lr_scheduler_type="constant", weight_decay=0.1, adam_beta2=0.95, max_grad_norm=ask["clip"], logging_steps=1,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, dataloader_drop_last=True,
            remove_unused_columns=False, **best)
        trainer = InOrder(model=model, args=arguments, train_dataset=Rows(ask["batches"]), callbacks=[Turns()])
        threading.Thread(target=trainer.train, daemon=True).start()
        return "ready"
    wanted.put(ask["steps"])
    return made.get()
"""
)
LIGHTNING = (
    PEAK
    + TURNS
    + """
import numpy, torch, lightning
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

class Rows(torch.utils.data.Dataset):
    def __init__(self, path):
        self.batches = numpy.load(path, mmap_mode="r")
    def __len__(self):
        return len(self.batches)
    def __getitem__(self, at):
        return torch.from_numpy(self.batches[at].astype(numpy.int64))

class Module(lightning.LightningModule):
    def __init__(self, ask):
        super().__init__()
        self.ask = ask
        self.model = AutoModelForCausalLM.from_pretrained(ask["folder"], dtype=torch.float32).train()
        self.whole = torch.compile(self.loss_of, dynamic=False) if ask["compile"] else self.loss_of
    def loss_of(self, ids, targets):
        logits = self.model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        torch.nn.utils.clip_grad_norm_(self.parameters(), self.ask["clip"])  # its own way refuses a fused optimizer
    def training_step(self, rows, _):
        return self.whole(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.ask["lr"], betas=(0.9, 0.95), fused=True)

class Watch(lightning.Callback):
    def on_train_batch_start(self, *_):
        turns.begin()
    def on_train_batch_end(self, trainer, module, outputs, *_):
        turns.end(float(outputs["loss"]))

def answer(ask):
    if "folder" in ask:
        torch.set_num_threads(ask["threads"])
        trainer = lightning.Trainer(accelerator="cpu", devices=1, precision="bf16-mixed" if ask["dtype"] == "bf16" else "32-true",
            max_steps=10**6, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, callbacks=[Watch()], use_distributed_sampler=False, default_root_dir=ask["out"])
        loader = torch.utils.data.DataLoader(Rows(ask["batches"]), batch_size=None, shuffle=False)
        turns.start(lambda: trainer.fit(Module(ask), loader))
        return "ready"
    return turns.take(ask["steps"])
"""
)
# As litgpt's pretrain.py does it: Fabric, its own model (rotary, with a head of its own), its loss, torch.compile.
LITGPT = (
    PEAK
    + """
import numpy, torch
import lightning as L
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import chunked_cross_entropy

def answer(ask):
    global model, optimizer, fabric, batches, place, clip
    if "folder" in ask:
        torch.set_num_threads(ask["threads"])
        torch.manual_seed(0)
        sizes = json.load(open(ask["folder"] + "/config.json"))
        config = Config(block_size=sizes["n_positions"], n_layer=sizes["n_layer"], n_head=sizes["n_head"], n_embd=sizes["n_embd"],
            vocab_size=sizes["vocab_size"], padded_vocab_size=sizes["vocab_size"], intermediate_size=4 * sizes["n_embd"],
            rotary_percentage=1.0, parallel_residual=False)
        fabric = L.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if ask["dtype"] == "bf16" else "32-true")
        model = GPT(config)
        for p in model.parameters():
            if p.dim() >= 2:
                torch.nn.init.normal_(p, std=0.02)
        model = fabric.setup(torch.compile(model) if ask["compile"] else model)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=ask["lr"], betas=(0.9, 0.95), weight_decay=0.1, fused=True))
        batches, place, clip = numpy.load(ask["batches"], mmap_mode="r"), 0, ask["clip"]
        return "ready"
    losses, began, used = [], time.perf_counter(), time.process_time()
    for _ in range(ask["steps"]):
        rows = torch.from_numpy(batches[place].astype(numpy.int64))
        place += 1
        loss = chunked_cross_entropy(model(rows[:, :-1].contiguous()), rows[:, 1:].contiguous())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"s": time.perf_counter() - began, "cpu_s": time.process_time() - used, "losses": losses, "mb": peak_mb()}
"""
)
