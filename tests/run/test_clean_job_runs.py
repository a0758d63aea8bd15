"""What starts processes: `lamp data clean` as a user runs it: what it makes, what it says, what it leaves out and why; killed, repeated, in parallel."""

from __future__ import annotations

import gzip
import json
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import zstandard
from test_clean_job import _run, make_corpus, prose, rejected, texts

from lamplighter.data.sources.file_source import FileSource
from lamplighter.readers.local import find_files
from running import LONG, lamp, start_lamp, wait_for


def everything(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def test_the_command_makes_documents_that_train_reads(tmp_path: Path) -> None:
    raw = make_corpus(tmp_path / "raw")
    (raw / "page.html").write_text(f"<html><body><p>{prose(50)}</p></body></html>")
    (raw / "web.jsonl.gz").write_bytes(gzip.compress((json.dumps({"text": prose(51), "url": "u"}) + "\n").encode()))
    (raw / "web.jsonl.zst").write_bytes(zstandard.compress((json.dumps({"text": prose(52)}) + "\n").encode()))
    done = lamp("data", "clean", "raw", "--out", "clean", "--workers", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kept" in done.stdout
    assert "joined lines" in done.stdout
    assert "next: lamp train --data.paths clean" in done.stderr
    assert "MB of" in done.stderr or "done  clean" in done.stderr
    found = find_files([str(tmp_path / "clean")])
    assert [Path(path.name).name for path in found] == ["clean-00000.jsonl"], "the log must not be trained on"
    documents = list(FileSource(found).documents())
    assert len(documents) == 9
    assert all(len(text) > 500 for text in documents)
    assert "\n" not in documents[0].split("\n\n")[0], "wrapped lines are joined"
    records = texts(tmp_path / "clean")
    assert records[-2]["source"].endswith("web.jsonl.gz:1")
    assert records[-2]["meta"] == {"url": "u"}
    again = lamp("data", "clean", "raw", "--out", "clean", cwd=tmp_path)
    assert again.returncode == 0
    assert "nothing has changed" in again.stderr
    assert again.stdout == done.stdout


def test_a_killed_run_goes_on_and_comes_out_the_same(tmp_path: Path) -> None:
    make_corpus(tmp_path / "raw", 24, 300)
    process = start_lamp("data", "clean", "raw", "--out", "clean", "--workers", "2", cwd=tmp_path)
    work = tmp_path / "clean" / "parts"
    wait_for(lambda: len(list(work.glob("*.done"))) >= 2, process=process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for(lambda: not _locked(work / "lock"))
    done = len(list(work.glob("*.done")))
    assert 2 <= done < 24, "it was to be killed in the middle"
    assert not list((tmp_path / "clean").glob("clean-*"))
    second = lamp("data", "clean", "raw", "--out", "clean", "--workers", "1", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert f"{done} of 24 parts are there from an earlier run" in second.stderr
    killed = everything(tmp_path / "clean")
    shutil.move(tmp_path / "clean", tmp_path / "other")
    _run(tmp_path, "raw", workers=1)
    assert everything(tmp_path / "clean") == killed
    assert set(killed) == {"clean-00000.jsonl", "log/manifest.log", "log/rejected.log", "log/report.log"}


def _locked(path: Path) -> bool:
    import fcntl

    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    raw = make_corpus(tmp_path / "raw", 8)
    (raw / "a_copy.txt").write_text(prose(3).upper())
    lines = [json.dumps({"text": prose(100 + number)}) for number in range(20)]
    (raw / "z.jsonl").write_text("\n".join([*lines, lines[4], "{torn"]))
    one = _run(tmp_path, "raw", workers=1, out="one")
    three = _run(tmp_path, "raw", workers=3, out="three")
    assert one.totals == three.totals
    assert everything(tmp_path / "one") == everything(tmp_path / "three")
    why = rejected(tmp_path / "one")
    assert why["raw/book003.txt"] == ("duplicate", "the same as raw/a_copy.txt"), (
        "the first in the order of the input stays"
    )
    assert why["raw/z.jsonl:21"] == ("duplicate", "the same as raw/z.jsonl:5")
    assert why["raw/z.jsonl:22"][0] == "bad_json"
    kept = _run(tmp_path, "raw", workers=1, out="all", keep_duplicates=True)
    assert kept.totals["kept"] == one.totals["kept"] + 2


@LONG  # 200 MB
def test_a_line_of_200_mb_is_named_and_the_next_one_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "long.jsonl", "wb") as file:
        file.write(b'{"text": "' + b"a" * 200_000_000 + b'"}\n' + json.dumps({"text": prose(1)}).encode())
    done = lamp("data", "clean", "long.jsonl", "--out", "clean", cwd=tmp_path)
    assert done.returncode == 0
    assert rejected(tmp_path / "clean")["long.jsonl:1"][0] == "too_long"


def test_other_rules_and_other_files_are_noticed(tmp_path: Path) -> None:
    raw = make_corpus(tmp_path / "raw", 3)
    first = lamp("data", "clean", "raw", "--out", "clean", "--workers", "1", cwd=tmp_path)
    assert first.returncode == 0
    ruled = lamp("data", "clean", "raw", "--out", "clean", "--workers", "1", "--keep-lines", cwd=tmp_path)
    assert "the rules are not those of the last time" in ruled.stderr
    assert "\n" in texts(tmp_path / "clean")[0]["text"].split("\n\n")[0]
    (raw / "book001.txt").write_text(prose(77))
    (raw / "book002.txt").unlink()
    changed = lamp("data", "clean", "raw", "--out", "clean", "--workers", "1", "--keep-lines", cwd=tmp_path)
    assert "the input is not that of the last time" in changed.stderr
    assert [record["text"] for record in texts(tmp_path / "clean")] == [prose(0), prose(77)]


def test_a_dry_run_shows_examples_and_writes_nothing(tmp_path: Path) -> None:
    raw = make_corpus(tmp_path / "raw", 2)
    (raw / "pg.txt").write_text(
        "*** START OF THE PROJECT GUTENBERG EBOOK 1 ***\n\n\n"
        + prose(5)
        + "\n\n\n*** END OF THE PROJECT GUTENBERG EBOOK 1 ***\n"
    )
    before = everything(tmp_path)
    done = lamp("data", "clean", "raw", "--out", "clean", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "joined lines: raw/book000.txt" in done.stdout
    assert "  - *** START OF THE PROJECT GUTENBERG EBOOK 1 ***" in done.stdout
    assert "nothing was written" in done.stderr
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["missing", "--out", "o"], 66, "no such file or folder"),
        (["raw/*.tei", "--out", "o"], 66, "nothing matches"),
        (["poor", "--out", "o"], 65, "every document was rejected"),
        (["raw"], 2, "--out DIR is needed"),
        (["--out", "o"], 2, "no path was given"),
        (["raw", "--out", "o", "--languag", "en"], 2, "--language"),
        (["raw", "--out", "o", "--near", "7"], 2, "out of range"),
        (["raw", "--out", "raw"], 2, "is both input and output"),
        (["raw", "--out", "poor"], 2, "has other files in it"),
    ],
)
def test_mistakes_have_an_exit_code_and_three_lines(words: list[str], code: int, said: str, tmp_path: Path) -> None:
    make_corpus(tmp_path / "raw", 1)
    (tmp_path / "poor").mkdir()
    (tmp_path / "poor" / "a.txt").write_text("too few words")
    done = lamp("data", "clean", *words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "nothing was changed" not in done.stderr, "what is finished is kept"


def test_a_full_disk_is_said_and_the_next_run_goes_on(tmp_path: Path) -> None:
    """A file-size limit stands in for the disk where a small disk cannot be mounted."""
    small = tmp_path / "small"
    small.mkdir()
    make_corpus(tmp_path / "raw", 6, 60)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no small disk can be mounted here")
    try:
        done = lamp("data", "clean", "raw", "--out", "small/clean", "--workers", "1", cwd=tmp_path)
        assert done.returncode == 73, done.stderr
        assert "the disk is full" in done.stderr
        assert not list((small / "clean").glob("clean-*"))
        subprocess.run(["mount", "-o", "remount,size=8m", str(small)], check=True)
        again = lamp("data", "clean", "raw", "--out", "small/clean", "--workers", "1", cwd=tmp_path)
        assert again.returncode == 0
        assert len(texts(small / "clean")) == 6
    finally:
        subprocess.run(["umount", str(small)], check=False)
