"""Parents of several nodes: what a stranger cannot do, who takes which rank, what launchers say, whose clock counts."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from lamplighter.commands import nodes as nodes_command
from lamplighter.commands.launched import first_host, launch_of, tasks_of_nodes
from lamplighter.commands.train import _for_launch
from lamplighter.config import Run, resolve
from lamplighter.config.schema import Budget
from lamplighter.config.schema import Launch as LaunchSection
from lamplighter.errors import BadConfig, UsageError
from lamplighter.procs import peers
from lamplighter.report import Verdict
from lamplighter.rundir import RunDir
from lamplighter.slot import Slot
from lamplighter.watch import meeting, wire
from lamplighter.watch.elsewhere import RemotePid, shown_pids, slot_of
from lamplighter.watch.launcher import seats_of
from lamplighter.watch.meeting import Card
from lamplighter.watch.wire import LinkLost, SecretDiffers, Wire

SECRET = b"0123456789abcdef"


def _pair(theirs: bytes = SECRET) -> tuple[Wire | Exception, Wire | Exception]:
    """Both ends of a connection after its greeting, or what became of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        link, _ = server.accept()
    ends: dict[str, Wire | Exception] = {}

    def greet(name: str, side: socket.socket, secret: bytes) -> None:
        try:
            ends[name] = (wire.answer if name == "answer" else wire.call)(side, secret)
        except (LinkLost, OSError) as error:
            ends[name] = error
            side.close()

    greeting = threading.Thread(target=greet, args=("answer", link, SECRET))
    greeting.start()
    greet("call", out, theirs)
    greeting.join()
    return ends["answer"], ends["call"]


def test_who_knows_the_secret_is_heard() -> None:
    one, other = _pair()
    assert isinstance(one, Wire) and isinstance(other, Wire)
    other.send("hello", text="x" * 100_000)
    one.send("welcome", node=1)
    got: list[dict[str, object]] = []
    while not got:
        got = one.messages(1.0)
    assert got[0]["do"] == "hello" and len(str(got[0]["text"])) == 100_000
    assert other.messages(1.0) == [{"do": "welcome", "node": 1}]
    other.close()
    with pytest.raises(LinkLost, match="was closed"):
        one.messages(1.0)


def test_a_stranger_is_not_heard_and_learns_nothing() -> None:
    one, other = _pair(b"another secret 0123456789")
    assert isinstance(one, SecretDiffers) and isinstance(other, SecretDiffers)


@pytest.mark.parametrize("tampering", ["changed", "repeated", "left out", "huge"])
def test_what_was_tampered_with_ends_the_connection(tampering: str) -> None:
    one, other = _pair()
    assert isinstance(one, Wire) and isinstance(other, Wire)
    here, there = socket.socketpair()
    real, other.link = other.link, here
    for number in range(2):
        other.send("kill", numbers=[number])
    frame = there.recv(1 << 16)
    size = len(frame) // 2
    sent = {
        "changed": frame[:size].replace(b"[0]", b"[7]"),
        "repeated": frame[:size] * 2,
        "left out": frame[size:],
        "huge": (wire.MOST_BYTES + 1).to_bytes(4, "big") + bytes(32),
    }[tampering]
    real.sendall(sent)
    with pytest.raises(LinkLost, match=r"not genuine|announced"):
        one.messages(1.0)
    for each in (here, there, real, one.link):
        each.close()


def test_node_0_never_answers_more_than_a_greeting_to_a_silent_stranger() -> None:
    nodes = meeting.Nodes(2, "127.0.0.1", _free_port(), 0, 1.0)
    first = meeting.Meeting(nodes, SECRET)
    try:
        with socket.create_connection((nodes.host, nodes.port)) as link:
            assert len(link.recv(4096)) == 8 + 32
            link.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(8 + 32 + 32 - 18))
            link.settimeout(5)
            rest = b""
            while more := link.recv(4096):
                rest += more
            assert rest in (b"", bytes(32))
        assert not first.arrived
    finally:
        first.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_node_that_differs_is_named_with_what_differs() -> None:
    mine = Card("alpha", 1, 1, {"run": "r", "train.lr": "0.1", "torch": "2.13.0"})
    meeting.refuse_other(mine, Card("beta", 2, 4, dict(mine.facts)))
    with pytest.raises(BadConfig) as found:
        meeting.refuse_other(mine, Card("beta", 1, 1, {**mine.facts, "train.lr": "0.2"}))
    assert "node beta" in found.value.what and "train.lr: 0.1 here, 0.2 there" in found.value.why


def test_a_secret_that_could_be_guessed_is_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "r")
    with pytest.raises(BadConfig, match="too short"):
        meeting.secret_of(run, {"LAMP_SECRET": "word"}, None, first=True)
    assert meeting.secret_of(run, {}, None, first=False) is None
    made = meeting.secret_of(run, {}, None, first=True)
    assert made is not None and len(made) == 64 and meeting.secret_file(run).stat().st_mode & 0o777 == 0o600
    assert meeting.secret_of(run, {}, None, first=False) == made, "whoever sees the folder has it"


