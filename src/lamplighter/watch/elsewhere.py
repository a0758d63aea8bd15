"""Ranks on other machines, as the parent of node 0 sees them: processes like its own, over the link to the parent of their node.

In:  the connections of the other nodes (meeting.py), what their parents tell (node_parent.py).
Out: RemoteNode with RemoteProcesses that can be started, asked, killed and waited for; looks, slots and stacks in the terms of
     this machine: moments by its clock, process numbers that cannot be mistaken for its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lamplighter.errors import CHILD_LOST
from lamplighter.procs.stacks import Stacks
from lamplighter.slot import REALS, TEXT_BYTES, Slot
from lamplighter.watch import evidence
from lamplighter.watch.process_tree import Process
from lamplighter.watch.wire import BEAT_S, UNREACHABLE_S, LinkLost, Wire

_PIDS = 1 << 32
_STARTED_S = 10.0
_ENDED_S = 20.0
_STACKS_S = 4.0
_SILENT_S = 3.0
SILENT_WORDS = (
    f"that process is stopped or gets no core, or its machine is gone, which is known after {UNREACHABLE_S:.0f} s"
)
_LISTED_LINES = 2000  # of events or output that wait to be read here
_MOMENTS = ("hello_ns", "tick_ns", "step_ns", "step_first_ns", "phase_since_ns", "span_since_ns", "fetch_since_ns",
            "item_since_ns", "coll_since_ns", "compile_since_ns", "bar_ns", "gc_since_ns", "left_ns")  # fmt: skip


class RemotePid(int):
    """A process of another machine: a number of its own here, shown as it is known there."""

    host: str

    def __new__(cls, value: int, host: str = "") -> RemotePid:
        made = super().__new__(cls, value)
        made.host = host
        return made

    @classmethod
    def of(cls, node: int, pid: int, host: str) -> RemotePid:
        return cls(node * _PIDS + pid, host)

    @property
    def node(self) -> int:
        """Which node its machine is."""
        return int(self) // _PIDS

    @property
    def there(self) -> int:
        """Its number on its own machine."""
        return int(self) % _PIDS

    def __str__(self) -> str:
        return f"{self.there} on {self.host}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


def shown_pids(fields: Mapping[str, Any]) -> dict[str, Any]:
    """For a record: the number as it is known there, and where that is."""
    found = dict(fields)
    if isinstance(pid := found.get("pid"), RemotePid):
        found |= {"pid": pid.there, "host": pid.host}
    return found


class RemoteProcess:
    """A rank on another node, as subprocess.Popen has its own."""

    def __init__(self, node: RemoteNode, number: int, pid: int) -> None:
        self.node, self.number = node, number
        self.pid = RemotePid.of(node.number, pid, node.host)
        self.returncode: int | None = None
        self.ended = threading.Event()
        self.signal_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
            os.eventfd_write(self.signal_fd, 1)
            self.ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Without a limit, for so long as ending a killed process takes: a parent that does not tell of it is of no use."""
        if not self.ended.wait(_ENDED_S if timeout is None else timeout):
            if timeout is not None:
                raise subprocess.TimeoutExpired("a rank of another node", timeout)
            self.node.lose(f"its parent has not told of the end of a rank within {_ENDED_S:.0f} s")
        assert self.returncode is not None
        return self.returncode

    def open_end(self) -> int:
        """A descriptor that becomes readable when it has ended; whoever asks closes it."""
        return os.dup(self.signal_fd)


