"""The HTTP server: OpenAI's paths, /health, /metrics and the chat page; it answers also while the child computes or restarts.

In:  requests that the guard (web_access.py) has let in, a Bridge.
Out: replies. No torch.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lamplighter.serve import protocol
from lamplighter.serve.bridge import Bridge
from lamplighter.serve.protocol import ApiError, Wanted, Written

_LOOK_S = 0.5  # how often it is looked whether the client is still there
_BODY_S = 30.0  # for a client to send its request
_PAGE = Path(__file__).parent / "chat.html"
_PAGE_RULES = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"  # fmt: skip


def make_app(bridge: Bridge, timeout_s: float) -> Starlette:
    """The application for one model."""

    async def chat(request: Request) -> Response:
        return await _complete(request, bridge, timeout_s, chat=True)

    async def complete(request: Request) -> Response:
        return await _complete(request, bridge, timeout_s, chat=False)

    async def models(_: Request) -> Response:
        facts = bridge.facts
        names = [facts["model"]] if facts else []
        rows = [{"id": name, "object": "model", "created": int(bridge.began), "owned_by": "lamplighter", "max_model_len": facts.get("length")} for name in names]  # fmt: skip
        return JSONResponse({"object": "list", "data": rows})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if not bridge.facts or not _is_ours(name, bridge.facts):
            return _error(_no_model(name, bridge.facts))
        return JSONResponse({"id": bridge.facts["model"], "object": "model", "created": int(bridge.began), "owned_by": "lamplighter"})  # fmt: skip

    async def health(_: Request) -> Response:
        state, facts = bridge.state(), bridge.facts
        body = {"status": state, "model": facts.get("model"), "step": facts.get("step"), "template": facts.get("template"), "texts": len(bridge.waiting), "most": bridge.most}  # fmt: skip
        return JSONResponse(body, 200 if state == "ok" else 503, {} if state == "ok" else {"retry-after": "2"})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(_prometheus(bridge), media_type="text/plain; version=0.0.4")

    async def page(_: Request) -> Response:
        return HTMLResponse(_PAGE.read_text(), headers={"content-security-policy": _PAGE_RULES})

    routes = [
        Route("/", page),
        Route("/health", health),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/v1/completions", complete, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {404: _not_found, 405: _not_found, ApiError: _api_error}
    return Starlette(routes=routes, exception_handlers=handlers)


async def _not_found(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return _error(ApiError(status, f"there is no {request.method} {request.url.path} here", code="not_found"))


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error)


def _error(error: ApiError) -> JSONResponse:
    headers = {"retry-after": "1"} if error.status in (429, 503) else {}
    return JSONResponse(error.body(), error.status, headers)


def _is_ours(name: str, facts: dict[str, Any]) -> bool:
    """The served name, with or without its step; a client that names none means ours."""
    return name in ("", "default", facts.get("model"), facts.get("name")) or name.startswith(f"{facts.get('name')}:")


def _no_model(name: str, facts: dict[str, Any]) -> ApiError:
    return ApiError(404, f"there is no model {name[:100]!r} here; {facts.get('model')!r} is", code="model_not_found", param="model")  # fmt: skip


async def _complete(request: Request, bridge: Bridge, timeout_s: float, chat: bool) -> Response:
    try:
        body = json.loads(await asyncio.wait_for(request.body(), _BODY_S))
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_BODY_S:g} s", code="timeout") from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON") from None
    wanted = protocol.parse(body, chat)
    if not bridge.is_ready:
        bridge.counts["not_ready"] += 1
        raise ApiError(503, f"the model is {bridge.state()}; try again soon", "server_error", "not_ready")
    if not _is_ours(wanted.model, bridge.facts):
        raise _no_model(wanted.model, bridge.facts)
    if chat and not bridge.facts.get("template"):
        raise ApiError(400, "this model has no chat template: it was not trained on conversations; use /v1/completions", code="no_chat_template")  # fmt: skip
    texts = _Texts(bridge, wanted, timeout_s)
    bridge.counts["requests"] += 1
    if not wanted.stream:
        try:
            while not texts.ended:
                await texts.next(request)
            return JSONResponse(protocol.reply(texts.name, wanted, texts.written))
        finally:
            texts.drop()
    try:
        first = await texts.next(request)  # what is refused is refused with a status, before the stream begins
    except ApiError:
        texts.drop()
        raise
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(_events(texts, first), media_type="text/event-stream", headers=headers)


class _Texts:
    """The texts of one request, and what is known of each."""

    def __init__(self, bridge: Bridge, wanted: Wanted, timeout_s: float) -> None:
        self.bridge, self.wanted, self.name = bridge, wanted, protocol.new_id(wanted.chat)
        self.deadline = time.monotonic() + timeout_s
        self.looked = time.monotonic()
        self.numbers, self.queue = bridge.add(wanted.texts)
        self.written = [Written(model=bridge.facts["model"]) for _ in self.numbers]

    @property
    def ended(self) -> bool:
        return all(one.end is not None for one in self.written)

    async def next(self, request: Request | None) -> tuple[int, str, list[dict[str, Any]]]:
        """A piece of one of them; an ApiError where it is refused, lost, late, or nobody waits any more."""
        while True:
            now = time.monotonic()
            if now >= self.deadline:
                raise ApiError(408, "this took longer than the server allows", "server_error", "timeout")
            if request is not None and now - self.looked >= _LOOK_S:
                self.looked = now
                if await request.is_disconnected():
                    self.bridge.counts["gone"] += 1
                    raise ApiError(499, "the client is gone", "server_error", "gone")
            try:
                said = await asyncio.wait_for(self.queue.get(), min(_LOOK_S, self.deadline - now))
                break
            except TimeoutError:  # look again whether anybody waits
                continue
        if "error" in said:
            status = int(said.get("status", 400))
            kind = "invalid_request_error" if status < 500 else "server_error"
            raise ApiError(status, str(said["error"]), kind, said.get("code"))
        index = self.numbers.index(said["key"])
        one = self.written[index]
        one.text += said.get("text", "")
        one.tokens += said.get("tokens", 0)
        one.prompt_tokens = said.get("prompt_tokens", one.prompt_tokens)
        one.model = said.get("model", one.model)
        one.end = said.get("end") or None
        one.logprobs += said.get("logprobs", [])
        return index, said.get("text", ""), said.get("logprobs", [])

    def drop(self) -> None:
        for number in self.numbers:
            self.bridge.drop(number)


async def _events(texts: _Texts, first: tuple[int, str, list[dict[str, Any]]]) -> AsyncIterator[str]:
    """Server-sent events: pieces as they come, [DONE] at the end; a client that leaves ends the work."""
    wanted, name, begun, is_whole = texts.wanted, texts.name, set[int](), False
    try:
        piece: tuple[int, str, list[dict[str, Any]]] | None = first
        while piece is not None:
            index, text, found = piece
            one = texts.written[index]
            if wanted.chat and index not in begun:
                begun.add(index)
                yield _line(protocol.first_chunk(name, wanted, index, one.model))
            if text or one.end is not None or found:
                yield _line(protocol.chunk(name, wanted, index, text, one, found))
            piece = None if texts.ended else await texts.next(None)
        if wanted.usage_in_stream:
            yield _line(protocol.usage_chunk(name, wanted, texts.written))
        is_whole = True
        yield "data: [DONE]\n\n"
    except ApiError as error:  # too late for a status: the error is the last event
        is_whole = True
        yield _line(error.body())
    finally:
        texts.bridge.counts["gone"] += not is_whole  # cancelled or closed: the client has left
        texts.drop()


def _line(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"


def _prometheus(bridge: Bridge) -> str:
    """Counters and gauges in Prometheus' text form."""
    gauges = {"texts_under_way": len(bridge.waiting), "texts_most": bridge.most, "up": int(bridge.is_ready), "step": bridge.facts.get("step") or 0}  # fmt: skip
    counters = {name: bridge.counts[name] for name in ("requests", "texts", "tokens", "refused", "gone", "not_ready", "restarts", "swaps")}  # fmt: skip
    lines = [f"# TYPE lamp_serve_{name} gauge\nlamp_serve_{name} {value}" for name, value in gauges.items()]
    lines += [f"# TYPE lamp_serve_{name}_total counter\nlamp_serve_{name}_total {n}" for name, n in counters.items()]
    return "\n".join(lines) + "\n"
