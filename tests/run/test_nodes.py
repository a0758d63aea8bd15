"""Several nodes by the real command: two network namespaces are two machines, with a cable between them that can be cut.

One parent on each; the bits are those of one rank on one machine, through deaths on the other node and through its loss.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lamplighter.rundir import RunDir, newest_first, read_json, read_status
from running import LAMP, LONG, TINY, clean_env, lamp, losses_of, verdicts_of, wait_for

WORDS = ["train", "--run", "r", *TINY, "--train.batch_size", "6", "--train.micro_batch", "2", "--eval.every_steps", "100",
         "--save.every_steps", "50", "--save.keep", "100", "--train.ranks", "1"]  # fmt: skip
STEPS = ["--train.steps", "150"]
LONGER = ["--train.steps", "700", "--save.every_steps", "500", "--eval.every_steps", "0"]
FIRST, SECOND = "10.203.7.1", "10.203.7.2"
PORT = 29511
SECRET = "for-tests-only-0123456789"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Cable:
    """Two machines, alpha and beta, and the cable between them."""

    def __init__(self, name: str) -> None:
        self.alpha, self.beta = f"{name}a", f"{name}b"
        self.started: list[subprocess.Popen[str]] = []
        self.ends = {self.alpha: f"{name}va", self.beta: f"{name}vb"}
        try:
            self._lay()
        except BaseException:
            self.remove()
            raise

    def _lay(self) -> None:
        for space in self.ends:
            _ip("netns", "add", space)
        one, other = self.ends.items()
        _ip("link", "add", one[1], "netns", one[0], "type", "veth", "peer", "name", other[1], "netns", other[0])
        for (space, end), address in zip(self.ends.items(), (FIRST, SECOND), strict=True):
            _ip("-n", space, "addr", "add", f"{address}/24", "dev", end)
            for device in ("lo", end):
                _ip("-n", space, "link", "set", device, "up")

    def cut(self) -> None:
        """In the middle: both ends stay up, and what is sent reaches nobody (it goes to a machine that is not there)."""
        other = dict(zip(self.ends, (SECOND, FIRST), strict=True))
        for space, end in self.ends.items():
            _ip(
                "-n",
                space,
                "neigh",
                "replace",
                other[space],
                "lladdr",
                "02:00:00:00:00:99",
                "dev",
                end,
                "nud",
                "permanent",
            )

    def start(self, space: str, place: Path, *words: str, **env: str) -> subprocess.Popen[str]:
        host = "alpha" if space == self.alpha else "beta"
        place.mkdir(exist_ok=True)
        full = [
            "ip",
            "netns",
            "exec",
            space,
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname {host}; exec "$@"',
            "sh",
            *LAMP,
            *words,
        ]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(full, cwd=place, env=clean_env(**env), **pipes)
        self.started.append(process)
        return process

    def remove(self) -> None:
        for process in self.started:  # those of a test that has failed
            if process.poll() is None:
                process.kill()
                process.communicate()
        for space in self.ends:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)


@pytest.fixture
def cable() -> Iterator[Cable]:
    if os.getuid() != 0:
        pytest.skip("network namespaces need root")
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"network namespaces are not permitted here: {tried.stderr.strip()}")
    if shutil.which("ip") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("ip is missing (Debian: iproute2)")
    try:
        made = Cable(f"lamp{os.getpid() % 10_000}")
    except subprocess.CalledProcessError as error:
        why = error.stderr.decode(errors="replace").strip()
        if not any(words in why for words in ("not permitted", "not supported", "Permission denied")):
            raise
        pytest.skip(f"network namespaces are not permitted here: {' '.join(error.cmd)}: {why}")
    try:
        yield made
    finally:
        made.remove()


MEET = ["--launch.nodes", "2", "--launch.rendezvous", f"{FIRST}:{PORT}"]


def _folder(place: Path) -> RunDir:
    return RunDir(place / "runs" / "r")


def _stored(place: Path) -> list[bytes]:
    newest = newest_first(_folder(place).checkpoints)[0]
    return [
        newest.name.encode(),
        *((newest / name).read_bytes() for name in ("model.safetensors", "training/optimizer.safetensors")),
    ]


def _ranks(place: Path, step: int, process: subprocess.Popen[str], deadline_s: float = 200) -> list[dict[str, Any]]:
    """The ranks once so many steps are made."""
    run = _folder(place)
    wait_for(
        lambda: (read_status(run).get("step") or 0) >= step and len(read_status(run).get("ranks") or ()) > 0,
        deadline_s,
        process,
    )
    found: list[dict[str, Any]] = read_json(run.status)["ranks"]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one rank of one machine."""
    place = tmp_path_factory.mktemp("alone")
    done = lamp(*WORDS, *STEPS, cwd=place)
    assert done.returncode == 0, done.stdout
    return place


