"""The GPUs beside a run, by a fake driver library that speaks NVML's own interface, and by a fake nvidia-smi."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lamplighter.errors import BadConfig
from lamplighter.procs import nvml
from lamplighter.report import Verdict
from lamplighter.rundir import RunDir, read_json, read_lines
from lamplighter.watch import gpu_watch
from lamplighter.watch.gpu_watch import GpuWatch, RunLook
from running import LAMP, LONG, TINY, clean_env, line_in, losses_of, verdicts_of, wait_for, write_model

SOURCE = Path(__file__).parents[1] / "fixtures" / "fake_nvml.c"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libnvidia-ml.so.1 in it."""
    if shutil.which("gcc") is None:
        assert os.environ.get("CI") != "true", "gcc is needed for the fake driver"
        pytest.skip("no gcc")
    folder = tmp_path_factory.mktemp("driver")
    words = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)]
    subprocess.run(words, check=True)
    return folder


class Driver:
    """What the fake driver says, and the watch that hears it."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "script"
        self.said: dict[str, int] = {}
        self.watch = GpuWatch(RunDir(folder))
        self.found: list[Verdict] = []
        self.step, self.steps, self.data_wait = 3, 0, 0.0

    def say(self, **values: int) -> None:
        self.said |= values
        fresh = self.script.with_suffix(".new")
        fresh.write_text("".join(f"{name} {value}\n" for name, value in self.said.items()))
        fresh.rename(self.script)

    def until(self, condition: Callable[[], object]) -> None:
        def look() -> object:
            self.step += self.steps
            self.found += self.watch.look(RunLook(frozenset({os.getpid()}), self.step, 1, self.data_wait))
            return condition()

        wait_for(look, 120)

    def cause(self, name: str) -> Callable[[], bool]:
        return lambda: any(verdict.cause == name for verdict in self.found)


@pytest.fixture
def driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver(tmp_path)
    made.say(count=1, util=0)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("FAKE_NVML", str(made.script))
    yield made
    made.watch.close()


def test_what_the_cards_do_is_kept(driver: Driver, tmp_path: Path) -> None:
    driver.say(util=97, pid=os.getpid(), temperature=71)
    with open(tmp_path / "ours", "w") as ours:
        driver.until(lambda: driver.watch.now)
        (gpu,) = driver.watch.now
        assert (gpu.name, gpu.util, gpu.memory_total, gpu.temperature_c, gpu.power_w) == (
            "Fake GPU",
            0.97,
            16_000_000_000,
            71,
            250,
        )
        assert gpu.processes == ((os.getpid(), 3_000_000_000),)
        assert driver.watch.process is not None
        held = [str(fd.readlink()) for fd in Path(f"/proc/{driver.watch.process.pid}/fd").iterdir()]
        assert ours.name not in held and not any(str(tmp_path) in name for name in held)  # nothing of ours
    record = next(read_lines(RunDir(tmp_path).system))
    assert (record["gpu"], record["step"], record["sys/gpu_util"], record["sys/gpu_mem_gb"]) == (0, 3, 0.97, 4.0)
    assert record["sys/gpu_processes"] == {str(os.getpid()): 3.0}
    assert driver.watch.fields()["gpus"][0]["sys/gpu_clock_mhz"] == 1800


def test_an_xid_that_needs_a_person_forbids_another_attempt(driver: Driver) -> None:
    driver.until(lambda: driver.watch.now)
    driver.say(xid=79)
    driver.until(driver.cause("off_the_bus"))
    hopeless = driver.watch.hopeless()
    assert hopeless is not None and "Xid 79" in hopeless.why
    driver.watch.begin_again()
    assert driver.watch.hopeless() is None


def test_an_xid_of_somebody_elses_card_is_not_ours_and_one_that_repeats_is_said_once(driver: Driver) -> None:
    driver.say(count=2, pid=os.getpid(), xid=79, xid_card=1, xid_repeats=1)
    driver.until(lambda: driver.watch.now)
    looks = len(list(read_lines(driver.watch.run.system)))
    driver.until(lambda: len(list(read_lines(driver.watch.run.system))) > looks + 4)
    assert not driver.cause("off_the_bus")() and driver.watch.hopeless() is None
    driver.say(xid_card=0, xid=13)
    driver.until(driver.cause("kernel_failed"))
    driver.until(lambda: len(list(read_lines(driver.watch.run.system))) > looks + 10)
    assert [verdict.cause for verdict in driver.found].count("kernel_failed") == 1
    assert any("Xid 13 (GPU 0)" in verdict.why for verdict in driver.found)


def test_heat_and_a_card_that_is_not_used_are_said_once(driver: Driver) -> None:
    driver.say(count=2, reasons=0x40, clock=700, temperature=93, pid=os.getpid())
    driver.until(lambda: driver.cause("throttled")() and driver.cause("gpu_unused")())
    looks = len(list(read_lines(driver.watch.run.system)))
    driver.until(lambda: len(list(read_lines(driver.watch.run.system))) > looks + 12)
    causes = [verdict.cause for verdict in driver.found]
    assert causes.count("throttled") == 1 and causes.count("gpu_unused") == 1  # of the card that is ours
    assert any("too hot (hardware); 700 of 1980 MHz, 93 C (GPU 0)" in verdict.why for verdict in driver.found)


def test_a_card_that_is_idle_while_steps_are_made_is_said_with_its_cause(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_watch, "_LOOKS", 4)
    driver.say(util=20, pid=os.getpid())
    driver.until(lambda: len(driver.watch.busy.get(0, ())) == 4)
    assert not driver.cause("low_utilisation")(), "no step was made: that is for others to judge"
    driver.steps, driver.data_wait = 1, 0.6
    driver.until(driver.cause("low_utilisation"))
    (found,) = [one for one in driver.found if one.cause == "low_utilisation"]
    assert "in use for 20% of the time; the steps wait for data 60% of the time" in found.why and found.state == "waste"
    driver.say(util=95)
    driver.until(lambda: driver.watch.held["idle 0"] == 0)


def test_a_driver_call_that_never_returns_is_named_and_left(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_watch, "_SILENT_S", 1.0)
    monkeypatch.setattr(gpu_watch, "_START_S", 1.0)
    driver.say(hang=1)
    began = time.monotonic()
    driver.until(driver.cause("driver_stuck"))
    (verdict,) = driver.found
    assert "no answer for" in verdict.why and verdict.state == "waste" and time.monotonic() - began < 60
    assert driver.watch.process is None and driver.watch.look(RunLook(frozenset(), 3, 1)) == []


def test_a_driver_that_does_not_fit_is_named(driver: Driver) -> None:
    driver.say(init=18)
    driver.until(driver.cause("driver_mismatch"))


def test_without_the_package_the_drivers_own_command_tells_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho '0, GPU-1a, 55, 1024, 23028, 1500, 1695, 64, 140.50, 0x0000000000000004, A card, with a comma'\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert nvml.is_there()
    code = "import sys; sys.modules['pynvml'] = None; sys.argv = ['x', '0']; from lamplighter.procs import nvml; nvml.main()"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        gpu = nvml.read_look(json.loads(process.stdout.readline())["gpus"][0])
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert (gpu.name, gpu.util, gpu.memory_used, gpu.power_w, gpu.reasons) == (
        "A card, with a comma",
        0.55,
        1 << 30,
        140.5,
        4,
    )


def test_a_card_that_the_user_has_hidden_is_not_called_unused(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-fake-0")
    driver.say(count=2, pid=os.getpid(), reasons=0x40, clock=700)
    driver.until(driver.cause("throttled"))
    looks = len(list(read_lines(driver.watch.run.system)))
    driver.until(lambda: len(list(read_lines(driver.watch.run.system))) > looks + 6)
    assert not driver.cause("gpu_unused")() and [gpu.uuid for gpu in driver.watch.now] == ["GPU-fake-0", "GPU-fake-1"]
    assert [gpu.index for gpu in driver.watch.cards_of([os.getpid()])] == [0]
    assert driver.watch.cards_of([1]) == (), "a process that has no card open"


SPIN = """
import ctypes
wait = ctypes.CDLL({library!r}).wait_for_the_card

