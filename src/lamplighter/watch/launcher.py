"""Starts the processes of a run: one per rank, and one that stands by, ready to take the place of one that dies.

In:  a run folder, what the processes shall do, their environment, the other nodes of the run.
Out: processes of `python -m lamplighter.commands.child_main`, by rank. Where one of several has died, the others keep their
     memory: each is told its rank in a world that is whole again by the standby, or smaller.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lamplighter.procs import stacks
from lamplighter.report import STANDBY
from lamplighter.rundir import RunDir, open_lines
from lamplighter.slot import Slot, read_slot
from lamplighter.watch.elsewhere import Elsewhere, RemoteNode, RemoteProcess

_SPIN = "3000"  # turns of waiting before a thread sleeps: chosen by measurement, decision 005
_ALLOCATOR, _PRODUCTS = "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG"
_MOST_FAILURES = 2  # of a standby that does not get ready


@dataclass
class Launcher:
    """The processes of one run."""

    run: RunDir
    verb: str
    ranks: int  # that are wanted
    lock_fd: int
    result_fd: int
    stdin: int
    elastic: bool  # ranks can go on without one that died
    memory: list[int] = field(default_factory=list)  # descriptors of the child's state, which outlives it
    processes: list[subprocess.Popen[bytes] | RemoteProcess] = field(default_factory=list)  # by rank
    standby: Standby | RemoteStandby | None = None
    failures: int = 0  # of standbys
    elsewhere: Elsewhere = field(default_factory=Elsewhere)  # the other nodes
    left: set[int] = field(default_factory=set)  # nodes that are lost, and that the ranks know of
    all_again: bool = False  # none of the ranks that are left holds a state
    met: int = 0  # the attempt whose meeting the other nodes know of

    @property
    def ranks_here(self) -> int:
        """That this machine has room for."""
        return self.ranks - sum(node.ranks for node in self.elsewhere.nodes if node.number not in self.left)

    @property
    def survivors(self) -> list[int]:
        """The ranks that are still there."""
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def start(self, request: Mapping[str, Any], attempt: int, told: Mapping[str, str]) -> str:
        """All ranks of this attempt; how it was done, in words, where processes go on that were there."""
        wanted = self.ranks
        self._leave_lost_nodes()
        alive, ready = self.survivors, self.standby_is_ready
        here = [rank for rank in alive if not isinstance(self.processes[rank], RemoteProcess)]
        spare_here = ready and not isinstance(self.standby, RemoteStandby)
        nobody = not alive or self.all_again
        seats = None if nobody else seats_of(alive, here, self.ranks, ready, spare_here)
        self.all_again = False
        if seats is None:
            self.kill(alive)
            return self._start_all(request, attempt, told)
        world, free = len(seats), [rank for rank, before in enumerate(seats) if before is None]
        taken: dict[int, subprocess.Popen[bytes] | RemoteProcess] = {}
        for rank, before in enumerate(seats):
            if before is not None:
                environment = self._of_rank(rank, world, attempt, told)
                order = {"rank": rank, "world": world, "attempt": attempt, "environment": environment}
                self._tell_to_become(before, order)
                taken[rank] = self.processes[before]
        for rank in free:
            taken[rank] = self._take_over(rank, {**request, "joins": True}, self._of_rank(rank, world, attempt, told))
        self.processes = [taken[rank] for rank in range(world)]
        if free:
            return f"the process that stood by becomes rank {free[0]}; the others keep their state"
        return f"{world} of {wanted} ranks go on at once, with the state that they hold"

    def _start_all(self, request: Mapping[str, Any], attempt: int, told: Mapping[str, str]) -> str:
        """From a checkpoint or from memory: on this node first, then on the others that are there."""
        for stale in self.run.slots.glob(
            "meeting-*"
        ):  # not while a survivor may still look into one: it would wait for it
            stale.unlink(missing_ok=True)
        ready = self.standby_is_ready and not isinstance(self.standby, RemoteStandby)
        places: list[tuple[RemoteNode | None, int]] = [(None, local) for local in range(self.ranks_here)]
        for other in self.elsewhere.nodes:
            places += [(other, local) for local in range(other.ranks) if not other.lost]
        self.processes = []
        for rank, (node, local) in enumerate(places):
            environment = self._of_rank(rank, len(places), attempt, told, local)
            if node is None:
                self.processes.append(self.place(rank, request, environment))
            else:
                self.processes.append(
                    node.place_rank({"rank": rank, "environment": environment, "request": dict(request)})
                )
        return "a process that stood by takes over" if ready else ""

    def place(self, rank: int, request: Mapping[str, Any], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """A new process on this machine for this rank, or the one that stands by."""
        self._make_room(rank)
        if self.standby_is_ready and isinstance(self.standby, Standby):
            standby, self.standby = self.standby, None
            return standby.take_over({"rank": rank, "attempt": int(environment["LAMP_ATTEMPT"]), "environment": dict(environment),
                                      "request": dict(request)}, self.lock_fd)  # fmt: skip
        return self._spawn(request, environment, [self.lock_fd, self.result_fd])

    def _take_over(
        self, rank: int, request: Mapping[str, Any], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes] | RemoteProcess:
        """By the process that stands by, wherever that is."""
        standby = self.standby
        if isinstance(standby, RemoteStandby):
            self.standby = None
            order = {"rank": rank, "environment": dict(environment), "request": dict(request), "standby": True}
            return standby.node.place_rank(order)
        return self.place(rank, request, environment)

    def _make_room(self, rank: int) -> None:
        for stale in self.run.slots.glob(f"rank{rank}.*"):  # of an earlier attempt, or no pipe where one is needed
            stale.unlink(missing_ok=True)
        os.mkfifo(self.run.fifo(rank), 0o600)

    def _spawn(
        self, request: Mapping[str, Any], environment: Mapping[str, str], descriptors: list[int], log: str = ""
    ) -> subprocess.Popen[bytes]:
        output = open_lines(self.run.slots / log if log else self.run.output, mode=0o600)  # whatever it prints
        full = {"folder": str(self.run.path), "result_fd": self.result_fd, "lock_fd": self.lock_fd, **request}
        try:
            return subprocess.Popen(
                # -P: what lies in the current folder (a model folder, say) is not imported in a library's place
                [sys.executable, "-P", "-m", "lamplighter.commands.child_main", self.verb, json.dumps(full)],
                stdin=self.stdin,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=[fd for fd in (*descriptors, *self.memory) if fd >= 0],
                env={
                    **os.environ,
                    **_settings(os.environ),
                    **environment,
                    "LAMP_MEMORY": ",".join(map(str, self.memory)),
                },
            )
        finally:
            os.close(output)

    def _of_rank(
        self, rank: int, world: int, attempt: int, told: Mapping[str, str], local: int | None = None
    ) -> dict[str, str]:
        where = {"LAMP_LOCAL_RANK": str(local)} if local is not None and self.elsewhere.nodes else {}
        return {"LAMP_RANK": str(rank), "LAMP_WORLD": str(world), "LAMP_ATTEMPT": str(attempt), **where, **told}

    # ---------------------------------------------------------------- words to the ranks

    def tell(self, rank: int, text: str) -> None:
        """A line to the listening thread of this rank, wherever it is."""
        process = self.processes[rank]
        if isinstance(process, RemoteProcess):
            process.node.tell("tell", rank=rank, text=text)
        else:
            stacks.send(self.run.slot(rank), text)

    def slot_of(self, rank: int) -> Slot | None:
        """What this rank said last."""
        process = self.processes[rank] if rank < len(self.processes) else None
        return self.elsewhere.slot(rank) if isinstance(process, RemoteProcess) else read_slot(self.run.slot(rank))

    def _tell_to_become(self, rank: int, order: dict[str, Any]) -> None:
        process = self.processes[rank]
        if isinstance(process, RemoteProcess):
            process.node.tell("become", rank=rank, number=process.number, order=order)
        else:
            stacks.send(self.run.slot(rank), f"become {json.dumps(order)}")

    def _leave_lost_nodes(self) -> None:
        """Ranks that wait in a connection to a machine that cannot be reached would wait for a quarter of an hour."""
        for node in self.elsewhere.nodes:
            if node.lost and node.number not in self.left:
                self.left.add(node.number)
                self.ranks -= node.ranks
                for rank in self.survivors:
                    self.tell(rank, f"lost {node.place}")

    def pass_on_meeting(self, attempt: int) -> None:
        """Where rank 0 waits for the others, to the other nodes, once for each attempt."""
        place = self.run.slots / f"meeting-{attempt}"
        if not self.elsewhere.nodes or self.met == attempt or not place.is_file():
            return
        self.met = attempt
        for node in self.elsewhere.nodes:
            node.tell("meeting", attempt=attempt, text=place.read_text())

    # ---------------------------------------------------------------- the process that stands by

    @property
    def standby_is_ready(self) -> bool:
        return self.standby is not None and self.standby.is_ready

    def stand_by(self, request: Mapping[str, Any], attempt: int, told: Mapping[str, str]) -> str:
        """Have one ready: on the node that has lost a rank, else here. What went wrong with the one before, in words."""
        environment = self._of_rank(len(self.processes), self.ranks + 1, attempt, told)
        held = [
            one.node.number if isinstance(one, RemoteProcess) else 0 for one in self.processes if one.poll() is None
        ]
        node = next((one for one in self.elsewhere.nodes if not one.lost and held.count(one.number) < one.ranks), None)
        if isinstance(self.standby, RemoteStandby) and not self.standby.node.lost:
            return self.standby.node.standby_failed
        if node is None or held.count(0) < self.ranks_here:
            self.standby = None if isinstance(self.standby, RemoteStandby) else self.standby
            return self.get_ready(request, environment)
        if self.standby is None:
            self.standby = RemoteStandby(node)
            node.tell("standby", request=dict(request), environment=environment)
        return ""

    def get_ready(self, request: Mapping[str, Any], environment: Mapping[str, str]) -> str:
        """Start one that stands by on this machine; what went wrong with the one before, in words."""
        problem = ""
        if isinstance(self.standby, Standby) and (code := self.standby.process.poll()) is not None:
            self.failures += 1
            problem = f"the standby process ended with {code} before it was ready ({self.run.slots / 'standby.txt'})"
            self.standby = None
        if self.standby is not None or self.failures >= _MOST_FAILURES:
            return problem
        ours, theirs = socket.socketpair()
        with theirs:
            for stale in self.run.slots.glob("standby.*"):
                stale.unlink(missing_ok=True)
            os.mkfifo(self.run.standby_slot.with_suffix(".ask"), 0o600)
            full = {**request, "standby_fd": theirs.fileno(), "lock_fd": -1, "result_fd": -1}
            process = self._spawn(full, environment, [theirs.fileno()], "standby.txt")
        self.standby = Standby(self.run, process, ours)
        return problem

    @property
    def grows(self) -> bool:
        """Whether a rank that was lost can be replaced now."""
        return self.elastic and len(self.processes) < self.ranks and self.standby_is_ready

    # ---------------------------------------------------------------- ends

    def kill(self, ranks: list[int]) -> None:
        """These ranks and everything that they started (each has a session of its own)."""
        for rank in ranks:
            process = self.processes[rank]
            if isinstance(process, RemoteProcess):
                process.node.kill([process.number])
                continue
            with contextlib.suppress(ProcessLookupError):  # nobody is left in that session
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """The run is over."""
        if self.standby is not None:
            self.standby.end()
            self.standby = None
        for fd in self.memory:
            os.close(fd)
        self.memory = []


@dataclass
class Standby:
    """A process that waits for its turn; what it waits at is a socket."""

    run: RunDir
    process: subprocess.Popen[bytes]
    socket: socket.socket

    @property
    def slot(self) -> Slot | None:
        return read_slot(self.run.standby_slot)

    @property
    def is_ready(self) -> bool:
        slot = self.slot
        return self.process.poll() is None and slot is not None and slot.phase == STANDBY

    def take_over(self, order: Mapping[str, Any], lock_fd: int) -> subprocess.Popen[bytes]:
        with self.socket:
            socket.send_fds(self.socket, [json.dumps(order).encode()], [lock_fd] if lock_fd >= 0 else [])
        return self.process

    def end(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


@dataclass
class RemoteStandby:
    """The same on another node, by its parent."""

    node: RemoteNode

    @property
    def is_ready(self) -> bool:
        return self.node.standby_ready and not self.node.lost

    def end(self) -> None:
        """Its own parent ends it."""


def seats_of(
    alive: Sequence[int], here: Sequence[int], most: int, spare: bool, spare_here: bool
) -> list[int | None] | None:
    """Who is which rank from now on: for each, the rank that a survivor had, or None for the process that stands by. Rank 0
    speaks and saves, and sits on node 0: None where nobody there can be it, and all must start again."""
    world = min(most, len(alive) + spare)
    seats: list[int | None] = [rank if rank in alive else None for rank in range(world)]
    for rank in [rank for rank in alive if rank >= world]:
        seats[seats.index(None)] = rank
    is_here = [spare_here if before is None else before in here for before in seats]
    if not any(is_here):
        return None
    first = is_here.index(True)
    seats[0], seats[first] = seats[first], seats[0]
    return seats


def memory_files() -> list[int]:
    """Two files without a name, of no size until a child fills them; only Linux has such."""
    if sys.platform != "linux":
        return []
    return [os.memfd_create(f"lamp-state-{number}") for number in range(2)]


def _settings(environ: Mapping[str, str]) -> dict[str, str]:
    """What a process that computes reads at its start."""
    return {
        **threads_wait(environ),
        _PRODUCTS: environ.get(_PRODUCTS, ":4096:8"),  # read once, before the first product; exact ones need it
        _ALLOCATOR: environ.get(_ALLOCATOR, "expandable_segments:True"),  # fewer holes; changes no number
        "PYTHONUNBUFFERED": "1",
        "LAMP_PARENT_PID": str(os.getpid()),
    }


def threads_wait(environ: Mapping[str, str]) -> dict[str, str]:
    """Threads that wait for each other spin a little and then sleep; who has said otherwise is heard."""
    said = "OMP_WAIT_POLICY" in environ or "GOMP_SPINCOUNT" in environ
    return {} if said else {"GOMP_SPINCOUNT": _SPIN}
