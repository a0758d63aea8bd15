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
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from lamplighter import device_faults, report
from lamplighter.device_faults import Fault
from lamplighter.errors import CRASHED, CannotWrite, LampError, StoppedEarly
from lamplighter.procs import prctl
from lamplighter.procs.lock import keep_to_ourselves
from lamplighter.rundir import RunDir, cannot_write
from lamplighter.slot import OF_ALL_RANKS


def main() -> int:
    verb, request, us = sys.argv[1], json.loads(sys.argv[2]), os.getpid()
    memory = [int(fd) for fd in os.environ.get("LAMP_MEMORY", "").split(",") if fd]
    keep_to_ourselves([fd for fd in (request.get("lock_fd", -1), request["result_fd"], *memory) if fd >= 0])
    os.register_at_fork(after_in_child=report.forget)
    prctl.belong_to(int(os.environ.get("LAMP_PARENT_PID", "0")))
    folder = RunDir(Path(request["folder"]), Path(request["whole"]) if request.get("whole") else None)
    rank, attempt = int(os.environ.get("LAMP_RANK", "0")), int(os.environ.get("LAMP_ATTEMPT", "1"))
    try:
        if "standby_fd" in request:
            report.start_unheard(folder, folder.standby_slot)
        else:
            report.start(folder, rank, attempt, request["result_fd"])
    except OSError as error:
        os.write(2, ("\n".join(cannot_write(folder.path, error).lines()) + "\n").encode())
        return CannotWrite.code
    warnings.showwarning = _hear_warning
    try:
        code = _child_part(verb)(folder, request)
    except StoppedEarly as stop:
        code = stop.code
    except LampError as error:
        code = _last_words(error)
    except BaseException as crash:  # noqa: BLE001  KeyboardInterrupt and SystemExit of the user's code too: never a quiet end
        if os.getpid() != us:  # forked off by the user's code, and at its end: no word of it is about the run
            os._exit(crash.code if isinstance(crash, SystemExit) and isinstance(crash.code, int) else CRASHED)
        if isinstance(crash, OSError) and crash.errno == errno.ENOSPC:
            code = _last_words(cannot_write(folder.path, crash))
        else:
            traceback.print_exc()
            fault = device_faults.of_error(crash)
            passing = _may_pass(crash) or (fault is not None and fault.action == "restart")
            report.number(passing=OF_ALL_RANKS if getattr(crash, "of_all_ranks", False) else int(passing))
            report.last_words(_lines_of(device_faults.first_error(crash), fault), CRASHED)
            code = CRASHED
    if (pools := sys.modules.get("lamplighter.procs.pool")) is not None:  # not loaded for this: most have none
        pools.Apart.close_all()
    report.leave(code)  # at once: nothing is buffered, and torch takes a second to unload itself
    return code


def _hear_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: str | None = None,
) -> None:
    """What a library warns of is kept as an event: no person can act on it. What their own code warns of is printed."""
    if "site-packages" in filename or "dist-packages" in filename or filename.startswith(sys.base_prefix):
        report.event("library_warning", text=str(message), category=category.__name__, file=filename, line=lineno)
    else:
        os.write(2, warnings.formatwarning(message, category, filename, lineno, line).encode("utf-8", "replace"))


def _child_part(verb: str) -> Callable[[RunDir, dict[str, Any]], int]:
    """train_child of train.py for `train`, stats_child of data.py for `data-stats`."""
    module, _, second = verb.partition("-")
    commands = import_module(f"lamplighter.commands.{module}")
    part: Callable[[RunDir, dict[str, Any]], int] = getattr(commands, f"{second or module}_child")
    return part


def _last_words(error: LampError) -> int:
    report.last_words(error.lines(), error.code, error.cause, f"{error.what}: {error.why}", error.next)
    return error.code


def _may_pass(crash: BaseException) -> bool:
    """An error of a network or a disk, which a second try may not meet again; a file that is not there stays away."""
    lasting = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)
    return isinstance(crash, OSError) and not isinstance(crash, lasting)


def _lines_of(crash: BaseException, fault: Fault | None = None) -> list[str]:
    if isinstance(crash, MemoryError):
        return ["error: out of memory", "next:  a smaller train.micro_batch, data.seq_len or model"]
    where = traceback.extract_tb(crash.__traceback__)[-1]
    if fault is not None:  # torch adds lines of general advice to its sentence: they are in the traceback
        said = str(crash).splitlines()[0] if str(crash) else ""
        return [
            f"error: {type(crash).__name__}: {said}",
            f"why:   {fault.why}; raised at {where.filename}:{where.lineno} in {where.name}",
            f"next:  {fault.advice}",
        ]
    return [
        f"error: {type(crash).__name__}: {crash}",
        f"why:   raised at {where.filename}:{where.lineno} in {where.name}",
    ]


if __name__ == "__main__":
    sys.exit(main())
