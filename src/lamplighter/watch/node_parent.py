"""The parent of a node beside node 0: it starts and ends ranks here as the parent of node 0 says, and tells it all that it sees.

In:  the link to node 0's parent (meeting.py), a small folder of its own for slots, events and output.
Out: processes of ranks; four times a second their looks, slots and new lines over the link. The exit code of the run. Where node 0
     is gone nothing can go on here: the ranks are ended, and what to run is said.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lamplighter.errors import CHILD_LOST, LEFT_AT_ONCE
from lamplighter.procs import prctl, signals, stacks
from lamplighter.rundir import RunDir, Tail
from lamplighter.watch.console import Console
from lamplighter.watch.elsewhere import SILENT_WORDS
from lamplighter.watch.launcher import Launcher
from lamplighter.watch.process_tree import Process, ProcessTree
from lamplighter.watch.status import Status
from lamplighter.watch.wire import LinkLost, Wire

_LOOK_EVERY_S = 0.25
_END_S = 10.0
_SILENT_S = 3.0


@dataclass
class NodeParent:
    """What a node needs to know of its run."""

    run: RunDir  # the node's own folder
    launcher: Launcher
    wire: Wire
    console: Console
    node: int
    first_host: str  # of node 0
    resume_command: str
    cache: str  # folder of token caches and tokenizers on this machine
    whole: str = ""  # the folder of the run itself, where this node sees it
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)  # by node 0's number
    rank_of: dict[int, int] = field(default_factory=dict)  # by the same
    told_end: set[int] = field(default_factory=set)
    interrupts: int = 0
    signalled: str = ""

    def serve(self) -> int:
        """Until the run is over; the exit code."""
        self.tree = ProcessTree((), self.run.slots)
        self.events = {rank: Tail(path, from_end=True) for rank, path in _event_files(self.run)}  # of an earlier start
        self.output = Tail(self.run.output, from_end=True)
        self.status = Status(f"{self.run.path.parents[1].name}, node {self.node}", saves=False)
        self.closely, self.silent_said, self.asked_stop = False, False, False
        self.standby_problem = ""
        prctl.adopt_orphans()
        with self._signals():
            try:
                while True:
                    for message in self.wire.messages(_LOOK_EVERY_S):
                        if message["do"] == "end":
                            return self._end(int(message["code"]), str(message["words"]))
                        self._obey(message)
                    self._heed_signals()
                    self._look()
            except LinkLost as error:
                return self._cut_off(str(error))
            finally:
                self._kill(list(self.processes))
                self.launcher.close()

    # ---------------------------------------------------------------- orders

    def _obey(self, message: dict[str, Any]) -> None:
        do = message["do"]
        if do == "beat":
            self.closely = bool(message["closely"])
        elif do == "start":
            self._start(message)
        elif do == "become":
            self.rank_of[message["number"]] = int(message["order"]["rank"])
            order = {**message["order"], "environment": self._own_times(message, message["order"]["environment"])}
            stacks.send(self.run.slot(int(message["rank"])), f"become {json.dumps(order)}")
        elif do == "tell":
            stacks.send(self.run.slot(int(message["rank"])), str(message["text"]))
        elif do == "kill":
            self._kill(message["numbers"])
        elif do == "stacks":
            threading.Thread(target=self._take, args=(message,), name="lamp-stacks", daemon=True).start()
        elif do == "meeting":
            place = self.run.slots / f"meeting-{int(message['attempt'])}"
            fresh = place.with_suffix(".new")
            fresh.write_text(str(message["text"]))
            fresh.rename(place)
        elif do == "standby":
            environment = self._own_times(message, message["environment"])
            self.standby_problem = self.launcher.get_ready(self._request(message), environment) or self.standby_problem
        elif do == "say":
            self.console.say(str(message["text"]), str(message.get("style", "")))

    def _start(self, message: dict[str, Any]) -> None:
        rank, number = int(message["rank"]), int(message["number"])
        environment = self._own_times(message, message["environment"])
        try:
            process = self.launcher.place(rank, self._request(message), environment)
        except OSError as error:
            self.console.say(f"rank {rank} cannot be started here: {error}", "bold red")
            self.wire.send("started", number=number, pid=0)
            return
        self.processes[number], self.rank_of[number] = process, rank
        own = {
            one.pid: self.run.slot(self.rank_of[which]) for which, one in self.processes.items() if one.poll() is None
        }
        self.tree.close()
        self.tree = ProcessTree(tuple(own), self.run.slots, own)
        self.wire.send("started", number=number, pid=process.pid)

    def _request(self, message: dict[str, Any]) -> dict[str, Any]:
        all_see = "LAMP_SHARED" in message["environment"]
        return {**message["request"], "cache": self.cache, **({"whole": self.whole} if all_see else {})}

    def _own_times(self, message: dict[str, Any], environment: dict[str, str]) -> dict[str, str]:
        """Moments of node 0's clock, in ours."""
        began = float(environment["LAMP_STARTED_MONOTONIC"]) - float(message["now"]) + time.monotonic()
        return {**environment, "LAMP_STARTED_MONOTONIC": str(began)}

    def _kill(self, numbers: list[int]) -> None:
        for number in numbers:
            if (process := self.processes.get(number)) is not None:
                with contextlib.suppress(ProcessLookupError):  # nobody is left in that session
                    os.killpg(process.pid, signal.SIGKILL)

    def _take(self, message: dict[str, Any]) -> None:
        """In a thread of its own: py-spy may take its two seconds."""
        found = {}
        for pid in map(int, message["pids"]):
            if pid in self.tree.parents or pid in self.tree.own:
                taken = stacks.take(self.tree.slot_path(pid), pid, ours=pid in self.tree.own)
                found[str(pid)] = asdict(taken) if taken is not None else None
        with contextlib.suppress(LinkLost):  # the loop finds it too
            self.wire.send("stacks", number=message["number"], found=found)

    # ---------------------------------------------------------------- telling

    def _look(self) -> None:
        for number, process in self.processes.items():
            if number not in self.told_end and (code := process.poll()) is not None:
                self._tell_processes()  # its last words come before its end
                self.told_end.add(number)
                self.wire.send("ended", number=number, code=code)
        self._tell_processes()
        self._say_silence()
        self.console.show(self.status)

    def _tell_processes(self) -> None:
        if time.monotonic() - self.wire.heard_at > _SILENT_S:  # what nobody takes must not pile up
            self.wire.send("beat")
            return
        snapshot = self.tree.look(self.closely) if self.tree.roots else None
        seen = snapshot.processes if snapshot is not None else ()
        ranks = [one for one in seen if one.pid in self.tree.own]
        if ranks:
            self.status.slot, self.status.process = ranks[0].slot, ranks[0].look
            self.status.stalled_s = snapshot.stalled_s if snapshot is not None else 0.0
        standby = self.launcher.standby_is_ready
        told = [self._told(one) for one in seen]
        self.wire.send("look", now_ns=time.monotonic_ns(), processes=told, events=self._fresh_events(),
                       output=self.output.lines()[:200], standby=standby, standby_failed=self.standby_problem)  # fmt: skip

    def _told(self, one: Process) -> list[Any]:
        return [asdict(one.look), one.slot.told() if one.slot else None, one.ppid, one.moved_bytes]

    def _fresh_events(self) -> list[tuple[int, list[str]]]:
        for rank in set(self.rank_of.values()) - self.events.keys():
            self.events[rank] = Tail(self.run.rank_events(rank))
        return [(rank, lines) for rank, tail in self.events.items() if (lines := tail.lines())]

    def _say_silence(self) -> None:
        """Node 0's parent says nothing: while its machine answers, that is no reason to end anything."""
        silent_s = time.monotonic() - self.wire.heard_at
        if silent_s > _SILENT_S and not self.silent_said:
            self.silent_said = True
            self.console.say(
                f"the parent on node 0 ({self.first_host}) has said nothing for {silent_s:.1f} s: {SILENT_WORDS}; while its machine"
                " answers, the ranks here go on", "yellow",
            )  # fmt: skip
        elif silent_s < _SILENT_S and self.silent_said:
            self.silent_said = False
            self.console.say(f"the parent on node 0 ({self.first_host}) speaks again")

    # ---------------------------------------------------------------- ends

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """A stop is asked of node 0, which has all ranks save and leave together; a second Ctrl+C leaves at once."""
        caught = {signal.SIGINT, signal.SIGTERM, *signals.requests_to_stop()}
        before: dict[int, Callable[[int, Any], Any] | int | None] = {
            which: signal.signal(which, self._on_signal) for which in caught
        }
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)

    def _on_signal(self, which: int, _frame: object) -> None:
        self.interrupts += which == signal.SIGINT
        self.signalled = self.signalled or ("Ctrl+C" if which == signal.SIGINT else signals.signal_name(which))

    def _heed_signals(self) -> None:
        if self.signalled and not self.asked_stop:
            self.asked_stop = True
            self.console.say(f"stopping ({self.signalled}): node 0 is asked to save and to end the run", "bold")
            self.wire.send("stop", reason=f"{self.signalled} on {os.uname().nodename}")
        if self.interrupts > 1:
            raise LinkLost("left at once (second Ctrl+C)")

    def _end(self, code: int, words: str) -> int:
        """The word of node 0: what its ranks here have not ended by themselves is ended."""
        deadline = time.monotonic() + _END_S
        self._kill([number for number in self.processes if number not in self.told_end])
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel: it ends when that lets it
                process.wait(max(0.1, deadline - time.monotonic()))
        self.console.say(words, "bold green" if code == 0 else "bold")
        return code

    def _cut_off(self, why: str) -> int:
        if self.interrupts > 1:
            self.console.say("left at once (second Ctrl+C); the other nodes go on without this one", "bold")
            return LEFT_AT_ONCE
        self.console.say(
            f"node 0 ({self.first_host}) is lost: {why}. The ranks of this node are ended; what was saved is there",
            "bold red",
        )
        self.console.say(f"next, on every node: {self.resume_command}", "bold")
        return CHILD_LOST


def _event_files(run: RunDir) -> list[tuple[int, Path]]:
    found = [
        (path.name.removeprefix("events.rank").removesuffix(".jsonl"), path)
        for path in run.path.glob("events.rank*.jsonl")
    ]
    return [(int(rank), path) for rank, path in found if rank.isdecimal()]
