"""Whether a step gives the same bits twice on this very machine: tried and compared, not claimed.

In:  a model on its first weights, the size of a micro-batch; of a resumed run the probe of its checkpoint and the steps that
     metrics.jsonl holds already.
Out: one sentence for people ("exact: proved here ..."), the facts behind it, a verdict where bits differ.

The probe comes before a checkpoint is loaded, so that one hash holds for the whole run: another card, driver or choice of
kernels shows in it. The steps that a resumed run does again are compared with what they were the first time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from lamplighter import report
from lamplighter.config import Train
from lamplighter.data.batches import Batch
from lamplighter.report import Verdict
from lamplighter.rundir import read_record, write_json
from lamplighter.train.hardware import Machine

PASSES = 3
_MOST_S, _MOST_SHARE, _MOST_WAIT_S = (
    2.0,
    0.01,
    10.0,
)  # so many seconds, or this share of the run, and no longer than this
_FEWEST_TOKENS = 32
_DEAR = 0.15  # exact kernels that cost more than this on a card are not chosen by `auto`
SELFTEST = "selftest.json"  # in .cache: what `lamp selftest --gpu` has measured, by card, torch and family


# ---------------------------------------------------------------- the setting


def choose(section: Train, device: torch.device, card: str, cache: Path, family: str) -> tuple[bool, str]:
    """Whether kernels that give the same bits each time are asked for, and why. Nothing is measured here."""
    if device.type == "cpu":
        return True, "a CPU with as many threads does the same each time"
    if section.exact != "auto":
        return section.exact, "train.exact"
    cost = _measured_cost(cache, card, family)
    if cost is None:
        return True, "train.exact auto; what it costs is not measured here (lamp selftest --gpu)"
    told = f"it costs {cost:.0%} on this card, as lamp selftest has measured"
    return cost <= _DEAR, told if cost <= _DEAR else f"{told}; --train.exact true insists"


def require(exact: bool, device: torch.device) -> None:
    """Of torch on a GPU; before anything is compiled, as the compiler chooses its reductions by it."""
    if device.type != "cuda":
        return
    torch.use_deterministic_algorithms(exact)  # not warn_only: that warns and takes the same kernels
    # Filling new tensors costs a pass over each, and finds bugs only.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    if exact:
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass adds up in any order


def _measured_cost(cache: Path, card: str, family: str) -> float | None:
    found = read_record(cache / SELFTEST).get(f"{card} {torch.__version__} {family}")
    cost = found.get("exact_cost") if isinstance(found, dict) else None
    return float(cost) if isinstance(cost, (int, float)) else None


# ---------------------------------------------------------------- the probe


@dataclass(frozen=True)
class GradientProbe:
    """The gradients of one micro-batch, worked out several times from the same numbers."""

    hash: str
    rows: int
    tokens: int  # in a row
    passes: int
    differs: str = ""  # the first parameter whose gradient was not the same each time
    other_than_then: bool = False  # the same each time, and not what the run's first start found
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        return not self.differs and not self.other_than_then


@dataclass(frozen=True)
class Place:
    """Where a probe's result counts: the recorded facts of machine, model and seed."""

    cache: Path
    facts: dict[str, Any]

    @property
    def file(self) -> Path:
        text = json.dumps(self.facts, sort_keys=True, default=str)
        return self.cache / "exact" / f"{sha256(text.encode()).hexdigest()[:20]}.json"


