"""The wheel: built from these sources, installed into an empty environment outside the checkout, and used there.

Nothing is downloaded: the new environment finds torch and the other libraries in this one, but not this checkout.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from running import clean_env

ROOT = Path(__file__).parents[2]
OF_EXTRAS = (
    "dash/server.py",
    "serve/app.py",
    "serve/connections.py",
)  # loaded by their verbs alone, after the extra was looked for
UNDECLARED = {"huggingface_hub", "IPython"}  # comes with transformers and datasets; a notebook has it, and calls us
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def call(*words: object, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in clean_env().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `python -m build` builds it, from a copy: building leaves folders beside the sources."""
    pytest.importorskip("build")
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__", "*.pyc"))
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", cwd=copy)
    (made,) = (copy / "dist").glob("*.whl")
    return made


def test_everything_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    source = ROOT / "src"
    files = {p.relative_to(source).as_posix() for p in (source / "lamplighter").rglob("*") if p.is_file()}
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    missing = {name for name in files - names if not name.endswith(".pyc")}  # an old Python puts them beside the source
    assert not missing, f"not in the wheel: {sorted(missing)}; see package-data in pyproject.toml"
    assert {"lamplighter/presets/demo.yaml", "lamplighter/watch/agent/path/sitecustomize.py"} <= names


def test_every_library_that_the_package_imports_is_declared(wheel: Path) -> None:
    """The demo below finds its libraries in this environment: one that nobody declared would be found there too."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        declared = Parser().parsestr(packed.read(name).decode()).get_all("Requires-Dist", [])
    always = {canonicalize_name(one.name) for one in map(Requirement, declared) if one.marker is None}
    extras = {
        canonicalize_name(one.name)
        for one in map(Requirement, declared)
        if one.marker is not None
        and any(
            one.marker.evaluate({"extra": extra})
            for extra in ("data", "hf", "track", "mlflow", "web", "export", "eval", "gpu")
        )
    }
    distributions = packages_distributions()
    imported = imported_libraries(ROOT / "src")
    assert sum(imported.values()) > 5
    for module, at_load in imported.items():
        names = {canonicalize_name(one) for one in distributions.get(module, [module])}
        may_come_from = always if at_load else always | extras
        assert names & may_come_from or module in UNDECLARED, f"{module} is imported, and nothing brings {names}"


def imported_libraries(source: Path) -> dict[str, bool]:
    """Every module from elsewhere that is imported anywhere, and whether some file imports it as it loads."""
    found: dict[str, bool] = {}
    for path in source.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for name in {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"lamplighter"}:
                at_load = node in tree.body and not path.as_posix().endswith(OF_EXTRAS)
                found[name] = found.get(name, False) or at_load
    return found


@pytest.mark.slow
def test_the_demo_runs_where_only_the_wheel_is_installed(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "environment"
    call(sys.executable, "-m", "venv", "--without-pip", place, cwd=tmp_path)
    libraries = [path for path in sys.path if path.endswith("site-packages")]
    (site,) = (place / "lib").glob("python3*/site-packages")
    (site / "libraries.pth").write_text(
        "\n".join(libraries) + "\n"
    )  # their own .pth files do not count, so no checkout
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    call(*pip, "--ignore-installed", wheel, cwd=tmp_path)
    where = call(python, "-c", "import lamplighter; print(lamplighter.__file__)", cwd=tmp_path).stdout
    assert where.startswith(str(site))

    lamp = place / "bin" / "lamp"
    small = [
        "--train.steps",
        "20",
        "--train.warmup_steps",
        "2",
        "--data.embedded_documents",
        "300",
        "--tokenizer.kind",
        "bytes",
    ]
    call(lamp, "demo", *small, cwd=tmp_path)
    assert "finished" in (tmp_path / "runs/demo/console.log").read_text()
    text = call(lamp, "generate", "demo", "--prompt", "Dear", cwd=tmp_path).stdout
    assert "Dear" in text

    script = "import torch; print('a script')"
    watched = call(lamp, "watch", "--run", "other", "--", python, "-c", script, cwd=tmp_path)
    assert watched.stdout == "a script\n"
    assert list((tmp_path / "runs/other/slots").iterdir()), "the agent came along and reported"


def test_every_hint_about_an_extra_names_one_that_exists() -> None:
    extras = set(PROJECT["optional-dependencies"])
    texts = [*(ROOT / "src").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for path in texts:
        for found in re.findall(r"lamplighter\[([\w,]+)\]", path.read_text()):
            assert set(found.split(",")) <= extras, f"{path}: {found}"


def test_a_missing_library_is_answered_with_what_a_user_would_type(tmp_path: Path) -> None:
    """A Parquet file where pyarrow is not installed: one line that can be pasted."""
    (tmp_path / "a.parquet").write_bytes(b"PAR1" + bytes(64) + b"PAR1")
    (tmp_path / "hidden" / "pyarrow").mkdir(parents=True)
    (tmp_path / "hidden" / "pyarrow" / "__init__.py").write_text("raise ImportError('No module named pyarrow')\n")
    done = subprocess.run(
        [sys.executable, "-m", "lamplighter", "data", "stats", "--data.paths", "a.parquet"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env=clean_env(PYTHONPATH=os.pathsep.join([str(tmp_path / "hidden"), str(ROOT / "src")])),
    )  # fmt: skip
    assert done.returncode == 66, done.stderr
    assert "pip install 'lamplighter[data]'" in done.stderr
