"""The child's entry point: runs one verb's child part, and says how it ended.

In:  `python -m lamplighter.commands.child_main VERB REQUEST`, a run folder made by the parent.
Out: the verb's exit code; everything else goes through report.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from lamplighter import report
from lamplighter.errors import CRASHED, CannotWrite, LampError, StoppedEarly
from lamplighter.procs import prctl
from lamplighter.rundir import RunDir, cannot_write

VERBS = {
    "train": "train.train_child",
    "generate": "generate.generate_child",
    "checkpoints": "checkpoints.checkpoints_child",
    "doctor": "doctor.doctor_child",
    "plan": "plan.plan_child",
    "data-stats": "data.stats_child",
    "data-clean": "data.clean_child",
    "data-prepare": "data.prepare_child",
    "tokenizer-train": "tokenizer.train_child",
    "tokenizer-show": "tokenizer.show_child",
}  # the function of this folder that is the verb's child part


def main() -> int:
    verb, request = sys.argv[1], json.loads(sys.argv[2])
    prctl.belong_to(int(os.environ.get("LAMP_PARENT_PID", "0")))
    folder = RunDir(Path(request["folder"]))
    try:
        rank, attempt = (
            int(os.environ.get(name, default)) for name, default in (("LAMP_RANK", "0"), ("LAMP_ATTEMPT", "1"))
        )
        report.start(folder, rank, attempt, request["result_fd"])
    except OSError as error:
        os.write(2, ("\n".join(cannot_write(folder.path, error).lines()) + "\n").encode())
        return CannotWrite.code
    try:
        code = _child_part(verb)(folder, request)
    except StoppedEarly as stop:
        code = stop.code
    except LampError as error:
        report.last_words(error.lines(), error.code, error.cause, f"{error.what}: {error.why}", error.next)
        code = error.code
    except MemoryError:
        traceback.print_exc()
        lines = ["error: out of memory", "next:  a smaller train.micro_batch, data.seq_len or model"]
        report.last_words(lines, CRASHED)
        code = CRASHED
    except (Exception, SystemExit) as crash:  # noqa: BLE001  the traceback is kept in output.log, the last line is said
        if isinstance(crash, OSError) and crash.errno == errno.ENOSPC:
            full = cannot_write(folder.path, crash)
            report.last_words(full.lines(), full.code, full.cause, f"{full.what}: {full.why}", full.next)
            report.leave(full.code)
        traceback.print_exc()
        where = traceback.extract_tb(crash.__traceback__)[-1]
        lines = [
            f"error: {type(crash).__name__}: {crash}",
            f"why:   raised at {where.filename}:{where.lineno} in {where.name}",
        ]
        report.last_words(lines, CRASHED)
        code = CRASHED
    report.leave(code)  # at once: nothing is buffered, and torch takes a second to unload itself
    return code


def _child_part(verb: str) -> Callable[[RunDir, dict[str, Any]], int]:
    module, function = VERBS[verb].split(".")
    part: Callable[[RunDir, dict[str, Any]], int] = getattr(import_module(f"lamplighter.commands.{module}"), function)
    return part


if __name__ == "__main__":
    sys.exit(main())