@dataclass
class RemoteNode:
    """One other node and its parent."""

    number: int
    host: str
    ranks: int  # that it has room for
    wire: Wire
    shared: bool = False  # it sees the folder of the run
    place: str = ""  # its address, also when it is gone
    lost: str = ""  # why it cannot be reached any more
    processes: dict[int, RemoteProcess] = field(default_factory=dict)  # by a number of ours
    events: list[tuple[int, str]] = field(default_factory=list)  # rank and line, not read here yet
    output: list[str] = field(default_factory=list)
    wants_stop: str = ""  # why somebody there wants the run to end
    standby_ready: bool = False
    standby_failed: str = ""
    seen: tuple[Process, ...] = ()
    offset_ns: int | None = None  # its clock is so much behind ours
    closely: bool = False
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    hearing: threading.Thread | None = None

    @property
    def words(self) -> str:
        return f"node {self.number} ({self.host}, {self.place})"

    def begin(self) -> None:
        """Hear what it tells, from now on."""
        self.place = self.wire.address
        self.hearing = threading.Thread(target=self._hear_all, name=f"lamp-node{self.number}", daemon=True)
        self.hearing.start()

    @property
    def silent_s(self) -> float:
        """Since its parent has said anything; where its machine still answers, that process is stopped or starved."""
        return 0.0 if self.lost else time.monotonic() - self.wire.heard_at

    @property
    def last_word_s(self) -> float:
        """How long ago it was heard last."""
        return time.monotonic() - self.wire.heard_at

    # ---------------------------------------------------------------- asking

    def tell(self, do: str, **fields: Any) -> bool:
        """False where it cannot be reached."""
        if self.lost:
            return False
        try:
            self.wire.send(do, now=time.monotonic(), **fields)
        except LinkLost as error:
            self.lose(str(error))
            return False
        return True

    def place_rank(self, order: Mapping[str, Any]) -> RemoteProcess:
        """Start a process as this rank there, or have the one that stands by take its place."""
        number = time.monotonic_ns()
        self.standby_ready = self.standby_ready and not order.get("standby")
        self.tell("start", number=number, **order)
        answer = self._answer(number, _STARTED_S)
        with self.changed:
            process = self.processes.get(number)
            if process is None:
                process = self.processes[number] = RemoteProcess(self, number, 0)
                if answer is None and not self.lost:
                    self.lost = f"its parent has not started a rank within {_STARTED_S:.0f} s"
                process.end(CHILD_LOST)
        return process

    def take(self, pids: Sequence[int]) -> dict[int, Stacks | None]:
        """The stacks of these processes."""
        number = time.monotonic_ns()
        wanted = {pid.there: pid for pid in pids if isinstance(pid, RemotePid)}
        if not self.tell("stacks", number=number, pids=list(wanted)):
            return {}
        found = (self._answer(number, _STACKS_S) or {}).get("found") or {}
        taken: dict[int, Stacks | None] = dict.fromkeys(wanted.values())
        for there, told in found.items():
            if told is not None and (pid := wanted.get(int(there))) is not None:
                stacks = evidence.read_stacks(told)
                taken[pid] = replace(stacks, at=stacks.at + (self.offset_ns or 0) / 1e9)
        return taken

    def _answer(self, number: int, deadline_s: float) -> dict[str, Any] | None:
        with self.changed:
            self.changed.wait_for(lambda: number in self.answers or bool(self.lost), deadline_s)
            return self.answers.pop(number, None)

    def kill(self, numbers: Sequence[int]) -> None:
        self.tell("kill", numbers=list(numbers))

    # ---------------------------------------------------------------- hearing

    def _hear_all(self) -> None:
        beat_at = 0.0
        while not self.lost:
            try:
                for message in self.wire.messages(BEAT_S / 2):
                    self._hear(message)
            except LinkLost as error:
                self.lose(str(error))
            except (KeyError, TypeError, ValueError, AttributeError) as error:  # another version, or damage
                self.lose(f"its parent has said what makes no sense ({type(error).__name__}: {error})")
            if time.monotonic() - beat_at > BEAT_S:
                beat_at = time.monotonic()
                self.tell("beat", closely=self.closely)

    def _hear(self, message: dict[str, Any]) -> None:
        do = message["do"]
        with self.changed:
            if do == "look":
                self._learn(message)
            elif do == "started":
                if message["pid"]:
                    process = RemoteProcess(self, message["number"], int(message["pid"]))
                    self.processes[process.number] = process
                self.answers[message["number"]] = message
            elif do == "ended":
                if (ended := self.processes.get(message["number"])) is not None:
                    ended.end(int(message["code"]))
            elif do == "stacks":
                self.answers[message["number"]] = message
            elif do == "stop":  # beats need no answer
                self.wants_stop = str(message["reason"])[:200]
            self.changed.notify_all()

    def _learn(self, message: dict[str, Any]) -> None:
        """One look of its parent; the clock is that of the quickest message so far."""
        offset = time.monotonic_ns() - int(message["now_ns"])
        if self.offset_ns is None or offset < self.offset_ns:
            self.offset_ns = offset
        self.seen = tuple(self._process(*one) for one in message["processes"])
        for rank, lines in message["events"]:
            self.events += [(int(rank), str(text)) for text in lines]
        self.output += map(str, message["output"])
        del self.events[:-_LISTED_LINES], self.output[:-_LISTED_LINES]
        self.standby_ready = bool(message["standby"])
        self.standby_failed = str(message["standby_failed"])

    def _process(self, look: dict[str, Any], told: dict[str, Any] | None, ppid: int, moved: int) -> Process:
        pid = RemotePid.of(self.number, int(look["pid"]), self.host)
        seen = evidence.read_process_look({**look, "pid": pid})
        parent = RemotePid.of(self.number, ppid, self.host) if ppid else 0
        return Process(seen, slot_of(told, self.offset_ns or 0, pid), parent, moved)

    # ---------------------------------------------------------------- the end

    def lose(self, why: str) -> None:
        """It cannot be reached any more: nothing that it holds can."""
        with self.changed:
            if self.lost:
                return
            self.lost, self.seen = why, ()
            for process in self.processes.values():
                process.end(CHILD_LOST)
            self.changed.notify_all()

    def close(self, code: int, words: str) -> None:
        """The run is over: its parent ends with the same code."""
        self.tell("end", code=code, words=words)
        self.lost = self.lost or "the run is over"
        if self.hearing is not None:
            self.hearing.join(2.0)
        self.wire.close()


