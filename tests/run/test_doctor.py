"""The doctor: probes that hang, die, raise, flood and eat; broken set-ups named; nothing of the user's is touched."""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from doctor_context import SICK, context
from lamplighter.config import Resolved, dump, load_dump, resolve, with_change
from lamplighter.doctor import collectives, findings, model_cost, probe, runner, settings, system
from lamplighter.doctor.findings import Report
from lamplighter.doctor.probe import Finding, Probe, ProbeContext
from lamplighter.doctor.runner import ProbeConfig, ProbeResult
from lamplighter.doctor.settings import PlanFigures
from lamplighter.doctor.system import Driver
from lamplighter.errors import BadConfig, UsageError
from running import LAMP, LONG, TINY, clean_env, lamp, wait_for

GIB = 1 << 30
PROBES = """
import os, re, signal, subprocess, sys, time
from lamplighter.doctor.probe import Finding
from lamplighter.errors import BadData

def fine(context):
    yield Finding("ok", f"seq_len {context.run.data.seq_len}", figures={"n": 1.0})

def hangs(context):
    yield Finding("ok", "before")
    context.now("reading shard 7")
    deeper()

def deeper():
    time.sleep(1000)  # the line

def holds(context):
    yield Finding("ok", "before")
    context.now("reading shard 7")
    re.match(r"(a+)+$", "a" * 40 + "b")

def garbled(context):
    yield Finding("fault", "x" * 3_000_000)

def killed(context):
    context.now("opening the door")
    os.kill(os.getpid(), signal.SIGKILL)
    yield

def raises(context):
    yield Finding("ok", "before")
    {}["a key"]

def leaves(context):
    sys.exit(3)
    yield

def slips_away(context):
    os._exit(0)
    yield

def refuses(context):
    raise BadData("half a shard", "64 bytes of 128", "build it again")
    yield

def eats(context):
    hoard = []
    while True:
        hoard.append(bytearray(b"x") * (8 << 20))
        time.sleep(0.01)
    yield

def prints(context):
    for _ in range(300):
        os.write(1, b"\\x00\\xff garbage" * 1000)
        os.write(2, b"\\n{\\"finding\\": 1}\\n")
    yield Finding("ok", "said after all that")

def floods(context):
    for number in range(5000):
        yield Finding("warn", f"number {number}")
    yield Finding("fault", "the one that counts")

def leaves_children(context):
    quiet = [sys.executable, "-c", "import time; time.sleep(1000)"]
    inside = subprocess.Popen(quiet)
    escaped = subprocess.Popen(quiet, start_new_session=True)
    yield Finding("ok", f"{inside.pid} {escaped.pid}")
"""


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProbeConfig:
    """A case for probes of the tests' own, in a module that the children find."""
    (tmp_path / "odd_probes.py").write_text(PROBES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (tmp_path / "config.yaml").write_text(dump(resolve("demo")))
    return ProbeConfig(tmp_path / "config.yaml", "demo", tmp_path / "runs", tmp_path / "scratch")


def visit(
    case: ProbeConfig, name: str, deadline_s: float = 60.0, tell: Callable[[str], None] = lambda _: None
) -> ProbeResult:
    return runner.run(Probe(name, f"odd_probes:{name}", deadline_s), case, tell)


def line_of(words: str) -> int:
    return PROBES.splitlines().index(next(line for line in PROBES.splitlines() if words in line)) + 1


# ---------------------------------------------------------------- how a probe ends


@pytest.mark.parametrize(("name", "line"), [("hangs", "# the line"), pytest.param("holds", "(a+)+$", marks=LONG)])
def test_a_probe_that_hangs_is_named_by_its_line_and_ended(case: ProbeConfig, name: str, line: str) -> None:
    told: list[str] = []
    seen = visit(case, name, 5.0, told.append)
    before, fault = seen.findings
    assert before.what == "before"
    assert (fault.level, fault.cause, fault.culprit["line"]) == ("fault", "hang", line_of(line))
    assert fault.culprit["file"].endswith("odd_probes.py")
    assert "reading shard 7" in fault.what and any("reading shard 7" in text for text in told)
    assert not psutil.pid_exists(fault.culprit["pid"])


@pytest.mark.parametrize(
    ("name", "cause", "words"),
    [
        ("killed", "killed", "SIGKILL"),
        ("raises", "raised", "KeyError: 'a key'"),
        ("leaves", "raised", "SystemExit: 3"),
        ("slips_away", "exit", "exit code 0 before its end"),
        ("refuses", "bad_data", "half a shard"),
        ("no_such_probe", "raised", "no_such_probe"),
        ("garbled", "garbled", "could not be read"),
    ],
)
def test_a_probe_that_dies_is_a_fault_with_its_name(case: ProbeConfig, name: str, cause: str, words: str) -> None:
    fault = visit(case, name).findings[-1]
    assert (fault.level, fault.cause) == ("fault", cause)
    assert words in fault.what
    if name == "raises":
        assert fault.culprit["line"] == line_of('{}["a key"]') and "odd_probes.py" in fault.what
    if name == "killed":
        assert "opening the door" in fault.what


def test_a_probe_that_eats_the_memory_is_ended_before_the_machine_is(case: ProbeConfig) -> None:
    small = ProbeConfig(case.config, None, case.runs_dir, case.scratch, memory_bytes=256 << 20)
    (fault,) = visit(small, "eats").findings
    assert (fault.level, fault.cause) == ("fault", "rss_oom")
    assert fault.figures["bytes"] > 256 << 20
    assert fault.culprit.get("func") == "eats"


def test_what_a_probe_prints_is_no_finding_and_a_flood_is_counted(case: ProbeConfig) -> None:
    assert [finding.what for finding in visit(case, "prints").findings] == ["said after all that"]
    seen = visit(case, "floods").findings
    assert len(seen) == runner.MOST_FINDINGS + 2
    assert [finding.what for finding in seen if finding.level == "fault"] == ["the one that counts"]
    assert "4,800 more findings" in seen[-1].what


def test_what_a_probe_leaves_behind_is_ended_and_a_bystander_is_not(case: ProbeConfig, tmp_path: Path) -> None:
    """In a process of its own: to adopt orphans is for life."""
    script = textwrap.dedent(f"""
        import subprocess, sys
        from pathlib import Path
        from lamplighter.doctor import runner
        from lamplighter.doctor.probe import Probe
        from lamplighter.procs import prctl
        prctl.adopt_orphans()
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        try:
            config, runs, scratch = {[str(case.config), str(case.runs_dir), str(case.scratch)]!r}
            case = runner.ProbeConfig(Path(config), None, Path(runs), Path(scratch))
            seen = runner.run(Probe("x", "odd_probes:leaves_children", 60), case)
            sys.stdout.write(f"{{seen.findings[0].what}} {{child.poll()}}")
        finally:
            child.kill()
    """)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "lamplighter.doctor"])
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        inside, escaped, child = done.stdout.split()
        assert not psutil.pid_exists(int(inside)) and not psutil.pid_exists(int(escaped))
        assert child == "None" and bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_a_probe_that_cannot_be_started_is_a_fault(case: ProbeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    (fault,) = visit(case, "fine").findings
    assert (fault.level, fault.cause) == ("fault", "not_started") and "No such file" in fault.what


def test_a_probe_gets_the_run_and_a_calm_one_has_nothing_more_to_say(case: ProbeConfig) -> None:
    (found,) = visit(case, "fine").findings
    assert (found.level, found.what, found.figures) == ("ok", "seq_len 256", {"n": 1.0})


# ---------------------------------------------------------------- the report


def some_report(*found: Finding) -> Report:
    return Report((ProbeResult(Probe("a / b", "x:y", 1.0), found, 0.5),), 2.0)


def test_the_report_says_verdict_why_and_next_and_is_json() -> None:
    bad = Finding("fault", "too\nlong", "because", "do this", settings={"train.lr": 1e-4}, figures={"x": float("nan")})
    made = some_report(Finding("ok", "fine"), bad)
    text = findings.table(made)
    assert "a / b  FAULT       too long" in text and "  why      because" in text and "  next     do this" in text
    record = json.loads(findings.as_json(made))
    assert not record["ok"] and record["findings"][1]["figures"] == {"x": None}
    assert record["advice"] == {"train.lr": {"value": 1e-4, "why": "too long", "probe": "a / b"}}
    assert findings.table(some_report(Finding("ok", "fine"))).endswith("next: lamp train with the same words\n")


def test_where_nothing_was_tested_it_says_so_and_not_ok() -> None:
    idle = some_report(Finding("skip", "no Dataset of your own"))
    assert "a / b  not tested  no Dataset of your own" in findings.table(idle)
    assert "no faults, no warnings by 1 probe, 1 of them not tested in 2 s" in findings.table(idle)
    assert json.loads(findings.as_json(idle))["probes"][0]["level"] == "not tested"
    assert findings.worst(some_report(Finding("skip", "x"), Finding("ok", "y")).results[0]) == "ok"


def test_a_package_without_its_metadata_is_named_with_the_pip_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    for name in ("trl", "peft", "vllm"):
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text("")
    (site / "peft-1.0.dist-info").mkdir()  # cut off before its METADATA was written
    (site / "vllm-2.0.dist-info").mkdir()
    (site / "vllm-2.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 2.0\n")
    monkeypatch.syspath_prepend(str(site))
    found = {name: list(system._judge_metadata(name)) for name in ("trl", "peft", "vllm", "deepspeed")}
    assert not found["vllm"] and not found["deepspeed"]
    assert "the metadata of trl are missing" in found["trl"][0].what
    assert "the metadata of peft are damaged" in found["peft"][0].what and found["peft"][0].level == "fault"
    assert found["peft"][0].next == "pip install --force-reinstall --no-deps peft"


def test_advice_of_a_fault_counts_more_and_must_fit_the_rest() -> None:
    made = some_report(
        Finding("fault", "f", settings={"train.micro_batch": 2}),
        Finding("warn", "w", settings={"train.micro_batch": 4}),
    )
    assert findings.advice(made)["train.micro_batch"].value == 2
    resolved = with_change(Resolved(resolve("demo").run), "train.epochs", 2.0, "doctor: longer")
    assert (resolved.run.train.steps, resolved.run.train.epochs) == (None, 2.0)
    assert "# doctor: longer" in dump(resolved)
    with pytest.raises(BadConfig):
        with_change(resolved, "train.micro_batch", 1000, "doctor: too much")


def test_probes_are_chosen_by_name_and_those_of_a_run_need_one() -> None:
    assert {stage.name.split(" / ")[0] for stage in probe.choose([], readable=True)} >= {"environment", "settings"}
    assert not [stage for stage in probe.choose([], readable=False) if stage.name.startswith("settings")]
    assert [stage.name for stage in probe.choose(["disk"], readable=True)] == ["settings / disk"]
    with pytest.raises(UsageError, match="no probe is called enviroment") as refused:
        probe.choose(["enviroment"], readable=True)
    assert refused.value.why == "did you mean environment?"


def test_every_probe_of_the_table_is_there() -> None:
    for one in probe.choose([], readable=True):
        module, _, name = one.function.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), one.name


