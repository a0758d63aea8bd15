"""Who may import whom, no cycles, no torch where it must not be, no print outside the console: by syntax tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "lamplighter"
LAYER0 = {
    "config",
    "report",
    "read_back",
    "rundir",
    "errors",
    "slot",
    "own_stacks",
    "own_code",
    "safe_text",
    "braille",
    "gpus",
    "device_faults",
    "leaves",
    "schedule",
    "first_words",
    "web_access",
}
ALLOWED = {
    "config": {"errors", "read_back", "rundir", "safe_text", "model.shape"},
    "report": {"errors", "read_back", "rundir", "procs", "slot", "own_stacks", "safe_text"},
    "rundir": {"errors", "procs", "read_back"},
    "errors": {"safe_text"},
    "read_back": set(),
    "own_code": set(),
    "safe_text": set(),
    "braille": set(),
    "first_words": set(),
    "web_access": {"errors"},
    "slot": set(),
    "own_stacks": {"slot"},
    "gpus": {"errors"},  # torch-free tables and arithmetic that plan and train share
    "device_faults": set(),
    "leaves": set(),
    "schedule": {"config"},
    "procs": {"errors", "read_back"},
    "readers": LAYER0,
    "data": LAYER0 | {"procs", "readers"},
    "clean": LAYER0 | {"procs", "readers", "data.ngrams"},  # one index of runs of words for all
    "model": LAYER0,
    "train": LAYER0 | {"procs", "readers", "data", "model"},
    "plan": LAYER0 | {"procs", "model.shape", "model.stored", "model.lora_targets"},
    "doctor": LAYER0 | {"procs", "readers", "data", "model", "train", "plan"},
    "evaluate": LAYER0 | {"procs", "readers", "data", "model", "train"},
    "serve": LAYER0 | {"procs", "data", "model", "train"},
    "export": LAYER0 | {"procs", "readers", "data", "model", "train"},
    "mirror": LAYER0 | {"procs", "readers", "train.held"},  # a checkpoint that is copied is held, as by every reader
    "watch": LAYER0 | {"procs"},
    "dash": LAYER0 | {"procs", "watch"},
    "commands": LAYER0
    | {
        "procs",
        "readers",
        "data",
        "clean",
        "model",
        "train",
        "mirror",
        "watch",
        "dash",
        "plan",
        "doctor",
        "evaluate",
        "export",
        "serve",
    },
    "__main__": {"commands"},
}
TORCH_FREE = [*(f"commands.{path.stem}" for path in (SRC / "commands").glob("[!_]*.py")), "watch.supervisor", "watch.live", "readers", "data.sources", "data.tokenizer",
              "data.token_cache.reader", "plan.render", "plan.dry_run", "procs.child", "data.batches", "data.corpus", "data.chat.packing", "data.chat", "data.batch_source", "model.shape",
              "train.anomalies.detector", "mirror.fetching"]  # fmt: skip
FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "base", "misc", "core", "manager"}


class House:
    """The modules of a package and what each of them imports."""

    def __init__(self, src: Path) -> None:
        self.src = src
        self.trees = {self._name(path): ast.parse(path.read_text()) for path in sorted(src.rglob("*.py"))}
        self.packages = {self._name(path) for path in src.rglob("__init__.py")}

    def _name(self, path: Path) -> str:
        return ".".join(path.relative_to(self.src.parent).with_suffix("").parts).removesuffix(".__init__")

    def imports_of(self, module: str) -> Iterator[tuple[str, int]]:
        """Names that a module imports, wherever in it, with their lines; relative ones are made absolute."""
        stem = module.split(".") if module in self.packages else module.split(".")[:-1]
        for node in ast.walk(self.trees[module]):
            if isinstance(node, ast.Import):
                yield from ((alias.name, node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = stem[: len(stem) - node.level + 1] if node.level else []
                source = ".".join([*above, *([node.module] if node.module else [])])
                yield source, node.lineno
                yield from ((f"{source}.{alias.name}", node.lineno) for alias in node.names)

    def breaches(self, allowed: dict[str, set[str]]) -> list[str]:
        """Imports that the table does not allow, and rooms that it does not know."""
        found = []
        for module in self.trees:
            room = _room(module)
            if room and room not in allowed:
                found.append(f"{module}: {room} is not a room of the house")
            for name, line in self.imports_of(module) if room in allowed else ():
                other = _room(name) if name.startswith("lamplighter.") else ""
                may = any(f"{name}.".startswith(f"lamplighter.{one}.") for one in allowed[room] | {room})
                if other in allowed and not may:
                    found.append(f"{module}:{line} imports {name}")
        return sorted(set(found))

    def cycle(self) -> list[str]:
        """A ring of modules that import each other, parent packages included: importing a.b runs a/__init__ first."""
        graph = {module: self._reached(module) for module in self.trees}
        done: set[str] = set()
        path: list[str] = []

        def visit(module: str) -> list[str]:
            if module in path:
                return [*path[path.index(module) :], module]
            if module in done:
                return []
            path.append(module)
            for other in sorted(graph[module]):
                if ring := visit(other):
                    return ring
            path.pop()
            done.add(module)
            return []

        return next((ring for module in graph if (ring := visit(module))), [])

    def _reached(self, module: str) -> set[str]:
        """Modules whose code an import of `module` needs; its own parents are already running when it begins."""
        reached: set[str] = set()
        for name, _ in self.imports_of(module):
            parts = name.split(".")
            reached |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        own = {module, *(module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1))}
        return (reached & set(self.trees)) - own

    def reads_of_proc(self) -> list[str]:
        others = [m for m in self.trees if _room(m) != "procs" and not m.startswith("lamplighter.watch.agent.")]
        words = [(m, n) for m in others for n in ast.walk(self.trees[m]) if isinstance(n, ast.Constant)]
        return [f"{m}:{n.lineno} {n.value!r}" for m, n in words if re.match(r"/proc(/|$)", str(n.value))]

    def printed(self) -> list[str]:
        calls = [(m, n) for m, tree in self.trees.items() for n in ast.walk(tree) if isinstance(n, ast.Call)]
        return [f"{m}:{n.lineno}" for m, n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


HOUSE = House(SRC)


def test_a_room_imports_only_what_lies_below_it() -> None:
    assert not HOUSE.breaches(ALLOWED)


def test_clean_and_doctor_can_be_taken_out_with_their_verbs() -> None:
    for room, verbs in (("clean", {"data"}), ("doctor", {"doctor", "selftest"})):
        prefix = f"lamplighter.{room}."
        users = {
            module for module in HOUSE.trees for name, _ in HOUSE.imports_of(module) if f"{name}.".startswith(prefix)
        }
        outside = {module for module in users if not f"{module}.".startswith(prefix)}
        assert outside <= {f"lamplighter.commands.{verb}" for verb in verbs}


def test_there_are_no_import_cycles() -> None:
    assert not HOUSE.cycle()


def test_files_have_a_first_line_and_a_name_that_says_something() -> None:
    silent = [module for module, tree in HOUSE.trees.items() if not ast.get_docstring(tree)]
    assert not silent, f"{silent} do not say what they are"
    assert not [module for module in HOUSE.trees if module.split(".")[-1] in FORBIDDEN_NAMES]


def test_nothing_prints_outside_the_console() -> None:
    assert not [place for place in HOUSE.printed() if not place.startswith("lamplighter.watch.console:")]


def test_the_parent_and_the_data_room_never_load_torch() -> None:
    code = f"import sys, {', '.join('lamplighter.' + name for name in TORCH_FREE)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_parent_of_a_run_loads_little() -> None:
    """It is silent while it loads, and on a busy machine for long (decision 018)."""
    code = (
        "import sys, lamplighter.commands.train, lamplighter.config, lamplighter.watch.supervisor\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'rich', 'psutil', 'ssl', 'http.client', 'asyncio', 'tokenizers'}\n"
        "print(*heavy & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_step_of_the_optimizer_does_not_load_the_compiler() -> None:
    code = (
        "import sys, torch\n"
        "from lamplighter.config import Train\n"
        "from lamplighter.train import optimizers\n"
        "m = torch.nn.Linear(2, 2)\n"
        "o = optimizers.make_optimizer(m, Train())\n"
        "m(torch.ones(1, 2)).sum().backward()\n"
        "o.step(0.1); o.zero_grad()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_procs_knows_where_the_kernel_keeps_its_processes() -> None:
    """The agent is injected into other people's processes and can import nothing of ours."""
    assert not HOUSE.reads_of_proc()


