"""Save, keep, find, load: a checkpoint is a Hugging Face folder plus training/, complete or not there at all.

In:  model, optimizer, tokenizer, the counters of the run.
Out: checkpoints/checkpoint-N, latest.json, best.json; the newest valid one at resume, each invalid one with its reason.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from lamplighter import read_back, report
from lamplighter.errors import CannotWrite, NoCheckpoint
from lamplighter.model.lora import SETTINGS as ADAPTER_SETTINGS
from lamplighter.model.lora import WEIGHTS as ADAPTER_WEIGHTS
from lamplighter.model.origin import RECORD as BASE_RECORD
from lamplighter.rundir import (
    FORMAT,
    VERSIONS,
    cannot_write,
    checkpoint_name,
    free_bytes,
    fsync_folder,
    human_bytes,
    move_aside,
    newer_format,
    newest_first,
    step_of,
    verify_manifest,
    write_json,
    write_manifest,
)
from lamplighter.train import tensorfile
from lamplighter.train.held import remove_unless_read
from lamplighter.train.parts import Part

MOST_READ = 2  # checkpoints that stay beyond save.keep because somebody reads them
SPARE = 1.05  # a save needs its tensors and a little more


@dataclass(frozen=True)
class Progress:
    """The counters after `step` steps. With the seed they determine all that follows."""

    step: int = 0
    tokens: int = 0
    loss: float | None = None
    best_val_loss: float | None = None
    best_step: int = 0
    skipped: tuple[int, ...] = ()  # steps whose batch was not finite, the latest few
    passed_from: int = 0  # after a roll-back the batches of these steps are passed over
    passed_to: int = 0
    stream: dict[str, Any] | None = None  # of streamed data: the place of the next sample
    scored_step: int = 0  # the last step that was validated,
    since_best: int = 0  # and how many validations ago the best one was
    loss_sum: float = 0.0  # over the steps that were learned from,
    loss_steps: int = 0  # and how many they are
    overflows: int = 0  # fp16: steps whose gradients did not fit at their loss scale

    @property
    def mean_loss(self) -> float:
        return self.loss_sum / self.loss_steps if self.loss_steps else math.nan

    def learned(self, step: int, tokens: int, loss: float) -> Progress:
        """With one more step that was learned from."""
        total, count = self.loss_sum + loss, self.loss_steps + 1
        return replace(self, step=step, tokens=self.tokens + tokens, loss=loss, loss_sum=total, loss_steps=count)

    def overflowed(self, step: int, tokens: int) -> Progress:
        """With one more step, passed over because its gradients did not fit into fp16."""
        return replace(self, step=step, tokens=self.tokens + tokens, overflows=self.overflows + 1)

    def scored(self, step: int, val_loss: float) -> Progress:
        """With the validation after a step; said again (after a kill) it counts once."""
        if step <= max(self.scored_step, self.best_step):
            return self
        better = math.isfinite(val_loss) and (self.best_val_loss is None or val_loss < self.best_val_loss)
        if better:
            return replace(self, best_val_loss=val_loss, best_step=step, scored_step=step, since_best=0)
        return replace(self, scored_step=step, since_best=self.since_best + 1)


@dataclass(frozen=True)
class Contents:
    """What goes into a checkpoint."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    config: dict[str, Any]  # config.json
    save_tokenizer: Callable[[Path], None]
    facts: dict[str, Any]  # machine, versions, fingerprints
    adapter: dict[str, Any] | None = None  # adapter_config.json: the tensors are adapters, and the folder is PEFT's
    base: dict[str, Any] | None = None  # base.json: what they were trained on
    part: Part | None = None  # of a sharded run: which rows of the tensors these are
    bad: str = ""  # of a sharded run: the tensor whose rows here are not finite; others still hand in theirs

    @property
    def files(self) -> dict[str, dict[str, torch.Tensor]]:
        weights = "model.safetensors" if self.adapter is None else ADAPTER_WEIGHTS
        return {weights: self.model, "training/optimizer.safetensors": self.optimizer}

    @property
    def bytes(self) -> int:
        """That this rank writes."""
        return sum(t.numel() * t.element_size() for part in self.files.values() for t in part.values())

    @property
    def made_bytes(self) -> int:
        """Of the tensors that all ranks write together."""
        if self.part is None:
            return self.bytes
        every = [pair for part in self.files.values() for pair in part.items()]
        return sum(math.prod(self.part.whole(name, tensor)) * tensor.element_size() for name, tensor in every)

    @property
    def whole_bytes(self) -> int:
        """That the checkpoint takes while it is written."""
        whole = self.made_bytes
        if self.part is None:
            return whole
        return whole + whole * len(self.part.apart) // self.part.size  # theirs are there twice until they are copied


