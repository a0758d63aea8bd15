"""A table of file and function sizes: to look at, not to pass.

In:  src/lamplighter.
Out: lines per file, functions per file, the longest functions.
"""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

SRC = Path(__file__).parents[1] / "src" / "lamplighter"


def main() -> None:
    files, functions = [], []
    for path in sorted(SRC.rglob("*.py")):
        text = path.read_text()
        files.append((len(text.splitlines()), str(path.relative_to(SRC))))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                functions.append((length, f"{path.relative_to(SRC)}:{node.lineno} {node.name}"))
    for lines, name in sorted(files, reverse=True):
        print(f"{lines:5}  {name}")
    lengths = sorted(length for length, _ in functions)
    file_lengths = [lines for lines, _ in files]
    print(
        f"\n{len(files)} files, {sum(file_lengths)} lines, median {statistics.median(file_lengths):.0f}, max {max(file_lengths)}"
    )
    p90 = lengths[int(0.9 * len(lengths))]
    print(
        f"{len(functions)} functions, median {statistics.median(lengths):.0f}, p90 {p90}, max {lengths[-1]}; the longest:"
    )
    for length, name in sorted(functions, reverse=True)[:6]:
        print(f"{length:5}  {name}")


if __name__ == "__main__":
    main()
