"""Files elsewhere: http(s) and every fsspec URL, read as a stream that survives drops and silences, and says them.

In:  URLs; patterns and folders where fsspec can list them.
Out: RemoteFiles, whose bytes go on at the exact byte after each fault, or an error when `retry_s` is used up. While a read
     waits, `tell` has already said which file, which byte and which attempt.
"""

from __future__ import annotations

import io
import re
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Protocol, TypeVar

from lamplighter import report
from lamplighter.errors import BadData, InputMissing, LampError, Unreachable
from lamplighter.readers.http import ConnectionLost, HttpOpener, RemoteFacts, changed, host_of, no_host, safe_url
from lamplighter.readers.local import Tell, kind_of

STALL_S = 3.0  # a server that sends nothing for so long is asked again; twice as long each time
_LONGEST_STALL_S = 60.0
FIRST_WAIT_S, LONGEST_WAIT_S = 0.25, 30.0
_FIRST_CONTACT_S = 20.0  # a server that was never reached is given up sooner than one that was
_SAME_PLACE = 3  # an orderly end at the same byte, so often: the file ends there, whatever was announced
_VERDICTS = 5  # of one cause and one file; later ones are warnings only
OVERLAP_BYTES = 1 << 10  # asked for again after a fault, and compared: a server may answer from another byte
WINDOW_BYTES = 1 << 21  # of a file that is read here and there
_URL = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]*://")
Result = TypeVar("Result")


def is_url(entry: str) -> bool:
    return bool(_URL.match(entry))


class ByteStream(Protocol):
    """Open bytes of a remote file."""

    at: int

    def read(self, size: int) -> bytes:
        """Some bytes; b"" at the end; ConnectionLost when the connection is."""

    def close(self) -> None: ...


class Opener(Protocol):
    """How the bytes of one kind of address are had."""

    def ask_for_facts(self, patience_s: float) -> RemoteFacts:
        """What is known of the file."""

    def open(self, at: int, stop: int | None, facts: RemoteFacts, patience_s: float) -> ByteStream:
        """Its bytes from `at` on, or from 0 where that cannot be."""


# ---------------------------------------------------------------- trying again


class Retries:
    """How often and how long one file was asked again, without progress in between."""

    def __init__(self, name: str, host: str, budget_s: float, limit: str = "data.retry_s") -> None:
        self.name, self.host, self.budget_s, self.limit = name, host, budget_s, limit
        self.attempt = 0
        self.since = 0.0
        self.patience_s = STALL_S
        self.said: Counter[str] = Counter()

    def progress(self) -> None:
        if self.attempt:
            self.attempt, self.patience_s = 0, STALL_S

    def again(self, lost: ConnectionLost, at: int, tell: Tell) -> None:
        """Say what happened and wait, in sight; an error when it was tried for long enough."""
        now = time.monotonic()
        if not self.attempt:
            self.since = now
        self.attempt += 1
        reason = lost.reason
        if lost.cause == "stream_stall":
            reason = f"socket idle {self.patience_s:.0f} s"
            self.patience_s = min(2 * self.patience_s, _LONGEST_STALL_S)
        wait = max(min(FIRST_WAIT_S * 2 ** (self.attempt - 1), LONGEST_WAIT_S), min(lost.after_s, 60.0))
        left_s = self.budget_s - (now - self.since)
        wait = min(wait, left_s)
        if left_s <= 0:
            tried = f"{self.attempt - 1} retries in {now - self.since:.0f} s" if self.attempt > 1 else "no retries"
            why = f"byte {at:,}: {reason}; {tried}"
            raise Unreachable(f"lost {self.name}", why, "look at the network and the server, then run it again")
        self._say(lost.cause, reason, at, wait)
        with report.phase("wait to try again", total=wait, unit="s") as p:
            while (left := now + wait - time.monotonic()) > 0:
                words = f"retry {self.attempt} in {left:.0f} s: {self.host}, byte {at:,}: {reason}"
                tell(words, at)
                p.set(wait - left, words)
                time.sleep(min(0.2, left))
        tell(f"{self.name}, byte {at:,}, attempt {self.attempt + 1}", at)

    def _say(self, cause: str, reason: str, at: int, wait: float) -> None:
        words = f"retry {self.attempt} in {wait:.1f} s: {self.host}, byte {at:,}: {reason}"
        self.said[cause] += self.attempt == 1
        if self.attempt == 1 and self.said[cause] <= _VERDICTS:
            verdict = report.Verdict(
                "slow",
                cause,
                f"{reason}: {self.name}, byte {at:,}",
                f"nothing to do: it is asked again from that byte on, for up to {self.budget_s:.0f} s ({self.limit})",
                culprit={"path": self.name, "byte": at, "host": self.host},
                evidence=(words,),
                since_s=self.patience_s / 2 if cause == "stream_stall" else 0.0,
            )
            report.verdict(verdict)
        report.warn(words, cause=cause, attempt=self.attempt, host=self.host, byte=at, url=self.name, reason=reason)


