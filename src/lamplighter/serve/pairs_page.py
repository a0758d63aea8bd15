"""Blind pairs on a local page: a prompt, two answers, three buttons.

In:  a comparison that knows its pairs and keeps each choice (commands/human.py).
Out: the choices, kept as they are made; ends when all are, or with Ctrl+C. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from lamplighter import web_access

_PAGE = Path(__file__).parent / "pairs.html"
_RULES = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; frame-ancestors 'none'"


class Pairs(Protocol):
    """What the page needs of a comparison."""

    pairs: list[Any]
    chosen: dict[int, int]

    def left(self) -> Iterator[Any]: ...
    def choose(self, pair: Any, answer: int) -> None: ...


def make_pairs_app(pairs: Pairs, done: list[bool]) -> Any:
    """The application; `done` gets a value when the last pair was chosen."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse, Response
    from starlette.routing import Route

    async def page(_: Request) -> Response:
        return HTMLResponse(_PAGE.read_text(), headers={"content-security-policy": _RULES})

    async def pair(_: Request) -> Response:
        found = next(pairs.left(), None)
        counts = {"done": len(pairs.chosen), "all": len(pairs.pairs)}
        if found is None:
            done.append(True)
            return JSONResponse({"number": None, **counts})
        first, second = found.shown()
        return JSONResponse(
            {"number": found.number, "prompt": found.prompt, "first": first, "second": second, **counts}
        )

    async def choose(request: Request) -> Response:
        try:
            body = json.loads(await request.body())
            number, answer = body["number"], body["answer"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return JSONResponse({"error": {"message": "number and answer are needed"}}, 400)
        found = next((one for one in pairs.left() if one.number == number), None)
        if found is not None and type(answer) is int and 0 <= answer <= 2:
            pairs.choose(found, answer)
        return JSONResponse({"done": len(pairs.chosen)})

    return Starlette(routes=[Route("/", page), Route("/pair", pair), Route("/choose", choose, methods=["POST"])])


def choose_by_page(pairs: Pairs, say: Any, port: int = 0) -> None:
    """Serve the page until all is chosen or Ctrl+C."""
    import threading
    import time

    import uvicorn

    done: list[bool] = []
    with web_access.listen("127.0.0.1", port) as socket:
        access = web_access.grant("127.0.0.1", socket.getsockname()[1])
        app = web_access.guard(make_pairs_app(pairs, done), access)
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
        thread.start()
        for line in web_access.how_to_open(access):
            say(f"{line}\n")
        try:
            while not done:
                time.sleep(0.1)
            time.sleep(0.5)  # the page gets its last answer
        finally:
            server.should_exit = True
            thread.join(3)
