"""Probes of what is installed: Python, torch against the driver, packages that break each other, clock and language.

In:  this interpreter and its packages; nvidia-smi where there is one.
Out: Findings. Of the run only the device that it asks for is looked at.
"""

from __future__ import annotations

import importlib
import importlib.util
import locale
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lamplighter.doctor.probe import Finding, Level, ProbeContext, fault, ok, warn

# Packages of this field; what they require of each other is checked. Those of BOUND stop working where it is not kept:
# they hold code that was compiled for one torch, or refuse to be imported.
_BOUND = ("torchvision", "torchaudio", "torchtext", "xformers", "flash-attn", "triton", "transformers", "torch")
_FIELD = (
    *_BOUND, "lamplighter", "accelerate", "bitsandbytes", "datasets", "deepspeed", "gigatoken", "huggingface-hub",
    "lightning", "numpy", "pandas", "peft", "pyarrow", "pytorch-lightning", "safetensors", "scikit-learn", "scipy",
    "sentence-transformers", "tokenizers", "torchmetrics", "trl", "vllm",
)  # fmt: skip
_COMPILED_FOR_TORCH = ("torchvision", "torchaudio")  # imported by others unasked, so a broken one breaks those
SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_DAY_S = 86_400.0


# ---------------------------------------------------------------- torch and the driver


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi says."""

    version: str
    cuda: str  # the newest CUDA that this driver can run; empty where it does not say
    gpus: tuple[str, ...]


def torch_and_driver(context: ProbeContext) -> Iterator[Finding]:
    """Whether torch was built for what this machine has."""
    context.now("asking nvidia-smi")
    driver, trouble = ask_driver()
    context.now("importing torch")
    try:
        import torch
    except (ImportError, OSError) as error:
        yield fault(
            f"torch cannot be imported: {error}",
            "a broken or partial installation",
            "pip install --force-reinstall torch, of one build",
            "versions",
            culprit={"module": "torch"},
        )
        return
    built = torch.version.cuda or ""
    yield ok(
        f"Python {platform.python_version()}, torch {torch.__version__},"
        f" {f'built for CUDA {built}' if built else 'built for the CPU' if not torch.version.hip else 'built for ROCm'}"
    )
    yield from _numpy_and_torch(context)
    if trouble:
        yield warn(
            f"nvidia-smi does not work: {trouble}",
            "the driver and its tools are of different versions, or the module is not loaded",
            "restart the machine, or install the driver anew",
            "driver",
        )
    refused = ""
    if built or torch.version.hip:
        context.now("starting the GPU")
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            refused = str(error)
    yield from judge_driver(built or torch.version.hip or "", driver, refused, context.run.train.device)
    if torch.cuda.is_available():
        yield from _each_gpu(context)


def ask_driver() -> tuple[Driver | None, str]:
    """The driver, and what was wrong where it could not be asked."""
    if shutil.which(SMI[0]) is None:
        return None, ""
    try:
        rows = subprocess.run(SMI, capture_output=True, text=True, timeout=30, check=False)
        header = subprocess.run(SMI[:1], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if rows.returncode:
        return None, " ".join((rows.stdout + rows.stderr).split())[:200]
    found = [[cell.strip() for cell in row.split(",")] for row in rows.stdout.splitlines() if row.strip()]
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", header)
    return Driver(found[0][1] if found else "", cuda.group(1) if cuda else "", tuple(row[0] for row in found)), ""


def judge_driver(built: str, driver: Driver | None, refused: str, device: str) -> Iterator[Finding]:
    """`built`: the CUDA that torch was built for, empty for a CPU build. `refused`: what torch said when it was started."""
    gpus = ", ".join(driver.gpus) if driver else ""
    if not built:
        if driver and driver.gpus and device != "cpu":
            yield fault(
                f"torch is a CPU build, and this machine has {gpus}",
                "the GPU would stand idle while it is paid for",
                "install a CUDA build of torch (its site names the index for your driver)",
                "versions",
                culprit={"module": "torch"},
            )
        elif device == "cuda":
            yield fault(
                "train.device is cuda, and torch is a CPU build",
                "",
                "a CUDA build of torch, or --train.device auto",
                "versions",
                culprit={"module": "torch"},
                settings={"train.device": "auto"},
            )
        return
    if refused and ("too old" in refused or (driver and driver.cuda and _older(driver.cuda, built))):
        have = f"driver {driver.version} (up to CUDA {driver.cuda or '?'})" if driver else "the driver"
        yield fault(
            f"{have} is too old for torch, which was built for CUDA {built}",
            refused.splitlines()[0],
            "a newer driver, or a torch that was built for an older CUDA",
            "driver",
        )
    elif refused and driver is None:
        level: Level = "fault" if device == "cuda" else "warn"
        settings = {"train.device": "auto"} if device == "cuda" else {}
        yield Finding(
            level,
            f"torch was built for CUDA {built}, and there is no driver: everything runs on the CPU",
            refused.splitlines()[0],
            "install the driver, run the container with --gpus all, or use a CPU build of torch",
            "driver",
            settings=settings,
        )
    elif refused:
        yield fault(
            f"torch cannot start the GPU: {refused.splitlines()[0]}",
            f"driver {driver.version if driver else '?'}, built for CUDA {built}",
            "nvidia-smi; CUDA_VISIBLE_DEVICES; restart the machine if the driver was changed",
            "driver",
        )
    elif driver and driver.cuda and int(driver.cuda.split(".")[0]) < int(built.split(".")[0]):
        yield warn(
            f"the driver runs up to CUDA {driver.cuda}, torch was built for {built}",
            "newer kernels may fail at their first use",
            "a newer driver",
            "driver",
        )


def _older(one: str, other: str) -> bool:
    return [int(part) for part in one.split(".")] < [int(part) for part in other.split(".")]


def _each_gpu(context: ProbeContext) -> Iterator[Finding]:
    """A product on each, checked; a GPU that torch has no kernels for fails here and not after an hour."""
    import torch

    for number in range(torch.cuda.device_count()):
        name, free = torch.cuda.get_device_name(number), torch.cuda.mem_get_info(number)
        context.now(f"a product on GPU {number}")
        try:
            ones = torch.ones(512, 512, device=f"cuda:{number}")
            right = bool((ones @ ones == 512).all().item())
        except RuntimeError as error:
            known = " ".join(torch.cuda.get_arch_list())
            yield fault(
                f"GPU {number} ({name}) cannot compute: {str(error).splitlines()[0]}",
                f"this torch has kernels for: {known}",
                "a build of torch for this GPU",
                "driver",
                culprit={"gpu": number},
            )
            continue
        if not right:
            yield fault(
                f"GPU {number} ({name}) computes wrongly",
                "512 x 1 x 1 did not add up",
                "another GPU; this one is broken",
                "gpu",
                culprit={"gpu": number},
            )
        elif free[0] < 0.5 * free[1]:
            yield warn(
                f"GPU {number} ({name}): {free[0] / 2**30:.1f} of {free[1] / 2**30:.1f} GiB are free",
                "somebody else computes on it",
                "nvidia-smi names the process",
                "",
                culprit={"gpu": number},
            )
        else:
            yield ok(f"GPU {number}: {name}, {free[0] / 2**30:.1f} of {free[1] / 2**30:.1f} GiB free")


# ---------------------------------------------------------------- packages


def packages(context: ProbeContext) -> Iterator[Finding]:
    """What the packages of this field require of each other, and whether the touchy ones can be imported."""
    context.now("reading what the packages require")
    found, checked = [], 0
    for name in _FIELD:
        try:
            wanted = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # not installed: nothing to compare
            continue
        checked += 1
        found += [finding for text in wanted if (finding := _judge_requirement(name, text)) is not None]
    yield from found
    imported = []
    for name in _COMPILED_FOR_TORCH:
        if importlib.util.find_spec(name) is None:
            continue
        context.now(f"importing {name}")
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  whatever it raises is the finding
            yield _broken(name, error)
        else:
            imported.append(name)
    also = f"; {', '.join(imported)} can be imported" if imported else ""
    yield ok(f"requirements of {checked} packages were compared with what is installed{also}")


def _judge_requirement(name: str, text: str) -> Finding | None:
    """One line of a package's requirements against what is installed; None where it is kept, or does not count here."""
    wanted = Requirement(text)
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return None
    mine = metadata.version(name)
    level: Level = "fault" if canonicalize_name(name) in _BOUND else "warn"
    try:
        have = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return warn(
            f"{name} {mine} needs {wanted.name}{wanted.specifier}, which is not installed",
            "",
            f"pip install '{wanted.name}{wanted.specifier}'",
            "versions",
            culprit={"module": name},
        )
    if wanted.specifier.contains(have, prereleases=True):
        return None
    why = (
        "it holds code that was compiled for that one"
        if name in _COMPILED_FOR_TORCH
        else "its authors exclude this version"
    )
    advice = f"pip install --upgrade {name} (one that fits {wanted.name} {have}), or pip uninstall {name}"
    return Finding(
        level,
        f"{name} {mine} needs {wanted.name}{wanted.specifier}, and {have} is installed",
        why,
        advice,
        "versions",
        culprit={"module": name},
    )


