"""Probes of ranks that work together: addresses and ports, then the ranks of this run, as many as it would have, act by act.

In:  MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME where they are set; the settings of the run.
Out: Findings that name the rank that did not arrive, that is slow or that has other settings, the owner of a port, the address that
     leads nowhere; what a reduction of the model's gradients takes.

The ranks meet, compare and reduce by train/ranks.py, as they do in a run.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from lamplighter.doctor.probe import Finding, ProbeContext, fault, first_line, ok, skip, warn
from lamplighter.doctor.runner import patience
from lamplighter.errors import LampError
from lamplighter.plan.job import Job, job_of, known_shape, shape_of
from lamplighter.plan.ranks import division_words, idle, reduction_sets, without_idle
from lamplighter.procs import nvml, procfs
from lamplighter.procs.child import Child, Say
from lamplighter.rundir import human_bytes

if TYPE_CHECKING:
    import torch

    from lamplighter.train.ranks import World

_ACTS = ("start", "import", "device", "rendezvous", "compare", "compute", "reduce", "end")
_ACT_S = 12.0
_IMPORT_S = 40.0
_REACH_S = 3.0
_DEVICE_S = 30.0  # to choose the device and the number format: a trial or two
_ROUNDS = 3  # reductions; the first one makes connections
_COMPUTE_S = 0.3
_SLOW = 1.6  # times slower than the others in the middle: named
_MEMORY_SHARE = 0.3  # of what is free, for the gradients of all ranks
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


# ---------------------------------------------------------------- the ranks of this run


@dataclass
class Rank:
    """One of them, and how far it has come."""

    number: int
    child: Child
    at: str = "start"
    since: float = field(default_factory=time.monotonic)
    done: bool = False
    error: str = ""
    advice: str = ""
    told: dict[str, Any] = field(default_factory=dict)  # device, threads, memory_gb, gflops, reduce_s

    def listen(self, wait_s: float = 0.05) -> None:
        for record in self.child.listen(wait_s):
            if "at" in record:
                self.at, self.since = str(record["at"]), time.monotonic()
            self.done = self.done or bool(record.get("done"))
            if "error" in record and not self.error:
                self.error, self.advice = str(record["error"]), str(record.get("advice", ""))
            self.told |= record.get("told", {})


def ranks_of_run(context: ProbeContext) -> Iterator[Finding]:
    """As many as the run would have; of a run with one, two are tried all the same."""
    train = context.run.train
    wanted, why = nvml.count_ranks(train.ranks, train.device)
    count = max(2, wanted)
    job = _job(context, count)
    if lazy := idle(job, count) if wanted > 1 else 0:
        what = f"{lazy} of {count} ranks would stay idle: a step has {division_words(job)} to share out"
        yield warn(
            what,
            f"train.micro_batch {job.micro_batch}, train.tree {job.tree}",
            f"for a new run {without_idle(job, count)}",
        )
    said = f"{count} ranks ({why})" if wanted > 1 else "2 ranks (two on trial: this run has one)"
    yield from trial(requests(context, job, count), said, context.now)


def _job(context: ProbeContext, count: int) -> Job:
    """In numbers; of a model of one's own only its own code knows them, and a usual size stands for it."""
    run = context.run
    shape = known_shape(run) or shape_of(run)
    return job_of(run, shape, 1, "fp32", ranks=count)


def requests(context: ProbeContext, job: Job, count: int) -> list[dict[str, Any]]:
    """What each rank is told: the settings, and as many gradients as the model has, or as fit into the memory that is free."""
    sets = max(2.0, reduction_sets(job, count) + 1)
    room = int(_MEMORY_SHARE * procfs.memory_available() / (4 * sets * count))
    place = context.scratch / f"meeting-{os.getpid()}-{time.monotonic_ns()}"
    whole = {"run": asdict(context.run), "place": str(place), "nodes": job.nodes, "gradients": job.trained}
    return [{**whole, "numbers": min(job.trained, room), "rank": rank, "ranks": count} for rank in range(count)]


def trial(
    asked: list[dict[str, Any]], words: str, now: Callable[[str], None], act_s: float = _ACT_S
) -> Iterator[Finding]:
    """Every rank goes through every act; the first that fails or is late ends it, with who and where."""
    act_s, started = act_s * patience(), time.monotonic()
    ranks = [_start(request) for request in asked]
    try:
        while not all(rank.done for rank in ranks):
            for rank in ranks:
                rank.listen(0.05 / len(ranks))
            now(_where(ranks))
            found = _died(ranks) or _failed(ranks) or _late(ranks, act_s)
            if found is not None:
                yield found
                return
    finally:
        for rank in ranks:
            rank.child.end()
    yield from judge_ranks([rank.told for rank in ranks], asked[0], words, time.monotonic() - started)