def _persist(ask: Callable[[float], Result], retries: Retries) -> Result:
    """The answer to a short question."""
    while True:
        try:
            return ask(retries.patience_s)
        except ConnectionLost as lost:
            retries.again(lost, 0, lambda *_: None)


# ---------------------------------------------------------------- one file


class RemoteFile:
    """A file at an address, as it was when it was found."""

    def __init__(self, url: str, opener: Opener, facts: RemoteFacts, retry_s: float) -> None:
        self.url, self.opener, self.facts, self.retry_s = url, opener, facts, retry_s
        self.name = safe_url(url).removesuffix("?...")  # what is inside is known by the ending
        self.size = facts.size

    def identity(self) -> list[Any]:
        """Address, size and mark; a query counts only where the server gives no mark (a signed one is new each time)."""
        parts = urllib.parse.urlsplit(self.url)
        address = [parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "" if self.facts.mark else parts.query]
        return [*address, self.facts.size, self.facts.mark]

    def blocks(self, at: int, size: int, tell: Tell, stop: int | None = None) -> Iterator[bytes]:
        """Its bytes from `at` on; after a fault it goes on at the very byte."""
        end = self.size if stop is None else stop
        retries = Retries(self.name, host_of(self.url), self.retry_s)
        ended_at = Counter[int]()
        tail = b""  # the last bytes that were handed on
        while end is None or at < end:
            try:
                tell(f"{self.name}, byte {at:,}", at)
                stream = self.opener.open(at - len(tail), stop, self.facts, retries.patience_s)
                try:
                    over, again = at - stream.at, b""
                    if over > len(tail):
                        self._start_over(at, stop)
                    while block := stream.read(size):
                        if over:
                            tell(f"{self.name}, passing over to byte {at:,}", at - over)
                            again = (again + block[:over])[-OVERLAP_BYTES:]
                            block, over = block[over:], max(0, over - len(block))
                            if not over and not again.endswith(tail):
                                raise self._other_bytes(at)
                        if block:
                            at += len(block)
                            tail = (tail + block)[-OVERLAP_BYTES:]
                            retries.progress()
                            tell(f"{self.name}, byte {at:,}", at)
                            yield block
                            ended_at.clear()
                finally:
                    stream.close()
                if end is None or at >= end:
                    return
                raise ConnectionLost(f"it ended, but {end:,} bytes were announced")
            except ConnectionLost as lost:
                ended_at[at] += lost.cause == "stream_drop" and ("announced" in lost.reason)
                if ended_at[at] >= _SAME_PLACE:
                    why = f"{end or 0:,} bytes are announced, it ends after {at:,}, {_SAME_PLACE} times out of {_SAME_PLACE}"
                    raise BadData(
                        f"cut short: {self.name}", why, "the file on the server is damaged; put it there again"
                    ) from lost
                retries.again(lost, at, tell)

    def _other_bytes(self, at: int) -> BadData:
        why = (
            f"asked again from byte {at - OVERLAP_BYTES if at > OVERLAP_BYTES else 0:,} on, {host_of(self.url)} sends other"
            " bytes than before: its answer begins at the wrong byte, or the file has changed"
        )
        return BadData(f"{self.name} is not the same when it is asked for again", why, "fetch it first: curl -O")

    def _start_over(self, at: int, stop: int | None) -> None:
        if stop is not None:
            why = "its server cannot send parts of a file (no Range), and this kind is read here and there"
            raise BadData(f"cannot read {self.name}", why, f"fetch it first: curl -O '{safe_url(self.url)}'")
        report.warn(
            f"{host_of(self.url)} cannot send parts of a file: {at:,} bytes of {self.name} are fetched again and passed over"
        )

    def open(self, tell: Tell) -> BinaryIO:
        """For reading here and there."""
        if self.size is None:
            raise BadData(f"cannot read {self.name}", "its server does not say how long it is", "fetch it first")
        return io.BufferedReader(_Seekable(self, self.size, tell), 1 << 16)