def _broken(name: str, error: Exception) -> Finding:
    mine = metadata.version(name) if _is_installed(name) else "?"
    torch = metadata.version("torch") if _is_installed("torch") else "none"
    what = (
        f"{name} {mine} cannot be imported: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    )
    why = f"torch is {torch}; transformers and others import {name} unasked and break with it"
    return fault(what, why, f"pip uninstall {name}, or the {name} for this torch", "versions", culprit={"module": name})


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:  # that is the answer
        return False
    return True


def _numpy_and_torch(context: ProbeContext) -> Iterator[Finding]:
    """A torch that was compiled for another numpy says so only when an array is handed over."""
    context.now("handing an array to torch")
    import numpy as np
    import torch

    try:
        torch.from_numpy(np.ones(4, np.float32)).numpy()
    except RuntimeError as error:
        what = f"torch and numpy {np.__version__} do not work together: {str(error).splitlines()[0]}"
        yield fault(
            what,
            "torch was compiled for another numpy",
            "pip install 'numpy<2', or a newer torch",
            "versions",
            culprit={"module": "numpy"},
        )


# ---------------------------------------------------------------- clock and language


def clock_and_language(context: ProbeContext) -> Iterator[Finding]:
    """A clock that goes wrong, and an encoding in which text cannot be read."""
    now, installed = time.time(), Path(__file__).stat().st_mtime
    probe = context.scratch / "clock"
    probe.touch()
    apart = probe.stat().st_mtime - now
    if installed > now + _DAY_S:
        yield warn(
            f"the clock says {time.strftime('%Y-%m-%d', time.gmtime(now))}, which is before this package was installed",
            "downloads fail by their certificates, and ages of files are wrong",
            "set the clock (timedatectl set-ntp true)",
            "clock",
        )
    elif abs(apart) > 5:
        yield warn(
            f"the file system's clock is {apart:+.0f} s from this machine's",
            f"{context.scratch} is on another machine",
            "set both clocks",
            "clock",
        )
    encoding = locale.getpreferredencoding(False).lower().replace("-", "").replace("_", "")
    if encoding != "utf8" and not sys.flags.utf8_mode:
        yield warn(
            f"text files are read as {locale.getpreferredencoding(False)} here",
            "scripts of your own that open files without an encoding fail on, or garble, other letters",
            "export PYTHONUTF8=1",
            "encoding",
        )
    else:
        yield ok(f"clock {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(now))}, text in UTF-8")