# ---------------------------------------------------------------- judgements on numbers


@pytest.mark.parametrize(
    ("built", "driver", "refused", "device", "level", "words"),
    [
        ("", Driver("550.54", "12.4", ("NVIDIA L4",)), "", "auto", "fault", "CPU build"),
        ("", Driver("550.54", "12.4", ("NVIDIA L4",)), "", "cpu", None, ""),
        ("", None, "", "cuda", "fault", "train.device is cuda"),
        ("12.6", None, "Found no NVIDIA driver on your system.", "auto", "warn", "there is no driver"),
        ("12.6", None, "Found no NVIDIA driver on your system.", "cuda", "fault", "there is no driver"),
        ("12.6", Driver("470.1", "11.4", ("T4",)), "The NVIDIA driver on your system is too old", "auto", "fault", "too old"),
        ("12.6", Driver("550.1", "12.8", ("T4",)), "CUDA error: unknown error", "auto", "fault", "cannot start"),
        ("13.0", Driver("550.1", "12.8", ("T4",)), "", "auto", "warn", "up to CUDA 12.8"),
        ("12.6", Driver("550.1", "12.8", ("T4",)), "", "auto", None, ""),
    ],
)  # fmt: skip
def test_torch_against_the_driver(
    built: str, driver: Driver, refused: str, device: str, level: str, words: str
) -> None:
    found = list(system.judge_driver(built, driver, refused, device))
    assert [finding.level for finding in found] == ([level] if level else [])
    assert all(words in finding.what for finding in found)