# ---------------------------------------------------------------- saving


def save(
    root: Path, progress: Progress, contents: Contents, phase: report.Phase, *, keep: int, protect: set[int]
) -> Path:
    """Write checkpoint-N whole, then make room. On a full disk: prune, try once more, else CannotWrite. BadPart where weights of
    a sharded run are not finite, here or on another rank."""
    final = root / checkpoint_name(progress.step)
    try:
        _save_with_room(final, progress, contents, phase, protect)
        write_json(root / "latest.json", {"step": progress.step, "path": final.name, "t": time.time()})
    except OSError as error:
        raise cannot_write(final, error) from error
    prune(root, keep, protect | {progress.step})
    return final


def _save_with_room(
    final: Path, progress: Progress, contents: Contents, phase: report.Phase, protect: set[int]
) -> None:
    root = final.parent
    need = int(contents.whole_bytes * SPARE)
    if free_bytes(root) < need:
        prune(root, 1, protect, most_read=0)
    try:
        require_room(root, need)
        _write(final, progress, contents, phase)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        report.warn(
            f"the disk filled up while saving step {progress.step}; pruning old checkpoints and trying once more"
        )
        prune(root, 1, protect, most_read=0)
        require_room(root, need)
        _write(final, progress, contents, phase)


def require_room(root: Path, need: int) -> None:
    """CannotWrite, with need and have, before anything is written."""
    have = free_bytes(root)
    if have < need:
        raise CannotWrite(
            f"no room for a checkpoint in {root}",
            f"it needs {human_bytes(need)}, {human_bytes(have)} are free",
            "free some space, or choose another place with --runs-dir; the checkpoints that exist are intact",
        )


def _write(final: Path, progress: Progress, contents: Contents, phase: report.Phase) -> None:
    """Under a temporary name, fsynced, manifest last, renamed, folder fsynced."""
    temporary = final.with_name(f".writing-{final.name}-{os.getpid()}")  # as the other ranks know it (parts.py)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()  # not its parents: a run whose folder was taken away must not make half of it again
        (temporary / "training").mkdir()
        checksums = _write_tensors(temporary, contents, phase)
        phase.tick(0, "flushing")
        if contents.adapter is None:
            write_json(temporary / "config.json", contents.config)
        else:
            write_json(temporary / ADAPTER_SETTINGS, contents.adapter)
            write_json(temporary / BASE_RECORD, contents.base)
        eos = contents.config.get("eos_token_id")
        write_json(temporary / "generation_config.json", {"bos_token_id": eos, "eos_token_id": eos})
        contents.save_tokenizer(temporary)
        state = {**VERSIONS, **asdict(progress), **contents.facts, "t": time.time()}
        write_json(temporary / "training" / "state.json", state)
        for path in temporary.rglob("*"):
            if path.is_file():
                _fsync(path)
        write_manifest(temporary, checksums, step=progress.step)
        fsync_folder(temporary / "training")
        fsync_folder(temporary)
        if final.exists():
            move_aside(final)
        temporary.rename(final)
        fsync_folder(final.parent)
    except (OSError, BadPart, CannotWrite):
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _write_tensors(folder: Path, contents: Contents, phase: report.Phase) -> dict[str, str]:
    """The checksums of the files. Of a sharded run this rank's rows, then waits for the others'."""
    files, part, started = contents.files, contents.part, time.monotonic()
    phase.set(0, next(iter(files)))
    if part is None:
        return {
            name: tensorfile.write(folder / name, tensors, lambda n, name=name: phase.tick(n, name))  # type: ignore[misc]
            for name, tensors in files.items()
        }
    part.lay_out(folder, files)
    part.write(folder, files, phase.tick)
    phase.tick(0, "waiting for the other ranks' parts")
    theirs = part.collect(folder, files, time.monotonic() - started, phase.tick)
    if bad := contents.bad or theirs:
        raise BadPart(bad)
    return {name: tensorfile.checksum(folder / name) for name in files}


