"""What starts processes: CSV, TSV, Parquet and JSON arrays: columns by name; bad rows with file, line and byte; cut, changed and huge files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from test_sources import read, write


def test_only_the_column_is_read_and_memory_stays_small(tmp_path: Path) -> None:
    """One row group of 120 MB: a child measures its own peak."""
    path = tmp_path / "a.parquet"
    schema = pa.schema({"text": pa.string(), "blob": pa.string()})
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as writer:
        rows = [os.urandom(3000).hex() for _ in range(20)]
        writer.write_table(pa.table({"text": rows * 500, "blob": rows * 500}, schema), row_group_size=10_000)
    assert peak_mb(path) < 60
    assert path.stat().st_size > 100e6


PEAK = """
import sys, threading, time
from pathlib import Path
import pyarrow.parquet, zstandard
from lamplighter.config import Data
from lamplighter.data.sources import open_data

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024

def watch():
    global most
    while True:
        most = max(most, anonymous())
        time.sleep(0.002)

source = open_data(Data(paths=[sys.argv[1]]))
before = most = anonymous()
threading.Thread(target=watch, daemon=True).start()
chars = sum(len(text) for text in source.documents())
print(max(most, anonymous()) - before, chars)
"""


def peak_mb(path: Path) -> float:
    """By how many MB of its own (pages of files and libraries apart) reading a file raises the memory of a process.

    One arena of malloc: what others leave unused between them is not what reading needs.
    """
    env = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True, env=env)
    return float(done.stdout.split()[0])


def test_a_line_of_200_mb_is_read_in_a_bounded_space(tmp_path: Path) -> None:
    size = 200_000_000
    lines = {"a.txt": b"fog and lamps, " * (size // 15), "b.txt.zst": zstandard.compress(b"x" * size)}
    for name, data in lines.items():
        (tmp_path / name).write_bytes(data)
        assert peak_mb(tmp_path / name) < 100, name  # one byte, repeated, is the worst that zstd can do
        (tmp_path / name).unlink()
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + b"fog " * (size // 16) + b'"}\n')
    assert peak_mb(tmp_path / "a.jsonl") < 6 * size / 4e6, "one JSON line is held, some times over"


def test_an_array_is_read_without_holding_it(tmp_path: Path, monkeypatch: Any) -> None:
    rows = [{"text": f'é {n} ]}},[ \\ " ' + "x" * (n % 700), "n": n, "deep": [[n], {"a": None}]} for n in range(3000)]
    for indent in (None, 2):
        path = write(tmp_path / "a.json", json.dumps(rows, indent=indent, ensure_ascii=False))
        assert read(path) == [row["text"] for row in rows]
    assert read(write(tmp_path / "b.json", "\ufeff \n [ ] "), write(tmp_path / "c.txt", "x")) == ["x"]
    big = write(tmp_path / "big.json", b"[" + b",\n".join([b'{"text": "%s"}' % (b"fog " * 500)] * 30_000) + b"]")
    assert big.stat().st_size > 60e6 and peak_mb(big) < 30
