"""A web server that misbehaves on demand: slow, dropping, stalling, lying about lengths, changing its files."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Served:
    """One path of the server: what is there, and how it misbehaves."""

    data: bytes
    etag: str | None = '"one"'
    ranges: bool = True
    drops: list[int] = field(default_factory=list)  # bytes of the file at which the connection ends, once each
    stalls: list[int] = field(default_factory=list)  # where nothing more comes, once each
    spared: int = -1  # requests that begin at or before this byte meet no drop and no stall
    always_drop: int | None = None
    refuse: list[int] = field(default_factory=list)  # answers before the first good one
    announce: int = 0  # this many bytes more than there are
    chunked: bool = False
    encoding: str = ""
    slow_s: float = 0.0
    redirect: str = ""
    shift: int = 0  # a ranged answer begins so many bytes later than it says
    requests: list[dict[str, str]] = field(default_factory=list)
    after: dict[int, dict[str, Any]] = field(default_factory=dict)  # from the n-th request on: other attributes


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: dict[str, Served]
    closing: threading.Event

    def do_GET(self) -> None:
        found = self.served.get(self.path.partition("?")[0])
        if found is None:
            self.send_error(404)
            return
        found.requests.append(dict(self.headers))
        for name, value in found.after.get(len(found.requests), {}).items():
            setattr(found, name, value)
        if found.refuse:
            self.send_error(found.refuse.pop(0))
            return
        if found.redirect:
            self.send_response(302)
            self.send_header("Location", found.redirect)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.close_connection = True
        begin, stop, total = 0, len(found.data), len(found.data) + found.announce
        wanted = self.headers.get("Range")
        same = self.headers.get("If-Range") in (None, found.etag)
        if wanted and found.ranges and same:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, stop = int(first), min(stop, int(last) + 1) if last else stop
            if begin >= total:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{total}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            end = total if stop == len(found.data) else stop
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{total}")
            shift = found.shift if begin else 0
        else:
            self.send_response(200)
            end, shift = total, 0
        if found.etag:
            self.send_header("ETag", found.etag)
        if found.encoding:
            self.send_header("Content-Encoding", found.encoding)
        if found.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        self._send(found, begin + shift, stop)

    def _send(self, found: Served, begin: int, stop: int) -> None:
        at = begin
        drops, stalls = found.drops, found.stalls  # of this request: a later one may get others
        if begin <= found.spared:
            drops, stalls = [], []
        while at < stop:
            block = found.data[at : min(stop, at + 4096)]
            for places in (drops, stalls):
                inside = [place for place in places if at <= place < at + len(block) and place < stop - 1]
                if inside:
                    places.remove(inside[0])
                    self._write(found, block[: inside[0] - at])
                    if places is stalls:
                        self.closing.wait(20)
                    return
            if found.always_drop is not None and at + len(block) > found.always_drop:
                self._write(found, block[: found.always_drop - at])
                return
            self._write(found, block)
            at += len(block)
            if found.slow_s:
                time.sleep(found.slow_s)
        if found.chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _write(self, found: Served, block: bytes) -> None:
        try:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(block), block) if found.chunked and block else block)
        except OSError:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


@dataclass
class Server:
    url: str
    served: dict[str, Served]

    def put(self, name: str, data: bytes, **how: Any) -> tuple[str, Served]:
        self.served[f"/{name}"] = Served(data, **how)
        return f"{self.url}/{name}", self.served[f"/{name}"]


@contextmanager
def serving() -> Iterator[Server]:
    """A server until the block is left."""
    served: dict[str, Served] = {}
    closing = threading.Event()
    kind = type("Bound", (Handler,), {"served": served, "closing": closing})
    web = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    web.daemon_threads = True
    thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield Server(f"http://127.0.0.1:{web.server_address[1]}", served)
    closing.set()
    web.shutdown()
    web.server_close()
