"""The parents of a run's nodes find each other: node 0 listens, the others come with the run's secret and the same run in hand.

In:  where they meet, how many there shall be, what this node has (Card).
Out: on node 0 a RemoteNode for each other one, compared with itself; on the others the place that node 0 gives them. Who is missing is
     named while anybody waits, a node that differs is refused with the difference, and a run never begins with fewer than asked for.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lamplighter import web_access
from lamplighter.errors import AlreadyRunning, BadConfig, ChildLost, LampError, UsageError
from lamplighter.procs import peers
from lamplighter.rundir import RunDir, write_atomic
from lamplighter.safe_text import clean
from lamplighter.watch import wire
from lamplighter.watch.elsewhere import RemoteNode
from lamplighter.watch.wire import LinkLost, SecretDiffers, Wire

_LOOK_S = 0.1
_CONNECT_S = 3.0
_AGAIN_S = 0.5
_MOST_STRANGERS = 16  # greetings at the same time
_NONCE_S = 3.0  # how long a network file system may take to show a new file
_MOST_DIFFERENCES = 6


@dataclass(frozen=True)
class Nodes:
    """What is asked for."""

    count: int
    host: str
    port: int
    node: int | None = None  # which of them this one is; None: by address, then by order of arrival
    wait_s: float = 600.0

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_first(self) -> bool:
        """Whether node 0 is here."""
        return self.node == 0 if self.node is not None else peers.is_own(self.number)

    @property
    def number(self) -> str:
        """The host as an address."""
        try:
            return str(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0])
        except OSError as error:
            why = f"{self.host} is not known here ({error.strerror or error})"
            raise UsageError(
                f"the nodes cannot meet at {self.address}", why, "--launch.rendezvous ADDRESS:PORT"
            ) from error


@dataclass(frozen=True)
class Card:
    """What a node says of itself."""

    host: str
    ranks: int
    threads: int  # for each of its ranks
    facts: dict[str, str]  # that must be the same everywhere: versions, code, settings


# ---------------------------------------------------------------- the secret


def secret_of(run: RunDir, environ: dict[str, str] | os._Environ[str], file: str | None, first: bool) -> bytes | None:
    """LAMP_SECRET, the file of launch.secret, or the one that node 0 keeps in the run's folder; None: not there yet."""
    told = environ.get("LAMP_SECRET", "")
    if file is not None and not told:
        try:
            told = Path(file).read_text().strip()
        except OSError as error:
            raise BadConfig(
                f"the secret in {file} cannot be read", str(error.strerror), "launch.secret FILE"
            ) from error
    if told:
        if len(told) < wire.SECRET_LETTERS:
            why = f"it has {len(told)} letters, and could be guessed"
            raise BadConfig(
                "the secret of the nodes is too short",
                why,
                "LAMP_SECRET=$(openssl rand -hex 32), the same on every node",
            )
        return told.encode()
    kept = secret_file(run)
    if first and not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, secrets.token_hex(32), mode=0o600)
    try:
        return kept.read_text().strip().encode() or None
    except OSError:  # node 0 has not made it yet, or this is another file system
        return None


def secret_file(run: RunDir) -> Path:
    return run.nodes / "secret"


# ---------------------------------------------------------------- node 0


@dataclass(eq=False)
class _Arrival:
    """A node that knows the secret, and waits for its place."""

    wire: Wire
    card: Card
    wanted: int | None  # which node it wants to be
    place: str


