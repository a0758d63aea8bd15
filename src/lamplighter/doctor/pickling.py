"""Which part of an object cannot be pickled, and where it was defined: what spawn and forkserver trip over.

In:  any object.
Out: an Unpicklable: the path to it (dataset.transform), what it is, the line that made it; or None.
"""

from __future__ import annotations

import ast
import inspect
import pickle
import textwrap
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

from lamplighter.doctor.code_owner import Place

DEEP = 4


@dataclass(frozen=True)
class Unpicklable:
    """The innermost part that fails."""

    path: str
    kind: str
    error: str
    place: Place | None


def find(value: Any, path: str = "dataset") -> Unpicklable | None:
    """None where all of it can be sent to another process."""
    error = _error(value)
    return None if error is None else _innermost(value, path, error, None, DEEP)


def _error(value: Any) -> str | None:
    try:
        ForkingPickler.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _innermost(value: Any, path: str, error: str, owner: tuple[Any, str] | None, depth: int) -> Unpicklable:
    for name, part in _parts(value) if depth else ():
        if (inner := _error(part)) is not None:
            is_attribute = not isinstance(value, (dict, list, tuple))
            step = f".{name}" if is_attribute else f"[{name!r}]"
            attribute = (value, name) if is_attribute else owner
            return _innermost(part, path + step, inner, attribute, depth - 1)
    return Unpicklable(path, _kind(value), error, _defined(value, owner))


def _parts(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())[:1000]
    if isinstance(value, (list, tuple)):
        return list(enumerate(value[:1000]))
    return list(vars(value).items()) if hasattr(value, "__dict__") and not inspect.isroutine(value) else []


def _kind(value: Any) -> str:
    if getattr(value, "__name__", "") == "<lambda>":
        return "a lambda"
    if inspect.isfunction(value):
        return f"the function {value.__qualname__}"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _defined(value: Any, owner: tuple[Any, str] | None) -> Place | None:
    """A function knows its line; of anything else, the line of its owner's class that sets it."""
    code = getattr(value, "__code__", None)
    if code is not None:
        return Place(code.co_filename, code.co_firstlineno, code.co_name)
    if owner is None:
        return None
    kind, name = type(owner[0]), owner[1]
    try:
        lines, first = inspect.getsourcelines(kind)
        tree = ast.parse(textwrap.dedent("".join(lines)))
        file = inspect.getsourcefile(kind) or "?"
    except (OSError, TypeError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
            return Place(file, first + node.lineno - 1, f"{kind.__name__}.{name}")
    return Place(file, first, kind.__name__)
