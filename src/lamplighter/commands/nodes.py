"""lamp train on several nodes: what a node says of itself, how it waits for the others, and the whole life of one beside node 0.

In:  the launch section or what a launcher has put into the environment, the resolved settings, the secret.
Out: on node 0 the other nodes, ready to be given ranks; on the others the exit code of the run.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamplighter import first_words
from lamplighter.commands.launched import Launch
from lamplighter.errors import LEFT_AT_ONCE, BadConfig, ChildLost, LampError, StoppedEarly, UsageError
from lamplighter.rundir import (
    CACHE_NAME,
    VERSIONS,
    RunDir,
    hash_file,
    identity,
    newest_first,
    open_lines,
    read_record,
    read_status,
    take_lock,
    write_atomic,
    write_json,
)

if TYPE_CHECKING:
    from lamplighter.config import Resolved, Run
    from lamplighter.watch.console import Console
    from lamplighter.watch.elsewhere import Elsewhere, RemoteNode
    from lamplighter.watch.meeting import Card, Meeting, Nodes

_SAY_EVERY_S = 1.6
_STATUS_EVERY_S = 0.9
_DISMISS_S = 5.0  # how long the others are waited for where the run does not even begin
_NOT_COMPARED = ("launch.", "watch.notify", "save.mirror", "track.")
_PACKAGES = ("torch", "numpy", "tokenizers", "transformers")


def nodes_of(run: Run, launch: Launch | None) -> Nodes | None:
    """As it was given, else as a launcher says it; None for a run on one machine, which pays nothing for there being others."""
    section = run.launch
    count = section.nodes if section.nodes > 1 else launch.nodes if launch is not None else 1
    if count == 1:
        return None
    from lamplighter.watch.meeting import Nodes

    if section.rendezvous is not None:
        host, _, port = section.rendezvous.rpartition(":")
        node = section.node if section.node is not None or launch is None or launch.nodes != count else launch.node
        return Nodes(count, host.strip("[]"), int(port), node, section.wait_s)
    if launch is None or launch.nodes != count or not launch.host:
        raise UsageError(
            f"{count} nodes, and launch.rendezvous is not set",
            "they must know where to meet",
            "on every node: --launch.rendezvous HOST:PORT with an address of node 0, such as 10.0.0.1:29511",
        )
    return Nodes(count, launch.host, launch.port, launch.node, section.wait_s)


def make_card(resolved: Resolved, name: str, ranks: int) -> Card:
    """What this node has, and what must be the same on all: settings, code, versions."""
    from lamplighter.config import flat
    from lamplighter.procs.pool import usable_cores
    from lamplighter.safe_text import mask
    from lamplighter.watch.meeting import Card

    settings = {
        key: mask(repr(value)) for key, value in flat(resolved.run).items() if not key.startswith(_NOT_COMPARED)
    }
    facts = {
        "run": name,
        "code of lamplighter": _hash_of_package(),
        **_versions(),
        **_own_code(resolved.run),
        **settings,
    }
    return Card(os.uname().nodename, ranks, max(1, usable_cores() // ranks), facts)


def _hash_of_package() -> str:
    """Of all that is executed here: two versions may have the same number."""
    import hashlib

    total = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        total.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return total.hexdigest()[:16]


def _versions() -> dict[str, str]:
    import platform
    from importlib import metadata

    found = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # an extra
            found[name] = "not installed"
    return found


def _own_code(run: Run) -> dict[str, str]:
    """Files of the user's own that the run is made with."""
    from lamplighter import own_code

    found = {}
    for name in (run.model.family, run.data.source or ""):
        module = name.partition(":")[0].replace(".", "/")
        files = [Path(folder) / f"{module}.py" for folder in own_code.folders()] if ":" in name else []
        for path in [file for file in files if file.is_file()][:1]:
            found[f"code of {name}"] = hash_file(path)[:16]
    return found


# ---------------------------------------------------------------- waiting


