"""What there is to compute on: memory and peak FLOP/s of GPUs by name, the only such table. No torch.

In:  a name such as "a100-80gb", or a card's own name such as "NVIDIA A100-SXM4-80GB".
Out: a Device; the sources of the numbers are in docs/plan.md.
"""

from __future__ import annotations

import re
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
    bf16_flops: float | None  # none: it has no bf16 units, so training runs in fp32
    fp32_flops: float
    count: int = 1
    mfu: float = 0.4  # a usual share of the peak for a plain, well-fed loop
    mark: str = ""  # the word of the card's own name that tells it from others, as a regular expression
    rates: Rates | None = None  # of a processor: time is then summed up part by part, without a guess of the MFU
    host_gib: float | None = None  # memory of the machine around it; none: not known on paper
    total_gib: float | None = None  # what it has, whoever uses it now; none: all of it is free

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"

    @property
    def dtype(self) -> str:
        return "bf16" if self.bf16_flops else "fp32"

    def peak(self, dtype: str) -> float:
        """FLOP/s of all of them together."""
        each = self.bf16_flops if dtype == "bf16" and self.bf16_flops else self.fp32_flops
        return each * self.count

    def __str__(self) -> str:
        return f"{self.count} x {self.name}" if self.count > 1 else self.name


# Makers' data sheets, without sparsity; memory as nvidia-smi reports it, in GiB.
TABLE = {
    device.name: device
    for device in (
        Device("t4", 14.7, None, 8.1e12, mark="T4"),
        Device("v100-16gb", 15.7, None, 15.7e12, mark="V100"),
        Device("l40s", 45.0, 362e12, 91.6e12, mark="L40S"),
        Device("l4", 22.5, 121e12, 30.3e12, mark="L4"),
        Device("a100-40gb", 39.6, 312e12, 19.5e12, mark="A100"),
        Device("a100-80gb", 79.2, 312e12, 19.5e12, mark="A100"),
        Device("a10", 22.5, 125e12, 31.2e12, mark="A10G?"),
        Device("rtx3090", 24.0, 71e12, 35.6e12, mark="3090"),
        Device("rtx4090", 24.0, 165e12, 82.6e12, mark="4090"),
        Device("h100-80gb", 79.6, 989e12, 67e12, mark="H100"),
        Device("h200", 140.4, 989e12, 67e12, mark="H200"),
    )
}


def of_card(name: str) -> Device | None:
    """By a card's own name; none where the table does not know it. Of two sizes of one card the first is taken."""
    return next((device for device in TABLE.values() if re.search(rf"\b{device.mark}\b", name)), None)


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
        why = f"a run of ours uses one device: ranks are not there yet, and {number} would cost {number} times as much"
        raise UsageError(f"no plan for {number} devices ({name})", why, f"lamp plan --on {kind}")
    return TABLE[kind]
