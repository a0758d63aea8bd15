"""Ollama, where it runs: the model is created through its API and asked one question.

In:  a GGUF file, a chat template; OLLAMA_HOST, or the usual port of this machine.
Out: the model under its name, and what it said; or the word that no Ollama answers here.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from lamplighter import report
from lamplighter.data.chat.template import ChatTemplate
from lamplighter.errors import BadConfig, Unreachable
from lamplighter.export.modelfile import go_template, stops_of, take_apart

_ANSWER_S = 600.0
_LOOK_S = 2.0


def address() -> str:
    given = os.environ.get("OLLAMA_HOST", "").strip() or "127.0.0.1:11434"
    given = given if "://" in given else f"http://{given}"
    return given if re.search(r":\d+$", given.split("://", 1)[1].rstrip("/")) else f"{given.rstrip('/')}:11434"


def is_there() -> bool:
    try:
        with _opener().open(f"{address()}/api/version", timeout=_LOOK_S) as answered:
            return bool(answered.status == 200)
    except (OSError, ValueError, http.client.HTTPException):  # nobody answers there: that is the answer
        return False


def create(name: str, file: Path, template: ChatTemplate | None, question: str) -> str:
    """Upload, create, ask; the answer. What the server refuses is said in its own words."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*(/[a-z0-9._-]+)?(:[\w.-]+)?", name):
        raise BadConfig(f"{name} is no name for Ollama", "small letters, digits, . _ -", "--name my-model")
    digest = hashlib.sha256()
    with report.phase("hash", total=file.stat().st_size, unit="B") as phase, open(file, "rb") as opened:
        while piece := opened.read(1 << 20):
            digest.update(piece)
            phase.tick(len(piece), file.name)
    blob = f"sha256:{digest.hexdigest()}"
    with report.phase("ollama create"):
        if not _has_blob(blob):
            _upload(blob, file)
        _post("/api/create", {"model": name, "files": {file.name: blob}, "stream": False, **_about(template)})
        options = {"temperature": 0, "num_predict": 32}
        asked = {
            "model": name,
            "messages": [{"role": "user", "content": question}],
            "stream": False,
            "options": options,
        }
        said = _post("/api/chat", asked)
    answer = (said.get("message") or {}).get("content") if isinstance(said, dict) else None
    if not isinstance(answer, str):
        raise Unreachable("Ollama made the model and gave no answer", str(said)[:200], f"ollama run {name}")
    marks = [mark for mark in (stops_of(template) if template else []) if mark in answer]
    if marks:
        raise BadConfig(
            "Ollama's answer runs over its end mark",
            f"{marks[0]!r} in {answer[:120]!r}",
            "please report it",
            cause="template_differs",
        )
    return answer


def _about(template: ChatTemplate | None) -> dict[str, Any]:
    if template is None:
        return {"template": "{{ .Prompt }}"}
    turns = take_apart(template)
    found: dict[str, Any] = {"template": go_template(turns), "parameters": {"stop": stops_of(template)}}
    return {**found, "system": turns.default_system} if turns.default_system else found


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _has_blob(blob: str) -> bool:
    try:
        with _opener().open(urllib.request.Request(f"{address()}/api/blobs/{blob}", method="HEAD"), timeout=_ANSWER_S):
            return True
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return False
        raise _refused(error) from error
    except OSError as error:
        raise _refused(error) from error


def _upload(blob: str, file: Path) -> None:
    size = str(file.stat().st_size)
    with open(file, "rb") as opened:
        request = urllib.request.Request(
            f"{address()}/api/blobs/{blob}", opened, {"Content-Length": size}, method="POST"
        )
        _send(request)


def _post(path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{address()}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    data = _send(request)
    try:
        found = json.loads(data.splitlines()[-1] if data.strip() else b"{}")
    except ValueError as error:
        raise Unreachable(
            f"Ollama answered {path} with no JSON", data[:120].decode("utf-8", "replace"), "ollama --version"
        ) from error
    if isinstance(found, dict) and found.get("error"):
        raise Unreachable("Ollama refuses the model", str(found["error"])[:300], "ollama --version")
    return found


def _send(request: urllib.request.Request) -> bytes:
    try:
        with _opener().open(request, timeout=_ANSWER_S) as answered:
            data: bytes = answered.read()
            return data
    except urllib.error.HTTPError as error:
        raise _refused(error) from error
    except (OSError, http.client.HTTPException) as error:
        raise _refused(error) from error


def _refused(error: Exception) -> Unreachable:
    words = error.read().decode("utf-8", "replace")[:300] if isinstance(error, urllib.error.HTTPError) else str(error)
    return Unreachable(
        f"Ollama at {address()} does not take it", words or type(error).__name__, "ollama --version; ollama list"
    )
