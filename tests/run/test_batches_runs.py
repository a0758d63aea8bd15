"""What starts processes: Every token is a target once per epoch, in an order that depends on (seed, step) and on nothing else."""

from __future__ import annotations

import subprocess
import sys


def test_this_room_does_not_import_torch() -> None:
    rooms = "sources, tokenizer, batch_source, batches"
    code = f"from lamplighter.data import {rooms}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
