"""A small server that speaks the Hugging Face hub's API: repositories to create, upload to, and download from.

In:  folders to offer; faults to make (an upload that breaks off after so many bytes, a download that is cut).
Out: a running server, with what was uploaded, and its requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "c" * 40


@dataclass
class Hub:
    """What the server has, and what it was asked."""

    address: str = ""
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)  # what can be downloaded
    uploaded: dict[str, bytes] = field(default_factory=dict)  # LFS objects by hash
    commits: list[dict[str, bytes]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    fail_commit: int = 0  # so many commits are refused with 500
    cut_download: int = 0  # the next download of weights ends after so many bytes
    ranges: list[int] = field(default_factory=list)  # where downloads went on
    sent: int = 0  # bytes of LFS uploads that came in


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Quiet."""

    def _reply(self, code: int, body: Any = None, **headers: str) -> None:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _body(self) -> bytes:
        if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.asked.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/([^/]+))?", path):
            files = self.hub.models.get(found[1])
            if files is None:
                return self._reply(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
            if found[3] not in (None, "main", COMMIT):
                return self._reply(404, {"error": "no such revision"}, X_Error_Code="RevisionNotFound")
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            return self._reply(
                200,
                {
                    "id": found[1],
                    "modelId": found[1],
                    "sha": COMMIT,
                    "siblings": siblings,
                    "private": False,
                    "tags": [],
                },
            )
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", path):
            files = self.hub.models[found[1]]
            return self._reply(
                200,
                [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ],
            )
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(self.hub.models.get(found[1], {}).get(found[3]))
        return self._reply(404, {"error": "not found"})

    def _file(self, data: bytes | None) -> None:
        if data is None:
            return self._reply(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound")
        start = int((re.match(r"bytes=(\d+)-", self.headers.get("Range") or "") or [0, 0])[1])
        if start:
            self.hub.ranges.append(start)
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        self.send_response(206 if start else 200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return None
        cut = self.hub.cut_download
        if cut and len(data) > cut:
            self.wfile.write(data[start : start + cut])
            self.close_connection = True
            self.connection.close()
            return None
        self.wfile.write(data[start:])
        return None

    def do_PUT(self) -> None:
        self.hub.asked.append(f"PUT {self.path}")
        data = self._body()
        self.hub.sent += len(data)
        self.hub.uploaded[hashlib.sha256(data).hexdigest()] = data
        self._reply(200)

    def do_POST(self) -> None:
        self.hub.asked.append(f"POST {self.path}")
        data = self._body()
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            asked = json.loads(data)
            self._reply(200, {"url": f"{self.hub.address}/{asked['organization']}/{asked['name']}", "id": "1"})
        elif "/preupload/" in path:
            files = json.loads(data)["files"]
            modes = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith("safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for one in files
            ]
            self._reply(200, {"files": modes})
        elif path.endswith("/info/lfs/objects/batch"):
            self._reply(
                200, {"transfer": "basic", "objects": [self._object(one) for one in json.loads(data)["objects"]]}
            )
        elif "/commit/" in path:
            self._commit(data, path.split("/")[3:5])
        else:
            self._reply(200, {})

    def _object(self, one: dict[str, Any]) -> dict[str, Any]:
        if one["oid"] in self.hub.uploaded:
            return one
        return {**one, "actions": {"upload": {"href": f"{self.hub.address}/lfs/{one['oid']}"}}}

    def _commit(self, data: bytes, name: list[str]) -> None:
        if self.hub.fail_commit:
            self.hub.fail_commit -= 1
            return self._reply(403, {"error": "the disk of the hub is full"})
        files = {}
        for line in data.splitlines():
            record = json.loads(line)
            value = record["value"]
            if record["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif record["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploaded[value["oid"]]
        self.hub.commits.append(files)
        self._reply(
            200,
            {
                "success": True,
                "commitOid": COMMIT,
                "commitUrl": f"{self.hub.address}/{'/'.join(name)}/commit/{COMMIT}",
                "hookOutput": "",
            },
        )
        return None


@contextmanager
def hub_server(**models: Path) -> Iterator[Hub]:
    """`org__name=folder` offers that folder as org/name."""
    hub = Hub()
    for name, folder in models.items():
        hub.models[name.replace("__", "/")] = {
            path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()
        }
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