def test_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\n[ $# -eq 0 ] && echo "CUDA Version: 12.4" || echo "NVIDIA L4, 550.54.15"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert system.ask_driver() == (Driver("550.54.15", "12.4", ("NVIDIA L4",)), "")
    smi.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    assert system.ask_driver()[1].startswith("Failed to initialize NVML")


def demo_context(tmp_path: Path, **overrides: str) -> ProbeContext:
    words = {name.replace("__", "."): [value] for name, value in overrides.items()}
    return ProbeContext(resolve("demo", None, words).run, "demo", tmp_path / "runs", tmp_path, lambda _: None)


def test_room_and_speed_against_the_checkpoints(tmp_path: Path) -> None:
    who, paper = demo_context(tmp_path, save__every_s="100"), PlanFigures({"params": 10**9, "hours": 1.0})
    levels = {free: next(iter(settings.judge_room(who, paper, tmp_path, free * GIB))).level for free in (5, 40, 100)}
    assert levels == {5: "fault", 40: "warn", 100: "ok"}
    (tight,) = settings.judge_room(who, paper, tmp_path, 40 * GIB)
    assert tight.settings == {"save.keep": 1}
    slow = settings.judge_speed(who, paper, tmp_path, 100e6, 1e9)
    assert (slow.level, slow.settings) == ("warn", {"save.every_s": 1200.0})
    assert settings.judge_speed(who, paper, tmp_path, 3e9, 1e9).level == "ok"
    assert settings.measure(tmp_path)[0] > 0 and not list(tmp_path.iterdir())


def test_memory_warm_up_and_threads(tmp_path: Path) -> None:
    (fault,) = settings.judge_memory(3.0, GIB, 2 * GIB)
    assert (fault.cause, fault.settings) == ("rss_oom", {"train.recompute": True})
    assert not list(settings.judge_memory(3.0, GIB, None))
    never = settings.judge_warmup(640, 100, 0.3)
    assert (never.level, never.settings) == ("fault", {"train.warmup_steps": 5})
    assert settings.judge_warmup(50, 100, 0.3).level == "warn"
    found = list(settings.threads(demo_context(tmp_path, train__threads="64", data__workers="900")))
    assert {name for finding in found for name in finding.settings} == {"train.threads", "data.workers"}


def test_a_plan_that_cannot_succeed_and_a_toy_on_a_long_run(tmp_path: Path) -> None:
    poor = demo_context(tmp_path, budget__hours="0.003")
    (fault, *_) = settings.planned(poor)
    free = demo_context(tmp_path, budget__usd_per_hour="2")
    (tmp_path / "plan.json").unlink()
    assert "budget" in {finding.cause for finding in settings.planned(free)}
    assert (fault.level, fault.cause) == ("fault", "no_go") and "time:" in fault.what
    assert set(fault.settings) >= {"train.steps"} and int(fault.settings["train.steps"]) < 600
    (tmp_path / "long").mkdir()
    long = demo_context(tmp_path / "long", train__steps="90000000", save__every_s="0", save__every_steps="0")
    causes = {finding.cause: finding.settings for finding in settings.schedule_and_saves(long)}
    assert causes["no_save"] == {"save.every_s": 600.0}


# ---------------------------------------------------------------- broken set-ups, by the real command


def examined(tmp_path: Path, *words: str, **extra: Any) -> dict[str, Any]:
    done = lamp("doctor", *words, "--json", cwd=tmp_path, **extra)
    record: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if record["ok"] else 1), done.stderr
    assert "crashed" not in done.stderr
    return record


