"""Probes of ranks that work together: addresses and ports first, then two local ranks by gloo, act by act.

In:  MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME where they are set; the loopback address and a free port otherwise.
Out: Findings that name the rank that did not arrive, the owner of a port, the address that leads nowhere.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import psutil

from lamplighter.doctor.probe import Finding, ProbeContext, fault, first_line, ok, skip, warn
from lamplighter.doctor.runner import patience
from lamplighter.procs import procfs
from lamplighter.procs.child import Child, Say

_ACTS = ("start", "import", "rendezvous", "all-reduce", "barrier", "broadcast", "end")
_ACT_S = 12.0
_IMPORT_S = 40.0
_REACH_S = 3.0
_NUMBERS = 1 << 16
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


# ---------------------------------------------------------------- addresses


def address_and_port(context: ProbeContext) -> Iterator[Finding]:
    """What the environment says about where ranks meet, and whether it leads anywhere."""
    yield from _interfaces()
    context.now("resolving the host's name")
    yield judge_hostname()
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address and not port:
        yield skip("MASTER_ADDR and MASTER_PORT are not set: one machine, or torchrun sets them")
        return
    if bool(address) != bool(port):
        missing = "MASTER_PORT" if address else "MASTER_ADDR"
        what, why = f"{missing} is not set, and the other one is", "ranks wait for an address that is half known"
        yield warn(what, why, f"export {missing}=...", "no_peer")
    if port and not _is_port(port):
        yield fault(f"MASTER_PORT is {port}, which is no port", "", "export MASTER_PORT=29500", "no_peer")
    elif address:
        context.now(f"resolving {address}")
        yield judge_master(address, int(port) if port else None)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text) < 65_536


def _interfaces() -> Iterator[Finding]:
    """Names of interfaces that do not exist."""
    known = list(psutil.net_if_addrs())
    for variable in _INTERFACES:
        for name in os.environ.get(variable, "").lstrip("^=").split(","):
            if name and not any(one.startswith(name) for one in known):
                what, why = f"{variable} is {name}, and there is no such interface", f"there are: {', '.join(known)}"
                advice = f"export {variable}={_first_real()}, or unset {variable}"
                yield fault(what, why, advice, "no_peer", culprit={"interface": name})


def _first_real() -> str:
    """An interface that leads out of this machine."""
    known = list(psutil.net_if_addrs())
    return next((name for name in known if not name.startswith(("lo", "docker", "veth", "br-"))), known[0])


def _resolve(name: str, port: int | None = None) -> set[str]:
    return {str(row[4][0]) for row in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)}


def _is_here(addresses: set[str]) -> bool:
    """Whether one of them is of this machine."""
    local = {one.address.split("%")[0] for rows in psutil.net_if_addrs().values() for one in rows}
    return bool(addresses & local) or any(ipaddress.ip_address(one).is_loopback for one in addresses)


def judge_hostname() -> Finding:
    """gloo listens on the address that the host's own name leads to."""
    name = socket.gethostname()
    try:
        found = _resolve(name)
    except OSError as error:
        what = f"this host's name, {name}, leads to no address: {error.strerror or error}"
        why = "ranks of one machine fall back to the loopback; those of several do not find each other"
        advice = f"a line for {name} in /etc/hosts, or export GLOO_SOCKET_IFNAME"
        return warn(what, why, advice, "no_peer", culprit={"host": name})
    where = ", ".join(sorted(found))
    if _is_here(found):
        return ok(f"{name} leads to {where}")
    what = f"this host's name, {name}, leads to {where}, which is not this machine"
    why = "gloo listens on the address that the name leads to, and cannot"
    advice = f"mend /etc/hosts or the name server, or export GLOO_SOCKET_IFNAME={_first_real()}"
    return fault(what, why, advice, "no_peer", culprit={"host": name})


