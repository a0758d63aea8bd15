"""The looping pictures of the README are recordings: made anew by the real commands, they claim what the committed ones do.

`make pictures` takes a recording into docs/; here it goes into a folder of the test's own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pictures import CHECKS, MOST_BYTES, last_screen
from running import LONG, clean_env

pytestmark = LONG
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("scene", CHECKS)
def test_a_picture_recorded_anew_shows_what_the_committed_one_does(scene: str, tmp_path: Path) -> None:
    out = tmp_path / f"{scene}.svg"
    recorder = [sys.executable, str(ROOT / "benchmarks" / "recording.py"), scene, str(out)]
    made = subprocess.run(recorder, capture_output=True, text=True, timeout=600, env=clean_env(), check=False)
    assert made.returncode == 0, made.stdout + made.stderr
    anew, committed = out.read_text(), (ROOT / "docs" / f"{scene}.svg").read_text()
    CHECKS[scene](last_screen(anew))
    assert len(anew) < MOST_BYTES
    assert _captions(anew) == _captions(committed)


def _captions(svg: str) -> list[str]:
    """What stands over the film, without its numbers."""
    return [re.sub(r"[\d.]+", "#", text) for text in re.findall(r'text-anchor="middle"[^>]*>(.*?)<', svg)]
