"""lamp launch slurm|sky|kubernetes: the file by which a scheduler starts a training, and starts it again after 75.

In:  a run.yaml with the words of lamp train; nodes, GPUs, time, partition, image.
Out: an sbatch script, a SkyPilot YAML or a Kubernetes Job; --submit gives the script to sbatch.

The settings are read and checked here, before anything waits in a queue. What is written holds no secret: keys belong into the
scheduler's own secrets.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lamplighter import own_code
from lamplighter.commands import write
from lamplighter.commands.arguments import one_of, parse
from lamplighter.commands.launched import FIRST_PORT
from lamplighter.commands.train import by_flag, has_secret, run_name
from lamplighter.config import Run, parse_overrides, resolve
from lamplighter.errors import DONE, STOPPED_EARLY, BadConfig, CannotWrite, InputMissing, UsageError
from lamplighter.readers.remote import is_url, package_for
from lamplighter.rundir import cannot_write, write_atomic

NOTICE_S = 120  # between TERM and the end
_HEAD = "# Written by lamp launch"  # who finds it may write over it
_HOPELESS = [2, 65, 66, 74, 76, 77, 78]  # these need another input, not the same command again
_OF_NODES = ("launch.nodes", "launch.rendezvous", "launch.node")
_ACCELERATORS = re.compile(r"[A-Za-z][\w.-]*(:[1-9]\d*)?")
_SLURM_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|(?i:infinite|unlimited)")
_FOR_TRAIN = ("preset", "run", "runs_dir")


@dataclass(frozen=True)
class Job:
    """A training for a scheduler."""

    name: str
    words: list[str]  # after `lamp train`
    run: Run
    yaml: Path | None
    nodes: int
    gpus: int
    flags: dict[str, Any]


def launch(words: list[str]) -> int:
    """The file, and what to do with it."""
    words = ["--output" if word == "-o" else word for word in words]
    return one_of("launch", words, {"slurm": _slurm, "sky": _sky, "kubernetes": _kubernetes})


def _slurm_flags(
    run_yaml: Path | None = None,
    /,
    *,
    output: Path | None = None,
    submit: bool = False,
    nodes: int = 1,
    gpus: int = 0,
    cpus: int = 0,
    mem: str = "",
    time: str = "",
    partition: str = "",
    account: str = "",
    preset: str | None = None,
    run: str | None = None,
    test: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp launch slurm` takes besides fields."""


