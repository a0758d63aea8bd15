"""The trial of the compiler: the run's own model, uncompiled and compiled, timed; runs in a process that may hang or die.

In:  a request with the run and its folders.
Out: records: what it is at; then seconds uncompiled, compiled and of compiling; or the compiler's error.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lamplighter.config import Run
from lamplighter.doctor.model_fixture import prepare, quick_rows, seconds_of
from lamplighter.doctor.probe import Patient
from lamplighter.doctor.trials import Said
from lamplighter.model.transformer import Transformer


def measure(request: dict[str, Any], said: Said) -> None:
    """Eager first, then the same blocks compiled as lamp train would."""
    now = lambda text: said.write(now=text)  # noqa: E731
    scratch = Path(request["scratch"])
    patient = Patient(Run.model_validate(request["run"]), None, Path(request["runs_dir"]), scratch, now)
    bed = prepare(patient, quick_dtype=False)
    is_own = not isinstance(bed.model, Transformer)
    said.write(now="the same step, uncompiled", own=is_own)
    batch, words = quick_rows(bed)
    eager_s = min(seconds_of(bed, batch) for _ in range(3))
    from lamplighter.train.compiled import Compiled, CompileError

    said.write(now=f"compiling for {words}", own=is_own)
    blocks = Compiled(bed.model)
    began = time.monotonic()
    try:
        blocks.begin(scratch / "compiled")
        seconds_of(bed, batch)
        compile_s = time.monotonic() - began
        said.write(now="the same step, compiled", own=is_own)
        compiled_s = min(seconds_of(bed, batch) for _ in range(3))
    except CompileError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        said.write(error=lines[0] if lines else type(error).__name__, where=_where(lines))
        return
    said.write(eager_s=eager_s, compiled_s=compiled_s, compile_s=compile_s, words=words, compiles=blocks.compiles)


def _where(lines: list[str]) -> str:
    """The user's line that the compiler complains about, where it says one."""
    return next((line.strip() for line in lines if line.strip().startswith("File ")), "")