def causes(record: dict[str, Any], level: str = "fault") -> set[str]:
    return {finding["cause"] for finding in record["findings"] if finding["level"] == level}


def test_a_torchvision_that_does_not_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    for folder in ("torchvision", "torchvision-0.15.2.dist-info"):
        (site / folder).mkdir(parents=True)
    about = "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.15.2\nRequires-Dist: torch (==2.0.1)\n"
    (site / "torchvision-0.15.2.dist-info" / "METADATA").write_text(about)
    (site / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]))
    record = examined(tmp_path, "--only", "packages")
    told = [finding["what"] for finding in record["findings"] if finding["level"] == "fault"]
    assert any("torchvision 0.15.2 needs torch==2.0.1" in text for text in told)
    assert any("operator torchvision::nms does not exist" in text for text in told)
    assert causes(record) == {"versions"}


def test_few_files_and_a_port_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
        few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))  # noqa: E731
        record = examined(tmp_path, "--only", "limits", "address", preexec_fn=few)
    assert causes(record) == {"low_fd", "no_peer"}
    port = next(finding for finding in record["findings"] if finding["culprit"].get("port"))
    assert port["culprit"]["pid"] == os.getpid() and str(os.getpid()) in port["what"]
    assert any(finding["culprit"].get("interface") == "nosuch0" for finding in record["findings"])


