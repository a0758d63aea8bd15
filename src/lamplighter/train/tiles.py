"""Matrix tiles (AMX) where a virtual machine passes the instructions on but hides their description.

Some hypervisors end CPUID before leaf 0x1D, which says how large the tiles are. The library under torch then sets the tiles
up with a size of nothing and dies of SIGILL at its first bf16 product, on a processor that could do it ten times as fast as
fp32. Linux can make CPUID a fault (arch_prctl ARCH_SET_CPUID, for one thread), so for the length of one small product the
two missing leaves are answered here, with the constants of Intel's manual. The library remembers what it read.

In:  a thread that has not yet asked torch for a bf16 product.
Out: `missing` says whether that is the case here; `describe` repairs it for this process. docs/decisions/014.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import signal
import sys
from collections.abc import Callable

from lamplighter.procs.procfs import of_processor

TILE_INFORMATION, TILE_PRODUCTS = 0x1D, 0x1E
PALETTE = (8192 | 1024 << 16, 64 | 8 << 16, 16, 0)  # bytes of all tiles and of one; of a row, and how many; rows
_PRODUCTS = (0, 16 | 64 << 8, 0, 0)  # rows or columns, and bytes of a column, that one product takes
ARCH_SET_CPUID, SYS_ARCH_PRCTL = 0x1012, 158
SA_SIGINFO, SA_NODEFER = 0x4, 0x40000000
CPUID = b"\x0f\xa2"
_REGISTERS = 40  # where the registers are in a ucontext_t, and which is which
RBX, RDX, RAX, RCX, RIP = 11, 12, 13, 14, 16
# cpuid(leaf, subleaf, answer[4]): push rbx; mov r8,rdx; mov eax,edi; mov ecx,esi; cpuid; four stores; pop rbx; ret
_ASK = bytes.fromhex("53 4989d0 89f8 89f1 0fa2 418900 41895804 41894808 4189500c 5b c3")

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
Answer = tuple[int, int, int, int]


class SigAction(ctypes.Structure):
    """What the C library calls struct sigaction."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


def missing() -> bool:
    """Whether the processor has tiles and CPUID ends before it describes them."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    try:
        words = of_processor("flags").split()
        return "amx_bf16" in words and "amx_tile" in words and _asker()(0, 0)[0] < TILE_INFORMATION
    except OSError:  # pages that may not be executed
        return False


def describe(first_product: Callable[[], object]) -> None:
    """Answer for the missing leaves while `first_product` runs. Only one thread may work in it: a new one would inherit
    the faulting, and keep it. OSError where this kernel or processor cannot make CPUID a fault.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    ask, before = _asker(), SigAction()

    def faulting(on: bool) -> None:
        if libc.syscall(SYS_ARCH_PRCTL, ARCH_SET_CPUID, ctypes.c_ulong(not on)):
            raise OSError(ctypes.get_errno(), "CPUID cannot be made a fault here")

    def on_fault(number: int, info: int, context: int) -> None:
        registers = (ctypes.c_uint64 * 23).from_address(context + _REGISTERS)
        faulting(False)
        if ctypes.string_at(registers[RIP], len(CPUID)) != CPUID:  # somebody else's fault: as if we had never been here
            libc.sigaction(signal.SIGSEGV, ctypes.byref(before), None)
            return
        leaf, subleaf = registers[RAX] & 0xFFFFFFFF, registers[RCX] & 0xFFFFFFFF
        registers[RAX], registers[RBX], registers[RCX], registers[RDX] = answer(leaf, subleaf, ask)
        registers[RIP] += len(CPUID)
        faulting(True)

    handler = _Handler(on_fault)
    ours = SigAction(handler=ctypes.cast(handler, ctypes.c_void_p), flags=SA_SIGINFO | SA_NODEFER)
    libc.sigaction(signal.SIGSEGV, ctypes.byref(ours), ctypes.byref(before))
    try:
        faulting(True)
        try:
            first_product()
        finally:
            faulting(False)
    finally:
        libc.sigaction(signal.SIGSEGV, ctypes.byref(before), None)


def answer(leaf: int, subleaf: int, ask: Callable[[int, int], Answer]) -> Answer:
    """What the processor says, and for the leaves that are kept from us what it would say."""
    if leaf == TILE_INFORMATION:
        return (1, 0, 0, 0) if subleaf == 0 else PALETTE if subleaf == 1 else (0, 0, 0, 0)
    if leaf == TILE_PRODUCTS:
        return _PRODUCTS if subleaf == 0 else (0, 0, 0, 0)
    said = ask(leaf, subleaf)
    return (max(said[0], TILE_PRODUCTS), *said[1:]) if leaf == 0 else said


def _asker() -> Callable[[int, int], Answer]:
    """CPUID itself, which Python cannot say: a few bytes of machine code."""
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(_ASK)
    code = ctypes.c_char.from_buffer(page)
    run = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(ctypes.addressof(code))

    def ask(leaf: int, subleaf: int) -> Answer:
        said = (ctypes.c_uint32 * 4)()
        run(leaf, subleaf, ctypes.addressof(said))
        assert code is not None  # keeps the page
        return said[0], said[1], said[2], said[3]

    return ask