class _Seekable(io.RawIOBase):
    """A remote file that is read here and there, a window at a time."""

    def __init__(self, file: RemoteFile, size: int, tell: Tell) -> None:
        self.file, self.size, self.say = file, size, tell
        self.place = self.begin = 0
        self.window = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        return self.place

    def readinto(self, buffer: Any) -> int:
        if self.place >= self.size:
            return 0
        if not self.begin <= self.place < self.begin + len(self.window):
            stop = min(self.size, self.place + max(len(buffer), WINDOW_BYTES))
            self.begin, self.window = self.place, b"".join(self.file.blocks(self.place, 1 << 18, self.say, stop))
        piece = self.window[self.place - self.begin :][: len(buffer)]
        buffer[: len(piece)] = piece
        self.place += len(piece)
        return len(piece)


# ---------------------------------------------------------------- fsspec


_FSSPEC_MARKS = ("ETag", "etag", "md5Hash", "crc32c", "checksum", "blob_id", "LastModified", "last_modified", "updated", "mtime", "created")  # fmt: skip


class FsspecOpener:
    """A file of an fsspec file system."""

    def __init__(self, system: Any, path: str, name: str) -> None:
        self.system, self.path, self.name = system, path, name

    def ask_for_facts(self, patience_s: float) -> RemoteFacts:
        info = _answered(lambda: self.system.info(self.path), self.name)
        marks = [f"{key} {info[key]}" for key in _FSSPEC_MARKS if info.get(key)]
        size = info.get("size")
        return RemoteFacts(None if size is None else int(size), marks[0] if marks else None)

    def open(self, at: int, stop: int | None, facts: RemoteFacts, patience_s: float) -> ByteStream:
        if at and self.ask_for_facts(patience_s) != facts:
            raise changed(self.name, "size or mark are other ones than before")
        file = _answered(lambda: self.system.open(self.path, "rb"), self.name)
        _answered(lambda: file.seek(at), self.name)
        return _StoredBody(file, at, stop, self.name)


class _StoredBody:
    def __init__(self, file: Any, at: int, stop: int | None, name: str) -> None:
        self.file, self.at, self.name = file, at, name
        self.left = None if stop is None else stop - at

    def read(self, size: int) -> bytes:
        wanted = size if self.left is None else min(size, self.left)
        block: bytes = _answered(lambda: self.file.read(wanted), self.name) if wanted else b""
        self.left = None if self.left is None else self.left - len(block)
        return block

    def close(self) -> None:
        self.file.close()


def _answered(ask: Callable[[], Result], name: str) -> Result:
    """Whatever a file system raises: gone and forbidden are errors, the rest may pass."""
    try:
        return ask()
    except FileNotFoundError as error:
        raise InputMissing(f"no such file: {name}", "its file system says so", "check data.paths") from error
    except PermissionError as error:
        raise Unreachable(
            f"no permission to read {name}", str(error)[:200], "check the credentials of its service"
        ) from error
    except ImportError as error:
        raise _no_package(name, error) from error
    except LampError:
        raise
    except TimeoutError as error:
        raise ConnectionLost("no answer in time", "stream_stall") from error
    except Exception as error:  # each file system has its own for a lost connection
        if "Name or service not known" in str(error):
            raise no_host(name, "Name or service not known") from error
        raise ConnectionLost(f"{type(error).__name__}: {' '.join(str(error).split())}"[:160]) from error