def _sky_flags(
    run_yaml: Path | None = None,
    /,
    *,
    output: Path | None = None,
    nodes: int = 1,
    gpus: str = "",
    on_demand: bool = False,
    preset: str | None = None,
    run: str | None = None,
    test: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp launch sky` takes besides fields."""


def _kubernetes_flags(
    run_yaml: Path | None = None,
    /,
    *,
    image: str,
    output: Path | None = None,
    gpus: int = 0,
    cpus: int = 0,
    mem: str = "",
    claim: str = "",
    preset: str | None = None,
    run: str | None = None,
    test: bool = False,
    runs_dir: Path = Path("runs"),
) -> None:
    """What `lamp launch kubernetes` takes besides fields."""


def _job(words: list[str], function: Any) -> Job:
    """The settings, checked as `lamp train` checks them, and the words that give them again."""
    if function is _kubernetes_flags and any(word.partition("=")[0] == "--nodes" for word in words):
        raise UsageError("--nodes: for Kubernetes one pod is written", "several nodes are not", "--gpus N, or lamp launch slurm or sky --nodes N")  # fmt: skip
    rest, overrides = parse_overrides(words)
    flags = parse("launch", function, rest)
    _refuse_counts(flags)
    if function is _kubernetes_flags and not isinstance(flags.get("image"), str):
        raise UsageError("--image is missing", "a pod runs an image that holds lamp", "--image REGISTRY/IMAGE:TAG")
    own_code.look_beside(flags["run_yaml"])
    resolved = resolve(flags["preset"], flags["run_yaml"], overrides, flags["test"])
    name = run_name(flags)
    for group in by_flag(words):
        if has_secret(group):
            raise UsageError(
                f"{group[0].partition('=')[0]} holds a secret",
                "the file that is written here will be read by others",
                "put it into the environment (AWS_SECRET_ACCESS_KEY and its like), where the scheduler keeps secrets",
            )
    given = [str(flags["run_yaml"])] if flags["run_yaml"] else []
    for field in _FOR_TRAIN:
        if flags[field] is not None and flags[field] != Path("runs"):
            given += [f"--{field.replace('_', '-')}", str(flags[field])]
    given += ["--test"] if flags["test"] else []
    for field, values in overrides.items():
        given += [f"--{field}", *values]
    nodes = flags.get("nodes", 1)
    _refuse_other_nodes(
        resolved.run.launch.nodes, nodes, function, [field for field in _OF_NODES if field in overrides]
    )
    gpus = int(flags["gpus"]) if str(flags["gpus"]).isdecimal() else _count_of(str(flags["gpus"]))
    return Job(name, given, resolved.run, flags["run_yaml"], nodes, gpus, flags)


def _refuse_counts(flags: dict[str, Any]) -> None:
    """What no scheduler could take: it would be refused when it is submitted, or wait for ever."""
    for name, least in (("nodes", 1), ("gpus", 0), ("cpus", 0)):
        value = flags.get(name, least)
        if isinstance(value, int) and value < least:
            raise UsageError(f"--{name} {value}", f"it is a number of {name} for each node" if least == 0 else "a job has at least one", f"--{name} {least} or more")  # fmt: skip
    if isinstance(flags["gpus"], str) and flags["gpus"] and not _ACCELERATORS.fullmatch(flags["gpus"]):
        raise UsageError(f"--gpus {flags['gpus']}", "SkyPilot reads NAME or NAME:COUNT", "--gpus A100:8")
    if (time := flags.get("time")) and not _SLURM_TIME.fullmatch(time):
        raise UsageError(
            f"--time {time}",
            "SLURM reads MINUTES, [HOURS:]MINUTES:SECONDS or DAYS-HOURS[:MINUTES[:SECONDS]]",
            "--time 24:00:00",
        )


def _refuse_other_nodes(set_to: int, nodes: int, function: Any, given: list[str]) -> None:
    """How many nodes there are is said once, by --nodes: what is written has the rest."""
    if given:
        named = ", ".join(f"--{field}" for field in given)
        raise UsageError(
            f"{named}: the file says that itself", "each node gets it when the job starts", "--nodes N instead"
        )
    if set_to in (1, nodes):
        return
    if function is _kubernetes_flags:
        raise UsageError(f"launch.nodes is {set_to}, and for Kubernetes one pod is written", "several nodes are not", "launch.nodes 1 and --gpus N, or lamp launch slurm or sky")  # fmt: skip
    raise UsageError(
        f"launch.nodes is {set_to}, and the job would have {nodes}",
        "the nodes would wait for each other",
        f"--nodes {set_to}",
    )


def _count_of(accelerators: str) -> int:
    """A100:8 -> 8; A100 -> 1; none -> 0."""
    count = accelerators.partition(":")[2]
    return int(count) if count.isdecimal() else int(bool(accelerators))


def _several(job: Job, head: str) -> list[str]:
    """Of several nodes: how many, and where their parents meet."""
    return ["--launch.nodes", str(job.nodes), "--launch.rendezvous", f"{head}:{FIRST_PORT}"] if job.nodes > 1 else []


def _command(job: Job, words: list[str]) -> str:
    """As a shell reads it; what begins with $ is a variable of the script."""
    several = [f'"{word}"' if "$" in word else word for word in words]
    return " ".join([shlex.join(["lamp", "train", *job.words]), *several])


# ---------------------------------------------------------------- SLURM


def _slurm(words: list[str]) -> int:
    job = _job(words, _slurm_flags)
    flags = job.flags
    path = _write(flags["output"] or Path(f"{job.name}.sbatch"), sbatch_script(job))
    if not flags["submit"]:
        return _tell(job, path, f"sbatch {shlex.quote(str(path))}")
    _warn_of_idle(job)
    return _submit(path)


def sbatch_script(job: Job) -> str:
    """One task on each node: lamp starts a rank for each GPU of it, and 75 arrives at srun."""
    flags = job.flags
    options = {
        "job-name": job.name,
        "chdir": str(Path.cwd()),
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus or None,
        "cpus-per-task": flags["cpus"] or None,
        "mem": flags["mem"] or None,
        "time": flags["time"] or None,
        "partition": flags["partition"] or None,
        "account": flags["account"] or None,
        "output": f"{job.name}-%j.out",
        "open-mode": "append",
        "requeue": "",
        "signal": f"TERM@{NOTICE_S}",
    }
    lines = [
        "#!/bin/bash",
        f"{_HEAD} slurm: {NOTICE_S} s before its end the job gets TERM, saves and leaves with 75; then it is",
    ]
    lines += ["# queued again and resumes. scancel ends it for good (after lamp stop it would be queued again)."]
    for name, value in options.items():
        if value is not None:
            lines.append(f"#SBATCH --{name}={shlex.quote(str(value))}" if value != "" else f"#SBATCH --{name}")
    lines += ["", f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH"]
    if flags["cpus"]:
        lines.append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from sbatch by itself")
    if job.nodes > 1:
        lines.append('head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)')
        lines.append("export LAMP_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')  # the nodes hear nobody else")
    srun = "srun --kill-on-bad-exit=1" if job.nodes > 1 else "srun"
    lines += [
        f"{srun} {_command(job, _several(job, '$head'))}",
        "code=$?",
        f'if [ "$code" -eq {STOPPED_EARLY} ]; then  # stopped early, all saved',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _submit(path: Path) -> int:
    """By sbatch, whose own words are shown."""
    if shutil.which("sbatch") is None:
        raise InputMissing(
            "there is no sbatch here",
            f"{path} is written, and only a machine of the cluster can submit it",
            f"on a login node: sbatch {shlex.quote(str(path))}",
        )
    done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        why = " ".join(done.stderr.split()) or f"it ended with {done.returncode}"
        raise CannotWrite(f"sbatch has not taken {path}", why, f"mend it, then: sbatch {shlex.quote(str(path))}")
    number = done.stdout.strip().partition(";")[0]
    write(1, f"submitted {path} as job {number}\nlook: squeue -j {number}\nstop: scancel {number}\n")
    return DONE


# ---------------------------------------------------------------- SkyPilot


def _sky(words: list[str]) -> int:
    job = _job(words, _sky_flags)
    path = _write(job.flags["output"] or Path(f"{job.name}.sky.yaml"), sky_yaml(job))
    secret = "--env LAMP_SECRET=$(openssl rand -hex 32) " if job.nodes > 1 else ""
    return _tell(job, path, f"sky jobs launch {secret}{shlex.quote(str(path))}")


def sky_yaml(job: Job) -> str:
    """A managed job on spot machines: each new one goes on from the mirror."""
    mirror = job.run.save.mirror
    if mirror is None or not is_url(mirror):
        raise BadConfig(
            "a machine that is taken away takes its disk with it"
            + ("" if mirror is None else f" ({mirror} is a folder)"),
            "the next one goes on from a store: save.mirror",
            "--save.mirror s3://BUCKET/runs (or gs://, az:// ...)",
        )
    packages = ["lamplighter[data]", *filter(None, [package_for(mirror)])]
    head = '$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    several = f' --launch.nodes {job.nodes} --launch.rendezvous "{head}:{FIRST_PORT}"' if job.nodes > 1 else ""
    content = {
        "name": job.name,
        "workdir": ".",
        "num_nodes": job.nodes,
        **({"envs": {"LAMP_SECRET": None}} if job.nodes > 1 else {}),  # sky asks for it: --env LAMP_SECRET=...
        "resources": {
            **({"accelerators": str(job.flags["gpus"])} if job.flags["gpus"] else {}),
            "use_spot": not job.flags["on_demand"],
            "job_recovery": {"strategy": "EAGER_NEXT_REGION", "recover_on_exit_codes": [STOPPED_EARLY]},
        },
        "setup": f"pip install {shlex.join(packages)}\n",
        "run": f"{_command(job, [])}{several}\n",
    }
    return f"{_HEAD} sky: a new machine goes on from the newest checkpoint in save.mirror.\n{_as_yaml(content)}"


# ---------------------------------------------------------------- Kubernetes


def _kubernetes(words: list[str]) -> int:
    job = _job(words, _kubernetes_flags)
    path = _write(job.flags["output"] or Path(f"{job.name}.k8s.yaml"), kubernetes_yaml(job))
    return _tell(job, path, f"kubectl apply -f {shlex.quote(str(path))}")


def kubernetes_yaml(job: Job) -> str:
    """A Job that is started again after 75 and after a disruption, and not after what the same command would meet again."""
    flags, mirror = job.flags, job.run.save.mirror
    if not flags["claim"] and (mirror is None or not is_url(mirror)):
        raise BadConfig(
            "a pod's disk goes with the pod",
            "the next one goes on from a volume that stays, or from a store",
            "--claim NAME (a PersistentVolumeClaim), or --save.mirror s3://BUCKET/runs",
        )
    name = re.sub(r"[^a-z0-9-]+", "-", job.name.lower()).strip("-")[:50] or "train"
    words = [f"/settings/{job.yaml.name}" if job.yaml and word == str(job.yaml) else word for word in job.words]
    if job.yaml and "--run" not in words:
        words += ["--run", job.name]
    words += ["--runs-dir", "/runs"] if "--runs-dir" not in words else []
    limits = {"nvidia.com/gpu": job.gpus or None, "cpu": flags["cpus"] or None, "memory": flags["mem"] or None}
    runs: dict[str, Any] = (
        {"persistentVolumeClaim": {"claimName": flags["claim"]}} if flags["claim"] else {"emptyDir": {}}
    )
    volumes = [{"name": "runs", **runs}, {"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "runs", "mountPath": "/runs"}, {"name": "shm", "mountPath": "/dev/shm"}]
    parts: list[dict[str, Any]] = []
    if job.yaml:
        volumes.append({"name": "settings", "configMap": {"name": f"{name}-settings"}})
        mounts.append({"name": "settings", "mountPath": "/settings"})
        content = {job.yaml.name: job.yaml.read_text()}
        if has_secret([content[job.yaml.name]]):
            raise UsageError(f"{job.yaml} holds a secret", "a ConfigMap is read by others", "put it into a Secret")
        parts.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-settings"}, "data": content}
        )
    container = {
        "name": "train",
        "image": flags["image"],
        "command": ["lamp", "train", *words],
        "resources": {"limits": {kind: str(value) for kind, value in limits.items() if value is not None}},
        "volumeMounts": mounts,
    }
    rules: list[dict[str, Any]] = [
        {"action": "Ignore", "onExitCodes": {"containerName": "train", "operator": "In", "values": [STOPPED_EARLY]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
        {"action": "FailJob", "onExitCodes": {"containerName": "train", "operator": "In", "values": _HOPELESS}},
    ]
    parts.append(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name},
            "spec": {
                "backoffLimit": 6,
                "podFailurePolicy": {"rules": rules},
                "template": {
                    "spec": {
                        "restartPolicy": "Never",
                        "terminationGracePeriodSeconds": NOTICE_S,
                        "containers": [container],
                        "volumes": volumes,
                    }
                },
            },
        }
    )
    head = f"{_HEAD} kubernetes: a pod that gets TERM saves and leaves with 75; 75 and disruptions start the next pod, which resumes.\n"
    return head + "# kubectl delete job ends it for good.\n" + "---\n".join(map(_as_yaml, parts))


# ---------------------------------------------------------------- files


def _as_yaml(content: dict[str, Any]) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Commands of several lines as blocks, which people can read."""

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return str(yaml.dump(content, Dumper=Dumper, sort_keys=False, width=10**6))


def _write(path: Path, text: str) -> Path:
    """Only over a file of ours: the next word after -o may be somebody's run.yaml."""
    try:
        if path.exists() and _HEAD not in path.read_text(errors="replace")[:200]:
            raise UsageError(f"{path} is there already, and is not of lamp launch", "", "another name: -o FILE")
        write_atomic(path, text)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


def _warn_of_idle(job: Job) -> None:
    """GPUs that would be paid for and have nothing to compute."""
    from lamplighter.leaves import Division, leaf_size
    from lamplighter.plan.ranks import idle_words

    train = job.run.train
    each = train.ranks if train.ranks != "auto" else job.gpus or 1
    ranks = job.nodes * each
    micro = train.micro_batch or leaf_size(train.batch_size, ranks)
    if words := idle_words(Division(train.batch_size, micro, train.tree), ranks):
        write(1, f"WARNING  {words}\n")
    if job.gpus > each:
        write(1, f"WARNING  train.ranks is {each}, and a node has {job.gpus} GPUs: {job.gpus - each} of them stay idle; train.ranks auto uses all\n")  # fmt: skip


def _tell(job: Job, path: Path, command: str) -> int:
    _warn_of_idle(job)
    write(1, f"made: {path}\nnext: {command}\n")
    return DONE
