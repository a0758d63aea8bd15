"""What `lamp selftest` tries on the machine that it is on: the promises, with real runs, real kills and planted faults.

In:  a ProbeContext whose run is small; `train.device` says where.
Out: Findings whose words hold no path, name or secret, so that the table can be sent to others.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lamplighter.config import Run
from lamplighter.doctor.probe import CannotExamine, Finding, ProbeContext, fault, ok, skip, warn
from lamplighter.procs import procfs
from lamplighter.procs.pool import usable_cores
from lamplighter.rundir import RunDir, human_bytes, newest_first, read_lines, read_record, read_status, write_json

SETTINGS = (
    "model.family", "model.layers", "model.width", "model.heads", "model.dropout", "data.seq_len", "data.embedded_documents",
    "tokenizer.vocab_size", "train.batch_size", "train.micro_batch", "train.steps", "train.lr", "train.dtype", "train.device",
    "train.exact", "save.every_steps", "save.every_s", "eval.every_steps", "eval.windows", "eval.sample_every_steps",
)  # fmt: skip
_PROMPT = "The "
_WORDS = 24  # tokens that both write
_CLOSE = 1e-3  # between the two best logits: either may win
_SLACK = {"fp32": 2e-5, "bf16": 4e-2}  # of attention, against float64
_BUSY = 2.0  # programs that want a core, for each core
_RUN_S = 240.0


def settings(gpu: bool, quick: bool) -> dict[str, list[str]]:
    """A small model on the embedded corpus: minutes on a CPU, seconds where `quick`."""
    small = {"model.layers": "2", "model.width": "64", "model.heads": "2", "data.seq_len": "64", "train.steps": "40"}
    large = {"model.layers": "4", "model.width": "256", "model.heads": "4", "data.seq_len": "256", "train.steps": "60"}
    sizes = small if quick else large
    found = {
        **sizes,
        "model.family": "gpt2",
        "model.dropout": "0.1",
        "data.embedded_documents": "600",
        "tokenizer.vocab_size": "512",
        "train.batch_size": "8",
        "train.micro_batch": "4",
        "train.lr": "1e-3",
        "train.device": "cuda" if gpu else "cpu",
        "save.every_steps": "10",
        "save.every_s": "0",
        "eval.every_steps": "0",
        "eval.windows": "8",
        "eval.sample_every_steps": "0",
    }
    if not gpu:
        found["train.dtype"] = "fp32"
    return {name: [value] for name, value in found.items()}


# ---------------------------------------------------------------- runs of the real command


@dataclass
class _Command:
    """`lamp train` with the settings of the self-test, in a folder of its own."""

    run: Run
    place: Path
    more: tuple[str, ...] = ()

    @property
    def folder(self) -> RunDir:
        return RunDir(self.place / "runs" / "r")

    def start(self) -> subprocess.Popen[bytes]:
        self.place.mkdir(parents=True, exist_ok=True)
        words = [word for name in SETTINGS for word in _flag(self.run, name)]
        with open(self.place / "out.txt", "ab") as out:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "lamplighter", "train", "--run", "r", *words, *self.more],
                cwd=self.place,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def finish(self, going: subprocess.Popen[bytes] | None = None) -> None:
        """To its end, or a finding that it did not get there; `going`: it was started already."""
        going = going or self.start()
        try:
            code = going.wait(_RUN_S)
        except subprocess.TimeoutExpired:
            _kill(going)
            raise CannotExamine(_too_slow(f"a small run did not end in {_RUN_S:.0f} s")) from None
        if code:
            said = [
                line for line in (self.place / "out.txt").read_text(errors="replace").splitlines() if "error:" in line
            ]
            why = said[-1].partition("error:")[2].strip() if said else "it said no error"
            raise CannotExamine(fault(f"a small run ended with exit code {code}", why, "lamp doctor"))

    def losses(self) -> dict[int, str]:
        """By step, the last record of each, as bits."""
        records = read_lines(self.folder.metrics)
        return {r["step"]: float(r["train/loss"]).hex() for r in records if r.get("train/loss") is not None}

    def weights(self) -> str:
        """A hash of the newest checkpoint's weights and optimizer state."""
        newest, digest = newest_first(self.folder.checkpoints)[0], hashlib.sha256()
        for name in ("model.safetensors", "training/optimizer.safetensors"):
            digest.update((newest / name).read_bytes())
        return digest.hexdigest()

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.folder.events) if event.get("type") == kind]


