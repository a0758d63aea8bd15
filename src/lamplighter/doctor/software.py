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

from lamplighter.doctor.probe import Finding, Level, ProbeContext, fault, finding, first_line, ok, warn

# Packages of this field; what they require of each other is checked. Those of BOUND stop working where it is not kept:
# they hold code that was compiled for one torch, or refuse to be imported.
_BOUND = ("torchvision", "torchaudio", "torchtext", "xformers", "flash-attn", "triton", "transformers", "torch")
_FIELD = (
    *_BOUND, "lamplighter", "accelerate", "bitsandbytes", "datasets", "deepspeed", "gigatoken", "huggingface-hub",
    "lightning", "numpy", "pandas", "peft", "pyarrow", "pytorch-lightning", "safetensors", "scikit-learn", "scipy",
    "sentence-transformers", "tokenizers", "torchmetrics", "trl", "vllm",
)  # fmt: skip
_COMPILED_FOR_TORCH = ("torchvision", "torchaudio")  # imported by others unasked, so a broken one breaks those
_SMI = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_DAY_S = 86_400.0


def _versions(what: str, why: str, advice: str, module: str = "torch") -> Finding:
    """A package that does not fit the others, or this machine."""
    return fault(what, why, advice, "versions", culprit={"module": module})


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
        advice = "pip install --force-reinstall torch, of one build"
        yield _versions(f"torch cannot be imported: {error}", "a broken or partial installation", advice)
        return
    built, rocm = torch.version.cuda or "", torch.version.hip or ""
    kind = f"CUDA {built}" if built else "ROCm" if rocm else "the CPU"
    yield ok(f"Python {platform.python_version()}, torch {torch.__version__}, built for {kind}")
    yield from _numpy_and_torch(context)
    if trouble:
        why = "the driver and its tools are of different versions, or the module is not loaded"
        yield warn(
            f"nvidia-smi does not work: {trouble}", why, "restart the machine, or install the driver anew", "driver"
        )
    refused = ""
    if built or rocm:
        context.now("starting the GPU")
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            refused = str(error)
    yield from judge_driver(built or rocm, driver, refused, context.run.train.device)
    if torch.cuda.is_available():
        yield from _each_gpu(context)


def ask_driver() -> tuple[Driver | None, str]:
    """The driver, and what was wrong where it could not be asked."""
    if shutil.which(_SMI[0]) is None:
        return None, ""
    try:
        rows = subprocess.run(_SMI, capture_output=True, text=True, timeout=30, check=False)
        header = subprocess.run(_SMI[:1], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if rows.returncode:
        return None, " ".join((rows.stdout + rows.stderr).split())[:200]
    found = [[cell.strip() for cell in row.split(",")] for row in rows.stdout.splitlines() if row.strip()]
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", header)
    return Driver(found[0][1] if found else "", cuda.group(1) if cuda else "", tuple(row[0] for row in found)), ""


def judge_driver(built: str, driver: Driver | None, refused: str, device: str) -> Iterator[Finding]:
    """`built`: the CUDA that torch was built for, empty for a CPU build. `refused`: what torch said when it was started."""
    said = first_line(refused)
    if not built:
        yield from _judge_cpu_build(driver, device)
    elif refused and ("too old" in refused or (driver and driver.cuda and _older(driver.cuda, built))):
        have = f"driver {driver.version} (up to CUDA {driver.cuda or '?'})" if driver else "the driver"
        what = f"{have} is too old for torch, which was built for CUDA {built}"
        yield fault(what, said, "a newer driver, or a torch that was built for an older CUDA", "driver")
    elif refused and driver is None:
        what = f"torch was built for CUDA {built}, and there is no driver: everything runs on the CPU"
        advice = "install the driver, run the container with --gpus all, or use a CPU build of torch"
        if device == "cuda":
            yield fault(what, said, advice, "driver", settings={"train.device": "auto"})
        else:
            yield warn(what, said, advice, "driver")
    elif refused:
        why = f"driver {driver.version if driver else '?'}, built for CUDA {built}"
        advice = "nvidia-smi; CUDA_VISIBLE_DEVICES; restart the machine if the driver was changed"
        yield fault(f"torch cannot start the GPU: {said}", why, advice, "driver")
    elif driver and driver.cuda and int(driver.cuda.split(".")[0]) < int(built.split(".")[0]):
        what = f"the driver runs up to CUDA {driver.cuda}, torch was built for {built}"
        yield warn(what, "newer kernels may fail at their first use", "a newer driver", "driver")


def _judge_cpu_build(driver: Driver | None, device: str) -> Iterator[Finding]:
    if driver and driver.gpus and device != "cpu":
        what = f"torch is a CPU build, and this machine has {', '.join(driver.gpus)}"
        advice = "install a CUDA build of torch (its site names the index for your driver)"
        yield _versions(what, "the GPU would stand idle while it is paid for", advice)
    elif device == "cuda":
        what, advice = "train.device is cuda, and torch is a CPU build", "a CUDA build of torch, or --train.device auto"
        where, settings = {"module": "torch"}, {"train.device": "auto"}
        yield fault(what, "", advice, "versions", culprit=where, settings=settings)


def _older(one: str, other: str) -> bool:
    return [int(part) for part in one.split(".")] < [int(part) for part in other.split(".")]


def _each_gpu(context: ProbeContext) -> Iterator[Finding]:
    """A product on each, checked; a GPU that torch has no kernels for fails here and not after an hour."""
    import torch

    for number in range(torch.cuda.device_count()):
        gpu, where = f"GPU {number} ({torch.cuda.get_device_name(number)})", {"gpu": number}
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(number))
        context.now(f"a product on GPU {number}")
        try:
            ones = torch.ones(512, 512, device=f"cuda:{number}")
            right = bool((ones @ ones == 512).all().item())
        except RuntimeError as error:
            why = f"this torch has kernels for: {' '.join(torch.cuda.get_arch_list())}"
            what, advice = f"{gpu} cannot compute: {first_line(error)}", "a build of torch for this GPU"
            yield fault(what, why, advice, "driver", culprit=where)
            continue
        if not right:
            why, advice = "512 x 1 x 1 did not add up", "another GPU; this one is broken"
            yield fault(f"{gpu} computes wrongly", why, advice, "gpu", culprit=where)
        elif free < 0.5 * total:
            what = f"{gpu}: {free:.1f} of {total:.1f} GiB are free"
            yield warn(what, "somebody else computes on it", "nvidia-smi names the process", culprit=where)
        else:
            yield ok(f"{gpu}: {free:.1f} of {total:.1f} GiB free")