@pytest.mark.parametrize(
    ("alive", "here", "spare", "seats"),
    [
        ([0, 1, 3], [0, 1], False, [0, 1, 3]),  # rank 2 of node 1 died
        ([1, 2, 3], [1], False, [1, 3, 2]),  # rank 0 died: the other one of node 0 takes its place
        ([1, 2, 3], [1], True, [None, 1, 2, 3]),  # the one that stands by takes it
        ([2, 3], [], False, None),  # nobody of node 0 is left
        ([2, 3], [], True, [None, 3, 2]),
        ([0], [0], False, [0]),
    ],
)
def test_rank_0_stays_on_node_0(alive: list[int], here: list[int], spare: bool, seats: list[int | None] | None) -> None:
    assert seats_of(alive, here, 4, spare, spare) == seats


def test_a_process_of_another_machine_cannot_be_mistaken_for_one_of_ours() -> None:
    pid = RemotePid.of(2, 4711, "beta")
    assert pid != 4711 and f"process {pid}" == "process 4711 on beta" and pid.there == 4711
    assert shown_pids({"pid": pid, "rank": 3}) == {"pid": 4711, "host": "beta", "rank": 3}
    import copy
    from dataclasses import asdict

    assert shown_pids(asdict(Verdict("dead", "killed", "", "", culprit={"pid": pid}))["culprit"])["host"] == "beta"
    assert copy.deepcopy(pid) == pid


def test_moments_of_another_clock_are_told_in_ours() -> None:
    slot = Slot(pid=5, rank=1, step=7, tick_ns=1000, coll_since_ns=2000, coll_ns=300, loss=2.5, phase="train")
    told = json.loads(json.dumps(slot.told()))
    there = slot_of(told, 10**9, 99)
    assert there is not None
    assert (there.tick_ns, there.coll_since_ns, there.coll_ns) == (10**9 + 1000, 10**9 + 2000, 300)
    assert (there.pid, there.step, there.loss, there.phase) == (99, 7, 2.5, "train")


def test_connections_to_a_lost_machine_end_at_once() -> None:
    with socket.create_server(("127.0.0.2", 0)) as lost, socket.create_server(("127.0.0.3", 0)) as kept:
        to_lost, to_kept = (socket.create_connection(one.getsockname()) for one in (lost, kept))
        with to_lost, to_kept:
            assert peers.end_connections_to("127.0.0.2") == 1
            assert to_lost.recv(1) == b"" and to_kept.getpeername()[0] == "127.0.0.3"
            to_kept.setblocking(False)
            with pytest.raises(BlockingIOError):
                to_kept.recv(1)
    assert peers.interface_of("127.0.0.1") == "lo" and peers.is_own("127.0.0.1") and not peers.is_own("192.0.2.1")


def test_what_srun_and_torchrun_say_of_several_nodes() -> None:
    assert (
        first_host("gpu[07-09,12],cpu3") == "gpu07" and first_host("alpha") == "alpha" and first_host("a1,a2") == "a1"
    )
    assert first_host("rack[1-2]-x") == "rack1-x" and tasks_of_nodes("2(x3),1") == [2, 2, 2, 1]
    slurm = {"SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "17",
             "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_NODELIST": "n[1-2]"}  # fmt: skip
    found = launch_of(slurm)
    assert found is not None and found.leads
    assert (found.ranks, found.nodes, found.node, found.host, found.port) == (None, 2, 1, "n1", 29528)
    each = launch_of({**slurm, "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_LOCALID": "3"})
    assert each is not None and each.ranks == 4 and not each.leads
    torchrun = {"LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29400"}  # fmt: skip
    found = launch_of(torchrun)
    assert found is not None and (found.ranks, found.nodes, found.node, found.host, found.port) == (
        2,
        2,
        1,
        "n1",
        29401,
    )
    wanted = _for_launch(resolve(), found)
    assert wanted.run.train.ranks == 2 and wanted.origin["train.ranks"] == "torchrun", "as good as given at a resume"
    assert launch_of({}) is None
    with pytest.raises(UsageError, match="3 processes, 2 of them here"):
        launch_of({**torchrun, "WORLD_SIZE": "3"})


def test_nodes_are_asked_for_or_said_by_a_launcher() -> None:
    assert nodes_command.nodes_of(Run(), None) is None
    with pytest.raises(UsageError, match=r"rendezvous is not set"):
        nodes_command.nodes_of(Run(launch=LaunchSection(nodes=2)), None)
    asked = nodes_command.nodes_of(Run(launch=LaunchSection(nodes=2, rendezvous="127.0.0.1:1234", node=1)), None)
    assert asked is not None and asked.address == "127.0.0.1:1234" and not asked.is_first
    with pytest.raises(ValueError, match="HOST:PORT"):
        LaunchSection(nodes=2, rendezvous="somewhere")
    with pytest.raises(BadConfig) as refused:
        resolve(None, None, {"launch.nodes": ["2"], "launch.rendezvous": ["h:99999"]})
    assert refused.value.why == "a port is a number from 1 to 65535"
    assert Budget(usd_per_hour=3.0).of_nodes(2).spent_usd(3600) == 6.0 and Budget().of_nodes(4) == Budget()