def _too_slow(what: str) -> Finding:
    """A fault of the run, or a machine that others use up: then nothing was tested, and that is no fault of ours to send."""
    load, cores = os.getloadavg()[0], usable_cores()
    if load > _BUSY * cores:
        return warn(
            what, f"not tested: the load of this machine is {load:.0f}, on {cores} cores", "try again when it is quiet"
        )
    return fault(what, "it takes a few seconds elsewhere", "lamp doctor")


def _flag(run: Run, name: str) -> list[str]:
    section, _, key = name.partition(".")
    value = getattr(getattr(run, section), key)
    return [] if value is None else [f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)]


def _kill(going: subprocess.Popen[bytes]) -> None:
    """The whole tree, by SIGKILL; the child of a killed parent ends by itself, but not at once."""
    for pid in reversed(procfs.tree(going.pid)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended meanwhile
            continue
    going.wait()


# ---------------------------------------------------------------- the tests


def kill_and_resume(context: ProbeContext) -> Iterator[Finding]:
    """One run to its end, and the same one killed in the middle of a step: every loss and the weights must be the same."""
    context.now("a run to its end, and beside it the same run, killed")
    whole, broken = (_Command(context.run, context.scratch / name) for name in ("whole", "broken"))
    to_its_end, going = whole.start(), broken.start()
    steps = int(context.run.train.steps or 0)
    until = time.monotonic() + _RUN_S
    while len(broken.losses() if broken.folder.metrics.exists() else ()) < 0.6 * steps and going.poll() is None:
        if time.monotonic() > until:
            _kill(going)
            raise CannotExamine(_too_slow(f"a small run made too few steps in {_RUN_S:.0f} s"))
        time.sleep(0.02)
    _kill(going)
    reached = max(broken.losses(), default=0)
    context.now(f"killed at step {reached}; going on")
    broken.finish()
    whole.finish(to_its_end)
    first, second = whole.losses(), broken.losses()
    same = sum(first[step] == second.get(step) for step in first)
    told = str(read_status(broken.folder).get("exact") or "")
    figures = {"steps": float(len(first)), "equal": float(same), "killed_at": float(reached)}
    if same == len(first) == steps and whole.weights() == broken.weights():
        what = f"killed with SIGKILL at step {reached}: all {steps} losses, the final weights and the optimizer are the same bits"
        yield ok(what, figures=figures)
    else:
        what = f"after a SIGKILL at step {reached}, {same} of {steps} losses are the same"
        yield warn(
            what,
            "nothing is lost, and the run is not bit-identical on this machine",
            "--train.exact true",
            "not_exact",
            figures=figures,
        )
    yield (ok if told.startswith("exact: proved") else warn)(told or "the run said nothing about exactness")
    yield _saves(broken)


def _saves(command: _Command) -> Finding:
    saved = command.events("checkpoint")
    if not saved:
        return fault("no checkpoint was made", "", "lamp doctor --only disk")
    waited, size = sum(float(one.get("blocked_s") or 0) for one in saved), max(int(one["bytes"]) for one in saved)
    longest = max(float(one["seconds"]) for one in saved)
    what = f"{len(saved)} saves of {human_bytes(size)} beside the steps, {longest:.2f} s at most; the steps waited {waited:.2f} s in all"
    return ok(what, figures={"saves": float(len(saved)), "waited_s": waited, "longest_s": longest})


def generation(context: ProbeContext) -> Iterator[Finding]:
    """The same words from `lamp generate` and from transformers, at temperature 0, on a checkpoint of a run."""
    if find_spec("transformers") is None:
        yield skip("transformers is not installed")
        return
    command = _Command(context.run, context.scratch / "whole")
    if not newest_first(command.folder.checkpoints):
        command.finish()
    folder = newest_first(command.folder.checkpoints)[0]
    context.now("lamp generate, and transformers beside it")
    words = ["generate", "r", "--prompt", _PROMPT, "--temperature", "0", "--max-tokens", str(_WORDS), "--json"]
    going = subprocess.Popen(
        [sys.executable, "-P", "-m", "lamplighter", *words],
        cwd=command.place,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    said, wrong = going.communicate()
    if going.returncode:
        yield fault(f"lamp generate ended with exit code {going.returncode}", wrong.decode(errors="replace")[-200:])
        return
    ours = json.loads(said.decode().splitlines()[-1])
    context.now("transformers")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()  # type: ignore[no-untyped-call]
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer.encode(_PROMPT, add_special_tokens=False)]])
    made: list[int] = []
    close = 0
    with torch.no_grad():
        while len(made) < _WORDS:
            best = model(ids).logits[0, -1].topk(2)
            close += int(best.values[0] - best.values[1] < _CLOSE)
            if (token := int(best.indices[0])) == tokenizer.eos_token_id:
                break
            made.append(token)
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
    theirs = str(tokenizer.decode(made))
    if str(ours["samples"][0]["text"]).strip() == theirs.strip():
        yield ok(f"lamp generate and transformers write the same {len(made)} tokens")
    elif close:
        yield warn(
            f"the words differ; {close} times the two best tokens were within {_CLOSE:g}", "either may win there"
        )
    else:
        yield fault("lamp generate and transformers write different words", "no choice was close", cause="generation")