def _house(folder: Path, files: dict[str, str]) -> House:
    for name, text in files.items():
        path = folder / "lamplighter" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.relative_to(folder / "lamplighter").parents:
            (folder / "lamplighter" / parent / "__init__.py").touch()
    return House(folder / "lamplighter")


def test_a_read_of_proc_is_found_however_it_is_written(tmp_path: Path) -> None:
    files = {
        "watch/x.py": '"""Of /proc in words."""\nopen("/proc/self/stat")\n',
        "watch/y.py": 'Path("/proc") / str(1)\nPath("/process")\n',
        "procs/z.py": 'Path("/proc")\n',
    }
    found = _house(tmp_path, files).reads_of_proc()
    assert found == ["lamplighter.watch.x:2 '/proc/self/stat'", "lamplighter.watch.y:1 '/proc'"]


def test_the_rules_catch_a_breach(tmp_path: Path) -> None:
    files = {"watch/x.py": "def f():\n    from lamplighter.train import loop\n", "watch/y.py": "from ..train import loop\n",
             "train/loop.py": "", "attic/z.py": ""}  # fmt: skip
    house = _house(tmp_path, files)
    assert house.breaches(ALLOWED) == [
        "lamplighter.attic.z: attic is not a room of the house",
        "lamplighter.attic: attic is not a room of the house",
        "lamplighter.watch.x:2 imports lamplighter.train",
        "lamplighter.watch.x:2 imports lamplighter.train.loop",
        "lamplighter.watch.y:1 imports lamplighter.train",
        "lamplighter.watch.y:1 imports lamplighter.train.loop",
    ]
    assert not house.cycle()


