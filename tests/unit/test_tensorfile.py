"""Our writer of .safetensors files writes what the library's does, and says what it wrote."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from lamplighter.train import tensorfile


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    found = {f"of {name}": torch.randint(0, 2, (5, 3)).to(dtype) for dtype, name in tensorfile.NAMES.items()}
    found |= {"large": torch.randn(700, 999), "none": torch.empty(0, 4), "one": torch.tensor(2.5), "ünï": torch.ones(3)}
    return found | {"across": torch.randn(6, 8).t(), "part": torch.randn(10, 10)[2:4]}


def test_every_byte_is_the_library_s(tmp_path: Path) -> None:
    ticks: list[int] = []
    digest = tensorfile.write(tmp_path / "ours", tensors(), ticks.append)
    whole = {name: tensor.contiguous() for name, tensor in tensors().items()}
    save_file(whole, tmp_path / "theirs", metadata={"format": "pt"})
    ours = (tmp_path / "ours").read_bytes()
    assert ours == (tmp_path / "theirs").read_bytes()
    assert digest == xxhash.xxh3_128_hexdigest(ours)
    assert sum(ticks) == sum(tensor.nbytes for tensor in whole.values())
    for name, tensor in load_file(tmp_path / "ours").items():
        assert torch.equal(tensor, whole[name]), name


def test_another_type_is_what_the_library_writes_of_converted_tensors(tmp_path: Path) -> None:
    given = {"wide": torch.randn(70, 9), "narrow": torch.randn(3).half(), "whole": torch.arange(4)}
    tensorfile.write(tmp_path / "ours", given, dtype=torch.bfloat16)
    kept = {name: one.bfloat16() if one.is_floating_point() else one for name, one in given.items()}
    save_file(kept, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_the_system_s_error() -> None:
    with pytest.raises(OSError) as caught:
        tensorfile.write(Path("/dev/full"), {"a": torch.ones(10)})
    assert caught.value.errno == errno.ENOSPC