def _no_package(url: str, error: ImportError) -> InputMissing:
    why = " ".join(str(error).split())[:200]
    return InputMissing(f"cannot open {url}", f"a package for this kind of address is missing: {why}", _install(url))


def package_for(url: str) -> str:
    """The package that fsspec needs for an address of this kind; empty where it needs none, or none is known."""
    packages = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs", "abfs": "adlfs"}
    return packages.get(url.split("://")[0].split("::")[-1], "")


def _install(url: str) -> str:
    package = package_for(url)
    return f"pip install {package}" if package else "see the fsspec documentation for the package it needs"


# ---------------------------------------------------------------- finding


def find_remote(entry: str, retry_s: float) -> list[RemoteFile]:
    """The files that a URL names: itself, or what a folder or a pattern holds where it can be listed."""
    scheme = entry.split("://")[0].lower()
    first_s = min(retry_s, _FIRST_CONTACT_S)
    with report.phase("look at remote files", unit="files") as p:
        p.tick(0, safe_url(entry))
        if scheme in ("http", "https"):
            if "*" in urllib.parse.urlsplit(entry).path:
                raise InputMissing(
                    f"no patterns over http: {safe_url(entry)}",
                    "a web server does not list its files",
                    "name each file",
                )
            openers: list[tuple[str, Opener]] = [(entry, HttpOpener(entry))]
        else:
            openers = _stored(entry, first_s)
        files = []
        for url, opener in openers:
            p.tick(0, safe_url(url))
            facts = _persist(opener.ask_for_facts, Retries(safe_url(url), host_of(url), first_s, "a first contact"))
            if facts.size is None:
                report.note(f"{safe_url(url)}: its server does not say how long it is")
            files.append(RemoteFile(url, opener, facts, retry_s))
            p.tick(1)
    full = [file for file in files if file.size != 0]
    if not full:
        raise BadData(f"empty file: {safe_url(entry)}", "it has 0 bytes", "fill it, or take it out of data.paths")
    if len(full) < len(files):
        report.warn(f"{len(files) - len(full)} empty files of {safe_url(entry)} are passed over")
    return full


def open_system(entry: str) -> tuple[Any, str]:
    """The fsspec file system of an address, and the path in it."""
    try:
        import fsspec
    except ImportError as error:
        advice = "pip install 'lamplighter[data]'"
        raise InputMissing(
            f"cannot open {safe_url(entry)}", "such addresses need the package fsspec", advice
        ) from error

    try:
        system, path = fsspec.core.url_to_fs(entry)
    except ImportError as error:
        raise _no_package(safe_url(entry), error) from error
    except ValueError as error:
        raise InputMissing(
            f"cannot open {safe_url(entry)}", str(error)[:200], "check the beginning of the address"
        ) from error
    return system, str(path)


def _stored(entry: str, first_s: float) -> list[tuple[str, Opener]]:
    system, path = open_system(entry)
    retries = Retries(safe_url(entry), host_of(entry), first_s, "a first contact")
    names = _persist(lambda _: _answered(lambda: _listed(system, path), safe_url(entry)), retries)
    if not names:
        what = "nothing matches" if any(letter in path for letter in "*?[") else "no text in"
        raise InputMissing(
            f"{what} {safe_url(entry)}", "its file system lists no such file of a known kind", "check data.paths"
        )
    return [(url := str(system.unstrip_protocol(name)), FsspecOpener(system, name, safe_url(url))) for name in names]


def _listed(system: Any, path: str) -> list[str]:
    """The files that a path, folder or pattern means, sorted."""
    if any(letter in path for letter in "*?[") and not system.exists(path):
        return sorted(name for name in system.glob(path) if not system.isdir(name))
    if system.isdir(path):
        return sorted(
            name for name in system.find(path) if kind_of(name) and not name.rpartition("/")[2].startswith(".")
        )
    return [path]


def as_local(entry: str) -> str:
    """The path of a file:// URL."""
    return urllib.request.url2pathname(urllib.parse.urlsplit(entry).path)