@dataclass
class Waiting:
    """While others are missing: said in words, written down, and a stop is heeded."""

    console: Console
    run: RunDir | None = None  # whose status is kept, and whose readers are answered
    said_at: float = 0.0
    written_at: float = 0.0
    words: str = ""
    began: float = field(default_factory=time.monotonic)
    signalled: str = ""

    @contextmanager
    def signals(self) -> Iterator[None]:
        before = {which: signal.signal(which, self._on_signal) for which in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for which, handler in before.items():
                signal.signal(which, handler)

    def _on_signal(self, which: int, _frame: object) -> None:
        self.signalled = signal.Signals(which).name

    def heed(self, words: str) -> None:
        """Called again and again; StoppedEarly where somebody wants no more of it."""
        first_words.end()
        now = time.monotonic()
        if words != self.words or now - self.said_at > _SAY_EVERY_S:
            self.console.say(f"{words} (for {now - self.began:.0f} s)")
            self.words, self.said_at = words, now
        if self.run is not None and now - self.written_at > _STATUS_EVERY_S:
            self.written_at = now
            self.write("running")
            self._answer()
        if self.signalled:
            raise StoppedEarly(
                f"stopped ({self.signalled}) while not all nodes were there", "", "the same command again"
            )

    def write(self, state: str, **more: Any) -> None:
        """What was known of the run stays known."""
        assert self.run is not None
        before = {
            name: value
            for name, value in read_status(self.run).items()
            if name not in ("exit_code", "outcome", "damage")
        }
        now = {"state": state, "verb": "train", "phase": "nodes", "now": self.words, "t": time.time(), "ranks": []}
        write_json(self.run.status, {**before, **VERSIONS, **now, **identity(), **more}, durable=False)

    def _answer(self) -> None:
        assert self.run is not None
        for path in [one for one in self.run.ask.iterdir() if one.suffix in (".why", ".stop", ".save")]:
            path.unlink(missing_ok=True)
            answer = {"kind": path.suffix[1:], "text": self.words, "step": 0}
            write_json(path.with_suffix(".answer"), answer, durable=False)
            if path.suffix == ".stop":
                self.signalled = "lamp stop"


# ---------------------------------------------------------------- node 0


@dataclass
class FirstNode:
    """Node 0's side: open from the first moment, so that the others find it, and dismissing them where nothing begins."""

    run: RunDir
    nodes: Nodes
    console: Console
    meeting: Meeting
    began: bool = False

    @classmethod
    def open(cls, run: RunDir, nodes: Nodes, secret: str | None, console: Console) -> FirstNode:
        from lamplighter.watch import meeting

        known = meeting.secret_of(run, os.environ, secret, first=True)
        kept = ""
        if "LAMP_SECRET" not in os.environ and not secret:
            kept = f"; their secret is in {meeting.secret_file(run)}: one that does not see this file needs LAMP_SECRET with what it holds"
        os.environ.pop("LAMP_SECRET", None)  # nobody that we start needs it
        assert known is not None
        console.say(f"note  node 0 of {nodes.count}: the others meet this one at {nodes.address}{kept}")
        return cls(run, nodes, console, meeting.Meeting(nodes, known))

    def card(self, given: Resolved, ranks: int) -> Card:
        """Of this node; `given`: the settings as its command has them."""
        return make_card(given, self.run.name, ranks)

    def facts_of_run(self) -> dict[str, Any]:
        """What the newest checkpoint says of the run, for ranks that do not see it."""
        for path in newest_first(self.run.checkpoints):
            if found := read_record(path / "training" / "state.json"):
                return {name: found[name] for name in ("machine", "compiled", "exact") if name in found}
        return {}

    def gather(self, card: Card) -> list[Any]:
        """The other nodes, compared with this one."""
        waiting = Waiting(self.console, self.run)
        try:
            with waiting.signals():
                return self.meeting.gather(card, waiting.heed)
        except LampError as error:
            waiting.write(
                "stopped" if isinstance(error, StoppedEarly) else "failed", exit_code=error.code, outcome=error.what
            )
            raise

    def welcome(
        self, arrivals: list[Any], resolved: Resolved, ranks_here: int, card: Card
    ) -> tuple[Elsewhere, dict[str, str]]:
        """Give the others their places; and what every rank must know of it."""
        from lamplighter.config import dump, with_check
        from lamplighter.procs import peers
        from lamplighter.watch.elsewhere import Elsewhere

        run = resolved.run
        plain = replace(run, watch=replace(run.watch, notify=None), save=replace(run.save, mirror=None))
        config = with_check(dump(replace(resolved, run=plain)))
        others = self.meeting.welcome(self.run, arrivals, config)
        self.began = True
        for node in others:
            self.console.say(
                f"note  {node.words}: {node.ranks} rank{'s' * (node.ranks > 1)}; {_of_folder(node.shared)}"
            )
        shared = self._may_shard(others, run.train.shard)
        here = others[0].wire.own_address
        use_interface(here)
        hosts = [card.host] * ranks_here + [node.host for node in others for _ in range(node.ranks)]
        threads = min(card.threads, *(one.card.threads for one in arrivals))
        told = {
            "LAMP_MEET": here,
            "LAMP_HOSTS": json.dumps(hosts),
            "LAMP_THREADS": str(threads),
            "LAMP_NODES": str(self.nodes.count),
            "LAMP_NODE_RANKS": str(max(ranks_here, *(node.ranks for node in others))),
            **({"LAMP_SHARED": "1"} if shared else {}),
        }
        if not peers.is_own(here):
            raise BadConfig(f"{here} is no address of this machine", "ranks must reach it", "--launch.rendezvous")
        return Elsewhere(others), told

    def _may_shard(self, others: list[RemoteNode], shard: str) -> bool:
        """Whether ranks may hold parts of the model: they write one checkpoint together, into a folder that all nodes see."""
        blind = [node for node in others if not node.shared]
        if not blind or shard == "none":
            return shard != "none"
        who = " and ".join(node.words for node in blind)
        why = f"sharded ranks write one checkpoint together, and the folder of the run on node 0 is not seen by {who}"
        if shard == "auto":
            self.console.say(f"note  every rank holds the whole model (train.shard auto): {why}")
            return False
        error = BadConfig(
            f"train.shard is full, and the {self.nodes.count} nodes share no folder", why,
            "--runs-dir on a file system that all nodes see, or --train.shard none (every rank holds the whole model)",
        )  # fmt: skip
        for node in others:  # they have their places already, and wait for ranks
            node.close(error.code, f"{error.what}: {error.why}")
        waiting = Waiting(self.console, self.run, words=error.what)
        waiting.write("failed", exit_code=error.code, outcome=error.what)
        raise error

    def close(self, code: int, words: str) -> None:
        """Those who came, and were never given ranks, end with us."""
        if not self.began:
            missing = self.meeting.missing if code != ChildLost.code else 0  # they have not come in all that time
            if missing:
                who = "the other node" if missing == 1 else f"the other {missing} nodes"
                self.console.say(
                    f"note  {who} shall hear of it: waiting {_DISMISS_S:.0f} s for {'it' if missing == 1 else 'them'}"
                )
            self.meeting.dismiss(code, words, _DISMISS_S if missing else 0.0)
        self.meeting.close()


def _of_folder(shared: bool) -> str:
    return "it sees the run's folder" if shared else "it does not see the run's folder: checkpoints are on node 0 alone"


def use_interface(address: str) -> None:
    """Collectives go where the parents have found each other, and not over any other network."""
    from lamplighter.procs.peers import interface_of

    if name := interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


# ---------------------------------------------------------------- the other nodes


def take_part(resolved: Resolved, nodes: Nodes, run: RunDir, again: str) -> int:
    """The whole life of a parent beside node 0."""
    import subprocess

    from lamplighter.procs.nvml import count_ranks
    from lamplighter.watch import meeting
    from lamplighter.watch.console import Console
    from lamplighter.watch.launcher import Launcher, memory_files
    from lamplighter.watch.node_parent import NodeParent

    console = Console(1)
    ranks, why = count_ranks(resolved.run.train.ranks, resolved.run.train.device)
    waiting = Waiting(console)
    code = LEFT_AT_ONCE
    node_run: RunDir | None = None
    lock_fd = -1
    try:
        console.say(
            f"note  a node of {nodes.count}, with {ranks} rank{'s' * (ranks > 1)} ({why}); node 0 is at {nodes.address}"
        )
        card = make_card(resolved, run.name, ranks)
        secret = resolved.run.launch.secret
        with waiting.signals():
            place = meeting.join(
                nodes,
                lambda: meeting.secret_of(run, os.environ, secret, first=False),
                card,
                waiting.heed,
                str(meeting.secret_file(run)),
            )
        os.environ.pop("LAMP_SECRET", None)
        shared = meeting.sees_folder(run, place.nonce)
        node_run = RunDir(run.nodes / str(place.node))
        problem = ""
        try:
            node_run.create()
            lock_fd = take_lock(node_run)
            write_atomic(node_run.config, place.config, mode=0o600)
        except LampError as error:
            problem = f"{error.what}: {error.why}"
        place.wire.send("settled", shared=shared, problem=problem)
        if problem:
            raise BadConfig(f"this node cannot take part in {run.name}", problem, "")
        console.log_fd = open_lines(node_run.console)
        console.say(
            f"node {place.node} of {nodes.count}: the run is on node 0 ({place.host}), look there with: lamp watch {run.address};"
            f" {_of_folder(shared).replace('it ', 'this node ', 1)}"
        )
        use_interface(place.wire.own_address)
        first_words.end()
        launcher = Launcher(node_run, "train", ranks, lock_fd, -1, subprocess.DEVNULL, True, memory_files())
        cache = str((run.path.parent / CACHE_NAME).absolute())
        whole = str(run.path.absolute()) if shared else ""
        parent = NodeParent(node_run, launcher, place.wire, console, place.node, place.host, again, cache, whole)
        code = parent.serve()
        return code
    except LampError as error:
        code = error.code
        raise
    finally:
        if node_run is not None and node_run.path.exists():
            write_json(
                node_run.status,
                {**VERSIONS, "state": "ended", "exit_code": code, "t": time.time(), **identity()},
                durable=False,
            )
        if lock_fd >= 0:
            os.close(lock_fd)
        console.close()
