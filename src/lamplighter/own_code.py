"""Code of the user's own, "module:name": the only code that is loaded beside the installed packages.

In:  a name from a command line or a run.yaml (never from a model folder or a run folder), and where the run.yaml is.
Out: the module; what it raises while it is loaded is the caller's to explain.

It is looked for last, behind everything installed: in the folder of the run.yaml, then in the current one. Until a name
is asked for, neither of the two is on the import path of any process of ours.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = "LAMP_CODE_FOLDER"  # in the environment: a child, and a probe or a worker of that child, look there too


def look_beside(run_yaml: Path | None) -> None:
    """From here on, in this process and in those that it starts: the folder of this file is looked into as well."""
    os.environ.pop(_FOLDER, None)
    if run_yaml is not None:
        os.environ[_FOLDER] = str(run_yaml.absolute().parent)


def folders() -> list[str]:
    """Where the user's own modules may lie, first the first."""
    beside = os.environ.get(_FOLDER)
    return list(dict.fromkeys([*([beside] if beside else []), str(Path.cwd())]))


def load(module_name: str) -> ModuleType:
    """The module of this name; the folders stay at the end of the path, for what it imports later."""
    sys.path.extend(folder for folder in folders() if folder not in sys.path)
    importlib.invalidate_caches()
    return importlib.import_module(module_name)


def places() -> str:
    """The same in words, for an error."""
    return " and then in ".join(["the installed packages", *folders()])
