"""Signals: their names, and which of them ask a process of ours to save and end.

In:  signal numbers.
Out: words for people; the set that a run takes for a request to stop.
"""

from __future__ import annotations

import os
import signal
import threading

from lamplighter.errors import LEFT_AT_ONCE

_NAMES = {int(number): number.name for number in signal.Signals}
# Left as they are: those that cannot be caught, that stop or continue a process, that end nothing by default, that tell of
# a fault of this very process, and SIGPIPE, which Python makes an exception.
_NOT_A_REQUEST = "KILL STOP TSTP TTIN TTOU CONT CHLD URG WINCH SEGV BUS FPE ILL ABRT TRAP SYS PIPE XFSZ"
_OF_ITSELF = "ALRM VTALRM PROF POLL IO STKFLT"


def signal_name(number: int) -> str:
    """SIGKILL; a real-time signal has no name of its own."""
    return _NAMES.get(number, "a real-time signal")


def requests_to_stop() -> set[int]:
    """Every signal that would end this process and can be caught; what is ignored already (nohup) stays so.

    Ctrl+C, TERM and HUP are only the common ones: schedulers announce the end of a lease by USR1 or USR2, a power supply
    by PWR, a limit by XCPU. Work would be lost by the default action of each of them.
    """
    others = {getattr(signal, f"SIG{name}", None) for name in _NOT_A_REQUEST.split()}
    catchable = signal.valid_signals() - others
    return {int(number) for number in catchable if signal.getsignal(number) is not signal.SIG_IGN}


def requests_from_outside() -> set[int]:
    """The same without timers and real-time signals, which the code that runs in a process may send to itself."""
    own = {getattr(signal, f"SIG{name}", None) for name in _OF_ITSELF.split()}
    return {number for number in requests_to_stop() - own if number < getattr(signal, "SIGRTMIN", 1 << 10)}


def left_by_ctrl_c() -> threading.Event:
    """Set by Ctrl+C from here on; the second one leaves at once.

    Not by an exception: raised in the middle of an import it can make a library panic, and the command end as if killed.
    """
    left = threading.Event()

    def leave(_number: int, _frame: object) -> None:
        if left.is_set():
            os._exit(LEFT_AT_ONCE)
        left.set()

    signal.signal(signal.SIGINT, leave)
    return left
