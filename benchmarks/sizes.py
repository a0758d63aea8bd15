"""The house in figures: files and lines per room, sizes of functions, names, comments, swallowed exceptions; to look at.

In:  src/lamplighter, or another checkout's (`python benchmarks/sizes.py ../other/src/lamplighter`).
Out: a table per room, then the figures of the whole, then what stands out.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "lamplighter"
POSITIONAL = 5  # a call with more positional arguments than this is hard to read


@dataclass(frozen=True)
class File:
    """One source file, parsed."""

    path: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.path.split("/")[0] if "/" in self.path else "(top)"

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())


def read(src: Path) -> list[File]:
    """Every Python file below `src`."""
    paths = sorted(src.rglob("*.py"))
    return [File(str(p.relative_to(src)), p.read_text(), ast.parse(p.read_text())) for p in paths]


def functions(file: File) -> Iterator[tuple[int, str]]:
    """Length and place of every function."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1, f"{file.path}:{node.lineno} {node.name}"


def public_names(file: File) -> list[str]:
    """Names without an underscore that a module defines at its top."""
    names: list[str] = []
    for node in file.tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return [name for name in names if not name.startswith("_")]


def swallowed(file: File) -> Iterator[tuple[int, bool]]:
    """Lines where an exception ends without a word, and whether a comment beside it says why."""
    lines = file.text.splitlines()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ExceptHandler) and all(_is_silent(one) for one in node.body):
            where = range(node.lineno - 1, (node.end_lineno or node.lineno))
        elif isinstance(node, ast.With) and any("suppress(" in ast.unparse(item) for item in node.items):
            where = range(node.lineno - 1, node.body[0].lineno)
        else:
            continue
        near = [lines[i] for i in where] + [lines[max(0, where.start - 1)]]
        yield node.lineno, any("#" in line for line in near)


def _is_silent(node: ast.stmt) -> bool:
    empty = isinstance(node, ast.Return) and (node.value is None or isinstance(node.value, ast.Constant | ast.Name))
    return empty or isinstance(node, ast.Pass | ast.Continue | ast.Break)


def comment_lines(file: File) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(file.text).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def docstring_lines(file: File) -> int:
    found = 0
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            found += (first.end_lineno or first.lineno) - first.lineno + 1
    return found


def long_calls(file: File) -> Iterator[str]:
    """Calls with more positional arguments than a reader can keep apart."""
    for node in ast.walk(file.tree):
        if (
            isinstance(node, ast.Call)
            and len(node.args) > POSITIONAL
            and not any(isinstance(one, ast.Starred) for one in node.args)
        ):
            yield f"{file.path}:{node.lineno} {ast.unparse(node.func)} ({len(node.args)})"


def main() -> None:
    files = read(Path(sys.argv[1]) if len(sys.argv) > 1 else SRC)
    rooms: dict[str, list[File]] = defaultdict(list)
    for file in files:
        rooms[file.room].append(file)
    print(f"{'room':<12}{'files':>6}{'lines':>8}")
    for room, members in sorted(rooms.items()):
        print(f"{room:<12}{len(members):>6}{sum(f.lines for f in members):>8}")
    lengths = [f.lines for f in files]
    total = sum(lengths)
    sizes = sorted(length for f in files for length, _ in functions(f))
    silent = [(f.path, *one) for f in files for one in swallowed(f)]
    classes = Counter(n.name for f in files for n in ast.walk(f.tree) if isinstance(n, ast.ClassDef))
    stems = Counter(Path(f.path).stem for f in files if Path(f.path).stem not in ("__init__", "__main__"))
    print(f"\n{len(files)} files, {total} lines; median {statistics.median(lengths):.0f}, max {max(lengths)},", end=" ")
    print(f"{sum(n <= 60 for n in lengths)} of 60 lines or fewer")
    print(f"functions: median {statistics.median(sizes):.0f}, p90 {sizes[int(0.9 * len(sizes))]}, max {sizes[-1]}")
    comments, docstrings = sum(map(comment_lines, files)), sum(map(docstring_lines, files))
    print(f"comments {100 * comments / total:.1f} %, docstrings {100 * docstrings / total:.1f} % of lines")
    print(f"public module names: {sum(len(public_names(f)) for f in files)}")
    print(f"exceptions swallowed: {len(silent)}, {sum(not why for *_, why in silent)} without a reason beside them")
    print(f"class names used twice: {', '.join(n for n, k in classes.items() if k > 1) or 'none'}")
    print(f"file names used twice: {', '.join(n for n, k in stems.items() if k > 1) or 'none'}")
    calls = [call for f in files for call in long_calls(f)]
    print(f"calls with more than {POSITIONAL} positional arguments: {len(calls)}")
    for call in calls[:12]:
        print(f"  {call}")
    print("longest files and functions:")
    for lines, name in sorted(((f.lines, f.path) for f in files), reverse=True)[:8]:
        print(f"{lines:6}  {name}")
    for length, name in sorted((one for f in files for one in functions(f)), reverse=True)[:6]:
        print(f"{length:6}  {name}")
    for path, line, why in silent:
        if not why:
            print(f"  swallowed without a reason: {path}:{line}")


if __name__ == "__main__":
    main()
