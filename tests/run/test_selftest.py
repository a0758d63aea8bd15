"""lamp selftest: the quick form on the CPU, what it finds, and the file that can be sent."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from lamplighter.config import resolve
from lamplighter.doctor import self_tests
from lamplighter.doctor.probe import ProbeContext
from lamplighter.model import transformer
from lamplighter.procs.nvml import GpuLook
from running import LAMP, clean_env


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, object], str]]:
    folder = tmp_path_factory.mktemp("selftest")
    done = subprocess.run(
        [*LAMP, "selftest", "--test", "--json"],
        cwd=folder,
        env=clean_env(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    yield folder, json.loads(done.stdout), done.stderr


def test_the_quick_form_tries_every_promise(made: tuple[Path, dict[str, object], str]) -> None:
    _, told, words = made
    findings = told["findings"]
    assert isinstance(findings, list) and told["ok"] is True
    said = "\n".join(f"{one['level']} {one['what']}" for one in findings)
    assert "all 40 losses, the final weights and the optimizer are the same bits" in said
    assert "ok exact: proved here" in said and "redone step" in said
    assert "lamp generate and transformers write the same" in said
    assert "packed in bf16: at most" in said and "tokens/s in fp32" in said
    assert "called device_assert, restarted, and all 40 steps were made" in said
    assert "called out_of_memory, restarted" in said
    assert "skip this was asked for on the CPU" in said
    assert "made: " in words and "lamplighter-selftest.txt" in words


def test_the_file_holds_no_paths_or_names(made: tuple[Path, dict[str, object], str]) -> None:
    folder = made[0]
    text = (folder / "lamplighter-selftest.txt").read_text()
    assert "kill and resume" in text and "torch" in text
    assert str(folder) not in text and str(Path.home()) not in text and "/tmp" not in text
    assert [path.name for path in folder.iterdir()] == ["lamplighter-selftest.txt"], "nothing else is left behind"


def test_attention_that_is_wrong_is_a_fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = transformer.attend
    monkeypatch.setattr(transformer, "attend", lambda *words: right(*words) + 1e-3)
    run = resolve(None, None, self_tests.settings(gpu=False, quick=True)).run
    found = list(self_tests.attention(ProbeContext(run, None, tmp_path, tmp_path, lambda _: None)))
    assert {one.level for one in found if "fp32" in one.what} == {"fault"}


def test_a_card_that_is_slowed_down_is_a_warning() -> None:
    hot = GpuLook(0, util=0.97, temperature_c=92, power_w=301, reasons=0x40)
    calm = GpuLook(1, util=0.97, temperature_c=60, power_w=250)
    lines = [json.dumps({"gpus": [vars(hot), vars(calm)]})]
    first, second = self_tests._of_looks(lines)
    assert first.level == "warn" and "92 °C" in first.what and "slowed down by" in first.what
    assert second.level == "ok" and "97% busy" in second.what
    assert next(iter(self_tests._of_looks([]))).level == "warn"