def judge_master(address: str, port: int | None) -> Finding:
    """MASTER_ADDR: does it lead anywhere, is it here, is the port free, does somebody listen."""
    try:
        found = _resolve(address, port)
    except OSError as error:
        what = f"MASTER_ADDR {address} leads to no address: {error.strerror or error}"
        why, advice = "every rank would wait for rank 0 until its time is over", "check the name, or give the number"
        return fault(what, why, advice, "no_peer", culprit={"host": address})
    where = ", ".join(sorted(found))
    if port is None:
        return ok(f"MASTER_ADDR {address} leads to {where}")
    return _judge_port(address, port) if _is_here(found) else _reach(address, where, port)


def _judge_port(address: str, port: int) -> Finding:
    """On this machine: nobody else may listen there."""
    owner = _owner_of(port)
    if owner is None and _is_free(port):
        return ok(f"MASTER_ADDR {address} is this machine, and port {port} is free")
    who = f"process {owner.pid} ({_command(owner)})" if owner else "a process that cannot be seen from here"
    culprit = {"port": port, **({"pid": owner.pid} if owner else {})}
    why = "rank 0 cannot listen there; another run, or one that has not ended?"
    advice = f"export MASTER_PORT={free_port()}"
    return fault(f"port {port} of MASTER_PORT is taken by {who}", why, advice, "no_peer", culprit=culprit)


def _reach(address: str, where: str, port: int) -> Finding:
    """Another machine: is anybody there?"""
    try:
        socket.create_connection((address, port), _REACH_S).close()
    except ConnectionRefusedError:
        return ok(f"{address} ({where}) is another machine and answers; nobody listens on port {port} yet")
    except OSError as error:
        what = f"{address} ({where}) port {port} cannot be reached: {error.strerror or error}"
        why = "a firewall, another network, or the machine is not there"
        advice = "try from both sides; open the port between the machines"
        return warn(what, why, advice, "no_peer", culprit={"host": address, "port": port})
    return ok(f"{address} ({where}) is another machine, and somebody listens on port {port}")


def _owner_of(port: int) -> psutil.Process | None:
    """Who listens on a port of this machine, as far as we may see."""
    try:
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
                return psutil.Process(one.pid)
    except psutil.Error:  # what others listen on may not be read: the port counts as nobody's
        return None
    return None


def _command(one: psutil.Process) -> str:
    try:
        return " ".join(one.cmdline())[:80]
    except psutil.Error:  # it has ended, or is another user's
        return "its command cannot be read"


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("", port))
        except OSError:  # taken
            return False
    return True


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


# ---------------------------------------------------------------- two ranks


@dataclass
class Rank:
    """One of the two, and how far it has come."""

    number: int
    child: Child
    at: str = "start"
    since: float = field(default_factory=time.monotonic)
    done: bool = False
    error: str = ""

    def listen(self, wait_s: float = 0.05) -> None:
        for record in self.child.listen(wait_s):
            if "at" in record:
                self.at, self.since = str(record["at"]), time.monotonic()
            self.done = self.done or bool(record.get("done"))
            self.error = self.error or str(record.get("error", ""))


def two_ranks(context: ProbeContext) -> Iterator[Finding]:
    """On the loopback address by a free port; then where the environment says, if that is here and the port is free."""
    yield trial("127.0.0.1", free_port(), context.now)
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not _is_port(port):
        return
    try:
        here = _is_here(_resolve(address, int(port)))
    except OSError:  # told by the probe of the address
        here = False
    if here and _is_free(int(port)):
        yield trial(address, int(port), context.now)
    else:
        yield skip(f"not tried at {address}:{port}: it is not free, or not here")


def trial(address: str, port: int, now: Callable[[str], None], act_s: float = _ACT_S) -> Finding:
    """Two processes go through every act; the first that fails or is late ends it, with who and where."""
    act_s, started, place = act_s * patience(), time.monotonic(), f"{address}:{port}"
    ranks = [_start(number, address, port, act_s) for number in range(2)]
    try:
        while not all(rank.done for rank in ranks):
            for rank in ranks:
                rank.listen()
            now(f"{place}: " + ", ".join(f"rank {rank.number} at {rank.at}" for rank in ranks))
            for rank in ranks:
                if (found := _failed_or_died(rank, ranks[1 - rank.number], place)) is not None:
                    return found
            if (found := _late(ranks, place, act_s)) is not None:
                return found
    finally:
        for rank in ranks:
            rank.child.end()
    took = time.monotonic() - started
    what = f"two ranks met at {place}: all-reduce, barrier and broadcast are right ({took:.1f} s)"
    return ok(what, figures={"seconds": took})


