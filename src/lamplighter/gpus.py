"""What there is to compute on: memory and peak FLOP/s of GPUs by name, the only such table. No torch.

In:  a name such as "a100-80gb", or a card's own name such as "NVIDIA A100-SXM4-80GB".
Out: a Device; the sources of the numbers are in docs/plan.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from lamplighter.errors import UsageError


@dataclass(frozen=True)
class Rates:
    """How fast a processor is at the two things that training does, measured; it has no data sheet that could be believed."""

    gemm_flops: float  # a matrix product, FLOP/s
    bytes_per_s: float  # numbers read, changed and written to fresh memory


@dataclass(frozen=True)
class Device:
    """One kind of device, `count` of them; peaks are dense, in FLOP/s each."""

    name: str
    memory_gib: float  # what a program can have, below what is on the box
    bf16_flops: float | None  # none: it has no bf16 units
    fp32_flops: float
    fp16_flops: float | None = None  # none: as fast as bf16, or it has no units for it either
    tf32_flops: float | None = None  # fp32 by tensor units, as a run of ours computes it where there are some
    count: int = 1
    mfu: float = 0.4  # a usual share of the peak for a plain, well-fed loop
    cards: tuple[str, ...] = ()  # the names by which the driver calls just these cards
    rates: Rates | None = None  # of a processor: time is then summed up part by part, without a guess of the MFU
    host_gib: float | None = None  # memory of the machine around it; none: not known on paper
    total_gib: float | None = None  # what it has, whoever uses it now; none: all of it is free

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def dtype(self) -> str:
        """What train.dtype auto takes here; fp16 needs a loss scale, so bf16 comes first."""
        return "bf16" if self.bf16_flops else "fp16" if self.fp16_flops else "fp32"

    def peak(self, dtype: str) -> float:
        """FLOP/s of all of them together."""
        by_dtype = {"bf16": self.bf16_flops, "fp16": self.fp16_flops or self.bf16_flops, "fp32": self.tf32_flops}
        return (by_dtype[dtype] or self.fp32_flops) * self.count

    def __str__(self) -> str:
        return f"{self.count} x {self.name}" if self.count > 1 else self.name


# Makers' data sheets, without sparsity; memory as nvidia-smi reports it, in GiB. Of a card that exists in several forms
# (an H100 for PCIe, a 4090 in a laptop) only the form whose data sheet this is stands here: the others are measured.
TABLE = {
    device.name: device
    for device in (
        Device("t4", 14.7, None, 8.1e12, 65e12, cards=("Tesla T4",)),
        Device("v100-16gb", 15.7, None, 15.7e12, 125e12, cards=("Tesla V100-SXM2-16GB",)),
        Device("v100-32gb", 31.7, None, 15.7e12, 125e12, cards=("Tesla V100-SXM2-32GB",)),
        Device("l40s", 45.0, 362e12, 91.6e12, tf32_flops=183e12, cards=("NVIDIA L40S",)),
        Device("l4", 22.5, 121e12, 30.3e12, tf32_flops=60e12, cards=("NVIDIA L4",)),
        Device("a30", 23.5, 165e12, 10.3e12, tf32_flops=82e12, cards=("NVIDIA A30",)),
        Device("a100-40gb", 39.6, 312e12, 19.5e12, tf32_flops=156e12,
               cards=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB")),
        Device("a100-80gb", 79.2, 312e12, 19.5e12, tf32_flops=156e12,
               cards=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB", "NVIDIA A100 80GB PCIe")),
        Device("a10", 22.5, 125e12, 31.2e12, tf32_flops=62.5e12, cards=("NVIDIA A10",)),
        Device("rtx3090", 24.0, 71e12, 35.6e12, tf32_flops=35.6e12, cards=("NVIDIA GeForce RTX 3090",)),
        Device("rtx4090", 24.0, 165e12, 82.6e12, tf32_flops=82.6e12, cards=("NVIDIA GeForce RTX 4090",)),
        Device("h100-pcie", 79.6, 756e12, 51e12, tf32_flops=378e12, cards=("NVIDIA H100 PCIe",)),
        Device("h100-80gb", 79.6, 989e12, 67e12, tf32_flops=494e12, cards=("NVIDIA H100 80GB HBM3",)),
        Device("h200", 140.4, 989e12, 67e12, tf32_flops=494e12, cards=("NVIDIA H200",)),
    )
}  # fmt: skip


def of_card(name: str) -> Device | None:
    """By a card's own name, exactly; none where the table does not know it: its speed is then measured, not guessed."""
    return next((device for device in TABLE.values() if name in device.cards), None)


def peak_of_card(name: str, dtype: str) -> float | None:
    """FLOP/s of a card by its own name; none where the table does not know it."""
    found = of_card(name)
    return found.peak(dtype) if found is not None else None


def find(name: str) -> Device:
    """`a100-80gb`; `a100-80gb:2`, two of them, is refused until a run can use them."""
    kind, _, number = name.lower().replace(" ", "").replace("_", "-").partition(":")
    if kind not in TABLE:
        near = get_close_matches(kind, TABLE, 1, 0.5)
        why = f"did you mean {near[0]}?" if near else f"known: {', '.join(TABLE)}"
        raise UsageError(f"no device called {name}", why, f"lamp plan --on {near[0] if near else 'a100-80gb'}")
    if number and not (number.isascii() and number.isdecimal() and int(number)):
        raise UsageError(f"{name}: {number} is not a number of devices", "", f"lamp plan --on {kind}")
    if number and int(number) > 1:
        why = f"time and traffic of several devices are not planned yet; each holds what one holds, and {number} cost {number} times as much"
        raise UsageError(f"no plan for {number} devices ({name})", why, f"lamp plan --on {kind}")
    return TABLE[kind]