def test_two_nodes_without_a_shared_folder_have_the_bits_of_one_rank(cable: Cable, tmp_path: Path, alone: Path) -> None:
    """A rank on the other node is killed on the way: it is named with its host, and the run goes on."""
    here, there = tmp_path / "alpha", tmp_path / "beta"
    first = cable.start(cable.alpha, here, *WORDS, *STEPS, *MEET, "--budget.usd_per_hour", "3", LAMP_SECRET=SECRET)
    status = _folder(here).status
    wait_for(lambda: status.exists() and "missing" in read_json(status).get("now", ""), 60, first)
    waiting = read_json(status)
    assert f"1 of 2 nodes missing at {FIRST}:{PORT}; here: alpha (node 0)" in waiting["now"]
    second = cable.start(cable.beta, there, *WORDS, *STEPS, *MEET, "--budget.usd_per_hour", "3", LAMP_SECRET=SECRET)
    ranks = _ranks(here, 20, first)
    assert [(one["rank"], one["host"]) for one in ranks] == [(0, "alpha"), (1, "beta")]
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    said, _ = first.communicate(timeout=200)
    there_said, _ = second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), said + there_said
    (verdict,) = verdicts_of(_folder(here), "killed")
    assert verdict["culprit"] == {"pid": ranks[1]["pid"], "host": "beta", "rank": 1, "step": verdict["culprit"]["step"]}
    assert f"rank 1 (process {ranks[1]['pid']} on beta) was killed by SIGKILL" in verdict["why"]
    assert losses_of(_folder(here)) == losses_of(_folder(alone)) and _stored(here) == _stored(alone)
    assert "node 1 (beta, 10.203.7.2): 1 rank; it does not see the run's folder" in said
    assert "every rank holds the whole model (train.shard auto): sharded ranks write one checkpoint together" in said
    assert "look there with: lamp watch r" in there_said and "finished r" in there_said
    assert not newest_first(RunDir(there / "runs" / "r" / "nodes" / "1").checkpoints)
    end = read_json(status)
    assert end["usd"] == pytest.approx(2 * 3 * end["spent_s"] / 3600, rel=0.01), (
        "two machines cost twice the price of one"
    )
    assert SECRET not in said + there_said


@LONG
def test_a_cut_cable_is_named_in_seconds_and_node_0_goes_on_alone(cable: Cable, tmp_path: Path) -> None:
    here, there = tmp_path / "alpha", tmp_path / "beta"
    first = cable.start(cable.alpha, here, *WORDS, *LONGER, *MEET, LAMP_SECRET=SECRET)
    second = cable.start(cable.beta, there, *WORDS, *LONGER, *MEET, LAMP_SECRET=SECRET)
    _ranks(here, 50, first)
    cable.cut()
    cut_at = time.time()
    wait_for(lambda: bool(verdicts_of(_folder(here), "node_lost")), 60, first)
    (verdict,) = verdicts_of(_folder(here), "node_lost")
    named_s = verdict["t"] - cut_at
    step = read_status(_folder(here))["step"]
    wait_for(lambda: read_status(_folder(here))["step"] > step, 60, first)
    again_s = time.time() - cut_at
    there_said, _ = second.communicate(timeout=60)
    assert (
        second.returncode == 71 and "node 0 (alpha) is lost: its machine has acknowledged nothing for 4 s" in there_said
    )
    assert "next, on every node: lamp train --run r" in there_said
    nodes = read_status(_folder(here))["nodes"]
    assert [(one["host"], one["state"]) for one in nodes] == [("beta", "lost")]
    said, _ = first.communicate(timeout=300)
    assert first.returncode == 0, said
    assert "node 1 (beta, 10.203.7.2): its machine has acknowledged nothing for 4 s; ranks 1 went" not in said
    assert "node 1 (beta, 10.203.7.2): its machine has acknowledged nothing for 4 s; rank 1 went with it" in said
    assert "attempt 2: 1 of 2 ranks go on at once, with the state that they hold" in said
    done = lamp(*WORDS, *LONGER, cwd=tmp_path, timeout=300)
    assert done.returncode == 0 and losses_of(_folder(here)) == losses_of(_folder(tmp_path))
    assert _stored(here) == _stored(tmp_path)
    warnings.warn(f"named {named_s:.1f} s after the cut, next step seen after {again_s:.1f} s", stacklevel=1)
    assert named_s < 8, "4 s without an acknowledgement, and the look that finds it"


