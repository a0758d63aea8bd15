"""The part that goes into somebody else's Python: one folder for PYTHONPATH, and one module of counters behind it.

In:  the folder of the slots, and the environment that the command would have had.
Out: the environment that makes every Python below it report there. Standard library only, from Python 3.9 on;
     older ones, and those that ignore the environment (-I, -E, -S), run as if we were not there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

PATH = Path(__file__).resolve().parent / "path"


def environment(slots: Path, base: Mapping[str, str]) -> dict[str, str]:
    """`base` with our folder first on PYTHONPATH: a sitecustomize of the user before it would hide ours."""
    rest = [part for part in base.get("PYTHONPATH", "").split(os.pathsep) if part != str(PATH)]
    given = base.get("PYTHONPATH", "")
    return {
        **base,
        "PYTHONPATH": os.pathsep.join([str(PATH), *rest]) if given else str(PATH),
        "LAMP_WATCH": str(slots.absolute()),
    }