def test_a_cycle_through_a_parent_package_is_caught(tmp_path: Path) -> None:
    files = {"a/__init__.py": "import lamplighter.b.y\n", "a/x.py": "", "b/y.py": "from lamplighter.a import x\n"}
    assert set(_house(tmp_path, files).cycle()) == {"lamplighter.a", "lamplighter.b.y"}
    assert not _house(tmp_path / "sound", {"a/x.py": "", "b/y.py": "from lamplighter.a import x\n"}).cycle()


AGENT = sorted([SRC / "slot.py", SRC / "own_stacks.py", *(SRC / "watch" / "agent").rglob("*.py")])


def test_the_agent_lives_on_the_standard_library_alone() -> None:
    for path in AGENT:
        tree = ast.parse(path.read_text())
        for block in ast.walk(tree):  # what only a type checker reads is never imported
            if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
                block.body = []
        named = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        named += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        foreign = {name for name in named if name.split(".")[0] not in sys.stdlib_module_names}
        assert foreign <= {"imp"}, f"{path} imports {foreign}"  # gone from the newest library, used in the oldest only


def test_the_agent_loads_nothing_that_costs_a_start() -> None:
    door = next(path for path in AGENT if path.stem == "sitecustomize")
    load = f"d = {{'__file__': {str(door)!r}}}; exec(open({str(door)!r}).read(), d); d['_load']('slot'); d['_load']('bootstrap')"
    code = f"import sys; {load}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert "mmap" in loaded.split()
    heavy = {"signal", "struct", "threading", "json", "ctypes", "logging", "typing", "enum", "re"}
    assert not heavy & set(loaded.split())
