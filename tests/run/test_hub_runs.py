"""What starts processes: Hugging Face datasets: folders are read in place and ask nobody; a name without a network is an error in seconds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from running import lamp


def test_a_name_on_the_hub_without_a_network_ends_within_seconds_and_speaks(tmp_path: Path) -> None:
    """The real command. Where there is a network, nothing answers at the address that it is given."""
    began = time.monotonic()
    words = ["train", "--data.paths", "dataset:someone/some-corpus", "--train.steps", "1", "--runs-dir", "runs"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", "http://no-such-host.invalid")
        patch.setenv("HF_HOME", str(tmp_path / "home"))
        done = lamp(*words, cwd=tmp_path, timeout=60)
    assert done.returncode == 67, done.stderr[-2000:]
    said = done.stdout + done.stderr
    assert "someone/some-corpus" in said and "cannot be reached" in said and "dataset:/path/to/folder" in said
    assert time.monotonic() - began < 40, "about 5 s on a calm machine"
