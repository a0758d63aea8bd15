"""Files elsewhere, from a real server that drops, stalls, lies and changes: nothing lost, nothing repeated, all of it said."""

from __future__ import annotations

import gzip
import io
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from test_cursors import check_every_cursor, walk

from lamplighter import report
from lamplighter.data.sources import Source
from lamplighter.errors import BadData, InputMissing, LampError, Unreachable
from lamplighter.readers import files as reader_files
from lamplighter.readers import remote
from opening import open_source
from server import Handler, Served, Server, serving

ROWS = [f"row {n} é " + "fog " * (n % 40) for n in range(3000)]
LINES = "".join(json.dumps({"text": row}) + "\n" for row in ROWS).encode()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@dataclass
class Said:
    verdicts: list[report.Verdict] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@pytest.fixture(autouse=True)
def said(monkeypatch: Any) -> Said:
    found = Said()
    monkeypatch.setattr(report, "verdict", found.verdicts.append)
    monkeypatch.setattr(report, "warn", lambda text, **_: found.warnings.append(text))
    monkeypatch.setattr(report, "note", lambda text, **_: found.notes.append(text))
    monkeypatch.setattr(remote, "STALL_S", 0.3)
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.02)
    return found


def read(*urls: str, **options: Any) -> list[str]:
    return list(open_source([*urls], None, None, **options).documents())


def fails(kind: type[LampError], *urls: str, **options: Any) -> LampError:
    with pytest.raises(kind) as caught:
        read(*urls, **options)
    assert caught.value.what and caught.value.why and caught.value.next
    return caught.value


# ---------------------------------------------------------------- the same kinds as here


def test_every_kind_is_read_from_a_server_and_any_cursor_goes_on(server: Server, monkeypatch: Any) -> None:
    monkeypatch.setattr(reader_files, "BLOCK_BYTES", 5000)
    rows = ROWS[:300]
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
    table = io.BytesIO()
    pq.write_table(pa.table({"text": rows, "id": range(300)}), table, row_group_size=90)
    kinds = {
        "a.jsonl": lines,
        "a.jsonl.gz": gzip.compress(lines),
        "a.jsonl.zst": zstandard.compress(lines[:4000]) + zstandard.compress(lines[4000:]),
        "a.json": json.dumps([{"text": row} for row in rows]).encode(),
        "a.csv": ("id,text\n" + "".join(f'{n},"{row}"\n' for n, row in enumerate(rows))).encode(),
        "a.parquet": table.getvalue(),
    }
    for name, data in kinds.items():
        url, _ = server.put(name, data)
        assert check_every_cursor(lambda url=url: open_source([f"{url}?download=true"]), 4) == rows  # type: ignore[misc]
    url, _ = server.put("a.txt", b"one two\nthree\n")
    assert read(url) == ["one two\nthree\n"]


def test_a_cursor_asks_for_the_exact_byte(server: Server) -> None:
    url, served = server.put("a.jsonl", LINES)
    source = open_source([url])
    _, cursors = walk(source)
    served.requests.clear()
    assert list(open_source([url]).documents(cursors[2000])) == ROWS[2001:]
    assert served.requests[1]["Range"] == f"bytes={cursors[2000]['at']}-"
    assert all(request["Accept-Encoding"] == "identity" for request in served.requests)
    assert not any("Authorization" in request for request in served.requests)


@pytest.mark.parametrize("shift", [1, -1, 17, remote.OVERLAP_BYTES - 60_000])
def test_a_server_that_goes_on_at_another_byte_than_it_says_is_refused(server: Server, shift: int) -> None:
    url, _ = server.put("a.jsonl", LINES, drops=[60_000], shift=shift)
    error = fails(BadData, url)
    assert "not the same when it is asked for again" in error.what and "wrong byte" in error.why


def test_local_and_remote_stand_side_by_side(server: Server, tmp_path: Path) -> None:
    url, _ = server.put("a.jsonl", b'{"text": "far"}\n')
    (tmp_path / "b.txt").write_text("near")
    assert read(str(tmp_path / "b.txt"), url) == ["near", "far"]
    assert read(url, (tmp_path / "b.txt").as_uri()) == ["far", "near"]


def test_local_files_never_touch_the_network(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "b.txt").write_text("near")
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")

    def no(*_: object, **__: object) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket, "socket", no)
    monkeypatch.setattr(socket, "getaddrinfo", no)
    source = open_source([str(tmp_path), (tmp_path / "b.txt").as_uri()])
    source.fingerprint()
    assert list(source.documents()) == ["x", "near"]