@LONG
def test_a_shared_folder_is_found_and_a_stop_on_the_other_node_saves_once(
    cable: Cable, tmp_path: Path, alone: Path
) -> None:
    """The secret is read from the folder. TERM on node 1 stops all; the run goes on on one machine, bit for bit."""
    first = cable.start(cable.alpha, tmp_path, *WORDS, *STEPS, *MEET)
    second = cable.start(cable.beta, tmp_path, *WORDS, *STEPS, *MEET)
    _ranks(tmp_path, 20, first)
    os.kill(_parent(cable, cable.beta), signal.SIGTERM)
    said, _ = first.communicate(timeout=120)
    there_said, _ = second.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (75, 75), said + there_said
    assert "it sees the run's folder" in said and "stopped early (SIGTERM on beta)" in said
    assert (_folder(tmp_path).path / "nodes" / "secret").stat().st_mode & 0o777 == 0o600
    done = lamp(*WORDS, *STEPS, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)


SHARDED = ["--train.shard", "full"]


def _parent(cable: Cable, space: str) -> int:
    """The first process of that machine."""
    found = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=True).stdout.split()
    return min(map(int, found))


@LONG
@pytest.mark.parametrize("each", [1, 2])
def test_sharded_over_two_nodes_with_one_folder_has_the_bits_of_one_rank(
    cable: Cable, tmp_path: Path, alone: Path, each: int
) -> None:
    """A rank on the other node is killed on the way: no rank holds what it has lost, so all go on from the durable step."""
    words = [*WORDS[:-1], str(each), *STEPS, *SHARDED, *MEET]
    going = [cable.start(space, tmp_path, *words) for space in (cable.alpha, cable.beta)]
    ranks = _ranks(tmp_path, 60, going[0])
    assert [one["host"] for one in ranks] == ["alpha"] * each + ["beta"] * each
    os.kill(ranks[-1]["pid"], signal.SIGKILL)
    said = [process.communicate(timeout=300)[0] for process in going]
    assert [process.returncode for process in going] == [0, 0], "\n".join(said)
    (verdict,) = verdicts_of(_folder(tmp_path), "killed")
    assert verdict["culprit"]["host"] == "beta"
    assert (
        f"sharded: each of {2 * each} ranks holds its rows of weights, gradients and optimizer (train.shard full"
        in said[0]
    )
    assert "a lost rank takes all back to the durable step" in said[0] and "resumed from checkpoint-50" in said[0]
    checkpoints = _folder(tmp_path).checkpoints
    assert {path.name for path in newest_first(checkpoints)} == {f"checkpoint-{step}" for step in (50, 100, 150)}
    assert not [path for path in checkpoints.rglob("*") if "parts" in path.parts or path.name.startswith(".")]
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)
    for step in (50, 100):
        mine, theirs = (
            _folder(place).checkpoint(step) / "training/optimizer.safetensors" for place in (tmp_path, alone)
        )
        assert mine.read_bytes() == theirs.read_bytes()


@LONG
def test_a_cut_cable_takes_sharded_ranks_back_to_the_durable_step(cable: Cable, tmp_path: Path) -> None:
    """Node 0 goes on alone, with the whole model, as no rank holds what the lost one held."""
    more = ["--train.steps", "400"]
    shared, plain = tmp_path / "shared", tmp_path / "plain"
    going = [cable.start(space, shared, *WORDS, *more, *SHARDED, *MEET) for space in (cable.alpha, cable.beta)]
    _ranks(shared, 60, going[0])
    cable.cut()
    said = [process.communicate(timeout=300)[0] for process in going]
    assert [process.returncode for process in going] == [0, 71], "\n".join(said)
    assert len(verdicts_of(_folder(shared), "node_lost")) == 1
    assert "rank 1 went with it" in said[0] and "resumed from checkpoint-" in said[0]
    plain.mkdir()
    done = lamp(*WORDS, *more, cwd=plain, timeout=300)
    assert done.returncode == 0 and losses_of(_folder(shared)) == losses_of(_folder(plain))
    assert _stored(shared) == _stored(plain)