def _where(ranks: list[Rank]) -> str:
    """Who is at what: the first few of each act."""
    acts = [(act, [rank.number for rank in ranks if rank.at == act]) for act in _ACTS]
    return ", ".join(
        f"rank {' '.join(map(str, numbers[:4]))}{' ...' if len(numbers) > 4 else ''} at {act}"
        for act, numbers in acts
        if numbers
    )


def judge_ranks(told: list[dict[str, Any]], asked: dict[str, Any], words: str, took_s: float) -> Iterator[Finding]:
    """They met and what they computed is right: what a reduction takes, what each of them has, and who is slow."""
    seconds, whole, tried = max(one["reduce_s"] for one in told), asked["gradients"], asked["numbers"]
    of = "" if tried == whole else f" (by arithmetic from {human_bytes(4 * tried)}, which fit here)"
    reduce_s = seconds * whole / tried
    figures = {"seconds": took_s, "reduce_s": reduce_s, "gradient_bytes": 4.0 * whole}
    yield ok(
        f"{words} met and have the same settings; adding up {human_bytes(4 * whole)} of gradients takes {reduce_s:.3g} s a step{of}",
        figures=figures,
    )
    middle = sorted(one["gflops"] for one in told)[len(told) // 2]
    for rank, one in enumerate(told):
        what = f"rank {rank}: {one['device']}, {one['threads']} threads, {one['memory_gb']:.1f} GB free, {one['gflops']:,.0f} GFLOP/s"
        numbers = {name: float(one[name]) for name in ("threads", "memory_gb", "gflops", "reduce_s")}
        if one["gflops"] * _SLOW < middle:
            why = "every step takes as long as its slowest rank"
            advice = "look at its device: other processes on it, its clock, its threads"
            yield warn(
                f"{what}: slow, others have {middle:,.0f}",
                why,
                advice,
                "slow_rank",
                culprit={"rank": rank},
                figures=numbers,
            )
        else:
            yield ok(what, figures=numbers)


def _start(request: dict[str, Any]) -> Rank:
    number = request["rank"]
    env = {"LAMP_RANK": str(number), "LAMP_WORLD": str(request["ranks"])}
    return Rank(number, Child("lamplighter.doctor.collectives:one_rank", request, env))


def _others(rank: Rank, ranks: list[Rank]) -> str:
    return _where([one for one in ranks if one is not rank])


def _died(ranks: list[Rank]) -> Finding | None:
    """Who is gone without a word; before those who have lost it."""
    for rank in ranks:
        if not rank.child.has_ended() or rank.done:
            continue
        rank.listen()  # its last words
        if rank.done or rank.error:
            continue
        rank.child.end()
        outcome = rank.child.outcome()
        what, why = f"rank {rank.number} {outcome.how()} in {rank.at}", _others(rank, ranks)
        why += f"; its last words: {outcome.last_line or 'none'}"
        advice = "lamp watch -- CMD keeps the evidence of such a death"
        return fault(what, why, advice, "rank_sigkill", culprit={"rank": rank.number})
    return None


def _failed(ranks: list[Rank]) -> Finding | None:
    """Who has raised: first who has not merely lost a peer."""
    failed = sorted((rank for rank in ranks if rank.error), key=lambda rank: rank.error.startswith("PeerLost"))
    if not failed:
        return None
    rank = failed[0]
    advice = rank.advice or "check GLOO_SOCKET_IFNAME, /etc/hosts and the firewall of this machine"
    if other := re.match(r"rank (\d+) has other ", rank.error):  # every rank says so, of one of them
        return fault(rank.error, _others(rank, ranks), advice, "other_run", culprit={"rank": int(other.group(1))})
    what = f"rank {rank.number} failed in {rank.at}: {rank.error}"
    return fault(what, _others(rank, ranks), advice, "no_peer", culprit={"rank": rank.number})


def _late(ranks: list[Rank], act_s: float) -> Finding | None:
    """The rank that did not arrive; None while all goes well."""
    last = min(ranks, key=lambda rank: (_ACTS.index(rank.at), rank.number))
    ahead = [rank for rank in ranks if _ACTS.index(rank.at) > _ACTS.index(last.at)]
    waits = max((rank for rank in ranks if rank is not last), key=lambda rank: time.monotonic() - rank.since)
    alone = len(ahead) == len(ranks) - 1  # all others wait for it: how long they wait counts, not how long it is at it
    waited = time.monotonic() - (min(rank.since for rank in ahead) if alone else max(rank.since for rank in ranks))
    at = min(ahead, key=lambda rank: _ACTS.index(rank.at)).at if alone else last.at
    limits = {"start": _IMPORT_S, "import": _IMPORT_S, "device": _DEVICE_S}
    limit = limits[at] * patience() * max(1.0, len(ranks) / 4) if at in limits else act_s
    if waited < limit or last.done:
        return None
    if alone:
        who = f"rank {waits.number} has" if len(ranks) == 2 else f"{len(ahead)} others have"
        what = f"rank {last.number} did not arrive at {at}: it is at {last.at}, and {who} waited for {waited:.0f} s"
    else:
        what = f"{sum(rank.at == last.at for rank in ranks)} of {len(ranks)} ranks wait in {last.at} for {waited:.0f} s"
    return fault(
        what,
        f"the process of rank {last.number} is {procfs.look(last.child.pid).words}",
        "check GLOO_SOCKET_IFNAME and the firewall; lamp watch -- torchrun ... names it in your own run",
        "rank_late" if alone else "no_peer",
        culprit={"rank": last.number, "act": at, "pid": last.child.pid},
    )


# ---------------------------------------------------------------- inside a rank


def one_rank(request: dict[str, Any], say: Say) -> None:
    """As a rank of the run does it: its device, the meeting, the same settings; then gradients of the model's size, added up."""
    say(at="import")
    import torch

    from lamplighter.config import validated
    from lamplighter.train import exactness, hardware, ranks

    try:
        say(at="device")
        run, world = validated(request["run"]), ranks.world_of(os.environ)
        machine = hardware.detect(run.train, shape=known_shape(run), world=world)
        device = machine.device
        say(told={"device": machine.name, "threads": machine.threads, "memory_gb": _free_gb(device)})
        say(at="rendezvous")
        ranks.meet(world, Path(request["place"]), "nccl" if device.type == "cuda" else "gloo")
        say(at="compare")
        facts = {"settings": exactness.short_hash(repr(run)), "torch": exactness.short_hash(torch.__version__)}
        ranks.refuse_strangers(world, facts, device)
        say(at="compute")
        say(told={"gflops": _gflops(device)})
        say(at="reduce")
        took = min(_reduced(request, world, device) for _ in range(_ROUNDS))
        say(told={"reduce_s": took})
        say(at="end")
        ranks.sum_in_order(world, {world.rank: torch.ones(())}, world.size, device)  # nobody leaves before the others
    except LampError as error:
        say(error=error.what, advice=error.next)
    except Exception as error:  # noqa: BLE001  whatever it is, it is told
        say(error=f"{type(error).__name__}: {first_line(error)}")
    else:
        say(done=True)


def _free_gb(device: torch.device) -> float:
    import torch

    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else procfs.memory_available()
    return round(free / 1e9, 2)


def _gflops(device: torch.device) -> float:
    """A matrix product, again and again while the other ranks do the same: what a rank has when all of them work."""
    import torch

    size = 2048 if device.type == "cuda" else 512
    one = torch.ones(size, size, device=device)
    rounds, began = 0, time.perf_counter()
    while time.perf_counter() - began < _COMPUTE_S:
        float((one @ one)[0, 0])  # a number is only there when the work is done
        rounds += 1
    return 2e-9 * size**3 * rounds / (time.perf_counter() - began)


def _reduced(request: dict[str, Any], world: World, device: torch.device) -> float:
    """Seconds of one reduction of the step's tree; what comes out is checked."""
    import torch

    from lamplighter.train import ranks
    from lamplighter.train.gradient_tree import GradientTree

    nodes = request["nodes"]
    parameter = torch.nn.Parameter(torch.zeros(request["numbers"], device=device))
    tree = GradientTree([parameter], nodes)
    for place in world.node_range(nodes):
        parameter.grad = torch.full_like(parameter, place + 1.0)
        tree.add(place, torch.ones((), device=device))
    ranks.sum_in_order(world, {world.rank: torch.ones(())}, world.size, device)  # all begin together
    began = time.perf_counter()
    loss, votes = ranks.reduce(world, tree, [float(world.rank + 1) if world.rank < nodes else 0.0])
    busy = min(nodes, world.size)
    if float(loss) != nodes or votes != [busy * (busy + 1) / 2]:
        raise ArithmeticError(f"{nodes} losses of 1 and the votes 1 to {busy} gave {float(loss)} and {votes}")
    took = time.perf_counter() - began
    wanted = nodes * (nodes + 1) / 2
    if parameter.grad is None or not bool((parameter.grad == wanted).all()):
        raise ArithmeticError(f"1 + ... + {nodes} gave something else than {wanted:g}")
    return took