class BadPart(Exception):
    """Weights of some rank are not finite; its word is the name of the tensor."""


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def mark_best(root: Path, progress: Progress) -> None:
    """best.json names the best checkpoint that exists."""
    try:
        write_json(root / "best.json", {"step": progress.best_step, "val_loss": progress.best_val_loss})
    except OSError as error:
        raise cannot_write(root / "best.json", error) from error


def best_of(root: Path) -> tuple[int, float] | None:
    """(step, validation loss) of the best checkpoint, where one is marked."""
    found, damage = read_back.read_object(root / "best.json", read_back.BEST)
    return (found["step"], found["val_loss"]) if found and not damage else None


def prune(root: Path, keep: int, protect: set[int], most_read: int = MOST_READ) -> None:
    """Never the best, never the newest, never the one that this attempt resumed from; and what a dead save left.

    Those that somebody reads stay as well, the newest `most_read` of them.
    """
    best = best_of(root)
    protect = protect | ({best[0]} if best else set())
    for path in newest_first(root)[max(1, keep) :]:
        if step_of(path) in protect or remove_unless_read(path, _remove):
            continue
        if most_read > 0:
            most_read -= 1
            continue
        report.note(f"{path.name} is removed while another process reads it: newer ones that are read take its room")
        _remove(path)
    for path in _set_aside(root)[max(1, keep) :]:
        if _step_aside(path) not in protect:
            _remove(path)
    for path in root.glob(".writing-*"):
        if not path.name.endswith(f"-{os.getpid()}"):
            shutil.rmtree(path, ignore_errors=True)


def _set_aside(root: Path) -> list[Path]:
    """Checkpoints of another future (aside-checkpoint-80-TIME) and those replaced by a new save (checkpoint-80.1), newest first."""
    found = [(_changed_at(path), path) for path in root.glob("*checkpoint-*") if _step_aside(path) >= 0]
    return [path for _, path in sorted(found, reverse=True)]


def _step_aside(path: Path) -> int:
    """80 for aside-checkpoint-80-1700000000 and for checkpoint-80.1; -1 for any other name."""
    found = re.fullmatch(r"aside-checkpoint-(\d+)-\d+|checkpoint-(\d+)\.\d+", path.name, re.ASCII)
    return int(found[1] or found[2]) if found else -1


def _changed_at(path: Path) -> float:
    """When it was set aside: a rename changes that time of a folder, and nothing else does."""
    try:
        return path.stat().st_ctime
    except OSError:  # somebody has removed it meanwhile
        return 0.0


