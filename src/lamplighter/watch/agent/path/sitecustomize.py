"""The door of the agent: Python runs this file at its start because the watcher put its folder first on PYTHONPATH.

In:  LAMP_WATCH, the folder of the slots.
Out: the counters of bootstrap.py are in place; then the user's own sitecustomize runs, as it would have without us.

Every Python that the script starts meets this file, old ones too, so it is written in words that Python 2.7 knows.
Whatever goes wrong here stays here: the script runs, unwatched.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_FOLDER = os.environ.get("LAMP_WATCH", "")


def _load(name):
    """A file of ours by its path. Where no compiled copy of it is kept beside it, one is kept with the slots."""
    import _frozen_importlib
    import _frozen_importlib_external as external

    agent = os.path.dirname(_HERE)
    shared = name in ("slot", "own_stacks")  # our own processes use them too
    folder = os.path.dirname(os.path.dirname(agent)) if shared else agent
    path = os.path.join(folder, name + ".py")
    before = sys.dont_write_bytecode, sys.pycache_prefix
    try:
        if not os.path.exists(external.cache_from_source(path)):
            sys.dont_write_bytecode, sys.pycache_prefix = False, os.path.join(_FOLDER, "code")
        spec = external.spec_from_file_location("_lamplighter_" + name, path)
        module = _frozen_importlib.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.dont_write_bytecode, sys.pycache_prefix = before
    sys.modules["_lamplighter_" + name] = module
    return module


def _install():
    if sys.version_info < (3, 9) or not os.path.isdir(_FOLDER) or "_lamplighter_bootstrap" in sys.modules:
        return
    _load("slot")
    _load("bootstrap").install(_load)


def _chain():
    """Run the next sitecustomize on the path under its own name. Its errors are its own: site prints them as ever."""
    folders = [os.path.abspath(folder) for folder in sys.path]
    after = folders.index(_HERE) + 1 if _HERE in folders else 0
    rest = [folder for folder in sys.path[after:] if os.path.abspath(folder) != _HERE]
    if sys.version_info < (3, 5):
        import imp

        try:
            found = imp.find_module("sitecustomize", rest)
        except ImportError:  # there is no other one
            return
        imp.load_module("sitecustomize", *found)
        return
    import _frozen_importlib
    import _frozen_importlib_external as external

    spec = external.PathFinder.find_spec("sitecustomize", rest)
    if spec is None or spec.loader is None:
        return
    module = _frozen_importlib.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    _install()
except Exception:  # errors of ours must never reach the script
    pass
_chain()
