"""What starts processes: The model room: the same numbers as transformers, the same names on disk, true arithmetic about sizes."""

import subprocess
import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def few_threads() -> None:
    torch.set_num_threads(1)


def test_plans_need_no_torch() -> None:
    code = "import sys, lamplighter.model.shape; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
