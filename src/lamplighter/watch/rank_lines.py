"""The ranks of a run in words: a line for each, the slowest marked.

In:  the records of `ranks` in a status.json (rank_series.py writes them).
Out: lines for `lamp watch RUN`, `lamp why` and `lamp runs`; which rank the others wait for, and why.
"""

from __future__ import annotations

from typing import Any

from lamplighter import read_back
from lamplighter.rundir import number
from lamplighter.safe_text import clean

_WAITED_S = 1.0  # that others are in a collective which one has not come to
_LESS_SHARE = 0.15  # of the time: so much less in collectives than any other is no chance
MOST_LINES = 16
SLOWEST = "  <- slowest: "


def ranks_of(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that a status.json has; none of a run with one process."""
    found = status.get("ranks")
    return found if isinstance(found, list) and read_back.RANKS.fits(found) else []


def slowest(ranks: list[dict[str, Any]]) -> tuple[int, str] | None:
    """The rank that the others wait for, and how that is seen; none while they are about even. One that is done is waited for by nobody."""
    ranks = [one for one in ranks if one.get("state") != "ended"]
    if not ranks:
        return None
    for state, words in (("gone", "it is gone"), ("stopped", "stopped by a signal; go on with: kill -CONT {pid}")):
        if found := next((one for one in ranks if one.get("state") == state), None):
            return found["rank"], words.format(pid=found.get("pid"))
    waiting = [one for one in ranks if number(one.get("waiting_s")) > _WAITED_S]
    behind = [one for one in ranks if one not in waiting]
    if waiting and behind:
        last = min(behind, key=lambda one: (one.get("collectives") or 0, one["rank"]))
        longest = max(number(one.get("waiting_s")) for one in waiting)
        return last["rank"], f"{len(waiting)} of {len(ranks)} wait for it, for {longest:.1f} s"
    least, *others = sorted(ranks, key=lambda one: number(one.get("in_collective")))
    share = [number(one.get("in_collective")) for one in (least, *others)]
    if others and share[1] - share[0] > _LESS_SHARE:
        return least["rank"], f"it waits {share[0]:.0%} of the time, every other at least {share[1]:.0%}"
    return None


def rank_lines(ranks: list[dict[str, Any]], most: int = MOST_LINES) -> list[str]:
    """Where there are more than fit, the slowest and the first ones."""
    if not ranks:
        return []
    found = slowest(ranks)
    shown = sorted(ranks, key=lambda one: one["rank"])[: max(1, most)]
    if found and all(one["rank"] != found[0] for one in shown):
        shown[-1] = next(one for one in ranks if one["rank"] == found[0])
    lines = [_line(one, found[1] if found and one["rank"] == found[0] else "") for one in shown]
    more = len(ranks) - len(shown)
    return [*lines, *([f"... and {more} more ranks, in status.json"] if more else [])]


def _line(rank: dict[str, Any], why: str) -> str:
    inside = f" > {clean(rank['span'])}" if rank.get("span") else ""
    speed = f"{number(rank.get('tokens_per_s')):,.0f} tok/s computing, {number(rank.get('in_collective')):.0%} waiting"
    node = f"node {rank['node']}, " if rank.get("node") is not None else ""  # several may share a host's name
    where = (
        f"{number(rank.get('ram_gb')):.2f} GB  {node}{clean(str(rank.get('host') or '?'))}, process {rank.get('pid')}"
    )
    mark = f"{SLOWEST}{why}" if why else ""
    phase = clean(rank.get("phase") or "start")
    return f"rank {rank['rank']:<3} step {rank.get('step') or 0}{mark}  {phase}{inside}  {speed}  {where}"
