"""What starts processes: The optimizer: the very numbers of torch's own, without the compiler at every start."""

from __future__ import annotations

import subprocess
import sys


def test_a_step_does_not_load_the_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from lamplighter.config import Train\n"
        "from lamplighter.train import optimizers\n"
        "m = torch.nn.Linear(2, 2)\n"
        "o = optimizers.make_optimizer(m, Train())\n"
        "m(torch.ones(1, 2)).sum().backward()\n"
        "o.step(0.1); o.zero_grad()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
