"""Who may import whom, no cycles, no torch where it must not be, no print outside voice: the house rules, by syntax tree."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "lamplighter"
LAYER0 = {"config", "report", "rundir", "errors"}
ALLOWED = {
    "config": {"errors"},
    "report": {"errors", "rundir"},
    "rundir": {"errors"},
    "errors": set(),
    "procs": LAYER0,
    "readers": LAYER0,
    "data": LAYER0 | {"procs", "readers"},
    "clean": LAYER0 | {"procs", "readers"},
    "model": LAYER0,
    "train": LAYER0 | {"procs", "readers", "data", "model"},
    "plan": LAYER0 | {"procs", "data", "model", "train"},
    "doctor": LAYER0 | {"procs", "readers", "data", "model", "train", "plan"},
    "watch": LAYER0 | {"procs"},
    "commands": LAYER0 | {"procs", "readers", "data", "clean", "model", "train", "watch", "plan", "doctor"},
    "__main__": {"commands"},
}
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "misc", "core", "manager"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SRC.parent).with_suffix("").parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(path: Path, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    package = module_name(path).split(".")
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            stem = package[: len(package) - node.level + (path.name == "__init__.py")] if node.level else []
            base = ".".join([*stem, *([node.module] if node.module else [])])
            found.add(base)
            found |= {f"{base}.{alias.name}" for alias in node.names if base.startswith("lamplighter")}
    return found


FILES = sorted(path for path in SRC.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_room_imports_only_what_lies_below_it(path: Path) -> None:
    room = room_of(module_name(path))
    if not room:
        return
    assert room in ALLOWED, f"{room} is not a room of the house"
    known = {room_of(name) for name in imports_of(path) if name.startswith("lamplighter.")} & set(ALLOWED)
    assert known <= ALLOWED[room] | {room}, f"{path} imports {known - ALLOWED[room]}"


def test_there_are_no_import_cycles() -> None:
    modules = {module_name(path): path for path in FILES}
    graph = {
        name: {found for found in imports_of(path) if found in modules and found != name}
        for name, path in modules.items()
    }
    visiting: list[str] = []
    done: set[str] = set()

    def visit(name: str) -> None:
        assert name not in visiting, f"cycle: {' -> '.join([*visiting[visiting.index(name) :], name])}"
        if name in done:
            return
        visiting.append(name)
        for other in graph[name]:
            if other != "lamplighter" and not name.startswith(other + "."):
                visit(other)
        visiting.pop()
        done.add(name)

    for name in graph:
        visit(name)


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_have_a_first_line_and_a_name_that_says_something(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} does not say what it is"
    assert path.stem not in FORBIDDEN_NAMES


def test_nothing_prints_outside_voice() -> None:
    for path in FILES:
        calls = [
            n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        ]
        printed = [call.lineno for call in calls if call.func.id == "print"]  # type: ignore[attr-defined]
        assert not printed or path.name == "console.py", f"{path}:{printed}"


@pytest.mark.parametrize("module", ["lamplighter.watch.supervisor", "lamplighter.watch.live", *map(module_name, sorted((SRC / "commands").glob("[!_]*.py"))),
                                    "lamplighter.data.sources", "lamplighter.data.tokenizer", "lamplighter.data.token_cache.reader",
                                    "lamplighter.data.batches", "lamplighter.data.corpus", "lamplighter.data.chat.layout", "lamplighter.data.chat", "lamplighter.model.shape"])  # fmt: skip
def test_the_parent_and_the_data_room_never_load_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


SHIM = [path for path in FILES if path.is_relative_to(SRC / "watch" / "agent")]


@pytest.mark.parametrize("path", SHIM, ids=module_name)
def test_the_shim_lives_on_the_standard_library_alone(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for block in ast.walk(tree):  # what only a type checker reads is never imported
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            block.body = []
    named = [n for node in ast.walk(tree) if isinstance(node, ast.Import) for n in (alias.name for alias in node.names)]
    named += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    foreign = {name for name in named if name.split(".")[0] not in sys.stdlib_module_names}
    assert foreign <= {"imp"}, f"{path} imports {foreign}"  # gone from the newest library, used in the oldest only


def test_the_shim_loads_nothing_that_costs_a_start() -> None:
    path = next(path for path in SHIM if path.stem == "bootstrap")
    code = f"import sys; __file__ = {str(path)!r}; exec(compile(open({str(path)!r}).read(), {str(path)!r}, 'exec')); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert len(SHIM) == 4
    assert "mmap" in loaded.split()
    assert not {"signal", "struct", "threading", "json", "ctypes", "logging", "typing", "enum", "re"} & set(
        loaded.split()
    )


def test_the_rule_would_catch_a_breach(tmp_path: Path) -> None:
    bad = SRC / "procs" / "procfs.py"
    assert "lamplighter.train" not in imports_of(bad)
    breach = tmp_path / "lamplighter" / "watch" / "x.py"
    breach.parent.mkdir(parents=True)
    breach.write_text("from lamplighter.train import loop\n")
    tree = ast.parse(breach.read_text())
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {room_of(str(name)) for name in names} - ALLOWED["watch"] == {"train"}