def attention(context: ProbeContext) -> Iterator[Finding]:
    """Every path of attention that this machine takes, against float64: whole windows, packed examples, grouped heads."""
    import torch

    from lamplighter.model.transformer import attend, attention_context

    device = torch.device(context.run.train.device if context.run.train.device != "auto" else "cpu")
    dtypes = {"fp32": torch.float32}
    if device.type == "cpu" or torch.cuda.is_bf16_supported():
        dtypes["bf16"] = torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    rows, length, heads, width = 2, 96, 4, 32
    segments = torch.arange(length).mul(3).div(length, rounding_mode="floor")[None].repeat(rows, 1)
    for dtype_name, dtype in dtypes.items():
        for name, parts, kv_heads in (
            ("windows", None, heads),
            ("packed", segments, heads),
            ("grouped heads", None, heads // 2),
        ):
            context.now(f"{name} in {dtype_name}")
            shapes = [(rows, count, length, width) for count in (heads, kv_heads, kv_heads)]
            q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
            mask = attention_context(torch.zeros(rows, length, dtype=torch.long), None, parts).mask
            seen = torch.ones(length, length, dtype=torch.bool).tril() if mask is None else mask
            wide_k, wide_v = (one.double().repeat_interleave(heads // kv_heads, 1) for one in (k, v))
            scores = (q.double() @ wide_k.mT / width**0.5).masked_fill(~seen, float("-inf"))
            truth = (scores.softmax(-1) @ wide_v).transpose(1, 2).flatten(2)
            found = attend(q.to(device), k.to(device), v.to(device), None if mask is None else mask.to(device), 0.0)
            error = float((found.cpu().double() - truth).abs().max())
            say = ok if error <= _SLACK[dtype_name] else fault
            yield say(f"{name} in {dtype_name}: at most {error:.1e} from float64", figures={"error": error})


def speed(context: ProbeContext) -> Iterator[Finding]:
    """Tokens per second and the share of the peak; on a GPU with and without exact kernels, and what they cost is kept."""
    from lamplighter.plan import dry_run
    from lamplighter.plan.job import family_of, vocabulary

    run = context.run
    gpu, micro = run.train.device == "cuda", run.train.micro_batch or run.train.batch_size
    tokens, took = run.train.batch_size * run.data.seq_len, {}
    for exact in (True, False) if gpu else (True,):
        context.now(f"steps with {'exact' if exact else 'the fastest'} kernels" if gpu else "steps")
        trial = dry_run.attempt(replace(run, train=replace(run.train, exact=exact)), vocabulary(run), micro)
        if not trial.measured.fits:
            yield fault(f"a micro-batch of {micro} does not fit", trial.measured.why)
            return
        took[exact] = trial.measured.step_s
        peak = float(trial.told.get("peak_flops") or 0.0)
        flops = float(trial.told.get("flops_per_token") or 0.0)
        share = f", {tokens / took[exact] * flops / peak:.0%} of the peak" if peak and flops else ""
        kernels = f" with {'exact' if exact else 'the fastest'} kernels" if gpu else ""
        figures = {"tokens_per_s": tokens / took[exact], "peak_gib": trial.measured.peak_gib}
        yield ok(
            f"{tokens / took[exact]:,.0f} tokens/s{kernels} in {trial.measured.dtype}{share}; {trial.measured.peak_gib:.2f} GiB",
            figures=figures,
        )
    if gpu:
        import torch

        from lamplighter.train.exactness import SELFTEST

        cost = took[True] / took[False] - 1
        cache = context.runs_dir / ".cache"
        cache.mkdir(parents=True, exist_ok=True)
        key = f"{torch.cuda.get_device_name()} {torch.__version__} {family_of(run)}"
        write_json(cache / SELFTEST, {**read_record(cache / SELFTEST), key: {"exact_cost": cost}})
        yield ok(
            f"exact kernels cost {cost:.1%} here; train.exact auto goes by that from now on",
            figures={"exact_cost": cost},
        )


_PLANTED = """
import os
import torch

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Linear(width, vocab_size)
        self.calls = 0

    def forward(self, ids):
        self.calls += self.training
        if self.calls == 24 and not os.path.exists("failed"):
            open("failed", "w").close()
            {fault}
        return self.head(self.embed(ids))
"""
_ON_CPU = {
    "device_assert": 'raise torch.AcceleratorError("CUDA error: device-side assert triggered")',
    "out_of_memory": 'raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")',
}
_ON_GPU = {
    "device_assert": "torch.zeros(4, device=ids.device)[torch.tensor([9], device=ids.device)].item()",
    "out_of_memory": "torch.empty(1 << 44, device=ids.device)",
}


def planted_faults(context: ProbeContext) -> Iterator[Finding]:
    """A failed assert inside a kernel, and memory that is not there, once each: named, and the run goes on to its end."""
    gpu = context.run.train.device == "cuda"
    own = replace(context.run, model=replace(context.run.model, family="planted:Model"))
    commands: dict[str, tuple[_Command, subprocess.Popen[bytes]]] = {}
    for cause, code in (_ON_GPU if gpu else _ON_CPU).items():
        place = context.scratch / cause
        place.mkdir(parents=True)
        (place / "planted.py").write_text(_PLANTED.replace("{fault}", code))
        command = _Command(own, place)
        commands[cause] = command, command.start()
    for cause, (command, going) in commands.items():
        context.now(cause)
        command.finish(going)
        said = [one for one in command.events("verdict") if str(one.get("cause", "")).startswith(cause)]
        steps = len(command.losses())
        real = "a real" if gpu else "torch's own exception for"
        name = "failed assert in a kernel" if cause == "device_assert" else "allocation that does not fit"
        if said and said[0].get("action") == "restart" and steps == context.run.train.steps:
            yield ok(f"{real} {name}: called {said[0]['cause']}, restarted, and all {steps} steps were made")
        else:
            told = ", ".join(str(one.get("cause")) for one in command.events("verdict")) or "nothing"
            yield fault(
                f"{real} {name} was called {told}; {steps} steps were made",
                "it should be named and survived",
                cause=cause,
            )


def cards(context: ProbeContext) -> Iterator[Finding]:
    """What the driver says of the cards while one works: heat, power, and what slows them down."""
    from lamplighter.procs import nvml

    if context.run.train.device != "cuda":
        yield skip("this was asked for on the CPU (--gpu)")
        return
    if not nvml.is_there():
        yield skip("there is no NVML (pip install 'lamplighter[gpu]') and no nvidia-smi")
        return
    import torch

    context.now("ten seconds of matrix products")
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "lamplighter.procs.nvml", str(os.getpid())], stdout=subprocess.PIPE, text=True
    ) as watcher:
        a = torch.randn(4096, 4096, device="cuda")
        until = time.monotonic() + 10
        while time.monotonic() < until:
            a = (a @ a).clamp_(-1, 1)
            torch.cuda.synchronize()
        watcher.kill()
        said = watcher.stdout.read().splitlines() if watcher.stdout else []
    yield from _of_looks(said)


def _of_looks(lines: list[str]) -> Iterator[Finding]:
    """The last look of every card."""
    from lamplighter.device_faults import reasons_in_words
    from lamplighter.procs.nvml import GpuLook, read_look

    found: dict[int, GpuLook] = {}
    for line in lines:
        for fields in json.loads(line).get("gpus", []):
            look = read_look(fields)
            found[look.index] = look
    if not found:
        yield warn("the driver said nothing of its cards", "", "nvidia-smi")
    for index, look in found.items():
        reasons = reasons_in_words(look.reasons)
        slowed = f", slowed down by {', '.join(reasons)}" if reasons else ""
        say = warn if reasons else ok
        yield say(f"card {index}: {look.util:.0%} busy, {look.temperature_c:.0f} °C, {look.power_w:.0f} W{slowed}")
