"""What there is to compute on: memory, peak FLOP/s and link of GPUs by name, the only such table. No torch.

In:  a name such as "a100-80gb" or "a100-80gb:8", or a card's own name such as "NVIDIA A100-SXM4-80GB".
Out: a Device; the sources of the numbers are in docs/plan.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import get_close_matches

from lamplighter.errors import UsageError


@dataclass(frozen=True)
class Rates:
    """How fast a processor is at the two things that training does, measured; it has no data sheet that could be believed."""

    gemm_flops: float  # a matrix product, FLOP/s
    bytes_per_s: float  # numbers read, changed and written to fresh memory


@dataclass(frozen=True)
class Link:
    """By what devices of one machine reach each other."""

    name: str
    bytes_per_s: float  # one way

    def __str__(self) -> str:
        return f"{self.name}, {self.bytes_per_s / 1e9:g} GB/s each way"


# Half of what the makers' data sheets give for both ways together.
PCIE3, PCIE4, PCIE5 = Link("PCIe 3.0 x16", 16e9), Link("PCIe 4.0 x16", 32e9), Link("PCIe 5.0 x16", 64e9)
NVLINK2, NVLINK3, NVLINK4 = Link("NVLink 2", 150e9), Link("NVLink 3", 300e9), Link("NVLink 4", 450e9)
GLOO = Link("gloo on one machine", 1.4e9)  # 48 MB in 46 to 56 ms between two processes; small ones are slower
_MOST = 1024  # as train.ranks
ONE_MACHINE = 8  # devices that such a link usually joins; beyond them there is a network, which no table knows


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
    link: Link = GLOO
    nodes: int = 1  # machines that have them; 1 also where that is not known

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def is_elsewhere(self) -> bool:
        """Known on paper alone: as many of them as are asked for, at the price of one each."""
        return not self.is_cpu and self.host_gib is None

    @property
    def dtype(self) -> str:
        """What train.dtype auto takes here; fp16 needs a loss scale, so bf16 comes first."""
        return "bf16" if self.bf16_flops else "fp16" if self.fp16_flops else "fp32"

    def peak(self, dtype: str) -> float:
        """FLOP/s of all of them together."""
        by_dtype = {"bf16": self.bf16_flops, "fp16": self.fp16_flops or self.bf16_flops, "fp32": self.tf32_flops}
        return (by_dtype[dtype] or self.fp32_flops) * self.count

    def __str__(self) -> str:
        return (f"{self.count} x {self.name}" if self.count > 1 else self.name) + (
            f" on {self.nodes} machines" if self.nodes > 1 else ""
        )


# Makers' data sheets, without sparsity; memory as nvidia-smi reports it, in GiB. Of a card that exists in several forms
# (an H100 for PCIe, a 4090 in a laptop) only the form whose data sheet this is stands here: the others are measured.
TABLE = {
    device.name: device
    for device in (
        Device("t4", 14.7, None, 8.1e12, 65e12, link=PCIE3, cards=("Tesla T4",)),
        Device("v100-16gb", 15.7, None, 15.7e12, 125e12, link=NVLINK2, cards=("Tesla V100-SXM2-16GB",)),
        Device("v100-32gb", 31.7, None, 15.7e12, 125e12, link=NVLINK2, cards=("Tesla V100-SXM2-32GB",)),
        Device("l40s", 45.0, 362e12, 91.6e12, tf32_flops=183e12, link=PCIE4, cards=("NVIDIA L40S",)),
        Device("l4", 22.5, 121e12, 30.3e12, tf32_flops=60e12, link=PCIE4, cards=("NVIDIA L4",)),
        Device("a30", 23.5, 165e12, 10.3e12, tf32_flops=82e12, link=PCIE4, cards=("NVIDIA A30",)),
        Device("a100-40gb", 39.6, 312e12, 19.5e12, tf32_flops=156e12,
               link=NVLINK3, cards=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "A100-PCIE-40GB")),
        Device("a100-80gb", 79.2, 312e12, 19.5e12, tf32_flops=156e12,
               link=NVLINK3, cards=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB", "NVIDIA A100 80GB PCIe")),
        Device("a10", 22.5, 125e12, 31.2e12, tf32_flops=62.5e12, link=PCIE4, cards=("NVIDIA A10",)),
        Device("rtx3090", 24.0, 71e12, 35.6e12, tf32_flops=35.6e12, link=PCIE4, cards=("NVIDIA GeForce RTX 3090",)),
        Device("rtx4090", 24.0, 165e12, 82.6e12, tf32_flops=82.6e12, link=PCIE4, cards=("NVIDIA GeForce RTX 4090",)),
        Device("h100-pcie", 79.6, 756e12, 51e12, tf32_flops=378e12, link=PCIE5, cards=("NVIDIA H100 PCIe",)),
        Device("h100-80gb", 79.6, 989e12, 67e12, tf32_flops=494e12, link=NVLINK4, cards=("NVIDIA H100 80GB HBM3",)),
        Device("h200", 140.4, 989e12, 67e12, tf32_flops=494e12, link=NVLINK4, cards=("NVIDIA H200",)),
    )
}  # fmt: skip


def of_card(name: str) -> Device | None:
    """By a card's own name, exactly; none where the table does not know it: its speed is then measured, not guessed."""
    found = next((device for device in TABLE.values() if name in device.cards), None)
    if found is not None and found.link is NVLINK3 and "PCI" in name.upper():  # the same card without NVLink
        return replace(found, link=PCIE4)
    return found


def link_of(card: str) -> Link:
    """By what cards of this name reach each other; of one that the table does not know, the slowest."""
    found = of_card(card)
    return found.link if found is not None else PCIE3


def peak_of_card(name: str, dtype: str) -> float | None:
    """FLOP/s of a card by its own name; none where the table does not know it."""
    found = of_card(name)
    return found.peak(dtype) if found is not None else None


def find(name: str) -> Device:
    """`a100-80gb`, or eight of them as `a100-80gb:8`."""
    kind, _, number = name.lower().replace(" ", "").replace("_", "-").partition(":")
    many = f":{number}" if number else ""
    if kind not in TABLE:
        near = get_close_matches(kind, TABLE, 1, 0.5)
        why = f"did you mean {near[0]}?" if near else f"known: {', '.join(TABLE)}"
        raise UsageError(f"no device called {name}", why, f"lamp plan --on {near[0] if near else 'a100-80gb'}{many}")
    if number and not (number.isascii() and number.isdecimal() and 0 < int(number) <= _MOST):
        raise UsageError(f"{name}: {number} is not a number of devices", f"1 to {_MOST}", f"lamp plan --on {kind}:8")
    return replace(TABLE[kind], count=int(number or 1))
