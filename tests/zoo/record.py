"""Makes the recordings: runs each animal of the zoo and keeps what its verdict was judged from, without machine paths.

Run: python tests/zoo/record.py [NAME ...]    (the results are in tests/recordings)
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from test_zoo import ANIMALS, ONCE, Animal

from lamplighter.procs.stacks import OURS
from lamplighter.rundir import RunDir, read_lines
from running import TINY, lamp, write_model

RECORDINGS = Path(__file__).parents[1] / "recordings"


def record(animal: Animal) -> Path:
    """One run, one file: the truth, the source, and the observations with their stacks."""
    with tempfile.TemporaryDirectory() as folder:
        cwd = Path(folder)
        family = write_model(cwd, ONCE + animal.body)
        words = ["train", "--run", "z", *TINY, "--model.family", family, "--train.steps", "40"]
        lamp(*words, "--save.every_steps", "5", *animal.flags, cwd=cwd)
        run = RunDir(cwd / "runs" / "z")
        verdict = next(e for e in read_lines(run.events) if e.get("cause") == animal.cause and e.get("kept"))
        text = (run.stacks / verdict["kept"]).read_text()
        for real, shown in (
            (OURS, "{ours}/"),
            (str(cwd / "own.py"), "{folder}/animal.py"),
            (str(cwd), "{folder}"),
            (sys.prefix, "/venv"),
            (sys.base_prefix, "/base"),
        ):
            text = text.replace(real, shown)
        truth = {name: verdict[name] for name in ("state", "cause", "provable")}
        truth["line"] = verdict["culprit"]["line"]
        source = (cwd / "own.py").read_text()
        path = RECORDINGS / f"{animal.name}.json"
        path.write_text(json.dumps({"truth": truth, "source": source, "seen": json.loads(text)}, indent=1) + "\n")
        return path


if __name__ == "__main__":
    RECORDINGS.mkdir(exist_ok=True)
    for one in ANIMALS:
        if len(sys.argv) == 1 or one.name in sys.argv[1:]:
            sys.stdout.write(f"{record(one)}\n")
