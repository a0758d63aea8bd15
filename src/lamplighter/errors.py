"""What can go wrong for a user, as one tree: each error says what happened, why, and what to try.

In:  three short sentences from the room that noticed.
Out: an exit code and three lines on the screen; never a traceback.
"""

from __future__ import annotations

DONE = 0
CRASHED = 1
FAULTS_FOUND = 79  # the doctor's child to its parent, so that it is not taken for a crash; the command exits with 1
STUCK = 70
CHILD_LOST = 71
STOPPED_EARLY = 75
LEFT_AT_ONCE = 130


class LampError(Exception):
    """A mistake or a fault that has a name. `code` is the exit code of the command."""

    code = CRASHED
    cause = ""  # the name of the fault in a verdict, where it has one

    def __init__(self, what: str, why: str = "", next: str = "", cause: str = "") -> None:
        super().__init__(what)
        self.what, self.why, self.next = what, why, next
        self.cause = cause or self.cause

    def __reduce__(self) -> tuple[type[LampError], tuple[str, str, str, str]]:
        return type(self), (self.what, self.why, self.next, self.cause)

    def lines(self) -> list[str]:
        """The three lines that a person reads."""
        from lamplighter.safe_text import safe  # most commands end without an error

        named = (("error", self.what), ("why", self.why), ("next", self.next))
        return [safe(f"{name + ':':<7}{text}") for name, text in named if text]


class UsageError(LampError):
    """The command line cannot be understood."""

    code = 2


class BadData(LampError):
    """Input was found, but it is empty, binary or corrupt."""

    code = 65
    cause = "bad_data"


class InputMissing(LampError):
    """A file, folder or run that was asked for does not exist."""

    code = 66


class Unreachable(InputMissing):
    """A server refused, or there was no way to it."""

    code = 67


class AlreadyRunning(LampError):
    """Somebody else holds the run; the message says who and where."""

    code = 69


class ChildLost(LampError):
    """The training process ended without a word."""

    code = CHILD_LOST


class CannotWrite(LampError):
    """The disk is full or the folder is not writable."""

    code = 73
    cause = "disk_full"


class NoCheckpoint(LampError):
    """Nothing valid to resume from or to load."""

    code = 74
    cause = "bad_checkpoint"


class RanksDiffer(LampError):
    """Ranks call different collectives: a bug in the code, at which each of them would wait for ever."""

    code = STUCK


class StoppedEarly(LampError):
    """Stopped by request, time or budget; all saved; resume to go on."""

    code = STOPPED_EARLY


class Diverged(LampError):
    """The numbers are no longer finite; the last good checkpoint is kept."""

    code = 76


class RefusedByPlan(LampError):
    """The arithmetic says that the run cannot succeed."""

    code = 77


class BadConfig(LampError):
    """A key, type or value in the configuration is wrong."""

    code = 78
