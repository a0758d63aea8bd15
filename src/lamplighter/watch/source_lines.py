"""What the source says about a line: the loop around it, the lock that it takes, the locks that it is inside of.

In:  a file and a line of a stack.
Out: names and loops, for the words of a verdict. Text is a hint and never a proof: identity comes from the process itself.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

_LONGEST_CALL = 60
_TAKES = ("acquire", "get", "put", "wait", "join", "result", "recv")


@dataclass(frozen=True)
class Loop:
    """The innermost loop around a line."""

    kind: str  # for or while
    line: int
    text: str
    counter: str = ""  # the variable of a `for`
    node: ast.For | ast.While | None = field(default=None, compare=False)


@lru_cache(maxsize=64)
def _parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, ValueError):  # not there, or no Python: nothing is known then
        return None


def enclosing_loop(file: str, line: int) -> Loop | None:
    """The innermost `for` or `while` whose body or head holds the line."""
    parsed = _parsed(file)
    if parsed is None:
        return None
    found: Loop | None = None
    for node in ast.walk(parsed):
        if isinstance(node, ast.For | ast.While) and node.lineno <= line <= (node.end_lineno or node.lineno):
            kind = "for" if isinstance(node, ast.For) else "while"
            text = ast.unparse(node.iter) if isinstance(node, ast.For) else ast.unparse(node.test)
            if found is None or node.lineno >= found.line:
                target = node.target if isinstance(node, ast.For) else None
                found = Loop(kind, node.lineno, text, target.id if isinstance(target, ast.Name) else "", node)
    return found


@lru_cache(maxsize=256)
def lock_taken_at(file: str, line: int) -> str:
    """The name of the object that this line takes or waits for: `with A:`, `self.lock.acquire()`; empty where there is none."""
    parsed = _parsed(file)
    for node in ast.walk(parsed) if parsed else ():
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                if item.context_expr.lineno <= line <= (item.context_expr.end_lineno or line):
                    return ast.unparse(item.context_expr)
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _TAKES):
            continue
        if node.lineno <= line <= (node.end_lineno or line):
            return ast.unparse(node.func.value)
    return ""


@lru_cache(maxsize=256)
def call_at(file: str, line: int) -> str:
    """The outermost call that is written at this line, without its arguments: `dist.TCPStore`; empty where there is none."""
    parsed = _parsed(file)
    calls = [
        node
        for node in (ast.walk(parsed) if parsed else ())
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or line)
    ]
    calls = [node for node in calls if isinstance(node.func, ast.Name | ast.Attribute)]
    shortest = min(((node.end_lineno or line) - node.lineno for node in calls), default=0)
    found = next((node for node in calls if (node.end_lineno or line) - node.lineno == shortest), None)
    text = ast.unparse(found.func) if found else ""
    return text if len(text) <= _LONGEST_CALL else ""


@lru_cache(maxsize=256)
def locks_around(file: str, line: int) -> frozenset[str]:
    """The names of all `with` blocks whose body holds the line, within the same function."""
    parsed = _parsed(file)
    found: set[str] = set()
    spans = [(node.lineno, node.end_lineno or node.lineno) for node in ast.walk(parsed)
             if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)] if parsed else []  # fmt: skip
    function = max((span for span in spans if span[0] <= line <= span[1]), default=(0, 1 << 60))
    for node in ast.walk(parsed) if parsed else ():
        if isinstance(node, ast.With | ast.AsyncWith) and function[0] <= node.lineno:
            first, last = node.body[0].lineno, node.body[-1].end_lineno or node.body[-1].lineno
            if first <= line <= last:
                found |= {ast.unparse(item.context_expr) for item in node.items}
    return frozenset(found)