@LONG
def test_sharded_nodes_are_stopped_from_the_other_one_and_one_machine_goes_on(
    cable: Cable, tmp_path: Path, alone: Path
) -> None:
    """The other one sees the folder by another path."""
    there = tmp_path / "mounted"
    there.mkdir()
    (tmp_path / "runs").mkdir()
    (there / "runs").symlink_to(tmp_path / "runs")
    words = [*WORDS, *STEPS, *SHARDED, *MEET]
    going = [cable.start(space, place, *words) for space, place in ((cable.alpha, tmp_path), (cable.beta, there))]
    _ranks(tmp_path, 20, going[0])
    os.kill(_parent(cable, cable.beta), signal.SIGTERM)
    said = [process.communicate(timeout=120)[0] for process in going]
    assert [process.returncode for process in going] == [75, 75], "\n".join(said)
    assert "stopped early (SIGTERM on beta)" in said[0]
    saved = newest_first(_folder(tmp_path).checkpoints)[0]
    done = lamp(*WORDS, *STEPS, "--train.shard", "none", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert (
        f"resumed from {saved.name}" in done.stdout
        and "sharded then, replicated now, with the same bits" in done.stdout
    )
    assert losses_of(_folder(tmp_path)) == losses_of(_folder(alone)) and _stored(tmp_path) == _stored(alone)


def test_sharded_nodes_without_a_shared_folder_are_refused_in_words_on_both(cable: Cable, tmp_path: Path) -> None:
    """As soon as it is known, before any rank is started; `auto` means whole models there, and says so."""
    places = {cable.alpha: tmp_path / "alpha", cable.beta: tmp_path / "beta"}
    going = [
        cable.start(space, place, *WORDS, *STEPS, *SHARDED, *MEET, LAMP_SECRET=SECRET)
        for space, place in places.items()
    ]
    said = [process.communicate(timeout=60)[0] for process in going]
    assert [process.returncode for process in going] == [78, 78], "\n".join(said)
    for words in said:
        assert "train.shard is full, and the 2 nodes share no folder" in words
        assert "is not seen by node 1 (beta, 10.203.7.2)" in words
    status = read_json(_folder(tmp_path / "alpha").status)
    assert (status["state"], status["exit_code"]) == ("failed", 78) and not status["ranks"]


@LONG
def test_a_stopped_rank_on_the_other_node_is_named_and_a_stopped_parent_is_no_lost_node(
    cable: Cable, tmp_path: Path
) -> None:
    here = tmp_path / "alpha"
    longer = ["--train.steps", "200000", "--save.every_steps", "0", "--eval.every_steps", "0"]
    first = cable.start(cable.alpha, here, *WORDS, *longer, *MEET, LAMP_SECRET=SECRET)
    second = cable.start(cable.beta, tmp_path / "beta", *WORDS, *longer, *MEET, LAMP_SECRET=SECRET)
    ranks = _ranks(here, 50, first)
    parent = int(Path(f"/proc/{ranks[1]['pid']}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGSTOP)
    status = _folder(here).status
    wait_for(lambda: read_json(status)["nodes"][0]["state"] == "silent", 30, first)
    time.sleep(6)  # longer than a cut cable takes
    step = read_json(status)["step"]
    os.kill(parent, signal.SIGCONT)
    wait_for(lambda: read_json(status)["nodes"][0]["state"] == "", 30, first)
    wait_for(lambda: read_json(status)["step"] > step, 30, first)
    assert not verdicts_of(_folder(here), "node_lost")
    stopped_at = time.time()
    os.kill(ranks[1]["pid"], signal.SIGSTOP)
    wait_for(lambda: len(verdicts_of(_folder(here), "rank_sigstop")) == 2, 60, first)
    named, acted = verdicts_of(_folder(here), "rank_sigstop")
    warnings.warn(
        f"named after {named['t'] - stopped_at:.1f} s, acted upon after {acted['t'] - stopped_at:.1f} s", stacklevel=1
    )
    assert (named["culprit"]["host"], named["culprit"]["pid"]) == ("beta", ranks[1]["pid"]) and acted[
        "action"
    ] == "restart"
    attempt = read_json(status)["attempt"]
    wait_for(lambda: read_json(status)["attempt"] > attempt or read_json(status)["step"] > step + 200, 60, first)
    os.kill(first.pid, signal.SIGKILL)  # the parent of node 0, which `exec` has put there
    there_said, _ = second.communicate(timeout=60)
    first.communicate(timeout=60)
    assert second.returncode == 71 and "node 0 (alpha) is lost: the connection was closed" in there_said
    left = subprocess.run(
        ["ip", "netns", "pids", cable.beta], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not left, "nothing stays behind"


def test_who_does_not_belong_is_refused_by_name(cable: Cable, tmp_path: Path) -> None:
    """Other settings, another secret, a port that is taken, and a node that never comes: no run begins."""
    here = tmp_path / "alpha"
    wait = ["--launch.wait_s", "12"]
    first = cable.start(cable.alpha, here, *WORDS, *STEPS, *MEET, *wait, LAMP_SECRET=SECRET)
    time.sleep(0.1)
    stranger = cable.start(
        cable.beta, tmp_path / "x", *WORDS, *STEPS, *MEET, *wait, LAMP_SECRET="another-secret-9876543210"
    )
    stranger_said, _ = stranger.communicate(timeout=60)
    assert stranger.returncode == 78 and "does not know this secret" in stranger_said, stranger_said
    taken = cable.start(cable.alpha, tmp_path / "y", *WORDS, *STEPS, *MEET, *wait, LAMP_SECRET=SECRET)
    taken_said, _ = taken.communicate(timeout=60)
    assert taken.returncode == 69 and "the port is taken" in taken_said and "python" in taken_said, taken_said
    other = cable.start(
        cable.beta, tmp_path / "z", *WORDS, *STEPS, *MEET, *wait, "--train.lr", "0.5", LAMP_SECRET=SECRET
    )
    said, _ = first.communicate(timeout=60)
    other_said, _ = other.communicate(timeout=60)
    assert (first.returncode, other.returncode) == (78, 78), said + other_said
    assert "node beta has another run in hand than node 0 (alpha)" in said and "train.lr" in said
    assert "refused, with another secret or none: 10.203.7.2" in said
    nobody = cable.start(cable.alpha, here, *WORDS, *STEPS, *MEET, "--launch.wait_s", "2", LAMP_SECRET=SECRET)
    said, _ = nobody.communicate(timeout=60)
    assert nobody.returncode == 71 and "not all nodes have come within 2 s" in said, said
    assert "1 of 2 nodes missing" in said and "exit_code" in _folder(here).status.read_text()


# From its 31st pass on every loss of rank 1, on the other node, is no number.
BAD_NODE = """
import os

import torch

class Model(torch.nn.Module):
    def __init__(self, vocab_size, width, **_):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab_size, width)
        self.head = torch.nn.Linear(width, vocab_size)
        self.count = 0

    def forward(self, ids):
        self.count += self.training
        bad = os.environ["LAMP_RANK"] == "1" and self.count > 30
        return self.head(self.embed(ids)) * (float("nan") if bad else 1.0)
"""


@LONG
def test_all_nodes_go_back_to_a_checkpoint_that_only_node_0_has(cable: Cable, tmp_path: Path) -> None:
    here, there = tmp_path / "alpha", tmp_path / "beta"
    more = ["--model.family", "bad_node:Model", "--train.micro_batch", "3", "--train.steps", "60", "--save.every_steps", "20"]  # fmt: skip
    for place in (here, there):
        place.mkdir()
        (place / "bad_node.py").write_text(BAD_NODE)
    going = [
        cable.start(space, place, *WORDS, *more, *MEET, "--launch.spare", "0", LAMP_SECRET=SECRET)
        for space, place in ((cable.alpha, here), (cable.beta, there))
    ]
    said = [process.communicate(timeout=200)[0] for process in going]
    assert [process.returncode for process in going] == [76, 76], "\n".join(said)
    actions = [one["action"] for one in verdicts_of(_folder(here), "nan_batch")]
    assert actions == [*["skip"] * 3, "restart", *["skip"] * 3, "stop"], said[0]
    assert [path.name for path in newest_first(_folder(here).checkpoints)] == ["checkpoint-20"]
    assert not newest_first(RunDir(there / "runs" / "r" / "nodes" / "1").checkpoints)