def _start(number: int, address: str, port: int, act_s: float) -> Rank:
    request = {"rank": number, "ranks": 2, "address": address, "port": port, "act_s": 3 * act_s}
    alone = {"OMP_NUM_THREADS": "1", "RANK": str(number)}
    return Rank(number, Child("lamplighter.doctor.collectives:one_rank", request, alone))


def _failed_or_died(rank: Rank, other: Rank, place: str) -> Finding | None:
    ended, where, why = rank.child.has_ended(), {"rank": rank.number}, f"rank {other.number} was at {other.at}"
    if ended and not rank.done:
        rank.listen()  # its last words
    if rank.error:
        what = f"rank {rank.number} failed in {rank.at} at {place}: {rank.error}"
        advice = "check GLOO_SOCKET_IFNAME, /etc/hosts and the firewall of this machine"
        return fault(what, why, advice, "no_peer", culprit=where)
    if not ended or rank.done:
        return None
    rank.child.end()
    outcome = rank.child.outcome()
    why += f"; its last words: {outcome.last_line or 'none'}"
    advice = "lamp watch -- CMD keeps the evidence of such a death"
    return fault(f"rank {rank.number} {outcome.how()} in {rank.at}", why, advice, "rank_sigkill", culprit=where)


def _late(ranks: list[Rank], place: str, act_s: float) -> Finding | None:
    """The rank that did not arrive; None while all goes well."""
    last = min(ranks, key=lambda rank: _ACTS.index(rank.at))
    other = ranks[1 - last.number]
    alone = other.at != last.at  # one waits for the other: how long it waits counts, not how long the other is at it
    waited = time.monotonic() - (other.since if alone else max(last.since, other.since))
    limit = _IMPORT_S * patience() if other.at in ("start", "import") else act_s
    if waited < limit or last.done:
        return None
    if alone:
        what = (
            f"rank {last.number} did not arrive at {other.at}: it is at {last.at}, and rank {other.number} has waited"
        )
        what += f" for {waited:.0f} s"
    else:
        what = f"both ranks wait in {last.at} at {place} for {waited:.0f} s"
    return fault(
        what,
        f"the process of rank {last.number} is {procfs.look(last.child.pid).words}",
        "check GLOO_SOCKET_IFNAME and the firewall; lamp watch -- torchrun ... names it in your own run",
        "rank_late" if alone else "no_peer",
        culprit={"rank": last.number, "act": other.at, "pid": last.child.pid},
    )


# ---------------------------------------------------------------- inside a rank


def one_rank(request: dict[str, Any], say: Say) -> None:
    """One record before and after each act: rendezvous, all-reduce, barrier, broadcast; each result is checked."""
    rank, ranks = request["rank"], request["ranks"]
    say(at="import")
    import torch
    import torch.distributed as dist

    limit = timedelta(seconds=request["act_s"])
    try:
        say(at="rendezvous")
        address, port = request["address"], request["port"]
        store = dist.TCPStore(address, port, ranks, is_master=rank == 0, timeout=limit)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
        say(at="all-reduce")
        numbers = torch.full((_NUMBERS,), float(rank + 1))
        dist.all_reduce(numbers)
        if not bool((numbers == ranks * (ranks + 1) / 2).all()):
            raise ArithmeticError(f"1 + 2 gave {numbers[0].item()}")
        say(at="barrier")
        dist.barrier()
        say(at="broadcast")
        sent = torch.arange(_NUMBERS) if rank == 0 else torch.zeros(_NUMBERS, dtype=torch.int64)
        dist.broadcast(sent, src=0)
        if not torch.equal(sent, torch.arange(_NUMBERS)):
            raise ArithmeticError("what arrived is not what was sent")
        say(at="end")
        dist.barrier()  # rank 0 keeps the store: it may not leave before the other has done
    except Exception as error:  # noqa: BLE001  whatever it is, it is told
        say(error=f"{type(error).__name__}: {first_line(error)}")
    else:
        say(done=True)