def test_settings_that_cannot_be_read_and_leftovers_of_a_dead_run(tmp_path: Path) -> None:
    """Both at once: the other probes run although the settings cannot be read; nothing is removed, and no process ends."""
    dead = tmp_path / "runs" / "dead"
    (dead / "checkpoints" / ".writing-checkpoint-5-4242").mkdir(parents=True)
    gone = subprocess.Popen(["true"])
    gone.wait()
    (dead / "lock").write_text(json.dumps({"pid": gone.pid, "pid_start": 1, "boot_id": "x", "host": "h"}))
    half = tmp_path / "runs" / ".cache" / "half" / "lock"
    half.parent.mkdir(parents=True)
    half.write_text((dead / "lock").read_text())
    (dead / "status.json").write_text(json.dumps({"state": "running", "durable_step": 4}))
    (tmp_path / "my.yaml").write_text("train:\n  max_steps: 5\n")
    orphan = [sys.executable, "-c", "import time; time.sleep(1000)", "-m", "lamplighter.commands.child_main"]
    bystander = subprocess.Popen(orphan, env=clean_env(LAMP_PARENT_PID=str(gone.pid)))
    try:
        record = examined(tmp_path, "my.yaml", "--only", "leftovers")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
    assert causes(record) == {"bad_config"}
    assert any("did you mean train.steps" in finding["why"] for finding in record["findings"])
    assert {"dead_lock_file", "save_kill", "orphans"} <= causes(record, "warn")
    named = {str(finding["culprit"].get("pid")) for finding in record["findings"] if finding["cause"] == "orphans"}
    assert str(bystander.pid) in named
    locks = {finding["culprit"]["path"] for finding in record["findings"] if finding["cause"] == "dead_lock_file"}
    assert locks == {str(dead / "lock"), str(half)}
    assert half.exists() and (dead / "lock").exists() and (dead / "checkpoints" / ".writing-checkpoint-5-4242").exists()