def slot_of(told: dict[str, Any] | None, offset_ns: int, pid: int) -> Slot | None:
    """A slot as another machine has told it, in moments of our clock."""
    if told is None:
        return None
    values: dict[str, Any] = {}
    for name, value in told.items():
        if name in TEXT_BYTES:
            values[name] = str(value)
        elif name in REALS:
            values[name] = math.nan if value is None else float(value)
        elif name in Slot.__annotations__:
            values[name] = int(value)
            if name in _MOMENTS and value:
                values[name] += offset_ns
    return Slot(**{**values, "pid": pid})


@dataclass
class Elsewhere:
    """All other nodes of a run."""

    nodes: list[RemoteNode] = field(default_factory=list)
    said: set[str] = field(default_factory=set)

    def look(self, closely: bool) -> list[Process]:
        """All processes of other machines, as their parents saw them last."""
        found: list[Process] = []
        for node in self.nodes:
            node.closely = closely
            found += node.seen
        return found

    def take(self, pids: Sequence[int]) -> dict[int, Stacks | None]:
        """Their stacks, of all nodes at the same time."""
        taken: dict[int, Stacks | None] = {}
        wanted = {node.number: [pid for pid in pids if int(pid) // _PIDS == node.number] for node in self.nodes}

        def ask(node: RemoteNode) -> None:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # of another version: they are not known
                taken.update(node.take(wanted[node.number]))

        asking = [threading.Thread(target=ask, args=(node,)) for node in self.nodes if wanted[node.number]]
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        return taken

    def slot(self, rank: int) -> Slot | None:
        """What the process of this rank said last."""
        for node in self.nodes:
            for process in node.seen:
                if process.rank == rank and process.slot is not None and process.worker < 0:
                    return process.slot
        return None

    def drain(self) -> tuple[list[tuple[int, str]], list[tuple[str, str]]]:
        """Lines of events by rank, and of output by host, that have come since."""
        events: list[tuple[int, str]] = []
        output: list[tuple[str, str]] = []
        for node in self.nodes:
            with node.changed:
                events += node.events
                output += [(node.host, text) for text in node.output]
                node.events, node.output = [], []
        return events, output

    def wants_stop(self) -> str:
        return next((node.wants_stop for node in self.nodes if node.wants_stop), "")

    def records(self) -> list[dict[str, Any]]:
        """For status.json: each node, and whether it is there."""
        return [
            {
                "node": node.number,
                "host": node.host,
                "address": node.place,
                "ranks": node.ranks,
                "state": "lost" if node.lost else "silent" if node.silent_s > _SILENT_S else "",
                "why": node.lost,
            }
            for node in self.nodes
        ]

    def fresh_words(self) -> list[str]:
        """What is to be said of nodes, once each: one whose parent says nothing; whether its machine answers is not known yet."""
        words = []
        for node in self.nodes:
            silent = not node.lost and node.silent_s > _SILENT_S
            if silent and node.words not in self.said:
                self.said.add(node.words)
                words.append(
                    f"{node.words}: its parent has said nothing for {node.silent_s:.1f} s: {SILENT_WORDS}; while its machine answers,"
                    " its ranks go on, unseen"
                )
            elif not silent and node.words in self.said and not node.lost:
                self.said.discard(node.words)
                words.append(f"{node.words}: its parent speaks again")
        return words