def _numpy_and_torch(context: ProbeContext) -> Iterator[Finding]:
    """A torch that was compiled for another numpy says so only when an array is handed over."""
    context.now("handing an array to torch")
    import numpy as np
    import torch

    try:
        torch.from_numpy(np.ones(4, np.float32)).numpy()
    except RuntimeError as error:
        what = f"torch and numpy {np.__version__} do not work together: {first_line(error)}"
        why, advice = "torch was compiled for another numpy", "pip install 'numpy<2', or a newer torch"
        yield _versions(what, why, advice, "numpy")


# ---------------------------------------------------------------- packages


def packages(context: ProbeContext) -> Iterator[Finding]:
    """What the packages of this field require of each other, and whether the touchy ones can be imported."""
    context.now("reading what the packages require")
    installed = [name for name in _FIELD if _version(name)]
    for name in installed:
        for text in metadata.requires(name) or []:
            yield from _judge_requirement(name, Requirement(text))
    imported = []
    for name in _COMPILED_FOR_TORCH:
        if importlib.util.find_spec(name) is None:
            continue
        context.now(f"importing {name}")
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  whatever it raises is the finding
            what = f"{name} {_version(name) or '?'} cannot be imported: {type(error).__name__}: {first_line(error)}"
            why = f"torch is {_version('torch') or 'none'}; transformers and others import {name} unasked and break with it"
            yield _versions(what, why, f"pip uninstall {name}, or the {name} for this torch", name)
        else:
            imported.append(name)
    also = f"; {', '.join(imported)} can be imported" if imported else ""
    yield ok(f"requirements of {len(installed)} packages were compared with what is installed{also}")


def _judge_requirement(name: str, wanted: Requirement) -> Iterator[Finding]:
    """One line of a package's requirements against what is installed."""
    if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
        return
    have, where = _version(wanted.name), {"module": name}
    needs = f"{name} {_version(name)} needs {wanted.name}{wanted.specifier}"
    if not have:
        advice = f"pip install '{wanted.name}{wanted.specifier}'"
        yield warn(f"{needs}, which is not installed", "", advice, "versions", culprit=where)
    elif not wanted.specifier.contains(have, prereleases=True):
        compiled = name in _COMPILED_FOR_TORCH
        why = "it holds code that was compiled for that one" if compiled else "its authors exclude this version"
        advice = f"pip install --upgrade {name} (one that fits {wanted.name} {have}), or pip uninstall {name}"
        level: Level = "fault" if canonicalize_name(name) in _BOUND else "warn"
        yield finding(level, f"{needs}, and {have} is installed", why, advice, "versions", culprit=where)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # that is the answer
        return ""


# ---------------------------------------------------------------- clock and language


def clock_and_language(context: ProbeContext) -> Iterator[Finding]:
    """A clock that goes wrong, and an encoding in which text cannot be read."""
    now, installed = time.time(), Path(__file__).stat().st_mtime
    probe = context.scratch / "clock"
    probe.touch()
    apart = probe.stat().st_mtime - now
    if installed > now + _DAY_S:
        day = time.strftime("%Y-%m-%d", time.gmtime(now))
        what = f"the clock says {day}, which is before this package was installed"
        why = "downloads fail by their certificates, and ages of files are wrong"
        yield warn(what, why, "set the clock (timedatectl set-ntp true)", "clock")
    elif abs(apart) > 5:
        what = f"the file system's clock is {apart:+.0f} s from this machine's"
        yield warn(what, f"{context.scratch} is on another machine", "set both clocks", "clock")
    encoding = locale.getpreferredencoding(False)
    if encoding.lower().replace("-", "").replace("_", "") != "utf8" and not sys.flags.utf8_mode:
        why = "scripts of your own that open files without an encoding fail on, or garble, other letters"
        yield warn(f"text files are read as {encoding} here", why, "export PYTHONUTF8=1", "encoding")
    else:
        yield ok(f"clock {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(now))}, text in UTF-8")