def before(model):
    if model.calls == 6 and not os.path.exists("hung"):
        open("hung", "w").write(str(os.getpid()))
        wait()  # the line
"""


@LONG  # the rule: tests/unit/test_verdict.py
def test_a_kernel_that_does_not_end_is_named_and_given_up_after_patience(library: Path, tmp_path: Path) -> None:
    """A C function that spins without the GIL, as a wait for a GPU does, beside a driver that says the card is busy."""
    (tmp_path / "spin.c").write_text("void wait_for_the_card(void) { for (volatile int i = 0;; i++); }\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(tmp_path / "spin.so"), str(tmp_path / "spin.c")], check=True)
    family = write_model(tmp_path, SPIN.format(library=str(tmp_path / "spin.so")))
    script = tmp_path / "script"
    script.write_text("util 0\n")
    env = clean_env(LD_LIBRARY_PATH=str(library), FAKE_NVML=str(script))
    words = [*LAMP, "train", "--run", "r", *TINY, "--train.steps", "8", "--save.every_steps", "3", "--save.staged", "false",
             "--model.family", family, "--watch.patience_s", "12"]  # fmt: skip
    going = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: (tmp_path / "hung").exists() and (tmp_path / "hung").read_text(), 150, going)
    script.write_text(f"util 100\npid {(tmp_path / 'hung').read_text()}\n")
    said, _ = going.communicate(timeout=300)
    assert going.returncode == 0, said
    run = RunDir(tmp_path / "runs" / "r")
    first = next(one for one in verdicts_of(run) if one["cause"] in ("gpu_wait", "hung_kernel"))
    assert first["since_s"] < 10 and first["culprit"]["line"] == line_in(tmp_path / "own.py", "# the line")
    named, *_, acted = verdicts_of(run, "hung_kernel")
    assert named["state"] == "waiting" and named["action"] == "none"
    assert (
        "a kernel does not end, or a step is far longer than all before; GPU 0 (Fake GPU) is in use for 100% of the time"
        in named["why"]
    )
    assert named["waits_for"] == {"kind": "gpu", "holder": "GPU 0"}
    assert acted["action"] == "restart" and acted["since_s"] >= 12
    assert not verdicts_of(run, "running"), "it is not called alive"
    assert sorted(losses_of(run)) == list(range(1, 9))


@pytest.mark.parametrize("said", ["sleep 30", "echo nonsense"])
def test_an_nvidia_smi_that_does_not_tell_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """Not taken for a machine without a card."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nexec {said}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(BadConfig, match="does not tell of the cards"):
        nvml.cards_here()


def test_a_watched_command_has_its_cards_in_status_and_in_system(library: Path, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("util 42\nxid 63\n")
    env = clean_env(LD_LIBRARY_PATH=str(library), FAKE_NVML=str(script))
    words = [*LAMP, "watch", "--run", "w", "--", "sh", "-c", "while [ ! -e enough ]; do sleep 0.2; done"]
    going = subprocess.Popen(words, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = RunDir(tmp_path / "runs" / "w")
    try:
        wait_for(lambda: run.system.exists() and "gpus" in read_json(run.status) and verdicts_of(run), 150, going)
    finally:
        (tmp_path / "enough").touch()
        assert going.wait(60) == 0
    assert read_json(run.status)["gpus"][0]["sys/gpu_util"] == 0.42
    assert verdicts_of(run)[0]["cause"] == "rows_remapped"
    asking = [line.parent for line in Path("/proc").glob("[0-9]*/cmdline") if b"lamplighter.procs.nvml" in _read(line)]
    own = [one for one in asking if str(script).encode() in _read(one / "environ")]  # other tests have theirs
    assert not own, "the process that asks is left behind"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has just ended
        return b""