@dataclass
class Meeting:
    """Of node 0: open from before anything else is done until all others are there."""

    nodes: Nodes
    secret: bytes
    server: socket.socket = field(init=False)
    arrived: list[_Arrival] = field(default_factory=list)
    strangers: dict[str, int] = field(default_factory=dict)  # who did not know the secret, and how often
    greeting: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_MOST_STRANGERS))
    closed: str = ""  # what is said to those who come now

    def __post_init__(self) -> None:
        host = self.nodes.host if peers.is_own(self.nodes.number) else "0.0.0.0"
        try:
            self.server = web_access.listen(host, self.nodes.port)
        except AlreadyRunning as taken:
            raise AlreadyRunning(
                f"the nodes cannot meet at {self.nodes.address}: the port is taken",
                taken.why,
                f"another port, on every node: --launch.rendezvous {self.nodes.host}:{self.nodes.port + 1};"
                " or, where that process is node 0 of this run: --launch.node 1",
            ) from taken
        threading.Thread(target=self._accept, name="lamp-meeting", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                link, where = self.server.accept()
            except OSError:  # closed: the run has ended
                return
            if not self.greeting.acquire(blocking=False):
                link.close()  # so many at once are no nodes
                continue
            threading.Thread(target=self._greet, args=(link, str(where[0])), name="lamp-greeting", daemon=True).start()

    def _greet(self, link: socket.socket, place: str) -> None:
        made = None
        try:
            made = wire.answer(link, self.secret)
            message = _next(made, "hello", _CONNECT_S)
            if self.closed:
                made.send("refused", words=self.closed, code=AlreadyRunning.code)
                made.close()
                return
            arrival = _Arrival(made, card_of(message["card"]), message["node"], place)
            self.arrived = [*self.arrived, arrival]
        except SecretDiffers:
            self.strangers = {**self.strangers, place: self.strangers.get(place, 0) + 1}
            link.close()
        except (LinkLost, OSError, KeyError, TypeError, ValueError):  # no node of this version, or gone again
            link.close()
        finally:
            self.greeting.release()

    @property
    def missing(self) -> int:
        """How many other nodes have not come."""
        return self.nodes.count - 1 - len(self.arrived)

    def _tell_waiting(self, here: str) -> None:
        """Who is there hears who is missing; who has left again is missing too."""
        gone = []
        for one in self.arrived:
            try:
                one.wire.messages(0.0)
                one.wire.send("wait", words=self.words(here))
            except LinkLost:
                one.wire.close()
                gone.append(one)
        self.arrived = [one for one in self.arrived if one not in gone]

    def words(self, here: str) -> str:
        """Who is there and how many are missing."""
        names = ", ".join([*([here] if here else []), *(f"{one.card.host} ({one.place})" for one in self.arrived)])
        refused = ", ".join(f"{place} ({count} x)" for place, count in self.strangers.items())
        unknown = f"; refused, with another secret or none: {refused}" if refused else ""
        return f"{self.missing} of {self.nodes.count} nodes missing at {self.nodes.address}; here: {names or 'nobody'}{unknown}"

    def gather(self, card: Card, heed: Callable[[str], None]) -> list[_Arrival]:
        """All other nodes, by their number; `heed` is told who is missing, and may end the waiting."""
        until = time.monotonic() + self.nodes.wait_s
        looked = 0.0
        here = f"{card.host} (node 0)"
        while self.missing > 0:
            heed(self.words(here))
            if time.monotonic() - looked > 1.0:
                looked = time.monotonic()
                self._tell_waiting(here)
            if time.monotonic() > until:
                raise ChildLost(
                    f"not all nodes have come within {self.nodes.wait_s:.0f} s", self.words(here),
                    f"start the missing ones with the same command; can they reach {self.nodes.address}? launch.wait_s waits longer",
                )  # fmt: skip
            time.sleep(_LOOK_S)
        self.closed = f"the run has its {self.nodes.count} nodes already: {here}, " + ", ".join(
            f"{one.card.host} ({one.place})" for one in self.arrived
        )
        for one in self.arrived:
            refuse_other(card, one.card)
        return self._numbered()

    def _numbered(self) -> list[_Arrival]:
        """As they asked for; the others by the order in which they came."""
        seats: dict[int, _Arrival] = {}
        for one in self.arrived:
            if one.wanted is None:
                continue
            if one.wanted in seats or not 0 < one.wanted < self.nodes.count:
                taken = (
                    f"{seats[one.wanted].card.host} is that"
                    if one.wanted in seats
                    else "node 0 is the one that listens"
                )
                raise BadConfig(
                    f"{one.card.host} wants to be node {one.wanted} of {self.nodes.count}",
                    taken,
                    "another --launch.node",
                )
            seats[one.wanted] = one
        free = [number for number in range(1, self.nodes.count) if number not in seats]
        for one in self.arrived:
            if one.wanted is None:
                seats[free.pop(0)] = one
        return [seats[number] for number in sorted(seats)]

    def welcome(self, run: RunDir, arrivals: list[_Arrival], config: str) -> list[RemoteNode]:
        """Tell each its place, and hear whether it sees the run's folder."""
        nonce = secrets.token_hex(16)
        place = run.nodes / "nonce"
        place.parent.mkdir(exist_ok=True)
        write_atomic(place, nonce)
        nodes = []
        for number, one in enumerate(arrivals, 1):
            host = clean(one.card.host)
            try:
                one.wire.send("welcome", node=number, nonce=nonce, config=config, host=os.uname().nodename)
                answer = _next(one.wire, "settled", _NONCE_S + _CONNECT_S)
            except LinkLost as error:
                why = f"{host} ({one.place}) left while it was given its place: {error}"
                raise ChildLost("a node has gone again", why, "the same command on every node") from error
            if answer.get("problem"):
                raise BadConfig(
                    f"node {number} ({host}) cannot take part", clean(str(answer["problem"])), "mend it there"
                )
            nodes.append(RemoteNode(number, host, one.card.ranks, one.wire, bool(answer["shared"])))
        for node in nodes:
            node.begin()
        return nodes

    def dismiss(self, code: int, words: str, wait_s: float = 0.0) -> None:
        """The run does not begin, or is over: whoever is there, or comes within so long, ends with this code."""
        until = time.monotonic() + wait_s
        while self.missing > 0 and time.monotonic() < until:
            time.sleep(_LOOK_S)
        for one in self.arrived:
            with contextlib.suppress(LinkLost, OSError):  # gone already
                one.wire.send("refused", words=words, code=code)
        self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the thread in accept() wakes by it
            self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()


def card_of(told: dict[str, Any]) -> Card:
    facts = {str(name): str(value) for name, value in told["facts"].items()}
    return Card(
        clean(str(told["host"]))[:100], max(1, min(1024, int(told["ranks"]))), max(1, int(told["threads"])), facts
    )


def refuse_other(mine: Card, theirs: Card) -> None:
    """A node that would compute another run is named, with what differs."""
    different = [
        name
        for name in sorted(mine.facts.keys() | theirs.facts.keys())
        if mine.facts.get(name) != theirs.facts.get(name)
    ]
    if not different:
        return
    words = [f"{name}: {mine.facts.get(name, 'not there')} here, {theirs.facts.get(name, 'not there')} there" for name in different[:_MOST_DIFFERENCES]]  # fmt: skip
    more = f"; and {len(different) - _MOST_DIFFERENCES} more" if len(different) > _MOST_DIFFERENCES else ""
    raise BadConfig(
        f"node {theirs.host} has another run in hand than node 0 ({mine.host})",
        clean("; ".join(words) + more),
        "the same command, files and versions on every node",
    )


# ---------------------------------------------------------------- the other nodes


@dataclass(frozen=True)
class Place:
    """What node 0 has said."""

    wire: Wire
    node: int
    host: str  # of node 0
    nonce: str
    config: str


def join(
    nodes: Nodes, secret: Callable[[], bytes | None], card: Card, heed: Callable[[str], None], where_secret: str
) -> Place:
    """Come to node 0 and wait for a place. `secret` is asked again while it is not there, or an old one."""
    until = time.monotonic() + nodes.wait_s
    differs = ""
    while True:
        known = secret()
        if known is None:
            heed(
                f"waiting for the secret of the run: LAMP_SECRET is not set, and {where_secret} is not there yet; where this node"
                " does not see node 0's folder, start every node with the same in LAMP_SECRET (openssl rand -hex 32)"
            )
        else:
            try:
                return _ask_for_place(nodes, known, card, heed)
            except SecretDiffers as error:
                differs = str(error)
                heed(f"node 0 at {nodes.address} does not know this secret ({error})")
            except (LinkLost, OSError) as error:
                heed(f"waiting for node 0 at {nodes.address}: {getattr(error, 'strerror', None) or error}")
        if time.monotonic() > until or (differs and "LAMP_SECRET" in os.environ):
            if differs:
                raise BadConfig(
                    f"node 0 at {nodes.address} does not know this secret", differs,
                    f"the same LAMP_SECRET on every node, or what node 0 keeps in {where_secret}",
                )  # fmt: skip
            raise ChildLost(
                f"node 0 has not been reached within {nodes.wait_s:.0f} s"
                if known
                else "the secret of the run is not known here",
                f"it should listen at {nodes.address}"
                if known
                else f"LAMP_SECRET is not set, and {where_secret} is not there",
                f"start it on the machine that has the address {nodes.host}, or there with --launch.node 0"
                if known
                else f"put what node 0 keeps in {where_secret} into LAMP_SECRET here, or the same on every node (openssl rand -hex 32)",
            )
        time.sleep(_AGAIN_S)


def _ask_for_place(nodes: Nodes, secret: bytes, card: Card, heed: Callable[[str], None]) -> Place:
    link = socket.create_connection((nodes.host, nodes.port), timeout=_CONNECT_S)
    try:
        made = wire.call(link, secret)
        made.send("hello", card=asdict(card), node=nodes.node)
        words = "it has our word"
        while True:
            for message in made.messages(_AGAIN_S):
                if message["do"] == "wait":
                    words = clean(str(message["words"]))
                    made.send("here")
                elif message["do"] == "refused":
                    raise Refused(clean(str(message["words"])), int(message["code"]))
                elif message["do"] == "welcome":
                    told = (clean(str(message["host"])), str(message["nonce"]), str(message["config"]))
                    return Place(made, int(message["node"]), *told)
            heed(f"at node 0: {words}")
    except BaseException:
        link.close()
        raise


class Refused(LampError):
    """Node 0 does not want us, or has ended."""

    def __init__(self, words: str, code: int) -> None:
        super().__init__("node 0 has ended the start" if code else words, words, "look at node 0")
        self.code = code


def sees_folder(run: RunDir, nonce: str) -> bool:
    """Whether node 0 has just written this into the folder that we see too; a network file system may take a moment."""
    until = time.monotonic() + (_NONCE_S if run.path.exists() else 0.0)
    place = run.nodes / "nonce"
    while True:
        with contextlib.suppress(OSError):  # not there: another file system, or not yet
            if place.read_text() == nonce:
                return True
        if time.monotonic() > until or not place.parent.exists():
            return False
        time.sleep(_LOOK_S)


def _next(link: Wire, do: str, deadline_s: float) -> dict[str, Any]:
    """The next message of this kind."""
    until = time.monotonic() + deadline_s
    while time.monotonic() < until:
        for message in link.messages(_LOOK_S):
            if message["do"] == do:
                return message
    raise LinkLost(f"no answer within {deadline_s:.0f} s")