def _remove(path: Path) -> None:
    """Take the manifest first: a half-removed checkpoint must never look valid."""
    (path / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


# ---------------------------------------------------------------- finding and loading


def find(root: Path, wanted: str = "auto") -> Path | None:
    """`auto`: the newest valid one, or None; a name or path: that one, or an error."""
    if wanted not in ("auto", ""):
        path = root / wanted if (root / wanted).is_dir() else Path(wanted)
        if not path.is_dir():
            have = ", ".join(reversed([item.name for item in newest_first(root)])) or "none"
            raise NoCheckpoint(
                f"there is no checkpoint {wanted}", f"in {root} there are: {have}", "lamp checkpoints RUN"
            )
        reason = _verify(path)
        if reason:
            raise NoCheckpoint(f"{path} cannot be used", reason, "choose another: lamp checkpoints RUN")
        return path
    there = newest_first(root)
    for path in there:
        refuse_newer(path)
        reason = _verify(path)
        if reason is None:
            return path
        advice = "nothing to do: the one before it is used; the bad one is kept aside"
        why = f"{path.name} is passed over: {reason}"
        report.verdict(report.Verdict("broken", "bad_checkpoint", why, advice, "fallback", culprit={"path": str(path)}))
    if there:
        raise NoCheckpoint(
            f"none of the {len(there)} checkpoints in {root} is valid",
            "each was damaged or not finished (see the warnings above)",
            "begin anew with --resume never (the old folder is kept), or give another with --resume PATH",
        )
    return None


def refuse_newer(path: Path) -> None:
    """A checkpoint of a newer version is not damaged: going on from an older one would lose its work without a word."""
    if (found := newer_format(path)) is not None:
        raise NoCheckpoint(
            f"{path} has format {found}, and this version reads up to format {FORMAT}",
            "a newer version of lamplighter saved it",
            "use that version, or choose an older one: lamp checkpoints RUN",
        )


def latest_step(root: Path) -> int:
    """The newest step that was made durable; 0 where none was."""
    return max((step_of(path) for path in newest_first(root)), default=0)


def _verify(path: Path) -> str | None:
    total = sum(item.stat().st_size for item in path.rglob("*") if item.is_file())
    with report.phase("verify", total=total, unit="B") as phase:
        reason = verify_manifest(path, deep=True, tick=lambda n: phase.tick(n, path.name))
    file = path / "training" / "state.json"
    damage = "" if reason else read_back.read_object(file, _STATE, read_back.MOST_BYTES)[1]
    return reason or (f"training/state.json is damaged: {damage}" if damage else None)


def find_before(root: Path, step: int) -> Path | None:
    """The newest valid checkpoint of an earlier step."""
    return next((path for path in newest_first(root) if step_of(path) < step and _verify(path) is None), None)


def first_not_finite(tensors: dict[str, torch.Tensor]) -> str | None:
    """The first tensor that holds NaN or infinity; a sum tells, so it costs one pass over the memory."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            return name
    return None


def go_back(root: Path, progress: Progress) -> list[str]:
    """This step is the newest again: later ones are set aside, and neither latest nor best names one of them."""
    moved = _set_aside_newer(root, progress.step)
    if moved:
        write_json(
            root / "latest.json", {"step": progress.step, "path": checkpoint_name(progress.step), "t": time.time()}
        )
    best = best_of(root)
    if best is not None and best[0] > progress.step:
        (root / "best.json").unlink(missing_ok=True)
        if progress.best_val_loss is not None:
            mark_best(root, progress)
    return moved


def _set_aside_newer(root: Path, step: int) -> list[str]:
    """After going back to an older checkpoint the newer ones are another future: kept, but out of the way."""
    moved = []
    for path in newest_first(root):
        if step_of(path) > step:
            at = int(time.time())
            while (aside := path.with_name(f"aside-{path.name}-{at}")).exists():  # back twice within a second
                at += 1
            path.rename(aside)
            moved.append(path.name)
    return moved


_COUNT, _LOSS = read_back.COUNT, read_back.NUMBER
_NUMBERS = ("tokens", "loss_steps", "best_step", "passed_from", "passed_to", "scored_step", "since_best")
_STATE: read_back.Fields = {
    "step": read_back.needed(_COUNT),
    **{name: replace(_COUNT, may_be_none=False) for name in _NUMBERS},
    **dict.fromkeys(("loss", "loss_sum", "best_val_loss"), _LOSS),
    "skipped": read_back.Kind("a list of steps", (list,), may_be_none=False, of=replace(_COUNT, may_be_none=False)),
    **dict.fromkeys(("stream", "machine"), read_back.OBJECT),
    "exact": read_back.Kind("an object", (dict,), of={"hash": read_back.TEXT, "rows": _COUNT, "tokens": _COUNT}),
    **dict.fromkeys(("cache", "packing", "chat"), read_back.TEXT),
    **dict.fromkeys(("compiled", "sharded"), read_back.FLAG),
    **dict.fromkeys(("steps", "ranks"), _COUNT),
    **dict.fromkeys(("format", "numerics"), _COUNT),
}


def read_state(path: Path) -> dict[str, Any]:
    """training/state.json of a checkpoint, every known field as it should be; NoCheckpoint says what is not."""
    file = path / "training" / "state.json"
    state, damage = read_back.read_object(file, _STATE, read_back.MOST_BYTES)
    if not file.exists():
        raise NoCheckpoint(
            f"{path} has no training state",
            "it is a model folder",
            f"start from it with --model.init_from {shlex.quote(str(path))}",
        )
    if damage:
        raise NoCheckpoint(f"{file} is damaged", damage, "choose another: lamp checkpoints RUN")
    return state


def load_state(path: Path) -> tuple[Progress, dict[str, torch.Tensor], dict[str, Any]]:
    """(counters, optimizer tensors, facts) of a verified checkpoint."""
    state = read_state(path)
    tensors = load_file(path / "training" / "optimizer.safetensors")
    facts = {name: value for name, value in state.items() if name not in Progress.__dataclass_fields__}
    return progress_of(state), tensors, facts


def progress_of(state: dict[str, Any]) -> Progress:
    """The counters among what was recorded."""
    progress = Progress(**{name: state[name] for name in Progress.__dataclass_fields__ if name in state})
    return replace(progress, skipped=tuple(progress.skipped))
