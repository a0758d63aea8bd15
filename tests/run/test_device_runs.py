"""A GPU that fails under a run: torch's own exceptions with CUDA's own words, raised at a step by a model of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from lamplighter.rundir import RunDir, read_lines
from running import LONG, TINY, events_of, lamp, line_in, losses_of, verdicts_of, write_model

TRAIN = ["train", "--run", "r", *TINY, "--train.steps", "8", "--save.every_steps", "3", "--save.staged", "false"]
MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 1.00 GiB is free. "
    "Including non-PyTorch memory, this process has 23.00 GiB memory in use. Of the allocated memory {used} GiB is "
    "allocated by PyTorch, and {spare} GiB is reserved by PyTorch but unallocated."
)
ONCE = """
def before(model):
    if model.calls == 6 and not os.path.exists("failed"):
        open("failed", "w").close()
        raise {error}
    if model.calls == 1 and os.path.exists("failed"):
        open("setting", "w").write(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
"""
EVER = """
def before(model):
    steps = int(open("steps").read()) if os.path.exists("steps") else 0
    if model.calls + steps == 5:
        {before}
        raise {error}
"""
ASSERT = 'torch.AcceleratorError("CUDA error: device-side assert triggered\\nCompile with `TORCH_USE_CUDA_DSA`")'


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of the same run without a fault."""
    place = tmp_path_factory.mktemp("calm")
    family = write_model(place, "pass")
    assert lamp(*TRAIN, "--model.family", family, cwd=place).returncode == 0
    return losses_of(RunDir(place / "runs" / "r"))


def test_a_dead_context_is_restarted_from_the_durable_step(tmp_path: Path, calm: dict[int, str]) -> None:
    family = write_model(tmp_path, ONCE.format(error=ASSERT))
    done = lamp(*TRAIN, "--model.family", family, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    run = RunDir(tmp_path / "runs" / "r")
    (verdict,) = verdicts_of(run, "device_assert")
    assert verdict["action"] == "restart" and verdict["culprit"]["step"] == 5
    assert "restarting from step 3" in done.stdout  # step 5 was done, and was not saved out of a dead context
    assert not (run.checkpoints / "checkpoint-5").exists()
    assert losses_of(run) == calm


@LONG  # a dead context and a fault that needs a person stay in make test
def test_out_of_memory_in_pieces_saves_and_goes_on_with_another_allocator(tmp_path: Path, calm: dict[int, str]) -> None:
    family = write_model(
        tmp_path, ONCE.format(error=f'torch.OutOfMemoryError("{MEMORY.format(used="19.00", spare="3.50")}")')
    )
    done = lamp(*TRAIN, "--model.family", family, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    run = RunDir(tmp_path / "runs" / "r")
    (verdict,) = verdicts_of(run, "out_of_memory_fragmented")
    assert "2.00 GiB were asked for" in verdict["why"] and "restarting from step 5" in done.stdout  # the context lives
    assert (tmp_path / "setting").read_text() == "expandable_segments:True"
    assert losses_of(run) == calm


@LONG  # a dead context and a fault that needs a person stay in make test
def test_out_of_memory_twice_at_one_step_stops_with_advice(tmp_path: Path) -> None:
    error = f'torch.OutOfMemoryError("{MEMORY.format(used="22.00", spare="0.50")}")'
    body = EVER.format(before='open("steps", "w").write("4")', error=error)
    done = lamp(*TRAIN, "--model.family", write_model(tmp_path, body), cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    first, second = verdicts_of(RunDir(tmp_path / "runs" / "r"), "out_of_memory")
    assert (first["action"], second["action"]) == ("restart", "stop")
    assert "for the second time (out_of_memory): it does not fit; a smaller train.micro_batch" in second["next"]
    assert len(events_of(RunDir(tmp_path / "runs" / "r"), "start")) == 2


@LONG  # a dead context and a fault that needs a person stay in make test
def test_an_assert_twice_at_one_step_is_a_bug_and_the_first_exception_is_told(tmp_path: Path) -> None:
    """A second exception while the first is dealt with (here: a cleanup that meets the dead context) does not hide it."""
    body = (
        EVER.format(before='open("steps", "w").write("3")', error=ASSERT).replace(
            "        raise ", "        try: raise "
        )
        + '        finally: raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")\n'
    )
    done = lamp(*TRAIN, "--model.family", write_model(tmp_path, body), cwd=tmp_path)
    assert done.returncode == 1, done.stdout
    run = RunDir(tmp_path / "runs" / "r")
    assert not verdicts_of(run, "illegal_access")
    first, second = verdicts_of(run, "device_assert")
    assert (first["action"], second["action"]) == ("restart", "stop") and "a bug in code or data" in second["next"]
    assert "CUDA_LAUNCH_BLOCKING=1" in second["next"]


REPLAYED = """
def before(model):
    if os.path.exists("failed"):
        torch.zeros(3)[torch.tensor([7])]  # the line
    if model.calls == 5:
        open("failed", "w").close()
        raise {error}
"""


@LONG  # tests/unit/test_replay.py has the words
def test_an_assert_is_replayed_on_the_cpu_and_its_index_named(tmp_path: Path) -> None:
    done = lamp(*TRAIN, "--model.family", write_model(tmp_path, REPLAYED.format(error=ASSERT)), cwd=tmp_path)
    assert done.returncode == 65, done.stdout
    line = line_in(tmp_path / "own.py", "# the line")
    assert "index 7 is out of bounds" in done.stdout and f"own.py:{line} in before" in done.stdout
    assert len(events_of(RunDir(tmp_path / "runs" / "r"), "start")) == 1, "the same batch would fail again"
    assert (tmp_path / "runs" / "r" / "checkpoints" / "checkpoint-3").is_dir()


def test_what_needs_a_person_is_not_tried_again(tmp_path: Path) -> None:
    error = 'RuntimeError("CUDA error: CUDA driver version is insufficient for CUDA runtime version")'
    family = write_model(tmp_path, ONCE.format(error=error))
    done = lamp(*TRAIN, "--model.family", family, cwd=tmp_path)
    assert done.returncode == 1 and "update the driver" in done.stdout, done.stdout
    assert len(events_of(RunDir(tmp_path / "runs" / "r"), "start")) == 1
    assert list(read_lines(RunDir(tmp_path / "runs" / "r").metrics))[-1]["step"] == 5