# ---------------------------------------------------------------- zoo 13 and 14: drops and stalls


def test_a_dropped_connection_goes_on_at_the_byte(server: Server, said: Said) -> None:
    rng = random.Random(1)
    places = sorted(rng.sample(range(len(LINES)), 8))
    url, served = server.put("a.jsonl", LINES, drops=[*places])
    assert check_every_cursor(lambda: open_source([url]), 3) == ROWS
    assert not served.drops
    first = said.verdicts[0]
    assert first.cause == "stream_drop" and first.culprit["byte"] == places[0]
    assert "127.0.0.1" in str(first.culprit["host"]) and url in first.why
    assert sum("retry 1 in" in text and "byte" in text for text in said.warnings) == 8
    assert all(f"byte {place:,}" in text for place, text in zip(places, said.warnings, strict=False))


def test_a_dropped_packed_and_chunked_stream_too(server: Server, said: Said) -> None:
    packed = zstandard.compress(LINES)
    url, _ = server.put("a.jsonl.zst", packed, drops=[len(packed) // 3, len(packed) // 2])
    assert read(url) == ROWS
    url, _ = server.put("b.jsonl", LINES, chunked=True, drops=[70_000])
    assert read(url) == ROWS
    assert len(said.warnings) == 3


def test_a_stalled_server_is_named_and_asked_again(server: Server, said: Said) -> None:
    url, served = server.put("a.jsonl", LINES, stalls=[1, 60_000])
    source = open_source([url])
    texts = source.documents()
    items: list[str] = []
    found: list[str] = []

    def work() -> None:
        found.extend(texts)

    thread = threading.Thread(target=work)
    thread.start()
    deadline = time.monotonic() + 20
    while thread.is_alive() and time.monotonic() < deadline:
        items.append(source.position().item)
        time.sleep(0.005)
    thread.join(1)
    assert found == ROWS and not served.stalls
    assert [verdict.cause for verdict in said.verdicts] == ["stream_stall", "stream_stall"]
    assert (
        "socket idle" in said.verdicts[1].why and url in said.verdicts[1].why and "byte 60,000" in said.verdicts[1].why
    )
    assert f"{url}, byte 60,000" in items, "while the read waits, its place can be seen"
    assert served.requests[-1]["Range"] == f"bytes={60_000 - remote.OVERLAP_BYTES}-", "some bytes again, to compare"
    assert served.requests[-1]["If-Range"] == '"one"'


def test_waiting_for_a_retry_can_be_seen(server: Server, monkeypatch: Any) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.6)
    url, _ = server.put("a.jsonl", LINES, drops=[50_000])
    source = open_source([url])
    thread = threading.Thread(target=lambda: list(source.documents()))
    thread.start()
    items: set[str] = set()
    deadline = time.monotonic() + 20
    while thread.is_alive() and time.monotonic() < deadline:
        items.add(source.position().item)
        time.sleep(0.01)
    assert any(item.startswith("retry 1 in ") and "byte 50,000" in item for item in items)


def test_a_slow_first_byte_is_borne_longer_each_time(server: Server, said: Said) -> None:
    """A server that needs longer than the patience for its first byte is not asked for ever in vain."""
    url, _served = server.put("a.jsonl", LINES[:4000].rpartition(b"\n")[0], slow_s=0.0)
    real = Handler._send

    def late(self: Handler, found: Served, begin: int, stop: int) -> None:
        time.sleep(0.5)
        real(self, found, begin, stop)

    try:
        Handler._send = late  # type: ignore[method-assign]
        assert read(url)
    finally:
        Handler._send = real  # type: ignore[method-assign]
    assert any("socket idle" in text for text in said.warnings)


def test_a_server_without_ranges_is_read_again_and_passed_over(server: Server, said: Said) -> None:
    url, served = server.put("a.jsonl", LINES, ranges=False)
    served.after = {2: {"drops": [90_000]}}
    assert read(url) == ROWS
    assert any("cannot send parts" in text and "90,000" in text for text in said.warnings)
    url, _ = server.put("b.jsonl", LINES, ranges=False)
    assert check_every_cursor(lambda: open_source([url]), 2) == ROWS
    table = io.BytesIO()
    rng = random.Random(0)
    pq.write_table(pa.table({"text": [rng.randbytes(50).hex() for _ in ROWS]}), table)
    url, _ = server.put("a.parquet", table.getvalue(), ranges=False)
    assert "no Range" in fails(BadData, url).why


def test_busy_answers_are_tried_again(server: Server, said: Said) -> None:
    url, _served = server.put("a.jsonl", LINES, refuse=[503, 503])
    assert read(url) == ROWS
    assert "503" in said.warnings[0] and "retry 1" in said.warnings[0] and "retry 2" in said.warnings[1]
    url, _ = server.put("b.jsonl", LINES, refuse=[429, 408, 500])
    assert read(url) == ROWS


def test_it_gives_up_when_the_time_is_used_up(server: Server, said: Said) -> None:
    url, served = server.put("a.jsonl", LINES, ranges=False)
    served.after = {2: {"always_drop": 5000, "data": LINES, "chunked": True}}
    began = time.monotonic()
    error = fails(InputMissing, url, retry_s=0.5)
    assert time.monotonic() - began < 10
    assert error.code == 67 and "byte 5,000" in error.why and "retries in" in error.why
    url, _ = server.put("b.jsonl", LINES, drops=[5000])
    assert "no retries" in fails(InputMissing, url, retry_s=0).why


def test_faults_under_a_table_keep_their_words(server: Server, said: Said, monkeypatch: Any) -> None:
    """The reads are asked for by a library in C: what goes wrong in them is said all the same, and goes on all the same."""
    rng = random.Random(0)
    rows = [rng.randbytes(200).hex() for _ in range(3000)]
    table = io.BytesIO()
    pq.write_table(pa.table({"text": rows}), table, row_group_size=500, compression="none", use_dictionary=False)
    monkeypatch.setattr(remote, "WINDOW_BYTES", 100_000)
    url, served = server.put("a.parquet", table.getvalue(), drops=[200_000, 600_000])
    assert read(url) == rows and not served.drops
    assert sum("retry 1" in text for text in said.warnings) == 2
    url, _ = server.put("b.parquet", table.getvalue(), drops=[200_000])
    assert "byte 200,000" in fails(InputMissing, url, retry_s=0).why
    url, served = server.put("c.parquet", table.getvalue())
    served.after = {4: {"etag": '"two"'}}
    assert "changed" in fails(BadData, url).what


# ---------------------------------------------------------------- what a server may say that is not so


def test_a_changed_file_is_refused(server: Server) -> None:
    url, served = server.put("a.jsonl", LINES, drops=[30_000])
    served.after = {3: {"etag": '"two"'}}
    error = fails(BadData, url)
    assert "changed" in error.what and '"one"' in error.why and '"two"' in error.why
    url, served = server.put("b.jsonl", LINES, drops=[30_000], etag=None)
    served.after = {3: {"data": LINES[:-100]}}
    assert "changed" in fails(BadData, url).what
    url, served = server.put("c.jsonl", LINES, drops=[30_000], etag=None)
    served.after = {3: {"data": LINES[:1000]}}
    assert "changed" in fails(BadData, url).what


def test_a_length_that_is_too_great_is_named(server: Server, said: Said) -> None:
    for number, ranges in enumerate((True, False)):
        url, _ = server.put(f"{number}.jsonl", LINES, announce=1000, ranges=ranges)
        error = fails(BadData, url)
        assert "cut short" in error.what
        assert f"{len(LINES) + 1000:,}" in error.why and f"{len(LINES):,}" in error.why
    assert any("announced" in text for text in said.warnings)


def test_a_length_that_is_too_small_is_said(server: Server, said: Said) -> None:
    cut = LINES.rfind(b"\n", 0, len(LINES) - 1000) + 1
    url, _ = server.put("a.jsonl", LINES, announce=cut - len(LINES), ranges=False)
    assert read(url) == [json.loads(line)["text"] for line in LINES[:cut].splitlines()]
    assert any("more than the" in text and f"{cut:,}" in text for text in said.warnings)


def test_packing_that_was_not_asked_for(server: Server) -> None:
    url, _ = server.put("a.jsonl", gzip.compress(LINES), encoding="gzip")
    assert "gzip" in fails(BadData, url).why
    url, _ = server.put("a.jsonl.gz", gzip.compress(LINES), encoding="gzip")
    assert read(url) == ROWS


def test_answers_that_will_not_pass_are_errors_at_once(server: Server, said: Said) -> None:
    began = time.monotonic()
    missing = fails(InputMissing, f"{server.url}/nothing.jsonl")
    assert "404" in missing.why and missing.code == 66, "it has answered: there is no such file"
    for code in (401, 403):
        url, _ = server.put("a.jsonl", LINES, refuse=[code])
        error = fails(InputMissing, url)
        assert error.code == 67 and "no permission" in error.what and "user:word@host" in error.next
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert "refused" in (error := fails(Unreachable, f"http://127.0.0.1:{port}/a.txt", retry_s=0.1)).why
    assert error.code == 67
    assert "no such host" in fails(Unreachable, "http://no-such-host.invalid/a.txt").what
    assert time.monotonic() - began < 15
    url, _ = server.put("empty.jsonl", b"")
    assert "empty file" in fails(BadData, url).what
    assert "nonnumeric" in fails(InputMissing, "http://localhost:port/a.txt").why
    assert "does not list" in fails(InputMissing, f"{server.url}/*.jsonl").why


def test_redirects_credentials_and_names(server: Server, said: Said) -> None:
    _url, served = server.put("real.jsonl", LINES)
    server.put("old", b"", redirect="/real.jsonl")
    host = server.url.removeprefix("http://")
    secret = f"http://me:hush@{host}/real.jsonl"
    source = open_source([secret])
    assert list(source.documents()) == ROWS
    assert served.requests[-1]["Authorization"] == "Basic bWU6aHVzaA=="
    assert "hush" not in source.position().item + str(source)
    server.put("old.jsonl", b"", redirect=f"http://localhost:{host.rpartition(':')[2]}/real.jsonl")
    served.requests.clear()
    assert read(f"http://me:hush@{host}/old.jsonl") == ROWS
    assert served.requests and not any("Authorization" in request for request in served.requests)


def test_the_fingerprint_is_address_size_and_mark(server: Server, said: Said) -> None:
    def mark(query: str = "") -> str:
        return open_source([url + query]).fingerprint()

    url, served = server.put("a.jsonl", LINES)
    first = mark()
    assert mark() == first == mark("?signature=other")
    assert "ETag" in said.notes[0]
    served.etag = '"two"'
    assert mark() != first
    served.etag = '"one"'
    served.data = LINES[:-20]
    assert mark() != first


# ---------------------------------------------------------------- fsspec


@pytest.fixture
def memory() -> Iterator[Any]:
    import fsspec

    system = fsspec.filesystem("memory")
    yield system
    for path in system.find("/"):
        system.rm(path)


def test_any_fsspec_address(memory: Any) -> None:
    memory.pipe("/corpus/a.jsonl", LINES)
    memory.pipe("/corpus/b.jsonl.zst", zstandard.compress(b'{"text": "second"}\n'))
    memory.pipe("/corpus/picture.png", b"\x89PNG")
    table = io.BytesIO()
    pq.write_table(pa.table({"text": ["third"]}), table)
    memory.pipe("/corpus/deep/c.parquet", table.getvalue())
    assert check_every_cursor(lambda: open_source(["memory://corpus"]), 3) == [*ROWS, "second", "third"]
    assert read("memory://corpus/*.zst") == ["second"]
    assert "nothing matches" in fails(InputMissing, "memory://corpus/*.csv").what
    assert "no such file" in fails(InputMissing, "memory://corpus/x.txt").what
    source: Source = open_source(["memory://corpus/a.jsonl"])
    assert source.fingerprint() == open_source(["memory://corpus/a.jsonl"]).fingerprint()


def test_an_fsspec_file_that_fails_in_the_middle_goes_on(memory: Any, said: Said, monkeypatch: Any) -> None:
    memory.pipe("/a.jsonl", LINES)
    faults = [30_000, 80_000]
    real = remote._StoredBody.read

    def shaky(self: Any, size: int) -> bytes:
        if faults and self.file.tell() >= faults[0]:
            faults.pop(0)
            raise remote.ConnectionLost("EndpointConnectionError: gone")
        return real(self, min(size, 10_000))

    monkeypatch.setattr(remote._StoredBody, "read", shaky)
    assert read("memory://a.jsonl") == ROWS
    assert [verdict.cause for verdict in said.verdicts] == ["stream_drop"] * 2


@pytest.mark.parametrize(
    ("url", "package"),
    [("s3://bucket/a.jsonl", "s3fs"), ("gs://bucket/a.jsonl", "gcsfs"), ("nope://x/a.jsonl", "fsspec")],
)
def test_a_missing_package_is_one_clear_line(url: str, package: str, monkeypatch: Any) -> None:
    import importlib.util

    if importlib.util.find_spec(package) and package != "fsspec":
        pytest.skip(f"{package} is installed here")
    error = fails(InputMissing, url)
    assert error.code == 66 and "\n" not in error.why
    assert package in error.next or "beginning of the address" in error.next
