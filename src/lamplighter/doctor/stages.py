"""The rounds: which probes there are, and in which order they are made.

In:  names from the command line.
Out: the stages, from the machine to the model; those of a run only where its settings could be read.
"""

from __future__ import annotations

import difflib

from lamplighter.doctor import collectives, disk, environment, limits, loading, model, settings, stale, text
from lamplighter.doctor.probe import Stage
from lamplighter.errors import UsageError

MACHINE = (*environment.STAGES, *limits.STAGES, *stale.STAGES)
RUN = (
    *settings.STAGES,
    *disk.STAGES,
    *text.STAGES,
    *loading.STAGES,
    *model.STAGES,
)
RANKS = collectives.STAGES
ALL: tuple[Stage, ...] = (*MACHINE, *RUN, *RANKS)


def choose(only: list[str], readable: bool) -> tuple[Stage, ...]:
    """All, or those whose name holds one of the words; without readable settings those of the machine alone."""
    for word in only:
        if not any(_fits(stage, word) for stage in ALL):
            raise _nothing_like(word)
    stages = ALL if readable else (*MACHINE, *RANKS)
    return tuple(stage for stage in stages if not only or any(_fits(stage, word) for word in only))


def _fits(stage: Stage, word: str) -> bool:
    return word.lower().strip() in stage.name.lower()


def _nothing_like(word: str) -> UsageError:
    names = [stage.name for stage in ALL]
    near = difflib.get_close_matches(word, sorted({part for name in names for part in name.split()}), 1, 0.5)
    why = f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
    return UsageError(f"no probe is called {word}", why, "lamp doctor --only environment collectives")
