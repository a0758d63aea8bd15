"""What starts processes: The words of a command line, bound to the parameters of a function; and what the parent of a run does not load."""

from __future__ import annotations

import subprocess
import sys


def test_the_parent_of_a_run_loads_little() -> None:
    """It is silent while it loads, and on a busy machine for long (decision 018)."""
    code = (
        "import sys, lamplighter.commands.train, lamplighter.config, lamplighter.watch.supervisor\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'rich', 'psutil', 'ssl', 'http.client', 'asyncio', 'tokenizers'}\n"
        "print(*heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