def in_small_rooms(tmp_path: Path, mounts: str, *words: str) -> dict[str, Any]:
    """The command with file systems of its own; skipped, visibly, where that is not allowed."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("no mounts of one's own here")
    command = ["unshare", "-m", "sh", "-c", f'{mounts} && exec "$@"', "sh", *LAMP, "doctor", "--json", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=clean_env(), check=False)  # fmt: skip
    if not done.stdout:
        pytest.skip(f"no mounts of one's own here: {done.stderr[-200:]}")
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def test_a_full_disk_and_a_small_shared_memory(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    mounts = "mount -t tmpfs -o size=8m tmpfs /dev/shm && mount -t tmpfs -o size=4m tmpfs runs"
    record = in_small_rooms(tmp_path, mounts, "--preset", "demo", "--only", "limits", "disk")
    assert {"disk_full"} == causes(record)
    full = [finding for finding in record["findings"] if finding["cause"] == "disk_full"]
    assert all(finding["culprit"]["path"] == str(tmp_path / "runs") for finding in full)
    assert any("not even one checkpoint fits" in finding["what"] for finding in full)
    small = next(finding for finding in record["findings"] if finding["cause"] == "shm_small")
    assert small["figures"]["bytes"] == 8 << 20


def test_text_in_another_encoding(case: ProbeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    (stage,) = probe.choose(["language"], readable=True)
    (found,) = runner.run(stage, case).findings
    assert (found.level, found.cause, found.next) == ("warn", "encoding", "export PYTHONUTF8=1")


def test_advice_is_printed_as_settings_that_train(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("train: {steps: 40, warmup_steps: 30}\n")
    done = lamp("doctor", "my.yaml", "--print-config", "--only", "schedule", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "new.yaml").write_text(done.stdout)
    assert load_dump(tmp_path / "new.yaml").train.warmup_steps == 2
    assert "# doctor: warm-up takes 75% of the run" in done.stdout
    trained = lamp("train", "new.yaml", "--test", cwd=tmp_path)
    assert trained.returncode == 0, trained.stdout
    refused = lamp("doctor", "--print-config", "--train.lr", "7", cwd=tmp_path)
    assert refused.returncode == 78 and "train.lr" in refused.stderr and not refused.stdout


def test_nothing_is_left_when_the_doctor_is_stopped(tmp_path: Path) -> None:
    going = subprocess.Popen([*LAMP, "doctor", "--only", "ranks of this run"], cwd=tmp_path, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, env=clean_env())  # fmt: skip
    try:
        family = wait_for(lambda: _with_ranks(going.pid), process=going)
        going.terminate()
        assert going.wait(30) == 75
        wait_for(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in family), 20)
    finally:
        going.kill()
        going.wait()


def _with_ranks(pid: int) -> list[psutil.Process]:
    found = psutil.Process(pid).children(recursive=True)
    try:
        return found if sum("lamplighter.procs.child" in one.cmdline() for one in found) == 3 else []
    except psutil.Error:  # one of them has ended meanwhile
        return []


# ---------------------------------------------------------------- the ranks of a run


def _asked(tmp_path: Path, ranks: int, **overrides: str) -> list[dict[str, Any]]:
    context = demo_context(tmp_path, train__ranks=str(ranks), **overrides)
    return collectives.requests(context, collectives._job(context, ranks), ranks)


def _injected(place: Path, monkeypatch: pytest.MonkeyPatch, act: str) -> None:
    """Something that rank 1 does before it begins, from outside."""
    (place / "sitecustomize.py").write_text(f"import os, time\nif os.environ.get('LAMP_RANK') == '1':\n    {act}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))


def test_a_rank_that_does_not_arrive_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _injected(tmp_path, monkeypatch, "time.sleep(1000)")
    (fault,) = collectives.trial(_asked(tmp_path, 2), "two ranks", lambda _: None, act_s=1.0)
    assert (fault.level, fault.cause, fault.culprit["rank"]) == ("fault", "rank_late", 1), fault
    assert "rank 1 did not arrive at rendezvous" in fault.what
    assert not psutil.pid_exists(fault.culprit["pid"])


def test_a_rank_with_other_settings_is_named(tmp_path: Path) -> None:
    one, two = _asked(tmp_path, 2)
    two["run"] = {**two["run"], "train": {**two["run"]["train"], "lr": 1e-5}}
    (fault,) = collectives.trial([one, two], "two ranks", lambda _: None)
    assert (fault.level, fault.culprit) == (
        "fault",
        {"rank": 1},
    ) and fault.what == "rank 1 has other settings than rank 0"


@LONG
def test_a_rank_that_dies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _injected(tmp_path, monkeypatch, "import threading; threading.Timer(3.0, os.kill, (os.getpid(), 9)).start()")
    asked = [{**one, "numbers": 50_000_000} for one in _asked(tmp_path, 3)]
    (fault,) = collectives.trial(asked, "three ranks", lambda _: None, act_s=60.0)
    assert (fault.cause, fault.culprit) == ("rank_sigkill", {"rank": 1}), fault


def test_the_ranks_of_a_run_meet_and_reduce_as_a_run_does(tmp_path: Path) -> None:
    idle, met, *each = collectives.ranks_of_run(demo_context(tmp_path, train__ranks="3", train__micro_batch="4"))
    assert idle.level == "warn" and "1 of 3 ranks would stay idle: a step has 2 micro-batches" in idle.what
    assert idle.next == "for a new run --train.micro_batch 3"
    assert met.what.startswith(
        "3 ranks (train.ranks) met and have the same settings; adding up 2.8 MB of gradients takes"
    )
    assert met.figures["gradient_bytes"] == 4 * 689_024 and met.figures["reduce_s"] > 0
    assert [one.what[:6] for one in each] == ["rank 0", "rank 1", "rank 2"]
    assert all(one.figures["gflops"] > 0 and one.figures["threads"] >= 1 for one in each)


def test_a_slow_rank_is_named_and_gradients_that_do_not_fit_are_said() -> None:
    told = [{"device": "d", "threads": 1, "memory_gb": 9.0, "gflops": speed, "reduce_s": 0.2} for speed in (50, 20, 48)]
    met, *each = collectives.judge_ranks(told, {"gradients": 4000, "numbers": 1000}, "3 ranks", 5.0)
    assert met.figures["reduce_s"] == pytest.approx(0.8) and "by arithmetic from 4.0 KB, which fit here" in met.what
    assert [one.level for one in each] == ["ok", "warn", "ok"]
    assert (each[1].cause, each[1].culprit) == ("slow_rank", {"rank": 1}) and "slow, others have 48" in each[1].what


def test_addresses_that_lead_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = collectives.judge_master("no-such-host.invalid", 29500)
    assert (nowhere.level, nowhere.culprit["host"]) == ("fault", "no-such-host.invalid")
    free = collectives.judge_master("127.0.0.1", collectives.free_port())
    assert free.level == "ok" and "is free" in free.what
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert collectives.judge_hostname().cause == "no_peer"


# ---------------------------------------------------------------- the compiler


@LONG
def test_a_loop_under_the_compiler_does_not_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """System D, for real."""
    monkeypatch.chdir(SICK)
    monkeypatch.setattr(model_cost, "COMPILE_S", 30.0)
    words = ["--model.family", "models:Looped", "--data.seq_len", "512", "--train.compile", "true"]
    (found,) = model_cost.compiling(context(tmp_path, *words))
    assert found.cause == "compile_slow"
    assert found.settings == {"train.compile": False}


@LONG
def test_the_compiler_is_tried_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_cost, "COMPILE_S", 300.0)
    (found,) = model_cost.compiling(context(tmp_path, "--train.compile", "true"))
    assert found.figures["compile_s"] > 0
    assert found.figures["compiled_s"] > 0
