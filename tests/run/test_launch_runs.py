"""lamp launch by the real command: what it writes is read by the parsers of those who will read it; SLURM itself where it is installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from lamplighter.rundir import RunDir, read_status
from running import LONG, TINY, Command, events_of, lamp, losses_of, wait_for

SETTINGS = "train: {steps: 7}\nsave: {keep: 2}\n"


def _written(command: Command, tmp_path: Path, *words: str) -> str:
    (tmp_path / "my run.yaml").write_text(SETTINGS)
    done = command("launch", words[0], "my run.yaml", "-o", "file", *words[1:], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "made: file\nnext: " in done.stdout
    assert ("stay idle" in done.stdout) == ("A100:8" in words), "16 GPUs, and 8 parts of a step; nowhere else"
    return (tmp_path / "file").read_text()


def test_the_sbatch_script(command: Command, tmp_path: Path) -> None:
    text = _written(
        command, tmp_path, "slurm", "--gpus", "4", "--time", "8:00:00", "--partition", "gpu", "--train.lr", "1e-3"
    )
    assert subprocess.run(["bash", "-n", tmp_path / "file"], check=False).returncode == 0
    options = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"--job-name='my run'", "--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=4", "--time=8:00:00", "--partition=gpu",
            "--signal=TERM@120", "--requeue", "--open-mode=append"} <= set(options)  # fmt: skip
    assert "\nsrun lamp train 'my run.yaml' --train.lr 1e-3\ncode=$?" in text and "--launch.nodes" not in text
    assert '[ "$code" -eq 75 ]' in text and 'scontrol requeue "$SLURM_JOB_ID"' in text


def test_the_script_for_several_nodes_meets_at_the_first_host(command: Command, tmp_path: Path) -> None:
    text = _written(command, tmp_path, "slurm", "--nodes", "2", "--cpus", "3")
    assert "#SBATCH --nodes=2" in text and 'scontrol show hostnames "$SLURM_JOB_NODELIST"' in text
    assert "export LAMP_SECRET=$(od " in text
    assert '--launch.nodes 2 --launch.rendezvous "$head:29511"' in text and "SRUN_CPUS_PER_TASK" in text
    assert subprocess.run(["bash", "-n", tmp_path / "file"], check=False).returncode == 0


@pytest.mark.parametrize("code", [75, 0, 66])
def test_the_script_is_queued_again_after_75_alone(command: Command, tmp_path: Path, code: int) -> None:
    """With stand-ins for srun and scontrol: what the script itself does."""
    _written(command, tmp_path, "slurm")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, does in (("srun", f'[ "$1 $2" = "lamp train" ] && exit {code}'), ("scontrol", 'echo "$@" > asked')):
        (tools / name).write_text(f"#!/bin/sh\n{does}\n")
        (tools / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    done = subprocess.run(["bash", "file"], cwd=tmp_path, env=env, check=False)
    assert done.returncode == code
    assert (tmp_path / "asked").exists() == (code == 75)
    assert code != 75 or (tmp_path / "asked").read_text() == "requeue 17\n"


def test_the_skypilot_yaml(command: Command, tmp_path: Path) -> None:
    words = ("sky", "--gpus", "A100:8", "--nodes", "2", "--save.mirror", "gs://bucket/runs")
    found = yaml.safe_load(_written(command, tmp_path, *words))
    assert found["resources"] == {"accelerators": "A100:8", "use_spot": True,
                                  "job_recovery": {"strategy": "EAGER_NEXT_REGION", "recover_on_exit_codes": [75]}}  # fmt: skip
    assert found["envs"] == {"LAMP_SECRET": None}, "sky asks for what is null"
    assert found["num_nodes"] == 2 and found["name"] == "my run" and "gcsfs" in found["setup"]
    assert found["run"].startswith("lamp train 'my run.yaml' --save.mirror gs://bucket/runs --launch.nodes 2")
    for script in (found["run"], found["setup"]):
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_the_kubernetes_job(command: Command, tmp_path: Path) -> None:
    settings, job = yaml.safe_load_all(
        _written(
            command, tmp_path, "kubernetes", "--image", "a/b:1", "--gpus", "2", "--claim", "runs", "--train.lr", "1e-3"
        )
    )
    assert settings["kind"] == "ConfigMap" and settings["data"]["my run.yaml"] == SETTINGS
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (job["apiVersion"], job["kind"], job["metadata"]["name"]) == ("batch/v1", "Job", "my-run")
    assert spec["backoffLimit"] > 0 and pod["restartPolicy"] == "Never", "as podFailurePolicy wants it"
    ignored = [rule["onExitCodes"]["values"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert ignored[0] == [75] and 78 in ignored[1] and pod["terminationGracePeriodSeconds"] == 120
    (container,) = pod["containers"]
    assert container["command"][:3] == ["lamp", "train", "/settings/my run.yaml"]
    assert container["command"][-2:] == ["--runs-dir", "/runs"] and container["resources"]["limits"] == {
        "nvidia.com/gpu": "2"
    }
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_what_is_wrong_is_said_before_anything_waits_in_a_queue(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "my.yaml").write_text(SETTINGS)
    (tmp_path / "bad.yaml").write_text("train: {stepz: 7}\n")
    (tmp_path / "five.yaml").write_text(f"{SETTINGS}launch: {{nodes: 5, rendezvous: 'h:1'}}\n")
    (tmp_path / "mine.sh").write_text("echo mine\n")
    for words, code, said in (
        (("slurm", "bad.yaml"), 78, "stepz"),
        (("slurm", "my.yaml", "--submit"), 66, "there is no sbatch here"),
        (("slurm", "my.yaml", "-o", "mine.sh"), 2, "is not of lamp launch"),
        (("slurm", "my.yaml", "--save.mirror", "s3://me:sesame@b/x"), 2, "--save.mirror holds a secret"),
        (("sky", "my.yaml"), 78, "save.mirror"),
        (("kubernetes", "my.yaml", "--image", "a"), 78, "--claim"),
        (("kubernetes", "my.yaml"), 2, "--image is missing"),
        (("lsf", "my.yaml"), 2, "lamp launch has no lsf"),
        (("slurm", "my.yaml", "--gpus", "-3"), 2, "--gpus -3"),
        (("slurm", "my.yaml", "--nodes", "0"), 2, "--nodes 1 or more"),
        (("slurm", "my.yaml", "--time", "banana"), 2, "--time banana"),
        (("slurm", "my.yaml", "--nodes", "2", "--launch.nodes", "5"), 2, "--launch.nodes: the file says that itself"),
        (("slurm", "five.yaml", "--nodes", "2"), 2, "launch.nodes is 5, and the job would have 2"),
        (("sky", "my.yaml", "--gpus", "A100:-1"), 2, "NAME:COUNT"),
        (("kubernetes", "my.yaml", "--image", "a", "--nodes", "2"), 2, "for Kubernetes one pod is written"),
    ):
        done = command("launch", *words, cwd=tmp_path)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
        assert "sesame" not in done.stderr + done.stdout
    assert (tmp_path / "mine.sh").read_text() == "echo mine\n"


# ---------------------------------------------------------------- SLURM itself


DAEMONS = ("munged", "slurmctld", "slurmd")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cluster of this machine alone: munged, slurmctld and slurmd of our own, with keys, ports and folders of their own."""
    if missing := [name for name in DAEMONS if shutil.which(name) is None]:
        pytest.skip(f"SLURM is not installed here: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)")
    if os.getuid() != 0:
        pytest.skip("slurmd needs root")
    home, host = tmp_path_factory.mktemp("slurm"), socket.gethostname()
    home.chmod(0o700)
    (home / "munge.key").write_bytes(os.urandom(1024))
    (home / "munge.key").chmod(0o600)
    for name in ("state", "spool"):
        (home / name).mkdir()
    (home / "slurm.conf").write_text(f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
CredType=cred/munge
SlurmctldPort={_free_port()}
SlurmdPort={_free_port()}
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd.pid
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
""")
    monkeypatch.setenv("SLURM_CONF", str(home / "slurm.conf"))
    files = (
        ("key-file", "munge.key"),
        ("socket", "munge.socket"),
        ("pid-file", "m.pid"),
        ("log-file", "m.log"),
        ("seed-file", "seed"),
    )
    munged = ["munged", "--foreground", "--force", *(f"--{flag}={home / name}" for flag, name in files)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for words, ready in (
            (munged, lambda: (home / "munge.socket").exists()),
            (["slurmctld", "-D"], _answers),
            (["slurmd", "-D"], _idle),
        ):
            with open(home / f"{words[0]}.out", "wb") as output:
                started.append(subprocess.Popen(words, stdout=output, stderr=output))
            wait_for(ready, process=started[-1], deadline_s=60)
        yield home
    finally:
        subprocess.run(["scancel", "--full", "--signal=KILL", "--user=root"], check=False)
        for daemon in reversed(started):
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _answers() -> bool:
    return subprocess.run(["scontrol", "ping"], capture_output=True, check=False).returncode == 0


def _idle() -> bool:
    return "idle" in subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True, check=False).stdout


def _job(number: str) -> dict[str, str]:
    told = subprocess.run(["scontrol", "show", "job", "-o", number], capture_output=True, text=True, check=False).stdout
    return dict(part.split("=", 1) for part in told.split() if "=" in part)


@LONG
def test_a_notice_saves_and_the_job_is_queued_again_and_resumes(cluster: Path, tmp_path: Path) -> None:
    """sbatch, srun and scontrol of a real SLURM. The notice is sent by scancel --signal, to the job's steps as --signal=TERM@120 does."""
    submitted = lamp(
        "launch",
        "slurm",
        "--run",
        "r",
        *TINY,
        "--train.steps",
        "100000",
        "--save.every_steps",
        "100000",
        "--submit",
        cwd=tmp_path,
    )
    assert submitted.returncode == 0, submitted.stderr
    number = submitted.stdout.partition("as job ")[2].split()[0]
    run = RunDir(tmp_path / "runs" / "r")
    wait_for(lambda: (read_status(run).get("step") or 0) > 50, deadline_s=90)
    subprocess.run(["scancel", "--signal=TERM", number], check=True)
    wait_for(lambda: _job(number).get("Restarts") == "1", deadline_s=60)
    saved = events_of(run, "checkpoint")[-1]["step"]
    assert (
        saved > 50 and events_of(run, "stop")[-1]["code"] == 75 and "SIGTERM" in events_of(run, "stop")[-1]["outcome"]
    )
    before = losses_of(run)
    subprocess.run(
        ["scontrol", "update", f"JobId={number}", "StartTime=now"], check=True
    )  # SLURM itself waits for two minutes
    wait_for(lambda: len(losses_of(run)) > len(before) + 50, deadline_s=180)
    assert events_of(run, "resumed")[-1]["step"] == saved
    subprocess.run(["scancel", number], check=True)
    wait_for(lambda: _job(number).get("JobState") == "CANCELLED", deadline_s=90)
    output = (tmp_path / f"r-{number}.out").read_text()
    assert "stopping (SIGTERM)" in output and output.count("look from elsewhere") == 2, (
        "appended: both attempts are in it"
    )
