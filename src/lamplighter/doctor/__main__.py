"""python -m lamplighter.doctor REQUEST: one probe, in a process of its own.

In:  which probe, the run's settings, and a descriptor to answer on.
Out: one JSON line for each finding, for what it is at, and for how it ended; its stack on SIGURG.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_PTRACER = 1, 0x59616D61


def main() -> int:
    request = json.loads(sys.argv[1])
    dump = open(request["stack"], "wb")
    faulthandler.register(signal.SIGURG, file=dump, all_threads=False, chain=False)
    _belong_to(request["parent"])
    os.set_inheritable(request["fd"], False)

    def answer(**record: Any) -> None:
        data = json.dumps(record, default=str).encode() + b"\n"
        while data:
            data = data[os.write(request["fd"], data) :]

    try:
        from lamplighter.config import load_dump
        from lamplighter.doctor.probe import Finding, Patient, Probe
        from lamplighter.errors import LampError

        patient = Patient(
            load_dump(Path(request["config"])),
            request["preset"],
            Path(request["runs_dir"]),
            Path(request["scratch"]),
            lambda text: answer(now=text),
        )
        module, _, name = request["function"].partition(":")
        probe: Probe = getattr(importlib.import_module(module), name)
        try:
            for finding in probe(patient):
                answer(finding=asdict(finding))
        except LampError as error:
            answer(finding=asdict(Finding("fault", error.what, error.why, error.next, error.cause)))
    except BaseException as death:  # noqa: BLE001  SystemExit too: it is told, and the traceback is printed
        from lamplighter.doctor.user_frame import culprit, frames_of

        traceback.print_exc()
        answer(died=f"{type(death).__name__}: {death}", culprit=culprit(frames_of(death.__traceback__)))
    else:
        answer(done=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # at once: torch takes a second to unload itself, and a thread that was left must not hold us


def _belong_to(parent: int) -> None:
    """Die with the doctor, be the first that the kernel takes where memory ends, and let our stack be read."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died before we could ask
    libc.prctl(PR_SET_PTRACER, parent, 0, 0, 0)
    with contextlib.suppress(OSError):  # not every container lets it be set
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main())
