"""One answer of an HTTP server: a file's facts, or its bytes from an offset on, checked against what is known of it.

In:  an http or https URL; the first byte wanted; how long a silence is borne.
Out: RemoteFacts, or an open Body. What may pass (dropped, silent, busy) is ConnectionLost, and is tried again by remote.py; what will not
     (no such file, no permission, another content) is an error that says so.
"""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lamplighter import report
from lamplighter.errors import BadData, InputMissing, LampError, Unreachable

_PEEK_S = 0.2  # how long bytes beyond the announced length are waited for
_PASSING = {408, 425, 429}  # besides 500 and above
_AGENT = "lamplighter"


class ConnectionLost(Exception):
    """A connection that gave nothing more; it may be tried again. `cause` is stream_drop or stream_stall."""

    def __init__(self, reason: str, cause: str = "stream_drop", after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.reason, self.cause, self.after_s = reason, cause, after_s


@dataclass(frozen=True)
class RemoteFacts:
    """What is known of a remote file; the mark changes when its content does."""

    size: int | None
    mark: str | None
    ranges: bool = True


def safe_url(url: str) -> str:
    """The URL for people: without credentials, without the secrets of a signed query, of bounded length."""
    parts = urllib.parse.urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    query = "?..." if parts.query else ""
    name = urllib.parse.urlunsplit((parts.scheme, host, parts.path, "", "")) + query
    return name if len(name) <= 160 else f"{name[:60]}...{name[-97:]}"


def host_of(url: str) -> str:
    return urllib.parse.urlsplit(url).netloc.rpartition("@")[2] or url.split("://")[0]


class Body:
    """The bytes of one answer; `at` is where in the file it begins."""

    def __init__(self, answer: Any, at: int, expected: int | None, name: str) -> None:
        self.answer, self.at, self.expected, self.name = answer, at, expected, name
        self.got = 0
        self.counted = expected is not None and not answer.chunked
        self.fp = answer.fp  # http.client closes its own at the announced length: what comes after could not be seen

    def read(self, size: int) -> bytes:
        """Some bytes, as soon as there are some; b"" at the announced end."""
        try:
            if not self.counted:
                return bytes(self.answer.read1(size))
            assert self.expected is not None
            if (left := self.expected - self.got) <= 0:
                self._peek()
                return b""
            block = bytes(self.fp.read1(min(size, left)))
        except (OSError, http.client.HTTPException) as error:
            raise _lost(error) from error
        if not block:
            raise ConnectionLost(f"closed after {self.got:,} of {self.expected:,} announced bytes")
        self.got += len(block)
        return block

    def _peek(self) -> None:
        """A server that goes on after the announced length is named; by the protocol the rest is not the file's."""
        try:
            self.fp.raw._sock.settimeout(_PEEK_S)
            more = self.fp.read1(1)
        except (OSError, AttributeError, ValueError):  # nothing came, or the socket is gone: nothing to name
            return
        if more:
            report.warn(
                f"{self.name}: the server sends more than the {self.expected:,} bytes that it announced; what follows is"
                " not read: is the file whole?",
                url=self.name,
            )

    def close(self) -> None:
        self.answer.close()


class HttpOpener:
    """How the bytes behind an http or https address are had."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask_for_facts(self, patience_s: float) -> RemoteFacts:
        """Size, mark and whether parts can be asked for: by asking for the first byte."""
        with _ask(self.url, {"Range": "bytes=0-0"}, patience_s, (416,)) as answer:
            if answer.status == 416:
                return RemoteFacts(0, _mark(answer.headers))
            if answer.status == 206:
                return RemoteFacts(_range(answer.headers)[1], _mark(answer.headers))
            return RemoteFacts(_length(answer.headers), _mark(answer.headers), ranges=False)

    def open(self, at: int, stop: int | None, facts: RemoteFacts, patience_s: float) -> Body:
        """The bytes from `at` on (up to `stop`), or from 0 where the server cannot do otherwise; never of another content."""
        headers = {}
        if at or stop is not None:
            headers["Range"] = f"bytes={at}-{'' if stop is None else stop - 1}"
            if facts.mark and not facts.mark.startswith("W/"):
                headers["If-Range"] = facts.mark
        answer, name = _ask(self.url, headers, patience_s, (416,)), safe_url(self.url)
        try:
            begin = _check(answer, name, at, facts)
        except BaseException:
            answer.close()
            raise
        return Body(answer, begin, _length(answer.headers), name)


def _check(answer: Any, name: str, at: int, facts: RemoteFacts) -> int:
    """Where the answer begins; an error where it is of another content than before."""
    mark, size = _mark(answer.headers), facts.size
    if facts.mark and mark and mark != facts.mark:
        raise changed(name, f"its mark was {facts.mark}, is {mark}")
    if answer.headers.get("Content-Encoding", "identity") != "identity" and not name.removesuffix("?...").endswith(
        ".gz"
    ):
        why = f"the server sends it packed ({answer.headers['Content-Encoding']}), which was not asked for"
        raise BadData(f"cannot read {name}", why, "fetch it first, with: curl -O")
    if answer.status == 416:
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        raise changed(name, f"byte {at:,} was asked for, it had {size or 0:,} bytes and now has {total or 'fewer'}")
    if answer.status == 206:
        begin, total_bytes = _range(answer.headers)
        if begin != at:
            raise BadData(
                f"cannot read {name}", f"byte {at:,} was asked for, the server sends {begin:,}", "fetch it first"
            )
        if size is not None and total_bytes is not None and total_bytes != size:
            raise changed(name, f"it had {size:,} bytes, now {total_bytes:,}")
        return at
    length = _length(answer.headers)
    if size is not None and length is not None and length != size:
        raise changed(name, f"it had {size:,} bytes, now {length:,}")
    return 0


def changed(name: str, why: str) -> BadData:
    return BadData(f"{name} changed while it was read", why, "begin again, with one and the same content")


def _ask(url: str, headers: Mapping[str, str], patience_s: float, allowed: tuple[int, ...]) -> Any:
    """The open answer. Redirects and proxies as usual; credentials only where the URL has them, and never passed on."""
    parts = urllib.parse.urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    path = urllib.parse.quote(parts.path, safe="/%:@!$&'()*+,;=~")
    bare = urllib.parse.urlunsplit((parts.scheme, host, path, parts.query, ""))
    request = urllib.request.Request(bare, headers={"User-Agent": _AGENT, "Accept-Encoding": "identity", **headers})
    if user:
        word = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {word}")
    try:
        answer = urllib.request.urlopen(request, timeout=patience_s)
    except urllib.error.HTTPError as error:
        if error.code in allowed:
            return error
        raise _refused(error, url) from error
    except urllib.error.URLError as error:
        raise _unreached(error.reason, url) from error
    except (http.client.InvalidURL, ValueError) as error:
        raise InputMissing(f"cannot read {safe_url(url)}", str(error), "check the address in data.paths") from error
    except (OSError, http.client.HTTPException) as error:
        raise _lost(error) from error
    if parts.scheme == "https" and not answer.url.startswith("https:"):
        answer.close()
        raise BadData(f"cannot read {safe_url(url)}", "it leads from https to http", "name the other address yourself")
    return answer


def _refused(error: urllib.error.HTTPError, url: str) -> Exception:
    """An answer of 4xx or 5xx."""
    words = f"HTTP {error.code} {error.reason}"
    if error.code in _PASSING or error.code >= 500:
        after = error.headers.get("Retry-After", "") if error.headers else ""
        return ConnectionLost(words, after_s=float(after) if after.isdecimal() else 0.0)
    name = safe_url(url)
    if error.code in (401, 403):
        advice = (
            "credentials are taken from the URL (https://user:word@host/), or use an fsspec URL such as s3:// or hf://"
        )
        return Unreachable(f"no permission to read {name}", words, advice)
    if error.code in (404, 410):
        return InputMissing(f"no such file: {name}", words, "check the address in data.paths")
    return Unreachable(f"cannot read {name}", words, "check the address in data.paths")


def _unreached(reason: object, url: str) -> Exception:
    if isinstance(reason, ssl.SSLCertVerificationError):
        why = f"its certificate cannot be verified: {reason.verify_message}"
        return Unreachable(f"cannot read {safe_url(url)}", why, "check the address, and the clock of this machine")
    if isinstance(reason, socket.gaierror) and reason.errno == socket.EAI_NONAME:
        return no_host(url, str(reason.strerror))
    if isinstance(reason, BaseException):
        return _lost(reason)
    return Unreachable(f"cannot read {safe_url(url)}", str(reason), "check the address in data.paths")


def no_host(url: str, why: str) -> LampError:
    return Unreachable(
        f"cannot read {safe_url(url)}: no such host", why, "check the address in data.paths, and the network"
    )


def _lost(error: BaseException) -> ConnectionLost:
    if isinstance(error, TimeoutError):
        return ConnectionLost("socket idle", "stream_stall")
    if isinstance(error, http.client.IncompleteRead):
        return ConnectionLost(f"closed in the middle, {len(error.partial):,} bytes after the last whole piece")
    words = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return ConnectionLost(words[:120])


def _mark(headers: Any) -> str | None:
    found = headers.get("ETag") or headers.get("Last-Modified")
    return str(found) if found else None


def _length(headers: Any) -> int | None:
    words = str(headers.get("Content-Length", ""))
    return int(words) if words.isdecimal() else None


def _range(headers: Any) -> tuple[int, int | None]:
    """(first byte, size of the file) of a Content-Range."""
    words = headers.get("Content-Range", "")
    span, _, total = words.removeprefix("bytes ").partition("/")
    first = span.partition("-")[0].strip()
    return int(first) if first.isdecimal() else -1, int(total) if total.isdecimal() else None
