"""What a virtual machine hides of the matrix tiles is answered for one product, and nothing else is changed."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from lamplighter.train import tiles


def processor(leaf: int, subleaf: int) -> tiles.Answer:
    return (0x1C, 1, 2, 3) if leaf == 0 else (leaf, subleaf, 0, 7)


def test_only_the_missing_leaves_are_answered_for_the_processor() -> None:
    assert tiles.answer(0, 0, processor) == (0x1E, 1, 2, 3)  # the last leaf there is
    assert tiles.answer(7, 1, processor) == (7, 1, 0, 7)
    assert tiles.answer(0x1D, 0, processor) == (1, 0, 0, 0)
    eax, ebx, ecx, _ = tiles.answer(0x1D, 1, processor)
    assert (eax & 0xFFFF, eax >> 16, ebx & 0xFFFF, ebx >> 16, ecx) == (8192, 1024, 64, 8, 16)
    assert tiles.answer(0x1D, 2, processor) == (0, 0, 0, 0)
    assert tiles.answer(0x1E, 0, processor)[1] == 0x4010


def in_a_process(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)


def faulting_works() -> bool:
    told = in_a_process(
        """
        from lamplighter.train import tiles
        tiles.describe(lambda: None)
        """
    )
    return told.returncode == 0


needs_faults = pytest.mark.skipif(not faulting_works(), reason="this machine cannot make CPUID a fault")


@needs_faults
def test_cpuid_is_answered_while_it_lasts_and_is_the_processor_s_own_after_it() -> None:
    told = in_a_process(
        """
        from lamplighter.train import tiles
        ask = tiles._asker()
        before, inside = ask(0x1D, 1), []
        tiles.describe(lambda: inside.append((ask(0x1D, 1), ask(1, 0)[0])))
        assert inside == [(tiles.PALETTE, ask(1, 0)[0])], inside
        assert ask(0x1D, 1) == before
        """
    )
    assert told.returncode == 0, told.stderr


@needs_faults
def test_somebody_else_s_fault_stays_a_fault() -> None:
    told = in_a_process(
        """
        import ctypes, faulthandler, sys
        from lamplighter.train import tiles
        faulthandler.enable()
        tiles.describe(lambda: ctypes.string_at(0))
        """
    )
    assert told.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in told.stderr  # whoever listened before hears it


@needs_faults
def test_an_exception_inside_leaves_nothing_behind() -> None:
    told = in_a_process(
        """
        from lamplighter.train import tiles
        ask = tiles._asker()
        try:
            tiles.describe(lambda: 1 / 0)
        except ZeroDivisionError:
            print(ask(1, 0)[0] > 0)
        """
    )
    assert told.stdout == "True\n", told.stderr


@pytest.mark.skipif(not tiles.missing(), reason="this machine describes its tiles, or has none")
def test_bf16_products_of_any_shape_are_right_where_the_tiles_were_hidden() -> None:
    told = in_a_process(
        """
        import os, torch
        from lamplighter.train import bf16
        assert bf16.make_it_work()
        assert bf16.ISA_LIMIT not in os.environ  # it was not done by going without
        torch.manual_seed(0)
        for m, k, n in [(1, 3, 5), (17, 384, 29), (256, 2900, 384), (513, 130, 70), (64, 1, 64)]:
            a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
            torch.testing.assert_close((a @ b).float(), a.float() @ b.float(), rtol=2e-2, atol=2e-2 * k**0.5)
        q = torch.randn(2, 3, 100, 40).bfloat16().requires_grad_()
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        assert q.grad.isfinite().all()
        """
    )
    assert told.returncode == 0, told.stderr