@dataclass(frozen=True)
class Size:
    """Of what the probe works on."""

    rows: int
    tokens: int
    vocab_size: int
    segments: bool  # packed examples, as the run has them

    def batch(self) -> Batch:
        """Fixed ids: the same for everybody, whatever the data."""
        ids = (np.arange(self.rows * (self.tokens + 1), dtype=np.int64) * 7919 + 13) % self.vocab_size
        table = ids.reshape(self.rows, self.tokens + 1)
        parts = np.minimum(np.arange(self.tokens) * 3 // self.tokens, 2)[None].repeat(self.rows, 0)
        samples = np.arange(self.rows, dtype=np.int64)
        segments = parts if self.segments else None
        real = self.rows * self.tokens
        return Batch(0, table[:, :-1].copy(), table[:, 1:].copy(), segments, samples, epoch=0.0, real_tokens=real)


def affordable(size: Size, micro_batch_s: float, expected_s: float) -> Size:
    """Fewer rows, then shorter ones, until all passes take at most what a probe may take."""
    limit = max(_MOST_S, min(_MOST_SHARE * expected_s, _MOST_WAIT_S))
    whole, rows, tokens = size.rows * size.tokens, size.rows, size.tokens
    while PASSES * micro_batch_s * rows * tokens / whole > limit and (rows > 1 or tokens > _FEWEST_TOKENS):
        rows, tokens = (rows // 2, tokens) if rows > 1 else (1, tokens // 2)
    return Size(rows, tokens, size.vocab_size, size.segments)


def probe(gradients: Gradients, before: dict[str, Any] | None, place: Place, phase: report.Phase) -> GradientProbe:
    """Three times at the first start; once where it is known what must come out, and again where that does not.

    `before`: the probe that is kept with the checkpoint; else the cache knows what came out for the same facts.
    """
    started = time.perf_counter()
    known = before or read_record(place.file)
    size = gradients.size
    expected = known.get("hash") if (known.get("rows"), known.get("tokens")) == (size.rows, size.tokens) else None
    first = gradients.hashes()
    phase.tick()
    whole, passes, differs = _together(first), 1, ""
    if expected != whole:
        while passes < PASSES and not differs:
            again = gradients.hashes()
            passes += 1
            phase.tick()
            differs = next((name for name in first if first[name] != again[name]), "")
    else:
        passes += _count(known.get("passes"))
    changed = bool(before) and expected is not None and expected != whole and not differs
    seconds = time.perf_counter() - started
    found = GradientProbe(whole, size.rows, size.tokens, passes, differs, other_than_then=changed, seconds=seconds)
    if passes > 1 and not before and not differs:
        place.file.parent.mkdir(parents=True, exist_ok=True)
        write_json(place.file, asdict(found), durable=False)
    return found


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value <= PASSES else 0


def _together(hashes: dict[str, str]) -> str:
    return sha256(" ".join(f"{name}={value}" for name, value in sorted(hashes.items())).encode()).hexdigest()[:32]


class Gradients:
    """Those of one micro-batch, by name; they are gone again afterwards."""

    def __init__(
        self, model: torch.nn.Module, size: Size, loss: Callable[[Batch], torch.Tensor], seed: Callable[[], None]
    ) -> None:
        self.model, self.size, self.batch = model, size, size.batch()
        self.loss, self.seed = loss, seed

    def hashes(self) -> dict[str, str]:
        """A hash of each parameter's gradient, after one forward and backward pass."""
        was_training = self.model.training
        self.model.train()
        try:
            self.seed()
            self.loss(self.batch).backward()  # type: ignore[no-untyped-call]
            return gradient_hashes(self.model)
        finally:
            self.model.zero_grad(set_to_none=True)
            self.model.train(was_training)


def gradient_hashes(model: torch.nn.Module) -> dict[str, str]:
    """Of each parameter that has a gradient now."""
    return {name: hash_of(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def short_hash(*texts: str) -> str:
    """Sixteen hexadecimal digits."""
    return str(xxhash.xxh3_64_hexdigest("\n".join(texts).encode()))


def hash_of(tensor: torch.Tensor) -> str:
    return str(xxhash.xxh3_128_hexdigest(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data))


def hash_of_all(tensors: dict[str, torch.Tensor]) -> str:
    return short_hash(*(hash_of(one) for one in tensors.values()))


# ---------------------------------------------------------------- steps that are done again


@dataclass
class Redone:
    """The steps that an earlier attempt had done and that were not saved: done again, they must give the same bits."""

    before: dict[int, tuple[float, float]] = field(default_factory=dict)  # by step: loss, gradient norm
    equal: int = 0
    first_other: int = 0  # the first step that was not the same

    @classmethod
    def of(cls, records: Iterable[dict[str, Any]], after: int) -> Redone:
        """From metrics.jsonl, whose last record of a step counts.

        A step that was done again with another result (after a roll-back, on another schedule) began another curve: what was
        known of later steps belongs to the one before.
        """
        found: dict[int, tuple[float, float]] = {}
        for record in records:
            loss, norm, step = record.get("train/loss"), record.get("train/grad_norm"), record.get("step")
            if isinstance(step, int) and step > after and isinstance(loss, float) and isinstance(norm, float):
                if found.get(step, (loss, norm)) != (loss, norm):
                    found = {known: value for known, value in found.items() if known < step}
                found[step] = (loss, norm)
        return cls(found)

    def compare(self, step: int, loss: float, grad_norm: float) -> str:
        """What a step says: empty, or in which number it is not what it was, the first time that one is."""
        before = self.before.pop(step, None)
        if before is None:
            return ""
        if before == (loss, grad_norm):
            self.equal += 1
            return ""
        if self.first_other:
            return ""
        self.first_other = step
        name, then, now = ("loss", before[0], loss) if before[0] != loss else ("gradient norm", before[1], grad_norm)
        return f"the {name} of step {step} was {then!r} and is {now!r}"

    def forget_from(self, step: int) -> None:
        """After a roll-back these steps see other batches."""
        self.before = {known: value for known, value in self.before.items() if known < step}


# ---------------------------------------------------------------- words


def words(found: GradientProbe | None, redone: Redone, machine: Machine, sharded: bool = False) -> str:
    """ "exact: proved here (probe 3 of 3, 41 redone steps equal)", or what is not, and that nothing is lost by it."""
    where = "CPU" if machine.device.type == "cpu" else "GPU"
    done = f"{redone.equal:,} redone step{'s' if redone.equal != 1 else ''} equal" if redone.equal else ""
    if found is not None and found.differs:
        why = f"the gradient of {found.differs} differs between two passes on this {where}"
    elif found is not None and found.other_than_then:
        why = f"the same gradients come out otherwise on this {where} than where the run began"
    elif redone.first_other:
        why = f"step {redone.first_other}, done again, is not what it was"
    elif found is None:
        why = "each rank probes by itself, and none holds the whole model" if sharded else "code of your own is called for steps alone"  # fmt: skip
        return f"exact: {done or f'not tried, as {why}; steps done again are compared'}"
    else:
        times = f"probe {found.passes} of {found.passes}" if found.passes > 1 else "probe as at the first start"
        return f"exact: proved here ({', '.join(filter(None, (times, done)))})"
    advice = (
        "" if machine.exact else "; --train.exact true asks for exact kernels (lamp selftest --gpu measures their cost)"
    )
    return f"close, not bit-identical: {why}; nothing is lost{advice}"


def verdict(why: str, step: int) -> Verdict:
    """Of a step that was done again with another result."""
    return Verdict(
        "broken",
        "not_exact",
        f"{why}: the same step has given other bits",
        "nothing is lost: the run goes on from the saved weights; look for what changed in environment.json (card, driver,"
        " torch, threads), and try lamp selftest",
        culprit={"step": step},
    )


def say(text: str, found: GradientProbe | None, redone: Redone) -> None:
    """Once at the start, and once when all redone steps have been compared."""
    report.note(text)
    told = asdict(found) if found is not None else {}
    report.event("exact", text=text, probe=told, redone_equal=redone.equal, first_other=redone.first_other)
